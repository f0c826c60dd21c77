# SPDX-License-Identifier: Apache-2.0
"""ModelOpt's own data set and collator on our files."""

from __future__ import annotations

import hosts
import torch
from modelopt.torch.speculative.eagle.utils import EagleOfflineDataCollator, OfflineSupervisedDataset


def files_of(output):
    return sorted((output.path / "modelopt").rglob("*.pt"))


def test_the_data_set_gives_the_states_that_were_captured(output):
    files = files_of(output)
    dataset = OfflineSupervisedDataset(files, answer_only_loss=True)
    assert len(dataset) == len(output.dataset)
    for path, sample in zip(files, dataset):
        number = int(path.stem.removeprefix("data_"))
        ids, mask = output.record(number)
        assert sample["input_ids"].tolist() == ids and sample["loss_mask"].tolist() == mask
        assert torch.equal(sample["aux_hidden_states"], hosts.aux(number, len(ids)))
        assert torch.equal(sample["base_model_hidden_states"], hosts.post_norm(number, len(ids)))
        assert sample["base_hidden_prenorm"] is False
        assert torch.load(path, weights_only=True)["conversation_id"] == path.stem


def test_the_collator_takes_the_samples(output):
    dataset = OfflineSupervisedDataset(files_of(output), answer_only_loss=True)
    batch = EagleOfflineDataCollator(32)([dataset[index] for index in range(4)])
    assert batch["input_ids"].shape == (4, 32)
    assert batch["base_model_outputs"]["aux_hidden_states"].shape == (4, 32, 3 * hosts.HIDDEN)
