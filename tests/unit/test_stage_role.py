# SPDX-License-Identifier: GPL-3.0-or-later
"""The role dataset_stage on two hosts of this machine, with the sources on the controller or on one of them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packing import write
from plays import PLAYED

from hidden_state_bridge.packed import PackedDataset

ROOT = Path(__file__).resolve().parents[2]
PLAY = """
- hosts: sglang
  gather_facts: true
  tasks:
    - ansible.builtin.include_role: {name: hidden_state.bridge.dataset_stage, tasks_from: pack}
    - ansible.builtin.include_role: {name: hidden_state.bridge._bridge}
    - ansible.builtin.include_role: {name: hidden_state.bridge.dataset_stage}
"""


@pytest.fixture
def stage(tmp_path):
    """Runs the play and returns (exit status, output, changes of each host)."""
    (tmp_path / "ansible.cfg").touch()
    (tmp_path / "play.yml").write_text(PLAY)
    rows = [{"input_ids": [number, 7], "loss_mask": [0, 1]} for number in range(20)]
    common = {
        "ansible_connection": "local",
        "ansible_python_interpreter": sys.executable,
        "dataset_stage_sources": [{"name": "a", "path": write(tmp_path / "a.jsonl", rows), "weight": 1.5}],
        "dataset_stage_python": sys.executable,
        "dataset_stage_cache_dir": str(tmp_path / "cache"),
        "dataset_stage_dir": f"{tmp_path}/{{{{ inventory_hostname }}}}/datasets",
        "dataset_stage_code_dir": f"{tmp_path}/code",
        "_bridge_code_dir": f"{tmp_path}/code",
        "_bridge_cache_dir": str(tmp_path / "payload"),
    }
    environment = {**os.environ, "ANSIBLE_CONFIG": str(tmp_path / "ansible.cfg"), "LC_ALL": "C.UTF-8"}
    environment["ANSIBLE_COLLECTIONS_PATH"] = str(ROOT / "playbooks" / "collections")

    def run(*arguments, **variables):
        hosts = {name: {**common, **variables} for name in ("one", "two")}
        (tmp_path / "hosts.json").write_text(json.dumps({"sglang": {"hosts": hosts}}))
        command = [str(Path(sys.executable).parent / "ansible-playbook"), "play.yml", "-i", "hosts.json", *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr, dict(re.findall(r"^(one|two) .*changed=(\d+)", done.stdout, re.MULTILINE))

    return run


def sets(directory: Path) -> list[str]:
    return sorted(name for name in os.listdir(directory) if not name.startswith("key-"))


@pytest.mark.parametrize("pack_host", [pytest.param("localhost", marks=PLAYED), "two"])
def test_packed_once_and_on_every_host(tmp_path, stage, pack_host):
    status, said, _changes = stage("--check", dataset_stage_pack_host=pack_host)
    assert status == 0, said
    assert not any((tmp_path / name).exists() for name in ("cache", "one", "two")), "check mode wrote something"
    status, said, changes = stage(dataset_stage_pack_host=pack_host)
    assert status == 0 and "source" in said and changes.keys() == {"one", "two"}, said
    assert "dataset_stage_tokenizer is not set" in said
    (name,) = sets(tmp_path / "cache")
    for host in ("one", "two"):
        data = PackedDataset(str(tmp_path / host / "datasets" / name))
        data.check_content()
        assert len(data) == 30
    status, said, changes = stage(dataset_stage_pack_host=pack_host)
    assert status == 0 and changes == {"one": "0", "two": "0"}, said


@pytest.mark.parametrize("pack_host", [pytest.param("localhost", marks=PLAYED), "two"])
def test_a_bad_source_ends_it_on_all_hosts_with_the_line(tmp_path, stage, pack_host):
    with open(tmp_path / "a.jsonl", "a") as stream:
        stream.write("no\n")
    status, said, _changes = stage(dataset_stage_pack_host=pack_host)
    assert status != 0 and f"a {tmp_path}/a.jsonl:21: not JSON" in said, said
    assert not any((tmp_path / host / "datasets").exists() and sets(tmp_path / host / "datasets") for host in ("one", "two"))
    status, said, _changes = stage(dataset_stage_pack_host=pack_host, dataset_stage_on_bad="skip")
    assert status == 0 and re.search(r"rejected records are listed in \S+\.rejects\.jsonl", said), said


def test_a_pack_host_that_is_not_in_the_run_is_refused(stage):
    status, said, _changes = stage(dataset_stage_pack_host="three")
    assert status != 0 and "dataset_stage_pack_host is three, which is not among the hosts of this run (one, two)" in said, said
