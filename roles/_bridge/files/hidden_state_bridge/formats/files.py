# SPDX-License-Identifier: Apache-2.0
"""What the format modules share: files hashed while they are written, and the content of a file that was read back."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

BLOCK_BYTES = 1 << 22


class HashedFile:
    """A file to append to, as torch.save and compressors want it, with the SHA-256 of what was written."""

    def __init__(self, path: str) -> None:
        self._stream = open(path, "wb")
        self._digest = hashlib.sha256()

    def write(self, data: memoryview) -> int:
        self._digest.update(data)
        return self._stream.write(data)

    def flush(self) -> None:
        self._stream.flush()

    def close(self) -> str:
        """Close the file; returns the hash in hex."""
        self._stream.close()
        return self._digest.hexdigest()


def file_hash(path: str) -> str:
    """SHA-256 of a file, in hex. Raises OSError."""
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        for block in iter(lambda: stream.read(BLOCK_BYTES), b""):
            digest.update(block)
    return digest.hexdigest()


def save_pickled(path: str, content: dict[str, object]) -> str:
    """`torch.save` of a dict; returns the file's SHA-256."""
    import torch

    stream = HashedFile(path)
    try:
        torch.save(content, stream)
    finally:
        digest = stream.close()
    return digest


@dataclass(frozen=True)
class Stored:
    """The states of one record as a file holds them; stands where dumps.States stands when a file is saved.

    tensors: {name: [tokens, hidden_size]}; layer_names: those of the layers, ascending. input_ids, loss_mask [tokens],
    the mask None where the format keeps none.
    """

    input_ids: torch.Tensor
    loss_mask: torch.Tensor | None
    layer_names: list[str]
    tensors: dict[str, torch.Tensor]
    metadata: dict[str, str] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        return list(self.tensors)

    @property
    def hidden_size(self) -> int:
        return self.tensors[self.layer_names[0]].shape[1]

    @property
    def torch_dtype(self) -> torch.dtype:
        return self.tensors[self.layer_names[0]].dtype

    def copy_into(self, name: str, target: torch.Tensor) -> None:
        """Copy one state into `target` [tokens, hidden_size]."""
        target.copy_(self.tensors[name])


def side_by_side(states: object, target: torch.Tensor) -> None:
    """Copy the layers' states into `target` [tokens, layers * hidden_size], ascending."""
    hidden = states.hidden_size
    for position, name in enumerate(states.layer_names):
        states.copy_into(name, target[:, position * hidden : (position + 1) * hidden])


def split_layers(layer_names: list[str], joined: torch.Tensor) -> dict[str, torch.Tensor]:
    """The layers' states {name: [tokens, hidden_size]} in `joined` [tokens, layers * hidden_size]. Raises ValueError."""
    if joined.ndim != 2 or joined.shape[1] % len(layer_names):
        raise ValueError(f"states of shape {list(joined.shape)} are not those of {len(layer_names)} layers")
    return dict(zip(layer_names, joined.split(joined.shape[1] // len(layer_names), dim=1)))
