# SPDX-License-Identifier: Apache-2.0
"""Reader of tokenized sources: JSONL files with a line a record, `{"input_ids": [...], "loss_mask": [...]}`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import orjson

from .errors import Refusal

READ_BYTES = 1 << 20
INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class Source:
    """A named source file. The name is what manifests and reports call it."""

    name: str
    path: str


@dataclass(frozen=True)
class Settings:
    """How records are read.

    max_length: tokens kept of a record, None for all. missing_mask: `fail` or `ones`.
    vocab_size: token ids must be below it, None to allow any int32.
    """

    seed: int = 0
    max_length: int | None = None
    missing_mask: str = "fail"
    vocab_size: int | None = None
    input_ids_field: str = "input_ids"
    loss_mask_field: str = "loss_mask"


@dataclass(frozen=True)
class SourceRecord:
    """One record as it was in its source, uncut.

    line: 1-based. input_ids: int32 [tokens]. loss_mask: uint8 [tokens], 1 where the trainer learns.
    """

    line: int
    input_ids: np.ndarray
    loss_mask: np.ndarray


class BadRecord(ValueError):
    """Reason and remedy for a line that is no record; `read_source` adds source, path and line."""


def _input_ids(value: object, settings: Settings) -> np.ndarray:
    field = settings.input_ids_field
    if not isinstance(value, list):
        raise BadRecord(f"{field} is {_kind(value)}, not a list; give the token ids as a list of integers")
    if not value:
        raise BadRecord(f"{field} is empty; take the line out or give it its tokens")
    if set(map(type, value)) != {int}:
        position, item = next((i, item) for i, item in enumerate(value) if item.__class__ is not int)
        raise BadRecord(f"{field}[{position}] is {_kind(item)}, not an integer; tokenize the source again")
    limit = INT32_MAX if settings.vocab_size is None else settings.vocab_size - 1
    try:
        ids = np.array(value, dtype=np.int64)
        inside = ids.min() >= 0 and ids.max() <= limit
    except OverflowError:
        inside = False
    if not inside:
        position, item = next((i, item) for i, item in enumerate(value) if not 0 <= item <= limit)
        if item < 0:
            raise BadRecord(f"{field}[{position}] is {item}; token ids cannot be negative")
        if settings.vocab_size is None:
            raise BadRecord(f"{field}[{position}] is {item}, more than 32 bits hold; tokenize the source again")
        raise BadRecord(
            f"{field}[{position}] is {item}, outside the vocabulary of {settings.vocab_size};"
            " tokenize the source with the tokenizer of the model"
        )
    return ids.astype(np.int32)


def _loss_mask(value: object, tokens: int, settings: Settings) -> np.ndarray:
    field = settings.loss_mask_field
    if value is None:
        if settings.missing_mask == "ones":
            return np.ones(tokens, dtype=np.uint8)
        raise BadRecord(f"there is no {field}; add it, or set missing_mask to ones to train on every token")
    if not isinstance(value, list):
        raise BadRecord(f"{field} is {_kind(value)}, not a list; give a list of 0 and 1")
    if len(value) != tokens:
        raise BadRecord(f"{field} has {len(value)} entries and {settings.input_ids_field} {tokens}; give one entry a token")
    try:
        mask = np.frombuffer(bytes(value), dtype=np.uint8)
    except (TypeError, ValueError):
        mask = None
    if mask is None or mask.max() > 1:
        position, item = next((i, item) for i, item in enumerate(value) if item.__class__ is not int or item not in (0, 1))
        raise BadRecord(f"{field}[{position}] is {_kind(item)}; only 0 and 1 are allowed")
    return mask


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value)) or str(value)


def parse_line(data: bytes, line: int, settings: Settings) -> SourceRecord:
    """The record in one line of JSON. Raises BadRecord with reason and remedy."""
    try:
        row = orjson.loads(data)
    except ValueError as error:
        raise BadRecord(f"not JSON ({error}); mend the line or take it out") from None
    if not isinstance(row, dict):
        raise BadRecord(f"{_kind(row)}, not a JSON object; each line must be one object")
    if settings.input_ids_field not in row:
        raise BadRecord(f"there is no {settings.input_ids_field}; name the field that holds the token ids")
    input_ids = _input_ids(row[settings.input_ids_field], settings)
    return SourceRecord(line, input_ids, _loss_mask(row.get(settings.loss_mask_field), len(input_ids), settings))


def read_source(source: Source, settings: Settings, digest: hashlib._Hash) -> Iterator[SourceRecord]:
    """The records of a source in order; `digest` takes in the file's bytes. Blank lines are passed over.

    Raises Refusal with `NAME PATH:LINE: reason; remedy`.
    """
    number = 0
    try:
        with open(source.path, "rb", buffering=READ_BYTES) as stream:
            for number, data in enumerate(stream, 1):
                digest.update(data)
                if data.isspace():
                    continue
                try:
                    yield parse_line(data, number, settings)
                except BadRecord as error:
                    raise Refusal(f"{source.name} {source.path}:{number}: {error}") from None
    except OSError as error:
        raise Refusal(_unreadable(source, error, number)) from error


def hash_source(source: Source) -> str:
    """SHA-256 of the file, in hex. Raises Refusal where it cannot be read."""
    digest = hashlib.sha256()
    try:
        with open(source.path, "rb") as stream:
            for block in iter(lambda: stream.read(READ_BYTES), b""):
                digest.update(block)
    except OSError as error:
        raise Refusal(_unreadable(source, error, 0)) from error
    return digest.hexdigest()


def _unreadable(source: Source, error: OSError, line: int) -> str:
    place = f"{source.path}:{line}" if line else source.path
    return f"{source.name} {place}: cannot be read: {error.strerror}; give a readable file"
