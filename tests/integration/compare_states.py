# SPDX-License-Identifier: Apache-2.0
"""Compare every token of every extracted record with Hugging Face transformers on the same weights.

    compare_states.py MODEL OUTPUT_DIR PACKED_DIR     (run by the engine's interpreter)

Prints one JSON object: records, tokens, and for each state the largest |difference| over the largest |value|
of that state in all records.  In transformers ``hidden_states[k + 1]`` is the output of layer k, except that the
last entry is taken after the final norm.
"""

import json
import pathlib
import sys

import numpy
import torch
from transformers import AutoModelForCausalLM


def main(model_dir: str, output_dir: str, packed_dir: str) -> None:
    output, packed = pathlib.Path(output_dir), pathlib.Path(packed_dir)
    layers = json.loads((output / "run.json").read_text())["identity"]["layers"]
    tokens = numpy.load(packed / "tokens.npy", mmap_mode="r")
    masks = numpy.load(packed / "loss_mask.npy", mmap_mode="r")
    offsets = numpy.load(packed / "offsets.npy", mmap_mode="r")
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="eager").eval()

    worst = dict.fromkeys([f"layer_{layer}" for layer in layers] + ["final"], 0.0)
    largest = dict(worst)
    seen = {"records": 0, "tokens": 0, "ids_differ": 0, "masks_differ": 0}
    for line in (output / "manifest.jsonl").read_text().splitlines():
        entry = json.loads(line)
        record = torch.load(output / entry["file"], weights_only=True, mmap=True)
        first, end = offsets[entry["id"]], offsets[entry["id"] + 1]
        seen["records"] += 1
        seen["tokens"] += len(record["input_ids"])
        seen["ids_differ"] += not numpy.array_equal(record["input_ids"].numpy(), tokens[first:end])
        seen["masks_differ"] += not numpy.array_equal(record["loss_mask"].numpy(), masks[first:end])
        with torch.no_grad():
            states = model(record["input_ids"][None], output_hidden_states=True).hidden_states
        got = [*record["aux_hidden_state"][0].chunk(len(layers), dim=-1), record["hidden_state"][0]]
        want = [*(states[layer + 1][0] for layer in layers), states[-1][0]]
        for name, mine, reference in zip(worst, got, want, strict=True):
            assert mine.shape == reference.shape, (entry, name, mine.shape, reference.shape)
            assert mine.isfinite().all(), (entry, name, "not finite")
            worst[name] = max(worst[name], (mine - reference).abs().max().item())
            largest[name] = max(largest[name], reference.abs().max().item())
    print(json.dumps({**seen, "relative": {name: worst[name] / largest[name] for name in worst}, "largest": largest}))


if __name__ == "__main__":
    main(*sys.argv[1:])
