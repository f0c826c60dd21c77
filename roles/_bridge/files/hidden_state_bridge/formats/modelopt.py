# SPDX-License-Identifier: Apache-2.0
"""ModelOpt's offline format: `torch.save` of a dict that `torch.load(weights_only=True)` takes, named by its conversation.

input_ids int64 [L], loss_mask int64 [L], hidden_states [L, H] (after the final norm, as hidden_states_prenorm = False
says), aux_hidden_states [L, layers * H] (layers side by side, ascending), conversation_id (the file's name without suffix).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hs_capture import dumpfile

from .files import Stored, save_pickled, side_by_side, split_layers

if TYPE_CHECKING:
    from ..dumps import States
    from ..packed import Record

PLACE = "rows_{first}-{last}/data_{number}.pt"
FINAL = ("post_norm", "both")
KEEPS = "post_norm"


def save(path: str, record: Record, states: States | Stored) -> str:
    """Write one record; returns the file's SHA-256."""
    import torch

    tokens, hidden = len(record.input_ids), states.hidden_size
    aux = torch.empty((tokens, len(states.layer_names) * hidden), dtype=states.torch_dtype)
    side_by_side(states, aux)
    final = torch.empty((tokens, hidden), dtype=states.torch_dtype)
    states.copy_into(dumpfile.POST_NORM, final)
    content = {
        "input_ids": torch.tensor(record.input_ids, dtype=torch.int64),
        "loss_mask": torch.tensor(record.loss_mask, dtype=torch.int64),
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
