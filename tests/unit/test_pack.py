# SPDX-License-Identifier: Apache-2.0
"""Sources in, one packed data set out: the same bytes every time, and every bad line named."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from forked import KILLED, forked, kill

from hidden_state_bridge import pack as pack_module
from hidden_state_bridge.errors import Refusal
from hidden_state_bridge.pack import pack
from hidden_state_bridge.packed import PackedDataset
from hidden_state_bridge.sources import shuffled


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def rows():
    generator = np.random.default_rng(5)
    return {
        name: [
            {"input_ids": generator.integers(0, 100, length).tolist(), "loss_mask": generator.integers(0, 2, length).tolist()}
            for length in generator.integers(1, 50, 30).tolist()
        ]
        for name in ("beta", "alpha", "gamma")
    }


@pytest.fixture
def sources(tmp_path, rows):
    return [{"name": name, "path": write(tmp_path / f"{name}.jsonl", part)} for name, part in rows.items()]


def reference(rows, seed, max_length):
    """The packed records in ten lines of plain Python."""
    records = []
    for name in sorted(rows):
        for line, row in enumerate(rows[name], 1):
            records.append((name, line, row["input_ids"][:max_length], row["loss_mask"][:max_length]))
    return [records[place] for place in shuffled(len(records), seed)]


@pytest.mark.parametrize("max_length", [None, 20, 1])
def test_equals_the_reference(tmp_path, sources, rows, max_length):
    result = pack({"sources": sources, "seed": 9, "max_length": max_length, "vocab_size": 100}, str(tmp_path / "out"))
    dataset = PackedDataset(result["path"])
    dataset.check_content()
    expected = reference(rows, 9, max_length)
    assert len(dataset) == len(expected) == result["meta"]["records"] == 90
    for index, (name, line, ids, mask) in enumerate(expected):
        record = dataset.record(index)
        assert (record.index, record.source, record.line) == (index, name, line)
        assert record.input_ids.dtype == np.int32 and record.loss_mask.dtype == np.uint8
        assert record.input_ids.tolist() == ids and record.loss_mask.tolist() == mask
    assert dataset.lengths.tolist() == [len(ids) for _, _, ids, _ in expected]
    meta = result["meta"]
    assert meta["tokens"] == sum(len(ids) for _, _, ids, _ in expected)
    assert meta["max_token_id"] == max(max(ids) for _, _, ids, _ in expected)
    for source in meta["sources"]:
        lengths = [len(row["input_ids"]) for row in rows[source["name"]]]
        assert source["cut"] == sum(length > (max_length or 100) for length in lengths)
        assert source["longest"] == min(max(lengths), max_length or 100)
        assert source["path"] == f"{source['name']}.jsonl"
    assert os.listdir(tmp_path / "out") and not [name for name in os.listdir(tmp_path / "out") if name.startswith(".")]


def test_order_and_place_of_the_sources_do_not_matter(tmp_path, sources, rows):
    first = pack({"sources": sources, "seed": 9}, str(tmp_path / "one"))
    (tmp_path / "moved").mkdir()
    moved = [
        {"name": source["name"], "path": write(tmp_path / "moved" / f"{source['name']}.jsonl", rows[source["name"]])}
        for source in reversed(sources)
    ]
    second = pack({"sources": moved, "seed": 9}, str(tmp_path / "two"))
    assert first["meta"] == second["meta"]
    assert os.path.basename(first["path"]) == first["meta"]["sha256"][:16]
    assert {os.stat(os.path.join(first["path"], name)).st_mode & 0o777 for name in os.listdir(first["path"])} == {0o600}
    third = pack({"sources": sources, "seed": 10}, str(tmp_path / "one"))
    assert third["meta"]["sha256"] != first["meta"]["sha256"]
    one, other = PackedDataset(first["path"]), PackedDataset(third["path"])
    bags = [sorted(data.record(i).input_ids.tobytes() for i in range(len(data))) for data in (one, other)]
    assert bags[0] == bags[1]


def test_the_shuffle_is_fixed_for_all_time():
    assert shuffled(8, 0).tolist() == [3, 2, 1, 6, 0, 7, 4, 5]
    assert sorted(shuffled(1000, 3).tolist()) == list(range(1000))


def test_the_same_sources_are_recognised_and_a_change_is_not(tmp_path, sources):
    out = str(tmp_path / "out")
    first = pack({"sources": sources, "seed": 9}, out)
    again = pack({"sources": sources, "seed": 9}, out)
    assert first["changed"] and not again["changed"]
    assert (again["path"], again["meta"], again["table"]) == (first["path"], first["meta"], first["table"])
    assert pack({"sources": sources, "seed": 9, "max_length": 8}, out)["changed"]
    with open(sources[0]["path"], "a") as stream:
        stream.write('{"input_ids": [1], "loss_mask": [1]}\n')
    assert pack({"sources": sources, "seed": 9}, out)["meta"]["records"] == 91


def test_a_damaged_packed_set_is_packed_again(tmp_path, sources):
    out = str(tmp_path / "out")
    first = pack({"sources": sources}, out)
    with open(os.path.join(first["path"], "tokens.npy"), "r+b") as stream:
        stream.seek(-1, 2)
        stream.write(b"\x55")
    again = pack({"sources": sources}, out)
    assert again["changed"] and again["meta"] == first["meta"]
    PackedDataset(again["path"]).check_content()


def test_dry_run_writes_nothing_and_counts_all(tmp_path, sources):
    result = pack({"sources": sources, "seed": 9}, str(tmp_path / "out"), dry_run=True)
    assert result["path"] is None and result["changed"] and not (tmp_path / "out").exists()
    real = pack({"sources": sources, "seed": 9}, str(tmp_path / "out"))
    for key in ("records", "tokens", "longest", "sources", "max_token_id"):
        assert result["meta"][key] == real["meta"][key]
    dry = pack({"sources": sources, "seed": 9}, str(tmp_path / "out"), dry_run=True)
    assert not dry["changed"] and dry["path"] == real["path"]


def test_missing_masks_can_be_ones(tmp_path):
    sources = [{"name": "a", "path": write(tmp_path / "a.jsonl", [{"tokens": [1, 2, 3]}])}]
    config = {"sources": sources, "missing_mask": "ones", "input_ids_field": "tokens"}
    assert PackedDataset(pack(config, str(tmp_path / "out"))["path"]).record(0).loss_mask.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({}, "sources is empty"),
        ({"sources": []}, "sources is empty"),
        ({"sources": [{"name": "a"}]}, "needs a name and a path"),
        ({"sources": [{"name": "a", "path": "x"}, {"name": "a", "path": "y"}]}, "two sources are called 'a'"),
        ({"sources": [{"name": "a", "path": "x"}], "seed": "7"}, "seed is '7'; it must be an integer"),
        ({"sources": [{"name": "a", "path": "x"}], "max_length": 0}, "max_length is 0"),
        ({"sources": [{"name": "a", "path": "x"}], "missing_mask": "zeros"}, "it must be fail or ones"),
        ({"sources": [{"name": "a", "path": "x"}], "sead": 1}, "unknown setting sead"),
        ({"sources": [{"name": "a", "path": "/nowhere/a.jsonl"}]}, "a /nowhere/a.jsonl: cannot be read: No such file"),
        ({"sources": [{"name": "a", "path": "/dev"}]}, "a /dev: the directory holds no file that ends in"),
    ],
)
def test_a_bad_configuration_is_refused(tmp_path, config, text):
    with pytest.raises(Refusal) as caught:
        pack(config, str(tmp_path / "out"))
    assert text in str(caught.value)


def test_sources_without_records_are_refused(tmp_path):
    path = write(tmp_path / "a.jsonl", [])
    with pytest.raises(Refusal, match="the sources hold no records"):
        pack({"sources": [{"name": "a", "path": path}]}, str(tmp_path / "out"))


def test_the_command_prints_a_table_and_one_object(tmp_path, sources):
    command = [sys.executable, "-m", "hidden_state_bridge", "pack", "--config", "-", "--out-dir", str(tmp_path / "out")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, input=json.dumps({"sources": sources}), env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert done.stdout.splitlines()[:-1] == result["table"]
    assert result["table"][0].split() == [
        "source",
        "records",
        "tokens",
        "mean",
        "longest",
        "cut",
        "untrained",
        "dropped",
        "repeated",
        "rejected",
    ]
    assert result["table"][-1].split()[:2] == ["total", "90"]
    with open(sources[1]["path"], "a") as stream:
        stream.write("no\n")
    done = subprocess.run(command, input=json.dumps({"sources": sources}), env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == ""
    assert f"{sources[1]['name']} {sources[1]['path']}:31: not JSON" in done.stderr


def test_what_a_killed_packer_left_goes_and_one_at_work_keeps_its_own(tmp_path, sources):
    out = tmp_path / "out"

    def killed() -> None:
        with pack_module._workspace(str(out)) as work:
            (Path(work) / "1.ids").write_bytes(bytes(1000))
            kill()

    assert forked(killed)[0] == KILLED
    [left] = out.iterdir()
    asked, answer = os.pipe()
    child = os.fork()
    if child == 0:
        with pack_module._workspace(str(out)):
            os.write(answer, b"1")
            time.sleep(60)
        os._exit(0)
    os.close(answer)
    try:
        assert os.read(asked, 1)
        [at_work] = out.iterdir()
        assert at_work != left
        pack({"sources": sources}, str(out))
        assert at_work.is_dir()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(asked)
    pack({"sources": sources, "seed": 4}, str(out))
    assert not list(out.glob(".pack-*"))
