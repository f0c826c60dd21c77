# SPDX-License-Identifier: Apache-2.0
"""From host memory to files: concurrency, want of memory and room, and a directory that is taken away or full."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import dumping
import pytest
import torch
from small_tmpfs import remount, small_tmpfs

from hs_capture import dumpfile, guards, writer
from hs_capture.counters import read_counters
from hs_capture.settings import Settings
from hs_capture.sheet import Piece

HIDDEN = 64
STATES = ("layer_1", "layer_3", "final_post_norm")
# Bytes of the data of a dump of one row.
ROW = 8 + len(STATES) * HIDDEN * 4


def settings(directory: Path) -> Settings:
    return Settings(str(directory), (1, 3), "post_norm", "hsb-")


def state(rid: str, name: str, rows: int) -> torch.Tensor:
    """Different for every request, tensor, row and column."""
    seed = sum(ord(character) * 31**place for place, character in enumerate(rid + name)) % 1009
    return seed + torch.arange(rows * HIDDEN, dtype=torch.float32).reshape(rows, HIDDEN) / 4096


def forward(to: writer.Writer, *requests: tuple[str, int], start: int = 0) -> None:
    """One forward of whole requests (rid, rows), with a row of another's between them."""
    pieces, first = [], 0
    for rid, rows in requests:
        pieces.append(Piece(rid, start, first, first + rows))
        first += rows + 1
    sheet = to.reserve(pieces)
    ids = torch.full((first,), -1, dtype=torch.int32)
    for piece in pieces:
        ids[piece.first : piece.last] = torch.arange(piece.tokens, dtype=torch.int32)
    sheet.copy_ids(ids)
    ids.zero_()
    for name in STATES:
        whole = torch.full((first, HIDDEN), float("nan"))
        for piece in pieces:
            whole[piece.first : piece.last] = state(piece.rid, name, piece.tokens)
        sheet.copy(name, whole)
        whole.zero_()
    to.submit(sheet)


def check(directory: Path, rid: str, rows: int, start: int = 0) -> None:
    metadata, tensors = dumpfile.read_dump(directory / dumpfile.dump_name(rid, start))
    assert metadata["tokens"] == str(rows)
    assert torch.equal(tensors[dumpfile.INPUT_IDS], torch.arange(rows))
    for name in STATES:
        assert torch.equal(tensors[name], state(rid, name, rows)), f"{rid}: {name}"


def marker(directory: Path, rid: str) -> dict[str, str]:
    return dumpfile.read_error(directory / dumpfile.error_name(rid))


def test_many_dumps_at_once_are_each_right(tmp_path: Path) -> None:
    """More than the ring and the directory hold at a time, while a reader checks them and gives them back."""
    rows = {f"hsb-{number}": 1 + number * 37 % 120 for number in range(300)}
    to = dumping.make_writer(settings(tmp_path), HIDDEN, ring=400 * ROW, directory=500 * ROW, wait_seconds=20)
    wrong: list[BaseException] = []

    def read() -> None:
        left = dict(rows)
        deadline = time.monotonic() + 60
        while left and time.monotonic() < deadline and not wrong:
            for rid in list(left):
                name = dumpfile.dump_name(rid, 0)
                if (tmp_path / name).exists():
                    try:
                        check(tmp_path, rid, left.pop(rid))
                    except BaseException as error:
                        wrong.append(error)
                    if len(left) % 3:
                        dumpfile.give_back(tmp_path, name)
                    else:
                        (tmp_path / name).unlink()
        if left:
            wrong.append(AssertionError(f"never came: {list(left)[:5]}"))

    reader = threading.Thread(target=read)
    reader.start()
    names = list(rows)
    for place in range(0, len(names), 2):
        forward(to, *((rid, rows[rid]) for rid in names[place : place + 2]))
    reader.join()
    assert not wrong, wrong
    assert to.drain(20)
    assert to.counters["requests"] == len(rows)
    assert to.counters["tokens"] == sum(rows.values())
    assert to.counters["drops"] == 0


def test_a_file_given_back_is_written_anew_and_cut(tmp_path: Path) -> None:
    to = dumping.make_writer(settings(tmp_path), HIDDEN)
    inodes = set()
    for rid, rows in (("hsb-a", 90), ("hsb-b", 7), ("hsb-c", 300)):
        forward(to, (rid, rows))
        assert to.drain(20)
        check(tmp_path, rid, rows)
        path = tmp_path / dumpfile.dump_name(rid, 0)
        found = path.stat()
        assert stat.S_IMODE(found.st_mode) == 0o600
        dumpfile.give_back(tmp_path, path.name)
        time.sleep(0.1)
        inodes.add(found.st_ino)
    assert len(inodes) == 1


def test_a_file_with_another_name_is_not_written_anew(tmp_path: Path) -> None:
    to = dumping.make_writer(settings(tmp_path), HIDDEN)
    forward(to, ("hsb-a", 9))
    assert to.drain(20)
    os.link(tmp_path / "hsb-a.0.safetensors", tmp_path / "kept")
    kept = (tmp_path / "kept").read_bytes()
    dumpfile.give_back(tmp_path, "hsb-a.0.safetensors")
    (tmp_path / ".spare-1").symlink_to(tmp_path / "kept")
    time.sleep(0.1)
    for rid in ("hsb-b", "hsb-c"):
        forward(to, (rid, 9))
        assert to.drain(20)
        check(tmp_path, rid, 9)
    assert (tmp_path / "kept").read_bytes() == kept


def test_files_given_back_do_not_stay(tmp_path: Path) -> None:
    to = dumping.make_writer(settings(tmp_path), HIDDEN)
    forward(to, ("hsb-a", 9))
    assert to.drain(20)
    dumpfile.give_back(tmp_path, "hsb-a.0.safetensors")
    deadline = time.monotonic() + 20
    while dumping.names(to, tmp_path) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert dumping.names(to, tmp_path) == []


def test_without_room_requests_are_given_up_and_the_forward_goes_on(tmp_path: Path) -> None:
    """No reader: the directory fills, then the ring; each waits once, and later requests not at all."""
    to = dumping.make_writer(settings(tmp_path), HIDDEN, ring=50 * ROW, directory=45 * ROW, wait_seconds=0.6)
    began = time.monotonic()
    given_up = 0
    for number in range(30):
        try:
            forward(to, (f"hsb-{number}", 20))
        except guards.NotCapturable as error:
            given_up += 1
            assert "see that the extractor runs" in error.remedy
            to.fail(f"hsb-{number}", error)
    assert to.drain(20)
    assert time.monotonic() - began < 6, "every request waited"
    whole = [name for name in dumping.names(to, tmp_path) if dumpfile.is_dump(name)]
    assert whole == ["hsb-0.0.safetensors", "hsb-1.0.safetensors"]
    assert "bytes of dumps wait in" in marker(tmp_path, "hsb-2")["reason"]
    assert to.counters["drops"] == 28
    assert to.counters["room_waits"] >= 1
    for name in whole:
        (tmp_path / name).unlink()
    forward(to, ("hsb-again", 20))
    assert to.drain(20)
    check(tmp_path, "hsb-again", 20)


def test_a_full_ring_is_an_error_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hang = threading.Event()
    write = dumpfile.write_all
    monkeypatch.setattr("hs_capture.spool.write_all", lambda *arguments: hang.wait(20) and write(*arguments))
    to = dumping.make_writer(settings(tmp_path), HIDDEN, ring=50 * ROW, wait_seconds=0.3)
    forward(to, ("hsb-a", 30))
    with pytest.raises(guards.NotCapturable, match="30 tokens found no room in the capture's host memory"):
        forward(to, ("hsb-b", 30))
    assert (to.counters["ring_waits"], 0.3 <= to.counters["ring_wait_seconds"] < 5) == (1, True)
    # Refused at once: one for what stalled before, one for what can never fit.
    with pytest.raises(guards.NotCapturable, match="30 tokens found no room"):
        forward(to, ("hsb-b", 30))
    with pytest.raises(guards.NotCapturable, match="raise SGLANG_HS_DUMP_MAX_BYTES"):
        forward(to, ("hsb-c", 60))
    hang.set()
    assert to.drain(20)
    forward(to, ("hsb-d", 30))
    assert dumping.names(to, tmp_path) == ["hsb-a.0.safetensors", "hsb-d.0.safetensors"]
    assert to.counters["ring_waits"] == 1


def test_pieces_after_a_failed_one_are_not_written(tmp_path: Path) -> None:
    to = dumping.make_writer(settings(tmp_path), HIDDEN)
    to.fail("hsb-a", guards.NotCapturable("a hole", "mend it"))
    forward(to, ("hsb-a", 5), start=5)
    assert dumping.names(to, tmp_path) == ["hsb-a.error.json"]
    # The rid may be used again, from its beginning.
    forward(to, ("hsb-a", 5))
    assert dumping.names(to, tmp_path) == ["hsb-a.0.safetensors", "hsb-a.error.json"]


def test_a_full_file_system_is_an_error_marker(tmp_path: Path) -> None:
    path = tmp_path / "small"
    with small_tmpfs(path, "256k"):
        to = dumping.make_writer(settings(path), HIDDEN, directory=1 << 30)
        # One after the other: while a dump that does not fit is being written, there is no room for any other.
        for rid, tokens in (("hsb-a", 100), ("hsb-b", 1000), ("hsb-c", 50)):
            forward(to, (rid, tokens))
            assert to.drain(20)
        assert dumping.names(to, path) == ["hsb-a.0.safetensors", "hsb-b.error.json", "hsb-c.0.safetensors"]
        assert "No space left" in marker(path, "hsb-b")["reason"]
        assert marker(path, "hsb-b")["remedy"] == f"make room in {path}"
        check(path, "hsb-a", 100)
        check(path, "hsb-c", 50)
        # What was given back makes room for what does not fit into it.
        dumpfile.give_back(path, "hsb-a.0.safetensors")
        dumpfile.give_back(path, "hsb-c.0.safetensors")
        time.sleep(0.1)
        forward(to, ("hsb-d", 250))
        assert to.drain(20)
        check(path, "hsb-d", 250)
        to.close()
        dumping.OPEN.remove(to)


def test_a_server_counts_what_waits_where_its_dumps_go(tmp_path: Path) -> None:
    """The dumps of a server before it are among the bytes that it lets wait."""
    path = tmp_path / "small"
    with small_tmpfs(path, "8m"):
        empty = usable(path)
        (path / "hsb-a.0.safetensors").write_bytes(bytes(5 << 20))
        assert usable(path) == empty
        # What is not a dump is nobody's to take away.
        (path / "other").write_bytes(bytes(1 << 20))
        assert empty - usable(path) == pytest.approx(0.9 * (1 << 20), abs=4096)


def usable(path: Path) -> int:
    """What a server that starts there lets wait."""
    arguments = {"chunked_prefill_size": 100, "device": "cpu"}
    to = writer.open_writer(settings(path), {}, HIDDEN, arguments.get)
    to.close()
    limit = read_counters(path)["directory_limit"]
    os.unlink(path / dumpfile.COUNTERS_NAME)
    return limit


def test_an_error_marker_waits_for_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Dumps that do not fit take all there is until they are given up."""
    path = tmp_path / "small"
    with small_tmpfs(path, "256k"):
        to = dumping.make_writer(settings(path), HIDDEN)
        with (path / "filler").open("wb") as filler, contextlib.suppress(OSError):
            while True:
                os.write(filler.fileno(), bytes(4096))
        to.fail("hsb-a", guards.NotCapturable("a hole", "mend it"))
        assert to.drain(20)
        assert "the error marker of hsb-a could not be written" in caplog.text
        monkeypatch.setattr(writer, "_MARKER_PAUSE", 0.2)
        to.fail("hsb-b", guards.NotCapturable("a hole", "mend it"))
        (path / "filler").unlink()
        assert dumping.names(to, path) == ["hsb-b.error.json"]
        assert to.counters["markers_lost"] == 1
        to.close()
        dumping.OPEN.remove(to)


def test_a_read_only_file_system_reaches_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "small"
    with small_tmpfs(path, "256k"):
        to = dumping.make_writer(settings(path), HIDDEN)
        remount(path, "ro")
        forward(to, ("hsb-a", 10))
        assert dumping.names(to, path) == []
        assert "hidden states of hsb-a are not dumped" in caplog.text
        assert "the error marker of hsb-a could not be written" in caplog.text
        assert (to.counters["drops"], to.counters["markers_lost"]) == (1, 1)
        remount(path, "rw")
        forward(to, ("hsb-b", 10))
        assert dumping.names(to, path) == ["hsb-b.0.safetensors"]
        to.close()
        dumping.OPEN.remove(to)


@pytest.mark.parametrize("how", ["removed", "moved"])
def test_a_directory_that_is_taken_away_is_made_again(tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "dumps"
    to = dumping.make_writer(settings(path), HIDDEN)
    if how == "removed":
        (path / dumpfile.COUNTERS_NAME).unlink()
        path.rmdir()
    else:
        path.rename(tmp_path / "moved")
    forward(to, ("hsb-a", 10))
    assert dumping.names(to, path) == ["hsb-a.error.json"]
    assert "was removed or replaced" in marker(path, "hsb-a")["reason"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    forward(to, ("hsb-b", 10))
    assert to.drain(20)
    check(path, "hsb-b", 10)
    assert "dumps that waited there are lost" in caplog.text
    assert not (tmp_path / "moved").exists() or os.listdir(tmp_path / "moved") == [dumpfile.COUNTERS_NAME]


def test_every_dump_that_went_along_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads have written when the directory is moved: the one that looks second finds a new one in its place."""
    path = tmp_path / "dumps"
    to = dumping.make_writer(settings(path), HIDDEN)
    written = threading.Barrier(2, action=lambda: path.rename(tmp_path / "moved"))
    write = to._spool._write

    def write_and_wait(*given: Any) -> None:
        write(*given)
        written.wait(20)

    monkeypatch.setattr(to._spool, "_write", write_and_wait)
    forward(to, ("hsb-a", 10), ("hsb-b", 10))
    assert dumping.names(to, path) == ["hsb-a.error.json", "hsb-b.error.json"]
    assert "was removed or replaced" in marker(path, "hsb-a")["reason"] == marker(path, "hsb-b")["reason"]
    assert to.counters["requests"] == 0


@pytest.mark.parametrize("kind", ["link", "file", "open"])
def test_a_directory_that_is_replaced_is_not_written_to(tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    path, aside = tmp_path / "dumps", tmp_path / "aside"
    to = dumping.make_writer(settings(path), HIDDEN)
    path.rename(aside)
    (tmp_path / "victim").mkdir(mode=0o700)
    if kind == "link":
        path.symlink_to(tmp_path / "victim")
    elif kind == "file":
        path.touch()
    else:
        path.mkdir()
        path.chmod(0o777)
    for rid in ("hsb-a", "hsb-b"):
        forward(to, (rid, 10))
    assert to.drain(20)
    assert list((tmp_path / "victim").iterdir()) == []
    assert os.listdir(aside) == [dumpfile.COUNTERS_NAME]
    assert not path.is_dir() or kind == "link" or list(path.iterdir()) == []
    assert to.counters["markers_lost"] == 2
    assert ("is open to other users" if kind == "open" else "is a link or a file") in caplog.text
    if path.is_dir() and kind == "open":
        path.rmdir()
    else:
        path.unlink()
    aside.rename(path)
    forward(to, ("hsb-c", 10))
    assert dumping.names(to, path) == ["hsb-c.0.safetensors"]


KILLED = """
import sys
sys.path[:0] = [{modules!r}, {tests!r}]
from pathlib import Path
import dumping
import test_hs_capture_writer as tests
to = dumping.make_writer(tests.settings(Path({directory!r})), tests.HIDDEN, ring=64 << 20, directory=1 << 30)
for number in range(10**6):
    tests.forward(to, (f"hsb-{{number}}", 4000))
    print(number, flush=True)
"""


def test_a_server_killed_while_it_writes_leaves_only_whole_dumps(tmp_path: Path) -> None:
    tests = Path(__file__).parent
    path = tmp_path / "dumps"
    script = KILLED.format(modules=str(Path(writer.__file__).parents[1]), tests=str(tests), directory=str(path))
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as server:
        deadline = time.monotonic() + 60
        temporary: list[str] = []
        while not temporary and time.monotonic() < deadline:
            temporary = [name for name in (os.listdir(path) if path.exists() else ()) if dumpfile.temporary_pid(name)]
            if len(list(path.glob("hsb-*.safetensors")) if path.exists() else ()) < 3:
                temporary = []
        server.send_signal(signal.SIGKILL)
    whole = [name for name in os.listdir(path) if dumpfile.is_dump(name)]
    assert len(whole) >= 3
    assert len({(path / name).stat().st_size for name in whole}) <= 2, "the rid's length aside, all are of one size"
    for name in sorted(whole, key=lambda name: (path / name).stat().st_mtime)[-8:]:
        check(path, name.split(".")[0], 4000)
    (path / ".spare-7").touch()
    dumping.make_writer(settings(path), HIDDEN)
    assert [name for name in os.listdir(path) if name.startswith(".")] == []
    assert sorted(name for name in os.listdir(path) if dumpfile.is_dump(name)) == sorted(whole)
