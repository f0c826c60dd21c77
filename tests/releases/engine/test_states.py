# SPDX-License-Identifier: GPL-3.0-or-later
"""Every token of every captured state, from a real server of each release, against Hugging Face transformers in float32."""

from __future__ import annotations

import itertools
import re

import pytest
import torch

import models
from capture import RECORDS, capture, differences, rows_beyond
from cases import RELEASES, parameters
from hs_capture.dumpfile import INPUT_IDS, POST_NORM, PRE_NORM, layer_name
from hs_capture.layers import default_layers

TOLERANCE = 1e-5
# Neighbouring layers of these models differ by far more, in the largest |difference| over the largest |value|.
DISTINCT = 0.05
# By tensor parallel size: unset gives the default layers.
LAYERS = {1: "", 2: ",".join(map(str, range(models.LAYERS)))}
CASES = list(itertools.product(RELEASES, models.STRUCTURES, LAYERS))
SAMPLE = ("0.5.23", "deepseek_v3", 2)


@pytest.mark.parametrize("release, structure, tp_size", parameters(CASES, SAMPLE))
def test_every_state_is_that_of_transformers(engine_of, states_of, report, tmp_path, release, structure, tp_size):
    captured = capture(engine_of(release), structure, tp_size, tmp_path, LAYERS[tp_size])
    assert not captured.errors
    measured = differences(captured.dumps, states_of(structure))
    worst = max((name for name in measured if name.startswith("layer")), key=measured.get)
    report(
        [f"SGLang {release}", structure, f"tp {tp_size}", f"family {captured.family}", f"{worst} {measured[worst]:.1e}"]
        + [f"{name} {measured[name]:.1e}" for name in (PRE_NORM, POST_NORM)]
    )
    layers = [int(layer) for layer in LAYERS[tp_size].split(",") if layer] or default_layers(models.LAYERS)
    assert set(measured) == {*map(layer_name, layers), POST_NORM, PRE_NORM}
    beyond = rows_beyond(TOLERANCE, captured.dumps, states_of(structure))
    said = captured.log.read_text(errors="replace").splitlines()[-20:]
    assert {name: value for name, value in measured.items() if value > TOLERANCE} == {}, "\n".join([*beyond, *said])
    for rid, (metadata, _tensors) in captured.dumps.items():
        assert (metadata["sglang_version"], metadata["tp_size"]) == (release, str(tp_size)), rid
    assert most_requests_in_a_forward(captured.log.read_text()) > 1, "no forward held the rows of several requests"


def test_the_layers_of_the_reference_differ(states_of):
    """Else a state of the wrong layer would pass."""
    for structure in models.STRUCTURES:
        joined = {name: torch.cat([states_of(structure)[rid][name] for rid in RECORDS]) for name in states_of(structure)["hsb-0"]}
        joined.pop(PRE_NORM)  # It is the last layer's output.
        assert INPUT_IDS not in joined
        for one, other in itertools.combinations(joined, 2):
            assert (joined[one] - joined[other]).abs().max() > DISTINCT * joined[one].abs().max(), f"{structure}: {one} is {other}"


def most_requests_in_a_forward(log: str) -> int:
    return max(int(count) for count in re.findall(r"Prefill batch.*?#new-seq: (\d+)", log))
