"""Moshi on buffers of fixed shape: says what the steps say, in one graph each, replayed or not."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from codebook_models import choices, moshi
from graph_recorder import CaptureError, FakeCuda
from torch import Tensor
from torch._dynamo.utils import counters

from mmfast.bench.suites import decode as moshi_bench
from mmfast.core.errors import MediaError, ModelError
from mmfast.decoding.codebooks import copy_frame
from mmfast.decoding.sampling import Sampling
from mmfast.models.speech import moshi as moshi_voice
from mmfast.models.speech.moshi import MoshiVoice
from mmfast.models.speech.moshi_graphs import (
    CudaGraphs,
    MoshiFrames,
    MoshiStatic,
    StaticStage,
    compile_run,
    eager,
    frame_bytes,
)
from mmfast.models.speech.moshi_steps import MoshiSteps

HOP = 1920


@pytest.fixture(scope="module")
def model() -> Any:
    return moshi(6)


def _recorders() -> dict[str, Any]:
    return {"as it is": eager, "replayed": CudaGraphs("cpu", FakeCuda())}


@pytest.mark.parametrize("window", [20, 6])
@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("way", ["as it is", "replayed"])
def test_it_says_what_the_steps_say(window: int, sampled: bool, way: str) -> None:
    model = moshi(window)
    steps = MoshiSteps(model, **choices(sampled))
    static = MoshiStatic(model, 3, **choices(sampled), graphs=_recorders()[way])
    state, user = steps.start(3), torch.randint(64, (3, 4, 30))
    assert torch.equal(state.codes, static.codes) and torch.equal(state.text, static.text)
    said = []
    for at in range(30):
        state, frame = steps.step(state, user[:, :, at])
        mine = static.step(user[:, :, at])
        assert torch.equal(frame.text, mine.text) and torch.equal(frame.codes, mine.codes)
        assert torch.equal(frame.whole, mine.whole)
        said.append(mine.codes.clone())
        if at == 12 and not sampled:
            rows = torch.tensor([False, True, False])
            state = steps.reset(state, rows)
            static.reset(rows)
    assert len(torch.unique(torch.stack(said))) > 20


def test_conversations_that_do_not_take_a_step_stay_as_they_are(model: Any) -> None:
    user = torch.randint(64, (2, 4, 12))
    static, alone = MoshiStatic(model, 2), MoshiStatic(model, 1)
    second = iter(range(12))
    for at in range(12):
        active = torch.tensor([True, at % 3 == 0])
        codes = user[:, :, at].clone()
        place = next(second) if active[1] else 0
        codes[1] = user[1, :, place]
        before = static.codes[1].clone()
        static.step(codes, active)
        if active[1]:
            alone.step(user[1:, :, place])
        else:
            assert torch.equal(static.codes[1], before)
        assert torch.equal(static.codes[1], alone.codes[0])


def _sound(batch: int, frames: int) -> Tensor:
    return torch.randn(frames, batch, HOP, generator=torch.Generator().manual_seed(0)) * 0.3


@pytest.mark.parametrize("way", ["as it is", "replayed"])
def test_frames_of_sound_are_those_of_the_voice(model: Any, way: str) -> None:
    voice = MoshiVoice(model, text=Sampling(), audio=Sampling())
    recorder = _recorders()[way]
    frames, state = MoshiFrames(voice, 2, recorder), voice.start(2)
    for at, pcm in enumerate(_sound(2, 10)):
        state, heard = voice.step(state, pcm)
        mine = frames.frame(pcm)
        assert torch.equal(mine.codes, heard.codes) and torch.equal(mine.text, heard.text)
        torch.testing.assert_close(mine.pcm, heard.pcm, rtol=1e-4, atol=1e-5)
        if at == 5:
            rows = torch.tensor([True, False])
            state = voice.reset(state, rows)
            frames.reset(rows)
    frames.check()
    if way == "replayed":
        assert len(recorder.cuda.graphs) == 4  # ear, temporal, depth, mouth
        assert all(graph.replays >= 10 for graph in recorder.cuda.graphs)


def _said(sounds: Any) -> tuple[Tensor, Tensor]:
    found = list(sounds)
    return torch.cat([s.codes for s in found], dim=1), torch.cat([s.pcm for s in found])


def test_a_voice_replays_its_graphs_and_says_the_same(model: Any) -> None:
    plain = MoshiVoice(model, text=Sampling(), audio=Sampling())
    recorder = CudaGraphs("cpu", FakeCuda())
    replaying = MoshiVoice(model, text=Sampling(), audio=Sampling(), graphs=recorder)
    assert plain.graphs is None  # on a CPU
    asked = torch.randn(3 * HOP + 100, generator=torch.Generator().manual_seed(1)) * 0.3
    for _ in range(2):  # the second conversation begins anew on the same graphs
        codes, pcm = _said(plain.reply(asked, 24_000, seconds=0.8))
        mine = replaying.reply(asked, 24_000, seconds=0.8)
        first = next(mine)
        # meanwhile another conversation goes step by step, and neither disturbs the other
        assert torch.equal(_said(replaying.reply(asked, 24_000, seconds=0.8))[0], codes)
        found = _said([first, *mine])
        assert torch.equal(found[0], codes)
        torch.testing.assert_close(found[1], pcm, rtol=1e-4, atol=1e-5)
    assert len(recorder.cuda.graphs) == 4
    chunks = asked.split(700)  # no whole frames
    assert torch.equal(_said(replaying.run(chunks))[0], _said(plain.run(chunks))[0])


def test_a_cuda_device_replays_unless_codes_are_drafted(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = eager
    monkeypatch.setattr(moshi_voice, "graphs_for", lambda device: recorder)
    monkeypatch.setattr(moshi_voice, "device_kind", lambda model: "cuda")
    assert MoshiVoice(model).graphs is recorder
    assert MoshiVoice(model, drafter=copy_frame).graphs is None


@pytest.mark.slow
def test_each_part_compiles_as_one_graph_and_only_once(model: Any) -> None:
    voice = MoshiVoice(model, text=Sampling(), audio=Sampling())
    torch._dynamo.reset()
    counters.clear()
    compiled, plain = (
        MoshiFrames(voice, 1, partial(compile_run, backend="eager")),
        MoshiFrames(voice, 1),
    )
    for pcm in _sound(1, 8):
        mine, want = compiled.frame(pcm), plain.frame(pcm)
        assert torch.equal(mine.codes, want.codes) and torch.equal(mine.text, want.text)
    assert counters["stats"]["unique_graphs"] == 4 and not counters["graph_break"]


def test_a_planted_look_at_a_value_is_found(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = MoshiStatic._pick

    def peeks(self: MoshiStatic, logits: Tensor, choice: Any, at: int) -> Tensor:
        assert logits.amax().item() < 1e9
        return stock(self, logits, choice, at)

    monkeypatch.setattr(MoshiStatic, "_pick", peeks)
    with pytest.raises(CaptureError):
        MoshiStatic(model, 1, graphs=CudaGraphs("cpu", FakeCuda()))
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        MoshiStatic(model, 1, graphs=partial(compile_run, backend="eager"))


def test_a_state_that_moves_is_found(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = MoshiStatic._temporal

    def moves(self: MoshiStatic) -> None:
        before = self.seen
        self.seen = before.clone()
        stock(self)

    steps, user = MoshiSteps(model), torch.randint(64, (1, 4, 10))
    state, want = steps.start(1), []
    for at in range(10):
        state, frame = steps.step(state, user[:, :, at])
        want.append(frame.codes)
    monkeypatch.setattr(MoshiStatic, "_temporal", moves)
    static = MoshiStatic(model, 1, graphs=CudaGraphs("cpu", FakeCuda()))
    said = [static.step(user[:, :, at]).codes.clone() for at in range(10)]
    assert not torch.equal(torch.stack(said), torch.stack(want))


def test_what_cannot_be_said_is_an_error(model: Any) -> None:
    voice = MoshiVoice(model, text=Sampling(), audio=Sampling())
    frames = MoshiFrames(voice)
    with pytest.raises(MediaError, match="1920"):
        frames.frame(torch.zeros(1, 100))
    frames.steps.hidden.fill_(torch.nan)
    frames.steps._say()
    with pytest.raises(ModelError, match="NaN"):
        frames.check()
    frames.reset()
    frames.check()
    layers = voice.codec.encoder.layers
    waits = type("Stage", (), {"layers": layers, "lookahead": 1, "startup": 1})()
    with pytest.raises(ModelError, match="fixed shape"):
        StaticStage(waits, torch.zeros(1, HOP))


def test_bytes_of_a_frame_are_those_of_the_weights(model: Any) -> None:
    parts = frame_bytes(model, batch=2)
    layers = sum(p.numel() for p in model.decoder.model.layers.parameters())
    assert parts["temporal"] == 4 * (layers + model.decoder.lm_head.weight.numel())
    assert parts["kv"] == 2 * sum(r.nbytes for r in MoshiStatic(model).ring)
    assert parts["depth"] < sum(p.nbytes for p in model.depth_decoder.parameters())


def test_rows_of_the_benchmark() -> None:
    tiny = moshi_bench.TINY
    rows = moshi_bench.measure_moshi(tiny, "tiny", (2,), 3, "cpu", copy_gb_s=10.0)
    assert [row["job"] for row in rows] == ["steps", "static"]
    for row in rows:
        assert row["same_codes"] == 1.0 and row["p99_ms"] >= row["median_ms"] > 0
        assert 0 < row["of_floor"] < 1 and row["device"] == "cpu" and row["goal_ms"] is None
    large = moshi_bench.unmeasured(moshi_bench.SEVEN_B, "moshi-7b", 1)
    assert large["median_ms"] is None and 16_000 < large["mb"] < 17_000


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_real_graphs_say_what_the_steps_say() -> None:
    model = moshi(6).to("cuda")
    steps, static = MoshiSteps(model), MoshiStatic(model, 2)
    state, user = steps.start(2), torch.randint(64, (2, 4, 20), device="cuda")
    for at in range(20):
        state, frame = steps.step(state, user[:, :, at])
        assert torch.equal(frame.codes, static.step(user[:, :, at]).codes)
