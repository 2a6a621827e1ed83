"""The embedded speech codec: 16 kHz, 25 frames per second, two codes of 10 bits each.

Fitted to speech of espeak-ng by `mmfast.tiny.speech_codec`; 500 bits per second, pitch included.
Streams in both directions: codes are out with the last sample of their frame, sound one frame
behind its codes. Whole sound goes through the very steps a stream does.
"""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from mmfast.core.errors import ModelError
from mmfast.frontends.codecs.checks import check_codes, check_pcm
from mmfast.frontends.codecs.embedded_decoder import EmbeddedDecoder
from mmfast.frontends.codecs.embedded_encoder import EmbeddedEncoder
from mmfast.frontends.codecs.embedded_features import FRAME
from mmfast.frontends.codecs.embedded_network import VocoderNet

KIND = "mmfast-embedded-codec"
WEIGHTS, CONFIG, NET = "codec.safetensors", "config.json", "vocoder."


class EmbeddedCodec:
    """A `Codec` from its tables and its vocoder.

    Args:
        books: Entries `[Q, V, 100]`.
        bias: What an entry costs beside its distance `[Q, V]`.
        net: The vocoder's network.
    """

    sample_rate = 16_000
    hop = FRAME
    frame_rate = sample_rate / hop
    name = "embedded"

    def __init__(self, books: Tensor, bias: Tensor, net: VocoderNet) -> None:
        self.codebooks, self.size = int(books.shape[0]), int(books.shape[1])
        self.encoder = EmbeddedEncoder(books, bias)
        self.decoder = EmbeddedDecoder(books, net)

    def __repr__(self) -> str:
        return (
            f"<codec embedded: {self.sample_rate} Hz, {self.frame_rate:g} frames/s, "
            f"{self.codebooks} x {self.size}>"
        )

    def encode(self, pcm: Tensor) -> Tensor:
        """Sound `[B, n]` or `[n]` to codes `[B, Q, ceil(n / 640)]`; a last part is filled up.

        Raises:
            MediaError: Not finite floating-point samples of that shape.
        """
        one = isinstance(pcm, Tensor) and pcm.dim() == 1
        pcm = check_pcm(pcm[None] if one else pcm)
        state, codes = self.encoder.step(self.encoder.start(len(pcm)), pcm)
        return torch.cat([codes, self.encoder.finish(state)], 2)

    def decode(self, codes: Tensor) -> Tensor:
        """Codes `[B, Q, T]` or `[Q, T]` to sound `[B, T * 640]`, float32.

        Raises:
            MediaError: Not whole numbers of that shape and range.
        """
        one = isinstance(codes, Tensor) and codes.dim() == 2
        codes = check_codes(codes[None] if one else codes, self.codebooks, self.size)
        state, sound = self.decoder.step(self.decoder.start(len(codes)), codes)
        return torch.cat([sound, self.decoder.finish(state)], 1)[:, : codes.shape[2] * FRAME]


def embedded_codec_path() -> Path:
    """Directory of the codec inside the embedded speech model."""
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
        "sample_rate": EmbeddedCodec.sample_rate,
        "hop": FRAME,
        "codebooks": int(books.shape[0]),
        "size": int(books.shape[1]),
        "vocoder": {"width": net.enter.out_features, "fine": net.leave.in_features},
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def load_embedded(path: str | Path | None = None) -> EmbeddedCodec:
    """The embedded codec, or one that `save_embedded` wrote.

    Raises:
        ModelError: Files are missing, broken or of something else.
    """
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
