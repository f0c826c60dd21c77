# SPDX-License-Identifier: Apache-2.0
"""speculators' own data set, its check and its collator on our files and the Arrow data set beside them."""

from __future__ import annotations

import warnings

import hosts
import pytest
import torch
from datasets import load_from_disk
from hs_connectors import FileTransfer
from speculators.data_generation.offline import (
    check_hidden_states,
    find_corrupt_hidden_state_indices,
    get_existing_hidden_state_indices,
)
from speculators.train.data import ArrowDataset, CollateFn

import hs_manifest

pytestmark = pytest.mark.filterwarnings("error")


def test_the_data_set_gives_the_states_that_were_captured(output):
    dataset = ArrowDataset(64, output.path / "speculators", on_missing="raise")
    assert len(dataset) == len(output.dataset)
    assert dataset.approx_lengths == output.dataset.lengths.tolist()
    for number in range(len(dataset)):
        ids, mask = output.record(number)
        with warnings.catch_warnings():
            # A sample whose token ids differ is dropped with a warning.
            warnings.simplefilter("error")
            sample = dataset[number]
        assert sample["input_ids"].tolist() == ids and sample["loss_mask"].tolist() == mask
        assert torch.equal(sample["hidden_states"], hosts.aux(number, len(ids)))
        assert torch.equal(sample["verifier_last_hidden_states"], hosts.pre_norm(number, len(ids)))


def test_a_split_finds_its_files(output):
    held_out = ArrowDataset(64, output.path / "speculators", on_missing="raise", train_ratio=0.75, split="val")
    first = len(output.dataset) - len(held_out)
    assert held_out[0]["input_ids"].tolist() == output.record(first)[0]


def test_the_check_of_the_package_passes_for_every_file(output):
    directory = output.path / "speculators" / "hidden_states"
    indices = get_existing_hidden_state_indices(directory)
    assert indices == list(range(len(output.dataset)))
    assert find_corrupt_hidden_state_indices(directory, indices) == {}
    transfer, rows = FileTransfer(directory), load_from_disk(output.path / "speculators")
    for index in indices:
        check_hidden_states(transfer.get_cached(index), rows[index]["input_ids"].tolist())


def test_the_collator_takes_the_samples(output):
    dataset = ArrowDataset(64, output.path / "speculators", on_missing="raise")
    batch = CollateFn(64, hosts.HIDDEN)([dataset[number] for number in range(4)])
    assert batch["error_records"] == 0
    assert batch["hidden_states"].shape == (1, 64, 3 * hosts.HIDDEN)


def test_a_part_of_the_records_has_rows_without_a_hole(output, tmp_path):
    some = [3, 5, 11, 20]
    host = hosts.make_host(tmp_path / "one", output.dataset, some, ("speculators",))
    result = hosts.collection(tmp_path / "collected", [host], output.dataset, partial=True)
    assert result["records"] == 4
    dataset = ArrowDataset(64, tmp_path / "collected" / "speculators", on_missing="raise")
    assert [dataset[row]["input_ids"].tolist() for row in range(len(dataset))] == [output.record(number)[0] for number in some]


def test_a_part_that_grows_keeps_its_rows(output, tmp_path):
    def rows():
        dataset = ArrowDataset(64, tmp_path / "collected" / "speculators", on_missing="raise")
        return [dataset[row]["input_ids"].tolist() for row in range(len(dataset))]

    host = hosts.make_host(tmp_path / "one", output.dataset, [3, 20], ("speculators",))
    hosts.collection(tmp_path / "collected", [host], output.dataset, partial=True)
    hosts.make_host(tmp_path / "one", output.dataset, [5, 1], ("speculators",))
    hosts.collection(tmp_path / "collected", [host], output.dataset, partial=True)
    assert rows() == [output.record(number)[0] for number in (3, 20, 1, 5)]
    # What is lost leaves no hole: the last rows move up. The file is linked, so the collection's is damaged too and does not stay.
    [lost] = (line["file"] for line in hs_manifest.read_lines(str(host / hs_manifest.MANIFEST)) if line["id"] == 20)
    (host / lost).write_bytes(bytes((host / lost).stat().st_size))
    lines = [line for line in hs_manifest.read_lines(str(host / hs_manifest.MANIFEST)) if line["id"] != 20]
    hs_manifest.write_lines(str(host / hs_manifest.MANIFEST), lines)
    hosts.collection(tmp_path / "collected", [host], output.dataset, partial=True)
    assert rows() == [output.record(number)[0] for number in (3, 5, 1)]
    assert len(list((tmp_path / "collected" / "speculators" / "hidden_states").iterdir())) == 3


def test_the_frequencies_are_what_the_package_counts(output, tmp_path):
    from speculators.train.vocab_mapping import save_token_frequency_distribution

    save_token_frequency_distribution(load_from_disk(output.path / "speculators"), tmp_path / "theirs.pt")
    theirs = torch.load(tmp_path / "theirs.pt", weights_only=True)
    assert torch.load(output.path / "speculators" / "token_freq.pt", weights_only=True) == theirs
