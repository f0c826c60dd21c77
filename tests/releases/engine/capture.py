# SPDX-License-Identifier: GPL-3.0-or-later
"""A capture from a patched server, record by record, and its comparison with the reference."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy
import torch

import hs_patcher
import models
from engines import Engine
from hidden_state_bridge.dumps import Layout, announce, find, load
from hs_capture.dumpfile import COUNTERS_NAME, error_name, read_error
from hs_capture.layers import default_layers, format_layers
from hs_capture.settings import DEFAULT_RID_PREFIX, DUMP_DIR, DUMP_FINAL, DUMP_LAYERS
from server import Server

Records = Mapping[str, Sequence[int]]

LENGTHS = [1, 120, 2, 3, 17, 64, 65, 31, 9, 100, 5, 48, 1, 77, 24, 111]
AT_ONCE = 8
# Seconds that a dump may come after its answer.
PATIENCE = 60


def make_records(lengths: Sequence[int], seed: int, name: str = "") -> dict[str, list[int]]:
    """Token ids by rid, the same every time; no two records are alike."""
    generator = random.Random(seed)
    ids = [[generator.randrange(3, models.VOCABULARY) for _ in range(length)] for length in lengths]
    return {f"{DEFAULT_RID_PREFIX}{name}{number}": record for number, record in enumerate(ids)}


RECORDS = make_records(LENGTHS, 5)


@contextlib.contextmanager
def patched(engine: Engine, model: str, originals: Path) -> Iterator[hs_patcher.Result]:
    """Patch a model file of the engine, and take the patch out again, to the byte."""
    path = engine.model_file(model)
    before, files = path.read_bytes(), set(os.listdir(path.parents[1]))
    result = hs_patcher.apply(path, originals=str(originals))
    assert path.read_bytes() != before
    try:
        yield result
    finally:
        hs_patcher.revert(path, originals=str(originals))
    assert path.read_bytes() == before, f"{path} is not what it was before the patch"
    assert set(os.listdir(path.parents[1])) == files


@dataclass
class Captured:
    """What a capture left: by rid the dump's metadata and states, its pieces, or the error marker; the patch's family, the log."""

    family: str
    log: Path
    dumps: dict[str, tuple[dict, dict]] = field(default_factory=dict)
    pieces: dict[str, list[str]] = field(default_factory=dict)
    errors: dict[str, dict[str, str]] = field(default_factory=dict)


@dataclass
class Capturing:
    """A server that captures into the directory `dumps`."""

    server: Server
    dumps: Path
    layout: Layout
    family: str

    def take(self, records: Records = RECORDS, at_once: int = AT_ONCE) -> Captured:
        """Send every record, `at_once` at a time, and read what the server leaves of each."""
        # The first ones are sent together however slowly threads start.
        first = list(records)[:at_once]
        together = threading.Barrier(len(first) or 1)

        def send(rid: str) -> dict:
            if rid in first:
                together.wait(PATIENCE)
            # The one client that the project has for releases before 0.5.10.
            asyncio.run(announce(str(self.dumps), rid, numpy.array(records[rid], dtype=numpy.int32), PATIENCE))
            return self.server.generate(records[rid], rid)

        with ThreadPoolExecutor(at_once) as senders:
            answers = list(senders.map(send, records))
        assert [answer["output_ids"] for answer in answers] == [[]] * len(records)
        captured = Captured(self.family, self.server.log)
        for rid, ids in records.items():
            self.read(rid, ids, captured)
        return captured

    def read(self, rid: str, ids: Sequence[int], into: Captured) -> None:
        """Wait for what the capture leaves of a request that was answered; its dump has to hold just these token ids."""
        error, deadline = self.dumps / error_name(rid), time.monotonic() + PATIENCE
        while not error.exists():
            paths = find(str(self.dumps), rid, len(ids))
            if paths:
                states = load(paths, rid, numpy.array(ids, dtype=numpy.int32), self.layout)
                whole = {name: torch.empty(len(ids), self.layout.hidden_size) for name in self.layout.names}
                for name, target in whole.items():
                    states.copy_into(name, target)
                into.dumps[rid], into.pieces[rid] = (states.metadata, whole), paths
                return
            if time.monotonic() > deadline:
                raise self.server.failure(f"{rid} was answered, and left neither dump nor error marker in {PATIENCE} s")
            time.sleep(0.05)
        into.errors[rid] = read_error(error)

    def unknown(self, *read: Captured) -> list[str]:
        """Names in the directory that are none of what was read."""
        known = {COUNTERS_NAME}
        for captured in read:
            known.update(os.path.basename(path) for paths in captured.pieces.values() for path in paths)
            known.update(map(error_name, captured.errors))
        return sorted({path.name for path in self.dumps.iterdir() if path.is_file()} - known)


@contextlib.contextmanager
def capturing(
    engine: Engine,
    structure: str,
    tp_size: int,
    directory: Path,
    layers: str = "",
    arguments: Sequence[str] = (),
    without: Sequence[str] = (),
    dumps: Path | None = None,
    **environment: str,
) -> Iterator[Capturing]:
    """Patch the engine, serve a tiny model with it, put the engine back.

    `directory` takes what the run leaves, and the dumps where `dumps` names no other; an empty `layers` gives the default
    ones. `arguments` and `without` as for Server.
    """
    dumps = dumps or directory / "dumps"
    environment = {DUMP_DIR: str(dumps), DUMP_LAYERS: layers, DUMP_FINAL: "both", **environment}
    numbers = tuple(map(int, (layers or format_layers(default_layers(models.LAYERS))).split(",")))
    layout = Layout(numbers, "both", models.WIDTH, "float32")
    server = Server(engine, models.checkpoint(structure), tp_size, directory / "server.log", environment, arguments, without)
    with patched(engine, models.STRUCTURES[structure].model_file, directory / "originals") as patch, server:
        yield Capturing(server, dumps, layout, patch.family)


def capture(engine: Engine, structure: str, tp_size: int, directory: Path, layers: str = "", **environment: str) -> Captured:
    """What a server as of `capturing` leaves of every record."""
    with capturing(engine, structure, tp_size, directory, layers, **environment) as running:
        captured = running.take()
        unknown = running.unknown(captured)
    assert not unknown, f"nobody asked for {', '.join(unknown)}"
    return captured


def differences(dumps: dict[str, tuple[dict, dict]], states: dict[str, dict]) -> dict[str, float]:
    """By state the largest |difference| over the largest |value| of all tokens.

    `states` are the reference's, by rid: [tokens, width] float32 by the name of the state.
    """
    worst: dict[str, float] = {}
    largest: dict[str, float] = {}
    for rid, (_metadata, tensors) in dumps.items():
        for name, mine in tensors.items():
            want = states[rid][name]
            assert mine.isfinite().all(), f"{rid}: {name} is not finite"
            assert mine.shape == want.shape, f"{rid}: {name} has the shape {list(mine.shape)}, expected {list(want.shape)}"
            worst[name] = max(worst.get(name, 0.0), (mine - want).abs().max().item())
            largest[name] = max(largest.get(name, 0.0), want.abs().max().item())
    return {name: worst[name] / largest[name] for name in worst}


def rows_beyond(tolerance: float, dumps: dict[str, tuple[dict, dict]], states: dict[str, dict]) -> list[str]:
    """Lines that say which rows differ by more: what tells a wrong row, a wrong record and a server that computes otherwise apart."""
    found = []
    for rid, (_metadata, tensors) in dumps.items():
        for name, mine in tensors.items():
            largest = max(named[name].abs().max().item() for named in states.values())
            apart = (mine - states[rid][name]).abs().amax(dim=1) / largest
            rows = (apart > tolerance).nonzero().flatten().tolist()
            if rows:
                found.append(f"{rid} {name}: {len(rows)} of {len(mine)} rows, to {apart.max():.1e}, the first {rows[:5]}")
    return found
