#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-3.0-or-later
"""Extraction end to end against plain prefill of the same records, turn by turn.

    python bench/extract_gpu.py [--output DIRECTORY] [--rounds N] [--tokens N] [--json]

A plain server and a capturing one stay up. A round is: all records through the plain server, in the data set's order and then longest
first, as the extractor sends them, which fills batches better; then the extractor as a process, from its first request to its last
fsynced manifest line, into an empty directory on the file system of --output. `ratio` is of the medians, against the faster of the two
orders; `of_plain_in_order` is against the data set's. Each round's files are verified. Where the disk is the limit,
`output_bytes_per_second` is what it took beside what a plain write with fsync reaches there. --json adds SGLang's own
return_hidden_states, answers written into the same format. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import payload
import serving
from serving import say

RID_PREFIX = "hsb-"
MEMORY = {"cuda": (0.32, 0.5), "cpu": (0.2, 0.2)}
CLAIM = {"cuda": 0.98, "cpu": 0.90}
LEAST_SECONDS = 30


def disk_rate(directory: Path, size: int = 1 << 30) -> float:
    """Bytes a second that one writer with an fsync reaches there."""
    block, path = os.urandom(1 << 24), directory / "rate"
    began = time.monotonic()
    with path.open("wb") as stream:
        for _block in range(size >> 24):
            stream.write(block)
        stream.flush()
        os.fsync(stream.fileno())
    seconds = time.monotonic() - began
    path.unlink()
    return size / seconds


class Bench:
    """The records, the servers and the extractor's configuration."""

    def __init__(self, options: argparse.Namespace, directory: Path) -> None:
        self.options, self.directory = options, directory
        self.package, self.release = serving.installed_sglang()
        self.cpu = options.device == "cpu"
        lengths, vocabulary = ((16, 1000, 5.9, 0.5), 500) if self.cpu else (serving.LENGTHS, 100_000)
        self.records = serving.make_records(options.tokens, lengths=lengths, vocabulary=vocabulary)
        self.tokens = sum(map(len, self.records))
        self.packed = payload.pack(self.records, directory)
        self.dumps = Path(f"/dev/shm/hs-bench-{os.getpid()}")
        self.model = json.loads((options.model / "config.json").read_text())
        count = self.model["num_hidden_layers"]
        self.layers = sorted({1, count // 2 - 1, count - 4} & set(range(count))) or [0]

    def start(self, name: str, memory: float, path: Path | None, environment: dict[str, str], *more: str) -> serving.Server:
        """A server that is ready and warm."""
        command = serving.arguments(self.release, self.options.device, self.options.model, memory=memory)
        command += [] if self.cpu else ["--load-format", "dummy"]
        environment = {**(serving.cpu_environment() if self.cpu else {}), **environment}
        server = serving.Server([*command, *more], self.options.logs / f"{name}.log", path=path, environment=environment)
        say(f"{name}: ready after {server.wait():.0f} s")
        serving.warm(server.port, self.records, self.options.concurrency)
        return server

    def capturing(self) -> serving.Server:
        path = serving.make_variant(self.directory / "patched", self.package)
        environment = {"SGLANG_HS_DUMP_DIR": str(self.dumps), "SGLANG_HS_DUMP_LAYERS": ",".join(map(str, self.layers))}
        return self.start("capture", MEMORY[self.options.device][1], path, environment)

    def extract(self, server: serving.Server, output: Path) -> float:
        """Tokens a second, from the first request to the last durable manifest line."""
        about = {"layers": self.layers, "hidden_size": self.model["hidden_size"], "dtype": "float32" if self.cpu else "bfloat16"}
        about["concurrency"] = self.options.concurrency
        file = self.directory / "extract.json"
        file.write_text(json.dumps(payload.configuration(self.packed, len(self.records), server.port, self.dumps, output, **about)))
        with (self.options.logs / "extract.log").open("w") as log:
            payload.call("extract", "--config", file, stdout=log, stderr=log)
        status = json.loads((output / "status.json").read_text())
        if (status["state"], status["records_done"]) != ("done", len(self.records)):
            raise RuntimeError(f"the extraction ended as {status['state']}: {status['message']}")
        payload.call("verify", "--output-dir", output, "--all", stdout=subprocess.DEVNULL)
        return self.tokens / status["session_seconds"]

    def answers(self, output: Path) -> dict[str, Any]:
        """SGLang's own return_hidden_states: the final state alone, as JSON, written by torch.save."""
        server = self.start("return_hidden_states", MEMORY[self.options.device][1], None, {}, "--enable-return-hidden-states")
        # It is slower by so much that a part of the records says enough.
        records = self.records[: max(8, len(self.records) // 10)]
        try:
            seconds = asyncio.run(_answers(server.port, records, self.options.concurrency, output))
        finally:
            server.stop()
        return {"tokens": sum(map(len, records)), "tokens_per_second": round(sum(map(len, records)) / seconds)}


async def _answers(port: int, records: list[list[int]], concurrency: int, output: Path) -> float:
    import aiohttp
    import torch

    gate = asyncio.Semaphore(concurrency)
    output.mkdir()
    # Writing such an answer as JSON takes the server longer than it keeps an idle connection.
    connector = aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600), connector=connector) as session:

        async def one(number: int) -> None:
            body = {"input_ids": records[number], "return_hidden_states": True, "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
            async with gate, session.post(f"http://127.0.0.1:{port}/generate", json=body) as answer:
                states = torch.tensor((await answer.json())["meta_info"]["hidden_states"][0], dtype=torch.bfloat16)
            path = output / f"{number}.ckpt"
            torch.save({"input_ids": torch.tensor(records[number]), "hidden_state": states}, path)
            with path.open("rb") as stream:
                os.fsync(stream.fileno())

        began = time.monotonic()
        await asyncio.gather(*map(one, range(len(records))))
        return time.monotonic() - began


def measure(bench: Bench, options: argparse.Namespace, output: Path) -> dict[str, Any]:
    """The figures; RuntimeError where a server or an extraction fails."""
    orders = {"in order": bench.records, "longest first": sorted(bench.records, key=len, reverse=True)}
    plain_rates: dict[str, list[float]] = {name: [] for name in orders}
    rates, plain, server = [], None, None
    try:
        plain = bench.start("plain", MEMORY[options.device][0], None, {})
        server = bench.capturing()
        for number in range(options.rounds):
            for name, records in orders.items():
                plain_rates[name].append(bench.tokens / serving.send(plain.port, records, options.concurrency, f"plain-{number}-"))
            rates.append(bench.extract(server, output / f"round-{number}"))
            shutil.rmtree(output / f"round-{number}")
            beside = ", ".join(f"plain {name} {measured[-1]:,.0f}" for name, measured in plain_rates.items())
            say(f"extraction {rates[-1]:,.0f} tok/s, {beside}")
    finally:
        for one in (plain, server):
            if one is not None:
                one.stop()
        shutil.rmtree(bench.dumps, ignore_errors=True)
    rate = statistics.median(rates)
    medians = {name: statistics.median(measured) for name, measured in plain_rates.items()}
    width = (len(bench.layers) + 1) * bench.model["hidden_size"] * (4 if bench.cpu else 2)
    figures: dict[str, Any] = {
        "ratio": round(rate / max(medians.values()), 4),
        "of_plain_in_order": round(rate / medians["in order"], 4),
        "tokens_per_second": [round(one) for one in rates],
        "plain_tokens_per_second": {name: [round(one) for one in measured] for name, measured in plain_rates.items()},
        "seconds": round(bench.tokens / rate, 1),
        "output_bytes_per_second": round(rate * width),
        "disk_bytes_per_second": round(disk_rate(output)),
    }
    if options.json:
        figures["return_hidden_states"] = bench.answers(output / "answers")
    return figures


def main(arguments: list[str] | None = None) -> int:
    serving.use_engine_python()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=2_000_000, help="of a round, about")
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--output", type=Path, default=Path("/dev/shm"), help="where the files go")
    parser.add_argument("--json", action="store_true", help="return_hidden_states beside it")
    parser.add_argument("--model", type=Path, help="its directory; default: made here, or the demo's on the CPU")
    parser.add_argument("--logs", type=Path, help="keep the logs there")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryDirectory(dir=options.output) as output:
        directory = Path(name)
        options.logs = options.logs or directory
        options.logs.mkdir(parents=True, exist_ok=True)
        options.model = serving.model_of(options.model, options.device, directory)
        bench = Bench(options, directory)
        try:
            figures = measure(bench, options, Path(output))
        except RuntimeError as error:
            say(error)
            return 1
    claimed = CLAIM[options.device]
    ok = figures["ratio"] >= claimed
    if not ok:
        say(f"ratio is {figures['ratio']}, claimed at least {claimed}")
    if figures["seconds"] < LEAST_SECONDS:
        say(f"a round took {figures['seconds']} s; give more --tokens, so that it takes {LEAST_SECONDS}")
    about = {"sglang": bench.release, "device": options.device, "records": len(bench.records), "tokens": bench.tokens}
    print(json.dumps({**about, "concurrency": options.concurrency, **figures, "ok": ok}))
    return not ok


if __name__ == "__main__":
    sys.exit(main())
