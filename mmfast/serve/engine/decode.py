"""Decoder: one token for every running answer per step, in one pass."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmfast.serve.engine.base import Sampling
from mmfast.serve.engine.parts import Draw, Filled
from mmfast.serve.engine.prefill import check_batches, logits
from mmfast.serve.engine.sample import Chooser
from mmfast.serve.engine.slots import RowCache, Slots


@dataclass(eq=False)
class _Answer:
    key: Hashable
    sampling: Sampling
    token: int
    step: int
    position: list[int]  # [A] of the token that is read next
    seen: Tensor | None


class Decoder:
    """Answers that run.

    Args:
        model: A stock model of full-attention layers.
        slots: Answers at once.

    Attributes:
        slots: Their keys and values.
        chooser: How tokens are chosen.

    Raises:
        ModelError: Its rows cannot be at different lengths in one pass.
    """

    def __init__(self, model: Any, slots: int = 16) -> None:
        check_batches(model)
        self.decoder, self._output = model.get_decoder(), model.get_output_embeddings()
        self._table = self.decoder.get_input_embeddings()
        self.chooser = Chooser(model)
        self.slots = Slots(len(self.decoder.layers), slots)
        self._rows: list[_Answer] = []

    def __len__(self) -> int:
        return len(self._rows)

    def first(self, filled: Filled, sampling: Sampling) -> int:
        """The first token of an answer.

        Raises:
            ModelError: There is none to choose.
        """
        found = self.chooser.choose(filled.logits[None].clone(), [Draw(sampling)], [filled.seen])
        if isinstance(found[0], Exception):
            raise found[0]
        return found[0]

    @torch.inference_mode()
    def admit(self, key: Hashable, filled: Filled, token: int, sampling: Sampling) -> None:
        """Take an answer in behind its first token.

        Args:
            key: Its name.
            filled: Its prompt.
            token: The first token.
            sampling: How the others are chosen; the seed is set.
        """
        seen = filled.seen
        if seen is not None:
            seen = torch.cat([seen, seen.new_tensor([token])]).unique()
        self.slots.add(filled.kv, filled.length + sampling.max_tokens)
        row = _Answer(key, sampling, token, 1, filled.position.tolist(), seen)
        self._rows.append(row)

    @torch.inference_mode()
    def release(self, key: Hashable) -> bool:
        """Let an answer go; its memory is free at once. Whether it was there."""
        for number, row in enumerate(self._rows):
            if row.key == key:
                self.slots.remove(number)
                self._rows[number] = self._rows[-1]
                self._rows.pop()
                return True
        return False

    @torch.inference_mode()
    def step(self) -> list[tuple[Hashable, int | Exception]]:
        """The next token of every answer, or why there is none."""
        rows = self._rows
        if not rows:
            return []
        device = self._table.weight.device
        tokens = torch.tensor([[row.token] for row in rows], device=device)
        places = [list(axis) for axis in zip(*(row.position for row in rows), strict=True)]
        positions = torch.tensor(places, device=device)[..., None]  # [A, B, 1]
        cache = RowCache(self.slots)
        output = self.decoder(
            inputs_embeds=self._table(tokens),
            attention_mask=cache.mask,
            position_ids=positions if len(positions) > 1 else positions[0],
            past_key_values=cache,
            use_cache=True,
        )
        self.slots.lengths = [length + 1 for length in self.slots.lengths]
        found = logits(self._output, self.decoder, output.last_hidden_state[:, -1])
        draws = [Draw(row.sampling, row.step) for row in rows]
        chosen = self.chooser.choose(found, draws, [row.seen for row in rows])
        for row, token in zip(rows, chosen, strict=True):
            row.step, row.position = row.step + 1, [place + 1 for place in row.position]
            if isinstance(token, int):
                row.token = token
                if row.seen is not None:
                    row.seen = torch.cat([row.seen, row.seen.new_tensor([token])]).unique()
        return [(row.key, token) for row, token in zip(rows, chosen, strict=True)]
