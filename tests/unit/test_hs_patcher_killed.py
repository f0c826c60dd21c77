# SPDX-License-Identifier: Apache-2.0
"""A patcher that is killed, or whose disk fails, at any step: the old state or the new one, and no litter."""

from __future__ import annotations

import itertools
import json
import os
import re
import resource
import shutil
import signal
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from forked import KILLED, at_step, forked, imports, kill, no_space
from model_source import SOURCE, install

import hs_patcher

RUNTIME = Path(hs_patcher.__file__).with_name("hs_capture")

IMPORTED: dict[tuple, str] = {}


class World:
    """An installed package, its stored originals, and every state that its model file may be in."""

    def __init__(self, root: Path) -> None:
        self.model = install(root, SOURCE)
        self.srt = self.model.parents[1]
        self.originals = root / "originals"
        self.source = self.model.read_bytes()
        self.patched = hs_patcher.apply(self.model, originals=str(self.originals), dry_run=True).after
        self.states = {self.source, self.patched}

    def apply(self) -> hs_patcher.Result:
        return hs_patcher.apply(self.model, originals=str(self.originals))

    def revert(self) -> hs_patcher.Result:
        return hs_patcher.revert(self.model, originals=str(self.originals))

    def listing(self) -> list[str]:
        return sorted(str(path.relative_to(self.srt)) for path in self.srt.rglob("*"))

    def imports(self) -> str:
        """What importing says, asked once for each state of the tree."""
        runtime = self.srt / "hs_capture"
        files = [self.model, *sorted(runtime.glob("*"))] if runtime.is_dir() else [self.model, Path(os.devnull)][: 1 + runtime.is_symlink()]
        state = tuple((path.name, path.read_bytes()) for path in files)
        if state not in IMPORTED:
            IMPORTED[state] = imports(self.model)
        return IMPORTED[state]

    def has_matching_runtime(self) -> bool:
        """Whether a patch of some version has the runtime of that version; a file without a patch needs none."""
        patch = re.search(r"hidden_state\.bridge patch (\S+),", self.model.read_text())
        if patch is None:
            return True
        marker = json.loads((self.srt / "hs_capture" / hs_patcher.MARKER_FILE).read_text())
        return marker["patch_version"] == patch[1]

    def has_live_runtime_alone(self) -> bool:
        hidden = [path for path in self.srt.rglob(".h*") if path.name != hs_patcher.MARKER_FILE]
        return hidden == [self.srt / os.readlink(self.srt / "hs_capture")]


def older(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A patch of an older version with a runtime of another content."""
    runtime = world.originals.with_name("older")
    shutil.copytree(RUNTIME, runtime)
    (runtime / "layers.py").write_bytes((runtime / "layers.py").read_bytes() + b"# older\n")
    with monkeypatch.context() as past:
        past.setattr(hs_patcher, "PATCH_VERSION", "0")
        hs_patcher.apply(world.model, originals=str(world.originals), runtime=str(runtime))
    world.states.add(world.model.read_bytes())


def start_fresh(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is patched."""


def start_patched(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.apply()


def start_stale(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.apply()
    (world.srt / "hs_capture" / "writer.py").write_text("raise SystemExit\n")


def start_copied(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The older patch in a tree that was copied with links followed, so that the runtime is a directory."""
    older(world, monkeypatch)
    link = world.srt / "hs_capture"
    target = world.srt / os.readlink(link)
    link.unlink()
    target.rename(link)


CASES = {
    "apply": (start_fresh, World.apply),
    "upgrade": (older, World.apply),
    "upgrade a copy": (start_copied, World.apply),
    "refresh": (start_stale, World.apply),
    "revert": (start_patched, World.revert),
    "revert a copy": (start_copied, World.revert),
}


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory in memory where there is one, since the tests sync hundreds of times; a patch once made is kept."""
    make, made = hs_patcher._make, {}

    def make_once(data: bytes, path: str, release: str | None) -> tuple[str, bytes]:
        key = (data, release, hs_patcher.PATCH_VERSION)
        if key not in made:
            made[key] = make(data, path, release)
        return made[key]

    monkeypatch.setattr(hs_patcher, "_make", make_once)
    root = Path(tempfile.mkdtemp(prefix="hsb-test-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
    yield root
    shutil.rmtree(root)


def worlds(root: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, World]]:
    """A world made ready for `case`, again and again, with the number of the step to strike at."""
    for number in itertools.count(1):
        world = World(root / str(number))
        CASES[case][0](world, monkeypatch)
        yield number, world
        shutil.rmtree(root / str(number))


@pytest.mark.parametrize("case", CASES)
def test_killed_at_any_step(fast: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    action = CASES[case][1]
    steps = 0
    for number, world in worlds(fast, case, monkeypatch):
        status, said = forked(partial(at_step, number, kill, partial(action, world)))
        assert status in (0, KILLED), said
        assert world.model.read_bytes() in world.states, f"killed at step {number}"
        assert world.has_matching_runtime(), f"killed at step {number}"
        if case != "refresh" or status == 0:
            assert world.imports() == "", f"killed at step {number}"
        if number % 2:
            world.apply()
            assert world.model.read_bytes() == world.patched
            assert world.has_live_runtime_alone(), f"killed at step {number}: {world.listing()}"
            assert world.imports() == ""
            assert not world.apply().changed
        world.revert()
        assert world.model.read_bytes() == world.source
        assert world.listing() == ["models", "models/deepseek_v2.py"], f"killed at step {number}"
        assert len(list(world.originals.glob("*") if world.originals.is_dir() else [])) <= 1
        assert not list(world.originals.glob(".*"))
        if status == 0:
            steps = int(said)
            break
    assert steps > 5


@pytest.mark.parametrize("case", CASES)
def test_no_space_at_any_step(fast: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    action = CASES[case][1]
    for number, world in worlds(fast, case, monkeypatch):
        before, listing = world.model.read_bytes(), world.listing()
        status, said = forked(partial(at_step, number, no_space, partial(action, world)))
        if status == 0 and int(said) < number:
            break
        if status == 0:
            # A directory that was not synced holds the patcher up no more than it undoes a rename.
            assert world.model.read_bytes() == (world.source if action is World.revert else world.patched)
            continue
        assert said.startswith("Refused: "), f"step {number}: {said}"
        assert "No space left on device" in said
        assert "make room" in said
        after = world.model.read_bytes()
        if "is still there" in said:
            assert after == (world.source if action is World.revert else world.patched)
        elif case == "upgrade a copy" and after == world.source:
            assert world.imports() == ""
        else:
            assert (after, world.listing()) == (before, listing), f"step {number}: {said}"
        (world.revert if action is World.revert else world.apply)()
        assert world.model.read_bytes() == (world.source if action is World.revert else world.patched)
    assert number > 5


@pytest.mark.parametrize("behind", ["the runtime", "the model file"])
def test_interrupted_behind_a_rename(fast: Path, monkeypatch: pytest.MonkeyPatch, behind: str) -> None:
    world = World(fast)
    sync, ends = hs_patcher._sync, world.srt if behind == "the runtime" else world.model.parent

    def interrupt(directory: str) -> None:
        sync(directory)
        if directory == str(ends):
            monkeypatch.setattr(hs_patcher, "_sync", sync)
            raise KeyboardInterrupt

    monkeypatch.setattr(hs_patcher, "_sync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        world.apply()
    assert world.model.read_bytes() == (world.source if behind == "the runtime" else world.patched)
    assert world.imports() == ""
    assert world.apply().changed == (behind == "the runtime")


@pytest.mark.parametrize("room", [1, 300, 2000])
def test_killed_in_the_middle_of_a_write(fast: Path, room: int) -> None:
    """A limit on the size of files kills the patcher with part of the model file written."""
    world = World(fast)
    world.apply()
    os.replace(world.originals / os.listdir(world.originals)[0], world.originals / "away")
    world.model.write_bytes(world.source)
    (world.originals / "away").rename(world.apply().original or "")
    world.model.write_bytes(world.source)

    def work() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
        world.apply()

    assert forked(work)[0] == -signal.SIGXFSZ
    torn = [path for path in world.model.parent.iterdir() if path != world.model]
    assert [path.stat().st_size for path in torn] == [room]
    assert world.model.read_bytes() == world.source
    result = world.apply()
    assert result.leftovers == [str(path) for path in torn]
    assert sorted(world.model.parent.iterdir()) == [world.model]


def test_what_is_not_provably_ours_is_never_swept(fast: Path) -> None:
    world = World(fast)
    note = world.model.with_name(".hsb-a_notice")
    note.write_text("Not a model file.\n")
    strange = world.srt / ".hs_capture-precious"
    (strange / "sub").mkdir(parents=True)
    (strange / hs_patcher.MARKER_FILE).touch()
    other = world.srt / ".hs_capture-no_mark_"
    other.mkdir()
    (other / "data").touch()
    link = world.srt / ".hs_capture-elsewher.link"
    link.symlink_to("/etc/passwd")
    world.apply()
    result = world.revert()
    assert result.leftovers == []
    assert all(os.path.lexists(path) for path in (note, strange / "sub", other / "data", link))


def test_a_killed_run_is_seen_by_check(fast: Path) -> None:
    world = World(fast)
    world.apply()
    (world.srt / ".hs_capture-00000000").mkdir()
    before = world.listing()
    seen = hs_patcher.apply(world.model, originals=str(world.originals), dry_run=True)
    assert (seen.changed, seen.leftovers) == (True, [str(world.srt / ".hs_capture-00000000")])
    assert world.listing() == before
    assert world.apply().leftovers == seen.leftovers
    assert not world.apply().changed
