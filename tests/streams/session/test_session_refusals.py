"""Memories and times that a session refuses, in one line, before it changes anything."""

from __future__ import annotations

import re

import pytest
import torch
from snapshot_steps import FAMILY
from stream_tools import FAMILIES, answer_logits, seconds, shared_pipe, watcher

import mmfast
from mmfast.core.errors import MediaError, MmfastError, SpecError

STAMP = 1_763_000_000_000_000_000  # of time.time_ns()


@pytest.mark.parametrize(
    ("memory", "fix"),
    [
        ("retrieve:4", "window:4096+retrieve:4"),
        ("resv:0.3", "window:4096+resv:0.3"),
        ("quant:4", "window:4096+quant:4"),
        ("keynorm:0.5", "window:4096+keynorm:0.5"),
        ("keynorm:0.5+retrieve:4", "window:4096+keynorm:0.5+retrieve:4"),
    ],
)
def test_a_memory_that_cannot_act_is_refused(memory: str, fix: str) -> None:
    with pytest.raises(SpecError, match=re.escape(fix)) as caught:
        shared_pipe(FAMILY).open(memory)
    assert "\n" not in str(caught.value) and memory in str(caught.value)


@pytest.mark.parametrize(
    ("memory", "why"),
    [
        ("window:300+keynorm:0.5+adakv", "in the heads|does not tell"),
        ("snapkv:300+adakv", "in the heads"),
        ("window:300+knorm:0.5+adakv", "in the heads"),
        ("window:300+duo_attention", "in the heads"),
        ("duo_attention:0.5", "in the heads"),
        ("qfilter:300", "query_filter"),
        ("window:300+qfilter:0.5", "query_filter"),
    ],
)
def test_policies_by_head_are_refused(memory: str, why: str) -> None:
    with pytest.raises(SpecError, match=why) as caught:
        shared_pipe(FAMILY).open(memory)
    assert "\n" not in str(caught.value)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("time", [1e300, -1e300, STAMP, float(STAMP)])
def test_a_time_that_is_no_seconds_is_refused(family: str, time: float) -> None:
    """The stream stays as it was, and goes on as if it had not come."""
    clip = watcher(family).clip(4)
    pipe, memory = shared_pipe(family), "sink:8+window:300"
    with pipe.open(memory) as one, pipe.open(memory) as two:
        for session in (one, two):
            session.push(list(clip[:2]), seconds(2))
        with pytest.raises(MediaError, match="give seconds") as caught:
            one.push(clip[2], time)
        assert "\n" not in str(caught.value)
        for session in (one, two):
            session.push([clip[2], clip[3]], [None, 1.5])
        assert one.stats()["seconds"] == two.stats()["seconds"] == 1.5
        assert torch.equal(answer_logits(one, "?"), answer_logits(two, "?"))


@pytest.mark.parametrize(
    ("given", "acts"),
    [
        ({"reduce": "random:0.5"}, True),
        ({"reduce": "auto"}, True),
        ({"cache": "snapkv:16"}, True),
        ({"decode": "lookup"}, True),
        ({"encoder": "fast"}, False),
    ],
)
def test_what_would_not_act_in_a_stream_is_refused(given: dict[str, str], acts: bool) -> None:
    """Keys and values of a session are its own, which nothing that is attached would see."""
    pipe = shared_pipe(FAMILY)
    handle = mmfast.attach(pipe.model, **given)
    handle.trace.calls = 1  # nothing to be warned of
    try:
        if not acts:
            pipe.open().close()
            return
        with pytest.raises(MmfastError, match="would not act in a stream; detach it") as caught:
            pipe.open()
        assert "\n" not in str(caught.value)
    finally:
        handle.detach()
    pipe.open().close()


@pytest.mark.parametrize(
    "wrong", [{"temperature": "x"}, {"top_p": "x"}, {"seed": "x"}, {"seed": -1}, {"seed": 1.5}]
)
def test_draws_that_are_none_are_refused(wrong: dict[str, object]) -> None:
    clip = watcher(FAMILY).clip(2)
    ((name, value),) = wrong.items()
    with shared_pipe(FAMILY).open() as session:
        session.push(list(clip), seconds(2))
        with pytest.raises(MmfastError, match=f"{name}={value!r}") as caught:
            session.ask("what?", **wrong)  # type: ignore[arg-type]
        assert "\n" not in str(caught.value)


def test_what_is_attached_to_an_open_stream_is_refused() -> None:
    """Frames and questions are refused while it is there, and the stream goes on after it."""
    clip = watcher(FAMILY).clip(2)
    with shared_pipe(FAMILY).open() as session:
        session.push(clip[0], 0.0)
        handle = mmfast.attach(session.model.model, cache="snapkv:16")
        handle.trace.calls = 1  # nothing to be warned of
        try:
            for call in (lambda: session.push(clip[1], 1.0), lambda: session.ask("what?")):
                with pytest.raises(MmfastError, match="would not act in a stream; detach it"):
                    call()
        finally:
            handle.detach()
        assert session.push(clip[1], 1.0) and session.stats()["frames"] == 2


def test_a_question_to_a_stream_without_a_frame_is_refused() -> None:
    with shared_pipe(FAMILY).open() as session:
        for question in ("How many objects are there?", "Has there been a green star?"):
            with pytest.raises(MmfastError, match="nothing was seen yet; push a frame"):
                session.ask(question)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"nosuch": 1}, "unknown option 'nosuch'; choices: ahead, allow_network, background"),
        ({"each": 5}, "each=5 cannot be called"),
        ({"latency": "x"}, "latency='x' is not a delay"),
        ({"realtime": "x"}, "realtime='x' is not allowed; give True or False"),
    ],
)
def test_options_of_a_watch_are_checked(given: dict[str, object], told: str) -> None:
    with shared_pipe(FAMILY).open() as session:
        with pytest.raises(MmfastError, match=re.escape(told)) as caught:
            session.watch(list(watcher(FAMILY).clip(2)), **given)
        assert "\n" not in str(caught.value) and not session.stats()["frames"]


@pytest.mark.parametrize(
    "wrong",
    [{"yes": 5}, {"yes": "red"}, {"no": 5}, {"probe": 5}, {"reply": 5}, {"max_new_tokens": 0}],
)
def test_options_of_a_subscription_are_checked(wrong: dict[str, object]) -> None:
    ((name, value),) = wrong.items()
    with shared_pipe(FAMILY).open() as session:
        with pytest.raises(MmfastError, match=f"{name}={value!r}.*; give") as caught:
            session.subscribe("a car stops", **wrong)  # type: ignore[arg-type]
        assert "\n" not in str(caught.value) and not session.subscriptions
