#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-3.0-or-later
"""The capture's copies on this machine's GPU (or CPU), without SGLang: every byte, under reuse of the source, and the rate.

    python bench/capture_selfcheck.py [--device cpu] [--directory /dev/shm/...]

Forwards of random sizes are played: each state is recorded and overwritten at once in the model's stream, as SGLang does, while
matrices are multiplied beside. Every dump has to hold the bytes that were recorded. The last line is one JSON object; exit status 1
where a dump is wrong or missing.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "plugins" / "module_utils"))

import torch

from hs_capture import dumpfile
from hs_capture.budget import Layout, plan
from hs_capture.directory import DumpDirectory
from hs_capture.sheet import Piece
from hs_capture.writer import Writer

CODES = {"I64": torch.int64, "BF16": torch.bfloat16}


def read(path: str) -> dict[str, torch.Tensor]:
    """The tensors of a dump; by hand, so that safetensors need not be there."""
    data = bytearray(Path(path).read_bytes())
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(bytes(data[8:end]))
    header.pop("__metadata__")
    found = {}
    for name, about in header.items():
        first, last = (end + offset for offset in about["data_offsets"])
        found[name] = torch.frombuffer(data[first:last], dtype=CODES[about["dtype"]]).view(about["shape"])
    return found


class Model:
    """States of a forward: every layer adds to the stream in place, as fused kernels do."""

    def __init__(self, device: str, width: int, layers: int) -> None:
        self.device, self.width, self.layers = device, width, layers
        self.weights = torch.randn(width, width, dtype=torch.bfloat16, device=device) / width**0.5

    def forward(self, rows: int, record, keep: dict[str, torch.Tensor] | None) -> None:
        """Call record(name, stream) after each layer, and overwrite the stream at once; `keep` gets what was recorded."""
        stream = torch.randn(rows, self.width, dtype=torch.bfloat16, device=self.device)
        for layer in range(self.layers):
            stream += stream @ self.weights * 0.1
            record(f"layer_{layer}", stream)
            if keep is not None:
                keep[f"layer_{layer}"] = stream.clone()
            stream.mul_(0.9)
        record(dumpfile.POST_NORM, stream)
        if keep is not None:
            keep[dumpfile.POST_NORM] = stream.clone()
        stream.zero_()


def pieces_of(generator: random.Random, number: int, rows: int) -> list[Piece]:
    """Pieces of a forward of `rows` rows; rows of others lie between them."""
    pieces, first = [], 0
    while first < rows:
        length = min(rows - first, generator.choice([1, 7, 64, 500, 2000, 8192]))
        if generator.random() < 0.85 or not pieces:
            pieces.append(Piece(f"hsb-{number}-{len(pieces)}", 0, first, first + length))
        first += length
    return pieces


def check(writer: Writer, model: Model, directory: str, forwards: int, most_rows: int) -> int:
    """Play forwards one after another without waiting, compare all dumps; returns how many were compared."""
    generator = random.Random(5)
    expected = []
    compared = 0
    for number in range(forwards):
        rows = generator.choice([1, 3, 100, 2049, most_rows])
        pieces = pieces_of(generator, number, rows)
        ids = torch.randint(0, 163840, (rows,), dtype=torch.int32, device=model.device)
        keep: dict[str, torch.Tensor] = {dumpfile.INPUT_IDS: ids.long()}
        sheet = writer.reserve(pieces)
        sheet.copy_ids(ids)
        ids.zero_()
        model.forward(rows, sheet.copy, keep)
        writer.submit(sheet)
        expected.append((pieces, keep))
        if number % 4 < 3:
            continue
        assert writer.drain(120)
        for pieces_then, kept in expected:
            for piece in pieces_then:
                name = dumpfile.dump_name(piece.rid, 0)
                found = read(os.path.join(directory, name))
                for tensor, whole in kept.items():
                    assert torch.equal(found[tensor], whole[piece.first : piece.last].cpu()), f"{name}: {tensor} is not what was recorded"
                compared += 1
                dumpfile.give_back(directory, name)
        expected.clear()
    return compared


def drain_directory(directory: str, stop: threading.Event) -> None:
    """A reader that takes every dump away."""
    while not stop.is_set():
        for name in os.listdir(directory):
            if dumpfile.is_dump(name):
                dumpfile.give_back(directory, name)
        time.sleep(0.005)


def rate(writer: Writer, model: Model, directory: str, rows: int, seconds: float) -> dict[str, float]:
    """Forwards with and without capture, back to back; bytes a second written, and the time a forward takes longer."""

    def forwards(record_of) -> tuple[int, float]:
        count, began = 0, time.monotonic()
        while time.monotonic() - began < seconds:
            record_of(count)
            count += 1
            if model.device == "cuda":
                torch.cuda.synchronize()
        return count, (time.monotonic() - began) / count

    stop = threading.Event()
    reader = threading.Thread(target=drain_directory, args=(directory, stop))
    reader.start()

    def captured(count: int) -> None:
        sheet = writer.reserve([Piece(f"hsb-r{count}-{i}", 0, i * rows // 8, (i + 1) * rows // 8) for i in range(8)])
        sheet.copy_ids(ids)
        model.forward(rows, sheet.copy, None)
        writer.submit(sheet)

    ids = torch.zeros(rows, dtype=torch.int64, device=model.device)
    forwards(lambda count: model.forward(rows, lambda name, state: None, None))
    _count, plain = forwards(lambda count: model.forward(rows, lambda name, state: None, None))
    before = writer.counters["bytes"]
    began = time.monotonic()
    count, with_capture = forwards(captured)
    assert writer.drain(120)
    written = (writer.counters["bytes"] - before) / (time.monotonic() - began)
    stop.set()
    reader.join()
    return {
        "forward_seconds": plain,
        "captured_forward_seconds": with_capture,
        "bytes_per_second": round(written),
        "forwards": count,
        "ring_waits": writer.counters["ring_waits"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--directory", default=f"/dev/shm/hs-selfcheck-{os.getpid()}")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--rows", type=int, default=16384)
    parser.add_argument("--layers", type=int, default=15, help="so many states and the final one")
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--forwards", type=int, default=24)
    options = parser.parse_args()
    names = tuple(f"layer_{layer}" for layer in range(options.layers)) + (dumpfile.POST_NORM,)
    layout = Layout(names, options.width, "bfloat16")
    directory = DumpDirectory(options.directory)
    budget = plan({}, layout, options.rows, directory.free_bytes(), options.directory)
    began = time.monotonic()
    writer = Writer(directory, budget, layout, {}, options.device)
    figures = {"device": options.device, "open_seconds": round(time.monotonic() - began, 2)}
    figures.update(device_bytes=writer.device_bytes, ring_bytes=budget.ring)
    try:
        model = Model(options.device, options.width, options.layers)
        with torch.inference_mode():
            figures["dumps_compared"] = check(writer, model, options.directory, options.forwards, options.rows)
            figures.update(rate(writer, model, options.directory, options.rows, options.seconds))
        figures["drops"] = writer.counters["drops"]
        writer.close()
    finally:
        shutil.rmtree(options.directory, ignore_errors=True)
    print(json.dumps(figures))
    return 0 if figures["drops"] == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
