"""The model of long texts, its documents, and the suite `needles`."""

from __future__ import annotations

import json
import re
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli_runs import fails, run

from mmfast.models.loading import EMBEDDED_TEXT, embedded_path
from mmfast.models.text_chat import load_text
from mmfast.tiny.card import write_card
from mmfast.tiny.text import evaluate
from mmfast.tiny.text.evaluate import DocumentReader, documents, needle_rows
from mmfast.tiny.text.haystack import (
    HOPS,
    KINDS,
    FactCounts,
    Haystack,
    make_document,
    vocabulary,
    words_of,
)
from mmfast.tiny.text.train import (
    FOUND,
    GROWN,
    IGNORE,
    PATIENCE,
    SPECIAL,
    START,
    TextSampler,
    TextTask,
    make_tokenizer,
)

HOME = embedded_path(EMBEDDED_TEXT)


@pytest.fixture(scope="module")
def reader() -> DocumentReader:
    return DocumentReader(*load_text(EMBEDDED_TEXT, "cpu", "float32"))


def solve(text: str, asked: str) -> str:
    """The answer, found by searching the text of a document with regular expressions."""
    if asked == "password":
        return re.findall(r"password (\w+)\.", text)[0]
    if times := len(re.findall(rf"one {asked} came by\.", text)):
        return str(times)
    if things := re.findall(rf"key {asked} (\w+)\.", text):
        return str(things[0])
    value = re.findall(rf"let {asked} (\w+)\.", text)[0]
    return str(value) if value.isdigit() else solve(text, value)


def some_document(length: int, seed: int, facts: FactCounts | None = None) -> Haystack:
    return make_document(length, np.random.default_rng(seed), facts or FactCounts())


@pytest.mark.parametrize("length", [512, 1000, 4096])
def test_documents_hold_every_answer_once(length: int) -> None:
    for seed in range(4):
        document = some_document(length, seed)
        assert length - 16 < len(words_of(document.text)) <= length
        assert len({q.text for q in document.questions}) == len(document.questions) == 19
        for question in document.questions:
            assert solve(document.text, question.lead) == question.answer, question
        assert {q.kind for q in document.questions} == set(KINDS)


def test_documents_are_those_of_their_seed() -> None:
    assert some_document(800, 3) == some_document(800, 3) != some_document(800, 4)
    first, again = (list(islice(documents(5, 600), 2)) for _ in range(2))
    assert first == again and first[0] != first[1]
    assert first[0] != next(documents(6, 600))


def test_facts_lie_anywhere_and_links_keep_their_order() -> None:
    places = list[float]()
    for seed in range(40):
        sentences = some_document(1024, seed).sentences
        places.append([s.startswith("password") for s in sentences].index(True) / len(sentences))
        known = set[str]()
        for sentence in (s for s in sentences if s.startswith("let ")):
            _, name, value, _ = words_of(sentence)
            assert value.isdigit() or value in known
            known.add(name)
        assert len(known) == FactCounts().chains * HOPS
    assert min(places) < 0.15 and max(places) > 0.85
    assert 0.35 < sum(places) / len(places) < 0.65


def test_words_of_facts_stand_elsewhere_too() -> None:
    document = some_document(4096, 1)
    thing = next(q.answer for q in document.questions if q.kind == "single")
    words = words_of(document.text)
    assert words.count(thing) > 1


def test_every_word_is_one_token_and_comes_back() -> None:
    words = make_tokenizer()
    document = some_document(2000, 2)
    ids = words(document.text).input_ids
    assert ids[0] == words.bos_token_id and words.unk_token_id not in ids
    assert words.decode(ids[1:]).split() == words_of(document.text)
    assert [words.convert_tokens_to_ids(word) for word in vocabulary()] == list(
        range(len(SPECIAL), len(words))
    )


def test_the_shipped_tokenizer_is_that_of_the_recipe(reader: DocumentReader) -> None:
    assert reader.words.get_vocab() == make_tokenizer().get_vocab()
    text = "key bati castle. question bati? bati"
    assert reader.words(text).input_ids == make_tokenizer()(text).input_ids
    assert reader.model.config.vocab_size == len(reader.words)


def test_lessons_teach_the_answers_of_their_documents() -> None:
    lesson, words = TextSampler(0).lesson(512), make_tokenizer()
    for ids, answers, kinds in zip(lesson.ids, lesson.answers, lesson.kinds, strict=True):
        said = answers != IGNORE
        assert torch.equal(ids[said], answers[said])
        assert said[kinds != IGNORE].all() and said.sum() > (kinds != IGNORE).sum()
        text = re.sub(r" (?=[.?])", "", words.decode(ids[1:]))
        body, *asked = re.split(r"question (?=\w+\?)", text.replace("<pad>", "").strip())
        for each in asked[:-1]:  # the last one may be cut off
            name, again, answer = re.match(r"(\w+)\? (\w+) (.*)\.", each).groups()  # type: ignore[union-attr]
            assert name == again and solve(body, name) == answer


def test_most_documents_ask_about_one_kind_of_fact() -> None:
    sampler = TextSampler(0)
    drawn = [sampler._facts(512) for _ in range(400)]
    many = [sum(n > 1 for n in (f.keys, f.chains, f.animals)) for f in drawn]
    assert 0.6 < sum(n <= 1 for n in many) / len(many) < 0.85 and max(many) == 3
    for name in ("keys", "chains", "animals"):
        assert max(getattr(facts, name) for facts in drawn) >= 8


def test_documents_grow_by_what_is_found_and_late_in_any_case() -> None:
    task = TextTask(0, 1e-3, 512)
    for kind in FOUND[:-1]:
        task.lately[kind].extend([1.0] * PATIENCE)
    task.batches(0, 0.1)
    assert task.length == START  # of one kind nothing is known
    task.lately[FOUND[-1]].extend([GROWN + 0.01] * PATIENCE)
    task.batches(1, 0.1)
    assert task.length == 2 * START and not any(task.lately.values())
    task.batches(2, 1.0)
    assert task.length == 512  # never longer than the longest


def test_places_part_sentences_and_nothing_else() -> None:
    lesson, words = TextSampler(1).lesson(256), make_tokenizer()
    stops = {words.convert_tokens_to_ids(mark) for mark in (".", "<s>", "<pad>")}
    for ids, places in zip(lesson.ids.tolist(), lesson.places.tolist(), strict=True):
        for before, one, two in zip(ids, places, places[1:], strict=False):
            assert two - one == 1 or before in stops
    reach = max(int(TextSampler(seed).lesson(256).places.max()) for seed in range(8))
    assert reach > 4096  # short documents reach over the distances of long ones


@pytest.mark.parametrize("aware", [False, True])
def test_answers_are_those_of_stock_generation(reader: DocumentReader, aware: bool) -> None:
    document = next(documents(11, 600))
    found, kept = reader.answers(document, document.questions, None, aware)
    assert kept == 1.0
    for question, text in zip(document.questions, found, strict=True):
        prompt = f"{document.text} {question.text} {question.lead}"
        ids = reader.words(prompt, return_tensors="pt").input_ids
        out = reader.model.generate(ids, max_new_tokens=2, do_sample=False)
        wanted = reader.words.decode(out[0, ids.shape[1] :]).split(".")[0].strip()
        assert text == wanted


@pytest.mark.parametrize("aware", [False, True])
def test_a_whole_share_changes_nothing_and_a_small_one_is_exact(
    reader: DocumentReader, aware: bool
) -> None:
    document = next(documents(12, 600))
    full, _ = reader.answers(document, document.questions, None, aware)
    whole, kept = reader.answers(document, document.questions, "snapkv:1.0", aware)
    assert whole == full and kept == 1.0
    _, kept = reader.answers(document, document.questions, "snapkv:0.25", aware)
    assert abs(kept - 0.25) < 0.01


def test_reducers_cut_prompts_with_their_question(reader: DocumentReader) -> None:
    document = next(documents(13, 600))
    asked = document.questions[:6]
    full, _ = reader.answers(document, asked, None, True)
    whole, kept = reader.answers(document, asked, None, reduce="fastkv:1.0?tokens=text")
    assert whole == full and kept == 1.0
    two = "random@llm0:0.5?tokens=text+fastkv@llm2:0.5?tokens=text"
    found, kept = reader.answers(document, asked, None, reduce=two)
    assert found != full and kept == pytest.approx(0.25, abs=0.01)  # of both cuts


def test_the_shipped_model_answers_about_unseen_documents() -> None:
    (row,) = needle_rows([], [], 57, 4321, 1024)
    assert row["n"] == 57 and row["accuracy"] > FLOOR and row["interval"][0] > 0.9, row
    assert row["by_kind"]["single"] == 1.0 and min(row["by_kind"].values()) >= 0.9, row


FLOOR = 0.97  # at 1,024 tokens


def test_a_cache_that_lost_the_document_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies whose values are zero behind the first token must cost nearly everything."""
    stock = evaluate._copies

    def emptied(cache: Any, many: int) -> Any:
        mine = stock(cache, many)
        for layer in mine.layers:
            layer.values[..., 1:, :] = 0
        return mine

    monkeypatch.setattr(evaluate, "_copies", emptied)
    (row,) = needle_rows([], [], 19, 4321, 600)
    assert row["accuracy"] < 0.3


def test_the_suite_on_the_command_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    asked = ("eval", "--suite", "needles", "--n", "9", "--length", "600", "--out", str(out))
    code, said, err = run(
        capsys, *asked, "--cache", "sink:0.05", "--cache", "keydiff:0.5", "--json"
    )
    assert code == 0, err
    whole, sink, half = json.loads(said)
    assert [row["cache"] for row in (whole, sink, half)] == [None, "sink:0.05", "keydiff:0.5"]
    assert whole["n"] == 9 and whole["length"] == 600 and whole["kept"] == 1.0
    assert sink["accuracy"] < whole["accuracy"] and sink["kept"] < 0.06
    kept = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [row["score"] for row in kept] == [row["accuracy"] for row in (whole, sink, half)]
    assert all(row["versions"] and row["model"] == EMBEDDED_TEXT for row in kept)
    both = ("--cache", "tova:0.5", "--reduce", "gemfilter:0.5?tokens=text")
    code, said, _ = run(capsys, *asked[:5], "--length", "600", "--aware", *both)
    assert code == 0 and "tova:0.5" in said and "gemfilter:0.5" in said and "keys" in said


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--suite", "needles", "--length", "20"], "--length 20 is no length"),
        (["--suite", "needles", "--reduce", "random:0.5"], "with its question; add --aware"),
        (["--suite", "needles", "--weights", "int8"], "needles takes no --weights"),
        (["--suite", "video", "--length", "600"], "video takes no --length"),
        (["--suite", "video", "--aware"], "video takes no --length and no --aware"),
    ],
)
def test_what_the_suite_does_not_take_is_refused(
    capsys: pytest.CaptureFixture[str], options: list[str], reason: str
) -> None:
    assert reason in fails(capsys, "eval", "--n", "1", *options)


def test_the_card_is_made_of_the_log(tmp_path: Path) -> None:
    for name in ("training.jsonl", "config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((HOME / name).read_bytes())
    write_card(tmp_path, EMBEDDED_TEXT)
    assert (tmp_path / "README.md").read_text() == (HOME / "README.md").read_text()
