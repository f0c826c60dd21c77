# SPDX-License-Identifier: GPL-3.0-or-later
"""A server over two hosts: started, switched and stopped together. The tests build on each other."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import testinfra

ENGINE = os.environ.get("HSB_CONTAINER_ENGINE", "podman")
ROOT = Path(os.environ["MOLECULE_PROJECT_DIRECTORY"])
RECAP = re.compile(r"^hsb-nodes-head +: ok=(\d+) +changed=(\d+) +unreachable=(\d+) +failed=(\d+)", re.MULTILINE)
HOSTS = [testinfra.get_host(f"{ENGINE}://hsb-nodes-{name}") for name in ("head", "second")]


def drive(wanted: str) -> int:
    """Bring the server into a state; returns how many tasks changed something."""
    extra = {"wanted": wanted, "sglang_server_capture_environment": {"SGLANG_HS_DUMP_DIR": "/dev/shm/sglang_hs"}}
    command = [Path(sys.executable).parent / "ansible-playbook", ROOT / "tests/integration/drive.yml"]
    environment = {**os.environ, "ANSIBLE_NOCOLOR": "1", "ANSIBLE_COLLECTIONS_PATH": str(ROOT / "playbooks/collections")}
    done = subprocess.run(
        [*command, "-i", os.environ["MOLECULE_INVENTORY_FILE"], "-e", json.dumps(extra)],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    print(done.stdout)
    assert done.returncode == 0
    return int(RECAP.search(done.stdout)[2])


def mains() -> list[int]:
    return [int(host.check_output("systemctl show --property MainPID --value sglang")) for host in HOSTS]


def arguments(number: int) -> list[str]:
    return HOSTS[number].check_output("tr '\\0' '\\n' < /proc/%s/cmdline", str(mains()[number])).splitlines()


def test_they_are_started_together():
    assert drive("serving") > 0
    for number in (0, 1):
        words = arguments(number)
        assert words[words.index("--nnodes") + 1] == "2" and words[words.index("--node-rank") + 1] == str(number)
        assert words[words.index("--dist-init-addr") + 1] == "hsb-nodes-head:20000"
    pids = mains()
    assert drive("serving") == 0 and mains() == pids


def test_they_capture_together():
    pids = mains()
    assert drive("capture") > 0
    assert not set(mains()) & set(pids)
    assert all("--disable-radix-cache" in arguments(number) for number in (0, 1))
    pids = mains()
    assert drive("capture") == 0 and mains() == pids


@pytest.mark.parametrize("dead", [0, 1])
def test_where_one_has_died_both_start_anew(dead):
    pids = mains()
    HOSTS[dead].check_output("systemctl kill --signal KILL sglang; systemctl stop sglang")
    assert drive("capture") > 0
    assert not set(mains()) & set(pids) and 0 not in mains()


def test_they_stop_together_and_come_back():
    assert drive("stopped") > 0
    assert mains() == [0, 0] and drive("stopped") == 0
    assert drive("restored") > 0
    assert 0 not in mains() and "--disable-radix-cache" not in arguments(0) + arguments(1)
