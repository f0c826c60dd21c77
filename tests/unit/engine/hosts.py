# SPDX-License-Identifier: Apache-2.0
"""Output directories of hosts, as the extractor leaves them: dumps from tensors at hand, through the code that checks and writes."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import TYPE_CHECKING

import dumping
import torch

import hs_manifest
from hidden_state_bridge import dumps, store
from hidden_state_bridge.pack import pack
from hidden_state_bridge.packed import PackedDataset
from hs_capture import dumpfile

if TYPE_CHECKING:  # the engine's interpreter, which makes these without a test, has no pytest
    import pytest

LAYERS = (1, 3, 4)
HIDDEN = 16
VOCAB = 96
DTYPE = torch.bfloat16


def make_dataset(directory: Path, records: int, longest: int = 40) -> PackedDataset:
    """A packed data set of random records with 1 to `longest` tokens."""
    generator = random.Random(7)
    with (directory / "A2_source.jsonl").open("w") as stream:
        for _ in range(records):
            ids = [min(generator.randrange(VOCAB), generator.randrange(VOCAB)) for _ in range(generator.randint(1, longest))]
            mask = [int(position >= len(ids) // 3) for position in range(len(ids))]
            stream.write(json.dumps({"input_ids": ids, "loss_mask": mask}) + "\n")
    sources = [{"name": "A2_source", "path": str(directory / "A2_source.jsonl")}]
    return PackedDataset(pack({"sources": sources, "seed": 1, "vocab_size": VOCAB}, str(directory / "packed"))["path"])


def state(record: int, name: str, tokens: int) -> torch.Tensor:
    """The state [tokens, HIDDEN] of a record by its tensor's name, always the same."""
    seed = 1000 * record + sum(name.encode())
    return torch.randn((tokens, HIDDEN), generator=torch.Generator().manual_seed(seed)).to(DTYPE)


def layer(record: int, number: int, tokens: int) -> torch.Tensor:
    return state(record, dumpfile.layer_name(number), tokens)


def aux(record: int, tokens: int) -> torch.Tensor:
    """The layers' states side by side: [tokens, layers * HIDDEN]."""
    return torch.cat([layer(record, number, tokens) for number in LAYERS], dim=-1)


def post_norm(record: int, tokens: int) -> torch.Tensor:
    return state(record, dumpfile.POST_NORM, tokens)


def pre_norm(record: int, tokens: int) -> torch.Tensor:
    return state(record, dumpfile.PRE_NORM, tokens)


def identity_of(dataset: PackedDataset, final: str = "both") -> dict:
    return {"dataset": dataset.meta["sha256"], "weights": "w", "layers": list(LAYERS), "final": final, "dtype": "bfloat16"}


def make_host(path: Path, dataset: PackedDataset, records: list[int], formats: tuple[str, ...], final: str = "both") -> Path:
    """Add these records to the output directory of a host; returns the directory."""
    identity = identity_of(dataset, final)
    hs_manifest.claim_directory(str(path), hs_manifest.run_of(identity))
    hs_manifest.claim_run(str(path), identity, {"host": path.name})
    layout = dumps.Layout(LAYERS, final, HIDDEN, "bfloat16")
    target = store.Target(str(path), formats, layout, store.Access())
    waiting = path.parent / f"{path.name}-dumps"
    waiting.mkdir(exist_ok=True)
    writer = hs_manifest.ManifestWriter(str(path))
    for number in records:
        record = dataset.record(number)
        tokens = len(record.input_ids)
        tensors = {dumpfile.INPUT_IDS: torch.tensor(record.input_ids, dtype=torch.int64)}
        tensors.update({name: state(number, name, tokens) for name in layout.names})
        metadata = {"layers": "1,3,4", "final": final, "sglang_version": "0.5.20", "patch_version": "1", "family": "D"}
        piece = dumping.write_dump(waiting, f"hsb-run-{number}-0", 0, tensors, metadata)
        writer.append([store.store(target, record, f"hsb-run-{number}-0", [str(piece)])])
        piece.unlink()
    writer.close()
    waiting.rmdir()
    return path


def collection(dest: Path, hosts: list[Path], dataset: PackedDataset | None, **changes: object) -> dict:
    """Collect from hosts whose directories this machine sees; returns what it said."""
    from hidden_state_bridge.collect import collect, read_request

    sources = [
        {
            "host": host.name,
            "manifest": str(host / hs_manifest.MANIFEST),
            "run": str(host / hs_manifest.RUN),
            "place": str(host),
            "root": str(host),
        }
        for host in hosts
    ]
    request = {"dest": str(dest), "mode": "link", "sources": sources, "dataset_dir": dataset and str(Path(dataset.path).parent)}
    return collect(read_request({**request, **changes}))


def die_at(monkeypatch: pytest.MonkeyPatch, stage: int) -> None:
    """Let the process die, as by KeyboardInterrupt, when a directory is made durable for the stage-th time."""
    calls, original = 0, hs_manifest.fsync_directory

    def die(path):
        nonlocal calls
        calls += 1
        if calls == stage:
            raise KeyboardInterrupt
        original(path)

    monkeypatch.setattr(hs_manifest, "fsync_directory", die)
