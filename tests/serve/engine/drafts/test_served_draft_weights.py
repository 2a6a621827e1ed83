"""A server that drafts on weights in fewer bits says what it says without, to all at once."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_requests import eventually
from peft import LoraConfig, get_peft_model
from scheduling import Ear, answers, ask, comings_and_goings, image, model_of, promised_bytes, stock

from mmfast.core.errors import MmfastError
from mmfast.models import packing
from mmfast.models.decoder import few_rows
from mmfast.models.decoder.draft_weights import DraftWeights
from mmfast.models.packing import PackedLinear
from mmfast.ops.weight_forms import Int4Weights
from mmfast.serve.engine.base import Finish, Message, Request
from mmfast.serve.engine.drafts import DraftRows
from mmfast.serve.engine.scheduler import Scheduler

FAMILY = "llava_onevision"  # its answers have no end, so that there is time to read a second prompt
FIXED = "adapt=false&least=0&most=3"
TEXT = r".*language_model.*_proj"
WHOLE = f"self?weights=int4&{FIXED}"
PART = f"self:0.2?weights=int4&{FIXED}"
SHORT = f"self?weights=int4&{FIXED}&reduce=divprune:0.3"


@pytest.fixture(autouse=True)
def small_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let layers of tiny models be packed, which are not worth it."""
    monkeypatch.setattr(packing, "SMALL", 64)


def scheduler(decode: str | None) -> Scheduler:
    return Scheduler(model_of(FAMILY), chunk=1024, memory="200MB", decode=decode)


def asked(*specs: str | None) -> list[Any]:
    return [
        ask(f"{number}", image(number), "Describe the picture.", tokens=40, decode=spec)
        for number, spec in enumerate(specs)
    ]


def counts(end: Any) -> tuple[int, int]:
    assert isinstance(end, Finish), end
    rows = [row for row in end.trace["rows"] if row["stage"] == "draft"]
    return sum(row["tokens_in"] for row in rows), sum(row["tokens_out"] for row in rows)


@pytest.mark.parametrize("spec", [PART, SHORT, WHOLE, f"{WHOLE}&tree=2"])
def test_answers_are_those_without_drafts(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside one without drafts, whose step reads the weights of the model."""
    with closing(scheduler(None)) as made:
        want = [text for text, _ in answers(made, asked(None, None, None))]
    read, product = list[int](), Int4Weights.product

    def seen(self: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        read.append(len(x))
        return product(self, x, bias)

    monkeypatch.setattr(Int4Weights, "product", seen)
    with closing(scheduler(spec)) as made:
        found = answers(made, asked(None, "none", "self:0.2?adapt=false&least=0"))
        model = made._runner.model
        assert not any("forward" in vars(each) for each in model.modules())
        assert not any(isinstance(each, PackedLinear) for each in model.modules())
    assert [text for text, _ in found] == want
    (proposed, accepted), (none, _), _ = [counts(end) for _, end in found]
    assert read and proposed >= accepted > 0 and not none


def test_the_model_itself_is_read_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the packed weights are wrong, drafts fall and answers stay."""
    with closing(scheduler(None)) as made:
        want = [text for text, _ in answers(made, asked(None, None))]
    product = Int4Weights.product
    monkeypatch.setattr(Int4Weights, "product", lambda self, *given: -product(self, *given))
    with closing(scheduler(PART)) as made:
        found = answers(made, asked(None, None))
    assert [text for text, _ in found] == want
    assert all(p > 4 * a for p, a in (counts(end) for _, end in found))


@pytest.mark.parametrize("started", [WHOLE, PART])
def test_one_server_drafts_on_all_keys_and_on_a_part(started: str) -> None:
    """Beside answers under a policy of the cache, drawn ones, and of text alone."""
    specs = (WHOLE, PART, WHOLE, WHOLE, "lookup")

    def some(given: tuple[str | None, ...]) -> list[Any]:
        first, second, third, fourth, fifth = asked(*given)
        third = replace(third, sampling=replace(third.sampling, temperature=0.9, seed=3))
        fourth = replace(fourth, options=replace(fourth.options, cache="snapkv:24"))
        text = Message("user", ("Describe the picture of a cat.",))
        return [first, second, third, fourth, replace(fifth, messages=(text,))]

    with closing(scheduler(None)) as made:
        want = [text for text, _ in answers(made, some((None,) * 5))]
    with closing(scheduler(started)) as made:
        found = answers(made, some(specs))
        assert not made._runner.answers and not made._runner.batch.decoder.drafts.models[""].rows
    assert [text for text, _ in found] == want
    assert all(counts(end)[1] > 0 for _, end in found[:4])


def test_text_is_drafted_on_all_keys() -> None:
    def texts() -> list[Any]:
        words = "Tell me more about it", "And who are you, then?"
        requests = [ask(f"{n}", image(n), "", tokens=24) for n in range(2)]
        both = zip(requests, words, strict=True)
        return [replace(r, messages=(Message("user", (w,)),)) for r, w in both]

    with closing(scheduler(None)) as made:
        want = [text for text, _ in answers(made, texts())]
    with closing(scheduler(WHOLE)) as made:
        found = answers(made, texts())
    assert [text for text, _ in found] == want
    assert all(counts(end)[1] > 0 for _, end in found)
    assert not any("drafted nothing" in str(end.trace.get("notes")) for _, end in found)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_who_comes_and_goes_at_random_changes_no_text(seed: int) -> None:
    """Knobs, lengths, priorities, and moments of coming and leaving are random."""
    rng, ways = random.Random(seed), ("", "&tree=2x2", "&tree=dynamic&most=5", "&most=2")
    with closing(Scheduler(model_of(FAMILY), slots=3, memory="200MB", decode=WHOLE)) as made:

        def some() -> Iterator[Request]:
            for number in range(12):
                spec = f"self?weights=int4&least=0&adapt={rng.choice(['true', 'false'])}"
                spec = rng.choice([spec + rng.choice(ways), PART, "lookup", "none"])
                parts = rng.choice([(image(number), "what?"), ("a b " * rng.randrange(1, 30),)])
                more = {"tokens": rng.randrange(1, 40), "priority": rng.randrange(3)}
                yield ask(f"{number}", *parts, decode=spec, **more)

        ends = comings_and_goings(made, rng, some(), model_of(FAMILY))
        assert not any("no longer" in str(end.trace.get("notes")) for end in ends)
        drafts = made._runner.batch.decoder.drafts
        eventually(lambda: not made._runner.nbytes and not drafts.models[""].rows)


def test_an_answer_that_gives_way_goes_on_drafting() -> None:
    with closing(Scheduler(model_of(FAMILY), slots=1, memory="200MB", decode=WHOLE)) as made:
        long = replace(ask("a", image(1), "what?", tokens=60), priority=0)
        ear = Ear(made, long)
        rows = made._runner.batch.decoder.drafts.models[""].rows
        eventually(lambda: bool(rows))
        urgent = Ear(made, replace(ask("b", image(2), "and?", tokens=5), priority=5))
        assert isinstance(urgent.wait(), Finish)
        end = ear.wait()
    assert ear.text == stock(model_of(FAMILY), long) and counts(end)[1] > 20


@pytest.mark.filterwarnings("ignore")
def test_requests_of_adapters_draft_with_them(tmp_path: Path) -> None:
    """Each beside the others, on the packed weights of the model and its own matrices."""
    folders = {}
    for number, name in enumerate(("a", "b"), start=1):
        torch.manual_seed(number)
        made = LoraConfig(r=4, lora_alpha=64, target_modules=TEXT, init_lora_weights=False)
        get_peft_model(copy.deepcopy(model_of(FAMILY)[0]), made).save_pretrained(tmp_path / name)
        folders[name] = str(tmp_path / name)

    def texts(decode: str | None) -> list[tuple[str, Any]]:
        model, processor = model_of(FAMILY)
        how = {"memory": "200MB", "lora": folders, "decode": decode}
        requests = [ask(f"{n}", image(n), "what?", tokens=30) for n in range(3)]
        for request, name in zip(requests, (None, *folders), strict=True):
            object.__setattr__(request, "adapter", name)
        with closing(Scheduler((copy.deepcopy(model), processor), **how)) as made:
            return answers(made, requests)

    want, found = texts(None), texts(WHOLE)
    assert [text for text, _ in found] == [text for text, _ in want]
    assert len({text for text, _ in want}) == 3
    assert all(counts(end)[1] > 10 for _, end in found)


def test_rows_are_in_the_memory_that_is_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    found, draft, over = promised_bytes(monkeypatch), DraftRows.draft, list[int]()

    def noted(self: DraftRows, wanted: Any) -> int:
        count = draft(self, wanted)
        over.extend(s.length > s.most for mine in self.store._slots for s in mine)
        return count

    monkeypatch.setattr(DraftRows, "draft", noted)
    spec = "self?weights=int4&adapt=false&least=0&tree=dynamic&most=24"
    with closing(Scheduler(model_of(FAMILY), slots=4, memory="200MB", decode=spec)) as made:
        answers(made, [ask(f"{i}", image(i), "what?", tokens=60) for i in range(4)])
    assert found and all(0.95 * held <= most for held, most in found)
    assert over and not any(over)


def test_layers_with_windows_are_refused() -> None:
    with pytest.raises(MmfastError, match=r"needs full attention in all layers.*has windows"):
        Scheduler(model_of("gemma3"), chunk=1024, memory="200MB", decode=WHOLE)


@pytest.mark.parametrize(
    ("started", "spec", "words"),
    [
        (None, "self?weights=int4", "start it with --decode 'self.weights=int4'"),
        (SHORT, "self?weights=int4", "does not hold"),
        (SHORT, "self:0.2?weights=int4", "does not hold"),
        (WHOLE, "self?weights=int8", "does not hold"),
        (None, "self:0.1?weights=int4", "start it with --decode 'self:0.1.weights=int4'"),
        (PART, "self:0.1?weights=int8", "does not hold"),
    ],
)
def test_what_the_server_does_not_hold_is_refused(
    started: str | None, spec: str, words: str
) -> None:
    with closing(scheduler(started)) as made, pytest.raises(MmfastError, match=words) as found:
        answers(made, asked(spec))
    assert "\n" not in str(found.value)


def test_a_server_does_not_start_with_a_form_that_there_is_not() -> None:
    with pytest.raises(MmfastError, match="unknown weights"):
        scheduler("self:0.1?weights=int5")
    assert DraftWeights(model_of(FAMILY)[0], "int4").nbytes > 0


def test_steps_of_several_answers_compute_few_rows_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(scheduler(None)) as made:
        want = [text for text, _ in answers(made, asked(None, None, None))]
    seen, stock = list[int](), few_rows.product

    def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        seen.append(len(x))
        return stock(x, weight)

    monkeypatch.setattr(few_rows, "LARGE", 1)
    monkeypatch.setattr(few_rows, "paying_rows", lambda threads: frozenset(few_rows.ROWS))
    monkeypatch.setattr(few_rows, "product", product)
    with closing(scheduler(None)) as made:
        assert [text for text, _ in answers(made, asked(None, None, None))] == want
    assert seen and max(seen) <= 3
