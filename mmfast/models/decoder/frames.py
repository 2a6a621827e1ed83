"""Frames of several codebooks from any causal language model with a `depth` or `groups` head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mmfast.core.errors import ModelError
from mmfast.decoding.codebooks import BlockPlan, CodeChoice, Drafter, FrameDecoder, pick
from mmfast.heads.code_base import CodeState
from mmfast.heads.depth import DepthHead
from mmfast.heads.groups import GroupsHead
from mmfast.heads.pair import PairHead
from mmfast.models.decoder.stream import StreamDecoder
from mmfast.ops.codebooks import DelayRing, DelayState
from mmfast.ops.stream_cache import StreamKV


@dataclass(frozen=True, eq=False)
class FrameState:
    """Where B streams stand; a value.

    Attributes:
        kv: Of the backbone.
        hidden: `[B, D]` its last hidden state.
        head: Of the head.
        ring: Codes on their way to the frame they belong to.
        codes: `[B, K]` of the last step, not read by the backbone yet; None behind a prompt.
    """

    kv: StreamKV
    hidden: Tensor
    head: CodeState
    ring: DelayState
    codes: Tensor | None = None


class FrameSteps:
    """Steps of a causal language model whose every step says one code per codebook.

    Args:
        model: `…ForCausalLM` of transformers.
        head: Made for its hidden width.
        choice: How codes are chosen.
        drafter: For a depth head: drafts all codes of a step; None says them one by one.
        plan: For a depth head: how many codes a pass takes.
        window: Positions that the model looks back; None for all.

    Raises:
        ModelError: A drafter for a head that says all codes at once anyway.
    """

    def __init__(
        self,
        model: Any,
        head: DepthHead | GroupsHead,
        *,
        choice: CodeChoice | None = None,
        drafter: Drafter | None = None,
        plan: BlockPlan | None = None,
        window: int | None = None,
    ) -> None:
        if drafter is not None and not isinstance(head, DepthHead):
            raise ModelError(
                "a groups head says all codes of a step at once and takes no drafter; "
                "leave it out, or use a depth head"
            )
        self.model, self.head = model, head
        self.choice = choice or CodeChoice()
        self.decoder = StreamDecoder(model.get_decoder(), window)
        self.frames = None
        if isinstance(head, DepthHead):
            self.frames = FrameDecoder(head, drafter, plan)
        self.ring = DelayRing(head.delays, head.size)
        self.lags = torch.tensor(head.delays, device=head.inputs.offsets.device)

    @torch.no_grad()
    def start(self, prompts: Sequence[Tensor]) -> FrameState:
        """Read a prompt of token ids `[T]` per stream, of any lengths."""
        longest = max(len(ids) for ids in prompts)
        ids = prompts[0].new_zeros(len(prompts), longest)
        real = torch.zeros_like(ids, dtype=torch.bool)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = prompt
            real[row, longest - len(prompt) :] = True
        embeds = self.model.get_input_embeddings()(ids)
        kv, hidden = self.decoder.step(self.decoder.start(len(ids)), embeds, real)
        head = self.head.init_state(len(ids))
        return FrameState(kv, hidden[:, -1], head, self.ring.start(len(ids), ids.device))

    @torch.no_grad()
    def step(self, state: FrameState) -> tuple[FrameState, Tensor, Tensor]:
        """Say one step.

        Returns:
            The next state, the newest whole frame `[B, K]`, and `[B]` bool where there is one
            (behind a prompt the longest delay passes first).
        """
        kv, hidden = state.kv, state.hidden
        if state.codes is not None:
            read = state.codes.masked_fill(state.ring.seen[:, None] <= self.lags, self.head.size)
            kv, out = self.decoder.step(kv, self.head.inputs(read)[:, None])
            hidden = out[:, -1]
        head, codes = self._say(state.head, hidden)
        ring, frame, whole = self.ring.gather(state.ring, codes)
        return FrameState(kv, hidden, head, ring, codes), frame, whole

    def _say(self, state: CodeState, hidden: Tensor) -> tuple[CodeState, Tensor]:
        if self.frames is None:
            assert isinstance(self.head, GroupsHead)
            return self.head.draft(state, hidden, lambda logits: pick(logits, self.choice))
        assert isinstance(self.head, DepthHead)
        before, first = state.codes[:, -1], self.head.fronts(hidden)
        codes = self.frames.frame(hidden, first, before, self.choice)
        return CodeState(torch.cat([state.codes, codes[:, None]], dim=1)[:, -16:]), codes


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
