"""DAC with less look-ahead than it wants: the same for any split, and off by what is measured."""

from __future__ import annotations

import pytest
import torch
from codec_cases import dac, deviation, in_pieces, noise, some_codes

from mmfast.models.loading import load_codec

FULL = 19  # frames that the tiny one's decoder sees ahead: 149 samples of 8


@pytest.mark.parametrize("lookahead", [0, 2])
def test_any_split_gives_the_same(lookahead: int) -> None:
    codec = load_codec(dac(), lookahead=lookahead)
    codes, pcm = some_codes(codec, 1, 9), noise(1, 9 * codec.hop - 3)
    whole = codec.decode(codes)
    assert whole.shape == (1, 9 * codec.hop)
    for size in (1, 7):
        assert (in_pieces(codec.decoder, codes, size) - whole).abs().max() < 2e-5
    heard = codec.encode(pcm)
    assert heard.shape == (1, codec.codebooks, 9)
    for sizes in ([3, 50],):
        assert torch.equal(in_pieces(codec.encoder, pcm, sizes), heard)


def test_it_is_late_by_the_lookahead_alone() -> None:
    codec = load_codec(dac(), lookahead=2)
    assert codec.decoder.lookahead == 2 * codec.hop and codec.decoder.startup == 3
    _, out = codec.decoder.step(codec.decoder.start(), some_codes(codec, 1, 10))
    assert out.shape[-1] == 8 * codec.hop


def test_the_error_falls_with_the_lookahead_to_none() -> None:
    """Decibels of error below the signal; with all it wants it is exact."""
    codec = load_codec(dac())
    codes = some_codes(codec, 1, 30)
    whole = codec.decode(codes)
    errors = [
        deviation(whole, load_codec(dac(), lookahead=n).decode(codes)) for n in (0, 2, 6, FULL)
    ]
    decibels = [each[1] for each in errors]
    assert decibels == sorted(decibels, reverse=True) and decibels[0] > -10 > decibels[2]
    assert errors[-1][0] < 2e-5


def test_a_stream_begins_anew_beside_others() -> None:
    codec = load_codec(dac(), lookahead=2)
    codes = some_codes(codec, 2, 20)
    state, first = codec.decoder.step(codec.decoder.start(2), codes[..., :10])
    state = codec.decoder.reset(state, torch.tensor([False, True]))
    state, second = codec.decoder.step(state, codes[..., 10:])
    out = torch.cat([first, second, codec.decoder.finish(state)], -1)
    n = 20 * codec.hop
    assert (out[:1, :n] - codec.decode(codes[:1])).abs().max() < 2e-5
    fresh = codec.decode(codes[1:, :, 10:])
    assert (out[1:, -fresh.shape[-1] :] - fresh).abs().max() < 2e-5


def test_a_negative_one_is_refused() -> None:
    with pytest.raises(ValueError, match="lookahead=-1 is negative"):
        load_codec(dac(), lookahead=-1)
