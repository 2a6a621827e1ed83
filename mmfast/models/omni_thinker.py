"""Qwen2.5-Omni's thinker, a token at a time: what it says, and what it tells the talker.

Positions are worked out here and given to every pass: nothing is kept on the model, so several
streams may share it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmfast.models.omni_choice import Picker

MEDIA = {
    "input_features": "audio_token_index",
    "pixel_values": "image_token_index",
    "pixel_values_videos": "video_token_index",
}
SPANS = ("image_grid_thw", "video_grid_thw", "video_second_per_grid", "use_audio_in_video")


@dataclass
class Thought:
    """What one pass of the thinker gave.

    Args:
        state: What it tells the talker of the tokens that went in `[1, n, D]`.
        token: The token it picked; None behind the last.
    """

    state: Tensor
    token: int | None


@torch.no_grad()
def think(
    thinker: Any,
    inputs: dict[str, Any],
    picker: Picker | Iterator[int],
    ends: set[int],
    limit: int,
) -> Iterator[Thought]:
    """Pass by pass: first the prompt, then each token that was picked, until one ends the answer.

    Args:
        thinker: The model's thinker.
        inputs: What its processor gives for one prompt, on its device.
        picker: How tokens are picked, or the tokens themselves (words to be said).
        ends: Tokens that end the answer; they are not fed.
        limit: Most tokens.
    """
    ids = inputs["input_ids"]
    mask = inputs.get("attention_mask")
    mask = torch.ones_like(ids) if mask is None else mask
    positions, _ = place(thinker, ids, mask, inputs)
    media = {k: v for k, v in inputs.items() if k not in ("input_ids", "attention_mask")}
    cache: Any = None
    feed, extra, count = ids, media, 0
    while True:
        out = thinker(
            input_ids=feed,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            output_hidden_states=True,
            **extra,
        )
        cache = out.past_key_values
        state = _told(thinker, feed, out.hidden_states, inputs if not count else {})
        token = _pick(picker, ids, out.logits[:, -1])
        yield Thought(state, token)
        count += 1
        if token is None or token in ends or count == limit:
            return
        feed, extra = ids.new_tensor([[token]]), {}
        ids, mask = torch.cat([ids, feed], 1), torch.cat([mask, mask.new_ones(1, 1)], 1)
        positions = positions[..., -1:] + 1


def place(model: Any, ids: Tensor, mask: Tensor, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Positions `[4, 1, n]` of a prompt, and how far later ones are ahead of theirs `[1, 1]`."""
    heard = inputs.get("feature_attention_mask")
    lengths = inputs.get("audio_feature_lengths") if heard is None else heard.sum(-1)
    grid = {name: inputs.get(name) for name in SPANS}
    spatial, delta = model.get_rope_index(
        ids,
        grid["image_grid_thw"],
        grid["video_grid_thw"],
        mask,
        bool(grid["use_audio_in_video"]),
        lengths,
        grid["video_second_per_grid"],
    )
    text = (mask.long().cumsum(-1) - 1).clamp(min=0)
    return torch.cat([text[None], spatial.to(text)]), delta.reshape(1, 1).to(text)


def _told(thinker: Any, feed: Tensor, states: tuple[Tensor, ...], inputs: dict[str, Any]) -> Tensor:
    """Last hidden state and embedding, added; of sound and pictures the state alone."""
    embedded = states[0]
    for name, index in MEDIA.items():
        if inputs.get(name) is not None:
            gone = feed == getattr(thinker.config, index)
            embedded = embedded.masked_fill(gone[..., None], 0)
    return states[-1] + embedded


def _pick(picker: Picker | Iterator[int], ids: Tensor, logits: Tensor) -> int | None:
    return picker(ids, logits) if isinstance(picker, Picker) else next(picker, None)
