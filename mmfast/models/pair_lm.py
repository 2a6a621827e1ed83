"""A dialogue of two channels on any causal language model with a `pair` head, full duplex."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mmfast.decoding.codebook_choice import CodeChoice
from mmfast.decoding.codebooks import pick
from mmfast.heads.pair import PairHead
from mmfast.models.stream_decoder import StreamDecoder
from mmfast.ops.stream_kv import StreamKV


@dataclass(frozen=True, eq=False)
class PairState:
    """Where B dialogues stand; a value.

    Attributes:
        kv: Of the backbone, two entries per step.
        head: Of the head.
        next: `[B, 2]` what each channel is expected to say next.
    """

    kv: StreamKV
    head: StreamKV
    next: Tensor


class PairSteps:
    """Steps of a causal language model that reads and says one token per channel.

    Args:
        model: `…ForCausalLM` of transformers; its attention is that of the pair.
        head: Made for its hidden width.
        choice: How tokens are chosen.
        window: Steps that the model looks back; None for all.
    """

    def __init__(
        self,
        model: Any,
        head: PairHead,
        *,
        choice: CodeChoice | None = None,
        window: int | None = None,
    ) -> None:
        self.head = head
        self.choice = choice or CodeChoice()
        self.decoder = StreamDecoder(model.get_decoder(), window, width=2)

    @torch.no_grad()
    def start(self, codes: Tensor) -> PairState:
        """Read what both have said, `[B, 2, T]` with T at least 1."""
        batch = len(codes)
        blank = PairState(self.decoder.start(batch), self.head.init_state(batch), codes[:, :, 0])
        return self.read(blank, codes)

    @torch.no_grad()
    def read(self, state: PairState, codes: Tensor) -> PairState:
        """The state behind some more steps `[B, 2, n]` of both channels."""
        kv, hidden = self.decoder.step(state.kv, self.head.embed(codes))
        head, logits = self.head.logits(state.head, hidden)
        return PairState(kv, head, pick(logits[:, :, -1], self.choice))

    def step(self, state: PairState, user: Tensor) -> tuple[PairState, Tensor]:
        """Hear the user's token `[B]`, say the model's of the same step.

        Returns:
            The next state, and the model's token `[B]`: it was chosen before the user's was known.
        """
        said = state.next[:, 1]
        return self.read(state, torch.stack([user, said], dim=1)[:, :, None]), said


@dataclass(eq=False)
class Duplex:
    """A dialogue that runs ahead of the user: what they will say is forecast by their own channel.

    Where the forecast is right the answer of the next step is there before it is needed; where it
    is wrong the dialogue goes back to the last step that was heard. What is said is the same as
    without running ahead, as long as tokens are chosen greedily.

    Args:
        steps: The model; channel 0 is the user, channel 1 the model.
        state: Behind what both have said.

    Attributes:
        forecast: Steps run ahead.
        right: Of these, steps whose forecast came true for every stream.
    """

    steps: PairSteps
    state: PairState
    forecast: int = 0
    right: int = 0
    _ahead: list[tuple[Tensor, PairState]] = field(default_factory=list)

    def run_ahead(self, limit: int) -> None:
        """Use idle time: go on by forecasts until `limit` steps are ready."""
        last = self._ahead[-1][1] if self._ahead else self.state
        while len(self._ahead) < limit:
            user = last.next[:, 0]
            last, _ = self.steps.step(last, user)
            self._ahead.append((user, last))
            self.forecast += 1

    def hear(self, user: Tensor) -> Tensor:
        """The user's token `[B]` of this step in, the model's out."""
        said = self.state.next[:, 1]
        if self._ahead and bool((self._ahead[0][0] == user).all()):
            self.state = self._ahead.pop(0)[1]
            self.right += 1
        else:
            self._ahead.clear()
            self.state, _ = self.steps.step(self.state, user)
        return said
