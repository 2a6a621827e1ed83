"""What training asks of the decoder's inside; the read-outs are thrown away, the keys stay."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot

from mmfast.tiny.stream.decoder import DecoderOutput
from mmfast.tiny.stream.lessons import StreamLesson
from mmfast.tiny.video.build import ASSISTANT
from mmfast.tiny.video.lessons import IGNORE

TOLD = (30, 10, 10, 4)  # name, tens, ones and corner of a fact
SUMMARY = 24  # from this patch on (the last two rows of six) a token has seen its frame


class FactHead(nn.Module):
    """The last tokens of a fact's frames must say what it is: name, number, corner."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.read = nn.Linear(width, sum(TOLD))

    def loss(self, x: Tensor, lesson: StreamLesson) -> Tensor:
        """Mean loss: states of the prefix `[B, 1 + N, D]`."""
        clip = torch.tensor(lesson.slots.clip)[lesson.frame]  # [N]
        told = lesson.facts[:, clip]  # [B, N, 4]
        owes = (lesson.spot >= SUMMARY) & (told[..., 0] >= 0)
        outs, label = self.read(x[:, 1:][owes]).split(TOLD, -1), told[owes]
        losses = [cross_entropy(out, label[:, i]) for i, out in enumerate(outs)]
        return torch.stack(losses).sum()


def frame_scores(outcome: DecoderOutput, lesson: StreamLesson) -> list[Tensor]:
    """Per layer the questions' mean queries on the frames' mean keys: `[B, Q, T]`, scaled."""
    member = one_hot(lesson.frame).float()  # [N, T]
    share = member / member.sum(0)
    packed = lesson.packed
    # The answer is not there yet when a session looks for frames.
    before = packed.within <= _ends(lesson).gather(1, packed.block.clamp(min=0))
    asks = (packed.block[..., None] == torch.arange(lesson.target.shape[1])) & before[..., None]
    weight = asks.float() / asks.sum(1, keepdim=True).clamp(min=1)  # [B, L, Q]
    scores = []
    for keys, queries in zip(outcome.keys, outcome.queries, strict=True):
        frames = share.T @ keys[:, 1:]  # [B, T, D]
        asked = weight.transpose(1, 2) @ queries  # [B, Q, D]
        scores.append(asked @ frames.transpose(1, 2) * (32**-0.5))
    return scores


def retrieval_loss(outcome: DecoderOutput, lesson: StreamLesson) -> tuple[Tensor, list[float]]:
    """Of all frames of a stream, those of the fact asked about must match best in each layer.

    Returns:
        The mean loss over layers, and per layer the share of questions whose best frame is right.
    """
    right, asks = _right(lesson)
    losses, hits = [], []
    for scores in frame_scores(outcome, lesson):
        logs = scores.log_softmax(-1).masked_fill(~right, float("-inf"))
        losses.append(-logs[asks].logsumexp(-1).mean())
        best = scores[asks].argmax(-1, keepdim=True)
        hits.append(float(right[asks].gather(1, best).float().mean()))
    return torch.stack(losses).mean(), hits


def found(outcome: DecoderOutput, lesson: StreamLesson, count: int) -> list[float]:
    """Per layer the share of questions with a right frame among the best `count`."""
    right, asks = _right(lesson)
    shares = []
    for scores in frame_scores(outcome, lesson):
        best = scores[asks].topk(count, -1).indices
        shares.append(float(right[asks].gather(1, best).any(-1).float().mean()))
    return shares


def _right(lesson: StreamLesson) -> tuple[Tensor, Tensor]:
    """Frames that answer each question `[B, Q, T]`, and which questions ask about a fact."""
    clip = torch.tensor(lesson.slots.clip)
    return lesson.target[..., None] - 1 == clip, lesson.target > 0


def _ends(lesson: StreamLesson) -> Tensor:
    """Place of the token that asks for an answer in each question: `[B, Q]`."""
    packed = lesson.packed
    questions = lesson.target.shape[1]
    ends = torch.zeros(len(packed.ids), questions, dtype=torch.long)
    marks = (packed.ids == ASSISTANT) & (packed.block >= 0)
    row, at = marks.nonzero(as_tuple=True)
    ends[row, packed.block[row, at]] = packed.within[row, at]
    return ends


__all__ = ["IGNORE", "FactHead", "found", "frame_scores", "retrieval_loss"]
