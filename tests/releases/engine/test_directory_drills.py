# SPDX-License-Identifier: GPL-3.0-or-later
"""What goes wrong with the dump directory of a real server: it goes on serving, and never leaves a wrong dump.

The tests share a server and leave it, and its directory, as they found it.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
import stat
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import pytest

import engines
import models
from capture import PATIENCE, RECORDS, Captured, Capturing, Records, capturing, differences, make_records
from cases import WITH_RIDS, parameters
from hidden_state_bridge.dumps import DumpRejected, remove
from hs_capture.dumpfile import COUNTERS_NAME, dump_name, error_name, is_dump, read_error, temporary_pid
from hs_capture.settings import DEFAULT_RID_PREFIX
from server import ServerError
from test_states import TOLERANCE

STRUCTURE = "deepseek_v3"
SAMPLE = (WITH_RIDS[-1], 1)
CASES = [*((release, 1) for release in WITH_RIDS), (WITH_RIDS[-1], 2)]
# The file system holds four full prefill batches of all layers.
ROOM, PREFILL_TOKENS = "96m", 8192
LARGE = make_records([models.make_checkpoint.CONTEXT - 48] * 4, 21, "large")
PROMPT, NEW_TOKENS = [7, 301, 44, 199, 23], 6
# Its name begins as a rid does: a path through it leads on.
STEP = f"{DEFAULT_RID_PREFIX}step"
BAD_RIDS = {
    "upwards": f"{DEFAULT_RID_PREFIX}../../escaped",
    "above": f"{STEP}/../../escaped",
    "within": f"{STEP}/escaped",
    "absolute": f"/{DEFAULT_RID_PREFIX}a",
    "NUL": f"{DEFAULT_RID_PREFIX}a\0b",
    "300 characters": DEFAULT_RID_PREFIX + "a" * 296,
}
TRIES = 6


class Drilled:
    """A server that captures every layer into `path`, a directory within `room`."""

    def __init__(self, running: Capturing, room: Path, unmounted: str) -> None:
        self.running, self.room, self.path = running, room, running.dumps
        self.unmounted = unmounted
        self.states = models.reference(STRUCTURE, [*RECORDS.values(), *LARGE.values()])
        self.ids = [*RECORDS.values(), *LARGE.values()]
        self.tokens = models.greedy(STRUCTURE, PROMPT, NEW_TOKENS)
        self._numbers = itertools.count()

    def fresh(self, records: Records = RECORDS) -> dict[str, list[int]]:
        """The same records under rids that were never used."""
        return {f"{DEFAULT_RID_PREFIX}drill{next(self._numbers)}": list(ids) for ids in records.values()}

    def answers(self, rid: str = "") -> None:
        """The server gives the right tokens."""
        answer = self.running.server.generate(PROMPT, rid or f"plain{next(self._numbers)}", NEW_TOKENS)
        assert answer["output_ids"] == self.tokens

    def check(self, captured: Captured, records: Records) -> None:
        """What was dumped is right."""
        states = {rid: self.states[self.ids.index(records[rid])] for rid in captured.dumps}
        assert all(value <= TOLERANCE for value in differences(captured.dumps, states).values())

    def is_sound(self) -> None:
        """It serves and captures, and nothing lies about that nobody asked for."""
        self.answers()
        records = self.fresh()
        captured = self.running.take(records)
        assert not captured.errors
        self.check(captured, records)
        assert self.running.unknown(captured) == []
        self.forget(records)

    def forget(self, records: Records) -> None:
        """Remove what is left of requests, as the extractor does."""
        for rid in records:
            remove(str(self.path), f"{rid}.")

    def lost(self, rid: str, because: str) -> None:
        """Wait until the log says that a request has neither dump nor error marker, and why."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            lines = self.running.server.log.read_text().splitlines()
            given_up = [line for line in lines if f"hidden states of {rid} are not dumped" in line and because in line]
            if given_up and any(f"the error marker of {rid} could not be written" in line for line in lines):
                return
            time.sleep(0.05)
        raise self.running.server.failure(f"the log does not say that {rid} is lost: {because}")

    def tree(self) -> set[str]:
        """Every name at and beside the dump directory, but for the counters and their temporary names."""
        names = {str(path.relative_to(self.room)) for path in self.room.rglob("*")}
        return {name for name in names if os.path.basename(name) != COUNTERS_NAME and temporary_pid(os.path.basename(name)) is None}

    def mounted(self, option: str) -> None:
        """Mount the file system anew, `ro` or `rw`; while the server has its counters open it is busy."""
        command, environment = ["mount", "-o", f"remount,{option}", self.room], {**os.environ, "LC_ALL": "C"}
        deadline = time.monotonic() + PATIENCE
        while (done := subprocess.run(command, check=False, env=environment, capture_output=True, text=True)).returncode:
            assert "busy" in done.stderr and time.monotonic() < deadline, done.stderr
            time.sleep(0.01)


@pytest.fixture(scope="module")
def drilled(request, cache, tmp_path_factory) -> Iterator[Drilled]:
    release, tp_size = request.param
    directory = tmp_path_factory.mktemp("drills")
    room = directory / "room"
    room.mkdir()
    options = ["-o", f"size={ROOM},mode=700", "tmpfs"]
    mount = subprocess.run(["mount", "-t", "tmpfs", *options, room], check=False, capture_output=True, text=True)
    engine = engines.clone(engines.install(release))
    layers = ",".join(map(str, range(models.LAYERS)))
    try:
        arguments = [f"--max-prefill-tokens={PREFILL_TOKENS}"]
        with capturing(engine, STRUCTURE, tp_size, directory, layers, arguments, dumps=room / "dumps") as running:
            yield Drilled(running, room, mount.stderr.strip())
    finally:
        shutil.rmtree(engine.directory)
        if not mount.returncode:
            subprocess.run(["umount", "-l", room], check=True)


pytestmark = pytest.mark.parametrize(
    "drilled",
    [pytest.param(one.values, id=one.id, marks=one.marks) for one in parameters(CASES, SAMPLE)],
    indirect=True,
)


def test_the_directory_is_removed(drilled):
    deadline = time.monotonic() + PATIENCE
    while drilled.path.exists():
        # The server may write its counters meanwhile.
        shutil.rmtree(drilled.path, ignore_errors=True)
        assert time.monotonic() < deadline, f"{drilled.path} cannot be removed"
    drilled.answers()
    records = drilled.fresh()
    captured = drilled.running.take(records)
    # Threads that write meet the loss together, or one of them makes the directory for the others.
    assert captured.errors
    for error in captured.errors.values():
        assert "was removed or replaced while the server ran" in error["reason"]
        assert error["remedy"] == "leave it alone while the server runs"
    drilled.check(captured, records)
    assert stat.S_IMODE(drilled.path.stat().st_mode) == 0o700
    drilled.forget(records)
    drilled.is_sound()


@pytest.mark.parametrize("what", ["link", "file", "open to others"])
def test_the_directory_is_replaced(drilled, what):
    aside, victim = drilled.room / "aside", drilled.room / "victim"
    victim.mkdir(mode=0o700)
    drilled.path.rename(aside)
    if what == "link":
        drilled.path.symlink_to(victim)
    elif what == "file":
        drilled.path.touch()
    else:
        drilled.path.mkdir()
        drilled.path.chmod(0o777)
    before = drilled.tree()
    drilled.answers()
    rid, ids = next(iter(drilled.fresh().items()))
    drilled.running.server.generate(ids, rid)
    drilled.lost(rid, "is open to other users" if what == "open to others" else "is a link or a file")
    assert drilled.tree() == before
    drilled.answers()
    (drilled.path.rmdir if what == "open to others" else drilled.path.unlink)()
    victim.rmdir()
    aside.rename(drilled.path)
    drilled.is_sound()


def test_the_directory_is_read_only(drilled):
    if not drilled.unmounted:
        drilled.mounted("ro")
        because = "Read-only file system"
    elif os.geteuid():
        drilled.path.chmod(0o500)
        because = "Permission denied"
    else:
        pytest.skip(f"root may write where it may not mount: {drilled.unmounted}")
    before = drilled.tree()
    drilled.answers()
    rid, ids = next(iter(drilled.fresh().items()))
    drilled.running.server.generate(ids, rid)
    drilled.lost(rid, because)
    assert drilled.tree() == before
    drilled.answers()
    drilled.path.chmod(0o700) if drilled.unmounted else drilled.mounted("rw")
    drilled.is_sound()
    deadline = time.monotonic() + PATIENCE
    while not json.loads((drilled.path / COUNTERS_NAME).read_text())["markers_lost"]:
        assert time.monotonic() < deadline, "the counters do not say that an error marker was lost"
        time.sleep(0.1)


def test_the_file_system_is_full(drilled):
    if drilled.unmounted:
        pytest.skip(f"no tmpfs can be mounted here: {drilled.unmounted}")
    filler = drilled.room / "filler"
    leave(256 << 10, filler)
    drilled.answers()
    records = drilled.fresh(LARGE)
    captured = drilled.running.take(records)
    assert not captured.dumps
    for error in captured.errors.values():
        assert "No space left on device" in error["reason"]
        assert error["remedy"] == f"make room in {drilled.path}"
    assert drilled.running.unknown(captured) == []
    drilled.forget(records)
    # What is small enough still fits.
    small = {rid: ids for rid, ids in drilled.fresh().items() if len(ids) < 10}
    captured = drilled.running.take(small, at_once=1)
    assert not captured.errors
    drilled.check(captured, small)
    drilled.forget(small)

    fill(filler)
    drilled.answers()
    before = drilled.tree()
    rid, ids = next(iter(drilled.fresh(LARGE).items()))
    drilled.running.server.generate(ids, rid)
    drilled.lost(rid, "No space left on device")
    assert drilled.tree() == before
    filler.unlink()
    drilled.is_sound()


def leave(size: int, path: Path) -> None:
    """Let `path` take all bytes of its file system but `size`."""
    path.touch()
    found = os.statvfs(path)
    taken = path.stat().st_size + found.f_bavail * found.f_frsize - size
    with path.open("r+b") as stream:
        os.posix_fallocate(stream.fileno(), 0, taken)


def fill(path: Path) -> None:
    """Let `path` take every page of its file system, those with it that the server gives back meanwhile."""
    with path.open("ab", buffering=0) as stream:
        while append(stream):
            pass


def append(stream: BinaryIO) -> int:
    """Append pages until the file system is full; returns the bytes."""
    before = stream.tell()
    try:
        while stream.write(bytes(os.sysconf("SC_PAGE_SIZE"))):
            pass
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
    return stream.tell() - before


@pytest.mark.parametrize("kind", BAD_RIDS)
def test_a_rid_that_cannot_name_a_file_leaves_nothing(drilled, kind):
    (drilled.path / STEP).mkdir(exist_ok=True)
    before = drilled.tree()
    drilled.answers(BAD_RIDS[kind])
    # What was answered before this one is on the disk or nowhere.
    drilled.is_sound()
    assert drilled.tree() == before
    assert not list(drilled.room.parent.glob("*escaped*"))
    (drilled.path / STEP).rmdir()


def test_a_rid_comes_twice(drilled):
    one, other = list(LARGE.values())[:2]
    rid, later = drilled.fresh({"1": one, "2": other})
    with ThreadPoolExecutor(2) as senders:
        answers = [senders.submit(drilled.running.server.generate, ids, rid) for ids in (one, other)]
    refused = [answer.exception() for answer in answers if answer.exception()]
    assert len(refused) < 2
    for error in refused:
        # It is SGLang that refuses a rid that is under way.
        assert "Duplicate request ID" in str(error)
    wait_for_either(drilled, rid, one, other)
    drilled.forget([rid])

    for ids in (one, other):
        drilled.running.server.generate(ids, later)
        replaced(drilled, later, ids)
    drilled.forget([later])
    drilled.is_sound()


def wait_for_either(drilled: Drilled, rid: str, *records: list[int]) -> None:
    """What is left of a rid is a whole dump of one of the records, or an error marker."""
    deadline = time.monotonic() + PATIENCE
    while not ((drilled.path / dump_name(rid, 0)).exists() or (drilled.path / error_name(rid)).exists()):
        assert time.monotonic() < deadline, f"nothing came of {rid}"
        time.sleep(0.05)
    if (drilled.path / error_name(rid)).exists():
        assert "rid" in read_error(drilled.path / error_name(rid))["remedy"]
        return
    captured = Captured("", drilled.running.server.log)
    for ids in records:
        try:
            drilled.running.read(rid, ids, captured)
        except DumpRejected:
            continue
        drilled.check(captured, {rid: ids})
        return
    raise AssertionError(f"the dump of {rid} is that of no request")


def replaced(drilled: Drilled, rid: str, ids: list[int]) -> None:
    """The dump of a rid becomes that of its latest request, whole at every moment."""
    deadline = time.monotonic() + PATIENCE
    while True:
        captured = Captured("", drilled.running.server.log)
        try:
            drilled.running.read(rid, ids, captured)
        except DumpRejected as error:
            assert "was sent" in str(error), "it is neither dump"
            assert time.monotonic() < deadline, error
            time.sleep(0.05)
        else:
            assert not captured.errors
            drilled.check(captured, {rid: ids})
            return


def test_it_is_killed_while_it_writes(drilled):
    """Nothing has a final name that is not whole, and the next start sweeps what is under way."""
    for _try in range(TRIES):
        records = drilled.fresh(LARGE)
        under_way = kill_while_it_writes(drilled, records)
        captured = Captured("", drilled.running.server.log)
        for rid, ids in records.items():
            if (drilled.path / dump_name(rid, 0)).exists():
                drilled.running.read(rid, ids, captured)
        drilled.check(captured, records)
        assert sorted(filter(is_dump, os.listdir(drilled.path))) == sorted(dump_name(rid, 0) for rid in captured.dumps)
        drilled.running.server.start()
        assert not [name for name in os.listdir(drilled.path) if name in under_way]
        assert drilled.running.unknown(captured) == []
        drilled.forget(records)
        drilled.is_sound()
        if under_way:
            return
    pytest.fail(f"{TRIES} times no dump was under way when the server was killed")


def kill_while_it_writes(drilled: Drilled, records: Records) -> list[str]:
    """Send records and kill the server when it has begun to write; returns the temporary files that are left of dumps."""

    def send(rid: str) -> None:
        try:
            drilled.running.server.generate(records[rid], rid)
        except ServerError:
            pass  # It was killed.

    def under_way() -> list[str]:
        with os.scandir(drilled.path) as entries:
            return [entry.name for entry in entries if temporary_pid(entry.name) and entry.stat().st_size > 64 << 10]

    senders = [threading.Thread(target=send, args=(rid,)) for rid in records]
    for sender in senders:
        sender.start()
    deadline = time.monotonic() + 2 * PATIENCE
    while time.monotonic() < deadline and not all((drilled.path / dump_name(rid, 0)).exists() for rid in records):
        try:
            if under_way():
                break
        except FileNotFoundError:
            pass  # It got its final name.
    drilled.running.server.kill()
    for sender in senders:
        sender.join()
    return under_way()
