# SPDX-License-Identifier: Apache-2.0
"""From lines of JSON, or rows as Python objects, to checked token ids and loss masks."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson

from .sources import Settings
from .streams import MAX_LINE_BYTES

INT32_MAX = 2**31 - 1
KEY_BYTES = 16
SHOWN_BYTES = 200
BOM = b"\xef\xbb\xbf"
# Stands in a row for a mask that was read apart from it.
APART = "\0loss_mask"
# The digits 0 and 1 as numbers.
BITS = bytes(byte - ord("0") if byte in b"01" else 255 for byte in range(256))
# What turns a row with a conversation into token ids and a loss mask.
Encode = Callable[[dict[str, Any], list[dict[str, Any]]], "tuple[list[int], list[int]]"]


class BadRecord(ValueError):
    """Reason and remedy for something that is no record; the caller knows source, path and line."""


@dataclass
class Parsed:
    """The records of one stretch of a file, cut and filtered, and what was wrong there.

    ids and masks hold the tokens (int32) and masks (uint8) of all records one after the other; once they are spooled,
    they lie from token `start` on in the files of `spool`, and both lists are empty. An entry a record: lengths,
    full_lengths (before the cut), trained (tokens with mask 1), lines (1-based) and keys (KEY_BYTES of the hash of its
    id, zeros where it has none). rejects: (line, reason, beginning of the text).
    """

    ids: list[bytes] = field(default_factory=list)
    masks: list[bytes] = field(default_factory=list)
    lengths: array = field(default_factory=lambda: array("q"))
    full_lengths: array = field(default_factory=lambda: array("q"))
    trained: array = field(default_factory=lambda: array("q"))
    lines: array = field(default_factory=lambda: array("q"))
    keys: bytearray = field(default_factory=bytearray)
    max_token_id: int = 0
    short: int = 0
    long: int = 0
    untrained_dropped: int = 0
    rejects: list[tuple[int, str, str]] = field(default_factory=list)
    spool: int = 0
    start: int = 0

    def add(self, line: int, input_ids: np.ndarray, loss_mask: np.ndarray, key: bytes, settings: Settings) -> None:
        """Cut one record and keep it, unless the settings drop it."""
        full = len(input_ids)
        if full < settings.min_tokens:
            self.short += 1
            return
        if settings.max_tokens is not None and full > settings.max_tokens:
            self.long += 1
            return
        input_ids, loss_mask = input_ids[: settings.max_length], loss_mask[: settings.max_length]
        trained = int(np.count_nonzero(loss_mask))
        if not trained and settings.untrained == "drop":
            self.untrained_dropped += 1
            return
        self.ids.append(input_ids.astype(np.int32, copy=False).tobytes())
        self.masks.append(loss_mask.tobytes())
        self.lengths.append(len(input_ids))
        self.full_lengths.append(full)
        self.trained.append(trained)
        self.lines.append(line)
        self.keys += key
        self.max_token_id = max(self.max_token_id, int(input_ids.max()))


def kind_name(value: object) -> str:
    """What a value of JSON is, for a message."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value)) or str(value)[:40]


def check_ids(ids: np.ndarray, settings: Settings) -> None:
    """Refuse (BadRecord) integer token ids [tokens] that the model cannot have."""
    name = settings.input_ids_field
    limit = INT32_MAX if settings.vocab_size is None else settings.vocab_size - 1
    if not len(ids):
        raise BadRecord(f"{name} is empty; take the line out or give it its tokens")
    if ids.min() < 0 or ids.max() > limit:
        position = int(np.flatnonzero((ids < 0) | (ids > limit))[0])
        raise _outside(position, int(ids[position]), settings)


def _outside(position: int, item: int, settings: Settings) -> BadRecord:
    place = f"{settings.input_ids_field}[{position}] is {item}"
    if item < 0:
        return BadRecord(f"{place}; token ids cannot be negative")
    if settings.vocab_size is None:
        return BadRecord(f"{place}, more than 32 bits hold; tokenize the source again")
    return BadRecord(f"{place}, outside the vocabulary of {settings.vocab_size}; tokenize the source with the tokenizer of the model")


def _input_ids(value: object, settings: Settings, booleans: bool) -> np.ndarray:
    name = settings.input_ids_field
    if not isinstance(value, list):
        raise BadRecord(f"{name} is {kind_name(value)}, not a list; give the token ids as a list of integers")
    try:
        # Of unsigned 32 bits: the one conversion of a list that is fast and takes nothing but integers and booleans.
        ids = np.frombuffer(array("I", value), dtype=np.uint32) if value else np.zeros(0, np.uint32)
        fits = not (booleans and bool in map(type, value))
    except (TypeError, OverflowError):
        fits = False
    if not fits:
        for position, item in enumerate(value):
            if item.__class__ is not int:
                raise BadRecord(f"{name}[{position}] is {kind_name(item)}, not an integer; tokenize the source again")
        limit = INT32_MAX if settings.vocab_size is None else settings.vocab_size - 1
        position, item = next((i, item) for i, item in enumerate(value) if not 0 <= item <= limit)
        raise _outside(position, item, settings)
    check_ids(ids, settings)
    return ids.view(np.int32)


def no_mask(tokens: int, settings: Settings) -> np.ndarray:
    """The mask of a record that has none, uint8 [tokens]. Raises BadRecord unless every token is to be trained."""
    if settings.missing_mask == "ones":
        return np.ones(tokens, dtype=np.uint8)
    raise BadRecord(f"there is no {settings.loss_mask_field}; add it, or set missing_mask to ones to train on every token")


def check_mask_length(entries: int, tokens: int, settings: Settings) -> None:
    """Refuse (BadRecord) a mask that is not of the record's length."""
    if entries != tokens:
        name = settings.loss_mask_field
        raise BadRecord(f"{name} has {entries} entries and {settings.input_ids_field} {tokens}; give one entry a token")


def _loss_mask(value: object, tokens: int, settings: Settings) -> np.ndarray:
    name = settings.loss_mask_field
    if isinstance(value, np.ndarray):
        check_mask_length(len(value), tokens, settings)
        return value
    if value is None:
        return no_mask(tokens, settings)
    if not isinstance(value, list):
        raise BadRecord(f"{name} is {kind_name(value)}, not a list; give a list of 0 and 1")
    check_mask_length(len(value), tokens, settings)
    try:
        mask = np.frombuffer(bytes(value), dtype=np.uint8)
    except (TypeError, ValueError):
        mask = None
    if mask is None or mask.max() > 1:
        position, item = next((i, item) for i, item in enumerate(value) if item.__class__ not in (int, bool) or item not in (0, 1))
        raise BadRecord(f"{name}[{position}] is {kind_name(item)}; only 0 and 1 are allowed")
    return mask


def key_of(value: object, settings: Settings) -> bytes:
    """KEY_BYTES that two records of the same id share; zeros without an id. Raises BadRecord for an id of another type."""
    if value is None:
        return bytes(KEY_BYTES)
    if not isinstance(value, (str, int)):
        raise BadRecord(f"{settings.id_field} is {kind_name(value)}; give an id as text or a number, or set id_field to another field")
    return hashlib.blake2b(f"{type(value).__name__} {value}".encode(errors="surrogatepass"), digest_size=KEY_BYTES).digest()


def messages_of(row: dict[str, Any], settings: Settings) -> object:
    """The conversation in a row, or None."""
    names = (settings.messages_field,) if settings.messages_field else ("messages", "conversations")
    return next((row[name] for name in names if row.get(name) is not None), None)


def add_row(parsed: Parsed, line: int, row: object, settings: Settings, encode: Encode, booleans: bool = True) -> None:
    """Add the record in one row. booleans: whether the row may hold any. Raises BadRecord with reason and remedy."""
    if not isinstance(row, dict):
        raise BadRecord(f"{kind_name(row)}, not a JSON object; each line must be one object")
    key = key_of(row.get(settings.id_field) if settings.id_field else None, settings)
    if settings.input_ids_field in row:
        input_ids = _input_ids(row[settings.input_ids_field], settings, booleans)
        loss_mask = _loss_mask(row.get(settings.loss_mask_field), len(input_ids), settings)
    else:
        messages = messages_of(row, settings)
        if messages is None:
            raise BadRecord(
                f"there is no {settings.input_ids_field} and no conversation; name the field that holds the token ids or messages"
            )
        ids, mask = encode(row, messages)
        input_ids, loss_mask = np.array(ids, dtype=np.int64), np.array(mask, dtype=np.uint8)
        check_ids(input_ids, settings)
    parsed.add(line, input_ids, loss_mask, key, settings)


def parse_lines(data: bytes, first_line: int, settings: Settings, encode: Encode) -> Parsed:
    """The records in whole lines of JSON. Blank lines are passed over."""
    parsed = Parsed()
    for line, text in enumerate(data.split(b"\n"), first_line):
        if not text or text.isspace():
            continue
        try:
            _check_text(text)
            row = _load(text, settings)
            # Looking for one byte is many times faster than for a word, and most lines have no e.
            booleans = b"e" in text and (b"true" in text or b"false" in text)
            add_row(parsed, line, row, settings, encode, booleans)
        except BadRecord as error:
            parsed.rejects.append((line, str(error), text[:SHOWN_BYTES].decode(errors="replace")))
    return parsed


def _load(text: bytes, settings: Settings) -> Any:
    """The object in a line. Its mask, where it is evenly written, is read from the text: no number becomes an object.

    Raises BadRecord for what is no JSON.
    """
    key = b'"%s":' % settings.loss_mask_field.encode()
    start = text.find(key) + len(key)
    start += text[start : start + 1] == b" "
    end = text.find(b"]", start)
    mask = plain_mask(text[start + 1 : end]) if start >= len(key) and text[start : start + 1] == b"[" and end > start else None
    if mask is not None:
        try:
            row = orjson.loads(b'%s"\\u0000loss_mask"%s' % (text[:start], text[end + 1 :]))
        except ValueError:
            row = None
        # The place may have been within an object in the row.
        if isinstance(row, dict) and row.get(settings.loss_mask_field) == APART:
            row[settings.loss_mask_field] = mask
            return row
    try:
        return orjson.loads(text)
    except ValueError as error:
        raise BadRecord(f"not JSON ({error}); mend the line or take it out") from None


def plain_mask(text: bytes) -> np.ndarray | None:
    """uint8 [tokens] from `0, 1, ...` or `0,1,...`; None for anything else."""
    step = 3 if text[1:3] == b", " else 2
    digits = text[::step]
    between = len(digits) - 1
    if len(text) != between * step + 1 or text[1::step] != b"," * between or (step == 3 and text[2::3] != b" " * between):
        return None
    return None if digits.translate(None, b"01") else np.frombuffer(digits.translate(BITS), dtype=np.uint8)


def _check_text(text: bytes) -> None:
    if len(text) > MAX_LINE_BYTES:
        raise BadRecord(f"the line is longer than {MAX_LINE_BYTES >> 20} MiB, and no record is; look whether its line ends are missing")
    if text.startswith(BOM):
        raise BadRecord("it begins with a byte order mark; save the file as UTF-8 without one (sed -i '1s/^\\xEF\\xBB\\xBF//' FILE)")
    if text.endswith(b"\r"):
        raise BadRecord("it ends in CR LF, so a transfer has changed the file; fetch it again in binary, or run sed -i 's/\\r$//' FILE")
