# SPDX-License-Identifier: GPL-3.0-or-later
"""A capture from a patched server, record by record, and its comparison with the reference."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy

import hs_patcher
import models
from engines import Engine
from hidden_state_bridge.dumps import announce
from hs_capture.dumpfile import COUNTERS_NAME, INPUT_IDS, dump_name, error_name, read_dump, read_error
from hs_capture.settings import DEFAULT_RID_PREFIX, DUMP_DIR, DUMP_FINAL, DUMP_LAYERS
from server import Server

LENGTHS = [1, 120, 2, 3, 17, 64, 65, 31, 9, 100, 5, 48, 1, 77, 24, 111]
AT_ONCE = 8
# Seconds that a dump may come after its answer.
PATIENCE = 30


def make_records() -> dict[str, list[int]]:
    """Token ids by rid, the same every time; no two records are alike."""
    generator = random.Random(5)
    ids = [[generator.randrange(3, models.VOCABULARY) for _ in range(length)] for length in LENGTHS]
    return {f"{DEFAULT_RID_PREFIX}{number}": record for number, record in enumerate(ids)}


RECORDS = make_records()


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
    """What a capture left: by rid the dump's metadata and tensors, or the error marker; the patch's family, the log."""

    family: str
    log: Path
    dumps: dict[str, tuple[dict, dict]] = field(default_factory=dict)
    errors: dict[str, dict[str, str]] = field(default_factory=dict)


def capture(engine: Engine, structure: str, tp_size: int, directory: Path, layers: str = "", **environment: str) -> Captured:
    """Patch the engine, serve a tiny model with it, capture every record, put the engine back.

    `directory` takes what the run leaves; an empty `layers` gives the default ones.
    """
    dumps, originals = directory / "dumps", directory / "originals"
    environment = {DUMP_DIR: str(dumps), DUMP_LAYERS: layers, DUMP_FINAL: "both", **environment}
    server = Server(engine, models.checkpoint(structure), tp_size, directory / "server.log", environment)
    with patched(engine, models.STRUCTURES[structure].model_file, originals) as patch, server:
        captured = Captured(patch.family, server.log)
        _take(captured, server, dumps)
    return captured


def _take(captured: Captured, server: Server, directory: Path) -> None:
    """Send every record, several at a time, and read what the server leaves in `directory`."""

    def send(rid: str) -> dict:
        # The one client that the project has for releases before 0.5.10.
        asyncio.run(announce(str(directory), rid, numpy.array(RECORDS[rid], dtype=numpy.int32), PATIENCE))
        return server.generate(RECORDS[rid], rid)

    with ThreadPoolExecutor(AT_ONCE) as senders:
        answers = list(senders.map(send, RECORDS))
    assert [answer["output_ids"] for answer in answers] == [[]] * len(RECORDS)
    deadline = time.monotonic() + PATIENCE
    for rid in RECORDS:
        dump, error = directory / dump_name(rid, 0), directory / error_name(rid)
        while not (dump.exists() or error.exists()):
            if time.monotonic() > deadline:
                raise server.failure(f"{rid} was answered, and left neither dump nor error marker in {PATIENCE} s")
            time.sleep(0.05)
        if error.exists():
            captured.errors[rid] = read_error(error)
        else:
            captured.dumps[rid] = read_dump(dump)
    known = {COUNTERS_NAME} | {dump_name(rid, 0) for rid in captured.dumps} | {error_name(rid) for rid in captured.errors}
    unknown = {path.name for path in directory.iterdir() if path.is_file()} - known
    assert not unknown, f"nobody asked for {', '.join(sorted(unknown))}"


def differences(dumps: dict[str, tuple[dict, dict]], states: dict[str, dict]) -> dict[str, float]:
    """By state the largest |difference| over the largest |value| of all tokens; ids have to be equal.

    `states` are the reference's, by rid: [tokens, width] float32 by the name of the state.
    """
    worst: dict[str, float] = {}
    largest: dict[str, float] = {}
    for rid, (_metadata, tensors) in dumps.items():
        assert tensors[INPUT_IDS].tolist() == RECORDS[rid], f"{rid}: the token ids are another record's"
        for name, mine in tensors.items():
            if name != INPUT_IDS:
                want = states[rid][name]
                assert mine.isfinite().all(), f"{rid}: {name} is not finite"
                assert mine.shape == want.shape, f"{rid}: {name} has the shape {list(mine.shape)}, expected {list(want.shape)}"
                worst[name] = max(worst.get(name, 0.0), (mine - want).abs().max().item())
                largest[name] = max(largest.get(name, 0.0), want.abs().max().item())
    return {name: worst[name] / largest[name] for name in worst}
