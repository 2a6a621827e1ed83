"""Sessions: streaming is offline, questions leave no trace, sessions do not touch each other."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from stream_checks import same
from stream_tools import (
    EMBEDDED,
    answer_logits,
    full_pipe,
    pipe_of,
    seconds,
    shared_pipe,
    shot,
    splits,
    stock_logits,
    watcher,
)

import mmfast
from mmfast.core.errors import MediaError, MmfastError, SpecError
from mmfast.frontends.video.reader import read_video
from mmfast.streams.reply import Sampler

THREE = ("llava_onevision", "qwen2_5_vl", "qwen3_vl")
QUESTION = "what moves?"
MEMORY = "sink:40+window:220+retrieve:3"
CLIP = Path(__file__).parents[3] / "assets" / "clips" / "red-circle.mp4"


def push_in_runs(session: Any, clip: Any, times: list[float], runs: list[int]) -> None:
    at = 0
    for run in runs:
        if run == 1:
            session.push(clip[at], times[at])
        else:
            session.push(clip[at : at + run], times[at : at + run])
        at += run


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("family", [*THREE, "qwen2_vl", EMBEDDED])
@pytest.mark.parametrize("frames", [5, 6])
def test_every_split_gives_the_stock_logits(family: str, frames: int) -> None:
    this, pipe = watcher(family), shared_pipe(family)
    clip, times = this.clip(frames), seconds(frames)
    wanted = stock_logits(this, [shot(list(clip), times), QUESTION])
    first: torch.Tensor | None = None
    for runs in splits(frames) if family != EMBEDDED else [[1] * frames, [frames], [2, frames - 2]]:
        with pipe.open(None) as session:
            push_in_runs(session, clip, times, runs)
            logits = answer_logits(session, QUESTION)
        if first is None:
            first = logits
            torch.testing.assert_close(logits, wanted, atol=1e-5, rtol=1e-5)
        assert torch.equal(logits, first), runs


@pytest.mark.parametrize("family", THREE)
def test_several_units_in_one_call_of_the_encoder(family: str) -> None:
    this, pipe = watcher(family), pipe_of(family, batch=3)
    clip, times = this.clip(8), seconds(8)
    with pipe.open(None) as session:
        session.push(clip, times)
        logits = answer_logits(session, QUESTION)
    wanted = stock_logits(this, [shot(list(clip), times), QUESTION])
    torch.testing.assert_close(logits, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", THREE)
def test_remembered_exchanges_are_a_stock_conversation(family: str) -> None:
    this, pipe = watcher(family), shared_pipe(family)
    clip = this.clip(8)
    with pipe.open(None) as session:
        session.push(clip[:4], seconds(4))
        reply = session.ask(QUESTION, remember=True, max_new_tokens=6)
        words = iter(pipe.stream_model.script.wording.text("a ball"))
        reply._sampler = lambda *_: next(words)  # type: ignore[assignment]
        assert reply.read() == "a ball" and reply.finished == "length"
        session.push(clip[4:], seconds(4, start=2.0))
        logits = answer_logits(session, "and now?")
    first, second = shot(list(clip[:4]), seconds(4)), shot(list(clip[4:]), seconds(4, start=2.0))
    wanted = stock_logits(this, [first, QUESTION], ["a ball"], [second, "and now?"])
    torch.testing.assert_close(logits, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", [*THREE, EMBEDDED])
def test_questions_leave_the_stream_as_it_is(family: str) -> None:
    """With all that has state, and an odd frame that waits for its partner."""
    this, pipe = watcher(family), full_pipe(family)
    clip, times = this.clip(9), seconds(9)
    with pipe.open(MEMORY) as asked, pipe.open(MEMORY) as silent:
        for i, (frame, time) in enumerate(zip(clip, times, strict=True)):
            asked.push(frame, time)
            silent.push(frame, time)
            if i % 3 == 0:
                for _ in asked.ask(QUESTION, max_new_tokens=3):
                    break
                asked.ask("why?", max_new_tokens=2, temperature=1.0, seed=i).read()
        assert torch.equal(answer_logits(asked, QUESTION), answer_logits(silent, QUESTION))
        assert same(asked.stream.memory.snapshot(), silent.stream.memory.snapshot())


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("family", [*THREE, EMBEDDED])
def test_eight_sessions_interleaved_at_random(family: str) -> None:
    """Each equals its run alone, bit for bit, with one of them answering all the time."""
    this, pipe = watcher(family), full_pipe(family)
    clips = [this.clip(7, seed) for seed in range(8)]
    times = seconds(7)

    def end(session: Any) -> tuple[torch.Tensor, str]:
        text = session.ask(QUESTION, max_new_tokens=4).read()
        return answer_logits(session, QUESTION), text

    alone = []
    for clip in clips:
        with pipe.open(MEMORY) as session:
            session.push(clip, times)
            alone.append(end(session))
    sessions = [pipe.open(MEMORY) for _ in clips]
    order = [i for i in range(8) for _ in range(7)]
    random.Random(5).shuffle(order)
    done = [0] * 8
    talk = None
    for i in order:
        sessions[i].push(clips[i][done[i]], times[done[i]])
        done[i] += 1
        if talk is None and done[0]:
            talk = sessions[0].ask("tell all", max_new_tokens=200)
        next(talk or iter(()), None)
    for session, (logits, text) in zip(sessions, alone, strict=True):
        mine = end(session)
        assert torch.equal(mine[0], logits) and mine[1] == text


def test_sessions_in_threads() -> None:
    """Frames are pushed while answers are written, in eight threads on one model."""
    family = "qwen3_vl"
    this, pipe = watcher(family), full_pipe(family)
    times = seconds(6)

    def run(seed: int) -> tuple[torch.Tensor, str]:
        clip = this.clip(6, seed)
        with pipe.open(MEMORY) as session:
            session.push(clip[:3], times[:3])
            reply = session.ask(QUESTION, max_new_tokens=12)
            pusher = threading.Thread(target=session.push, args=(clip[3:], times[3:]))
            pusher.start()
            text = reply.read()
            pusher.join()
            return answer_logits(session, QUESTION), text

    alone = [run(seed) for seed in range(8)]
    together: dict[int, tuple[torch.Tensor, str]] = {}

    def note(seed: int) -> None:
        together[seed] = run(seed)

    threads = [threading.Thread(target=note, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed, (logits, text) in enumerate(alone):
        assert torch.equal(together[seed][0], logits) and together[seed][1] == text


def test_the_stream_goes_on_while_an_exchange_is_remembered() -> None:
    """Frames that came meanwhile stand before it, and the conversation is still a stock one."""
    family = "llava_onevision"
    this, pipe = watcher(family), shared_pipe(family)
    clip = this.clip(6)
    with pipe.open(None) as session:
        session.push(clip[:3], seconds(3))
        reply = session.ask(QUESTION, remember=True, max_new_tokens=3)
        next(reply, None)
        session.push(clip[3:], seconds(3, start=1.5))
        reply.read()
        logits = answer_logits(session, "and now?")
        ids = reply.ids
    with pipe.open(None) as other:
        other.push(clip, seconds(6))
        script = pipe.stream_model.script
        for piece in [*script.question(other.stream.written, QUESTION), script.text(ids)]:
            pipe.stream_model.engine.append(other.stream.memory, piece)
        other.stream.written = script.answered(other.stream.written)
        assert torch.equal(answer_logits(other, "and now?"), logits)


@pytest.mark.parametrize("penalty", [1.0, 9.0])
def test_answers_equal_stock_generate(penalty: float, monkeypatch: pytest.MonkeyPatch) -> None:
    this = watcher(EMBEDDED)
    monkeypatch.setattr(this.model.generation_config, "repetition_penalty", penalty)
    pipe = mmfast.pipeline("video-stream", model=(this.model, this.processor))
    clip = read_video(CLIP, frames=5).frames
    with pipe.open(None) as session:
        session.push(clip, seconds(5))
        question = "What colour is the circle: red, blue, green, yellow, purple or white?"
        reply = session.ask(question)
        deltas = list(reply)
        qa = mmfast.pipeline("video-qa", model=(this.model, this.processor), frames=5)
        assert "".join(deltas).strip() == qa(clip, question).text
        assert reply.finished == "stop" and 0 < reply.ttft_ms <= (reply.ms or 0)
        assert [row.stage for row in reply.trace.rows] == ["question", "generate"]
        assert list(reply) == []  # it has ended


def test_bad_calls_leave_the_session_usable() -> None:
    this, pipe = watcher("qwen2_5_vl"), shared_pipe("qwen2_5_vl")
    with pipe.open(MEMORY) as session:
        session.push(this.clip(2), seconds(2))
        before = answer_logits(session, QUESTION)
        for frame, time in (
            (b"no picture", 1.0),
            (this.clip(1)[0], float("nan")),
            (this.clip(1)[0], 10**309),
            (this.clip(1)[0], "soon"),
            (this.clip(2), [1.0]),
            (this.clip(2), 3.0),
            (None, 1.0),
        ):
            with pytest.raises(MediaError):
                session.push(frame, time)
        for question in ("", "<|video_pad|>?", 7):
            with pytest.raises(MmfastError):
                session.ask(question)
        for options in ({"max_new_tokens": 0}, {"temperature": -1.0}, {"top_p": 0.0}):
            with pytest.raises(MmfastError):
                session.ask(QUESTION, **options)
        assert torch.equal(answer_logits(session, QUESTION), before)
        assert session.push(this.clip(2), seconds(2, start=1.0)) == 1
    with pytest.raises(MmfastError, match="closed"):
        session.push(this.clip(1)[0])
    with pytest.raises(MmfastError, match="closed"):
        session.ask(QUESTION)


def test_memory_that_cannot_work() -> None:
    pipe = shared_pipe("llava_onevision")
    for memory in ("window:0.5", "sink:4", "widow:10", "window:10+retrieve:1+retrieve:2"):
        with pytest.raises(SpecError):
            pipe.open(memory)
    with pipe.open("window:8") as session, pytest.raises(MmfastError, match="does not fit"):
        session.push(watcher("llava_onevision").clip(1)[0], 0.0)
    for options in ({"fps": 0}, {"batch": 0}, {"sized_for": 0}, {"gate": 2.0}):
        with pytest.raises(MmfastError):
            pipe_of("llava_onevision", **options)
    with pytest.raises(SpecError):
        pipe_of("llava_onevision", reduce="fastv@llm3:0.5")


def test_a_sampler_that_is_given_is_the_only_one(monkeypatch: pytest.MonkeyPatch) -> None:
    this, pipe = watcher("qwen2_5_vl"), shared_pipe("qwen2_5_vl")
    with pipe.open() as session:
        session.push(this.clip(2), seconds(2))
        greedy = session.ask(QUESTION, max_new_tokens=3).read()
        monkeypatch.setattr("mmfast.streams.session.Sampler", lambda *_: pytest.fail("made"))
        own = session.ask(
            QUESTION, max_new_tokens=3, sampler=lambda model: Sampler(model.blocked)
        ).read()
    assert own == greedy
