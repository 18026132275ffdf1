"""Symbols of Python source and a normal form of their text, so that a digest moves when the code does and only then.

The normal form is the syntax tree without positions, comments and docstrings: reformatting or explaining code changes
no digest, and any other edit does. It is spelt here because ``ast.dump`` differs between releases of Python. Knows no
documents and no registry.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator, Sequence

_SCOPES = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_DOCUMENTED = (*_SCOPES, ast.Module)


def symbol_nodes(tree: ast.Module, dotted: str) -> list[ast.AST]:
    """Return the definitions or assignments of a name: ``function``, ``Class.method``, ``outer.inner`` or ``NAME``.

    More than one where it is defined in branches, none where it is not defined.
    """
    scopes: list[ast.AST] = [tree]
    for name in dotted.split("."):
        scopes = [node for scope in scopes for node in _statements(scope) if name in names_of(node)]
    return scopes


def names_of(node: ast.AST) -> set[str]:
    """Return the names a statement defines."""
    if isinstance(node, _SCOPES):
        return {node.name}
    if isinstance(node, ast.Assign):
        return {name.id for target in node.targets for name in _unpacked(target) if isinstance(name, ast.Name)}
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return {node.target.id}
    return set()


def _unpacked(target: ast.expr) -> list[ast.expr]:
    return [*target.elts] if isinstance(target, (ast.Tuple, ast.List)) else [target]


def defined_names(tree: ast.Module) -> Iterator[str]:
    """Yield the dotted name of every function, class and module-level name of a file."""

    def walk(scope: ast.AST, prefix: str) -> Iterator[str]:
        for node in _statements(scope):
            if isinstance(node, _SCOPES) or not prefix:
                for name in sorted(names_of(node)):
                    yield prefix + name
            if isinstance(node, _SCOPES):
                yield from walk(node, f"{prefix}{node.name}.")

    return walk(tree, "")


def _statements(scope: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements of a scope, those inside its branches included, and none of a nested scope."""
    for field in ("body", "orelse", "handlers", "finalbody", "cases"):
        for node in getattr(scope, field, ()):
            yield node
            if not isinstance(node, _SCOPES):
                yield from _statements(node)


def normal_form(node: object) -> str:
    """Return a spelling of a syntax tree that no release of Python spells otherwise."""
    if isinstance(node, list):
        return f"[{','.join(map(normal_form, node))}]"
    if not isinstance(node, ast.AST):
        return ascii(node)
    fields = []
    for name, value in ast.iter_fields(node):
        if isinstance(node, _DOCUMENTED) and name == "body":
            value = _without_docstring(value)
        if isinstance(node, ast.JoinedStr) and name == "values":
            value = _joined(value)
        # What a release does not know yet, another spells as nothing.
        absent = value is None or value == []
        if name in ("ctx", "kind", "type_comment") or (absent and not isinstance(node, ast.Constant)):
            continue
        fields.append(f"{name}={normal_form(value)}")
    return f"{type(node).__name__}({','.join(fields)})"


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    first = body[0] if body else None
    documented = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return body[1:] if documented and isinstance(first.value.value, str) else body  # type: ignore[union-attr]


def _joined(parts: Sequence[ast.expr]) -> list[ast.expr]:
    """Return the parts of an f-string with neighbouring texts as one: releases split them differently."""
    merged: list[ast.expr] = []
    for part in parts:
        last = merged[-1] if merged else None
        if isinstance(part, ast.Constant) and isinstance(last, ast.Constant):
            merged[-1] = ast.Constant(str(last.value) + str(part.value))
        elif not isinstance(part, ast.Constant) or part.value:
            merged.append(part)
    return merged


def matching_code(nodes: Sequence[ast.AST], text: str) -> list[ast.AST]:
    """Return the statements and expressions inside symbols that are this code, however they are laid out.

    Raises:
        SyntaxError: the text is neither a statement nor an expression.
    """
    (wanted,) = ast.parse(text).body
    spelling = normal_form(wanted.value if isinstance(wanted, ast.Expr) else wanted)
    kind = type(wanted.value if isinstance(wanted, ast.Expr) else wanted)
    return [
        node for symbol in nodes for node in ast.walk(symbol) if type(node) is kind and normal_form(node) == spelling
    ]


def digest_of(nodes: Sequence[ast.AST]) -> str:
    """Return the digest of the normal form of one or more pieces of code, in order."""
    return "sha256:" + hashlib.sha256("\n".join(map(normal_form, nodes)).encode()).hexdigest()
