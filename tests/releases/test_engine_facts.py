# SPDX-License-Identifier: GPL-3.0-or-later
"""What the capture imports of SGLang, on the released sources: of each accessor's alternatives one is there, by syntax tree.

RELEASES as for test_matrix.py.
"""

from __future__ import annotations

import ast
import functools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import wheels
from packaging.version import Version
from test_matrix import SAMPLE

ENGINE = wheels.ROOT / "plugins" / "module_utils" / "hs_capture" / "engine.py"
MODEL = "sglang.srt.models.deepseek_v2"
NAMES_REQUESTS = "0.5.10"
# Only what is patched as the shape "stream" calls it.
SINCE = {"snapshot": "0.5.21"}


@functools.cache
def accessors() -> dict[str, list[tuple[str, str]]]:
    """By function of engine.py what it imports, in the order in which it tries: (module, name)."""
    found = {}
    for function in ast.parse(ENGINE.read_bytes()).body:
        if isinstance(function, ast.FunctionDef):
            found[function.name] = [
                (node.module, alias.name) for node in ast.walk(function) if isinstance(node, ast.ImportFrom) for alias in node.names
            ]
    return {name: imported for name, imported in found.items() if imported}


def module_file(release: str, module: str) -> Path | None:
    path = wheels.source(release).joinpath(*module.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


def top_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a module, those within `if` and `try` included."""
    for node in body:
        yield node
        for part in ("body", "orelse", "finalbody"):
            if isinstance(node, (ast.If, ast.Try)):
                yield from top_level(getattr(node, part, []))
        for handler in getattr(node, "handlers", []):
            yield from top_level(handler.body)


@functools.cache
def defines(release: str, module: str) -> frozenset[str]:
    """Names that a module of a release has; none where it is not there. Of another package, those that the model imports."""
    if not module.startswith("sglang."):
        imports = [node for node in ast.parse(module_file(release, MODEL).read_bytes()).body if isinstance(node, ast.ImportFrom)]
        return frozenset(alias.name for node in imports if node.module == module for alias in node.names)
    file = module_file(release, module)
    if file is None:
        return frozenset()
    names = {child.stem for child in file.parent.glob("*.py")} if file.name == "__init__.py" else set()
    for node in top_level(ast.parse(file.read_bytes()).body):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names.update(name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name))
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                names.update(defines(release, node.module) if alias.name == "*" else {alias.asname or alias.name})
    return frozenset(names)


def fields(release: str, module: str, name: str) -> set[str]:
    """The annotated fields of a class."""
    tree = ast.parse(module_file(release, module).read_bytes())
    made = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    return {node.target.id for node in made.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}


@pytest.fixture(scope="module")
def chosen() -> list[str]:
    asked = os.environ.get("RELEASES", "sample")
    names = wheels.releases()[0] if asked == "all" else wheels.sort(SAMPLE if asked == "sample" else asked.split(","))
    wheels.fetch(names)
    return names


def test_every_accessor_finds_what_it_imports(chosen):
    missing = [
        f"{release}: {accessor} finds none of {', '.join(f'{module}.{name}' for module, name in alternatives)}"
        for release in chosen
        for accessor, alternatives in accessors().items()
        if Version(release) >= Version(SINCE.get(accessor, wheels.OLDEST))
        and not any(name in defines(release, module) for module, name in alternatives)
    ]
    assert not missing, "\n".join(missing)


def test_no_alternative_is_idle(chosen):
    """Each that engine.py tries is the first to be found in some release."""
    if set(chosen) < SAMPLE:
        pytest.skip("needs the releases of the sample")
    idle = [
        f"{module}.{name}"
        for alternatives in accessors().values()
        for place, (module, name) in enumerate(alternatives)
        if not any(
            name in defines(release, module)
            and not any(other in defines(release, where) for where, other in alternatives[:place] if where != module)
            for release in chosen
        )
    ]
    assert not idle


def test_batches_name_their_requests_since(chosen):
    ((module, name),) = accessors()["batches_name_requests"]
    named = {release: "rids" in fields(release, module, name) for release in chosen}
    assert named == {release: Version(release) >= Version(NAMES_REQUESTS) for release in chosen}


def test_batches_have_what_the_capture_reads(chosen):
    ((module, name),) = accessors()["batches_name_requests"]
    read = {"forward_mode", "input_ids", "extend_seq_lens_cpu", "extend_prefix_lens_cpu"}
    missing = {release: read - fields(release, module, name) for release in chosen}
    assert not {release: names for release, names in missing.items() if names}
