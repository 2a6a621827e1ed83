"""Speakers and listeners for tests: perfect ones, deaf ones, and a tiny random model."""

from types import SimpleNamespace

import numpy as np
import torch

from mmfast.core.speech import Sound
from mmfast.tiny.speech.dialogue import WORDS
from mmfast.tiny.speech.recordings import EspeakVoice, say
from mmfast.tiny.speech.text import PITCHES, SPEEDS, VOICE_NAMES

RATE = 16000


class PlainCodec:
    """Eight bits a sample: near enough to the sound to be understood."""

    sample_rate, frame_rate, hop, codebooks, size = RATE, 25.0, 640, 1, 256

    def encode(self, pcm):
        return ((pcm.clamp(-1, 1) + 1) * 127.5).round().long()[:, None]

    def decode(self, codes):
        return codes[:, 0].float() / 127.5 - 1


class Parrot:
    """Speaks like espeak-ng, eleven tokens a pass in raw drafts; `lisp` says other words there."""

    name, sample_rate, codec = "parrot", RATE, PlainCodec()

    def __init__(self, lisp=False, known=()):
        self.lisp, self.known, self.calls = lisp, list(known), []

    def speak(self, text, *, voice, rate, pitch, **how):
        self.calls.append((text, how))
        raw = how == {"verify": "none"}
        wrong = self.lisp and raw
        pcm = say("zero" if wrong else text, EspeakVoice(voice, rate, pitch)).pcm
        codes = torch.full((2, 6), int(wrong))
        per_pass = 11 if raw else 1
        middle = len(pcm) // 2
        yield Sound(pcm[:middle], RATE, text, codes[:, :3], 1, per_pass - 1, per_pass)
        yield Sound(pcm[middle:], RATE, "", codes[:, 3:], 1, per_pass - 1, per_pass)
        yield Sound(torch.zeros(0), RATE)

    def transcribe(self, pcm, rate=RATE):
        assert rate == RATE
        found = [text for key, text in self.known if key == fingerprint(pcm)]
        return found[0] if found else ""

    def reply(self, pcm, rate=RATE, history=(), **how):
        yield Sound(torch.zeros(0), RATE, heard="hello")
        yield from self.speak(
            "hello.", voice=VOICE_NAMES[0], rate=SPEEDS[0], pitch=PITCHES[0], **how
        )


def fingerprint(pcm):
    """Equal for equal sound."""
    return float(np.abs(pcm.numpy().astype(np.float64)).sum())


def random_speech_model(codes=8, books=2, modules=4):
    """What the benchmarks take of a `SpeechModel`, with a tiny random language model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from mmfast.models.decoder.backbone import Backbone, make_head
    from mmfast.models.speech.layout import SpeechLayout, specials, vocabulary

    torch.manual_seed(0)
    rows = vocabulary(WORDS, specials(4, 3, 3))
    layout = SpeechLayout(rows, books, codes, VOICE_NAMES, SPEEDS, PITCHES)
    config = LlamaConfig(
        vocab_size=layout.total, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=4096,
    )  # fmt: skip
    backbone = Backbone(LlamaForCausalLM(config).eval())

    heads = {name: make_head(name, backbone, modules=modules).eval() for name in ("mctp", "mtp")}
    return SimpleNamespace(backbone=backbone, layout=layout, heads=heads)
