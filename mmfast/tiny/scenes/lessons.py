"""Training batches of the larger world: several questions about a clip or picture in one row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from einops import rearrange
from numpy.typing import NDArray
from torch import Tensor
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as vision

from mmfast.tiny.scenes import outside
from mmfast.tiny.scenes.albums import album_items
from mmfast.tiny.scenes.bank import SceneBank
from mmfast.tiny.scenes.everyday import everyday
from mmfast.tiny.scenes.facts import clip_items, picture_items
from mmfast.tiny.scenes.questions import ABSENT, CLIP_KINDS, LOOSE, OUTSIDE, SceneItem, varied
from mmfast.tiny.scenes.readout import ALL, SceneReadout, name_number, names_there, thing_numbers
from mmfast.tiny.training import shares
from mmfast.tiny.video.lessons import Lesson, PackedQuestions, Weights, answer, laid_out, pack
from mmfast.tiny.video.model import ASSISTANT, END, USER
from mmfast.tiny.video.scene import COLOURS, IGNORE, SAMPLED, SHAPES, Table

KINDS = (*CLIP_KINDS, OUTSIDE, ABSENT, *LOOSE)
LONG = ("where", "describe")  # scored in training by tokens
TOTALS = ("count", "describe")  # ask for everything that is there
LEAST = 0.4  # weight of a kind that is always right
WORLDLY = 0.35  # share of the questions from outside that are worded as those of the world
DAILY = 0.5  # share of those of everyday life
CLAUSE = 0.25  # share of these that are clauses behind what people say first
GREY = 127  # mean of the pixels as the processor knows them
FEW = 8  # questions about a clip outside the world
Pair = tuple[list[int], list[int]]  # ids of a question and its answer


@dataclass(frozen=True)
class Encoded:
    """Visual tokens of a bank after tower and projector, clips outside the world last."""

    clips: Tensor  # pooled, float16 `[n, T, P, H]`
    # Overview, all of it without distortion, and as one of several. float16 `[m, 3, 4 P, H]`
    pictures: Tensor
    frames: list[tuple[int, int]]  # clip and frame of each picture
    sizes: list[tuple[int, int]]  # height and width of each picture


@dataclass(frozen=True)
class SceneDraft:
    """A drawn batch without its visual tokens: arrays, as worker processes hand them over."""

    media: list[int]  # numbers of the clips, or of the pictures, those of a prompt side by side
    back: list[bool]  # which clips are played backwards
    still: bool  # whether they are pictures
    album: int  # pictures in a prompt
    packed: NDArray[np.int16]  # fields of `PackedQuestions`. `[5, B, L]`
    kinds: list[list[str]]  # for each medium the kind of each question
    numbers: NDArray[np.float32]  # see `thing_numbers`. `[B, 1 + THINGS, FACTS]`
    there: NDArray[np.float32]  # see `names_there`. `[B, NAMES]`


@dataclass(frozen=True)
class SceneAsk:
    """The batch to draw: its media, its random numbers, and what it should ask."""

    seed: tuple[int, ...]
    media: list[int]
    still: bool
    questions: int  # about a medium
    weights: Weights  # of the kinds of questions
    kept: bool = False  # in the wordings that training does not show
    album: int = 1  # pictures in a prompt, none of several outside the world


class SceneDrawer:
    """Questions and answers about a bank; half of the clips are played backwards."""

    def __init__(self, bank: SceneBank, frames: list[tuple[int, int]], tokenizer: Any) -> None:
        self.views, self.tables, self.frames = bank.views, bank.clips.tables, frames
        self.tokenizer, self.rng = tokenizer, np.random.default_rng(0)
        self.known: dict[tuple[int, bool | int], list[SceneItem]] = {}
        ids = (self._encode(f" {c} {s}") for s in SHAPES for c in COLOURS)
        self.names = {tuple(pair): number for number, pair in enumerate(ids)}

    def __call__(self, ask: SceneAsk) -> SceneDraft:
        """Draw a batch; it depends on what is asked alone."""
        self.rng = np.random.default_rng(ask.seed)
        rows, kinds, backs = [], [], list[bool]()
        marks, numbers, there = list[list[dict[int, int]]](), [], []
        for at in range(0, len(ask.media), ask.album):
            page = ask.media[at : at + ask.album]
            back = not ask.still and bool(self.rng.random() < 0.5)
            clip, frame = self.frames[page[0]] if ask.still else (page[0], None)
            if ask.album > 1:
                items = self._album(page)
            elif frame is None:
                items = self._clip(clip, back)
            else:
                items = self._picture(clip, frame)
            row, names = self._row(items, ask, clip >= len(self.views))
            lone = clip < len(self.views) and ask.album == 1
            table = self.tables[clip] if lone else None
            table = table.backwards() if table and back else table
            marks.append([self._marks(*each, table) for each in zip(row, names, strict=True)])
            numbers.append(thing_numbers(table, frame))
            there.append(names_there(table, frame))
            rows.append(row)
            kinds.append(names)
            backs.append(back)
        packed = torch.stack(pack(rows, marks).columns()).to(torch.int16).numpy()
        truth, shown = torch.stack(numbers).numpy(), torch.stack(there).numpy()
        return SceneDraft(ask.media, backs, ask.still, ask.album, packed, kinds, truth, shown)

    def _marks(self, pair: Pair, kind: str, table: Table | None) -> dict[int, int]:
        if table is None:
            return {}
        text, found = [*pair[0], ASSISTANT, *pair[1]], dict[int, int]()
        if kind in TOTALS:
            found[len(pair[0])] = ALL
        things = {name_number(table, i): i + 1 for i in range(table.count)}
        for place in range(1, len(text)):
            name = self.names.get((text[place - 1], text[place]))
            if name in things:
                found[place] = things[name]
        return found

    def _clip(self, clip: int, back: bool) -> list[SceneItem]:
        if clip >= len(self.views):
            return []
        if (clip, back) not in self.known:
            table = self.tables[clip]
            table = table.backwards() if back else table
            self.known[clip, back] = clip_items(self.views[clip], table)
        return self.known[clip, back]

    def _picture(self, clip: int, frame: int) -> list[SceneItem]:
        if clip >= len(self.views):
            return []
        key = clip, 2 + frame
        if key not in self.known:
            table = self.tables[clip]
            self.known[key] = picture_items(self.views[clip], table, frame)
        return self.known[key]

    def _album(self, pictures: Sequence[int]) -> list[SceneItem]:
        frames = [self.frames[picture] for picture in pictures]
        return album_items([(self._picture(*at), self.tables[at[0]], at[1]) for at in frames])

    def _row(
        self, items: list[SceneItem], ask: SceneAsk, strange: bool
    ) -> tuple[list[Pair], list[str]]:
        """Ids and kinds of the questions asked about a medium; all of a stranger are outside."""
        most, weights, kept = ask.questions, ask.weights, ask.kept
        if strange:  # anything that could be asked of another clip
            items, most = self._clip(int(self.rng.integers(len(self.views))), False), FEW
        chosen = self._choose(items, most, weights)
        found = [(self._ids(item, kept, strange), OUTSIDE if strange else item.kind)
                 for item in chosen]  # fmt: skip
        many = 0 if strange else int(weights[OUTSIDE] + self.rng.random())
        for _ in range(many):
            text = varied(self._foreign(kept), self.rng)
            found.append(((self._encode(text), self._encode(outside.REFUSAL)), OUTSIDE))
        return [pair for pair, _ in found], [kind for _, kind in found]

    def _foreign(self, kept: bool) -> str:
        way = self.rng.random()
        if way < WORLDLY:
            return outside.worldly(self.rng, kept, said=bool(self.rng.random() < CLAUSE))
        if way < WORLDLY + DAILY and not kept:
            return everyday(self.rng)
        return outside.question(self.rng, kept)

    def _choose(self, items: list[SceneItem], most: int, weights: Weights) -> list[SceneItem]:
        keyed, seen = [], dict[str, int]()
        for which in self.rng.permutation(len(items)):
            item = items[which]
            seen[item.kind] = place = seen.get(item.kind, 0) + 1
            # Exponential race: the n-th item of a kind is n times less urgent.
            keyed.append((self.rng.exponential() * place / weights[item.kind], item))
        return [item for _, item in sorted(keyed, key=lambda pair: pair[0])[:most]]

    def _ids(self, item: SceneItem, kept: bool, strange: bool) -> Pair:
        question = self._encode(self._worded(item, kept))
        if item.before is not None:
            said = outside.REFUSAL if strange else item.before.answer
            first = self._encode(self._worded(item.before, kept))
            question = [*first, ASSISTANT, *self._encode(said), END, USER, *question]
        return question, self._encode(outside.REFUSAL if strange else item.answer)

    def _worded(self, item: SceneItem, kept: bool) -> str:
        numbers = item.wordings(kept)
        return varied(item.worded(numbers[int(self.rng.integers(len(numbers)))]), self.rng)

    def _encode(self, text: str) -> list[int]:
        # The tokenizer's own library: the class around it takes most of the time of a batch.
        ids: list[int] = self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
        return ids


class SceneSampler:
    """Lessons from drafts and the visual tokens of a bank, on the device of the newline."""

    def __init__(
        self, bank: SceneBank, encoded: Encoded, newline: Tensor, tokenizer: Any, seed: int
    ) -> None:
        self.bank, self.encoded, self.newline, self.tokenizer = bank, encoded, newline, tokenizer
        self.draw, self.seed = SceneDrawer(bank, encoded.frames, tokenizer), seed

    def lesson(self, draft: SceneDraft) -> Lesson:
        """A drawn batch with its visual tokens."""
        device = self.newline.device
        if draft.album > 1:  # each picture ends with a newline
            each = self.encoded.pictures[draft.media, 2].float()
            each = torch.cat([each, self.newline.expand(len(each), 1, -1)], 1)
            shown = rearrange(each, "(b a) n h -> b 1 (a n) h", a=draft.album)[:, :, :-1]
        elif draft.still:
            (size,) = {self.encoded.sizes[medium] for medium in draft.media}
            shown = laid_out(self.encoded.pictures[draft.media, :2].float(), self.newline, size)
        else:
            shown = self.encoded.clips[draft.media].float()
            back = torch.tensor(draft.back, device=device)[:, None, None, None]
            shown = torch.where(back, shown.flip(1), shown)
        columns = torch.from_numpy(draft.packed).to(device).long()
        truth = {"numbers": draft.numbers, "there": draft.there}
        things = {name: torch.from_numpy(value).to(device) for name, value in truth.items()}
        return Lesson(shown, PackedQuestions(*columns), draft.kinds, things=things)

    def clips(
        self, chosen: Sequence[int], questions: int, weights: Weights, kept: bool = False
    ) -> Lesson:
        """A batch of clips; `kept` asks in the wordings that training does not show."""
        ask = SceneAsk((self.seed, 2, *chosen), list(chosen), False, questions, weights, kept)
        return self.lesson(self.draw(ask))

    def pictures(
        self, chosen: Sequence[int], questions: int, weights: Weights, album: int = 1
    ) -> Lesson:
        """A batch of pictures of one size, or with so many of any size in a prompt."""
        seed = (self.seed, 3, *chosen)
        ask = SceneAsk(seed, list(chosen), True, questions, weights, album=album)
        return self.lesson(self.draw(ask))


def picture_frames(bank: SceneBank, many: int, seed: int) -> list[tuple[int, int]]:
    """Clip and frame of so many pictures on which something can be asked, strangers behind them."""
    rng, found, inside = np.random.default_rng([seed, 4]), list[tuple[int, int]](), len(bank.views)
    for clip in range(min(many, inside)):
        frame = int(rng.integers(SAMPLED))
        table = bank.clips.tables[clip]
        if table.alive[:, frame].any() or table.shown[frame]:  # else no item is about it
            found.append((clip, frame))
    strangers = range(inside, len(bank.clips.tables))
    return found + [(clip, int(rng.integers(SAMPLED))) for clip in strangers]


def picture_sizes(bank: SceneBank, frames: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Height and width of the canvas of each picture; strangers have those of known ones."""
    looks = [bank.views[clip].look for clip, _ in frames if clip < len(bank.views)]
    return [(looks[i % len(looks)].height, looks[i % len(looks)].width) for i in range(len(frames))]


def letterboxed(frame: Tensor, size: tuple[int, int], fill: int = 0) -> Tensor:
    """A square frame `[3, S, S]` as the image path shows a picture of a size.

    It is black around a single picture; `fill` is GREY around one of several.
    """
    side, longest = frame.shape[-1], max(size)
    high, wide = (min(-(-side * part // longest), side) for part in size)
    small = vision.resize(frame, [high, wide], InterpolationMode.BICUBIC, antialias=True)
    left, top = (side - wide) // 2, (side - high) // 2
    around = [left, top, side - wide - left, side - high - top]
    found: Tensor = vision.pad(small, around, fill=fill)
    return found


def token_weights(packed: PackedQuestions) -> Tensor:
    """Weight of each answer token: a long answer weighs as the root of its length. `[n]`."""
    asked = packed.labels != IGNORE
    rows = torch.arange(len(asked), device=asked.device)[:, None] * (int(packed.block.max()) + 1)
    answers = (rows + packed.block)[asked]  # number of the answer
    return torch.bincount(answers)[answers].float().rsqrt()


def scene_loss(
    model: Any, states: Tensor, packed: PackedQuestions, readout: SceneReadout
) -> Tensor:
    """Weighted mean loss of the answer tokens: states `[B, L, D]`."""
    each, weights = readout.answers(model, states, packed), token_weights(packed)
    return (each * weights).sum() / weights.sum()


@torch.no_grad()
def scene_score(model: Any, lessons: Sequence[Lesson]) -> Weights:
    """Share of answers that are right by kind; of long ones the share of their tokens."""
    marks: list[tuple[str, bool]] = []
    for lesson in lessons:
        states = answer(model, lesson, lesson.every).states
        guesses, packed = model.lm_head(states).argmax(-1).cpu(), lesson.packed.to("cpu")
        for line, (kinds, row) in enumerate(
            zip(lesson.kinds, packed.correct(guesses), strict=True)
        ):
            for number, (kind, right) in enumerate(zip(kinds, row, strict=True)):
                if kind not in LONG:
                    marks.append((kind, right))
                    continue
                mine = (packed.block[line] == number) & (packed.labels[line] != IGNORE)
                same = guesses[line][mine] == packed.labels[line][mine]
                marks += [(kind, bool(each)) for each in same]
    return shares(marks, KINDS)
