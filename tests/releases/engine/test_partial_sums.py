# SPDX-License-Identifier: GPL-3.0-or-later
"""The trap is real: `hidden + residual` of TP rank 0 is one rank's part where an all-reduce is left to the next layer."""

from __future__ import annotations

import collections
import re

import numpy
import pytest
import torch

import models
from capture import RECORDS, capture, differences
from cases import parameters
from hs_capture.dumpfile import layer_name
from source_edits import force_allreduce_fusion, record_naive_sums
from test_states import TOLERANCE

RIGHT, WRONG, REFUSED = "right", "wrong", "refused"
# release, the fusion, what the naive sum is, what the project's capture is, tp_size
CASES = [
    ("0.5.23", "as-released", WRONG, RIGHT, 2),
    ("0.5.20", "forced", WRONG, RIGHT, 2),
    ("0.5.12", "forced", WRONG, REFUSED, 2),
    ("0.5.9", "forced", WRONG, REFUSED, 2),
    # What shows that the sums are taken at the right place.
    ("0.5.20", "as-released", RIGHT, RIGHT, 2),
    ("0.5.12", "as-released", RIGHT, RIGHT, 2),
]
STRUCTURE = "deepseek_v3"


@pytest.mark.parametrize("release, fusion, naive, project, tp_size", parameters(CASES, CASES[0]))
def test_the_naive_sum_and_the_capture(engine_of, states_of, report, tmp_path, release, fusion, naive, project, tp_size):
    engine, states = engine_of(release), states_of(STRUCTURE)
    record_naive_sums(engine)
    if fusion == "forced":
        force_allreduce_fusion(engine)
    sums = tmp_path / "sums"
    sums.mkdir()
    captured = capture(engine, STRUCTURE, tp_size, tmp_path, HS_NAIVE_SUM_DIR=str(sums))
    errors = naive_errors(sums, states)
    worst = max(errors.values())
    measured = differences(captured.dumps, states)
    outcome = f"{max(measured.values()):.1e}" if measured else REFUSED
    report([f"SGLang {release}", STRUCTURE, f"tp {tp_size}", f"fusion {fusion}", f"naive sum off by {worst:.1e}", f"capture {outcome}", ""])

    if naive == WRONG:
        assert worst > 1
    else:
        assert worst < TOLERANCE * max(state.abs().max() for named in states.values() for state in named.values())
    if project == REFUSED:
        assert not captured.dumps
        for rid, error in captured.errors.items():
            assert re.search("all-?reduce.fusion", " ".join(error.values())), f"{rid}: {error}"
    else:
        assert not captured.errors
        assert max(measured.values()) <= TOLERANCE


def naive_errors(directory, states) -> dict[int, float]:
    """By layer the largest |naive sum - reference| of all tokens of all records."""
    rids = {tuple(ids): rid for rid, ids in RECORDS.items()}
    errors, seen = collections.defaultdict(float), collections.Counter()
    for path in directory.iterdir():
        with numpy.load(path) as saved:
            layer, first = int(saved["layer"]), 0
            for length in saved["lengths"]:
                rows = slice(first, first + length)
                first += length
                rid = rids.get(tuple(saved["ids"][rows].tolist()))
                if rid:
                    difference = torch.from_numpy(saved["sums"][rows]) - states[rid][layer_name(layer)]
                    errors[layer] = max(errors[layer], difference.abs().max().item())
                    seen[layer] += 1
    assert seen == {layer: len(RECORDS) for layer in range(models.LAYERS)}
    return errors
