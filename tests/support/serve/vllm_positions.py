"""The plugin's positions behind the signature of vLLM's `recompute_mrope_positions`.

vLLM tells that function of a chunk of a prompt and of the items in it; the plugin's model is told
of all items when a request begins, and of the distances of their tokens with each chunk. Here a
stand-in for vLLM's model lays out what was told; its places, the channels of the distances and the
sum of both are the plugin's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from mmfast.vllm.media import Item, PrunedMedia, digits


@dataclass(frozen=True)
class Told:
    """An item of a prompt: from `start` to `stop`, of which `rows` are known from `first` on.

    One of which nothing is known yet takes no position, as in vLLM.
    """

    start: int
    stop: int
    first: int
    rows: Tensor  # [4 or 5, n]

    @property
    def extent(self) -> int:
        """Positions that it takes, as vLLM counts them."""
        if not self.rows.numel():
            return 0
        return int(self.rows[:3].max()) + 1 if len(self.rows) == 5 else int(self.rows[3, 0])


class Stock:
    """The parent of the plugin's model: positions by what was told, and nothing else."""

    known: Tensor  # [3, L]: final before the first item that was told
    items: Sequence[Told]

    def get_mrope_input_positions(self, ids: list[int], features: Any) -> tuple[Tensor, int]:
        after = self.items[0].start if self.items else len(ids)
        value = int(self.known[-1, after - 1]) + 1
        out = torch.zeros(3, len(ids), dtype=torch.int64)
        out[:, :after] = self.known[:, :after]
        for feature in features:
            at, length = feature.mm_position.offset, feature.mm_position.length
            out[:, after:at] = torch.arange(value, value + at - after)
            value += at - after
            out[:, at : at + length] = value  # the first token's counts alone
            value, after = value + feature.data["item"].extent, at + length
        out[:, after:] = torch.arange(value, value + len(ids) - after)
        return out, 0

    def embed_input_ids(self, ids: Tensor, embeddings: Any, **_: Any) -> Tensor:
        return ids

    def forward(self, ids: Any, positions: Tensor) -> Tensor:
        return positions


class Model(PrunedMedia, Stock):
    """The plugin's model without an encoder or weights."""

    def __init__(self, ids: Tensor, known: Tensor, items: Sequence[Told]) -> None:
        self.known, self.items = known, items
        self._shift = torch.zeros(3, len(ids), dtype=torch.int64)

    def _item(self, kind: str, data: Any) -> Item:
        return Item(kind, data, data["ids"])


def recompute_mrope_positions(
    input_ids: Tensor,
    multimodal_positions: list[Tensor],
    mrope_positions: Tensor,
    num_computed_tokens: int,
    vision_start_token_id: int,
    image_token_id: int,
    video_token_id: int,
) -> tuple[Tensor, int]:
    """Positions `[3, L]` of a prompt after a chunk that begins at `num_computed_tokens`."""
    media = (input_ids == image_token_id) | (input_ids == video_token_id)
    items: list[Told] = []
    cursor = num_computed_tokens
    for rows in (each for each in multimodal_positions if each.numel()):
        if not media[cursor:].any():
            break
        items.append(_told(rows, cursor, input_ids == vision_start_token_id, media))
        cursor = items[-1].first + rows.shape[1]
    stop = items[-1].stop if items else len(media)
    later = [stop + at for at in media[stop:].nonzero()[:, 0].tolist()]
    items += [Told(at, at + 1, at, torch.zeros(5, 0)) for at in later]
    model, ids = Model(input_ids, mrope_positions, items), input_ids.tolist()
    features = [
        SimpleNamespace(
            modality="image",
            data={"item": item, "ids": ids[item.start : item.stop] if item.extent else []},
            mm_position=SimpleNamespace(offset=item.start, length=item.stop - item.start),
        )
        for item in items
    ]
    positions, delta = model.get_mrope_input_positions(ids, features)
    chunk, told = slice(num_computed_tokens, None), torch.zeros(len(ids), dtype=torch.bool)
    for item in items:
        told[item.first : item.first + item.rows.shape[1]] = True
    channels = [digits(item.rows[:3], torch.zeros(1)) for item in items]
    model.embed_input_ids(input_ids[chunk], channels, is_multimodal=told[chunk])
    out = torch.cat([mrope_positions[:, :num_computed_tokens], positions[:, chunk]], dim=1)
    model.forward(None, out[:, chunk])
    return out, delta


def _told(rows: Tensor, cursor: int, marks: Tensor, media: Tensor) -> Told:
    """Find the item that `rows` belong to, at or after the cursor."""
    if len(rows) == 5 and rows[4].any():  # timestamps of a video and its marks are rows as well
        ahead = int((rows[3] == 1).nonzero()[0])
        start = cursor + int(marks[cursor:].nonzero()[0]) - ahead
        return Told(start, start + rows.shape[1], start, rows)
    first = cursor + int(media[cursor:].nonzero()[0])
    start = int(marks[:first].nonzero()[-1]) + 1
    stop = start + int(media[start:].long().cumprod(0).sum())
    return Told(start, stop, first, rows)
