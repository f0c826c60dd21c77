#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-3.0-or-later
"""What capture costs: prefill rates of a patched server against those of a plain one, turn by turn, on one GPU.

    python bench/capture_gpu.py [--variants unset,capture4,capture16,naive] [--graphs] [--ranks N] [--device cpu]

The plain server stays up throughout; each variant is started beside it, and rounds alternate: plain, variant, plain, variant. Variants:
`unset` (patched, SGLANG_HS_DUMP_DIR unset), `captureN` (N states a token, a reader taking dumps away), `naive` (the same four states,
copied in the loop and saved in the forward). With --graphs the batches are small enough for the graphs, and `batches_from_graphs`
says which share of them ran so. The last line is one JSON object; `of_plain` is the ratio of the medians. Exit status 1 where a dump is
missing. gpu/wheels.sh says what the host needs; --device cpu plays the same on the demo's engine, for the flow alone.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import serving
from serving import say

RID_PREFIX = "hsb-"
# The share of the GPU's free memory for weights and KV, of the first server and of the one beside it.
MEMORY = {"cuda": (0.32, 0.5), "cpu": (0.2, 0.2)}


def layers_of(model: Path, states: int) -> list[int]:
    """`states` - 1 layers, spread over the model, so that with the final state a token has so many."""
    count = json.loads((model / "config.json").read_text())["num_hidden_layers"]
    wanted = min(states - 1, count)
    return sorted({round(number * (count - 2) / max(1, wanted - 1)) for number in range(wanted)})


class Bench:
    """One plain server, and variants beside it."""

    def __init__(self, options: argparse.Namespace, directory: Path) -> None:
        self.options, self.directory = options, directory
        self.package, self.release = serving.installed_sglang()
        self.model = options.model
        if options.device == "cpu":
            lengths, vocabulary = (4, 200, 4.0, 0.8), 500
        else:
            lengths, vocabulary = serving.LENGTHS, 100_000
        self.records = serving.make_records(options.tokens, lengths=lengths, vocabulary=vocabulary)
        self.tokens = sum(map(len, self.records))
        self.failures: list[str] = []

    def start(self, name: str, memory: float, path: Path | None, environment: dict[str, str]) -> serving.Server:
        """A server that is ready and warm."""
        command = serving.arguments(
            self.release, self.options.device, self.model, memory=memory, graphs=self.options.graphs, ranks=self.options.ranks
        )
        if self.options.device != "cpu":
            command += ["--load-format", "dummy"]
        else:
            environment = {**serving.cpu_environment(self.options.ranks), **environment}
        server = serving.Server(command, self.options.logs / f"{name}.log", path=path, environment=environment)
        say(f"{name}: ready after {server.wait():.0f} s")
        serving.warm(server.port, self.records, self.options.concurrency)
        return server

    def round(self, server: serving.Server, stem: str) -> float:
        """Tokens a second."""
        return self.tokens / serving.send(server.port, self.records, self.options.concurrency, stem)

    def variant(self, name: str, plain: serving.Server) -> dict[str, Any]:
        """Rounds of plain and variant in turn, and what the capture counted."""
        path = serving.make_variant(self.directory / name, self.package, edit=serving.save_in_the_forward if name == "naive" else None)
        dumps = Path(f"/dev/shm/hs-bench-{os.getpid()}-{name}")
        environment: dict[str, str] = {}
        states = 4 if name == "naive" else int((re.match(r"capture(\d+)\Z", name) or [0, 0])[1])
        if states:
            captured = layers_of(self.model, states)
            states, layers = len(captured) + 1, ",".join(map(str, captured))
            environment = {"SGLANG_HS_DUMP_DIR": str(dumps), "SGLANG_HS_DUMP_LAYERS": layers, "SGLANG_HS_DUMP_RID_PREFIX": RID_PREFIX}
        reader = None
        server = self.start(name, MEMORY[self.options.device][1], path, environment)
        try:
            reader = serving.Reader(dumps) if states else None
            plain_rates, rates = [], []
            for number in range(self.options.rounds):
                plain_rates.append(self.round(plain, f"plain-{number}-"))
                rates.append(self.round(server, f"{RID_PREFIX}{number}-"))
                if reader is not None:
                    self.check(name, reader.take(len(self.records), 60), f"{RID_PREFIX}{number}-")
                say(f"{name}: {rates[-1]:,.0f} tok/s, plain {plain_rates[-1]:,.0f}")
            result: dict[str, Any] = {
                "batches_from_graphs": server.batches_from_graphs(),
                "tokens_per_second": [round(rate) for rate in rates],
                "plain_tokens_per_second": [round(rate) for rate in plain_rates],
                "of_plain": round(statistics.median(rates) / statistics.median(plain_rates), 4),
            }
            if states:
                counted = serving.counters(dumps)
                result.update(states=states, **{key: counted.get(key) for key in COUNTED if key in counted})
                if counted.get("bytes"):
                    seconds = sum(self.tokens / rate for rate in rates)
                    result["bytes_per_second"] = round(counted["bytes"] / seconds)
            return result
        finally:
            if reader is not None:
                reader.stop()
            server.stop()
            shutil.rmtree(dumps, ignore_errors=True)

    def check(self, name: str, found: list[tuple[str, Any]], stem: str) -> None:
        """Every record of a round has its dump, of its length."""
        if name == "naive":
            found = [
                (file.rpartition(".")[0].rpartition(".")[0], len(self.records[int(file[len(stem) :].split(".")[0])])) for file, _ in found
            ]
        expected = {f"{stem}{number}": len(record) for number, record in enumerate(self.records)}
        wrong = {rid: tokens for rid, tokens in found if expected.get(rid) != tokens}
        if wrong or len(dict(found)) != len(expected):
            self.failures.append(f"{name}: {len(wrong)} wrong of {len(found)} dumps, {len(expected)} records: {list(wrong.items())[:3]}")


COUNTED = ("device_bytes", "ring_bytes", "requests", "tokens", "bytes", "drops", "ring_waits", "ring_wait_seconds", "room_waits")


def gpu_name(device: str) -> str:
    """What the figures were measured on."""
    if device == "cpu":
        return "cpu"
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def main() -> int:
    serving.use_engine_python()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--variants", default="unset,capture4,capture16,naive")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, help="of a round, about; default: 600,000 a rank")
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--ranks", type=int, default=1, help="tensor parallel size of all servers")
    parser.add_argument("--graphs", action="store_true", help="leave the release's prefill graphs on (for unset)")
    parser.add_argument("--model", type=Path, help="its directory; default: made here, or the demo's on the CPU")
    parser.add_argument("--logs", type=Path, help="keep the servers' logs there")
    options = parser.parse_args()
    options.tokens = options.tokens or 600_000 * options.ranks
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        options.logs = options.logs or directory
        options.logs.mkdir(parents=True, exist_ok=True)
        options.model = serving.model_of(options.model, options.device, directory)
        bench = Bench(options, directory)
        figures: dict[str, Any] = {"sglang": bench.release, "gpu": gpu_name(options.device), "tokens": bench.tokens}
        figures.update(records=len(bench.records), concurrency=options.concurrency, ranks=options.ranks)
        figures.update(prefill_graphs=options.graphs, variants={})
        plain = None
        try:
            plain = bench.start("plain", MEMORY[options.device][0], None, {})
            for variant in options.variants.split(","):
                figures["variants"][variant] = bench.variant(variant, plain)
        except RuntimeError as error:
            bench.failures.append(str(error))
        finally:
            if plain is not None:
                plain.stop()
    for failure in bench.failures:
        say(failure)
    figures["failures"] = len(bench.failures)
    print(json.dumps(figures))
    return 1 if bench.failures else 0


if __name__ == "__main__":
    sys.exit(main())
