"""`auto?check=…` in an engine: answers are read again behind them, and harm no other request."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_requests import eventually
from planner_rows import SHARES, blinding, settle
from scheduling import EMBEDDED, Ear, answers, ask, image, model_of

from mmfast.attach import attach
from mmfast.core.errors import MmfastError, SpecError
from mmfast.core.spec import self_check
from mmfast.frontends.video.reader import read_video
from mmfast.models.context import placeholders
from mmfast.models.prompt import Shot, chat_inputs
from mmfast.planner.plan import Plan
from mmfast.planner.target import Target
from mmfast.serve.engine import checks as checking
from mmfast.serve.engine.base import Finish, Media, Request, SamplingOptions
from mmfast.serve.engine.checks import KEPT, UNITS, AnswerChecks, KeptAnswer
from mmfast.serve.engine.model import chunk_work
from mmfast.serve.engine.request import ActiveRequest
from mmfast.serve.engine.scheduler import Scheduler

CHECK = "auto?check=0.8"
CLIPS = sorted((Path(__file__).resolve().parents[3] / "assets" / "clips").glob("*.mp4"))


@pytest.fixture
def blind() -> Iterator[None]:
    with blinding():
        yield


@contextmanager
def checked(
    reduce: str | None, name: str, shares: tuple[float, ...] = SHARES, **options: Any
) -> Iterator[Scheduler]:
    """An engine whose planner knows rows that say that a method loses nothing at these shares."""
    made = Scheduler(model_of(EMBEDDED), reduce=reduce, chunk=48, memory="200MB", **options)
    settle(made._runner.planner, name, shares)
    try:
        yield made
    finally:
        made.close()


def moving(name: str, number: int, question: str = "Describe the video.", **more: Any) -> Request:
    """A question about a clip."""
    path = CLIPS[number % len(CLIPS)]
    clip = read_video(path, frames=8)
    return ask(
        name, Media(Shot("video", clip.frames, clip.metadata()), path.name), question, **more
    )


def figure(engine: Scheduler, name: str) -> float:
    return engine.health().gauges.get(name, 0.0)


def read_again(engine: Scheduler, count: int) -> None:
    """Wait until so many answers have been read again."""
    eventually(lambda: figure(engine, "checked_answers") + figure(engine, "checks_failed") >= count)


def notes(end: Any) -> list[str]:
    assert isinstance(end, Finish), end
    return [str(each) for each in end.trace.get("notes", ())]


def by_hand(request: Request, spec: str) -> tuple[str, int, int]:
    """The answer of stock `generate` under a spec, its tokens, and those that stand.

    They are read in one plain pass of the stock model over prompt and answer.
    """
    model, processor = model_of(EMBEDDED)
    inputs = chat_inputs(processor, [[each.chat for each in request.messages]], model.device)
    blocked, how = sorted(placeholders(model)), {"max_new_tokens": request.sampling.max_tokens}
    with torch.inference_mode():
        with attach(model, spec):
            ids = model.generate(**inputs, **how, do_sample=False, suppress_tokens=blocked)
        said = ids[0, inputs["input_ids"].shape[1] :]
        whole = {**inputs, "input_ids": ids, "attention_mask": torch.ones_like(ids)}
        logits = model(**whole).logits[0, -len(said) - 1 : -1].clone()
        logits[:, blocked] = -torch.inf
    same = (logits.argmax(-1) == said).tolist()
    text = processor.batch_decode(said[None], skip_special_tokens=True)[0]
    return text, len(said), [*same, False].index(False)


def test_answers_are_given_and_then_read_again(blind: None) -> None:
    """In one batch of prompts and answers of all lengths, beside requests that no check is for."""
    questions = ["Which way does it move?", "Describe the video.", "What number is there?"]
    requests = [moving(f"{i}", i, text, tokens=4 + 4 * i) for i, text in enumerate(questions)]
    requests += [ask("text", "hello there"), moving("own", 7, reduce="divprune:0.5")]
    with checked(CHECK, "blind") as engine:
        found = answers(engine, requests)
        (spec,) = {note for _, end in found[:3] for note in notes(end) if "plan: " in note}
        read_again(engine, 3)
        hand = [by_hand(each, spec.removeprefix("plan: ")) for each in requests[:3]]
        assert [text for text, _ in found[:3]] == [text for text, _, _ in hand]
        assert figure(engine, "checked_tokens") == sum(n for _, n, _ in hand)
        assert figure(engine, "standing_tokens") == sum(n for _, _, n in hand)
        assert figure(engine, "standing_tokens") < 0.8 * figure(engine, "checked_tokens")
        assert figure(engine, "checks_raised") == 1
        kept = found[0][1].trace["kept_tokens"]  # type: ignore[union-attr]
        ((_, later),) = answers(engine, [moving("later", 9)])
        assert isinstance(later, Finish) and later.trace["kept_tokens"] >= 2 * kept
        assert any("raised by 1" in note for note in notes(later))
        eventually(lambda: not engine._runner.checks.busy)
        assert not any("plan: " in note for _, end in found[3:] for note in notes(end))
    with checked("auto", "blind") as engine:
        again = answers(engine, [replace(each, id=f"{each.id}-auto") for each in requests])
        assert [text for text, _ in again] == [text for text, _ in found]
        assert "checked_answers" not in engine.health().gauges


def test_figures_tell_a_check_that_lets_all_stand(
    blind: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    agreeing = lambda _, said: (said, torch.ones_like(said, dtype=torch.bool))
    monkeypatch.setattr("mmfast.pipelines.planning.chosen_tokens", agreeing)  # a planted fault
    request = moving("a", 1)
    with checked(CHECK, "blind") as engine:
        ((_, end),) = answers(engine, [request])
        read_again(engine, 1)
        (spec,) = [note for note in notes(end) if "plan: " in note]
        _, said, stand = by_hand(request, spec.removeprefix("plan: "))
        assert figure(engine, "standing_tokens") == said > stand


def test_a_cut_that_loses_all_is_driven_to_all_tokens(blind: None) -> None:
    with checked("auto?check=0.8&every=2", "blind") as engine:
        for number in range(60):
            ((_, end),) = answers(engine, [moving(f"{number}", number % 3, "Describe it.")])
            eventually(lambda: not engine._runner.checks.busy)
            if end.trace["kept_tokens"] == end.trace["visual_tokens"]:  # type: ignore[union-attr]
                break
        assert end.trace["kept_tokens"] == 288  # type: ignore[union-attr]
        assert figure(engine, "checked_answers") == number // 2  # the last is not checked yet


def test_an_error_of_a_check_is_logged_and_counted_and_harms_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with checked(CHECK, "divprune", (0.5,)) as engine:
        ((expected, _),) = answers(engine, [moving("a", 1)])
        read_again(engine, 1)

        def broken(*_: Any) -> Any:
            raise torch.OutOfMemoryError("no room")

        monkeypatch.setattr("mmfast.pipelines.planning.chosen_tokens", broken)
        with caplog.at_level(logging.WARNING, "mmfast.serve"):
            ((text, end),) = answers(engine, [moving("b", 1)])
            read_again(engine, 2)
        assert text == expected and isinstance(end, Finish)
        assert figure(engine, "checks_failed") == 1
        assert any("could not be checked" in each.message for each in caplog.records)
        monkeypatch.undo()
        answers(engine, [moving("c", 1)])
        read_again(engine, 3)
        assert figure(engine, "checks_failed") == 1 and figure(engine, "checked_answers") == 2


def test_others_are_answered_while_a_check_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check yields after each slice: others go on between, and get all units but one of four."""
    seen, step = list[str](), AnswerChecks.step
    with checked(CHECK, "divprune", (0.5,)) as engine:
        batch = engine._runner.batch
        assert batch is not None
        unit, decode = batch.unit, batch.decode
        expected = answers(engine, [ask("alone", image(1, (96, 96)), "what?", reduce="none")])[0][0]
        hold = [True]

        def stepped(self: AnswerChecks, budget: float, work: float) -> None:
            seen.append("check")
            assert budget <= 0.7 * batch.pace  # a unit of work on prompts
            assert work == chunk_work(batch.prefiller.model, batch.prefiller.chunk)
            step(self, 1e-4 if hold[0] else budget, work / 50)

        monkeypatch.setattr(AnswerChecks, "step", stepped)
        monkeypatch.setattr(batch, "unit", lambda w: (seen.append("prompt"), unit(w))[1])
        monkeypatch.setattr(batch, "decode", lambda: (seen.append("decode"), decode())[1])
        answers(engine, [moving("a", 1)])
        eventually(lambda: "check" in seen)
        ((text, _),) = answers(
            engine, [ask("b", image(1, (96, 96)), "what?", reduce="none", tenant="other")]
        )
        assert text == expected and figure(engine, "checked_answers") == 0  # it came before
        assert 0 < engine._runner.checks.held <= engine._runner.worst()
        hold[0] = False
        read_again(engine, 1)
    assert seen.count("check") > 10
    assert ("check", "check") not in pairwise(seen)  # a decoding step stands between


def fake(name: str, tenant: str, own: str | None, check: Any) -> Any:
    request = moving(name, 1, tenant=tenant, **({} if own is None else {"reduce": own}))
    made = ActiveRequest(request, print, request.sampling)
    made.target = Target(quality="balanced", auto=True, check=check)
    return made


def test_a_budget_is_of_the_server_or_of_the_tenant_that_names_it() -> None:
    held, check = AnswerChecks(lambda: None, lambda *_: None), self_check(CHECK)
    shared = held.budget(fake("a", "x", None, check))
    assert shared is not None and shared is held.budget(fake("b", "y", None, check))
    mine = held.budget(fake("c", "x", CHECK, check))
    assert mine is not shared and mine is held.budget(fake("d", "x", CHECK, check))
    assert mine is not held.budget(fake("e", "y", CHECK, check))
    assert held.budget(fake("f", "x", None, None)) is None
    request = fake("h", "x", None, check)
    plan = Plan("a", {}, 0, 0, 0.0, {}, rungs=("a", "b"))
    held._due.append(KeptAnswer(request, plan, shared, {"input_ids": torch.zeros(1, 5)}, [1, 2]))
    assert not held.takes(False, lambda tokens: tokens < 7) and held.takes(False, lambda _: True)
    assert [held.takes(True, lambda _: True) for _ in range(2 * UNITS)].count(True) == 2
    held.clear()
    for number in range(2 * checking.BUDGETS):
        held.budget(fake("g", f"{number}", CHECK, check))
    assert len(held._budgets) == checking.BUDGETS
    assert [held.takes(True, lambda _: True) for _ in range(UNITS)] == [False] * UNITS


def test_held_media_are_few_and_go_with_their_request() -> None:
    with checked(CHECK, "divprune", (0.5,)) as engine:
        count = KEPT + 2
        found = answers(engine, [moving(f"{i}", i, tokens=8) for i in range(count)])
        left = [note for _, end in found for note in notes(end) if "left out" in note]
        assert len(left) == figure(engine, "checks_left_out") == 2
        read_again(engine, KEPT)
        ear = Ear(engine, moving("gone", 1, "Describe the video.", tokens=200))
        ear.next()
        engine.cancel("gone")
        eventually(lambda: not engine._runner.checks.busy)
        assert figure(engine, "checked_answers") == KEPT


def test_what_cannot_be_checked_is_refused_or_noted() -> None:
    drawn = SamplingOptions(max_tokens=4, temperature=0.8, seed=1)
    biased = SamplingOptions(max_tokens=4, logit_bias=((5, 1.0),))
    with checked(CHECK, "divprune", (0.5,)) as engine:
        for name, sampling in (("temperature=0.8", drawn), ("logit_bias=", biased)):
            with pytest.raises(MmfastError, match=name) as error:
                Ear(engine, moving("a", 1, sampling=sampling, reduce=CHECK))
            assert "\n" not in str(error.value) and "drop the check" in str(error.value)
        with pytest.raises(MmfastError, match=r"cache='snapkv:0\.5'"):
            Ear(engine, moving("a", 1, cache="snapkv:0.5", reduce=CHECK))
        with pytest.raises(SpecError, match="did you mean 'check'"):
            Ear(engine, moving("a", 1, reduce="auto?chek=0.5"))
        found = answers(
            engine, [moving("b", 1, sampling=drawn), moving("c", 1, cache="snapkv:0.5")]
        )
        for name, (_, end) in zip(("temperature=0.8", "cache="), found, strict=True):
            assert any("does not check answers under" in n and name in n for n in notes(end))
        time.sleep(0.2)
        assert "checked_answers" not in engine.health().gauges
    with pytest.raises(MmfastError, match="cache="):
        Scheduler(model_of(EMBEDDED), reduce=CHECK, cache="snapkv:0.5")
    pytest.importorskip("ray")
    from mmfast.serve.ray.engine import check_parts

    with pytest.raises(SpecError, match="plans every request on the whole model; start the server"):
        check_parts(CHECK, None, None)


def test_a_target_in_milliseconds_is_checked_as_the_server_says() -> None:
    with checked(CHECK, "divprune", (0.5,)) as engine:
        ((_, end),) = answers(engine, [moving("a", 1, target_ttft_ms=150)])
        kept = end.trace["kept_tokens"]  # type: ignore[union-attr]
        assert kept < 288
        read_again(engine, 1)
        own = moving("b", 1, target_ttft_ms=150, reduce=CHECK)
        ((_, end),) = answers(engine, [own])
        assert end.trace["kept_tokens"] == kept  # type: ignore[union-attr]
        with pytest.raises(MmfastError, match="contradict"):
            Ear(engine, moving("c", 1, target_ttft_ms=150, reduce="evs:0.5"))
