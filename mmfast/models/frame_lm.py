"""Frames of several codebooks from any causal language model with a `depth` or `groups` head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmfast.core.errors import ModelError
from mmfast.decoding.codebook_choice import CodeChoice
from mmfast.decoding.codebook_plan import BlockPlan
from mmfast.decoding.codebook_types import Drafter
from mmfast.decoding.codebooks import FrameDecoder, pick
from mmfast.heads.code_base import CodeState
from mmfast.heads.depth import DepthHead
from mmfast.heads.groups import GroupsHead
from mmfast.models.stream_decoder import StreamDecoder
from mmfast.ops.delay import DelayRing, DelayState
from mmfast.ops.stream_kv import StreamKV


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
