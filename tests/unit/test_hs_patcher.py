# SPDX-License-Identifier: Apache-2.0
"""The patcher as a program and as a library, on sources of the known shapes."""

from __future__ import annotations

import ast
import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import hs_capture
import hs_patcher

PROGRAM = Path(hs_patcher.__file__)

SOURCE = '''\
# SPDX-License-Identifier: Apache-2.0
"""Inference-only DeepseekV2 model – with bytes beyond ASCII: é."""

from __future__ import annotations

import logging
from typing import (
    List,
    Optional,
)

_is_cuda = False
if _is_cuda:
    from sglang.nowhere import kernel

logger = logging.getLogger(__name__)


class DeepseekV2Model:
    def __init__(self, config, prefix: str = "") -> None:
        self.config = config
        self.layers_to_capture = []
        # llama_4_scaling
        self.llama_4_scaling_config = getattr(config, "llama_4_scaling", None)

    def forward(self, input_ids, positions, forward_batch, input_embeds=None):
        hidden_states, residual, topk_indices = input_ids, None, None
        aux_hidden_states = []
        for i in range(self.start_layer, self.end_layer):
            with self.recorder(i):
                layer = self.layers[i]
                hidden_states, residual, topk_indices = layer(
                    positions,
                    hidden_states,
                    forward_batch,
                    residual,
                    prev_topk_indices=topk_indices,
                    captured_last_layer_outputs=(
                        aux_hidden_states if i in self.layers_to_capture else None
                    ),
                )

        if not self.pp_group.is_last_rank:
            return {"hidden_states": hidden_states, "residual": residual}
        else:
            if not forward_batch.forward_mode.is_idle():
                if residual is None:
                    hidden_states = self.norm(hidden_states)
                else:
                    hidden_states, _ = self.norm(hidden_states, residual)

        if len(aux_hidden_states) == 0:
            return hidden_states
        return hidden_states, aux_hidden_states


class DeepseekV3ForCausalLM:
    pass
'''


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return install(tmp_path, SOURCE)


@pytest.fixture
def originals(tmp_path: Path) -> str:
    return str(tmp_path / "state" / "originals")


def install(root: Path, source: str, release: str | None = "0.5.20") -> Path:
    """Lay out a package as a wheel does and return its model file."""
    package = root / "site-packages" / "sglang"
    path = package / "srt" / "models" / "deepseek_v2.py"
    path.parent.mkdir(parents=True)
    path.write_bytes(source.encode())
    if release is not None:
        (package / "_version.py").write_text(f"__version__ = version = '{release}'\n")
    return path


def program(*arguments: object, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    return subprocess.run([python, "-I", str(PROGRAM), *map(str, arguments)], capture_output=True, text=True)


def edited(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


class _WithoutPatch(ast.NodeTransformer):
    """Takes every node of the patch out of a tree."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST | None:
        return None if node.name == "_hs_open" else self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> ast.AST | None:
        ours = ("_hs = ", "self._hs_capture = ")
        return None if ast.unparse(node).startswith(ours) else self.generic_visit(node)

    def visit_If(self, node: ast.If) -> ast.AST | None:
        return None if ast.unparse(node.test) == "_hs is not None" else self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        if ast.unparse(node.test) != "_hs is None":
            return self.generic_visit(node)
        assert ast.unparse(node.orelse) == f"_hs.collector(i, {ast.unparse(node.body)})"
        return node.body


def test_apply_makes_the_four_changes_and_nothing_else(model: Path, originals: str) -> None:
    before = model.read_bytes()
    result = hs_patcher.apply(model, originals=originals)
    after = model.read_bytes()
    assert result.changed
    assert result.family == "D"
    assert result.sglang_version == "0.5.20"
    assert [change.name for change in result.changes] == ["imports", "init", "layer loop", "after the norm"]
    lines = after.decode().splitlines()
    for change in result.changes:
        assert lines[change.line - 1].strip().startswith("# hidden_state.bridge begin ")
        assert lines[change.line : change.line + 1] == change.text.splitlines()[:1]
    assert ast.dump(_WithoutPatch().visit(ast.parse(after))) == ast.dump(ast.parse(before))
    removed = [line for line in result.diff().splitlines() if line.startswith("-") and not line.startswith("---")]
    assert removed == []


def test_inserted_code_is_where_it_belongs(model: Path, originals: str) -> None:
    hs_patcher.apply(model, originals=originals)
    tree = ast.parse(model.read_bytes())
    owner = next(node for node in tree.body if isinstance(node, ast.ClassDef))
    init, forward = (node for node in owner.body if isinstance(node, ast.FunctionDef))
    assert ast.unparse(init.body[-1]) == "self._hs_capture = _hs_open(self)"
    loop = next(number for number, node in enumerate(forward.body) if isinstance(node, ast.For))
    assert [ast.unparse(node) for node in forward.body[loop - 2 : loop]] == [
        "_hs = self._hs_capture",
        "if _hs is not None:\n    _hs = _hs.begin(forward_batch)",
    ]
    assert "hidden_states, _ = self.norm(hidden_states, residual)" in ast.unparse(forward)
    norm = next(node for node in ast.walk(forward) if isinstance(node, ast.If) and ast.unparse(node.test) == "residual is None")
    assert ast.unparse(norm.orelse[-1]) == "if _hs is not None:\n    _hs.finish(hidden_states, _)"


def test_second_apply_changes_nothing(model: Path, originals: str) -> None:
    hs_patcher.apply(model, originals=originals)
    found = model.stat()
    result = hs_patcher.apply(model, originals=originals)
    assert not result.changed
    assert len(result.changes) == 4
    assert result.checksum_before == result.checksum_after
    assert model.stat() == found


def test_revert_gives_back_every_byte_and_the_directory(model: Path, originals: str) -> None:
    before, listing = model.read_bytes(), sorted(model.parent.parent.rglob("*"))
    hs_patcher.apply(model, originals=originals)
    result = hs_patcher.revert(model, originals=originals)
    assert result.changed
    assert len(result.changes) == 4
    assert model.read_bytes() == before
    assert sorted(model.parent.parent.rglob("*")) == listing
    assert not hs_patcher.revert(model, originals=originals).changed


def test_original_is_kept_once(model: Path, originals: str) -> None:
    before = model.read_bytes()
    for _ in range(2):
        result = hs_patcher.apply(model, originals=originals)
        hs_patcher.revert(model, originals=originals)
    assert result.original is not None
    kept = Path(result.original)
    assert re.fullmatch(r"deepseek_v2\.[0-9a-f]{16}\.orig", kept.name)
    assert kept.read_bytes() == before
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert stat.S_IMODE(kept.parent.stat().st_mode) == 0o700
    assert list(kept.parent.iterdir()) == [kept]


def test_a_damaged_original_is_put_right(model: Path, originals: str) -> None:
    before = model.read_bytes()
    kept = Path(hs_patcher.apply(model, originals=originals, dry_run=True).original or "")
    kept.parent.mkdir(parents=True)
    kept.write_text("torn")
    hs_patcher.apply(model, originals=originals)
    assert kept.read_bytes() == before


def test_mode_stays_and_hard_links_keep_the_original(model: Path, originals: str, tmp_path: Path) -> None:
    cache = tmp_path / "cache.py"
    os.link(model, cache)
    model.chmod(0o640)
    before = cache.read_bytes()
    hs_patcher.apply(model, originals=originals)
    assert cache.read_bytes() == before != model.read_bytes()
    assert stat.S_IMODE(model.stat().st_mode) == 0o640
    runtime = model.parent.parent / "hs_capture"
    assert stat.S_IMODE((runtime / "capture.py").stat().st_mode) == 0o640
    assert stat.S_IMODE(runtime.stat().st_mode) == stat.S_IMODE(model.parent.stat().st_mode)


def test_dry_run_writes_nothing(model: Path, originals: str, tmp_path: Path) -> None:
    listing = sorted(tmp_path.rglob("*"))
    result = hs_patcher.apply(model, originals=originals, dry_run=True)
    assert result.changed
    assert len(result.changes) == 4
    assert sorted(tmp_path.rglob("*")) == listing
    assert model.read_text() == SOURCE


def test_runtime_is_the_sibling_package(model: Path, originals: str) -> None:
    hs_patcher.apply(model, originals=originals)
    source = Path(hs_capture.__file__).parent
    assert sorted(path.name for path in source.glob("*.py")) == sorted(hs_patcher.RUNTIME_FILES)
    for name in hs_patcher.RUNTIME_FILES:
        assert (model.parent.parent / "hs_capture" / name).read_bytes() == (source / name).read_bytes()


@pytest.mark.parametrize("damage", ["missing", "file", "differs", "surplus"])
def test_a_stale_runtime_is_repaired(model: Path, originals: str, damage: str) -> None:
    hs_patcher.apply(model, originals=originals)
    runtime = model.parent.parent / "hs_capture"
    if damage == "missing":
        runtime.rename(runtime.with_name("away"))
    elif damage == "file":
        (runtime / "writer.py").unlink()
    elif damage == "differs":
        (runtime / "writer.py").write_text("")
    else:
        (runtime / "older.py").write_text("")
    patched = model.read_bytes()
    result = hs_patcher.apply(model, originals=originals)
    assert result.changed
    assert result.runtime_changed
    assert model.read_bytes() == patched
    assert not hs_patcher.apply(model, originals=originals).changed


def test_a_directory_that_is_not_ours_is_left_alone(model: Path, originals: str) -> None:
    runtime = model.parent.parent / "hs_capture"
    runtime.mkdir()
    (runtime / "precious.py").write_text("")
    with pytest.raises(hs_patcher.Refused, match=r"lacks \.hidden_state_bridge.*move it away"):
        hs_patcher.apply(model, originals=originals)
    with pytest.raises(hs_patcher.Refused, match=r"lacks \.hidden_state_bridge"):
        hs_patcher.revert(model, originals=originals)
    assert model.read_text() == SOURCE
    assert (runtime / "precious.py").exists()


def test_runtime_stays_while_another_model_is_patched(model: Path, originals: str) -> None:
    hs_patcher.apply(model, originals=originals)
    other = model.with_name("other.py")
    other.write_bytes(model.read_bytes())
    hs_patcher.revert(model, originals=originals)
    assert (model.parent.parent / "hs_capture").is_dir()
    hs_patcher.revert(other, originals=originals)
    assert not (model.parent.parent / "hs_capture").exists()


def test_another_patch_version_is_replaced(model: Path, originals: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hs_patcher, "PATCH_VERSION", "0")
    hs_patcher.apply(model, originals=originals)
    monkeypatch.undo()
    result = hs_patcher.apply(model, originals=originals)
    assert result.changed
    assert b"patch 1, family D" in model.read_bytes()
    hs_patcher.revert(model, originals=originals)
    assert model.read_text() == SOURCE


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("# hidden_state.bridge end loop\n", "", r"patched in part: piece 'loop' begins 1 times and ends 0"),
        ("# hidden_state.bridge begin norm\n", "", r"patched in part: piece 'norm'"),
        ("# hidden_state.bridge end init\n", "# hidden_state.bridge end init\n" * 2, "patched in part: piece 'init'"),
        (", original sha256 ", ", sha ", r"marks|head of the patch"),
        ("logger = logging", "LOGGER = logging", "was edited after it was patched"),
    ],
)
def test_a_torn_or_edited_patch_is_refused(model: Path, originals: str, old: str, new: str, reason: str) -> None:
    hs_patcher.apply(model, originals=originals)
    edited(model, old, new)
    damaged = model.read_bytes()
    for action in (hs_patcher.apply, hs_patcher.revert):
        with pytest.raises(hs_patcher.Refused, match=reason) as refused:
            action(model, originals=originals)
        assert "reinstall SGLang" in str(refused.value)
    assert model.read_bytes() == damaged


def test_edited_inserted_code_is_refused_by_apply_and_reverted_exactly(model: Path, originals: str) -> None:
    hs_patcher.apply(model, originals=originals)
    edited(model, "_hs = _hs.begin(forward_batch)", "_hs = _hs.begin(None)")
    with pytest.raises(hs_patcher.Refused, match="inserted code was edited. Run revert"):
        hs_patcher.apply(model, originals=originals)
    hs_patcher.revert(model, originals=originals)
    assert model.read_text() == SOURCE


UNKNOWN = {
    "no class": ("class DeepseekV2Model:", "class Other:", "expected one class DeepseekV2Model, found 0"),
    "naive sum": ("captured_last_layer_outputs=", "other=", "takes no captured_last_layer_outputs"),
    "two results": (
        "hidden_states, residual, topk_indices = layer(",
        "hidden_states, topk_indices = layer(",
        "gives 2 results",
    ),
    "other capture rule": ("if i in self.layers_to_capture", "if i + 1 in self.layers_to_capture", "does not depend on"),
    "on one line": (
        "captured_last_layer_outputs=(\n                        aux_hidden_states if i in self.layers_to_capture else None\n                    ),",
        "captured_last_layer_outputs=aux_hidden_states if i in self.layers_to_capture else None,",
        "on its own lines",
    ),
    "second loop": (
        "        if not self.pp_group",
        "        for i in range(2):\n            a, b, c = layer(i)\n        if not self.pp_group",
        "expected one loop over layer",
    ),
    "norm": (
        "hidden_states, _ = self.norm(hidden_states, residual)",
        "hidden_states = self.norm(hidden_states, residual)",
        r"from self\.norm\(hidden_states, residual\)",
    ),
    "early return": ("        self.layers_to_capture = []", "        if not config:\n            return", "returns early"),
    "other layers": ("layer = self.layers[i]", "layer = self.blocks[i]", r"layer = self\.layers\[i\]"),
    "own name": ("aux_hidden_states = []", "aux_hidden_states = _hs = []", "already uses the names _hs"),
    "carriage return": ("import logging\n", "import logging\r\n", "CR line ends"),
    "byte order mark": ("# SPDX", "\ufeff# SPDX", "byte order mark"),
    "not python": ("import logging\n", "import import\n", "is not Python"),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_shape_is_refused_and_stays(tmp_path: Path, originals: str, name: str) -> None:
    old, new, reason = UNKNOWN[name]
    assert SOURCE.count(old) == 1
    model = install(tmp_path, SOURCE.replace(old, new))
    before = model.read_bytes()
    with pytest.raises(hs_patcher.Refused, match=reason):
        hs_patcher.apply(model, originals=originals)
    assert model.read_bytes() == before
    assert not (model.parent.parent / "hs_capture").exists()


@pytest.mark.parametrize("release", ["0.5.13", "0.5.13.post1", "0.5.21", "0.6.0", "0.0.0.dev0"])
def test_the_shape_in_another_release_is_refused(tmp_path: Path, originals: str, release: str) -> None:
    model = install(tmp_path, SOURCE, release)
    with pytest.raises(hs_patcher.Refused, match=r"not by its release. Known families: D \(0.5.14 to 0.5.20\)"):
        hs_patcher.apply(model, originals=originals)


@pytest.mark.parametrize("release", ["0.5.14", "0.5.14.post1", "0.5.20", None])
def test_the_shape_in_its_releases_is_taken(tmp_path: Path, originals: str, release: str | None) -> None:
    result = hs_patcher.apply(install(tmp_path, SOURCE, release), originals=originals)
    assert (result.changed, result.sglang_version) == (True, release)


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
    assert "+        self._hs_capture = _hs_open(self)" in shown.stdout
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
    model = install(tmp_path, SOURCE, "0.5.13")
    refused = program("apply", model)
    assert refused.returncode == 1
    assert refused.stderr.startswith("refused: ")
    assert "Install such a release" in refused.stderr
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
        assert space["_hs_open"](object()) is None
        assert set(sys.modules) == known
    monkeypatch.setenv("SGLANG_HS_DUMP_DIR", "/dev/shm/x")
    monkeypatch.setitem(sys.modules, "sglang", None)
    with pytest.raises(RuntimeError, match=r"sglang\.srt\.hs_capture cannot be imported .*patch\.yml.*unset SGLANG_HS_DUMP_DIR"):
        space["_hs_open"](object())


def test_everything_is_python_3_9() -> None:
    runtime = Path(hs_capture.__file__).parent
    for path in [PROGRAM, *runtime.glob("*.py")]:
        ast.parse(path.read_bytes(), feature_version=(3, 9))


def test_marker_of_the_runtime(model: Path, originals: str) -> None:
    hs_patcher.apply(model, originals=originals)
    marker = json.loads((model.parent.parent / "hs_capture" / ".hidden_state_bridge").read_text())
    assert marker == {"kind": "capture_runtime", "patch_version": hs_patcher.PATCH_VERSION}
