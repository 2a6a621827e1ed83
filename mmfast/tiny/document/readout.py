"""Read-outs of visual states of pages, and where the answer to a question stands among them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from mmfast.tiny.document import pages, prints
from mmfast.tiny.video.model import DecoderOutput, Readout, rotate
from mmfast.tiny.video.questions import Fact
from mmfast.tiny.video.scene import IGNORE

PARTS = pages.PARTS | prints.PARTS
DIGITS = tuple("0123456789")
# Parts that are words or digits, and those of which a question names one: behind a space there.
NAMED = {"own word": prints.WORDS, "item": prints.ITEMS, "header": prints.HEADERS,
         "before": prints.NOTES, "own tens": DIGITS, "own units": DIGITS}  # fmt: skip
ASKED = ("item", "header", "before")
COUNTED = 3  # the running number counts that many times more: it is learned last
POINTING, HEADS = (3, 4), 2  # layers some heads of which attend to the answer


class PageReadout(nn.Module):
    """Losses of reading visual states: words and digits by the embeddings of their tokens, so that
    one product matches all of them with those of a question; other labels by classifiers.
    """

    def __init__(self, width: int, tokenizer: Any) -> None:
        super().__init__()
        self.ids = _token_ids(tokenizer)
        self.plain = Readout(width, {k: v for k, v in PARTS.items() if k not in NAMED})
        self.named = nn.ModuleDict({name: nn.Linear(width, width) for name in self.ids})

    def loss(self, x: Tensor, labels: Mapping[str, Tensor], embedding: Tensor) -> Tensor:
        """Sum of the mean losses of labels `[B, M]`: states `[B, M, D]`, embedding `[V, D]`."""
        total = self.plain.loss(x, {name: labels[name] for name in self.plain.sizes})
        total = total + COUNTED * self.plain.loss(x, {"begun": labels["begun"]})
        for name, ids in self.ids.items():
            label = labels[name.strip()]
            some = label != IGNORE
            if some.any():
                logits = self.named[name](x[some]) @ embedding[ids].to(x.dtype).T
                total = total + cross_entropy(logits.float(), label[some])
        return total


def _token_ids(tokenizer: Any) -> dict[str, list[int]]:
    """Tokens of the words of NAMED as they are answered, and (keys with a space) asked."""
    ways = [(name, "") for name in NAMED] + [(name, " ") for name in ASKED]
    return {
        space + name: [
            tokenizer.encode(space + word, add_special_tokens=False)[0] for word in words
        ]
        for name, space in ways
        for words in (NAMED[name],)
    }


def pointers(labels: Tensor, fact: Fact) -> Tensor:
    """Tokens that say the answer to a question: `[tokens]`, of their labels `[parts, tokens]`."""
    named = dict(zip(PARTS, labels, strict=True))
    none = torch.zeros_like(labels[0], dtype=torch.bool)
    if fact.kind in ("cell", "item"):
        header, other = fact.slots
        column: Tensor = named["header"] == prints.HEADERS.index(header)
        if fact.kind == "cell":
            return column.logical_and(named["item"] == prints.ITEMS.index(other))
        return column.logical_and(_numbered(named, other))
    if fact.kind == "after":
        return none.logical_or(named["before"] == prints.NOTES.index(fact.slots[0]))
    if fact.kind == "title":
        return none.logical_or(named["own word"] == prints.WORDS.index(fact.answer))
    if fact.kind in ("rows", "count"):
        return none.logical_or(named["begun"] == int(fact.answer))
    return _numbered(named, fact.answer) if fact.kind == "entry" else none


def _numbered(named: Mapping[str, Tensor], number: str) -> Tensor:
    tens, units = divmod(int(number), 10)
    return (named["own tens"] == tens).logical_and(named["own units"] == units)


def pointing_loss(
    lm: Any,
    found: DecoderOutput,
    kept: Tensor,
    wanted: Tensor,
    asked: tuple[Tensor, Tensor, Tensor],
) -> Tensor:
    """Loss of HEADS heads of the layers POINTING, which shall attend to tokens that say the answer.

    Args:
        lm: The decoder.
        found: Its queries and keys.
        kept: Places `[B, M]` of its visual tokens.
        wanted: Those that say the answer of each question: `[questions, M]`, at least one of each.
        asked: Row, column and position of the last token of each question: `[questions]`.
    """
    (lines, columns, places), total = asked, found.states.new_zeros(())
    for layer in POINTING:
        size = lm.layers[layer].self_attn.head_dim
        q = found.queries[layer][lines, columns][:, None]  # [questions, 1, D]
        k = found.keys[layer][lines, 1 : kept.shape[1] + 1]
        mine = slice(0, HEADS * size)
        q, k = (rearrange(t[..., mine].float(), "n m (h d) -> n h m d", d=size) for t in (q, k))
        q = rotate(q, lm.rotary_emb(q, places[:, None]))
        k = rotate(k, lm.rotary_emb(k, kept[lines] + 1))
        scores = (q @ k.mT)[:, :, 0] / size**0.5  # [questions, h, M]
        right = scores.masked_fill(~wanted[:, None], float("-inf")).logsumexp(-1)
        total = total + (scores.logsumexp(-1) - right).mean()
    return total
