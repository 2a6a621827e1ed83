"""Choosing tokens for the rows of a batch, each in its own way."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mmfast.decoding.sampling import Sampling as Choice
from mmfast.decoding.sampling import draw, not_finite, process
from mmfast.models.towers import KINDS
from mmfast.serve.engine.failures import NoTokenError
from mmfast.serve.engine.parts import Draw

_GREEDY = 1e-5  # a temperature under it: logits divided by it are no numbers any more


class Chooser:
    """What `generate` of a model does to logits, without its state.

    A draw depends on the seed and on the number of the token alone, so an answer is the same
    whatever was decoded beside it.

    Args:
        model: A stock model.

    Attributes:
        ends: Token ids that end an answer.
        penalty: Repetition penalty of its generation config; 1 is none.
    """

    def __init__(self, model: Any) -> None:
        config = model.generation_config
        ends = config.eos_token_id
        self.ends = frozenset([ends] if isinstance(ends, int) else ends or ())
        self.penalty = float(getattr(config, "repetition_penalty", None) or 1.0)
        named = (getattr(model.config, f"{kind}_token_id", None) for kind in KINDS)
        blocked = [i for i in named if i is not None]  # an answer has no placeholders
        rows = model.get_output_embeddings().weight.shape[0]
        inside = sorted(i for i in {*blocked, *(config.suppress_tokens or ())} if i < rows)
        self._blocked = torch.tensor(inside, device=model.device, dtype=torch.int64)

    def choose(
        self, logits: Tensor, draws: Sequence[Draw], seen: Sequence[Tensor | None]
    ) -> list[int | Exception]:
        """A token per row; a row that has none gets an error.

        Args:
            logits: `[B, V]` float32; changed in place.
            draws: How.
            seen: Per row the token ids so far, where there is a penalty.
        """
        if len(self._blocked):
            logits[:, self._blocked] = -torch.inf
        for row, mine in enumerate(seen):
            if mine is not None and self.penalty != 1:
                old = logits[row, mine]
                old = torch.where(old < 0, old * self.penalty, old / self.penalty)
                logits[row, mine] = old
        peaks, best = logits.max(-1)
        fine, tokens = torch.isfinite(peaks).tolist(), best.tolist()
        found: list[int | Exception] = []
        for row, each in enumerate(draws):
            if not fine[row]:
                found.append(NoTokenError(not_finite()))
            elif each.sampling.temperature < _GREEDY:
                found.append(tokens[row])
            else:
                found.append(_drawn(logits[row], each))
        return found


def _drawn(logits: Tensor, how: Draw) -> int:
    given = how.sampling
    choice = Choice(temperature=given.temperature, top_p=given.top_p)
    chances = process(logits[None], choice, ((),))[0].softmax(-1)
    number = random.Random(f"{given.seed}/{how.step}").random()
    return int(draw(chances, torch.tensor(number, dtype=torch.float64, device=logits.device)))
