"""Stages that look at all images of a prompt at once (`scope="prompt"`), among others."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mmfast.core.errors import ModelError
from mmfast.core.follow import follow
from mmfast.core.reduction import Mix, Reduction
from mmfast.core.schedule import wanted
from mmfast.core.spec import Spec, run
from mmfast.core.tokens import Tokens
from mmfast.models.stages import Chain, Site, check_signals


def left_of_row(
    site: Site, lengths: Sequence[int | None], entered: Sequence[MutableMapping[int, int]]
) -> list[int | None]:
    """Tokens a site leaves of each item of a prompt; None where only the whole is known.

    Args:
        site: With a stage of scope `prompt`.
        lengths: Tokens per item.
        entered: See `Item.entered`, of each item.
    """
    left, total = list(lengths), _total(lengths)
    for spec in site.specs:
        if spec.method.scope != "prompt":
            pairs = zip(left, entered, strict=True)
            left = [None if n is None else wanted(spec, n, seen) for n, seen in pairs]
            total = _total(left)
            continue
        after = None if total is None else wanted(spec, total, entered[0])
        if after is None or after != total:
            left = [None] * len(left)
        total = after
    return left


def _total(lengths: Sequence[int | None]) -> int | None:
    known = [n for n in lengths if n is not None]
    return sum(known) if len(known) == len(lengths) else None


def run_row(
    site: Site, items: Sequence[Tokens | None], entered: Sequence[MutableMapping[int, int]]
) -> list[Chain]:
    """Run all stages of a site on the items of one prompt.

    Args:
        site: With a stage of scope `prompt`.
        items: Tokens of each item; None where nothing is left of it.
        entered: See `Item.entered`, of each item.

    Returns:
        A chain per item; a stage of scope `prompt` may leave nothing of one, and later stages do
        not touch what is empty.

    Raises:
        ModelError: A signal is missing, or a stage merges across images.
        SpecError: A budget does not fit.
    """
    found: list[list[Reduction]] = [[] for _ in items]
    for spec in site.specs:
        alive = [(i, tokens) for i, tokens in enumerate(items) if tokens is not None]
        for i, one in _stage(spec, alive, entered):
            found[i].append(one)
        items = [
            None if tokens is None or found[i][-1].m == 0 else follow(tokens, found[i][-1])
            for i, tokens in enumerate(items)
        ]
    return [Chain(tuple(each)) for each in found]


def _stage(
    spec: Spec,
    alive: Sequence[tuple[int, Tokens]],
    entered: Sequence[MutableMapping[int, int]],
) -> list[tuple[int, Reduction]]:
    if spec.method.scope != "prompt":
        return [(i, _run(spec, tokens, entered[i])) for i, tokens in alive]
    if not alive:
        return []
    joined = _run(spec, join(alive), entered[alive[0][0]])
    parts = split(joined, [tokens.n for _, tokens in alive], str(spec))
    return [(i, part) for (i, _), part in zip(alive, parts, strict=True)]


def _run(spec: Spec, tokens: Tokens, entered: MutableMapping[int, int]) -> Reduction:
    if spec.cut is not None:
        spec = replace(spec, budget=wanted(spec, tokens.n, entered), cut=None)
    check_signals(spec, tokens)
    one = run(spec, tokens)
    assert isinstance(one, Reduction)
    return one


def join(items: Sequence[tuple[int, Tokens]]) -> Tokens:
    """Items of one prompt as one, with the signal `image` `[N]` to tell them apart.

    Args:
        items: `(number of the item in its prompt, tokens)`; a `grid` survives where it is alone.
    """
    first = items[0][1]
    signals = {}
    for name in set.intersection(*(set(tokens.signals) for _, tokens in items)):
        values = [tokens.signals[name] for _, tokens in items]
        signals[name] = values[0] if name.startswith("text_") else torch.cat(values)
    numbers = [torch.full((tokens.n,), i, device=tokens.x.device) for i, tokens in items]
    attention = [tokens.attn for _, tokens in items if tokens.attn is not None]
    return Tokens(
        x=torch.cat([tokens.x for _, tokens in items]),
        attn=torch.cat(attention) if len(attention) == len(items) else None,
        query=first.query,
        grid=first.grid if len(items) == 1 else None,
        signals={**signals, "image": torch.cat(numbers)},
    )


def split(whole: Reduction, lengths: Sequence[int], name: str = "the stage") -> list[Reduction]:
    """A Reduction of joined items as one per item, `lengths` tokens each.

    Raises:
        ModelError: It merges tokens of different items.
    """
    parts, start = [], 0
    for length in lengths:
        stop = start + length
        low, high = (int((whole.keep < end).sum()) for end in (start, stop))
        owner = whole.owner[start:stop]
        foreign = (owner >= 0) & ((owner < low) | (owner >= high))
        weight = None if whole.weight is None else whole.weight[start:stop]
        mix = None if whole.mix is None else _mix(whole.mix, (low, high), (start, stop))
        if bool(foreign.any()) or (mix is not None and bool((mix.source < 0).any())):
            raise ModelError(
                f"'{name}' merges tokens of different images, which have places of their own; "
                "use a method that prunes across images, or one of scope 'item'"
            )
        owner = (owner - low).masked_fill(owner < 0, -1)
        keep = whole.keep[low:high] - start
        parts.append(Reduction(keep, owner, weight, mix, pure=whole.pure))
        start = stop
    return parts


def _mix(mix: Mix, slots: tuple[int, int], sources: tuple[int, int]) -> Mix:
    """The triplets of some outputs, renumbered; source -1 where it lies in another item."""
    mine = (mix.output >= slots[0]) & (mix.output < slots[1])
    source: Tensor = mix.source[mine]
    inside = (source >= sources[0]) & (source < sources[1])
    source = (source - sources[0]).masked_fill(~inside, -1)
    return Mix(mix.output[mine] - slots[0], source, mix.weight[mine])
