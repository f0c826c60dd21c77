# SPDX-License-Identifier: Apache-2.0
"""What the format modules share: files hashed while they are written, and the content of a file that was read back."""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hs_capture import dumpfile

from ..hashes import file_hash

if TYPE_CHECKING:
    import torch

    from ..packed import Record


class HashedFile:
    """A file to append to, as torch.save and compressors want it, with the SHA-256 of what was written."""

    def __init__(self, path: str) -> None:
        self._stream = open(path, "wb")
        self._digest = hashlib.sha256()
        self._failed: OSError | None = None

    def write(self, data: memoryview) -> int:
        self._digest.update(data)
        try:
            return self._stream.write(data)
        except OSError as error:
            self._failed = OSError(error.errno, error.strerror, self._stream.name)
            raise

    def flush(self) -> None:
        self._stream.flush()

    def close(self) -> str:
        """Close the file; returns the hash in hex. Raises OSError, also where a write failed: its caller may have made another error of that."""
        try:
            self._stream.close()
        finally:
            if self._failed is not None:
                raise self._failed
        return self._digest.hexdigest()


def save_pickled(path: str, content: dict[str, object]) -> str:
    """`torch.save` of a dict; returns the file's SHA-256."""
    import torch

    stream = HashedFile(path)
    try:
        torch.save(content, stream)
    finally:
        digest = stream.close()
    return digest


def save_tensors(path: str, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> str:
    """Write a safetensors file; returns its SHA-256. Raises OSError."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, path, metadata=metadata)
    except SafetensorError as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), path) from error
    return file_hash(path)


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


def tensors_of(record: Record, states: object) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """input_ids and loss_mask int64 [tokens], the layers side by side [tokens, layers * hidden_size], the final state after its norm."""
    import torch

    tokens, hidden = len(record.input_ids), states.hidden_size
    aux = torch.empty((tokens, len(states.layer_names) * hidden), dtype=states.torch_dtype)
    for position, name in enumerate(states.layer_names):
        states.copy_into(name, aux[:, position * hidden : (position + 1) * hidden])
    final = torch.empty((tokens, hidden), dtype=states.torch_dtype)
    states.copy_into(dumpfile.POST_NORM, final)
    return torch.tensor(record.input_ids, dtype=torch.int64), torch.tensor(record.loss_mask, dtype=torch.int64), aux, final


def split_layers(layer_names: list[str], joined: torch.Tensor) -> dict[str, torch.Tensor]:
    """The layers' states {name: [tokens, hidden_size]} in `joined` [tokens, layers * hidden_size]. Raises ValueError."""
    if joined.ndim != 2 or joined.shape[1] % len(layer_names):
        raise ValueError(f"states of shape {list(joined.shape)} are not those of {len(layer_names)} layers")
    return dict(zip(layer_names, joined.split(joined.shape[1] // len(layer_names), dim=1)))
