# SPDX-License-Identifier: Apache-2.0
"""SpecForge's offline format: `torch.save` of a dict of four tensors, read back with `torch.load(mmap=True)`.

input_ids int64 [L], loss_mask int64 [L], aux_hidden_state [1, L, layers * H] (layers side by side, ascending) and
hidden_state [1, L, H], the state after the final norm; states in the model's dtype.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hs_capture import dumpfile

from .files import Stored, save_pickled, side_by_side, split_layers

if TYPE_CHECKING:
    from ..dumps import States
    from ..packed import Record

PLACE = "rows_{first}-{last}/data_{number}.ckpt"
FINAL = ("post_norm", "both")
KEEPS = "post_norm"


def save(path: str, record: Record, states: States | Stored) -> str:
    """Write one record; returns the file's SHA-256."""
    import torch

    tokens, hidden = len(record.input_ids), states.hidden_size
    aux = torch.empty((1, tokens, len(states.layer_names) * hidden), dtype=states.torch_dtype)
    side_by_side(states, aux[0])
    final = torch.empty((1, tokens, hidden), dtype=states.torch_dtype)
    states.copy_into(dumpfile.POST_NORM, final[0])
    content = {
        "input_ids": torch.tensor(record.input_ids, dtype=torch.int64),
        "loss_mask": torch.tensor(record.loss_mask, dtype=torch.int64),
        "aux_hidden_state": aux,
        "hidden_state": final,
    }
    return save_pickled(path, content)


def load(path: str, layer_names: list[str]) -> Stored:
    """A file's content."""
    import torch

    content = torch.load(path, mmap=True, weights_only=True)
    tensors = split_layers(layer_names, content["aux_hidden_state"][0])
    tensors[dumpfile.POST_NORM] = content["hidden_state"][0]
    return Stored(content["input_ids"], content["loss_mask"], layer_names, tensors)
