# SPDX-License-Identifier: GPL-3.0-or-later
"""Whose files in /dev/shm can vanish, and how much memory a control group leaves."""

from __future__ import annotations

import os

import pytest

from ansible_collections.hidden_state.bridge.plugins.module_utils import host_limits as limits
from ansible_collections.hidden_state.bridge.plugins.module_utils import host_processes as hp


@pytest.fixture
def logind(monkeypatch, tmp_path):
    monkeypatch.setattr(limits, "LINGER", str(tmp_path))
    monkeypatch.setattr(limits, "LOGIN_DEFS", str(tmp_path / "login.defs"))
    answers = {"says": (0, "b true\n", "")}
    monkeypatch.setattr(limits, "run", lambda *_args, **_more: answers["says"])
    return answers


def test_files_of_a_user_who_logs_out(logind, tmp_path):
    assert "alice is no system user and does not linger" in limits.ipc_risk(1000, "alice")
    assert limits.ipc_risk(999, "sglang") == limits.ipc_risk(0, "root") == ""
    (tmp_path / "alice").touch()
    assert limits.ipc_risk(1000, "alice") == ""
    (tmp_path / "login.defs").write_text("# SYS_UID_MAX 5\nSYS_UID_MAX\t2000\n")
    assert limits.ipc_risk(1000, "bob") == ""


@pytest.mark.parametrize("says", [(0, "b false\n", ""), (1, "", "no bus")])
def test_nothing_vanishes_where_it_is_off(logind, says):
    logind["says"] = says
    assert limits.ipc_risk(1000, "alice") == ""


def test_the_user_of_a_process():
    assert limits.user_of(os.getpid())["uid"] == os.getuid()


def group(root, path, **files):
    directory = root / path.lstrip("/")
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (directory / name.replace("__", ".")).write_text(text)


def test_the_tightest_group_counts(monkeypatch, tmp_path):
    monkeypatch.setattr(hp, "cgroups", lambda _pid: ["/a.slice/b.service"])
    group(tmp_path, "/a.slice", memory__max="500\n", memory__stat="anon 100\nfile 300\nshmem 20\n")
    group(tmp_path, "/a.slice/b.service", memory__max="max\n")
    assert limits.memory_of(1, str(tmp_path)) == {"limit": 500, "used": 120}


def test_the_older_hierarchy_and_no_limit(monkeypatch, tmp_path):
    monkeypatch.setattr(hp, "cgroups", lambda _pid: ["/b"])
    group(tmp_path, "/memory/b", memory__limit_in_bytes="700", memory__stat="total_rss 7\ntotal_shmem 3\n")
    assert limits.memory_of(1, str(tmp_path)) == {"limit": 700, "used": 10}
    group(tmp_path, "/memory/b", memory__limit_in_bytes=str((1 << 63) - 4096))
    assert limits.memory_of(1, str(tmp_path)) is None
