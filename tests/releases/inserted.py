# SPDX-License-Identifier: GPL-3.0-or-later
"""What the patch inserts, told apart from SGLang's own code in a syntax tree.

Everything it inserts stands behind `_hs is None` or `_hs is not None`, but for what opens and begins the capture: without a capture it does
nothing.
"""

from __future__ import annotations

import ast

WRAPPERS = {"collector", "callback"}
# With the variable unset nothing of the model is asked for that its class may not have.
BEGUN = "_hs = _hs_of(self) if _hs_asked else getattr(self, '_hs_capture', None)"
ASKED = "_hs_asked = bool(__import__('os').environ.get('SGLANG_HS_DUMP_DIR'))"


class _WithoutPatch(ast.NodeTransformer):
    """Takes every node of the patch out of a tree, and only such as do nothing when nothing is captured."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST | None:
        return None if node.name in ("_hs_open", "_hs_of") or _opens_only(node) else self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> ast.AST | None:
        ours = ast.unparse(node) in (BEGUN, ASKED) or ast.unparse(node).startswith("self._hs_capture = _hs_open(self, ")
        return None if ours else self.generic_visit(node)

    def visit_If(self, node: ast.If) -> ast.AST | None:
        return None if guarded(node) else self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        own = wrapped(node)
        return self.generic_visit(node) if own is None else own


def _opens_only(node: ast.FunctionDef) -> bool:
    """Whether it is the `__init__` of a class that had none: its base's, and the opening of the capture."""
    lines = [ast.unparse(statement) for statement in node.body]
    return (
        node.name == "__init__"
        and ast.unparse(node.args) == "self, *args, **kwargs"
        and len(lines) == 2
        and lines[0] == "super().__init__(*args, **kwargs)"
        and lines[1].startswith("self._hs_capture = _hs_open(self, ")
    )


def without_patch(tree: ast.Module) -> ast.Module:
    """The tree without the patch's nodes; what the patch may not contain stays in it."""
    return _WithoutPatch().visit(tree)


def handed_on(tree: ast.Module) -> list[ast.expr]:
    """SGLang's own values that the patch wrapped: each is there once more, to be handed on to."""
    return [own for own in map(wrapped, ast.walk(tree)) if own is not None]


def guarded(node: ast.AST) -> ast.Call | None:
    """The one call of `if _hs is not None:`, which names nothing of the model's but plain names, `self.<norm>` and `x.to(self.<dtype>)`."""
    if not isinstance(node, ast.If) or ast.unparse(node.test) != "_hs is not None" or node.orelse or len(node.body) != 1:
        return None
    statement = node.body[0]
    if isinstance(statement, ast.Assign):
        return statement.value if ast.unparse(statement) == "_hs = _hs.begin(forward_batch)" else None
    call = getattr(statement, "value", None)
    if not isinstance(statement, ast.Expr) or not isinstance(call, ast.Call) or not ast.unparse(call.func).startswith("_hs."):
        return None
    return call if all(map(_is_plain, call.args)) and not call.keywords else None


def _is_plain(given: ast.expr) -> bool:
    if is_conversion(given):
        return isinstance(given.func.value, ast.Name) and all(map(_is_plain, given.args)) and not given.keywords
    return isinstance(given, (ast.Name, ast.Constant)) or of_self(given) is not None


def is_conversion(node: ast.AST | None) -> bool:
    """Whether it is `x.to(...)`."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "to"


def wrapped(node: ast.AST) -> ast.expr | None:
    """SGLang's own value of `own if _hs is None else _hs.collector(i, own)`."""
    if not isinstance(node, ast.IfExp) or ast.unparse(node.test) != "_hs is None":
        return None
    call = node.orelse
    if not isinstance(call, ast.Call) or len(call.args) != 2 or call.keywords or not isinstance(call.args[0], ast.Name):
        return None
    same = ast.dump(call.args[1]) == ast.dump(node.body)
    return node.body if same and ast.unparse(call.func) in {f"_hs.{name}" for name in WRAPPERS} else None


def of_self(node: ast.AST | None) -> str | None:
    """X of `self.X`."""
    found = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    return node.attr if found else None
