# SPDX-License-Identifier: GPL-3.0-or-later
"""What the capture benches share: variants of an SGLang installation, servers, a load of requests, a reader that drains dumps."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import multiprocessing
import os
import queue
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ENGINE_PYTHON = ROOT / ".cache" / "sglang-cpu" / "venv" / "bin" / "python"
sys.path[:0] = [str(ROOT / "plugins" / "module_utils")]

READY_SECONDS = 400
# Tokens of a batch that SGLang replays as a graph, at most.
LARGEST_GRAPH = 2048
# Shortest and longest record, and the logarithms' mean and deviation: 272 records of 601,276 tokens for seed 7.
LENGTHS = (64, 8192, 7.4, 0.85)


def say(*words: Any) -> None:
    """Progress, on stderr: the last line of stdout is the result."""
    print(*words, file=sys.stderr, flush=True)


def use_engine_python() -> None:
    """Start again under the CPU engine's interpreter where this one has no torch."""
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("aiohttp") is None:
        if not ENGINE_PYTHON.exists():
            raise SystemExit(f"{sys.executable} has no torch and aiohttp, and there is no {ENGINE_PYTHON}; run: make engine")
        os.execv(ENGINE_PYTHON, [str(ENGINE_PYTHON), *sys.argv])


def installed_sglang() -> tuple[Path, str]:
    """The package directory and release of the SGLang that this interpreter would import."""
    import sglang_release

    found = sglang_release.installation(sys.executable)
    return Path(found["package"]), found["release"]


def make_variant(
    directory: Path, package: Path, *, model_file: str = "deepseek_v2.py", edit: Callable[[Path], object] | None = None
) -> Path:
    """A patched copy of the installation, of hard links, in `directory`: put that first in PYTHONPATH. Returns it.

    edit: changes the capture runtime in a copy that is made for this variant, whose directory it is given.
    """
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    if subprocess.run(["cp", "-al", package, directory / "sglang"], check=False, stderr=subprocess.DEVNULL).returncode:
        shutil.rmtree(directory / "sglang", ignore_errors=True)
        shutil.copytree(package, directory / "sglang")
    runtime = ROOT / "plugins" / "module_utils" / "hs_capture"
    if edit is not None:
        runtime = Path(shutil.copytree(runtime, directory / "hs_capture"))
        edit(runtime)
    patcher = ROOT / "plugins" / "module_utils" / "hs_patcher.py"
    target = directory / "sglang" / "srt" / "models" / model_file
    command = [sys.executable, patcher, "apply", "--originals", directory / "originals", "--runtime", runtime, target]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return directory


def save_in_the_forward(runtime: Path) -> None:
    """Give a copy of the runtime the writer of gpu/naive_writer.py."""
    shutil.copy(ROOT / "bench" / "gpu" / "naive_writer.py", runtime / "writer.py")


def arguments(
    release: str, device: str, model: Path, *, memory: float, graphs: bool = False, fusion: bool = False, ranks: int = 1
) -> list[str]:
    """Server arguments of the benches: those of a capture server of that release, and the backends that the loads hold.

    graphs: leave the release's prefill graphs on, and no batch larger than they are. fusion: leave all-reduce fusion as the
    release sets it. ranks: tensor parallel size.
    """
    import sglang_flags

    found = ["--model-path", str(model), "--skip-tokenizer-init", "--skip-server-warmup"]
    found += ["--sampling-backend", "pytorch", "--grammar-backend", "none"]
    if device == "cpu":
        found += ["--device=cpu", "--dtype=float32", "--attention-backend=torch_native", "--prefill-attention-backend=intel_amx"]
        found += ["--decode-attention-backend=torch_native", "--disable-overlap-schedule", "--max-total-tokens=16384"]
        found += ["--max-running-requests=16", "--sleep-on-idle", "--disable-custom-all-reduce"]
    else:
        found += ["--attention-backend", "triton"]
    found += ["--mem-fraction-static", f"{memory:.2f}", "--disable-cuda-graph", "--tp-size", str(ranks)]
    wanted = list(sglang_flags.capture_arguments(release))
    found += [one for one in wanted if not (graphs and "graph" in one or fusion and "fusion" in one)]
    return found + (["--chunked-prefill-size", str(LARGEST_GRAPH)] if graphs else [])


def cpu_environment(ranks: int = 1) -> dict[str, str]:
    """What a server on the CPU needs besides."""
    found = {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1"}
    if ranks > 1:
        # A core a rank: ranks that share one wait for each other.
        found["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(map(str, sorted(os.sched_getaffinity(0))[:ranks]))
    return found


def model_of(asked: Path | None, device: str, directory: Path, *made: str) -> Path:
    """The model that was asked for; without one the demo's on the CPU, or one that gpu/make_model.py makes below `directory`, as `made` says."""
    if asked is not None:
        return asked
    if device == "cpu":
        return ROOT / ".cache" / "tiny-model"
    subprocess.run([sys.executable, ROOT / "bench" / "gpu" / "make_model.py", directory / "model", *made], check=True)
    return directory / "model"


def _free_port() -> int:
    """A free port: below the system's own choices, since 0.5.12 listens 10,000 higher too."""
    for port in random.sample(range(20000, 30000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("no port between 20000 and 30000 is free")


class Server:
    """An SGLang server of this machine. `wait` for it, then `stop` it."""

    def __init__(self, command: list[str], log: Path, *, path: Path | None = None, environment: dict[str, str] | None = None) -> None:
        self.port = _free_port()
        variables = {name: value for name, value in os.environ.items() if not name.startswith("SGLANG_HS_")}
        if path is not None:
            variables["PYTHONPATH"] = os.pathsep.join(filter(None, [str(path), variables.get("PYTHONPATH", "")]))
        # A health probe that prefills would take part in what is measured.
        variables.update(HF_HUB_OFFLINE="1", SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION="0", PYTHONUNBUFFERED="1")
        variables.update(environment or {})
        self.log = log
        self._began = time.monotonic()
        with log.open("wb") as stream:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "sglang.launch_server", "--host", "127.0.0.1", "--port", str(self.port), *command],
                stdout=stream,
                stderr=subprocess.STDOUT,
                env=variables,
                cwd="/",
                start_new_session=True,
            )

    def wait(self) -> float:
        """Wait until it answers; returns the seconds since its start. Raises RuntimeError with the end of its log."""
        deadline = time.monotonic() + READY_SECONDS
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                if urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5).status == 200:
                    return time.monotonic() - self._began
            except OSError:
                pass
            time.sleep(0.5)
        self.stop()
        raise RuntimeError(f"the server of {self.log} did not start:\n{self.tail()}")

    def tail(self) -> str:
        """The end of its log."""
        return self.log.read_bytes()[-6000:].decode("utf-8", "replace")

    def batches_from_graphs(self) -> float | None:
        """The share of prefill batches that its log says were replayed from a graph; None where it says nothing of graphs."""
        said = re.findall(r"Prefill batch.*cuda graph: (True|False)", self.log.read_text(errors="replace"))
        return round(said.count("True") / len(said), 3) if said else None

    def stop(self) -> None:
        """Stop it and its workers, which share its process group."""
        for number, patience in ((signal.SIGTERM, 20), (signal.SIGKILL, 20)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            deadline = time.monotonic() + patience
            while time.monotonic() < deadline:
                self._process.poll()
                try:
                    os.killpg(self._process.pid, 0)
                except ProcessLookupError:
                    return
                time.sleep(0.2)


def make_records(tokens: int, seed: int = 7, lengths: tuple = LENGTHS, vocabulary: int = 100_000) -> list[list[int]]:
    """Records of random token ids, `tokens` of them at least, of log-normal lengths."""
    generator = random.Random(seed)
    shortest, longest, mean, deviation = lengths
    records, total = [], 0
    while total < tokens:
        length = int(min(longest, max(shortest, generator.lognormvariate(mean, deviation))))
        records.append([generator.randrange(10, vocabulary) for _ in range(length)])
        total += length
    return records


async def _send(port: int, records: list[list[int]], rids: list[str], concurrency: int) -> float:
    import aiohttp

    gate = asyncio.Semaphore(concurrency)
    bodies = [
        json.dumps({"input_ids": record, "rid": rid, "sampling_params": {"max_new_tokens": 0, "temperature": 0}}).encode()
        for record, rid in zip(records, rids)
    ]
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600), connector=connector) as session:

        async def one(body: bytes) -> None:
            async with (
                gate,
                session.post(f"http://127.0.0.1:{port}/generate", data=body, headers={"Content-Type": "application/json"}) as answer,
            ):
                text = await answer.read()
                if answer.status != 200:
                    raise RuntimeError(f"the server answered {answer.status}: {text[:300]!r}")

        began = time.monotonic()
        await asyncio.gather(*(one(body) for body in bodies))
        return time.monotonic() - began


def send(port: int, records: list[list[int]], concurrency: int, stem: str) -> float:
    """Prefill all records, `<stem><number>` being their rids; returns the seconds it took."""
    return asyncio.run(_send(port, records, [f"{stem}{number}" for number in range(len(records))], concurrency))


def warm(port: int, records: list[list[int]], concurrency: int) -> None:
    """Bring a server to where it stays: some records together, then one alone in each size up to the longest.

    A batch of a size that was not there before has its kernels built, for half a second, whoever sends it.
    """
    longest = max(records, key=len)
    send(port, records[:40], concurrency, "warm-")
    send(port, [longest[: 2**power] for power in range(4, len(longest).bit_length())], 1, "warm-alone-")


def _drain(directory: str, stop: Any, found: Any) -> None:
    from hs_capture import dumpfile

    while not stop.is_set():
        names = os.listdir(directory) if os.path.isdir(directory) else []
        for name in names:
            path = os.path.join(directory, name)
            if dumpfile.is_dump(name):
                with open(path, "rb") as stream:
                    header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
                dumpfile.give_back(directory, name)
                found.put((header["__metadata__"]["rid"], int(header["__metadata__"]["tokens"])))
            elif name.endswith(".error.json"):
                found.put((name, json.loads(Path(path).read_text())["reason"]))
                os.unlink(path)
            elif name.endswith(".pt"):
                os.unlink(path)
                found.put((name, -1))
        time.sleep(0.002)


class Reader:
    """A process that takes dumps away as they come. `found` says which, and of how many tokens."""

    def __init__(self, directory: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._stop, self._queue = context.Event(), context.Queue()
        self._process = context.Process(target=_drain, args=(str(directory), self._stop, self._queue), daemon=True)
        self._process.start()

    def take(self, count: int, seconds: float) -> list[tuple[str, Any]]:
        """The next `count` dumps or error markers: (rid, tokens) or (name of the marker, its reason); fewer once none comes."""
        found = []
        with contextlib.suppress(queue.Empty):
            while len(found) < count:
                found.append(self._queue.get(timeout=seconds))
        return found

    def stop(self) -> None:
        """End the process."""
        self._stop.set()
        self._process.join(10)


def take_dumps(directory: Path, records: list[list[int]], stem: str) -> list[dict[str, Any] | str]:
    """Of each record that `send` sent its states by tensor name, float32 on the CPU, or the reason of its error marker.

    Token ids are checked (RuntimeError), and dumps that were read are removed.
    """
    import torch

    from hs_capture import dumpfile

    counters(directory)
    taken: list[dict[str, Any] | str] = []
    for number, record in enumerate(records):
        marker = directory / dumpfile.error_name(f"{stem}{number}")
        if marker.exists():
            taken.append(dumpfile.read_error(marker)["reason"])
            continue
        path = directory / dumpfile.dump_name(f"{stem}{number}", 0)
        _metadata, tensors = dumpfile.read_dump(path)
        if not torch.equal(tensors.pop(dumpfile.INPUT_IDS), torch.tensor(record)):
            raise RuntimeError(f"{path.name} has other token ids than record {number} of {len(record)} tokens")
        taken.append({name: tensor.float() for name, tensor in tensors.items()})
        path.unlink()
    return taken


def counters(directory: Path) -> dict[str, Any]:
    """capture.json once it stands still."""
    from hs_capture import dumpfile

    time.sleep(2.5)
    path = directory / dumpfile.COUNTERS_NAME
    return json.loads(path.read_text()) if path.exists() else {}
