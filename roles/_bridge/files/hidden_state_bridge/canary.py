# SPDX-License-Identifier: Apache-2.0
"""The canary: a few records captured alone and then together, before the run begins, and compared between ranks.

Batching may change a state by rounding only. A row of another request, a partial sum or a stale buffer is far outside.
Complete states are the same on every tensor parallel rank: each rank writes a few numbers a row, which have to agree.
"""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

import numpy as np

import hs_manifest
from hs_capture import dumpfile

from . import dumps
from .canary_compare import AGREEMENT, FUSION_TOKENS, TOLERANCE, Comparison, distances
from .client import Client, RecordRefused, RequestFailed, ServerAway
from .config import ExtractConfig, read_secret
from .errors import Refusal
from .packed import PackedDataset, Record

RECORDS = 6
POLL_SECONDS = 0.005


def choose(lengths: np.ndarray) -> list[int]:
    """Records for the canary: shortest, median, longest, and those next to 2,048 tokens on either side."""
    order = np.argsort(lengths, kind="stable")
    boundary = int(np.searchsorted(lengths[order], FUSION_TOKENS, side="right"))
    places = [0, len(order) // 2, len(order) - 1, boundary - 1, boundary, len(order) // 4]
    chosen = [int(order[min(max(place, 0), len(order) - 1)]) for place in places]
    return list(dict.fromkeys(chosen))[:RECORDS]


async def _dump(client: Client, config: ExtractConfig, record: Record, rid: str) -> list[str]:
    """Paths of the dump's pieces of one record. Raises as the client and dumps do."""
    await dumps.announce(config.dump_dir, rid, record.input_ids, config.request_timeout)
    await client.prefill(rid, record.input_ids)
    return await dumps.wait_for(config.dump_dir, rid, len(record.input_ids), config.dump_timeout)


async def _capture(client: Client, config: ExtractConfig, layout: dumps.Layout, record: Record, rid: str) -> dumps.States:
    """The states of one record, read from its dump, which is removed. Raises as the client and dumps do."""
    states = dumps.load(await _dump(client, config, record, rid), rid, record.input_ids, layout)
    dumps.remove(config.dump_dir, f"{rid}.")
    return states


async def _fingerprints(client: Client, config: ExtractConfig, record: Record, rid: str, ranks: int) -> list[dict[str, np.ndarray]]:
    """By rank the fingerprints of one record by state, float32 [tokens, values]. Raises as the client and dumps do."""
    pieces = await _dump(client, config, record, rid)
    starts = [int(os.path.basename(path).rsplit(".", 2)[1]) for path in pieces]
    deadline = time.monotonic() + config.dump_timeout
    found = []
    for rank in range(ranks):
        parts: list[dict[str, np.ndarray]] = []
        for start in starts:
            name = dumpfile.fingerprint_name(rid, start, rank)
            while not os.path.exists(os.path.join(config.dump_dir, name)):
                if time.monotonic() > deadline:
                    raise dumps.DumpRejected(f"rank {rank} of {ranks} wrote no {name}; read the log of the server for that rank")
                await asyncio.sleep(POLL_SECONDS)
            try:
                parts.append(dumpfile.read_fingerprint(os.path.join(config.dump_dir, name)))
            except dumpfile.DumpError as error:
                raise dumps.DumpRejected(str(error)) from error
        found.append({name: np.concatenate([part[name] for part in parts]) for name in parts[0]})
    dumps.remove(config.dump_dir, f"{rid}.")
    return found


async def _run(config: ExtractConfig, dataset: PackedDataset) -> dict[str, Any]:
    layout = dumps.Layout(tuple(config.layers), config.final, config.hidden_size, config.dtype)
    records = [dataset.record(index) for index in choose(dataset.lengths)]
    turn = f"{config.run}-{os.getpid()}-{time.time_ns()}-"
    stem, asking = config.canary_stem + turn, config.asking_stem + turn
    ranks_prints: list[list[dict[str, np.ndarray]]] = []
    comparison = Comparison(layout)
    try:
        async with Client(config.url, read_secret("api_key_file", config.api_key_file), config.request_timeout, len(records)) as client:
            ranks = 1
            refused: dict[int, RecordRefused] = {}
            for record in records:
                try:
                    states = await _capture(client, config, layout, record, f"{stem}a{record.index}")
                except RecordRefused as error:
                    refused[record.index] = error
                    continue
                ranks = int(states.metadata.get("tp_ranks_on_host", "1"))
                comparison.add_alone(record.index, states)
            # A record that the server will not take fails by itself in the run; it says nothing of the capture.
            records = [record for record in records if record.index not in refused]
            if not records:
                raise next(iter(refused.values()))
            for letter, order in (("t", records), ("r", records[::-1])):
                await _together(client, config, layout, order, f"{stem}{letter}", comparison)
            # Where batches carry no rid, no request can ask for fingerprints.
            if ranks > 1 and not dumps.keeps_list(config.dump_dir):
                ranks_prints = [await _fingerprints(client, config, r, f"{asking}{r.index}", ranks) for r in records]
    except (RecordRefused, RequestFailed, ServerAway, dumps.DumpRejected) as error:
        raise Refusal(f"the canary failed on {config.url}: {error}") from error
    finally:
        dumps.remove(config.dump_dir, stem)
        dumps.remove(config.dump_dir, asking)
    ok, states, lines = comparison.judge(TOLERANCE[config.dtype])
    tokens = sum(len(record.input_ids) for record in records)
    head = f"canary: {len(records)} records, {tokens:,} tokens, alone against together and in the other order (relative L2 a row)"
    lines = [f"  record {index} is left out: {error}" for index, error in refused.items()] + lines
    if ranks_prints:
        agree, more = _agreement(ranks_prints, AGREEMENT[config.dtype])
        ok &= agree
        lines += more
    prints = comparison.prints
    return {"ok": ok, "records": len(records), "tokens": tokens, "states": states, "table": [head, *lines], "prints": prints}


async def _together(
    client: Client, config: ExtractConfig, layout: dumps.Layout, records: list[Record], stem: str, comparison: Comparison
) -> None:
    """All records at once, each compared as it comes, so that few are in memory."""

    async def one(record: Record) -> None:
        comparison.add_other(record.index, await _capture(client, config, layout, record, f"{stem}{record.index}"))

    outcomes = await asyncio.gather(*map(one, records), return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome


def _agreement(prints: list[list[dict[str, np.ndarray]]], bound: float) -> tuple[bool, list[str]]:
    """Whether all ranks hold the same states, and lines that say so. `prints`: of each record, of each rank, by state."""
    apart = {}
    for name in prints[0][0]:
        rows = [distances(record[0][name], other[name]) for record in prints for other in record[1:]]
        apart[name] = float(np.median(np.concatenate(rows)))
    wrong = {name: median for name, median in apart.items() if not median <= bound}
    lines = [f"  {len(prints[0])} ranks: the farthest state is {max(apart.values()):.1e} apart (bound {bound:.0e})"]
    if wrong:
        named = ", ".join(f"{name} {median:.1e}" for name, median in wrong.items())
        lines += [
            f"  tensor parallel ranks hold different states ({named}): WRONG",
            "one rank's partial sum is captured, as all-reduce fusion leaves it: start the server with"
            " --enforce-disable-flashinfer-allreduce-fusion, and report this release",
        ]
    return not wrong, lines


def run_canary(config: ExtractConfig) -> dict[str, Any]:
    """Run the canary; returns `{ok, records, tokens, states: [{state, median, p99, ok}], table, prints}`. Raises Refusal.

    prints: what `compare_hosts` takes.
    """
    dumps.check_directory(config.dump_dir)
    # Beside an extractor at work only what other canaries left is surely awaited by nobody.
    at_work = hs_manifest.is_locked(config.output_dir)
    for stem in (config.canary_stem, config.asking_stem) if at_work else (config.rid_prefix,):
        dumps.remove_left(config.dump_dir, stem)
    return asyncio.run(_run(config, PackedDataset(config.dataset)))
