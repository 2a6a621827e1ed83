"""Live tokens of a stream that leave one by one, as tables of rows instead of lists of blocks.

A token may stay of hundreds of frames each. What a new frame costs must not depend on how many of
them there are, so everything about the live tokens is a column of a tensor; blocks are made of it
when a question or a snapshot asks for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mmfast.streams.buffers import Cursor, LayerBuffer, LiveBlock, Turner

NUMBER, TOKEN, KIND, SPOT, PLACE = range(5)  # behind them the places on the other axes
_FAR = 1 << 32  # more tokens than any block has


def _rows_of(block: LiveBlock, layer: int) -> Tensor:
    """Rows `[4 + A, m]` of the tokens that a layer holds of a block."""
    held = block.tokens(layer)
    tokens = torch.arange(block.n) if held is None else held
    number = torch.full_like(tokens, block.number)
    facts = torch.stack([number, tokens, block.counted(layer), block.spots(layer)])
    return torch.cat([facts, block.relative.index_select(1, tokens)])


def _groups(begins: Tensor) -> tuple[Tensor, Tensor]:
    """Return the group `[B]` of every block, and the first block of each group."""
    return begins.cumsum(0) - 1, begins.nonzero()[:, 0]


def _column(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)[:, None]


class LiveRows:
    """Tables of the live tokens of a stream: rows of every layer, and columns of every block.

    `layers` has for each layer `[4 + A, N]` the number of the block of a row, its token in it, its
    kind, its spot in the frame and its places, relative to `start` of its block, on the A axes.
    `numbers` `[B]`, ascending, and `start`, `advance`, `highest` `[A, B]` are of the live blocks.
    """

    def __init__(self, layers: int, axes: int) -> None:
        self.axes = axes
        self.layers = [torch.zeros(PLACE + axes, 0, dtype=torch.int64)] * layers
        self.numbers = torch.zeros(0, dtype=torch.int64)
        self.start = self.advance = self.highest = torch.zeros(axes, 0, dtype=torch.int64)
        self._n = self._sizes = self.numbers
        self._resets = torch.zeros(2, 0, dtype=torch.bool)  # fresh blocks, and level ones
        self._known: dict[int, LiveBlock] = {}

    @classmethod
    def of(cls, blocks: Sequence[LiveBlock], layers: int, axes: int) -> LiveRows:
        """Return the tables of live blocks."""
        rows = cls(layers, axes)
        for block in blocks:
            rows.add(block)
        return rows

    def __len__(self) -> int:
        return len(self.numbers)

    def add(self, block: LiveBlock) -> None:
        """Put a block behind the others."""
        self.layers = [self.joined(layer, block) for layer in range(len(self.layers))]
        self.numbers = torch.cat([self.numbers, torch.tensor([block.number])])
        self.start = torch.cat([self.start, _column(block.start)], 1)
        self.advance = torch.cat([self.advance, _column(block.advance)], 1)
        self.highest = torch.cat([self.highest, _column(block.highest)], 1)
        self._n = torch.cat([self._n, torch.tensor([block.n])])
        self._sizes = torch.cat([self._sizes, torch.tensor([block.size])])
        resets = torch.tensor([[block.fresh], [block.level]])
        self._resets = torch.cat([self._resets, resets], 1)
        self._known[block.number] = block

    def joined(self, layer: int, block: LiveBlock) -> Tensor:
        """Return the rows of a layer with those of a block behind them."""
        return torch.cat([self.layers[layer], _rows_of(block, layer)], 1)

    def slots(self, layer: int) -> Tensor:
        """Place `[N]` among the live blocks of the block of every row."""
        return torch.searchsorted(self.numbers, self.layers[layer][NUMBER])

    def positions(self, layer: int) -> Tensor:
        """Positions `[A, N]` of the rows of a layer."""
        return self.layers[layer][PLACE:] + self.start[:, self.slots(layer)]

    def keep(self, chosen: Mapping[int, Tensor]) -> tuple[int, int]:
        """Keep these rows of these layers; returns how many blocks and tokens left for good."""
        for layer, index in chosen.items():
            self.layers[layer] = self.layers[layer].index_select(1, index)
        before, blocks = int(self._sizes.sum()), len(self)
        self._sizes = self._counts().amax(0)
        stays = self._sizes > 0
        for number in self.numbers[~stays].tolist():
            del self._known[number]
        tables = ("numbers", "start", "advance", "highest", "_n", "_sizes", "_resets")
        for name in tables if len(self._known) < blocks else ():
            setattr(self, name, getattr(self, name)[..., stays])
        return blocks - len(self), before - int(self._sizes.sum())

    def _counts(self) -> Tensor:
        """Rows `[L, B]` of every layer in every block."""
        slots = [self.slots(layer) for layer in range(len(self.layers))]
        return torch.stack([slot.bincount(minlength=len(self)) for slot in slots])

    def cursor(self) -> Cursor:
        """Return the end of the stream."""
        if not len(self):
            return Cursor((0,) * self.axes)
        after = (self.start[:, -1] + self.advance[:, -1]).tolist()
        return Cursor(tuple(after), int((self.start + self.highest).max()))

    def close_up(self, turner: Turner, buffers: Sequence[LayerBuffer], slack: float) -> bool:
        """Rotate anew what stands too far behind the rows before it; tells whether anything was."""
        if not len(self):
            return False
        places, advance, highest = self._compact()
        starts = self._starts(advance, highest)
        gap = int((self.start[:, -1] - starts[:, -1]).abs().max())
        if gap <= slack * (int((starts[:, -1] + self.highest[:, -1]).max()) + 1):
            return False
        moved = ((self.start != starts) | (self.advance != advance)).any(0)
        self.start, self.advance, self.highest = starts, advance, highest
        for layer, buffer in enumerate(buffers):
            rows, slots = self.layers[layer], self.slots(layer)
            self.layers[layer] = rows = torch.cat([rows[:PLACE], places[layer]])
            turned = moved[slots].nonzero()
            if len(turned):
                first, stop = int(turned[0]), int(turned[-1]) + 1
                to = (rows[PLACE:] + starts[:, slots])[:, first:stop]
                turner.move_rows(layer, buffer, first, to)
        return True

    def _compact(self) -> tuple[list[Tensor], Tensor, Tensor]:
        """Places of the rows, with advance and highest places of the blocks, closed up.

        On one axis a block takes as many positions as tokens of it are held in any layer: a frame
        of which one token is left would otherwise take those of a whole one for ever.
        """
        sizes = [rows.shape[1] for rows in self.layers]
        every = torch.cat(self.layers, 1)
        whole = (self._counts() == self._n).all(0)
        if self.axes > 1 or bool(whole.all()):
            return list(every[PLACE:].split(sizes, 1)), self.advance, self.highest
        tokens, rank = (every[NUMBER] * _FAR + every[TOKEN]).unique(return_inverse=True)
        slots = torch.searchsorted(self.numbers, tokens.div(_FAR, rounding_mode="floor"))
        n = slots.bincount(minlength=len(self))
        within = torch.arange(len(tokens)) - (n.cumsum(0) - n)[slots]
        places = torch.where(whole[slots][rank], every[PLACE], within[rank])[None]
        advance = torch.where(whole, self.advance, n)
        highest = torch.where(whole, self.highest, n - 1)
        return list(places.split(sizes, 1)), advance, highest

    def _starts(self, advance: Tensor, highest: Tensor) -> Tensor:
        """Starts `[A, B]` of the blocks in a prompt made of them alone, as `Cursor` walks it.

        Blocks follow each other on every axis, up to one whose axes start level; these runs follow
        each other at the least end of their axes, up to a fresh one, which starts behind all.
        """
        if self.axes == 1 and bool((highest == advance - 1).all()):
            return advance.cumsum(1) - advance
        fresh, level = self._resets.clone()
        fresh[0] = True  # of a prompt, whatever stood before it in the stream
        ahead = advance.cumsum(1) - advance
        runs, heads = _groups(fresh | level)
        starts = ahead - ahead[:, heads][:, runs]
        last = torch.cat([heads[1:], torch.tensor([len(self)])]) - 1
        least = (starts + advance)[:, last].amin(0)
        ahead = (least.cumsum(0) - least)[runs]
        parts, heads = _groups(fresh)
        starts = starts + (ahead - ahead[heads][parts])
        top = torch.full_like(heads, -1)
        top = top.scatter_reduce(0, parts, (starts + highest).amax(0), "amax") + 1
        return starts + (top.cumsum(0) - top)[parts]

    def blocks(self) -> list[LiveBlock]:
        """Return the live blocks with the tokens that every layer holds of them."""
        counts = self._counts()
        whole, cuts = (counts == self._n).all(0).tolist(), counts.tolist()
        rows = [each.split(cut, 1) for each, cut in zip(self.layers, cuts, strict=True)]
        columns = (self.start.T.tolist(), self.advance.T.tolist(), self.highest.T.tolist())
        found = []
        for i, (block, start, advance, highest) in enumerate(
            zip(self._known.values(), *(map(tuple, each) for each in columns), strict=True)
        ):
            block = replace(block, start=start, advance=advance, highest=highest)
            if not whole[i]:
                # Tokens that no layer holds have no place, so that equal streams have equal blocks.
                relative = torch.zeros_like(block.relative)
                held = [layer[i] for layer in rows]
                for each in held:
                    relative[:, each[TOKEN]] = each[PLACE:]
                tokens = tuple(each[TOKEN] for each in held)
                block = replace(block, held=tokens, relative=relative, whole=False)
            found.append(block)
        return found
