"""Training of the replies: a small stock language model over text, on endless new conversations."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import LlamaForCausalLM

from mmfast.core.speech import Turn
from mmfast.models.speech.layout import SpeechLayout
from mmfast.models.speech.reply import FOLDER
from mmfast.tiny import training
from mmfast.tiny.speech.dialogue import dialogue
from mmfast.tiny.speech.model import continued, make_backbone, run_backbone

WIDTH, LAYERS, INNER = 128, 6, 384
TOKENS = 2400  # of a batch
EXAM = 300  # conversations of the evaluation half
ASKED = 0.25  # weight of a word that is asked, beside 1 of one in a reply
LOST = 0.06  # share of what is heard that lacks one of these words
SMALL = {"the", "is", "a", "what", "me", "of", "and", "what's", "please", "tell", "so", "to"}


def misheard(text: str, rng: np.random.Generator) -> str:
    """The text, now and then without one of its small words."""
    words = text.split()
    places = [i for i, word in enumerate(words) if word in SMALL]
    if places and rng.random() < LOST:
        del words[places[int(rng.integers(len(places)))]]
    return " ".join(words)


def lesson(layout: SpeechLayout, turns: list[Turn]) -> tuple[list[int], list[float]]:
    """Ids of a conversation, and how much it counts that each is predicted: 1 in replies.

    Words that are asked count a little: by them the ear chooses among words that sound alike.
    """
    ids, weights = list[int](), list[float]()
    for turn in turns:
        part = layout.history([(turn.role, turn.text)])
        ids += part
        whole = turn.text[-1] in ".?"  # else it was cut off
        weight = ASKED if turn.role == "user" else float(whole)
        weights += [0.0] + [weight] * (len(part) - 1)
    return ids, weights


def stack(lessons: list[tuple[list[int], list[float]]]) -> tuple[Tensor, Tensor]:
    """Ids and weights `[B, L]`, padded on the right."""
    length = max(len(ids) for ids, _ in lessons)
    ids, weights = (
        torch.zeros(len(lessons), length, dtype=kind) for kind in (torch.long, torch.float)
    )
    for row, (mine, each) in enumerate(lessons):
        ids[row, : len(mine)], weights[row, : len(mine)] = torch.tensor(mine), torch.tensor(each)
    return ids, weights


class ReplyTask(training.Task):
    """A model of replies on conversations, none of which comes twice."""

    parallel = True

    def __init__(
        self, layout: SpeechLayout, seed: int, rate: float, start: Path | None = None
    ) -> None:
        torch.manual_seed(seed)
        self.layout = layout
        self.lm: LlamaForCausalLM = (
            make_backbone(layout, WIDTH, LAYERS, INNER, codes=False)
            if start is None
            else continued(start / FOLDER, layout, SpeechLayout.load(start), codes=False)
        )
        self.optimiser = training.Optimiser.of(self.lm, (), rate)
        self.rng = np.random.default_rng([seed, 41, start is not None])
        exam = np.random.default_rng([seed, 42])
        self.exam = [lesson(layout, dialogue(exam, "eval")) for _ in range(EXAM)]

    def batches(self, step: int, done: float) -> list[tuple[Tensor, Tensor]]:
        """Two batches of new conversations."""
        return [self._batch() for _ in range(training.THREADS)]

    def _batch(self) -> tuple[Tensor, Tensor]:
        found, longest = list[tuple[list[int], list[float]]](), 0
        while longest * len(found) < TOKENS:
            turns = [
                Turn("user", misheard(turn.text, self.rng)) if turn.role == "user" else turn
                for turn in dialogue(self.rng)
            ]
            found.append(lesson(self.layout, turns))
            longest = max(longest, len(found[-1][0]))
        return stack(found)

    def loss(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, training.Figures]:
        """Mean loss over words by their weights, and the share of replies' words that is right."""
        ids, weights = batch
        losses, right = self._judge(ids, weights)
        weights = weights[:, 1:]
        loss = (losses * weights).sum() / weights.sum()
        replies = weights == 1
        reply, share = losses[replies].mean().item(), right[replies].float().mean().item()
        return loss, {"reply": [reply, share]}

    def _judge(self, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Loss of every token behind the first one where it counts, and whether it is right."""
        states, _ = run_backbone(self.lm, self.lm.model.embed_tokens(ids))
        chosen = weights[:, 1:] > 0
        logits, labels = self.lm.lm_head(states[:, :-1][chosen]), ids[:, 1:][chosen]
        losses = states.new_zeros(chosen.shape).masked_scatter(
            chosen, cross_entropy(logits, labels, reduction="none")
        )
        return losses, torch.zeros_like(chosen).masked_scatter(chosen, logits.argmax(-1) == labels)

    @torch.no_grad()
    def look(self) -> training.Figures:
        """Loss and share of words, whole conversations and words asked, in unseen ones."""
        ids, weights = stack(self.exam)
        losses, right = self._judge(ids, weights)
        replies, asked = weights[:, 1:] == 1, weights[:, 1:] == ASKED
        figures = [losses[replies].mean(), right[replies].float().mean()]
        figures += [(right | ~replies).all(1).float().mean(), losses[asked].mean()]
        return {"reply": [round(float(each), 4) for each in figures]}


def train_replies(
    out: Path,
    layout: SpeechLayout,
    minutes: float,
    seed: int,
    rate: float,
    log: training.Log,
    start: Path | None = None,
) -> None:
    """Train the replies of a speech model, from those of `start` on, and write them."""
    task = ReplyTask(layout, seed, rate, start)
    save = partial(training.save_half, task.lm, out / FOLDER)
    course = training.Course("replies", minutes, hold=0.5, watch=2)
    training.train(task, course, log, save)
