# SPDX-License-Identifier: GPL-3.0-or-later
"""Packages for an interpreter that lacks some: gathered on the controller, laid beside the payload, never into its environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = ROOT / "roles" / "_bridge" / "files"
NEEDED = ("aiohttp", "numpy", "orjson", "safetensors", "zstandard")


def asks(interpreter: Path, *names: str) -> dict:
    """What the probe says of an interpreter, as preflight asks for it."""
    source = (FILES / "interpreter.py").read_text()
    done = subprocess.run([interpreter, "-B", "-", *names], input=source, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def gather(cache: Path, wheelhouse: Path, interpreter: dict, *names: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-B", FILES / "build_packages.py", cache, wheelhouse, json.dumps(interpreter), *names]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture
def wheelhouse(tmp_path):
    """A wheel of a package that holds one line."""
    directory = tmp_path / "wheels"
    directory.mkdir()
    about = "zstandard-0.25.0.dist-info"
    with zipfile.ZipFile(directory / "zstandard-0.25.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("zstandard.py", "here = True\n")
        wheel.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: zstandard\nVersion: 0.25.0\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")
    return directory


def test_the_probe_tells_what_an_interpreter_is_and_lacks():
    found = asks(sys.executable, "json", "no_such_module", "numpy")
    assert found["version"] == "%d.%d" % sys.version_info[:2] and found["missing"] == ["no_such_module"]
    assert found["glibc"].startswith("2.") and found["machine"] == os.uname().machine


@pytest.mark.parametrize("version", ["3.9", "3.11", "3.13"])
def test_wheels_are_taken_for_the_hosts_interpreter_and_not_the_controllers(tmp_path, wheelhouse, version):
    """Before 3.11 aiohttp and what it needs want two more, which this wheelhouse lacks."""
    interpreter = {"version": version, "glibc": "2.28", "machine": "x86_64"}
    done = gather(tmp_path / "cache", wheelhouse, interpreter, "zstandard")
    if version == "3.9":
        assert done.returncode and "async-timeout" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    with tarfile.open(done.stdout.split()[-1]) as archive:
        assert "zstandard.py" in archive.getnames()
        assert {(member.mtime, member.uid, member.mode) for member in archive} == {(0, 0, 0o644)}


def test_the_same_is_gathered_once_and_gives_the_same_bytes(tmp_path, wheelhouse):
    interpreter = {"version": "3.11", "glibc": "2.36", "machine": "x86_64"}
    first = gather(tmp_path / "one", wheelhouse, interpreter, "zstandard").stdout
    other = gather(tmp_path / "two", wheelhouse, interpreter, "zstandard").stdout
    assert Path(first.strip()).read_bytes() == Path(other.strip()).read_bytes()
    (wheelhouse / "zstandard-0.25.0-py3-none-any.whl").unlink()
    assert gather(tmp_path / "one", wheelhouse, interpreter, "zstandard").stdout == first


def test_packages_that_are_not_to_be_had_are_named_with_the_remedy(tmp_path, wheelhouse):
    done = gather(tmp_path / "cache", wheelhouse, {"version": "3.11", "glibc": "2.36", "machine": "x86_64"}, "orjson", "zstandard")
    assert done.returncode == 1
    assert f"orjson, zstandard for Python 3.11 could not be had from {wheelhouse}" in done.stderr and "extraction_wheelhouse" in done.stderr
    assert not list((tmp_path / "cache").glob("*.tar.gz"))


def test_a_bare_interpreter_runs_the_payload_with_what_is_brought(tmp_path):
    """Wheels from pip's index; the environment of the interpreter stays as it is."""
    venv.create(tmp_path / "bare", with_pip=False)
    bare = tmp_path / "bare" / "bin" / "python"
    before = sorted((tmp_path / "bare").rglob("*"))
    interpreter = asks(bare, *NEEDED)
    assert interpreter["missing"] == list(NEEDED)
    play = {
        "hosts": "localhost",
        "gather_facts": True,
        "tasks": [{"ansible.builtin.include_role": {"name": "hidden_state.bridge._bridge"}}],
        "vars": {
            "_bridge_code_dir": str(tmp_path / "code"),
            "_bridge_user": str(os.getuid()),
            "_bridge_group": str(os.getgid()),
            "_bridge_cache_dir": str(tmp_path / "cache"),
            "_bridge_interpreter": interpreter,
            "ansible_python_interpreter": sys.executable,
        },
    }
    (tmp_path / "play.yml").write_text(json.dumps([play]))
    (tmp_path / "ansible.cfg").touch()
    environment = {**os.environ, "ANSIBLE_CONFIG": str(tmp_path / "ansible.cfg"), "LC_ALL": "C.UTF-8"}
    command = [Path(sys.executable).parent / "ansible-playbook", "play.yml"]

    def run(*more: str) -> str:
        done = subprocess.run([*command, *more], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run("--check")
    assert not (tmp_path / "code").exists()
    run()
    assert "changed=0" in run()
    source = tmp_path / "source.jsonl"
    source.write_text(json.dumps({"input_ids": [1, 2], "loss_mask": [0, 1]}) + "\n")
    config = json.dumps({"sources": [{"name": "one", "path": str(source)}]})
    payload = [bare, "-B", tmp_path / "code" / "hidden_state_bridge.pyz"]
    done = subprocess.run(
        [*payload, "pack", "--config", "-", "--out-dir", tmp_path / "packed"], input=config, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert sorted((tmp_path / "bare").rglob("*")) == before
