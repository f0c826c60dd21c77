# SPDX-License-Identifier: Apache-2.0
"""speculators' offline format: one safetensors file a record in one flat directory, beside an Arrow data set (arrow.py).

hidden_states [L, layers + 1, H] (layers ascending, then the final state before its norm) and token_ids int64 [L]. The
trainer finds the file of row i of the data set as `hidden_states/hs_{i}.safetensors`, and the loss mask in that row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hs_capture import dumpfile

from .files import Stored, save_tensors

if TYPE_CHECKING:
    from ..dumps import States
    from ..packed import Record

PLACE = "hidden_states/hs_{number}.safetensors"
FINAL = ("pre_norm", "both")
KEEPS = "pre_norm"


def save(path: str, record: Record, states: States | Stored) -> str:
    """Write one record; returns the file's SHA-256."""
    import torch

    names = [*states.layer_names, dumpfile.PRE_NORM]
    hidden = torch.empty((len(record.input_ids), len(names), states.hidden_size), dtype=states.torch_dtype)
    for slot, name in enumerate(names):
        states.copy_into(name, hidden[:, slot])
    return save_tensors(path, {"hidden_states": hidden, "token_ids": torch.tensor(record.input_ids, dtype=torch.int64)})


def load(path: str, layer_names: list[str]) -> Stored:
    """A file's content; the loss mask is in the data set alone."""
    from safetensors.torch import load_file

    content = load_file(path)
    names = [*layer_names, dumpfile.PRE_NORM]
    hidden = content["hidden_states"]
    if hidden.ndim != 3 or hidden.shape[1] != len(names):
        raise ValueError(f"hidden_states of shape {list(hidden.shape)} are not those of {len(layer_names)} layers and a final state")
    return Stored(content["token_ids"], None, layer_names, dict(zip(names, hidden.unbind(1))))
