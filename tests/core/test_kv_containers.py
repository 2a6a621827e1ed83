"""Keys and values lie in containers of four kinds, each of them one class."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# kind -> its class, and the subclasses that transformers' interface of cache layers asks for
KINDS = {
    "numbers in few bits": ["PackedTensor"],
    "rows that grow in place": ["RowBuffer"],
    "layer of a transformers cache": [
        "Shorter",
        "StoreLayer",
        "PackedLayer",
        "RoomyLayer",
        "PaddingFirst",
        "OrphanLayer",
    ],
    "immutable block": ["KVBlock"],
}
PAIRS = ({"key", "keys", "k"}, {"value", "values", "v"})
JOINT = {"kv", "key_values", "past_key_values"}
PACKED = ({"codes", "quantised", "packed"}, {"scale", "scales", "step", "zero"})
STORING = {"update", "put", "put_two", "write", "add", "append", "store", "admit", "push"}
NEW = (
    {"key_states", "new_keys", "raw", "rotated", *PAIRS[0]},
    {"value_states", "new_values", *PAIRS[1]},
)


def _methods(node: ast.ClassDef) -> list[ast.FunctionDef]:
    return [each for each in node.body if isinstance(each, ast.FunctionDef)]


def _fields(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """Names of what objects of a class hold, without underscore, each with its annotation."""
    for each in node.body:
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            yield each.target.id.lstrip("_"), ast.unparse(each.annotation)
        elif isinstance(each, ast.Assign) and "__slots__" in map(ast.unparse, each.targets):
            yield from ((c.value, "") for c in ast.walk(each.value) if isinstance(c, ast.Constant))
    for method in _methods(node):
        for each in ast.walk(method):
            annotation = ast.unparse(each.annotation) if isinstance(each, ast.AnnAssign) else ""
            targets = each.targets if isinstance(each, ast.Assign) else []
            targets = [each.target] if isinstance(each, ast.AnnAssign) else targets
            for part in (part for target in targets for part in ast.walk(target)):
                if isinstance(part, ast.Attribute) and ast.unparse(part.value) == "self":
                    yield part.attr.lstrip("_"), annotation


def _tensors(annotation: ast.expr | None) -> bool:
    return annotation is None or "Tensor" in ast.unparse(annotation)


def _stores(node: ast.ClassDef) -> bool:
    """A method takes new keys and values in."""
    taking = [m for m in _methods(node) if m.name in STORING]
    names = [{a.arg for a in m.args.args if _tensors(a.annotation)} for m in taking]
    return any((mine & NEW[0] and mine & NEW[1]) or mine & JOINT for mine in names)


def holders(source: str) -> set[str]:
    """Classes of a module that hold keys and values, or numbers in few bits, themselves."""
    read, found = (ast.ImportFrom, ast.ClassDef), set[str]()
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, read)]
    stock = {
        alias.asname or alias.name
        for node in nodes
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("transformers")
        for alias in node.names
        if alias.name.endswith(("Cache", "Layer", "CacheLayerMixin"))
    }
    for node in nodes:
        if not isinstance(node, ast.ClassDef):
            continue
        bases = {ast.unparse(base) for base in node.bases}
        fields = dict(_fields(node))
        # The layers of a network have projections of these names, a call of attention arguments.
        # Weights that multiply activations are not keys and values, whatever their bits.
        apart = (
            any(base.endswith("Module") for base in bases)
            or {"query", "key"} <= fields.keys()
            or "product" in {method.name for method in _methods(node)}
        )
        pairs = () if apart else (PAIRS, PACKED)
        if (
            bases & (stock | {name for names in KINDS.values() for name in names})
            or any(fields.keys() & one and fields.keys() & other for one, other in pairs)
            or any("Tensor" in fields[name] for name in JOINT & fields.keys())
            or _stores(node)
            or "get_mask_sizes" in {method.name for method in _methods(node)}
        ):
            found.add(node.name)
    return found


def test_there_are_four_kinds_of_containers() -> None:
    tops = [ROOT / top for top in ("mmfast", "kernels", "pipelines", "demos")]
    paths = [path for top in tops for path in top.rglob("*.py")]
    found = {name: path for path in paths for name in holders(path.read_text())}
    known = {name for names in KINDS.values() for name in names}
    fifth = {name: str(found[name].relative_to(ROOT)) for name in found.keys() - known}
    assert not fifth, f"{fifth}: use one of {KINDS}, see docs/architecture.md"
    assert len(KINDS) <= 4 and known == found.keys()


def test_layers_of_a_transformers_cache_are_one_class() -> None:
    from mmfast.models.kv.packs import PackedLayer
    from mmfast.models.reduction.cache_layers import Shorter, StoreLayer

    for kind in (StoreLayer, PackedLayer):
        assert issubclass(kind, Shorter)
        assert kind.get_seq_length is Shorter.get_seq_length
        assert kind.get_mask_sizes is Shorter.get_mask_sizes


PLANTED = {
    "a pair of fields": "class X(NamedTuple):\n keys: tuple[Tensor, ...]\n values: Tensor",
    "a pair of slots": "class X:\n __slots__ = ('k', 'v')",
    "a pair of lists": (
        "class X:\n def __init__(self):\n  self._keys: list[Tensor] = []\n  self._values = []"
    ),
    "a pair assigned at once": "class X:\n def f(self, x):\n  self.keys, self.values = x",
    "both in one tensor": "class X:\n kv: list[Tensor]",
    "a layer of its own": (
        "from transformers.cache_utils import DynamicLayer as D\nclass X(D):\n pass"
    ),
    "a cache of its own": "from transformers import DynamicCache\nclass X(DynamicCache):\n pass",
    "one that looks like a cache": (
        "class X:\n def update(self, key_states, value_states, layer_idx): ..."
    ),
    "another store": "class X:\n def put(self, keys, values, at): ...",
    "a store of both in one": "class X:\n def add(self, kv: Sequence[Tensor], room: int): ...",
    "numbers in few bits": "class X:\n codes: Tensor\n scale: Tensor",
    "a subclass of a kind": "class X(RowBuffer):\n pass",
}


@pytest.mark.parametrize("case", PLANTED)
def test_a_fifth_kind_is_found(case: str) -> None:
    assert holders(PLANTED[case]) == {"X"}


@pytest.mark.parametrize(
    "source",
    [
        "class X(nn.Module):\n def __init__(self):\n  self.k = Linear()\n  self.v = Linear()",
        "class X:\n kv: KVBlock\n layers: list[RowBuffer]",
        "class X:\n keys: list[Tensor]\n queries: list[Tensor]",
        "class X:\n def read(self, keys, values): ...",
        "class X(LRUCache):\n def put(self, key: Hashable, value: T): ...",
        "class X:\n query: Tensor\n key: Tensor\n value: Tensor",
        "class X:\n packed: Tensor\n scale: Tensor\n def product(self, x): ...",
    ],
)
def test_what_holds_none_is_not_found(source: str) -> None:
    assert holders(source) == set()
