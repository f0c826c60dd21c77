# SPDX-License-Identifier: GPL-3.0-or-later
"""Which names the role _service takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# No engine of this machine has such containers: there is nothing to be done.
PLAY = """
- hosts: all
  gather_facts: true
  tasks:
    - ansible.builtin.include_role: {name: hidden_state.bridge._service}
"""


def test_a_template_unit_of_the_operators_has_an_at_sign_and_ours_has_none(tmp_path):
    common = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable, "_service_manager": "podman"}
    # Of a length that a socket below it can have.
    common.update(_service_state="stopped", _service_state_dir="/nowhere")
    hosts = {
        "theirs": {"_service_name": "sglang@0", "_service_foreign": True},
        "ours": {"_service_name": "sglang@0"},
    }
    inventory = {"all": {"hosts": {name: {**common, **one} for name, one in hosts.items()}}}
    (tmp_path / "hosts.json").write_text(json.dumps(inventory))
    (tmp_path / "play.yml").write_text(PLAY)
    (tmp_path / "ansible.cfg").touch()
    environment = {**os.environ, "ANSIBLE_CONFIG": str(tmp_path / "ansible.cfg"), "LC_ALL": "C.UTF-8"}
    environment["ANSIBLE_COLLECTIONS_PATH"] = str(ROOT / "playbooks" / "collections")
    command = [str(Path(sys.executable).parent / "ansible-playbook"), "play.yml", "-i", "hosts.json"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    said = {line.split()[0]: line for line in done.stdout.splitlines() if "unreachable=" in line}
    assert "failed=0" in said["theirs"], done.stdout + done.stderr
    assert "failed=1" in said["ours"] and "a service needs a name of letters" in done.stdout, done.stdout
