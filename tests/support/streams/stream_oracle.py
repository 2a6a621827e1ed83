"""A stream, slowly: lists of keys and values in float64, with RoPE written out anew.

Nothing of mmfast is used. Every layer keeps a list of tokens; whenever something is asked, all of
them are rotated to the positions that a prompt of the live tokens has, counted from 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from stream_math import attend, linear, norm, rope
from torch import Tensor

Recalled = dict[int, Tensor | None]
Choose = Callable[[int, Tensor, dict[int, Tensor]], Recalled]


@dataclass
class Slow:
    """One block: its piece, and per layer keys before RoPE, values and token numbers."""

    piece: Any
    number: int
    start: Tensor  # [A]
    keys: list[Tensor] = field(default_factory=list)  # [H, m, d]
    values: list[Tensor] = field(default_factory=list)
    tokens: list[Tensor] = field(default_factory=list)  # [m]

    def cut(self, size: int) -> Slow:
        rows = ([x[:, :size] for x in self.keys], [x[:, :size] for x in self.values])
        return Slow(self.piece, self.number, self.start, *rows, [x[:size] for x in self.tokens])

    def rest(self, size: int) -> Slow:
        rows = ([x[:, size:] for x in self.keys], [x[:, size:] for x in self.values])
        return Slow(self.piece, self.number, self.start, *rows, [x[size:] for x in self.tokens])

    def pick(self, layer: int, index: Tensor | None) -> Slow:
        """With only some tokens in one layer."""
        if index is None:
            return self
        rows = [list(self.keys), list(self.values), list(self.tokens)]
        rows[0][layer], rows[1][layer] = rows[0][layer][:, index], rows[1][layer][:, index]
        rows[2][layer] = rows[2][layer][index]
        return Slow(self.piece, self.number, self.start, *rows)

    def places(self, layer: int, start: Tensor) -> Tensor:
        return start[:, None] + self.piece.relative[:, self.tokens[layer]]


def first(piece: Any, after: Tensor, top: int) -> Tensor:
    """Where a piece starts behind others."""
    start = torch.full_like(after, top + 1) if piece.fresh else after
    return start.min().expand_as(start) if piece.level else start


def starts(blocks: list[Slow]) -> list[Tensor]:
    """Where blocks start in a prompt of them alone; what is left of one block counts once."""
    axes = blocks[0].piece.relative.shape[0]
    found: list[Tensor] = []
    after, top = torch.zeros(axes, dtype=torch.int64), -1
    for i, block in enumerate(blocks):
        if i and block.number == blocks[i - 1].number:
            found.append(found[-1])
            continue
        start = first(block.piece, after, top)
        found.append(start)
        after = start + block.piece.advance
        top = max(top, int((start[:, None] + block.piece.relative).max()))
    return found


class SlowStream:
    """A stream with sinks and a window, and everything that left them.

    Args:
        model: The stock model, whose weights are read.
        sink: Tokens at the beginning that stay; None keeps all.
        window: Tokens at the end that stay, whole blocks at a time.
        norms: Visual tokens of a frame that a layer keeps: those of smallest key norm; None is all.
        slack: Share of the prompt that positions may run ahead.
    """

    def __init__(
        self,
        model: Any,
        sink: int | None = None,
        window: int = 0,
        norms: int | None = None,
        slack: float = 0.0,
    ) -> None:
        self.model, self.decoder = model, model.get_decoder()
        self.sink, self.window, self.norms, self.slack = sink, window, norms, slack
        self.blocks: list[Slow] = []
        self.gone: list[Slow] = []
        self.number = 0

    def append(self, piece: Any) -> None:
        start = self._next(piece)
        block = Slow(piece, self.number, start)
        self.number += 1
        before = [(block_, block_.start) for block_ in self.blocks]
        _, block.keys, block.values = self.run(piece, lambda layer, query: (start, before))
        block.tokens = [torch.arange(len(piece.embeds)) for _ in block.keys]
        if self.norms is not None and piece.kind == "frame":
            self._choose(block)
        self.blocks.append(block)
        if self.sink is not None:
            self._evict()

    def _choose(self, block: Slow) -> None:
        for layer, keys in enumerate(block.keys):
            size = keys.transpose(0, 1).flatten(1).norm(dim=1)
            seen = [i for i in size.argsort().tolist() if block.piece.visual[i]][: self.norms]
            markers = (~block.piece.visual).nonzero()[:, 0].tolist()
            keep = torch.tensor(sorted(seen + markers))
            block.keys[layer], block.values[layer] = keys[:, keep], block.values[layer][:, keep]
            block.tokens[layer] = keep

    def _next(self, piece: Any) -> Tensor:
        if not self.blocks:
            return torch.zeros(piece.relative.shape[0], dtype=torch.int64)
        tops = [int((b.start[:, None] + b.piece.relative).max()) for b in self.blocks]
        return first(piece, self.blocks[-1].start + self.blocks[-1].piece.advance, max(tops))

    def _evict(self) -> None:
        assert self.sink is not None
        sizes = [max(len(tokens) for tokens in block.tokens) for block in self.blocks]
        total, at, live, left = sum(sizes), 0, [], False
        for block, size in zip(self.blocks, sizes, strict=True):
            inside = [i < self.sink or i >= total - self.window for i in range(at, at + size)]
            sinks = min(size, max(0, self.sink - at))
            at += size
            if all(inside):
                live.append(block)
                continue
            left = True
            self.gone.append(block.rest(sinks))
            if sinks:
                live.append(block.cut(sinks))
        self.blocks = live
        if left:
            tight = starts(live)
            top = int((tight[-1][:, None] + live[-1].piece.relative).max())
            if int((live[-1].start - tight[-1]).abs().max()) > self.slack * (top + 1):
                for block, start in zip(live, tight, strict=True):
                    block.start = start

    def ask(self, piece: Any, recalled: list[Recalled] | None = None) -> Tensor:
        """Logits `[V]` of the last token of a question.

        Args:
            piece: The question.
            recalled: Per layer which tokens of which blocks that left are read again (None is
                all); the prompt is then counted from 0, in every layer for itself, where it
                reads anything.
        """
        if recalled is None:
            rows = [(block, block.start) for block in self.blocks]
            return self.run(piece, lambda layer, query: (self._next(piece), rows))[0]
        question = Slow(piece, -1, torch.zeros(0))
        asked, shown = [], []
        for layer, wanted in enumerate(recalled):
            if not wanted:  # the layer sees the stream as it stands
                asked.append(self._next(piece))
                shown.append([(block, block.start) for block in self.blocks])
                continue
            gone = [block for block in self.gone if block.number in wanted]
            back = [block.pick(layer, wanted[block.number]) for block in gone]
            # Stable: what is left of a block comes before the rest of it.
            prompt = sorted([*self.blocks, *back], key=lambda block: block.number)
            *tight, start = starts([*prompt, question])
            shown.append(list(zip(prompt, tight, strict=True)))
            asked.append(start)
        return self.run(piece, lambda layer, query: (asked[layer], shown[layer]))[0]

    def run(
        self, piece: Any, seen: Callable[[int, Tensor], tuple[Tensor, list[tuple[Slow, Tensor]]]]
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Logits of the last token, and keys before RoPE and values of all tokens per layer.

        `seen` says for a layer and its queries before RoPE where the piece starts, and which blocks
        are before it and where.
        """
        hidden, made = piece.embeds.double(), ([], [])
        for layer, module in enumerate(self.decoder.layers):
            q, k, v = self._project(module, hidden)
            here, blocks = seen(layer, q)
            keys = torch.cat([*(b.keys[layer] for b, _ in blocks), k], 1)
            values = torch.cat([*(b.values[layer] for b, _ in blocks), v], 1)
            mine = here[:, None] + piece.relative
            places = torch.cat([*(b.places(layer, s) for b, s in blocks), mine], 1)
            out = attend(self._rope(q, mine), self._rope(keys, places), values)
            hidden = hidden + linear(module.self_attn.o_proj, out)
            hidden = hidden + self._mlp(module, hidden)
            if piece.planes and layer < len(piece.planes):
                hidden[piece.visual] += piece.planes[layer].double()
            made[0].append(k)
            made[1].append(v)
        last = norm(self.decoder.norm, hidden[-1])
        return linear(self.model.get_output_embeddings(), last), *made

    def _project(self, module: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        attention, width = module.self_attn, module.self_attn.head_dim
        x = norm(module.input_layernorm, hidden)
        names = ("q_proj", "k_proj", "v_proj")
        rows = [linear(getattr(attention, n), x).unflatten(1, (-1, width)) for n in names]
        for i, name in enumerate(("q_norm", "k_norm")):
            if hasattr(attention, name):
                rows[i] = norm(getattr(attention, name), rows[i])
        q, k, v = (row.transpose(0, 1) for row in rows)
        return q, k, v

    def _mlp(self, module: Any, hidden: Tensor) -> Tensor:
        x, mlp = norm(module.post_attention_layernorm, hidden), module.mlp
        gate = torch.nn.functional.silu(linear(mlp.gate_proj, x))
        return linear(mlp.down_proj, gate * linear(mlp.up_proj, x))

    def _rope(self, x: Tensor, places: Tensor) -> Tensor:
        return rope(x, places, self.decoder.config.rope_parameters)


class SlowAnswer:
    """Question and answer on a slow stream as it is now, that choose while they are written.

    Keys and values of what was said stay; all else is laid out anew for every token: the live
    blocks, what is read again of those that have left, and what was said, in every layer for
    itself. `choose` gets the layer, its queries before RoPE and the keys of what has left.
    """

    def __init__(self, stream: SlowStream, choose: Choose) -> None:
        self.stream, self.choose = stream, choose
        self.live, self.gone = list(stream.blocks), list(stream.gone)
        self.said: list[Slow] = []
        self.recalled: list[Recalled] = [{} for _ in stream.decoder.layers]

    def write(self, piece: Any, anew: bool) -> Tensor:
        """Logits `[V]` behind a piece, for which layers choose `anew` or read what they did."""
        new = Slow(piece, -1 - len(self.said), torch.zeros(0))

        def seen(layer: int, query: Tensor) -> tuple[Tensor, list[tuple[Slow, Tensor]]]:
            if anew:
                left = {block.number: block.keys[layer] for block in self.gone}
                self.recalled[layer] = self.choose(layer, query, left)
            prompt = self._prompt(layer)
            for block in (*self.said, new):
                top = max(int((start[:, None] + b.piece.relative).max()) for b, start in prompt)
                last, start = prompt[-1]
                after = start + last.piece.advance
                prompt.append((block, first(block.piece, after, top)))
            return prompt[-1][1], prompt[:-1]

        logits, new.keys, new.values = self.stream.run(piece, seen)
        new.tokens = [torch.arange(len(piece.embeds)) for _ in new.keys]
        self.said.append(new)
        return logits

    def _prompt(self, layer: int) -> list[tuple[Slow, Tensor]]:
        wanted = self.recalled[layer]
        if not wanted:  # the layer sees the stream as it stands
            return [(block, block.start) for block in self.live]
        back = [b.pick(layer, wanted[b.number]) for b in self.gone if b.number in wanted]
        prompt = sorted([*self.live, *back], key=lambda block: block.number)
        return list(zip(prompt, starts(prompt), strict=True))
