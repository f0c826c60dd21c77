# SPDX-License-Identifier: Apache-2.0
"""How the patcher behaves as a program, and what the code that it inserts does."""

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

LINES = r"^(imports|init|layer loop|after the norm): line \d+$"


def test_program_reports_and_exits(model: Path, originals: str) -> None:
    kept = ("--originals", originals)
    checked = program("check", *kept, model)
    assert (checked.returncode, "state    not patched, can be patched\n" in checked.stdout) == (0, True)
    assert re.findall(LINES, checked.stdout, re.M) == list(hs_patcher.CHANGES)
    shown = program("diff", *kept, model)
    assert shown.returncode == 0
    assert '+        self._hs_capture = _hs_open(self, "layers", "norm")' in shown.stdout
    assert model.read_text() == SOURCE
    applied = program("apply", *kept, model)
    assert applied.returncode == 0, applied.stderr
    assert f"file     {model}" in applied.stdout
    assert "release  0.5.20" in applied.stdout
    assert "family   D" in applied.stdout
    assert re.findall(LINES, applied.stdout, re.M) == list(hs_patcher.CHANGES)
    assert re.findall(LINES, checked.stdout, re.M) == re.findall(LINES, applied.stdout, re.M)
    assert "patched already" in program("apply", *kept, model).stdout
    assert "state    patched, complete\n" in program("check", *kept, model).stdout
    reverted = program("revert", *kept, model)
    assert reverted.returncode == 0
    assert "removed layer loop: line " in reverted.stdout
    assert model.read_text() == SOURCE
    assert "changed  nothing (not patched)" in program("revert", *kept, model).stdout


def test_check_says_what_there_is_to_do(
    model: Path, originals: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def state() -> str:
        assert hs_patcher.main(["check", "--originals", originals, str(model)]) == 0
        return re.search("^state    (.*)$", capsys.readouterr().out, re.M)[1]

    with monkeypatch.context() as past:
        past.setattr(hs_patcher, "PATCH_VERSION", "1")
        hs_patcher.apply(model, originals=originals)
    assert state() == f"patched by patch 1, this is patch {hs_patcher.PATCH_VERSION}: run apply"
    hs_patcher.apply(model, originals=originals)
    assert state() == "patched, complete"
    runtime = model.parents[1] / "hs_capture"
    (runtime / "writer.py").write_text("")
    (runtime / "older.py").write_text("")
    assert state() == "patched, runtime stale (older.py, writer.py): run apply"
    model.write_text(SOURCE)
    assert state() == "not patched, can be patched, a runtime is beside it: apply refreshes it, revert removes it"


def test_program_refuses_and_says_why(tmp_path: Path) -> None:
    model = install(tmp_path, SOURCE.replace("def forward", "def run"))
    refused = program("apply", model)
    assert refused.returncode == 1
    assert refused.stderr.startswith("refused: ")
    assert "install a release of SGLang that docs/support.md lists" in refused.stderr
    checked = program("check", model)
    assert (checked.returncode, checked.stdout) == (1, f"file     {model}\nstate    refused\n")
    assert program("apply").returncode == 2
    assert program("mend", model).returncode == 2


def test_a_path_that_is_no_text_is_shown_as_it_can_be(model: Path, tmp_path: Path, originals: str) -> None:
    strange = os.fsdecode(os.fsencode(tmp_path) + b"/\xff")
    model.parents[3].rename(strange)
    path = os.path.join(strange, "sglang", "srt", "models", model.name)
    for command, shown in (("check", "state    not patched"), ("diff", "_hs_open"), ("apply", "\\udcff"), ("revert", "removed init")):
        done = program(command, "--originals", originals, path)
        assert (done.returncode, shown in done.stdout) == (0, True), done.stderr


@pytest.mark.parametrize("command", ["check", "diff", "apply", "revert"])
def test_help_says_what_a_command_does(command: str) -> None:
    text = " ".join(program(command, "--help").stdout.split())
    assert hs_patcher._COMMANDS[command] in text
    assert "Exit status: 0" in text
    assert hs_patcher._COMMANDS[command] in " ".join(program("--help").stdout.split())


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


# As SGLang's Glm4MoeLiteModel does: it makes the attributes by itself, and has the forward of another file.
HEIR = """
class Heir(DeepseekV2Model):
    def __init__(self):
        self.layers, self.start_layer, self.end_layer, self.layers_to_capture = [], 0, 0, []
        self.norm = lambda hidden, residual=None: hidden
        self.pp_group = type("Group", (), {"is_last_rank": True})


Mode = type("Mode", (), {"is_idle": lambda self: False})
Batch = type("Batch", (), {"forward_mode": Mode()})
"""


@pytest.mark.parametrize("directory", [None, "", "/dev/shm/x"])
def test_a_class_that_inherits_the_forward_alone(
    model: Path, originals: str, monkeypatch: pytest.MonkeyPatch, directory: str | None
) -> None:
    hs_patcher.apply(model, originals=originals)
    monkeypatch.delenv("SGLANG_HS_DUMP_DIR", raising=False)
    if directory is not None:
        monkeypatch.setenv("SGLANG_HS_DUMP_DIR", directory)
    space: dict = {"__name__": "sglang.srt.models.deepseek_v2"}
    exec(compile(model.read_text() + HEIR, str(model), "exec", dont_inherit=True), space)
    heir = space["Heir"]()
    if not directory:
        assert heir.forward("ids", None, space["Batch"]) == "ids"
        return
    with pytest.raises(RuntimeError, match=r"but Heir runs the decoder loop of sglang\.srt\.models\.deepseek_v2 without its __init__"):
        heir.forward("ids", None, space["Batch"])


def test_everything_is_python_3_9() -> None:
    runtime = Path(hs_capture.__file__).parent
    for path in [PROGRAM, *runtime.glob("*.py")]:
        ast.parse(path.read_bytes(), feature_version=(3, 9))


def test_marker_of_the_runtime(model: Path, originals: str) -> None:
    hs_patcher.apply(model, originals=originals)
    marker = json.loads((model.parent.parent / "hs_capture" / ".hidden_state_bridge").read_text())
    assert marker == {"kind": "capture_runtime", "patch_version": hs_patcher.PATCH_VERSION}
