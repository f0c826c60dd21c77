# SPDX-License-Identifier: GPL-3.0-or-later
"""Each thing that stands in the way of writing is named, with the variable and a remedy, and nothing is left behind."""

from __future__ import annotations

import errno
import os

import pytest

from ansible_collections.hidden_state.bridge.plugins.modules import path_probe


def entry(path, needed=0, variable="extraction_output_dir"):
    return {"path": str(path), "variable": variable, "bytes": needed}


def test_a_directory_to_be_made_is_probed_at_its_nearest_parent(tmp_path):
    found, problems = path_probe.probe(entry(tmp_path / "a" / "b"))
    assert problems == [] and found["existing"] == str(tmp_path) and found["free"] > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda path: path.symlink_to("/tmp"), "is a symbolic link"),
        (lambda path: path.symlink_to("/nosuch"), "is a symbolic link"),
        (lambda path: path.write_text("x"), "is not a directory"),
    ],
)
def test_what_is_no_directory_is_refused(tmp_path, make, what):
    path = tmp_path / "out"
    make(path)
    _found, problems = path_probe.probe(entry(path))
    assert len(problems) == 1 and what in problems[0]["what"]
    assert "extraction_output_dir" in problems[0]["what"] and problems[0]["remedy"]


def test_a_relative_path_is_refused():
    assert "absolute" in path_probe.probe(entry("out"))[1][0]["what"]


def test_a_directory_that_cannot_be_written_is_refused():
    problem = path_probe.probe(entry("/proc/hsb"))[1][0]
    assert "cannot write to /proc" in problem["what"]


def test_needs_on_one_file_system_are_added_up(tmp_path):
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    entries = [entry(tmp_path, free * 2 // 3), entry(tmp_path / "dumps", free * 2 // 3, "extraction_dump_dir")]
    found = [path_probe.probe(item)[0] for item in entries]
    (problem,) = path_probe.shortages(entries, found)
    assert "extraction_output_dir" in problem["what"] and "extraction_dump_dir" in problem["what"]
    assert path_probe.shortages(entries[:1], found[:1]) == []


def test_what_is_removed_before_anything_is_written_counts_as_free(tmp_path, monkeypatch):
    for name in ("hsb-a-1.0.safetensors", "other.0.safetensors"):
        (tmp_path / name).write_bytes(b"x" * (1 << 20))
    (tmp_path / "hsb-directory").mkdir()
    (tmp_path / "hsb-link").symlink_to(tmp_path / "other.0.safetensors")
    monkeypatch.setattr(path_probe, "free_bytes", lambda _path: 0)
    dumps = dict(entry(tmp_path, 1 << 20, "extraction_dump_dir"), removable="hsb-")
    found, problems = path_probe.probe(dumps)
    assert problems == [] and found["removable"] >= 1 << 20 and found["removable"] < 2 << 20
    assert path_probe.shortages([dumps], [found]) == []
    # Whatever else is to be written to that file system is counted first.
    entries = [entry(tmp_path, 1 << 20), dumps]
    (problem,) = path_probe.shortages(entries, [path_probe.probe(item)[0] for item in entries])
    assert "0.0 GB needed" in problem["what"] and problem["remedy"].startswith("free 0.0 GB there")
    # Even where they have left no room for the probe.
    monkeypatch.setattr(path_probe, "write_probe", lambda _path: OSError(errno.ENOSPC, "No space left on device"))
    assert path_probe.probe(dumps)[1] == [] and path_probe.probe(entry(tmp_path))[1] != []
    assert path_probe.removable_bytes(str(tmp_path / "not there"), "hsb-") == path_probe.removable_bytes(str(tmp_path), "") == 0


def test_a_full_file_system_asks_for_room(tmp_path, monkeypatch):
    def full(_handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(path_probe.os, "fsync", full)
    problem = path_probe.probe(entry(tmp_path))[1][0]
    assert "No space left on device" in problem["what"] and problem["remedy"].startswith("free space there")


def test_a_user_without_a_name_is_told_by_number(tmp_path, monkeypatch):
    def denied(_handle):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(path_probe.os, "fsync", denied)
    monkeypatch.setattr(path_probe.os, "geteuid", lambda: 4_000_000)
    assert path_probe.probe(entry(tmp_path))[1][0]["remedy"].startswith("make it writable for user 4000000, or set extraction_output_dir")


MOUNTS = """\
22 1 254:0 / / rw,relatime - ext4 /dev/vda rw
30 22 0:44 / /data rw - nfs4 filer:/export/states rw,vers=4.2
31 22 0:45 / /scratch rw shared:3 - lustre 10.0.0.1@tcp:/work rw
32 22 0:46 / /dev/shm rw - tmpfs tmpfs rw
33 22 0:47 / /mnt rw - fuse.sshfs me@filer:/x rw
"""


@pytest.mark.parametrize(
    ("device", "network"),
    [
        ((254, 0), ""),
        ((0, 44), "nfs4 filer:/export/states"),
        ((0, 45), "lustre 10.0.0.1@tcp:/work"),
        ((0, 46), ""),
        ((0, 47), "fuse.sshfs me@filer:/x"),
        ((9, 9), ""),
    ],
)
def test_a_file_system_that_other_hosts_see_is_told(device, network):
    assert path_probe.network_of(os.makedev(*device), MOUNTS) == network


def test_the_mounts_of_this_host_are_read(tmp_path):
    assert path_probe.mountinfo() and path_probe.probe(entry(tmp_path))[0]["network"] == ""
