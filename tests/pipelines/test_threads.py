"""Threads that share a model get the answers that one thread gets, one after the other."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import mmfast
from mmfast.core.errors import ModelError

CLIPS = sorted((Path(__file__).resolve().parents[2] / "assets" / "clips").glob("*.mp4"))
QUESTION = "How many objects are there?"


@pytest.fixture(scope="module")
def pair() -> Any:
    pipe = mmfast.pipeline("video-qa", device="cpu")
    return pipe.model, pipe.processor


def both_ways(asks: list[Callable[[], Any]]) -> tuple[list[Any], list[Any]]:
    """Results of calls one by one, and of four threads that begin together."""
    alone, gate = [ask() for ask in asks], threading.Barrier(4)

    def work(first: int) -> list[Any]:
        gate.wait()
        return [ask() for ask in asks[first::4]]

    with ThreadPoolExecutor(4) as pool:
        parts = list(pool.map(work, range(4)))
    return alone, [parts[i % 4][i // 4] for i in range(len(asks))]


def test_threads_share_a_pipeline_that_reduces(pair: Any) -> None:
    pipe = mmfast.pipeline("video-qa", pair, reduce="divprune:0.25")
    ask = lambda clip: lambda: (pipe(clip, QUESTION).text, pipe(clip, QUESTION).kept_tokens)
    alone, together = both_ways([ask(clip) for clip in CLIPS[:4]])
    assert together == alone


def test_pipelines_that_share_a_model_do_not_meet(pair: Any) -> None:
    """One that keeps all tokens is not reduced by its neighbour."""
    specs = (None, "divprune:0.25", None, "evs:0.5+fastv@llm1:0.5")
    pipes = [mmfast.pipeline("video-qa", pair, reduce=spec) for spec in specs]

    def ask(pipe: Any) -> Any:
        answer = pipe(CLIPS[0], QUESTION)
        return answer.text, answer.visual_tokens, answer.kept_tokens

    calls = [lambda pipe=pipe: ask(pipe) for pipe in pipes * 2]
    alone, together = both_ways(calls)
    assert together == alone and len({kept for _, _, kept in alone}) > 1


def test_streams_of_threads_wait_for_each_other(pair: Any) -> None:
    pipe = mmfast.pipeline("video-qa", pair, reduce="divprune:0.25")
    calls = [lambda clip=clip: "".join(pipe.stream(clip, QUESTION)) for clip in CLIPS[:2] * 2]
    alone, together = both_ways(calls)
    assert together == alone


def test_what_a_user_attached_is_refused_still(pair: Any) -> None:
    pipe = mmfast.pipeline("video-qa", pair, reduce="divprune:0.25")
    with pytest.raises(ModelError, match="attached already"), mmfast.attach(pair[0], "evs:0.5"):
        pipe(CLIPS[0], QUESTION)


@pytest.mark.parametrize("leaves", [False, True])
def test_a_call_at_work_ends_as_it_began(pair: Any, leaves: bool) -> None:
    """Another thread that attaches, or detaches, in the middle of it waits for its end."""
    model, inside, done = pair[0], threading.Event(), threading.Event()
    pipe = mmfast.pipeline("video-qa", pair)

    def pause(*_: Any) -> None:
        if not inside.is_set():
            inside.set()
            done.wait(0.5)  # long enough for what does not wait

    handle = mmfast.attach(model, "divprune:0.25" if leaves else None)
    expected = pipe(CLIPS[0], QUESTION).text
    parts = model.model.vision_tower, model.model.language_model.layers[2]
    with parts[leaves].register_forward_pre_hook(pause), ThreadPoolExecutor(1) as pool:
        running = pool.submit(pipe, CLIPS[0], QUESTION)
        assert inside.wait(60)
        handle.detach()
        with mmfast.attach(model, "evs:0.5") as trace:
            done.set()
            pipe(CLIPS[1], QUESTION)
        assert running.result(60).text == expected
    assert len(trace.reductions) == 1  # of this thread's call alone


def test_a_turn_belongs_to_the_model_and_dies_with_it(pair: Any) -> None:
    from mmfast.attach import _TURNS, turn_of

    model = copy.deepcopy(pair[0])
    assert turn_of(model) is turn_of(torch.compile(model)) is turn_of(model.model)
    assert turn_of(model) is not turn_of(pair[0])
    gc.collect()  # models that tests before this one have left
    before = len(_TURNS)
    del model
    gc.collect()
    assert len(_TURNS) == before - 1
