"""Sentences of what a cache holds, as a note on its entries.

A note is twice the number of the sentence in its row, and one more at the token that ends it, so
that the next entry can be numbered by what is there, whatever has left the cache.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any
from unicodedata import category

import torch
from torch import Tensor

from mmfast.core.errors import ModelError, SpecError
from mmfast.models.kv import notes

# Full stops, question and exclamation marks and ellipses; what may close behind them are spaces,
# quotes and brackets.
_STOPS = tuple(".!?\u2026\u3002\uff01\uff1f\u061f\u0964")
_CLOSERS = ("Pe", "Pf", "Pi", "Ps", "Zs")


class Sentences:
    """Ends of sentences, by the tokenizer beside a model or by ids that were given."""

    def __init__(self, model: Any, name: str, ends: int | str) -> None:
        self._name, self._known = name, dict[int, bool]()
        given = str(ends).split("_") if str(ends) else []
        if not all(each.isdigit() for each in given):
            raise SpecError(f"{name!r} got ends={ends!r}; write ids of tokens, as 'ends=13_30'")
        self._given = frozenset(map(int, given))
        home = str(getattr(model, "name_or_path", "") or "")
        self._tokenizer = None if self._given else _tokenizer_of(home)
        if self._tokenizer is None and not self._given:
            raise ModelError(
                f"{name!r} finds no tokenizer beside the model ({home or 'no folder'!r}) to tell "
                f"sentences by; load the model from a folder, or write '{name}:0.1?ends=13_30'"
            )

    def arrive(self, layer: Any, ids: Tensor | None, frames: Tensor, kinds: Tensor) -> None:
        """Note the sentences of entries `[B, n]` that a layer has just got.

        `ids` are their tokens, `frames` their frames, -1 for text, `kinds` tell padding.
        """
        if ids is None:
            raise ModelError(
                f"{self._name!r} needs the ids of tokens, and this call has embeddings alone; pass "
                "input_ids"
            )
        held, count = notes.fill(layer), ids.shape[1]
        before = held.get(notes.SENTENCE)
        start = torch.full((len(ids),), -1, dtype=torch.int64, device=ids.device)
        if before is not None and before.shape[-1] > count:
            start = before[..., :-count].amax((1, 2)).to(ids.device)
        frames = frames.to(ids.device).expand(ids.shape)
        real = (kinds != notes.PADDING).to(ids.device).expand(ids.shape)
        ends = self._ends(ids) & (frames < 0) & real
        place = held.get(notes.FRAME)
        known = place is not None and place.shape[-1] > count
        last = place[:, 0, -count - 1] if known and place is not None else frames[:, 0]
        turns = frames != torch.cat([last.to(frames)[:, None], frames[:, :-1]], 1)
        turns[:, 1:] |= ends[:, :-1]
        turns[:, 0] &= (start & 1) == 0  # what has ended is counted below
        first = (start.clamp_min(0) >> 1) + (start.clamp_min(0) & 1)
        codes = 2 * (first[:, None] + turns.cumsum(1)) + ends
        notes.mark(layer, notes.FRAME, frames)
        notes.mark(layer, notes.SENTENCE, codes.masked_fill(~real, -1))

    def _ends(self, ids: Tensor) -> Tensor:
        """Mark the tokens `[B, n]` that end a sentence."""
        new = set(ids.unique().tolist()) - self._known.keys()
        self._known |= {each: self._is_end(each) for each in new}
        ends = [each for each, end in self._known.items() if end]
        return torch.isin(ids, torch.tensor(ends, dtype=ids.dtype, device=ids.device))

    def _is_end(self, token: int) -> bool:
        if self._tokenizer is None:
            return token in self._given
        if token in self._tokenizer.all_special_ids:
            return True
        return ends_sentence(self._tokenizer.decode([token]))


def ends_sentence(text: str) -> bool:
    """Return True if a sentence ends with the text of a token."""
    if "\n" in text:
        return True
    while text and (text[-1] in "\"'" or category(text[-1]) in _CLOSERS):
        text = text[:-1]
    return text.endswith(_STOPS)


@lru_cache(maxsize=16)  # a pipeline attaches at every call
def _tokenizer_of(home: str) -> Any:
    from transformers import AutoTokenizer

    if not home:
        return None
    try:
        return AutoTokenizer.from_pretrained(home, local_files_only=True)
    except (OSError, ValueError):
        return None
