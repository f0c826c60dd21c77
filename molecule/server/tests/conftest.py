# SPDX-License-Identifier: GPL-3.0-or-later
"""Playbooks against the container, and what the server's process looks like from inside."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

ENGINE = os.environ.get("HSB_CONTAINER_ENGINE", "podman")
ROOT = Path(os.environ["MOLECULE_PROJECT_DIRECTORY"])
RECAP = re.compile(r"^hsb-server +: ok=(\d+) +changed=(\d+) +unreachable=(\d+) +failed=(\d+)", re.MULTILINE)
DUMPS = "/dev/shm/sglang_hs"
CAPTURE = {"SGLANG_HS_DUMP_DIR": DUMPS, "SGLANG_HS_DUMP_LAYERS": "1,3,4"}

ASK = """
import json, sys, urllib.request
body = json.dumps({"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 1}}).encode()
request = urllib.request.Request("http://127.0.0.1:30000/generate", body, {"Content-Type": "application/json"})
print(urllib.request.urlopen(request, timeout=60).status)
"""
# The main process of the server, without what systemd gives each start of a unit anew.
SEEN = """
import glob, json, os, re
for path in glob.glob("/proc/[0-9]*/cmdline"):
    words = open(path, "rb").read().split(b"\\0")
    if b"sglang.launch_server" in words:
        environment = open(path.replace("cmdline", "environ"), "rb").read().split(b"\\0")
        own = re.compile(rb"(INVOCATION_ID|JOURNAL_STREAM|SYSTEMD_EXEC_PID|MEMORY_PRESSURE_[A-Z]+)=")
        kept = sorted(one.decode() for one in environment if not own.match(one))
        pid = int(path.split("/")[2])
        print(json.dumps({"pid": pid, "argv": [word.decode() for word in words], "environment": kept, "cwd": os.readlink("/proc/%d/cwd" % pid)}))
"""


class Server:
    """The operator's server in the container ``hsb-server``."""

    def __init__(self, host) -> None:
        self.host = host

    def play(self, playbook: str, extra: dict | None = None, fails: bool = False, arguments: tuple[str, ...] = ()) -> str:
        command = [Path(sys.executable).parent / "ansible-playbook", ROOT / playbook, "-i", os.environ["MOLECULE_INVENTORY_FILE"]]
        environment = {**os.environ, "ANSIBLE_NOCOLOR": "1", "ANSIBLE_COLLECTIONS_PATH": str(ROOT / "playbooks/collections")}
        command += ["-e", json.dumps(extra or {}), *arguments]
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        print(done.stdout)
        assert (done.returncode != 0) == fails, f"{playbook} ended with {done.returncode}"
        return done.stdout

    def drive(self, wanted: str, fails: bool = False, **more) -> int:
        """Bring the server into a state; returns how many tasks changed something."""
        output = self.play("tests/integration/drive.yml", {"wanted": wanted, "sglang_server_capture_environment": CAPTURE, **more}, fails)
        return int(RECAP.search(output)[2])

    def answers(self) -> bool:
        return self.host.run("python3 -c %s", ASK).stdout.strip() == "200"

    def wait(self, seconds: float = 300) -> None:
        deadline = time.monotonic() + seconds
        while not self.answers():
            assert time.monotonic() < deadline, self.host.run("systemctl --no-pager status operators; journalctl -n 60 --no-pager").stdout
            time.sleep(2)

    def seen(self) -> dict | None:
        lines = self.host.check_output("python3 -c %s", SEEN).splitlines()
        assert len(lines) < 2, lines
        return json.loads(lines[0]) if lines else None

    def started(self) -> dict:
        """What it was started with, apart from the pid."""
        return {key: value for key, value in self.seen().items() if key != "pid"}


@pytest.fixture(scope="module")
def server(host):
    return Server(host)
