# SPDX-License-Identifier: GPL-3.0-or-later
"""Which model files hold a decoder, told by their structure and without asking the patcher.

A decoder model file has a class whose `forward` takes `forward_batch` and holds a `for` loop that calls a layer with
`forward_batch`. A layer is the loop's own variable (`for layer in self.layers`, also sliced or enumerated), a name that
the loop binds to an element of an attribute of self (`layer = self.layers[i]`), or such an element (`self.layers[i](...)`);
`layer.forward(...)` is a call of it too.

Files whose only such classes are draft models of speculative decoding do not count: a draft's forward reads the target's states
from `forward_batch.spec_info`, or ends in a LogitsProcessorOutput of its own because the target has the head. Encoders count:
nothing in their structure tells them apart.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Decoder(NamedTuple):
    """A decoder loop: its class, the forward, the loop, and the calls of layers in it."""

    owner: ast.ClassDef
    forward: ast.FunctionDef
    loop: ast.For
    calls: list[ast.Call]


def model_files(release: Path) -> Iterator[Path]:
    """Every file under `sglang/srt/models` of an unpacked release, sorted."""
    yield from sorted((release / "sglang" / "srt" / "models").rglob("*.py"))


def is_decoder_file(data: bytes) -> bool:
    # Most files are told apart without parsing them.
    return b"forward_batch" in data and any(not is_draft(found.forward) for found in decoders(ast.parse(data)))


def is_draft(forward: ast.FunctionDef) -> bool:
    """Whether a forward is a draft model's."""
    for node in ast.walk(forward):
        if isinstance(node, ast.Attribute) and node.attr == "spec_info":
            return True
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "LogitsProcessorOutput":
            return True
    return False


def decoders(tree: ast.Module) -> list[Decoder]:
    """All decoder loops of a file; of loops within each other every one that calls a layer."""
    found = []
    for owner in [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]:
        for forward in [node for node in owner.body if isinstance(node, ast.FunctionDef) and node.name == "forward"]:
            arguments = [*forward.args.posonlyargs, *forward.args.args, *forward.args.kwonlyargs]
            if "forward_batch" not in [argument.arg for argument in arguments]:
                continue
            for loop in [node for node in ast.walk(forward) if isinstance(node, ast.For)]:
                calls = layer_calls(loop)
                if calls:
                    found.append(Decoder(owner, forward, loop, calls))
    return found


def layer_calls(loop: ast.For) -> list[ast.Call]:
    """The calls of layers with `forward_batch` in a loop, in the order of the source."""
    layers = {node.id for node in ast.walk(loop.target) if isinstance(node, ast.Name)}
    for node in ast.walk(loop):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and _element_of_self(node.value):
            layers.add(node.targets[0].id)
    calls = []
    for node in ast.walk(loop):
        if not isinstance(node, ast.Call):
            continue
        called = node.func
        if isinstance(called, ast.Attribute) and called.attr == "forward":
            called = called.value
        if not (_element_of_self(called) or isinstance(called, ast.Name) and called.id in layers):
            continue
        given = [*node.args, *(keyword.value for keyword in node.keywords)]
        if any(isinstance(value, ast.Name) and value.id == "forward_batch" for value in given):
            calls.append(node)
    return sorted(calls, key=lambda call: (call.lineno, call.col_offset))


def _element_of_self(node: ast.AST) -> bool:
    """`self.X[...]`"""
    return (
        isinstance(node, ast.Subscript)
        and isinstance(node.value, ast.Attribute)
        and isinstance(node.value.value, ast.Name)
        and node.value.value.id == "self"
    )
