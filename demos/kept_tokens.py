"""Draw which visual tokens methods keep: one row of frames per method, dropped patches darkened.

python demos/kept_tokens.py assets/clips/four-shapes.mp4 "How many objects are there?" -o kept.png

For one method with the groups it merges in colour: `mmfast ask CLIP QUESTION --save-overlay x.png`.
"""

from __future__ import annotations

import argparse

import av
import numpy as np
from PIL import Image, ImageDraw

import mmfast

TILE, LEFT, GAP = 132, 120, 6


def uniform_frames(path: str, count: int) -> list[Image.Image]:
    with av.open(path) as container:
        frames = [frame.to_image() for frame in container.decode(video=0)]
    picks = np.linspace(0, len(frames) - 1, count).round().astype(int)
    return [frames[i].resize((TILE, TILE)) for i in picks]


def shade(frame: Image.Image, kept: np.ndarray) -> Image.Image:
    """Darken the patches that were dropped; `kept` is `[rows, columns]`."""
    mask = Image.fromarray((kept * 255).astype(np.uint8)).resize(
        frame.size, Image.Resampling.NEAREST
    )
    dark = Image.eval(frame, lambda value: value // 6)
    return Image.composite(frame, dark, mask)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("clip")
    parser.add_argument("question")
    parser.add_argument("-o", "--out", default="kept.png")
    parser.add_argument(
        "--reduce", nargs="+", default=["evs:0.25", "divprune:0.25", "fastv@llm4:0.1"]
    )
    args = parser.parse_args()
    frames = uniform_frames(args.clip, 8)
    width = LEFT + len(frames) * (TILE + GAP)
    sheet = Image.new("RGB", (width, (len(args.reduce) + 1) * (TILE + GAP)), "white")
    draw = ImageDraw.Draw(sheet)
    for row, spec in enumerate([None, *args.reduce]):
        answer = mmfast.pipeline("video-qa", reduce=spec)(args.clip, args.question)
        top = row * (TILE + GAP)
        name = (spec or "all tokens").replace(":", "\n")
        count = f"{answer.kept_tokens} of {answer.visual_tokens}"
        draw.text((6, top + 30), f"{name}\n\n{count}\n\n{answer.text!r}", fill="black")
        for i, frame in enumerate(frames):
            kept = answer.trace.heatmap(i) > 0
            sheet.paste(shade(frame, kept), (LEFT + i * (TILE + GAP), top))
    sheet.quantize(128).save(args.out, optimize=True)


if __name__ == "__main__":
    main()
