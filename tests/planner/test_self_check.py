"""`reduce="auto?check=…"`: answers on reduced tokens, read again by the whole model."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from planner_rows import SHARES, blinding, settle
from typer.testing import CliRunner

import mmfast
from mmfast.cli import app
from mmfast.core.errors import MmfastError, SpecError
from mmfast.core.spec import SelfCheck, self_check
from mmfast.core.trace import Row
from mmfast.models.context import placeholders
from mmfast.models.decoder.agreement import chosen_tokens
from mmfast.pipelines.planning import _standing, reread
from mmfast.planner.plan import Plan
from mmfast.planner.raised import LAST, RaisedBudget

CLIPS = Path(__file__).resolve().parents[2] / "assets" / "clips"
CLIP = str(CLIPS / "red-circle.mp4")
QUESTIONS = ["Which way does the red circle move?", "Which colour is the circle?"]
CHECK = "auto?check=0.8"


@pytest.fixture
def blind() -> Iterator[None]:
    with blinding():
        yield


def planned(reduce: str, name: str, shares: tuple[float, ...] = SHARES, **options: Any) -> Any:
    """A pipeline whose rows say that a method loses nothing at these shares."""
    pipe = mmfast.pipeline(
        "video-qa", reduce=reduce, device="cpu", max_new_tokens=6, batch_size=2, **options
    )
    settle(pipe.planner, name, shares)
    return pipe


def checks(answer: Any) -> list[Any]:
    return [each for each in answer.trace.rows if each.stage == "self-check"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ["auto?chek=0.8", "did you mean 'check'"],
        ["auto?check=1.5", "share in"],
        ["auto?check=much", "share in"],
        ["auto?check=0.8&every=0", "at least 1"],
        ["auto?every=2", "needs one share"],
        ["auto?check=0.5&check=0.8", "needs one share"],
        ["auto?", "needs one share|knob"],
    ],
)
def test_wrong_knobs_are_named(text: str, said: str) -> None:
    with pytest.raises(SpecError, match=said) as error:
        mmfast.pipeline("video-qa", model="./nowhere", reduce=text)
    assert "\n" not in str(error.value) and "auto?check=0.8" in str(error.value)


def test_what_cannot_be_checked_is_refused_in_one_line() -> None:
    assert self_check("auto") is None
    assert self_check("auto?check=0.8&every=4") == SelfCheck("auto?check=0.8&every=4", 0.8, 4)
    for option in ({"max_memory": "2GB"}, {"cache": "snapkv:64"}):
        with pytest.raises(MmfastError, match=next(iter(option))):
            mmfast.pipeline("video-qa", model="./nowhere", reduce=CHECK, **option)
    pipe = planned(CHECK, "divprune")
    beams = {"do_sample": True, "num_beams": 2}
    for how in ({"do_sample": True}, beams, {"cache_implementation": "static"}):
        with pytest.raises(MmfastError, match="drop the check"):
            pipe(CLIP, QUESTIONS[0], **how)
    for how in ({"do_sample": True}, {"cache_implementation": "static"}):
        with pytest.raises(MmfastError, match="drop the check"):
            pipe.stream(CLIP, QUESTIONS[0], **how)
    with pytest.raises(SpecError, match=r"mmfast\.pipeline"):
        mmfast.attach(pipe.model, CHECK)
    serve = ["serve", "--reduce", CHECK]
    for command in (
        ["eval", "--reduce", CHECK],
        [*serve, "--engine", "ray"],
        [*serve, "--engine", "vllm"],
        [*serve, "--cache", "snapkv:0.5"],
        ["ask", CLIP, "What?", "--reduce", f"{CHECK}&every=2"],
        ["watch", CLIP, "--reduce", CHECK],
        ["batch", str(CLIPS), "-q", "What?", "--engine", "inproc", "--reduce", CHECK],
    ):
        error = CliRunner().invoke(app, command).exception
        assert isinstance(error, MmfastError) and CHECK in str(error)
        assert "\n" not in str(error) and "did you mean" not in str(error)
    for task in ("video-stream", "omni-chat"):
        with pytest.raises(SpecError, match="planned for one prompt"):
            mmfast.pipeline(task, reduce=CHECK)


def test_what_a_model_would_have_chosen_is_a_recompute_without_cache() -> None:
    pipe = mmfast.pipeline("video-qa", device="cpu")
    inputs, _ = pipe._inputs([(CLIP, each) for each in QUESTIONS], mmfast.Trace())
    how = {"max_new_tokens": 4, "repetition_penalty": 1.3}
    answers = pipe.run(dict(inputs), how)[:, inputs["input_ids"].shape[1] :]
    ends = pipe.model.generation_config.eos_token_id
    rng = random.Random(3)
    for faults in (0, 1, 3):
        given = answers.clone()
        for _ in range(faults):
            given[rng.randrange(2), rng.randrange(given.shape[1])] = rng.randrange(5, 40)
        chosen, real = chosen_tokens(partial(pipe.run, dict(inputs), how), given)
        for b, said in enumerate(given.tolist()):
            alone, _ = pipe._inputs([(CLIP, QUESTIONS[b])], mmfast.Trace())
            for place, token in enumerate(said):
                ids = torch.cat([alone["input_ids"], given[b : b + 1, :place]], 1)
                grown = {**alone, "input_ids": ids, "attention_mask": torch.ones_like(ids)}
                step = pipe.run(grown, {**how, "max_new_tokens": 1})[0, -1]
                assert int(chosen[b, place]) == int(step)
                assert bool(real[b, place])
                if token == ends:
                    assert not real[b, place + 1 :].any()
                    break
        if not faults:
            assert bool(((chosen == given) | ~real).all())


def test_what_follows_another_word_does_not_stand() -> None:
    """A refusal goes on as all do behind its first word, whatever was seen."""
    tokens, chosen = (
        torch.tensor([[1, 2, 3, 4], [5, 6, 7, 0]]),
        torch.tensor([[9, 2, 3, 4], [5, 6, 8, 0]]),
    )
    real = torch.tensor([[True] * 4, [True, True, True, False]])
    assert _standing(tokens, chosen, real) == (2, 7)
    assert _standing(tokens, tokens, real) == (7, 7)


def test_a_cut_that_loses_all_is_driven_to_all_tokens(blind: None) -> None:
    """By threads and in batches; and it stays there, as the rung below would still lose all."""
    pipe = planned(CHECK, "blind")
    first = pipe(CLIP, QUESTIONS)
    assert first[0].plan.spec.startswith("blind:0.0") and first[0].kept_tokens < 20
    (noted,) = checks(first[0])
    assert noted.tokens_out < noted.tokens_in and "tokens stand" in noted.method and noted.ms > 0
    with ThreadPoolExecutor(2) as pool:
        for _ in range(20):
            a, b = pool.map(lambda _: pipe(CLIP, QUESTIONS), range(2))
            if a[0].plan.spec is None and b[0].plan.spec is None:
                break
    assert a[0].kept_tokens == a[0].visual_tokens == 288
    assert "Checked answers raised it" in a[0].plan.why[0]
    assert any("raised by" in each.method for each in a[0].trace.rows if each.stage == "plan")
    for _ in range(LAST + 1):
        after = pipe(CLIP, QUESTIONS)[0]
    assert after.plan.spec is None and " would at blind:" in checks(after)[0].method


def test_a_cut_that_loses_nothing_stays() -> None:
    pipe = planned("auto?check=0.8&every=4", "divprune", (0.5,))
    whole = mmfast.pipeline("video-qa", device="cpu", max_new_tokens=6)
    seen = []
    for _ in range(6):
        for question in QUESTIONS:
            answer = pipe(CLIP, question)
            assert answer.plan.spec == "divprune:0.5"
            assert answer.text == whole(CLIP, question).text  # or there is something to lose
            seen.append(checks(answer))
    assert [len(each) for each in seen] == [0, 0, 0, 1] * 3
    assert all(each.tokens_in == each.tokens_out > 0 for mine in seen for each in mine)


def settled(agreed: list[float], least: float, start: int, seed: int) -> int:
    """Rung at which a budget ends, whose answers of 3 to 6 tokens stand with these shares."""
    raised, rng = RaisedBudget(SelfCheck("", least)), random.Random(seed)
    raised.value, top = start, len(agreed)
    rungs = tuple(map(str, range(top + 1)))
    for _ in range(40 * LAST):
        plan = Plan(None, {}, 0, 0, 0.0, {}, rungs=rungs, raised=raised.value)
        n = rng.randint(3, 6)

        def stand(rung: int, n: int = n) -> tuple[int, int]:
            return round(agreed[rung] * n), n

        here = stand(plan.rung) if plan.rung < top else None
        raised.note(plan, here, stand(plan.rung - 1) if plan.rung else None)
    return raised.value


def test_a_budget_ends_at_the_smallest_that_agrees() -> None:
    """Shares of 0 or 1 by rung: below some rung nothing stands, from there on all."""
    for seed in range(30):
        rng = random.Random(seed)
        rungs = rng.randint(1, 5)
        good = rng.randint(0, rungs)
        agreed = [0.0] * good + [1.0] * (rungs - good)
        assert settled(agreed, 0.8, rng.randint(0, rungs), seed) == good


def test_the_last_step_within_a_target_says_so() -> None:
    raised = RaisedBudget(SelfCheck("", 0.8))
    plan = Plan("a", {}, 0, 0, 0.0, {}, rungs=("a",))
    assert "within the target" in raised.note(plan, (0, 9), None) and raised.value == 0


def test_threads_raise_by_one_for_what_they_saw_together() -> None:
    raised = RaisedBudget(SelfCheck("", 0.8, every=3))
    plan = Plan("a", {}, 0, 0, 0.0, {}, rungs=("a", "b", "c", None))
    with ThreadPoolExecutor(8) as pool:
        said = list(pool.map(lambda _: raised.note(plan, (0, 9), None), range(64)))
        due = list(pool.map(lambda _: raised.due(1), range(99)))
    assert raised.value == 1 and said.count("planned before the last change") == 63
    assert sum(due) == 33


def test_an_answer_whose_check_fails_is_given_all_the_same(monkeypatch: Any) -> None:
    pipe = planned(CHECK, "divprune", (0.5,))
    expected, value = pipe(CLIP, QUESTIONS[0]).text, pipe.planner.raised.value

    def broken(*_: Any) -> Any:
        raise torch.OutOfMemoryError("no room\nfor a second reading")

    monkeypatch.setattr("mmfast.pipelines.planning.chosen_tokens", broken)
    with pytest.warns(UserWarning, match="could not be checked.*no room for a second reading"):
        answer = pipe(CLIP, QUESTIONS[0])
    assert answer.text == expected and [each.method for each in checks(answer)] == ["failed"]
    assert any("no room" in note for note in answer.trace.notes)
    assert pipe.planner.raised.value == value
    monkeypatch.undo()
    assert "tokens stand" in checks(pipe(CLIP, QUESTIONS[0]))[0].method  # nothing is left broken


def stand_by_hand(pipe: Any, question: str, said: torch.Tensor, spec: str | None = None) -> int:
    """Tokens of an answer that a plain pass over prompt and answer leads to, up to the first not.

    Under a spec, those that a pass under it leads to as well.
    """
    inputs, _ = pipe._inputs([(CLIP, question)], mmfast.Trace())
    ids = torch.cat([inputs["input_ids"], said[None]], 1)
    given = {**inputs, "input_ids": ids, "attention_mask": torch.ones_like(ids)}
    blocked = torch.tensor(sorted(placeholders(pipe.model)))
    found = []
    for each in (None, spec):
        with mmfast.attach(pipe.model, each), torch.inference_mode():
            logits = pipe.model(**given).logits[0, -len(said) - 1 : -1]
        found.append(logits.index_fill(1, blocked, -torch.inf).argmax(-1))
    same = (found[0] == (said if spec is None else found[1])).tolist()
    return [*same, False].index(False)


@pytest.mark.parametrize("question", ["Which way does the red circle move?", "Describe the video."])
def test_a_stream_is_checked_behind_its_last_word(blind: None, question: str) -> None:
    pipe, plain = planned(CHECK, "blind"), planned("auto", "blind")
    deltas = pipe.stream(CLIP, question)
    assert deltas.answer is None and "".join(deltas) == plain(CLIP, question).text
    answer = deltas.answer
    assert answer is not None and answer.text == plain(CLIP, question).text
    (noted,) = checks(answer)
    inputs, _ = pipe._inputs([(CLIP, question)], mmfast.Trace())
    with mmfast.attach(pipe.model, answer.plan.spec):
        said = pipe.run(dict(inputs))[0, inputs["input_ids"].shape[1] :]
    assert (noted.tokens_in, noted.tokens_out) == (len(said), stand_by_hand(pipe, question, said))
    assert noted.tokens_out < noted.tokens_in
    for _ in range(LAST):
        if pipe.planner.raised.value:
            break
        list(pipe.stream(CLIP, question))
    assert pipe.planner.raised.value == 1 and not plain.planner.raised


def test_beams_that_a_checkpoint_asks_for_itself_are_beams(monkeypatch: Any) -> None:
    pipe = planned(CHECK, "divprune", (0.5,))
    asked = pipe(CLIP, "Describe the video.", num_beams=3)
    monkeypatch.setattr(pipe.model.generation_config, "num_beams", 3)
    answer = pipe(CLIP, "Describe the video.")
    assert answer.text == asked.text
    assert checks(answer)[0].tokens_out == checks(asked)[0].tokens_out
    with pytest.raises(MmfastError, match="without num_beams"):
        pipe.stream(CLIP, "Describe the video.")


def test_a_stream_whose_reader_leaves_is_not_checked() -> None:
    pipe = planned(CHECK, "divprune", (0.5,))
    deltas = pipe.stream(CLIP, "Describe the video.")
    next(deltas)
    deltas.close()
    assert deltas.answer is not None and not checks(deltas.answer)


def test_a_stream_whose_check_fails_is_whole(monkeypatch: Any) -> None:
    pipe = planned(CHECK, "divprune", (0.5,))
    expected = pipe(CLIP, QUESTIONS[0]).text
    monkeypatch.setattr("mmfast.pipelines.planning.chosen_tokens", lambda *_: 1 / 0)
    deltas = pipe.stream(CLIP, QUESTIONS[0])
    with pytest.warns(UserWarning, match="could not be checked.*ZeroDivisionError"):
        assert "".join(deltas) == expected
    assert [each.method for each in checks(deltas.answer)] == ["failed"]


def test_the_text_of_beams_is_judged_by_what_both_models_say_next(blind: None) -> None:
    """Beams do not take the likeliest tokens: what stands is where cut and whole model agree."""
    pipe, plain = planned(CHECK, "blind"), planned("auto", "blind")
    how = {"num_beams": 3, "max_new_tokens": 8}
    questions = ["Describe the video.", QUESTIONS[0]]  # of different lengths: a padded batch
    answers = pipe(CLIP, questions, **how)
    assert [a.text for a in answers] == [a.text for a in plain(CLIP, questions, **how)]
    spec, found = answers[0].plan.spec, []
    for question in questions:
        inputs, _ = pipe._inputs([(CLIP, question)], mmfast.Trace())
        with mmfast.attach(pipe.model, spec):
            said = pipe.run(dict(inputs), how | {"do_sample": False})
        said = said[0, inputs["input_ids"].shape[1] :]
        found.append((len(said), stand_by_hand(pipe, question, said, spec)))
    (noted,) = checks(answers[0])
    assert (noted.tokens_in, noted.tokens_out) == tuple(map(sum, zip(*found, strict=True)))
    kept = planned(CHECK, "divprune", (0.5,))
    plan, said = kept(CLIP, QUESTIONS[0]).plan, torch.tensor([7, 8, 9])  # no model says these
    inputs, _ = kept._inputs([(CLIP, QUESTIONS[0])], mmfast.Trace())
    budget, row = RaisedBudget(SelfCheck("", 0.8)), Row("self-check")
    reread(kept, budget, plan, inputs, how | {"do_sample": False}, said[None], row)
    assert row.tokens_out == stand_by_hand(kept, QUESTIONS[0], said, plan.spec) > 0
    assert stand_by_hand(kept, QUESTIONS[0], said) == 0  # what a greedy answer is counted by
