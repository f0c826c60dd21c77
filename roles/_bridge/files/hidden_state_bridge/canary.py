# SPDX-License-Identifier: Apache-2.0
"""The canary: a few records captured alone and then together, before the run begins.

Batching may change a state by rounding only. A row of another request, a partial sum or a stale buffer is far outside.
"""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

import numpy as np

from . import dumps
from .client import Client, RecordRefused, RequestFailed, ServerAway
from .config import ExtractConfig, read_key
from .errors import Refusal
from .packed import PackedDataset, Record

RECORDS = 6
# All-reduce fusion works up to this many tokens in a batch: a record on either side of it is wanted.
FUSION_TOKENS = 2048
# Relative L2 distance of a row, median and 99th percentile over the rows of a state. In 16 bits a router may choose
# another expert for a single token, which moves that row far and no other, hence the loose second bound.
TOLERANCE = {"float32": (1e-4, 1e-3), "bfloat16": (3e-2, 3e-1), "float16": (1e-2, 1e-1)}
POLL_SECONDS = 0.005


def choose(lengths: np.ndarray) -> list[int]:
    """Records for the canary: shortest, median, longest, and those next to 2,048 tokens on either side."""
    order = np.argsort(lengths, kind="stable")
    boundary = int(np.searchsorted(lengths[order], FUSION_TOKENS, side="right"))
    places = [0, len(order) // 2, len(order) - 1, boundary - 1, boundary, len(order) // 4]
    chosen = [int(order[min(max(place, 0), len(order) - 1)]) for place in places]
    return list(dict.fromkeys(chosen))[:RECORDS]


async def _capture(client: Client, config: ExtractConfig, layout: dumps.Layout, record: Record, rid: str) -> dict[str, Any]:
    """States of one record by tensor name, float32 [tokens, hidden]. Raises as the client and dumps do."""
    import torch

    await dumps.announce(config.dump_dir, rid, record.input_ids, config.request_timeout)
    await client.prefill(rid, record.input_ids)
    deadline = time.monotonic() + config.dump_timeout
    while True:
        pieces = dumps.find(config.dump_dir, rid, len(record.input_ids))
        if pieces is not None:
            break
        if time.monotonic() > deadline:
            raise dumps.DumpRejected(f"no whole dump of {rid} in {config.dump_dir}")
        await asyncio.sleep(POLL_SECONDS)
    states = dumps.load(pieces, rid, record.input_ids, layout)
    result = {}
    for name in states.names:
        result[name] = torch.empty((len(record.input_ids), layout.hidden_size), dtype=torch.float32)
        states.copy_into(name, result[name])
    dumps.remove(config.dump_dir, f"{rid}.")
    return result


def distances(alone: Any, together: Any) -> np.ndarray:
    """Relative L2 distance of each row of two float32 states [tokens, hidden]."""
    one, other = alone.numpy(), together.numpy()
    return np.linalg.norm(one - other, axis=1) / np.maximum(np.linalg.norm(one, axis=1), 1e-12)


async def _run(config: ExtractConfig, dataset: PackedDataset) -> dict[str, Any]:
    layout = dumps.Layout(tuple(config.layers), config.final, config.hidden_size, config.dtype)
    records = [dataset.record(index) for index in choose(dataset.lengths)]
    stem = f"{config.rid_stem}canary-{os.getpid()}-{time.time_ns()}-"
    try:
        async with Client(config.url, read_key(config.api_key_file), config.request_timeout, len(records)) as client:
            alone = [await _capture(client, config, layout, r, f"{stem}a{r.index}") for r in records]
            together = await asyncio.gather(
                *(_capture(client, config, layout, r, f"{stem}t{r.index}") for r in records), return_exceptions=True
            )
            for outcome in together:
                if isinstance(outcome, BaseException):
                    raise outcome
    except (RecordRefused, RequestFailed, ServerAway, dumps.DumpRejected) as error:
        raise Refusal(f"the canary failed on {config.url}: {error}") from error
    finally:
        dumps.remove(config.dump_dir, stem)
    median_bound, tail_bound = TOLERANCE[config.dtype]
    states, ok = [], True
    for name in layout.names:
        rows = np.concatenate([distances(one[name], other[name]) for one, other in zip(alone, together)])
        median, tail = float(np.median(rows)), float(np.percentile(rows, 99))
        good = median <= median_bound and tail <= tail_bound
        ok &= good
        states.append({"state": name, "median": median, "p99": tail, "ok": good})
    tokens = sum(len(record.input_ids) for record in records)
    lines = [f"canary: {len(records)} records, {tokens:,} tokens, alone against together (relative L2 a row)"]
    lines += [
        f"  {row['state']:<16} median {row['median']:.1e} (bound {median_bound:.0e})"
        f"  p99 {row['p99']:.1e} (bound {tail_bound:.0e})  {'right' if row['ok'] else 'WRONG'}"
        for row in states
    ]
    if not ok:
        lines.append("states depend on what else is in the batch: see which capture flag of this release is missing")
    return {"ok": ok, "records": len(records), "tokens": tokens, "states": states, "table": lines}


def run_canary(config: ExtractConfig) -> dict[str, Any]:
    """Run the canary; returns `{ok, records, tokens, states: [{state, median, p99, ok}], table}`. Raises Refusal."""
    dumps.check_directory(config.dump_dir)
    return asyncio.run(_run(config, PackedDataset(config.dataset)))
