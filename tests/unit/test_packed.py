# SPDX-License-Identifier: Apache-2.0
"""What the reader of packed data sets refuses."""

from __future__ import annotations

import json
import os

import pytest

from hidden_state_bridge.__main__ import main
from hidden_state_bridge.errors import Refusal
from hidden_state_bridge.pack import pack
from hidden_state_bridge.packed import PackedDataset


@pytest.fixture
def path(tmp_path):
    source = tmp_path / "a.jsonl"
    source.write_text("".join(json.dumps({"input_ids": [i, 7], "loss_mask": [0, 1]}) + "\n" for i in range(9)))
    return pack({"sources": [{"name": "a", "path": str(source)}]}, str(tmp_path / "out"))["path"]


def test_records_outside_are_refused(path):
    dataset = PackedDataset(path)
    for index in (-1, 9):
        with pytest.raises(IndexError):
            dataset.record(index)
    with pytest.raises(ValueError, match="read-only"):
        dataset.record(0).input_ids[0] = 1


def test_a_missing_directory_or_file_is_named(tmp_path, path):
    with pytest.raises(Refusal, match="nowhere is not complete"):
        PackedDataset(str(tmp_path / "nowhere"))
    os.unlink(os.path.join(path, "line.npy"))
    with pytest.raises(Refusal, match=r"no .*line\.npy; pack and stage the data set again"):
        PackedDataset(path)


def test_a_truncated_file_is_named(path):
    os.truncate(os.path.join(path, "tokens.npy"), 100)
    with pytest.raises(Refusal, match=r"tokens\.npy has 100 bytes instead of 200"):
        PackedDataset(path)


def test_a_flipped_byte_is_found_by_its_hash(path, capsys):
    assert main(["dataset-check", path]) == 0
    assert json.loads(capsys.readouterr().out)["records"] == 9
    name = os.path.join(path, "loss_mask.npy")
    with open(name, "r+b") as stream:
        stream.seek(-3, 2)
        byte = stream.read(1)
        stream.seek(-3, 2)
        stream.write(bytes([byte[0] ^ 1]))
    with pytest.raises(Refusal, match=r"loss_mask\.npy has another hash"):
        PackedDataset(path).check_content()
    assert main(["dataset-check", path]) == 1
    assert "dataset-check: data set file" in capsys.readouterr().err


@pytest.mark.parametrize("change", [{"seed": 5}, {"sha256": "0" * 64}])
def test_a_meta_file_that_was_edited_is_refused(path, change):
    name = os.path.join(path, "meta.json")
    with open(name) as stream:
        meta = json.load(stream)
    with open(name, "w") as stream:
        json.dump({**meta, **change}, stream)
    with pytest.raises(Refusal, match=r"meta\.json does not match its own hash"):
        PackedDataset(path)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format": "hidden_state_bridge.packed/9"}'])
def test_a_meta_file_of_another_kind_is_refused(path, text):
    with open(os.path.join(path, "meta.json"), "w") as stream:
        stream.write(text)
    with pytest.raises(Refusal, match=r"is damaged|has format"):
        PackedDataset(path)
