# SPDX-License-Identifier: GPL-3.0-or-later
"""Edits to a clone of a released SGLang that make visible on a CPU what happens on GPUs: partial sums, forwards from a graph."""

from __future__ import annotations

import ast
import os
import shutil
import textwrap
from pathlib import Path

from engines import Engine

# The kernel that reduces and normalizes at once is for GPUs. Here the next layer does it in two steps, at the same place:
# so what the layer loop holds is what it holds on a GPU.
FORCE_FUSION = """

def _leave_the_sum(self, forward_batch):
    return not self.is_last_layer and self._context.tp_size > 1


def _take_the_sum(self, x, residual, *rest, **named):
    return self.forward(tensor_model_parallel_all_reduce(x), residual)


from sglang.srt.distributed import tensor_model_parallel_all_reduce
from sglang.srt.layers.layernorm import RMSNorm

LayerCommunicator.should_fuse_mlp_allreduce_with_next_layer = _leave_the_sum
RMSNorm.forward_with_allreduce_fusion = _take_the_sum
"""

BYPASS = """

{recorded}

_called = DeepseekV2Model.forward


def _called_or_recorded(self, input_ids, *rest, **named):
    return (_recorded if len(input_ids) <= {tokens} else _called)(self, input_ids, *rest, **named)


DeepseekV2Model.forward = _called_or_recorded
"""


def force_allreduce_fusion(engine: Engine) -> None:
    """Let every layer but the last leave its all-reduce to the next one (releases before 0.5.21)."""
    path = engine.package / "srt" / "layers" / "communicator.py"
    source = path.read_text(encoding="utf-8")
    if "    def should_fuse_mlp_allreduce_with_next_layer(" not in source:
        raise AssertionError(f"{path} does not decide about the fusion: force it elsewhere for SGLang {engine.release}")
    _replace(path, source + FORCE_FUSION)


def record_naive_sums(engine: Engine) -> None:
    """Let DeepseekV2Model.forward write `hidden + residual` after each layer, by naive_sum.py."""
    shutil.copy(Path(__file__).with_name("naive_sum.py"), engine.site)
    path = engine.model_file("deepseek_v2")
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    tree = ast.parse("".join(lines))
    model = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "DeepseekV2Model")
    loop, call = next(
        (loop, node)
        for loop in ast.walk(model)
        if isinstance(loop, ast.For)
        for node in ast.walk(loop)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "layer"
    )
    names = [ast.unparse(name) for name in call.targets[0].elts]
    residual = "residual" if "residual" in names else "None"
    record = f"__import__('naive_sum').record({loop.target.id}, {names[0]}, {residual}, forward_batch)\n"
    lines.insert(call.end_lineno, " " * call.col_offset + record)
    _replace(path, "".join(lines))


def forward_as_from_a_graph(engine: Engine, tokens: int) -> None:
    """Let batches of up to that many tokens run the layer loop as it is before a patch, as a graph that was recorded then does.

    To be called before the engine is patched: the patch finds its place in the class, and this stands behind it.
    """
    path = engine.model_file("deepseek_v2")
    source = path.read_text(encoding="utf-8")
    model = next(node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == "DeepseekV2Model")
    forward = next(node for node in model.body if isinstance(node, ast.FunctionDef) and node.name == "forward")
    recorded = textwrap.dedent(ast.get_source_segment(source, forward, padded=True)).replace("def forward(", "def _recorded(", 1)
    _replace(path, source + BYPASS.format(recorded=recorded, tokens=tokens))


def _replace(path: Path, source: str) -> None:
    """By renaming: the file is a hard link to the engine's own."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(source, encoding="utf-8")
    os.replace(temporary, path)
