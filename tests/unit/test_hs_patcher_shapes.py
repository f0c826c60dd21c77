# SPDX-License-Identifier: Apache-2.0
"""The rule of each shape of decoder loop, and what each rule refuses.

The releases themselves are in tests/releases: here is one small source a rule.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from model_source import SOURCE, install

import hs_patcher

KEYWORD = """captured_last_layer_outputs=(
                        aux_hidden_states if i in self.layers_to_capture else None
                    ),"""
LAYER = """
class Layer:
    def forward(self, positions, hidden_states, forward_batch, capture_output=None):
        return self.attn_boundary.prepare(hidden_states, forward_batch, capture=capture_output)


class Model:
    def __init__(self, config):
        self.layers = make_layers(config.num_hidden_layers)
        self.norm = RMSNorm(config.hidden_size)

    def forward(self, input_ids, positions, forward_batch):
        hidden_states = self.embed(input_ids)
        residual = None
"""
TUPLE = (
    "from sglang.layers import RMSNorm\n"
    + LAYER
    + """        for i in range(len(self.layers)):
            layer = self.layers[i]
            hidden_states, residual = layer(positions, hidden_states, forward_batch, residual)
        hidden_states, _ = self.norm(hidden_states, residual)
        return hidden_states
"""
)
SINGLE = (
    "from sglang.layers import RMSNorm\n"
    + LAYER
    + """        for layer in self.layers:
            hidden_states = layer(positions, hidden_states, forward_batch)
        return self.norm(hidden_states)
"""
)
STREAM = (
    "from sglang.layers import RMSNorm, residual_batch\n"
    + LAYER
    + """        for i, layer in enumerate(self.layers):
            hidden_states = layer(positions, hidden_states, forward_batch)
        return residual_batch.final_norm(hidden_states, forward_batch, self.norm)
"""
)
KEYWORD_STREAM = STREAM.replace(
    "layer(positions, hidden_states, forward_batch)",
    "layer(positions, hidden_states, forward_batch, capture_output=aux.capture if i in self.layers_to_capture else None)  # own",
)


def patched(tmp_path: Path, source: str) -> hs_patcher.Result:
    """Apply to `source`; a second apply and a revert have to give what they must."""
    model = install(tmp_path, source)
    originals = str(tmp_path / "originals")
    result = hs_patcher.apply(model, originals=originals)
    compile(result.after, "patched", "exec")
    assert [change.name for change in result.changes] == list(hs_patcher.CHANGES)
    assert not hs_patcher.apply(model, originals=originals).changed
    hs_patcher.revert(model, originals=originals)
    assert model.read_text() == source
    return result


def inserted(result: hs_patcher.Result, change: str) -> str:
    return next(one.text for one in result.changes if one.name == change)


def own_keyword(result: hs_patcher.Result, name: str) -> str:
    """The value that the patched layer call gives SGLang's keyword."""
    calls = [node for node in ast.walk(ast.parse(result.after)) if isinstance(node, ast.Call)]
    values = [keyword.value for call in calls for keyword in call.keywords if keyword.arg == name and isinstance(keyword.value, ast.IfExp)]
    return ast.unparse(values[0])


@pytest.mark.parametrize(
    ("source", "family", "loop", "norm"),
    [
        (TUPLE, "tuple", "_hs.output(i, hidden_states, residual)", "_hs.finish(hidden_states, _)"),
        (TUPLE.replace("hidden_states, _ = self.norm", "hidden_states = self.norm"), "tuple", "_hs.output(i,", "_hs.watch(self.norm)"),
        (SINGLE, "single", "_hs.output(None, hidden_states)", "_hs.watch(self.norm)"),
        (STREAM, "stream", "_hs.stream(i, hidden_states, forward_batch)", "_hs.watch(self.norm)"),
        (STREAM.replace(".final_norm", ".norm"), "stream", "_hs.stream(i, ", "_hs.watch(self.norm)"),
        (KEYWORD_STREAM, "keyword-stream", "_hs.callback(", "_hs.watch(self.norm)"),
    ],
)
def test_each_shape_is_captured_where_its_state_is_complete(tmp_path: Path, source: str, family: str, loop: str, norm: str) -> None:
    result = patched(tmp_path, source)
    assert result.family == family
    assert loop in inserted(result, "layer loop")
    assert norm in inserted(result, "after the norm")


@pytest.mark.parametrize(
    ("changes", "family"),
    [
        ([], "D"),
        ([("hidden_states, residual, topk_indices = layer", "hidden_states, residual = layer"), (KEYWORD, "")], "B"),
        (
            [
                ("hidden_states, residual, topk_indices = layer", "hidden_states, residual = layer"),
                (KEYWORD, ""),
                ("self.pp_group", "self.last"),
            ],
            "A",
        ),
        ([(KEYWORD, "")], "C"),
    ],
)
def test_deepseek_v2_has_letters(tmp_path: Path, changes: list, family: str) -> None:
    source = SOURCE
    for old, new in changes:
        assert old in source
        source = source.replace(old, new)
    assert patched(tmp_path, source).family == family


def test_the_turn_of_the_loop_ends_with_what_the_next_layer_takes_in(tmp_path: Path) -> None:
    source = TUPLE.replace("        hidden_states, _", "            hidden_states = hidden_states + 1\n        hidden_states, _")
    result = patched(tmp_path, source)
    loop = next(node for node in ast.walk(ast.parse(result.after)) if isinstance(node, ast.For))
    assert ast.unparse(loop.body[-1]) == "if _hs is not None:\n    _hs.output(i, hidden_states, residual)"
    assert ast.unparse(loop.body[-2]) == "hidden_states = hidden_states + 1"


def test_own_collector_is_handed_on_from_within_a_line(tmp_path: Path) -> None:
    result = patched(tmp_path, KEYWORD_STREAM)
    own = "aux.capture if i in self.layers_to_capture else None"
    assert own_keyword(result, "capture_output") == f"({own}) if _hs is None else _hs.callback(i, {own})"
    # The comment behind the call stays where it was.
    assert b"  # own\n" in result.after


def test_own_collector_of_a_bracketed_expression(tmp_path: Path) -> None:
    one_line = SOURCE.replace(KEYWORD, "captured_last_layer_outputs=(aux_hidden_states if i in self.layers_to_capture else None),")
    own = "aux_hidden_states if i in self.layers_to_capture else None"
    for number, source in enumerate((SOURCE, one_line)):
        result = patched(tmp_path / str(number), source)
        assert own_keyword(result, "captured_last_layer_outputs") == f"({own}) if _hs is None else _hs.collector(i, {own})"


def test_a_layer_that_does_not_prepare_with_the_keyword_is_not_trusted(tmp_path: Path) -> None:
    source = KEYWORD_STREAM.replace("capture=capture_output", "other=None")
    assert patched(tmp_path, source).family == "stream"


def test_twin_loops_in_two_branches(tmp_path: Path) -> None:
    loop = TUPLE[TUPLE.index("        for i in") : TUPLE.index("        hidden_states, _")]
    inner = "".join("    " + line + "\n" for line in loop.splitlines())
    source = TUPLE.replace(loop, f"        if self.quick:\n{inner}        else:\n{inner}")
    result = patched(tmp_path, source)
    assert result.after.count(b"_hs.output(i, hidden_states, residual)") == 2


def test_a_return_at_the_end_of_init_stays_the_end(tmp_path: Path) -> None:
    source = TUPLE.replace("RMSNorm(config.hidden_size)\n", "RMSNorm(config.hidden_size)\n        return\n")
    init = next(node for node in ast.walk(ast.parse(patched(tmp_path, source).after)) if getattr(node, "name", "") == "__init__")
    assert [ast.unparse(node) for node in init.body[-2:]] == ["self._hs_capture = _hs_open(self, 'layers', 'norm')", "return"]


def test_a_model_that_inherits_its_start_gets_one(tmp_path: Path) -> None:
    start = SINGLE.index("    def __init__")
    source = (SINGLE[:start] + SINGLE[SINGLE.index("    def forward(self, input_ids") :]).replace("class Model:", "class Model(Base):")
    owner = next(node for node in ast.parse(patched(tmp_path, source).after).body if getattr(node, "name", "") == "Model")
    assert ast.unparse(owner.body[-1]).splitlines() == [
        "def __init__(self, *args, **kwargs):",
        "    super().__init__(*args, **kwargs)",
        "    self._hs_capture = _hs_open(self, 'layers', 'norm')",
    ]


def test_a_state_that_the_norm_takes_in_converted_is_captured_so(tmp_path: Path) -> None:
    source = SINGLE.replace(
        "        return self.norm(hidden_states)",
        "        narrow = hidden_states.to(self.dtype)\n        return self.norm(narrow).to(self.dtype)",
    )
    result = patched(tmp_path, source)
    assert "_hs.output(None, hidden_states.to(self.dtype))" in inserted(result, "layer loop")


OWN_NORM = """
class RMSNorm:
    def forward(self, hidden_states, residual=None):
        return hidden_states * 2, residual
"""


def test_a_norm_of_the_file_that_hands_the_residual_on_does_not_add_it(tmp_path: Path) -> None:
    source = TUPLE.replace("\nclass Layer:", OWN_NORM + "\n\nclass Layer:")
    result = patched(tmp_path / "0", source)
    assert result.family == "single"
    assert "_hs.output(i, hidden_states)" in inserted(result, "layer loop")
    assert "_hs.watch(self.norm, False)" in inserted(result, "after the norm")
    for number, (old, new) in enumerate(
        [("hidden_states * 2, residual", "hidden_states + residual, residual"), ("* 2, residual", "* 2, residual * 2")], 1
    ):
        model = install(tmp_path / str(number), source.replace(old, new))
        with pytest.raises(hs_patcher.Refused, match="whether it adds the residual cannot be told"):
            hs_patcher.apply(model, originals=str(tmp_path / "originals"))


def test_an_encoder_without_a_norm_ends_with_its_loop(tmp_path: Path) -> None:
    source = SINGLE.replace("return self.norm(hidden_states)", "return hidden_states")
    result = patched(tmp_path / "0", source)
    assert "_hs.finish(None, None)" in inserted(result, "after the norm")
    assert b'_hs_open(self, "layers", None)' in result.after
    model = install(
        tmp_path / "1", source.replace("return hidden_states\n", "hidden_states = other(hidden_states)\n        return hidden_states\n")
    )
    with pytest.raises(hs_patcher.Refused, match="expected one final norm"):
        hs_patcher.apply(model, originals=str(tmp_path / "originals"))


def test_of_encoder_and_decoder_the_one_that_takes_tokens_is_patched(tmp_path: Path) -> None:
    start = SINGLE.index("class Model:")
    encoder = (
        SINGLE[start:]
        .replace("class Model:", "class Encoder:")
        .replace("self, input_ids, ", "self, sound, ")
        .replace("embed(input_ids)", "x")
    )
    result = patched(tmp_path, SINGLE[:start] + encoder + "\n\n" + SINGLE[start:])
    owner = next(node for node in ast.parse(result.after).body if getattr(node, "name", "") == "Encoder")
    assert "_hs" not in ast.unparse(owner)


def test_a_sum_that_sglang_completes_behind_the_loop(tmp_path: Path) -> None:
    source = TUPLE.replace(BETWEEN, "        hidden_states = tensor_model_parallel_all_reduce(hidden_states)\n" + BETWEEN)
    assert patched(tmp_path, source).family == "tuple"


BETWEEN = "        hidden_states, _ = self.norm"
REFUSED = {
    "no loop": (TUPLE, "forward_batch, residual)", "residual)", "no class has a forward that calls its layers"),
    "no forward": (TUPLE, "def forward(self, input_ids", "def run(self, input_ids", "no class has a forward"),
    "left early": (
        TUPLE,
        "            layer = self",
        "            if not i:\n                continue\n            layer = self",
        "can be left at line",
    ),
    "other layers": (TUPLE, "layer = self.layers[i]", "layer = self.layers[i + 1]", "no class has a forward that calls its layers"),
    "attribute results": (TUPLE, "hidden_states, residual = layer", "self.h, residual = layer", "does not unpack into plain names"),
    "norm renamed": (TUPLE, "RMSNorm(config", "Scale(config", "expected one final norm"),
    "no norm": (TUPLE, "hidden_states, _ = self.norm(hidden_states, residual)", "pass", "expected one final norm"),
    "norm of the file": (
        TUPLE,
        "class Layer:",
        "class RMSNorm:\n    pass\n\n\nclass Layer:",
        "whether it adds the residual cannot be told",
    ),
    "strange residual": (
        TUPLE,
        "self.norm(hidden_states, residual)",
        "self.norm(hidden_states, other)",
        "takes in other, which the layers do not",
    ),
    "too much": (TUPLE, "self.norm(hidden_states, residual)", "self.norm(hidden_states, residual, 1)", "takes in more than the residual"),
    "changed between": (TUPLE, BETWEEN, "        hidden_states = hidden_states * 2\n" + BETWEEN, "changes hidden_states between"),
    "changed in place": (TUPLE, BETWEEN, "        residual.mul_(2)\n" + BETWEEN, "changes .*residual between"),
    "no init": (TUPLE, "def __init__", "def setup", r"expected one method Model\.__init__, found 0"),
    "early return": (TUPLE, "        self.norm =", "        if not config:\n            return\n        self.norm =", "returns early"),
    "shared line": (TUPLE, "        self.norm = RMSNorm(config.hidden_size)", "        self.a = 1; self.norm = RMSNorm(1)", "share a line"),
    "nested": (
        TUPLE,
        TUPLE[TUPLE.index("        for i in") : TUPLE.index(BETWEEN)],
        "        for _ in range(2):\n"
        + "".join("    " + line + "\n" for line in TUPLE[TUPLE.index("        for i in") : TUPLE.index(BETWEEN)].splitlines()),
        "layers run more than once",
    ),
    "second loop": (
        SOURCE,
        "        if not self.pp_group",
        "        for i in range(2):\n            a = self.layers[i](forward_batch)\n        if not self.pp_group",
        "more than one decoder loop",
    ),
    "two results": (
        SOURCE,
        "hidden_states, residual, topk_indices = layer(",
        "hidden_states, topk_indices = layer(",
        "takes in residual, which",
    ),
    "own name": (SOURCE, "aux_hidden_states = []", "aux_hidden_states = _hs = []", "already uses the names _hs"),
    "no imports": (SINGLE, "from sglang.layers import RMSNorm\n", "", "it imports nothing"),
    "single deepseek": (SINGLE, "class Model:", "class DeepseekV2Model:", "of the shape 'single' is in no release"),
    "twice": (TUPLE, "class Layer:", "class Model:\n    pass\n\n\nclass Layer:", "class Model is there twice"),
    "two forwards": (
        TUPLE,
        "    def forward(self, input_ids",
        "    def forward(self):\n        pass\n\n    def forward(self, input_ids",
        "forward is there twice",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_shown_is_refused_and_stays(tmp_path: Path, name: str) -> None:
    source, old, new, reason = REFUSED[name]
    assert source.count(old) == 1
    model = install(tmp_path, source.replace(old, new))
    before = model.read_bytes()
    with pytest.raises(hs_patcher.Refused, match=reason):
        hs_patcher.apply(model, originals=str(tmp_path / "originals"))
    assert model.read_bytes() == before
    assert not (model.parent.parent / "hs_capture").exists()


def test_a_model_that_builds_on_another_says_which(tmp_path: Path) -> None:
    model = install(tmp_path, "from sglang.srt.models.qwen2 import Qwen2Model\n\n\nclass Qwen3Model(Qwen2Model):\n    pass\n")
    with pytest.raises(hs_patcher.Refused, match=r"it builds on qwen2: one of those may hold it"):
        hs_patcher.apply(model, originals=str(tmp_path / "originals"))
