"""Token ids of a prompt while its media are encoded, for families whose layout depends on them.

Stock code encodes media without looking at the prompt. Where an image is a row of tiles and only
the prompt shows which tiles are one image, the ids are handed down here.

Some families write a clip as numbered pictures, one per line: "Frame1: <picture>", "Frame2: …".
Such a clip is found by token ids alone: the same words before every picture, but for a new number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mmfast.models.families.tower import KINDS
from mmfast.models.patching import override
from mmfast.models.wrappers import base_of

_IDS: ContextVar[Tensor | None] = ContextVar("prompt ids", default=None)
# The step of `generate` that encodes media before the prompt is read.
_ENCODES = "_maybe_prepare_encoder_kwargs_for_generation"


@contextmanager
def prompt_ids(ids: Tensor | None) -> Iterator[None]:
    """Media encoded inside belong to the prompts `ids` `[B, L]`; None where they are not known."""
    before = _IDS.get()
    _IDS.set(ids)
    try:
        yield
    finally:
        _IDS.set(before)


def ids_of(call: Mapping[str, Any]) -> Tensor | None:
    """Token ids `[B, L]` of the prompts whose media a call encodes, if known."""
    ids: Tensor | None = call.get("input_ids")
    return _IDS.get() if ids is None else ids


def placeholders_in(base: Any, embeds: Tensor) -> Tensor:
    """Ids `[B, L]` of the media placeholders among embeddings `[B, L, D]`, -1 at other tokens."""
    found = torch.full(embeds.shape[:2], -1, dtype=torch.int64, device=embeds.device)
    for kind in KINDS:
        number = getattr(base.config, f"{kind}_token_id", None)
        if number is not None:
            token = torch.tensor(number, device=embeds.device)
            found[(embeds == base.get_input_embeddings()(token)).all(-1)] = number
    return found


@torch.no_grad()
def alike_ids(base: Any, embeds: Tensor) -> Tensor:
    """Ids `[B, L]` that do for a layout where embeddings `[B, L, D]` were given instead of ids.

    Placeholders have their own; of all other tokens, which layouts only compare with one another,
    equal embeddings have the same negative number.
    """
    found = placeholders_in(base, embeds)
    words = found < 0
    if bool(words.any()):
        _, number = torch.unique(embeds[words], dim=0, return_inverse=True)
        found[words] = -1 - number
    return found


@contextmanager
def told_by_generate(model: Any) -> Iterator[None]:
    """Take the ids from the `generate` of a model."""
    if not hasattr(model, _ENCODES):  # a base model does not generate
        yield
        return
    with override(model, _ENCODES, partial(_around, base_of(model))):
        yield


def _around(base: Any, stock: Callable[..., Any], inputs: Any, *args: Any, **kwargs: Any) -> Any:
    ids = inputs if isinstance(inputs, Tensor) else None
    if ids is not None and ids.dim() == 3:
        ids = alike_ids(base, ids)
    with prompt_ids(ids):
        return stock(inputs, *args, **kwargs)


Span = tuple[int, int]
_LONGEST = 4  # tokens of a number


def clips(ids: Tensor, here: Tensor, tile: int) -> list[list[Span]]:
    """Runs of placeholders in reading order: one span per image, per clip one for each frame.

    `here` `[L]` is True at placeholders; a frame has `tile` of them.
    """
    tokens, spans = ids.tolist(), runs(here)
    groups: list[list[Span]] = []
    seen: set[tuple[int, ...]] = set()  # numbers of the current clip
    words: tuple[list[int], list[int]] | None = None  # before and after its numbers
    for index, span in enumerate(spans):
        one = span[1] - span[0] == tile
        before = spans[index - 1] if index else None
        if one and before is not None and before[1] - before[0] == tile:
            gap = tokens[before[1] : span[0]]
            if len(groups[-1]) == 1:
                head = tokens[spans[index - 2][1] if index > 1 else 0 : before[0]]
                words, seen = _label(head, gap)
            number = _number(gap, words)
            if number is not None and number not in seen:
                seen.add(number)
                groups[-1].append(span)
                continue
        groups.append([span])
        words, seen = None, set()
    return groups


def runs(here: Tensor) -> list[Span]:
    """Bounds of the runs of True in `here` `[L]`."""
    places = here.nonzero()[:, 0].tolist()
    starts = [p for i, p in enumerate(places) if i == 0 or places[i - 1] != p - 1]
    stops = [p + 1 for i, p in enumerate(places) if i + 1 == len(places) or places[i + 1] != p + 1]
    return list(zip(starts, stops, strict=True))


def _label(
    head: Sequence[int], gap: Sequence[int]
) -> tuple[tuple[list[int], list[int]] | None, set[tuple[int, ...]]]:
    """The words around the number of the second picture, and the number of the first.

    Both labels end alike, differ in one token, and have a word alike before it; in front of that
    the gap holds a closing tag and a line break at most.
    """
    after = _alike(head, gap)
    cut = len(gap) - after - 1
    if after == 0 or cut < 3 or len(head) <= after + 1:
        return None, set()
    word = _alike(head[: -after - 1], gap[:cut])
    if word == 0 or cut - word > 2:
        return None, set()
    return (list(gap[:cut]), list(gap[cut + 1 :])), {(head[-after - 1],)}


def _alike(a: Sequence[int], b: Sequence[int]) -> int:
    """Number of tokens that both end with."""
    count = 0
    for x, y in zip(reversed(a), reversed(b), strict=False):
        if x != y:
            break
        count += 1
    return count


def _number(
    gap: Sequence[int], words: tuple[list[int], list[int]] | None
) -> tuple[int, ...] | None:
    """The number between the words of a clip; None where the gap has other words."""
    if words is None:
        return None
    before, after = words
    length = len(gap) - len(before) - len(after)
    if not 0 < length <= _LONGEST:
        return None
    if list(gap[: len(before)]) != before or list(gap[len(gap) - len(after) :]) != after:
        return None
    return tuple(gap[len(before) : len(before) + length])
