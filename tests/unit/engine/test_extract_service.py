# SPDX-License-Identifier: Apache-2.0
"""The extractor as a process against the stand-in server: the path of a record, resume, and stops."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import stat
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from extractor_process import RECORDS
from fake_server import FINAL, LAYERS, FakeServer, expected_state

import hs_manifest
import hs_progress
from hidden_state_bridge import dumps, extract
from hidden_state_bridge.config import read_config
from hidden_state_bridge.extract import Extraction
from hidden_state_bridge.verify import verify


def test_specforge_files_hold_just_what_the_server_captured(site):
    with FakeServer(site.dumps) as server:
        out = site.run(url=server.url)
    site.check_complete()
    assert "40/40 records (100.0 %)" in out
    assert server.most_in_flight <= site.config["concurrency"]
    for entry in site.lines():
        record = site.dataset.record(entry["id"])
        path = site.output / entry["file"]
        assert entry["file"] == f"specforge/rows_0-2000/data_{entry['id']}.ckpt"
        origin = (entry["source"], entry["source_file"], entry["line"], entry["tokens"])
        assert origin == (record.source, record.file, record.line, len(record.input_ids))
        assert (entry["bytes"], entry["sglang_version"]) == (path.stat().st_size, "0.5.20")
        assert entry["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
        data = torch.load(path, weights_only=True, mmap=True)
        assert list(data) == ["input_ids", "loss_mask", "aux_hidden_state", "hidden_state"]
        ids = record.input_ids.tolist()
        assert data["input_ids"].dtype == data["loss_mask"].dtype == torch.int64
        assert data["input_ids"].tolist() == ids
        assert data["loss_mask"].tolist() == record.loss_mask.tolist()
        aux = torch.cat([expected_state(ids, layer) for layer in LAYERS], dim=-1)[None]
        assert torch.equal(data["aux_hidden_state"], aux)
        assert torch.equal(data["hidden_state"], expected_state(ids, FINAL)[None])


def test_files_are_private_and_a_group_opens_them(site):
    with FakeServer(site.dumps) as server:
        site.run(url=server.url)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in site.output.rglob("*")}
    assert stat.S_IMODE(site.output.stat().st_mode) == 0o700
    assert modes == {0o700, 0o600}
    import grp

    site.output = site.directory / "out" / "shared"
    with FakeServer(site.dumps) as server:
        site.run(url=server.url, output_dir=str(site.output), group=grp.getgrgid(os.getegid()).gr_name)
    files = [path for path in site.output.rglob("*") if path.name != hs_manifest.LOCK]
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o750, 0o640}


def test_safetensors_and_pieces_of_a_chunked_prefill(site):
    from safetensors import safe_open
    from safetensors.torch import load_file

    with FakeServer(site.dumps, lambda *_: "pieces") as server:
        site.run(url=server.url, format="safetensors")
    site.check_complete()
    entry = site.lines()[0]
    record = site.dataset.record(entry["id"])
    with safe_open(site.output / entry["file"], framework="pt") as opened:
        metadata = opened.metadata()
    data = load_file(site.output / entry["file"])
    assert metadata["id"] == str(entry["id"]) and metadata["layers"] == "1,3,4" and metadata["source"] == record.source
    assert set(data) == {"input_ids", "loss_mask", "layer_1", "layer_3", "layer_4", "final_post_norm"}
    assert torch.equal(data["layer_3"], expected_state(record.input_ids.tolist(), 3))
    assert data["loss_mask"].tolist() == record.loss_mask.tolist()


def test_a_second_start_does_nothing(site):
    with FakeServer(site.dumps) as server:
        site.run(url=server.url)
        before = (site.output / "manifest.jsonl").read_bytes()
        asked = len(server.requests)
        site.run(url=server.url)
        assert len(server.requests) == asked == RECORDS
    assert (site.output / "manifest.jsonl").read_bytes() == before
    site.check_complete()


def test_the_longest_records_come_first_and_only_the_share(site):
    with FakeServer(site.dumps) as server:
        site.run(url=server.url, share="3,5-12", concurrency=1)
    sent = [int(rid.rsplit("-", 2)[1]) for rid in server.requests]
    assert sorted(sent) == [3, *range(5, 13)]
    lengths = [int(site.dataset.lengths[record]) for record in sent]
    assert lengths == sorted(lengths, reverse=True)
    assert site.status()["records_total"] == 9


def takes_only(requests):
    """How a server behaves that is away after so many: the extractor is at work when it is killed."""
    left = iter(range(requests))
    return lambda *_: "ok" if next(left, None) is not None else "503"


@pytest.mark.parametrize("lines", [0, 1, 7, 20, 39])
def test_killed_and_started_again(site, lines):
    with FakeServer(site.dumps, delay=0.02) as server:
        server.behave = takes_only(lines)
        process = site.start(url=server.url, server_wait=600)
        site.wait_for_lines(lines)
        site.kill(process)
        server.behave = lambda *_: "ok"
        done = hs_manifest.Manifest(str(site.output)).entries
        assert len(done) >= lines
        found = hs_progress.observe(str(site.output))
        assert found["state"] == "dead"
        assert found["records_done"] == len(done)
        assert "dead since 20" in found["line"] and "start it again" in found["message"]
        (site.dumps / f"hsb-{site.config['run']}-1-0.0.safetensors").write_bytes(b"stale")
        (site.dumps / "hsb-000000000000-1-0.0.safetensors").write_bytes(b"of another run")
        server.delay = 0
        server.requests.clear()
        site.run(url=server.url)
        again = {int(rid.rsplit("-", 2)[1]) for rid in server.requests}
    assert not again & set(done), "a finished record was asked for again"
    site.check_complete()


def test_killed_over_and_over(site):
    for _ in range(6):
        # Some are written when it is killed.
        with FakeServer(site.dumps, takes_only(6), delay=0.01) as server:
            before = len(site.lines()) if (site.output / "manifest.jsonl").exists() else 0
            process = site.start(url=server.url, server_wait=600)
            site.wait_for_lines(before + 3)
            site.kill(process)
    with FakeServer(site.dumps) as server:
        site.run(url=server.url)
    site.check_complete()


def test_torn_line_truncated_file_repeated_line_and_leftovers_are_mended(site):
    with FakeServer(site.dumps) as server:
        site.run(url=server.url)
        entries = site.lines()
        manifest = site.output / "manifest.jsonl"
        text = manifest.read_text()
        torn = json.dumps(entries[-1])[:25]
        manifest.write_text("\n".join(text.splitlines()[:-1]) + "\n" + text.splitlines()[0] + "\nnot JSON\n" + torn)
        truncated = site.output / entries[5]["file"]
        os.truncate(truncated, 100)
        (site.output / entries[6]["file"]).unlink()
        leftovers = [truncated.with_name(f".{truncated.name}.tmp-12345"), site.output / ".manifest.jsonl.tmp-12345"]
        for leftover in leftovers:
            leftover.write_bytes(b"half")
        server.requests.clear()
        out = site.run(url=server.url)
    assert "mended the manifest: 2 bad lines, 1 repeated, 2 without their file" in out
    assert sorted(int(rid.rsplit("-", 2)[1]) for rid in server.requests) == sorted(entries[place]["id"] for place in (5, 6, -1))
    assert not any(leftover.exists() for leftover in leftovers)
    site.check_complete()


def test_what_a_crash_left_goes_where_another_host_does_the_record(site):
    """A host died between a file and its line, and lost another file; both records went to another host."""
    with FakeServer(site.dumps) as server:
        site.run(url=server.url, share="0-4")
        lines = site.lines()
        manifest = site.output / "manifest.jsonl"
        manifest.write_text("".join(json.dumps(line) + "\n" for line in lines if line["id"] != 3))
        orphan, lost = ((site.output / line["file"]) for number in (3, 4) for line in lines if line["id"] == number)
        os.truncate(lost, 10)
        notes = site.output / "specforge" / "notes.txt"
        notes.touch()
        out = site.run(url=server.url, share="0-2")
        other = site.directory / "out" / "other"
        site.run(url=server.url, share=f"3-{RECORDS - 1}", output_dir=str(other))
    assert "removed 2 files that no line of the manifest names" in out
    assert not orphan.exists() and not lost.exists() and notes.exists()
    notes.unlink()
    found = [verify(str(path), None) for path in (site.output, other)]
    assert [item["problems"] for item in found] == [[], []] and sum(item["records"] for item in found) == RECORDS


def test_files_without_a_manifest_are_neither_removed_nor_written_again(site):
    with FakeServer(site.dumps) as server:
        site.run(url=server.url, share="0-4")
        (site.output / "manifest.jsonl").rename(site.directory / "elsewhere")
        out = site.run(2, url=server.url, share="0-4")
        assert len(server.requests) == 5
    assert "holds 5 files of records, and no manifest.jsonl that names them; bring it back" in out


def test_sigterm_finishes_what_is_in_flight(site):
    with FakeServer(site.dumps, delay=1) as server:
        process = site.start(url=server.url)
        site.wait_for_lines(4)
        assert hs_progress.observe(str(site.output))["state"] == "running"
        out = site.kill(process, signal.SIGTERM)
        assert process.exitcode == 0, out
        status = site.status()
        assert status["state"] == "stopped" and "records are left" in status["message"]
        assert len(site.lines()) == status["records_done"] == len(server.requests)
        assert os.listdir(site.dumps) == []
        server.delay = 0
        site.run(url=server.url)
    site.check_complete()


def test_status_tells_rate_and_eta_while_running(site):
    with FakeServer(site.dumps) as server:

        def behave(*_):
            # All that comes after the first is in flight until the extractor is killed.
            server.delay = 600
            return "ok"

        server.behave = behave
        process = site.start(url=server.url, request_timeout=600)
        deadline = time.monotonic() + 60
        seen = {}
        while not seen.get("eta_s") and time.monotonic() < deadline:
            if (site.output / "status.json").exists():
                seen = site.status()
            time.sleep(0.05)
        line = hs_progress.observe(str(site.output))["line"]
        site.kill(process)
    assert seen["state"] == "running" and seen["tok_s"] > 0 and seen["pid"] == process.pid
    assert seen["tokens_total"] == int(site.dataset.lengths.sum())
    assert "tok/s · ETA" in line and "free" in line


def test_room_in_the_dump_directory_bounds_what_is_in_flight(site, monkeypatch):
    largest = int(site.dataset.lengths.max()) * 136
    monkeypatch.setattr(extract, "free_bytes", lambda path: largest * 5 // 4 if path == str(site.dumps) else 1 << 40)
    with FakeServer(site.dumps, delay=0.01) as server:
        assert extract.run_service(read_config({**site.config, "url": server.url, "share": "0-9"})) == 0
        by_id = {record: int(site.dataset.lengths[record]) for record in range(10)}
        assert server.most_in_flight < 4
    assert sorted(entry["id"] for entry in site.lines()) == sorted(by_id)


def test_an_api_key_is_sent_and_not_shown(site):
    key = site.directory / "key"
    key.write_text("secret-key\n")
    with FakeServer(site.dumps) as server:
        out = site.run(url=server.url, api_key_file=str(key), share="0-2")
    assert {headers["Authorization"] for headers in server.headers} == {"Bearer secret-key"}
    assert "secret-key" not in out + (site.output / "status.json").read_text() + (site.output / "run.json").read_text()


def test_a_sweep_that_fails_is_said_and_ends_nothing(site, monkeypatch, capsys):
    def fail(*_):
        raise OSError(5, "Input/output error", str(site.dumps))

    monkeypatch.setattr(extract, "LOG_SECONDS", 0.0)
    monkeypatch.setattr(extract, "STATUS_SECONDS", 0.02)
    monkeypatch.setattr(dumps, "names", fail)
    monkeypatch.setattr(dumps, "remove", lambda *_: 0)
    with FakeServer(site.dumps, delay=0.1) as server:
        assert extract.run_service(read_config({**site.config, "url": server.url, "concurrency": 1, "share": "0-5"})) == 0
    said = capsys.readouterr().out
    assert said.count(f"dumps that nobody awaits cannot be removed: [Errno 5] Input/output error: '{site.dumps}'") > 3


@pytest.mark.parametrize("prefix", ["hsb-", "team.a-", "a.0."])
def test_dumps_that_came_too_late_do_not_stay(site, capsys, prefix):
    extraction = Extraction(read_config({**site.config, "rid_prefix": prefix}))
    stem = extraction.config.rid_stem
    server = FakeServer(str(site.dumps))
    for rid, fault in ((f"{stem}1-0", "pieces"), (f"{stem}1-1", "ok"), (f"{stem}10-0", "marker"), (f"{prefix}other-1-0", "ok")):
        server.dump(rid, [1, 2, 3, 4], fault)
    extraction._awaited = {f"{stem}1-1"}
    with ThreadPoolExecutor(1) as extraction._pool:
        asyncio.run(extraction._sweep())
        asyncio.run(extraction._sweep())
    assert sorted(os.listdir(site.dumps)) == sorted([f"{stem}1-1.0.safetensors", f"{prefix}other-1-0.0.safetensors"])
    assert capsys.readouterr().out == "removed 3 dumps that came too late, or that nobody awaits\n"


def test_dumps_that_nobody_owns_go_once_they_are_old(site):
    extraction = Extraction(read_config(site.config))
    awaited = f"{extraction.config.rid_stem}1-1"
    extraction._awaited = {awaited}
    ended = subprocess.Popen(["true"])
    ended.wait()
    at_work = f"hsb-canary-0123456789ab-{os.getpid()}-1-a0.0.safetensors"
    killed = f"hsb-fp-canary-0123456789ab-{ended.pid}-1-a0.0.fp1"
    old = [
        f"{awaited}.0.safetensors",
        "hsb-000000000000-1-0.0.safetensors",
        "hsb-of.a.client.error.json",
        at_work,
        killed,
        "other.0.safetensors",
    ]
    past = time.time() - site.config["request_timeout"] - 1
    for name in old:
        (site.dumps / name).touch()
        os.utime(site.dumps / name, (past, past))
    (site.dumps / "hsb-of-a-client.0.safetensors").touch()
    with ThreadPoolExecutor(1) as extraction._pool:
        asyncio.run(extraction._sweep())
    assert set(os.listdir(site.dumps)) == {f"{awaited}.0.safetensors", at_work, "other.0.safetensors", "hsb-of-a-client.0.safetensors"}


def test_a_start_removes_whatever_nobody_awaits(site):
    os.mkdir(site.dumps / "expect")
    at_work = f"hsb-canary-0123456789ab-{os.getpid()}-1-a0.0.safetensors"
    for name in ("hsb-000000000000-1-0.0.safetensors", "hsb-of-a-client.error.json", at_work, "other.0.safetensors"):
        (site.dumps / name).touch()
    (site.dumps / "expect" / "0").write_text("hsb-000000000000-2-0")
    extraction = Extraction(read_config(site.config))
    extraction.prepare()
    extraction.close()
    assert sorted(os.listdir(site.dumps)) == sorted(["expect", at_work, "other.0.safetensors"])
    assert os.listdir(site.dumps / "expect") == []
