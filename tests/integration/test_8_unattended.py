# SPDX-License-Identifier: GPL-3.0-or-later
"""A host that no play looks on any more brings its server back by itself, as the end of a run does, and in no other case.

A stand-in serves, and this process holds the lock that an extractor at work holds. test_9_alone.py does the same with the real ones.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import time

import pytest

import hs_manifest
from conftest import drill
from stand_in_site import StandInSite

AFTER = 5
# Several looks of the host beyond the time that it gives a play.
LONG = AFTER + 5


class LeftSite(StandInSite):
    """A host that was told to bring its server back by itself."""

    def __init__(self, code: pathlib.Path) -> None:
        super().__init__(code)
        self.home = self.directory / "state" / "server" / "sglang"
        self.output = self.directory / "out" / "one"
        self.output.mkdir(parents=True)
        extraction = {"output_dir": str(self.output), "manager": "supervisor", "name": "hidden-state-extraction"}
        extraction["state_dir"] = str(self.directory / "state")
        self.variables.update(
            sglang_server_manager="auto",
            extraction_manager="supervisor",
            sglang_server_unattended={"after": AFTER, "extraction": extraction},
        )

    def attend(self) -> None:
        """What the look of a play at a working extractor leaves."""
        os.utime(self.home / "attended")

    def watch(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.attend()
            time.sleep(1)

    def journal(self) -> dict:
        path = self.home / "returned.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def wait_for(self, state: str, seconds: float = 60) -> dict:
        """Until the host says that it came to that state."""
        deadline = time.monotonic() + seconds
        while self.journal().get("state") != state:
            assert time.monotonic() < deadline, (self.journal(), self.log())
            time.sleep(0.02)
        return self.journal()

    def log(self) -> str:
        return (self.directory / "state/supervisor/log/hidden-state-return-sglang.log").read_text()

    def watchdog(self) -> int:
        """The process that brings the server back."""
        return int((self.directory / "state/services/hidden-state-return-sglang/pids").read_text().split()[-1])

    def supervisorctl(self, *words: str) -> None:
        """What an operator types on the host."""
        code, configuration = self.variables["sglang_server_code_dir"], self.directory / "state/supervisor/supervisord.conf"
        subprocess.run([f"{code}/supervisor/bin/supervisorctl", "-c", configuration, *words], check=True)

    def is_capturing(self) -> bool:
        return any(one.startswith(b"SGLANG_HS_DUMP_DIR=") for one in self.seen()["environment"])

    def is_over(self) -> bool:
        """Whether nothing of the order is left, and nobody works on it."""
        return not (self.home / "unattended.json").exists() and not pathlib.Path(f"/proc/{self.watchdog()}").exists()

    def wait_until_over(self, seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while not self.is_over():
            assert time.monotonic() < deadline, (self.journal(), self.log())
            time.sleep(0.1)


@pytest.fixture(scope="module")
def code(tmp_path_factory):
    return tmp_path_factory.mktemp("code")


@pytest.fixture
def site(code):
    site = LeftSite(code)
    yield site
    site.close()


@contextlib.contextmanager
def extractor(site):
    """An extractor at work, as far as a host sees it."""
    lock = hs_manifest.Lock(str(site.output))
    try:
        yield
    finally:
        lock.close()


def test_the_host_serves_again_once_the_extraction_has_ended_and_no_play_looks_on(site):
    site.start(site.command("--enable-mixed-chunk"))
    before = site.seen()
    with extractor(site):
        site.play("capture")
        site.attend()
        time.sleep(LONG)
        assert site.is_capturing(), "an extractor is at work"
        site.watch(2)
    # A play looks on: it verifies, or takes over what others left.
    site.watch(LONG)
    assert site.is_capturing() and site.journal() == {}
    at = site.wait_for("returned")["at"]
    assert site.seen() == before
    site.wait_until_over()
    assert not (site.home / "before.json").exists()
    assert f"returned to serving by itself at {at}" in site.run("playbooks/status.yml")

    # And the next run takes it, and gives it back as it was.
    site.play("capture")
    assert site.is_capturing() and "returned" not in site.journal()
    site.play("restored")
    assert site.seen() == before and site.journal() == {}


@drill
def test_nothing_is_done_by_itself_while_a_play_changes_the_server_and_nothing_after_it(site):
    site.ours()
    site.play("serving")
    before = site.seen()
    site.play("capture")
    # The order holds off for as long as the play may need, and no look shortened that.
    time.sleep(LONG)
    assert site.is_capturing()
    output = " ".join(site.run("playbooks/status.yml").split())
    assert (
        f"returns by itself once the extraction has ended and no play has looked on for {AFTER} s (a play is changing the server)" in output
    )
    site.play("restored")
    site.wait_until_over()
    assert site.journal() == {} and site.seen() == before
    time.sleep(LONG)
    assert site.seen() == before


@pytest.mark.parametrize("phase", ["returning", pytest.param("started", marks=drill)])
def test_a_crash_in_the_middle(site, phase):
    """While the server that captures, and is deaf to SIGTERM, is stopped; while the one that serves is loading."""
    site.start(site.command(), STAND_IN="ready=4", STAND_IN_CAPTURE="deaf")
    before = site.seen()
    site.play("capture")
    site.attend()
    site.wait_for(phase)
    first = site.watchdog()
    os.kill(first, signal.SIGKILL)
    site.wait_for("returned")
    assert site.seen() == before
    site.wait_until_over()
    assert site.watchdog() != first


@drill
def test_a_server_that_the_operator_stopped_stays_down(site):
    site.ours()
    site.play("serving")
    before = site.seen()
    site.play("capture")
    site.supervisorctl("stop", "sglang")
    site.attend()
    site.wait_for("left")
    time.sleep(LONG)
    assert site.pid() is None and site.is_over()
    assert "not returned by itself" in site.run("playbooks/status.yml")
    # Started by its operator it serves.
    site.supervisorctl("start", "sglang")
    deadline = time.monotonic() + 30
    while site.pid() is None and time.monotonic() < deadline:
        time.sleep(0.2)
    assert site.seen()["environment"] == before["environment"] and not site.is_capturing()


@drill
def test_a_server_that_did_not_run_before_is_stopped_and_taken_away(site):
    site.ours()
    site.play("capture")
    site.attend()
    assert site.wait_for("returned")["to"] == "absent"
    assert site.pid() is None
    assert not list((site.directory / "state").glob("supervisor/*/sglang.conf")) and not (site.directory / "state/services/sglang").exists()
    assert "returned to absent by itself" in site.run("playbooks/status.yml")


@drill
def test_a_server_that_does_not_come_back_is_told_and_the_next_play_mends_it(site):
    site.variables["sglang_server_health_timeout"] = 4
    site.ours()
    site.play("serving")
    before = site.seen()
    site.play("capture")
    (site.model / "config.json").rename(site.directory / "config.json")
    site.attend()
    assert "not ready 4 s after its start" in site.wait_for("failed")["why"]
    (site.directory / "config.json").rename(site.model / "config.json")
    assert "could not return to serving by itself" in site.run("playbooks/status.yml")
    site.play("restored")
    assert site.seen() == before
