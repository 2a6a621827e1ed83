"""Cut a box of tokens into a given number of compact cells."""

from __future__ import annotations

from functools import lru_cache

Box = tuple[int, int, int, int, int, int]  # start and stop of frames, rows and columns


@lru_cache(maxsize=64)
def split_box(grid: tuple[int, int, int], count: int) -> tuple[Box, ...]:
    """Cut `grid` into exactly `count` boxes of nearly equal volume, by halving the longest side.

    Args:
        grid: `(frames, rows, columns)`.
        count: Number of boxes, from 1 to the volume of the grid.

    Returns:
        Boxes `(t0, t1, y0, y1, x0, x1)` that cover every token once.
    """
    done: list[Box] = []
    todo: list[tuple[Box, int]] = [((0, grid[0], 0, grid[1], 0, grid[2]), count)]
    while todo:
        box, share = todo.pop()
        if share == 1:
            done.append(box)
        else:
            todo.extend(_halve(box, share))
    return tuple(done)


def _halve(box: Box, share: int) -> tuple[tuple[Box, int], tuple[Box, int]]:
    """Cut the longest side (space before time) so that both parts can hold their cells."""
    sides = [box[1] - box[0], box[3] - box[2], box[5] - box[4]]
    axis = max((1, 2, 0), key=lambda a: sides[a])
    volume = sides[0] * sides[1] * sides[2]
    slab = volume // sides[axis]
    left = share // 2
    cut = min(max(round(sides[axis] * left / share), 1), sides[axis] - 1)
    # Rounding the cut may leave too little room on either side for its cells.
    left = min(max(round(share * cut / sides[axis]), share - (volume - cut * slab), 1), cut * slab)
    left = min(left, share - 1)
    start = box[2 * axis]
    first, second = list(box), list(box)
    first[2 * axis + 1] = second[2 * axis] = start + cut
    return (_box(first), left), (_box(second), share - left)


def _box(values: list[int]) -> Box:
    t0, t1, y0, y1, x0, x1 = values
    return t0, t1, y0, y1, x0, x1
