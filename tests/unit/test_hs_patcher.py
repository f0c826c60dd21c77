# SPDX-License-Identifier: Apache-2.0
"""What the patcher changes, what it keeps, and what it refuses."""

from __future__ import annotations

import ast
import os
import re
import stat
from pathlib import Path

import pytest
from model_source import SOURCE, edited

import hs_capture
import hs_patcher


class _WithoutPatch(ast.NodeTransformer):
    """Takes every node of the patch out of a tree."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST | None:
        return None if node.name in ("_hs_open", "_hs_of") else self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> ast.AST | None:
        ours = ("_hs = ", "_hs_asked = ", "self._hs_capture = ")
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
    owner = next(node for node in tree.body if getattr(node, "name", "") == "DeepseekV2Model")
    init, forward = (node for node in owner.body if isinstance(node, ast.FunctionDef))
    assert ast.unparse(init.body[-1]) == "self._hs_capture = _hs_open(self, 'layers', 'norm')"
    loop = next(number for number, node in enumerate(forward.body) if isinstance(node, ast.For))
    assert [ast.unparse(node) for node in forward.body[loop - 2 : loop]] == [
        "_hs = _hs_of(self) if _hs_asked else getattr(self, '_hs_capture', None)",
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
    assert (model.stat().st_ino, model.stat().st_mtime_ns) == (found.st_ino, found.st_mtime_ns)


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
    assert b"patch 3, family D" in model.read_bytes()
    hs_patcher.revert(model, originals=originals)
    assert model.read_text() == SOURCE


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("# hidden_state.bridge end loop\n", "", r"patched in part: piece 'loop' begins at line 77 and does not end"),
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
