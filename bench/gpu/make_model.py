#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-3.0-or-later
"""A model of DeepSeek-V2-Lite's shapes: its config.json, and with --weights random bf16 weights under which every layer contributes.

    python make_model.py DIR [--layers 27] [--experts 64] [--structure v2] [--weights] [--seed 0]

--structure v3 has the shapes in DeepSeek-V3's structure, which Kimi-K2.5 shares: queries by a latent, a router with sigmoid and
correction bias. SGLang turns all-reduce fusion on by itself for that one alone.
Without --weights, start the server with --load-format dummy: right for speed, wrong for correctness, since its layers add nothing.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

HIDDEN, HEADS, DENSE, EXPERT, VOCABULARY = 2048, 16, 10944, 1408, 102400
LATENT, NOPE, ROPE, VALUE = 512, 128, 64, 128


QUERY_LATENT = 768
# What DeepSeek-V3's config.json has otherwise.
V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "n_group": 4,
    "topk_group": 2,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "q_lora_rank": QUERY_LATENT,
}
STRUCTURES = {"v2": {}, "v3": V3}


def config(layers: int, experts: int, structure: str) -> dict:
    """config.json: DeepSeek-V2-Lite, of so many layers and routed experts."""
    scaling = {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707}
    return {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "aux_loss_alpha": 0.001,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "initializer_range": 0.02,
        "intermediate_size": DENSE,
        "kv_lora_rank": LATENT,
        "max_position_embeddings": 163840,
        "moe_intermediate_size": EXPERT,
        "moe_layer_freq": 1,
        "n_group": 1,
        "n_routed_experts": experts,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "num_attention_heads": HEADS,
        "num_experts_per_tok": 6,
        "num_hidden_layers": layers,
        "num_key_value_heads": HEADS,
        "pretraining_tp": 1,
        "q_lora_rank": None,
        "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": ROPE,
        "rms_norm_eps": 1e-6,
        "rope_scaling": {**scaling, "original_max_position_embeddings": 4096, "type": "yarn", "rope_type": "yarn"},
        "rope_theta": 10000,
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "seq_aux": True,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "greedy",
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "v_head_dim": VALUE,
        "vocab_size": VOCABULARY,
        **STRUCTURES[structure],
    }


def shapes(layer: int, experts: int, structure: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of one layer's weights."""
    queries = HEADS * (NOPE + ROPE)
    if structure == "v3":
        attention = {"q_a_proj": (QUERY_LATENT, HIDDEN), "q_a_layernorm": (QUERY_LATENT,), "q_b_proj": (queries, QUERY_LATENT)}
    else:
        attention = {"q_proj": (queries, HIDDEN)}
    attention |= {
        "kv_a_proj_with_mqa": (LATENT + ROPE, HIDDEN),
        "kv_a_layernorm": (LATENT,),
        "kv_b_proj": (HEADS * (NOPE + VALUE), LATENT),
        "o_proj": (HIDDEN, HEADS * VALUE),
    }
    for name, shape in attention.items():
        yield f"self_attn.{name}", shape
    yield "input_layernorm", (HIDDEN,)
    yield "post_attention_layernorm", (HIDDEN,)
    blocks = {"mlp": DENSE}
    if layer > 0:
        yield "mlp.gate", (experts, HIDDEN)
        blocks = {"mlp.shared_experts": 2 * EXPERT, **{f"mlp.experts.{expert}": EXPERT for expert in range(experts)}}
    for block, inner in blocks.items():
        yield f"{block}.gate_proj", (inner, HIDDEN)
        yield f"{block}.up_proj", (inner, HIDDEN)
        yield f"{block}.down_proj", (HIDDEN, inner)


def write_weights(directory: Path, layers: int, experts: int, structure: str, seed: int) -> None:
    """One file a layer. Matrices give about what they take in, so that each layer moves the stream."""
    import torch
    from safetensors.torch import save_file

    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(seed)

    def draw(shape: tuple[int, ...]) -> torch.Tensor:
        noise = torch.randn(shape, generator=generator, device=device)
        if len(shape) == 1:
            return (1 + 0.1 * noise).bfloat16().cpu()
        return (noise / shape[1] ** 0.5).bfloat16().cpu()

    index = {}
    for layer in range(-1, layers):
        if layer < 0:
            top = {"model.embed_tokens": (VOCABULARY, HIDDEN), "lm_head": (VOCABULARY, HIDDEN), "model.norm": (HIDDEN,)}
            tensors = {f"{name}.weight": draw(shape) for name, shape in top.items()}
            tensors["model.embed_tokens.weight"] *= HIDDEN**0.5
        else:
            tensors = {f"model.layers.{layer}.{name}.weight": draw(shape) for name, shape in shapes(layer, experts, structure)}
            if structure == "v3" and layer > 0:
                # Small beside the scores, so that it decides between near ones alone.
                bias = torch.randn(experts, generator=generator, device=device) * 0.01
                tensors[f"model.layers.{layer}.mlp.gate.e_score_correction_bias"] = bias.cpu()
        file = f"model-{layer + 1:05d}.safetensors"
        save_file(tensors, directory / file, metadata={"format": "pt"})
        index.update(dict.fromkeys(tensors, file))
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--layers", type=int, default=27)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--structure", choices=STRUCTURES, default="v2")
    parser.add_argument("--weights", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    (options.directory / "config.json").write_text(json.dumps(config(options.layers, options.experts, options.structure), indent=1))
    if options.weights:
        write_weights(options.directory, options.layers, options.experts, options.structure, options.seed)


if __name__ == "__main__":
    main()
