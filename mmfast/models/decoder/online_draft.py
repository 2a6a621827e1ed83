"""A draft model that learns while it drafts, from the places where its drafts fell.

Online Speculative Decoding (Liu et al., arXiv 2310.07177): the verifying model has told its
distribution there anyway, so that a step of distillation costs passes of the small model alone.
What is said does not change: drafts are verified as before, each by what it was drawn from.
"""

from __future__ import annotations

import copy
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mmfast.models.decoder.drafters import BatchText
from mmfast.models.decoder.reader import SequenceReader

EVERY = 8  # corrections of a step
_LOSSES = 1024


@dataclass
class Correction:
    """The token at `place` of what a row has said took that of a draft; `p` `[V]` are its chances.

    `p` are those of the verifying model, before processors.
    """

    row: int
    place: int
    p: Tensor


class OnlineLearner:
    """Steps of distillation into a draft model, over all calls of `generate`.

    A step is made for `EVERY` corrections, and for what is left at the end of an answer.
    `losses` are the divergences (Kullback-Leibler, nats) before each of the last steps. Calls take
    turns, as a step changes the weights under all of them.
    """

    def __init__(self, model: Any, rate: float) -> None:
        self.model = model
        self._parameters = [each for each in model.parameters() if each.is_floating_point()]
        self._optimiser = torch.optim.AdamW(self._parameters, lr=rate, weight_decay=0.0)
        self._lessons: CorrectionLessons | None = None
        self._turn = threading.RLock()
        self.losses: deque[float] = deque(maxlen=_LOSSES)

    @contextmanager
    def call(self) -> Iterator[None]:
        """Let one call of `generate` draft and learn; nothing of its prompt stays behind."""
        with self._turn:
            try:
                yield
                self.step()
            finally:
                self._lessons = None

    def lessons(self, reader: SequenceReader) -> CorrectionLessons:
        """Begin to note corrections behind a prompt that the draft has just read."""
        self._lessons = CorrectionLessons(self, reader)
        return self._lessons

    def step(self) -> None:
        """Learn from what was corrected and not yet learned, if anything was."""
        lessons = self._lessons
        if lessons is None or not lessons.waiting:
            return
        with torch.inference_mode(False), torch.enable_grad():
            loss = lessons.loss()
            grads = torch.autograd.grad(loss, self._parameters, allow_unused=True)
            for each, grad in zip(self._parameters, grads, strict=True):
                each.grad = grad
            torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
            self._optimiser.step()
            self._optimiser.zero_grad()
        self.losses.append(float(loss.detach()))
        lessons.waiting.clear()


class CorrectionLessons:
    """Corrections of one call of `generate`, and the prompt in front of them."""

    def __init__(self, learner: OnlineLearner, reader: SequenceReader) -> None:
        self._learner, self._reader = learner, reader
        with torch.inference_mode(False):
            self._prompt = copy.deepcopy(reader.cache)
        self._read: tuple[BatchText, int, Sequence[Sequence[int]], Tensor] | None = None
        self.waiting: list[Correction] = []
        self._text: BatchText | None = None

    def read(
        self, text: BatchText, held: int, streams: Sequence[Sequence[int]], logits: Tensor
    ) -> None:
        """Remember what the verifying model has just read, and said behind it."""
        self._read, self._text = (text, held, streams, logits), text

    def judged(self, row: int) -> None:
        """Note a correction: the last token said, where a draft for its place was another."""
        if self._read is None:
            return
        text, held, streams, logits = self._read
        place = len(text.said[row]) - 1
        at = place - held - 1  # logits behind token `held + at`
        stream = streams[row]
        if not 0 <= at < len(stream) - 1 or stream[at + 1] == text.said[row][place]:
            return
        self.waiting.append(Correction(row, place, logits[row, at].softmax(-1)))
        if len(self.waiting) >= EVERY:
            self._learner.step()

    def loss(self) -> Tensor:
        """Mean divergence of the draft from the verifying model at the corrected places."""
        assert self._text is not None
        longest = max(each.place for each in self.waiting)
        lines = [(said + [0] * longest)[:longest] for said in self._text.said]
        reader = self._reader.beside(copy.deepcopy(self._prompt))
        logits = reader.run(torch.tensor(lines, device=self._learner.model.device))
        rows = torch.tensor([each.row for each in self.waiting], device=logits.device)
        places = torch.tensor([each.place - 1 for each in self.waiting], device=logits.device)
        q = logits[rows, places].log_softmax(-1)
        p = torch.stack([each.p for each in self.waiting]).to(q.device)[:, : q.shape[-1]]
        return F.kl_div(q, p, reduction="batchmean")
