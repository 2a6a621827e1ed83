"""How a stage of Qwen2.5-Omni picks its next token: stock processors, one stream, own seed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmfast.core.errors import ModelError


@dataclass(frozen=True)
class Picking:
    """Settings of `generate` under their names there; greedy unless `do_sample`."""

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 50
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    seed: int = 0


TALKER = Picking(True, 0.9, 40, 0.8, 1.05)  # as the stock talker speaks


class Picker:
    """The next token of one stream.

    Args:
        how: Settings.
        suppress: Tokens never picked.
        device: Where the logits are.

    Raises:
        ModelError: A setting is out of range.
    """

    def __init__(self, how: Picking, suppress: list[int], device: torch.device) -> None:
        self.how = how
        self.processors = _processors(how, suppress, device)
        self.generator = torch.Generator(device=device).manual_seed(how.seed)

    def __call__(self, ids: Tensor, logits: Tensor) -> int:
        """From what came before `[1, n]` and logits `[1, V]`."""
        scores = logits.float()
        for processor in self.processors:
            scores = processor(ids, scores)
        if not self.how.do_sample:
            return int(scores.argmax(-1))
        return int(torch.multinomial(scores.softmax(-1), 1, generator=self.generator))


def _processors(how: Picking, suppress: list[int], device: torch.device) -> list[Any]:
    """In the order in which `generate` applies them."""
    from transformers.generation import logits_process as stock

    made: list[Any] = []
    try:
        if how.repetition_penalty != 1.0:
            made.append(stock.RepetitionPenaltyLogitsProcessor(float(how.repetition_penalty)))
        if suppress:
            made.append(stock.SuppressTokensLogitsProcessor(suppress, device=str(device)))
        if how.do_sample:
            made.append(stock.TemperatureLogitsWarper(float(how.temperature)))
            made.append(stock.TopKLogitsWarper(how.top_k))
            made.append(stock.TopPLogitsWarper(float(how.top_p)))
    except ValueError as error:
        raise ModelError(f"sampling of speech: {' '.join(str(error).split())}") from error
    return made
