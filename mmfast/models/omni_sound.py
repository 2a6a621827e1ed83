"""Qwen2.5-Omni's last stage on a stream: codes to sound, blocks of codes at a time."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mmfast.core.errors import ModelError
from mmfast.frontends.codecs.checks import check_codes
from mmfast.models.omni_flow import Flow, Guide, Past
from mmfast.models.omni_vocoder import vocoder_layers


class Blocks(NamedTuple):
    """What the stage holds between codes."""

    codes: Tensor  # [1, t] not yet sound
    noise: Tensor  # [1, t * repeats, mel] for them, as far as drawn
    random: Tensor  # state of the generator of noise
    past: list[Past] | None  # what the flow said of the block before
    vocoder: Any
    frames: int = 0  # mel frames that went into it
    certain: int = 0  # samples it is sure of
    given: int = 0  # samples given


class SoundStage:
    """Codes `[1, 1, t]` to sound `[1, n]`: a `core.speech.Stage` of one stream.

    Args:
        model: A `Qwen2_5OmniToken2WavModel`.
        voice: An entry of the model's `speaker_map`.
        ahead: Blocks that must have come behind the one that becomes sound. With enough of them
            (`exact_ahead`) the sound is the stock one; each costs a block of delay and of work.
        vocoder_ahead: Mel frames of future that the vocoder waits for; None: all its layers see
            (34 frames, 0.34 s, of the 7B model), which is exact.
        seed: Of the noise the flow starts from; the stock model's after `torch.manual_seed(seed)`.
        **options: `num_steps`, `guidance_scale`, `sway_coefficient` of the flow.

    Raises:
        ModelError: `ahead` is negative.
    """

    def __init__(
        self,
        model: Any,
        voice: Any,
        ahead: int = 1,
        vocoder_ahead: int | None = None,
        seed: int = 0,
        **options: Any,
    ) -> None:
        if min(ahead, vocoder_ahead or 0) < 0:
            wrong = f"ahead={ahead}, vocoder_ahead={vocoder_ahead}"
            raise ModelError(f"{wrong}: one is negative; give 0 or more of look-ahead")
        flow = model.code2wav_dit_model
        self.flow, self.layers = Flow(flow, **options), vocoder_layers(model.code2wav_bigvgan_model)
        self.ahead, self.vocoder_ahead, self.seed = ahead, vocoder_ahead, seed
        self.hop = math.prod(model.code2wav_bigvgan_model.config.upsample_rates)
        self.exact_ahead = self.flow.reach
        self.device = flow.proj_out.weight.device
        self.codes_per_block = flow.block_size // flow.repeats
        self.size = flow.text_embed.codec_embed.num_embeddings
        with torch.no_grad():
            self.guide: Guide = self.flow.guide(
                voice["cond"].to(self.device).float().reshape(1, -1),
                voice["ref_mel"].to(self.device).float().reshape(1, -1, flow.mel_dim),
            )
        self.passes = 0  # of the flow's transformer

    def start(self, batch: int = 1) -> Blocks:
        """The state before the first code."""
        if batch != 1:
            raise ModelError(f"batch is {batch}; the stage works on one stream, give each its own")
        generator = torch.Generator().manual_seed(self.seed)
        codes = torch.zeros(1, 0, dtype=torch.long, device=self.device)
        noise = torch.zeros(1, 0, self.flow.model.mel_dim, device=self.device)
        return Blocks(codes, noise, generator.get_state(), None, self.layers.start(1))

    @torch.no_grad()
    def step(self, state: Blocks, chunk: Tensor) -> tuple[Blocks, Tensor]:
        """Codes `[1, 1, t]` to the sound of the blocks they complete."""
        chunk = check_codes(chunk, 1, self.size, 1)[:, 0].to(self.device)
        state = state._replace(codes=torch.cat([state.codes, chunk], 1))
        outs = []
        while state.codes.shape[1] >= (self.ahead + 1) * self.codes_per_block:
            state, mel = self._flow(state, 1, self.ahead + 1)
            state, out = self._sound(state, mel)
            outs.append(out)
        return state, torch.cat(outs, 1) if outs else self.guide.speaker.new_zeros(1, 0)

    @torch.no_grad()
    def finish(self, state: Blocks) -> Tensor:
        """The sound of what is left, all of it ahead of itself."""
        out = self.guide.speaker.new_zeros(1, 0)
        if state.codes.shape[1]:
            blocks = -(-state.codes.shape[1] // self.codes_per_block)
            state, mel = self._flow(state, blocks, blocks)
            state, out = self._sound(state, mel)
        tail = self.layers.finish(state.vocoder)
        if tail is None:
            return out
        return torch.cat([out, tail[:, 0, state.given - state.certain :]], 1)

    def reset(self, state: Blocks, rows: Tensor) -> Blocks:
        """The stream begun anew, if its row says so."""
        return self.start() if bool(rows.all()) else state

    def _sound(self, state: Blocks, mel: Tensor) -> tuple[Blocks, Tensor]:
        """What the vocoder is sure of; with less look-ahead also what it would end with now."""
        vocoder, out = self.layers.step(state.vocoder, mel)
        out = out[:, 0]
        frames, certain = state.frames + mel.shape[-1], state.certain + out.shape[-1]
        until = certain
        if self.vocoder_ahead is not None:
            until = max(certain, state.given, (frames - self.vocoder_ahead) * self.hop)
            tail = self.layers.finish(vocoder)
            out = out if tail is None else torch.cat([out, tail[:, 0]], 1)
        out = out[:, state.given - state.certain : until - state.certain]
        given = state.given + out.shape[-1]
        return (
            state._replace(vocoder=vocoder, frames=frames, certain=certain, given=given),
            out,
        )

    def _flow(self, state: Blocks, give: int, window: int) -> tuple[Blocks, Tensor]:
        """Mel frames `[1, mel, n]` of the first `give` of `window` blocks."""
        model = self.flow.model
        codes = state.codes[:, : window * self.codes_per_block]
        state = self._draw(state, codes.shape[1] * model.repeats)
        noise = state.noise[:, : codes.shape[1] * model.repeats]
        mel, past = self.flow.solve(noise, codes, self.guide, state.past)
        self.passes += self.flow.stages
        n = min(give * model.block_size, mel.shape[1])
        rest = state._replace(
            codes=state.codes[:, n // model.repeats :], noise=state.noise[:, n:], past=past
        )
        return rest, mel[:, :n].transpose(1, 2)

    def _draw(self, state: Blocks, frames: int) -> Blocks:
        """Noise for so many frames, in the order in which the stock model draws it at once."""
        missing = frames - state.noise.shape[1]
        if missing <= 0:
            return state
        generator = torch.Generator()
        generator.set_state(state.random)
        more = torch.randn(1, missing, state.noise.shape[2], generator=generator)
        noise = torch.cat([state.noise, more.to(state.noise)], 1)
        return state._replace(noise=noise, random=generator.get_state())
