# SPDX-License-Identifier: GPL-3.0-or-later
"""Sources of every kind, directories, field names, shares and filters: which records come out, and what is counted."""

from __future__ import annotations

import errno
import gzip
import json
import os
import random
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from packing import SUFFIXES, contents, lines_of, packed, write

from hidden_state_bridge import columns, pack, reading, records, scan, sources, spool, streams
from hidden_state_bridge.errors import Refusal


def rows_of(count: int, seed: int = 1) -> list[dict]:
    rng = random.Random(seed)
    return [
        {"input_ids": [rng.randrange(100) for _ in range(length)], "loss_mask": [rng.randrange(2) for _ in range(length)]}
        for length in (rng.randint(1, 30) for _ in range(count))
    ]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_every_kind_of_file_gives_the_same_records(tmp_path, suffix):
    rows = rows_of(20)
    plain, _ = packed(tmp_path / "plain", [{"name": "a", "path": write(tmp_path / "a.jsonl", rows)}], seed=3, vocab_size=100)
    other, _ = packed(tmp_path / "other", [{"name": "a", "path": write(tmp_path / f"b{suffix}", rows)}], seed=3, vocab_size=100)
    strip = [[(source, line, ids, mask) for source, _file, line, ids, mask in contents(data)] for data in (plain, other)]
    assert strip[0] == strip[1] and len(strip[0]) == 20


def test_arrow_in_its_file_format_and_with_other_types_of_integers(tmp_path):
    rows = rows_of(10)
    table = pa.table(
        {
            "input_ids": pa.array([row["input_ids"] for row in rows], pa.large_list(pa.uint16())),
            "loss_mask": pa.array([[bool(x) for x in row["loss_mask"]] for row in rows], pa.list_(pa.bool_())),
        }
    )
    with pa.ipc.new_file(str(tmp_path / "a.arrow"), table.schema) as writer:
        writer.write_table(table.slice(0, 4))
        writer.write_table(table.slice(4))
    data, _ = packed(tmp_path / "out", [{"name": "a", "path": str(tmp_path / "a.arrow")}])
    found = {line: (ids, mask) for _source, _file, line, ids, mask in contents(data)}
    assert found == {line: (row["input_ids"], row["loss_mask"]) for line, row in enumerate(rows, 1)}


def test_a_directory_is_read_in_the_order_of_names(tmp_path, monkeypatch):
    parts = {f"part-{number}{suffix}": rows_of(4, number) for number, suffix in enumerate(SUFFIXES)}
    parts["deeper/part-9.jsonl"] = rows_of(4, 9)
    for name, rows in parts.items():
        write(tmp_path / "set" / name, rows)
    for other in ("README.md", ".hidden.jsonl", "dataset_info.json"):
        (tmp_path / "set" / other).write_text("no record")
    data, result = packed(tmp_path / "out", [{"name": "a", "path": str(tmp_path / "set")}], seed=8)
    assert [file["path"] for file in result["meta"]["sources"][0]["files"]] == sorted(parts)
    found = {(file, line): ids for _source, file, line, ids, _mask in contents(data)}
    assert found == {(name, line): row["input_ids"] for name, rows in parts.items() for line, row in enumerate(rows, 1)}

    walk = os.walk

    def backwards(*arguments, **options):
        for directory, directories, files in walk(*arguments, **options):
            directories.reverse()
            yield directory, directories, files[::-1]

    monkeypatch.setattr(sources.os, "walk", backwards)
    _, again = packed(tmp_path / "again", [{"name": "a", "path": str(tmp_path / "set")}], seed=8)
    assert again["meta"] == result["meta"]


def test_a_directory_without_sources_is_refused(tmp_path):
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "notes.txt").write_text("x")
    with pytest.raises(Refusal, match=r"a .*set: the directory holds no file that ends in \.jsonl, \.jsonl\.gz"):
        packed(tmp_path / "out", [{"name": "a", "path": str(tmp_path / "set")}])


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_fields_have_other_names_for_all_or_for_one_source(tmp_path, suffix):
    rows = rows_of(6)
    one = [{"tokens": row["input_ids"], "mask": row["loss_mask"]} for row in rows]
    other = [{"ids": row["input_ids"], "mask": row["loss_mask"]} for row in rows]
    data, _ = packed(
        tmp_path / "out",
        [
            {"name": "a", "path": write(tmp_path / f"a{suffix}", one)},
            {"name": "b", "path": write(tmp_path / f"b{suffix}", other), "input_ids_field": "ids"},
        ],
        input_ids_field="tokens",
        loss_mask_field="mask",
    )
    found = [sorted((line, ids, mask) for source, _file, line, ids, mask in contents(data) if source == name) for name in "ab"]
    assert found[0] == found[1] == [(line, row["input_ids"], row["loss_mask"]) for line, row in enumerate(rows, 1)]


def test_several_members_and_frames_and_zeros_at_the_end(tmp_path):
    rows = rows_of(6)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines_of(rows[:3])) + gzip.compress(lines_of(rows[3:])) + bytes(700))
    (tmp_path / "b.jsonl.zst").write_bytes(zstandard.compress(lines_of(rows[:3])) + zstandard.compress(lines_of(rows[3:])))
    for name in ("a.jsonl.gz", "b.jsonl.zst"):
        data, _ = packed(tmp_path / "out", [{"name": "a", "path": str(tmp_path / name)}])
        assert sorted(line for _s, _f, line, _i, _m in contents(data)) == [1, 2, 3, 4, 5, 6]


def test_weights_and_caps(tmp_path):
    rows = rows_of(100)
    path = write(tmp_path / "a.jsonl", rows)

    def lines(seed=1, **share):
        data, result = packed(tmp_path / "out", [{"name": "a", "path": path, **share}], seed=seed)
        return sorted(line for _s, _f, line, _i, _m in contents(data)), result["meta"]["sources"][0]

    half, counts = lines(weight=0.5)
    assert len(half) == len(set(half)) == 50
    assert (counts["records"], counts["dropped"], counts["repeated"]) == (50, 50, 0)
    assert lines(seed=2, weight=0.5)[0] != half
    more, counts = lines(weight=2.25)
    assert len(more) == 225 and {more.count(line) for line in range(1, 101)} == {2, 3}
    assert (counts["records"], counts["dropped"], counts["repeated"]) == (225, 0, 125)
    few, counts = lines(max_records=7)
    assert len(set(few)) == 7 and few != [1, 2, 3, 4, 5, 6, 7] and counts["dropped"] == 93
    assert lines(max_records=1000)[0] == list(range(1, 101))
    assert counts["tokens"] == sum(len(rows[line - 1]["input_ids"]) for line in few)


def test_what_is_chosen_of_a_source_does_not_depend_on_the_others(tmp_path):
    source = {"name": "a", "path": write(tmp_path / "a.jsonl", rows_of(50)), "weight": 0.3}
    other = {"name": "A0", "path": write(tmp_path / "b.jsonl", rows_of(20, 2)), "weight": 0.3}
    alone, _ = packed(tmp_path / "out", [source])
    both, _ = packed(tmp_path / "out", [source, other])
    assert sorted(contents(alone)) == sorted(item for item in contents(both) if item[0] == "a")


def test_lengths_are_filtered_before_the_cut_and_all_is_counted(tmp_path):
    rows = [{"input_ids": [1] * length, "loss_mask": [0] * (length - 1) + [1]} for length in range(1, 21)]
    source = [{"name": "a", "path": write(tmp_path / "a.jsonl", rows)}]
    data, result = packed(tmp_path / "out", source, min_tokens=3, max_tokens=15, max_length=10)
    counts = result["meta"]["sources"][0]
    assert sorted(data.lengths.tolist()) == [3, 4, 5, 6, 7, 8, 9, 10, 10, 10, 10, 10, 10]
    assert (counts["short"], counts["long"], counts["dropped"], counts["cut"], counts["untrained"]) == (2, 5, 7, 5, 5)
    assert counts["longest"] == 10 and result["meta"]["trained_tokens"] == 8
    data, result = packed(tmp_path / "out", source, min_tokens=3, max_tokens=15, max_length=10, untrained="drop")
    counts = result["meta"]["sources"][0]
    assert (len(data), counts["untrained"], counts["untrained_dropped"], counts["dropped"], counts["cut"]) == (8, 0, 5, 12, 0)
    header, row, total = (line.split() for line in result["table"])
    assert header == ["source", "records", "tokens", "mean", "longest", "cut", "untrained", "dropped", "repeated", "rejected"]
    assert row == ["a", "8", "52", "6", "10", "0", "0", "12", "0", "0"] and total[1:] == row[1:]


def test_filters_that_leave_nothing_are_refused(tmp_path):
    with pytest.raises(Refusal, match="the sources hold no records that are kept"):
        packed(tmp_path / "out", [{"name": "a", "path": write(tmp_path / "a.jsonl", rows_of(5))}], min_tokens=1000)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"weight": 0}, "has weight 0; it must be a number above 0"),
        ({"weight": True}, "has weight True"),
        ({"max_records": 0}, "has max_records 0; it must be an integer of at least 1"),
        ({"wieght": 1}, "has the unknown setting wieght"),
        ({"id_field": 3}, "has id_field 3; it must be text"),
    ],
)
def test_a_bad_source_is_refused(tmp_path, change, text):
    with pytest.raises(Refusal, match=text):
        packed(tmp_path / "out", [{"name": "a", "path": write(tmp_path / "a.jsonl", rows_of(2)), **change}])


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"on_bad": "warn"}, "on_bad is 'warn'; it must be fail or skip"),
        ({"untrained": 1}, "untrained is 1; it must be keep or drop"),
        ({"min_tokens": 0}, "min_tokens is 0; it must be an integer of at least 1"),
        ({"trust_remote_code": "yes"}, "trust_remote_code is 'yes'; it must be true or false"),
        ({"id_field": None}, "id_field is None; it must be text"),
        ({"tokenizer": "/nowhere/model"}, "tokenizer /nowhere/model cannot be read: No such file"),
    ],
)
def test_a_bad_setting_is_refused(tmp_path, settings, text):
    with pytest.raises(Refusal, match=text):
        packed(tmp_path / "out", [{"name": "a", "path": write(tmp_path / "a.jsonl", rows_of(2))}], **settings)


@pytest.mark.parametrize(("suffix", "package"), [(".parquet", "pyarrow"), (".arrow", "pyarrow"), (".jsonl.zst", "zstandard")])
def test_a_missing_package_is_named(tmp_path, monkeypatch, suffix, package):
    path = write(tmp_path / f"a{suffix}", rows_of(3))
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(Refusal, match=rf"needs the Python package {package}, .*pip install {package}"):
        packed(tmp_path / "out", [{"name": "a", "path": path}])


def test_blocks_and_cores_do_not_matter(tmp_path, monkeypatch):
    """Many small blocks in several processes give what one process gives."""
    rows = rows_of(200)
    source = [{"name": "a", "path": write(tmp_path / f"a{suffix}", rows)} for suffix in SUFFIXES]
    for number, item in enumerate(source):
        item["name"] = f"s{number}"
    one = pack.pack({"sources": source, "seed": 4}, str(tmp_path / "one"), workers=1)
    monkeypatch.setattr(streams, "BLOCK_BYTES", 100)
    monkeypatch.setattr(streams, "COMPRESSED_BYTES", 64)
    monkeypatch.setattr(columns, "BATCH_ROWS", 3)
    many = pack.pack({"sources": source, "seed": 4}, str(tmp_path / "many"), workers=3)
    assert one["meta"] == many["meta"]


def test_a_dead_worker_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(streams, "BLOCK_BYTES", 100)
    monkeypatch.setattr(reading, "parse_lines", lambda *_arguments: os._exit(9))
    path = write(tmp_path / "a.jsonl", rows_of(50))
    with pytest.raises(Refusal, match=r"a process that parsed .*a\.jsonl died, perhaps for lack of memory"):
        pack.pack({"sources": [{"name": "a", "path": path}]}, str(tmp_path / "out"), workers=2)
    assert os.listdir(tmp_path / "out") == []


@pytest.mark.parametrize("when", ["while spooling", "before writing"])
def test_a_disk_that_would_be_filled_is_refused(tmp_path, monkeypatch, when):
    path = write(tmp_path / "a.jsonl", rows_of(50))
    if when == "while spooling":
        monkeypatch.setattr(scan, "ROOM_EVERY_BYTES", 10)
        free = pack.LOW_WATER_BYTES - 1
    else:
        free = pack.LOW_WATER_BYTES + 100
    monkeypatch.setattr(pack.shutil, "disk_usage", lambda _path: type("usage", (), {"free": free}))
    with pytest.raises(Refusal, match=r"has 0\.07 GB free, and packing needs 0\.07 GB there; make room"):
        pack.pack({"sources": [{"name": "a", "path": path}]}, str(tmp_path / "out"))
    assert os.listdir(tmp_path / "out") == []


@pytest.mark.parametrize("cores", [1, 2])
def test_a_disk_that_fills_up_while_spooling_is_said(tmp_path, monkeypatch, cores):
    def full(_self, _parsed):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(spool.SpoolWriter, "add", full)
    monkeypatch.setattr(streams, "BLOCK_BYTES", 200)
    path = write(tmp_path / "a.jsonl", rows_of(50))
    with pytest.raises(Refusal, match=r"packing in .* failed: .*No space left on device; see to its free space"):
        pack.pack({"sources": [{"name": "a", "path": path}]}, str(tmp_path / "out"), workers=cores)
    assert os.listdir(tmp_path / "out") == []


def test_a_parquet_file_of_null_values_and_other_columns(tmp_path):
    table = pa.table({"text": ["x"] * 3, "input_ids": [[1], None, [2]], "loss_mask": [[1], [1], [0]]})
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(Refusal, match=r"a .*a\.parquet:2: input_ids is null, not a list"):
        packed(tmp_path / "out", [{"name": "a", "path": str(tmp_path / "a.parquet")}])


@pytest.mark.parametrize("form", [{}, {"separators": (",", ":")}, {"separators": (" ,", " : ")}, {"separators": (",\t", ": ")}])
def test_masks_in_any_spelling_of_json(tmp_path, form):
    """Also where an object in the row, or an escaped key, has the mask's name."""
    rows = rows_of(10)
    trap = {"meta": {"loss_mask": [1, 1, 1]}, "text": 'say "loss_mask": [0, 1]'}
    lines = [json.dumps(row, **form) for row in rows]
    lines += [json.dumps({**trap, **row}, **form) for row in rows]
    lines += [json.dumps({**row, **trap}, **form) for row in rows]
    lines += [json.dumps(row, **form).replace("loss_mask", "loss\\u005fmask") for row in rows]
    lines += [json.dumps({**row, "loss_mask": [bool(bit) for bit in row["loss_mask"]]}, **form) for row in rows]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    data, _ = packed(tmp_path / "out", [{"name": "a", "path": str(tmp_path / "a.jsonl")}])
    found = [(ids, mask) for _s, _f, _line, ids, mask in sorted(contents(data))]
    assert found == [(row["input_ids"], row["loss_mask"]) for row in rows] * 5


@pytest.mark.parametrize("text", [b"", b"2", b"0,", b"0, 1,1", b"0,1, 1", b"0 1", b"01", b"0,  1", b"-1", b"0,2", b"1.", b", 0"])
def test_a_mask_of_another_form_is_left_to_the_parser_of_json(text):
    assert records.plain_mask(text) is None
