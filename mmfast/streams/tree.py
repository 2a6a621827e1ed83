"""Nested state as plain data beside its tensors: what a file can hold, and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmfast.core.errors import MmfastError

_KINDS = "dict, list, tuple, tensors, numbers, strings, True, False, None and files"


@dataclass(frozen=True)
class File:
    """A finished file, synced to disk, that belongs to some state; saving links or copies it."""

    path: Path


@dataclass(frozen=True)
class Plain:
    """A tree without what is large.

    Attributes:
        skeleton: Fit for JSON; containers are one-entry dicts that name their kind.
        tensors: In the order in which the skeleton numbers them.
        files: Likewise.
    """

    skeleton: Any
    tensors: list[Tensor]
    files: list[File]


def to_plain(tree: Any) -> Plain:
    """Take a tree apart.

    Raises:
        MmfastError: It holds something else than what `from_plain` can give back; says where.
    """
    plain = Plain(None, [], [])
    return Plain(_skeleton(tree, plain, "tree"), plain.tensors, plain.files)


def _skeleton(node: Any, plain: Plain, where: str) -> Any:
    if node is None or type(node) in (bool, int, float, str):
        return node
    if isinstance(node, Tensor):
        plain.tensors.append(node)
        return {"tensor": len(plain.tensors) - 1}
    if isinstance(node, File):
        plain.files.append(node)
        return {"file": len(plain.files) - 1}
    if type(node) in (list, tuple):
        items = [_skeleton(v, plain, f"{where}[{i}]") for i, v in enumerate(node)]
        return {type(node).__name__: items}
    if type(node) is dict and all(type(key) in (str, int) for key in node):
        pairs = [[key, _skeleton(v, plain, f"{where}[{key!r}]")] for key, v in node.items()]
        return {"dict": pairs}
    raise MmfastError(
        f"cannot save {where}: a {type(node).__name__} is none of {_KINDS} (keys: str or int)"
    )


def from_plain(skeleton: Any, tensors: Sequence[Tensor], files: Sequence[File] = ()) -> Any:
    """Put a tree together again.

    Raises:
        MmfastError: The skeleton is not one that `to_plain` made, or lacks parts.
    """
    try:
        return _tree(skeleton, tensors, files)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise MmfastError(f"saved state is malformed: {error!r}; it was not written here") from None


def _tree(node: Any, tensors: Sequence[Tensor], files: Sequence[File]) -> Any:
    if not isinstance(node, dict):
        return node
    ((kind, value),) = node.items()
    if kind == "dict":
        return {key: _tree(v, tensors, files) for key, v in value}
    many: Callable[[Any], Any] = {"list": list, "tuple": tuple}.get(kind, list)
    if kind in ("list", "tuple"):
        return many(_tree(v, tensors, files) for v in value)
    return {"tensor": tensors, "file": files}[kind][value]


def compact(x: Tensor) -> Tensor:
    """The same numbers, dense, and in storage of their own: a view would keep its whole base."""
    x = x.detach()
    alone = x.untyped_storage().nbytes() == x.numel() * x.element_size()
    return x if alone and x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)
