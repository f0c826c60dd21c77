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
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, NamedTuple

PATCH_VERSION = "1"
CHANGES = ("imports", "init", "layer loop", "after the norm")
RUNTIME_PACKAGE = "hs_capture"
RUNTIME_FILES = (
    "__init__.py",
    "capture.py",
    "collector.py",
    "dumpfile.py",
    "engine.py",
    "guards.py",
    "layers.py",
    "settings.py",
    "writer.py",
)
MARKER_FILE = ".hidden_state_bridge"

_BEGIN = b"# hidden_state.bridge begin "
_END = b"# hidden_state.bridge end "
# Every inserted piece is whole lines; "own" and "collector" enclose SGLang's own expression.
_PIECES = (b"imports", b"init", b"loop", b"own", b"collector", b"norm")
_PIECES_OF_CHANGE = dict(zip(CHANGES, ((b"imports",), (b"init",), (b"loop", b"own", b"collector"), (b"norm",))))
_BLOCK = re.compile(
    rb"^[ ]*# hidden_state\.bridge begin (" + b"|".join(_PIECES) + rb")\n(?:.*\n)*?"
    rb"[ ]*# hidden_state\.bridge end \1\n",
    re.MULTILINE,
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


# --- families: one rule each ---------------------------------------------------------------


class _Source:
    """A model file with its tree; positions of the tree as byte offsets."""

    def __init__(self, data: bytes, path: str) -> None:
        self.data = data
        if b"\r" in data or data.startswith(b"\xef\xbb\xbf"):
            raise Refused(f"{path} has CR line ends or a byte order mark, which no release has; reinstall SGLang")
        try:
            self.tree = ast.parse(data)
        except (SyntaxError, ValueError) as error:
            raise Refused(
                f"{path} is not Python {sys.version_info[0]}.{sys.version_info[1]} source "
                f"({error}); run the patcher with SGLang's own interpreter or reinstall SGLang"
            ) from error
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

    def stands_alone(self, first: int, last: int) -> bool:
        """Whether nothing but blanks shares the lines of [first, last), within brackets."""
        start = self.data.rfind(b"\n", 0, first) + 1
        end = self.data.index(b"\n", last)
        enclosed = self.data[:start].rstrip()[-1:] == b"("
        return enclosed and not self.data[start:first].strip() and not self.data[last:end].strip()

    def block(self, lineno: int, piece: str, indent: int, lines: list[str]) -> _Edit:
        """An edit that puts `lines`, marked as `piece`, before line `lineno`."""
        offset = self.line(lineno)
        if offset and self.data[offset - 1 : offset] != b"\n":
            raise Refused("the file does not end with a line end; reinstall SGLang")
        marked = [(_BEGIN.decode() + piece), *lines, (_END.decode() + piece)]
        text = "".join(" " * indent + line + "\n" if line else "\n" for line in marked)
        return _Edit(offset, text.encode())


class _Family(NamedTuple):
    name: str
    first: tuple[int, ...]
    last: tuple[int, ...]
    edit: Callable[[_Source, str], list[_Edit]]


_LOADER = '''\
# hidden_state.bridge patch {version}, family {family}, original sha256 {checksum}
def _hs_open(model):
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
    return open_capture(model, patch_version="{version}", family="{family}")
'''


def _only(nodes: list, what: str):
    if len(nodes) != 1:
        raise Refused(f"expected one {what}, found {len(nodes)}")
    return nodes[0]


def _method(owner: ast.ClassDef, name: str) -> ast.FunctionDef:
    return _only(
        [n for n in owner.body if isinstance(n, ast.FunctionDef) and n.name == name],
        f"method {owner.name}.{name}",
    )


def _same(node: ast.AST, expression: str) -> bool:
    return ast.dump(node) == ast.dump(ast.parse(expression, mode="eval").body)


def _loop_call(tree: ast.Module) -> tuple[ast.ClassDef, ast.FunctionDef, ast.For, ast.Assign]:
    """The model class, its forward, its decoder loop and the assignment from ``layer(...)``."""
    model = _only(
        [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "DeepseekV2Model"],
        "class DeepseekV2Model",
    )
    forward = _method(model, "forward")
    loop, call = _only(
        [
            (loop, node)
            for loop in forward.body
            if isinstance(loop, ast.For)
            for node in ast.walk(loop)
            if isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Call)
            and isinstance(node.value.func, ast.Name)
            and node.value.func.id == "layer"
        ],
        "loop over layer(...) in DeepseekV2Model.forward",
    )
    return model, forward, loop, call


def _edit_keyword_tuple(source: _Source, family: str) -> list[_Edit]:
    """Family D: three results, and the call takes ``captured_last_layer_outputs=``."""
    model, forward, loop, assign = _loop_call(source.tree)
    results = assign.targets[0].elts if isinstance(assign.targets[0], ast.Tuple) else []
    own = [k.value for k in assign.value.keywords if k.arg == "captured_last_layer_outputs"]
    if len(results) != 3 or len(own) != 1:
        raise Refused(
            f"the layer call gives {len(results) or 1} results and takes "
            f"{'' if own else 'no '}captured_last_layer_outputs=; family D gives 3 and takes it"
        )
    if not all(isinstance(node, ast.Name) for node in [loop.target, *results[:2]]):
        raise Refused("the layer loop does not count or unpack into plain names")
    index, hidden, residual = loop.target.id, results[0].id, results[1].id
    if not (isinstance(own[0], ast.IfExp) and _same(own[0].test, f"{index} in self.layers_to_capture")):
        raise Refused(f"captured_last_layer_outputs= does not depend on '{index} in self.layers_to_capture'")
    _only(
        [n for n in ast.walk(loop) if isinstance(n, ast.Assign) and _same(n.value, f"self.layers[{index}]")],
        f"layer = self.layers[{index}] in the layer loop",
    )
    if "forward_batch" not in [argument.arg for argument in forward.args.args]:
        raise Refused("DeepseekV2Model.forward takes no forward_batch")
    norm = _only(
        [
            n
            for n in ast.walk(forward)
            if isinstance(n, ast.Assign)
            and n.lineno > loop.end_lineno
            and _same(n.value, f"self.norm({hidden}, {residual})")
            and isinstance(n.targets[0], ast.Tuple)
            and len(n.targets[0].elts) == 2
            and all(isinstance(element, ast.Name) for element in n.targets[0].elts)
        ],
        f"assignment of two names from self.norm({hidden}, {residual}) after the layer loop",
    )
    post_norm, pre_norm = (element.id for element in norm.targets[0].elts)

    init = _method(model, "__init__")
    if any(isinstance(node, ast.Return) for node in ast.walk(init)):
        raise Refused("DeepseekV2Model.__init__ returns early")
    imports = [n for n in source.tree.body if isinstance(n, (ast.Import, ast.ImportFrom))]
    loader = _LOADER.format(version=PATCH_VERSION, family=family, checksum=_sha256(source.data))
    first, last = source.span(own[0])
    if not source.stands_alone(first, last):
        raise Refused("captured_last_layer_outputs= is not a bracketed expression on its own lines")
    column = own[0].col_offset
    handed_on = ["    " + line for line in source.data[first:last].decode("utf-8").splitlines()]
    return [
        source.block(imports[-1].end_lineno + 1, "imports", 0, loader.splitlines()),
        source.block(
            init.end_lineno + 1,
            "init",
            init.body[0].col_offset,
            ["self._hs_capture = _hs_open(self)"],
        ),
        source.block(
            loop.lineno,
            "loop",
            loop.col_offset,
            ["_hs = self._hs_capture", "if _hs is not None:", "    _hs = _hs.begin(forward_batch)"],
        ),
        source.block(own[0].lineno, "own", column, ["("]),
        source.block(
            own[0].end_lineno + 1,
            "collector",
            column,
            [")", "if _hs is None", "else _hs.collector(", f"    {index},", *handed_on, ")"],
        ),
        source.block(
            norm.end_lineno + 1,
            "norm",
            norm.col_offset,
            ["if _hs is not None:", f"    _hs.finish({post_norm}, {pre_norm})"],
        ),
    ]


FAMILIES = (_Family("D", (0, 5, 14), (0, 5, 20), _edit_keyword_tuple),)


def _patched(data: bytes, path: str, release: str | None) -> tuple[str, bytes]:
    """Return (family, patched bytes) for the original `data`, or raise Refused."""
    source = _Source(data, path)
    used = {n.id for n in ast.walk(source.tree) if isinstance(n, ast.Name)}
    used |= {n.attr for n in ast.walk(source.tree) if isinstance(n, ast.Attribute)}
    if used & set(_OWN_NAMES):
        raise Refused(f"{path} already uses the names {', '.join(sorted(used & set(_OWN_NAMES)))}")
    reasons = []
    for family in FAMILIES:
        try:
            edits = sorted(family.edit(source, family.name))
        except Refused as error:
            reasons.append(f"not family {family.name}: {error}")
            continue
        if release is not None and not family.first <= _numbers(release) <= family.last:
            reasons.append(f"family {family.name} by its shape, but not by its release")
            continue
        after = bytearray()
        done = 0
        for edit in edits:
            after += data[done : edit.offset] + edit.text
            done = edit.offset
        after += data[done:]
        result = bytes(after)
        if _stripped(result, path) != data:
            raise Refused(f"{path}: the patch could not be taken out again; report this file")
        ast.parse(result)
        return family.name, result
    known = ", ".join(f"{f.name} ({'.'.join(map(str, f.first))} to {'.'.join(map(str, f.last))})" for f in FAMILIES)
    raise Refused(
        f"{path} (SGLang {release or 'of unknown release'}) is unknown to this patcher: "
        f"{'; '.join(reasons)}. Known families: {known}. Install such a release of SGLang"
    )


def _stripped(data: bytes, path: str) -> bytes:
    """`data` without the marked pieces; Refused where a piece is missing, doubled or torn."""
    for piece in _PIECES:
        begins = data.count(_BEGIN + piece + b"\n")
        ends = data.count(_END + piece + b"\n")
        if (begins, ends) != (1, 1):
            raise Refused(
                f"{path} is patched in part: piece '{piece.decode()}' begins {begins} times and ends {ends} times. {_restore(data, path)}"
            )
    rest, blocks = _BLOCK.subn(b"", data)
    if blocks != len(_PIECES) or b"# hidden_state.bridge" in rest:
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
        for piece in pieces:
            first = patched.index(_BEGIN + piece + b"\n")
            last = patched.index(_END + piece + b"\n")
            lines += patched[first:last].decode("utf-8").split("\n")[1:-1]
        line = patched.count(b"\n", 0, patched.index(_BEGIN + pieces[0] + b"\n")) + 1
        changes.append(Change(name, line, "\n".join(lines)))
    return changes


# --- files ---------------------------------------------------------------------------------


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.match(r"[\d.]*", release)[0].split(".") if number)[:3]


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
    for other in Path(path).parent.glob("*.py"):
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
