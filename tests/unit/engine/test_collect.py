# SPDX-License-Identifier: Apache-2.0
"""Collections: each record once, by link, copy, move or list, whatever happened to hosts, files and the call before."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys

import hosts
import pytest
import torch

import hs_manifest as hm
from hidden_state_bridge import collect as collect_module
from hidden_state_bridge import placing
from hidden_state_bridge.__main__ import main
from hidden_state_bridge.errors import Refusal
from hidden_state_bridge.verify import verify

RECORDS = 10
FORMATS = ("specforge", "safetensors")


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    return hosts.make_dataset(tmp_path_factory.mktemp("set"), RECORDS)


@pytest.fixture
def two(tmp_path, packed):
    """Two hosts, with records 4 and 5 on both."""
    return [
        hosts.make_host(tmp_path / "one", packed, list(range(6)), FORMATS),
        hosts.make_host(tmp_path / "two", packed, list(range(4, RECORDS)), FORMATS),
    ]


@pytest.fixture
def dest(tmp_path):
    return tmp_path / "collected"


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def check(dest, records=RECORDS):
    """Each record once, every file right, nothing beside."""
    entries = hm.Manifest(str(dest)).entries
    assert list(entries) == list(range(records))
    result = verify(str(dest), None)
    assert result["ok"], result["problems"]
    return entries


@pytest.mark.parametrize("mode", ["link", "symlink", "copy"])
def test_each_record_is_there_once_and_the_second_copy_is_superseded(two, dest, packed, mode):
    result = hosts.collection(dest, two, packed, mode=mode)
    assert result["ok"] and result["changed"] and (result["records"], result["superseded"]) == (RECORDS, 2)
    assert result["hosts"] == {"one": 6, "two": 4} and result["expected"] == RECORDS
    entries = check(dest)
    second = [line for line in lines_of(dest / hm.MANIFEST) if line.get("superseded")]
    assert [(line["id"], line["host"]) for line in second] == [(4, "two"), (5, "two")]
    for record, entry in entries.items():
        for file in hm.files_of(entry):
            ours, source = dest / file["file"], two[record >= 6] / file["file"]
            assert ours.read_bytes() == source.read_bytes()
            assert os.path.samefile(ours, source) == (mode != "copy")
            assert ours.is_symlink() == (mode == "symlink") and (mode != "symlink" or not os.readlink(ours).startswith("/"))
    assert hm.read_json(str(dest / hm.RUN))["identity"] == hosts.identity_of(packed)
    before = {path: path.lstat().st_ino for path in dest.rglob("*")}
    assert not hosts.collection(dest, two, packed, mode=mode)["changed"]
    assert {path: path.lstat().st_ino for path in dest.rglob("*")} == before


def test_an_index_says_where_everything_is(two, dest, packed):
    result = hosts.collection(dest, two, packed, mode="list")
    assert result["changed"] and not hosts.collection(dest, two, packed, mode="list")["changed"]
    index = lines_of(dest / collect_module.INDEX)
    assert [line["id"] for line in index] == [*range(RECORDS), 4, 5]
    assert index[7]["at"] == [f"two:{two[1]}/{file['file']}" for file in index[7]["files"]]
    assert [line.get("superseded", False) for line in index] == [False] * RECORDS + [True] * 2
    assert not list(dest.glob("specforge*"))


def test_one_format_is_taken_out_of_several(two, dest, packed):
    hosts.collection(dest, two, packed, formats=["safetensors"])
    assert all(entry["file"].startswith("safetensors/") for entry in check(dest).values())
    with pytest.raises(Refusal, match=r"one: record 0 is in the format safetensors, specforge, not in modelopt; make it with convert\.yml"):
        hosts.collection(dest, two, packed, formats=["modelopt"])


def test_a_part_is_collected_on_demand_and_grows(two, dest, packed):
    with pytest.raises(
        Refusal, match=r"4 of 10 records are done on no host; run extract\.yml to its end, or .*extraction_collect_partial: true"
    ):
        hosts.collection(dest, two[:1], packed)
    assert hosts.collection(dest, two[:1], packed, partial=True)["records"] == 6
    # Without the packed set nobody knows how many there have to be.
    assert hosts.collection(dest, two[:1], None, partial=True)["expected"] is None
    assert hosts.collection(dest, two, packed)["hosts"] == {"one": 6, "two": 4}
    check(dest)


@pytest.mark.parametrize("mode", ["link", "copy"])
def test_a_bad_source_is_named_and_the_rest_is_collected(two, dest, packed, mode):
    broken = {0: b"short", 8: None}
    for record, content in broken.items():
        path = two[record >= 6] / f"specforge/rows_0-2000/data_{record}.ckpt"
        path.write_bytes(content) if content else path.unlink()
    flipped = two[0] / "safetensors/rows_0-2000/data_3.safetensors"
    content = flipped.read_bytes()
    flipped.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    result = hosts.collection(dest, two, packed, mode=mode)
    named = {(problem["host"], problem["id"]) for problem in result["problems"]}
    # A link reads nothing: verify does, here as on the hosts.
    assert not result["ok"] and named == {("one", 0), ("two", 8)} | ({("one", 3)} if mode == "copy" else set())
    assert all("verify_repair=true" in problem["reason"] for problem in result["problems"])
    for host in two:
        verify(str(host), None, repair=True)
    hosts.make_host(two[0], packed, [0, 3], FORMATS)
    hosts.make_host(two[1], packed, [8], FORMATS)
    assert hosts.collection(dest, two, packed, mode=mode)["ok"]
    check(dest)


def test_a_bad_file_of_a_collection_is_repaired_there(two, dest, packed):
    hosts.collection(dest, two, packed, mode="copy")
    path = dest / "specforge/rows_0-2000/data_3.ckpt"
    path.write_bytes(b"\xff" + path.read_bytes()[1:])
    result = verify(str(dest), None, repair=True)
    assert result["ok"] and "the next collection brings it again" in result["repaired"][0]["reason"]
    assert hosts.collection(dest, two, packed, mode="copy")["changed"]
    check(dest)


def test_a_host_that_is_gone_leaves_its_copies_and_gives_no_second_ones(two, dest, packed):
    hosts.collection(dest, two, packed, mode="copy")
    third = hosts.make_host(two[0].parent / "three", packed, list(range(6)), FORMATS)
    shutil.rmtree(two[0])
    result = hosts.collection(dest, [third, two[1]], packed, mode="copy")
    assert result["hosts"] == {"one": 6, "two": 4} and result["superseded"] == 8 and result["records"] == RECORDS
    check(dest)


def test_a_new_host_that_comes_first_does_not_move_what_is_there(two, dest, packed):
    hosts.collection(dest, two, packed, mode="copy")
    first = hosts.make_host(two[0].parent / "a", packed, list(range(RECORDS)), FORMATS)
    inode = (dest / "specforge/rows_0-2000/data_3.ckpt").stat().st_ino
    result = hosts.collection(dest, [first, *two], packed, mode="copy")
    assert result["hosts"] == {"one": 6, "two": 4} and result["superseded"] == RECORDS + 2
    assert (dest / "specforge/rows_0-2000/data_3.ckpt").stat().st_ino == inode
    check(dest)


@pytest.mark.parametrize("stage", range(1, 8))
def test_killed_anywhere_and_called_again(two, dest, packed, monkeypatch, stage):
    monkeypatch.setattr(placing, "BATCH", 2)
    hosts.die_at(monkeypatch, stage)
    with pytest.raises(KeyboardInterrupt):
        hosts.collection(dest, two, packed)
    monkeypatch.undo()
    assert hosts.collection(dest, two, packed)["ok"]
    check(dest)


def test_a_linked_file_that_its_host_wrote_again_is_linked_again(two, dest, packed):
    """The same bytes in another file: what the old link leads to may be damaged."""
    hosts.collection(dest, two, packed)
    source = two[0] / "specforge/rows_0-2000/data_3.ckpt"
    good = source.read_bytes()
    source.write_bytes(b"\xff" + good[1:])
    source.with_suffix(".other").write_bytes(good)
    source.with_suffix(".other").rename(source)
    assert not verify(str(dest), None)["ok"]
    assert hosts.collection(dest, two, packed)["changed"]
    check(dest)


def test_no_line_is_of_a_file_that_was_replaced(two, dest, packed, monkeypatch):
    """Killed after a record's new file took the place of the old one and before its line is written."""
    hosts.collection(dest, two, packed, mode="copy")
    source = two[0] / "specforge/rows_0-2000/data_3.ckpt"
    source.write_bytes(source.read_bytes()[:-1] + b"\x7f")
    lines = lines_of(two[0] / hm.MANIFEST)
    lines[3]["files"][0]["sha256"] = collect_module.file_hash(str(source))
    hm.write_lines(str(two[0] / hm.MANIFEST), lines)

    def die(*_arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(hm.ManifestWriter, "append", die)
    with pytest.raises(KeyboardInterrupt):
        hosts.collection(dest, two, packed, mode="copy")
    monkeypatch.undo()
    assert not [problem for problem in verify(str(dest), None)["problems"] if problem["id"] is not None]
    hosts.collection(dest, two, packed, mode="copy")
    check(dest)


def test_what_the_hosts_have_to_give_is_asked_for_and_moved(two, dest, packed):
    hosts.collection(dest, two[:1], packed, mode="copy", partial=True)
    sources = [
        {"host": host.name, "manifest": str(host / hm.MANIFEST), "run": str(host / hm.RUN), "place": str(host), "root": None}
        for host in two
    ]
    assert hosts.collection(dest, two, packed, mode="ask", sources=sources)["wanted"] == {"one": 0, "two": 4}
    assert [line["id"] for line in hm.read_lines(str(dest / ".incoming/two/wanted.jsonl"))] == [6, 7, 8, 9]
    for source in sources:
        source["root"] = str(dest / ".incoming" / source["host"])
    # Nothing came: each record is named, and what was there stays.
    result = hosts.collection(dest, two, packed, mode="move", sources=sources)
    assert [problem["id"] for problem in result["problems"]] == [6, 7, 8, 9] and len(hm.Manifest(str(dest)).entries) == 6
    for name in FORMATS:
        shutil.copytree(two[1] / name, dest / ".incoming" / "two" / name)
    shutil.copy(two[1] / hm.MANIFEST, dest / ".incoming" / "two" / hm.MANIFEST)
    assert hosts.collection(dest, two, packed, mode="move", sources=sources)["ok"]
    assert not (dest / ".incoming").exists()
    check(dest)


def test_the_vocabulary_mapping_is_written_once(two, dest, packed):
    result = hosts.collection(dest, two, packed, draft_vocab_size=20)
    mapping = torch.load(dest / "vocab_mapping.pt", weights_only=True)
    counts = torch.zeros(hosts.VOCAB, dtype=torch.int64)
    for number in range(RECORDS):
        record = packed.record(number)
        ids = torch.tensor(record.input_ids[record.loss_mask == 1], dtype=torch.int64)
        counts += torch.bincount(ids, minlength=hosts.VOCAB)
    ours = mapping["d2t"] + torch.arange(20)
    assert ours.tolist() == mapping["t2d"].nonzero()[:, 0].tolist() == sorted(ours.tolist())
    assert counts[ours].min() >= counts[~mapping["t2d"]].max()
    assert result["changed"] and not hosts.collection(dest, two, packed, draft_vocab_size=20)["changed"]
    assert hosts.collection(dest, two, packed, draft_vocab_size=21)["changed"]


def test_what_cannot_be_collected_is_refused_before_anything_is_placed(two, dest, packed, tmp_path, monkeypatch):
    other = hosts.make_host(tmp_path / "other", packed, [1], FORMATS, final="post_norm")
    with pytest.raises(Refusal, match="other: output directory .*holds another run.*post_norm.*both"):
        hosts.collection(dest, [*two, other], packed)
    alike = hosts.make_host(tmp_path / "alike", packed, [1], ("specforge",))
    with pytest.raises(Refusal, match="two has the formats safetensors, specforge, alike specforge"):
        hosts.collection(dest, [*two[1:], alike], packed)
    empty = hosts.make_host(tmp_path / "empty", packed, [], FORMATS)
    with pytest.raises(Refusal, match=r"no host has a record that is done; run extract\.yml first"):
        hosts.collection(dest, [empty], packed)
    with pytest.raises(Refusal, match=r"nobody: .*nowhere has no run\.json; take the host out with --limit"):
        sources = [
            {"host": "nobody", "manifest": "/nowhere/m", "run": str(tmp_path / "nowhere/run.json"), "place": str(tmp_path / "nowhere")}
        ]
        hosts.collection(dest, [], packed, sources=sources)
    with pytest.raises(Refusal, match="extraction_draft_vocab_size needs the packed data set, and it is not below None; run stage.yml"):
        hosts.collection(dest, two, None, draft_vocab_size=20)
    with pytest.raises(Refusal, match="extraction_draft_vocab_size is 97; it must be from 1 to 96"):
        hosts.collection(dest, two, packed, draft_vocab_size=97)
    with pytest.raises(Refusal, match="extraction_draft_vocab_size is for the formats specforge and spec"):
        hosts.collection(tmp_path / "plain", two, packed, draft_vocab_size=20, formats=["safetensors"])
    with pytest.raises(Refusal, match="is marked as 'extraction', not as a collection"):
        hosts.collection(two[0], two, packed)
    with pytest.raises(Refusal, match="mode is 'rsync'; it must be one of link, symlink"):
        hosts.collection(dest, two, packed, mode="rsync")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(Refusal, match=r"extraction_draft_vocab_size needs the Python package torch .*extraction_collect_python"):
        hosts.collection(dest, two, packed, draft_vocab_size=20)


def test_links_over_file_systems_are_refused(two, dest, packed, monkeypatch):
    def refuse(*_arguments, **_named):
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(Refusal, match="cannot be linked to .*: Invalid cross-device link; take extraction_collect_mode symlink or copy"):
        hosts.collection(dest, two, packed)


def test_the_data_set_of_speculators_needs_pyarrow(tmp_path, dest, packed, monkeypatch):
    host = hosts.make_host(tmp_path / "one", packed, list(range(RECORDS)), ("speculators",))
    with pytest.raises(Refusal, match="speculators needs the packed data set"):
        hosts.collection(dest, [host], None)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(Refusal, match="needs the Python package pyarrow where it is written; .*extraction_collect_python"):
        hosts.collection(dest, [host], packed)
    assert not (dest / "speculators").exists()


def test_the_command_reads_its_request_from_standard_input(two, dest, packed, monkeypatch, capsys):
    import io

    sources = [{"host": host.name, "manifest": str(host / hm.MANIFEST), "run": str(host / hm.RUN), "place": str(host)} for host in two]
    request = {"dest": str(dest), "mode": "link", "sources": sources, "partial": True}
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(request)))
    assert main(["collect"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert len(result["problems"]) == RECORDS and "cannot be seen from this machine" in result["problems"][0]["reason"]
    monkeypatch.setattr(sys, "stdin", io.StringIO('{"dest": "x"}'))
    assert main(["collect"]) == 1
    assert "a collection needs dest, mode and sources" in capsys.readouterr().err
