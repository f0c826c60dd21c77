# SPDX-License-Identifier: GPL-3.0-or-later
"""Real SGLang servers of several releases; run by the demo engine's interpreter (`make releases`)."""

from __future__ import annotations

import functools
import importlib.util
import shutil
from collections.abc import Callable, Iterator

import pytest

import engines

WITHOUT_TORCH = importlib.util.find_spec("torch") is None
collect_ignore_glob = ["test_*.py"] if WITHOUT_TORCH else []
TABLE = pytest.StashKey[list]()


@pytest.fixture(scope="session")
def cache() -> Iterator[None]:
    with engines.locked():
        yield


@pytest.fixture
def engine_of(cache) -> Iterator[Callable[[str], engines.Engine]]:
    """Gives a clone of a release's engine, installed where it is missing."""
    clones = []

    def give(release: str) -> engines.Engine:
        clones.append(engines.clone(engines.install(release)))
        return clones[-1]

    yield give
    for clone in clones:
        shutil.rmtree(clone.directory)


@pytest.fixture(scope="session")
def states_of(cache) -> Callable[[str], dict[str, dict]]:
    """Gives the reference states of all records by rid, for a structure."""
    import models
    from capture import RECORDS

    @functools.cache
    def give(structure: str) -> dict[str, dict]:
        return dict(zip(RECORDS, models.reference(structure, list(RECORDS.values())), strict=True))

    return give


@pytest.fixture
def report(request) -> Callable[..., None]:
    """Adds a line, given by its columns, to the table that is printed at the end."""
    return request.config.stash.setdefault(TABLE, []).append


def pytest_terminal_summary(terminalreporter, config) -> None:
    if WITHOUT_TORCH:
        terminalreporter.write_line("tests/releases/engine is left out: it needs the demo engine's interpreter, as `make releases` has it")
    lines = config.stash.get(TABLE, [])
    if lines:
        terminalreporter.section("largest |difference| / largest |value|, against transformers in float32")
        widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
        for line in lines:
            terminalreporter.write_line("  ".join(cell.ljust(width) for cell, width in zip(line, widths)))
