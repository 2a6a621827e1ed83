"""Recent frames of a stream as pictures, for questions that its model cannot answer.

The embedded model of streams was trained on an endless world: it remembers, but no longer answers
questions about movement, speed and order, counts badly, has never been asked for yes or no or
about "the object", and knows few words. The embedded model of clips does all that. A stream of
the first therefore keeps its last seconds as pictures, and a question about the present is put to
the second, about a clip of them.
"""

from __future__ import annotations

import re
from collections import deque
from typing import Any

import numpy as np
import torch
from PIL import Image

GAP = 0.25  # seconds between two frames that are kept, as between those of a trained clip
MOST = 32  # frames that are kept
CLIP = 8  # frames of a clip that the model was trained on
STEP = 1.0  # seconds at least between two frames of a clip of the end of a stream
SIDE = 192  # pixels; twice the side of the encoder's input
# Seconds between two frames, and median change of colour (0 to 1) over cells of coarse pictures,
# above which they are of different scenes.
APART, CUT = 4.0, 0.018
_COARSE = (12, 12)
_MOTION = re.compile(
    r"\b(?:mov(?:e|es|ed|ing|ement)|motion|go(?:es|ing)?|head(?:s|ing)|direction|fast(?:er|est)?"
    r"|slow(?:er|est)?|speed|first|earlier|later)\b",
    re.IGNORECASE,
)
# What asks about the present without motion: by its time, for a number of things, for yes or no.
_PRESENT = re.compile(
    r"\b(?:now|currently|at the moment|how many|count|number of)\b"
    r"|^\W*(?:is|are|does|do|can) ",
    re.IGNORECASE,
)
# What names no thing: the model of the stream was asked for things by their names alone.
_NAMELESS = re.compile(
    r"\b(?:its?|this|the (?:object|thing|figure|shape(?! of)))\b"
    r"|\b(?:colou?r|shape|object) (?:do you see|can you see|is (?:shown|there))\b",
    re.IGNORECASE,
)
_ENDS = re.compile(r"\bat the (?:start|beginning|end)\b", re.IGNORECASE)
# A place changes within the clip, whose model tells its beginning and its end, but not a now.
_PLACE = re.compile(r"\b(?:where|corner|position|lie)\b", re.IGNORECASE)
_NOW = re.compile(r"\s*\b(?:right )?now\b", re.IGNORECASE)


class RecentFrames:
    """The last frames since a cut, at least `GAP` seconds apart, as small pictures.

    `whole` tells that no frame of the stream is missing but those in between.
    """

    def __init__(self) -> None:
        self._kept: deque[tuple[float, Any]] = deque(maxlen=MOST)
        self.whole = True

    def add(self, frame: Any, time: float) -> None:
        """Take a frame `[H, W, 3]` uint8 and its seconds; one too close to the last is left out."""
        if self._kept and time < self._kept[-1][0] + GAP - 1e-3:
            return
        shown = small_picture(np.asarray(frame))
        if self._kept and (
            time > self._kept[-1][0] + APART or colour_change(self._kept[-1][1], shown) > CUT
        ):
            self.cut()
        self.whole = self.whole and len(self._kept) < MOST
        self._kept.append((time, shown))

    def cut(self) -> None:
        """Forget what is kept, since another scene begins."""
        self.whole = self.whole and not self._kept
        self._kept.clear()

    def asked(self, question: str, strange: bool = False) -> bool:
        """Return True for a question that a clip of these frames answers.

        That is one about the present or in words that the model of the stream has never read
        (`strange`); one about motion as soon as there are two frames.
        """
        if not self._kept:
            return False
        if _MOTION.search(question):
            return len(self._kept) > 1
        patterns = (_PRESENT, _NAMELESS, *([_ENDS] if self.whole else []))
        return strange or any(pattern.search(question) for pattern in patterns)

    def worded(self, question: str) -> str:
        """Return a question in the words of a clip, which is of now: a place now is at its end."""
        place = _PLACE.search(question) and not _MOTION.search(question)
        return _NOW.sub(" at the end" if place else "", question).lstrip(" ,")

    def clip(self) -> tuple[list[Any], list[float]]:
        """Return at most `CLIP` frames and their seconds, of all that is kept or of its end."""
        kept = list(self._kept)
        if len(kept) > CLIP and self.whole:
            spread = np.linspace(0, len(kept) - 1, CLIP).round().astype(int)
            kept = [kept[i] for i in spread]
        elif len(kept) > CLIP:
            end = [kept.pop()]
            while kept and len(end) < CLIP:
                each = kept.pop()
                end += [each] if each[0] <= end[-1][0] - STEP + 1e-3 else []
            kept = end[::-1]
        return [frame for _, frame in kept], [time for time, _ in kept]

    def snapshot(self) -> dict[str, Any]:
        """Return all state as a tree of plain containers and tensors."""
        frames = [[time, torch.from_numpy(frame)] for time, frame in self._kept]
        return {"frames": frames, "whole": self.whole}

    def restore(self, tree: dict[str, Any]) -> None:
        """Take over a snapshot."""
        self._kept.clear()
        self._kept.extend((time, frame.numpy()) for time, frame in tree["frames"])
        self.whole = tree["whole"]


def small_picture(frame: Any) -> Any:
    """Return a picture with no side above `SIDE`; a small one is only copied."""
    height, width = frame.shape[:2]
    most = max(height, width)
    if most <= SIDE:
        return frame.copy()
    size = (max(1, width * SIDE // most), max(1, height * SIDE // most))
    return np.array(Image.fromarray(frame).resize(size, Image.Resampling.BICUBIC))


def colour_change(before: Any, after: Any) -> float:
    """Return the median change of colour, 0 to 1, over the cells of two coarse pictures."""
    if before.shape != after.shape:
        return 1.0  # a source of another size
    both = (Image.fromarray(each).resize(_COARSE, Image.Resampling.BOX) for each in (before, after))
    first, second = (np.asarray(each, np.float32) for each in both)
    return float(np.median(np.abs(first - second).mean(-1)) / 255)
