# SPDX-License-Identifier: Apache-2.0
"""SpecForge's offline format: `torch.save` of a dict of four tensors, read back with `torch.load(mmap=True)`.

input_ids int64 [L], loss_mask int64 [L], aux_hidden_state [1, L, layers * H] (layers side by side, ascending) and
hidden_state [1, L, H], the state after the final norm; states in the model's dtype.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..dumps import States
    from ..packed import Record

SUFFIX = ".ckpt"
FINAL = ("post_norm", "both")


class _HashedFile:
    """What torch.save needs of a file (it only appends), hashing as it goes."""

    def __init__(self, path: str) -> None:
        self._stream = open(path, "wb")
        self._digest = hashlib.sha256()

    def write(self, data: memoryview) -> int:
        self._digest.update(data)
        return self._stream.write(data)

    def flush(self) -> None:
        self._stream.flush()

    def close(self) -> str:
        self._stream.close()
        return self._digest.hexdigest()


def save(path: str, record: Record, states: States) -> str:
    """Write one record; returns the file's SHA-256."""
    import torch

    layers = states.layer_names
    tokens, hidden = len(record.input_ids), states.hidden_size
    aux = torch.empty((1, tokens, len(layers) * hidden), dtype=states.torch_dtype)
    for position, name in enumerate(layers):
        states.copy_into(name, aux[0, :, position * hidden : (position + 1) * hidden])
    final = torch.empty((1, tokens, hidden), dtype=states.torch_dtype)
    states.copy_into("final_post_norm", final[0])
    content = {
        "input_ids": torch.tensor(record.input_ids, dtype=torch.int64),
        "loss_mask": torch.tensor(record.loss_mask, dtype=torch.int64),
        "aux_hidden_state": aux,
        "hidden_state": final,
    }
    stream = _HashedFile(path)
    try:
        torch.save(content, stream)
    finally:
        digest = stream.close()
    return digest
