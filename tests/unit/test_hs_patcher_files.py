# SPDX-License-Identifier: Apache-2.0
"""How the patcher writes, finds its files, and behaves as a program."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from model_source import PROGRAM, SOURCE, install, program

import hs_capture
import hs_patcher


def test_a_file_that_changes_meanwhile_is_refused(model: Path, originals: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keep = hs_patcher._keep

    def meddle(kept: str, original: bytes) -> None:
        keep(kept, original)
        model.write_text(SOURCE + "# upgraded\n")

    monkeypatch.setattr(hs_patcher, "_keep", meddle)
    with pytest.raises(hs_patcher.Refused, match="changed while it was patched"):
        hs_patcher.apply(model, originals=originals)
    assert model.read_text() == SOURCE + "# upgraded\n"


def test_a_failed_write_leaves_the_file_and_no_litter(model: Path, originals: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hs_patcher.apply(model, originals=originals)
    hs_patcher.revert(model, originals=originals)
    replace = os.replace

    def full(source: str, target: str) -> None:
        if str(target) == str(model):
            raise OSError(28, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(hs_patcher.Refused, match="No space left"):
        hs_patcher.apply(model, originals=originals)
    assert model.read_text() == SOURCE
    assert list(model.parent.iterdir()) == [model]


@pytest.mark.parametrize("closed", ["models", "srt", "state"])
def test_a_dry_run_finds_what_cannot_be_written(
    model: Path, originals: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closed: str
) -> None:
    (tmp_path / "state").mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != closed)
    with pytest.raises(hs_patcher.Refused, match=f"{closed} is not writable; run as the owner"):
        hs_patcher.apply(model, originals=originals, dry_run=True)


@pytest.mark.parametrize("kind", ["absent", "directory", "link"])
def test_what_is_not_a_file_is_refused(model: Path, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "deepseek_v2.py"
    if kind == "directory":
        path.mkdir()
    elif kind == "link":
        path.symlink_to(model)
    with pytest.raises(hs_patcher.Refused, match={"absent": "No such file", "directory": "not a file", "link": "is a link"}[kind]):
        hs_patcher.apply(path)


def test_program_reports_and_exits(model: Path, originals: str) -> None:
    checked = program("check", model)
    assert (checked.returncode, "not patched, can be patched" in checked.stdout) == (0, True)
    shown = program("diff", model)
    assert shown.returncode == 0
    assert '+        self._hs_capture = _hs_open(self, "layers", "norm")' in shown.stdout
    assert model.read_text() == SOURCE
    applied = program("apply", "--originals", originals, model)
    assert applied.returncode == 0, applied.stderr
    assert f"file     {model}" in applied.stdout
    assert "release  0.5.20" in applied.stdout
    assert "family   D" in applied.stdout
    assert re.findall(r"^(imports|init|layer loop|after the norm): line \d+$", applied.stdout, re.M) == list(hs_patcher.CHANGES)
    assert "patched already" in program("apply", "--originals", originals, model).stdout
    assert "patched, complete" in program("check", model).stdout
    assert program("revert", "--originals", originals, model).returncode == 0
    assert model.read_text() == SOURCE


def test_program_refuses_and_says_why(tmp_path: Path) -> None:
    model = install(tmp_path, SOURCE.replace("def forward", "def run"))
    refused = program("apply", model)
    assert refused.returncode == 1
    assert refused.stderr.startswith("refused: ")
    assert "install a release of SGLang that docs/support.md lists" in refused.stderr
    assert program("check", model).returncode == 1
    assert program("apply").returncode == 2
    assert program("mend", model).returncode == 2


def test_program_runs_alone_with_the_runtime_named(model: Path, originals: str, tmp_path: Path) -> None:
    alone = tmp_path / "alone" / "hs_patcher.py"
    alone.parent.mkdir()
    alone.write_bytes(PROGRAM.read_bytes())
    command = [sys.executable, "-I", str(alone), "apply", "--originals", originals]
    refused = subprocess.run([*command, str(model)], capture_output=True, text=True)
    assert refused.returncode == 1
    assert "--runtime DIR" in refused.stderr
    runtime = str(Path(hs_capture.__file__).parent)
    done = subprocess.run([*command, "--runtime", runtime, str(model)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_release_is_read_without_importing(tmp_path: Path) -> None:
    model = install(tmp_path, SOURCE, None)
    package = model.parents[2]
    assert hs_patcher.release_of(model) is None
    metadata = package.parent / "sglang-0.5.17.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.4\nName: sglang\nVersion: 0.5.17\n")
    assert hs_patcher.release_of(model) == "0.5.17"
    (package / "version.py").write_text('raise SystemExit\n__version__ = "0.4.0"\n')
    assert hs_patcher.release_of(package) == "0.4.0"
    assert hs_patcher.release_of(tmp_path) is None


def test_model_file_is_found_by_the_interpreter(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (model.parents[2] / "__init__.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.setenv("PYTHONPATH", str(model.parents[3]))
    assert hs_patcher.find_model_file(sys.executable) == str(model)
    with pytest.raises(hs_patcher.Refused, match="name another model"):
        hs_patcher.find_model_file(sys.executable, "absent")
    with pytest.raises(hs_patcher.Refused, match="not the name of a module"):
        hs_patcher.find_model_file(sys.executable, "../../etc/passwd")
    with pytest.raises(hs_patcher.Refused, match="no such interpreter"):
        hs_patcher.find_model_file(str(tmp_path / "python"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "nothing"))
    with pytest.raises(hs_patcher.Refused, match="has no sglang|could not"):
        hs_patcher.find_model_file(sys.executable)


def test_loader_is_inert_unless_the_gate_is_set(model: Path, originals: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hs_patcher.apply(model, originals=originals)
    loader = next(node for node in ast.parse(model.read_bytes()).body if getattr(node, "name", "") == "_hs_open")
    space: dict = {}
    exec(compile(ast.Module([loader], []), str(model), "exec"), space)
    for value in (None, ""):
        monkeypatch.delenv("SGLANG_HS_DUMP_DIR", raising=False)
        if value is not None:
            monkeypatch.setenv("SGLANG_HS_DUMP_DIR", value)
        known = set(sys.modules)
        assert space["_hs_open"](object(), "layers", "norm") is None
        assert set(sys.modules) == known
    monkeypatch.setenv("SGLANG_HS_DUMP_DIR", "/dev/shm/x")
    monkeypatch.setitem(sys.modules, "sglang", None)
    with pytest.raises(RuntimeError, match=r"sglang\.srt\.hs_capture cannot be imported .*patch\.yml.*unset SGLANG_HS_DUMP_DIR"):
        space["_hs_open"](object(), "layers", "norm")


def test_everything_is_python_3_9() -> None:
    runtime = Path(hs_capture.__file__).parent
    for path in [PROGRAM, *runtime.glob("*.py")]:
        ast.parse(path.read_bytes(), feature_version=(3, 9))


def test_marker_of_the_runtime(model: Path, originals: str) -> None:
    hs_patcher.apply(model, originals=originals)
    marker = json.loads((model.parent.parent / "hs_capture" / ".hidden_state_bridge").read_text())
    assert marker == {"kind": "capture_runtime", "patch_version": hs_patcher.PATCH_VERSION}
