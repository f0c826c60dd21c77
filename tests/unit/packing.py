# SPDX-License-Identifier: GPL-3.0-or-later
"""Writes the same rows as sources of every kind, and reads packed sets back."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from hidden_state_bridge.pack import pack
from hidden_state_bridge.packed import PackedDataset

SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet", ".arrow")


def lines_of(rows: list[Any]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def table_of(rows: list[dict]) -> pa.Table:
    return pa.Table.from_pylist(rows)


def write(path: Path, rows: list[dict]) -> str:
    """Write rows as the file's name says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    name = path.name
    if name.endswith(".gz"):
        path.write_bytes(gzip.compress(lines_of(rows)))
    elif name.endswith(".zst"):
        path.write_bytes(zstandard.compress(lines_of(rows)))
    elif name.endswith(".parquet"):
        pq.write_table(table_of(rows), path, row_group_size=3)
    elif name.endswith(".arrow"):
        with pa.ipc.new_stream(str(path), table_of(rows).schema) as writer:
            writer.write_table(table_of(rows), max_chunksize=3)
    else:
        path.write_bytes(lines_of(rows))
    return str(path)


def packed(out: Path, sources: list[dict], **settings: Any) -> tuple[PackedDataset, dict[str, Any]]:
    """Pack, check, and open."""
    result = pack({"sources": sources, **settings}, str(out))
    dataset = PackedDataset(result["path"])
    dataset.check_content()
    return dataset, result


def contents(dataset: PackedDataset) -> list[tuple]:
    """(source, file, line, token ids, mask) of each record in order."""
    records = map(dataset.record, range(len(dataset)))
    return [(record.source, record.file, record.line, record.input_ids.tolist(), record.loss_mask.tolist()) for record in records]
