# SPDX-License-Identifier: Apache-2.0
"""The rows of a collection for speculators: each file has the states of the record that its line and its row name, whoever is away."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pyarrow.ipc
import pytest

import hs_manifest as hm
from hidden_state_bridge.collect import collect, read_request
from hidden_state_bridge.formats import file_name
from hidden_state_bridge.pack import pack
from hidden_state_bridge.packed import PackedDataset
from hidden_state_bridge.verify import verify

RECORDS = 6


@pytest.fixture
def packed(tmp_path):
    path = tmp_path / "source.jsonl"
    lines = [json.dumps({"input_ids": [number, 2, 3], "loss_mask": [0, 1, 1]}) for number in range(RECORDS)]
    path.write_text("".join(f"{line}\n" for line in lines))
    return PackedDataset(pack({"sources": [{"name": "S", "path": str(path)}], "seed": 1}, str(tmp_path / "packed"))["path"])


def states(record):
    """Stand for a record's file: what is in it is not read here."""
    return b"states of record %d" % record


def extract(path, packed, records):
    """Add records to a host's directory; returns it."""
    identity = {"dataset": packed.meta["sha256"], "weights": "w", "layers": [1], "final": "both", "dtype": "bfloat16"}
    hm.claim_directory(str(path), hm.run_of(identity))
    hm.claim_run(str(path), identity, {"host": path.name})
    writer = hm.ManifestWriter(str(path))
    for record in records:
        file = path / file_name("speculators", record)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(states(record))
        about = {"file": str(file.relative_to(path)), "bytes": len(states(record)), "sha256": hashlib.sha256(states(record)).hexdigest()}
        writer.append([{"id": record, "source": "S", "line": 1, "tokens": 3, **about}])
    writer.close()
    return path


@pytest.fixture
def two(tmp_path, packed):
    return extract(tmp_path / "one", packed, [0, 1, 2]), extract(tmp_path / "two", packed, [3, 4, 5])


@pytest.fixture
def gather(tmp_path, packed):
    def gather(*hosts, **changes):
        sources = [
            {"host": host.name, "manifest": f"{host}/{hm.MANIFEST}", "run": f"{host}/{hm.RUN}", "place": str(host), "root": str(host)}
            for host in hosts
        ]
        request = {"dest": str(tmp_path / "all"), "mode": "copy", "sources": sources, "dataset_dir": str(Path(packed.path).parent)}
        return collect(read_request({**request, **changes}))

    return gather


def lines_of(dest):
    return {entry["id"]: entry for entry in hm.read_lines(str(dest / hm.MANIFEST)) if not entry.get("superseded")}


def lose(two, dest, *records):
    """Host one loses records, and so does the collection, as repairs do it after a disk has damaged both."""
    for directory in (two[0], dest):
        for record in records:
            path = directory / lines_of(directory)[record]["file"]
            path.unlink()
            path.write_bytes(b"S" + states(record)[1:])
        assert verify(str(directory), None, repair=directory == two[0])["ok"] == (directory == two[0])


def check(dest, packed, records):
    """Rows without a hole, of the right records, in the data set as in the files."""
    result = verify(str(dest), None)
    assert result["ok"], result["problems"]
    lines = lines_of(dest)
    assert list(lines) == sorted(records)
    state = json.loads((dest / "speculators/state.json").read_text())
    with pyarrow.ipc.open_stream(dest / "speculators" / state["_data_files"][0]["filename"]) as reader:
        rows = reader.read_all().to_pylist()
    assert len(rows) == len(lines)
    for record, entry in lines.items():
        assert (dest / entry["file"]).read_bytes() == states(record)
        row = int(entry["file"].rpartition("_")[2].partition(".")[0])
        assert rows[row]["input_ids"] == packed.record(record).input_ids.tolist()


@pytest.mark.parametrize("mode", ["copy", "link", "symlink"])
@pytest.mark.parametrize("killed_at", ["", "append", "write_lines"])
def test_a_record_of_a_host_that_is_not_asked_moves_with_its_states(two, tmp_path, packed, gather, monkeypatch, mode, killed_at):
    """Its row is taken away as there are fewer, and its host cannot give it again."""
    dest = tmp_path / "all"
    gather(*two, mode=mode)
    lose(two, dest, 1)
    if killed_at:

        def die(*_arguments, **_named):
            raise KeyboardInterrupt

        monkeypatch.setattr(*((hm.ManifestWriter, "append") if killed_at == "append" else (hm, "write_lines")), die)
        with pytest.raises(KeyboardInterrupt):
            gather(two[0], mode=mode, partial=True)
        monkeypatch.undo()
        kept = hm.Manifest(str(dest)).entries
        assert {3, 4, 5} <= set(kept)
        assert all((dest / entry["file"]).read_bytes() == states(record) for record, entry in kept.items() if record != 1)
    result = gather(two[0], mode=mode, partial=True)
    assert result["ok"] and result["hosts"] == {"one": 2, "two": 3}
    check(dest, packed, [0, 2, 3, 4, 5])
    moved = dest / lines_of(dest)[5]["file"]
    assert moved.name == "hs_1.safetensors" and moved.is_symlink() == (mode == "symlink")
    assert not gather(two[0], mode=mode, partial=True)["changed"]
    extract(two[0], packed, [1])
    gather(*two, mode=mode)
    check(dest, packed, range(RECORDS))


def test_a_record_that_was_written_again_takes_no_file_of_another(two, tmp_path, packed, gather):
    gather(*two)
    lose(two, tmp_path / "all", 1, 2)
    verify(str(tmp_path / "all"), None, repair=True)
    extract(two[0], packed, [2])
    assert gather(two[0], partial=True)["records"] == 5
    check(tmp_path / "all", packed, [0, 2, 3, 4, 5])


def test_a_moved_file_is_copied_where_nothing_can_be_linked(two, tmp_path, packed, gather, monkeypatch):
    gather(*two)
    lose(two, tmp_path / "all", 1)

    def refuse(*_arguments, **_named):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    assert gather(two[0], partial=True)["ok"]
    check(tmp_path / "all", packed, [0, 2, 3, 4, 5])


def rows_file(dest):
    [path] = (dest / "speculators").glob("*.arrow")
    return path


@pytest.mark.parametrize("spoil", ["flip", "cut", "state", "unknown", "missing"])
def test_a_damaged_data_set_is_found_and_written_again(two, tmp_path, packed, gather, spoil):
    dest = tmp_path / "all"
    gather(*two)
    path = dest / "speculators/state.json" if spoil == "state" else rows_file(dest)
    content = path.read_bytes()
    if spoil == "unknown":
        run = hm.read_json(str(dest / hm.RUN))
        del run["together"]
        hm.write_json(str(dest / hm.RUN), run)
    elif spoil == "missing":
        path.unlink()
    else:
        path.write_bytes(content[:-3] if spoil == "cut" else content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
    problems = verify(str(dest), 0)["problems"]
    assert path.relative_to(dest).as_posix() in {problem["file"] for problem in problems}
    assert all("; the next collection brings it again" in problem["reason"] for problem in problems)
    assert gather(*two)["changed"]
    check(dest, packed, range(RECORDS))
    assert path.read_bytes() == content
    assert not gather(*two)["changed"]


def test_a_damaged_data_set_is_removed_by_a_repair(two, tmp_path, packed, gather):
    dest = tmp_path / "all"
    gather(*two)
    rows_file(dest).write_bytes(b"torn")
    result = verify(str(dest), None, repair=True)
    assert result["ok"] and [problem["file"].endswith(".arrow") for problem in result["repaired"]] == [True]
    assert not list((dest / "speculators").glob("*.arrow")) and verify(str(dest), None)["ok"]
    assert gather(*two)["changed"]
    check(dest, packed, range(RECORDS))


def test_a_data_set_of_before_does_not_stay(two, tmp_path, packed, gather):
    """Killed once state.json named the other one, and before the old file was removed."""
    dest = tmp_path / "all"
    gather(*two)
    (dest / "speculators/data-0123456789abcdef.arrow").write_bytes(b"old")
    assert not verify(str(dest), None)["ok"]
    assert gather(*two)["changed"]
    check(dest, packed, range(RECORDS))
