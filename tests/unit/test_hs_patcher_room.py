# SPDX-License-Identifier: Apache-2.0
"""File systems without room, without inodes or without leave to write: refused before anything is touched."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from model_source import SOURCE, install, refused

import hs_patcher

DATA = SOURCE.encode()


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator:
    """Mounts a file system in memory with the options given; skips, with the reason, where that is not allowed."""
    places = []

    def mount(options: str) -> Path:
        place = tmp_path / f"mount{len(places)}"
        place.mkdir()
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(place)], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"mount: {done.stderr.strip()}")
        places.append(place)
        return place

    yield mount
    for place in places:
        subprocess.run(["umount", str(place)], check=True)


def fill(place: Path, left: int) -> None:
    """Take all blocks of a file system but `left`."""
    room = os.statvfs(place)
    (place / "ballast").write_bytes(b"\0" * room.f_frsize * (room.f_bfree - left))


@pytest.mark.parametrize("left", [0, 1, 5])
def test_a_full_disk_is_seen_before_anything_is_touched(mounted, tmp_path: Path, originals: str, left: int) -> None:
    place = mounted("size=512k")
    model = install(place, SOURCE)
    fill(place, left)
    for dry_run in (True, False):
        message = refused(model, originals, dry_run=dry_run)
        assert re.search(r"has \d+ bytes free, and \d+ are needed; make room there \(df, df -i, quota\)", message)
    (place / "ballast").unlink()
    assert hs_patcher.apply(model, originals=originals).changed


def test_a_full_disk_for_the_originals_alone(mounted, model: Path) -> None:
    place = mounted("size=64k")
    fill(place, 0)
    assert str(place) in refused(model, str(place / "originals"))


def test_revert_needs_room_for_one_file(mounted, originals: str) -> None:
    place = mounted("size=512k")
    model = install(place, SOURCE)
    hs_patcher.apply(model, originals=originals)
    patched = model.read_bytes()
    fill(place, 0)
    with pytest.raises(hs_patcher.Refused, match="0 bytes free"):
        hs_patcher.revert(model, originals=originals)
    assert model.read_bytes() == patched
    (place / "ballast").unlink()
    fill(place, 2)
    hs_patcher.revert(model, originals=originals)
    assert model.read_bytes() == DATA


@pytest.mark.parametrize("left", [0, 1, 10])
def test_no_inodes_left_is_seen_before_anything_is_touched(mounted, originals: str, left: int) -> None:
    place = mounted("nr_inodes=40")
    model = install(place, SOURCE)
    for number in range(os.statvfs(place).f_ffree - left):
        (place / f"file{number}").touch()
    message = refused(model, originals)
    assert re.search(rf"has room for {left} more files, and \d+ are needed; make room there", message)


def test_a_read_only_file_system_is_seen_before_anything_is_touched(mounted, originals: str) -> None:
    place = mounted("size=1m")
    model = install(place, SOURCE)
    subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
    for dry_run in (True, False):
        message = refused(model, originals, dry_run=dry_run)
        assert "its file system is read-only: mount it for writing, or patch the image that it comes from" in message


def test_an_immutable_file_is_refused_and_everything_taken_back(model: Path, originals: str) -> None:
    done = subprocess.run(["chattr", "+i", str(model)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"chattr: {done.stderr.strip()}")
    try:
        with pytest.raises(hs_patcher.Refused, match=r"was not patched: .*deepseek_v2\.py: Operation not permitted; .*lsattr"):
            hs_patcher.apply(model, originals=originals)
        assert [path for path in model.parents[1].rglob("*") if path not in (model.parent, model)] == []
    finally:
        subprocess.run(["chattr", "-i", str(model)], check=True)
    assert model.read_bytes() == DATA


@pytest.mark.parametrize(
    ("room", "reason"),
    [
        ({"f_bavail": 0, "f_bfree": 0}, "0 bytes free"),
        ({"f_ffree": 0, "f_favail": 0}, "room for 0 more files"),
        ({"f_flag": os.ST_RDONLY}, "read-only"),
    ],
)
def test_what_the_file_system_says_is_heeded(
    model: Path, originals: str, monkeypatch: pytest.MonkeyPatch, room: dict[str, int], reason: str
) -> None:
    """The same as above where nothing can be mounted."""
    names = ("f_blocks", "f_bavail", "f_bfree", "f_frsize", "f_files", "f_ffree", "f_favail", "f_flag")
    found = os.statvfs(model)
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(**{**{name: getattr(found, name) for name in names}, **room}))
    assert reason in refused(model, originals)


def test_a_file_system_that_counts_nothing_is_no_full_one(model: Path, originals: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = os.statvfs(model)
    counts = ("f_blocks", "f_bavail", "f_bfree", "f_files", "f_ffree", "f_favail")
    none = SimpleNamespace(**dict.fromkeys(counts, 0), f_frsize=found.f_frsize, f_flag=found.f_flag)
    monkeypatch.setattr(os, "statvfs", lambda path: none)
    assert hs_patcher.apply(model, originals=originals).changed
