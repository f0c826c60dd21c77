# SPDX-License-Identifier: Apache-2.0
"""Which tokens of the target's vocabulary the draft model has: SpecForge's vocab_mapping.pt, and what speculators makes its own from.

vocab_mapping.pt: d2t int64 [draft_vocab_size]: target id minus draft id, for each draft id; t2d bool [vocab_size]: whether the draft has it.
The draft has the tokens that are trained on most often, of equally frequent ones those with the lower ids.
token_freq.pt: {token: how often it is trained on}, for the tokens that are.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable
from typing import Any

import numpy as np

from .errors import Refusal
from .packed import PackedDataset
from .store import Access, filling

MAPPING = "vocab_mapping.pt"
FREQUENCIES = "speculators/token_freq.pt"


def count_tokens(dataset: PackedDataset, records: Iterable[int], vocab_size: int) -> np.ndarray:
    """How often each token is trained on in these records: int64 [vocab_size]. Raises Refusal for an id outside."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for number in records:
        record = dataset.record(number)
        ids = record.input_ids[record.loss_mask != 0]
        if len(ids) and int(ids.max()) >= vocab_size:
            raise Refusal(f"record {number} has token {int(ids.max())}, outside the vocabulary of {vocab_size}; is it another model's set?")
        found, times = np.unique(ids, return_counts=True)
        counts[found] += times
    return counts


def make_mapping(counts: np.ndarray, draft_vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """d2t and t2d for counts [vocab_size]."""
    used = np.sort(np.argsort(-counts, kind="stable")[:draft_vocab_size])
    t2d = np.zeros(len(counts), dtype=bool)
    t2d[used] = True
    return used - np.arange(draft_vocab_size), t2d


def check(dataset: PackedDataset, draft_vocab_size: int) -> None:
    """Raise Refusal where there cannot be a mapping of that size, or this interpreter cannot write it."""
    vocab_size = dataset.meta.get("vocab_size")
    if not vocab_size:
        raise Refusal(f"data set {dataset.path} does not say how large the vocabulary is; set dataset_stage_vocab_size and pack it again")
    if not 0 < draft_vocab_size <= vocab_size:
        raise Refusal(f"extraction_draft_vocab_size is {draft_vocab_size}; it must be from 1 to {vocab_size}, the size of the vocabulary")
    if not importlib.util.find_spec("torch"):
        raise Refusal(
            "extraction_draft_vocab_size needs the Python package torch where the collection is made; name an interpreter that has it"
            " (extraction_collect_python)"
        )


def write_vocab(
    dest: str, formats: set[str], dataset: PackedDataset, records: Iterable[int], draft_vocab_size: int, whole: set[str], access: Access
) -> set[str]:
    """Make the collection `dest` hold, for these records, what the formats' trainers want; returns the paths that were written.

    whole: the paths whose files are as they were written. Raises Refusal for a token outside the vocabulary, and OSError.
    """
    import torch

    counts = count_tokens(dataset, records, dataset.meta["vocab_size"])
    contents: dict[str, dict[Any, Any]] = {}
    if "specforge" in formats:
        d2t, t2d = (torch.from_numpy(part) for part in make_mapping(counts, draft_vocab_size))
        contents[MAPPING] = {"d2t": d2t, "t2d": t2d}
    if "speculators" in formats:
        found = np.flatnonzero(counts)
        contents[FREQUENCIES] = dict(zip(found.tolist(), counts[found].tolist()))
    return {file for file, content in contents.items() if _write(os.path.join(dest, file), content, file in whole, access)}


def _write(path: str, content: dict[Any, Any], whole: bool, access: Access) -> bool:
    import torch

    if whole:
        there = torch.load(path, weights_only=True)
        if there.keys() == content.keys() and all(torch.equal(*map(torch.as_tensor, (there[key], content[key]))) for key in content):
            return False
    with filling(path, access, replace=True) as temporary:
        torch.save(content, temporary)
    return True
