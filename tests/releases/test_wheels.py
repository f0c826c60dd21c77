# SPDX-License-Identifier: GPL-3.0-or-later
"""The cache of released sources, with wheels made here and a pip that knows no index but their directory."""

from __future__ import annotations

import json
import subprocess
import zipfile
from pathlib import Path

import pytest
import wheels

MODELS = "sglang/srt/models/"
FILES = {
    MODELS + "llama.py": "# llama",
    MODELS + "common/modeling.py": "# inner",
    MODELS + "table.json": "{}",
    "sglang/version.py": "__version__ = '0.4.1'",
    "sglang/srt/server_args.py": "# parser",
    "sglang/srt/arg_groups/fields/memory.py": "# fields",
    "sglang/srt/model_executor/forward_batch_info.py": "# batch",
    "sglang/srt/model_executor/model_runner.py": "# not kept",
    "sglang/srt/server.py": "# not kept",
    "sglang/__init__.py": "",
}


def make_wheel(directory: Path, release: str, files: dict[str, str] | None = None, says: str | None = None) -> Path:
    """A wheel of sglang that pip takes."""
    directory.mkdir(exist_ok=True)
    path = directory / f"sglang-{release}-py3-none-any.whl"
    info = f"sglang-{says or release}.dist-info/"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in (FILES if files is None else files).items():
            archive.writestr(name, text)
        archive.writestr(info + "METADATA", f"Metadata-Version: 2.1\nName: sglang\nVersion: {says or release}\n")
        archive.writestr(info + "WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(info + "RECORD", "")
    return path


@pytest.fixture
def index(tmp_path, monkeypatch) -> Path:
    """The directory that pip takes for everything there is; the cache is an empty one."""
    monkeypatch.setattr(wheels, "ROOT", tmp_path)
    monkeypatch.setattr(wheels, "CACHE", tmp_path / "cache")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    (tmp_path / "index").mkdir()
    return tmp_path / "index"


def names(directory: Path) -> set[str]:
    return {path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()}


def test_a_release_comes_in_as_its_wheel_has_it(index):
    for release in ("0.3.9", "0.4.1", "0.4.10", "0.4.2.post1", "0.5.0rc1"):
        make_wheel(index, release)
    assert wheels.releases() == (["0.4.1", "0.4.2.post1", "0.4.10"], "the package index")
    assert wheels.fetch(["0.4.1", "0.4.10"]) == ["0.4.1", "0.4.10"]
    kept = {MODELS + "llama.py", MODELS + "common/modeling.py", "sglang/version.py", "sglang-0.4.1.dist-info/METADATA"}
    kept |= {"sglang/srt/server_args.py", "sglang/srt/arg_groups/fields/memory.py", "sglang/srt/model_executor/forward_batch_info.py"}
    assert names(wheels.source("0.4.1")) == kept
    assert {path.name for path in wheels.CACHE.iterdir()} == {"0.4.1", "0.4.10", "releases.json"}


def test_a_release_that_was_kept_with_less_is_fetched_again(index):
    make_wheel(index, "0.4.1")
    (wheels.source("0.4.1") / MODELS).mkdir(parents=True)
    assert wheels.fetch(["0.4.1"]) == ["0.4.1"] and wheels.fetch(["0.4.1"]) == []
    assert {path.name for path in wheels.CACHE.iterdir()} == {"0.4.1"}


def test_what_is_there_costs_no_network(index, monkeypatch):
    path = wheels.source("0.4.1") / "sglang/srt/model_executor/forward_batch_info.py"
    path.parent.mkdir(parents=True)
    path.touch()
    monkeypatch.setattr(subprocess, "run", None)
    assert wheels.fetch(["0.4.1"]) == []


def test_without_an_index_the_list_of_the_last_time_serves_and_is_named(index):
    wheels.CACHE.mkdir()
    (wheels.CACHE / "releases.json").write_text(json.dumps({"asked": "2026-01-02", "releases": ["0.5.1", "0.4.1"]}))
    listed, origin = wheels.releases()
    assert listed == ["0.4.1", "0.5.1"]
    assert "the list of 2026-01-02" in origin


def test_without_an_index_and_a_list_it_says_so(index):
    with pytest.raises(wheels.Unavailable, match="pip cannot list the releases of sglang.*Give this machine a package index"):
        wheels.releases()


@pytest.mark.parametrize("text", ["[", "{}", '{"asked": "2026-01-02", "releases": ["x.y"]}'])
def test_a_broken_list_is_named(index, text):
    wheels.CACHE.mkdir()
    (wheels.CACHE / "releases.json").write_text(text)
    with pytest.raises(wheels.Unavailable, match=r"releases\.json is not a list of releases"):
        wheels.releases()


def test_a_broken_download_names_its_release_and_leaves_the_others(index):
    make_wheel(index, "0.4.1")
    broken = make_wheel(index, "0.4.2")
    broken.write_bytes(broken.read_bytes()[:200])
    with pytest.raises(wheels.Unavailable) as raised:
        wheels.fetch(["0.4.1", "0.4.2", "0.4.3"])
    lines = str(raised.value).splitlines()
    assert lines[0] == "2 of 3 releases of sglang could not be fetched:"
    assert [line.split(":")[0] for line in lines[1:]] == ["0.4.2", "0.4.3"]
    assert {path.name for path in wheels.CACHE.iterdir()} == {"0.4.1"}


@pytest.mark.parametrize(
    ("files", "says", "reason"),
    [
        (None, "0.4.3", "is not the wheel of 0.4.2: its METADATA says 0.4.3"),
        ({"sglang/version.py": ""}, None, "has no sglang/srt/models"),
    ],
)
def test_a_wheel_of_something_else_is_refused(index, files, says, reason):
    wheel = make_wheel(index, "0.4.2", files, says)
    with pytest.raises(wheels.Unavailable, match=reason):
        wheels.unpack(wheel, "0.4.2")
    assert list(wheels.CACHE.iterdir()) == []


def test_two_runs_at_a_time_leave_one_release(index):
    wheel = make_wheel(index, "0.4.1")
    wheels.unpack(wheel, "0.4.1")
    wheels.unpack(wheel, "0.4.1")
    assert {path.name for path in wheels.CACHE.iterdir()} == {"0.4.1"}


def test_the_command_line(index, capsys):
    make_wheel(index, "0.4.1")
    assert wheels.main([]) is None
    assert "1 wanted, 1 fetched" in capsys.readouterr().out
    assert wheels.main(["0.4.9"]).startswith("0.4.9: not among the 1 releases from 0.4.0 on")
