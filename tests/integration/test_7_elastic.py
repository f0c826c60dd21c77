# SPDX-License-Identifier: GPL-3.0-or-later
"""Hosts that fail and hosts that join: every record once, on real servers."""

from __future__ import annotations

import collections
import json
import os
import pathlib
import signal
import tempfile

import pytest

from conftest import ENGINE, drill
from fleet import Fleet, failed

HOSTS = "abc"
# Enough for the others to be at work when a host is found dead: whoever is through by then takes nothing over.
PILOT = 300
RECORDS_A_SOURCE = 60
SOURCES = 8

pytestmark = drill


@pytest.fixture(scope="module")
def fleet():
    # A socket of supervisor's lies in there, and its path may not be long.
    fleet = Fleet(pathlib.Path(tempfile.mkdtemp(prefix="hsb-")), ENGINE, RECORDS_A_SOURCE)
    for name in HOSTS:
        fleet.join(name)
    yield fleet
    fleet.close()


def records(fleet: Fleet, output: str = "out") -> collections.Counter:
    return collections.Counter(entry["id"] for name in fleet.hosts for entry in fleet.manifest(name, output))


def test_what_a_host_leaves_that_dies_is_done_by_the_others_in_the_same_run(fleet):
    running = fleet.start("extract.yml", extraction_max_records=PILOT)
    fleet.wait_for_records("b", 3)
    fleet.kill("b")
    output = fleet.finish(running)
    assert running.returncode != 0
    assert failed(output) == {"b"}
    assert "records (" in output and "over from b" in output
    assert set(records(fleet).values()) == {1} and len(records(fleet)) == PILOT
    totals = fleet.report()["totals"]
    assert (totals["records"], totals["twice"], totals["complete"]) == (PILOT, 0, True)
    assert {row["host"] for row in fleet.report()["hosts"] if row["records"]} == set(HOSTS)


def test_a_host_that_joins_takes_its_part_and_nothing_is_done_again(fleet):
    before = {name: fleet.manifest(name) for name in HOSTS}
    fleet.join("d")
    running = fleet.start("extract.yml")
    output = fleet.finish(running)
    assert running.returncode == 0 and failed(output) == set()
    assert set(records(fleet).values()) == {1} and len(records(fleet)) == RECORDS_A_SOURCE * SOURCES
    tokens = {}
    for name in fleet.hosts:
        lines = fleet.manifest(name)
        assert lines[: len(before.get(name, []))] == before.get(name, [])
        tokens[name] = sum(entry["tokens"] for entry in lines[len(before.get(name, [])) :])
    mean = sum(tokens.values()) / len(tokens)
    assert all(abs(part / mean - 1) < 0.05 for part in tokens.values()), tokens


def test_a_stop_on_request_brings_the_servers_back_and_the_next_run_goes_on(fleet):
    again, total = {"extraction_output_dir": str(fleet.directory / "again")}, RECORDS_A_SOURCE * SOURCES
    running = fleet.start("extract.yml", **again)
    fleet.wait_for_records("a", 2, "again")
    os.killpg(running.pid, signal.SIGKILL)
    running.wait()
    stopping = fleet.start("extract.yml", **again, extraction_state="stopped")
    output = fleet.finish(stopping)
    assert stopping.returncode == 0, output
    half = records(fleet, "again")
    assert 0 < len(half) < total, "the stop came too late to prove anything"
    for name in fleet.hosts:
        status = fleet.directory / "again" / name / "status.json"
        assert not status.exists() or json.loads(status.read_text())["state"] in ("stopped", "done")
        assert not fleet.hosts[name].server_pids(), "before the run no server was up"
    running = fleet.start("extract.yml", **again)
    fleet.finish(running)
    assert running.returncode == 0
    assert set(records(fleet, "again").values()) == {1} and len(records(fleet, "again")) == total
