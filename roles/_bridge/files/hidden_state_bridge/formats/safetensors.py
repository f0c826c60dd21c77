# SPDX-License-Identifier: Apache-2.0
"""Plain safetensors: what the dump carries, whole, plus the loss mask.

input_ids int64 [L], loss_mask uint8 [L], layer_<k> [L, H] and the captured final states [L, H] in the model's dtype;
metadata (strings): format, id, source, line, layers, final, sglang_version, patch_version, family.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .files import Stored, save_tensors

if TYPE_CHECKING:
    import torch

    from ..dumps import States
    from ..packed import Record

PLACE = "rows_{first}-{last}/data_{number}.safetensors"
FINAL = ("post_norm", "pre_norm", "both", "none")
KEEPS = None
FORMAT = "hidden_state_bridge.record/1"


def content_of(record: Record, states: States | Stored) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Tensors and metadata of a record's file."""
    import torch

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
    return tensors, metadata


def stored(layer_names: list[str], content: dict[str, torch.Tensor], metadata: dict[str, str]) -> Stored:
    """A file's content from its tensors."""
    tensors = {name: tensor for name, tensor in content.items() if name not in ("input_ids", "loss_mask")}
    return Stored(content["input_ids"], content["loss_mask"], layer_names, tensors, metadata)


def save(path: str, record: Record, states: States | Stored) -> str:
    """Write one record; returns the file's SHA-256."""
    tensors, metadata = content_of(record, states)
    return save_tensors(path, tensors, metadata)


def load(path: str, layer_names: list[str]) -> Stored:
    """A file's content."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as opened:
        names = opened.keys()
        content = {name: opened.get_tensor(name) for name in names}
        return stored(layer_names, content, opened.metadata() or {})
