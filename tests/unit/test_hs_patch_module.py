# SPDX-License-Identifier: GPL-3.0-or-later
"""The module as Ansible runs it: what it ships, what it returns, check and diff mode."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from model_source import SOURCE, edited, install

ROOT = Path(__file__).resolve().parents[2]
MODULE = "hidden_state.bridge.hs_patch"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return install(tmp_path, SOURCE)


@pytest.fixture
def module(tmp_path: Path, model: Path):
    def run(*calls: dict[str, Any]) -> list[dict[str, Any]]:
        """Call the module in one play, once for each task of `calls`; return what was registered."""
        tasks: list[dict[str, Any]] = []
        for number, call in enumerate(calls):
            call = {**call, "register": f"result_{number}", "ignore_errors": True}
            call[MODULE] = {"model_file": str(model), "originals_dir": str(tmp_path / "originals"), **call.get(MODULE, {})}
            tasks.append(call)
        names = ", ".join(task["register"] for task in tasks)
        copied = {"content": f"{{{{ [{names}] | to_json }}}}", "dest": str(tmp_path / "results.json"), "mode": "0600"}
        tasks.append({"ansible.builtin.copy": copied})
        play = tmp_path / "play.json"
        play.write_text(json.dumps([{"hosts": "localhost", "gather_facts": False, "tasks": tasks}]))
        subprocess.run(
            [
                str(Path(sys.executable).with_name("ansible-playbook")),
                *("--inventory", "localhost,", "--connection", "local"),
                *("--extra-vars", json.dumps({"ansible_python_interpreter": sys.executable})),
                str(play),
            ],
            check=True,
            capture_output=True,
            cwd=tmp_path,
            env={**os.environ, "ANSIBLE_COLLECTIONS_PATH": str(ROOT / "playbooks" / "collections")},
        )
        return json.loads((tmp_path / "results.json").read_text())

    return run


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_present(module, model: Path) -> None:
    before = model.read_bytes()
    checked, patched, again = module({"check_mode": True, "diff": True}, {}, {})
    after = model.read_bytes()
    assert [checked["changed"], patched["changed"], again["changed"]] == [True, True, False]
    assert checked["diff"]["before"] == before.decode()
    assert checked["diff"]["after"] == after.decode()
    assert "diff" not in patched
    # The check left the file alone: the next task still found the original.
    assert (patched["checksum_before"], patched["checksum_after"]) == (sha256(before), sha256(after))
    assert [change["name"] for change in patched["changes"]] == ["imports", "init", "layer loop", "after the norm"]
    assert (patched["sglang_version"], patched["family"], patched["patch_version"]) == ("0.5.20", "D", "3")
    assert (patched["model_file"], patched["link"], patched["leftovers"]) == (str(model), None, [])
    assert Path(patched["original"]).read_bytes() == before
    source = ROOT / "plugins" / "module_utils" / "hs_capture"
    for path in source.glob("*.py"):
        assert (Path(patched["runtime"]) / path.name).read_bytes() == path.read_bytes()


def test_absent(module, model: Path) -> None:
    before = model.read_bytes()
    absent = {MODULE: {"state": "absent"}}
    _, checked, kept, reverted, again = module({}, {**absent, "check_mode": True}, {}, absent, absent)
    changed = [result["changed"] for result in (checked, kept, reverted, again)]
    assert changed == [True, False, True, False]
    assert reverted["checksum_after"] == again["checksum_before"] == sha256(before)
    assert model.read_bytes() == before
    assert not (model.parents[1] / "hs_capture").exists()


def test_the_interpreter_finds_the_file(module, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(model.parents[3]))
    (model.parents[2] / "__init__.py").touch()
    (found,) = module({"check_mode": True, MODULE: {"model_file": None, "python": sys.executable}})
    assert (found["model_file"], found["changed"]) == (str(model), True)


def test_a_refusal_fails_with_the_remedy(module, model: Path) -> None:
    model.write_text(SOURCE.replace("class DeepseekV2Model:", "class Other:").replace("def forward", "def run"))
    (refused,) = module({})
    assert refused["failed"]
    assert "docs/support.md lists" in refused["msg"]
    assert "family" not in refused


def test_a_link_is_resolved_and_shown(module, model: Path, tmp_path: Path) -> None:
    link = tmp_path / "served.py"
    link.symlink_to(model)
    checked, patched, reverted = module(
        {"check_mode": True, MODULE: {"model_file": str(link)}},
        {MODULE: {"model_file": str(link)}},
        {MODULE: {"model_file": str(link), "state": "absent"}, "diff": True},
    )
    for result in (checked, patched, reverted):
        assert (result["changed"], result["model_file"], result["link"]) == (True, str(model), str(link))
    assert reverted["diff"]["after_header"] == str(model)
    assert model.read_text() == SOURCE


def test_an_edited_file_fails_with_a_diff(module, model: Path) -> None:
    module({})
    edited(model, "_hs.begin(forward_batch)", "_hs.begin(None)")
    checked, refused = module({"check_mode": True}, {})
    assert checked["failed"]
    assert checked["msg"] == refused["msg"]
    first, *diff = refused["msg"].splitlines()
    assert "Run revert (unpatch.yml)" in first
    assert [line for line in diff[2:] if line[0] in "+-"] == [
        "-            _hs = _hs.begin(forward_batch)",
        "+            _hs = _hs.begin(None)",
    ]


def test_what_a_killed_run_left_counts_as_a_change(module, model: Path) -> None:
    module({})
    left = model.parents[1] / ".hs_capture-0123abcd"
    left.mkdir()
    checked, swept, again = module({"check_mode": True}, {}, {})
    assert [result["leftovers"] for result in (checked, swept, again)] == [[str(left)], [str(left)], []]
    assert [result["changed"] for result in (checked, swept, again)] == [True, True, False]
