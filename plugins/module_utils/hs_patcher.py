# SPDX-License-Identifier: Apache-2.0
"""Patch an SGLang model file so that it can dump hidden states; take the patch out again.

Usage: hs_patcher.py check|diff|apply|revert PATH
       hs_patcher.py check|diff|apply|revert --python PYTHON [--model NAME]

PATH is ``sglang/srt/models/deepseek_v2.py``; with ``--python`` it is found in
the SGLang that this interpreter would import. The patch is found in the syntax
tree and made as text at these places; every other byte stays. It is inert
unless SGLANG_HS_DUMP_DIR is set. The capture runtime it then imports is put
beside the models as ``sglang/srt/hs_capture``, a link to a directory that was
written whole. A run that is killed leaves the old or the new state, and the
next run sweeps what it left.

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
import contextlib
import difflib
import errno
import fcntl
import hashlib
import json
import os
import pkgutil
import pwd
import re
import shlex
import stat
import subprocess
import sys
import tempfile
import time
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

PATCH_VERSION = "3"
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
_MARK = b"# hidden_state.bridge"
_MARKED_LINE = re.compile(rb"^.*# hidden_state\.bridge.*(?:\n|\Z)", re.MULTILINE)
_EDGE = re.compile(rb"[ ]*# hidden_state\.bridge (begin|end) ([a-z0-9-]+)(" + _SPLIT + rb")?\n")
_HEAD = b"# hidden_state.bridge patch "
_HEADER = re.compile(
    rb"^# hidden_state\.bridge patch (\S+), family (\S+), original sha256 ([0-9a-f]{64})$",
    re.MULTILINE,
)
_OWN_NAMES = ("_hs", "_hs_open", "_hs_of", "_hs_asked", "_hs_capture")

# What a killed run can leave: tempfile's names behind a prefix of ours.
_TEMPORARY = re.compile(r"\.hsb-[a-z0-9_]{8}")
_RUNTIME_NAME = re.compile(rf"\.{RUNTIME_PACKAGE}-[a-z0-9_]{{8}}")
_RUNTIME_LINK = re.compile(rf"\.{RUNTIME_PACKAGE}-[a-z0-9_]{{8}}\.link")
_LARGEST_BYTES = 4 << 20
_PATIENCE_SECONDS = 20
_DIFF_LINES = 80


class Refused(Exception):
    """The file is left as it is; the message says why and what to do.

    Its first line says all; a unified diff may follow.
    """


class Change(NamedTuple):
    """One of the four changes: `line` is 1-based in the patched file."""

    name: str
    line: int
    text: str


class Found(NamedTuple):
    """A model file, and its release where the interpreter that found it tells one."""

    path: str
    release: str | None


class _Edit(NamedTuple):
    offset: int
    text: bytes


@dataclass
class Result:
    """What `apply` or `revert` did, or would do (dry run).

    `model_file` is the real file; `link` is the path asked for where links lead
    from it there. `found_version` is the patch version that was in the file.
    `leftovers` are paths that a killed run left, swept by this one.
    """

    model_file: str
    link: str | None
    sglang_version: str | None
    family: str | None
    changed: bool
    changes: list[Change]
    before: bytes
    after: bytes
    runtime_dir: str
    runtime_changed: list[str]
    leftovers: list[str] = field(default_factory=list)
    found_version: str | None = None
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
        return _unified(self.before, self.after, self.model_file, self.model_file)


# --- where SGLang is -----------------------------------------------------------------------


def release_of(path: str | os.PathLike[str]) -> str | None:
    """The SGLang release that holds `path`, read from files, never by importing it.

    `path` is the package directory ``sglang`` or anything in it. A wheel, a source
    tree with ``_version.py`` and one with ``sglang.egg-info`` tell; None if nothing does.
    """
    path = Path(path).absolute()
    for package in (path, *path.parents):
        if package.name == "sglang" and (package / "srt").is_dir():
            break
    else:
        return None
    for name in ("_version.py", "version.py"):
        release = _assigned_version(package / name)
        if release:
            return release
    releases = set()
    for pattern in ("sglang-*.dist-info/METADATA", "sglang.egg-info/PKG-INFO", "sglang-*.egg-info/PKG-INFO"):
        for metadata in package.parent.glob(pattern):
            with contextlib.suppress(OSError):
                found = re.search(r"^Version: (\S+)$", metadata.read_text(encoding="utf-8", errors="replace"), re.M)
                if found:
                    releases.add(found[1])
    return releases.pop() if len(releases) == 1 else None


def _assigned_version(path: Path) -> str | None:
    """The text that the module `path` assigns to ``__version__`` outside of any block."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None
    for node in tree.body:
        names = [target.id for target in node.targets if isinstance(target, ast.Name)] if isinstance(node, ast.Assign) else []
        if "__version__" in names and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            return node.value.value
    return None


# Runs in the server's interpreter. The metadata of an editable install lies elsewhere than its package.
_LOOK = """\
import importlib.metadata, importlib.util, json, sys, urllib.parse
if sys.argv[1] == "installed":
    sys.path[:] = [entry for entry in sys.path if entry]
spec = importlib.util.find_spec("sglang")
places = list(spec.submodule_search_locations or []) if spec else []
projects = []
try:
    for found in importlib.metadata.distributions(name="sglang"):
        url = urllib.parse.urlparse(json.loads(found.read_text("direct_url.json") or "{}").get("url", ""))
        if url.scheme == "file":
            projects.append([urllib.parse.unquote(url.path), found.version])
except Exception:
    projects = []
print(json.dumps([places, projects]))
"""


def locate(python: str, model: str = "deepseek_v2", directory: str | None = None) -> Found:
    """The file of `model` in the SGLang that the interpreter `python` would import.

    Runs `python` once to look SGLang up without importing it: wheels, editable
    installs and source trees on PYTHONPATH answer. A source tree in `directory`
    counts as it does for ``python -m`` called there; without it no working
    directory counts. Raises Refused with the remedy.
    """
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", model):
        raise Refused(f"model {model!r} is not the name of a module; give deepseek_v2 or its like")
    command = [python, "-c", _LOOK, "here" if directory else "installed"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, cwd=directory)
        places, projects = json.loads(done.stdout.splitlines()[-1])
    except FileNotFoundError:
        raise Refused(f"{python}: no such interpreter; give the Python that runs SGLang") from None
    except subprocess.CalledProcessError as error:
        said = error.stderr.strip().splitlines() or [f"exit status {error.returncode}"]
        raise Refused(f"{python} could not look for sglang ({said[-1]}); give the Python that runs SGLang") from error
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError, TypeError) as error:
        raise Refused(f"{python} could not look for sglang ({error}); give the Python that runs SGLang") from error
    for place in places:
        path = os.path.join(place, "srt", "models", model + ".py")
        if os.path.lexists(path):
            real = os.path.realpath(path)
            releases = {version for root, version in projects if real.startswith(os.path.join(os.path.realpath(root), ""))}
            return Found(path, releases.pop() if len(releases) == 1 else None)
    if places:
        raise Refused(f"{', '.join(places)} has no srt/models/{model}.py; name another model")
    raise Refused(f"{python} has no sglang; give the Python that runs SGLang, or the model file itself")


def find_model_file(python: str, model: str = "deepseek_v2") -> str:
    """The path that `locate` finds for an installed SGLang."""
    return locate(python, model).path


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


def _hs_of(model):
    """The capture that a model opened; an error where its class is built without the __init__ that opens one."""
    if not hasattr(model, "_hs_capture"):
        raise RuntimeError(
            f"hidden_state.bridge: SGLANG_HS_DUMP_DIR is set, but {{type(model).__name__}} runs the decoder loop of "
            f"{{__name__}} without its __init__, so no capture was opened. "
            "Serve a model that builds itself by it, or unset SGLANG_HS_DUMP_DIR."
        )
    return model._hs_capture


_hs_asked = bool(__import__("os").environ.get("SGLANG_HS_DUMP_DIR"))
'''
# A class of another file may inherit the forward and not the __init__: unset, that has to work as it does unpatched.
_BEGUN = '_hs = _hs_of(self) if _hs_asked else getattr(self, "_hs_capture", None)'


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
    # The decoder of an encoder-decoder model is what takes the tokens.
    tokens = [one for one in loops if "input_ids" in [argument.arg for argument in one.forward.args.args]]
    if len(loops) > 1 and len(tokens) == 1 and [one.owner for one in loops].count(tokens[0].owner) == 1:
        loops = tokens
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
    """The final norm: what it takes in is what every layer gives out.

    `hidden` is that state as the norm takes it in, the name of the hidden
    states or a conversion of them; `adds` is False for a norm that only hands
    its residual on. Without an `attribute` there is no norm.
    """

    statement: ast.stmt
    attribute: str | None
    hidden: str
    residual: str | None = None
    stream: bool = False
    outputs: list[str] | None = None
    adds: bool = True


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
    local = {n.name: n for n in tree.body if isinstance(n, ast.ClassDef)}
    heirs = [ast.unparse(base) for base in found.owner.bases if ast.unparse(base) not in ("nn.Module", "torch.nn.Module")]
    converted = _converted(found, hidden)
    for statement in _behind(found):
        if not isinstance(statement, (ast.Assign, ast.Return)):
            continue
        value, name = statement.value, hidden
        if _is_conversion(value) and isinstance(value.func.value, ast.Call):
            value = value.func.value
        if isinstance(value, ast.Call) and value.args and isinstance(value.args[0], ast.Name) and value.args[0].id in converted:
            name = value.args[0].id
        call = _norm_call(value, name)
        if call is None:
            continue
        attribute, residual, stream = call
        made = _classes_of(found.owner, attribute)
        # A base class in another file may make it.
        if not all(one.lower().endswith("norm") for one in made) or not (made or heirs):
            continue
        if isinstance(value, ast.IfExp) and residual is None:
            continue
        if residual is not None and not (isinstance(residual, ast.Name) and residual.id in others):
            raise Refused(f"the final norm of line {statement.lineno} takes in {ast.unparse(residual)}, which the layers do not give")
        adds = residual is not None or stream and _of_self(value.func) is None
        if adds and made & set(local):
            if stream or not all(one in local and _hands_on(local[one]) for one in made):
                raise Refused(f"the final norm is a {made.pop()} of this file: whether it adds the residual cannot be told")
            adds = False
        outputs = None
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Tuple):
            names = [element.id for element in statement.targets[0].elts if isinstance(element, ast.Name)]
            outputs = names if len(names) == len(statement.targets[0].elts) == 2 else None
        ignored = residual is not None and not adds
        norms.append(
            _Norm(
                statement,
                attribute,
                converted.get(name, hidden),
                residual.id if residual is not None and adds else None,
                stream,
                None if ignored else outputs,
                not ignored,
            )
        )
    # The branch for a missing residual is never taken behind a layer that gives one.
    if any(norm.residual for norm in norms):
        norms = [norm for norm in norms if norm.residual]
    last = found.forward.body[-1]
    if (
        not norms
        and not others
        and isinstance(last, ast.Return)
        and found.forward.body[-2:-1] == [found.loop]
        and _is_name(last.value, hidden)
    ):
        return _Norm(last, None, hidden)
    return _only(norms, f"final norm of '{hidden}' behind the decoder loop")


def _is_conversion(value: ast.AST) -> bool:
    """Whether it is ``x.to(...)``."""
    return isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr == "to"


def _converted(found: _Loop, hidden: str) -> dict[str, str]:
    """Names that behind the loop stand for `hidden` in another dtype, with the conversion."""
    names: dict[str, list[ast.expr]] = {}
    for statement in _behind(found):
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            names.setdefault(statement.targets[0].id, []).append(statement.value)
    return {
        name: ast.unparse(values[0])
        for name, values in names.items()
        if len(values) == 1 and name != hidden and _is_conversion(values[0]) and _is_name(values[0].func.value, hidden)
    }


def _hands_on(norm: ast.ClassDef) -> bool:
    """Whether the forward of a norm does nothing with its second argument but to return it untouched."""
    forwards = [n for n in norm.body if isinstance(n, ast.FunctionDef) and n.name == "forward"]
    if len(forwards) != 1 or len(forwards[0].args.args) != 3:
        return False
    residual = forwards[0].args.args[2].arg
    uses = [n for n in ast.walk(forwards[0]) if _is_name(n, residual)]
    returned = [n.value.elts for n in _own_nodes(forwards[0]) if isinstance(n, ast.Return) and isinstance(n.value, ast.Tuple)]
    return len(uses) == len(returned) == 1 and len(returned[0]) == 2 and returned[0][1] is uses[0]


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
    # own completion and folding keep the state; a sum that it completes here was refused at the end of the turn.
    allowed = ("model_forward_maybe_tbo", "model_forward_stages", "residual_batch.complete_output", "residual_batch.fold")
    allowed += ("tensor_model_parallel_all_reduce",)
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
    call = state.get(shape, f"output({found.index}, {norm.hidden})")
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
    opening = f"self._hs_capture = _hs_open(self, {_quoted(found.layers)}, {_quoted(norm.attribute)})"
    opened = _open_edit(source, owner, opening)
    top = next(statement for statement in forward.body if found.loop in ast.walk(statement))
    imports = [n for n in source.tree.body if isinstance(n, (ast.Import, ast.ImportFrom))]
    if not imports:
        raise Refused("it imports nothing")
    if not all(map(source.begins_line, [top, norm.statement])):
        raise Refused("statements share a line, or are indented with tabs")
    loader = _LOADER.format(version=PATCH_VERSION, family=family, checksum=_sha256(source.data))
    if norm.outputs is not None:
        place, watch = norm.statement.end_lineno + 1, f"_hs.finish({norm.outputs[0]}, {norm.outputs[1]})"
    elif norm.attribute is None:
        place, watch = norm.statement.lineno, "_hs.finish(None, None)"
    else:
        # Its result has no names of its own: the norm itself says what it took in and gave.
        place, watch = norm.statement.lineno, f"_hs.watch(self.{norm.attribute}{'' if norm.adds else ', False'})"
    return family, [
        source.block(imports[-1].end_lineno + 1, "imports", 0, loader.splitlines()),
        opened,
        source.block(
            top.lineno,
            "loop",
            top.col_offset,
            [_BEGUN, "if _hs is not None:", "    _hs = _hs.begin(forward_batch)"],
        ),
        *edits,
        source.block(place, "norm", norm.statement.col_offset, ["if _hs is not None:", f"    {watch}"]),
    ]


def _quoted(name: str | None) -> str:
    return f'"{name}"' if name else "None"


def _open_edit(source: _Source, owner: ast.ClassDef, opening: str) -> _Edit:
    """An edit that has the model open the capture when it is built."""
    inits = [n for n in owner.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
    if not inits and all(ast.unparse(base) != "nn.Module" for base in owner.bases) and owner.bases:
        lines = ["def __init__(self, *args, **kwargs):", "    super().__init__(*args, **kwargs)", f"    {opening}"]
        return source.block(owner.end_lineno + 1, "init", owner.body[-1].col_offset, lines)
    init = _only(inits, f"method {owner.name}.__init__")
    end = init.body[-1]
    if any(isinstance(node, ast.Return) and node is not end for node in _own_nodes(init)):
        raise Refused(f"{owner.name}.__init__ returns early")
    if not source.begins_line(end):
        raise Refused("statements share a line, or are indented with tabs")
    return source.block(end.lineno if isinstance(end, ast.Return) else end.end_lineno + 1, "init", init.body[0].col_offset, [opening])


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


# --- the marks ------------------------------------------------------------------------------


class _Piece(NamedTuple):
    """An inserted piece with its marks: [first, last) is what the patch added."""

    name: bytes
    first: int
    last: int
    inside: bytes


def _pieces(data: bytes, path: str) -> list[_Piece]:
    """The pieces of a patch of any version, in their order; Refused where a mark is torn, doubled or strange."""
    found: list[_Piece] = []
    opened = None
    for match in _MARKED_LINE.finditer(data):
        line = data.count(b"\n", 0, match.start()) + 1
        edge = _EDGE.fullmatch(match[0])
        if edge is None:
            if opened is not None and match[0].startswith(_HEAD):
                continue
            raise Refused(f"{path}, line {line}: the text '{_MARK.decode()}' stands where the patch puts none, so its marks were edited")
        name = edge[2].decode()
        if edge[1] == b"begin":
            if opened is not None:
                raise Refused(f"{path} is patched in part: piece '{opened[0].decode()}' begins at line {opened[3]} and does not end")
            if name.encode() in [piece.name for piece in found]:
                raise Refused(f"{path} is patched in part: piece '{name}' is there twice, again at line {line}")
            # A split piece took up the line end before it.
            first = match.start() - 1 if edge[3] and match.start() else match.start()
            opened = (edge[2], first, match.end(), line, edge[3])
            continue
        if opened is None or (opened[0], opened[4]) != (edge[2], edge[3]):
            raise Refused(f"{path} is patched in part: piece '{name}' ends at line {line} and does not begin")
        last = match.end()
        if edge[3]:
            last += len(data[last:]) - len(data[last:].lstrip(b" "))
        found.append(_Piece(opened[0], opened[1], last, data[opened[2] : match.start()]))
        opened = None
    if opened is not None:
        raise Refused(f"{path} is patched in part: piece '{opened[0].decode()}' begins at line {opened[3]} and does not end")
    return found


def _stripped(data: bytes, path: str) -> bytes:
    """`data` without the marked pieces; Refused where a piece is doubled or torn."""
    rest = bytearray()
    done = 0
    for piece in _pieces(data, path):
        rest += data[done : piece.first]
        done = piece.last
    return bytes(rest + data[done:])


def _changes(patched: bytes, path: str) -> list[Change]:
    """The four changes, with lines as they stand in the patched file."""
    found = _pieces(patched, path)
    changes = []
    for name, names in _PIECES_OF_CHANGE.items():
        pieces = [piece for piece in found if piece.name in names]
        if pieces:
            begin = patched.index(_BEGIN, pieces[0].first)
            lines = [line for piece in pieces for line in piece.inside.decode("utf-8", "replace").split("\n")[:-1]]
            changes.append(Change(name, patched.count(b"\n", 0, begin) + 1, "\n".join(lines)))
    return changes


def _original(place: _Place, release: str | None, originals: str | None) -> tuple[bytes, str, str]:
    """Return (original, patch version, family) of a patched file, proved by its checksum."""
    data, path = place.data, place.file
    try:
        original = _stripped(data, path)
        headers = _HEADER.findall(data)
        if len(headers) != 1:
            raise Refused(f"{path}: the head of the patch was edited")
        version, family, checksum = (group.decode() for group in headers[0])
        if _sha256(original) != checksum:
            raise Refused(
                f"{path} was edited after it was patched: without the patch its sha256 is "
                f"{_sha256(original)[:16]}…, the head of the patch says {checksum[:16]}…"
            )
    except Refused as error:
        raise Refused(f"{error}. {_remedy(place, release, originals)}") from None
    return original, version, family


def _remedy(place: _Place, release: str | None, originals: str | None) -> str:
    """What to do about a file that does not tell its original, and a diff of what was edited, as far as it can be told."""
    # The head itself may be what was edited.
    version = re.search(re.escape(_HEAD) + rb"(\S+),", place.data)
    checksums = [found.decode() for found in re.findall(rb"original sha256 ([0-9a-f]{16,64})", place.data)]
    rest = None
    with contextlib.suppress(Refused):
        rest = _stripped(place.data, place.file)
        checksums.append(_sha256(rest))
    kept = [(_original_name(place.file, checksum, originals), checksum) for checksum in checksums]
    stored = next((name for name, checksum in kept if _holds(name, checksum)), None)
    text = "reinstall SGLang, then patch again; what was edited by hand is lost with that"
    if stored is not None:
        text = f"Put the original back (cp {shlex.quote(stored)} {shlex.quote(place.file)}) or {text}"
        rest, against = _read(stored)[0], stored
    else:
        directory = os.path.dirname(_original_name(place.file, "", originals))
        text = f"{directory} does not have the original, so {text}"
        against = f"{place.file} without the patch"
    if rest is None:
        return text
    expected = rest
    if version is None or version[1].decode() == PATCH_VERSION:
        with contextlib.suppress(Refused):
            expected = _make(rest, place.file, release)[1]
            against = f"{against}, with patch {PATCH_VERSION}"
    return f"{text}\n{_unified(expected, place.data, against, place.file, _DIFF_LINES)}"


def _make(data: bytes, path: str, release: str | None) -> tuple[str, bytes]:
    """(family, patched bytes) for the original `data`; Refused where it is not of a known shape."""
    try:
        return _patched(data, path, release)
    except RecursionError as error:
        raise Refused(f"{path} is nested too deeply for a model file; reinstall SGLang") from error


def _unified(old: bytes, new: bytes, old_name: str, new_name: str, most: int | None = None) -> str:
    """Unified diff of two files, cut behind `most` lines."""
    sides = [data.decode("utf-8", "replace").split("\n") for data in (old, new)]
    # What follows the last line end is no line unless there is something.
    sides = [
        [f"{line}\n" for line in side[:-1]] + ([f"{side[-1]}\n", "\\ No newline at end of file\n"] if side[-1] else []) for side in sides
    ]
    lines = list(difflib.unified_diff(*sides, old_name, new_name))
    if most is not None and len(lines) > most:
        lines[most:] = [f"… {len(lines) - most} lines more\n"]
    return "".join(lines)


def _is_newer(version: str) -> bool:
    """Whether a patch or a runtime is of a version that this patcher does not know."""
    return not version.isdecimal() or int(version) > int(PATCH_VERSION)


# --- what a user asks for ------------------------------------------------------------------


class _Plan(NamedTuple):
    """What is to be done about one model file; `result` tells it to the user."""

    place: _Place
    result: Result
    source: bytes
    runtime: dict[str, bytes]
    kept: str


def apply(
    path: str | os.PathLike[str],
    *,
    runtime: str | None = None,
    originals: str | None = None,
    release: str | None = None,
    dry_run: bool = False,
) -> Result:
    """Patch the model file `path` and install the runtime beside it; raise Refused.

    A file patched by an older patch version is patched afresh, a runtime that is
    missing or differs is put right, what a killed run left is swept. `release` is
    the release of SGLang where no file beside the model tells it. With `dry_run`
    everything is checked and nothing is written.
    """
    with _alone(path, dry_run):
        plan = _plan_apply(path, runtime, originals, release)
        place, result = plan.place, plan.result
        if result.changed:
            _check(plan)
        if dry_run or not result.changed:
            return result
        _sweep(result.leftovers)
        _keep(plan.kept, plan.source)
        # A patched model without its runtime would stop a capture server, so the runtime comes first.
        with _refusing(f"{place.file} was not patched"):
            replaced = _carry_out(plan)
        if replaced is not None:
            with _refusing(f"{place.file} is patched, but the runtime that was replaced is still there"):
                _remove_runtime(replaced)
    return result


def _carry_out(plan: _Plan) -> str | None:
    """Install the runtime and replace the file, or neither; return the runtime that was replaced and is to be removed."""
    place, result, replaced = plan.place, plan.result, None
    with contextlib.ExitStack() as undo:
        try:
            if result.runtime_changed:
                copied = os.path.isdir(result.runtime_dir) and not os.path.islink(result.runtime_dir)
                if copied or result.found_version != PATCH_VERSION:
                    # A patched model never stands beside the runtime of another version. Nor beside none, and a
                    # directory cannot give way to a link at once.
                    place = _replace(place, plan.source)
                if copied:
                    _remove_runtime(_set_aside(result.runtime_dir))
                else:
                    undo.callback(_replace, place, result.before)
                fresh = _prepare_runtime(place, plan.runtime)
                undo.callback(_remove_runtime, fresh)
                replaced = _live(result.runtime_dir)
                undo.callback(_point, result.runtime_dir, replaced)
                _point(result.runtime_dir, fresh)
            _replace(place, result.after)
        except BaseException:
            # What comes behind the replacement can fail too, or be interrupted.
            if result.before != result.after and _holds(place.file, result.checksum_after):
                undo.pop_all()
            raise
        undo.pop_all()
    return replaced


def revert(path: str | os.PathLike[str], *, originals: str | None = None, release: str | None = None, dry_run: bool = False) -> Result:
    """Take the patch out of `path`, byte for byte, and its runtime away; raise Refused.

    The original is reconstructed and proved by the checksum that the patch carries,
    so a patch of any version can be taken out. `release` and `dry_run` as in `apply`.
    """
    with _alone(path, dry_run):
        plan = _plan_revert(path, originals, release)
        place, result = plan.place, plan.result
        if result.changed:
            _check(plan)
        if dry_run or not result.changed:
            return result
        _sweep(result.leftovers)
        with _refusing(f"{place.file} still has the patch"):
            _replace(place, result.after)
        if result.runtime_changed:
            with _refusing(f"{place.file} is without the patch, but the runtime is still there"):
                live = _live(result.runtime_dir)
                if live is not None:
                    _point(result.runtime_dir, None)
                _remove_runtime(live or _set_aside(result.runtime_dir))
    return result


def _plan_apply(path: str | os.PathLike[str], runtime: str | None, originals: str | None, release: str | None) -> _Plan:
    place = _look(path)
    release = release_of(place.asked) or release_of(place.file) or release
    source, version = place.data, None
    if _MARK in place.data:
        source, version, _family = _original(place, release, originals)
        if _is_newer(version):
            raise Refused(
                f"{place.file} carries patch {version}, and this patcher knows patch {PATCH_VERSION}. Use the newer patcher (upgrade "
                "the collection), or take that patch out first: revert (unpatch.yml), then apply (patch.yml)"
            )
    family, after = _make(source, place.file, release)
    if version == PATCH_VERSION and after != place.data:
        raise Refused(
            f"{place.file}: the inserted code was edited. Run revert (unpatch.yml), which restores the original exactly and drops "
            "that edit, then apply (patch.yml)\n"
            + _unified(after, place.data, f"{place.file} as patch {version} makes it", place.file, _DIFF_LINES)
        )
    directory = os.path.join(place.srt, RUNTIME_PACKAGE)
    files = _runtime_files(runtime)
    stale = _stale_runtime(directory, files)
    if stale:
        _check_shared(place, directory)
    kept = _original_name(place.file, _sha256(source), originals)
    result = _result(place, release, version, after, _changes(after, place.file), stale, _leftovers(place, source, kept))
    result.family = family
    result.original = kept if result.changed or os.path.exists(kept) else None
    return _Plan(place, result, source, files, kept)


def _plan_revert(path: str | os.PathLike[str], originals: str | None, release: str | None) -> _Plan:
    place = _look(path)
    release = release_of(place.asked) or release_of(place.file) or release
    after, version, family = place.data, None, None
    if _MARK in place.data:
        after, version, family = _original(place, release, originals)
    kept = _original_name(place.file, _sha256(after), originals)
    removed = _removable_runtime(place, os.path.join(place.srt, RUNTIME_PACKAGE))
    result = _result(place, release, version, after, _changes(place.data, place.file), removed, _leftovers(place, after, kept))
    result.family = family
    result.original = kept if os.path.exists(kept) else None
    return _Plan(place, result, after, {}, "")


def _result(
    place: _Place, release: str | None, version: str | None, after: bytes, changes: list[Change], runtime: list[str], leftovers: list[str]
) -> Result:
    return Result(
        model_file=place.file,
        link=place.asked if place.asked != place.file else None,
        sglang_version=release,
        family=None,
        changed=bool(runtime or leftovers) or after != place.data,
        changes=changes,
        before=place.data,
        after=after,
        runtime_dir=os.path.join(place.srt, RUNTIME_PACKAGE),
        runtime_changed=runtime,
        leftovers=leftovers,
        found_version=version,
    )


def _check(plan: _Plan) -> None:
    """Refuse what could not be carried out, before anything is touched."""
    place, result = plan.place, plan.result
    # Sizes of the files that come into a directory; none where something only goes.
    needed: dict[str, list[int]] = {os.path.dirname(path): [] for path in result.leftovers}
    if plan.kept:
        if os.path.basename(place.srt) != "srt":
            raise Refused(
                f"{place.file} is not in a package sglang/srt, so its runtime would lie astray; give the model file inside the package"
            )
        sizes = [] if _holds(plan.kept, _sha256(plan.source)) else [len(plan.source)]
        needed.setdefault(os.path.dirname(plan.kept), []).extend(sizes)
    if result.runtime_changed:
        # A directory and a link beside the files.
        sizes = [*map(len, plan.runtime.values()), 1, 1] if plan.runtime else []
        needed.setdefault(place.srt, []).extend(sizes)
    if result.after != place.data:
        _check_owner(place)
        needed.setdefault(os.path.dirname(place.file), []).append(len(result.after))
        for compiled in _bytecode(place):
            needed.setdefault(os.path.dirname(compiled), [])
    _check_room(needed)


# --- files ---------------------------------------------------------------------------------


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class _Place(NamedTuple):
    """A model file as it is asked for and as it lies on the disk.

    `srt` is the directory whose models Python imports, where a link stands: the
    runtime belongs there, also when the file itself is in a cache.
    """

    asked: str
    file: str
    srt: str
    data: bytes
    found: os.stat_result


def _look(path: str | os.PathLike[str]) -> _Place:
    """Resolve `path` once and read the file; Refused for what is no model file."""
    file = os.path.realpath(path)
    asked = os.path.abspath(path)
    if os.path.realpath(asked) != file:
        # A ".." behind a link: only the system knows where it leads.
        asked = file
    srt = _srt_of(asked) or _srt_of(file) or os.path.dirname(os.path.dirname(file))
    try:
        data, found = _read(file)
    except Refused as error:
        link = f" ({asked} is a link to it)" if asked != file else ""
        raise Refused(f"{error}{link}; give the model file, sglang/srt/models/deepseek_v2.py, or reinstall SGLang") from error
    if not data:
        raise Refused(f"{file} is empty, so a write of it was cut off; reinstall SGLang")
    return _Place(asked, file, os.path.realpath(srt), data, found)


def _srt_of(path: str) -> str | None:
    """The directory ``srt`` of ``.../srt/models/...``: some models lie in a directory of their own."""
    for parent in Path(path).parents:
        if parent.name == "models" and parent.parent.name == "srt":
            return str(parent.parent)
    return None


def _read(path: str) -> tuple[bytes, os.stat_result]:
    """Bytes and state of a regular file, links not followed; never waits on a pipe or touches a device."""
    try:
        found = os.lstat(path)
        if stat.S_ISLNK(found.st_mode):
            raise Refused(f"{path} is a link" if os.path.exists(path) else f"{path} is a link that leads nowhere or in a circle")
        if not stat.S_ISREG(found.st_mode):
            raise Refused(f"{path} is {_KINDS.get(stat.S_IFMT(found.st_mode), 'not a file')}")
        if found.st_size > _LARGEST_BYTES:
            raise Refused(f"{path} has {found.st_size} bytes, more than a source file has")
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(handle, "rb") as stream:
            return stream.read(), os.fstat(stream.fileno())
    except OSError as error:
        raise Refused(f"{path}: {error.strerror}" + ("; run as its owner" if error.errno in (errno.EACCES, errno.EPERM) else "")) from error


_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


@contextlib.contextmanager
def _alone(path: str | os.PathLike[str], dry_run: bool) -> Iterator[None]:
    """Keep other patchers off the tree of `path`; a killed one keeps nobody off."""
    if dry_run:
        with _refusing(f"{os.fspath(path)} cannot be looked at"):
            yield
        return
    place = _look(path)
    handle = None
    try:
        handle = _lock(place.srt, os.O_RDONLY)
    except OSError:
        # NFS locks nothing but files that are open for writing. Where that is refused too, so is the patch.
        while handle is None:
            try:
                handle = _lock(place.file, os.O_RDWR)
                replaced = not os.path.samestat(os.fstat(handle), os.stat(place.file))
            except OSError:
                break
            if replaced:
                os.close(handle)
                handle = None
    try:
        with _refusing(f"{place.file} cannot be worked on"):
            yield
    finally:
        if handle is not None:
            os.close(handle)


def _lock(path: str, flags: int) -> int:
    """An open handle that holds the lock of `path`; OSError where its file system has none."""
    handle = os.open(path, flags | os.O_CLOEXEC)
    deadline = time.monotonic() + _PATIENCE_SECONDS
    try:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return handle
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise Refused(f"another patcher is at work on {path}; wait until it has ended, then run this one again") from None
                time.sleep(0.1)
    except BaseException:
        os.close(handle)
        raise


@contextlib.contextmanager
def _refusing(state: str) -> Iterator[None]:
    """Turn an OSError into Refused: `state` says what is, the error why, and what to do comes last."""
    try:
        yield
    except OSError as error:
        path = error.filename2 or error.filename
        where = f"{path}: " if path else ""
        raise Refused(f"{state}: {where}{error.strerror}; {_remedy_of(error.errno)}") from error


def _remedy_of(number: int | None) -> str:
    """What to do about an error of this number."""
    if number in (errno.ENOSPC, errno.EDQUOT):
        return "make room there (df, df -i, quota), then run the patcher again"
    if number == errno.EROFS:
        return "its file system is read-only: mount it for writing, or patch the image that it comes from"
    if number in (errno.EACCES, errno.EPERM):
        return "run as the owner of the SGLang installation; where that is no help, lsattr shows an immutable file"
    return "mend that, then run the patcher again"


def _check_owner(place: _Place) -> None:
    """Refuse where the file could be replaced, but not by one of the same owner."""
    groups = {os.getegid(), *os.getgroups()}
    if os.geteuid() == 0 or (place.found.st_uid == os.geteuid() and place.found.st_gid in groups):
        return
    try:
        owner = pwd.getpwuid(place.found.st_uid).pw_name
    except KeyError:
        owner = str(place.found.st_uid)
    raise Refused(f"{place.file} belongs to {owner} (group {place.found.st_gid}); run as {owner} or root")


def _check_room(needed: dict[str, list[int]]) -> None:
    """Refuse where files of these sizes could not be put into these directories, or things not be taken out of them."""
    blocks: dict[int, int] = {}
    inodes: dict[int, int] = {}
    for asked, sizes in needed.items():
        directory = asked
        made = 0
        while not os.path.lexists(directory):
            directory = os.path.dirname(directory)
            made += 1
        if not os.path.isdir(directory):
            raise Refused(f"{directory} is not a directory; move it away, or name another directory (--originals DIR, originals_dir)")
        with _refusing(f"{directory} cannot be looked at"):
            room = os.statvfs(directory)
            device = os.stat(directory).st_dev
        if room.f_flag & os.ST_RDONLY:
            raise Refused(f"{directory} is not writable: {_remedy_of(errno.EROFS)}")
        if not os.access(directory, os.W_OK | os.X_OK):
            raise Refused(
                f"{directory} is not writable; run as the owner of the SGLang installation, and name "
                "a directory for originals that this user may write (--originals DIR, originals_dir)"
            )
        blocks[device] = blocks.get(device, 0) + sum(-(-size // room.f_frsize) for size in sizes) + made
        inodes[device] = inodes.get(device, 0) + len(sizes) + made
        free, left = (room.f_bfree, room.f_ffree) if os.geteuid() == 0 else (room.f_bavail, room.f_favail)
        # Some file systems count no blocks, some no inodes.
        if room.f_blocks and blocks[device] > free:
            raise Refused(
                f"{directory} has {free * room.f_frsize} bytes free, and {blocks[device] * room.f_frsize} are needed; "
                f"{_remedy_of(errno.ENOSPC)}"
            )
        if room.f_files and inodes[device] > left:
            raise Refused(f"{directory} has room for {left} more files, and {inodes[device]} are needed; {_remedy_of(errno.ENOSPC)}")


def _fill(handle: int, data: bytes, mode: int, owner: tuple[int, int]) -> None:
    """Write `data` to an open file, to the disk, and give it mode and owner."""
    with open(handle, "wb") as stream:
        stream.write(data)
        stream.flush()
        if owner != (os.geteuid(), os.getegid()):
            os.fchown(stream.fileno(), *owner)
        os.fchmod(stream.fileno(), mode)
        os.fsync(stream.fileno())


def _write(target: str, data: bytes, mode: int, owner: tuple[int, int], like: os.stat_result | None = None) -> None:
    """Write by a temporary file in the same directory, fsync and rename.

    With `like`, the state of the file at `target`, its extended attributes are kept.
    """
    handle, temporary = tempfile.mkstemp(prefix=".hsb-", dir=os.path.dirname(target))
    try:
        _fill(handle, data, mode, owner)
        if like is not None:
            _copy_attributes(target, temporary)
            _make_later(temporary, like)
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise
    _sync(os.path.dirname(target))


def _make_later(path: str, than: os.stat_result) -> None:
    """Let `path` be modified in a later second: bytecode is taken for fresh by size and second."""
    if int(os.lstat(path).st_mtime) <= int(than.st_mtime):
        os.utime(path, (int(than.st_mtime) + 1,) * 2, follow_symlinks=False)


def _copy_attributes(source: str, target: str) -> None:
    """Give `target` the extended attributes of `source`: SELinux context, access lists, a user's own."""
    try:
        names, present = os.listxattr(source), os.listxattr(target)
    except OSError as error:
        if error.errno in (errno.ENOTSUP, errno.ENOSYS):
            return
        raise
    # An access list that the directory hands to each new file.
    for name in set(present) - set(names):
        if name == "system.posix_acl_access":
            os.removexattr(target, name)
    for name in names:
        # Signatures of the old bytes.
        if name in ("security.ima", "security.evm"):
            continue
        value = os.getxattr(source, name)
        if name not in present or os.getxattr(target, name) != value:
            os.setxattr(target, name, value)


def _sync(directory: str) -> None:
    """Have a rename outlive a loss of power, where the file system can: done it is in any case."""
    with contextlib.suppress(OSError):
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _bytecode(place: _Place) -> list[str]:
    """Compiled copies of the model file: some are never compared with their source, so they have to go."""
    stem = re.escape(os.path.splitext(os.path.basename(place.file))[0])
    found = set()
    for path in (place.asked, place.file):
        cache = os.path.join(os.path.dirname(path), "__pycache__")
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            found |= {os.path.join(cache, name) for name in os.listdir(cache) if re.fullmatch(rf"{stem}\.[^/]+\.pyc", name)}
    return sorted(found)


def _replace(place: _Place, after: bytes) -> _Place:
    """Put `after` in the place of the file that was looked at; owner, mode and attributes stay."""
    if after == place.data:
        return place
    moved = f"{place.file} changed while it was patched; run the patcher again"
    if os.path.realpath(place.asked) != place.file:
        raise Refused(moved)
    try:
        data, found = _read(place.file)
    except Refused as error:
        raise Refused(f"{moved} ({error})") from error
    if data != place.data or not os.path.samestat(found, place.found):
        raise Refused(moved)
    for compiled in _bytecode(place):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(compiled)
    _write(place.file, after, stat.S_IMODE(found.st_mode), (found.st_uid, found.st_gid), found)
    return place._replace(data=after, found=os.lstat(place.file))


def _original_name(path: str, checksum: str, originals: str | None) -> str:
    stem = os.path.splitext(os.path.basename(path))[0]
    return os.path.join(os.path.abspath(originals or default_originals()), f"{stem}.{checksum[:16]}.orig")


def _holds(path: str, checksum: str) -> bool:
    """Whether `path` is there and its bytes have this sha256, or one that begins so."""
    with contextlib.suppress(Refused):
        return _sha256(_read(path)[0]).startswith(checksum)
    return False


def _make_private(directory: str) -> None:
    """Make `directory` and the parents it lacks, each 0700."""
    if not os.path.isdir(directory):
        _make_private(os.path.dirname(directory))
        os.mkdir(directory, 0o700)


def _keep(kept: str, original: bytes) -> None:
    if _holds(kept, _sha256(original)):
        return
    with _refusing(
        f"nothing was changed, since the original cannot be kept as {kept} (name another directory with --originals, originals_dir)"
    ):
        _make_private(os.path.dirname(kept))
        _write(kept, original, 0o600, (os.geteuid(), os.getegid()))


def _leftovers(place: _Place, original: bytes, kept: str) -> list[str]:
    """What a killed run left beside the file: temporary files and runtimes that are provably of a patcher."""
    found = []
    for directory in sorted({os.path.dirname(place.file), os.path.dirname(kept)}):
        for path in _matching(directory, _TEMPORARY):
            with contextlib.suppress(Refused):
                data = _read(path)[0]
                # The last line may be torn.
                whole = data[: data.rfind(b"\n") + 1]
                if original.startswith(whole) or _BEGIN in whole:
                    found.append(path)
    live = _live(os.path.join(place.srt, RUNTIME_PACKAGE))
    for path in _matching(place.srt, _RUNTIME_NAME):
        if path != live and not os.path.islink(path) and os.path.isdir(path):
            names = os.listdir(path)
            if not names or (MARKER_FILE in names and not _strange(path)):
                found.append(path)
    for path in _matching(place.srt, _RUNTIME_LINK):
        if os.path.islink(path) and _RUNTIME_NAME.fullmatch(os.readlink(path)):
            found.append(path)
    return found


def _matching(directory: str, names: re.Pattern[str]) -> list[str]:
    try:
        return sorted(os.path.join(directory, name) for name in os.listdir(directory) if names.fullmatch(name))
    except OSError:
        return []


def _sweep(leftovers: list[str]) -> None:
    with _refusing("nothing was changed, since what a killed run left cannot be removed"):
        for path in leftovers:
            if os.path.isdir(path) and not os.path.islink(path):
                _remove_runtime(path)
            else:
                os.unlink(path)


# --- the runtime ---------------------------------------------------------------------------


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


def _live(directory: str) -> str | None:
    """The directory that the runtime's link leads to; None where there is no such link."""
    if not os.path.islink(directory):
        return None
    name = os.readlink(directory)
    if not _RUNTIME_NAME.fullmatch(name):
        raise Refused(f"{directory} is a link to {name}, so it is not the capture runtime; move it away and run the patcher again")
    return os.path.join(os.path.dirname(directory), name)


def _strange(directory: str) -> list[str]:
    """Names in a runtime that cannot be of it: everything but plain files and bytecode."""
    names = set(os.listdir(directory)) - {"__pycache__"}
    return sorted(name for name in names if not stat.S_ISREG(os.lstat(os.path.join(directory, name)).st_mode))


def _entries(directory: str) -> set[str]:
    """Names in an installed runtime but for bytecode; Refused for a directory not ours."""
    if _live(directory) is None and os.path.lexists(directory) and not os.path.isdir(directory):
        raise Refused(f"{directory} is not a directory; move it away and run the patcher again")
    if not os.path.isdir(directory):
        return set()
    found = set(os.listdir(directory)) - {"__pycache__"}
    if found and MARKER_FILE not in found:
        raise Refused(f"{directory} lacks {MARKER_FILE}, so it is not the capture runtime; move it away and run the patcher again")
    strange = _strange(directory)
    if strange:
        raise Refused(f"{directory} holds {', '.join(strange)}, which no runtime has; move it away and run the patcher again")
    return found


def _stale_runtime(directory: str, files: dict[str, bytes]) -> list[str]:
    """Names in the installed runtime that are missing, differ or do not belong there."""
    found = _entries(directory)
    stale = sorted(found - set(files))
    for name, data in files.items():
        if name not in found or _read(os.path.join(directory, name))[0] != data:
            stale.append(name)
    return stale


def _other_patched(place: _Place) -> list[str]:
    """Other model files of the tree that have a patch, so need the runtime."""
    models = Path(place.srt, "models")
    found = []
    for path in sorted(models.rglob("*.py")):
        file = os.path.realpath(path)
        if file != place.file and os.path.isfile(file) and _BEGIN in _read(file)[0]:
            found.append(str(path.relative_to(models)))
    return found


def _check_shared(place: _Place, directory: str) -> None:
    """Refuse to put a runtime in the place of a newer one that another model file needs."""
    if MARKER_FILE not in _entries(directory):
        return
    try:
        version = str(json.loads(_read(os.path.join(directory, MARKER_FILE))[0])["patch_version"])
    except (ValueError, KeyError, TypeError):
        return
    others = _other_patched(place) if _is_newer(version) else []
    if others:
        raise Refused(
            f"{directory} is of patch {version} and serves {', '.join(others)}, and this patcher knows patch {PATCH_VERSION}. "
            "Use the newer patcher (upgrade the collection)"
        )


def _prepare_runtime(place: _Place, files: dict[str, bytes]) -> str:
    """Write the runtime into a directory beside the live one, the marker first; mode and owner like the models'."""
    models = os.stat(os.path.dirname(place.file))
    owner, mode = (models.st_uid, models.st_gid), stat.S_IMODE(place.found.st_mode)
    installed = os.path.join(place.srt, RUNTIME_PACKAGE)
    directory = tempfile.mkdtemp(prefix=f".{RUNTIME_PACKAGE}-", dir=place.srt)
    try:
        for name, data in files.items():
            path = os.path.join(directory, name)
            _fill(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), data, mode, owner)
            with contextlib.suppress(FileNotFoundError):
                _make_later(path, os.stat(os.path.join(installed, name)))
        if owner != (os.geteuid(), os.getegid()):
            os.chown(directory, *owner)
        os.chmod(directory, stat.S_IMODE(models.st_mode))
        _sync(directory)
    except BaseException:
        _remove_runtime(directory)
        raise
    return directory


def _point(directory: str, target: str | None) -> None:
    """Make the link `directory` lead to the runtime `target` beside it, at once; take it away with None."""
    if target is None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(directory)
    else:
        link = f"{target}.link"
        os.symlink(os.path.basename(target), link)
        try:
            found = os.lstat(target)
            os.chown(link, found.st_uid, found.st_gid, follow_symlinks=False)
            os.replace(link, directory)
        except BaseException:
            os.unlink(link)
            raise
    _sync(os.path.dirname(directory))


def _removable_runtime(place: _Place, directory: str) -> list[str]:
    """What revert removes; nothing while another model file is patched."""
    if not os.path.lexists(directory) or _other_patched(place):
        return []
    return sorted(_entries(directory)) or [RUNTIME_PACKAGE]


def _set_aside(directory: str) -> str:
    """Take a runtime that is a directory out of the way at once; where it is then."""
    aside = tempfile.mkdtemp(prefix=f".{RUNTIME_PACKAGE}-", dir=os.path.dirname(directory))
    try:
        os.rename(directory, aside)
    except OSError:
        # An overlay does not rename what an image brought.
        os.rmdir(aside)
        return directory
    return aside


def _remove_runtime(directory: str) -> None:
    """Remove a directory of the runtime; the marker goes last, so that a removal that was cut off can be finished."""
    if not os.path.isdir(directory):
        return
    cache = os.path.join(directory, "__pycache__")
    if os.path.isdir(cache) and not os.path.islink(cache):
        for name in os.listdir(cache):
            os.unlink(os.path.join(cache, name))
        os.rmdir(cache)
    for name in sorted(os.listdir(directory), key=lambda name: name == MARKER_FILE):
        os.unlink(os.path.join(directory, name))
    os.rmdir(directory)


# --- command line --------------------------------------------------------------------------


_COMMANDS = {
    "check": "Say what the file is and what apply would do: nothing, patch it, or refuse. Changes nothing.",
    "diff": "Show what apply would change in the file, as a unified diff. Changes nothing.",
    "apply": "Keep the original, install the capture runtime, patch the file; upgrade an older patch, put a stale runtime right.",
    "revert": "Take the patch out, byte for byte, and remove the capture runtime. The kept original stays.",
}


def _state(result: Result) -> str:
    """One line about a file as it was found."""
    if result.found_version is None:
        left = ", a runtime is beside it: apply refreshes it, revert removes it" if os.path.lexists(result.runtime_dir) else ""
        return f"not patched, can be patched{left}"
    if result.before != result.after:
        return f"patched by patch {result.found_version}, this is patch {PATCH_VERSION}: run apply"
    if result.runtime_changed:
        return f"patched, runtime stale ({', '.join(result.runtime_changed)}): run apply"
    return "patched, complete"


def _report(command: str, result: Result) -> list[str]:
    """The lines that a command prints."""
    lines = [f"file     {result.model_file}"]
    if result.link:
        lines.append(f"link     {result.link}")
    unknown = "unknown: neither _version.py, version.py nor the package's metadata tells it"
    lines += [f"release  {result.sglang_version or unknown}", f"family   {result.family or '-'}"]
    if command == "check":
        lines.append(f"state    {_state(result)}")
    elif not result.changed:
        lines.append(f"changed  nothing ({'patched already' if command == 'apply' else 'not patched'})")
    verb = "removed " if command == "revert" else ""
    lines += [f"{verb}{change.name}: line {change.line}" for change in result.changes]
    if result.runtime_changed and command != "check":
        done = "removed" if command == "revert" else "written"
        lines.append(f"runtime  {done}: {result.runtime_dir} ({len(result.runtime_changed)} files)")
    for path in result.leftovers:
        lines.append(f"leftover {path} of a killed run{': apply and revert remove it' if command == 'check' else ', removed'}")
    if result.original:
        lines.append(f"original {result.original}{'' if os.path.exists(result.original) else ' (apply puts it there)'}")
    return lines


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hs_patcher.py",
        description="Patch an SGLang model file for hidden state capture, or take the patch out again.",
        epilog="Exit status: 0 done, nothing to do, or (check) patched or patchable; 1 refused, with the reason and what to do; 2 usage.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in _COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text, epilog=parser.epilog)
        command.add_argument("path", metavar="PATH", nargs="?", help="the model file, sglang/srt/models/deepseek_v2.py")
        command.add_argument("--python", metavar="PYTHON", help="instead of PATH: the interpreter that runs SGLang, called from here")
        command.add_argument("--model", metavar="NAME", default="deepseek_v2", help="with --python: the model's module (%(default)s)")
        command.add_argument("--originals", metavar="DIR", help="where the original is kept (%(default)s)", default=default_originals())
        if name != "revert":
            command.add_argument("--runtime", metavar="DIR", help="source of the capture runtime (hs_capture beside this file)")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return its exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if (options.path is None) == (options.python is None):
        parser.error("give either PATH or --python PYTHON")
    try:
        path, release = options.path, None
        if options.python is not None:
            path, release = locate(options.python, options.model, os.getcwd())
        if options.command == "revert":
            result = revert(path, originals=options.originals, release=release)
        elif options.command == "diff":
            with _alone(path, dry_run=True):
                result = _plan_apply(path, options.runtime, options.originals, release).result
        else:
            dry_run = options.command == "check"
            result = apply(path, runtime=options.runtime, originals=options.originals, release=release, dry_run=dry_run)
    except Refused as error:
        if options.command == "check":
            sys.stdout.write(f"file     {path or options.python}\nstate    refused\n")
        sys.stderr.write(f"refused: {error}\n")
        return 1
    sys.stdout.write(result.diff() if options.command == "diff" else "\n".join(_report(options.command, result)) + "\n")
    return 0


if __name__ == "__main__":
    # A path or a source may hold what the terminal's encoding does not.
    sys.stdout.reconfigure(errors="backslashreplace")
    raise SystemExit(main())
