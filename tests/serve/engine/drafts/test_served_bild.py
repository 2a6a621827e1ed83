"""A small model that writes alone while it is sure, in the batch: each answer is as of `attach`."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from scheduling import Ear, answers, ask, image, model_of, stock, together
from second_drafts import ONEVISION, counts, empty, engine, folder, mixed, second

from mmfast.attach import attach
from mmfast.core.errors import MmfastError
from mmfast.models.prompt import chat_inputs
from mmfast.serve.engine import decode as decode_module
from mmfast.serve.engine.base import Finish, Request, SamplingOptions
from mmfast.serve.engine.drafts import AnswerDrafts
from mmfast.serve.engine.second_model import SecondModel


def spec(fallback: float = 0.02, rollback: float = 5.0, most: int = 5, name: str = "near") -> str:
    where = f"{folder(ONEVISION)}/{name}"
    return f"bild:{where}?fallback={fallback}&rollback={rollback}&most={most}"


def alone(request: Request) -> str:
    """The answer of `attach` and `generate` alone with the spec of a request."""
    model, processor = model_of(ONEVISION)
    inputs = chat_inputs(processor, [[each.chat for each in request.messages]], model.device)
    names = (f"{kind}_token_id" for kind in ("image", "video", "audio"))
    none = [i for i in (getattr(model.config, name, None) for name in names) if i is not None]
    most = request.sampling.max_tokens
    with attach(model, decode=request.options.decode), torch.inference_mode():
        output = model.generate(
            **inputs, max_new_tokens=most, do_sample=False, suppress_tokens=none
        )
    new = output[:, inputs["input_ids"].shape[1] :]
    return str(processor.batch_decode(new, skip_special_tokens=True)[0])


def right(requests: list[Request], found: list[tuple[str, Any]]) -> list[bool]:
    """For each answer, whether it is that of its own spec alone."""
    pairs = zip(requests, found, strict=True)
    return [text == alone(request) for request, (text, _) in pairs]


def test_every_answer_is_that_of_attach_beside_others() -> None:
    """Bits of confidence and loss that matter: specs differ, and so do their answers."""
    plain, loose = model_of(ONEVISION), spec(0.0, 9.0)
    with engine(spec()) as made:
        for each in (spec(), loose, spec(0.03, 4.6, 8), spec(0.0, 0.69)):
            requests = mixed(each)
            found = answers(made, requests)
            assert all(right(requests, found))
            assert sum((counts(end) or (0, 0))[0] for _, end in found[:3]) > 0
            if each == loose:
                assert any(
                    text != stock(plain, r) for r, (text, _) in zip(requests, found, strict=True)
                )
        assert empty(made) and made._runner.nbytes == 0


FAULTS: list[tuple[Any, str, Any]] = [
    (decode_module, "_stands", lambda *given: False),
    (AnswerDrafts, "doubts", lambda self, chance: False),
    (AnswerDrafts, "waits", property(lambda self: False, lambda self, value: None)),
]


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize(("owner", "name", "fault"), FAULTS)
def test_a_fault_is_seen(
    owner: Any, name: str, fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only its own words stand, the small model is never unsure, answers do not wait for it."""
    read = SecondModel.read
    if name == "waits":  # a prompt that takes longer than the first tokens of an answer
        calls = iter(range(10**6))
        monkeypatch.setattr(SecondModel, "read", lambda self: next(calls) > 12 and read(self))
    each = spec(0.03, 5.0, 8)
    with engine(each) as made:
        requests = mixed(each)
        assert all(right(requests, answers(made, requests)))
        monkeypatch.setattr(owner, name, fault, raising=False)
        if name == "waits":
            calls = iter(range(10**6))
        assert not all(right(requests, answers(made, requests)))


def test_penalties_count_what_the_small_model_has_written(monkeypatch: pytest.MonkeyPatch) -> None:
    config = model_of(ONEVISION)[0].generation_config
    monkeypatch.setattr(config, "repetition_penalty", 1.4)
    each = spec(0.025, 5.0, 6)
    with engine(each) as made:
        requests = [replace(r, id=f"penalty {r.id}") for r in mixed(each)]
        assert all(right(requests, answers(made, requests)))


def test_any_arrivals_give_each_answer_as_alone() -> None:
    rng = random.Random(5)
    with engine(spec(), slots=3) as made:
        requests, ears = list[Request](), list[Ear]()
        for number in range(10):
            mine = spec(rng.choice([0.0, 0.02]), rng.choice([1.0, 5.0]), rng.randint(1, 8))
            words = "what? " * rng.randint(1, 20)
            media = [image(number)] * (rng.random() < 0.6)
            requests.append(
                ask(f"any {number}", *media, words, tokens=rng.randint(1, 30), decode=mine)
            )
            ears.append(Ear(made, requests[-1]))
            if rng.random() < 0.4:
                ears[-1].next()
        cancelled = rng.randrange(10)
        made.cancel(requests[cancelled].id)
        for number, (request, ear) in enumerate(zip(requests, ears, strict=True)):
            over = ear.events and not hasattr(ear.events[-1], "logprobs")
            end = ear.events[-1] if over else ear.wait()
            assert number == cancelled or (isinstance(end, Finish) and ear.text == alone(request))
        assert empty(made)


def test_an_answer_that_gives_way_goes_on_as_it_was() -> None:
    with engine(spec(), slots=1) as made:
        long = replace(ask("long", image(1), "what?", tokens=30, decode=spec()), priority=0)
        (ear,) = together(made, [long])
        ear.next()
        urgent = replace(ask("urgent", image(2), "and?", tokens=6, decode=spec()), priority=5)
        first = Ear(made, urgent)
        assert isinstance(first.wait(), Finish) and isinstance(ear.wait(), Finish)
        assert (first.text, ear.text) == (alone(urgent), alone(long))
        assert empty(made)


def test_a_prompt_that_the_small_model_cannot_read_does_not_stop_an_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*given: Any) -> Any:
        raise MmfastError("no memory is left")

    with engine(spec()) as made:
        monkeypatch.setattr(second(made).reader.prefiller, "job", broken)
        request = ask("broken", "why?", tokens=5, decode=spec())
        ((text, end),) = answers(made, [request])
        assert text == stock(model_of(ONEVISION), request)
        assert "cannot read this prompt: no memory is left" in " ".join(end.trace["notes"])


def test_drawn_answers_and_unknown_models_are_refused_in_one_line() -> None:
    with engine(spec()) as made:
        drawn = ask("drawn", "why?", decode=spec())
        drawn = replace(drawn, sampling=SamplingOptions(max_tokens=4, temperature=0.7))
        with pytest.raises(MmfastError, match="give temperature 0, or 'draft:") as error:
            Ear(made, drawn)
        assert "\n" not in str(error.value)
        with pytest.raises(MmfastError, match="second prompt"):
            Ear(made, ask("other", "why?", decode="bild:elsewhere"))
