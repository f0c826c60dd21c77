# SPDX-License-Identifier: Apache-2.0
"""SpecForge's offline format: `torch.save` of a dict of four tensors, read back with `torch.load(mmap=True)`.

input_ids int64 [L], loss_mask int64 [L], aux_hidden_state [1, L, layers * H] (layers side by side, ascending) and
hidden_state [1, L, H], the state after the final norm; states in the model's dtype.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hs_capture import dumpfile

from .files import Stored, save_pickled, split_layers, tensors_of

if TYPE_CHECKING:
    from ..dumps import States
    from ..packed import Record

PLACE = "rows_{first}-{last}/data_{number}.ckpt"
FINAL = ("post_norm", "both")
KEEPS = "post_norm"


def save(path: str, record: Record, states: States | Stored) -> str:
    """Write one record; returns the file's SHA-256."""
    input_ids, loss_mask, aux, final = tensors_of(record, states)
    content = {
        "input_ids": input_ids,
        "loss_mask": loss_mask,
        "aux_hidden_state": aux.unsqueeze(0),
        "hidden_state": final.unsqueeze(0),
    }
    return save_pickled(path, content)


def load(path: str, layer_names: list[str]) -> Stored:
    """A file's content."""
    import torch

    content = torch.load(path, mmap=True, weights_only=True)
    tensors = split_layers(layer_names, content["aux_hidden_state"][0])
    tensors[dumpfile.POST_NORM] = content["hidden_state"][0]
    return Stored(content["input_ids"], content["loss_mask"], layer_names, tensors)
