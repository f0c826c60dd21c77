# SPDX-License-Identifier: Apache-2.0
"""capture.json: what it counts, and that whoever waits for a dump can tell from it whether one will come."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import dumping
import pytest
from test_hs_capture_writer import HIDDEN, ROW, check, forward, settings

from hs_capture import dumpfile, writer
from hs_capture.sheet import Piece


def test_counters_are_written_every_second(tmp_path: Path) -> None:
    to = dumping.make_writer(settings(tmp_path), HIDDEN)
    forward(to, ("hsb-a", 10), ("hsb-b", 20))
    path = tmp_path / dumpfile.COUNTERS_NAME
    deadline = time.monotonic() + 20
    while json.loads(path.read_text())["requests"] < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    found = json.loads(path.read_text())
    size = sum((tmp_path / f"hsb-{name}.0.safetensors").stat().st_size for name in "ab")
    expected = {
        "format": dumpfile.COUNTERS_FORMAT,
        "pid": os.getpid(),
        "forwards": 1,
        "requests": 2,
        "pieces": 2,
        "tokens": 30,
        "bytes": size,
    }
    assert expected.items() <= found.items()
    assert (found["drops"], found["ring_waits"], found["queue"], found["ring_used"]) == (0, 0, 0, 0)
    assert found["directory_bytes"] == size
    assert found["directory_limit"] == 4 << 20
    assert found["write_bytes_per_second"] > 0
    assert abs(found["updated"] - time.time()) < 60 > found["updated"] - found["started"]
    while json.loads(path.read_text())["updated"] < found["updated"] + 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    idle = json.loads(path.read_text())
    assert idle["updated"] >= found["updated"] + 2
    assert idle["write_bytes_per_second"] == 0


def test_what_waits_for_room_is_in_the_queue(tmp_path: Path) -> None:
    """Whoever reads the counters may not take a dump that is late for one that will never come."""
    to = dumping.make_writer(settings(tmp_path), HIDDEN, directory=45 * ROW, wait_seconds=20)
    for rid in ("hsb-a", "hsb-b", "hsb-c"):
        forward(to, (rid, 20))
    path = tmp_path / dumpfile.COUNTERS_NAME
    sent, deadline = time.time(), time.monotonic() + 20
    while json.loads(path.read_text())["updated"] <= sent and time.monotonic() < deadline:
        time.sleep(0.05)
    found = json.loads(path.read_text())
    assert (found["forwards"], found["queue"]) == (3, 1)
    (tmp_path / "hsb-a.0.safetensors").unlink()
    assert to.drain(20)
    check(tmp_path, "hsb-c", 20)


def test_a_forward_that_does_not_end_stays_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the next one nothing else tells of it: there is neither a dump nor an error marker."""
    monkeypatch.setattr(writer, "_REPORT_SECONDS", 3600)
    to = dumping.make_writer(settings(tmp_path), HIDDEN)
    path = tmp_path / dumpfile.COUNTERS_NAME

    def opened() -> list[str]:
        to._report()
        return json.loads(path.read_text())["open"]

    forward(to, ("hsb-a", 2))
    assert opened() == []
    to.reserve([Piece("hsb-b", 0, 0, 2), Piece("hsb-c", 0, 2, 5)])
    assert opened() == ["hsb-b", "hsb-c"]
    forward(to, ("hsb-d", 2))
    assert opened() == []
    assert dumping.names(to, tmp_path) == ["hsb-a.0.safetensors", "hsb-b.error.json", "hsb-c.error.json", "hsb-d.0.safetensors"]
