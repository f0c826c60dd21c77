# SPDX-License-Identifier: Apache-2.0
"""What is told of an output directory's extractor: from its lock, its status and its service, in a line for people."""

from __future__ import annotations

import types

import pytest
from test_manifest import IDENTITY, RUN, append, claimed, entry

import hs_manifest as hm
import hs_progress


@pytest.fixture
def out(tmp_path):
    return claimed(tmp_path / "host")


def write_status(out, state, **more):
    status = {"state": state, "records_done": 1204, "records_total": 37312, "tokens_done": 2_800_000, "tokens_total": 87_800_000}
    status.update(tok_s=18_400.0, eta_s=4620, bytes_free=3_100_000_000_000, updated_at="2026-01-31T12:00:00Z", **more)
    hm.write_json(str(out / hm.STATUS), status)


def test_progress_line(out):
    write_status(out, "running")
    lock = hm.Lock(str(out))
    found = hs_progress.observe(str(out))
    assert found["state"] == "running"
    assert found["line"] == ("1,204/37,312 records (3.2 %) · 2.8 M/87.8 M tokens · 18.4 k tok/s · ETA 1 h 17 m · 3.1 TB free")
    lock.close()


def test_absent(tmp_path):
    found = hs_progress.observe(str(tmp_path / "nowhere"))
    assert (found["state"], found["line"], found["done"], found["run"]) == ("absent", "absent", "", "")


def test_dead_says_since_when_and_what_to_do(out):
    append(out, entry(out, 0), entry(out, 1, source="b"))
    write_status(out, "running")
    found = hs_progress.observe(str(out), RUN)
    assert found["state"] == "dead"
    assert found["line"].startswith("dead since 2026-01-31T12:00:00Z · 2/37,312 records")
    assert "start it again" in found["line"]
    assert (found["done"], found["records_done"], found["tokens_done"], found["bytes"]) == ("0-1", 2, 10, 20)
    assert found["sources"] == {name: {"records": 1, "tokens": 5, "bytes": 10} for name in "ab"}
    assert found["identity"] == IDENTITY and found["provenance"] == {"host": "one"}


@pytest.mark.parametrize("state", ["done", "incomplete", "failed", "stopped"])
def test_ended(out, state):
    write_status(out, state, message="why", failed=[{"record": 3, "reason": "too long"}], failed_total=1)
    found = hs_progress.observe(str(out), RUN, "stopped")
    assert found["state"] == state and found["failures"] == [{"record": 3, "reason": "too long"}]
    assert f"1 failed · {state}" in found["line"] and found["line"].endswith(": why") == (state in ("incomplete", "failed"))


def test_the_service_tells_what_the_lock_cannot(out):
    write_status(out, "failed", message="of an earlier start")
    assert hs_progress.observe(str(out), RUN, "running")["state"] == "starting"
    assert hs_progress.observe(str(out), RUN, "running")["message"] == ""
    write_status(out, "done")
    assert hs_progress.observe(str(out), RUN, "failed")["state"] == "failed"
    write_status(out, "incomplete")
    assert hs_progress.observe(str(out), RUN, "failed")["state"] == "incomplete", "it ends with status 1"
    lock = hm.Lock(str(out))
    assert hs_progress.observe(str(out))["state"] == "starting", "an extractor that has not begun to work"
    lock.close()


@pytest.mark.parametrize("next_state, wanted", [(None, "done"), ("running", "running")])
def test_an_extractor_that_has_written_its_last_status_is_not_taken_for_one_that_starts(out, monkeypatch, next_state, wanted):
    """It holds the lock for an instant yet; who takes it next says so."""
    write_status(out, "done")
    lock, looks = hm.Lock(str(out)), []

    def pause(_seconds):
        looks.append(1)
        if len(looks) == 3:
            write_status(out, next_state) if next_state else lock.close()

    monkeypatch.setattr(hs_progress, "time", types.SimpleNamespace(monotonic=lambda: 0.0, sleep=pause))
    # Its service was asked before it ended.
    found = hs_progress.observe(str(out), RUN, "running")
    assert (found["state"], len(looks)) == (wanted, 3)
    if next_state:
        lock.close()


def test_numbers_for_people():
    assert [hs_progress.short(n) for n in (0, 312, 9999, 18_400, 2_800_000, 87.8e6)] == ["0", "312", "9,999", "18.4 k", "2.8 M", "87.8 M"]
    assert [hs_progress.size(n) for n in (12, 57_344, 5.03e12)] == ["12 B", "57.3 kB", "5.03 TB"]
    near = (999.7e9, 999.4e9, 999_700, 999, 1e15, 9.9951e15)
    assert [hs_progress.size(n) for n in near] == ["1 TB", "999 GB", "1 MB", "999 B", "1000 TB", "9995 TB"]
    assert [hs_progress.duration(n) for n in (12, 185, 4620)] == ["12 s", "3 m 05 s", "1 h 17 m"]


def test_what_a_running_extractor_waits_for_stands_in_its_line():
    status = {"state": "running", "records_done": 1, "records_total": 2, "eta_s": 5, "message": "no server at URL for 23 s"}
    line = hs_progress.progress_line(status)
    assert "no server at URL for 23 s" in line and "ETA" not in line
