# SPDX-License-Identifier: Apache-2.0
"""The dump format: written and read with the engine's torch and safetensors."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import torch

from hs_capture import dumpfile

METADATA = {"layers": "1,3", "final": "post_norm", "sglang_version": "0.5.20", "patch_version": "1", "family": "D", "tp_size": "1"}


def tensors(dtype: torch.dtype = torch.bfloat16, rows: int = 5) -> dict[str, torch.Tensor]:
    return {
        "input_ids": torch.arange(rows),
        **{name: torch.randn(rows, 4).to(dtype) for name in ("layer_1", "layer_3", "final_post_norm")},
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_round_trip(tmp_path: Path, dtype: torch.dtype) -> None:
    written = tensors(dtype)
    path = dumpfile.write_dump(tmp_path, "hsb-a-0-0", 16, written, METADATA)
    assert path == tmp_path / "hsb-a-0-0.16.safetensors"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]
    metadata, read = dumpfile.read_dump(path)
    assert metadata == {
        **METADATA,
        "format": "hidden_state_bridge.dump/1",
        "rid": "hsb-a-0-0",
        "start": "16",
        "tokens": "5",
        "dtype": str(dtype).partition(".")[2],
    }
    assert read.keys() == written.keys()
    for name, tensor in written.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"input_ids": torch.arange(5, dtype=torch.int32)}, r"input_ids has to be \[t\] int64"),
        ({"input_ids": torch.arange(4)}, "for 4 token ids"),
        ({"layer_1": torch.zeros(4, 4, dtype=torch.bfloat16)}, "unlike shape or dtype"),
        ({"layer_1": torch.zeros(5, 4)}, "unlike shape or dtype"),
        ({"layer_x": torch.zeros(5, 4, dtype=torch.bfloat16)}, "unknown tensor 'layer_x'"),
        ({name: torch.zeros(5, 4, dtype=torch.float64) for name in ("layer_1", "layer_3", "final_post_norm")}, "dtype float64"),
    ],
)
def test_tensors_that_the_format_does_not_allow(tmp_path: Path, change: dict[str, torch.Tensor], reason: str) -> None:
    with pytest.raises(dumpfile.DumpError, match=reason):
        dumpfile.write_dump(tmp_path, "hsb-a", 0, {**tensors(), **change}, METADATA)
    assert list(tmp_path.iterdir()) == []


def test_an_empty_piece_is_refused(tmp_path: Path) -> None:
    with pytest.raises(dumpfile.DumpError, match="for 0 token ids"):
        dumpfile.write_dump(tmp_path, "hsb-a", 0, tensors(rows=0), METADATA)


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        dumpfile.write_dump(tmp_path, "hsb-a", 0, tensors(), METADATA)
    assert list(tmp_path.iterdir()) == []


def test_a_torn_file_is_refused(tmp_path: Path) -> None:
    path = dumpfile.write_dump(tmp_path, "hsb-a", 0, tensors(), METADATA)
    whole = path.read_bytes()
    for size in (0, 4, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(dumpfile.DumpError, match="not a whole safetensors file"):
            dumpfile.read_dump(path)


def test_a_file_under_another_name_is_refused(tmp_path: Path) -> None:
    path = dumpfile.write_dump(tmp_path, "hsb-a", 0, tensors(), METADATA)
    other = path.rename(tmp_path / "hsb-b.0.safetensors")
    with pytest.raises(dumpfile.DumpError, match=r"metadata name hsb-a\.0"):
        dumpfile.read_dump(other)
    with pytest.raises(FileNotFoundError, match="no such dump"):
        dumpfile.read_dump(path)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"format": "other/1"}, "format 'other/1'"),
        ({"start": "x"}, "without a usable rid"),
        ({"tokens": "6"}, "metadata say 6 tokens"),
        ({"dtype": "float32"}, "of float32"),
    ],
)
def test_metadata_that_disagree_are_refused(tmp_path: Path, change: dict[str, str], reason: str) -> None:
    from safetensors import safe_open
    from safetensors.torch import save_file

    path = dumpfile.write_dump(tmp_path, "hsb-a", 0, tensors(), METADATA)
    with safe_open(path, framework="pt") as opened:
        metadata = opened.metadata()
    save_file(tensors(), path, metadata={**metadata, **change})
    with pytest.raises(dumpfile.DumpError, match=reason):
        dumpfile.read_dump(path)
