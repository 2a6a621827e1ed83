"""What the embedded speech model talks about."""

import re

import numpy as np
import pytest

from mmfast.core.errors import SpecError
from mmfast.pipelines.omni_chat import written
from mmfast.tiny.speech import text as domain
from mmfast.tiny.speech.text import PHRASES, RULES
from mmfast.tiny.video.questions import KINDS, WORDINGS, Fact

KNOWN = {*domain.words_of(RULES), *domain.MARKS}


def _many(make, count=400, seed=0, **options):
    rng = np.random.default_rng(seed)
    return [make(rng, **options) for _ in range(count)]


@pytest.mark.parametrize("split", ["train", "eval"])
@pytest.mark.parametrize("make", [domain.sentence, domain.question])
def test_texts_are_of_known_words(make, split):
    for text in _many(make, split=split):
        parts = domain.groups(text)
        assert set(parts) <= KNOWN
        assert re.sub(r" ([,.?])", r"\1", " ".join(parts)) == text
        assert text[-1] in ".?"


@pytest.mark.parametrize("make", [domain.sentence, domain.question])
def test_training_and_evaluation_never_meet(make):
    train = set(_many(make, 3000, split="train"))
    other = set(_many(make, 1000, seed=1, split="eval"))
    assert len(other) > 100
    assert not train & other
    # Nor where only the marks differ.
    bare = {re.sub(r"[,.?]", "", text) for text in train}
    assert not bare & {re.sub(r"[,.?]", "", text) for text in other}


def test_the_same_seed_says_the_same():
    assert _many(domain.sentence, 20, 3) == _many(domain.sentence, 20, 3)


def test_numbers_in_words():
    known = {
        0: "zero",
        42: "forty two",
        205: "two hundred and five",
        613: "six hundred and thirteen",
    }
    assert {number: domain.number_words(number) for number in known} == known
    with pytest.raises(SpecError, match="0 to 999"):
        domain.number_words(1000)


def test_every_question_about_a_clip_can_be_asked_and_typed_again():
    slots = {"direction": ("red star",), "position": ("blue cross", "end")}
    slots |= {"speed": ("red star", "blue cross"), "first": ("red star", "blue cross")}
    slots |= {"colour": ("star",), "shape": ("red",), "count": (), "number": ()}
    for kind in KINDS:
        fact = Fact(kind, slots[kind], "")
        for typed in (fact.ask(i) for i in range(len(WORDINGS[kind]))):
            ways = domain.spoken_variants(typed)
            assert {_bare(written(way)) for way in ways} == {_bare(typed)}
        ways = [w for i in range(len(WORDINGS[kind])) for w in domain.spoken_variants(fact.ask(i))]
        assert {domain.split_of(way) for way in ways} == {"train", "eval"}


def _bare(text):
    return re.sub(r"[^a-z ]", "", text.lower()).replace("color ", "colour ")


def test_typed_questions_have_a_capital_a_comma_and_a_question_mark():
    assert written("so what moves faster the red star or the blue cross") == (
        "What moves faster, the red star or the blue cross?"
    )
    assert written("how many objects are there") == "How many objects are there?"


def test_phrases_are_for_training_alone():
    assert all(domain.split_of(phrase) == "train" for phrase in PHRASES)
    assert not set(_many(domain.sentence, 500, split="eval")) & set(PHRASES)


def test_voices():
    assert len(set(domain.VOICES)) == 36
    assert domain.VOICES[2 * 9 + 3].name == domain.VOICE_NAMES[2]
    rng = np.random.default_rng(0)
    heard = {domain.heard_voice(rng) for _ in range(200)}
    assert len({voice.name for voice in heard}) > len(domain.VOICE_NAMES)
    assert not heard & set(domain.VOICES)


def test_rules_are_all_defined():
    for alternatives in RULES.values():
        for text in alternatives:
            assert set(domain.REFERENCE.findall(text)) <= set(RULES)
