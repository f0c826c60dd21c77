# SPDX-License-Identifier: Apache-2.0
"""The output directory: claims, lock, manifest, and what is told of them."""

from __future__ import annotations

import errno
import json
import os
import random
import time

import pytest
from forked import KILLED, at_step, forked, kill

import hs_manifest as hm
import hs_progress
from hidden_state_bridge.store import leftovers

IDENTITY = {"dataset": "d", "weights": "w", "layers": [1, 3, 4], "final": "post_norm", "dtype": "float32"}
RUN = hm.run_of(IDENTITY)


def entry(path, record, size=10, tokens=5, source="a"):
    name = f"specforge/rows_0-2000/data_{record}.ckpt"
    file = path / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"x" * size)
    return {"id": record, "source": source, "line": record + 1, "file": name, "bytes": size, "tokens": tokens, "sha256": "0" * 64}


def claimed(path):
    hm.claim_directory(str(path), RUN)
    hm.claim_run(str(path), IDENTITY, {"host": "one"})
    return path


@pytest.fixture
def out(tmp_path):
    return claimed(tmp_path / "host")


def append(path, *entries):
    writer = hm.ManifestWriter(str(path))
    writer.append(list(entries))
    writer.close()


def test_ranges_go_both_ways():
    assert hm.encode_ranges([]) == "" and hm.decode_ranges("") == []
    assert hm.encode_ranges([9, 7, 0, 1, 2, 2]) == "0-2,7,9"
    assert hm.decode_ranges("0-2,7, 9") == [(0, 2), (7, 7), (9, 9)]
    generator = random.Random(1)
    for _ in range(200):
        numbers = set(generator.sample(range(60), generator.randint(0, 60)))
        pairs = hm.decode_ranges(hm.encode_ranges(numbers))
        assert {n for first, last in pairs for n in range(first, last + 1)} == numbers


@pytest.mark.parametrize("text", ["a", "1-", "-1", "1,,2", "2-1", "1,1", "3,2", "1-3,3", "1.5", "1-2-3", "٣"])
def test_bad_ranges_are_refused(text):
    with pytest.raises(hm.ManifestError, match="range"):
        hm.decode_ranges(text)


def test_a_run_is_named_by_its_identity():
    assert len(RUN) == 12 and hm.run_of(dict(reversed(list(IDENTITY.items())))) == RUN
    assert hm.run_of({**IDENTITY, "final": "both"}) != RUN


def test_claiming_is_repeatable_and_private(tmp_path):
    path = tmp_path / "x" / "host"
    hm.claim_directory(str(path), RUN)
    hm.claim_directory(str(path), RUN)
    assert path.stat().st_mode & 0o777 == 0o700
    assert json.loads((path / hm.MARKER).read_text()) == {"kind": "extraction", "run": RUN}


def test_directories_that_are_not_ours_are_refused(tmp_path):
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("")
    with pytest.raises(hm.ManifestError, match=r"foreign is not empty and has no \.hidden_state_bridge of ours .*thesis"):
        hm.claim_directory(str(foreign), RUN)
    (tmp_path / "link").symlink_to(tmp_path / "target")
    (tmp_path / "target").mkdir()
    with pytest.raises(hm.ManifestError, match="is a link or no directory"):
        hm.claim_directory(str(tmp_path / "link"), RUN)
    (tmp_path / "file").write_text("")
    with pytest.raises(hm.ManifestError, match="is a link or no directory"):
        hm.claim_directory(str(tmp_path / "file"), RUN)
    with pytest.raises(hm.ManifestError, match="cannot be made: File exists"):
        hm.claim_directory(str(tmp_path / "file" / "host"), RUN)
    marked = tmp_path / "marked"
    marked.mkdir()
    (marked / hm.MARKER).write_text('{"kind": "dataset"}')
    with pytest.raises(hm.ManifestError, match="is marked as 'dataset'"):
        hm.claim_directory(str(marked), RUN)
    (marked / hm.MARKER).write_text("{")
    with pytest.raises(hm.ManifestError, match="cannot be read"):
        hm.claim_directory(str(marked), RUN)


def test_another_identity_is_refused_with_both_shown(out):
    with pytest.raises(hm.ManifestError) as caught:
        hm.claim_run(str(out), {**IDENTITY, "weights": "v"}, {})
    assert '"weights":"w"' in str(caught.value) and '"weights":"v"' in str(caught.value)


def test_records_of_a_run_that_nobody_can_name_are_not_taken_for_ours(out):
    append(out, entry(out, 3))
    (out / hm.RUN).unlink()
    with pytest.raises(hm.ManifestError, match=r"holds a manifest\.jsonl and no run\.json that says of which run it is; bring that back"):
        hm.claim_run(str(out), {**IDENTITY, "weights": "v"}, {})
    found = hs_progress.observe(str(out), run=RUN)
    assert "no run.json that says of which run it is" in found["conflict"] and (found["state"], found["done"]) == ("failed", "")


def test_provenance_may_change_and_is_kept(out):
    before = (out / hm.RUN).read_bytes()
    hm.claim_run(str(out), IDENTITY, {"host": "one"})
    assert (out / hm.RUN).read_bytes() == before
    hm.claim_run(str(out), IDENTITY, {"host": "one", "sglang_version": "0.5.23"})
    known = hm.read_json(str(out / hm.RUN))
    assert known["provenance"]["sglang_version"] == "0.5.23" and known["earlier"] == [{"host": "one"}]


def test_the_lock_is_exclusive_and_ends_with_its_holder(out):
    assert not hm.is_locked(str(out))
    lock = hm.Lock(str(out))
    assert hm.is_locked(str(out)) and hm.is_locked(str(out))
    with pytest.raises(hm.ManifestError, match="locked by another extractor"):
        hm.Lock(str(out), patience=0.1)
    lock.close()
    assert not hm.is_locked(str(out))
    pid = os.fork()
    if not pid:
        hm.Lock(str(out))
        time.sleep(60)
    while not hm.is_locked(str(out)):
        time.sleep(0.01)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    assert not hm.is_locked(str(out))


def test_done_is_a_valid_line_and_a_file_of_its_size(out):
    entries = [entry(out, record) for record in range(6)]
    append(out, *entries)
    (out / entries[1]["file"]).unlink()
    (out / entries[2]["file"]).write_bytes(b"short")
    link = out / entries[3]["file"]
    link.rename(out / "elsewhere")
    link.symlink_to(out / "elsewhere")
    manifest = hm.Manifest(str(out))
    assert list(manifest.entries) == [0, 4, 5]
    assert manifest.stale == {n: entries[n] for n in (1, 2, 3)}
    assert not (manifest.torn or manifest.broken or manifest.repeated)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ESTALE, errno.ETIMEDOUT])
def test_a_file_that_cannot_be_looked_at_is_not_taken_for_missing(out, monkeypatch, number):
    append(out, entry(out, 0), entry(out, 1))
    before, lstat = (out / hm.MANIFEST).read_bytes(), os.lstat

    def failing(path, **options):
        if str(path).endswith("data_1.ckpt"):
            raise OSError(number, os.strerror(number), path)
        return lstat(path, **options)

    monkeypatch.setattr(hm.os, "lstat", failing)
    with pytest.raises(OSError, match="data_1.ckpt"):
        hm.Manifest(str(out)).repair()
    assert (out / hm.MANIFEST).read_bytes() == before


def test_what_leads_to_no_file_is_missing(out):
    lines = [entry(out, record) for record in range(3)]
    append(out, *lines, {**lines[0], "id": 3, "file": f"{lines[0]['file']}/below"}, {**lines[0], "id": 4, "file": "loop/below"})
    (out / "loop").symlink_to("loop")
    (out / lines[1]["file"]).unlink()
    assert list(hm.Manifest(str(out)).entries) == [0, 2]


def several(path, record):
    """A line of a record in two formats, whose files are there."""
    first = entry(path, record)
    second = {"file": f"safetensors/rows_0-2000/data_{record}.safetensors", "bytes": 7, "sha256": "1" * 64}
    (path / second["file"]).parent.mkdir(parents=True, exist_ok=True)
    (path / second["file"]).write_bytes(b"y" * 7)
    files = [{key: first.pop(key) for key in ("file", "bytes", "sha256")}, second]
    return {**first, **hm.named(files)}


def test_a_record_in_several_formats_has_one_line_and_is_done_with_all_its_files(out):
    entries = [several(out, record) for record in range(4)]
    assert entries[0]["bytes"] == 17 and "file" not in entries[0]
    append(out, *entries)
    (out / hm.files_of(entries[1])[1]["file"]).unlink()
    (out / hm.files_of(entries[2])[0]["file"]).write_bytes(b"short")
    manifest = hm.Manifest(str(out))
    assert set(manifest.entries) == {0, 3} and set(manifest.stale) == {1, 2}
    assert manifest.other_format(["safetensors", "specforge"]) == ""
    assert "holds files of the format safetensors, specforge, and this run writes specforge;" in manifest.other_format("specforge")
    assert "convert.yml" in manifest.other_format(["specforge", "modelopt"])
    assert manifest.repair() and [line["id"] for line in hm.read_lines(str(out / hm.MANIFEST))] == [0, 3]


@pytest.mark.parametrize(
    "change",
    [{"files": []}, {"files": {}}, {"files": [1]}, {"bytes": 16}, {"files": [{"file": "a/../b", "bytes": 17, "sha256": ""}]}],
)
def test_an_invalid_line_of_several_formats_counts_for_nothing(out, change):
    append(out, {**several(out, 0), **change}, several(out, 1))
    assert list(hm.Manifest(str(out)).entries) == [1] and hm.Manifest(str(out)).broken == [1]


def test_records_are_taken_out_of_the_manifest(out):
    append(out, *(entry(out, record) for record in range(4)))
    manifest = hm.Manifest(str(out))
    assert not manifest.repair(without=[7]) and manifest.repair(without=[1, 2, 7])
    assert list(manifest.entries) == list(hm.Manifest(str(out)).entries) == [0, 3]


def test_second_copies_are_counted_and_links_count_in_a_collection_alone(tmp_path, out):
    path = tmp_path / "collected"
    hm.claim_directory(str(path), RUN, kind=hm.COLLECTION)
    with pytest.raises(hm.ManifestError, match="is marked as 'collection', not as an extraction"):
        hm.claim_directory(str(path), RUN)
    line = entry(out, 0)
    for directory in (path, out):
        (directory / "specforge" / "rows_0-2000").mkdir(parents=True, exist_ok=True)
    (path / line["file"]).symlink_to(out / line["file"])
    append(path, line, {**line, "superseded": True, "host": "two"})
    manifest = hm.Manifest(str(path))
    assert list(manifest.entries) == [0] and manifest.superseded == 1 and manifest.repeated == []
    hm.write_json(str(path / hm.MARKER), {"kind": hm.EXTRACTION, "run": RUN})
    assert list(hm.Manifest(str(path)).entries) == []


@pytest.mark.parametrize(
    "change",
    [
        {"id": "1"},
        {"id": True},
        {"id": -1},
        {"bytes": 1.5},
        {"file": "../x"},
        {"file": "/etc/passwd"},
        {"file": ""},
        {"sha256": None},
        # Where a collection pulls the file to.
        {"from": "../x"},
        {"from": "/etc/passwd"},
        {"from": None},
    ],
)
def test_an_invalid_line_counts_for_nothing(out, change):
    append(out, entry(out, 0), {**entry(out, 1), **change}, entry(out, 2))
    manifest = hm.Manifest(str(out))
    assert list(manifest.entries) == [0, 2] and manifest.broken == [2]


@pytest.mark.parametrize("cut", [1, 2, 30, 100])
def test_a_torn_line_is_cut_off(out, cut):
    append(out, *(entry(out, record) for record in range(3)))
    path = out / hm.MANIFEST
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    manifest = hm.Manifest(str(out))
    assert list(manifest.entries) == [0, 1] and manifest.torn > 0
    assert manifest.repair() and not list(out.glob(".manifest*"))
    append(out, entry(out, 2))
    assert path.read_bytes() == whole
    assert not hm.Manifest(str(out)).repair()


def test_of_two_lines_the_later_wins_only_if_its_file_agrees(out):
    first = entry(out, 0, size=10)
    append(out, {**first, "bytes": 11}, first, entry(out, 1), {**entry(out, 1), "bytes": 99})
    manifest = hm.Manifest(str(out))
    assert manifest.repeated == [0, 1] and manifest.stale == {}
    assert manifest.entries[0]["bytes"] == 10 and manifest.entries[1]["bytes"] == 10
    manifest.repair()
    assert (out / hm.MANIFEST).read_bytes().count(b"\n") == 2


def test_status_is_replaced_at_once(out):
    hm.write_json(str(out / hm.STATUS), {"state": "running"})
    with pytest.raises(TypeError):
        hm.write_json(str(out / hm.STATUS), {"state": object()})
    assert hm.read_json(str(out / hm.STATUS)) == {"state": "running"}
    assert not list(out.glob(".status*"))


@pytest.mark.parametrize(
    "write",
    [lambda out: hm.write_json(str(out / hm.STATUS), {"state": "running"}), lambda out: hm.write_lines(str(out / hm.MANIFEST), [])],
    ids=["status", "manifest"],
)
def test_a_writer_that_is_killed_leaves_nothing_but_what_is_known_as_left_over(out, write):
    status, steps = forked(lambda: at_step(0, kill, lambda: write(out)))
    assert status == 0
    left = 0
    for step in range(1, int(steps) + 1):
        assert forked(lambda step=step: at_step(step, kill, lambda: write(out)))[0] == KILLED
        for path in leftovers(str(out)):
            os.unlink(path)
            left += 1
        assert set(os.listdir(out)) <= {hm.MARKER, hm.RUN, hm.STATUS, hm.MANIFEST}
    assert left


def test_another_run_is_a_conflict_and_counts_nothing_as_done(out):
    append(out, entry(out, 0))
    found = hs_progress.observe(str(out), "0123456789ab")
    assert found["state"] == "failed" and found["done"] == "" and found["records_done"] == 0
    assert found["conflict"] == f"{out} holds run {RUN}, not 0123456789ab"


def test_the_size_of_the_real_run_takes_about_a_second(out):
    directory = out / "specforge" / "rows_0-2000"
    directory.mkdir(parents=True)
    (directory / "data_0.ckpt").write_bytes(b"x" * 10)
    line = json.dumps({**entry(out, 0), "sglang_version": "0.5.20"})
    (out / hm.MANIFEST).write_text("".join(line.replace('"id": 0', f'"id": {n}') + "\n" for n in range(37312)))
    began = time.process_time()
    found = hs_progress.observe(str(out))
    assert found["done"] == "0-37311" and time.process_time() - began < 3


def test_files_of_another_format_are_a_conflict(tmp_path):
    path = claimed(tmp_path / "out")
    file = path / "specforge" / "rows_0-2000" / "data_0.ckpt"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"states")
    writer = hm.ManifestWriter(str(path))
    writer.append(
        [{"id": 0, "source": "a", "line": 1, "file": "specforge/rows_0-2000/data_0.ckpt", "bytes": 6, "tokens": 3, "sha256": "0" * 64}]
    )
    writer.close()
    assert hs_progress.observe(str(path), RUN, output_format="specforge")["conflict"] == ""
    conflict = hs_progress.observe(str(path), RUN, output_format="safetensors")["conflict"]
    assert "files of the format specforge" in conflict and "this run writes safetensors" in conflict
