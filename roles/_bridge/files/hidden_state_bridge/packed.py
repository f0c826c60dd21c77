# SPDX-License-Identifier: Apache-2.0
"""Owner of the packed data set: a directory of .npy files and meta.json, read by memory map.

tokens.npy int32 [T], loss_mask.npy uint8 [T], offsets.npy int64 [R+1] (record r is [offsets[r], offsets[r+1])),
source.npy int32 [R] (index into meta.sources), file.npy int32 [R] (index into that source's files), line.npy int64 [R]
(1-based line or row in that file): about 5 bytes a token.
meta.json holds counts, the tokenizer, the sources with their hashes, the hashes of each file's blocks, and `sha256`: the
data set's hash, over the canonical JSON of all the rest. It depends on contents and settings, never on where sources or
the set itself lie.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

import hs_blocks

from .errors import ConfigError, Refusal

FORMAT = "hidden_state_bridge.packed/2"
META = "meta.json"
DTYPES = {"tokens": np.int32, "loss_mask": np.uint8, "offsets": np.int64, "source": np.int32, "file": np.int32, "line": np.int64}
# A block is hashed by itself, and is what is copied again where it differs.
BLOCK_BYTES = 16 << 20
WRITE_BYTES = 1 << 22
REMEDY = "pack and stage the data set again"


@dataclass(frozen=True)
class Record:
    """One record. input_ids int32 [tokens] and loss_mask uint8 [tokens] are read-only views of the mapped files."""

    index: int
    input_ids: np.ndarray
    loss_mask: np.ndarray
    source: str
    file: str
    line: int


def meta_hash(meta: dict[str, Any]) -> str:
    """The data set's hash: SHA-256 of the canonical JSON of everything in meta but `sha256` itself."""
    rest = {key: value for key, value in meta.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def open_private(path: str, flags: int) -> int:
    """An opener that makes files for their owner alone, as they are on the hosts."""
    return os.open(path, flags, 0o600)


class ArrayWriter:
    """Writes one one-dimensional .npy file of known length from start to end, and hashes its blocks on the way."""

    def __init__(self, directory: str, name: str, length: int) -> None:
        self._stream: BinaryIO = open(os.path.join(directory, name + ".npy"), "xb", buffering=WRITE_BYTES, opener=open_private)
        self._hashes = hs_blocks.BlockHashes(BLOCK_BYTES)
        self._dtype = np.dtype(DTYPES[name])
        self._left = length
        header = _Buffer()
        np.lib.format.write_array_header_1_0(header, {"descr": self._dtype.str, "fortran_order": False, "shape": (length,)})
        self._put(bytes(header))

    def _put(self, data: Any) -> None:
        self._stream.write(data)
        self._hashes.update(data)

    def write(self, values: np.ndarray | bytes) -> None:
        """Append values, or the bytes of values, of the file's dtype."""
        data = values if isinstance(values, bytes) else memoryview(np.ascontiguousarray(values, self._dtype)).cast("B")
        self._left -= len(data) // self._dtype.itemsize
        self._put(data)

    def close(self) -> dict[str, Any]:
        """Make the file durable; returns its `bytes` and the SHA-256 of each of its `blocks` for meta.json."""
        if self._left:
            raise ValueError(f"{self._left} values are missing")
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._stream.close()
        return self._hashes.close()


class _Buffer(bytearray):
    def write(self, data: bytes) -> None:
        self.extend(data)


class PackedDataset:
    """Random access to a packed data set. Raises Refusal where it is missing or not what its meta.json says.

    `meta` is meta.json; `lengths` int64 [R] are the tokens of each record. Opening checks sizes and the hash of
    meta.json; `check_content` reads everything.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            with open(os.path.join(path, META), encoding="utf-8") as stream:
                self.meta: dict[str, Any] = json.load(stream)
            if self.meta["format"] != FORMAT:
                raise Refusal(f"data set {path} has format {self.meta['format']!r}, not {FORMAT}; {REMEDY}")
            if meta_hash(self.meta) != self.meta["sha256"]:
                raise Refusal(f"data set {path}: {META} does not match its own hash; {REMEDY}")
            arrays = {name: self._map(name) for name in DTYPES}
        except FileNotFoundError as error:
            raise Refusal(f"data set {path} is not complete: no {error.filename}; {REMEDY}") from error
        except OSError as error:
            raise Refusal(f"data set {path} cannot be read: {error}; {REMEDY}") from error
        except (KeyError, TypeError, ValueError) as error:
            raise Refusal(f"data set {path} is damaged: {error!r}; {REMEDY}") from error
        self._tokens, self._loss_mask = arrays["tokens"], arrays["loss_mask"]
        self._offsets, self._source, self._file, self._line = (arrays[name] for name in ("offsets", "source", "file", "line"))
        self._names = [source["name"] for source in self.meta["sources"]]
        self._files = [[file["path"] for file in source["files"]] for source in self.meta["sources"]]
        self.lengths = np.diff(self._offsets)

    def _map(self, name: str) -> np.ndarray:
        file = os.path.join(self.path, name + ".npy")
        expected = self.meta["files"][name + ".npy"]["bytes"]
        if os.path.getsize(file) != expected:
            raise Refusal(f"data set file {file} has {os.path.getsize(file)} bytes instead of {expected}; {REMEDY}")
        array = np.load(file, mmap_mode="r", allow_pickle=False)
        if array.dtype != DTYPES[name] or array.ndim != 1:
            raise Refusal(f"data set file {file} is {array.dtype} {array.shape}; {REMEDY}")
        # A plain view of the map: slices of np.memmap itself are slow, and orjson does not take them.
        return np.asarray(array)

    def __len__(self) -> int:
        return len(self.lengths)

    def record(self, index: int) -> Record:
        """The record with that number. Raises IndexError outside 0 .. len-1."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        first, last = int(self._offsets[index]), int(self._offsets[index + 1])
        source = self._source[index]
        return Record(
            index,
            self._tokens[first:last],
            self._loss_mask[first:last],
            self._names[source],
            self._files[source][self._file[index]],
            int(self._line[index]),
        )

    def check_content(self) -> None:
        """Read every file and compare its blocks with meta.json. Raises Refusal with the file's name."""
        for name, expected in self.meta["files"].items():
            file = os.path.join(self.path, name)
            wrong = hs_blocks.wrong_blocks(file, expected, self.meta["block_bytes"])
            if wrong:
                where = ", ".join(str(block * self.meta["block_bytes"]) for block in wrong[:5])
                raise Refusal(f"data set file {file} has another hash than {META} says, from byte {where}; {REMEDY}")


def open_checked(path: str, expected: str | None) -> PackedDataset:
    """Open a data set and hash all of it. Raises ConfigError where it is damaged or its hash is not `expected`."""
    try:
        dataset = PackedDataset(path)
        if dataset.meta["sha256"] != expected:
            raise ConfigError(
                f"data set {dataset.path} has hash {dataset.meta['sha256']}, this run is of {expected}; stage the data set of this run"
            )
        dataset.check_content()
    except ConfigError:
        raise
    except Refusal as error:
        raise ConfigError(str(error)) from error
    return dataset
