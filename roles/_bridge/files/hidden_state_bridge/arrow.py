# SPDX-License-Identifier: Apache-2.0
"""The Arrow data set that speculators reads beside its files: Hugging Face `datasets` on disk, written without that package.

One row a file, in the order of the files' numbers: input_ids int64 [L], loss_mask int64 [L], seq_len int64. state.json is
written last and names the Arrow file, so that a reader sees the old set or the other one.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

import hs_manifest

from .errors import Refusal
from .packed import PackedDataset
from .store import Access, filling
from .together import is_ours

DIRECTORY = "speculators"
STATE = "state.json"
INFO = "dataset_info.json"
# Tokens of one record batch: some MiB in memory.
BATCH_TOKENS = 1 << 18


def need_package() -> None:
    """Raise Refusal where this interpreter cannot write the data set."""
    if not importlib.util.find_spec("pyarrow"):
        raise Refusal(
            "the data set of the format speculators needs the Python package pyarrow where it is written;"
            " name an interpreter that has it (extraction_collect_python)"
        )


def write_arrow(dest: str, dataset: PackedDataset, records: np.ndarray, whole: set[str], access: Access) -> tuple[set[str], set[str]]:
    """Make the collection `dest` hold the set whose row i is record `records[i]`; returns the paths that were written and removed.

    records: int64 [rows]. whole: the paths whose files are as they were written. Raises OSError.
    """
    directory = os.path.join(dest, DIRECTORY)
    fingerprint = hashlib.sha256(dataset.meta["sha256"].encode() + records.astype("<i8").tobytes()).hexdigest()[:16]
    name = f"data-{fingerprint}.arrow"
    state = {
        "_data_files": [{"filename": name}],
        "_fingerprint": fingerprint,
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": "torch",
        "_output_all_columns": False,
        "_split": None,
    }
    wanted = {INFO: {"builder_name": "hidden_state_bridge", "dataset_name": dataset.meta["sha256"][:16]}, STATE: state}
    paths = {file: os.path.join(directory, file) for file in (name, *wanted)}
    written = set()
    if not {f"{DIRECTORY}/{file}" for file in paths} <= whole or hs_manifest.read_json(paths[STATE]) != state:
        with filling(paths[name], access, replace=True) as temporary:
            _write_stream(temporary, dataset, records)
        for file, content in wanted.items():
            hs_manifest.write_json(paths[file], content, access.file_mode, access.gid)
        written = {f"{DIRECTORY}/{file}" for file in paths}
    removed = set()
    for other in os.listdir(directory):
        if other.endswith(".arrow") and other != name and is_ours(f"{DIRECTORY}/{other}"):
            os.unlink(os.path.join(directory, other))
            removed.add(f"{DIRECTORY}/{other}")
    return written, removed


def _write_stream(path: str, dataset: PackedDataset, records: np.ndarray) -> None:
    import pyarrow

    tokens = pyarrow.list_(pyarrow.int64())
    schema = pyarrow.schema([("input_ids", tokens), ("loss_mask", tokens), ("seq_len", pyarrow.int64())])
    with pyarrow.OSFile(path, "wb") as stream, pyarrow.ipc.new_stream(stream, schema) as writer:
        for some in _batches(dataset.lengths, records):
            rows = [dataset.record(record) for record in some.tolist()]
            lengths = dataset.lengths[some]
            offsets = pyarrow.array(np.concatenate(([0], np.cumsum(lengths))), pyarrow.int32())
            columns: list[Any] = [
                pyarrow.ListArray.from_arrays(offsets, pyarrow.array(np.concatenate(parts).astype(np.int64)))
                for parts in ([row.input_ids for row in rows], [row.loss_mask for row in rows])
            ]
            writer.write_batch(pyarrow.record_batch([*columns, pyarrow.array(lengths)], schema=schema))


def _batches(lengths: np.ndarray, records: Iterable[int]) -> Iterator[np.ndarray]:
    """Runs of records of about BATCH_TOKENS tokens."""
    records = np.asarray(records, dtype=np.int64)
    ends = np.cumsum(lengths[records])
    first = 0
    while first < len(records):
        before = ends[first - 1] if first else 0
        last = max(first + 1, int(np.searchsorted(ends, before + BATCH_TOKENS, side="right")))
        yield records[first:last]
        first = last
