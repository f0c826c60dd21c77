# SPDX-License-Identifier: Apache-2.0
"""Patch an SGLang model file so that it can dump hidden states; take the patch out again.

Usage: hs_patcher.py apply|revert|check|diff [--runtime DIR] [--originals DIR] PATH

PATH is ``sglang/srt/models/deepseek_v2.py``. The patch is found in the syntax
tree and made as text at these places; every other byte stays. It is inert
unless SGLANG_HS_DUMP_DIR is set. The capture runtime it then imports is put
beside the models as ``sglang/srt/hs_capture``.

Before the first change the original is kept as
``ORIGINALS/<model>.<first 16 hex of its sha256>.orig`` (0600). ORIGINALS is
/var/lib/hidden_state_bridge/originals for root and
~/.local/state/hidden_state_bridge/originals for others.

Exit status: 0 done or nothing to do, 1 refused, 2 usage.

Standalone: the standard library of Python 3.9 or later, no other file but the
runtime (``hs_capture`` beside this file, or ``--runtime``).
"""

from __future__ import annotations

import argparse
import ast
import difflib
import hashlib
import json
import os
import pkgutil
import re
import stat
import subprocess
import sys
import tempfile
import tokenize
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

PATCH_VERSION = "2"
CHANGES = ("imports", "init", "layer loop", "after the norm")
RUNTIME_PACKAGE = "hs_capture"
RUNTIME_FILES = (
    "__init__.py",
    "budget.py",
    "capture.py",
    "collector.py",
    "copier.py",
    "counters.py",
    "directory.py",
    "dumpfile.py",
    "engine.py",
    "expect.py",
    "fingerprints.py",
    "follower.py",
    "guards.py",
    "layers.py",
    "ring.py",
    "settings.py",
    "sheet.py",
    "spool.py",
    "writer.py",
)
MARKER_FILE = ".hidden_state_bridge"

_BEGIN = b"# hidden_state.bridge begin "
_END = b"# hidden_state.bridge end "
# Every inserted piece is whole lines: "own" and "collector" enclose SGLang's own expression, "output" ends
# a turn of the loop. A piece marked as split also broke the line that it stands in.
_SPLIT = b" split"
_PIECES_OF_CHANGE = dict(zip(CHANGES, ((b"imports",), (b"init",), (b"loop", b"own", b"collector", b"output", b"output-2"), (b"norm",))))
_PIECES = tuple(piece for pieces in _PIECES_OF_CHANGE.values() for piece in pieces)
_BLOCK = re.compile(
    rb"^[ ]*# hidden_state\.bridge begin (" + b"|".join(_PIECES) + rb")\n(?:.*\n)*?"
    rb"[ ]*# hidden_state\.bridge end \1\n",
    re.MULTILINE,
)
_SPLIT_BLOCK = re.compile(
    rb"\n[ ]*# hidden_state\.bridge begin (own|collector)" + _SPLIT + rb"\n(?:.*\n)*?"
    rb"[ ]*# hidden_state\.bridge end \1" + _SPLIT + rb"\n[ ]*",
)
_HEADER = re.compile(
    rb"^# hidden_state\.bridge patch (\S+), family (\S+), original sha256 ([0-9a-f]{64})$",
    re.MULTILINE,
)
_OWN_NAMES = ("_hs", "_hs_open", "_hs_capture")


class Refused(Exception):
    """The file is left as it is; the message says why and what to do."""


class Change(NamedTuple):
    """One of the four changes: `line` is 1-based in the patched file."""

    name: str
    line: int
    text: str


class _Edit(NamedTuple):
    offset: int
    text: bytes


@dataclass
class Result:
    """What `apply` or `revert` did, or would do (dry run)."""

    model_file: str
    sglang_version: str | None
    family: str | None
    changed: bool
    changes: list[Change]
    before: bytes
    after: bytes
    runtime_dir: str
    runtime_changed: list[str]
    original: str | None = None
    patch_version: str = PATCH_VERSION

    @property
    def checksum_before(self) -> str:
        return _sha256(self.before)

    @property
    def checksum_after(self) -> str:
        return _sha256(self.after)

    def diff(self) -> str:
        """Unified diff of the model file."""
        return "".join(
            difflib.unified_diff(
                self.before.decode("utf-8").splitlines(keepends=True),
                self.after.decode("utf-8").splitlines(keepends=True),
                self.model_file,
                self.model_file,
            )
        )


# --- where SGLang is -----------------------------------------------------------------------


def release_of(path: str | os.PathLike[str]) -> str | None:
    """The SGLang release that holds `path`, read from files, never by importing it.

    `path` is the package directory ``sglang`` or anything in it. None if nothing tells.
    """
    path = Path(path).absolute()
    for package in (path, *path.parents):
        if package.name == "sglang" and (package / "srt").is_dir():
            break
    else:
        return None
    for name in ("_version.py", "version.py"):
        try:
            text = (package / name).read_text(encoding="utf-8")
        except OSError:
            continue
        found = re.search(r"^__version__\s*=\s*(?:version\s*=\s*)?['\"]([^'\"]+)['\"]", text, re.M)
        if found:
            return found[1]
    releases = set()
    for metadata in package.parent.glob("sglang-*.dist-info/METADATA"):
        found = re.search(r"^Version: (\S+)$", metadata.read_text(encoding="utf-8"), re.M)
        if found:
            releases.add(found[1])
    return releases.pop() if len(releases) == 1 else None


def find_model_file(python: str, model: str = "deepseek_v2") -> str:
    """The file of `model` in the SGLang that the interpreter `python` would import.

    Runs `python` once to look SGLang up without importing it; wheels and editable
    installs both answer. Raises Refused with the remedy.
    """
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", model):
        raise Refused(f"model {model!r} is not the name of a module; give deepseek_v2 or its like")
    code = (
        "import sys; sys.path[:] = [p for p in sys.path if p]; "
        "import importlib.util, json; s = importlib.util.find_spec('sglang'); "
        "print(json.dumps(list(s.submodule_search_locations or []) if s else []))"
    )
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=120, check=True)
        places = json.loads(done.stdout.splitlines()[-1])
    except FileNotFoundError:
        raise Refused(f"{python}: no such interpreter; give the Python that runs SGLang") from None
    except subprocess.CalledProcessError as error:
        raise Refused(f"{python} could not look for sglang: {error.stderr.strip()}") from error
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError) as error:
        raise Refused(f"{python} could not look for sglang: {error}") from error
    for place in places:
        found = os.path.join(place, "srt", "models", model + ".py")
        if os.path.isfile(found):
            return found
    if places:
        raise Refused(f"{', '.join(places)} has no srt/models/{model}.py; name another model")
    raise Refused(f"{python} has no sglang; give the Python that runs SGLang")


def default_originals() -> str:
    """Where originals are kept unless told otherwise."""
    if os.geteuid() == 0:
        return "/var/lib/hidden_state_bridge/originals"
    return os.path.expanduser("~/.local/state/hidden_state_bridge/originals")


# --- the shapes of decoder loops: one rule each ----------------------------------------------


class _Source:
    """A model file with its tree; positions of the tree as byte offsets."""

    def __init__(self, data: bytes, path: str) -> None:
        self.data = data
        if b"\r" in data or data.startswith(b"\xef\xbb\xbf"):
            raise Refused(
                f"{path} has CR line ends or a byte order mark, which the patch cannot keep; reinstall SGLang if it was not released so"
            )
        try:
            data.decode("utf-8")
            encoding = tokenize.detect_encoding(iter(data.splitlines(keepends=True)).__next__)[0]
            if encoding != "utf-8":
                raise SyntaxError(f"it is declared as {encoding}, not UTF-8")
            self.tree = ast.parse(data)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise Refused(
                f"{path} is not Python {sys.version_info[0]}.{sys.version_info[1]} source "
                f"({error}); run the patcher with SGLang's own interpreter or reinstall SGLang"
            ) from error
        if not data.endswith(b"\n"):
            raise Refused(f"{path} does not end with a line end, so it may be cut; reinstall SGLang")
        self._lines = [0]
        for line in data.split(b"\n"):
            self._lines.append(self._lines[-1] + len(line) + 1)

    def line(self, lineno: int) -> int:
        """Offset of the start of a 1-based line (one past the last is the end)."""
        return min(self._lines[lineno - 1], len(self.data))

    def span(self, node: ast.expr) -> tuple[int, int]:
        return (
            self._lines[node.lineno - 1] + node.col_offset,
            self._lines[node.end_lineno - 1] + node.end_col_offset,
        )

    def text(self, node: ast.expr) -> str:
        first, last = self.span(node)
        return self.data[first:last].decode("utf-8")

    def begins_line(self, node: ast.stmt) -> bool:
        return not self.data[self.line(node.lineno) : self.line(node.lineno) + node.col_offset].strip(b" ")

    def block(self, lineno: int, piece: str, indent: int, lines: list[str]) -> _Edit:
        """An edit that puts `lines`, marked as `piece`, before line `lineno`."""
        return _Edit(self.line(lineno), _marked(piece, indent, lines).encode())

    def split(self, offset: int, piece: str, indent: int, lines: list[str]) -> _Edit:
        """An edit that breaks a line within brackets at `offset` and puts `lines` between."""
        text = "\n" + _marked(piece + _SPLIT.decode(), indent, lines) + " " * indent
        return _Edit(offset, text.encode())


def _marked(piece: str, indent: int, lines: list[str]) -> str:
    marked = [(_BEGIN.decode() + piece), *lines, (_END.decode() + piece)]
    return "".join(" " * indent + line + "\n" if line else "\n" for line in marked)


_LOADER = '''\
# hidden_state.bridge patch {version}, family {family}, original sha256 {checksum}
def _hs_open(model, layers, norm):
    """Open the capture that SGLANG_HS_DUMP_DIR asks for; None when it is unset."""
    import os

    if not os.environ.get("SGLANG_HS_DUMP_DIR"):
        return None
    try:
        from sglang.srt.hs_capture import open_capture
    except Exception as error:
        raise RuntimeError(
            "hidden_state.bridge: SGLANG_HS_DUMP_DIR is set, but the capture runtime "
            f"sglang.srt.hs_capture cannot be imported ({{error!r}}). "
            "Run patch.yml (or hs_patcher.py apply) again, or unset SGLANG_HS_DUMP_DIR."
        ) from error
    return open_capture(model, layers, norm, patch_version="{version}", family="{family}")
'''


def _only(nodes: list, what: str):
    if len(nodes) != 1:
        raise Refused(f"expected one {what}, found {len(nodes)}")
    return nodes[0]


def _same(node: ast.AST | None, expression: str) -> bool:
    return node is not None and ast.dump(node) == ast.dump(ast.parse(expression, mode="eval").body)


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _of_self(node: ast.AST) -> str | None:
    """X of ``self.X``."""
    if isinstance(node, ast.Attribute) and _is_name(node.value, "self"):
        return node.attr
    return None


def _words(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} | {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}


def _own_nodes(function: ast.FunctionDef) -> list[ast.AST]:
    """The nodes of a function but for those of functions within."""
    nodes, waiting = [], list(function.body)
    while waiting:
        node = waiting.pop()
        nodes.append(node)
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            waiting += ast.iter_child_nodes(node)
    return nodes


def _assigned(node: ast.AST, name: str) -> bool:
    """Whether `node` gives the plain name `name` a value anywhere, in place too."""
    return any(isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, (ast.Store, ast.Del)) for n in ast.walk(node))


class _Loop(NamedTuple):
    """A decoder loop: ``for ... : [layer = self.<layers>[i]]  hidden[, ...] = layer(..., forward_batch)``."""

    owner: ast.ClassDef
    forward: ast.FunctionDef
    loop: ast.For
    calls: list[ast.Assign]
    layers: str
    index: str | None
    twin: ast.For | None = None


def _sliced(node: ast.AST) -> str | None:
    """X of ``self.X``, ``self.X[a:b]`` or ``islice(self.X, a, b)``."""
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice):
        node = node.value
    if isinstance(node, ast.Call) and _is_name(node.func, "islice") and node.args:
        node = node.args[0]
    return _of_self(node)


def _layer_of(loop: ast.For, called: ast.expr) -> tuple[str, str | None] | None:
    """(attribute of the layers, name of the index) where `called` is the layer of this turn."""
    target = loop.target
    if isinstance(called, ast.Name):
        bound = [n.value for n in ast.walk(loop) if isinstance(n, ast.Assign) and len(n.targets) == 1 and _is_name(n.targets[0], called.id)]
        if len(bound) == 1:
            called = bound[0]
        elif _is_name(target, called.id):
            layers = _sliced(loop.iter)
            return (layers, None) if layers else None
        elif isinstance(target, ast.Tuple) and len(target.elts) == 2 and _is_name(target.elts[1], called.id):
            counted = isinstance(loop.iter, ast.Call) and _is_name(loop.iter.func, "enumerate") and len(loop.iter.args) == 1
            layers = _sliced(loop.iter.args[0]) if counted else None
            index = target.elts[0].id if isinstance(target.elts[0], ast.Name) else None
            return (layers, None if index == "_" else index) if layers else None
    if isinstance(called, ast.Subscript) and isinstance(target, ast.Name) and _is_name(called.slice, target.id):
        layers = _of_self(called.value)
        return (layers, target.id) if layers else None
    return None


def _decoder_loops(tree: ast.Module) -> list[_Loop]:
    """Every loop of a forward that calls a layer with ``forward_batch``."""
    found = []
    for owner in tree.body:
        for forward in owner.body if isinstance(owner, ast.ClassDef) else ():
            if not isinstance(forward, ast.FunctionDef) or forward.name != "forward":
                continue
            arguments = [*forward.args.args, *forward.args.kwonlyargs]
            if "forward_batch" not in [argument.arg for argument in arguments]:
                continue
            for loop in ast.walk(forward):
                if not isinstance(loop, ast.For):
                    continue
                calls, places = [], set()
                for node in ast.walk(loop):
                    if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)):
                        continue
                    given = [*node.value.args, *(keyword.value for keyword in node.value.keywords)]
                    called = node.value.func
                    if isinstance(called, ast.Attribute) and called.attr == "forward":
                        called = called.value
                    place = _layer_of(loop, called) if any(_is_name(one, "forward_batch") for one in given) else None
                    if place:
                        calls.append(node)
                        places.add(place)
                if len(places) == 1:
                    found.append(_Loop(owner, forward, loop, calls, *places.pop()))
    return found


def _find_loop(tree: ast.Module) -> _Loop:
    loops = _decoder_loops(tree)
    if not loops:
        origins = [n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and (n.module or "").startswith("sglang.srt.models.")]
        names = sorted({origin.rsplit(".", 1)[1] for origin in origins})
        where = f" (it builds on {', '.join(names)}: one of those may hold it)" if names else ""
        raise Refused(f"no class has a forward that calls its layers with forward_batch in a loop{where}")
    found = loops[0]
    if len(loops) == 2 and loops[1].owner is found.owner and loops[1].layers == found.layers and loops[1].index == found.index:
        other = loops[1]
        apart = any(
            isinstance(node, ast.If) and {found.loop in _nodes(node.body), other.loop in _nodes(node.orelse)} == {True}
            for node in ast.walk(found.forward)
        )
        if apart:
            loops = [found._replace(calls=[*found.calls, *other.calls], loop=other.loop, twin=found.loop)]
    if len(loops) > 1:
        raise Refused("it has more than one decoder loop: " + ", ".join(f"{one.owner.name}, line {one.loop.lineno}" for one in loops))
    found = loops[0]
    if len([n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == found.owner.name]) > 1:
        raise Refused(f"class {found.owner.name} is there twice")
    if len([n for n in found.owner.body if isinstance(n, ast.FunctionDef) and n.name == "forward"]) > 1:
        raise Refused(f"method {found.owner.name}.forward is there twice")
    early = [n.lineno for n in _own_nodes(found.forward) if isinstance(n, ast.Return) and n.lineno < _loops(found)[0].lineno]
    if early:
        raise Refused(f"{found.owner.name}.forward can return at line {min(early)}, before the decoder loop: its layers may run elsewhere")
    made = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and _is_name(n.func, found.owner.name)]
    if len(made) != 1 and "input_ids" not in [argument.arg for argument in found.forward.args.args]:
        raise Refused(f"{found.owner.name} takes no input_ids and is made {len(made)} times, so its layers may run more than once")
    for loop in _loops(found):
        for node in ast.walk(found.forward):
            if isinstance(node, (ast.For, ast.While)) and node is not loop and loop in ast.walk(node):
                raise Refused(f"the decoder loop stands within the loop of line {node.lineno}, so layers run more than once")
        for node in ast.walk(loop):
            if isinstance(node, (ast.Break, ast.Continue, ast.Return, ast.Yield)):
                raise Refused(f"the decoder loop can be left at line {node.lineno}")
    return found


def _loops(found: _Loop) -> list[ast.For]:
    return [found.loop] if found.twin is None else [found.twin, found.loop]


def _nodes(statements: list[ast.stmt]) -> list[ast.AST]:
    return [node for statement in statements for node in ast.walk(statement)]


class _Norm(NamedTuple):
    """The final norm: what it takes in is what every layer gives out."""

    statement: ast.stmt
    attribute: str
    residual: str | None
    stream: bool
    outputs: list[str] | None


def _norm_call(call: ast.expr, hidden: str) -> tuple[str, ast.expr | None, bool] | None:
    """(attribute of the norm, its residual argument, whether SGLang's stream holds the residual)."""
    if isinstance(call, ast.IfExp):
        # One norm, called in one of two ways.
        body, orelse = _norm_call(call.body, hidden), _norm_call(call.orelse, hidden)
        alike = body is not None and orelse is not None and body[0] == orelse[0]
        return body if alike and all(map(_same_node, body[1:2], orelse[1:2])) else None
    if not isinstance(call, ast.Call) or not call.args:
        return None
    function, given = call.func, call.args[0]
    if isinstance(function, ast.Attribute) and _is_name(function.value, "residual_batch"):
        if function.attr not in ("norm", "final_norm") or len(call.args) < 3 or not _is_name(given, hidden):
            return None
        attribute = _of_self(call.args[2])
        return (attribute, None, True) if attribute else None
    if isinstance(function, ast.Attribute) and function.attr == "forward_native":
        function = function.value
    attribute = _of_self(function)
    taken = _same(given, f"residual_batch.take_output({hidden}, forward_batch)")
    keywords = [keyword.value for keyword in call.keywords if keyword.arg != "post_residual_addition"]
    extra = [*call.args[1:], *keywords]
    if attribute is None or not (taken or _is_name(given, hidden)):
        return None
    if len(extra) > 1:
        raise Refused(f"line {call.lineno}: the final norm takes in more than the residual")
    return attribute, extra[0] if extra else None, taken


def _same_node(one: ast.AST | None, other: ast.AST | None) -> bool:
    return one is other if one is None or other is None else ast.dump(one) == ast.dump(other)


def _classes_of(owner: ast.ClassDef, attribute: str) -> set[str]:
    """The classes that the model makes ``self.<attribute>`` from, leaving placeholders of pipeline stages out."""
    values = {}
    for node in ast.walk(owner):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                values.setdefault(ast.unparse(target), []).append(node.value)
    made, waiting = set(), list(values.get(f"self.{attribute}", []))
    while waiting:
        value = waiting.pop()
        if isinstance(value, ast.IfExp):
            waiting += [value.body, value.orelse]
        elif isinstance(value, ast.Call):
            waiting.append(value.func)
        elif isinstance(value, ast.Name) and value.id in values:
            waiting += values.pop(value.id)
        else:
            made.add(ast.unparse(value).rsplit(".", 1)[-1])
    return made - {"PPMissingLayer", "Identity", "None"}


def _find_norm(tree: ast.Module, found: _Loop, hidden: str, others: list[str]) -> _Norm:
    """The one norm after the loop that takes in `hidden`, alone or with one of the loop's `others`."""
    norms = []
    local = {n.name for n in tree.body if isinstance(n, ast.ClassDef)}
    heirs = [ast.unparse(base) for base in found.owner.bases if ast.unparse(base) not in ("nn.Module", "torch.nn.Module")]
    for statement in _behind(found):
        if not isinstance(statement, (ast.Assign, ast.Return)):
            continue
        call = _norm_call(statement.value, hidden)
        if call is None:
            continue
        attribute, residual, stream = call
        made = _classes_of(found.owner, attribute)
        # A base class in another file may make it.
        if not all(name.lower().endswith("norm") for name in made) or not (made or heirs):
            continue
        if isinstance(statement.value, ast.IfExp) and residual is None:
            continue
        if residual is not None and not (isinstance(residual, ast.Name) and residual.id in others):
            raise Refused(f"the final norm of line {statement.lineno} takes in {ast.unparse(residual)}, which the layers do not give")
        adds = residual is not None or stream and _of_self(statement.value.func) is None
        if adds and made & local:
            raise Refused(f"the final norm is a {made.pop()} of this file: whether it adds the residual cannot be told")
        outputs = None
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Tuple):
            names = [element.id for element in statement.targets[0].elts if isinstance(element, ast.Name)]
            outputs = names if len(names) == len(statement.targets[0].elts) == 2 else None
        norms.append(_Norm(statement, attribute, residual.id if residual is not None else None, stream, outputs))
    # The branch for a missing residual is never taken behind a layer that gives one.
    if any(norm.residual for norm in norms):
        norms = [norm for norm in norms if norm.residual]
    return _only(norms, f"final norm of '{hidden}' behind the decoder loop")


def _behind(found: _Loop) -> list[ast.stmt]:
    """Statements behind the loop, in their order."""
    statements = [n for n in ast.walk(found.forward) if isinstance(n, ast.stmt) and n.lineno > found.loop.end_lineno]
    return sorted(statements, key=lambda statement: statement.lineno)


def _passed_by(found: _Loop, norm: _Norm) -> set[ast.AST]:
    """Nodes that never run on the way from the loop to `norm`: other branches, and branches that return."""
    nodes: set[ast.AST] = set()
    for statement in _behind(found):
        branches = [statement.body, statement.orelse] if isinstance(statement, ast.If) else []
        inside = [norm.statement in _nodes(branch) for branch in branches]
        for branch, holds in zip(branches, inside):
            if not holds and (any(inside) or (branch and isinstance(branch[-1], ast.Return))):
                nodes.update(_nodes(branch))
    return nodes


def _check_between(found: _Loop, norm: _Norm, names: list[str]) -> None:
    """Refuse where what the layers give is changed before the final norm takes it in."""
    # Two-batch overlap runs layers outside the loop: the runtime counts layers and refuses such a forward. SGLang's
    # own completion and folding of its stream keep the state.
    allowed = ("model_forward_maybe_tbo", "model_forward_stages", "residual_batch.complete_output", "residual_batch.fold")
    passed = _passed_by(found, norm)
    for statement in _behind(found):
        if statement.lineno >= norm.statement.lineno:
            break
        if statement in passed or not isinstance(statement, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Expr)):
            continue
        value = statement.value
        called = ast.unparse(value.func) if isinstance(value, ast.Call) else ""
        if called in allowed:
            continue
        changed = [name for name in names if _assigned(statement, name)]
        if isinstance(statement, ast.Expr) and called.split(".", 1)[0] in names:
            changed = names
        if changed:
            raise Refused(f"line {statement.lineno} changes {', '.join(changed)} between the decoder loop and the final norm")


def _check_elsewhere(found: _Loop, norm: _Norm) -> None:
    """Refuse where the final norm is handed to something else, which may be what takes in the state."""
    for statement in _behind(found):
        for call in [n for n in ast.walk(statement) if isinstance(n, ast.Call)]:
            given = [*call.args, *(keyword.value for keyword in call.keywords)]
            if any(_of_self(one) == norm.attribute for one in given) and not ast.unparse(call.func).startswith("residual_batch."):
                raise Refused(f"line {call.lineno} hands the final norm to {ast.unparse(call.func)}")


def _check_layers(tree: ast.Module, found: _Loop, norm: _Norm) -> None:
    """Refuse where the layers do not carry the state in what the final norm takes in."""
    for owner in [n for n in tree.body if isinstance(n, ast.ClassDef) and n is not found.owner]:
        for forward in [n for n in owner.body if isinstance(n, ast.FunctionDef) and n.name == "forward"]:
            if not {"residual", "forward_batch"} <= {one.arg for one in [*forward.args.args, *forward.args.kwonlyargs]}:
                continue
            reads = _reads(forward.body, "residual")
            if norm.residual and reads is False:
                raise Refused(f"{owner.name} overwrites the residual that it is given, but the final norm adds it")
            if not norm.residual and reads and not _gives_all(forward):
                raise Refused(f"{owner.name} reads the residual that it is given, but the final norm leaves it out")


def _reads(block: list[ast.stmt], name: str) -> bool | None:
    """Whether a value that is handed in is read before it is overwritten, on some way; None if it is neither."""
    for statement in block:
        if isinstance(statement, ast.If):
            found = {_is_name(node, name) or None for node in ast.walk(statement.test)}
            found |= {_reads(statement.body, name), _reads(statement.orelse, name)}
        else:
            # What an assignment reads, it reads before it writes.
            parts = [statement.value, *statement.targets] if isinstance(statement, ast.Assign) else [statement]
            found = {isinstance(n.ctx, ast.Load) for n in [n for part in parts for n in ast.walk(part) if _is_name(n, name)][:1]}
        if found - {None}:
            return True in found
    return None


def _gives_all(forward: ast.FunctionDef) -> bool:
    """Whether the first result of a layer is the whole state: beside it is None, or the same value again."""
    for node in [n for n in _own_nodes(forward) if isinstance(n, ast.Return)]:
        given = node.value.elts if isinstance(node.value, ast.Tuple) else []
        if len(given) < 2 or _same(given[1], "None"):
            continue
        last = [statement for statement in forward.body if statement.lineno < node.lineno][-1:]
        if not last or ast.unparse(last[0]) != f"{ast.unparse(given[1])} = {ast.unparse(given[0])}":
            return False
    return True


_KEYWORDS = {"captured_last_layer_outputs": "collector", "capture_output": "callback"}


def _keyword(tree: ast.Module, found: _Loop) -> ast.keyword | None:
    """SGLang's own capture argument of the layer call, where the layers hand it to what prepares their input."""
    for name in _KEYWORDS:
        own = [keyword for call in found.calls for keyword in call.value.keywords if keyword.arg == name]
        if len(own) != len(found.calls) or len(own) != 1:
            continue
        # In layers of the same file: an imported layer shows nothing of what it does with the argument.
        for call in ast.walk(tree):
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
                continue
            words = _words(call) | {n.value for n in ast.walk(call) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
            if name in words and (call.func.attr == "prepare" or call.func.attr.startswith("prepare_attn")):
                return own[0]
    return None


def _wrap(source: _Source, keyword: ast.keyword, index: str) -> list[_Edit]:
    """Hand SGLang's own collector to ours, which hands on to it; unchanged where nothing is captured."""
    value = keyword.value
    first, last = source.span(value)
    column = value.col_offset
    own = ["    " + line.strip() for line in source.text(value).splitlines()]
    after = [")", "if _hs is None", f"else _hs.{_KEYWORDS[keyword.arg]}(", f"    {index},", *own, ")"]
    start = source.data.rfind(b"\n", 0, first) + 1
    end = source.data.index(b"\n", last)
    if source.data[:start].rstrip()[-1:] == b"(" and not (source.data[start:first] + source.data[last:end]).strip():
        return [
            source.block(value.lineno, "own", column, ["("]),
            source.block(value.end_lineno + 1, "collector", column, after),
        ]
    column = len(source.data[start:first]) - len(source.data[start:first].lstrip())
    return [source.split(first, "own", column, ["("]), source.split(last, "collector", column, after)]


def _results(found: _Loop) -> tuple[str, list[str]]:
    """(name of the hidden states, names of what else the layers give) at the end of a turn of the loop."""
    hidden, others = set(), []
    for call in found.calls:
        target = call.targets[0]
        names = target.elts if isinstance(target, ast.Tuple) else [target]
        if len(call.targets) != 1 or not all(isinstance(name, ast.Name) for name in names):
            raise Refused(f"line {call.lineno}: the layer call does not unpack into plain names")
        first = names[0].id
        # A bundle of results, of which the loop takes the first on.
        taken = [n for n in ast.walk(found.loop) if isinstance(n, ast.Assign) and _same(n.value, f"{first}[0]")]
        if len(names) == 1 and len(taken) == 1 and isinstance(taken[0].targets[0], ast.Name):
            first = taken[0].targets[0].id
        hidden.add(first)
        others += [name.id for name in names[1:] if name.id not in others]
    if len(hidden) != 1:
        raise Refused(f"the layer calls of lines {', '.join(str(call.lineno) for call in found.calls)} give different results")
    return hidden.pop(), others


def _shape_edits(source: _Source) -> tuple[str, _Loop, _Norm, list[_Edit]]:
    """The shape of the file's decoder loop, and the edits in it; Refused for a loop of no known shape.

    keyword-tuple, keyword-stream
        SGLang hands each layer a collector for its complete input, the output
        of the layer before it: ours stands in its place and hands on to it.
    stream
        The residual is in ``forward_batch.residual_stream``: what SGLang's own
        snapshot gives at the end of a turn of the loop.
    tuple
        Layers give the residual beside their output, and the final norm takes
        in both: the sum of the two at the end of a turn.
    single
        Layers give the residual stream itself, which the final norm takes in.
    """
    found = _find_loop(source.tree)
    hidden, others = _results(found)
    norm = _find_norm(source.tree, found, hidden, others)
    _check_between(found, norm, [hidden] + ([norm.residual] if norm.residual else []))
    _check_elsewhere(found, norm)
    if others and not norm.stream:
        _check_layers(source.tree, found, norm)
    keyword = _keyword(source.tree, found)
    if keyword is not None and found.index is not None and (norm.stream or norm.residual):
        return "keyword-stream" if norm.stream else "keyword-tuple", found, norm, _wrap(source, keyword, found.index)
    shape = "stream" if norm.stream else "tuple" if norm.residual else "single"
    state = {"stream": f"stream({found.index}, {hidden}, forward_batch)", "tuple": f"output({found.index}, {hidden}, {norm.residual})"}
    call = state.get(shape, f"output({found.index}, {hidden})")
    lines = ["if _hs is not None:", f"    _hs.{call}"]
    blocks = []
    for loop, piece in zip(_loops(found), ("output", "output-2")):
        if not source.begins_line(loop.body[0]):
            raise Refused(f"line {loop.lineno}: the decoder loop shares a line with what it does")
        blocks.append(source.block(loop.body[-1].end_lineno + 1, piece, loop.body[0].col_offset, lines))
    return shape, found, norm, blocks


def _family_of(shape: str, found: _Loop) -> str:
    """The family by its letter for DeepSeek-V2's model class, which every release has; the shape for others."""
    if found.owner.name != "DeepseekV2Model":
        return shape
    if shape == "tuple":
        if len(found.calls[0].targets[0].elts) > 2:
            return "C"
        return "B" if "pp_group" in _words(found.forward) else "A"
    letters = {"keyword-tuple": "D", "keyword-stream": "E"}
    if shape not in letters:
        raise Refused(f"DeepseekV2Model with a decoder loop of the shape '{shape}' is in no release")
    return letters[shape]


def _edits(source: _Source) -> tuple[str, list[_Edit]]:
    """(family, edits) of a model file."""
    shape, found, norm, edits = _shape_edits(source)
    family = _family_of(shape, found)
    owner, forward = found.owner, found.forward
    init = _only([n for n in owner.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"], f"method {owner.name}.__init__")
    end = init.body[-1]
    if any(isinstance(node, ast.Return) and node is not end for node in _own_nodes(init)):
        raise Refused(f"{owner.name}.__init__ returns early")
    top = next(statement for statement in forward.body if found.loop in ast.walk(statement))
    imports = [n for n in source.tree.body if isinstance(n, (ast.Import, ast.ImportFrom))]
    if not imports:
        raise Refused("it imports nothing")
    if not all(map(source.begins_line, [top, norm.statement, end])):
        raise Refused("statements share a line, or are indented with tabs")
    loader = _LOADER.format(version=PATCH_VERSION, family=family, checksum=_sha256(source.data))
    if norm.outputs is not None:
        place, watch = norm.statement.end_lineno + 1, f"_hs.finish({norm.outputs[0]}, {norm.outputs[1]})"
    else:
        # Its result has no names of its own: the norm itself says what it took in and gave.
        place, watch = norm.statement.lineno, f"_hs.watch(self.{norm.attribute})"
    return family, [
        source.block(imports[-1].end_lineno + 1, "imports", 0, loader.splitlines()),
        source.block(
            end.lineno if isinstance(end, ast.Return) else end.end_lineno + 1,
            "init",
            init.body[0].col_offset,
            [f'self._hs_capture = _hs_open(self, "{found.layers}", "{norm.attribute}")'],
        ),
        source.block(
            top.lineno,
            "loop",
            top.col_offset,
            ["_hs = self._hs_capture", "if _hs is not None:", "    _hs = _hs.begin(forward_batch)"],
        ),
        *edits,
        source.block(place, "norm", norm.statement.col_offset, ["if _hs is not None:", f"    {watch}"]),
    ]


def _patched(data: bytes, path: str, release: str | None) -> tuple[str, bytes]:
    """Return (family, patched bytes) for the original `data`, or raise Refused."""
    source = _Source(data, path)
    used = _words(source.tree) & set(_OWN_NAMES)
    if used:
        raise Refused(f"{path} already uses the names {', '.join(sorted(used))}")
    try:
        family, edits = _edits(source)
    except Refused as error:
        raise Refused(
            f"{path} (SGLang {release or 'of unknown release'}) is unknown to this patcher: {error}. "
            "Name the model file of the served model, or install a release of SGLang that docs/support.md lists"
        ) from error
    after = bytearray()
    done = 0
    for edit in sorted(edits):
        after += data[done : edit.offset] + edit.text
        done = edit.offset
    after += data[done:]
    result = bytes(after)
    if _stripped(result, path) != data:
        raise Refused(f"{path}: the patch could not be taken out again; report this file")
    try:
        ast.parse(result)
    except SyntaxError as error:
        raise Refused(f"{path}: the patched file would not be Python ({error}); report this file") from error
    return family, result


def _ends(data: bytes, piece: bytes) -> tuple[int, int]:
    """How often `piece` begins and ends in `data`."""
    counts = []
    for mark in (_BEGIN, _END):
        counts.append(data.count(mark + piece + b"\n") + data.count(mark + piece + _SPLIT + b"\n"))
    return counts[0], counts[1]


def _stripped(data: bytes, path: str) -> bytes:
    """`data` without the marked pieces; Refused where a piece is missing, doubled or torn."""
    output, twin = (_ends(data, piece) == (1, 1) for piece in (b"output", b"output-2"))
    pieces = [b"imports", b"init", b"loop", b"norm", *([b"output"] if output else [b"own", b"collector"]), *([b"output-2"] if twin else [])]
    for piece in _PIECES:
        begins, ends = _ends(data, piece)
        if begins != ends or begins != pieces.count(piece):
            raise Refused(
                f"{path} is patched in part: piece '{piece.decode()}' begins {begins} times and ends {ends} times. {_restore(data, path)}"
            )
    rest, split = _SPLIT_BLOCK.subn(b"", data)
    rest, blocks = _BLOCK.subn(b"", rest)
    if split + blocks != len(pieces) or b"# hidden_state.bridge" in rest:
        raise Refused(f"{path}: the marks of the patch were edited. {_restore(data, path)}")
    return rest


def _restore(data: bytes, path: str) -> str:
    header = _HEADER.search(data)
    stem = os.path.splitext(os.path.basename(path))[0]
    kept = f" ({stem}.{header[3][:16].decode()}.orig among the kept originals)" if header else ""
    return f"Put the original back{kept} or reinstall SGLang, then patch again; what was edited by hand is lost with that"


def _original(data: bytes, path: str) -> tuple[bytes, str, str]:
    """Return (original, patch version, family) of a patched file, proved by its checksum."""
    original = _stripped(data, path)
    header = _HEADER.search(data)
    if header is None:
        raise Refused(f"{path}: the head of the patch was edited. {_restore(data, path)}")
    version, family, checksum = (group.decode() for group in header.groups())
    if _sha256(original) != checksum:
        raise Refused(
            f"{path} was edited after it was patched: without the patch its sha256 is "
            f"{_sha256(original)[:16]}…, the original had {checksum[:16]}…. {_restore(data, path)}"
        )
    return original, version, family


# --- what a user asks for ------------------------------------------------------------------


def apply(
    path: str | os.PathLike[str],
    *,
    runtime: str | None = None,
    originals: str | None = None,
    dry_run: bool = False,
) -> Result:
    """Patch the model file `path` and install the runtime beside it; raise Refused.

    A file patched by another patch version is patched afresh, a runtime that is
    missing or differs is put right. With `dry_run` nothing is written.
    """
    path, before, identity = _read(path)
    release = release_of(path)
    source, version = before, PATCH_VERSION
    if _BEGIN in before or _END in before:
        source, version, _family = _original(before, path)
    family, after = _patched(source, path, release)
    if source is not before and version == PATCH_VERSION and after != before:
        raise Refused(
            f"{path}: the inserted code was edited. Run revert (unpatch.yml), which restores the original exactly, then apply (patch.yml)"
        )
    directory = _runtime_dir(path)
    files = _runtime_files(runtime)
    stale = _stale_runtime(directory, files)
    result = Result(path, release, family, bool(stale) or after != before, _changes(after), before, after, directory, stale)
    kept = _original_name(path, source, originals)
    if result.changed or os.path.exists(kept):
        result.original = kept
    if result.changed:
        _check_writable(os.path.dirname(path), directory, os.path.dirname(kept))
    if dry_run or not result.changed:
        return result
    if os.path.basename(os.path.dirname(directory)) != "srt":
        raise Refused(f"{path} is not in a package sglang/srt, so its runtime would lie astray; give the file inside the package")
    _keep(kept, source)
    # A patched model without its runtime would stop a capture server: runtime first.
    if stale:
        _install_runtime(directory, files, stale, path)
    if after != before:
        _replace(path, before, after, identity)
    return result


def revert(path: str | os.PathLike[str], *, originals: str | None = None, dry_run: bool = False) -> Result:
    """Take the patch out of `path`, byte for byte, and its runtime away; raise Refused.

    The original is reconstructed and proved by the checksum that the patch carries.
    """
    path, before, identity = _read(path)
    after, family = before, None
    if _BEGIN in before or _END in before:
        after, _version, family = _original(before, path)
    directory = _runtime_dir(path)
    removed = _runtime_leftovers(directory, path)
    changed = after != before or bool(removed)
    changes = _changes(before) if after != before else []
    result = Result(path, release_of(path), family, changed, changes, before, after, directory, removed)
    kept = _original_name(path, after, originals)
    result.original = kept if os.path.exists(kept) else None
    if changed:
        _check_writable(os.path.dirname(path), directory, os.path.dirname(directory))
    if dry_run or not changed:
        return result
    if after != before:
        _replace(path, before, after, identity)
    if removed:
        _remove_runtime(directory)
    return result


def _changes(patched: bytes) -> list[Change]:
    """The four changes, with lines as they stand in the patched file."""
    changes = []
    for name, pieces in _PIECES_OF_CHANGE.items():
        lines: list[str] = []
        first = None
        for piece in pieces:
            block = re.search(rb"^[ ]*" + _BEGIN + piece + rb"(?: split)?\n((?:.*\n)*?)[ ]*" + _END + piece, patched, re.MULTILINE)
            if block:
                first = block.start() if first is None else first
                lines += block[1].decode("utf-8").splitlines()
        if first is not None:
            changes.append(Change(name, patched.count(b"\n", 0, first) + 1, "\n".join(lines)))
    return changes


# --- files ---------------------------------------------------------------------------------


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _read(path: str | os.PathLike[str]) -> tuple[str, bytes, os.stat_result]:
    path = os.path.abspath(path)
    try:
        found = os.lstat(path)
        if stat.S_ISLNK(found.st_mode):
            raise Refused(
                f"{path} is a link to {os.path.realpath(path)}, which other environments may "
                "share; reinstall SGLang with copies (uv: --link-mode copy)"
            )
        if not stat.S_ISREG(found.st_mode):
            raise Refused(f"{path} is not a file; give sglang/srt/models/deepseek_v2.py")
        with open(path, "rb") as stream:
            return path, stream.read(), found
    except OSError as error:
        raise Refused(f"{path}: {error.strerror}; give sglang/srt/models/deepseek_v2.py as its owner") from error


def _check_writable(*directories: str) -> None:
    """Refuse where a file could not be put into a directory that is there or has to be made."""
    for directory in directories:
        while not os.path.lexists(directory):
            directory = os.path.dirname(directory)
        if not (os.path.isdir(directory) and os.access(directory, os.W_OK | os.X_OK)):
            raise Refused(
                f"{directory} is not writable; run as the owner of the SGLang installation, and name "
                "a directory for originals that this user may write (--originals DIR, originals_dir)"
            )


def _write(target: str, data: bytes, mode: int, owner: tuple[int, int] | None) -> None:
    """Write by a temporary file in the same directory, fsync and rename."""
    handle, temporary = tempfile.mkstemp(prefix=".hsb-", dir=os.path.dirname(target))
    try:
        with open(handle, "wb") as stream:
            stream.write(data)
            if owner is not None and owner != (os.geteuid(), os.getegid()):
                os.fchown(stream.fileno(), *owner)
            os.fchmod(stream.fileno(), mode)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise
    _sync(os.path.dirname(target))


def _sync(directory: str) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _replace(path: str, before: bytes, after: bytes, identity: os.stat_result) -> None:
    """Put `after` in the place of the file that was read as `before`; mode and owner stay."""
    _path, current, found = _read(path)
    if current != before or (found.st_dev, found.st_ino) != (identity.st_dev, identity.st_ino):
        raise Refused(f"{path} changed while it was patched; run the patcher again")
    try:
        _write(path, after, stat.S_IMODE(found.st_mode), (found.st_uid, found.st_gid))
    except OSError as error:
        raise Refused(f"{path} cannot be replaced ({error.strerror}); run as the owner of the installation") from error


def _original_name(path: str, original: bytes, originals: str | None) -> str:
    stem = os.path.splitext(os.path.basename(path))[0]
    name = f"{stem}.{_sha256(original)[:16]}.orig"
    return os.path.join(os.path.abspath(originals or default_originals()), name)


def _make_private(directory: str) -> None:
    """Make `directory` and the parents it lacks, each 0700."""
    if not os.path.isdir(directory):
        _make_private(os.path.dirname(directory))
        os.mkdir(directory, 0o700)


def _keep(kept: str, original: bytes) -> None:
    try:
        if os.path.islink(kept) or not os.path.exists(kept) or _read(kept)[1] != original:
            _make_private(os.path.dirname(kept))
            _write(kept, original, 0o600, None)
    except OSError as error:
        raise Refused(
            f"the original cannot be kept as {kept} ({error.strerror}); name another directory "
            "(--originals DIR, originals_dir of the module)"
        ) from error


# --- the runtime ---------------------------------------------------------------------------


def _runtime_dir(path: str) -> str:
    """Beside ``models``, of which `path` may be in a directory."""
    for parent in Path(path).parents:
        if parent.name == "srt":
            return str(parent / RUNTIME_PACKAGE)
    return os.path.join(os.path.dirname(os.path.dirname(path)), RUNTIME_PACKAGE)


def _runtime_files(directory: str | None) -> dict[str, bytes]:
    """The runtime's source: from `directory`, from beside this file, or from its archive."""
    files = {}
    for name in RUNTIME_FILES:
        try:
            if directory is not None:
                data = Path(directory, name).read_bytes()
            elif __package__:
                data = pkgutil.get_data(f"{__package__}.{RUNTIME_PACKAGE}", name)
            else:
                data = Path(__file__).resolve().with_name(RUNTIME_PACKAGE).joinpath(name).read_bytes()
        except OSError as error:
            raise Refused(f"the capture runtime lacks {name} ({error}); give its directory with --runtime DIR") from error
        if data is None:
            raise Refused(f"the capture runtime lacks {name}; give its directory with --runtime DIR")
        files[name] = data
    marker = json.dumps({"kind": "capture_runtime", "patch_version": PATCH_VERSION})
    return {MARKER_FILE: marker.encode() + b"\n", **files}


def _entries(directory: str) -> set[str]:
    """Names in an installed runtime but for bytecode; Refused for a directory not ours."""
    if not os.path.lexists(directory):
        return set()
    if os.path.islink(directory) or not os.path.isdir(directory):
        raise Refused(f"{directory} is not a directory; move it away and run the patcher again")
    found = set(os.listdir(directory)) - {"__pycache__"}
    if found and MARKER_FILE not in found:
        raise Refused(f"{directory} lacks {MARKER_FILE}, so it is not the capture runtime; move it away and run the patcher again")
    return found


def _stale_runtime(directory: str, files: dict[str, bytes]) -> list[str]:
    """Names in the installed runtime that are missing, differ or do not belong there."""
    found = _entries(directory)
    stale = sorted(found - set(files))
    for name, data in files.items():
        if name not in found or _read(os.path.join(directory, name))[1] != data:
            stale.append(name)
    return stale


def _install_runtime(directory: str, files: dict[str, bytes], stale: list[str], path: str) -> None:
    """Write what is stale, the marker first, with mode and owner like the models'."""
    model, models = os.lstat(path), os.lstat(os.path.dirname(path))
    owner = (models.st_uid, models.st_gid)
    try:
        if not os.path.isdir(directory):
            os.mkdir(directory)
            os.chmod(directory, stat.S_IMODE(models.st_mode))
            if owner != (os.geteuid(), os.getegid()):
                os.chown(directory, *owner)
        for name in sorted(stale, key=lambda name: name != MARKER_FILE):
            target = os.path.join(directory, name)
            if name in files:
                _write(target, files[name], stat.S_IMODE(model.st_mode), owner)
            else:
                os.unlink(target)
    except OSError as error:
        raise Refused(
            f"the capture runtime cannot be put into {directory} ({error.strerror}); run as the owner of the SGLang installation"
        ) from error


def _runtime_leftovers(directory: str, path: str) -> list[str]:
    """What revert removes; nothing while another model file is patched."""
    if not os.path.lexists(directory):
        return []
    for other in Path(directory).parent.joinpath("models").rglob("*.py"):
        if str(other) != path and _BEGIN in other.read_bytes():
            return []
    found = _entries(directory)
    strange = [name for name in found if not os.path.isfile(os.path.join(directory, name))]
    if strange:
        raise Refused(f"{directory} holds {', '.join(strange)}; move it away and run again")
    return sorted(found) or ["__pycache__"]


def _remove_runtime(directory: str) -> None:
    # The marker goes last: a removal that was cut off can be finished.
    for name in sorted(_entries(directory), key=lambda name: name == MARKER_FILE):
        if name != MARKER_FILE:
            os.unlink(os.path.join(directory, name))
    cache = os.path.join(directory, "__pycache__")
    if os.path.isdir(cache) and not os.path.islink(cache):
        for name in os.listdir(cache):
            os.unlink(os.path.join(cache, name))
        os.rmdir(cache)
    if os.path.exists(os.path.join(directory, MARKER_FILE)):
        os.unlink(os.path.join(directory, MARKER_FILE))
    os.rmdir(directory)


# --- command line --------------------------------------------------------------------------


def _report(command: str, result: Result) -> list[str]:
    """The lines that a command prints."""
    lines = [
        f"file     {result.model_file}",
        f"release  {result.sglang_version or 'unknown'}",
        f"family   {result.family or '-'}",
    ]
    if command == "check":
        state = "not patched, can be patched"
        if _BEGIN in result.before:
            state = "patched, complete"
            if result.before != result.after:
                state = "patched, by another patch version: run apply"
            elif result.changed:
                state = "patched, the runtime is stale: run apply"
        return [*lines, f"state    {state}"]
    if not result.changed:
        lines.append(f"changed  nothing ({'patched already' if command == 'apply' else 'not patched'})")
    verb = "removed " if command == "revert" else ""
    lines += [f"{verb}{change.name}: line {change.line}" for change in result.changes]
    if result.runtime_changed:
        done = "removed" if command == "revert" else "written"
        lines.append(f"runtime  {done}: {result.runtime_dir} ({len(result.runtime_changed)} files)")
    if result.original:
        lines.append(f"original {result.original}")
    return lines


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return its exit status."""
    parser = argparse.ArgumentParser(prog="hs_patcher.py", description="Patch an SGLang model file for hidden state capture.")
    parser.add_argument("command", choices=("apply", "revert", "check", "diff"))
    parser.add_argument("path", metavar="PATH", help="sglang/srt/models/deepseek_v2.py")
    parser.add_argument("--runtime", metavar="DIR", help="source of the capture runtime")
    parser.add_argument("--originals", metavar="DIR", help="where the original is kept")
    options = parser.parse_args(arguments)
    try:
        if options.command == "revert":
            result = revert(options.path, originals=options.originals)
        else:
            result = apply(
                options.path,
                runtime=options.runtime,
                originals=options.originals,
                dry_run=options.command != "apply",
            )
    except Refused as error:
        sys.stderr.write(f"refused: {error}\n")
        return 1
    sys.stdout.write(result.diff() if options.command == "diff" else "\n".join(_report(options.command, result)) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
