"""Digest of the code of a method: what is kept of its results does not outlive a change of it."""

from __future__ import annotations

import ast
import hashlib
import inspect
import uuid
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mmfast.core.registry import Method
from mmfast.core.spec import Spec

_PACKAGE = "mmfast"


def code_of(method: Method | None) -> str:
    """Return the digest of a method's file and of the modules of mmfast that it is made of.

    These are the modules that the file imports, also inside functions, and those that they import
    in turn. The package itself offers names of them all, and of it only those that are taken count.
    A method without a file, as of a notebook, may be made of all that its process defines: it is
    known in that process alone, until it is defined again.
    """
    if method is None:
        return ""
    try:
        return digest(files_of(Path(inspect.getsourcefile(method.fn) or "")))
    except (OSError, TypeError):
        return _token(method.fn)


@cache
def _token(fn: Callable[..., Any]) -> str:
    return uuid.uuid4().hex[:12]


def name_of(specs: Iterable[Spec]) -> str:
    """Return specs as text, each with the digest of its method's code: a name of their results."""
    return "+".join(f"{spec} {code_of(spec.method)}" for spec in specs)


def files_of(path: Path) -> tuple[Path, ...]:
    """Return a file and the files of mmfast that it imports, directly or through one another."""
    found, left = set[Path](), [path]
    while left:
        file = left.pop()
        if file not in found:
            found.add(file)
            left += _imports(file)
    return path, *sorted(found - {path})


@cache
def digest(paths: tuple[Path, ...]) -> str:
    """Digest of the contents of files."""
    found = hashlib.sha256()
    for path in paths:
        found.update(path.read_bytes())
    return found.hexdigest()[:12]


@cache
def _imports(path: Path) -> list[Path]:
    """Return the files of mmfast that a file imports, without those for types alone."""
    names = {name for node in _run(ast.parse(path.read_bytes())) for name in _modules(node)}
    specs = [find_spec(name) for name in sorted(names)]
    return [Path(each.origin) for each in specs if each is not None and each.origin is not None]


def _run(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that run, without what only type checkers read."""
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING")):
            yield child
            yield from _run(child)


def _modules(node: ast.AST) -> Iterator[str]:
    """Yield the modules of mmfast that an import names."""
    if isinstance(node, ast.Import):
        yield from (each.name for each in node.names if each.name.startswith(f"{_PACKAGE}."))
    elif isinstance(node, ast.ImportFrom) and not node.level and node.module == _PACKAGE:
        import mmfast

        yield from (home for each in node.names if (home := mmfast._LAZY.get(each.name)))
    elif isinstance(node, ast.ImportFrom) and not node.level:
        module = str(node.module)
        if module.startswith(f"{_PACKAGE}."):
            yield module
            for each in node.names:  # which may be modules themselves
                if (inner := find_spec(module)) is not None and inner.submodule_search_locations:
                    yield f"{module}.{each.name}"
