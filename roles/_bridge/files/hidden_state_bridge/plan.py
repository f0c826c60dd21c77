# SPDX-License-Identifier: Apache-2.0
"""Which host does which records: what is left is spread by tokens over the hosts' weights, longest record first."""

from __future__ import annotations

from typing import Any

import numpy as np

import hs_manifest

from .errors import Refusal
from .packed import PackedDataset


def mask_of(ranges: str, records: int, owner: str) -> np.ndarray:
    """bool [records], true for the records in `ranges`. Raises Refusal where they do not fit the data set."""
    mask = np.zeros(records, dtype=bool)
    try:
        pairs = hs_manifest.decode_ranges(ranges)
    except hs_manifest.ManifestError as error:
        raise Refusal(f"{owner}: {error}") from error
    if pairs and pairs[-1][1] >= records:
        raise Refusal(f"{owner} has record {pairs[-1][1]}, and the data set ends at {records - 1}; is it another data set?")
    for first, last in pairs:
        mask[first : last + 1] = True
    return mask


def make_plan(request: dict[str, Any]) -> dict[str, Any]:
    """The plan for `{dataset: DIR, hosts: {host: {done: ranges, weight: number}}}`.

    Each record not done on any host goes, longest first, to the host that would finish it earliest (tokens over
    weight; by name where equal). A host of weight 0 gets nothing. Returns totals, `shares` (ranges a host) and `tokens`
    (a host). Raises Refusal.
    """
    if not isinstance(request.get("dataset"), str) or not isinstance(request.get("hosts"), dict):
        raise Refusal('a plan needs {"dataset": DIRECTORY, "hosts": {HOST: {"done": RANGES, "weight": NUMBER}}}')
    dataset = PackedDataset(request["dataset"])
    hosts = request["hosts"]
    names = sorted(hosts)
    done = np.zeros(len(dataset), dtype=bool)
    for name in names:
        done |= mask_of(hosts[name].get("done") or "", len(dataset), f"host {name}")
    weights = np.array([_weight(name, hosts[name].get("weight", 1.0)) for name in names], dtype=float)
    left = np.flatnonzero(~done)
    workers = np.flatnonzero(weights > 0)
    if len(left) and not len(workers):
        raise Refusal(f"{len(left):,} records are left and no host can take them; give a host a weight above 0")
    order = left[np.argsort(-dataset.lengths[left], kind="stable")]
    pace, load = 1.0 / weights[workers], np.zeros(len(workers))
    shares: list[list[int]] = [[] for _name in names]
    tokens = [0] * len(names)
    for record in order.tolist():
        length = int(dataset.lengths[record])
        chosen = int(np.argmin((load + length) * pace))
        load[chosen] += length
        host = int(workers[chosen])
        shares[host].append(record)
        tokens[host] += length
    total, finished = int(dataset.lengths.sum()), int(dataset.lengths[done].sum())
    return {
        "total_records": len(dataset),
        "total_tokens": total,
        "done_records": int(done.sum()),
        "done_tokens": finished,
        "left_records": len(left),
        "left_tokens": total - finished,
        "shares": {name: hs_manifest.encode_ranges(share) for name, share in zip(names, shares)},
        "tokens": dict(zip(names, tokens)),
    }


def _weight(host: str, weight: object) -> float:
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 <= weight < float("inf"):
        raise Refusal(f"host {host} has weight {weight!r}; it must be a number of at least 0")
    return float(weight)
