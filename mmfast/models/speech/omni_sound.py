"""Qwen2.5-Omni's last stage on a stream: codes to mel frames to sound, block by block.

The flow: a transformer gives the direction in which noise flows to a mel spectrogram, at every
stage of a Runge-Kutta solver. Its layers see their own block of frames, a few of them one block
back, a few one block ahead. What lies back is kept, exactly: keys and values of the last block, for
every stage. What lies ahead must have come: with `ahead` blocks of it the flow of a block is off by
what the blocks behind those would have said, less the more there are, and nothing once `ahead`
reaches stages x layers that look ahead. Paper: arXiv 2503.20215, section 2.4.

The vocoder, BigVGAN (arXiv 2206.04658), is convolutions that see both ways, and activations at
twice the rate between two low-pass filters. In pieces it is late by what they see of the future,
and equal to the stock one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from mmfast.core.errors import ModelError
from mmfast.frontends.codecs.base import check_codes
from mmfast.frontends.codecs.layers import (
    Capped,
    CodecLayer,
    Conv,
    ConvTranspose,
    Edge,
    LayerChain,
    Pointwise,
    Residual,
)
from mmfast.frontends.codecs.stages import stream
from mmfast.ops.attention import rotate

Past = dict[int, tuple[Tensor, Tensor]]  # layer -> keys and values [B, H, block, d]
Slope = Callable[[Tensor, Tensor], Tensor]  # of time and place


class FlowCondition(NamedTuple):
    """Conditions that hold for all of a stream: `[B, 1, ·]`, the unguided row second."""

    speaker: Tensor
    timbre: Tensor


class Flow:
    """The solver over a window of frames; its settings are those of the stock `sample`."""

    def __init__(
        self,
        model: Any,
        num_steps: int = 10,
        guidance_scale: float = 0.5,
        sway_coefficient: float | None = -1.0,
    ) -> None:
        self.model, self.scale = model, guidance_scale
        self.guided = guidance_scale >= 1e-5
        times = torch.linspace(0, 1, num_steps)
        if sway_coefficient is not None:
            times = times + sway_coefficient * (torch.cos(torch.pi / 2 * times) - 1 + times)
        self.times = times
        self.stages = 4 * (num_steps - 1)  # passes of the transformer per window
        self.reach = self.stages * sum(b.look_ahead_block for b in model.transformer_blocks)

    def guide(self, conditioning: Tensor, reference: Tensor) -> FlowCondition:
        """A voice: its vector `[1, E]` and a mel spectrogram of it `[1, n, mel]`."""
        timbre = self.model.input_embed.spk_encoder
        if not self.guided:
            return FlowCondition(conditioning[:, None], timbre(reference)[:, None])
        none = torch.zeros_like(reference)
        rows = torch.cat([conditioning, torch.zeros_like(conditioning)])
        return FlowCondition(rows[:, None], timbre(torch.cat([reference, none]))[:, None])

    def solve(
        self, noise: Tensor, codes: Tensor, guide: FlowCondition, past: list[Past] | None
    ) -> tuple[Tensor, list[Past]]:
        """Noise `[1, n, mel]` over whole blocks (the last may be short) to mel frames.

        `codes` are `[1, n / repeats]`; `guide` is the voice. `past` has, for every stage, what the
        layers gave of the block before, None: there is none. Returns mel frames `[1, n, mel]`, and
        for every stage keys and values of the first block.
        """
        kept: list[Past] = []
        words = self.model.text_embed(codes)
        if self.guided:
            words = torch.cat([words, self.model.text_embed(codes, drop_code=True)])

        def slope(t: Tensor, x: Tensor) -> Tensor:
            before = past[len(kept)] if past is not None else {}
            out, own = self._transform(x, words, guide, t.to(x), before)
            kept.append(own)
            if not self.guided:
                return out
            with_voice, without = out.chunk(2)
            return with_voice + (with_voice - without) * self.scale

        x = noise
        for start, stop in zip(self.times[:-1], self.times[1:], strict=True):
            x = x + _runge_kutta(slope, start, stop, x)
        return x, kept

    def _transform(
        self, x: Tensor, words: Tensor, guide: FlowCondition, time: Tensor, before: Past
    ) -> tuple[Tensor, Past]:
        """One pass of the transformer, and the keys and values that the next block reads."""
        model, size = self.model, self.model.block_size
        n = x.shape[1]
        rows = len(words)
        embedded = model.time_embed(time.repeat(rows))
        parts = (x.expand(rows, -1, -1), *(each.expand(-1, n, -1) for each in guide[1:]), words)
        hidden = model.input_embed.proj(torch.cat([*parts, guide.speaker.expand(-1, n, -1)], -1))
        turn = model.rotary_embed(hidden, torch.arange(size + n, device=x.device)[None])
        block = torch.arange(size + n, device=x.device) // size
        away = block[None] - block[size:, None]  # [n, size + n]
        own: Past = {}
        for i, layer in enumerate(model.transformer_blocks):
            old = before.get(i)
            seen = (away >= -layer.look_backward_block) & (away <= layer.look_ahead_block)
            hidden, keys = _layer(layer, hidden, embedded, turn, seen, old, size)
            if layer.look_backward_block:
                own[i] = (keys[0][:, :, :size], keys[1][:, :, :size])
        return model.proj_out(model.norm_out(hidden, embedded)), own


def _layer(
    layer: Any,
    x: Tensor,
    time: Tensor,
    turn: tuple[Tensor, Tensor],
    seen: Tensor,
    old: tuple[Tensor, Tensor] | None,
    size: int,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    attn = layer.attn
    normed, gate, shift, scale, gate_mlp = layer.attn_norm(x, emb=time)
    heads = (*x.shape[:2], attn.heads, -1)
    q, k, v = (f(normed).view(heads).transpose(1, 2) for f in (attn.to_q, attn.to_k, attn.to_v))
    keys, values, first = k, v, size
    if old is not None:
        keys, values, first = torch.cat([old[0], k], 2), torch.cat([old[1], v], 2), 0
    cos, sin = turn
    out = functional.scaled_dot_product_attention(
        _turn_first(q, cos[:, size:], sin[:, size:]),
        _turn_first(keys, cos[:, first:], sin[:, first:]),
        values,
        attn_mask=seen[:, first:],
    )
    out = attn.to_out[0](out.transpose(1, 2).flatten(2))
    x = x + gate[:, None] * out
    normed = layer.ff_norm(x) * (1 + scale[:, None]) + shift[:, None]
    return x + gate_mlp[:, None] * layer.ff(normed), (k, v)


def _turn_first(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions on the first head alone, as the checkpoint was trained; pairs interleave."""
    head = x[:, :1]
    pairs = torch.cat([head[..., 0::2], head[..., 1::2]], -1)
    return torch.cat([rotate(pairs, cos[:, None], sin[:, None]), x[:, 1:]], 1)


def _runge_kutta(slope: Slope, start: Tensor, stop: Tensor, x: Tensor) -> Tensor:
    """One step of the 3/8 rule: four slopes."""
    step = stop - start
    k1 = slope(start, x)
    k2 = slope(start + step / 3, x + step * k1 / 3)
    k3 = slope(start + step * 2 / 3, x + step * (k2 - k1 / 3))
    k4 = slope(stop, x + step * (k1 - k2 + k3))
    return (k1 + 3 * (k2 + k3) + k4) * step / 8


def vocoder_layers(model: Any) -> LayerChain:
    """Mel frames `[B, mel, t]` to sound `[B, 1, t * hop]`, by a BigVGAN of the stock model."""
    blocks = model.num_residual_blocks
    layers: list[CodecLayer] = [Pointwise(model.process_mel_spectrogram), stream(model.conv_pre)]
    for i, up in enumerate(model.ups):
        branches = [_block(each) for each in model.resblocks[i * blocks : (i + 1) * blocks]]
        layers += [stream(up[0]), Residual(*branches), Pointwise(lambda x: x / blocks)]
    layers += [_activation(model.activation_post), stream(model.conv_post)]
    return LayerChain([*layers, Pointwise(lambda x: x.clamp(-1.0, 1.0))])


def _block(module: Any) -> LayerChain:
    first, second = module.activations[::2], module.activations[1::2]
    parts = zip(first, module.convs1, second, module.convs2, strict=True)
    return LayerChain(
        [
            Residual(
                LayerChain([_activation(a), stream(wide), _activation(b), stream(narrow)]),
                Pointwise(torch.nn.Identity()),
            )
            for a, wide, b, narrow in parts
        ]
    )


def _activation(module: Any) -> LayerChain:
    """Up to twice the rate, the snake, and down again."""
    channels = module.act.alpha.shape[0]
    up, down = module.upsample, module.downsample
    raised = _filter(up.filter * up.ratio, channels, up.stride)
    spread = LayerChain([Edge(up.pad, up.pad), ConvTranspose(raised, up.pad_left, 0)])
    lowered = _filter(down.filter, channels, down.stride)
    return LayerChain(
        [
            Capped(spread, up.ratio),
            Pointwise(module.act),
            Conv(lowered, down.pad_left, down.pad_right, "replicate"),
        ]
    )


def _filter(taps: Tensor, channels: int, stride: int) -> SimpleNamespace:
    """The same taps for every channel, as a layer would hold them."""
    return SimpleNamespace(
        weight=taps.expand(channels, -1, -1).contiguous(),
        bias=None,
        stride=(stride,),
        dilation=(1,),
        groups=channels,
        kernel_size=(taps.shape[-1],),
    )


class Blocks(NamedTuple):
    """State of the stage between codes."""

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

    `voice` is an entry of the model's `speaker_map`. `ahead` blocks must have come behind the one
    that becomes sound; with enough of them (`exact_ahead`) the sound is the stock one, each costs a
    block of delay and of work. The vocoder waits for `vocoder_ahead` mel frames; None: all its
    layers see (34 frames, 0.34 s, of the 7B model), which is exact. `seed` is that of the noise the
    flow starts from, as the stock model's after `torch.manual_seed(seed)`; `options` are those of
    `Flow`.
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
            self.guide: FlowCondition = self.flow.guide(
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
        """Sound that the vocoder is sure of; with less look-ahead also its end as of now."""
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
        return (state._replace(vocoder=vocoder, frames=frames, certain=certain, given=given), out)

    def _flow(self, state: Blocks, give: int, window: int) -> tuple[Blocks, Tensor]:
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
