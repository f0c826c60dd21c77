# SPDX-License-Identifier: Apache-2.0
"""What the canary's states are held against: each other, and those of other hosts; and what a deviation looks like."""

from __future__ import annotations

from typing import Any

import numpy as np

from hs_capture import dumpfile
from hs_capture.fingerprints import Signs

from . import dumps
from .errors import Refusal

# All-reduce fusion works up to this many tokens in a batch: a record on either side of it is wanted.
FUSION_TOKENS = 2048
# Relative L2 distance of a row, median and 99th percentile over the rows of a state. In 16 bits a router may choose
# another expert for a single token, which moves that row far and no other, hence the loose second bound.
TOLERANCE = {"float32": (1e-4, 1e-3), "bfloat16": (3e-2, 3e-1), "float16": (1e-2, 1e-1)}
# Relative L2 distance of a row's fingerprints between two ranks, median over the rows of a state. An all-reduce gives every rank
# the same bits; a partial sum lacks what the other ranks add in the last layer, some per cent of the stream at least.
AGREEMENT = {"float32": 1e-5, "bfloat16": 2e-3, "float16": 5e-4}
# Between hosts few rows are compared, by few numbers each: these scatter around the distance of the rows themselves.
HOSTS_FACTOR = 3.0
PRINTED_ROWS = 8
# Rows at once, so that their float32 copies stay small.
_ROWS = 1024


def distances(one: Any, other: Any) -> np.ndarray:
    """Relative L2 distance of each row of two states [tokens, hidden], computed in float32; infinite where one is not finite."""
    import torch

    one, other = torch.as_tensor(one), torch.as_tensor(other)
    parts = []
    for first in range(0, len(one), _ROWS):
        a, b = one[first : first + _ROWS].float(), other[first : first + _ROWS].float()
        parts.append((a - b).norm(dim=1) / a.norm(dim=1).clamp_min(1e-12))
    return torch.nan_to_num(torch.cat(parts), nan=float("inf")).numpy()


class Comparison:
    """Holds each record's states alone, in the model's dtype, and how far others of the same record are from them."""

    def __init__(self, layout: dumps.Layout) -> None:
        self._layout = layout
        self._alone: dict[int, dict[str, Any]] = {}
        # By state: of each pair of states the record, the distances of its rows, and their median were they moved by one row.
        self._rows: dict[str, list[tuple[int, np.ndarray, float]]] = {name: [] for name in layout.names}
        self._signs = Signs()
        # By record, as text: by state a few numbers of a few rows.
        self.prints: dict[str, dict[str, list[list[float]]]] = {}

    def add_alone(self, record: int, states: dumps.States) -> None:
        """The states of a record that was alone in its batch."""
        self._alone[record] = {name: self._take(states, name) for name in states.names}
        self.prints[str(record)] = {name: self._print(state) for name, state in self._alone[record].items()}

    def add_other(self, record: int, states: dumps.States) -> None:
        """States of the same record in another batch."""
        for name in states.names:
            alone, other = self._alone[record][name], self._take(states, name)
            moved = [float(np.median(distances(alone[a], other[b]))) for a, b in _SHIFTS if len(alone) > 1]
            self._rows[name].append((record, distances(alone, other), min(moved, default=float("inf"))))

    def _take(self, states: dumps.States, name: str) -> Any:
        import torch

        state = torch.empty((states.tokens, self._layout.hidden_size), dtype=states.torch_dtype)
        states.copy_into(name, state)
        return state

    def _print(self, state: Any) -> list[list[float]]:
        rows = np.unique(np.linspace(0, len(state) - 1, PRINTED_ROWS).round().astype(int))
        return [[float(f"{value:.6g}") for value in row] for row in self._signs.project(state[rows]).tolist()]

    def judge(self, bounds: tuple[float, float]) -> tuple[bool, list[dict[str, Any]], list[str]]:
        """Whether all states are within the bounds (median, 99th percentile); a row a state, and lines for people."""
        median_bound, tail_bound = bounds
        found, lines = [], []
        for name, parts in self._rows.items():
            rows = np.concatenate([far for _record, far, _moved in parts])
            median, tail = float(np.median(rows)), float(np.percentile(rows, 99))
            good = median <= median_bound and tail <= tail_bound
            found.append({"state": name, "median": median, "p99": tail, "ok": good})
            lines.append(
                f"  {name:<16} median {median:.1e} (bound {median_bound:.0e})"
                f"  p99 {tail:.1e} (bound {tail_bound:.0e})  {'right' if good else 'WRONG'}"
            )
        ok = all(row["ok"] for row in found)
        if not ok:
            lines.append(self._looks_like({row["state"] for row in found if not row["ok"]}, median_bound))
        return ok, found, lines

    def _looks_like(self, wrong: set[str], bound: float) -> str:
        deviating = [part for name in wrong for part in self._rows[name] if np.median(part[1]) > bound]
        if any(moved <= bound for _record, _far, moved in deviating):
            return "the rows are moved by one: they are not those of the request; report this release"
        short = {record: len(next(iter(states.values()))) <= FUSION_TOKENS for record, states in self._alone.items()}
        touched = {record for record, _far, _moved in deviating}
        if deviating and not all(short.values()) and all(short[record] for record in touched):
            return (
                f"only records of at most {FUSION_TOKENS:,} tokens deviate, as all-reduce fusion leaves them: start the server with"
                " --enforce-disable-flashinfer-allreduce-fusion, and report this release"
            )
        finals = wrong & {dumpfile.POST_NORM, dumpfile.PRE_NORM}
        if not finals and set(self._layout.layer_names) & wrong:
            return (
                "layers deviate and the final state does not: the layer loop holds a partial sum or storage that is used again;"
                " report this release"
            )
        return (
            "states depend on what else is in the batch: see which capture flag of this release is missing (prefix cache, two-batch"
            " overlap, mixed chunks), and that the kernels of this server do not depend on the batch that far"
        )


_SHIFTS = ((slice(None, -1), slice(1, None)), (slice(1, None), slice(None, -1)))


def compare_hosts(request: dict[str, Any]) -> dict[str, Any]:
    """Hold one host's canary against those of other hosts.

    request: `{host, dtype, prints: {host: what the canary printed}}`. Returns `{ok, table}`. Raises Refusal where two
    hosts have no record in common, or captured other states.
    """
    prints, host = request["prints"], request["host"]
    bound = TOLERANCE[request["dtype"]][0] * HOSTS_FACTOR
    lines, ok = [], True
    for other in sorted(set(prints) - {host}):
        apart: dict[str, list[np.ndarray]] = {}
        # One that a server refuses is missing in its canary.
        common = prints[host].keys() & prints[other].keys()
        if not common or any(prints[host][record].keys() != prints[other][record].keys() for record in common):
            raise Refusal(f"the canaries of {host} and {other} are of other records or states; run extract.yml again on both")
        for record in sorted(common):
            for name, rows in prints[host][record].items():
                ours, theirs = np.array(rows), np.array(prints[other][record][name])
                apart.setdefault(name, []).append(np.linalg.norm(ours - theirs, axis=1) / np.maximum(np.linalg.norm(ours, axis=1), 1e-12))
        medians = {name: float(np.median(np.concatenate(rows))) for name, rows in apart.items()}
        worst = max(medians, key=lambda name: medians[name])
        good = medians[worst] <= bound
        ok &= good
        lines.append(
            f"  {host} and {other}: the farthest state is {worst}, {medians[worst]:.1e} apart (bound {bound:.0e})  {'right' if good else 'WRONG'}"
        )
    if not ok:
        lines.append(
            "the same records have other states on another host: compare weights, SGLang release, attention and MoE backends of the"
            " two; if most hosts agree, the one that does not is wrong"
        )
    return {"ok": ok, "table": lines}
