# SPDX-License-Identifier: Apache-2.0
"""Plain safetensors as one zstd frame: `zstd -d` gives the file of the format `safetensors`. Needs the package zstandard."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from .files import HashedFile, Stored
from .safetensors import FINAL, KEEPS, content_of, stored

if TYPE_CHECKING:
    from ..dumps import States
    from ..packed import Record

__all__ = ["FINAL", "KEEPS", "PLACE", "load", "save"]

PLACE = "rows_{first}-{last}/data_{number}.safetensors.zst"
# States in 16 bits give up about a fifth of their size, at any level.
LEVEL = 1


def save(path: str, record: Record, states: States | Stored) -> str:
    """Write one record; returns the file's SHA-256."""
    import zstandard
    from safetensors.torch import save as serialize

    tensors, metadata = content_of(record, states)
    data = serialize(tensors, metadata=metadata)
    del tensors
    stream = HashedFile(path)
    try:
        compressor = zstandard.ZstdCompressor(level=LEVEL, write_checksum=True)
        with compressor.stream_writer(stream, size=len(data), closefd=False) as writer:
            writer.write(data)
    finally:
        digest = stream.close()
    return digest


def load(path: str, layer_names: list[str]) -> Stored:
    """A file's content, in memory."""
    import zstandard
    from safetensors.torch import load as deserialize

    with open(path, "rb") as stream, zstandard.ZstdDecompressor().stream_reader(stream) as reader:
        data = reader.readall()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return stored(layer_names, deserialize(data), header.get("__metadata__", {}))
