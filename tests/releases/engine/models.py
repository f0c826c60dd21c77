# SPDX-License-Identifier: GPL-3.0-or-later
"""Tiny checkpoints of several structures, and the states that Hugging Face transformers computes with them."""

from __future__ import annotations

import copy
import hashlib
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from engines import ROLE, ROOT
from hs_capture.dumpfile import POST_NORM, PRE_NORM, layer_name

sys.path.append(str(ROLE))
import make_checkpoint

CACHE = ROOT / ".cache" / "release-models"
LAYERS, WIDTH, VOCABULARY, SEED = 8, 64, 512, 0

_DEEPSEEK = make_checkpoint.config_fields(LAYERS, 1, WIDTH, VOCABULARY)
_PLAIN = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": make_checkpoint.CONTEXT,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "initializer_range": 0.1,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


@dataclass(frozen=True)
class Structure:
    """A kind of model: `model_file` is SGLang's file with its decoder loop, `fields` are those of config.json.

    Experts are 128 wide, so that at tp=2 each rank holds a part of every expert.
    """

    model_file: str
    model_type: str
    fields: dict


STRUCTURES = {
    "deepseek_v3": Structure("deepseek_v2", "deepseek_v3", _DEEPSEEK),
    "deepseek_v2": Structure(
        "deepseek_v2",
        "deepseek_v2",
        {
            **_DEEPSEEK,
            "n_group": 1,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.0,
            "topk_method": "greedy",
            "scoring_func": "softmax",
        },
    ),
    "llama": Structure("llama", "llama", {**_PLAIN, "mlp_bias": False}),
    "qwen3_moe": Structure(
        "qwen2_moe",
        "qwen3_moe",
        {
            **_PLAIN,
            "moe_intermediate_size": 128,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
            "use_sliding_window": False,
        },
    ),
    "mixtral": Structure("mixtral", "mixtral", {**_PLAIN, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None}),
}


def checkpoint(name: str) -> Path:
    """The directory of a structure's checkpoint, written where it is missing or was written by other code."""
    structure = STRUCTURES[name]
    code = hashlib.sha256(Path(__file__).read_bytes() + Path(make_checkpoint.__file__).read_bytes()).hexdigest()
    directory = CACHE / name
    stamp = directory / f".made-{code[:16]}"
    if not stamp.exists():
        directory.mkdir(parents=True, exist_ok=True)
        for stale in directory.iterdir():
            stale.unlink()
        config = AutoConfig.for_model(structure.model_type, **copy.deepcopy(structure.fields))
        model = make_checkpoint.random_model(AutoModelForCausalLM.from_config, config, SEED)
        make_checkpoint.write_checkpoint(directory, model, structure.fields)
        stamp.touch()
    return directory


def _model(name: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(checkpoint(name), dtype=torch.float32, attn_implementation="eager").eval()


def greedy(name: str, record: list[int], count: int) -> list[int]:
    """The `count` most likely tokens behind a record."""
    model, ids = _model(name), list(record)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(record) :]


def reference(name: str, records: list[list[int]]) -> list[dict[str, torch.Tensor]]:
    """For each record every state by its name in a dump, [tokens, width] float32: each layer, and both final states."""
    model = _model(name)
    states = []
    for record in records:
        taken_in = []
        hook = model.model.norm.register_forward_pre_hook(lambda _module, arguments, taken_in=taken_in: taken_in.append(arguments[0]))
        with torch.no_grad():
            hidden = model(torch.tensor([record]), output_hidden_states=True).hidden_states
        hook.remove()
        # hidden[k + 1] is the output of layer k, except that the last entry is taken after the final norm.
        outputs = [*hidden[1:LAYERS], taken_in[0]]
        named = {layer_name(layer): output[0] for layer, output in enumerate(outputs)}
        states.append({**named, POST_NORM: hidden[-1][0], PRE_NORM: taken_in[0][0]})
    return states
