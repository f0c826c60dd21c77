# SPDX-License-Identifier: Apache-2.0
"""Merge tokenized sources into one packed data set: cut, shuffle by seed, write.

Two passes in bounded memory. The first reads each source once and appends tokens and masks to spool files; only lengths
and line numbers stay in memory. The second writes the records in shuffled order, reading the spools at their places.
The result depends on contents, names, settings and seed, not on the order in which sources are listed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import sys
import tempfile
from array import array
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, BinaryIO

import numpy as np

from .errors import Refusal
from .packed import DTYPES, FORMAT, META, ArrayWriter, PackedDataset, meta_hash
from .sources import Settings, Source, hash_source, read_source

PACK_VERSION = 1
TOKEN_BYTES = 4


@dataclass
class Scanned:
    """What the first pass learned of one source. lengths and lines have an entry a record."""

    source: Source
    sha256: str = ""
    lengths: array = field(default_factory=lambda: array("q"))
    lines: array = field(default_factory=lambda: array("q"))
    cut: int = 0
    untrained: int = 0
    trained_tokens: int = 0
    max_token_id: int = 0

    def summary(self) -> dict[str, Any]:
        """The source's entry in meta.json."""
        return {
            "name": self.source.name,
            "path": os.path.basename(self.source.path),
            "sha256": self.sha256,
            "records": len(self.lengths),
            "tokens": sum(self.lengths),
            "trained_tokens": self.trained_tokens,
            "longest": max(self.lengths, default=0),
            "cut": self.cut,
            "untrained": self.untrained,
            "dropped": 0,
        }


def read_config(config: dict[str, Any]) -> tuple[list[Source], Settings]:
    """Sources, sorted by name, and settings of a pack configuration. Raises Refusal naming the key that is wrong."""
    rows = config.get("sources")
    if not isinstance(rows, list) or not rows:
        raise Refusal("sources is empty; list the source files, each with a name and a path")
    sources = []
    for row in rows:
        if not isinstance(row, dict) or not all(isinstance(row.get(key), str) and row[key] for key in ("name", "path")):
            raise Refusal(f"source {row!r} needs a name and a path")
        sources.append(Source(row["name"], row["path"]))
    names = [source.name for source in sources]
    for name in names:
        if names.count(name) > 1:
            raise Refusal(f"two sources are called {name!r}; give each its own name")
    keys = Settings.__dataclass_fields__
    values = {key: value for key, value in config.items() if key in keys}
    unknown = sorted(set(config) - set(keys) - {"sources"})
    if unknown:
        raise Refusal(f"unknown setting {', '.join(unknown)}; known are {', '.join(keys)}")
    for key, least in (("seed", 0), ("max_length", 1), ("vocab_size", 1)):
        value = values.get(key, keys[key].default)
        if (value.__class__ is not int or value < least) and not (value is None and key != "seed"):
            raise Refusal(f"{key} is {value!r}; it must be an integer of at least {least}")
    if values.get("missing_mask", "fail") not in ("fail", "ones"):
        raise Refusal(f"missing_mask is {values['missing_mask']!r}; it must be fail or ones")
    return sorted(sources, key=lambda source: source.name), Settings(**values)


def scan(source: Source, settings: Settings, tokens: BinaryIO | None, masks: BinaryIO | None) -> Scanned:
    """First pass over one source; what is kept of each record goes to the spools, where they are given."""
    result = Scanned(source)
    digest = hashlib.sha256()
    for record in read_source(source, settings, digest):
        input_ids = record.input_ids[: settings.max_length]
        loss_mask = record.loss_mask[: settings.max_length]
        trained = int(np.count_nonzero(loss_mask))
        result.cut += len(input_ids) < len(record.input_ids)
        result.untrained += not trained
        result.trained_tokens += trained
        result.max_token_id = max(result.max_token_id, int(input_ids.max()))
        result.lengths.append(len(input_ids))
        result.lines.append(record.line)
        if tokens is not None and masks is not None:
            tokens.write(input_ids.data)
            masks.write(loss_mask.data)
    result.sha256 = digest.hexdigest()
    return result


def shuffled(records: int, seed: int) -> np.ndarray:
    """A permutation of 0 .. records-1, the same on every machine and numpy release.

    It sorts by the raw words of PCG64, whose stream numpy guarantees; that of `Generator.permutation` it does not.
    """
    return np.argsort(np.random.PCG64(seed).random_raw(records), kind="stable")


def table(summaries: list[dict[str, Any]]) -> list[str]:
    """The sources as lines of text: records, tokens, mean, longest, and how many were cut or have no trained token."""
    columns = ("source", "records", "tokens", "mean", "longest", "cut", "untrained")
    total = {key: sum(row[key] for row in summaries) for key in ("records", "tokens", "cut", "untrained")}
    total.update(name="total", longest=max((row["longest"] for row in summaries), default=0))
    rows = [columns] + [
        (
            row["name"],
            *(
                format(number, ",")
                for number in (
                    row["records"],
                    row["tokens"],
                    round(row["tokens"] / max(row["records"], 1)),
                    row["longest"],
                    row["cut"],
                    row["untrained"],
                )
            ),
        )
        for row in [*summaries, total]
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(columns))]
    return [
        "  ".join(cell.ljust(width) if not i else cell.rjust(width) for i, (cell, width) in enumerate(zip(row, widths))) for row in rows
    ]


def pack(config: dict[str, Any], out_dir: str | None, dry_run: bool = False) -> dict[str, Any]:
    """Pack the sources below `out_dir` and return `{path, changed, meta, table}`.

    The same sources and settings are recognised by content and not packed again. A dry run reads and counts everything
    and writes nothing; its `path` is None and its meta without hashes unless the packed set is there already.
    Raises Refusal.
    """
    sources, settings = read_config(config)
    out_dir = os.path.abspath(out_dir) if out_dir else None
    known = _find(sources, settings, out_dir) if out_dir else None
    if known:
        return _result(known.path, False, known.meta)
    if dry_run:
        scans = []
        for source in sources:
            scans.append(scan(source, settings, None, None))
            _say(scans[-1])
        return _result(None, True, _meta(scans, settings))
    if not out_dir:
        raise Refusal("--out-dir is missing; say where the packed data set goes")
    with _workspace(out_dir) as work:
        path, meta = _build(sources, settings, out_dir, work)
    _remember(out_dir, meta, settings)
    return _result(path, True, meta)


def _result(path: str | None, changed: bool, meta: dict[str, Any]) -> dict[str, Any]:
    return {"path": path, "changed": changed, "meta": meta, "table": table(meta["sources"])}


def _say(scanned: Scanned) -> None:
    row = scanned.summary()
    print(f"{row['name']}: {row['records']:,} records, {row['tokens']:,} tokens", file=sys.stderr, flush=True)


def _meta(scans: list[Scanned], settings: Settings) -> dict[str, Any]:
    rows = [scanned.summary() for scanned in scans]
    records = sum(row["records"] for row in rows)
    if not records:
        raise Refusal("the sources hold no records; give at least one with a line in it")
    return {
        "format": FORMAT,
        "records": records,
        "tokens": sum(row["tokens"] for row in rows),
        "trained_tokens": sum(row["trained_tokens"] for row in rows),
        "longest": max(row["longest"] for row in rows),
        "max_length": settings.max_length,
        "seed": settings.seed,
        "vocab_size": settings.vocab_size,
        "max_token_id": max(scanned.max_token_id for scanned in scans),
        "sources": rows,
    }


@contextlib.contextmanager
def _workspace(out_dir: str) -> Iterator[str]:
    try:
        os.makedirs(out_dir, mode=0o700, exist_ok=True)
        work = tempfile.mkdtemp(dir=out_dir, prefix=".pack-")
    except OSError as error:
        raise Refusal(f"{out_dir} cannot be written: {error.strerror}; choose another --out-dir") from error
    try:
        yield work
    except OSError as error:
        raise Refusal(f"packing into {out_dir} failed: {error}; see to its free space and permissions") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _build(sources: list[Source], settings: Settings, out_dir: str, work: str) -> tuple[str, dict[str, Any]]:
    scans, spools = [], []
    with contextlib.ExitStack() as stack:
        for number, source in enumerate(sources):
            pair = [stack.enter_context(open(os.path.join(work, f"{number}.{kind}"), "x+b")) for kind in ("ids", "mask")]
            scans.append(scan(source, settings, pair[0], pair[1]))
            for stream in pair:
                stream.flush()
            spools.append((pair[0].fileno(), pair[1].fileno()))
            _say(scans[-1])
        meta = _meta(scans, settings)
        packed = os.path.join(work, "packed")
        os.mkdir(packed, 0o700)
        meta["files"] = _write(scans, spools, meta, packed)
    meta["sha256"] = meta_hash(meta)
    with open(os.path.join(packed, META), "x", encoding="utf-8") as stream:
        json.dump(meta, stream, sort_keys=True, indent=1)
        stream.write("\n")
        stream.flush()
        os.fsync(stream.fileno())
    path = os.path.join(out_dir, meta["sha256"][:16])
    if os.path.lexists(path):
        # Only a damaged copy gets here: an intact one was found by its key, or is replaced by the same bytes.
        os.rename(path, os.path.join(work, "replaced"))
    os.rename(packed, path)
    return path, meta


def _write(scans: list[Scanned], spools: list[tuple[int, int]], meta: dict[str, Any], directory: str) -> dict[str, dict[str, Any]]:
    """Second pass: the arrays in shuffled order. Returns meta's `files`."""
    records = meta["records"]
    order = shuffled(records, meta["seed"])
    source = np.repeat(np.arange(len(scans), dtype=np.int32), [len(scanned.lengths) for scanned in scans])
    lengths = np.concatenate([np.frombuffer(scanned.lengths, dtype=np.int64) for scanned in scans if scanned.lengths])
    lines = np.concatenate([np.frombuffer(scanned.lines, dtype=np.int64) for scanned in scans if scanned.lines])
    starts = np.cumsum(lengths) - lengths
    # Places within the record's own spool.
    bases = np.zeros(len(scans), dtype=np.int64)
    np.cumsum([sum(scanned.lengths) for scanned in scans[:-1]], out=bases[1:])
    starts -= bases[source]
    counts = {"tokens": meta["tokens"], "loss_mask": meta["tokens"], "offsets": records + 1}
    writers = {name: ArrayWriter(directory, name, counts.get(name, records)) for name in DTYPES}
    for index in order.tolist():
        ids, mask = spools[source[index]]
        start, length = int(starts[index]), int(lengths[index])
        writers["tokens"].write(_read(ids, start * TOKEN_BYTES, length * TOKEN_BYTES))
        writers["loss_mask"].write(_read(mask, start, length))
    writers["offsets"].write(np.concatenate([[0], np.cumsum(lengths[order])]))
    writers["source"].write(source[order])
    writers["line"].write(lines[order])
    return {name + ".npy": writer.close() for name, writer in writers.items()}


def _read(handle: int, start: int, size: int) -> bytes:
    data = os.pread(handle, size, start)
    if len(data) != size:
        raise OSError(f"spool file ended after {len(data)} of {size} bytes")
    return data


def _key(hashes: list[tuple[str, str, str]], settings: Settings) -> str:
    text = json.dumps([PACK_VERSION, FORMAT, sorted(hashes), asdict(settings)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _key_file(out_dir: str, key: str) -> str:
    return os.path.join(out_dir, f"key-{key}.json")


def _find(sources: list[Source], settings: Settings, out_dir: str) -> PackedDataset | None:
    """The intact packed set of just these sources and settings, if there is one."""
    try:
        if not any(name.startswith("key-") for name in os.listdir(out_dir)):
            return None
    except OSError:
        return None
    hashes = [(source.name, os.path.basename(source.path), hash_source(source)) for source in sources]
    try:
        with open(_key_file(out_dir, _key(hashes, settings)), encoding="utf-8") as stream:
            dataset = PackedDataset(os.path.join(out_dir, json.load(stream)["path"]))
        dataset.check_content()
    except (OSError, ValueError, KeyError, Refusal):
        return None
    return dataset


def _remember(out_dir: str, meta: dict[str, Any], settings: Settings) -> None:
    hashes = [(row["name"], row["path"], row["sha256"]) for row in meta["sources"]]
    name = _key_file(out_dir, _key(hashes, settings))
    temporary = f"{name}.tmp-{os.getpid()}"
    with open(temporary, "w", encoding="utf-8") as stream:
        json.dump({"path": meta["sha256"][:16]}, stream)
    os.rename(temporary, name)
