# SPDX-License-Identifier: Apache-2.0
"""Which host does which records: what is left is spread by tokens over the hosts' weights, longest record first."""

from __future__ import annotations

from typing import Any

import numpy as np

import hs_manifest

from . import shares
from .errors import Refusal
from .packed import PackedDataset

# A start that lasted less says little about a host's rate.
LEAST_SECONDS = 30.0
# A measured rate moves a weight by this factor at most: a host that was disturbed once is not written off.
MOST_BY_RATE = 4.0


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
    """The plan for `{dataset: DIR, hosts: {host: {done, weight, share, tokens, seconds}}}`, and optionally more.

    Of a host: done: ranges of its records; weight: a number, 0 takes nothing; share: the ranges that its extractor is at
    work on, empty where none is; tokens, seconds: of its last start. Optional: `records` makes a pilot of so many;
    `ledger` (a file) and `run` say what hosts that are not asked had done and were given before, which stays theirs unless
    `reassign`; `commit` writes what the hosts that are asked have done and are given into the ledger.

    Extractors at work keep their shares, letter by letter, while all that is left is theirs and no other host could take
    some of it. Else
    each record that is left goes, longest first, to the host that would finish it earliest (tokens over weight and
    measured rate; by name where equal), and `stop` names the extractors that have to end before that holds.
    Returns totals, `wanted` (ranges: all records, or the pilot's), `shares` (ranges a host), `tokens` (a host), `held` (records and
    tokens, by host that is not asked) and `stop`. Raises Refusal.
    """
    if not isinstance(request.get("dataset"), str) or not isinstance(request.get("hosts"), dict):
        raise Refusal('a plan needs {"dataset": DIRECTORY, "hosts": {HOST: {"done": RANGES, "weight": NUMBER}}}')
    dataset = PackedDataset(request["dataset"])
    if not request.get("ledger"):
        return _plan(request, dataset, {})
    with shares.Ledger(request["ledger"], request["run"]) as ledger:
        plan = _plan(request, dataset, ledger.shares)
        if request.get("commit"):
            kept = {} if request.get("reassign") else ledger.shares
            had = {host: shares.join(plan["shares"][host], asked.get("done") or "") for host, asked in request["hosts"].items()}
            ledger.write({**kept, **had})
    return plan


def _plan(request: dict[str, Any], dataset: PackedDataset, before: dict[str, str]) -> dict[str, Any]:
    hosts, count, lengths = request["hosts"], len(dataset), dataset.lengths
    names = sorted(hosts)
    done = np.zeros(count, dtype=bool)
    for name in names:
        done |= mask_of(hosts[name].get("done") or "", count, f"host {name}")
    wanted = _pilot(lengths, request.get("records") or 0)
    left = wanted & ~done
    held = {}
    for host in sorted(set(before) - set(names)) if not request.get("reassign") else ():
        mask = mask_of(before[host], count, f"the ledger: host {host}") & left
        if mask.any():
            held[host] = {"records": int(mask.sum()), "tokens": int(lengths[mask].sum())}
            left &= ~mask
    weights = _weights(names, hosts)
    working = {name: mask_of(hosts[name].get("share") or "", count, f"host {name}") for name in names}
    taken = np.zeros(count, dtype=bool)
    for mask in working.values():
        taken |= mask
    idle = [name for name, weight in zip(names, weights) if weight > 0 and not working[name].any()]
    if taken[left].all() and not (idle and left.any()):
        spread = {name: np.flatnonzero(working[name]) for name in names}
        stop: list[str] = []
    else:
        spread = _spread(names, weights, np.flatnonzero(left), lengths)
        stop = [name for name in names if working[name].any()]
    kept = {name: hs_manifest.encode_ranges(spread[name].tolist()) for name in names}
    total, finished = int(lengths[wanted].sum()), int(lengths[wanted & done].sum())
    return {
        "total_records": int(wanted.sum()),
        "total_tokens": total,
        "wanted": hs_manifest.encode_ranges(np.flatnonzero(wanted).tolist()),
        "done_records": int((wanted & done).sum()),
        "done_tokens": finished,
        "left_records": int((wanted & ~done).sum()),
        "left_tokens": total - finished,
        "shares": kept if stop else {name: hosts[name].get("share") or kept[name] for name in names},
        "tokens": {name: int(lengths[spread[name]][left[spread[name]]].sum()) for name in names},
        "held": held,
        "stop": stop,
    }


def _pilot(lengths: np.ndarray, records: int) -> np.ndarray:
    """bool [records of the data set], true for those that are wanted: all, or so many, spread over all lengths."""
    wanted = np.ones(len(lengths), dtype=bool)
    if 0 < records < len(lengths):
        order = np.argsort(lengths, kind="stable")
        wanted[:] = False
        wanted[order[np.linspace(0, len(order) - 1, records).round().astype(int)]] = True
    return wanted


def _spread(names: list[str], weights: np.ndarray, left: np.ndarray, lengths: np.ndarray) -> dict[str, np.ndarray]:
    """Record numbers by host, int [records of it]."""
    workers = np.flatnonzero(weights > 0)
    if len(left) and not len(workers):
        raise Refusal(f"{len(left):,} records are left and no host can take them; give a host a weight above 0")
    order = left[np.argsort(-lengths[left], kind="stable")]
    pace, load = 1.0 / weights[workers], np.zeros(len(workers))
    given: list[list[int]] = [[] for _name in names]
    for record in order.tolist():
        length = int(lengths[record])
        chosen = int(np.argmin((load + length) * pace))
        load[chosen] += length
        given[int(workers[chosen])].append(record)
    return {name: np.array(records, dtype=np.int64) for name, records in zip(names, given)}


def _weights(names: list[str], hosts: dict[str, Any]) -> np.ndarray:
    """The hosts' weights times their measured rates over the mean of these, float [hosts]."""
    weights = np.array([_weight(name, hosts[name].get("weight", 1.0)) for name in names], dtype=float)
    rates = np.array([_rate(hosts[name]) for name in names])
    known = rates > 0
    if known.any():
        factor = np.clip(rates / rates[known].mean(), 1 / MOST_BY_RATE, MOST_BY_RATE)
        weights[known] *= factor[known]
    return weights


def _weight(host: str, weight: object) -> float:
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 <= weight < float("inf"):
        raise Refusal(f"host {host} has weight {weight!r}; it must be a number of at least 0")
    return float(weight)


def _rate(host: dict[str, Any]) -> float:
    tokens, seconds = host.get("tokens") or 0, host.get("seconds") or 0
    return tokens / seconds if seconds >= LEAST_SECONDS else 0.0


def claim(request: dict[str, Any]) -> dict[str, Any]:
    """What a host that is through with its share takes over from hosts that failed.

    request: `{dataset, ledger, run, host, weights: {host: number}, failed: {host: {done: ranges, refused: [ranges]}}}`.
    weights: of the hosts still at work, this one with them; failed: hosts whose extractors are proved to have ended;
    refused: records that failed by themselves, which no other host would fare better with. The host takes its part, by
    weight and longest first, of what is left of the failed hosts' shares; the last one takes all. The ledger holds it
    from then on. Returns `{share, records, tokens}`; share: ranges, empty where nothing is left to take.
    Raises Refusal.
    """
    dataset, host, weights = PackedDataset(request["dataset"]), request["host"], request["weights"]
    count = len(dataset)
    with shares.Ledger(request["ledger"], request["run"]) as ledger:
        pool, others = np.zeros(count, dtype=bool), np.zeros(count, dtype=bool)
        for name, given in ledger.shares.items():
            mask = mask_of(given, count, f"the share of host {name}")
            if name in request["failed"]:
                ended = request["failed"][name]
                mask &= ~mask_of(ended["done"], count, f"host {name}")
                for ranges in ended["refused"]:
                    mask &= ~mask_of(ranges, count, f"host {name}")
                pool |= mask
            else:
                others |= mask
        pool &= ~others
        part = _weight(host, weights[host]) / (sum(_weight(name, weight) for name, weight in weights.items()) or 1.0)
        left = np.flatnonzero(pool)
        order = left[np.argsort(-dataset.lengths[left], kind="stable")]
        enough = part * dataset.lengths[left].sum()
        before = np.cumsum(dataset.lengths[order]) - dataset.lengths[order]
        taken = order[before < enough]
        if len(taken):
            ledger.move(hs_manifest.encode_ranges(taken.tolist()), host, list(request["failed"]))
    return {
        "share": hs_manifest.encode_ranges(taken.tolist()),
        "records": len(taken),
        "tokens": int(dataset.lengths[taken].sum()),
    }
