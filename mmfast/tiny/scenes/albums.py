"""Several pictures in a prompt, and what can be asked of them: what one of them alone answers."""

from __future__ import annotations

from collections.abc import Sequence

from mmfast.tiny.scenes.questions import ABSENT, SceneItem
from mmfast.tiny.video.scene import Table

ALBUM = 3  # pictures in a prompt
KINDS = ("colour", "shape", "position", "number", "exists", ABSENT)
NUMBER = "number"  # what stands for a number among the things of a picture
Page = tuple[list[SceneItem], Table, int]  # items of a frame, its table, which frame it is


def album_items(pages: Sequence[Page]) -> list[SceneItem]:
    """Items of pictures that stay right beside the others, no two of which ask the same."""
    found: dict[tuple[str, str, tuple[str, ...]], SceneItem] = {}
    named = [_names(table, frame) for _, table, frame in pages]
    for number, (items, _, _) in enumerate(pages):
        others = set().union(*(names for i, names in enumerate(named) if i != number))
        for item in items:
            if item.kind in KINDS and item.before is None and not _words(item) & others:
                found.setdefault((item.kind, item.form, item.slots), item)
    return [*found.values()]


def _words(item: SceneItem) -> set[str]:
    """Names of the things that an item asks for."""
    return {slot.removesuffix(" object") for slot in item.slots} or {NUMBER}


def _names(table: Table, frame: int) -> set[str]:
    """Words that the things of a frame go by: names, shapes and colours."""
    alive = [i for i in range(table.count) if table.alive[i, frame]]
    found = {word for i in alive for word in (table.name(i), *table.looks[i])}
    return found | ({NUMBER} if table.shown[frame] else set())
