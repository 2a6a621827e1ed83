"""Drawing what was kept: bright patches kept, coloured ones merged, dark ones dropped."""

from __future__ import annotations

import colorsys
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from mmfast.core.errors import MmfastError, an
from mmfast.core.trace import Cells, Trace

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
VIEWS = ("tiles", "overview")  # of a picture that was cut, as the model sees it
_GAP, _LINE, _DARK, _TINT = 8, 16, 0.16, 0.55
_GOLDEN = 0.61803398875  # neighbouring numbers get hues far apart

Pixels = NDArray[np.uint8]
Floats = NDArray[np.float32]


def overlay(frames: Any, trace: Trace, item: int = 0, *, square: bool = False) -> Image.Image:
    """A contact sheet of an image or clip, with what became of each patch after all stages.

    Kept patches stay as they are; patches merged into one token share a colour, and a frame of
    that colour marks the one whose place it has; dropped patches are dark. An image cut into
    tiles shows its mosaic and then its overview.

    Args:
        frames: What the model saw: an image `[H, W, 3]`, a clip `[T, H, W, 3]`, or a list of
            frames, as uint8 arrays or PIL images.
        trace: The trace of the call.
        item: Image or clip of the batch, in reading order.
        square: The model saw the middle square only (LLaVA-1.5).

    Returns:
        An RGB image.

    Raises:
        MmfastError: The trace has no picture of this item, or there is no frame.
    """
    tiles = frame_pictures(frames, trace, item, square=square)
    return _sheet(tiles, _header(trace, item))


def frame_pictures(
    frames: Any, trace: Trace, item: int = 0, *, square: bool = False
) -> list[tuple[Image.Image, str]]:
    """The frames of `overlay` one by one, each with its number or view and its tokens."""
    if not isinstance(trace, Trace):
        raise MmfastError(f"{an(type(trace).__name__)} is no trace; give that of the call: .trace")
    pictures = [_square(each) if square else each for each in _frames(frames)]
    high, across = pictures[0].shape[:2]
    cells = trace.cells(item, patches=True, aspect=across / high)
    colours = _colours(cells)
    step = math.ceil(len(pictures) / len(cells))  # Qwen joins two frames into one
    width = _width(len(cells), max(cell.share.shape[1] for cell in cells))
    tiles = []
    for number, cell in enumerate(cells):
        picture = pictures[min(len(pictures) - 1, number * step)]
        name = VIEWS[number] if (len(pictures), len(cells)) == (1, 2) else str(number)
        tiles.append((_paint(picture, cell, colours, width), f"{name}: {_counted(cell)}"))
    return tiles


def draw_shots(
    shots: Sequence[Any], processor: Any, trace: Trace, item: int, sheets: bool = True
) -> list[Any]:
    """`overlay` of every image or clip of one input, as a pipeline read them.

    Without `sheets` it is `frame_pictures` of each.
    """
    square = bool(getattr(getattr(processor, "image_processor", None), "do_center_crop", 0))
    drawn = [
        frame_pictures(shot.pixels, trace, item + i, square=square and shot.kind == "image")
        for i, shot in enumerate(shots)
    ]
    return [_sheet(t, _header(trace, item + i)) for i, t in enumerate(drawn)] if sheets else drawn


def save_sheet(sheets: Sequence[Image.Image], path: str | Path) -> None:
    """Write sheets under each other into one file."""
    size = (max(sheet.width for sheet in sheets), sum(sheet.height for sheet in sheets))
    whole = Image.new("RGB", size, "white")
    top = 0
    for sheet in sheets:
        whole.paste(sheet, (0, top))
        top += sheet.height
    target = check_target(path)
    try:
        whole.save(target)
    except OSError as error:
        raise MmfastError(f"cannot write a picture to {str(path)!r}: {error}") from None


def check_target(path: str | Path) -> Path:
    """Refuse (MmfastError) a path that no picture can be written to, before any work is done."""
    target = Path(path)
    if target.suffix.lower() not in SUFFIXES:
        raise MmfastError(
            f"cannot write a picture to {str(path)!r}: suffix {target.suffix!r} is not one of "
            f"{', '.join(SUFFIXES)}"
        )
    there = target.exists()
    try:
        with target.open("ab"):
            pass
        if not there:
            target.unlink()
    except OSError as error:
        raise MmfastError(
            f"cannot write a picture to {str(path)!r}: {error.strerror}; give a path in a folder "
            "that exists and that you may write to"
        ) from None
    return target


def _frames(media: Any) -> list[Pixels]:
    if isinstance(media, (list, tuple)):
        found = [np.asarray(each) for each in media]
    else:
        array = np.asarray(media)
        found = list(array) if array.ndim == 4 else [array]
    if not found or any(each.ndim != 3 or each.shape[-1] != 3 for each in found):
        shapes = [list(each.shape) for each in found[:3]]
        raise MmfastError(
            f"no RGB frames to draw on, shapes {shapes}; give [H, W, 3], [T, H, W, 3] or a list"
        )
    other = next((each.dtype for each in found if each.dtype.kind not in "iu"), None)
    if other is not None:
        raise MmfastError(f"frames of type {other} are no RGB frames; give uint8, 0 to 255")
    return [each.astype(np.uint8, copy=False) for each in found]


def _square(frame: Pixels) -> Pixels:
    height, width = frame.shape[:2]
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    return frame[top : top + side, left : left + side]


def _width(count: int, columns: int) -> int:
    wanted = 480 if count <= 2 else 224 if count <= 8 else 160
    return columns * max(4, round(wanted / columns))


def _colours(cells: Sequence[Cells]) -> dict[int, Floats]:
    """A colour for every output that more than one token went into."""
    owners = np.concatenate([cell.owner.numpy().ravel() for cell in cells])
    names, sizes = np.unique(owners[owners >= 0], return_counts=True)
    merged = [int(name) for name, size in zip(names, sizes, strict=True) if size > 1]
    return {
        owner: 255 * np.array(colorsys.hsv_to_rgb(i * _GOLDEN % 1, 0.9, 1.0), np.float32)
        for i, owner in enumerate(merged)
    }


def _paint(frame: Pixels, cell: Cells, colours: dict[int, Floats], width: int) -> Image.Image:
    rows, columns = cell.share.shape
    high = rows * max(1, round(width * frame.shape[0] / frame.shape[1] / rows))
    wide = width // columns * columns
    small = Image.fromarray(frame).resize((wide, high), Image.Resampling.BICUBIC)
    out: Floats = np.asarray(small, np.float32).copy()
    for row in range(rows):
        for column in range(columns):
            y, x = row * high // rows, column * wide // columns
            patch = out[y : y + high // rows, x : x + wide // columns]
            owner, share = int(cell.owner[row, column]), float(cell.share[row, column])
            _paint_patch(patch, colours.get(owner), owner < 0, share)
            if owner in colours and bool(cell.stands[row, column]):
                edge = max(1, min(patch.shape[:2]) // 8)
                for side in (patch[:edge], patch[-edge:], patch[:, :edge], patch[:, -edge:]):
                    side[:] = colours[owner]
    return Image.fromarray(out.clip(0, 255).astype(np.uint8))


def _paint_patch(patch: Floats, colour: Floats | None, dropped: bool, share: float) -> None:
    if dropped:
        patch[:] = _DARK * patch.mean(-1, keepdims=True)
    elif colour is not None:
        patch[:] = (1 - _TINT) * patch + _TINT * colour
    elif share < 1:  # in the tower, or in several tokens: towards white by what is elsewhere
        patch[:] = patch + (1 - share) * _TINT * (255 - patch)


def _counted(cell: Cells) -> str:
    here = int((cell.owner >= 0).sum())
    standing = int(cell.stands.sum())
    return f"{standing} of {cell.owner.numel()} left, {here - standing} merged in"


def _header(trace: Trace, item: int) -> str:
    """Tokens before and after every site, such as `pre 140 to 35`."""
    ends: dict[str, tuple[int, int]] = {}
    for site, number, reduction in trace.reductions:
        if number == item:
            first = ends[site][0] if site in ends else reduction.n
            ends[site] = (first, reduction.m)
    parts = [f"{site} {n} to {m}" for site, (n, m) in ends.items()]
    return " | ".join(parts) or "nothing reduced"


def _sheet(tiles: Sequence[tuple[Image.Image, str]], header: str) -> Image.Image:
    """Frames in rows with captions, and a line that says what the colours mean."""
    count = len(tiles)
    columns = min(count, 4 if count <= 8 else 8)
    wide, high = tiles[0][0].width, max(tile.height for tile, _ in tiles)
    cell = (wide + _GAP, high + _GAP + _LINE)
    rows = -(-count // columns)
    size = (max(columns * cell[0], 700) + _GAP, rows * cell[1] + 2 * _LINE + 2 * _GAP)
    whole = Image.new("RGB", size, "white")
    draw, font = ImageDraw.Draw(whole), ImageFont.load_default(size=11)
    draw.text((_GAP, _GAP // 2), header, fill="black", font=font)
    legend = (
        "untouched: kept  |  same colour: merged into one token, whose place is framed  |  "
        "dark: dropped  |  pale: partly mixed with others"
    )
    draw.text((_GAP, _GAP // 2 + _LINE), legend, fill="dimgray", font=font)
    for index, (tile, caption) in enumerate(tiles):
        x = _GAP + index % columns * cell[0]
        y = _GAP + 2 * _LINE + index // columns * cell[1]
        whole.paste(tile, (x, y))
        draw.text((x, y + tile.height + 1), caption, fill="black", font=font)
    return whole
