# SPDX-License-Identifier: GPL-3.0-or-later
"""The laptop is closed while real extractors are at work on a real server: the host finishes, and serves as before."""

from __future__ import annotations

import datetime
import json
import os
import pathlib
import signal
import time

import pytest

from conftest import drill

pytestmark = drill
PATIENCE = 600
# The host gives a play that long, which looks every second, on a machine that does other things too.
AFTER = 20


def started_with(site) -> dict:
    """What the server's main process was started with, as /proc shows it."""
    proc = pathlib.Path(f"/proc/{site.server_pids()[0]}")
    return {"arguments": (proc / "cmdline").read_bytes(), "environment": sorted((proc / "environ").read_bytes().split(b"\0"))}


def read(path: pathlib.Path) -> dict:
    return json.loads(path.read_text()) if path.exists() else {}


def wait_for(what, seconds: float = PATIENCE):
    deadline = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


class Alone:
    """A run whose controller goes away. `extractor` is stopped (SIGSTOP) after its first record, so that it is surely at work then."""

    def __init__(self, site, name: str, **extra: object) -> None:
        self.site, self.output = site, site.directory / name
        self.extra = {"extraction_output_dir": str(self.output), "extraction_unattended_after": AFTER, "extraction_concurrency": 1, **extra}
        began = time.monotonic()
        with site.start("extract.yml", extra=self.extra) as running:
            self.extractor = self._first_record(running)
            os.kill(self.extractor, signal.SIGSTOP)
            # How long a run takes on this machine until its extractor works.
            self.seconds = time.monotonic() - began
            looked = next(line for line in running.stdout if " records (" in line)
            os.killpg(running.pid, signal.SIGKILL)
        print(looked)

    def _first_record(self, running) -> int:
        wait_for(lambda: self.site.manifest(self.output) or running.poll() is not None)
        assert running.poll() is None, running.stdout.read()
        return self.status()["pid"]

    def status(self) -> dict:
        return read(self.output / "one" / "status.json")

    def journal(self) -> dict:
        return read(self.site.directory / "state/server/sglang/returned.json")

    def go_on(self) -> dict:
        """Let the extractor work again; returns what the host did once that is done."""
        os.kill(self.extractor, signal.SIGCONT)
        wait_for(lambda: self.journal().get("state") == "returned")
        return self.journal()


@pytest.fixture(scope="module")
def before(site):
    site.play("serve.yml")
    return started_with(site)


@pytest.fixture(scope="module")
def pace():
    """Seconds until an extractor works, filled by the first run."""
    return {"seconds": 150.0}


def test_the_host_finishes_its_share_and_serves_as_before(site, before, pace):
    run = Alone(site, "alone")
    pace["seconds"] = run.seconds
    time.sleep(AFTER + 10)
    assert b"SGLANG_HS_DUMP_DIR" in b"".join(started_with(site)["environment"]), "the extractor is at work"
    assert run.journal() == {}
    at = run.go_on()["at"]
    assert run.status()["state"] == "done" and len(site.manifest(run.output)) == site.packed_meta()["records"]
    assert started_with(site) == before and site.serving() and site.generate([5, 6, 7], 4)
    pids = site.server_pids()
    assert f"returned to serving by itself at {at}" in site.play("status.yml", extra=run.extra)
    # Nothing is left to do, so the next run leaves the server alone.
    site.play("extract.yml", extra=run.extra)
    assert site.server_pids() == pids


def test_a_time_at_which_it_ends_and_the_next_run_goes_on(site, before, pace):
    until = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(seconds=60 + 1.5 * pace["seconds"])
    run = Alone(site, "alone_until", extraction_until=until.isoformat())
    time.sleep(max(0.0, until.timestamp() - time.time()))
    run.go_on()
    half = site.manifest(run.output)
    assert run.status()["state"] == "stopped" and 0 < len(half) < site.packed_meta()["records"]
    assert started_with(site) == before and site.serving()
    # A play that is attached does it itself: nothing by itself, and the host is as before.
    output = site.play("extract.yml", extra={**run.extra, "extraction_until": ""})
    assert "hosts return to what they were by themselves" in " ".join(output.split())
    lines = site.manifest(run.output)
    assert lines[: len(half)] == half and sorted(line["id"] for line in lines) == list(range(site.packed_meta()["records"]))
    assert started_with(site) == before and run.journal() == {}
