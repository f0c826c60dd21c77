# SPDX-License-Identifier: GPL-3.0-or-later
"""Tries the patcher on one model file of one release, and says all that is wrong with what it did."""

from __future__ import annotations

import ast
import concurrent.futures
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import audit
import decoders
import inserted
import wheels

sys.path.insert(0, str(wheels.ROOT / "plugins" / "module_utils"))

import hs_patcher

MAIN_MODEL = "deepseek_v2.py"
# Names that decide what a model's forward returns to its caller.
COUNTED = ("layers_to_capture", "capture_aux_hidden_states")


@dataclass
class Outcome:
    """What became of one model file: applied (`family`) or refused (`refusal`), and the `problems` found."""

    release: str
    model: str
    family: str | None = None
    refusal: str | None = None
    # Lines inserted, and the lines of the patched file at which the changes begin.
    lines: int = 0
    places: list[int] = field(default_factory=list)
    # The final states that a server with this file can dump.
    finals: tuple[str, ...] = ()
    problems: list[str] = field(default_factory=list)


def jobs(releases: Iterable[str]) -> list[tuple[str, str]]:
    """(release, model file) of everything to try: deepseek_v2.py everywhere, every decoder model file in some releases."""
    found = []
    for release in releases:
        found.append((release, MAIN_MODEL))
        if release in wheels.ALL_MODELS:
            top = wheels.source(release) / "sglang" / "srt" / "models"
            for path in decoders.model_files(wheels.source(release)):
                if path != top / MAIN_MODEL and decoders.is_decoder_file(path.read_bytes()):
                    found.append((release, path.relative_to(top).as_posix()))
    return found


def outcomes(releases: Iterable[str]) -> dict[tuple[str, str], Outcome]:
    """Try all of it, on every core; the releases have to be in the cache."""
    wanted = jobs(releases)
    with concurrent.futures.ProcessPoolExecutor(initializer=_without_fsync) as pool:
        return dict(zip(wanted, pool.map(attempt, wanted, chunksize=4)))


def _without_fsync() -> None:
    # Durability is tested with the patcher; hundreds of files would wait for the disk here.
    os.fsync = lambda _handle: None


def attempt(job: tuple[str, str]) -> Outcome:
    """Lay the model file out as its wheel does, patch it twice, take the patch out, and look at each step."""
    release, model = job
    outcome = Outcome(release, model)
    cached = wheels.source(release)
    with tempfile.TemporaryDirectory(prefix="hs-matrix-") as scratch:
        package = Path(scratch) / "site-packages" / "sglang"
        path = package / "srt" / "models" / model
        path.parent.mkdir(parents=True)
        shutil.copyfile(cached / "sglang" / "srt" / "models" / model, path)
        for name in ("version.py", "_version.py"):
            if (cached / "sglang" / name).is_file():
                shutil.copyfile(cached / "sglang" / name, package / name)
        original = path.read_bytes()
        originals = str(Path(scratch) / "originals")
        try:
            result = hs_patcher.apply(path, originals=originals)
        except hs_patcher.Refused as refused:
            outcome.refusal = _reason(str(refused), str(path))
            if path.read_bytes() != original:
                outcome.problems.append("refused, but the file has changed")
            return outcome
        patched = path.read_bytes()
        outcome.family = result.family
        outcome.lines = patched.count(b"\n") - original.count(b"\n")
        outcome.places = [change.line for change in result.changes]
        outcome.finals = _finals(result.changes[-1].text)
        problem = outcome.problems.append
        if result.sglang_version != release:
            problem(f"the release is taken for {result.sglang_version}")
        outcome.problems += _compare(original, patched)
        written = path.stat().st_mtime_ns
        again = hs_patcher.apply(path, originals=originals)
        if again.changed or path.read_bytes() != patched or path.stat().st_mtime_ns != written:
            problem("a second apply changes something")
        hs_patcher.revert(path, originals=originals)
        if path.read_bytes() != original:
            problem("revert does not give the wheel's bytes")
        if (package / "srt" / hs_patcher.RUNTIME_PACKAGE).exists():
            problem("revert leaves the capture runtime behind")
    return outcome


def _finals(after_the_norm: str) -> tuple[str, ...]:
    """What the last change hands over: the norm's two results, or the norm itself, which is asked for what it takes in and gives."""
    both = "_hs.watch(" in after_the_norm or after_the_norm.count(",") == 1
    return ("post_norm", "pre_norm") if both else ("post_norm",)


def _reason(message: str, path: str) -> str:
    """The reason in a refusal, without the paths and remedies that are the same for every file."""
    reason = message.replace(path, Path(path).name)
    reason = reason.split("is unknown to this patcher: ", 1)[-1]
    return reason.split(". Name the model file", 1)[0].strip()


def _compare(original: bytes, patched: bytes) -> list[str]:
    """What is wrong with a patched file beside its original, from the syntax trees."""
    try:
        compile(patched, "patched", "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        return [f"does not compile: {error}"]
    before, after = ast.parse(original), ast.parse(patched)
    problems = []
    expected = sum(map(_counts, inserted.handed_on(after)), _counts(before))
    if _counts(after) != expected:
        problems.append(f"names are there so often: {dict(_counts(after))}, not {dict(expected)}")
    if _returns(before) != _returns(after):
        problems.append("a return statement has changed")
    problems += audit.problems(after)
    if ast.dump(inserted.without_patch(after)) != ast.dump(before):
        problems.append("the syntax tree without the patch's nodes is not the original's")
    return problems


def _counts(tree: ast.AST) -> Counter[str]:
    """How often each of the names stands in a tree: as a name, an attribute, an argument or a string."""
    words = [value for node in ast.walk(tree) for _field, value in ast.iter_fields(node) if isinstance(value, str)]
    return Counter(word for word in words if word in COUNTED)


def _returns(tree: ast.Module) -> dict[str, list[str]]:
    """The return statements of each class, in order."""
    return {
        owner.name: [ast.unparse(node) for node in ast.walk(owner) if isinstance(node, ast.Return)]
        for owner in ast.walk(tree)
        if isinstance(owner, ast.ClassDef)
    }
