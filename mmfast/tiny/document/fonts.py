"""Letters of many fonts as one picture beside the checkpoint: print is the same on every machine.

`python -m mmfast.tiny.document.fonts FILE` draws it anew from the fonts of a Debian system:
fonts-liberation, -dejavu-core, -lato, -roboto-unhinted, -open-sans, -cantarell, -ebgaramond,
-linuxlibertine, -freefont-ttf, -inconsolata, -noto-core and -crosextra-caladea, -carlito.
"""

from __future__ import annotations

import json
import string
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from PIL.PngImagePlugin import PngInfo

from mmfast.models.loading import embedded_path

TRAINED = (
    "LiberationSans-Regular.ttf", "LiberationSans-Bold.ttf", "LiberationSerif-Regular.ttf",
    "LiberationSerif-Italic.ttf", "LiberationMono-Regular.ttf", "DejaVuSans.ttf",
    "DejaVuSans-Bold.ttf", "DejaVuSerif.ttf", "DejaVuSansMono.ttf", "Lato-Regular.ttf",
    "Roboto-Regular.ttf", "OpenSans-Regular.ttf", "Cantarell-Regular.otf", "Carlito-Regular.ttf",
    "EBGaramond12-Regular.otf", "LinLibertine_R.otf", "FreeSerifBold.ttf",
    "FreeSans.ttf", "FreeSerif.ttf", "Inconsolata.otf",
)  # fmt: skip
KEPT = ("NotoSans-Regular.ttf", "NotoSerif-Regular.ttf", "Caladea-Regular.ttf")  # never trained on
LETTERS = string.ascii_letters + string.digits
EM = 28  # pixels of the letters' size
HIGH, WIDE, BASE, SIDE = 40, 38, 30, 3  # cell of a letter, its base line, and room on its left

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Stamp:
    """A word in ink."""

    ink: Bytes  # 0 to 255. `[high, wide]`
    centres: tuple[float, ...]  # of its letters, in pixels from the left

    @property
    def high(self) -> int:
        """Height in pixels."""
        return len(self.ink)

    @property
    def wide(self) -> int:
        """Width in pixels."""
        return len(self.ink[0])


@dataclass(frozen=True)
class Typeface:
    """A font: the cells of its letters `[letters, HIGH, WIDE]`, and how far each one advances."""

    name: str
    cells: Bytes
    advances: tuple[float, ...]  # pixels, of each letter

    def stamp(self, text: str, size: float) -> Stamp:
        """A word at a size in pixels of the em."""
        places, centres, at = list[tuple[int, int]](), list[float](), 0.0
        for letter in text:
            number = LETTERS.index(letter)
            places.append((number, round(at)))
            centres.append(at + SIDE + self.advances[number] / 2)
            at += self.advances[number]
        ink = np.zeros((HIGH, round(at) + 2 * SIDE + WIDE), np.uint8)
        for number, left in places:
            part = ink[:, left : left + WIDE]
            np.maximum(part, self.cells[number], out=part)
        ink = ink[:, : round(at) + 2 * SIDE]
        scale = size / EM
        wide, high = (max(round(side * scale), 1) for side in ink.shape[::-1])
        small = Image.fromarray(ink).resize((wide, high), Image.Resampling.LANCZOS)
        return Stamp(np.asarray(small), tuple(centre * scale for centre in centres))


def draw_letters(file: Path) -> None:
    """Write the picture of all letters: a row of cells for each font, advances in its text."""
    faces = (*TRAINED, *KEPT)
    sheet = np.zeros((len(faces), HIGH, len(LETTERS), WIDE), np.uint8)
    advances = []
    for row, name in enumerate(faces):
        font = ImageFont.truetype(name, EM)
        for column, letter in enumerate(LETTERS):
            cell = Image.new("L", (WIDE, HIGH))
            ImageDraw.Draw(cell).text((SIDE, BASE), letter, 255, font, "ls")
            sheet[row, :, column] = np.asarray(cell)
        advances.append([round(font.getlength(letter), 2) for letter in LETTERS])
    note = PngInfo()
    note.add_text("advances", json.dumps(advances, separators=(",", ":")))
    flat = sheet.reshape(len(faces) * HIGH, len(LETTERS) * WIDE)
    Image.fromarray(flat).save(file, "PNG", optimize=True, pnginfo=note)


@cache
def typefaces() -> tuple[Typeface, ...]:
    """All fonts, the trained ones first."""
    faces = (*TRAINED, *KEPT)
    with Image.open(embedded_path("tiny-document") / "letters.png") as picture:
        advances = json.loads(picture.text["advances"])  # type: ignore[attr-defined]
        flat = np.asarray(picture.convert("L"))
    cells = flat.reshape(len(faces), HIGH, len(LETTERS), WIDE).transpose(0, 2, 1, 3)
    rows = zip(faces, cells, advances, strict=True)
    return tuple(Typeface(name, own, tuple(ahead)) for name, own, ahead in rows)


if __name__ == "__main__":
    draw_letters(Path(sys.argv[1]))
