# SPDX-License-Identifier: GPL-3.0-or-later
"""The module extraction_info, as a module: arguments in, result out."""

from __future__ import annotations

import json
import os
import time

import pytest
import yaml
from ansible.module_utils.testing import patch_module_args

import hs_manifest as hm
import hs_progress
from ansible_collections.hidden_state.bridge.plugins.module_utils import service_query
from ansible_collections.hidden_state.bridge.plugins.module_utils.hs_capture.counters import Counters
from ansible_collections.hidden_state.bridge.plugins.module_utils.hs_capture.dumpfile import COUNTERS_NAME
from ansible_collections.hidden_state.bridge.plugins.modules import extraction_info

IDENTITY = {"dataset": "d", "weights": "w", "layers": [1, 3, 4], "final": "post_norm", "dtype": "float32"}


@pytest.fixture
def ask(capsys):
    def call(**arguments):
        with patch_module_args(arguments), pytest.raises(SystemExit):
            extraction_info.main()
        return json.loads(capsys.readouterr().out)

    return call


def test_nothing_there(ask, tmp_path):
    found = ask(output_dir=str(tmp_path / "host"), identity=IDENTITY)
    assert (found["state"], found["changed"], found["done"], found["conflict"]) == ("absent", False, "", "")
    assert found["run"] == hm.run_of(IDENTITY) and found["service"] == "unknown"


def test_a_stopped_run_and_another_identity(ask, tmp_path):
    out = str(tmp_path / "host")
    hm.claim_directory(out, hm.run_of(IDENTITY))
    hm.claim_run(out, IDENTITY, {"host": "one"})
    hm.write_json(f"{out}/{hm.STATUS}", {"state": "stopped", "message": "7 records are left"})
    found = ask(output_dir=out)
    assert (found["state"], found["run"], found["message"]) == ("stopped", hm.run_of(IDENTITY), "7 records are left")
    found = ask(output_dir=out, identity={**IDENTITY, "final": "both"})
    assert found["state"] == "failed" and "post_norm" in found["conflict"] and '"final":"both"' in found["conflict"]
    assert found["run"] == hm.run_of({**IDENTITY, "final": "both"})


@pytest.mark.parametrize("content", ["", '{"state": "runn'])
def test_a_status_that_a_loss_of_power_tore_is_of_an_extractor_that_died(ask, tmp_path, content):
    out = str(tmp_path / "host")
    hm.claim_directory(out, hm.run_of(IDENTITY))
    hm.claim_run(out, IDENTITY, {})
    (tmp_path / "host" / hm.STATUS).write_text(content)
    found = ask(output_dir=out)
    assert (found["state"], found["status"], found["failures"]) == ("dead", {}, [])
    assert "start it again and it goes on where it was" in found["message"]
    lock = hm.Lock(out)
    assert ask(output_dir=out)["state"] == "starting"
    lock.close()


def test_a_file_that_cannot_be_looked_at_is_an_error_of_the_host(ask, tmp_path, monkeypatch):
    out = str(tmp_path / "host")
    hm.claim_directory(out, hm.run_of(IDENTITY))
    hm.claim_run(out, IDENTITY, {})
    hm.write_lines(f"{out}/{hm.MANIFEST}", [{"id": 0, "source": "a", "line": 1, "file": "x/0", "bytes": 0, "sha256": "", "tokens": 1}])
    lstat = os.lstat

    def failing(path, **options):
        if str(path).endswith("x/0"):
            raise PermissionError(13, "Permission denied", path)
        return lstat(path, **options)

    monkeypatch.setattr(os, "lstat", failing)
    found = ask(output_dir=out)
    assert found["failed"] and f"Permission denied: '{out}/x/0'; see to " in found["msg"]


def test_lengths_and_pace_of_what_is_done(ask, tmp_path):
    out = str(tmp_path / "host")
    hm.claim_directory(out, hm.run_of(IDENTITY))
    hm.claim_run(out, IDENTITY, {})
    writer = hm.ManifestWriter(out)
    for number, tokens in enumerate([1, 255, 256, 257, 300]):
        (tmp_path / "host" / f"{number}").write_bytes(b"")
        entry = {"id": number, "source": "a", "line": 1, "file": f"{number}", "bytes": 0, "sha256": "", "tokens": tokens}
        # An earlier release did not say when.
        writer.append([entry if number == 4 else {**entry, "at": 1769860800 + 9 * number}])
    writer.close()
    found = ask(output_dir=out)
    assert found["lengths"] == [[1, 1], [256, 2], [512, 2]]
    assert found["pace"] == {"seconds": 10, "tokens": [[1769860800, 256], [1769860810, 256], [1769860820, 257]]}


@pytest.mark.parametrize("bins, seconds", [(200, 10), (201, 60), (1200, 60), (1201, 300), (20_000, 1800)])
def test_bins_are_few_and_of_several_hosts_add_up(bins, seconds):
    wanted = hs_progress.pace([(10 * number, 3) for number in range(bins)])
    assert wanted["seconds"] == seconds and sum(tokens for _start, tokens in wanted["tokens"]) == 3 * bins
    again = hs_progress.pace([tuple(pair) for pair in wanted["tokens"]], max(seconds, 300))
    assert again["seconds"] == max(seconds, 300) and all(start % again["seconds"] == 0 for start, _tokens in again["tokens"])
    assert sum(tokens for _start, tokens in again["tokens"]) == 3 * bins


def test_the_service_is_asked(ask, tmp_path, monkeypatch):
    asked = []

    def query(*arguments):
        asked.append(arguments)
        return {"state": "running"}

    monkeypatch.setattr(service_query, "query", query)
    found = ask(output_dir=str(tmp_path), name="extraction", manager="supervisor", state_dir="/state")
    assert asked == [("supervisor", "extraction", "/state")]
    assert (found["state"], found["service"]) == ("starting", "running")

    def refuse(*_):
        raise service_query.ServiceError("supervisor cannot be asked: start it")

    monkeypatch.setattr(service_query, "query", refuse)
    found = ask(output_dir=str(tmp_path), name="extraction")
    assert found["failed"] is True and found["msg"] == "supervisor cannot be asked: start it"


def test_a_damaged_file_of_ours_is_named(ask, tmp_path):
    (tmp_path / hm.RUN).write_text("{")
    found = ask(output_dir=str(tmp_path))
    assert found["failed"] is True and f"{tmp_path / hm.RUN} cannot be read" in found["msg"]


def test_the_counters_of_the_capture_are_told(ask, tmp_path):
    assert "capture" not in ask(output_dir=str(tmp_path))
    found = ask(output_dir=str(tmp_path), dump_dir=str(tmp_path))
    assert (found["capture"], found["capture_line"]) == ({}, "no capture has reported")
    (tmp_path / COUNTERS_NAME).write_text("{")
    assert ask(output_dir=str(tmp_path), dump_dir=str(tmp_path))["capture"] == {}
    counters = Counters()
    counters.add(forwards=3, requests=1204, tokens=2_800_000, bytes=161e9, ring_waits=2, ring_wait_seconds=75.2, drops=1)
    for age, end in ((0, "1 given up"), (100, "silent for 1 m 40 s: its server was stopped or hangs")):
        (tmp_path / COUNTERS_NAME).write_bytes(counters.report(updated=time.time() - age, directory_bytes=12.34e9))
        found = ask(output_dir=str(tmp_path), dump_dir=str(tmp_path))
        line = " ".join(found["capture_line"].split(" \xb7 "))
        assert "1,204 requests 2.8 M tokens 161 GB written" in line
        assert "12.3 GB waiting 2 waits for memory (1 m 15 s) 1 given up" in line
        assert line.endswith(end)
        assert found["capture"]["forwards"] == 3


def test_a_look_says_that_a_play_looks_on(ask, tmp_path):
    """It shortens the time for which a play holds the return off only where the extractor is at work."""
    out, attended = str(tmp_path / "host"), tmp_path / "attended"
    hm.claim_directory(out, hm.run_of(IDENTITY))
    ask(output_dir=out, attended=str(attended))
    assert not attended.exists(), "no return is asked for"
    attended.touch()

    def look(was, **more):
        os.utime(attended, (time.time() + was,) * 2)
        ask(output_dir=out, attended=str(attended), **more)
        return round(attended.stat().st_mtime - time.time(), -2)

    assert look(-900) == 0 and look(900) == 900 and look(0, attended_for=3600) == 3600
    assert look(-900, _ansible_check_mode=True) == -900
    lock = hm.Lock(out)
    assert look(900) == 0 and look(-900, attended_for=3600) == 0
    lock.close()


def test_records_that_failed_do_not_fail_the_task(ask, tmp_path):
    """Ansible takes a key `failed` for whether the task did, and a list that is not empty for yes."""
    out = str(tmp_path / "host")
    hm.claim_directory(out, hm.run_of(IDENTITY))
    hm.claim_run(out, IDENTITY, {})
    failure = {"record": 3, "reason": "HTTP 400", "source": "a", "line": 1}
    hm.write_json(f"{out}/{hm.STATUS}", {"state": "incomplete", "failed": [failure], "failed_total": 1})
    found = ask(output_dir=out, config=str(tmp_path / "config.json"), dump_dir=str(tmp_path))
    assert found["failures"] == [failure] and "failed" not in found and found["state"] == "incomplete"
    documented = yaml.safe_load(extraction_info.RETURN).keys()
    assert found.keys() - {"changed", "invocation"} == documented, "tests/gates/test_modules.py looks at what is documented"


def test_an_extractor_that_was_started_with_other_settings_is_told(ask, tmp_path):
    out, config, secret = tmp_path / "host", tmp_path / "config.json", tmp_path / "api_key"
    hm.claim_directory(str(out), hm.run_of(IDENTITY))
    hm.claim_run(str(out), IDENTITY, {})
    secret.touch()
    config.write_text(json.dumps({"run": hm.run_of(IDENTITY), "share": "0-5", "api_key_file": str(secret), "notify_url_file": None}))

    def look(changed, written=config, **status):
        hm.write_json(f"{out}/{hm.STATUS}", {"state": "running", "started_at": "2026-01-31T12:00:00Z", **status})
        for path in (config, secret):
            # Noon of that day, in seconds since the epoch.
            os.utime(path, (1769860800 + (changed if path == written else -60),) * 2)
        found = ask(output_dir=str(out), config=str(config))
        return found["share"], found["outdated"]

    assert look(5) == ("", False), "nobody is at work"
    lock = hm.Lock(str(out))
    for written in (config, secret):
        assert look(-5, written) == look(0.9, written) == ("0-5", False) and look(5, written) == ("0-5", True)
    assert look(-5, started_at=None) == look(-5, started_at="noon") == ("0-5", True), "who cannot say so is started again"
    secret.unlink()
    lock.close()
