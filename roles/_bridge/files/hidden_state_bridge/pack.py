# SPDX-License-Identifier: Apache-2.0
"""Merge sources into one packed data set: cut, choose, shuffle by seed, write.

Two passes in bounded memory. The first reads each source once and appends tokens and masks to spool files; only some
numbers a record stay in memory. The second writes the records in shuffled order, reading the spools at their places.
The result depends on contents, names, settings and seed, not on the order in which sources or files are listed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any, BinaryIO

import numpy as np

import hs_manifest

from .conversations import describe
from .errors import Refusal
from .hashes import file_hash
from .packed import BLOCK_BYTES, DTYPES, FORMAT, META, ArrayWriter, PackedDataset, meta_hash, open_private
from .reading import Reader
from .scan import Scan, scan
from .sources import Settings, Source, files_of, read_config, shuffled
from .spool import read_spools

PACK_VERSION = 2
# A packer's own directory begins so, and holds a file that the packer has locked.
WORKSPACE = ".pack-"
AT_WORK = "at-work"
META_SETTINGS = ("seed", "max_length", "min_tokens", "max_tokens", "missing_mask", "untrained", "vocab_size")
# A token and its mask; the numbers of a record.
PACKED_BYTES = (5, 32)
# Places of records that are Python objects at a time.
PLACES = 4096
# Never taken from the file system that the set goes to.
LOW_WATER_BYTES = 64 << 20


def table(summaries: list[dict[str, Any]]) -> list[str]:
    """The sources as lines of text: records, tokens, mean, longest, and what was cut, dropped, repeated or rejected."""
    columns = ("records", "tokens", "mean", "longest", "cut", "untrained", "dropped", "repeated", "rejected")
    total: dict[str, Any] = {key: sum(row[key] for row in summaries) for key in columns if key not in ("mean", "longest")}
    total.update(name="total", longest=max((row["longest"] for row in summaries), default=0))
    rows = [("source", *columns)]
    for row in [*summaries, total]:
        row = {**row, "mean": round(row["tokens"] / max(row["records"], 1))}
        rows.append((row["name"], *(format(row[key], ",") for key in columns)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) if not i else cell.rjust(width) for i, (cell, width) in enumerate(zip(row, widths))) for row in rows
    ]


def pack(config: dict[str, Any], out_dir: str | None, dry_run: bool = False, workers: int | None = None) -> dict[str, Any]:
    """Pack the sources below `out_dir` and return `{path, changed, meta, table, rejects}`.

    The same sources and settings are recognised by content and not packed again. A dry run reads and counts everything
    and writes nothing; its `path` is None and its meta without hashes unless the packed set is there already. `rejects`
    is the path of the file that names the skipped records, or None. workers: processes that parse, by default one a core.
    Raises Refusal.
    """
    sources, settings = read_config(config)
    tokenizer = describe(settings)
    out_dir = os.path.abspath(out_dir) if out_dir else None
    known = _find(sources, settings, tokenizer, out_dir) if out_dir else None
    if known:
        return _result(known.path, False, known.meta)
    if dry_run:
        scans = [_say(item) for item in _scan_all(sources, None, workers)]
        return _result(None, True, _meta(scans, settings, tokenizer))
    if not out_dir:
        raise Refusal("--out-dir is missing; say where the packed data set goes")
    with _workspace(out_dir) as work:
        path, meta = _build(sources, settings, tokenizer, out_dir, work, workers)
    _remember(out_dir, sources, settings, tokenizer, meta)
    return _result(path, True, meta)


def _result(path: str | None, changed: bool, meta: dict[str, Any]) -> dict[str, Any]:
    rejects = path and _rejects_of(path)
    return {
        "path": path,
        "changed": changed,
        "meta": meta,
        "table": table(meta["sources"]),
        "rejects": rejects if rejects and os.path.exists(rejects) else None,
    }


def _rejects_of(path: str) -> str:
    return f"{path}.rejects.jsonl"


def _say(item: Scan) -> Scan:
    row = item.summary()
    print(f"{row['name']}: {row['records']:,} records, {row['tokens']:,} tokens", file=sys.stderr, flush=True)
    return item


def _scan_all(sources: list[Source], work: str | None, workers: int | None) -> Iterator[Scan]:
    with Reader(workers, work) as reader, contextlib.ExitStack() as stack:
        rejects: BinaryIO | None = stack.enter_context(open(os.path.join(work, "rejects"), "wb", opener=open_private)) if work else None
        for source in sources:
            yield scan(source, reader, rejects, (lambda: _need_room(work, LOW_WATER_BYTES)) if work else None)


def _need_room(directory: str, size: int) -> None:
    free = shutil.disk_usage(directory).free
    if free < size:
        raise Refusal(
            f"the file system of {directory} has {free / 1e9:.2f} GB free, and packing needs {size / 1e9:.2f} GB there; make room or"
            " choose another directory (dataset_stage_cache_dir)"
        )


def _meta(scans: list[Scan], settings: Settings, tokenizer: dict[str, Any] | None) -> dict[str, Any]:
    rows = [item.summary() for item in scans]
    records = sum(row["records"] for row in rows)
    if not records:
        raise Refusal("the sources hold no records that are kept; give at least one line, and look at min_tokens and max_tokens")
    return {
        "format": FORMAT,
        "block_bytes": BLOCK_BYTES,
        "records": records,
        "tokens": sum(row["tokens"] for row in rows),
        "trained_tokens": sum(row["trained_tokens"] for row in rows),
        "longest": max(row["longest"] for row in rows),
        **{name: getattr(settings, name) for name in META_SETTINGS},
        "max_token_id": max(item.max_token_id for item in scans),
        "tokenizer": tokenizer,
        "sources": rows,
    }


@contextlib.contextmanager
def _workspace(out_dir: str) -> Iterator[str]:
    try:
        os.makedirs(out_dir, mode=0o700, exist_ok=True)
        _remove_left(out_dir)
        work = tempfile.mkdtemp(dir=out_dir, prefix=WORKSPACE)
    except OSError as error:
        raise Refusal(f"{out_dir} cannot be written: {error.strerror}; choose another --out-dir") from error
    try:
        with open(os.path.join(work, f"{AT_WORK}.new"), "xb", opener=open_private) as held:
            # Of this process alone, so that one that it forked and that outlives it does not hold it.
            fcntl.lockf(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.rename(held.name, os.path.join(work, AT_WORK))
            yield work
    except OSError as error:
        raise Refusal(f"packing into {out_dir} failed: {error}; see to its free space and permissions") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _remove_left(out_dir: str) -> None:
    """Remove the workspaces of packers that were killed; they may be as large as the sources."""
    for name in os.listdir(out_dir):
        if not name.startswith(WORKSPACE):
            continue
        work = os.path.join(out_dir, name)
        # Where there is no such file yet, or another packer holds it, somebody is at work.
        with contextlib.suppress(OSError), open(os.path.join(work, AT_WORK), "r+b") as held:
            fcntl.lockf(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(work, ignore_errors=True)


def _build(
    sources: list[Source], settings: Settings, tokenizer: dict[str, Any] | None, out_dir: str, work: str, workers: int | None
) -> tuple[str, dict[str, Any]]:
    scans = [_say(item) for item in _scan_all(sources, work, workers)]
    meta = _meta(scans, settings, tokenizer)
    _need_room(work, meta["tokens"] * PACKED_BYTES[0] + meta["records"] * PACKED_BYTES[1] + LOW_WATER_BYTES)
    packed = os.path.join(work, "packed")
    os.mkdir(packed, 0o700)
    meta["files"] = _write(scans, meta, work, packed)
    meta["sha256"] = meta_hash(meta)
    with open(os.path.join(packed, META), "x", encoding="utf-8", opener=open_private) as stream:
        json.dump(meta, stream, sort_keys=True, indent=1)
        stream.write("\n")
        stream.flush()
        os.fsync(stream.fileno())
    hs_manifest.fsync_directory(packed)
    path = os.path.join(out_dir, meta["sha256"][:16])
    if os.path.lexists(path):
        # Only a damaged copy gets here: an intact one was found by its key, or is replaced by the same bytes.
        os.rename(path, os.path.join(work, "replaced"))
    if any(row["rejected"] for row in meta["sources"]):
        os.rename(os.path.join(work, "rejects"), _rejects_of(path))
    os.rename(packed, path)
    hs_manifest.fsync_directory(out_dir)
    return path, meta


def _write(scans: list[Scan], meta: dict[str, Any], work: str, directory: str) -> dict[str, dict[str, Any]]:
    """Second pass: the arrays in shuffled order. Returns meta's `files`."""
    records = meta["records"]
    chosen = [item.chosen() for item in scans]
    order = shuffled(records, meta["seed"])
    source = np.repeat(np.arange(len(scans), dtype=np.int32), [len(part) for part in chosen])[order]
    columns = {
        name: np.concatenate([getattr(item, name)[part] for item, part in zip(scans, chosen)])[order]
        for name in ("spools", "starts", "lengths", "files", "lines")
    }
    counts = {"tokens": meta["tokens"], "loss_mask": meta["tokens"], "offsets": records + 1}
    writers = {name: ArrayWriter(directory, name, counts.get(name, records)) for name in DTYPES}

    def places() -> Iterator[tuple[int, int, int]]:
        for begin in range(0, records, PLACES):
            yield from zip(*(columns[key][begin : begin + PLACES].tolist() for key in ("spools", "starts", "lengths")))

    def fill(name: str, kind: str) -> None:
        for data in read_spools(work, kind, places()):
            writers[name].write(data)

    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(fill, "tokens", "ids"), threads.submit(fill, "loss_mask", "mask")]:
            done.result()
    writers["offsets"].write(np.concatenate([[0], np.cumsum(columns["lengths"])]))
    writers["source"].write(source)
    writers["file"].write(columns["files"])
    writers["line"].write(columns["lines"])
    return {name + ".npy": writer.close() for name, writer in writers.items()}


def _key(
    hashes: list[tuple[str, str, str]], sources: list[Source], settings: Settings, tokenizer: dict[str, Any] | None, out_dir: str
) -> str:
    """Path of the file that remembers the packed set of these contents and settings."""
    # Where the tokenizer lies does not matter; what it is does.
    kept = {**asdict(settings), "tokenizer": tokenizer}
    shares = [(source.weight, source.max_records, asdict(source.settings)) for source in sources]
    for _weight, _most, own in shares:
        del own["tokenizer"]
    text = json.dumps([PACK_VERSION, FORMAT, hashes, kept, shares], sort_keys=True)
    return os.path.join(out_dir, f"key-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json")


def _find(sources: list[Source], settings: Settings, tokenizer: dict[str, Any] | None, out_dir: str) -> PackedDataset | None:
    """The intact packed set of just these sources and settings, if there is one."""
    try:
        if not any(name.startswith("key-") for name in os.listdir(out_dir)):
            return None
        hashes = [(source.name, file.name, file_hash(file.path)) for source in sources for file in files_of(source)]
        with open(_key(hashes, sources, settings, tokenizer, out_dir), encoding="utf-8") as stream:
            dataset = PackedDataset(os.path.join(out_dir, json.load(stream)["path"]))
        dataset.check_content()
    except (OSError, ValueError, KeyError, Refusal):
        return None
    return dataset


def _remember(out_dir: str, sources: list[Source], settings: Settings, tokenizer: dict[str, Any] | None, meta: dict[str, Any]) -> None:
    hashes = [(row["name"], file["path"], file["sha256"]) for row in meta["sources"] for file in row["files"]]
    hs_manifest.write_json(_key(hashes, sources, settings, tokenizer, out_dir), {"path": meta["sha256"][:16]})
