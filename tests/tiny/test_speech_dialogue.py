"""Conversations of the embedded voice: every reply is checked by an oracle of its own."""

import re
from itertools import pairwise

import numpy as np
import pytest

from mmfast.tiny.speech import dialogue as talks
from mmfast.tiny.speech.dialogue import SLOTS, WORDS, dialogue, jumbled, recalled
from mmfast.tiny.speech.text import MARKS, VOICES, groups, number_words, sentence, split_of
from mmfast.tiny.speech.unheard import LANGUAGES, clatter, foreign, is_foreign

NUMBERS = {number_words(n): n for n in range(1000)} | {
    f"minus {number_words(n)}": -n for n in range(1, 30)
}
KNOWN = {*WORDS, *MARKS}
ECHOES = ("repeat", "say", "please say", "what did", "what was", "can you repeat")


def _many(make, count=400, seed=0, **options):
    rng = np.random.default_rng(seed)
    return [make(rng, **options) for _ in range(count)]


def exchanges(count=1500, seed=0, split="train"):
    """Question, reply and what came before, of replies that are whole."""
    for turns in _many(dialogue, count, seed, split=split):
        for i in range(0, len(turns), 2):
            if turns[i + 1].text[-1] in ".?":
                yield turns[i].text, turns[i + 1].text, turns[:i]


def test_conversations_take_turns_and_end_with_a_whole_reply():
    for split in ("train", "eval"):
        for turns in _many(dialogue, 200, split=split):
            assert [t.role for t in turns] == ["user", "assistant"] * (len(turns) // 2)
            assert set(groups(" ".join(t.text for t in turns))) <= KNOWN
            assert turns[-1].text[-1] in ".?"
            assert all(turn.text[-1] in ".?" for turn in turns[::2])


def test_the_same_seed_says_the_same():
    assert _many(dialogue, 20, 3) == _many(dialogue, 20, 3)
    assert _many(dialogue, 20, 3) != _many(dialogue, 20, 4)


def test_every_word_is_trained_on():
    texts = _many(sentence, 600) + _many(jumbled, 3000)
    assert {part for text in texts for part in groups(text)} == KNOWN


def test_sums_are_right():
    signs = {"plus": int.__add__, "minus": int.__sub__, "times": int.__mul__}
    seen = set()
    for asked, reply, _ in exchanges():
        found = re.fullmatch(r"([a-z ]+) (plus|minus|times) ([a-z ]+) is ([a-z ]+)\.", reply)
        if not found or not re.search("plus|minus|times|add|and|take|less|from|multiply", asked):
            continue
        if asked.startswith(ECHOES):
            continue
        a, sign, b, total = found.groups()
        assert signs[sign](NUMBERS[a], NUMBERS[b]) == NUMBERS[total], (asked, reply)
        assert a in asked and b in asked
        seen.add(sign)
    assert seen == set(signs)


def test_neighbours_days_and_months_are_right():
    rows = [[number_words(n) for n in range(101)], [*talks.DAYS, talks.DAYS[0]]]
    rows.append([*talks.MONTHS, talks.MONTHS[0]])
    pairs = {(one, other) for row in rows for one, other in pairwise(row)}
    seen = 0
    for asked, reply, _ in exchanges():
        found = re.fullmatch(r"([a-z ]+) comes (after|before) ([a-z ]+)\.", reply)
        if found is None or asked.startswith(ECHOES):
            continue
        there, way, here = found.groups()
        assert ((here, there) if way == "after" else (there, here)) in pairs, (asked, reply)
        assert here in asked
        seen += 1
    assert seen > 100


def test_what_was_told_is_what_is_recalled():
    seen = set()
    for between in range(5):
        for turns in _many(recalled, 60, between, between=between):
            (told, back), asked, reply = turns[0], turns[-1][0], turns[-1][1]
            slot = next(s for s in SLOTS if asked in [t.format() for t in talks.TOLD[f"{s} asked"]])
            value = next(
                m[1]
                for t in talks.TOLD[f"{slot} told"]
                if (m := re.fullmatch(re.escape(t).replace(r"\{\}", "(.+)"), told))
                and reply == talks.TOLD[f"{slot} reply"][0].format(m[1])
            )
            assert value in back and len(turns) == between + 2
            seen.add(slot)
    assert seen == set(SLOTS)


def test_what_was_never_told_is_not_known():
    found = [
        (before, reply)
        for asked, reply, before in exchanges(2500)
        if asked in talks.TOLD["name asked"]
    ]
    told = [
        any(re.search(r"name is|i'm|i am|call me", t.text) for t in before[::2])
        for before, _ in found
    ]
    replies = [reply for _, reply in found]
    assert "you did not tell me." in replies and any(r.startswith("your name is") for r in replies)
    assert all(
        reply == talks.UNTOLD for reply, known in zip(replies, told, strict=True) if not known
    )


def test_some_replies_are_cut_off_and_remembered_as_heard():
    cut = 0
    for turns in _many(dialogue, 1500):
        for before, ask, reply in zip(turns[1::2], turns[2::2], turns[3::2], strict=False):
            if before.text[-1] not in ".?," and ask.text in talks.ASKED["again"]:
                cut += reply.text == f"i said, {before.text.rstrip(',')}."
    assert cut > 3


def test_splits_share_no_question():
    train = {asked for asked, _, _ in exchanges(600)}
    rng, unseen = np.random.default_rng(5), set()
    for _ in range(2000):
        asked, _ = talks.CONTENT[int(rng.integers(8))](talks.SmallTalk(rng, "eval", [], {}))
        if split_of(asked) == "eval":
            unseen.add(asked)
    assert len(unseen) > 50
    heard = talks.spoken_questions(np.random.default_rng(1))
    assert not unseen & {next(heard) for _ in range(2000)}
    assert train  # conversations are split as wholes


@pytest.mark.parametrize("seed", range(3))
def test_other_languages_share_no_sentence_with_ours(seed):
    pytest.importorskip("espeakng_loader")
    from mmfast.tiny.speech.recordings import say

    lines = _many(foreign, 40, seed)
    assert all(is_foreign(voice) and len(text.split()) >= 3 for text, voice in lines)
    assert len({voice.name.split("+")[0] for _, voice in lines}) > len(LANGUAGES) / 2
    assert not any(is_foreign(voice) for voice in VOICES)
    assert len(say(*lines[0]).pcm) > 4000


def test_clatter_is_sound_of_many_kinds():
    rng = np.random.default_rng(0)
    found = [clatter(rng) for _ in range(60)]
    assert all(np.isfinite(s).all() and np.abs(s).max() <= 1 and len(s) >= 6400 for s in found)
    assert len({round(float(np.std(s)), 3) for s in found}) > 20
