# SPDX-License-Identifier: GPL-3.0-or-later
"""A host in a container, for the scenarios of molecule: playbooks against it, and what its server's process looks like from inside."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import testinfra

ENGINE = os.environ.get("HSB_CONTAINER_ENGINE", "podman")
ROOT = Path(__file__).resolve().parents[1]
DUMPS = "/dev/shm/sglang_hs"
CAPTURE = {"SGLANG_HS_DUMP_DIR": DUMPS, "SGLANG_HS_DUMP_LAYERS": "1,3,4"}
GATE = f"SGLANG_HS_DUMP_DIR={DUMPS}"
# Seconds for one playbook, and for a server that starts by itself, on a machine that does other things too.
PATIENCE = 1800

ASK = """
import json, sys, urllib.request
body = json.dumps({"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 1}}).encode()
headers = {"Content-Type": "application/json", "Authorization": "Bearer " + sys.argv[1]}
request = urllib.request.Request("http://127.0.0.1:30000/generate", body, headers)
print(urllib.request.urlopen(request, timeout=60).status)
"""
# The main process of the server, without what systemd gives each start of a unit anew.
SEEN = """
import glob, json, os, re
for path in glob.glob("/proc/[0-9]*/cmdline"):
    try:
        words = open(path, "rb").read().split(b"\\0")
        if b"sglang.launch_server" not in words:
            continue
        proc = os.path.dirname(path)
        environment = open(proc + "/environ", "rb").read().split(b"\\0")
        status = {line.partition(":")[0]: line.partition(":")[2].strip() for line in open(proc + "/status")}
        if status["State"].startswith("Z"):
            continue
        own = re.compile(rb"(INVOCATION_ID|JOURNAL_STREAM|SYSTEMD_EXEC_PID|MEMORY_PRESSURE_[A-Z]+)=")
        print(json.dumps({
            "pid": int(os.path.basename(proc)),
            "argv": [word.decode() for word in words],
            "environment": sorted(one.decode() for one in environment if not own.match(one)),
            "cwd": os.readlink(proc + "/cwd"),
            "limits": open(proc + "/limits").read().splitlines(),
            **{key: status[key] for key in ("Umask", "Uid", "Gid")},
        }))
    except FileNotFoundError:
        pass
"""


class ContainerHost:
    """The host ``name`` of a scenario's inventory, which is the container of that name, with a server on port 30000."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.host = testinfra.get_host(f"{ENGINE}://{name}")
        self.api_key = ""

    # -- playbooks

    def begin(
        self, playbook: str, extra: dict | None = None, arguments: tuple[str, ...] = (), limit: tuple[str, ...] | None = None
    ) -> subprocess.Popen:
        """Start a playbook of the checkout, for this host alone, or for those that ``limit`` names."""
        command = [Path(sys.executable).parent / "ansible-playbook", ROOT / playbook, "-i", os.environ["MOLECULE_INVENTORY_FILE"]]
        environment = {
            **os.environ,
            "ANSIBLE_NOCOLOR": "1",
            "ANSIBLE_FORCE_COLOR": "0",
            "ANSIBLE_COLLECTIONS_PATH": str(ROOT / "playbooks/collections"),
        }
        command += ["--limit", ",".join(limit or [self.name]), "-e", json.dumps(extra or {}), *arguments]
        return subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )

    def play(
        self,
        playbook: str,
        extra: dict | None = None,
        fails: bool = False,
        arguments: tuple[str, ...] = (),
        at: tuple[str, int, Callable[[subprocess.Popen], object]] | None = None,
    ) -> str:
        """Run a playbook to its end and return what it printed.

        ``at`` is a text, the number of the line with it, counted from 1, and what is done once that line is there.
        """
        lines, met = [], 0
        with self.begin(playbook, extra, arguments) as running:
            for line in running.stdout:
                print(line, end="", flush=True)
                lines.append(line)
                if at and at[0] in line:
                    met += 1
                    if met == at[1]:
                        at[2](running)
        assert (running.returncode != 0) == fails, f"{playbook} ended with {running.returncode}"
        assert not at or met >= at[1], f"{playbook} never came to {at[0]}"
        return "".join(lines)

    @staticmethod
    def kill_controller(running: subprocess.Popen) -> None:
        os.killpg(running.pid, signal.SIGKILL)

    def drive(self, wanted: str, fails: bool = False, **more) -> int:
        """Bring the server into a state; returns how many tasks changed something."""
        extra = {"wanted": wanted, "sglang_server_capture_environment": CAPTURE, **more}
        return self.recap(self.play("tests/integration/drive.yml", extra, fails))["changed"]

    def recap(self, output: str) -> dict[str, int]:
        """The counts of this host's line in the play recap."""
        counts = re.search(rf"^{self.name} +: (ok=.*)$", output, re.MULTILINE)[1].split()
        return {key: int(number) for key, number in (count.split("=") for count in counts)}

    def run_states_twice(self, check: Callable[[str], object] = lambda state: None) -> None:
        """Start, capture, serve again, stop, start, each twice; the second time changes nothing and keeps the process."""
        for wanted in ("serving", "capture", "restored", "stopped", "restored"):
            self.drive(wanted)
            seen = self.seen()
            assert (seen is None) == (wanted == "stopped")
            assert self.drive(wanted) == 0, f"{wanted}, asked for again, changed something"
            assert self.seen() == seen
            if seen:
                assert (GATE in seen["environment"]) == (wanted == "capture") and self.answers()
            check(wanted)

    # -- the container

    def spawn(self, *command: str, env: dict[str, str] | None = None) -> None:
        """Start a process in the container, and leave it alone."""
        variables = [word for name, value in (env or {}).items() for word in ("--env", f"{name}={value}")]
        subprocess.run([ENGINE, "exec", "--detach", *variables, self.name, *command], check=True)

    def lose_power(self) -> None:
        subprocess.run([ENGINE, "kill", "--signal", "KILL", self.name], check=True, stdout=subprocess.DEVNULL)
        subprocess.run([ENGINE, "wait", self.name], check=True, stdout=subprocess.DEVNULL)

    def boot(self) -> None:
        subprocess.run([ENGINE, "start", self.name], check=True, stdout=subprocess.DEVNULL)

    # -- the server

    def answers(self) -> bool:
        return self.host.run("python3 -c %s %s", ASK, self.api_key).stdout.strip() == "200"

    def wait(self, seconds: float = PATIENCE) -> None:
        """Until the server answers."""
        deadline = time.monotonic() + seconds
        while not self.answers():
            assert time.monotonic() < deadline, self.host.run("ps axf; journalctl -n 60 --no-pager").stdout
            time.sleep(2)

    def seen(self) -> dict | None:
        """The process of the server; None where there is none."""
        lines = self.host.check_output("python3 -c %s", SEEN).splitlines()
        assert len(lines) < 2, lines
        return json.loads(lines[0]) if lines else None

    def started(self) -> dict:
        """What it was started with, apart from the pid."""
        return {key: value for key, value in self.seen().items() if key != "pid"}
