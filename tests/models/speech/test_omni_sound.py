"""Qwen2.5-Omni's codes to sound in blocks: the stock sound, once its look-ahead has come."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from codec_cases import deviation, in_pieces
from omni_models import CODES, omni
from torch import Tensor

from mmfast.core.speech import Stage
from mmfast.models.speech.omni_sound import SoundStage, vocoder_layers


def stock(codes: Tensor, seed: int, **options: Any) -> Tensor:
    """All at once; its noise comes from the global generator."""
    model, voice = omni().token2wav, omni().speaker_map["Chelsie"]
    torch.manual_seed(seed)
    with torch.no_grad():
        sound = model(codes, conditioning=voice["cond"], reference_mel=voice["ref_mel"], **options)
    return sound[None]


def stage(**options: Any) -> SoundStage:
    return SoundStage(omni().token2wav, omni().speaker_map["Chelsie"], **options)


def some(n: int, seed: int = 0) -> Tensor:
    return torch.randint(CODES, (1, n), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("size", [1, 7, 50])
def test_the_vocoder_in_pieces_is_the_stock_one(size: int) -> None:
    model = omni().token2wav.code2wav_bigvgan_model
    mel = torch.randn(1, 16, 50, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole = model(mel)
        pieces = in_pieces(vocoder_layers(model), mel, size)[0, 0]
    assert whole.std() > 0.1
    torch.testing.assert_close(pieces, whole, rtol=0, atol=2e-5)


@pytest.mark.parametrize("scale", [0.5, 0.0])
@pytest.mark.parametrize("n", [1, 8, 13])
def test_with_its_look_ahead_it_is_the_stock_sound(n: int, scale: float) -> None:
    options = {"num_steps": 2, "guidance_scale": scale}
    this = stage(ahead=4, seed=3, **options)
    assert isinstance(this, Stage) and this.exact_ahead == 4  # stages x layers that look ahead
    codes = some(n)
    whole = stock(codes, 3, **options)
    assert whole.std() > 0.1
    for sizes in ([1], [3, 5]):
        out = in_pieces(this, codes[:, None], sizes)
        torch.testing.assert_close(out, whole, rtol=0, atol=2e-5)


def test_with_less_it_is_off_by_less_and_less() -> None:
    codes = some(13)
    whole = stock(codes, 0, num_steps=4)
    decibels = []
    for ahead in (0, 1, 2):
        this = stage(ahead=ahead, num_steps=4)
        decibels.append(deviation(whole, in_pieces(this, codes[:, None], 1))[1])
    assert -20 > decibels[0] > decibels[1] + 10 > decibels[2] + 20


def test_what_lies_back_is_needed() -> None:
    """The planted fault: blocks each for itself, as if every one began the sound."""
    this = stage(ahead=4, num_steps=2)
    codes = some(13)
    solve = this.flow.solve
    this.flow.solve = lambda noise, codes, guide, past: solve(noise, codes, guide, None)  # type: ignore[method-assign]
    whole = stock(codes, 0, num_steps=2)
    assert deviation(whole, in_pieces(this, codes[:, None], 1))[1] > -60


@pytest.mark.slow
def test_the_vocoder_may_wait_less() -> None:
    codes = some(40)
    exact = in_pieces(stage(num_steps=2), codes[:, None], 1)
    worst = []
    for frames in (0, 8, 24):
        early = stage(num_steps=2, vocoder_ahead=frames)
        out = in_pieces(early, codes[:, None], 1)
        assert torch.equal(out, in_pieces(early, codes[:, None], [3, 7]))  # blocks decide
        worst.append(deviation(exact, out)[1])
        _, first = early.step(early.start(), codes[:, None, :22])
        assert first.shape[1] >= (20 * 2 - frames) * early.hop  # 10 blocks; it has not waited
    assert worst == sorted(worst, reverse=True) and worst[-1] < -40


def test_state_is_a_value_and_a_stream_can_begin_anew() -> None:
    this = stage(num_steps=2)
    codes = some(40)[:, None]
    state, _ = this.step(this.start(), codes[..., :30])
    _, first = this.step(state, codes[..., 30:])
    this.finish(state)
    _, again = this.step(state, codes[..., 30:])
    assert first.shape[1] and torch.equal(first, again)
    fresh = this.reset(state, torch.tensor([True]))
    assert torch.equal(this.step(fresh, codes)[1], this.step(this.start(), codes)[1])
    assert this.reset(state, torch.tensor([False])) is state


def test_bad_input() -> None:
    this = stage(num_steps=2)
    for codes, says in ((torch.tensor([[[77]]]), "code 77"), (torch.zeros(1, 1, 2), "float32")):
        with pytest.raises(ValueError, match=says):
            this.step(this.start(), codes)
    with pytest.raises(ValueError, match="ahead=-1"):
        stage(ahead=-1)
    with pytest.raises(ValueError, match="batch is 2"):
        this.start(2)
    assert this.finish(this.start()).shape == (1, 0)
