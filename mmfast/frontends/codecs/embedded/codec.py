"""The embedded speech codec: 16 kHz, 25 frames per second, two codes of 10 bits each.

Fitted to speech of espeak-ng by `mmfast.tiny.speech.codec`; 500 bits per second, pitch included.
It streams in both directions: codes are out with the last sample of their frame, sound one frame
after its codes, and whole sound takes the same steps as a stream. Two residual books hold the
codes. An entry costs its distance and a bias, which is larger the rarer the entry was in training
(entropy-constrained vector quantisation, P. Chou, T. Lookabaugh, R. Gray, 1989): codes become half
as surprising to a language model for one percent more error.
"""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from mmfast.core.errors import ModelError
from mmfast.frontends.codecs.base import StreamCodec, check_codes, check_pcm
from mmfast.frontends.codecs.embedded.features import (
    FRAME,
    LOOKAHEAD,
    PAST,
    STEPS,
    VocoderNet,
    features,
)
from mmfast.frontends.codecs.embedded.synthesis import RATE, SynthesisState, synthesise
from mmfast.frontends.codecs.stages import where_rows

_BLOCK = 250  # frames at once: bounded memory however long the sound


def quantise(frames: Tensor, books: Tensor, bias: Tensor) -> Tensor:
    """Codes `[..., Q]` of frames `[..., D]` float64: each book `[V, D]` codes what is left.

    The `bias` `[Q, V]` is the cost of an entry beside its squared distance.
    """
    codes = []
    for book, price in zip(books.double(), bias.double(), strict=True):
        cost = book.square().sum(-1) + price - 2.0 * frames @ book.mT  # [..., V]
        code = cost.argmin(-1)
        frames = frames - book[code]
        codes.append(code)
    return torch.stack(codes, -1)


class EncoderState(NamedTuple):
    """Samples that later frames need: 480 of the past and the begun frame, `[B, 480 + r]`."""

    tail: Tensor


class EmbeddedEncoder:
    """Stage from pcm `[B, n]` to codes `[B, Q, t]`; a frame is out with its last sample."""

    lookahead = 0

    def __init__(self, books: Tensor, bias: Tensor) -> None:
        self.books, self.bias = books.double(), bias.double()

    def start(self, batch: int = 1) -> EncoderState:
        """Return the state of streams without input."""
        return EncoderState(self.books.new_zeros(batch, PAST))

    def step(self, state: EncoderState, chunk: Tensor) -> tuple[EncoderState, Tensor]:
        """Add any number of samples `[B, n]`; return the frames that they complete, `[B, Q, t]`."""
        pcm = check_pcm(chunk, len(state.tail)).to(state.tail)
        heard = torch.cat([state.tail, pcm], 1)
        count = (heard.shape[1] - PAST) // FRAME
        codes = [self._block(heard, at, min(count, at + _BLOCK)) for at in range(0, count, _BLOCK)]
        empty = torch.zeros(len(heard), len(self.books), 0, dtype=torch.long, device=heard.device)
        return EncoderState(heard[:, count * FRAME :].clone()), torch.cat([empty, *codes], 2)

    def _block(self, heard: Tensor, start: int, stop: int) -> Tensor:
        frames = features(heard[:, start * FRAME : stop * FRAME + PAST])
        return quantise(frames, self.books, self.bias).mT  # [B, Q, t]

    def finish(self, state: EncoderState) -> Tensor:
        """Return the begun frame, filled with silence: `[B, Q, 1]`, or `[B, Q, 0]`."""
        rest = (PAST - state.tail.shape[1]) % FRAME
        return self.step(state, state.tail.new_zeros(len(state.tail), rest))[1]

    def reset(self, state: EncoderState, rows: Tensor) -> EncoderState:
        """Start streams `rows` (`[B]` bool) anew; their begun frame becomes silence."""
        if bool(rows.all()):
            return self.start(len(state.tail))
        return EncoderState(state.tail.masked_fill(rows.to(state.tail.device)[:, None], 0.0))


class DecoderState(NamedTuple):
    """State of `B` streams that later sound depends on."""

    tails: tuple[Tensor, ...]  # of the network, [B, past, W] each
    voice: SynthesisState
    waiting: Tensor  # [B] int64, frames until a stream sounds
    skipped: int  # frames of the batch that still give no sound


class EmbeddedDecoder:
    """Stage from codes `[B, Q, t]` to pcm `[B, n]`; sound comes one frame after its codes."""

    lookahead = LOOKAHEAD * FRAME  # samples

    def __init__(self, books: Tensor, net: VocoderNet) -> None:
        self.books = books.double()  # [Q, V, 100]
        self.net = net.double().eval().requires_grad_(False)

    def start(self, batch: int = 1) -> DecoderState:
        """Return the state of streams without input."""
        return DecoderState(
            tuple(self.net.tails(batch)),
            SynthesisState.start(batch, self.books),
            torch.full((batch,), LOOKAHEAD, device=self.books.device),
            LOOKAHEAD,
        )

    def features(self, codes: Tensor) -> Tensor:
        """Sum the entries that codes `[B, Q, T]` name, `[B, T, 100]`."""
        parts = [book[code] for book, code in zip(self.books, codes.unbind(1), strict=False)]
        return torch.stack(parts).sum(0)

    @torch.no_grad()
    def step(self, state: DecoderState, chunk: Tensor) -> tuple[DecoderState, Tensor]:
        """Add codes `[B, Q, t]`; return the sound that they make certain, `[B, n]` float32."""
        books, size, _ = self.books.shape
        codes = check_codes(chunk, books, size, len(state.waiting)).to(self.books.device)
        parts = []
        for block in codes.split(_BLOCK, 2):
            if block.shape[2]:
                state, sound = self._block(state, self.features(block))
                parts.append(sound)
        empty = self.books.new_zeros(len(chunk), 0)
        return state, torch.cat([empty, *parts], 1).float()

    def _block(self, state: DecoderState, frames: Tensor) -> tuple[DecoderState, Tensor]:
        count = frames.shape[1]
        pitch, points, tails = self.net(frames, list(state.tails))
        there = torch.arange(count, device=frames.device) >= state.waiting[:, None]  # [B, T]
        voice, sound = synthesise(state.voice, pitch, points, there.repeat_interleave(STEPS, 1))
        skip = min(state.skipped, count)
        waiting = (state.waiting - count).clamp(min=0)
        new = DecoderState(tuple(tails), voice, waiting, state.skipped - skip)
        return new, sound[:, skip * FRAME :]

    def finish(self, state: DecoderState) -> Tensor:
        """Return the sound of the last frame, `[B, 640]`, or nothing if there was no frame."""
        codes = torch.zeros(len(state.waiting), len(self.books), LOOKAHEAD, dtype=torch.long)
        return self.step(state, codes)[1]

    def reset(self, state: DecoderState, rows: Tensor) -> DecoderState:
        """Start streams `rows` (`[B]` bool) anew; the others go on."""
        if bool(rows.all()):
            return self.start(len(rows))
        rows = rows.to(self.books.device)
        mixed: DecoderState = where_rows(rows, self.start(len(rows)), state)
        return mixed._replace(skipped=state.skipped)


KIND = "mmfast-embedded-codec"
WEIGHTS, CONFIG, NET = "codec.safetensors", "config.json", "vocoder."


class EmbeddedCodec(StreamCodec):
    """The embedded codec from its entries `[Q, V, 100]`, their bias `[Q, V]` and its vocoder."""

    def __init__(self, books: Tensor, bias: Tensor, net: VocoderNet) -> None:
        stages = EmbeddedEncoder(books, bias), EmbeddedDecoder(books, net)
        super().__init__("embedded", RATE, FRAME, len(books), books.shape[1], *stages)


def embedded_codec_path() -> Path:
    """Return the directory of the codec inside the embedded speech model."""
    return Path(str(files("mmfast.assets").joinpath("models/tiny-speech/codec")))


def save_embedded(path: str | Path, books: Tensor, bias: Tensor, net: VocoderNet) -> None:
    """Write `config.json` and `codec.safetensors` (float16) to a directory."""
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    weights = {NET + name: value.half() for name, value in net.state_dict().items()}
    tensors = {"books": books.half(), "bias": bias.float(), **weights}
    save_file({name: t.contiguous() for name, t in tensors.items()}, str(folder / WEIGHTS))
    config = {
        "kind": KIND,
        "sample_rate": RATE,
        "hop": FRAME,
        "codebooks": int(books.shape[0]),
        "size": int(books.shape[1]),
        "vocoder": {"width": net.enter.out_features, "fine": net.leave.in_features},
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def load_embedded(path: str | Path | None = None) -> EmbeddedCodec:
    """Load the embedded codec, or one that `save_embedded` wrote; ModelError if it is broken."""
    folder = Path(path) if path is not None else embedded_codec_path()
    try:
        config: dict[str, Any] = json.loads((folder / CONFIG).read_text())
        if config.get("kind") != KIND:
            raise ModelError(f"{folder} holds no embedded codec (kind={config.get('kind')!r})")
        tensors = load_file(str(folder / WEIGHTS))
        net = VocoderNet(**config["vocoder"])
        own = {name[len(NET) :]: t for name, t in tensors.items() if name.startswith(NET)}
        net.load_state_dict(own)
        return EmbeddedCodec(tensors["books"], tensors["bias"], net)
    except (OSError, json.JSONDecodeError, SafetensorError, KeyError, RuntimeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ModelError(f"no embedded codec at {folder}: {reason}") from None
