"""A pass of the backbone over all that waits, and what it says of the drafts in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mmfast.core.errors import ModelError
from mmfast.decoding.row import Row

Prompt = Sequence[int] | Tensor  # ids [n], or embeddings [n, D]


def read(decoder: Any, live: list[bool]) -> tuple[int, Tensor]:
    """Read all that waits; how wide that was, and the normed hidden states `[B, n, D]`."""
    embeds = [
        _waiting(decoder, row) if alive else None
        for row, alive in zip(decoder.rows, live, strict=True)
    ]
    counts = [0 if e is None else e.shape[0] for e in embeds]
    width = max(counts)
    if len(counts) == 1 and embeds[0] is not None:
        stacked = embeds[0][None]
    else:
        like = next(e for e in embeds if e is not None)
        stacked = like.new_zeros(len(decoder.rows), width, like.shape[1])
        for i, e in enumerate(embeds):
            if e is not None:
                stacked[i, : len(e)] = e
    raw = decoder.backbone.run(decoder.state, stacked, counts)
    normed: Tensor = decoder.backbone.norm(raw)
    if decoder.head is not None:
        fed = normed if decoder.head.reads == "normed" else raw
        decoder.head.observe(decoder.heads, stacked, fed, counts)
    return width, normed


def _waiting(decoder: Any, row: Row) -> Tensor:
    if not row.unseen:
        assert row.before is not None
        return row.before
    ids = torch.tensor(row.unseen, device=decoder.backbone.device)
    embeds: Tensor = decoder.backbone.embed(ids)
    return embeds if row.before is None else torch.cat((row.before, embeds))


def judge(decoder: Any, live: list[bool], normed: Tensor) -> list[int | None]:
    """The backbone's token per stream, None where it has none now; wrong drafts go."""
    found: list[int | None] = [None] * len(decoder.rows)
    kept = list(decoder.state.lengths)
    for i, row in enumerate(decoder.rows):
        if not live[i]:
            continue
        token, back, left = _judge_row(decoder, row, normed[i])
        kept[i] -= back
        row.read(left)
        if token is not None:
            row.say(token)
            row.unseen.append(token)
            # What is owed behind it comes before any draft, unless drafts need not be exact.
            forced = [] if decoder.rule.kind == "none" or row.guide.done else row.owed()
            row.unseen += forced
            row.sure = len(row.unseen)
            token = None if forced else token
        found[i] = token
    if kept != decoder.state.lengths or decoder.rule.kind != "none":
        decoder.settle(kept)
    return found


def _judge_row(decoder: Any, row: Row, hidden: Tensor) -> tuple[int | None, int, list[int]]:
    """The token to say, how many of the tokens just read go, and forced ones to read next."""
    places, rows, drafts, ahead = row.wanted(), row.rows(), row.drafts, row.ahead
    chosen = hidden[places] if ahead else hidden[places[0] : places[-1] + 1]
    logits = decoder.backbone.logits(chosen, rows)
    accepted, token = row.judge(logits, rows.indices(decoder.backbone.vocabulary)[0])
    row.verified(accepted)
    forced: list[int] = []
    for i, draft in enumerate(drafts[:accepted]):
        row.accepted += 1
        left = len(drafts) - i - 1
        if not row.say(draft):
            return None, left + len(ahead), []
        forced = row.owed()
        if forced and (left or forced != ahead):  # not foreseen: they are to be read first
            return None, left + len(ahead), forced
    if accepted < len(drafts) or not drafts:
        return token, len(drafts) - accepted + len(ahead), []
    if forced != ahead:
        return _again(decoder, row, hidden[places[0] + len(drafts)]), len(ahead), []
    return token if row.guide.rows() == rows else _again(decoder, row, chosen[-1]), 0, []


def _again(decoder: Any, row: Row, hidden: Tensor) -> int:
    """The token behind accepted drafts, of the rows that the guide says now."""
    rows = row.guide.rows()
    start = rows.indices(decoder.backbone.vocabulary)[0]
    return row.choose(decoder.backbone.logits(hidden, rows), start)


def feed(decoder: Any, row: Row, prompt: Prompt) -> None:
    """Put ids or embeddings behind what a stream has said."""
    row.drop_drafts()
    if not len(prompt):
        return
    if isinstance(prompt, Tensor) and prompt.is_floating_point():
        if prompt.ndim != 2 or prompt.shape[1] != decoder.backbone.width:
            raise ModelError(
                f"a prompt of shape {list(prompt.shape)} is no list of embeddings of width "
                f"{decoder.backbone.width}; use [n, {decoder.backbone.width}]"
            )
        embeds = prompt.to(decoder.backbone.device, decoder.backbone.dtype)
    else:
        ids = [int(token) for token in prompt]
        if min(ids) < 0 or max(ids) >= decoder.backbone.entries:
            raise ModelError(
                f"token {min(ids) if min(ids) < 0 else max(ids)} of the prompt is not in "
                f"0..{decoder.backbone.entries - 1}; encode it with the model's own tokenizer"
            )
        row.history += ids
        embeds = decoder.backbone.embed(torch.tensor(ids, device=decoder.backbone.device))
    if row.waiting:
        embeds = torch.cat((_waiting(decoder, row), embeds))
    row.before, row.unseen, row.sure = embeds, [], 0
