# SPDX-License-Identifier: GPL-3.0-or-later
"""The collection's own payload under this interpreter, as the benches call it: pack, canary, extract, verify."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from serving import ROOT

_PATHS = (ROOT / "roles" / "_bridge" / "files", ROOT / "plugins" / "module_utils")


def call(*arguments: str | Path, **named: Any) -> subprocess.CompletedProcess:
    """One command of the payload; `named` as for subprocess.run."""
    path = os.pathsep.join([*map(str, _PATHS), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "hidden_state_bridge", *arguments]
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, **{"check": True, **named})


def pack(records: list[list[int]], directory: Path) -> tuple[str, str]:
    """A packed data set of the records; its directory and hash."""
    source = directory / "source.jsonl"
    with source.open("w") as stream:
        for record in records:
            stream.write(json.dumps({"input_ids": record, "loss_mask": [1] * len(record)}) + "\n")
    config = {"sources": [{"name": "bench", "path": str(source)}], "max_length": max(map(len, records))}
    arguments = ("pack", "--config", "-", "--out-dir", directory / "packed")
    done = call(*arguments, input=json.dumps(config), stdout=subprocess.PIPE, text=True)
    packed = json.loads(done.stdout.splitlines()[-1])
    return packed["path"], packed["meta"]["sha256"]


def configuration(packed: tuple[str, str], records: int, port: int, dumps: Path, output: Path, **more: Any) -> dict[str, Any]:
    """The extractor's configuration for all records of a packed set; `more` holds layers, hidden_size, dtype and the rest."""
    import hs_manifest

    identity = {"dataset": packed[1], "weights": "bench", "layers": more["layers"], "final": "post_norm", "dtype": more["dtype"]}
    return {
        "schema": 1,
        "run": hs_manifest.run_of(identity),
        "identity": identity,
        "dataset": packed[0],
        "share": f"0-{records - 1}",
        "url": f"http://127.0.0.1:{port}",
        "dump_dir": str(dumps),
        "output_dir": str(output),
        "format": "specforge",
        "final": "post_norm",
        **more,
    }
