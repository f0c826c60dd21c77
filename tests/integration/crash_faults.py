# SPDX-License-Identifier: GPL-3.0-or-later
"""What can break during an extraction: each kind of fault with the points at which it strikes, and what has to be seen of it.

A fault is a function of (host, point): it strikes, proves that it did, brings back what the host's service manager or an operator
would, and returns in a few words what was seen. It raises crash_host.Missed where the extraction was through before.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from functools import partial

import crash_trap
from ansible_collections.hidden_state.bridge.plugins.module_utils.hs_capture.counters import read_counters
from crash_host import EXTRACTOR, SERVER, Host, alive, wait

WHILE_LOADING = "while the server loads"
WATCHING = "while it watches"
AT_START = "at the extractor's start"
# Task of extract.yml that a controller dies in: its name in the play's output.
TASKS = {
    "while it stages": "TASK [hidden_state.bridge.dataset_stage : Put the packed data set on the host]",
    "while it plans": "TASK [hidden_state.bridge.extraction : Spread what is left over the hosts]",
    "while it configures": "TASK [hidden_state.bridge.extraction : Write the extractor's configuration]",
    "while the canary runs": "TASK [hidden_state.bridge.extraction : Capture a few records alone and together]",
    "while it starts the extractor": "TASK [hidden_state.bridge.extraction : Run the extractor as a service]",
    WATCHING: "TASK [hidden_state.bridge.extraction : Watch the extraction]",
}
# Seconds that a file system stays full for those who go on.
HOLD = 3.0


# -- processes ---------------------------------------------------------------------------------------


def extractor_killed(host: Host, point: str) -> str:
    if point in crash_trap.AT_START:
        leave_something_to_mend(host, point)
    struck = host.strike(point, "process", 0 if point in crash_trap.AT_START else None)
    wait("the extractor is gone", lambda: not alive(struck["pid"]))
    # Its manager does so by itself, without a word from here.
    wait("it is started again", lambda: host.pid(EXTRACTOR) not in (0, struck["pid"]))
    wait("it is at work", lambda: host.is_working() or host.is_through())
    return "dead at the point, started again by its manager"


def leave_something_to_mend(host: Host, point: str) -> None:
    if "manifest" in point:
        host.stop_extractor()
        with host.manifest_file().open("ab") as stream:
            stream.write(b'{"id":')
    else:
        struck = host.strike("file begun", "process")
        wait("the extractor is gone", lambda: not alive(struck["pid"]))


def server_killed(host: Host, point: str, victim: str) -> str:
    host.remember_memory()
    if point == WHILE_LOADING:
        launcher, pid = kill_while_loading(host, victim)
    else:
        launcher = host.pid(SERVER)
        struck = host.strike(point, "parent" if victim == "server" else "process")
        pid = struck["parent"] if victim == "server" else struck["pid"]
    extractor = host.pid(EXTRACTOR)
    # What is left of a server ends by itself.
    wait(f"the {victim} is gone, and the rest of the server", lambda: not alive(pid) and not alive(launcher))
    host.free_memory()
    host.await_server(launcher)
    waited = extractor and host.pid(EXTRACTOR) == extractor
    host.start_extractor()
    return f"all of it dead, started again by its manager; the extractor {'waited for it' if waited else 'was started'}"


def kill_while_loading(host: Host, victim: str) -> tuple[int, int]:
    """Processes of the server that was loading: its launcher, and the one that was killed."""
    host.tell("stopProcess", SERVER)
    host.tell("startProcess", SERVER, False)
    wait("it loads", host.scheduler)
    time.sleep(host.rng.uniform(0, 4))
    launcher = host.pid(SERVER)
    pid = launcher if victim == "server" else host.scheduler()
    host.remember_memory()
    assert not host.serving(), "the server was up before it could be killed while it loads"
    os.kill(pid, signal.SIGKILL)
    return launcher, pid


def controller_gone(host: Host, point: str) -> str:
    host.play_until(TASKS[point], host.is_working if point == WATCHING else lambda: True)
    at_work = host.is_working()
    host.start_extractor()
    return f"dead in that task; the extractor {'worked on' if at_work else 'was started'}"


def host_stopped(host: Host, point: str) -> str:
    root = host.root()
    host.remember_memory()
    if point == WHILE_LOADING:
        host.tell("stopProcess", SERVER)
        host.tell("startProcess", SERVER, False)
        wait("it loads", host.scheduler)
        killed = crash_trap.kill_host(root)
    else:
        killed = host.strike(point, "host", root=root)["killed"]
    assert len(killed) >= 3, f"no host of service manager, server and extractor: {killed}"
    wait("the host's processes are gone", lambda: not any(map(alive, killed)))
    shutil.rmtree(host.dumps)
    host.free_memory()
    return "all its processes dead, memory empty; extract.yml brought it back"


def come_back(host: Host) -> None:
    """What extract.yml does on a host where nothing runs, up to the extractor at work; then the controller dies."""
    host.play_until(TASKS[WATCHING], host.is_working)


# -- file systems ------------------------------------------------------------------------------------


def full(host: Host, point: str, place: pathlib.Path) -> str:
    """Others fill the file system to the last block; room is made once the extractor ended, or after a while."""
    log, dropped = host.said(), capture(host)["drops"]

    def keep_full() -> bool:
        crash_trap.fill(place)
        return not host.pid(EXTRACTOR)

    try:
        if point == AT_START:
            host.stop_extractor()
            free = crash_trap.fill(place)
            host.tell("startProcess", EXTRACTOR, False)
            wait("the extractor starts, or refuses to", lambda: keep_full() or host.is_working())
        else:
            free = host.strike(point, "fill", directory=str(place))["free"]
        assert free < 1 << 16, f"{free} bytes are left in {place}"
        over = time.monotonic() + HOLD
        wait("the extractor ends", lambda: keep_full() or (time.monotonic() > over and "giving up: " not in host.says(log)))
    finally:
        (place / crash_trap.FILLER).unlink(missing_ok=True)
    freed = time.time()
    wait("the capture counts again", lambda: capture(host)["updated"] > freed)
    dropped = capture(host)["drops"] - dropped
    after, said = host.tell("getProcessInfo", EXTRACTOR), host.says(log)
    assert "Traceback" not in said, said
    host.start_extractor()
    ended = "went on" if after["pid"] else f"ended with {after['exitstatus']}"
    return f"{ended}: {what_it_said(said) or ('the capture gave requests up, tried again' if dropped else 'nothing was lost by it')}"


def capture(host: Host) -> dict:
    """What the capture in the server counts."""
    return {"drops": 0, "updated": 0, **read_counters(str(host.dumps))}


# Of the log: (what is looked for, what it means).
SAID = [
    (r"could not be stored: .*No space left", "a record could not be stored"),
    (r"stay free \(min_free_bytes\)", "too little is free"),
    (r"are free there; make room", "no room for a dump"),
    (r"record \d+ .* failed: ", "records were left for the next start"),
    (r"No space left", "no space to start"),
]


def what_it_said(text: str) -> str:
    return next((meaning for pattern, meaning in SAID if re.search(pattern, text)), "")


# -- files -------------------------------------------------------------------------------------------


def torn(host: Host, point: str) -> str:
    wait("a line is there", host.lines)
    host.stop_extractor()
    content = b"".join(host.lines())
    last = host.lines()[-1]
    host.manifest_file().write_bytes(TORN[point](host, content, last))
    log = host.said()
    host.start_extractor()
    assert "mended the manifest" in host.says(log)
    return "mended at the next start"


TORN: dict[str, Callable[[Host, bytes, bytes], bytes]] = {
    "last line cut": lambda host, content, last: content[: -host.rng.randrange(2, len(last))],
    "line feed gone": lambda host, content, last: content[:-1],
    "garbage behind it": lambda host, content, last: content + host.rng.randbytes(host.rng.randrange(1, 200)).replace(b"\n", b""),
    "a line of garbage behind it": lambda host, content, last: content + host.rng.randbytes(50).replace(b"\n", b"") + b"\n",
    "zeros behind it": lambda host, content, last: content + bytes(4096),
    "last line twice": lambda host, content, last: content + last,
}


def truncated(host: Host, point: str) -> str:
    path = one_output(host)
    size = path.stat().st_size
    left = {"empty": 0, "half": size // 2, "one byte short": size - 1, "gone": None}[point]
    if left is None:
        path.unlink()
    else:
        os.truncate(path, left)
    log = host.said()
    host.start_extractor()
    assert "1 without their file" in host.says(log)
    return "seen at the next start"


def flipped(host: Host, point: str) -> str:
    path = one_output(host)
    size = path.stat().st_size
    place = {"first byte": 0, "last byte": size - 1}.get(point, host.rng.randrange(1, size - 1))
    with path.open("r+b") as stream:
        stream.seek(place)
        (byte,) = stream.read(1)
        stream.seek(place)
        stream.write(bytes([byte ^ 1 << host.rng.randrange(8)]))
    found = verify(host, "--repair")
    name = str(path.relative_to(host.output / "one"))
    assert [problem["file"] for problem in found["repaired"]] == [name] and not path.exists(), found
    host.start_extractor()
    return "found by verify --repair, back in the plan"


def one_output(host: Host) -> pathlib.Path:
    """The file of some done record, with the extractor down."""
    wait("a record is done", host.lines)
    host.stop_extractor()
    return host.output / "one" / json.loads(host.rng.choice(host.lines()))["file"]


def verify(host: Host, *arguments: str) -> dict:
    """What verify.yml runs on the host."""
    archive = host.directory / "code" / "hidden_state_bridge.pyz"
    command = [host.engine / "bin" / "python", "-B", archive, "verify", "--output-dir", host.output / "one", "--all", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert done.returncode == 0, done.stdout
    return json.loads(done.stdout.splitlines()[-1])


Strike = Callable[[Host, str], str]
# Kind: (its points, how it strikes).
KINDS: dict[str, tuple[list[str], Strike]] = {
    "extractor killed": ([*crash_trap.EXTRACTOR, *crash_trap.AT_START], extractor_killed),
    "server killed": ([*crash_trap.SERVER, WHILE_LOADING], partial(server_killed, victim="server")),
    "its scheduler killed": ([*crash_trap.SERVER, WHILE_LOADING], partial(server_killed, victim="scheduler")),
    "controller gone": (list(TASKS), controller_gone),
    "host stopped": (["file whole, not synced", "in the manifest line", "half a dump", WHILE_LOADING], host_stopped),
    "dump directory full": ([*crash_trap.FULL_DUMPS, AT_START], lambda host, point: full(host, point, host.memory)),
    "output full": ([*crash_trap.FULL_OUTPUT, AT_START], lambda host, point: full(host, point, host.disk)),
    "manifest torn": (list(TORN), torn),
    "output truncated": (["empty", "half", "one byte short", "gone"], truncated),
    "bit flipped": (["first byte", "somewhere", "last byte"], flipped),
}
# Those that need a file system of their own, and those that cost a server's start or a play.
NEED_ROOM = ("dump directory full", "output full")
SLOW = ("server killed", "its scheduler killed", "controller gone", "host stopped")
