# SPDX-License-Identifier: Apache-2.0
"""The patcher on the model file of the engine, as released."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import hs_patcher


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the released file in a tree of its own; a patched engine gives its original."""
    found = hs_patcher.find_model_file(sys.executable)
    original = hs_patcher.revert(found, dry_run=True).after
    package = tmp_path / "sglang"
    copy = package / "srt" / "models" / "deepseek_v2.py"
    copy.parent.mkdir(parents=True)
    copy.write_bytes(original)
    (package / "_version.py").write_text(f"__version__ = {hs_patcher.release_of(found)!r}\n")
    return copy


def test_the_released_file_is_patched_and_restored(model: Path, tmp_path: Path) -> None:
    before = model.read_bytes()
    result = hs_patcher.apply(model, originals=str(tmp_path / "originals"))
    assert (result.family, result.sglang_version) == ("D", "0.5.20")
    assert [change.name for change in result.changes] == list(hs_patcher.CHANGES)
    patched = model.read_bytes()
    compile(patched, str(model), "exec")
    inserted = [line for line in result.diff().splitlines() if line.startswith("+") and not line.startswith("+++")]
    assert len(patched.splitlines()) - len(before.splitlines()) == len(inserted)
    for word in ("capture_aux_hidden_states", "layers_to_capture ="):
        assert not any(word in line for line in inserted)
    hs_patcher.revert(model, originals=str(tmp_path / "originals"))
    assert model.read_bytes() == before


@pytest.mark.parametrize("tenth", range(10))
def test_the_released_file_cut_anywhere_is_refused(model: Path, tmp_path: Path, tenth: int) -> None:
    lines = model.read_bytes().splitlines(keepends=True)
    cut = b"".join(lines[: len(lines) * tenth // 10 + 1])
    model.write_bytes(cut)
    with pytest.raises(hs_patcher.Refused, match=r"deepseek_v2\.py.*(reinstall SGLang|install a release)"):
        hs_patcher.apply(model, originals=str(tmp_path / "originals"))
    assert model.read_bytes() == cut
    assert list(model.parents[1].iterdir()) == [model.parent]
