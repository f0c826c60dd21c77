# SPDX-License-Identifier: GPL-3.0-or-later
"""The audit finds each fault that a patch could have: a patched model in small, and then something wrong with it."""

from __future__ import annotations

import ast

import audit
import inserted
import matrix
import pytest

LAYER = """

class Layer:
    def forward(self, positions, hidden_states, forward_batch, residual):
        hidden_states, residual = self.input_norm(hidden_states, residual)
        return self.mlp(hidden_states), residual
"""
MODEL = """from sglang.srt.layers.layernorm import RMSNorm


class Model:
    def __init__(self, config):
        self.layers = [Layer() for _ in range(config.layers)]
        self.norm = RMSNorm(config.hidden_size)

    def forward(self, input_ids, positions, forward_batch):
        hidden_states, residual = self.embed(input_ids), None
        for i in range(len(self.layers)):
            hidden_states, residual = self.layers[i](positions, hidden_states, forward_batch, residual)
        hidden_states, _ = self.norm(hidden_states, residual)
        return hidden_states
"""
TUPLE = MODEL + LAYER
SINGLE = TUPLE.replace("self.norm(hidden_states, residual)", "self.norm(hidden_states)").replace("hidden_states, _ = ", "hidden_states = ")
SINGLE = SINGLE.replace("hidden_states, residual = self.layers", "hidden_states = self.layers")
STREAM = SINGLE.replace("self.norm(hidden_states)", "residual_batch.final_norm(hidden_states, forward_batch, self.norm)")
OWN = "forward_batch, residual, capture_output=aux.capture if i in self.layers_to_capture else None)"
KEYWORD = STREAM.replace("forward_batch, residual)\n        h", OWN + "\n        h").replace(
    "return self.mlp", "self.boundary.prepare(hidden_states, capture=capture_output)\n        return self.mlp"
)
LOOP = "        for i in range(len(self.layers)):\n"
BEGUN = '        _hs = _hs_of(self) if _hs_asked else getattr(self, "_hs_capture", None)\n'
NORM = "        # hidden_state.bridge begin norm\n"


@pytest.fixture
def patched(tmp_path):
    """Patch a source; the text with what was inserted."""

    def patch(source: str) -> str:
        path = tmp_path / "sglang" / "srt" / "models" / "model.py"
        path.parent.mkdir(parents=True)
        path.write_text(source)
        return matrix.hs_patcher.apply(path, dry_run=True, originals=str(tmp_path)).after.decode()

    return patch


@pytest.mark.parametrize("source", [TUPLE, SINGLE, STREAM, KEYWORD], ids=["tuple", "single", "stream", "keyword"])
def test_what_the_patcher_makes_is_without_doubt(patched, source):
    tree = ast.parse(patched(source))
    assert audit.problems(tree) == []
    assert ast.dump(inserted.without_patch(tree)) == ast.dump(ast.parse(source))


@pytest.mark.parametrize(
    ("source", "old", "new", "doubt"),
    [
        (
            TUPLE,
            "_hs.output(i, hidden_states, residual)",
            "_hs.output(i, hidden_states)",
            "hidden_states is captured, the final norm takes in",
        ),
        (
            TUPLE,
            "_hs.output(i, hidden_states, residual)",
            "_hs.output(i, residual, hidden_states)",
            "takes in hidden_states, the layers give",
        ),
        (TUPLE, "_hs.output(i, ", "_hs.output(j, ", "layers are counted by j"),
        (TUPLE, LOOP, LOOP + "            if i:\n                continue\n", "can be left early"),
        (TUPLE, NORM, "        pass\n" + NORM, "does not end at the final norm"),
        (TUPLE, "_hs.finish(hidden_states, _)", "_hs.finish(_, hidden_states)", "does not end at the final norm"),
        (
            TUPLE,
            "        hidden_states, _ =",
            "        hidden_states = hidden_states * 2\n        hidden_states, _ =",
            "changes the state between",
        ),
        (TUPLE, "        hidden_states, _ =", "        residual.mul_(2)\n        hidden_states, _ =", "changes the state between"),
        (
            TUPLE,
            "        hidden_states, _ =",
            "        hidden_states = self.norm(hidden_states)\n        hidden_states, _ =",
            "leaves the residual out",
        ),
        (TUPLE, "        hidden_states, _ =", "        other(self.norm.weight)\n        hidden_states, _ =", "in another way"),
        (
            TUPLE,
            "        hidden_states, _ =",
            "        self.layers[0](1, forward_batch)\n        hidden_states, _ =",
            "is called outside the loop",
        ),
        (TUPLE, LOOP, "        for again in range(2):\n          pass\n" + LOOP, None),
        (
            TUPLE,
            BEGUN,
            "        if self.fused:\n            return 1\n" + BEGUN,
            "can return before",
        ),
        (TUPLE, BEGUN, "", "does not begin before the loop"),
        (TUPLE, BEGUN, "        _hs = self._hs_capture\n", "which a class that inherits it may not have"),
        (
            TUPLE,
            "hidden_states, residual = self.input_norm(hidden_states, residual)",
            "residual = hidden_states",
            "does not read the residual",
        ),
        (TUPLE, "class Layer:", "class RMSNorm:\n    pass\n\n\nclass Layer:", "of the file's own, which shows no sum"),
        (TUPLE, "input_ids", "hidden_states", "takes no input_ids and is made 0 times"),
        (TUPLE, "return hidden_states\n", "return LogitsProcessorOutput(hidden_states)\n", "is a draft model's"),
        (
            SINGLE,
            "hidden_states = self.layers",
            "hidden_states, residual = self.layers",
            "carries a residual that the final norm leaves out",
        ),
        (SINGLE, "_hs.output(i, hidden_states)", "_hs.stream(i, hidden_states, forward_batch)", "the final norm takes in something else"),
        (STREAM, "_hs.stream(i, hidden_states, forward_batch)", "_hs.begin(forward_batch)", "does not end with a record"),
        (STREAM, "forward_batch, self.norm)", "forward_batch, self.norm, scale=2)", "is given scale"),
        (KEYWORD, "    def forward(self, positions", "    def forward(self, forward_batch", None),
        (KEYWORD, "else _hs.callback(", "else _hs.other(", "does not end with a record"),
        (KEYWORD, "_hs_open(self, ", "_hs_other(self, ", "_hs_open is called 0 times"),
    ],
)
def test_a_fault_is_found(patched, source, old, new, doubt):
    text = patched(source)
    assert old in text
    found = audit.problems(ast.parse(text.replace(old, new)))
    if doubt is None:
        assert found == []
    else:
        assert doubt in "\n".join(found)


def test_layers_that_run_again_are_found(patched):
    lines = patched(TUPLE).splitlines(keepends=True)
    first = lines.index(LOOP)
    last = next(number for number, line in enumerate(lines) if line.startswith("        hidden_states, _ ="))
    lines[first:last] = ["        for again in range(2):\n", *("    " + line for line in lines[first:last])]
    assert "layers run more than once" in "\n".join(audit.problems(ast.parse("".join(lines))))


def test_own_collectors_that_change_states_are_found(patched):
    closure = "        def prepared(value, owned=False):\n            value = value * 2\n\n"
    text = patched(KEYWORD.replace("aux.capture if", "prepared if").replace(LOOP, closure + LOOP))
    assert "own collector prepared changes the states" in "\n".join(audit.problems(ast.parse(text)))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("_hs.finish(hidden_states, _)", "hidden_states = _hs.finish(hidden_states, _)"),
        ("_hs.finish(hidden_states, _)", "_hs.finish(hidden_states.zero_(), _)"),
        ("if _hs is not None:", "if True:"),
    ],
)
def test_what_would_act_without_a_capture_is_not_taken_out(patched, old, new):
    tree = ast.parse(patched(TUPLE).replace(old, new))
    assert ast.dump(inserted.without_patch(tree)) != ast.dump(ast.parse(TUPLE))
