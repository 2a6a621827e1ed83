"""Training batches of the decoder: clips or pictures, questions behind them, dense labels."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch
from einops import rearrange
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize
from transformers import PreTrainedTokenizerFast
from transformers.models.llava_onevision.modeling_llava_onevision import unpad_image

from mmfast.tiny.training import shares
from mmfast.tiny.video import scene
from mmfast.tiny.video.clips import Bank
from mmfast.tiny.video.model import ASSISTANT, END, USER, DecoderLayout, DecoderOutput, run_decoder
from mmfast.tiny.video.questions import KINDS, STILL_WORDINGS, WORDINGS, Fact, Wordings, facts

Weights = dict[str, float]
UNMARKED = 0.15  # share of questions without their question mark


@dataclass(frozen=True)
class PackedQuestions:
    """Questions and answers of a batch, one row per clip, padded on the right."""

    ids: Tensor  # tokens. `[B, L]`
    block: Tensor  # number of the question, -1 = padding. `[B, L]`
    within: Tensor  # place in its question. `[B, L]`
    labels: Tensor  # next token where it belongs to an answer, else IGNORE. `[B, L]`
    named: Tensor  # 1 + the thing whose name ends here, 0 = none. `[B, L]`

    def bias(self, prefix: Tensor) -> Tensor:
        """Bias of the questions on prefix `[B, P]` and themselves: `[B, 1, L, P + L]`."""
        same = self.block[:, :, None] == self.block[:, None, :]
        own = same & (self.within[:, :, None] >= self.within[:, None, :])
        hidden = prefix.new_zeros(own.shape).masked_fill(~own, float("-inf"))
        return torch.cat([prefix[:, None].expand(-1, own.shape[1], -1), hidden], 2)[:, None]

    def columns(self) -> list[Tensor]:
        """All fields `[B, L]`, in order."""
        return [getattr(self, each.name) for each in fields(self)]

    def to(self, device: torch.device | str) -> PackedQuestions:
        """The same on a device."""
        return PackedQuestions(*(column.to(device) for column in self.columns()))

    def correct(self, guesses: Tensor) -> list[list[bool]]:
        """For each row and question, whether every answer token is right: guesses `[B, L]`."""
        wrong = (guesses != self.labels) & (self.labels != scene.IGNORE)
        return [
            [not bool(w[b == k].any()) for k in range(int(b.max()) + 1)]
            for w, b in zip(wrong, self.block, strict=True)
        ]


def pack(
    rows: Sequence[Sequence[tuple[list[int], list[int]]]],
    marks: Sequence[Sequence[dict[int, int]]] = (),
) -> PackedQuestions:
    """Pack rows of (question ids, answer ids); `marks` has the thing named up to each token."""
    columns: list[list[list[int]]] = [[], [], [], [], []]
    for line, row in enumerate(rows):
        found: tuple[list[int], ...] = ([], [], [], [], [])
        for number, (question, answer) in enumerate(row):
            text = [*question, ASSISTANT, *answer]
            mark = marks[line][number] if marks else {}
            labels = [scene.IGNORE] * len(question) + [*answer, END]
            named = [mark.get(place, 0) for place in range(len(text))]
            parts = (text, [number] * len(text), range(len(text)), labels, named)
            for values, part in zip(found, parts, strict=True):
                values += part
        for column, values in zip(columns, found, strict=True):
            column.append(values)
    length = max(map(len, columns[0]))
    padded = [
        torch.tensor([values + [fill] * (length - len(values)) for values in column])
        for column, fill in zip(columns, (END, -1, 0, scene.IGNORE, 0), strict=True)
    ]
    return PackedQuestions(*padded)


@dataclass(frozen=True)
class Lesson:
    """One batch."""

    tokens: Tensor  # visual tokens. `[B, T, P, D]`
    packed: PackedQuestions  # the questions
    kinds: list[list[str]]  # for each clip the kind of each question
    # See `motion_labels`, and the `count_labels`; none for pictures. `[B, T, P]`
    motion: dict[str, Tensor] = field(default_factory=dict)
    # See `thing_labels`; none for pictures. `[B, 1 + THINGS]`
    things: dict[str, Tensor] = field(default_factory=dict)
    facts: list[list[Fact]] = field(default_factory=list)  # asked of each picture

    @property
    def every(self) -> Tensor:
        """Indices that keep all visual tokens: `[B, N]`."""
        every = torch.arange(self.tokens[0, ..., 0].numel(), device=self.tokens.device)
        return every.expand(len(self.tokens), -1)


def answer(model: Any, lesson: Lesson, kept: Tensor) -> DecoderOutput:
    """Run the decoder on the tokens of a lesson at the indices `kept` `[B, M]`."""
    shown = lesson.tokens.flatten(1, 2)  # [B, N, D]
    visual = shown.gather(1, kept[..., None].expand(-1, -1, shown.shape[-1]))
    return answer_from(model, lesson.packed, visual, kept, shown.shape[1])


def answer_from(
    model: Any,
    packed: PackedQuestions,
    visual: Tensor,
    at: Tensor,
    total: int,
    fused: Tensor | None = None,
) -> DecoderOutput:
    """Run the decoder on visual tokens `[B, M, D]` that stand at `at` `[B, M]` of `total`.

    Where M is 0, the questions stand alone, as in a prompt without media.
    `fused` `[B, 1 + L, D]` is added to the embeddings of the text, the first in front of the clip.
    """
    lm, batch = model.model.language_model, len(visual)
    user = lm.embed_tokens(torch.full((batch, 1), USER, device=at.device))
    words = lm.embed_tokens(packed.ids)
    if fused is not None:
        user, words = user + fused[:, :1], words + fused[:, 1:]
    newline = model.model.image_newline.expand(batch, 1, visual.shape[-1])
    prefix = torch.cat([user, visual, newline], 1)
    ends = torch.tensor([0, total + 1], device=at.device).expand(batch, 2)
    places = torch.cat([ends[:, :1], at + 1, ends[:, 1:]], 1)
    if not visual.shape[1]:
        prefix, places, total = user, ends[:, :1], -1
    bias = packed.bias(torch.zeros(places.shape, device=at.device))
    layout = DecoderLayout(places, total + 2 + packed.within, [bias])
    return run_decoder(lm, prefix, words, layout)


def answer_loss(model: Any, states: Tensor, labels: Tensor) -> Tensor:
    """Mean loss of the answer tokens: states `[B, L, D]`, labels `[B, L]`."""
    asked = labels != scene.IGNORE
    return cross_entropy(model.lm_head(states[asked]), labels[asked])


@torch.no_grad()
def score(model: Any, lessons: Sequence[Lesson], keep: float = 1, way: str = "") -> Weights:
    """Share of questions answered correctly by kind, every answer token counted."""
    marks: list[tuple[str, bool]] = []
    rng = torch.Generator().manual_seed(0)
    for lesson in lessons:
        kept = lesson.every
        if keep < 1:
            kept = choose(lesson.tokens, round(keep * kept.shape[1]), way, rng)
        guesses = model.lm_head(answer(model, lesson, kept).states).argmax(-1).cpu()
        marked = lesson.packed.to("cpu").correct(guesses)
        for kinds, row in zip(lesson.kinds, marked, strict=True):
            marks += zip(kinds, row, strict=True)
    return shares(marks, KINDS)


class ClipSampler:
    """Batches from a bank of clips with computed visual tokens; half of them run backwards."""

    def __init__(
        self, bank: Bank, tokens: Tensor, tokenizer: PreTrainedTokenizerFast, seed: int
    ) -> None:
        self.bank, self.tokens, self.tokenizer = bank, tokens, tokenizer
        self.rng = np.random.default_rng(seed)
        self.texts: dict[str, list[int]] = {}
        self.known: dict[tuple[int, bool], tuple[dict[str, list[Fact]], dict[str, Tensor]]] = {}

    def ids(self, text: str) -> list[int]:
        """Token ids of a text, cached."""
        if text not in self.texts:
            self.texts[text] = self.tokenizer.encode(text, add_special_tokens=False)
        return self.texts[text]

    def lesson(self, clips: Sequence[int], questions: int, weights: Weights) -> Lesson:
        """A batch of the given clips with about so many questions each."""
        tokens, rows, marks, kinds, motions, things = [], [], [], [], [], []
        for clip in clips:
            back = bool(self.rng.random() < 0.5)
            by_kind, dense = self._facts(clip, back)
            chosen = self._choose(by_kind, questions, weights)
            rows.append([(self.ids(_worded(f, self.rng)), self.ids(f.answer)) for f in chosen])
            marks.append([self._names(clip, ids) for ids, _ in rows[-1]])
            kinds.append([f.kind for f in chosen])
            table = self.bank.tables[clip]
            things.append(scene.thing_labels(table.backwards() if back else table))
            shown = self.tokens[clip].float()
            tokens.append(shown.flip(0) if back else shown)
            motions.append(dense)
        motion = {k: torch.stack([m[k] for m in motions]).long() for k in motions[0]}
        named = {k: torch.stack([t[k] for t in things]) for k in things[0]}
        return Lesson(torch.stack(tokens), pack(rows, marks), kinds, motion, named)

    def _names(self, clip: int, ids: list[int]) -> dict[int, int]:
        table, found = self.bank.tables[clip], {}
        for thing in range(table.count):
            first, second = self.ids(" " + table.name(thing))
            for place in range(1, len(ids)):
                if ids[place - 1] == first and ids[place] == second:
                    found[place] = thing + 1
        return found

    def _facts(self, clip: int, back: bool) -> tuple[dict[str, list[Fact]], dict[str, Tensor]]:
        if (clip, back) not in self.known:
            table, owners = self.bank.tables[clip], self.bank.cells[clip]
            if back:
                table, owners = table.backwards(), owners.flip(0)
            by_kind = defaultdict(list)
            for fact in facts(table):
                by_kind[fact.kind].append(fact)
            dense = {k: v.to(torch.int8) for k, v in scene.motion_labels(owners, table).items()}
            self.known[clip, back] = (dict(by_kind), {**dense, "count": scene.count_labels(table)})
        return self.known[clip, back]

    def _choose(self, by_kind: dict[str, list[Fact]], most: int, weights: Weights) -> list[Fact]:
        keyed = []
        for kind, known in by_kind.items():
            for place, which in enumerate(self.rng.permutation(len(known))):
                # Exponential race: the n-th fact of a kind is n times less urgent.
                delay = self.rng.exponential() * (1 + place) / weights[kind]
                keyed.append((delay, known[which]))
        return [fact for _, fact in sorted(keyed, key=lambda pair: pair[0])[:most]]


def _worded(
    fact: Fact, rng: np.random.Generator, table: Wordings = WORDINGS, unmarked: float = UNMARKED
) -> str:
    text = fact.ask(int(rng.integers(len(table[fact.kind]))), table)
    return text.rstrip("?") if rng.random() < unmarked else text


SUBSETS = ("random", "uniform", "change", "diverse")


@torch.no_grad()
def choose(tokens: Tensor, keep: int, way: str, rng: torch.Generator) -> Tensor:
    """Choose tokens `[B, T, P, D]` to keep by a way of SUBSETS: ascending indices `[B, keep]`."""
    batch, frames, patches, _ = tokens.shape
    total = frames * patches
    if way == "uniform":
        shift = torch.rand((), generator=rng)
        picked = ((torch.arange(keep) + shift) * (total / keep)).long().clamp(max=total - 1)
        return picked.to(tokens.device).expand(batch, keep)
    if way == "diverse":
        return _farthest(tokens.flatten(1, 2), keep).sort(-1).values
    urge = torch.rand(batch, total, generator=rng).to(tokens.device)
    if way == "change":
        unit = normalize(tokens, dim=-1)
        change = 1 - (unit[:, 1:] * unit[:, :-1]).sum(-1)
        new = change.new_full((batch, 1, patches), 2.0)  # the first frame
        urge = torch.cat([new, change], 1).flatten(1) + 0.02 * urge
    return urge.topk(keep).indices.sort(-1).values


def _farthest(tokens: Tensor, keep: int) -> Tensor:
    """Farthest-point sampling by cosine: `[B, N, D]` to `[B, keep]`."""
    unit = normalize(tokens, dim=-1)
    gap = 1 - unit @ unit.mT  # [B, N, N]
    rows = torch.arange(len(tokens), device=tokens.device)
    chosen = [gap.mean(-1).argmax(-1)]
    nearest = gap[rows, chosen[0]]
    for _ in range(keep - 1):
        chosen.append(nearest.argmax(-1))
        nearest = torch.minimum(nearest, gap[rows, chosen[-1]])
        nearest[rows, chosen[-1]] = -1.0  # never twice
    return torch.stack(chosen, -1)


def laid_out(encoded: Tensor, newline: Tensor, size: tuple[int, int] = (1, 1)) -> Tensor:
    """Lay out pictures as the image path does: `[B, 1 + tiles, P, H]` to `[B, 1, N, H]`.

    All are of one size, height and width: the tiles without the padding around it are shown.
    """
    tiles = encoded[:, 1:] if encoded.shape[1] > 1 else encoded
    grid, side = round(tiles.shape[1] ** 0.5), round(tiles.shape[2] ** 0.5)
    mosaic = rearrange(tiles, "b (r c) (y x) h -> b (r y) (c x) h", r=grid, y=side)
    places = torch.arange(mosaic[0, ..., 0].numel()).view(1, grid * side, grid * side)
    rows = unpad_image(places, size)[0].to(encoded.device)
    ends = newline.expand(len(encoded), len(rows), 1, -1)
    lines = torch.cat([mosaic.flatten(1, 2)[:, rows], ends], 2).flatten(1, 2)
    return torch.cat([encoded[:, 0], lines[:, :-1]], 1)[:, None]


class PictureSampler:
    """Batches of pictures as the image path lays them out: overview, tiles, and newlines.

    `tokens` are projected features of overview and tiles, float16 `[n, 1 + tiles, P, H]`; a picture
    of one tile is its own overview. A share of questions is `unmarked`.
    """

    def __init__(
        self,
        model: Any,
        tokens: Tensor,
        facts: Sequence[Sequence[Fact]],
        tokenizer: PreTrainedTokenizerFast,
        seed: int,
        unmarked: float = UNMARKED,
        wordings: Wordings = STILL_WORDINGS,
    ) -> None:
        self.newline, self.wordings = model.model.image_newline, wordings
        self.tokens, self.facts, self.tokenizer = tokens, facts, tokenizer
        self.rng, self.unmarked = np.random.default_rng([seed, 1]), unmarked
        self.texts: dict[str, list[int]] = {}
        self.useful = [i for i, known in enumerate(facts) if known]

    def draw(self, size: int) -> list[int]:
        """Random pictures about which something can be asked."""
        return [int(i) for i in self.rng.choice(self.useful, size, replace=False)]

    def lesson(self, chosen: Sequence[int], questions: int) -> Lesson:
        """A batch; the newline that ends a picture is added by the forward pass."""
        rows, kinds, every = [], [], []
        for picture in chosen:
            known = self.facts[picture]
            asked = [known[i] for i in self.rng.permutation(len(known))[:questions]]
            kinds.append([fact.kind for fact in asked])
            rows.append([self._ids(fact) for fact in asked])
            every.append(asked)
        shown = laid_out(self.tokens[list(chosen)].float(), self.newline)
        return Lesson(shown, pack(rows).to(shown.device), kinds, facts=every)

    def _ids(self, fact: Fact) -> tuple[list[int], list[int]]:
        text = _worded(fact, self.rng, self.wordings, self.unmarked)
        for each in (text, fact.answer):
            if each not in self.texts:
                self.texts[each] = self.tokenizer.encode(each)
        return self.texts[text], self.texts[fact.answer]
