# SPDX-License-Identifier: Apache-2.0
"""Plain safetensors: what the dump carries, whole, plus the loss mask.

input_ids int64 [L], loss_mask uint8 [L], layer_<k> [L, H] and the captured final states [L, H] in the model's dtype;
metadata (strings): format, id, source, line, layers, final, sglang_version, patch_version, family.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..dumps import States
    from ..packed import Record

SUFFIX = ".safetensors"
FINAL = ("post_norm", "pre_norm", "both", "none")
FORMAT = "hidden_state_bridge.record/1"
BLOCK_BYTES = 1 << 22


def save(path: str, record: Record, states: States) -> str:
    """Write one record; returns the file's SHA-256."""
    import torch
    from safetensors.torch import save_file

    tensors = {
        "input_ids": torch.tensor(record.input_ids, dtype=torch.int64),
        "loss_mask": torch.tensor(record.loss_mask, dtype=torch.uint8),
    }
    for name in states.names:
        tensors[name] = torch.empty((len(record.input_ids), states.hidden_size), dtype=states.torch_dtype)
        states.copy_into(name, tensors[name])
    described = ("layers", "final", "sglang_version", "patch_version", "family")
    metadata = {key: states.metadata.get(key, "") for key in described}
    metadata.update(format=FORMAT, id=str(record.index), source=record.source, line=str(record.line))
    save_file(tensors, path, metadata=metadata)
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        for block in iter(lambda: stream.read(BLOCK_BYTES), b""):
            digest.update(block)
    return digest.hexdigest()
