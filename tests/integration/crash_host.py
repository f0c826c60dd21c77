# SPDX-License-Identifier: GPL-3.0-or-later
"""A host whose processes can be struck at named points, with file systems of its own that can be filled."""

from __future__ import annotations

import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import xmlrpc.client
from collections.abc import Callable

import crash_trap
from ansible_collections.hidden_state.bridge.plugins.module_utils import service_query
from conftest import ROOT, Site

SERVER, EXTRACTOR = "sglang", "hidden-state-extraction"
# Seconds: for something to happen, and for a server to come up.
PATIENCE, LOADING = 120, 300
DISK_BYTES, MEMORY_BYTES = 300 << 20, 128 << 20


class Missed(Exception):
    """What was to be struck did not come to its point."""


def wait(what: str, seen: Callable[[], object], seconds: float = PATIENCE) -> object:
    """What `seen` returns, once that is true."""
    deadline = time.monotonic() + seconds
    while True:
        value = seen()
        if value:
            return value
        assert time.monotonic() < deadline, f"after {seconds} s still not: {what}"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """Whether a process runs; one that is dead and not yet reaped does not."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stream:
            return stream.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


class Host(Site):
    """`disk` is below the output directories, `memory` below the dump directory: small file systems where they can be mounted."""

    def __init__(self, directory: pathlib.Path, records: int, rng: random.Random) -> None:
        super().__init__(directory)
        self.rng, self.mounted = rng, []
        self.disk, self.memory = directory / "disk", self.dumps.with_name(f"{self.dumps.name}-crashes")
        self.dumps = self.memory / "dumps"
        self._orders = 0
        self._shared: set[str] = set()
        self.log = directory / "plays.log"
        make = [sys.executable, ROOT / "demo" / "make_sources.py", "--output", directory / "sources", "--records", str(records)]
        subprocess.run(make, check=True, stdout=subprocess.DEVNULL)
        self.traps = next(self.engine.glob("lib/python3*/site-packages"))
        shutil.copy(crash_trap.__file__, self.traps)
        (self.traps / "crash_trap.pth").write_text("import crash_trap; crash_trap.spring()\n")
        self.order_file, self.struck_file = self.traps / "order.json", self.traps / "struck.json"
        for place, size in ((self.disk, DISK_BYTES), (self.memory, MEMORY_BYTES)):
            place.mkdir(mode=0o700)
            options = ["-o", f"size={size},mode=700", "tmpfs", place]
            if subprocess.run(["mount", "-t", "tmpfs", *options], check=False, stderr=subprocess.DEVNULL).returncode == 0:
                self.mounted.append(place)

    @property
    def variables(self) -> dict:
        drilled = {
            "extraction_afterwards": "keep",
            "extraction_concurrency": 4,
            "extraction_report_dir": str(self.directory / f"reports-{self.output.name}"),
        }
        return {**super().variables, **drilled}

    def environment(self) -> dict:
        # A server that is killed leaves its temporary files.
        temporary = self.directory / "tmp"
        temporary.mkdir(exist_ok=True)
        return {**super().environment(), "TMPDIR": str(temporary)}

    # -- plays ---------------------------------------------------------------------------------------

    def play_until(self, line: str, reached: Callable[[], object] = lambda: True) -> None:
        """Start extract.yml, and kill it once it printed `line` and `reached` is so."""
        with self.log.open("a") as log, self.start("extract.yml") as running:
            try:
                for text in running.stdout:
                    log.write(text)
                    if line in text:
                        break
                else:
                    raise Missed(f"extract.yml ended before {line}")
                wait(f"{line}: {reached.__name__}", lambda: reached() or running.poll() is not None)
                if running.poll() is not None:
                    log.write(running.stdout.read())
                    raise Missed("extract.yml ended by itself")
            finally:
                if running.poll() is None:
                    os.killpg(running.pid, signal.SIGKILL)
                running.wait()
        assert running.returncode == -signal.SIGKILL

    def play_whole(self, playbook: str) -> str:
        """Run a playbook to its good end; returns what it printed."""
        with self.log.open("a") as log, self.start(playbook) as running:
            output = running.communicate()[0]
            log.write(output)
        assert running.returncode == 0, output
        return output

    # -- services ------------------------------------------------------------------------------------

    def tell(self, method: str, *arguments: object) -> object:
        """Say something to the service manager; None where the service is in that state already."""
        # A server that is told to stop ends its requests first, for sglang_server_stop_timeout at most.
        proxy = service_query.supervisor(str(self.directory / "state"), timeout=180)
        try:
            return getattr(proxy.supervisor, method)(*arguments)
        except xmlrpc.client.Fault as fault:
            if "ALREADY_STARTED" not in fault.faultString and "NOT_RUNNING" not in fault.faultString:
                raise
            return None

    def pid(self, service: str) -> int:
        """Its main process, 0 for none."""
        return self.tell("getProcessInfo", service)["pid"] if self.root() else 0

    def root(self) -> int:
        """The service manager, 0 for none."""
        file = self.directory / "state" / "supervisor" / "supervisord.pid"
        pid = int(file.read_text()) if file.exists() else 0
        return pid if pid and alive(pid) else 0

    def scheduler(self) -> int:
        """The server's scheduler, 0 where there is none."""
        for pid in crash_trap.family(self.pid(SERVER) or -1):
            try:
                if b"sglang::scheduler" in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes():
                    return pid
            except OSError:
                continue
        return 0

    def status(self) -> dict:
        """What the extractor says of itself."""
        path = self.output / "one" / "status.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def lines(self) -> list[bytes]:
        """The whole lines of the manifest."""
        path = self.manifest_file()
        return [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")] if path.exists() else []

    def manifest_file(self) -> pathlib.Path:
        return self.output / "one" / "manifest.jsonl"

    def said(self) -> int:
        """Length of the extractor's log."""
        path = self.directory / "state" / "supervisor" / "log" / f"{EXTRACTOR}.log"
        return path.stat().st_size if path.exists() else 0

    def says(self, since: int) -> str:
        """What the extractor's log says from a place in it."""
        with (self.directory / "state" / "supervisor" / "log" / f"{EXTRACTOR}.log").open("rb") as stream:
            stream.seek(since)
            return stream.read().decode(errors="replace")

    def is_working(self) -> bool:
        """Whether the extractor is at work on records."""
        status = self.status()
        return status.get("state") == "running" and status.get("pid") == self.pid(EXTRACTOR)

    def is_through(self) -> bool:
        """Whether the extractor has ended with nothing left."""
        return self.status().get("state") == "done" and not self.pid(EXTRACTOR)

    def stop_extractor(self) -> None:
        """As `extraction_state: stopped` does, with what is in flight done."""
        self.tell("stopProcess", EXTRACTOR)
        assert not self.pid(EXTRACTOR)
        if self.is_through():
            raise Missed("the run is through")

    def start_extractor(self) -> None:
        """Have it started, and wait until it is at work or through."""
        self.tell("startProcess", EXTRACTOR, False)
        wait("the extractor is at work", lambda: self.is_working() or self.is_through())

    def await_server(self, before: int) -> None:
        """Wait until the server's manager has put another process in the place of `before`, and that answers."""
        wait("the server's manager starts it again", lambda: self.pid(SERVER) not in (0, before))
        wait("the server answers", self.serving, LOADING)

    def remember_memory(self) -> None:
        """Note which shared memory the host's processes hold: those that are killed leave it for good."""
        for pid in crash_trap.family(self.root() or -1):
            try:
                maps = pathlib.Path(f"/proc/{pid}/maps").read_text()
            except OSError:
                continue
            self._shared.update(re.findall(r"/dev/shm/(?:psm_|sem\.|sglang_)\S+", maps))

    def free_memory(self) -> None:
        """Give back what was noted, once those who held it are dead."""
        while self._shared:
            pathlib.Path(self._shared.pop()).unlink(missing_ok=True)

    # -- strikes -------------------------------------------------------------------------------------

    def full_speed(self) -> None:
        self._order({"point": crash_trap.NO_POINT})

    def _order(self, order: dict) -> None:
        self._orders += 1
        self.struck_file.unlink(missing_ok=True)
        temporary = self.order_file.with_suffix(".new")
        temporary.write_text(json.dumps({"number": self._orders, "skip": 0, **order}))
        temporary.rename(self.order_file)

    def strike(self, point: str, action: str, skip: int | None = None, **more: object) -> dict:
        """Have the process that comes to `point` for the `skip`-th time strike there; returns what it left. Raises Missed."""
        self._order({"point": point, "action": action, "skip": self.rng.randrange(4) if skip is None else skip, **more})
        try:
            deadline = time.monotonic() + PATIENCE
            while not self.struck_file.exists():
                if self.is_through() or time.monotonic() > deadline:
                    raise Missed(f"nobody came to: {point}")
                try:
                    # One that an earlier fault ended.
                    self.tell("startProcess", EXTRACTOR, False)
                except Exception:
                    # The service manager dies with its host, perhaps while it is spoken to.
                    if action != "host":
                        raise
                time.sleep(0.05)
            return json.loads(self.struck_file.read_text())
        finally:
            self.order_file.unlink(missing_ok=True)

    def close(self) -> None:
        self.remember_memory()
        killed = crash_trap.kill_host(self.root()) if self.root() else []
        wait("the host's processes are gone", lambda: not any(map(alive, killed)))
        self.free_memory()
        for place in self.mounted:
            subprocess.run(["umount", "-l", place], check=True)
        shutil.rmtree(self.memory, ignore_errors=True)
        shutil.rmtree(self.directory, ignore_errors=True)
