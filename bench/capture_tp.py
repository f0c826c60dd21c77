#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-3.0-or-later
"""Tensor parallel capture against one rank, with all-reduce fusion on and off: no partial sum ever reaches a file.

    python bench/capture_tp.py [--ranks 2] [--servers off,released,unchecked] [--soak SECONDS] [--device cpu]

One checkpoint of DeepSeek-V3's structure, of random weights under which every layer contributes, is loaded by every server in turn:
one rank, whose states are the reference, then `--ranks` ranks: `off` (the flags of a capture server), `released` (fusion as the release
sets it), `unchecked` (the same, with our check for partial sums taken out of a copy of the runtime). Records of up to 2,048 tokens and
of more go alone, then all of them 32 at a time; each group is compared with the same group on one rank, by relative L2 a row.

What has to hold: `off` is right everywhere. `released` is right too, or gives what is a partial sum up with an error marker that names
the fusion. `unchecked` holds wrong states where the fusion is on, and the canary stops there and names it. Right is: median and 99th
percentile of each layer are at most those of the final normed state, which is complete on every rank, and a quarter more for what the
norm weighs; those of short and of long records are within a factor of 1.5 of each other. --soak sends mixed records, plain requests and
health probes for so long. The last line is one JSON object. What capture costs at several ranks, capture_gpu.py --ranks says.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import payload
import serving
from capture_gpu import gpu_name
from capture_gpu_states import LEAST_CONTRIBUTION, contribution, distance
from serving import say

# The last layer is the stream that the norm weighs column by column: its distance differs from the final state's by some per cent.
RIGHT_FACTOR, STEP_FACTOR = 1.25, 1.5
TOGETHER = 32
# A partial sum lacks a part of a layer; rounding is far below.
WRONG = 0.2
NAMES_FUSION = re.compile("all-?reduce.fusion", re.IGNORECASE)


def take_out_the_check(runtime: Path) -> None:
    """Let a copy of the runtime capture what SGLang marks as a partial sum."""
    guards = runtime / "guards.py"
    text = guards.read_text()
    checked = 'getattr(tensor, "_sglang_needs_allreduce_fusion", False)'
    if text.count(checked) != 1:
        raise SystemExit(f"{guards} does not check for partial sums as it did; adapt take_out_the_check")
    guards.write_text(text.replace(checked, "False"))


class Bench:
    """The records, and the captures of one server after the other."""

    def __init__(self, options: argparse.Namespace, directory: Path) -> None:
        self.options, self.directory = options, directory
        self.package, self.release = serving.installed_sglang()
        self.cpu = options.device == "cpu"
        self.model = json.loads((options.model / "config.json").read_text())
        count = self.model["num_hidden_layers"]
        self.layers = sorted({0, 1, count // 2 - 1, count - 4, count - 2, count - 1} & set(range(count)))
        # SGLang fuses up to so many tokens a batch.
        self.border = 64 if self.cpu else 2048
        generator, vocabulary = random.Random(5), min(self.model["vocab_size"], 100_000)

        def records(shortest: int, longest: int) -> list[list[int]]:
            lengths = [shortest, longest, *(generator.randint(shortest, longest) for _ in range(options.records - 2))]
            return [[generator.randrange(10, vocabulary) for _ in range(length)] for length in lengths]

        self.groups = {"short": records(16, self.border), "long": records(self.border + 1, 2 * self.border)}
        self.dumps = Path(f"/dev/shm/hs-tp-{os.getpid()}")

    def start(self, name: str, ranks: int, *, fusion: bool = False, edit: Any = None) -> serving.Server:
        """A capturing server that is ready."""
        shutil.rmtree(self.dumps, ignore_errors=True)
        path = serving.make_variant(self.directory / name, self.package, edit=edit)
        layers = ",".join(map(str, self.layers))
        environment = {"SGLANG_HS_DUMP_DIR": str(self.dumps), "SGLANG_HS_DUMP_LAYERS": layers, "SGLANG_HS_DUMP_FINAL": "post_norm"}
        environment |= serving.cpu_environment(ranks) if self.cpu else {}
        command = serving.arguments(self.release, self.options.device, self.options.model, memory=0.6, fusion=fusion, ranks=ranks)
        server = serving.Server(command, self.options.logs / f"{name}.log", path=path, environment=environment)
        say(f"{name}: ready after {server.wait():.0f} s")
        # The first batches of a kind build their kernels.
        serving.send(server.port, [*self.groups["short"][:2], *self.groups["long"][:2]], 1, "warm-")
        return server

    def capture(self, server: serving.Server) -> dict[str, list[dict[str, Any] | str]]:
        """By group the states of each record, or the reason of its error marker."""
        found = {group: self._take(server, records, 1, f"hsb-{group}-") for group, records in self.groups.items()}
        found["together"] = self._take(server, [*self.groups["short"], *self.groups["long"]], TOGETHER, "hsb-together-")
        return found

    def _take(self, server: serving.Server, records: list[list[int]], concurrency: int, stem: str) -> list[dict[str, Any] | str]:
        serving.send(server.port, records, concurrency, stem)
        return serving.take_dumps(self.dumps, records, stem)

    def canary(self, server: serving.Server) -> tuple[bool, str]:
        """Whether the extractor's canary lets this server begin, and what it says."""
        records = [*self.groups["short"], *self.groups["long"]]
        about = {"layers": self.layers, "hidden_size": self.model["hidden_size"], "dtype": "float32" if self.cpu else "bfloat16"}
        packed = payload.pack(records, self.directory)
        config = payload.configuration(packed, len(records), server.port, self.dumps, self.directory / "out", **about)
        file = self.directory / "canary.json"
        file.write_text(json.dumps(config))
        done = payload.call("canary", "--config", file, check=False, capture_output=True, text=True)
        return done.returncode == 0, done.stdout + done.stderr

    def soak(self, server: serving.Server, seconds: float) -> dict[str, int]:
        """Mixed records, plain requests and health probes for so long; RuntimeError where one hangs or fails."""
        asked, end = {"records": 0, "plain": 0, "health": 0}, time.monotonic() + seconds
        records = [*self.groups["short"], *self.groups["long"]]
        failed: list[Exception] = []

        def beside(kind: str, ask: Any, pause: float) -> None:
            while time.monotonic() < end and not failed:
                try:
                    ask(asked[kind])
                except Exception as error:
                    failed.append(error)
                asked[kind] += 1
                time.sleep(pause)

        def plain(number: int) -> None:
            serving.send(server.port, [records[number % len(records)]], 1, f"plain-{number}-")

        def health(_number: int) -> None:
            with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/health", timeout=60):
                pass

        reader = serving.Reader(self.dumps)
        others = [threading.Thread(target=beside, args=one) for one in (("plain", plain, 0.1), ("health", health, 1.0))]
        for other in others:
            other.start()
        rounds = 0
        try:
            while time.monotonic() < end and not failed:
                serving.send(server.port, records, TOGETHER, f"hsb-soak{rounds}-")
                rounds += 1
                taken = reader.take(len(records), 60)
                asked["records"] += len(records)
                if len(taken) != len(records):
                    raise RuntimeError(f"{len(taken)} of {len(records)} records left a dump or an error marker")
        finally:
            for other in others:
                other.join()
            reader.stop()
        if failed:
            raise RuntimeError(f"beside the records: {failed[0]!r}")
        return asked


def compare(found: list[dict[str, Any] | str], reference: list[dict[str, Any]]) -> dict[str, Any]:
    """Of one group: by state the median and 99th percentile of relative L2 a row, and the records that were given up."""
    import torch

    reasons = [one for one in found if isinstance(one, str)]
    pairs = [(one, other) for one, other in zip(found, reference) if not isinstance(one, str)]
    states = {}
    for name in reference[0] if pairs else ():
        rows = torch.cat([distance(one[name], other[name]) for one, other in pairs])
        states[name] = {"median": float(rows.median()), "p99": float(rows.quantile(0.99)) if len(rows) < 1 << 24 else -1.0}
    return {"records": len(pairs), "given_up": len(reasons), "reasons": sorted(set(reasons)), "states": states}


def faults(groups: dict[str, dict[str, Any]]) -> list[str]:
    """What is not right in a server's comparison; nothing where all is."""
    from hs_capture import dumpfile

    found = []
    for group, figures in groups.items():
        found += [f"{group}: {reason}" for reason in figures["reasons"] if not NAMES_FUSION.search(reason)]
        final = figures["states"].get(dumpfile.POST_NORM)
        for name, state in figures["states"].items():
            found += [
                f"{group}: {name} {key} {state[key]:.2e}, the final state has {final[key]:.2e}"
                for key in ("median", "p99")
                if state[key] > RIGHT_FACTOR * final[key]
            ]
    short, long = groups["short"]["states"], groups["long"]["states"]
    for name in short.keys() & long.keys():
        low, high = sorted((short[name]["median"], long[name]["median"]))
        if high > STEP_FACTOR * low:
            found.append(f"{name}: median {short[name]['median']:.2e} up to the border and {long[name]['median']:.2e} beyond it")
    return found


def fusion_is_on(log: Path) -> list[str]:
    """The lines of a server's log that speak of the fusion."""
    return [line.strip()[:200] for line in log.read_text(errors="replace").splitlines() if NAMES_FUSION.search(line)][:6]


def measure(bench: Bench, options: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """The figures, and what does not hold."""
    server = bench.start("one-rank", 1)
    try:
        reference = bench.capture(server)
    finally:
        server.stop()
    if any(isinstance(one, str) for records in reference.values() for one in records):
        raise RuntimeError("the server of one rank gave records up")
    figures: dict[str, Any] = {"contribution": contribution(reference["short"]), "servers": {}}
    wrong = [] if min(figures["contribution"].values()) > LEAST_CONTRIBUTION else ["a layer contributes nothing"]
    for name in options.servers.split(","):
        server = bench.start(name, options.ranks, fusion=name != "off", edit=take_out_the_check if name == "unchecked" else None)
        try:
            began = time.monotonic()
            passed, said = bench.canary(server)
            result: dict[str, Any] = {"canary_passed": passed, "canary_seconds": round(time.monotonic() - began, 1)}
            groups = {group: compare(taken, reference[group]) for group, taken in bench.capture(server).items()}
            result.update(groups=groups, fusion=fusion_is_on(bench.options.logs / f"{name}.log"))
            if name == "unchecked":
                worst = max(state["median"] for state in groups["short"]["states"].values())
                result["partial_sums_off_by"] = round(worst, 3)
                if worst < WRONG:
                    wrong.append(f"{name}: the states are right, so the fusion is off and nothing was shown: {result['fusion']}")
                if passed or not NAMES_FUSION.search(said):
                    wrong.append(f"{name}: the canary {'passed' if passed else 'does not name the fusion'}: {said[-800:]}")
            else:
                wrong += [f"{name}: {fault}" for fault in faults(groups)]
                given_up = sum(group["given_up"] for group in groups.values())
                if name == "off" and (given_up or not passed):
                    wrong.append(f"{name}: {given_up} records given up, canary: {said[-800:]}")
            if options.soak and name == "off":
                result["soak"] = bench.soak(server, options.soak)
            say(f"{name}: {json.dumps(result)}")
        finally:
            server.stop()
        figures["servers"][name] = result
    return figures, wrong


def main() -> int:
    serving.use_engine_python()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--servers", default="off,released,unchecked")
    parser.add_argument("--records", type=int, default=24, help="of a group")
    parser.add_argument("--soak", type=float, default=0, help="seconds of mixed load on the server `off`")
    parser.add_argument("--model", type=Path, help="its directory; default: made here, or the demo's on the CPU")
    parser.add_argument("--logs", type=Path, help="keep the servers' logs there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        options.logs = options.logs or directory
        options.logs.mkdir(parents=True, exist_ok=True)
        made = ("--weights", "--structure", "v3", "--layers", "12", "--experts", "16")
        options.model = serving.model_of(options.model, options.device, directory, *made)
        bench = Bench(options, directory)
        try:
            figures, wrong = measure(bench, options)
        finally:
            shutil.rmtree(bench.dumps, ignore_errors=True)
    for line in wrong:
        say(line)
    about = {"sglang": bench.release, "gpu": gpu_name(options.device), "ranks": options.ranks}
    print(json.dumps({**about, **figures, "wrong": wrong, "ok": not wrong}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
