# SPDX-License-Identifier: GPL-3.0-or-later
"""A patched server whose SGLANG_HS_DUMP_DIR is unset does what an unpatched one does, and one test a layer."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

import models
from capture import patched
from cases import RELEASES, parameters
from engines import Engine
from hs_capture.settings import DEFAULT_RID_PREFIX, DUMP_DIR
from server import Server

STRUCTURE = "deepseek_v3"
PROMPT, NEW_TOKENS, TIMES = [11, 402, 5, 77, 260, 31, 8], 5, 3
BEGIN, END = "# hidden_state.bridge begin ", "# hidden_state.bridge end "
IN_LOOP = {"own", "collector", "output", "output-2"}
# A name of the frame is tested, and a jump made around what follows.
A_LAYER = ("LOAD_FAST", "POP_JUMP", "JUMP_FORWARD")
# Whether a capture is asked for is tested; the attribute, or None, is read into that name, which is tested before the loop and behind it.
ONCE = 14


@dataclass
class Forward:
    """One forward: instructions of its own frame by (line, name), and calls within it."""

    steps: Counter[tuple[int, str]]
    calls: Counter[str]

    def instructions(self, lines: set[int] | None = None) -> Counter[str]:
        """How often each instruction ran, in these lines only."""
        found = Counter()
        for (line, name), count in self.steps.items():
            if lines is None or line in lines:
                found[name] += count
        return found


def trace(engine: Engine, tp_size: int, directory: Path) -> tuple[list[list[int]], dict[str, Forward]]:
    """The answers of a server without SGLANG_HS_DUMP_DIR, and its last prefill and its last decoding step."""
    directory.mkdir()
    (engine.site / "forward_trace.pth").write_text("import forward_trace\n")
    shutil.copy(Path(__file__).with_name("forward_trace.py"), engine.site)
    environment = {"HS_TRACE_DIR": str(directory), DUMP_DIR: ""}
    with Server(engine, models.checkpoint(STRUCTURE), tp_size, directory.with_suffix(".log"), environment) as server:
        answers = [server.generate(PROMPT, f"{DEFAULT_RID_PREFIX}{time}", NEW_TOKENS)["output_ids"] for time in range(TIMES)]
    forwards = {}
    for path in directory.iterdir():
        for line in path.read_text().splitlines():
            written = json.loads(line)
            assert written["ours"] == [], "the capture is imported"
            if written["mode"] == "DECODE" or written["tokens"] == len(PROMPT):
                steps = Counter({(line, name): count for line, name, count in written["steps"]})
                forwards[written["mode"]] = Forward(steps, Counter(written["calls"]))
    assert set(forwards) == {"EXTEND", "DECODE"}
    return answers, forwards


def inserted(path: Path) -> dict[str, set[int]]:
    """The lines of a patched file that the patch added, by the name of the piece."""
    lines, name = {}, None
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip().startswith(BEGIN):
            name = line.strip()[len(BEGIN) :].split()[0]
        if name:
            lines.setdefault(name, set()).add(number)
        if line.strip().startswith(END):
            name = None
    return lines


CASES = [(release, 1) for release in RELEASES]


@pytest.mark.parametrize("release, tp_size", parameters(CASES, CASES[-1]))
def test_unset_it_costs_one_test_a_layer(engine_of, tmp_path, release, tp_size):
    engine, model_file = engine_of(release), models.STRUCTURES[STRUCTURE].model_file
    answers, original = trace(engine, tp_size, tmp_path / "original")
    with patched(engine, model_file, tmp_path / "originals"):
        pieces = inserted(engine.model_file(model_file))
        unset, forwards = trace(engine, tp_size, tmp_path / "patched")
    assert unset == answers == [models.greedy(STRUCTURE, PROMPT, NEW_TOKENS)] * TIMES
    for mode, forward in forwards.items():
        check(forward, original[mode], pieces)


def check(forward: Forward, original: Forward, pieces: dict[str, set[int]]) -> None:
    """A patched forward calls what the original calls, and adds the instructions of one test a layer and a few more."""
    in_loop = [lines for name, lines in pieces.items() if name in IN_LOOP]
    elsewhere = [lines for name, lines in pieces.items() if name not in IN_LOOP]
    assert in_loop and elsewhere
    assert forward.calls == original.calls
    once = forward.instructions(set().union(*elsewhere))
    assert sum(once.values()) <= ONCE, once
    a_layer = forward.instructions() - original.instructions() - once
    assert sum(a_layer.values()) <= len(A_LAYER) * models.LAYERS, a_layer
    assert sum(count for name, count in a_layer.items() if name.startswith("POP_JUMP")) <= models.LAYERS, a_layer
    assert all(any(kind in name for kind in A_LAYER) for name in a_layer), a_layer
    # Else the lines of the patch were not met at all.
    assert forward.instructions(set().union(*in_loop))
