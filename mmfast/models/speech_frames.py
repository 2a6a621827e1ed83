"""Tokens of speech to whole frames of codes, and which text begins at which frame."""

from __future__ import annotations

import torch
from torch import Tensor

from mmfast.models.speech_layout import SpeechLayout


class Frames:
    """Collects one utterance.

    A code of the wrong book (drafts that nobody verified) does not shift those behind it: frames
    begin at codes of book 0, and what a frame lacks is taken from the one before.

    Attributes:
        count: Frames so far.
        starts: Frame at which each group begins.
    """

    def __init__(self, layout: SpeechLayout) -> None:
        self.layout, self.count, self.starts = layout, 0, [0]
        self._open: list[int] = []
        self._before = [0] * layout.books
        self._ready: list[list[int]] = []

    def push(self, token: int) -> None:
        """An audio token, or the end of a group's sound."""
        place = token - self.layout.base
        if place < 0:
            self._close()
            self.starts.append(self.count)
            return
        book, code = divmod(place, self.layout.entries)
        if book == 0:
            self._close()
        if book == len(self._open):
            self._open.append(code)
        if len(self._open) == self.layout.books:
            self._close()

    def _close(self) -> None:
        if self._open:
            self._before = self._open + self._before[len(self._open) :]
            self._ready.append(self._before)
            self.count += 1
            self._open = []

    def take(self) -> Tensor:
        """Whole frames since the last call `[Q, t]`."""
        found = torch.tensor(self._ready, dtype=torch.long).reshape(-1, self.layout.books).T
        self._ready = []
        return found
