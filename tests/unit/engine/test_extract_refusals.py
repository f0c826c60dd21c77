# SPDX-License-Identifier: Apache-2.0
"""What the extractor refuses, what it retries, and what it then says."""

from __future__ import annotations

import asyncio
import datetime
import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from extractor_process import RECORDS
from fake_server import FakeServer
from small_tmpfs import fill, small_tmpfs

import hs_manifest
import hs_progress
from hidden_state_bridge import dumps, extract
from hidden_state_bridge.client import ServerAway
from hidden_state_bridge.config import read_config
from hidden_state_bridge.errors import ConfigError
from hidden_state_bridge.extract import Extraction

NOBODY = 65534
BAD_DUMPS = {
    "ids": r"has token id \d+ in row \d+, \d+ was sent \(1 differ\)",
    "nan": r"layer_3 has nan in row \d+, column 2",
    "inf": r"final_post_norm has inf in row 0, column 5",
    "layer": r"holds .*layer_5.*, expected .*layer_4.*SGLANG_HS_DUMP_LAYERS",
    "width": r"layer_1 is float32 \[\d+, 7\], expected float32 \[\d+, 8\]",
    "dtype": r"layer_1 is bfloat16 \[\d+, 8\], expected float32",
    "short": r"ends at token \d+, \d+ were sent",
    "hole": r"has no whole dump of hsb-",
    "none": r"is the server patched and started with SGLANG_HS_DUMP_DIR=",
    "marker": r"the capture gave it up: prefix cache hit; start with --disable-radix-cache",
}


@pytest.mark.parametrize("fault", sorted(BAD_DUMPS))
def test_a_bad_dump_fails_its_record_after_a_second_try_and_no_other(site, fault):
    import re

    victim = int(site.dataset.lengths[:10].argmax())
    ids = site.dataset.record(victim).input_ids.tolist()
    with FakeServer(site.dumps, lambda rid, input_ids, tries: fault if input_ids == ids else "ok") as server:
        site.run(1, url=server.url, share="0-9")
        assert sum(f"-{victim}-" in rid for rid in server.requests) == 2
    status = site.status()
    assert status["state"] == "incomplete" and status["records_done"] == 9
    [failure] = status["failed"]
    assert status["failed_records"] == str(failure["record"])
    assert failure["record"] == victim and re.search(BAD_DUMPS[fault], failure["reason"]), failure
    record = site.dataset.record(victim)
    assert (failure["source"], failure["line"]) == (record.source, record.line)
    named = f"1 of 10 records failed, the first is record {victim} ({record.source} line {record.line}): "
    assert status["message"] == f"{named}{failure['reason']}; the next run tries them again"
    assert {entry["id"] for entry in site.lines()} == set(range(10)) - {victim}
    assert os.listdir(site.dumps) == [] and not list(site.output.rglob("*.tmp-*"))


@pytest.mark.parametrize("fault", ["marker", "nan", "500", "429"])
def test_a_fault_that_passes_is_retried_with_another_rid(site, fault):
    with FakeServer(site.dumps, lambda rid, input_ids, tries: "ok" if tries else fault) as server:
        site.run(url=server.url, share="0-4")
    assert len(set(server.requests)) == len(server.requests) == 10
    assert site.status()["failed"] == []


def test_a_record_that_the_server_will_never_take_fails_at_once(site):
    longest = int(site.dataset.lengths.argmax())
    ids = site.dataset.record(longest).input_ids.tolist()
    with FakeServer(site.dumps, lambda rid, input_ids, tries: "400" if input_ids == ids else "ok") as server:
        site.run(1, url=server.url)
        assert len(server.requests) == RECORDS
    [failure] = site.status()["failed"]
    assert failure["record"] == longest and "HTTP 400" in failure["reason"] and "asked to answer 400" in failure["reason"]


def test_an_error_of_the_server_fails_the_record_after_the_retries(site):
    ids = site.dataset.record(2).input_ids.tolist()
    with FakeServer(site.dumps, lambda rid, input_ids, tries: "500" if input_ids == ids else "ok") as server:
        site.run(1, url=server.url, share="0-3")
        assert sum("-2-" in rid[16:] for rid in server.requests) == site.config["retries"] + 1
    assert "HTTP 500" in site.status()["failed"][0]["reason"]


def test_failed_records_are_tried_again_by_the_next_start(site):
    with FakeServer(site.dumps, lambda rid, input_ids, tries: "400" if tries == 0 and len(input_ids) > 30 else "ok") as server:
        site.run(1, url=server.url)
        site.run(url=server.url)
    site.check_complete()


def test_no_server_ends_with_the_url_and_the_remedy(site):
    out = site.run(1, url="http://127.0.0.1:9", server_wait=1)
    status = site.status()
    assert status["state"] == "failed" and status["records_done"] == 0 and status["failed"] == []
    assert "no server at http://127.0.0.1:9 for 1 s" in status["message"]
    assert "see the server's log, then run extract.yml again" in status["message"]
    assert status["message"] in out


def test_a_server_that_is_away_for_a_while_is_waited_for(site):
    with FakeServer(site.dumps, lambda rid, input_ids, tries: "503" if tries < 2 else "ok") as server:
        site.run(url=server.url, server_wait=30, share="0-5")
    assert site.status()["state"] == "done" and site.status()["message"] == ""


def test_any_number_of_tries_goes_to_a_server_that_is_away(site, monkeypatch):
    extraction, left = Extraction(read_config(site.config)), iter(range(1500))
    extraction.progress, rids = SimpleNamespace(generation=2), []

    async def once(_record, rid):
        rids.append(rid)
        if next(left, None) is not None:
            raise ServerAway("HTTP 503")

    async def pause(_seconds):
        pass

    monkeypatch.setattr(extraction, "_once", once)
    monkeypatch.setattr(extract.asyncio, "sleep", pause)
    with ThreadPoolExecutor(1) as extraction._pool:
        assert asyncio.run(extraction._attempts(SimpleNamespace(index=7))) == ""
    assert len(set(rids)) == len(rids) == 1501 and rids[-1] == f"{extraction.config.rid_stem}7-2_1500"


def test_the_time_to_end_ends_the_wait_for_a_server(site, capsys, monkeypatch):
    until = "2026-01-31T12:00:00+00:00"
    moment = datetime.datetime.fromisoformat(until).timestamp()
    with FakeServer(site.dumps, lambda *_: "503") as server:
        # It has come once the server was asked.
        clock = SimpleNamespace(time=lambda: moment + (60 if server.requests else -60), monotonic=extract.time.monotonic)
        monkeypatch.setattr(extract, "time", clock)
        assert extract.run_service(read_config({**site.config, "url": server.url, "server_wait": 600, "until": until})) == 0
        assert server.requests
    assert f"stopping: it is {until}; what is in flight is finished" in capsys.readouterr().out
    assert site.status()["state"] == "stopped"


def test_files_of_another_format_are_refused(site):
    with FakeServer(site.dumps) as server:
        site.run(url=server.url, share="0-1")
        out = site.run(2, url=server.url, share="0-3", format="safetensors")
    assert "holds files of the format specforge, and this run writes safetensors" in out


def test_many_failures_in_a_row_stop_the_run(site):
    with FakeServer(site.dumps, lambda *_: "none") as server:
        site.run(1, url=server.url, dump_timeout=0.1)
        assert len(server.requests) < RECORDS
    assert "8 records in a row failed" in site.status()["message"]


@pytest.mark.parametrize(("status", "text"), [("401", "api_key_file"), ("404", "is it the URL of an SGLang server?")])
def test_a_wrong_url_or_key_stops_the_run(site, status, text):
    with FakeServer(site.dumps, lambda *_: status) as server:
        site.run(2, url=server.url)
    assert text in site.status()["message"]


def test_an_answer_that_does_not_come_is_an_error_of_the_server(site):
    with FakeServer(site.dumps, delay=30) as server:
        site.run(1, url=server.url, request_timeout=0.2, retries=1, share="0")
    assert "no answer from http" in site.status()["failed"][0]["reason"]


def test_another_identity_in_the_directory_is_refused_with_both_shown(site):
    with FakeServer(site.dumps) as server:
        site.run(url=server.url, share="0-1")
        before = {path: path.read_bytes() for path in site.output.rglob("*") if path.is_file()}
        identity = {**site.config["identity"], "weights": "other-weights"}
        out = site.run(2, url=server.url, identity=identity)
    assert "holds another run" in out and '"weights":"w"' in out and '"weights":"other-weights"' in out
    assert {path: path.read_bytes() for path in site.output.rglob("*") if path.is_file()} == before


def test_a_second_extractor_is_refused_and_does_no_harm(site):
    with FakeServer(site.dumps, delay=1) as server:
        first = site.start(url=server.url)
        site.wait_for_lines(1)
        log, site.log = site.log, site.directory / "second"
        out = site.run(2, url=server.url)
        site.log = log
        assert "is locked by another extractor" in out
        assert site.status()["pid"] == first.pid
        site.kill(first, signal.SIGTERM)
        server.delay = 0
        site.run(url=server.url)
    site.check_complete()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("missing", "No such file or directory; it is made by the patched server: start that with SGLANG_HS_DUMP_DIR="),
        ("link", "is a link or no directory"),
        ("open", "can be written by others"),
        ("foreign", "run server and extractor as one user"),
    ],
)
def test_a_dump_directory_that_cannot_be_trusted_is_refused(site, change, text):
    if change == "missing":
        site.dumps.rmdir()
    elif change == "link":
        target = site.directory / "elsewhere"
        target.mkdir(mode=0o700)
        site.dumps.rmdir()
        site.dumps.symlink_to(target)
    elif change == "open":
        site.dumps.chmod(0o777)
    elif os.geteuid() == 0:
        os.chown(site.dumps, NOBODY, NOBODY)
    else:
        site.config["dump_dir"] = "/"
    site.run(2)
    assert text in site.status()["message"] and site.config["dump_dir"] in site.status()["message"]
    if change == "link":
        site.dumps.unlink()


def test_a_dump_directory_that_is_not_writable_is_refused(site):
    site.dumps.chmod(0o500)
    if os.geteuid() == 0:
        os.chown(site.dumps, NOBODY, NOBODY)
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        # Nothing is read-only to root: look as another user.
        if os.geteuid() == 0:
            os.setuid(NOBODY)
        try:
            dumps.check_directory(str(site.dumps))
            os.write(writer, b"accepted")
        except ConfigError as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    os.close(writer)
    assert os.read(reader, 1000).decode() == f"dump directory {site.dumps} is not writable; run: chmod 700 {site.dumps}"
    os.close(reader)
    if os.geteuid() == 0:
        os.chown(site.dumps, 0, 0)
    site.dumps.chmod(0o700)


def test_a_data_set_with_another_content_is_refused(site):
    with FakeServer(site.dumps) as server:
        tokens = os.path.join(site.dataset.path, "tokens.npy")
        with open(tokens, "r+b") as stream:
            stream.seek(-1, 2)
            stream.write(b"\x7f")
        site.run(2, url=server.url)
        assert server.requests == []
    message = site.status()["message"]
    assert f"{tokens} has another hash than meta.json says" in message and "stage the data set again" in message


def test_another_data_set_than_the_runs_is_refused(site):
    identity = {**site.config["identity"], "dataset": "0" * 64}
    site.run(2, identity=identity)
    assert "stage the data set of this run" in site.status()["message"]


def test_a_share_outside_the_data_set_is_refused(site):
    site.run(2, share="0-40")
    assert "share has record 40, and the data set ends at 39" in site.status()["message"]


def test_too_little_free_space_is_refused_at_the_start(site):
    site.run(2, min_free_bytes=1 << 60)
    message = site.status()["message"]
    assert f"the file system of {site.output} has" in message and "min_free_bytes" in message
    assert "make room and start again" in message


def test_what_is_in_flight_counts_with_all_its_formats(site, monkeypatch):
    config = read_config({**site.config, "format": ["specforge", "safetensors"], "min_free_bytes": 1 << 20})
    extraction = Extraction(config)
    extraction.dataset, extraction._capacity = site.dataset, 1 << 40
    output = [int(length) * config.output_bytes_per_token for length in site.dataset.lengths]
    monkeypatch.setattr(extract, "free_bytes", lambda _path: config.min_free_bytes + sum(output[:6]) + 1)

    async def admitted():
        return [record for record in range(len(output)) if not extraction.stopping and await extraction._admit(record)]

    assert asyncio.run(admitted()) == list(range(6))
    assert f"{hs_progress.size(sum(output[:7]))} that are in flight or next" in str(extraction.fatal)


def test_space_that_runs_out_stops_the_run_which_goes_on_later(site, monkeypatch):
    def free(path):
        lines = (site.output / "manifest.jsonl").read_bytes().count(b"\n") if path == str(site.output) else 0
        return 1 << 30 if lines < 8 else 1 << 10

    monkeypatch.setattr(extract, "free_bytes", free)
    (site.output).mkdir(parents=True)
    with FakeServer(site.dumps) as server:
        hs_manifest.claim_directory(str(site.output), site.config["run"])
        (site.output / "manifest.jsonl").touch()
        config = read_config({**site.config, "url": server.url, "min_free_bytes": 1 << 20})
        assert extract.run_service(config) == 2
        assert 8 <= len(site.lines()) < RECORDS
        assert "make room and start again" in site.status()["message"]
        site.run(url=server.url)
    site.check_complete()


def test_a_full_output_file_system_names_the_record_and_loses_nothing(site, monkeypatch):
    from hidden_state_bridge import store

    real = store.store

    def full(target, record, rid, pieces):
        if record.index == 3:
            raise OSError(28, "No space left on device", "/out/data_3")
        return real(target, record, rid, pieces)

    monkeypatch.setattr(extract.store, "store", full)
    with FakeServer(site.dumps) as server:
        assert extract.run_service(read_config({**site.config, "url": server.url})) == 2
        message = site.status()["message"]
        assert "record 3 could not be stored: [Errno 28] No space left on device: '/out/data_3'" in message
        monkeypatch.undo()
        site.run(url=server.url)
    site.check_complete()


@pytest.mark.parametrize("when", ["before it starts", "as it starts"])
def test_an_output_file_system_without_a_byte_left_is_said_and_loses_nothing(site, when, monkeypatch, capsys):
    from hidden_state_bridge.__main__ import main

    with FakeServer(site.dumps) as server, small_tmpfs(site.output.parent, "2m"):
        site.run(url=server.url, share="0-4")
        site.config_file.write_text(json.dumps({**site.config, "url": server.url}))
        filler, planned = site.output.parent / "filler", extract.Extraction._need_space
        if when == "before it starts":
            fill(filler)
        monkeypatch.setattr(extract.Extraction, "_need_space", lambda self: planned(self) or fill(filler))
        assert main(["extract", "--config", str(site.config_file)]) == 2
        assert "No space left on device" in capsys.readouterr().err
        monkeypatch.undo()
        filler.unlink()
        site.run(url=server.url)
        site.check_complete()


def test_a_manifest_that_cannot_be_written_stops_before_the_next_line(site, monkeypatch):
    calls = []

    def append(self, entries):
        calls.append(len(entries))
        os.write(self._handle, json.dumps(entries[0]).encode()[:30])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(hs_manifest.ManifestWriter, "append", append)
    with FakeServer(site.dumps) as server:
        assert extract.run_service(read_config({**site.config, "url": server.url})) == 2
        assert len(calls) == 1
        assert str(site.output / "manifest.jsonl") in site.status()["message"]
        monkeypatch.undo()
        out = site.run(url=server.url)
    assert "mended the manifest: 1 bad lines" in out
    site.check_complete()
