"""Fitting the embedded codec: books, prices, targets, a lesson."""

from __future__ import annotations

import math

import pytest
import torch
from embedded_codec_cases import codec, speech, voice

from mmfast.core.errors import MediaError
from mmfast.frontends.codecs.embedded.codec import quantise
from mmfast.frontends.codecs.embedded.features import VocoderNet
from mmfast.frontends.codecs.embedded.synthesis import white
from mmfast.tiny.speech import codec as speech_codec
from mmfast.tiny.speech.codec import (
    fit_book,
    fit_codec,
    fit_vocoder,
    make_lessons,
    spectral_loss,
    target_pitch,
)


def test_quantise_against_loops() -> None:
    draw = torch.Generator().manual_seed(0)
    frames = torch.randn(9, 5, generator=draw).double()
    books, bias = torch.randn(2, 7, 5, generator=draw), torch.rand(2, 7, generator=draw)
    for frame, codes in zip(frames, quantise(frames, books, bias), strict=True):
        left = frame
        for book, price, code in zip(books.double(), bias.double(), codes, strict=True):
            costs = [float((left - e).square().sum() + p) for e, p in zip(book, price, strict=True)]
            assert int(code) == min(range(7), key=costs.__getitem__)
            left = left - book[code]


def _surprise(codes: torch.Tensor) -> float:
    share = torch.bincount(codes).double() / len(codes)
    share = share[share > 0]
    return float(-(share * share.log()).sum())


def test_a_price_on_rare_entries_makes_codes_expected() -> None:
    draw = torch.Generator().manual_seed(3)
    frames = torch.randn(3000, 6, generator=draw)
    frames[:600] = 0.0
    surprise, error = [], []
    for price in (0.0, 0.5, 2.0):
        book, cost = fit_book(frames, 32, price, 1)
        assert not book[0].any()  # silence
        codes = quantise(frames.double(), book[None], cost[None])[:, 0]
        assert not codes[:600].any()
        surprise.append(_surprise(codes))
        error.append(float((frames - book[codes]).square().sum(1).mean()))
    assert surprise[0] > surprise[1] > surprise[2] and error[0] < error[1] < error[2]


def test_books_depend_on_the_seed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speech_codec, "ENTRIES", 12)
    corpus = [speech()[0], voice(0.6, 140, 120)]
    first, again, other = fit_codec(corpus, 1), fit_codec(corpus, 1), fit_codec(corpus, 2)
    assert first[0].shape == (2, 12, 100) and first[0].dtype == torch.half
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])
    assert not torch.equal(first[0], other[0])
    assert not first[0][0, :, 96:].any()  # book 0 knows nothing of pitch


def test_too_little_to_fit_to() -> None:
    with pytest.raises(MediaError, match="too few for 1024 entries"):
        fit_codec([speech()[0]])


def test_target_pitch_is_where_the_hop_ends() -> None:
    pcm = voice(0.64, 100, 200)
    pitch, voiced = target_pitch(pcm)
    assert pitch.shape == voiced.shape == (64,)
    wanted = torch.linspace(100, 200, 65)[1:].log() - math.log(110)
    assert (pitch - wanted)[8:58].abs().max() < 0.02
    assert not target_pitch(torch.zeros(640))[1].any()


def test_the_loss_knows_what_is_nearer() -> None:
    real = speech()[:, :8000]
    hiss = 0.01 * white(torch.arange(8000)).float()
    near, far = spectral_loss(real + hiss, real), spectral_loss(real + 10 * hiss, real)
    assert spectral_loss(real, real) == 0 and 0 < near < far


def test_a_vocoder_learns_and_depends_on_the_seed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speech_codec, "BATCH", 1)
    monkeypatch.setattr(speech_codec, "SEGMENT", 20)
    books, bias, corpus = codec().encoder.books, codec().encoder.bias, [speech()[0]]
    rows: list[dict[str, float]] = []
    nets = [
        fit_vocoder(corpus, books, bias, 0, 12, rows.append, VocoderNet(16, 16).apply(_same))
        for _ in range(2)
    ]
    for one, two in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        assert torch.equal(one, two)
    lessons = make_lessons(corpus, books, bias)
    start = torch.tensor([0])
    before = speech_codec.lesson_loss(VocoderNet(16, 16).apply(_same), lessons, start)
    after = speech_codec.lesson_loss(nets[0], lessons, start)
    both = [sound + speech_codec.PITCH_LOSS * pitch for sound, pitch in (before, after)]
    assert both[1] < both[0]


def _same(module: torch.nn.Module) -> None:
    """The same start whatever was drawn before."""
    for index, weight in enumerate(module.parameters(recurse=False)):
        draw = torch.Generator().manual_seed(index)
        weight.data = 0.1 * torch.randn(weight.shape, generator=draw)
