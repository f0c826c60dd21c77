# SPDX-License-Identifier: GPL-3.0-or-later
"""When a play proves the capture: always, but not beside an extractor that is at work with that very server.

The module that tells the service manager is a stand-in.
"""

from __future__ import annotations

import grp
import json
import os
import pwd
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

import hs_manifest as hm

ROOT = Path(__file__).resolve().parents[2]
IDENTITY = {"dataset": "d", "weights": "w", "layers": [1], "final": "post_norm", "dtype": "float32"}
PROVE = {"ansible.builtin.include_role": {"name": "hidden_state.bridge.extraction", "tasks_from": "canary"}}
PYTHON = """#!/bin/sh
echo "$@" >> "$(dirname "$0")/asked"
echo the table, ${BECAME:-no become}
echo '{"ok": true, "prints": {}}'
"""
MANAGER = """
from ansible.module_utils.basic import AnsibleModule
names = ("name", "state", "manager", "state_dir", "stop_timeout")
module = AnsibleModule({name: {"type": "raw"} for name in names}, supports_check_mode=True)
if not module.check_mode:
    with open("ASKED", "a") as file:
        print(module.params["name"], module.params["state"], file=file)
module.exit_json(changed=True, action="stop", service={"since": None})
"""
SUDO = """#!/bin/sh
while [ "$1" != /bin/sh ]; do shift; done
BECAME=become exec "$@"
"""
PROVED = ["hidden-state-extraction stopped", "canary"]


@pytest.fixture
def prove(tmp_path):
    """Runs the play on a host whose server was started then; returns what service and extractor were told, in order, and what was said."""
    home = tmp_path / "collections" / "ansible_collections" / "hidden_state" / "bridge"
    shutil.copytree(ROOT / "plugins", home / "plugins", ignore=shutil.ignore_patterns("__pycache__"))
    (home / "roles").symlink_to(ROOT / "roles")
    (home / "plugins" / "modules" / "managed_service.py").write_text(MANAGER.replace("ASKED", str(tmp_path / "asked")))
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    (tmp_path / "ansible.cfg").touch()
    environment = {**os.environ, "ANSIBLE_CONFIG": str(tmp_path / "ansible.cfg"), "LC_ALL": "C.UTF-8", "TZ": "Asia/Tokyo"}
    environment["ANSIBLE_COLLECTIONS_PATH"] = str(tmp_path / "collections")
    # A user who becomes the same one is none otherwise.
    environment["ANSIBLE_BECOME_ALLOW_SAME_USER"] = "true"
    sudo = tmp_path / "sudo"
    sudo.write_text(SUDO)
    sudo.chmod(0o755)

    def run(since, *arguments, before=None, action="none", tasks=PROVE):
        (tmp_path / "play.yml").write_text(json.dumps([{"hosts": "sglang", "gather_facts": True, "tasks": [tasks]}]))
        server = {"release": "0.5.20", "capture_args": [], "manager": "systemd", "model": {"hidden_size": 8}, "service": {"since": before}}
        server.update(attention_backend="", gpu_architecture="")
        host = {
            "ansible_connection": "local",
            "ansible_python_interpreter": sys.executable,
            "ansible_become_exe": str(sudo),
            "sglang_server_info": server,
            "_service_result": {"action": action, "service": {"since": since}},
            "dataset_stage_packed": {"path": "/data/d"},
            "extraction_identity": IDENTITY,
            "extraction_plan": {"run": hm.run_of(IDENTITY), "share": "0-9"},
            "extraction_output_dir": str(tmp_path / "out"),
            "extraction_state_dir": str(tmp_path / "state"),
            "extraction_code_dir": str(tmp_path / "code"),
            "extraction_python": str(python),
            "extraction_user": pwd.getpwuid(os.geteuid()).pw_name,
            "extraction_group": grp.getgrgid(os.getegid()).gr_name,
        }
        (tmp_path / "hosts.json").write_text(json.dumps({"sglang": {"hosts": {"one": host}}}))
        command = [str(Path(sys.executable).parent / "ansible-playbook"), "play.yml", "-i", "hosts.json", *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        asked = tmp_path / "asked"
        told = ["canary" if " canary " in line else line for line in asked.read_text().splitlines()] if asked.exists() else []
        asked.unlink(missing_ok=True)
        return told, done.stdout

    return run


@pytest.fixture
def extractor(tmp_path):
    """An extractor that was started a minute ago and is at work."""
    out = str(tmp_path / "out" / "one")
    os.makedirs(out)
    hm.claim_directory(out, hm.run_of(IDENTITY))
    hm.claim_run(out, IDENTITY, {})
    began = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - 60))
    hm.write_json(f"{out}/{hm.STATUS}", {"state": "running", "started_at": began})
    lock = hm.Lock(out)
    yield
    lock.close()


def test_without_an_extractor_at_work_the_capture_is_proved(prove, tmp_path):
    assert prove(time.time(), "--check")[0] == [] and not (tmp_path / "state").exists()
    told, said = prove(time.time())
    assert told == PROVED and "the table, no become" in said and (tmp_path / "state" / "extraction" / "config.json").exists()


@pytest.mark.parametrize("become", [["--become"], ["-e", '{"ansible_become": true}']])
def test_the_canary_runs_as_whoever_the_call_becomes(prove, become):
    """Its configuration is for that user alone."""
    told, said = prove(time.time(), *become)
    assert told == PROVED and "the table, become" in said


@pytest.mark.usefixtures("extractor")
def test_beside_an_extractor_only_a_server_that_came_after_it_is_proved(prove, tmp_path):
    assert prove(time.time() - 90)[0] == []
    # So that the role sees what changed in it.
    assert not (tmp_path / "state" / "extraction" / "config.json").exists()
    # Whatever it wrote until the answer is there would stay done, right or wrong.
    assert prove(time.time() - 30)[0] == PROVED


@pytest.mark.usefixtures("extractor")
def test_a_process_whose_start_is_not_known_counts_as_the_one_before_only_where_nothing_was_started(prove):
    before = time.time() - 90
    assert prove(None, before=before)[0] == []
    assert prove(None, before=before, action="restart")[0] == PROVED


def test_the_extractor_ends_while_a_server_that_is_started_anew_loads(prove):
    """By the playbook's own tasks for that moment."""
    text = (ROOT / "playbooks" / "extract.yml").read_text()
    (name,) = re.findall(r'sglang_server_tasks_while_loading: "\{\{ playbook_dir \}\}/(.+)"', text)
    ending = {"ansible.builtin.include_tasks": str(ROOT / "playbooks" / name)}
    assert prove(time.time(), tasks=ending)[0] == PROVED[:1]
