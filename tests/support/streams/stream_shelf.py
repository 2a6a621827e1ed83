"""An archive of streams that reads what a function says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from mmfast.core.kv import KVBlock
from mmfast.streams.archive.archive import Found

Choice = dict[int, Tensor | None]


class Shelf:
    """The simplest archive: a dict of blocks, and a function that chooses."""

    def __init__(self, choose: Callable[[int, list[int], Tensor], Choice]) -> None:
        self.blocks: dict[int, KVBlock] = {}
        self.asked: dict[int, Tensor] = {}
        self._choose = choose

    def put(self, block: KVBlock) -> None:
        assert block.number > max(self.blocks, default=-1)
        self.blocks[block.number] = block

    def choose(self, layer: int, query: Tensor, newest: int) -> list[Found]:
        self.asked[layer] = query
        known = [number for number in self.numbers() if number <= newest]
        chosen = self._choose(layer, known, query)
        return [Found(number, tokens) for number, tokens in sorted(chosen.items())]

    def read(self, layer: int, found: Sequence[Found]) -> list[KVBlock]:
        parts = []
        for each in found:
            block = self.blocks[each.number]
            rows = (block.keys[layer], block.values[layer], block.positions(layer))
            if each.tokens is not None:
                rows = tuple(row.index_select(1, each.tokens) for row in rows)
            keys, values, relative = rows
            parts.append(KVBlock((keys,), (values,), relative, block.advance, number=each.number))
        return parts

    def forget(self, number: int) -> None:
        self.blocks.pop(number)

    def numbers(self) -> list[int]:
        return sorted(self.blocks)

    def stats(self) -> dict[str, Any]:
        return {"blocks": len(self.blocks)}

    def snapshot(self) -> Any:
        return [vars(block) for block in self.blocks.values()]

    def restore(self, tree: Any) -> None:
        self.blocks = {row["number"]: KVBlock(**row) for row in tree}
