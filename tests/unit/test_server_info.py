# SPDX-License-Identifier: GPL-3.0-or-later
"""What the role is told of a server's files: by them it sees that a capture server runs with what lay there before."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import hs_patcher
from ansible_collections.hidden_state.bridge.plugins.modules import sglang_info


def test_any_other_file_of_the_runtime_shows_in_the_one_that_a_process_is_compared_with(model: Path, originals: str) -> None:
    hs_patcher.apply(model, originals=originals)
    marker = model.parents[1] / sglang_info.RUNTIME_MARK
    assert marker.read_bytes()
    earlier = os.stat(marker).st_mtime_ns
    for path in (*marker.parent.iterdir(), model):
        os.utime(path, (1000, 1000))
    assert not hs_patcher.apply(model, originals=originals).changed and os.stat(marker).st_mtime == 1000
    writer = marker.with_name("writer.py")
    writer.write_bytes(writer.read_bytes() + b"\n")
    os.utime(writer, (1000, 1000))
    assert hs_patcher.apply(model, originals=originals).changed
    assert os.stat(marker).st_mtime_ns >= earlier and os.stat(model).st_mtime == 1000


def test_the_marks_are_those_of_the_patcher() -> None:
    assert os.path.join(hs_patcher.RUNTIME_PACKAGE, hs_patcher.MARKER_FILE) == sglang_info.RUNTIME_MARK
    assert sglang_info.PATCH_MARK == hs_patcher._BEGIN


@pytest.mark.parametrize("name", ["deepseek_v2.py", "glm4_moe.py"])
def test_a_patch_shows_whatever_the_model(model: Path, originals: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    model = model.rename(model.with_name(name))
    place = {"release": "0.5.20", "python": "", "package": "", "models": str(model.parent), "model": "", "arguments": []}
    monkeypatch.setattr(sglang_info.place_of, "own_place", lambda _params: place)
    params = {"manager": "supervisor", "name": "sglang", "host": "127.0.0.1", "port": 1, "state_dir": str(tmp_path), "user": "root"}
    params.update(api_key="", visible_gpus="", arguments=[], extra_arguments=[])
    assert not sglang_info.gather(params)["patched"]
    hs_patcher.apply(model, originals=originals)
    assert sglang_info.gather(params)["patched"]
    hs_patcher.revert(model, originals=originals)
    assert not sglang_info.gather(params)["patched"]
