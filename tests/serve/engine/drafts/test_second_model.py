"""A second model that drafts in the batch: the plain text, its own words as drafts, no rests."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from engine_requests import eventually
from scheduling import (
    Ear,
    answers,
    ask,
    comings_and_goings,
    image,
    model_of,
    promised_bytes,
    stock,
    together,
)
from second_drafts import (
    FIXED,
    ONEVISION,
    counts,
    empty,
    engine,
    folder,
    mixed,
    proposals,
    reads,
    second,
    spec_of,
)
from transformers import Qwen2ForCausalLM

from mmfast.core.errors import MmfastError, ModelError
from mmfast.serve.engine.base import Finish, Request, SamplingOptions
from mmfast.serve.engine.decode import Chooser, DecodeBatch
from mmfast.serve.engine.drafts import DraftRows
from mmfast.serve.engine.scheduler import Scheduler
from mmfast.serve.engine.second_model import SecondModel

FAMILIES = ["qwen2_5_vl", "qwen3_vl", "gemma3"]  # M-RoPE, DeepStack, windows


@pytest.mark.parametrize("name", ["near", "near?media=false", "near?reduce=evs:0.3", "text"])
def test_text_is_that_of_stock_generate_beside_answers_without_drafts(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads(monkeypatch)
    with engine(spec_of(name)) as made:
        requests = mixed(None)
        for request, (text, end) in zip(requests, answers(made, requests), strict=True):
            assert text == stock(model_of(ONEVISION), request)
            found = counts(end)
            assert (found is None) == (request.options.decode == "none")
            assert found is None or request.id == "4" or found[0] > 0
        assert empty(made) and made._runner.nbytes == 0


@pytest.mark.parametrize(
    "family", [ONEVISION, *(pytest.param(each, marks=pytest.mark.slow) for each in FAMILIES)]
)
def test_drafts_of_the_model_itself_all_stand(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions and rows of the second model are right in a ragged batch, also where it is late."""
    reads(monkeypatch, 9 if family != ONEVISION else 80)  # more than one step catches up with
    with engine(spec_of("same", family), family) as made:
        requests = mixed(None, 40 if family != ONEVISION else 130)[:4]
        if family == "gemma3":  # takes no clips
            requests[2] = ask("2", image(3), "and?", tokens=30)
        for request, (text, end) in zip(requests, answers(made, requests), strict=True):
            assert text == stock(model_of(family), request)
            proposed, accepted = counts(end) or (1, 1)
            assert proposed == accepted > 0


def test_the_model_drafts_on_a_prompt_that_a_reducer_has_shortened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reads(monkeypatch)
    with engine(f"self?{FIXED}&reduce=random:0.4") as made:
        requests = mixed(f"self?{FIXED}&reduce=divprune:0.9")
        for request, (text, end) in zip(requests, answers(made, requests), strict=True):
            assert text == stock(model_of(ONEVISION), request)
            found = counts(end)
            # text has nothing to reduce: the draft is the model
            assert request.id != "1" or (found is not None and found[0] == found[1] > 0)
        assert empty(made)


def spoken(ids: list[int], count: int) -> list[int]:
    """What the draft model of text would say, read anew without a cache."""
    model = Qwen2ForCausalLM.from_pretrained(folder(ONEVISION) / "text").eval()
    blocked = Chooser(model_of(ONEVISION)[0])._blocked
    start = len(ids)
    for _ in range(count):
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
            logits[blocked] = -torch.inf
        ids = [*ids, int(logits.argmax())]
    return ids[start:]


def checked(made: Scheduler, found: list[tuple[list[int], list[int]]]) -> bool:
    """Drafts for a text are the words of the draft model, whatever stood and fell before."""
    request = ask("t", "a b c a b c " * 5, tokens=30)
    prompt = made._runner.encoder.prepare(request).inputs["input_ids"][0].tolist()
    answers(made, [request, ask("u", image(3), "what?", tokens=20, decode="none")])
    assert len(found) > 5
    return all(tokens == spoken([*prompt, *said], len(tokens)) for said, tokens in found)


def test_drafts_are_the_words_of_the_draft_model_behind_what_stands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reads(monkeypatch)
    with engine(spec_of("text")) as made:
        assert checked(made, proposals(monkeypatch))

    settle, turns = SecondModel.settle, [0]

    def kept(self: SecondModel, kept: dict[Any, int]) -> None:
        """Planted: a draft that fell stays in the row of the draft model."""
        settle(self, kept)
        for (slots,) in self.store._slots if turns[0] < 5 else ():
            slots.length += 1
            turns[0] += 1

    monkeypatch.setattr(SecondModel, "settle", kept)
    with engine(spec_of("text")) as made:
        assert not checked(made, proposals(monkeypatch))


def test_wrong_drafts_change_no_text_and_a_lenient_verifier_would(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    request = ask("a", image(1), "what?", tokens=20)
    plain = stock(model_of(ONEVISION), request)
    reads(monkeypatch)
    monkeypatch.setattr(Chooser, "guess", lambda self, logits, rows: [7] * len(rows))
    with engine(spec_of("same")) as made:
        ((text, end),) = answers(made, [request])
        assert text == plain and counts(end)[0] > 5 and counts(end)[1] == 0  # type: ignore[index]
        choose = DecodeBatch._chosen

        def lenient(self: DecodeBatch, rows: Any, logits: Any) -> list[Any]:
            first = all(row.key not in seen for row in rows)
            found = choose(self, rows, logits)
            for i, row in enumerate(rows if first else ()):
                if row.drafts is not None and row.own.tokens:
                    found[i] = row.token = row.own.tokens[0]
            return found

        seen = set[Any]()
        monkeypatch.setattr(DecodeBatch, "_chosen", lenient)
        ((text, end),) = answers(made, [replace(request, id="b")])
        assert text != plain and counts(end)[1] > 0  # type: ignore[index]


def test_drawn_text_is_that_of_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    reads(monkeypatch)
    found = proposals(monkeypatch)
    sampling = SamplingOptions(max_tokens=20, temperature=1.0, top_p=0.9, seed=5)
    with engine(spec_of("same")) as made:
        asked = [replace(each, sampling=sampling) for each in mixed(None)]
        plain = [
            replace(a, id=f"p{a.id}", options=replace(a.options, decode="none")) for a in asked
        ]
        texts = [text for text, _ in answers(made, plain)]
        assert not found
        drawn = answers(made, asked)
        assert [text for text, _ in drawn] == texts and len(set(texts)) > 1
        # the model itself draws by the same number
        assert all((both := counts(end)) and both[0] == both[1] > 0 for _, end in drawn[:3])


def test_who_leaves_takes_the_rows_of_the_draft_model_along(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While it reads the prompt, while it drafts, and while a more urgent request goes first."""
    with engine(spec_of("near"), slots=2) as made:
        own, read = second(made), SecondModel.read
        monkeypatch.setattr(SecondModel, "read", lambda self: None)
        ears = together(made, [ask(f"{i}", image(i), "what?", tokens=200) for i in range(2)])
        eventually(lambda: len(own._coming) == 2)
        made.cancel("0")
        ears[0].wait()
        eventually(lambda: list(own._coming) == ["1"] and len(own.reader.answers) == 1)
        monkeypatch.setattr(SecondModel, "read", read)
        eventually(lambda: len(own.rows) == 1)
        made.cancel("1")
        ears[1].wait()
        eventually(lambda: empty(made) and made._runner.nbytes == 0)
    for name in ("c", "d"):  # one that is paused goes on, or leaves
        with engine(spec_of("near"), slots=1) as made:
            long = replace(ask(name, image(1), "what?", tokens=60), priority=0)
            ear = Ear(made, long)
            eventually(lambda: bool(second(made).rows))
            urgent = Ear(made, replace(ask("b", image(2), "and?", tokens=5), priority=5))
            urgent.next()
            if name == "d":
                made.cancel(name)
            assert isinstance(urgent.wait(), Finish)
            assert isinstance(ear.wait(), Finish) == (name == "c")
            assert name == "d" or ear.text == stock(model_of(ONEVISION), long)
            eventually(lambda: empty(made) and made._runner.nbytes == 0)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_who_comes_and_goes_at_random_changes_no_text(seed: int) -> None:
    """Knobs, lengths, priorities, and moments of coming and leaving are random."""
    rng = random.Random(seed)
    with engine(spec_of("near"), slots=3) as made:

        def some() -> Iterator[Request]:
            for number in range(12):
                most = rng.choice([1, 2, 5])
                spec = f"draft:{folder(ONEVISION)}/near?most={most}" + rng.choice(
                    [
                        "",
                        "&adapt=false&least=0",
                        "&media=false&adapt=false&least=0",
                        "&reduce=evs:0.5",
                    ]
                )
                parts = rng.choice([(image(number), "what?"), ("a b " * rng.randrange(1, 30),)])
                yield ask(
                    f"{number}",
                    *parts,
                    tokens=rng.randrange(1, 40),
                    decode=rng.choice([spec, spec, "none", "recycle", "lookup?adapt=false"]),
                    priority=rng.randrange(3),
                )

        ends = comings_and_goings(made, rng, some(), model_of(ONEVISION))
        assert not any(end.trace.get("notes") for end in ends)
        eventually(lambda: empty(made) and made._runner.nbytes == 0)


def test_its_rows_are_in_the_memory_that_is_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    found = promised_bytes(monkeypatch)
    with engine(spec_of("near"), slots=5) as made:
        requests = [ask(f"{i}", image(i), "what?", tokens=200) for i in range(5)]
        answers(made, requests)
        assert all(0.95 * held <= most for held, most in found)
        assert max(held for held, _ in found) > 0.3 * max(most for _, most in found)
    with (
        engine(spec_of("near"), memory="800KB") as made,
        pytest.raises(MmfastError, match="bytes of keys and values"),
    ):
        Ear(made, ask("a", "a", tokens=900))
    with engine("none", memory="800KB") as made:  # it would fit alone
        Ear(made, ask("a", "a", tokens=900))
        made.cancel("a")


def test_what_no_server_drafts_is_refused_in_one_line() -> None:
    home = folder(ONEVISION)
    wrong = {
        f"draft:{home}/text": "not started for that; start it with --decode",
        "self?reduce=evs:0.5": "not started for that",
        f"draft:{home}/near?learn=1e-4": "all callers",
        f"draft:{home}/near?reduce=lazyllm:0.5": "does not act when a prompt is read",
    }
    with engine(spec_of("near")) as made:
        for spec, said in wrong.items():
            with pytest.raises(MmfastError, match=said) as error:
                Ear(made, ask("a", image(1), "what?", decode=spec))
            assert "\n" not in str(error.value)
    for name, said in {"many": "same tokenizer", "absent": "cannot load"}.items():
        with pytest.raises(ModelError, match=said):
            Scheduler(model_of(ONEVISION), decode=f"draft:{home}/{name}")
    with pytest.raises(ModelError, match="takes drafts back, which Lfm2Vl"):
        Scheduler(model_of("lfm2_vl"), decode=f"self?{FIXED}&reduce=evs:0.5")


def test_a_prompt_that_the_draft_model_cannot_read_is_refused_or_noted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Unknown tokens and media of other sizes are refused; later failures leave a note."""
    pictures = [ask("a", image(1), "what?"), ask("b", "what?", tokens=30)]
    with engine(spec_of("few")) as made:
        raw = replace(pictures[1], options=replace(pictures[1].options, raw=[20, 230]))
        with pytest.raises(
            MmfastError, match=r"token 230 is none of its \d+; let it read"
        ) as error:
            Ear(made, raw)
        assert "\n" not in str(error.value)
        ((text, end),) = answers(made, [pictures[1]])
        assert text == stock(model_of(ONEVISION), pictures[1])
        notes = [n for n in end.trace.get("notes", ()) if "drafted no longer" in n]  # type: ignore[union-attr]
        assert len(notes) == 1 and empty(made)
    monkeypatch.setattr(SecondModel, "_prompt", other_patches(SecondModel._prompt))
    with engine(spec_of("near")) as made:
        with pytest.raises(MmfastError, match=r"its images are \d+ tokens, and \d+ stand there"):
            Ear(made, pictures[0])
        monkeypatch.setattr(DraftRows, "add", broken)
        ((text, end),) = answers(made, [pictures[1]])
        assert text == stock(model_of(ONEVISION), pictures[1]) and counts(end) == (0, 0)
        assert "no room at all" in end.trace["notes"][-1] and empty(made)  # type: ignore[union-attr]


def other_patches(prompt: Any) -> Any:
    """Read prompts of a model whose images have one token more."""

    def read(self: SecondModel, plan: Any, prepared: Any) -> Any:
        ids = prepared.inputs["input_ids"]
        token = self._main.config.image_token_id
        more = torch.cat([ids, ids[:, (ids[0] == token).nonzero()[:1, 0]]], 1)
        return prompt(self, plan, replace(prepared, inputs={**prepared.inputs, "input_ids": more}))

    return read


def broken(self: DraftRows, row: Any) -> None:
    raise MmfastError("no room at all")
