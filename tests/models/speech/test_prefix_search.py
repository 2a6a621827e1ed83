"""Words by sound and text together: against all alignments of short sounds, counted one by one."""

from __future__ import annotations

import math
from collections import defaultdict
from itertools import groupby, product

import pytest
import torch
from torch import Tensor

from mmfast.models.speech.embedded import load_speech
from mmfast.models.speech.prefix_search import Prefix, PrefixSearch, next_words

WORDS, END = 4, 3  # class 0 is the blank, and class 3 of the prior ends a sentence


def bigrams(seed: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(WORDS, WORDS, generator=draw)).log_softmax(-1)


def searching(table: Tensor, weight: float, bonus: float) -> PrefixSearch:
    def prior(prefixes: list[Prefix]) -> Tensor:
        return torch.stack([table[prefix[-1] if prefix else 0] for prefix in prefixes])

    return PrefixSearch(prior, 0, END, weight, bonus)  # type: ignore[arg-type]


def best(chances: Tensor, table: Tensor, weight: float, bonus: float) -> Prefix:
    """The likeliest words, by the sum over every alignment there is."""
    sound: dict[Prefix, float] = defaultdict(float)
    for path in product(range(WORDS), repeat=len(chances)):
        chance = math.prod(float(frame[word]) for frame, word in zip(chances, path, strict=True))
        sound[tuple(word for word, _ in groupby(path) if word)] += chance

    def score(words: Prefix) -> float:
        text, before = 0.0, 0
        for word in (*words, END) if words else ():
            text, before = text + float(table[before, word]), word
        return math.log(sound[words] + 1e-300) + weight * text + bonus * len(words)

    return max(sound, key=score)


@pytest.mark.parametrize("seed", range(25))
def test_the_likeliest_of_all_alignments_is_found(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    weight, bonus = (0.0, 0.0) if seed % 5 == 0 else (0.6, 0.5)
    chances = (2 * torch.randn(5, WORDS, generator=draw)).softmax(-1)
    table = bigrams(seed)
    words, sure = searching(table, weight, bonus)(chances)
    assert tuple(words) == best(chances, table, weight, bonus)
    peaks = chances.max(0).values
    assert len(sure) == len(words)
    assert all(0 < s <= peaks[w] + 1e-6 for s, w in zip(sure, words, strict=True))


def test_a_word_twice_needs_a_blank_between() -> None:
    table = torch.zeros(WORDS, WORDS)
    sound = torch.full((3, WORDS), 0.01)
    sound[0, 1] = sound[1, 0] = sound[2, 1] = 0.97
    assert searching(table, 0, 0)(sound)[0] == [1, 1]
    sound[1, 0], sound[1, 1] = 0.01, 0.97
    assert searching(table, 0, 0)(sound)[0] == [1]


def test_text_decides_between_words_that_sound_alike() -> None:
    sound = torch.full((4, WORDS), 0.001)
    sound[0, 1] = sound[1, 0] = sound[3, 0] = 0.98
    sound[2, 2], sound[2, 3] = 0.49, 0.5  # the ear alone would take 3
    table = torch.full((WORDS, WORDS), -3.0)
    assert searching(table, 0, 0)(sound)[0] == [1, 3]
    table[1, 2] = -0.1
    words, sure = searching(table, 0.5, 1.5)(sound)
    assert words == [1, 2] and sure == pytest.approx([0.98, 0.49])


def test_nothing_is_heard_in_no_frames_and_in_blanks() -> None:
    search = searching(bigrams(0), 0.5, 1.5)
    assert search(torch.zeros(0, WORDS)) == ([], [])
    assert search(torch.tensor([[1.0, 0, 0, 0]] * 30)) == ([], [])


def test_padding_of_shorter_prefixes_is_not_seen() -> None:
    model = load_speech()
    lm, opening = model.replies.backbone, [model.layout.id("<user>")]
    words = [model.layout.index[f"{w}_"] for w in ("what", "is", "the", "opposite", "of")]
    together = next_words(lm, opening, [(), tuple(words), tuple(words[:2])])
    for row, prefix in zip(together, ((), words, words[:2]), strict=True):
        alone = next_words(lm, opening, [tuple(prefix)])[0]
        assert torch.allclose(row, alone, atol=1e-4)
