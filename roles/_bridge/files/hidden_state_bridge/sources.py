# SPDX-License-Identifier: Apache-2.0
"""What a data set is made of: sources, their files, and the settings by which records are read and chosen."""

from __future__ import annotations

import hashlib
import os
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from .errors import Refusal

# By the end of a file's name; any other file that is named itself is read as JSONL.
SUFFIXES = {".jsonl": "lines", ".jsonl.gz": "gzip", ".jsonl.zst": "zstd", ".parquet": "parquet", ".arrow": "arrow"}
SHARED_FIELDS = ("input_ids_field", "loss_mask_field", "messages_field", "id_field")
CHOICES = {"missing_mask": ("fail", "ones"), "on_bad": ("fail", "skip"), "untrained": ("keep", "drop")}


@dataclass(frozen=True)
class Settings:
    """How records are read and which are kept.

    max_length: tokens kept of a record, None for all. min_tokens, max_tokens: records outside are dropped, counted before
    the cut. missing_mask: `fail`, or `ones` to train on every token. untrained: `keep` or `drop` records of which the cut
    leaves no trained token. on_bad: `fail`, or `skip` to list bad records aside. vocab_size: token ids must be below it,
    None to allow any int32. tokenizer: directory of the tokenizer that made the token ids, and that makes those of
    conversations. An empty messages_field stands for `messages` or `conversations`, an empty id_field for no check.
    """

    seed: int = 0
    max_length: int | None = None
    min_tokens: int = 1
    max_tokens: int | None = None
    missing_mask: str = "fail"
    untrained: str = "keep"
    on_bad: str = "fail"
    vocab_size: int | None = None
    tokenizer: str | None = None
    trust_remote_code: bool = False
    input_ids_field: str = "input_ids"
    loss_mask_field: str = "loss_mask"
    messages_field: str = ""
    id_field: str = "id"


@dataclass(frozen=True)
class Source:
    """A named file, or a directory of files. The name is what manifests and reports call it.

    weight: records taken for each record there is; above 1 they repeat. max_records: records taken at most, None for all.
    settings: the settings with this source's own field names.
    """

    name: str
    path: str
    settings: Settings
    weight: float = 1.0
    max_records: int | None = None


@dataclass(frozen=True)
class SourceFile:
    """One file of a source. name: its path below a directory's, else its base name. kind: a value of SUFFIXES."""

    source: Source
    name: str
    path: str
    kind: str


@dataclass(frozen=True)
class Reject:
    """Something that is no record, with reason and remedy. line: 1-based line or row, 0 for the file as a whole."""

    file: SourceFile
    line: int
    reason: str
    text: str = ""

    def __str__(self) -> str:
        place = f"{self.file.path}:{self.line}" if self.line else self.file.path
        return f"{self.file.source.name} {place}: {self.reason}"

    def as_row(self) -> dict[str, Any]:
        """A line of the rejects file."""
        return {"source": self.file.source.name, "file": self.file.path, "line": self.line, "reason": self.reason, "text": self.text}


class BadFile(ValueError):
    """Reason and remedy for a file that cannot be read to its end. line: where it breaks off, 0 where that is not known."""

    line = 0


def kind_of(path: str) -> str | None:
    """How a file of that name is read, or None where its name says nothing."""
    return next((kind for suffix, kind in SUFFIXES.items() if path.lower().endswith(suffix)), None)


def files_of(source: Source) -> list[SourceFile]:
    """The files of a source in the order of their names; a directory is searched to any depth, hidden names left out.

    Raises Refusal where there is none or a directory cannot be read.
    """

    def stop(error: OSError) -> None:
        raise Refusal(f"{source.name} {error.filename}: cannot be read: {error.strerror}; give a readable file or directory")

    if not os.path.isdir(source.path):
        return [SourceFile(source, os.path.basename(source.path), source.path, kind_of(source.path) or "lines")]
    found = []
    for directory, directories, names in os.walk(source.path, onerror=stop):
        directories[:] = [name for name in directories if not name.startswith(".")]
        for name in names:
            path = os.path.join(directory, name)
            kind = kind_of(name)
            if kind and not name.startswith("."):
                found.append(SourceFile(source, os.path.relpath(path, source.path), path, kind))
    if not found:
        raise Refusal(f"{source.name} {source.path}: the directory holds no file that ends in {', '.join(SUFFIXES)}; give one that does")
    return sorted(found, key=lambda file: file.name.split(os.sep))


def read_config(config: dict[str, Any]) -> tuple[list[Source], Settings]:
    """Sources, sorted by name, and settings of a pack configuration. Raises Refusal naming the key that is wrong."""
    known = {field.name: field.default for field in fields(Settings)}
    unknown = sorted(set(config) - set(known) - {"sources"})
    if unknown:
        raise Refusal(f"unknown setting {', '.join(unknown)}; known are {', '.join(known)}")
    values = {**known, **{key: value for key, value in config.items() if key in known}}
    for key, least in (("seed", 0), ("min_tokens", 1), ("max_length", 1), ("max_tokens", 1), ("vocab_size", 1)):
        value = values[key]
        if (value.__class__ is not int or value < least) and not (value is None and known[key] is None):
            raise Refusal(f"{key} is {value!r}; it must be an integer of at least {least}")
    for key, choices in CHOICES.items():
        if values[key] not in choices:
            raise Refusal(f"{key} is {values[key]!r}; it must be {' or '.join(choices)}")
    if values["trust_remote_code"].__class__ is not bool:
        raise Refusal(f"trust_remote_code is {values['trust_remote_code']!r}; it must be true or false")
    for key in (*SHARED_FIELDS, "tokenizer"):
        if not isinstance(values[key], (str, known[key].__class__)):
            raise Refusal(f"{key} is {values[key]!r}; it must be text")
    settings = Settings(**values)
    rows = config.get("sources")
    if not isinstance(rows, list) or not rows:
        raise Refusal("sources is empty; list the sources, each with a name and a path")
    sources = sorted((_source(row, settings) for row in rows), key=lambda source: source.name)
    for one, other in zip(sources, sources[1:]):
        if one.name == other.name:
            raise Refusal(f"two sources are called {one.name!r}; give each its own name")
    return sources, settings


def _source(row: object, settings: Settings) -> Source:
    if not isinstance(row, dict) or not all(isinstance(row.get(key), str) and row[key] for key in ("name", "path")):
        raise Refusal(f"source {row!r} needs a name and a path")
    name = row["name"]
    # What a caller leaves out may come as null.
    row = {key: value for key, value in row.items() if value is not None}
    unknown = sorted(set(row) - {"name", "path", "weight", "max_records", *SHARED_FIELDS})
    if unknown:
        raise Refusal(f"source {name!r} has the unknown setting {', '.join(unknown)}")
    weight, most = row.get("weight", 1.0), row.get("max_records")
    if weight.__class__ not in (int, float) or not 0 < weight < float("inf"):
        raise Refusal(f"source {name!r} has weight {weight!r}; it must be a number above 0. To leave a source out, take it off the list")
    if most is not None and (most.__class__ is not int or most < 1):
        raise Refusal(f"source {name!r} has max_records {most!r}; it must be an integer of at least 1")
    own = {key: row[key] for key in SHARED_FIELDS if key in row}
    for key, value in own.items():
        if not isinstance(value, str):
            raise Refusal(f"source {name!r} has {key} {value!r}; it must be text")
    return Source(name, row["path"], Settings(**{**asdict(settings), **own}), float(weight), most)


def shuffled(records: int, seed: int | list[int]) -> np.ndarray:
    """A permutation of 0 .. records-1, the same on every machine and numpy release.

    It sorts by the raw words of PCG64, whose stream numpy guarantees; that of `Generator.permutation` it does not.
    """
    return np.argsort(np.random.PCG64(seed).random_raw(records), kind="stable")


def copies(source: Source, records: int) -> np.ndarray:
    """int64 [records]: how often each record is taken, by weight and max_records.

    Which ones are taken once more than others is chosen by seed and the source's name, whatever other sources there are.
    """
    # floor(x + 1/2), as round() would go to the even number.
    wanted = int(records * source.weight + 0.5)
    if source.max_records is not None:
        wanted = min(wanted, source.max_records)
    if not records:
        return np.zeros(0, dtype=np.int64)
    result = np.full(records, wanted // records, dtype=np.int64)
    key = int.from_bytes(hashlib.sha256(source.name.encode()).digest()[:8], "little")
    result[shuffled(records, [source.settings.seed, key])[: wanted % records]] += 1
    return result
