# SPDX-License-Identifier: Apache-2.0
"""Strikes in a process of the host, at a named point of its own work: it is killed there, or its file system fills up.

A `.pth` file imports this module whenever an interpreter of the engine's environment starts. It wraps functions of `os`; the code
that calls them is the one that is shipped. `order.json` beside this file names a point. The process that comes there takes the order,
says so in `struck.json` and strikes. Without an order, output files take their time, so that a run outlasts the faults.
"""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import threading
import time

HERE = os.path.dirname(os.path.abspath(__file__))
ORDER, TAKEN, STRUCK = (os.path.join(HERE, name) for name in ("order.json", "order.taken", "struck.json"))
# An order without a point: all works at full speed.
NO_POINT = ""
PAUSE = 1.0

_FILE = r"/\.data_\d+\.ckpt\.tmp-\d+"
_MANIFEST = r"/manifest\.jsonl$"
_DUMP = r"\.safetensors"
_DUMP_UNDER_WAY = r"/\.[0-9a-f]+-\d+\.tmp-\d+$"
# What an extractor does: (function of os, when it is struck, what it works on: a path, or for a rename "path > path").
EXTRACTOR = {
    "dump read, no file begun": ("mkdir", "before", r"/rows_[^/]*$"),
    "file begun": ("open", "after", _FILE),
    "file whole, not synced": ("fsync", "before", _FILE),
    "file synced, not renamed": ("rename", "before", _FILE),
    "file renamed, directory not synced": ("rename", "after", _FILE),
    "before the manifest line": ("write", "before", _MANIFEST),
    "in the manifest line": ("write", "half", _MANIFEST),
    "manifest line not synced": ("fsync", "before", _MANIFEST),
    "manifest line there, dump as well": ("fsync", "after", _MANIFEST),
    "dump given back": ("rename", "after", _DUMP + r" > .*/\.spare-"),
    "status.json written, not renamed": ("rename", "before", r"/\.status\.json\."),
}
# What one does at its start, where there is something to mend.
AT_START = {
    "manifest mended, not renamed": ("rename", "before", r"/\.manifest\.jsonl\.tmp-"),
    "manifest mended and renamed": ("rename", "after", r"/\.manifest\.jsonl\.tmp-"),
    "a file of an earlier start removed": ("unlink", "after", _FILE),
}
# What the capture does in the scheduler of the server.
SERVER = {
    "dump begun": ("pwritev", "before", _DUMP_UNDER_WAY),
    "half a dump": ("pwritev", "half", _DUMP_UNDER_WAY),
    "dump whole, not renamed": ("replace", "before", " > .*" + _DUMP),
    "dump there, request unanswered": ("replace", "after", " > .*" + _DUMP),
    "counters written, not renamed": ("replace", "before", r" > capture\.json"),
}
# Where a file system fills up.
FULL_OUTPUT = {
    "file begun": EXTRACTOR["file begun"],
    "before the manifest line": EXTRACTOR["before the manifest line"],
    "status.json begun": ("open", "after", r"/\.status\.json\."),
}
FULL_DUMPS = {"dump begun": SERVER["dump begun"], "counters written": SERVER["counters written, not renamed"]}
POINTS = {**EXTRACTOR, **AT_START, **SERVER, **FULL_OUTPUT, **FULL_DUMPS}

FILLER = "filler"
_lock = threading.Lock()
_seen: dict[int, int] = {}


def fill(directory: str) -> int:
    """Fill the file system of `directory` to the last block; returns the bytes that are free then."""
    with open(os.path.join(directory, FILLER), "ab", buffering=0) as stream:
        for size in (1 << 20, 1 << 12):
            try:
                while stream.write(bytes(size)):
                    pass
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
    return os.statvfs(directory).f_bavail


def family(pid: int) -> list[int]:
    """A process and all that descend from it, itself first."""
    parents = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as stream:
                parents[int(name)] = int(stream.read().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found = [pid] if pid in parents else []
    for member in found:
        found += [child for child, parent in parents.items() if parent == member]
    return found


def kill_host(root: int) -> list[int]:
    """Kill the service manager `root` and all that it started, this process last; returns their ids."""
    killed = family(root)
    # SGLang's processes die with their launcher, this one perhaps before it has killed the others.
    for pid in sorted(killed, key=lambda pid: (pid == os.getpid(), pid == os.getppid() and pid != root)):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return killed


def _subject(function: str, first: object, rest: tuple, named: dict) -> str:
    if function in ("rename", "replace"):
        return f"{first} > {rest[0]}"
    if isinstance(first, int):
        return _link(first)
    if named.get("dir_fd") is not None:
        return f"{_link(named['dir_fd'])}/{first}"
    return str(first)


def _link(descriptor: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return ""


def _take(function: str, first: object, rest: tuple, named: dict) -> dict | None:
    """The order, where this call is the point that it names."""
    try:
        with open(ORDER, encoding="utf-8") as stream:
            order = json.load(stream)
    except (OSError, ValueError):
        if function == "fsync" and re.search(_FILE, _link(first)):
            time.sleep(PAUSE)
        return None
    wanted, when, pattern = POINTS.get(order["point"], (None, None, None))
    if wanted != function or not re.search(pattern, _subject(function, first, rest, named)):
        return None
    with _lock:
        _seen[order["number"]] = _seen.get(order["number"], 0) + 1
        if _seen[order["number"]] <= order["skip"]:
            return None
        try:
            _plain["rename"](ORDER, TAKEN)
        except OSError:
            return None
    return {**order, "when": when}


def _strike(order: dict) -> None:
    action, struck = order["action"], {**order, "pid": os.getpid(), "parent": os.getppid()}
    if action == "fill":
        struck["free"] = fill(order["directory"])
    if action == "host":
        struck["killed"] = family(order["root"])
    with open(f"{STRUCK}.new", "w", encoding="utf-8") as stream:
        json.dump(struck, stream)
    _plain["rename"](f"{STRUCK}.new", STRUCK)
    if action == "host":
        kill_host(order["root"])
    elif action in ("process", "parent"):
        os.kill(os.getpid() if action == "process" else os.getppid(), signal.SIGKILL)


def _half(function: str, first: int, rest: tuple) -> None:
    if function == "write":
        _plain["write"](first, rest[0][: len(rest[0]) // 2])
    else:
        data = b"".join(bytes(memoryview(part).cast("B")) for part in rest[0])
        os.pwrite(first, data[: len(data) // 2], rest[1])


def _wrap(function: str):
    plain = _plain[function]

    def wrapped(first, *rest, **named):
        order = _take(function, first, rest, named)
        if order is None:
            return plain(first, *rest, **named)
        if order["when"] == "after":
            result = plain(first, *rest, **named)
            _strike(order)
            return result
        if order["when"] == "half":
            _half(function, first, rest)
        _strike(order)
        return plain(first, *rest, **named)

    return wrapped


_plain = {function: getattr(os, function) for function, _when, _pattern in POINTS.values()}


def spring() -> None:
    """Wrap the functions, in a process that is to be struck."""
    for function in _plain:
        setattr(os, function, _wrap(function))
