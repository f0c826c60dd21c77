# SPDX-License-Identifier: GPL-3.0-or-later
"""A packed set travels by blocks: only what differs, hash-checked, resumed after a kill, in both directions."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from packing import packed, write

import host_processes as hp
import hs_blocks
from hidden_state_bridge import packed as packed_module
from hidden_state_bridge.errors import Refusal
from hidden_state_bridge.packed import PackedDataset

ROOT = Path(__file__).resolve().parents[2]
BLOCK = 1 << 16


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A set of 2 MB in blocks of 64 KiB."""
    directory = tmp_path_factory.mktemp("original")
    rng = np.random.default_rng(2)
    rows = [{"input_ids": rng.integers(0, 2**20, 1000).tolist(), "loss_mask": [1] * 1000} for _ in range(400)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_module, "BLOCK_BYTES", BLOCK)
        patch.setattr("hidden_state_bridge.pack.BLOCK_BYTES", BLOCK)
        return packed(directory / "out", [{"name": "a", "path": write(directory / "a.jsonl", rows)}])[0]


def command(*arguments: str, **options: object) -> list[str]:
    words = " ".join(f"{key}={value}" for key, value in options.items())
    ansible = [str(Path(sys.executable).parent / "ansible"), "localhost", "-c", "local", "-i", "localhost,", *arguments]
    return [*ansible, "-e", f"ansible_python_interpreter={sys.executable}", "-m", "hidden_state.bridge.packed_set", "-a", words]


def environment(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "ansible.cfg").touch()
    return {
        **os.environ,
        "ANSIBLE_CONFIG": str(tmp_path / "ansible.cfg"),
        "ANSIBLE_COLLECTIONS_PATH": str(ROOT / "playbooks" / "collections"),
        "ANSIBLE_LOCAL_TEMP": str(tmp_path / "tmp"),
        "ANSIBLE_REMOTE_TEMP": str(tmp_path / "tmp"),
        "ANSIBLE_CALLBACK_RESULT_FORMAT": "json",
        "LC_ALL": "C.UTF-8",
    }


@pytest.fixture
def copy(tmp_path):
    """Runs the action on this machine and returns its result."""

    def call(*arguments: str, **options: object) -> dict:
        done = subprocess.run(command(*arguments, **options), env=environment(tmp_path), capture_output=True, text=True)
        found = re.search(r"=> (\{.*\})", done.stdout, re.DOTALL)
        assert found, done.stdout + done.stderr
        return {**json.loads(found[1]), "failed": "FAILED!" in done.stdout}

    return call


def blocks_of(dataset: PackedDataset) -> int:
    return sum(len(file["blocks"]) for file in dataset.meta["files"].values())


def flip(path: str, place: int) -> None:
    with open(path, "r+b") as stream:
        stream.seek(place)
        byte = stream.read(1)
        stream.seek(place)
        stream.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize("direction", ["to the host", "to the controller"])
def test_only_what_differs_is_copied(tmp_path, original, copy, direction):
    dest = str(tmp_path / "there" / "set")
    options = {"src": original.path, "dest": dest, "fetch": direction == "to the controller"}
    dry = copy("--check", **options)
    assert (dry["changed"], dry["blocks"]) == (True, blocks_of(original)) and not os.path.exists(dest)
    first = copy(**options)
    assert (first["changed"], first["blocks"]) == (True, blocks_of(original))
    assert first["bytes"] == sum(file["bytes"] for file in original.meta["files"].values())
    PackedDataset(dest).check_content()
    assert sorted(os.listdir(dest)) == sorted(os.listdir(original.path)), "something else stays"
    assert {os.stat(os.path.join(dest, name)).st_mode & 0o777 for name in os.listdir(dest)} == {0o600}
    assert os.stat(dest).st_mode & 0o777 == 0o700
    second = copy(**options)
    assert (second["changed"], second["blocks"], second["bytes"]) == (False, 0, 0)
    assert copy("--check", **options)["changed"] is False

    flip(os.path.join(dest, "tokens.npy"), 3 * BLOCK + 5)
    with pytest.raises(Refusal, match=rf"tokens\.npy has another hash .* from byte {3 * BLOCK}"):
        PackedDataset(dest).check_content()
    mended = copy(**options)
    assert (mended["changed"], mended["blocks"], mended["bytes"]) == (True, 1, BLOCK)
    PackedDataset(dest).check_content()

    with open(os.path.join(dest, "line.npy"), "ab") as stream:
        stream.write(b"more")
    os.truncate(os.path.join(dest, "loss_mask.npy"), 2 * BLOCK + 1)
    os.unlink(os.path.join(dest, "meta.json"))
    assert copy(**options)["changed"]
    PackedDataset(dest).check_content()


def test_modes_are_mended_and_count_as_a_change(tmp_path, original, copy):
    dest = str(tmp_path / "set")
    copy(src=original.path, dest=dest)
    os.chmod(os.path.join(dest, "tokens.npy"), 0o644)
    assert copy("--check", src=original.path, dest=dest)["changed"]
    assert copy(src=original.path, dest=dest)["changed"] and os.stat(os.path.join(dest, "tokens.npy")).st_mode & 0o777 == 0o600


def kill_all_of(pid: int) -> None:
    """Kill a process and all that it started, and wait until they are gone. Ansible's workers are in sessions of their own."""
    members: set[int] = set()
    # Who is stopped starts nobody.
    while found := set(hp.family_of(pid)) - members:
        send(signal.SIGSTOP, found)
        members |= found
    identities = list(filter(None, map(hp.identity, members)))
    send(signal.SIGKILL, members)
    assert hp.wait_until_gone(identities, 60)


def send(number: int, pids: set[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def test_a_copy_that_was_killed_goes_on(tmp_path, original, copy):
    dest = str(tmp_path / "set")
    running = subprocess.Popen(
        command(src=original.path, dest=dest),
        env=environment(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    total = blocks_of(original)
    deadline = time.monotonic() + 120
    left = total
    while left > total - 6:
        assert running.poll() is None and time.monotonic() < deadline, "the copy ended before it could be killed"
        time.sleep(0.1)
        left = sum(map(len, hs_blocks.missing(dest, original.meta["files"], BLOCK).values()))
    kill_all_of(running.pid)
    running.communicate()
    left = sum(map(len, hs_blocks.missing(dest, original.meta["files"], BLOCK).values()))
    with pytest.raises(Refusal, match="is not complete: no .*meta.json"):
        PackedDataset(dest)
    result = copy(src=original.path, dest=dest)
    # A part that was at its place when the copy was killed may still have been written.
    assert 0 < result["blocks"] <= left <= total - 6
    PackedDataset(dest).check_content()


def test_refusals_name_the_directory(tmp_path, original, copy):
    found = copy(src=str(tmp_path / "nowhere"), dest=str(tmp_path / "set"))
    assert found["failed"] is True and f"{tmp_path}/nowhere holds no packed data set: pack it again" in found["msg"]
    (tmp_path / "file").touch()
    found = copy(src=original.path, dest=str(tmp_path / "file" / "set"))
    assert found["failed"] is True and f"{tmp_path}/file/set: " in found["msg"] and "see to its permissions" in found["msg"]


def test_a_link_in_the_place_of_a_file_is_not_followed(tmp_path, original, copy):
    outside = tmp_path / "outside"
    outside.write_text("mine")
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "tokens.npy").symlink_to(outside)
    found = copy(src=original.path, dest=str(tmp_path / "set"))
    assert found["failed"] is True and outside.read_text() == "mine"


def test_a_block_that_arrives_damaged_is_not_written(tmp_path, original):
    expected = original.meta["files"]["tokens.npy"]
    target = str(tmp_path / "tokens.npy")
    with pytest.raises(ValueError, match="block 2 of tokens.npy arrived damaged"):
        hs_blocks.write_blocks(target, [2], io.BytesIO(b"x" * BLOCK), expected, BLOCK)
    assert 2 in hs_blocks.wrong_blocks(target, expected, BLOCK)


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/b", "", ".."])
def test_a_name_that_leads_elsewhere_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match="is no name of a file of the set"):
        hs_blocks.missing(str(tmp_path), {name: {"bytes": 1, "blocks": ["0"]}}, BLOCK)


@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK])
def test_blocks_of_any_size(tmp_path, size):
    content = np.random.default_rng(size).bytes(size)
    hashes = hs_blocks.BlockHashes(BLOCK)
    for start in range(0, size, 1000):
        hashes.update(content[start : start + 1000])
    described = hashes.close()
    assert (described["bytes"], len(described["blocks"])) == (size, -(-size // BLOCK))
    path = tmp_path / "file"
    path.write_bytes(content)
    assert hs_blocks.wrong_blocks(str(path), described, BLOCK) == []
    path.write_bytes(content + b"x")
    assert bool(hs_blocks.wrong_blocks(str(path), described, BLOCK)) == bool(size)


def test_two_hosts_that_write_the_same_directory_do_no_harm(tmp_path, original):
    """A shared file system that nobody told of: both write the same bytes to the same places."""
    dest = str(tmp_path / "set")
    running = [subprocess.Popen(command(src=original.path, dest=dest), env=environment(tmp_path), stdout=subprocess.PIPE) for _ in range(2)]
    assert [process.wait(120) for process in running if process.communicate()] == [0, 0]
    PackedDataset(dest).check_content()
    shutil.rmtree(dest)
