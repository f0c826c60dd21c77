# SPDX-License-Identifier: Apache-2.0
"""ModelOpt's offline format: `torch.save` of a dict that `torch.load(weights_only=True)` takes, named by its conversation.

input_ids int64 [L], loss_mask int64 [L], hidden_states [L, H] (after the final norm, as hidden_states_prenorm = False
says), aux_hidden_states [L, layers * H] (layers side by side, ascending), conversation_id (the file's name without suffix).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hs_capture import dumpfile

from .files import Stored, save_pickled, split_layers, tensors_of

if TYPE_CHECKING:
    from ..dumps import States
    from ..packed import Record

PLACE = "rows_{first}-{last}/data_{number}.pt"
FINAL = ("post_norm", "both")
KEEPS = "post_norm"


def save(path: str, record: Record, states: States | Stored) -> str:
    """Write one record; returns the file's SHA-256."""
    input_ids, loss_mask, aux, final = tensors_of(record, states)
    content = {
        "input_ids": input_ids,
        "loss_mask": loss_mask,
        "hidden_states": final,
        "aux_hidden_states": aux,
        "hidden_states_prenorm": False,
        "conversation_id": f"data_{record.index}",
    }
    return save_pickled(path, content)


def load(path: str, layer_names: list[str]) -> Stored:
    """A file's content."""
    import torch

    content = torch.load(path, mmap=True, weights_only=True)
    tensors = split_layers(layer_names, content["aux_hidden_states"])
    tensors[dumpfile.POST_NORM] = content["hidden_states"]
    return Stored(content["input_ids"], content["loss_mask"], layer_names, tensors)
