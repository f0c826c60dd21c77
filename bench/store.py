#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-3.0-or-later
"""How fast the extractor's workers turn dumps into trainer-ready files: check, convert, hash, write, fsync.

    python bench/store.py [--workers N,N] [--gigabytes N] [--format specforge] [--directory /dev/shm]

Dumps of Kimi-K2.5's shape (three layers and the final state of 7,168 bf16 values) lie in the directory, and every worker stores one
after the other as in a run, by threads of one process. Beside it, as many processes copy the same bytes with hash and fsync, which is
the least that has to be done. The last line is one JSON object: `bytes_per_second` by number of workers, and `of_copy`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import serving
from serving import ROOT, say

sys.path += [str(ROOT / "roles" / "_bridge" / "files")]

LAYERS, WIDTH, TOKENS = (1, 29, 57), 7168, 2048
BYTES_A_TOKEN = (len(LAYERS) + 1) * WIDTH * 2
PIECE = 1 << 22


def make_dump(directory: Path, rid: str, records: Any) -> list[int]:
    """One dump of random states; returns its token ids."""
    import torch

    from hs_capture import dumpfile

    generator = torch.Generator().manual_seed(records)
    ids = torch.randint(0, 100_000, (TOKENS,), generator=generator)
    state = torch.randn((TOKENS, WIDTH), generator=generator).bfloat16()
    names = [*map(dumpfile.layer_name, LAYERS), dumpfile.POST_NORM]
    header = dumpfile.encode_header(rid, 0, TOKENS, names, WIDTH, "bfloat16", {})
    data = state.view(-1).view(torch.uint8).numpy().data
    with (directory / dumpfile.dump_name(rid, 0)).open("wb") as stream:
        dumpfile.write_all(stream.fileno(), [header, ids.numpy().tobytes(), *[data] * len(names)])
    return ids.tolist()


def copy(source: str, target: str) -> None:
    """Copy a file with hash and fsync."""
    digest = hashlib.sha256()
    with open(source, "rb") as reader, open(target, "wb") as writer:
        for piece in iter(lambda: reader.read(PIECE), b""):
            digest.update(piece)
            writer.write(piece)
        writer.flush()
        os.fsync(writer.fileno())


def measure(dumps: list[str], records: list[Any], target: Any, workers: int, directory: Path) -> dict[str, float]:
    """Bytes of states a second, stored and copied."""
    from hidden_state_bridge import store

    size = len(records) * TOKENS * BYTES_A_TOKEN
    with ThreadPoolExecutor(workers) as pool:
        began = time.monotonic()
        done = [pool.submit(store.store, target, record, f"hsb-{record.index}", [dump]) for record, dump in zip(records, dumps)]
        entries = [one.result() for one in done]
        stored = size / (time.monotonic() - began)
    for entry in entries:
        os.unlink(Path(target.output_dir) / entry["file"])
    with ProcessPoolExecutor(workers) as pool:
        list(pool.map(abs, range(workers)))
        began = time.monotonic()
        list(pool.map(copy, dumps, [str(directory / f"copy-{number}") for number in range(len(dumps))]))
        copied = size / (time.monotonic() - began)
    for number in range(len(dumps)):
        (directory / f"copy-{number}").unlink()
    return {"bytes_per_second": round(stored), "copy_bytes_per_second": round(copied), "of_copy": round(stored / copied, 3)}


def main() -> int:
    serving.use_engine_python()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", help="how many, or several numbers; default: the extractor's")
    parser.add_argument("--gigabytes", type=float, default=4.0, help="of states; the directory takes three times as much")
    parser.add_argument("--format", default="specforge")
    parser.add_argument("--directory", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--cores", help="run on these cores only, as taskset names them")
    options = parser.parse_args()
    if options.cores:
        subprocess.run(["taskset", "-a", "-p", "-c", options.cores, str(os.getpid())], check=True, stdout=subprocess.DEVNULL)
    import numpy
    import torch

    from hidden_state_bridge import dumps, store
    from hidden_state_bridge.packed import Record

    numbers = options.workers or str(store.default_workers())
    # As the extractor does.
    torch.set_num_threads(1)
    count = max(8, round(options.gigabytes * 1e9 / (TOKENS * BYTES_A_TOKEN)))
    figures: dict[str, Any] = {"cores": len(os.sched_getaffinity(0)), "gigabytes": round(count * TOKENS * BYTES_A_TOKEN / 1e9, 2)}
    with tempfile.TemporaryDirectory(dir=options.directory) as name:
        directory = Path(name)
        layout = dumps.Layout(LAYERS, "post_norm", WIDTH, "bfloat16")
        target = store.Target(str(directory / "out"), (options.format,), layout, store.Access())
        (directory / "out").mkdir()
        ids = [numpy.array(make_dump(directory, f"hsb-{number}", number), dtype=numpy.int32) for number in range(count)]
        records = [Record(number, one, numpy.ones(TOKENS, dtype=numpy.uint8), "bench", "bench.jsonl", 1) for number, one in enumerate(ids)]
        paths = sorted(map(str, directory.glob("hsb-*.safetensors")), key=lambda path: int(Path(path).name.split(".")[0][4:]))
        figures["workers"] = {}
        for workers in map(int, numbers.split(",")):
            figures["workers"][workers] = measure(paths, records, target, workers, directory)
            say(f"{workers} workers: {json.dumps(figures['workers'][workers])}")
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
