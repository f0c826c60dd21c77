#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whether each state is that of its record: records of mixed length captured together, against the same ones one at a time.

    python bench/capture_gpu_states.py [--records 200] [--concurrency 64] [--device cpu]

The model has random weights under which every layer contributes. Token ids and lengths have to agree exactly. States agree by relative
L2 a row: in bf16 the order of a sum depends on the batch's shape, and a router may choose another expert for a token whose two best
are nearly equal, which moves that row alone; such rows are counted apart. Then faults are planted in the captured states (one record
shifted by a row, two records swapped, one row of another record), and each has to be found. The last line is one JSON object; exit
status 1 where something disagrees, a layer contributes nothing, or a planted fault passes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import serving
from serving import say

# By dtype: bounds of the median over a record's rows and over all rows, of the 99th percentile of all rows, the distance from which a
# row counts as moved by its router, and how many rows in a thousand may be. A rounding of bf16 is 2^-9, and random weights carry it on
# from layer to layer: one H200 gave medians of the worst record from 1.5e-4 behind layer 0 to 2.4e-2 behind layer 11, 99th percentiles
# to 4.7e-2, no row beyond 0.12. The bounds are twice that. A wrong row is as far as two random vectors: 1.4.
BOUNDS = {
    "bfloat16": {"median": 5e-2, "p99": 1e-1, "moved": 0.2, "moved_per_mille": 5.0},
    "float32": {"median": 1e-5, "p99": 1e-4, "moved": 1e-2, "moved_per_mille": 0.0},
}
# Far above rounding: what a layer has to add to the stream for the comparison to mean something.
LEAST_CONTRIBUTION = 0.1


def capture(port: int, dumps: Path, records: list[list[int]], concurrency: int, stem: str) -> list[dict[str, Any]]:
    """States of all records by tensor name, float32 on the CPU; token ids are checked."""
    serving.send(port, records, concurrency, stem)
    captured = serving.take_dumps(dumps, records, stem)
    for number, states in enumerate(captured):
        if isinstance(states, str):
            raise RuntimeError(f"record {number}: {states}")
    return captured


def distance(one: Any, other: Any) -> Any:
    """Relative L2 of each row [t]; NaN counts as far."""
    import torch

    apart = (one - other).norm(dim=1) / other.norm(dim=1).clamp_min(1e-30)
    return torch.nan_to_num(apart, nan=10.0)


def compare(alone: list[dict[str, Any]], together: list[dict[str, Any]], bounds: dict[str, float]) -> dict[str, Any]:
    """Figures a state, and whether they are within the bounds."""
    import torch

    result: dict[str, Any] = {}
    for name in alone[0]:
        apart = [distance(one[name], other[name]) for one, other in zip(together, alone)]
        rows = torch.cat(apart)
        moved = int((rows > bounds["moved"]).sum())
        figures = {
            "median": float(rows.median()),
            "p99": float(rows[rows <= bounds["moved"]].quantile(0.99)) if moved < len(rows) else 10.0,
            "worst_record_median": max(float(one.median()) for one in apart),
            "most": float(rows.max()),
            "moved_rows": moved,
        }
        # A fault that takes all of one record is seen in its median, one that takes single rows by their number.
        good = max(figures["median"], figures["worst_record_median"]) <= bounds["median"] and figures["p99"] <= bounds["p99"]
        figures["ok"] = good and moved <= bounds["moved_per_mille"] * len(rows) / 1000
        # A row that is no neighbour of rounding is told from one that a router moved by its distance.
        figures["wrong_rows"] = int((rows > 1.0).sum())
        figures["ok"] = figures["ok"] and figures["wrong_rows"] == 0
        result[name] = figures
    return result


def plant(together: list[dict[str, Any]], name: str, kind: str) -> list[dict[str, Any]]:
    """The captured states of one layer, with one fault."""
    faulty = [{name: one[name]} for one in together]
    order = sorted(range(len(together)), key=lambda number: len(together[number][name]))
    if kind == "row shift":
        number = order[len(order) // 2]
        faulty[number][name] = together[number][name].roll(1, dims=0)
    elif kind == "swapped requests":
        first, second = order[len(order) // 2 : len(order) // 2 + 2]
        rows = min(len(together[first][name]), len(together[second][name]))
        faulty[first][name], faulty[second][name] = together[first][name].clone(), together[second][name].clone()
        faulty[first][name][:rows] = together[second][name][:rows]
        faulty[second][name][:rows] = together[first][name][:rows]
    else:
        faulty[order[-1]][name] = together[order[-1]][name].clone()
        faulty[order[-1]][name][-1] = together[order[0]][name][0]
    return faulty


def contribution(states: list[dict[str, Any]]) -> dict[str, float]:
    """How far the stream moves from one captured layer to the next, median of relative L2."""
    import torch

    names = sorted((name for name in states[0] if name.startswith("layer_")), key=lambda name: int(name[6:]))
    return {
        f"{first} to {second}": float(torch.cat([distance(one[second], one[first]) for one in states]).median())
        for first, second in zip(names, names[1:])
    }


def run(options: argparse.Namespace, directory: Path) -> tuple[dict[str, Any], bool]:
    """Start a capture server, capture twice, compare."""
    package, release = serving.installed_sglang()
    path = serving.make_variant(directory / "patched", package)
    cpu = options.device == "cpu"
    options.model = serving.model_of(options.model, options.device, directory, "--weights", "--layers", "12", "--experts", "16")
    about = json.loads((options.model / "config.json").read_text())
    count, vocabulary = about["num_hidden_layers"], about["vocab_size"]
    layers = ",".join(map(str, sorted({0, 1, count // 2 - 1, count - 4, count - 1})))
    dumps = Path(f"/dev/shm/hs-states-{os.getpid()}")
    environment = {"SGLANG_HS_DUMP_DIR": str(dumps), "SGLANG_HS_DUMP_LAYERS": layers, "SGLANG_HS_DUMP_FINAL": "both"}
    if cpu:
        environment.update(serving.cpu_environment())
    lengths = (1, 120, 3.0, 1.2) if cpu else (1, 4096, 5.3, 1.2)
    # One more seed, one more record.
    records = [serving.make_records(1, seed=seed, lengths=lengths, vocabulary=vocabulary)[0] for seed in range(options.records)]
    command = serving.arguments(release, options.device, options.model, memory=0.5)
    server = serving.Server(command, options.logs / "states.log", path=path, environment=environment)
    try:
        say(f"ready after {server.wait():.0f} s")
        alone = capture(server.port, dumps, records, 1, "hsb-alone-")
        together = capture(server.port, dumps, records, options.concurrency, "hsb-together-")
    finally:
        server.stop()
        shutil.rmtree(dumps, ignore_errors=True)
    bounds = BOUNDS["float32" if cpu else "bfloat16"]
    figures: dict[str, Any] = {"sglang": release, "records": len(records), "tokens": sum(map(len, records)), "bounds": bounds}
    figures["states"] = compare(alone, together, bounds)
    figures["contribution"] = contribution(alone)
    figures["planted_found"] = {}
    name = next(iter(alone[0]))
    one_layer = [{name: one[name]} for one in alone]
    for kind in ("row shift", "swapped requests", "one row of another"):
        figures["planted_found"][kind] = not compare(one_layer, plant(together, name, kind), bounds)[name]["ok"]
    good = all(one["ok"] for one in figures["states"].values()) and all(figures["planted_found"].values())
    return figures, good and min(figures["contribution"].values()) > LEAST_CONTRIBUTION


def main() -> int:
    serving.use_engine_python()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--records", type=int, default=200)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--model", type=Path, help="its directory; default: made here, or the demo's on the CPU")
    parser.add_argument("--logs", type=Path, help="keep the server's log there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        options.logs = options.logs or Path(name)
        options.logs.mkdir(parents=True, exist_ok=True)
        figures, good = run(options, Path(name))
    figures["ok"] = good
    print(json.dumps(figures))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
