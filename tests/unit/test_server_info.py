# SPDX-License-Identifier: GPL-3.0-or-later
"""What the role is told of a server's files: by them it sees that a capture server runs with what lay there before."""

from __future__ import annotations

import os
from pathlib import Path

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
