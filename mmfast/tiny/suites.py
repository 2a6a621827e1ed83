"""Suites of questions to the embedded models: clips, pictures, several pictures, pages.

A suite is an endless sequence of cases; its kinds of question take turns, and the same seed gives
the same cases. Media are files as people have them (H.264 in mp4, JPEG, PNG), never training ones.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
from PIL import Image

from mmfast.core.errors import MmfastError, unknown
from mmfast.tiny.document import pages
from mmfast.tiny.video.clips import encode
from mmfast.tiny.video.questions import KINDS, STILL_WORDINGS, Fact, facts, still_facts
from mmfast.tiny.video.scene import (
    EVAL,
    FRAMES,
    Bytes,
    draw,
    make_scene,
    make_table,
    sampled_indices,
)

STILL_KINDS = ("colour", "shape", "count", "position", "number")
# A thing may be in several pictures of a prompt; what is asked of one must not depend on that.
ALBUM_KINDS = ("colour", "shape", "position", "number")
ALBUM = 3  # pictures in a prompt


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
    media: str  # `video` or `image`
    kinds: tuple[str, ...]  # kinds of question, in the order in which they take turns
    cases: Callable[[int], Iterator[SuiteCase]]  # `(seed) -> cases`
    summary: str  # one line


def suite(n: int, seed: int, name: str = "video") -> list[SuiteCase]:
    """First n cases of a suite; the same for the same seed."""
    return [case for case, _ in zip(suite_of(name).cases(seed), range(n), strict=False)]


def suite_of(name: str) -> Suite:
    """The suite called `name`; an unknown name is answered with the choices."""
    if name not in SUITES:
        raise MmfastError(unknown("suite", name, (*SUITES, "stream", "speech")))
    return SUITES[name]


@dataclass(frozen=True)
class Picture:
    """A frame, the facts that can be asked about it, and the things on it."""

    frame: Bytes  # [H, W, 3]
    known: list[Fact]
    names: list[tuple[str, str, str]]  # of each thing: name, shape, colour
    number: bool  # whether one is shown


def _clips(seed: int) -> Iterator[SuiteCase]:
    """Questions with clear answers about clips."""
    clips = count()
    for number in count():
        kind, known = KINDS[number % len(KINDS)], list[Fact]()
        while not known:  # such as a number where none is on screen
            scene = make_scene(EVAL, seed, next(clips))
            drawing = draw(scene)
            known = [f for f in facts(make_table(scene, drawing), margin=True) if f.kind == kind]
        fact = known[(7 * number) % len(known)]
        question = fact.ask(number // len(KINDS))
        yield SuiteCase((encode(drawing.frames),), question, fact.answer, kind)


def _stills(seed: int) -> Iterator[SuiteCase]:
    """Questions about one frame of a clip, as a JPEG."""
    pictures = _pictures(seed, 1)
    for number in count():
        kind = STILL_KINDS[number % len(STILL_KINDS)]
        yield next(case for shown in pictures if (case := _ask([shown], kind, number)))


def _albums(seed: int) -> Iterator[SuiteCase]:
    """Several pictures in one prompt, a question that only one of them answers."""
    pictures = _pictures(seed, 2)
    albums = ([next(pictures) for _ in range(ALBUM)] for _ in count())
    for number in count():
        kind = ALBUM_KINDS[number % len(ALBUM_KINDS)]
        yield next(case for shown in albums if (case := _ask(shown, kind, number)))


def _alone(fact: Fact, others: Sequence[Picture]) -> bool:
    """Return whether no other picture of the prompt has an answer, too."""
    if fact.kind == "number":
        return not any(other.number for other in others)
    return not any(fact.slots[0] in names for other in others for names in other.names)


def _pictures(seed: int, stream: int) -> Iterator[Picture]:
    """A random frame of each unseen clip, with its facts."""
    rng = np.random.default_rng([EVAL, seed, stream])
    for index in count():
        scene = make_scene(EVAL, seed, index)
        drawing = draw(scene)
        table = make_table(scene, drawing)
        at = int(rng.integers(len(sampled_indices(FRAMES))))
        things = [thing for i, thing in enumerate(scene.things) if table.alive[i, at]]
        yield Picture(
            drawing.frames[sampled_indices(FRAMES)[at]],
            still_facts(table, at),
            [(thing.name, thing.shape, thing.colour) for thing in things],
            bool(table.shown[at]),
        )


def _ask(shown: Sequence[Picture], kind: str, number: int) -> SuiteCase | None:
    """A question of a kind about pictures; None where there is none."""
    known = [
        fact
        for picture in shown
        for fact in picture.known
        if fact.kind == kind and _alone(fact, [other for other in shown if other is not picture])
    ]
    if not known:
        return None
    fact = known[(7 * number) % len(known)]
    files = tuple(_file(picture.frame, "JPEG") for picture in shown)
    return SuiteCase(files, fact.ask(number // 5, STILL_WORDINGS), fact.answer, kind)


def _documents(seed: int) -> Iterator[SuiteCase]:
    """Questions about pages with printed numbers, as PNG."""
    indices = count()
    for number in count():
        kind, known = pages.KINDS[number % len(pages.KINDS)], list[Fact]()
        while not known:
            page = pages.make_page(EVAL, seed, next(indices))
            known = [fact for fact in pages.page_facts(page) if fact.kind == kind]
        fact = known[(7 * number) % len(known)]
        question = fact.ask(number // len(pages.KINDS), STILL_WORDINGS)
        yield SuiteCase((_file(page.picture, "PNG"),), question, fact.answer, kind)


def _file(picture: Bytes, kind: str) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, kind, **({"quality": 92} if kind == "JPEG" else {}))
    return buffer.getvalue()


SUITES = {
    each.name: each
    for each in (
        Suite("video", "tiny-video", "video", KINDS, _clips, "clips of 8 frames"),
        Suite("image", "tiny-video", "image", STILL_KINDS, _stills, "single pictures"),
        Suite("multi-image", "tiny-video", "image", ALBUM_KINDS, _albums, "3 pictures a prompt"),
        Suite("document", "tiny-document", "image", pages.KINDS, _documents, "pages of nine tiles"),
    )
}
