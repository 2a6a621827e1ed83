"""Signals of a vision tower about its patches: their names, and the block each is read from.

    attn         last used block: the class token's row, or the mean over queries without one
    attn_visual  last used block: the mean over all queries, a class token's included (HiPrune)
    attn_middle  as `attn_visual`, from the middle block, where attention is on objects (HiPrune)
    attn_first   as `attn`, from the first block (HiRED)
    keys         last used block: keys, averaged over heads

No method needs a class token: in a tower without one, `attn` is the mean over all patches.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from mmfast.models.families.tower import Tower

# Name: one of the used blocks, and its reading: `row` (the class token's, where there is one),
# `mean` (over all queries) or `keys`.
TOWER_SIGNALS: Mapping[str, tuple[str, str]] = {
    "attn": ("last", "row"),
    "attn_visual": ("last", "mean"),
    "attn_middle": ("middle", "mean"),
    "attn_first": ("first", "row"),
    "keys": ("last", "keys"),
}


@dataclass(frozen=True)
class SignalSource:
    """Source of one signal in one call: the number of a block, and `row`, `mean` or `keys`."""

    block: int
    what: str


def from_tower(needs: Collection[str]) -> tuple[str, ...]:
    """Those of `needs` that come from the vision tower, in a fixed order."""
    return tuple(name for name in TOWER_SIGNALS if name in needs)


def sources_of(
    tower: Tower, names: Collection[str], call: Mapping[str, Any]
) -> dict[str, SignalSource]:
    """The source of each signal in one call of the tower.

    A tower without a class token has no row to prefer, so `attn` and `attn_visual` are one
    reading there.
    """
    last = tower.last_used(call)
    blocks = {"first": 0, "middle": middle_block(tower, last), "last": last}
    found = {}
    for name in names:
        where, what = TOWER_SIGNALS[name]
        what = "mean" if what == "row" and not tower.class_token else what
        found[name] = SignalSource(blocks[where], what)
    return found


def middle_block(tower: Tower, last: int) -> int:
    """The block three eighths up the used ones, of full attention where others have windows."""
    whole = getattr(tower.module, "fullatt_block_indexes", None)
    used = last + 1
    if whole:
        return int(min(sorted(whole), key=lambda index: abs(index - last / 2)))
    return max(0, round(3 / 8 * used) - 1)
