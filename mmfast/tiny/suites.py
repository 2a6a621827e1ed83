"""Suites of questions to the embedded models, as files: clips, pictures, albums, pages."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from typing import Any

import numpy as np
from PIL import Image

from mmfast.tiny.document import pages, prints
from mmfast.tiny.names import check_suite
from mmfast.tiny.video import scene
from mmfast.tiny.video.clips import encode
from mmfast.tiny.video.questions import KINDS, WORDINGS, Fact, Wordings, facts, still_facts

STILL_KINDS = ("colour", "shape", "count", "position", "number")
# A thing may be in several pictures of a prompt; what is asked of one must not depend on that.
ALBUM_KINDS = ("colour", "shape", "position", "number")
ALBUM = 3  # pictures in a prompt
Medium = tuple[Callable[[], tuple[bytes, ...]], list[Fact]]  # its files, and what can be asked


@dataclass(frozen=True)
class SuiteCase:
    """A question of some kind about media, the bytes of files, and its only right answer."""

    media: tuple[bytes, ...]
    question: str
    answer: str
    kind: str


@dataclass(frozen=True)
class Suite:
    """A subset of the evaluation."""

    name: str  # on the command line
    model: str  # the embedded model that it is meant for
    kinds: tuple[str, ...]  # kinds of question, in the order in which they take turns
    source: Callable[[int], Iterator[Medium]]  # media of a seed
    summary: str  # one line

    @property
    def media(self) -> str:
        """Media of a prompt: `video` or `image`."""
        return "video" if self.name == "video" else "image"

    @property
    def wordings(self) -> Wordings:
        """Wordings of its questions by kind."""
        return WORDINGS if self.media == "video" else prints.PAGE_WORDINGS

    def cases(self, seed: int) -> Iterator[SuiteCase]:
        """Cases of all kinds in turn, each about the next media that have a fact of its kind."""
        media, turn = self.source(seed), max(len(self.kinds), len(STILL_KINDS))
        for number in count():
            kind, known = self.kinds[number % len(self.kinds)], list[Fact]()
            while not known:  # such as a number where none is on screen
                files, every = next(media)
                known = [fact for fact in every if fact.kind == kind]
            fact = known[(7 * number) % len(known)]
            question = fact.ask(number // turn, self.wordings)
            yield SuiteCase(files(), question, fact.answer, kind)


def suite(n: int, seed: int, name: str = "video") -> list[SuiteCase]:
    """First n cases of a suite; the same for the same seed."""
    return [case for case, _ in zip(suite_of(name).cases(seed), range(n), strict=False)]


def suite_of(name: str) -> Suite:
    """The suite called `name`; an unknown name is answered with the choices."""
    check_suite(name)
    return SUITES[name]


@dataclass(frozen=True)
class Picture:
    """A frame, the facts that can be asked about it, and the things on it."""

    frame: scene.Bytes  # [H, W, 3]
    known: list[Fact]
    names: list[tuple[str, str, str]]  # of each thing: name, shape, colour
    number: bool  # whether one is shown


def _clips(seed: int) -> Iterator[Medium]:
    for index in count():
        draft = scene.make_scene(scene.EVAL, seed, index)
        drawing = scene.draw(draft)
        known = facts(scene.make_table(draft, drawing), margin=True)
        yield partial(_clip, drawing.frames), known


def _clip(frames: scene.Bytes) -> tuple[bytes, ...]:
    return (encode(frames),)


def _pages(
    make: Callable[[int, int, int], Any], facts: Callable[[Any], Iterable[Fact]], seed: int
) -> Iterator[Medium]:
    for index in count():
        page = make(scene.EVAL, seed, index)
        yield partial(_files, [page.picture], "PNG"), list(facts(page))


def _albums(stream: int, size: int, seed: int) -> Iterator[Medium]:
    """Frames of clips as JPEG, `size` in a prompt, and the facts that one of them alone answers."""
    pictures = _pictures(seed, stream)
    while True:
        shown = list(islice(pictures, size))
        known = [
            fact
            for picture in shown
            for fact in picture.known
            if _alone(fact, [other for other in shown if other is not picture])
        ]
        yield partial(_files, [picture.frame for picture in shown], "JPEG", quality=92), known


def _alone(fact: Fact, others: Sequence[Picture]) -> bool:
    if fact.kind == "number":
        return not any(other.number for other in others)
    return not any(set(fact.slots) & set(names) for other in others for names in other.names)


def _pictures(seed: int, stream: int) -> Iterator[Picture]:
    rng = np.random.default_rng([scene.EVAL, seed, stream])
    for index in count():
        draft = scene.make_scene(scene.EVAL, seed, index)
        drawing = scene.draw(draft)
        table = scene.make_table(draft, drawing)
        at = int(rng.integers(len(scene.sampled_indices(scene.FRAMES))))
        things = [thing for i, thing in enumerate(draft.things) if table.alive[i, at]]
        yield Picture(
            drawing.frames[scene.sampled_indices(scene.FRAMES)[at]],
            still_facts(table, at),
            [(thing.name, thing.shape, thing.colour) for thing in things],
            bool(table.shown[at]),
        )


def _files(pictures: Sequence[scene.Bytes], kind: str, **options: Any) -> tuple[bytes, ...]:
    buffers = [io.BytesIO() for _ in pictures]
    for buffer, picture in zip(buffers, pictures, strict=True):
        Image.fromarray(picture).save(buffer, kind, **options)
    return tuple(buffer.getvalue() for buffer in buffers)


SUITES = {
    each.name: each
    for each in (
        Suite("video", "tiny-video", KINDS, _clips, "clips of 8 frames"),
        Suite("image", "tiny-video", STILL_KINDS, partial(_albums, 1, 1), "single pictures"),
        Suite("multi-image", "tiny-video", ALBUM_KINDS, partial(_albums, 2, ALBUM),
              "3 pictures a prompt"),
        Suite("document", "tiny-document", pages.KINDS,
              partial(_pages, pages.make_page, pages.page_facts), "pages of nine tiles"),
        Suite("table", "tiny-document", prints.KINDS,
              partial(_pages, prints.make_print, prints.print_facts), "tables in 12-point print"),
    )
}  # fmt: skip


def order_cases(seed: int) -> Iterator[SuiteCase]:
    """Questions which of two things comes first; each thing is in one of two pictures alone."""
    pictures = _pictures(seed, ALBUM)
    for number in count():
        one, two = islice(pictures, 2)
        first, second = (
            [name for name, _, _ in a.names if name not in [other for other, _, _ in b.names]]
            for a, b in ((one, two), (two, one))
        )
        if first and second:
            pair = first[number % len(first)], second[number % len(second)]
            fact = Fact("first", pair if number % 2 else pair[::-1], pair[0])
            files = _files([one.frame, two.frame], "JPEG", quality=92)
            yield SuiteCase(files, fact.ask(number // 2), fact.answer, "first")
