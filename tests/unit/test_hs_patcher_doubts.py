# SPDX-License-Identifier: Apache-2.0
"""Loops of a known shape that would still give wrong states, and their like that give right ones.

Each is a model of a release in small: the file name stands beside it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from model_source import SOURCE, install
from test_hs_patcher_shapes import SINGLE, STREAM, TUPLE, inserted, patched

import hs_patcher

LAYER = """

class TupleLayer:
    def forward(self, positions, hidden_states, forward_batch, residual):
"""
# What a layer does with the residual that it is given.
READS = """        if hidden_states.shape[0] == 0:
            residual = hidden_states
        elif residual is None:
            residual = hidden_states
        else:
            hidden_states, residual = self.norm(
                hidden_states, residual
            )
        return hidden_states, residual
"""
OVERWRITES = """        residual = hidden_states
        hidden_states = residual + self.mlp(hidden_states)
        return hidden_states, residual
"""
GIVES_TWICE = """        if residual is None:
            residual = hidden_states
        hidden_states = residual + self.mlp(hidden_states)
        residual = hidden_states
        return hidden_states, residual
"""
GIVES_NONE = """        hidden_states = residual + self.mlp(hidden_states)
        return hidden_states, None
"""
ALONE = TUPLE.replace("hidden_states, _ = self.norm(hidden_states, residual)", "hidden_states = self.norm(hidden_states)")
# Without input_ids the class is a part of a model.
PART = SINGLE.replace("def forward(self, input_ids,", "def forward(self, hidden_states,").replace(
    "hidden_states = self.embed(input_ids)", "pass"
)


@pytest.mark.parametrize(
    ("source", "family"),
    [
        (TUPLE + LAYER + READS, "tuple"),
        (ALONE + LAYER + OVERWRITES, "single"),  # phimoe.py
        (ALONE + LAYER + GIVES_TWICE, "single"),  # exaone4.py
        (ALONE + LAYER + GIVES_NONE, "single"),  # glm_image_vl.py
        (PART + "\nmade = Model(1)\n", "single"),  # chatglm.py
        (TUPLE.replace(" = layer(", " = layer.forward("), "tuple"),  # nemotron_h.py
        (  # iquest_q1.py
            STREAM.replace(
                "residual_batch.final_norm(hidden_states, forward_batch, self.norm)",
                "self.norm(residual_batch.take_output(hidden_states, forward_batch))",
            )
            + "\n\nclass RMSNorm:\n    pass\n",
            "stream",
        ),
    ],
)
def test_what_is_right_is_applied(tmp_path: Path, source: str, family: str) -> None:
    assert patched(tmp_path, source).family == family


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        # beam.py: another method runs the layers.
        (
            SINGLE.replace("        for layer in", "        if self.fuse:\n            return self.run()\n        for layer in"),
            "can return at line",
        ),
        # hrm_text.py: two stacks, each run several times.
        (PART + "\nmade = [Model(1), Model(2)]\n", "takes no input_ids and is made 2 times"),
        # zaya.py: the norm merges with scales of its own.
        (STREAM + "\n\nclass RMSNorm:\n    pass\n", "is a RMSNorm of this file"),
        # kimi_k3.py: something else reads the state on the other way.
        (
            TUPLE.replace(
                "        hidden_states, _ =",
                "        if self.bank:\n            self.bank(residual, self.norm)\n        hidden_states, _ =",
            ),
            "hands the final norm to self.bank",
        ),
        # granitemoehybrid.py: the layers give out the whole state, and the norm adds a part of it again.
        (TUPLE + LAYER + OVERWRITES, "TupleLayer overwrites the residual"),
        (ALONE + LAYER + READS, "TupleLayer reads the residual"),
    ],
)
def test_what_is_wrong_is_refused(tmp_path: Path, source: str, reason: str) -> None:
    model = install(tmp_path, source)
    with pytest.raises(hs_patcher.Refused, match=reason):
        hs_patcher.apply(model, originals=str(tmp_path / "originals"))
    assert model.read_text() == source


def test_the_turn_of_a_part_is_counted(tmp_path: Path) -> None:
    assert "_hs.output(None, hidden_states)" in inserted(patched(tmp_path, PART + "\nmade = Model(1)\n"), "layer loop")


def test_a_model_in_a_directory_of_its_own(tmp_path: Path) -> None:
    """The runtime is where the patched file imports it from, and stays while another file needs it."""
    model = install(tmp_path, SOURCE)
    inner = model.parent / "common" / "modeling.py"
    inner.parent.mkdir()
    inner.write_text(TUPLE)
    originals = str(tmp_path / "originals")
    runtime = model.parent.parent / "hs_capture"
    for path in (inner, model):
        assert hs_patcher.apply(path, originals=originals).runtime_dir == str(runtime)
    hs_patcher.revert(model, originals=originals)
    assert (runtime / "capture.py").is_file()
    hs_patcher.revert(inner, originals=originals)
    assert not runtime.exists()
    assert inner.read_text() == TUPLE
