# SPDX-License-Identifier: GPL-3.0-or-later
"""Bad input is named by source, file and line with a remedy; skipped, it leaves exactly the good records and a list."""

from __future__ import annotations

import gzip
import json
import os
import random
import stat

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from packing import contents, lines_of, packed, write

from hidden_state_bridge import streams
from hidden_state_bridge.errors import Refusal

GOOD = {"input_ids": [1, 2], "loss_mask": [0, 1]}
BAD_LINES = {
    "not JSON": (b"{", "not JSON ("),
    "a cut line": (b'{"input_ids": [1, 2', "not JSON ("),
    "bytes that are no text": (b'{"input_ids": [1], "loss_mask": [1], "x": "\xff"}', "not JSON ("),
    "not an object": (b"[1, 2]", "a list, not a JSON object; each line must be one object"),
    "no input_ids": (b'{"loss_mask": [1]}', "there is no input_ids and no conversation; name the field"),
    "input_ids of another type": (b'{"input_ids": "1 2", "loss_mask": [1]}', "input_ids is a string, not a list"),
    "null input_ids": (b'{"input_ids": null, "loss_mask": []}', "input_ids is null, not a list"),
    "empty": (b'{"input_ids": [], "loss_mask": []}', "input_ids is empty; take the line out"),
    "float": (b'{"input_ids": [1, 2.0], "loss_mask": [1, 1]}', "input_ids[1] is 2.0, not an integer"),
    "boolean": (b'{"input_ids": [1, true], "loss_mask": [1, 1]}', "input_ids[1] is a boolean, not an integer"),
    "text": (b'{"input_ids": ["1"], "loss_mask": [1]}', "input_ids[0] is a string, not an integer"),
    "negative": (b'{"input_ids": [4, -1], "loss_mask": [1, 1]}', "input_ids[1] is -1; token ids cannot be negative"),
    "outside the vocabulary": (b'{"input_ids": [100], "loss_mask": [1]}', "input_ids[0] is 100, outside the vocabulary of 100"),
    "huge": (b'{"input_ids": [18446744073709551615], "loss_mask": [1]}', "outside the vocabulary of 100"),
    "mask too short": (b'{"input_ids": [1, 2], "loss_mask": [1]}', "loss_mask has 1 entries and input_ids 2"),
    "mask too long": (b'{"input_ids": [1], "loss_mask": [1, 0]}', "loss_mask has 2 entries and input_ids 1"),
    "mask of 2": (b'{"input_ids": [1, 2], "loss_mask": [1, 2]}', "loss_mask[1] is 2; only 0 and 1 are allowed"),
    "mask of -1": (b'{"input_ids": [1], "loss_mask": [-1]}', "loss_mask[0] is -1; only 0 and 1 are allowed"),
    "mask of 300": (b'{"input_ids": [1], "loss_mask": [300]}', "loss_mask[0] is 300; only 0 and 1 are allowed"),
    "mask of floats": (b'{"input_ids": [1], "loss_mask": [0.5]}', "loss_mask[0] is 0.5; only 0 and 1 are allowed"),
    "mask of another type": (b'{"input_ids": [1], "loss_mask": "1"}', "loss_mask is a string, not a list"),
    "no mask": (b'{"input_ids": [1]}', "there is no loss_mask; add it, or set missing_mask to ones"),
    "BOM": (b'\xef\xbb\xbf{"input_ids": [1], "loss_mask": [1]}', "it begins with a byte order mark; save the file as UTF-8 without"),
    "CRLF": (b'{"input_ids": [1], "loss_mask": [1]}\r', "it ends in CR LF, so a transfer has changed the file; fetch it again"),
    "an id of another type": (b'{"id": [1], "input_ids": [1], "loss_mask": [1]}', "id is a list; give an id as text or a number"),
    "no conversation": (b'{"messages": []}', "the conversation is empty; give a list of messages"),
}
KINDS = {".jsonl": bytes, ".jsonl.gz": gzip.compress, ".jsonl.zst": zstandard.compress}


def refusal(tmp_path, sources, **settings) -> str:
    with pytest.raises(Refusal) as caught:
        packed(tmp_path / "out", sources, **settings)
    assert os.listdir(tmp_path / "out") == [], "something half-written stays"
    return str(caught.value)


def skipped(tmp_path, sources, **settings) -> tuple[list, list, dict]:
    """(records, lines of the rejects file, meta) with bad input skipped."""
    data, result = packed(tmp_path / "skip", sources, on_bad="skip", **settings)
    # It quotes what is in the sources.
    assert stat.S_IMODE(os.stat(result["rejects"]).st_mode) == 0o600
    with open(result["rejects"], encoding="utf-8") as stream:
        rejects = [json.loads(line) for line in stream]
    assert sum(row["rejected"] for row in result["meta"]["sources"]) == len(rejects)
    assert result["table"][-1].split()[-1] == str(len(rejects))
    assert not [name for name in os.listdir(tmp_path / "skip") if name.startswith(".")]
    return sorted(contents(data)), rejects, result["meta"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", BAD_LINES)
def test_a_bad_line_is_named_or_skipped(tmp_path, case, kind):
    line, reason = BAD_LINES[case]
    path = tmp_path / f"bad{kind}"
    good = lines_of([GOOD])
    path.write_bytes(KINDS[kind](good + b"\n" + line + b"\n" + good))
    source = [{"name": "B3_bad", "path": str(path)}]
    message = refusal(tmp_path, source, vocab_size=100)
    assert message.startswith(f"B3_bad {path}:3: ")
    assert reason in message and ";" in message
    records, rejects, _meta = skipped(tmp_path, source, vocab_size=100)
    assert records == [("B3_bad", path.name, number, [1, 2], [0, 1]) for number in (1, 4)]
    assert [(item["source"], item["file"], item["line"]) for item in rejects] == [("B3_bad", str(path), 3)]
    assert reason in rejects[0]["reason"] and rejects[0]["text"] == line.decode(errors="replace")[:200]


@pytest.mark.parametrize("kind", KINDS)
def test_a_line_of_100_megabytes_is_never_held(tmp_path, kind, monkeypatch):
    """Here of 10 MB where 4 are allowed: a reader that took the line whole would give it to the parser whole."""
    monkeypatch.setattr(streams, "MAX_LINE_BYTES", 4 << 20)
    monkeypatch.setattr("hidden_state_bridge.records.MAX_LINE_BYTES", 4 << 20)
    monkeypatch.setattr(streams, "BLOCK_BYTES", 1 << 20)
    path = tmp_path / f"bad{kind}"
    good, digits = lines_of([GOOD]), random.Random(1)
    long = b'{"input_ids": [' + ", ".join(str(digits.randrange(10**6)) for _ in range(1_250_000)).encode() + b"]}\n"
    path.write_bytes(KINDS[kind](good + long + good + long[:3000] + b"\n" + good))
    source = [{"name": "B3_bad", "path": str(path)}]
    assert refusal(tmp_path, source).startswith(f"B3_bad {path}:2: the line is longer than 4 MiB, and no record is")
    records, rejects, _meta = skipped(tmp_path, source)
    assert [line for _source, _file, line, _ids, _mask in records] == [1, 3, 5]
    assert [item["line"] for item in rejects] == [2, 4]


@pytest.mark.parametrize("kind", [".jsonl.gz", ".jsonl.zst"])
@pytest.mark.parametrize("cut", [0.0, 0.5, 0.999])
def test_a_cut_file_is_named_at_the_line_where_it_breaks_off(tmp_path, kind, cut):
    rows = [{"input_ids": [random.Random(i).randrange(10**6) for _ in range(500)], "loss_mask": [1] * 500} for i in range(200)]
    whole = KINDS[kind](lines_of(rows))
    (tmp_path / "set").mkdir()
    path = tmp_path / "set" / f"cut{kind}"
    path.write_bytes(whole[: int(len(whole) * cut)])
    write(tmp_path / "set" / "whole.jsonl", rows[:3])
    source = [{"name": "a", "path": str(tmp_path / "set")}]
    message = refusal(tmp_path, source)
    assert message.startswith(f"a {path}:") and "file ends in the middle; fetch it again" in message
    records, rejects, _meta = skipped(tmp_path, source)
    (line,) = [item["line"] for item in rejects]
    assert message.startswith(f"a {path}:{line}: ")
    part = [item for item in records if item[1] == path.name]
    assert [item[2] for item in part] == list(range(1, line))
    assert all(ids == rows[number - 1]["input_ids"] for _s, _f, number, ids, _m in part)
    assert len(records) - len(part) == 3
    if cut == 0.5:
        assert line > 1 or kind == ".jsonl.zst"


@pytest.mark.parametrize("kind", [".jsonl.gz", ".jsonl.zst"])
def test_damaged_compressed_data_is_named(tmp_path, kind):
    path = tmp_path / f"a{kind}"
    path.write_bytes(lines_of([GOOD] * 10))
    assert f"damaged {kind.rpartition('.')[2].replace('gz', 'gzip').replace('zst', 'zstd').replace('stdd', 'std')} data (" in refusal(
        tmp_path, [{"name": "a", "path": str(path)}]
    )


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
@pytest.mark.parametrize("damage", ["cut", "other"])
def test_a_damaged_file_of_columns_is_named(tmp_path, suffix, damage):
    whole = write(tmp_path / "set" / f"whole{suffix}", [GOOD] * 5)
    path = tmp_path / "set" / f"a_bad{suffix}"
    content = open(whole, "rb").read()
    path.write_bytes(content[: len(content) // 2] if damage == "cut" else lines_of([GOOD]))
    source = [{"name": "a", "path": str(tmp_path / "set")}]
    message = refusal(tmp_path, source)
    assert (
        message.startswith(f"a {path}")
        and f"not a whole {suffix[1:].capitalize()} file (" in message
        and "fetch or write it again" in message
    )
    records, rejects, _meta = skipped(tmp_path, source)
    assert {item["file"] for item in rejects} == {str(path)}
    assert [line for _s, name, line, _i, _m in records if name == f"whole{suffix}"] == [1, 2, 3, 4, 5]


COLUMNS = {
    "float": ({"input_ids": pa.array([[1.0]]), "loss_mask": [[1]]}, "input_ids is a column of lists of double, not of integers"),
    "text": ({"input_ids": ["1"], "loss_mask": [[1]]}, "input_ids is a column of string, not of lists"),
    "empty": ({"input_ids": pa.array([[]], pa.list_(pa.int64())), "loss_mask": [[1]]}, "input_ids is empty"),
    "negative": ({"input_ids": [[1, -4]], "loss_mask": [[1, 1]]}, "input_ids[1] is -4; token ids cannot be negative"),
    "outside": ({"input_ids": [[1, 100]], "loss_mask": [[1, 1]]}, "input_ids[1] is 100, outside the vocabulary of 100"),
    "beyond 64 bits": ({"input_ids": pa.array([[2**64 - 1]], pa.list_(pa.uint64())), "loss_mask": [[1]]}, "outside the vocabulary of 100"),
    "null within": ({"input_ids": [[1, None]], "loss_mask": [[1, 1]]}, "input_ids[1] is null, not an integer"),
    "null": ({"input_ids": pa.array([None], pa.list_(pa.int64())), "loss_mask": [[1]]}, "input_ids is null, not a list"),
    "mask length": ({"input_ids": [[1, 2]], "loss_mask": [[1]]}, "loss_mask has 1 entries and input_ids 2"),
    "mask of 2": ({"input_ids": [[1, 2]], "loss_mask": [[1, 2]]}, "loss_mask[1] is 2; only 0 and 1 are allowed"),
    "no mask": ({"input_ids": [[1, 2]]}, "there is no loss_mask; add it"),
    "null mask": ({"input_ids": [[1, 2]], "loss_mask": pa.array([None], pa.list_(pa.int8()))}, "there is no loss_mask; add it"),
    "neither": ({"text": ["x"]}, "there is no input_ids and no conversation"),
}


@pytest.mark.parametrize("case", COLUMNS)
def test_a_bad_row_is_named_or_skipped(tmp_path, case):
    columns, reason = COLUMNS[case]
    write(tmp_path / "set" / "good.parquet", [GOOD] * 2)
    path = tmp_path / "set" / "bad.parquet"
    pq.write_table(pa.table(columns), path)
    source = [{"name": "a", "path": str(tmp_path / "set")}]
    message = refusal(tmp_path, source, vocab_size=100)
    assert message.startswith(f"a {path}:1: ") and reason in message and ";" in message
    records, rejects, _meta = skipped(tmp_path, source, vocab_size=100)
    assert [(name, line) for _s, name, line, _i, _m in records] == [("good.parquet", 1), ("good.parquet", 2)]
    assert [(item["file"], item["line"]) for item in rejects] == [(str(path), 1)]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_the_same_id_twice_is_named_within_a_source(tmp_path, suffix):
    rows = [dict(GOOD, id=name) for name in ("a", "b", "a", "c", "a", "b")]
    first, other = write(tmp_path / "set" / f"1{suffix}", rows[:4]), write(tmp_path / "set" / f"2{suffix}", rows[4:])
    source = [{"name": "A", "path": str(tmp_path / "set")}, {"name": "B", "path": first, "id_field": ""}]
    message = refusal(tmp_path, source)
    assert message.startswith(f"A {first}:3: its id is that of {first}:1; take one out, or set id_field to another field")
    records, rejects, _meta = skipped(tmp_path, source)
    assert [(name, line) for source, name, line, _i, _m in records if source == "A"] == [(f"1{suffix}", line) for line in (1, 2, 4)]
    assert [(item["file"], item["line"], item["reason"].split(";")[0]) for item in rejects] == [
        (first, 3, f"its id is that of {first}:1"),
        (other, 1, f"its id is that of {first}:1"),
        (other, 2, f"its id is that of {first}:2"),
    ]
    assert len([item for item in records if item[0] == "B"]) == 4


def test_ids_of_different_types_and_records_without_one_are_different(tmp_path):
    rows = [dict(GOOD, id=value) for value in (1, "1", None, None)] + [GOOD, GOOD]
    data, _ = packed(tmp_path / "out", [{"name": "a", "path": write(tmp_path / "a.jsonl", rows)}])
    assert len(data) == 6


@pytest.mark.parametrize("on_bad", ["fail", "skip"])
@pytest.mark.parametrize(("path", "reason"), [("/nowhere/a.jsonl", "No such file or directory"), ("/nowhere/a.parquet", "No such file")])
def test_a_missing_source_is_refused_even_where_bad_records_are_skipped(tmp_path, path, reason, on_bad):
    good = {"name": "z", "path": write(tmp_path / "z.jsonl", [GOOD])}
    message = refusal(tmp_path, [{"name": "a", "path": path}, good], on_bad=on_bad)
    assert message.startswith(f"a {path}: cannot be read: {reason}")


def test_an_unreadable_file_in_a_directory_is_named_or_skipped(tmp_path):
    write(tmp_path / "set" / "good.jsonl", [GOOD])
    (tmp_path / "set" / "loop.jsonl").symlink_to("loop.jsonl")
    source = [{"name": "a", "path": str(tmp_path / "set")}]
    assert refusal(tmp_path, source).startswith(f"a {tmp_path}/set/loop.jsonl: cannot be read: Too many levels of symbolic links")
    records, rejects, _meta = skipped(tmp_path, source)
    assert len(records) == 1 and rejects[0]["line"] == 0


def test_a_source_of_bad_records_alone_is_never_skipped_whole(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"input_ids": [1]}] * 3)
    good = {"name": "z", "path": write(tmp_path / "z.jsonl", [GOOD])}
    message = refusal(tmp_path, [{"name": "a", "path": path}, good], on_bad="skip")
    assert message.startswith(f"a {path}:1: there is no loss_mask") and message.endswith(
        "(the source has no good record, so nothing of it can be skipped)"
    )


def test_ids_beyond_32_bits_are_refused_without_a_vocabulary(tmp_path):
    for number in (2**31, 2**32):
        path = write(tmp_path / "a.jsonl", [{"input_ids": [number], "loss_mask": [1]}])
        assert f"{number}, more than 32 bits hold" in refusal(tmp_path, [{"name": "a", "path": path}])


def test_skipping_changes_nothing_where_all_is_good(tmp_path):
    source = [{"name": "a", "path": write(tmp_path / "a.jsonl", [GOOD] * 5)}]
    _, one = packed(tmp_path / "one", source)
    _, other = packed(tmp_path / "other", source, on_bad="skip")
    assert one["meta"] == other["meta"] and other["rejects"] is None


def test_a_file_that_grows_meanwhile_is_refused(tmp_path, monkeypatch):
    path = write(tmp_path / "a.jsonl", [GOOD] * 5)
    pieces = streams._pieces

    def growing(*arguments):
        yield from pieces(*arguments)
        with open(path, "ab") as stream:
            stream.write(lines_of([GOOD]))

    monkeypatch.setattr(streams, "_pieces", growing)
    assert f"a {path}: it changed while it was read; wait until it is complete" in refusal(tmp_path, [{"name": "a", "path": path}])
