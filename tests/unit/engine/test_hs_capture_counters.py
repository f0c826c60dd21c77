# SPDX-License-Identifier: Apache-2.0
"""capture.json: what it counts, and that whoever waits for a dump can tell from it whether one will come."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dumping
import pytest
from test_hs_capture_writer import HIDDEN, ROW, check, forward, settings

from hs_capture import counters, dumpfile, writer
from hs_capture.sheet import Piece


def test_counters_are_written_every_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reports: list[dict[str, Any]] = []
    encode = counters.Counters.report

    def report(self: counters.Counters, **present: Any) -> bytes:
        content = encode(self, **present)
        reports.append(json.loads(content))
        return content

    monkeypatch.setattr(counters.Counters, "report", report)
    to = dumping.make_writer(settings(tmp_path), HIDDEN)
    forward(to, ("hsb-a", 10), ("hsb-b", 20))
    assert to.drain(20)
    path = tmp_path / dumpfile.COUNTERS_NAME
    size = sum((tmp_path / f"hsb-{name}.0.safetensors").stat().st_size for name in "ab")
    settled = {"requests": 2, "queue": 0, "ring_used": 0, "directory_bytes": size}
    found = wait_for(path, lambda found: settled.items() <= found.items())
    expected = {
        "format": dumpfile.COUNTERS_FORMAT,
        "pid": os.getpid(),
        "forwards": 1,
        "pieces": 2,
        "tokens": 30,
        "bytes": size,
        "drops": 0,
        "ring_waits": 0,
        "directory_limit": 4 << 20,
    }
    assert expected.items() <= found.items()
    assert abs(found["updated"] - time.time()) < 60 > found["updated"] - found["started"]
    idle = wait_for(path, lambda later: later["updated"] >= found["updated"] + 2)
    assert idle["write_bytes_per_second"] == 0
    # A rate is that of the report in which the bytes rose: both dumps', or each its own.
    assert reports[0]["bytes"] == reports[0]["write_bytes_per_second"] == 0
    for before, after in zip(reports, reports[1:]):
        assert (after["write_bytes_per_second"] > 0) == (after["bytes"] > before["bytes"])


def wait_for(path: Path, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The first report that lies there of which `wanted` holds."""
    deadline = time.monotonic() + 60
    while not wanted(found := json.loads(path.read_text())):
        assert time.monotonic() < deadline, found
        time.sleep(0.05)
    return found


def test_what_waits_for_room_is_in_the_queue(tmp_path: Path) -> None:
    """Whoever reads the counters may not take a dump that is late for one that will never come."""
    to = dumping.make_writer(settings(tmp_path), HIDDEN, directory=45 * ROW, wait_seconds=120)
    rids = ["hsb-a", "hsb-b", "hsb-c"]
    for rid in rids:
        forward(to, (rid, 20))
    sent = time.time()
    found = wait_for(tmp_path / dumpfile.COUNTERS_NAME, lambda found: found["updated"] > sent and found["queue"] == 1)
    assert found["forwards"] == 3
    # Which of them waits is up to the threads that write.
    [late] = [rid for rid in rids if not (tmp_path / dumpfile.dump_name(rid, 0)).exists()]
    rids.remove(late)
    (tmp_path / dumpfile.dump_name(rids[0], 0)).unlink()
    assert to.drain(20)
    check(tmp_path, late, 20)


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
