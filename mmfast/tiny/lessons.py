"""What a training step of the decoder is made of: clips, questions and dense labels."""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from mmfast.tiny.bank import Bank
from mmfast.tiny.labels import count_labels, motion_labels, thing_labels
from mmfast.tiny.packing import Packed, pack
from mmfast.tiny.questions import KINDS, WORDINGS, Fact, facts

Weights = dict[str, float]


@dataclass(frozen=True)
class Lesson:
    """One batch."""

    tokens: Tensor  # [B, T, P, D]
    packed: Packed
    kinds: list[list[str]]  # per clip, the kind of each question
    motion: dict[str, Tensor]  # [B, T, P]
    count: Tensor  # [B, T]
    things: dict[str, Tensor]  # [B, 1 + THINGS], see thing_labels


class School:
    """Draws batches from a bank whose visual tokens are already computed.

    Half of the clips are shown backwards: the features of a frame do not know the direction of
    time, so this is another clip for free, with its own facts.
    """

    def __init__(
        self, bank: Bank, tokens: Tensor, tokenizer: PreTrainedTokenizerFast, seed: int
    ) -> None:
        self.bank, self.tokens, self.tokenizer = bank, tokens, tokenizer
        self.rng = np.random.default_rng(seed)
        self.texts: dict[str, list[int]] = {}
        self.known: dict[tuple[int, bool], tuple[dict[str, list[Fact]], dict[str, Tensor]]] = {}

    def ids(self, text: str) -> list[int]:
        """Token ids of a text, remembered."""
        if text not in self.texts:
            self.texts[text] = self.tokenizer.encode(text, add_special_tokens=False)
        return self.texts[text]

    def lesson(self, clips: list[int], questions: int, weights: Weights) -> Lesson:
        """A batch of the given clips with about so many questions each."""
        tokens, rows, marks, kinds, motions, counts, things = [], [], [], [], [], [], []
        for clip in clips:
            back = bool(self.rng.random() < 0.5)
            by_kind, dense = self._knowledge(clip, back)
            chosen = self._choose(by_kind, questions, weights)
            rows.append([(self.ids(self._word(f)), self.ids(f.answer)) for f in chosen])
            marks.append([self._marks(clip, ids) for ids, _ in rows[-1]])
            things.append(
                thing_labels(self.bank.tables[clip].backwards() if back else self.bank.tables[clip])
            )
            kinds.append([f.kind for f in chosen])
            shown = self.tokens[clip].float()
            tokens.append(shown.flip(0) if back else shown)
            counts.append(dense["count"])
            motions.append(dense)
        motion = {
            k: torch.stack([m[k] for m in motions]).long() for k in motions[0] if k != "count"
        }
        named = {k: torch.stack([t[k] for t in things]) for k in things[0]}
        packed = pack(rows, marks)
        return Lesson(torch.stack(tokens), packed, kinds, motion, torch.stack(counts), named)

    def _marks(self, clip: int, ids: list[int]) -> dict[int, int]:
        """Where the names of things end in a question."""
        table, found = self.bank.tables[clip], {}
        for thing in range(table.count):
            first, second = self.ids(" " + table.name(thing))
            for place in range(1, len(ids)):
                if ids[place - 1] == first and ids[place] == second:
                    found[place] = thing + 1
        return found

    def _knowledge(self, clip: int, back: bool) -> tuple[dict[str, list[Fact]], dict[str, Tensor]]:
        if (clip, back) not in self.known:
            table, owners = self.bank.tables[clip], self.bank.cells[clip]
            if back:
                table, owners = table.backwards(), owners.flip(0)
            by_kind = defaultdict(list)
            for fact in facts(table):
                by_kind[fact.kind].append(fact)
            dense = {k: v.to(torch.int8) for k, v in motion_labels(owners, table).items()}
            dense["count"] = count_labels(table)
            self.known[clip, back] = (dict(by_kind), dense)
        return self.known[clip, back]

    def _choose(self, by_kind: dict[str, list[Fact]], most: int, weights: Weights) -> list[Fact]:
        """Facts in random order, kinds drawn by weight, none twice."""
        keyed = []
        for kind, known in by_kind.items():
            for place, which in enumerate(self.rng.permutation(len(known))):
                # Exponential race: the n-th fact of a kind is n times less urgent.
                delay = self.rng.exponential() * (1 + place) / weights[kind]
                keyed.append((delay, known[which]))
        return [fact for _, fact in sorted(keyed, key=lambda pair: pair[0])[:most]]

    def _word(self, fact: Fact) -> str:
        text = fact.ask(int(self.rng.integers(len(WORDINGS[fact.kind]))))
        return text if self.rng.random() < 0.85 else text.rstrip("?")


def even_weights() -> Weights:
    """The same weight for every kind."""
    return dict.fromkeys(KINDS, 1.0)
