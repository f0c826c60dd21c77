# SPDX-License-Identifier: Apache-2.0
"""Directories below an output directory, with the modes that are asked for whatever became of their maker."""

from __future__ import annotations

import os

import pytest

import hs_manifest
from hidden_state_bridge import store


def test_a_directory_whose_maker_was_killed_is_put_right_once(tmp_path, monkeypatch):
    access, calls, chmod = store.Access(0o750, 0o640, os.getegid()), [], os.chmod

    def die(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(store.os, "chmod", die)
    monkeypatch.setattr(store, "_RIGHT", set())
    umask = os.umask(0o077)
    try:
        with pytest.raises(KeyboardInterrupt):
            store.make_directories(str(tmp_path), "specforge/rows_0-2000", access)
        monkeypatch.setattr(store.os, "chmod", chmod)
        monkeypatch.setattr(hs_manifest, "fsync_directory", calls.append)
        for _ in range(3):
            store.make_directories(str(tmp_path), "specforge/rows_0-2000", access)
    finally:
        os.umask(umask)
    assert [oct((tmp_path / path).stat().st_mode & 0o777) for path in ("specforge", "specforge/rows_0-2000")] == ["0o750"] * 2
    assert calls == [str(tmp_path), str(tmp_path / "specforge")]
