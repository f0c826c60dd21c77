# SPDX-License-Identifier: GPL-3.0-or-later
"""Writes eight random sources, 8 M tokens in all, so that the packed set has several blocks: make_sources.py DIRECTORY."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import orjson

NAMES = ("d1_topics", "d2_builtins", "d3_types", "d4_modules", "d5_functions", "d6_iteration", "d7_code", "d8_mathematics")


def main() -> None:
    directory = Path(sys.argv[1])
    directory.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(1)
    for name in NAMES:
        with open(directory / f"{name}.jsonl", "wb") as stream:
            for _record in range(1000):
                row = {"input_ids": rng.integers(0, 1000, 1000), "loss_mask": np.ones(1000, dtype=np.int64)}
                stream.write(orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n")


if __name__ == "__main__":
    main()
