"""SmolVLM: tiles as in Idefics3, and clips as pictures with a timestamp in front of each.

The frames of a clip are one item: its placeholders follow each other with text in between.
Paper: arXiv 2504.05299.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mmfast.models.families.adapter import Adapter, Call, Layout, add_adapter
from mmfast.models.families.idefics3 import fold_as, layouts, recover, tile
from mmfast.models.families.prompt_ids import Span

# Between two frames stands "\nFrame from 00:01:" and nothing else: 18 letters, fewer tokens.
# Between two clips stands a sentence about the second one.
_LONGEST = 24


def layout(base: Any, kind: str, call: Call) -> list[Layout]:
    """One layout per image and clip of the prompts; per tile where the prompts are not known."""
    return layouts(base, call, _clips)


def fold(base: Any, kind: str, values: Tensor, call: Call) -> list[Tensor]:
    """Mean over the patches `[P, C]` that pixel shuffling puts into one token."""
    return fold_as(layout(base, kind, call), base, values)


def tile_counts(base: Any, call: Call) -> list[int]:
    """Tiles per image, or frames per clip."""
    return [each.length // tile(base).length for each in layout(base, "image", call)]


def _clips(ids: list[int], found: list[list[Span]]) -> list[list[list[Span]]]:
    """Images in groups: the frames of a clip together, everything else alone."""
    groups: list[list[list[Span]]] = []
    for image in found:
        last = groups[-1][-1] if groups else []
        if len(image) == len(last) == 1 and _follows(ids, last[0], image[0]):
            groups[-1].append(image)
        else:
            groups.append([image])
    return groups


def _follows(ids: list[int], a: Span, b: Span) -> bool:
    """Whether two pictures are neighbours in a clip: both stamped, little between them."""
    return b[0] - a[1] <= _LONGEST and _stamped(ids, a) and _stamped(ids, b)


def _stamped(ids: list[int], span: Span) -> bool:
    """Whether `mm:ss:`, a token each, stands in front of a picture and its opening tags."""
    opening = ids[span[1] : span[1] + 1]  # the tag that closes a picture opens it, too
    first = span[0] - 1
    while first >= 0 and ids[first : first + 1] != opening:
        first -= 1
    stamp = ids[max(0, first - 6) : max(0, first)]
    colons = stamp[2:3] == stamp[5:6]
    return len(stamp) == 6 and colons and stamp[2] not in (stamp[i] for i in (0, 1, 3, 4))


add_adapter(Adapter("smolvlm", layout, fold, recover, tile_counts=tile_counts))
