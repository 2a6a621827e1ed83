"""Picture of the front page: the visual tokens that methods keep of a clip's frames.

`python -m mmfast.bench.report.kept` writes it into a checkout, `--out FILE` elsewhere.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from mmfast.core.errors import MmfastError
from mmfast.core.spec import parse
from mmfast.models.quiet import quiet
from mmfast.pipelines import pipeline
from mmfast.pipelines.overlay import check_target

ROOT = Path(__file__).resolve().parents[3]
FILES = ("assets/images/kept.png", "docs/images/kept.png")
CLIP, QUESTION = "assets/clips/four-shapes.mp4", "How many objects are there?"
SPECS: tuple[str | None, ...] = (None, "evs:0.25", "divprune:0.25", "fastv@llm4:0.1")
TILE, LEFT, GAP, LINE = 132, 170, 6, 30  # pixels


def kept_picture(clip: str | Path, question: str = QUESTION) -> Image.Image:
    """Draw a row of frames for each spec, dropped patches dark, beside its tokens and answer."""
    rows, first = list[tuple[list[str], list[Image.Image]]](), None
    for spec in SPECS:
        model = None if first is None else (first.model, first.processor)
        pipe = pipeline("video-qa", model, reduce=spec, device="cpu", dtype="float32")
        first, answer = first or pipe, pipe(clip, question)
        drawn = pipe.overlay(clip, answer.trace, sheets=False)[0]
        count = f"{answer.kept_tokens} of {answer.visual_tokens}"
        rows.append(([*_named(spec), count, f"“{answer.text}”"], [tile for tile, _ in drawn]))
    wide = LEFT + max(len(tiles) for _, tiles in rows) * (TILE + GAP) - GAP
    sheet = Image.new("RGB", (wide, len(rows) * (TILE + GAP) - GAP), "white")
    for number, (lines, tiles) in enumerate(rows):
        _draw_row(sheet, number * (TILE + GAP), lines, tiles)
    return sheet.quantize()


def _named(spec: str | None) -> list[str]:
    """Return the name of a spec with its site, and the share that it keeps."""
    if spec is None:
        return ["all tokens", ""]
    return [spec.rpartition(":")[0], f"{parse(spec)[0].budget:.0%} kept"]


def _draw_row(sheet: Any, top: int, lines: Sequence[str], tiles: Sequence[Image.Image]) -> None:
    draw = ImageDraw.Draw(sheet)
    for number, line in enumerate(lines):
        font = ImageFont.load_default(size=20 if number % 3 else 24)
        draw.text((4, top + 4 + number * LINE), line, fill="black", font=font)
    for number, tile in enumerate(tiles):
        small = tile.resize((TILE, TILE), Image.Resampling.BICUBIC)
        sheet.paste(small, (LEFT + number * (TILE + GAP), top))


def main(args: Sequence[str] | None = None, root: Path = ROOT) -> None:
    """Write the picture."""
    parser = argparse.ArgumentParser("mmfast.bench.report.kept", description=__doc__)
    parser.add_argument("--out", help="another file than those of the checkout")
    out = parser.parse_args(args).out
    if out is None and not (root / "README.md").is_file():
        raise MmfastError(f"no README.md in {root.name!r}: run this from a checkout, or give --out")
    targets = [check_target(path) for path in ([out] if out else [root / file for file in FILES])]
    quiet()
    picture = kept_picture(root / CLIP)
    for target in targets:
        picture.save(target, optimize=True)
        print(f"wrote {target}")


if __name__ == "__main__":
    main()
