"""Which frames a pass of the vision tower holds, whose they are, and which blocks are read."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Any

from torch import Tensor

from mmfast.core.errors import ModelError
from mmfast.models.adapter import Adapter, Call
from mmfast.models.towers import Tower, argument

Layouts = list[tuple[int, ...]]


@dataclass(frozen=True)
class Plan:
    """What is known of a pass before it begins.

    Attributes:
        streams: The state of each frame, by number; frames of a stream in their order.
        layouts: Per frame its number of rows, and what else must match to compare frames: rows
            and columns, or of how many tiles it is.
        taps: Blocks whose output is read.
        class_token: Row 0 of every tile is a class token.
    """

    streams: tuple[int, ...]
    layouts: tuple[tuple[int, ...], ...]
    taps: frozenset[int]
    class_token: bool

    @property
    def sizes(self) -> list[int]:
        """Patches of each frame."""
        return [layout[0] for layout in self.layouts]


def plan_pass(
    tower: Tower, adapter: Adapter, kind: str, arguments: Call, hidden: Tensor, states: int
) -> Plan:
    """Plan a pass from the call that caused it.

    Args:
        tower: The tower.
        adapter: Of its family.
        kind: `image` or `video`.
        arguments: Of `get_image_features` or `get_video_features`.
        hidden: Input of the first block, `[B, N, D]` or `[S, D]`.
        states: How many streams there are.

    Raises:
        ModelError: Media and streams do not match, or the tower got other patches than the call
            brings.
    """
    items = _packed(kind, arguments) if tower.packed else _batch(tower, adapter, arguments, hidden)
    if len(items) % states:
        raise ModelError(
            f"{len(items)} {kind}s came for {states} states of a frame cache; give equally many "
            "for each state"
        )
    share = len(items) // states
    layouts = tuple(chain.from_iterable(items))
    owners = tuple(i // share for i, frames in enumerate(items) for _ in frames)
    found, planned = hidden.shape[:-1].numel(), sum(layout[0] for layout in layouts)
    if found != planned:
        raise ModelError(
            f"the vision tower got {found} patches where the call brings {planned}; a frame cache "
            "does not work with reduction at sites 'pixel' and 'vit'"
        )
    return Plan(owners, layouts, taps_of(tower, arguments), tower.class_token)


def _packed(kind: str, arguments: Call) -> list[Layouts]:
    grids: list[list[int]] = arguments[f"{kind}_grid_thw"].tolist()
    return [[(h * w, h, w)] * t for t, h, w in grids]


def _batch(tower: Tower, adapter: Adapter, arguments: Call, hidden: Tensor) -> list[Layouts]:
    """Frames of a batch `[B, N, D]`: those of a video, or the tiles of an image together."""
    rows, n = hidden.shape[:2]
    videos = arguments.get("pixel_values_videos")
    if videos is not None:
        items, frames = videos.shape[:2]
        return [[(n, 1)] * frames] * items
    tiles = adapter.tile_counts(tower.base, arguments)
    if sum(tiles) != rows:  # padding among the pictures of a batch
        return [[(n, 1)]] * rows
    # A family without a call for videos encodes a clip as an image whose raster has many frames.
    found = adapter.layout(tower.base, "image", arguments)
    clips = [
        layout.grid is not None and layout.grid[0] == count > 1
        for layout, count in zip(found, tiles, strict=True)
    ]
    return [
        [(n, 1)] * count if clip else [(count * n, count)]
        for clip, count in zip(clips, tiles, strict=True)
    ]


def taps_of(tower: Tower, arguments: Call) -> frozenset[int]:
    """Blocks whose whole output is read: the last, feature layers and DeepStack taps."""
    blocks = len(tower.blocks)
    states: set[int] = set()  # hidden states asked for; 0 is the input of the first block
    if not tower.packed:
        states |= _numbers(argument(tower.base, arguments, "vision_feature_layer"), blocks)
    extra: dict[str, Any] = arguments.get("kwargs", {})
    asked = extra.get("output_hidden_states", arguments.get("output_hidden_states"))
    states |= {*range(blocks + 1)} if asked is True else _numbers(asked, blocks)
    taps = {state - 1 for state in states if state} | {blocks - 1}
    return frozenset(taps | {*getattr(tower.module, "deepstack_visual_indexes", ())})


def _numbers(layers: Any, blocks: int) -> set[int]:
    if layers is None or isinstance(layers, bool):
        return set()
    return {int(n) % (blocks + 1) for n in ([layers] if isinstance(layers, int) else layers)}
