"""CSM (Sesame's conversational speech model) step by step: a prompt in, frame after frame out.

The stock `CsmForConditionalGeneration.generate` runs a nested `generate` of 31 calls per frame and
hands the sound out when all is done. Here a step gives the codes of one frame, the state is a
value, and the 31 codes are drafted at once where a drafter is given. No paper of its own: the
architecture is that of Moshi's depth transformer (arXiv 2410.00037) behind a Llama.
"""

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
from mmfast.models.depth_weights import csm_depth
from mmfast.models.stream_decoder import StreamDecoder
from mmfast.ops.stream_kv import StreamKV


@dataclass(frozen=True, eq=False)
class CsmState:
    """Where B streams stand.

    Attributes:
        kv: Of the backbone.
        hidden: `[B, D]` its last hidden state.
        codes: `[B, Q]` the frame it has not read yet; None behind a prompt.
        before: `[B, Q]` the last frame, for drafters that copy it.
        ended: `[B]` bool.
    """

    kv: StreamKV
    hidden: Tensor
    codes: Tensor | None
    before: Tensor
    ended: Tensor


@dataclass(frozen=True)
class Said:
    """Something said before, as context: it fixes the voice.

    Args:
        ids: `[T]` token ids of its text.
        codes: `[Q, t]` codes of its sound; None for the text that is to be said.
    """

    ids: Tensor
    codes: Tensor | None = None


class CsmSteps:
    """Steps of `CsmForConditionalGeneration`.

    Args:
        model: The stock model.
        choice: How codes are chosen (Sesame's own setting is temperature 0.9, top-k 50).
        drafter: Drafts the codes 1.. of a frame; None runs the depth transformer code by code.
        plan: How many codes a depth pass takes.
        window: Positions that it looks back; None for all.

    Raises:
        ModelError: Not a CSM.
    """

    def __init__(
        self,
        model: Any,
        *,
        choice: CodeChoice | None = None,
        drafter: Drafter | None = None,
        plan: BlockPlan | None = None,
        window: int | None = None,
    ) -> None:
        config = model.config
        if config.model_type != "csm" or not hasattr(model, "depth_decoder"):
            raise ModelError(
                f"{type(model).__name__} is no CSM; "
                "load a checkpoint with CsmForConditionalGeneration"
            )
        self.model, self.books = model, int(config.num_codebooks)
        self.choice = choice or CodeChoice()
        self.frames = FrameDecoder(csm_depth(model.depth_decoder), drafter, plan)
        self.decoder = StreamDecoder(model.backbone_model, window)
        self.end = int(config.codebook_eos_token_id)

    def embed(self, turns: Sequence[Said]) -> Tensor:
        """A conversation as the backbone reads it, `[T, D]`: text, frames and an end per turn."""
        device, parts = self.model.device, []
        for turn in turns:
            parts.append(self.model.embed_text_tokens(turn.ids.to(device)))
            if turn.codes is not None:
                last = turn.codes.new_full((self.books, 1), self.end)
                codes = torch.cat([turn.codes, last], dim=1).to(device)
                parts.append(self.model.backbone_model.embed_tokens(codes.T[None])[0])
        return torch.cat(parts)

    @torch.no_grad()
    def start(self, prompts: Sequence[Sequence[Said]]) -> CsmState:
        """Read a prompt per stream.

        Args:
            prompts: Per stream what was said before and, last, the text that is to be said.
        """
        rows = [self.embed(turns) for turns in prompts]
        longest = max(len(row) for row in rows)
        embeds = rows[0].new_zeros(len(rows), longest, rows[0].shape[1])
        real = torch.zeros(embeds.shape[:2], dtype=torch.bool, device=embeds.device)
        for at, row in enumerate(rows):
            embeds[at, longest - len(row) :] = row
            real[at, longest - len(row) :] = True
        kv, hidden = self.decoder.step(self.decoder.start(len(rows)), embeds, real)
        zeros = torch.zeros(len(rows), self.books, dtype=torch.long, device=embeds.device)
        return CsmState(kv, hidden[:, -1], None, zeros, zeros[:, 0].bool())

    @torch.no_grad()
    def step(self, state: CsmState) -> tuple[CsmState, Tensor]:
        """Say one frame.

        Returns:
            The next state, whose `ended` tells where speech is over, and codes `[B, Q]`; those
            of streams that have ended are not to be heard.
        """
        kv, hidden = state.kv, state.hidden
        if state.codes is not None:
            embeds = self.model.backbone_model.embed_tokens(state.codes[:, None])
            kv, out = self.decoder.step(kv, embeds)
            hidden = out[:, -1]
        first = pick(self.model.lm_head(hidden), self.choice)
        rest = self.frames.frame(hidden, first, state.before[:, 1:], self.choice)
        codes = torch.cat([first[:, None], rest], dim=1)
        ended = state.ended | (codes == self.end).all(1)
        return CsmState(kv, hidden, codes, codes, ended), codes
