"""Change of rate: the definition, torchaudio, scipy, and the same for any split."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmfast.core.errors import MediaError, MmfastError
from mmfast.core.speech import Stage
from mmfast.ops.audio import Resampler, resample

RATES = [(8000, 16000), (48000, 16000), (44100, 16000), (192000, 16000), (16000, 24000)]
RATES += [(22050, 16000), (16000, 44100), (44101, 16000), (11025, 8000), (16000, 16000)]


def noise(samples: int, batch: int = 1, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 0.3 * torch.randn(batch, samples, generator=generator)


def tone(hertz: float, rate: int, samples: int) -> torch.Tensor:
    at = torch.arange(samples, dtype=torch.float64)
    return torch.sin(2 * math.pi * hertz * at / rate)[None].float()


def by_hand(pcm: torch.Tensor, source: int, rate: int, j: int) -> float:
    """One output from the definition, over all inputs."""
    cutoff = min(source, rate) * 0.95 / source
    total = 0.0
    for i, x in enumerate(pcm.tolist()):
        away = (i - j * source / rate) * cutoff
        if abs(away) < 16:
            sinc = math.sin(math.pi * away) / (math.pi * away) if away else 1.0
            total += x * cutoff * sinc * math.cos(math.pi * away / 32) ** 2
    return total


@pytest.mark.parametrize(("source", "rate"), RATES[:-1])
def test_outputs_follow_the_definition(source: int, rate: int) -> None:
    pcm = noise(1001)
    out = resample(pcm, source, rate)
    assert out.shape == (1, math.ceil(1001 * rate / source))
    for j in {0, 1, out.shape[1] // 2, out.shape[1] - 1}:
        assert float(out[0, j]) == pytest.approx(by_hand(pcm[0], source, rate, j), abs=1e-6)


@pytest.mark.parametrize(("source", "rate"), [r for r in RATES if r[0] != 44101])
def test_equals_torchaudio_with_its_settings(source: int, rate: int) -> None:
    functional = pytest.importorskip("torchaudio.functional")
    pcm = noise(source // 5 + 3, batch=2).double()
    for zeros in (6, 16):
        ours = resample(pcm, source, rate, zeros=zeros, rolloff=0.99)
        theirs = functional.resample(pcm, source, rate, lowpass_filter_width=zeros)
        torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=0)


def test_near_scipy_inside_the_band() -> None:
    signal = pytest.importorskip("scipy.signal")
    pcm = tone(1000, 48000, 9600) + 0.5 * tone(3100, 48000, 9600)
    theirs = torch.from_numpy(signal.resample_poly(pcm[0].double().numpy(), 1, 3)).float()
    gap = (resample(pcm, 48000, 16000)[0] - theirs)[100:-100].abs().max()
    assert float(gap) < 5e-3


def test_what_fits_the_band_passes_and_the_rest_does_not() -> None:
    def level(hertz: float) -> float:
        out = resample(tone(hertz, 48000, 48000), 48000, 16000)[0, 200:-200]
        return 20 * math.log10(float(out.square().mean().sqrt()) * math.sqrt(2))

    assert all(abs(level(f)) < 0.4 for f in (100, 1000, 4000, 7000))
    assert all(level(f) < -50 for f in (9000, 12000, 20000))


@settings(max_examples=60)
@given(
    st.sampled_from(RATES),
    st.lists(st.sampled_from([0, 1, 2, 17, 160, 441, 1000, 3001]), max_size=8),
)
def test_any_split_gives_the_same_sound(rates: tuple[int, int], sizes: list[int]) -> None:
    stage = Resampler(*rates)
    assert isinstance(stage, Stage)
    pcm = noise(sum(sizes), batch=2)
    pcm[1] = tone(440, rates[0], sum(sizes))[0]  # whose outputs pass through zero
    whole = resample(pcm, *rates)
    state, out = stage.start(2), []
    for chunk in pcm.split(sizes, dim=-1) if sizes else ():
        before = state.tail.clone()
        following, new = stage.step(state, chunk)
        assert torch.equal(state.tail, before)  # a state is a value
        state = following
        out.append(new)
        got = torch.cat(out, dim=1)
        assert torch.equal(got, whole[:, : got.shape[1]])  # a prefix of the whole
    out.append(stage.finish(state))
    assert torch.equal(torch.cat(out, dim=1), whole)


def test_outputs_that_cancel_to_nothing_are_the_same_too() -> None:
    """A tone passes through zero, where sums in another order would leave another residue."""
    at = torch.arange(551, dtype=torch.float64) / 8000
    pcm = (0.4 * torch.sin(2 * math.pi * 440 * at)).float()[None]
    for source, rate in ((8000, 16000), (8000, 24000), (48000, 16000), (44100, 16000)):
        stage, whole = Resampler(source, rate), resample(pcm, source, rate)
        for sizes in ([100, 441, 10], [300, 251]):
            state, out = stage.start(1), []
            for chunk in pcm.split(sizes, dim=-1):
                state, new = stage.step(state, chunk)
                out.append(new)
            assert torch.equal(torch.cat([*out, stage.finish(state)], dim=1), whole)


@pytest.mark.parametrize(("source", "rate"), RATES)
def test_the_delay_is_as_stated(source: int, rate: int) -> None:
    stage = Resampler(source, rate)
    for samples in (source // 50, source // 3):
        _, out = stage.step(stage.start(1), noise(samples))
        waits = samples / source - out.shape[1] / rate
        assert waits <= stage.delay + 1 / rate + 1e-9
    assert stage.delay <= 0.0022


def test_memory_of_a_stream_does_not_grow() -> None:
    stage = Resampler(44100, 16000)
    state = stage.start(1)
    for _ in range(50):
        state, _ = stage.step(state, noise(883))
    assert state.tail.shape[1] < 200
    assert state.tail.untyped_storage().nbytes() < 1000


def test_one_stream_of_a_batch_starts_anew() -> None:
    stage = Resampler(48000, 16000)
    state, _ = stage.step(stage.start(2), noise(9600, batch=2))
    state = stage.reset(state, torch.tensor([False, True]))
    later = noise(9600, batch=2, seed=1)
    behind, out = stage.step(state, later)
    fresh = resample(later[1:], 48000, 16000)
    owed = 9600 // 3 - state.given
    mine = torch.cat([out, stage.finish(behind)], dim=1)[1:, owed:]
    assert torch.equal(mine, fresh)
    state, _ = stage.step(stage.start(2), later[:, :100])
    with pytest.raises(MmfastError, match="whole periods"):
        stage.reset(state, torch.tensor([True, False]))
    assert stage.reset(state, torch.tensor([True, True])).heard == 0


@pytest.mark.parametrize("rate", [0, -8000, 999, 10**9, 16000.5, "16000", None, True, math.nan])
def test_what_is_no_rate(rate: object) -> None:
    with pytest.raises(MediaError, match="no sampling rate"):
        resample(noise(10), rate, 16000)  # type: ignore[arg-type]
