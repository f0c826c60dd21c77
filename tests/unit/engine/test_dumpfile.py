# SPDX-License-Identifier: Apache-2.0
"""The dump format: written and read with the engine's torch and safetensors."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import dumping
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
    path = dumping.write_dump(tmp_path, "hsb-a-0-0", 16, written, METADATA)
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
        ({"tokens": 0}, "for 0 token ids"),
        ({"states": ["layer_1", "layer_x"]}, "unknown tensor 'layer_x'"),
        ({"states": ["layer_1", "input_ids"]}, "unknown tensor 'input_ids'"),
        ({"dtype": "float64"}, "dtype float64"),
        ({"rid": "../x"}, "cannot name a dump"),
        ({"start": -1}, "cannot start at token -1"),
    ],
)
def test_what_the_format_does_not_allow(change: dict[str, Any], reason: str) -> None:
    header = {"rid": "hsb-a", "start": 0, "tokens": 5, "states": ["layer_1"], "width": 4, "dtype": "bfloat16", "metadata": METADATA}
    assert len(dumpfile.encode_header(**header)) % 8 == 0
    with pytest.raises(dumpfile.DumpError, match=reason):
        dumpfile.encode_header(**{**header, **change})


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
def test_tensors_that_the_format_does_not_allow_are_not_read(tmp_path: Path, change: dict[str, torch.Tensor], reason: str) -> None:
    from safetensors import safe_open
    from safetensors.torch import save_file

    path = dumping.write_dump(tmp_path, "hsb-a", 0, tensors(), METADATA)
    with safe_open(path, framework="pt") as opened:
        metadata = opened.metadata()
    save_file({**tensors(), **change}, path, metadata=metadata)
    with pytest.raises(dumpfile.DumpError, match=reason):
        dumpfile.read_dump(path)


def test_parts_of_any_size_are_written_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda descriptor, parts, offset: write(descriptor, [bytes(parts[0][:3]), *parts[1:1]], offset))
    parts = [b"", b"abcd", memoryview(b"efghijk"), b"", *(b"%03d" % i for i in range(600))]
    descriptor = os.open(tmp_path / "x", os.O_CREAT | os.O_RDWR)
    assert dumpfile.write_all(descriptor, parts) == len(b"".join(parts))
    os.close(descriptor)
    assert (tmp_path / "x").read_bytes() == b"".join(parts)


def test_a_torn_file_is_refused(tmp_path: Path) -> None:
    path = dumping.write_dump(tmp_path, "hsb-a", 0, tensors(), METADATA)
    whole = path.read_bytes()
    for size in (0, 4, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(dumpfile.DumpError, match="not a whole safetensors file"):
            dumpfile.read_dump(path)


def test_a_file_under_another_name_is_refused(tmp_path: Path) -> None:
    path = dumping.write_dump(tmp_path, "hsb-a", 0, tensors(), METADATA)
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

    path = dumping.write_dump(tmp_path, "hsb-a", 0, tensors(), METADATA)
    with safe_open(path, framework="pt") as opened:
        metadata = opened.metadata()
    save_file(tensors(), path, metadata={**metadata, **change})
    with pytest.raises(dumpfile.DumpError, match=reason):
        dumpfile.read_dump(path)


@pytest.mark.parametrize("rid", ["hsb-a-0-0", "team.a-0-0", "a.0.safetensors", "a.1", "a.fp0"])
def test_the_rid_of_each_name_is_told_whatever_dots_it_has(rid: str) -> None:
    names = (dumpfile.dump_name(rid, 16), dumpfile.fingerprint_name(rid, 0, 3), dumpfile.error_name(rid))
    assert [dumpfile.rid_of(name) for name in names] == [rid] * 3
    assert [dumpfile.rid_of(name) for name in (f"{names[0]}.tmp-1", f"{rid}.json", "capture.json")] == [""] * 3
