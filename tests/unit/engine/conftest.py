# SPDX-License-Identifier: Apache-2.0
"""Tests that need torch: run them with the engine's interpreter (and pytest beside it)."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import signal
import time
from pathlib import Path

import dumping
import pytest
from extractor_process import RECORDS, extract
from fake_server import HIDDEN, LAYERS

import hs_manifest
from hidden_state_bridge.pack import pack
from hidden_state_bridge.packed import PackedDataset

# Forks each extractor from a process that has torch already: a start takes milliseconds instead of seconds.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["torch", "extractor_process"])


class Site:
    """One host's directories, a packed data set, and the extractor as a process."""

    def __init__(self, directory: Path, dumps: Path) -> None:
        generator = random.Random(3)
        sources = []
        for name in ("A2_first", "B1_second"):
            path = directory / f"{name}.jsonl"
            with path.open("w") as stream:
                for _ in range(RECORDS // 2):
                    length = generator.randint(1, 60)
                    ids = [generator.randrange(512) for _ in range(length)]
                    stream.write(json.dumps({"input_ids": ids, "loss_mask": [i % 2 for i in ids]}) + "\n")
            sources.append({"name": name, "path": str(path)})
        self.dataset = PackedDataset(pack({"sources": sources, "seed": 1}, str(directory / "packed"))["path"])
        self.directory, self.dumps, self.output = directory, dumps, directory / "out" / "host"
        self.config_file, self.log = directory / "config.json", directory / "log"
        identity = {"dataset": self.dataset.meta["sha256"], "weights": "w", "layers": list(LAYERS)}
        identity.update(final="post_norm", dtype="float32")
        self.config = {
            "schema": 1,
            "run": hs_manifest.run_of(identity),
            "identity": identity,
            "provenance": {"host": "one"},
            "dataset": self.dataset.path,
            "share": f"0-{RECORDS - 1}",
            "url": "http://127.0.0.1:9",
            "dump_dir": str(dumps),
            "output_dir": str(self.output),
            "format": "specforge",
            "layers": list(LAYERS),
            "final": "post_norm",
            "hidden_size": HIDDEN,
            "dtype": "float32",
            "concurrency": 4,
            "retries": 2,
            "request_timeout": 5,
            "server_wait": 2,
            "dump_timeout": 0.5,
            "min_free_bytes": 0,
        }

    def start(self, **changes: object) -> multiprocessing.process.BaseProcess:
        """Start the extractor with a configuration changed so."""
        config = {**self.config, **changes}
        if "identity" in changes:
            config["run"] = hs_manifest.run_of(config["identity"])
        self.config_file.write_text(json.dumps(config))
        process = PROCESSES.Process(target=extract, args=(str(self.config_file), str(self.log)))
        process.start()
        return process

    def finish(self, process: multiprocessing.process.BaseProcess) -> str:
        """Wait for the extractor's end; returns what it printed."""
        process.join(300)
        assert process.exitcode is not None, "the extractor does not end"
        return self.log.read_text()

    def run(self, status: int = 0, **changes: object) -> str:
        """Run the extractor to its end, which has to be `status`; returns what it printed."""
        process = self.start(**changes)
        out = self.finish(process)
        assert process.exitcode == status, f"exit status {process.exitcode}, expected {status}\n{out}"
        return out

    def lines(self) -> list[dict]:
        """The manifest as it lies there; each line has to be whole."""
        return [json.loads(line) for line in (self.output / "manifest.jsonl").read_text().splitlines()]

    def status(self) -> dict:
        """status.json."""
        return json.loads((self.output / "status.json").read_text())

    def wait_for_lines(self, count: int, seconds: float = 300) -> None:
        """Wait until the manifest has that many lines."""
        deadline = time.monotonic() + seconds
        manifest = self.output / "manifest.jsonl"
        while not manifest.exists() or manifest.read_bytes().count(b"\n") < count:
            assert time.monotonic() < deadline, f"the manifest has not reached {count} lines"
            time.sleep(0.005)

    def kill(self, process: multiprocessing.process.BaseProcess, number: int = signal.SIGKILL) -> str:
        """Send a signal to the extractor and wait for its end; returns what it printed."""
        os.kill(process.pid, number)
        return self.finish(process)

    def check_complete(self, records: int = RECORDS) -> None:
        """Each record exactly once, every file right, nothing left over."""
        from hidden_state_bridge.verify import verify

        entries = self.lines()
        assert sorted(entry["id"] for entry in entries) == list(range(records))
        result = verify(str(self.output), None)
        assert result["ok"], result["problems"]
        assert result["checked"] == records
        assert os.listdir(self.dumps) == []
        assert self.status()["state"] == "done"


@pytest.fixture(autouse=True)
def writers():
    """No thread of a test outlives it."""
    yield
    while dumping.OPEN:
        dumping.OPEN.pop().close()


@pytest.fixture
def site(tmp_path):
    dumps = Path("/dev/shm") / f"hsb-unit-{os.getpid()}-{tmp_path.name}"
    shutil.rmtree(dumps, ignore_errors=True)
    dumps.mkdir(mode=0o700)
    yield Site(tmp_path, dumps)
    shutil.rmtree(dumps, ignore_errors=True)
