"""Where somebody speaks: silero's network against its published graph, splits, batches, noise."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmfast.core.errors import MmfastError, ModelError, SpecError
from mmfast.core.speech import Stage
from mmfast.frontends.audio import activity
from mmfast.frontends.audio.activity import (
    WINDOW,
    Gate,
    SpeechGateState,
    VoiceActivity,
)
from mmfast.frontends.audio.turns import TurnCutter
from mmfast.tiny.speech import recordings

SILERO = importlib.util.find_spec("silero_vad") is not None
needs_silero = pytest.mark.skipif(not SILERO, reason="silero-vad is not installed")
pytestmark = needs_silero
ENGINES = ("silero", "energy")


def noise(samples: int, level: float = 0.01, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return level * torch.randn(samples, generator=generator)


@pytest.fixture(scope="module")
def spoken() -> tuple[torch.Tensor, int, int]:
    """Faint noise, a sentence, faint noise; where its sound begins and ends."""
    pcm = recordings.say("which way does the red circle move", recordings.EspeakVoice()).pcm
    loud = (pcm.abs() > 0.01).nonzero()[:, 0]
    whole = torch.cat([torch.zeros(8000), pcm, torch.zeros(16000)])
    return whole + noise(len(whole), 5e-4), 8000 + int(loud[0]), 8000 + int(loud[-1])


def voices(pcm: torch.Tensor, engine: str = "silero") -> torch.Tensor:
    stage = VoiceActivity(engine)
    return stage.step(stage.start(), pcm[None])[1][0]


def speech_spans(pcm: torch.Tensor, silence_ms: int = 100) -> list[tuple[int, int]]:
    """Spans of speech that the gate finds in a sound."""
    cutter = TurnCutter(prefix_padding_ms=0, padding_ms=0, silence_duration_ms=silence_ms)
    state, events = cutter.step(cutter.start(), pcm)
    turns = [event for event in (*events, *cutter.finish(state)) if event.kind == "turn"]
    return [(16 * turn.start_ms, 16 * turn.stop_ms) for turn in turns]


def test_the_network_equals_the_published_graph(spoken: Any) -> None:
    """The wheel's TorchScript graph, given the same weights, says the same of every window."""
    data = Path(str(importlib.util.find_spec("silero_vad").origin)).parent / "data"  # type: ignore[union-attr]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph = torch.jit.load(str(data / "silero_vad.jit"))
    weights = activity._weights()
    names = {"stft_conv.weight": "_model.stft.forward_basis_buffer"}
    for part in ("weight", "bias"):
        for i in range(4):
            names[f"conv{i + 1}.{part}"] = f"_model.encoder.{i}.reparam_conv.{part}"
        names[f"final_conv.{part}"] = f"_model.decoder.decoder.2.{part}"
        for way in ("ih", "hh"):
            names[f"lstm_cell.{part}_{way}"] = f"_model.decoder.rnn.{part}_{way}"
    assert set(names) == set(weights)
    theirs = {**dict(graph.named_parameters()), **dict(graph.named_buffers())}
    pcm = spoken[0]
    with torch.no_grad():
        for ours, name in names.items():
            theirs[name].copy_(weights[ours])
        expected = [float(graph(w[None], 16000)) for w in pcm.split(512) if len(w) == 512]
    torch.testing.assert_close(voices(pcm), torch.tensor(expected), atol=1e-5, rtol=0)


def test_speech_is_found_where_it_is(spoken: Any) -> None:
    pcm, start, stop = spoken
    found = voices(pcm)
    assert bool((found[: start // WINDOW] < 0.1).all())
    assert bool((found[stop // WINDOW + 4 :] < 0.35).all())
    inside = found[start // WINDOW + 3 : stop // WINDOW - 3]
    assert float((inside >= 0.5).float().mean()) > 0.95
    ((first, last),) = speech_spans(pcm)
    assert abs(first - start) < 1000
    assert abs(last - stop) < 2000


@pytest.mark.parametrize(
    "name", ["silence", "noise", "loud noise", "offset", "hum", "tone", "clipped", "clicks"]
)
def test_what_is_no_speech(name: str) -> None:
    time = torch.arange(24000) / 16000
    pcm = {
        "silence": torch.zeros(24000),
        "noise": noise(24000, 0.03),
        "loud noise": noise(24000, 0.5),
        "offset": noise(24000, 0.002) + 0.5,
        "hum": 0.3 * torch.sin(time * 6.283 * 50),
        "tone": 0.3 * torch.sin(time * 6.283 * 440),
        "clipped": (30 * torch.sin(time * 6.283 * 200)).clamp(-1, 1),
        "clicks": (torch.arange(24000) % 4000 == 0).float(),
    }[name]
    assert float(voices(pcm).max()) < 0.35
    assert speech_spans(pcm) == []


@pytest.mark.parametrize("change", ["offset", "clipped", "quiet", "noisy"])
def test_speech_is_found_through_what_spoils_it(spoken: Any, change: str) -> None:
    pcm, start, stop = spoken
    pcm = {
        "offset": pcm + 0.3,
        "clipped": (8 * pcm).clamp(-0.5, 0.5),
        "quiet": pcm / 30,
        "noisy": pcm + noise(len(pcm), 0.02),
    }[change]
    spans = speech_spans(pcm, 500)
    covered = sum(min(b, stop) - max(a, start) for a, b in spans)
    assert covered > 0.8 * (stop - start)


@pytest.mark.parametrize("engine", ENGINES)
@settings(max_examples=15)
@given(st.lists(st.sampled_from([0, 1, 100, 511, 512, 513, 1600, 5000]), max_size=10))
def test_any_split_gives_the_same_figures(engine: str, sizes: list[int]) -> None:
    stage = VoiceActivity(engine)
    assert isinstance(stage, Stage)
    pcm = noise(sum(sizes), 0.1)[None].repeat(2, 1) * torch.tensor([[1.0], [0.3]])
    _, whole = stage.step(stage.start(2), pcm)
    assert whole.shape == (2, sum(sizes) // 512)
    state, out = stage.start(2), []
    for chunk in pcm.split(sizes, dim=-1) if sizes else ():
        before = (state.begun.clone(), repr(state.memory))
        following, new = stage.step(state, chunk)
        assert torch.equal(state.begun, before[0])  # a state is a value
        assert repr(state.memory) == before[1]
        state = following
        out.append(new)
    out.append(stage.finish(state))
    assert torch.equal(torch.cat(out, dim=1), whole)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_batch_is_one_by_one_and_streams_start_anew(engine: str, spoken: Any) -> None:
    stage = VoiceActivity(engine)
    pcm = spoken[0][: 512 * 60]
    both = torch.stack([pcm, noise(len(pcm), 0.05)])
    state, together = stage.step(stage.start(2), both)
    for row in range(2):
        torch.testing.assert_close(together[row], voices(both[row], engine), atol=1e-5, rtol=0)
    state = stage.reset(state, torch.tensor([False, True]))
    _, again = stage.step(state, both.flip(0))
    torch.testing.assert_close(again[1], voices(pcm, engine), atol=1e-5, rtol=0)
    _, longer = stage.step(stage.start(1), torch.cat([both[0], both[1]])[None])
    torch.testing.assert_close(again[0], longer[0, 60:], atol=1e-5, rtol=0)
    state, _ = stage.step(stage.start(2), both[:, :100])
    with pytest.raises(MmfastError, match="whole windows"):
        stage.reset(state, torch.tensor([False, True]))
    assert stage.reset(state, torch.tensor([True, True])).begun.shape == (2, 0)


def test_samples_that_are_no_numbers_do_not_poison_the_stream(spoken: Any) -> None:
    pcm = spoken[0].clone()
    broken = pcm.clone()
    broken[100:200], broken[300], broken[301] = torch.nan, torch.inf, -torch.inf
    assert bool(torch.isfinite(voices(broken)).all())
    assert abs(len(speech_spans(broken)) - len(speech_spans(pcm))) == 0


def test_importing_changes_nothing_for_the_process() -> None:
    """The package's own import sets the number of threads; ours does not run it."""
    before = "silero_vad" in sys.modules
    threads = torch.get_num_threads()
    activity._weights.cache_clear()
    VoiceActivity()
    assert ("silero_vad" in sys.modules, torch.get_num_threads()) == (before, threads)


def test_without_the_wheel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    activity._weights.cache_clear()
    monkeypatch.setattr(activity.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ModelError, match=r"mmfast\[speech\].*engine='energy'"):
        VoiceActivity()
    assert VoiceActivity("energy").engine == "energy"
    old = importlib.machinery.ModuleSpec("silero_vad", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(activity.importlib.util, "find_spec", lambda _: old)
    with pytest.raises(ModelError, match="too old"):
        VoiceActivity()
    with pytest.raises(SpecError, match="silero"):
        VoiceActivity("silerro")


def test_energy_knows_loud_from_quiet_above_the_noise() -> None:
    pcm = torch.cat([noise(32000, 0.003), noise(8000, 0.1), noise(16000, 0.003)])
    found = voices(pcm, "energy")
    assert float(found[40:62].max()) < 0.35
    assert bool((found[63:78] > 0.5).all())
    assert float(found[80:].max()) < 0.35
    assert float(voices(pcm + 0.4, "energy")[40:62].max()) < 0.35


@settings(max_examples=200)
@given(st.lists(st.sampled_from([0.0, 0.3, 0.4, 0.6, 1.0]), max_size=40), st.integers(0, 3))
def test_the_gate_follows_its_definition(figures: list[float], needed: int) -> None:
    """Against a slow search over the whole past."""
    gate = Gate(speech=needed * WINDOW, silence=3 * WINDOW)
    state, speaking, since = SpeechGateState(), False, 0
    for number, voice in enumerate(figures):
        state, change = gate.step(state, voice, (number + 1) * WINDOW)
        past = figures[since : number + 1]
        if not speaking:
            expected = len(past) >= max(1, needed) and all(
                v >= 0.5 for v in past[-max(1, needed) :]
            )
            assert change == ("start" if expected else "")
        else:
            loud = [i for i, v in enumerate(past) if v >= 0.5]
            tail = past[loud[-1] + 1 :] if loud else past
            low = next((i for i, v in enumerate(tail) if v < 0.35), None)
            expected = low is not None and len(tail) - low >= 3
            assert change == ("stop" if expected else "")
        if expected:
            speaking, since = not speaking, number + 1
        assert state.speaking == speaking


@pytest.mark.parametrize("values", [{"threshold": 1.5}, {"exit": 0.6}, {"silence": -1}])
def test_thresholds_that_are_none(values: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match="give"):
        Gate(**values)
