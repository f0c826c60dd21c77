# SPDX-License-Identifier: Apache-2.0
"""Write a tiny random checkpoint of DeepSeek-V3 structure: MLA, dense layers first, then mixtures of experts.

    PYTHON make_checkpoint.py DIR [--layers 8] [--dense 1] [--hidden 64] [--vocab 512] [--seed 0] [--stamp NAME]

The same options give the same bytes (with the same torch). Weights are float32 and large enough that every layer
contributes. ``moe_intermediate_size`` is 128, so that at tp=2 each rank holds a part of every expert.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, PretrainedConfig, PreTrainedModel

CONTEXT = 2048


def config_fields(layers: int, dense: int, hidden: int, vocab: int) -> dict:
    """The fields of config.json, in the spelling of the published checkpoints."""
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 128,
        "moe_intermediate_size": 128,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_shared_experts": 1,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": dense,
        "moe_layer_freq": 1,
        "n_group": 2,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "kv_lora_rank": 32,
        "q_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        # SGLang's CPU rotary embedding exists for yarn only; a factor of 1 changes nothing.
        "rope_scaling": {
            "type": "yarn",
            "factor": 1.0,
            "original_max_position_embeddings": CONTEXT,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "initializer_range": 0.1,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }


def random_model(make: Callable[[PretrainedConfig], PreTrainedModel], config: PretrainedConfig, seed: int) -> PreTrainedModel:
    """A model with random weights; norms and routing biases too, so that a test sees when one is left out."""
    torch.manual_seed(seed)
    model = make(config).to(torch.float32).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("norm.weight", "layernorm.weight")):
                weight.copy_(1 + 0.1 * torch.randn_like(weight))
        for name, bias in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                bias.copy_(0.1 * torch.randn_like(bias))
    return model


def write_checkpoint(directory: Path, model: PreTrainedModel, fields: dict) -> None:
    """Write weights and config.json; `fields` are the configuration's, in the spelling of the published checkpoints."""
    model.save_pretrained(directory)
    # What save_pretrained writes is spelled for transformers; SGLang of every release reads this.
    config = {"architectures": [type(model).__name__], "model_type": model.config.model_type, "torch_dtype": "float32", **fields}
    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    for path in directory.iterdir():
        path.chmod(0o644)  # safetensors writes for its owner only; a server may run as another user.


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--dense", type=int, default=1, help="dense layers before the first mixture of experts")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--vocab", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stamp", help="name of an empty file that is written last")
    options = parser.parse_args()

    fields = config_fields(options.layers, options.dense, options.hidden, options.vocab)
    model = random_model(DeepseekV3ForCausalLM, DeepseekV3Config(**copy.deepcopy(fields)), options.seed)
    write_checkpoint(options.directory, model, fields)
    if options.stamp:
        (options.directory / options.stamp).touch()
    print(f"{options.directory}: {sum(weight.numel() for weight in model.parameters())} parameters")


if __name__ == "__main__":
    main()
