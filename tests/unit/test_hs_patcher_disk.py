# SPDX-License-Identifier: Apache-2.0
"""Where the model file lies: links, attributes, bytecode, file systems without room or right, and others at work."""

from __future__ import annotations

import fcntl
import os
import py_compile
import re
import shutil
import stat
import struct
import subprocess
import threading
import time
from pathlib import Path

import pytest
from forked import forked, imports
from model_source import SOURCE, program, refused

import hs_patcher

DATA = SOURCE.encode()


# --- links ------------------------------------------------------------------------------------


@pytest.fixture
def farm(model: Path, tmp_path: Path) -> Path:
    """The model in an environment made of links into a cache, as uv --link-mode symlink makes it."""
    place = tmp_path / "venv" / "site-packages" / "sglang"
    for path in sorted(model.parents[2].rglob("*")):
        twin = place / path.relative_to(model.parents[2])
        if path.is_dir():
            twin.mkdir(parents=True, exist_ok=True)
        else:
            twin.parent.mkdir(parents=True, exist_ok=True)
            twin.symlink_to(path)
    return place / "srt" / "models" / model.name


def test_a_farm_of_links_is_patched_in_the_cache_with_the_runtime_in_the_environment(model: Path, farm: Path, originals: str) -> None:
    checked = program("check", "--originals", originals, farm)
    assert f"file     {model}\nlink     {farm}\n" in checked.stdout
    result = hs_patcher.apply(farm, originals=originals)
    assert (result.model_file, result.link, result.sglang_version) == (str(model), str(farm), "0.5.20")
    assert farm.is_symlink()
    assert model.read_bytes() == result.after
    assert result.runtime_dir == str(farm.parents[1] / "hs_capture")
    assert not (model.parents[1] / "hs_capture").exists()
    assert imports(farm) == ""
    assert not hs_patcher.apply(farm, originals=originals).changed
    assert hs_patcher.revert(farm, originals=originals).changed
    assert (model.read_bytes(), farm.is_symlink()) == (DATA, True)
    assert not os.path.lexists(result.runtime_dir)


@pytest.mark.parametrize("linked", ["sglang", "srt", "models", "file of another name"])
def test_a_link_on_the_way_is_resolved_and_shown(model: Path, tmp_path: Path, originals: str, linked: str) -> None:
    tree = tmp_path / "elsewhere"
    if linked == "sglang":
        tree.symlink_to(model.parents[3])
        asked = tree / "sglang" / "srt" / "models" / model.name
        runtime = model.parents[1]
    elif linked == "file of another name":
        tree.mkdir()
        asked = tree / "served_model.py"
        asked.symlink_to(model)
        runtime = model.parents[1]
    else:
        below = Path("sglang/srt") if linked == "models" else Path("sglang")
        (tree / below).mkdir(parents=True)
        (tree / below / linked).symlink_to(model.parent if linked == "models" else model.parents[1])
        asked = tree / "sglang" / "srt" / "models" / model.name
        # Python imports sglang.srt.hs_capture from where it finds sglang.srt.
        runtime = tree / "sglang" / "srt" if linked == "models" else model.parents[1]
    result = hs_patcher.apply(asked, originals=originals)
    assert (result.model_file, result.link) == (str(model), str(asked))
    assert (runtime / "hs_capture" / "capture.py").is_file()
    if linked != "file of another name":
        assert imports(asked) == ""
    hs_patcher.revert(asked, originals=originals)
    assert model.read_bytes() == DATA
    assert not os.path.lexists(runtime / "hs_capture")


def test_a_path_through_a_link_and_back_is_what_the_system_takes_it_for(model: Path, tmp_path: Path, originals: str) -> None:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "jump").symlink_to(model.parent)
    result = hs_patcher.apply(f"{tmp_path}/jump/../models/{model.name}", originals=originals)
    assert (result.model_file, result.link) == (str(model), None)


# --- another at work ----------------------------------------------------------------------------


def upgraded(model: Path) -> None:
    model.write_bytes(DATA + b"# upgraded\n")


def same_bytes(model: Path) -> None:
    """What a package manager does that installs the same release again."""
    copy = model.with_name("copy")
    copy.write_bytes(DATA)
    copy.replace(model)


def linked(model: Path) -> None:
    model.rename(model.with_name("moved.py"))
    model.symlink_to("moved.py")


def gone(model: Path) -> None:
    model.unlink()


def a_directory(model: Path) -> None:
    model.unlink()
    model.mkdir()


@pytest.mark.parametrize("change", [upgraded, same_bytes, linked, gone, a_directory])
def test_a_file_that_changes_meanwhile_is_refused(model: Path, originals: str, monkeypatch: pytest.MonkeyPatch, change) -> None:
    keep = hs_patcher._keep

    def meddle(kept: str, original: bytes) -> None:
        keep(kept, original)
        change(model)

    monkeypatch.setattr(hs_patcher, "_keep", meddle)
    with pytest.raises(hs_patcher.Refused, match="changed while it was patched; run the patcher again"):
        hs_patcher.apply(model, originals=originals)
    if model.is_file():
        assert model.read_bytes().startswith(DATA)
    assert not [path for path in model.parents[1].iterdir() if path != model.parent]


@pytest.mark.parametrize("directories", [True, False], ids=["locks on directories", "locks on files alone, as NFS has them"])
def test_a_second_patcher_waits_for_the_first(model: Path, originals: str, monkeypatch: pytest.MonkeyPatch, directories: bool) -> None:
    flock, keep = fcntl.flock, hs_patcher._keep
    inside, most = [0], [0]

    def slow(kept: str, original: bytes) -> None:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        time.sleep(0.3)
        keep(kept, original)
        inside[0] -= 1

    def lock(handle: int, operation: int) -> None:
        if not directories and stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(9, "Bad file descriptor")
        flock(handle, operation)

    monkeypatch.setattr(hs_patcher, "_keep", slow)
    monkeypatch.setattr(fcntl, "flock", lock)
    changed = []
    patchers = [threading.Thread(target=lambda: changed.append(hs_patcher.apply(model, originals=originals).changed)) for _ in range(2)]
    for patcher in patchers:
        patcher.start()
    for patcher in patchers:
        patcher.join()
    assert most == [1]
    assert sorted(changed) == [False, True]


def test_a_lock_of_a_file_that_was_replaced_meanwhile_is_none(model: Path, originals: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lock, locked = hs_patcher._lock, []

    def slow(path: str, flags: int) -> int:
        if path != str(model):
            raise OSError(9, "Bad file descriptor")
        locked.append(lock(path, flags))
        if len(locked) == 1:
            same_bytes(model)
        return locked[-1]

    monkeypatch.setattr(hs_patcher, "_lock", slow)
    assert hs_patcher.apply(model, originals=originals).changed
    assert len(locked) == 2


def test_a_patcher_that_never_ends_is_named(model: Path, originals: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hs_patcher, "_PATIENCE_SECONDS", 0.2)
    handle = os.open(model.parents[1], os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    assert re.search("another patcher is at work on .*srt; wait until it has ended", refused(model, originals))
    assert hs_patcher.apply(model, originals=originals, dry_run=True).changed
    os.close(handle)
    assert hs_patcher.apply(model, originals=originals).changed


# --- what stays with the file --------------------------------------------------------------------


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away or label it")
def test_owner_mode_context_and_attributes_stay(model: Path, originals: str) -> None:
    os.chown(model.parent, 1234, 2345)
    os.chown(model, 4321, 5432)
    model.chmod(0o640)
    kept = {"security.selinux": b"system_u:object_r:lib_t:s0\0", "user.origin": b"wheel"}
    try:
        for name, value in kept.items():
            os.setxattr(model, name, value)
        os.setxattr(model, "security.ima", b"signature of the original")
    except OSError as error:
        pytest.skip(f"the file system of the test takes no such attribute: {error}")
    for action in (hs_patcher.apply, hs_patcher.revert):
        assert action(model, originals=originals).changed
        found = model.stat()
        assert (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (4321, 5432, 0o640)
        # A signature of other bytes would make the kernel refuse the file.
        assert {name: os.getxattr(model, name) for name in os.listxattr(model)} == kept
    hs_patcher.apply(model, originals=originals)
    runtime = model.parents[1] / "hs_capture"
    assert {(path.stat().st_uid, path.stat().st_gid) for path in [runtime, *runtime.iterdir()]} == {(1234, 2345)}
    assert runtime.lstat().st_uid == 1234


def test_an_access_list_of_the_directory_does_not_open_the_file(model: Path, originals: str) -> None:
    model.chmod(0o644)
    entries = [(0x01, 7, -1), (0x02, 7, 1234), (0x04, 5, -1), (0x10, 7, -1), (0x20, 5, -1)]
    value = struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *entry) for entry in entries)
    try:
        os.setxattr(model.parent, "system.posix_acl_default", value)
    except OSError as error:
        pytest.skip(f"the file system of the test has no access lists: {error}")
    hs_patcher.apply(model, originals=originals)
    assert os.listxattr(model) == []
    assert stat.S_IMODE(model.stat().st_mode) == 0o644


# --- bytecode ------------------------------------------------------------------------------------


def loaded(model: Path, expression: str) -> str:
    """What `expression` is in the model as Python imports it, bytecode and all."""
    code = f"import sglang.srt.models.{model.stem} as m; print({expression})"
    command = [shutil.which("python3") or "python3", "-c", code]
    environment = {"PYTHONPATH": str(model.parents[3]), "PATH": os.environ["PATH"]}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize("mode", ["UNCHECKED_HASH", "CHECKED_HASH", "TIMESTAMP"])
def test_bytecode_of_another_state_never_wins(model: Path, originals: str, mode: str) -> None:
    cache = Path(forked(lambda: loaded(model, "m.__cached__"))[1])
    for action, patched in ((hs_patcher.apply, "True"), (hs_patcher.revert, "False")):
        py_compile.compile(str(model), str(cache), doraise=True, invalidation_mode=py_compile.PycInvalidationMode[mode])
        action(model, originals=originals)
        assert loaded(model, "hasattr(m, '_hs_open')") == patched
    unrelated = cache.with_name("other.cpython-311.pyc")
    unrelated.touch()
    hs_patcher.apply(model, originals=originals)
    assert unrelated.exists()


def test_two_states_of_one_size_differ_in_their_second(model: Path, originals: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytecode may lie where no patcher finds it (PYTHONPYCACHEPREFIX)."""
    ahead = time.time_ns() + 5_000_000_000
    with monkeypatch.context() as past:
        past.setattr(hs_patcher, "PATCH_VERSION", "0")
        hs_patcher.apply(model, originals=originals)
    os.utime(model, ns=(ahead, ahead))
    before = model.stat()
    hs_patcher.apply(model, originals=originals)
    after = model.stat()
    assert (after.st_size, int(after.st_mtime) > int(before.st_mtime)) == (before.st_size, True)


# --- what lies where the runtime belongs ------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("file", "is not a directory; move it away"),
        ("link", "is a link to models, so it is not the capture runtime; move it away"),
        ("link to nowhere", "is a link to nowhere, so it is not the capture runtime"),
        ("directory", r"lacks \.hidden_state_bridge, so it is not the capture runtime"),
        ("directory with another in it", "holds data, which no runtime has; move it away"),
    ],
)
def test_what_is_not_the_runtime_stays(model: Path, originals: str, kind: str, reason: str) -> None:
    place = model.parents[1] / "hs_capture"
    if kind == "file":
        place.touch()
    elif kind.startswith("link"):
        place.symlink_to("models" if kind == "link" else "nowhere")
    else:
        place.mkdir()
        (place / "mine.py").touch()
        if kind != "directory":
            (place / hs_patcher.MARKER_FILE).touch()
            (place / "data").mkdir()
    assert re.search(reason, refused(model, originals))
    with pytest.raises(hs_patcher.Refused, match=reason):
        hs_patcher.revert(model, originals=originals)
    assert os.path.lexists(place)


def test_a_link_of_ours_that_lost_its_directory_is_put_right(model: Path, originals: str) -> None:
    hs_patcher.apply(model, originals=originals)
    link = model.parents[1] / "hs_capture"
    shutil.rmtree(link.resolve())
    assert hs_patcher.apply(model, originals=originals).changed
    assert imports(model) == ""
    shutil.rmtree(link.resolve())
    hs_patcher.revert(model, originals=originals)
    assert not os.path.lexists(link)


def test_a_pipe_among_the_models_holds_nobody_up(model: Path, originals: str) -> None:
    os.mkfifo(model.with_name("pipe.py"))
    model.with_name("link.py").symlink_to("nowhere.py")
    hs_patcher.apply(model, originals=originals)
    assert hs_patcher.revert(model, originals=originals).runtime_changed
