# SPDX-License-Identifier: GPL-3.0-or-later
"""Whether a patched model file captures what its final norm takes in, told from its syntax tree alone.

This is a second opinion: it knows what the patch inserts, but none of the rules by which the patcher chose the places. The state after a layer
is what the final norm would take in if the stack ended there: `hidden`, `hidden + residual`, or SGLang's own stream.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

import decoders
import inserted

# SGLang's own steps between the loop and the final norm that leave the state what it is. Two-batch overlap runs layers
# outside the loop: the capture runtime counts layers and refuses such a forward.
KEEPING = {"model_forward_maybe_tbo", "model_forward_stages", "residual_batch.complete_output", "residual_batch.fold"}
# It completes a sum that the capture has refused by then.
KEEPING |= {"tensor_model_parallel_all_reduce"}
STREAM_NORMS = {"residual_batch.norm", "residual_batch.final_norm"}
RECORDS = {"output", "stream"}
# What a final norm may be given beside the state: none of it changes what a layer has given out.
EXTRAS = {"skip_empty", "capture", "capture_output", "finalize_norm", "post_residual_addition"}


class _Hook(NamedTuple):
    """What the patch made of a model class."""

    tree: ast.Module
    owner: ast.ClassDef
    norm: str
    found: list[decoders.Decoder]


class _Use(NamedTuple):
    """One use of the final norm behind the loop, and what it takes in."""

    call: ast.Call
    taken: str | None
    residual: str | None


def problems(tree: ast.Module) -> list[str]:
    """Everything that makes the states of a patched file doubtful; empty where nothing does."""
    opened = [
        (owner, call)
        for owner in tree.body
        if isinstance(owner, ast.ClassDef)
        for call in ast.walk(owner)
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "_hs_open"
    ]
    if len(opened) != 1:
        return [f"_hs_open is called {len(opened)} times"]
    owner, call = opened[0]
    wanted = decoders.decoders(tree)
    hook = _Hook(tree, owner, call.args[2].value, [found for found in wanted if found.owner is owner])
    if not hook.found:
        return [f"class {owner.name} has no decoder loop"]
    doubts = [f"the loop of {found.owner.name} is not hooked" for found in wanted if found.owner is not owner]
    doubts += _of_class(hook)
    for found in hook.found:
        doubts += _of_loop(found) + _of_norm(hook, found)
    return sorted(set(doubts))


def _of_class(hook: _Hook) -> list[str]:
    doubts = []
    forward = hook.found[0].forward
    if decoders.is_draft(forward):
        doubts.append("the class is a draft model's")
    made = [node for node in ast.walk(hook.tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == hook.owner.name]
    if "input_ids" not in [argument.arg for argument in forward.args.args] and len(made) != 1:
        doubts.append(f"{hook.owner.name} takes no input_ids and is made {len(made)} times, so its layers may run more than once")
    first = min(found.loop.lineno for found in hook.found)
    if any(isinstance(node, ast.Return) and node.lineno < first for node in ast.walk(forward)):
        doubts.append("forward can return before the decoder loop")
    begun = [statement for statement in forward.body if ast.unparse(statement) == inserted.BEGUN]
    if len(begun) != 1 or begun[0].lineno > first:
        doubts.append("the capture does not begin before the loop, in the body of forward itself")
    if any(isinstance(node, ast.Attribute) and node.attr == "_hs_capture" for node in ast.walk(forward)):
        doubts.append("forward asks for the capture's attribute, which a class that inherits it may not have")
    return doubts + _escapes(hook, forward)


def _escapes(hook: _Hook, forward: ast.FunctionDef) -> list[str]:
    """Layer calls outside the loops, but for two-batch overlap."""
    inside = {id(node) for found in hook.found for node in ast.walk(found.loop)}
    overlap = {
        id(node)
        for branch in ast.walk(forward)
        if isinstance(branch, ast.If) and "can_run_tbo" in ast.unparse(branch.test)
        for statement in branch.body
        for node in ast.walk(statement)
    }
    bound = {
        statement.targets[0].id
        for statement in ast.walk(forward)
        if isinstance(statement, ast.Assign)
        and isinstance(statement.targets[0], ast.Name)
        and isinstance(statement.value, ast.Subscript)
        and inserted.of_self(statement.value.value)
    }
    doubts = []
    for node in ast.walk(forward):
        if isinstance(node, ast.Call) and id(node) not in inside | overlap:
            called = node.func
            element = (
                isinstance(called, ast.Subscript) and inserted.of_self(called.value) or isinstance(called, ast.Name) and called.id in bound
            )
            if element and "forward_batch" in [ast.unparse(given) for given in node.args]:
                doubts.append(f"{ast.unparse(called)} is called outside the loop")
    return doubts


def _of_loop(found: decoders.Decoder) -> list[str]:
    doubts = []
    for outer in ast.walk(found.forward):
        if isinstance(outer, (ast.For, ast.While)) and outer is not found.loop and found.loop in ast.walk(outer):
            doubts.append("the decoder loop is within another loop, so layers run more than once")
    if any(isinstance(node, (ast.Break, ast.Continue, ast.Return)) for node in ast.walk(found.loop)):
        doubts.append("the decoder loop can be left early")
    wrapped = [[keyword for keyword in call.keywords if inserted.wrapped(keyword.value) is not None] for call in found.calls]
    index = {node.id for node in ast.walk(found.loop.target) if isinstance(node, ast.Name)}
    if any(wrapped):
        counted = {ast.unparse(keyword.value.orelse.args[0]) for keywords in wrapped for keyword in keywords}
        if any(len(keywords) != 1 for keywords in wrapped):
            doubts.append("not every layer call has exactly one collector of ours")
        doubts += [doubt for keywords in wrapped for keyword in keywords for doubt in _of_own(found, inserted.wrapped(keyword.value))]
    else:
        record = _record(found)
        if record is None:
            doubts.append("the loop does not end with a record of the state")
        counted = {ast.unparse(record.args[0])} if record is not None else set()
    # None: the runtime counts the turns.
    if counted - index - {"None"}:
        doubts.append(f"layers are counted by {', '.join(sorted(counted))}, which the loop does not give")
    return doubts


def _of_own(found: decoders.Decoder, own: ast.expr) -> list[str]:
    """SGLang's own collector has to take states as they are: then they are what ours is given."""
    value = own.body if isinstance(own, ast.IfExp) else own
    name = value.value if isinstance(value, ast.Attribute) else value
    local = {node.name for node in ast.walk(found.forward) if isinstance(node, ast.FunctionDef)}
    if not isinstance(name, ast.Name):
        return [f"SGLang's own collector is {ast.unparse(own)}, not a name"]
    function = next((node for node in ast.walk(found.forward) if isinstance(node, ast.FunctionDef) and node.name == name.id), None)
    if name.id in local and function is not None:
        first = function.args.args[0].arg
        changed = any(isinstance(node, ast.Name) and node.id == first and isinstance(node.ctx, ast.Store) for node in ast.walk(function))
        return [f"SGLang's own collector {name.id} changes the states it is given"] if changed else []
    return []


def _record(found: decoders.Decoder) -> ast.Call | None:
    """`_hs.output(...)` or `_hs.stream(...)` as the last statement of a turn."""
    call = inserted.guarded(found.loop.body[-1])
    return call if call is not None and ast.unparse(call.func) in {f"_hs.{name}" for name in RECORDS} else None


def _results(found: decoders.Decoder) -> list[str]:
    """The names that the layer call gives; of several calls the first one's."""
    for node in ast.walk(found.loop):
        if isinstance(node, ast.Assign) and node.value in found.calls:
            targets = node.targets[0].elts if isinstance(node.targets[0], ast.Tuple) else node.targets
            return [ast.unparse(target) for target in targets]
    return []


def _of_norm(hook: _Hook, found: decoders.Decoder) -> list[str]:
    record = _record(found)
    given = [ast.unparse(argument) for argument in record.args] if record is not None else [None, *_results(found)]
    if len(given) < 2:
        return ["the layer call gives nothing"]
    hidden = given[1]
    uses, doubts = _uses(hook, found)
    converted = _converted(found)
    uses = [use._replace(taken=converted.get(use.taken, use.taken)) for use in uses]
    pairs = [use for use in uses if use.residual is not None]
    if not uses:
        return [*doubts, f"self.{hook.norm} takes in nothing behind the loop"]
    for use in uses:
        if use.taken != hidden:
            doubts.append(f"the final norm takes in {use.taken}, the layers give {hidden}")
    stream = [use for use in uses if use.residual == "forward_batch"]
    if record is not None and ast.unparse(record.func) == "_hs.output":
        if {use.residual for use in pairs} != set(given[2:3]):
            doubts.append(f"{', '.join(given[1:])} is captured, the final norm takes in {[use.residual for use in pairs]} beside {hidden}")
        doubts += _missing_residual(found, uses, given[2] if len(given) > 2 else None)
    elif record is not None and len(stream) != len(uses):
        doubts.append("SGLang's stream is captured, but the final norm takes in something else")
    elif record is None and not pairs:
        doubts.append("SGLang's collector is used, but the final norm takes in no residual")
    names = [hidden.partition(".to(")[0], *{use.residual for use in pairs} - {"forward_batch"}]
    doubts += _of_layers(hook, bool(pairs) and not stream, found)
    doubts += _changes(found, hook, uses, names)
    if any(not _is_taken_out(use) for use in pairs):
        doubts += _of_classes(hook)
    return doubts + _finished(hook, found, uses)


def _converted(found: decoders.Decoder) -> dict[str | None, str]:
    """Names that behind the loop are given once, as the conversion of another: what they stand for."""
    values: dict[str, list[ast.expr]] = {}
    for node in ast.walk(found.forward):
        if isinstance(node, ast.Assign) and node.lineno > found.loop.end_lineno:
            values.setdefault(ast.unparse(node.targets[0]), []).append(node.value)
    return {name: ast.unparse(given[0]) for name, given in values.items() if len(given) == 1 and inserted.is_conversion(given[0])}


def _is_taken_out(use: _Use) -> bool:
    """`norm(residual_batch.take_output(...))`: SGLang has added the residual by then."""
    return use.residual == "forward_batch" and ast.unparse(use.call.func) not in STREAM_NORMS


def _uses(hook: _Hook, found: decoders.Decoder) -> tuple[list[_Use], list[str]]:
    """Every use of the final norm behind the loop; doubts where it is used in another way than called on the state."""
    uses, doubts, seen = [], [], set()
    calls = [node for node in ast.walk(found.forward) if isinstance(node, ast.Call) and node.lineno > found.loop.end_lineno]
    for call in calls:
        function = call.func
        # norm.forward_native and its like are the same norm.
        called = function.value if isinstance(function, ast.Attribute) and inserted.of_self(function.value) else function
        extras = [keyword for keyword in call.keywords if keyword.arg not in EXTRAS]
        if inserted.of_self(called) == hook.norm and call.args:
            taken = call.args[0]
            stream = isinstance(taken, ast.Call) and ast.unparse(taken.func) == "residual_batch.take_output"
            rest = [*call.args[1:], *(keyword.value for keyword in extras)]
            residual = "forward_batch" if stream else ast.unparse(rest[0]) if rest else None
            uses.append(_Use(call, ast.unparse(taken.args[0] if stream else taken), residual))
            seen.add(id(called))
        elif ast.unparse(function) in STREAM_NORMS and len(call.args) == 3 and inserted.of_self(call.args[2]) == hook.norm:
            uses.append(_Use(call, ast.unparse(call.args[0]), "forward_batch"))
            seen.add(id(call.args[2]))
            doubts += [f"{ast.unparse(function)} is given {keyword.arg}" for keyword in extras]
        elif ast.unparse(function) == "_hs.watch":
            seen.add(id(call.args[0]))
    seen |= {id(node.left) for node in ast.walk(found.forward) if isinstance(node, ast.Compare)}
    for node in ast.walk(found.forward):
        if (
            isinstance(node, ast.Attribute)
            and inserted.of_self(node) == hook.norm
            and node.lineno > found.loop.end_lineno
            and id(node) not in seen
        ):
            doubts.append(f"self.{hook.norm} is also used at line {node.lineno} in another way")
    return uses, doubts


def _missing_residual(found: decoders.Decoder, uses: list[_Use], residual: str | None) -> list[str]:
    """A norm of `hidden` alone beside one of the pair is for a residual that is None."""
    alone = [use for use in uses if use.residual is None]
    if residual is None or not alone:
        return []
    tests = [f"{residual} is None", f"{residual} is not None"]
    branches = [node for node in ast.walk(found.forward) if isinstance(node, ast.If) and ast.unparse(node.test) in tests]
    guarded = {id(node) for branch in branches for node in ast.walk(branch)}
    return ["the final norm leaves the residual out"] if any(id(use.call) not in guarded for use in alone) else []


def _changes(found: decoders.Decoder, hook: _Hook, uses: list[_Use], names: list[str]) -> list[str]:
    """Statements on the way from the loop to the norm that give the state another value."""
    last = max(use.call.lineno for use in uses)
    calls = {id(use.call) for use in uses}
    loops = {id(other.loop) for other in hook.found}
    doubts = []
    blocks = [found.forward.body]
    while blocks:
        for statement in blocks.pop():
            inner = [block for block in (getattr(statement, name, []) for name in ("body", "orelse", "finalbody")) if block]
            holding = [block for block in inner if any(id(node) in calls for part in block for node in ast.walk(part))]
            if id(statement) not in loops:
                # Not on the way: the branches beside one with the norm, and those that return, as in a pipeline stage.
                blocks += holding or [block for block in inner if not isinstance(block[-1], ast.Return)]
            if inner or not found.loop.end_lineno < statement.lineno <= last or inserted.guarded(statement) is not None:
                continue
            value = getattr(statement, "value", None)
            called = ast.unparse(value.func) if isinstance(value, ast.Call) else ""
            if called in KEEPING or any(id(node) in calls for node in ast.walk(statement)):
                continue
            stored = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, (ast.Store, ast.Del))}
            in_place = isinstance(statement, ast.Expr) and called.endswith("_") and called.split(".")[0] in names
            if stored & set(names) or in_place:
                doubts.append(f"line {statement.lineno} changes the state between the loop and the final norm")
    return doubts


def _of_classes(hook: _Hook) -> list[str]:
    """Where the norm adds the residual itself, it is SGLang's, or a class of this file that shows the sum."""
    local = {node.name: node for node in hook.tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
    made, waiting = (
        set(),
        [
            node.value
            for node in ast.walk(hook.owner)
            if isinstance(node, (ast.Assign, ast.AnnAssign))
            and inserted.of_self(node.targets[0] if isinstance(node, ast.Assign) else node.target) == hook.norm
        ],
    )
    while waiting:
        for node in ast.walk(waiting.pop() or ast.Pass()):
            name = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else None
            if name in local and name not in made:
                made.add(name)
                if isinstance(local[name], ast.FunctionDef):
                    waiting += [part.value for part in ast.walk(local[name]) if isinstance(part, ast.Return)]
    classes = [local[name] for name in made if isinstance(local[name], ast.ClassDef)]
    return [f"the final norm is a {one.name} of the file's own, which shows no sum" for one in classes if not _adds(one)]


def _adds(norm: ast.ClassDef) -> bool:
    """Whether the forward of a norm begins with the sum of its first two arguments."""
    for forward in [node for node in norm.body if isinstance(node, ast.FunctionDef) and node.name == "forward"]:
        given = {argument.arg for argument in forward.args.args[1:3]}
        for node in ast.walk(forward):
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add) and {ast.unparse(node.left), ast.unparse(node.right)} == given:
                return True
    return False


def _of_layers(hook: _Hook, pair: bool, found: decoders.Decoder) -> list[str]:
    """A layer that overwrites the residual it is given does not carry the state in it; one that reads it does."""
    if len(_results(found)) < 2:
        return []
    doubts = []
    for owner in [node for node in hook.tree.body if isinstance(node, ast.ClassDef) and node is not hook.owner]:
        for forward in [node for node in owner.body if isinstance(node, ast.FunctionDef) and node.name == "forward"]:
            arguments = [argument.arg for argument in [*forward.args.args, *forward.args.kwonlyargs]]
            if "residual" not in arguments or "forward_batch" not in arguments:
                continue
            stale = _overwrites(forward.body, "residual")
            if pair and stale:
                doubts.append(f"{owner.name} does not read the residual that the final norm adds")
            if not pair and not stale and not _gives_all(forward):
                doubts.append(f"{owner.name} carries a residual that the final norm leaves out")
    return doubts


def _overwrites(block: list[ast.stmt], name: str) -> bool | None:
    """Whether a parameter is given a value before it is read; of branches one that reads it decides. None: not used."""
    for statement in block:
        if isinstance(statement, ast.If):
            if any(isinstance(node, ast.Name) and node.id == name for node in ast.walk(statement.test)):
                return False
            branches = [_overwrites(statement.body, name), _overwrites(statement.orelse, name)]
            found = None if branches == [None, None] else False not in branches
        else:
            first = next((node for node in _in_order(statement) if isinstance(node, ast.Name) and node.id == name), None)
            found = None if first is None else isinstance(first.ctx, ast.Store)
        if found is not None:
            return found
    return None


def _in_order(node: ast.AST) -> Iterator[ast.AST]:
    """A node and what is in it, in the order in which it is run."""
    yield node
    parts = list(ast.iter_child_nodes(node))
    if isinstance(node, (ast.Assign, ast.AnnAssign)):
        parts.sort(key=lambda part: part is not node.value)
    for part in parts:
        yield from _in_order(part)


def _gives_all(forward: ast.FunctionDef) -> bool:
    """Whether a layer's first result is the whole state: no residual beside it, or the same value again."""
    for node in [node for node in ast.walk(forward) if isinstance(node, ast.Return)]:
        given = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
        if len(given) > 1 and ast.unparse(given[1]) != "None":
            before = [part for part in forward.body if part.lineno < node.lineno]
            if not before or ast.unparse(before[-1]) != f"{ast.unparse(given[1])} = {ast.unparse(given[0])}":
                return False
    return True


def _finished(hook: _Hook, found: decoders.Decoder, uses: list[_Use]) -> list[str]:
    """The end of the capture stands beside the norm whose input the layers' states are."""
    blocks = [
        getattr(node, name)
        for node in ast.walk(found.forward)
        for name in ("body", "orelse", "finalbody")
        if isinstance(getattr(node, name, None), list)
    ]
    chosen = [use.call for use in uses if use.residual is not None] or [use.call for use in uses]
    for block in blocks:
        for first, second in zip(block, block[1:]):
            ended, watched = inserted.guarded(second), inserted.guarded(first)
            if ended is not None and ast.unparse(ended.func) == "_hs.finish" and isinstance(first, ast.Assign) and _holds(first, chosen):
                targets = first.targets[0].elts if isinstance(first.targets[0], ast.Tuple) else first.targets
                if [ast.unparse(given) for given in ended.args] == [ast.unparse(target) for target in targets]:
                    return []
            if watched is not None and ast.unparse(watched) == f"_hs.watch(self.{hook.norm})" and _holds(second, chosen):
                return []
    return ["the capture does not end at the final norm"]


def _holds(statement: ast.stmt, calls: list[ast.Call]) -> bool:
    return any(node in calls for node in ast.walk(statement) if isinstance(node, ast.Call))
