"""Mimi in pieces: the stock decoder is wrong there, ours is not, for ever and in bounded memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from codec_cases import in_pieces, mimi, noise, some_codes
from torch import Tensor
from transformers.cache_utils import DynamicCache

from mmfast.frontends.codecs import checkpoints, layers
from mmfast.frontends.codecs.stages import tree_map
from mmfast.models.loading import load_codec


def stock_pieces(model: Any, codes: Tensor, size: int) -> Tensor:
    """The stock decoder, piece by piece, with the cache it has."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        outs = [
            model.decode(piece, decoder_past_key_values=cache).audio_values[:, 0]
            for piece in codes.split(size, -1)
        ]
    return torch.cat(outs, -1)


def worst(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_stock_pieces_are_wrong_and_ours_right(size: int) -> None:
    model, codec = mimi(), load_codec(mimi())
    codes = some_codes(codec, 2, 42)
    with torch.no_grad():
        whole = model.decode(codes).audio_values[:, 0]
    assert worst(stock_pieces(model, codes, size), whole) > 0.5 * float(whole.std())
    assert worst(in_pieces(codec.decoder, codes, size), whole) < 2e-5


def test_the_check_sees_each_kind_of_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the overlap, with the bias twice, or with a window one short, it is wrong."""
    codec = load_codec(mimi())
    codes = some_codes(codec, 1, 40)
    whole = codec.decode(codes)
    step = layers.ConvTranspose.step
    faults: list[tuple[Any, str, Any]] = [
        (
            layers.ConvTranspose,
            "step",
            lambda self, s, x: step(self, s._replace(tail=torch.zeros_like(s.tail)), x),
        ),
        (
            layers.ConvTranspose,
            "step",
            lambda self, s, x: step(self, s._replace(tail=self._biased(s.tail)), x),
        ),
        (
            checkpoints.Transformer,
            "_mask",
            lambda self, seen, places, n: torch.ones(1, 1, n, len(places), dtype=torch.bool),
        ),
    ]
    for owner, name, fault in faults:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fault)
            assert worst(in_pieces(codec.decoder, codes, 3), whole) > 1e-2, name


def test_memory_does_not_grow_and_positions_do_not_run_out() -> None:
    """Four thousand positions through a window of twelve: as exact at the end as at the start."""
    codec = load_codec(mimi())
    codes = some_codes(codec, 1, 2000)
    state, sizes, outs = codec.decoder.start(), set(), []
    for at in range(0, 2000, 20):
        state, out = codec.decoder.step(state, codes[..., at : at + 20])
        outs.append(out)
        count: list[int] = []
        tree_map(lambda x, count=count: count.append(x.numel()) or x, state)
        sizes.add(sum(count))
    assert len(sizes) == 1
    pieces = torch.cat(outs, -1)
    with torch.no_grad():
        # the last pieces again from a start inside: what lies before the layers' reach is forgotten
        late = mimi().decode(codes[..., 1900:]).audio_values[:, 0]
        whole = mimi().decode(codes).audio_values[:, 0]
    assert worst(pieces, whole) < 1e-4  # the stock positions lose digits as they grow
    reach = 30 * codec.hop
    assert worst(pieces[:, 1900 * codec.hop + reach :], late[:, reach:]) < 2e-5


def test_fewer_books() -> None:
    """Moshi uses 8 of 32: the semantic one and the first acoustic ones."""
    model = mimi()
    codec = load_codec(model, codebooks=2)
    pcm = noise(1, 20 * codec.hop)
    with torch.no_grad():
        theirs = model.encode(pcm[:, None], num_quantizers=2).audio_codes
        sound = model.decode(theirs).audio_values[:, 0]
    assert codec.codebooks == 2 and torch.equal(codec.encode(pcm), theirs)
    assert worst(in_pieces(codec.decoder, theirs, 3), sound) < 2e-5
    full = load_codec(model)
    assert worst(full.decode(theirs), sound) < 2e-5  # a codec of 4 takes codes of 2


def test_a_half_is_enough() -> None:
    from transformers import MimiModel

    config = mimi().config.to_dict() | {"encoder_config": None}
    half = MimiModel(type(mimi().config)(**config)).eval()
    half.load_state_dict(mimi().state_dict(), strict=False)
    codec = load_codec(half)
    codes = some_codes(codec, 1, 10)
    assert worst(codec.decode(codes), load_codec(mimi()).decode(codes)) == 0
    with pytest.raises(ValueError, match="no encoder; load the whole checkpoint"):
        codec.encode(noise(1, 100))
