# SPDX-License-Identifier: Apache-2.0
"""SpecForge's own reader, store, normalizer and collator on our files, its vocabulary mapping, and one step of its draft model."""

from __future__ import annotations

import collections
import json
import re
import types

import hosts
import pytest
import torch
from safetensors.torch import save_file
from specforge.algorithms.eagle3.data import build_offline_collator, build_offline_normalizer, build_offline_reader
from specforge.runtime.data_plane.feature_store import LocalFeatureStore
from specforge.runtime.data_plane.offline_reader import OfflineManifestReader

MAX_LEN = 32


def samples(output, max_len=MAX_LEN):
    """(record, normalized sample) as the trainer gets them."""
    reader = build_offline_reader(str(output.path / "specforge"), run_id="test", ttt_length=3, max_len=max_len)
    normalize, features = build_offline_normalizer(max_len), LocalFeatureStore()
    for ref in reader:
        raw, handle = features.get(ref)
        yield int(re.search(r"data_(\d+)\.ckpt$", ref.feature_store_uri)[1]), normalize(raw)
        features.release(handle)


def test_the_reader_finds_and_validates_every_record(output):
    refs = OfflineManifestReader(str(output.path / "specforge"), validate_files=True).read()
    assert len(refs) == len(output.dataset)
    assert sum(ref.num_tokens for ref in refs) == int(output.dataset.lengths.sum())
    assert refs[0].feature_specs["aux_hidden_state"].dtype == "bfloat16"


def test_the_trainer_gets_the_states_that_were_captured(output):
    seen = set()
    for number, sample in samples(output):
        ids, mask = output.record(number)
        kept = min(len(ids), MAX_LEN)
        assert sample["input_ids"].tolist() == [ids[:MAX_LEN]]
        # The trainer itself takes the last token out.
        assert sample["loss_mask"].tolist() == [mask[: kept - 1] + [0]]
        assert torch.equal(sample["hidden_state"], hosts.aux(number, len(ids))[None, :MAX_LEN])
        assert torch.equal(sample["target"], hosts.post_norm(number, len(ids))[None, :MAX_LEN])
        seen.add(number)
    assert seen == set(range(len(output.dataset)))


def batch_of(output, count=4):
    return build_offline_collator()([sample for _number, sample in samples(output)][:count])


def test_the_collator_pads_what_has_no_padding(output):
    batch = batch_of(output)
    longest = batch["attention_mask"].sum(dim=1).max()
    assert batch["hidden_state"].shape == (4, longest, 3 * hosts.HIDDEN)
    assert batch["target"].shape == (4, longest, hosts.HIDDEN)


def test_the_vocabulary_mapping_is_what_specforge_would_make_of_the_files(output):
    from specforge.data.preprocessing import process_token_dict_to_mappings
    from specforge.training.vocab_mapping import count_effective_feature_tokens

    counts = count_effective_feature_tokens(str(output.path / "specforge"), target_vocab_size=hosts.VOCAB)
    # Of equally frequent tokens SpecForge takes the one that it has met first; here that is the lower id.
    ordered = collections.Counter(dict(sorted(counts.items())))
    d2t, t2d = process_token_dict_to_mappings(ordered, 32, hosts.VOCAB)
    ours = torch.load(output.path / "vocab_mapping.pt", weights_only=True)
    assert torch.equal(ours["d2t"], d2t) and torch.equal(ours["t2d"], t2d)
    assert (ours["d2t"].dtype, ours["t2d"].dtype) == (torch.int64, torch.bool)


@pytest.fixture
def target(tmp_path):
    """A target model of which nothing is needed but its head."""
    config = {
        "model_type": "llama",
        "hidden_size": hosts.HIDDEN,
        "vocab_size": hosts.VOCAB,
        "num_hidden_layers": 8,
        "num_attention_heads": 2,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"lm_head.weight": torch.randn(hosts.VOCAB, hosts.HIDDEN)}, tmp_path / "head.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"lm_head.weight": "head.safetensors"}}))
    return str(tmp_path)


def test_a_real_draft_model_takes_one_step_on_the_output(output, target, monkeypatch):
    from specforge.algorithms.eagle3 import model
    from specforge.algorithms.eagle3.model import OnlineEagle3Model
    from specforge.core import loss as losses_of
    from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3
    from specforge.modeling.target.target_head import TargetHead
    from specforge.runtime.contracts import TrainBatch
    from specforge.training.strategies.base import Eagle3TrainStrategy
    from transformers import LlamaConfig

    # The loss is a Triton kernel, which the CPU has no driver for; the package's own reference of it stands in.
    monkeypatch.setattr(model, "LogSoftmaxLoss", types.SimpleNamespace(apply=losses_of._compute_loss))
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hosts.HIDDEN,
        intermediate_size=32,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_hidden_layers=1,
        vocab_size=hosts.VOCAB,
        max_position_embeddings=64,
        pad_token_id=0,
    )
    config.draft_vocab_size = 32
    draft = LlamaForCausalLMEagle3(config, attention_backend="sdpa").to(hosts.DTYPE)
    draft.load_vocab_mapping(str(output.path / "vocab_mapping.pt"))
    head = TargetHead(target)
    head.load_weights(target)
    head.freeze_weights()
    strategy = Eagle3TrainStrategy(OnlineEagle3Model(draft, length=3, attention_backend="sdpa"), target_head=head.to(hosts.DTYPE))
    optimizer = torch.optim.AdamW([weight for weight in draft.parameters() if weight.requires_grad], lr=1e-2)
    batch = TrainBatch(sample_ids=[], tensors=batch_of(output), strategy="eagle3", metadata={"target_repr": "hidden_state"})
    losses = []
    for _step in range(2):
        optimizer.zero_grad()
        loss = strategy.forward_loss(batch).loss
        loss.backward()
        losses.append(float(loss.detach()))
        assert draft.fc.weight.grad.abs().sum() > 0
        optimizer.step()
    assert all(torch.isfinite(torch.tensor(losses))), losses
    assert losses[1] < losses[0], losses
