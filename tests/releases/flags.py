# SPDX-License-Identifier: GPL-3.0-or-later
"""The arguments that the server of an SGLang release takes, read from its source without importing it.

Up to 0.5.13 every flag is an `add_argument` call of `ServerArgs.add_cli_args`. From 0.5.14 most are annotated fields,
`name: A[type, "help" or Arg(...)]`, of ServerArgs or (from 0.5.20) of the classes in `arg_groups/fields/`.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import NamedTuple

# What of a wheel the parser of arguments lies in, below `sglang/srt/`.
SERVER_ARGS = "server_args.py"
FIELDS = "arg_groups/fields"
# Actions that take no value.
SWITCHES = {"store_true", "store_false", "store_const", "count", "help"}


class Flag(NamedTuple):
    """One spelling of an argument."""

    name: str
    takes_value: bool


def _text(node: ast.expr) -> object:
    """The value of a literal; None for anything else."""
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None


def _keywords(call: ast.Call) -> dict[str, ast.expr]:
    return {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}


def _added(function: ast.FunctionDef) -> list[Flag]:
    """The flags of the `add_argument` calls in a function."""
    flags = []
    for call in ast.walk(function):
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument"):
            continue
        names = [name for name in map(_text, call.args) if isinstance(name, str) and name.startswith("-")]
        given = _keywords(call)
        action = given.get("action")
        takes_value = _text(action) not in SWITCHES if isinstance(action, ast.Constant) else _text(given.get("nargs", call.func)) != 0
        flags += [Flag(name, takes_value) for name in names]
    return flags


def _annotated(node: ast.AnnAssign) -> list[Flag]:
    """The flags of one field; [] where its annotation registers none."""
    hint = node.annotation
    if not (isinstance(hint, ast.Subscript) and isinstance(hint.value, ast.Name) and hint.value.id in ("A", "Annotated")):
        return []
    kind, *metas = hint.slice.elts
    given: dict[str, ast.expr] | None = None
    for meta in metas:
        if isinstance(meta, ast.Call) and isinstance(meta.func, ast.Name) and meta.func.id == "Arg":
            given = _keywords(meta)
            break
        if isinstance(meta, (ast.Constant, ast.JoinedStr, ast.BinOp)):
            given = {}
            break
    if given is None or _text(given.get("no_cli", ast.Constant(False))):
        return []
    name = _text(given["cli_name"]) if "cli_name" in given else "--" + node.target.id.replace("_", "-")
    names = [name, *((_text(given["aliases"]) or []) if "aliases" in given else [])]
    inner = ast.unparse(kind).replace("Optional[bool]", "bool").replace("bool | None", "bool")
    action = _text(given["action"]) if "action" in given else None
    takes_value = inner != "bool" if action is None else action not in SWITCHES
    return [Flag(one, takes_value) for one in names]


def flags(srt: Path) -> dict[str, Flag]:
    """Every flag of the release whose `sglang/srt` is this directory, by its spelling."""
    found: list[Flag] = []
    for path in [srt / SERVER_ARGS, *sorted((srt / FIELDS).glob("*.py"))]:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if not isinstance(node, ast.ClassDef) or (path.name == SERVER_ARGS and node.name != "ServerArgs"):
                continue
            for one in node.body:
                if isinstance(one, ast.AnnAssign):
                    found += _annotated(one)
                elif isinstance(one, ast.FunctionDef) and one.name == "add_cli_args":
                    found += _added(one)
    return {flag.name: flag for flag in found}
