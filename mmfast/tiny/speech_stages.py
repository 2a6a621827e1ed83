"""Stages of the speech recipe; each leaves a file, and what is there is not done again."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmfast.frontends.codecs.embedded_features import FRAME as HOP
from mmfast.models.speech_layout import SpeechLayout, specials, vocabulary
from mmfast.models.speech_tower import Tower
from mmfast.tiny.speech_bank import Heard, encoded, hear_bank, load_heard, save_heard, say_bank
from mmfast.tiny.speech_corpus import Corpus
from mmfast.tiny.speech_lessons import SPEEDS, Sizes, chats, recorded, said_lines
from mmfast.tiny.speech_losses import Model
from mmfast.tiny.speech_net import Net, Shape
from mmfast.tiny.speech_school import School
from mmfast.tiny.speech_text import PITCHES, VOICE_NAMES, WORDS
from mmfast.tiny.speech_trainer import Course, Trainer

Report = Callable[[dict[str, Any]], None]
# The ear alone first: it needs no codes, and what it learns, speaking does not undo.
EAR = Course("ear", ("hear", "hear"), minutes=12, hold=1.0, watch=3.0)
TASKS = ("say", "say", "chat", "say", "hear")
LANGUAGE = Course("language", TASKS, minutes=120, hold=0.45, short=0.04, warm=0.02)
RATE = 2e-3


def layout(books: int, entries: int) -> SpeechLayout:
    """The rows of the model for a codec of that size."""
    marks = specials(len(VOICE_NAMES), len(SPEEDS), len(PITCHES))
    rows = vocabulary(WORDS, marks)
    return SpeechLayout(rows, books, entries, VOICE_NAMES, SPEEDS, PITCHES)


def recordings(work: Path, sizes: Sizes, seed: int, report: Report) -> dict[str, Corpus]:
    """Stage 1: espeak-ng says everything."""
    start = time.monotonic()
    found = recorded(work / "corpus", sizes, seed)
    seconds = {kind: round(corpus.seconds) for kind, corpus in found.items()}
    report({"stage": "recordings", "seconds": time.monotonic() - start, "of_sound": seconds})
    return found


def ears(work: Path, corpora: dict[str, Corpus], seed: int) -> tuple[list[Heard], list[Heard]]:
    """Log-mel of what is heard: sentences, and the last questions of conversations."""
    found = []
    for kind in ("hear", "ask"):
        path = work / f"{kind}.npz"
        if not path.exists():
            save_heard(path, hear_bank(layout(1, 1), corpora[kind], seed))
        found.append(load_heard(path))
    return found[0], found[1]


def train_ear(work: Path, school: School, course: Course, report: Report) -> Model:
    """Stage 2: speech to text."""
    torch.manual_seed(school.seed)
    model = Model(Net(Shape(school.layout.base)), Tower(), school.layout)
    path = work / "ear.pt"
    if path.exists():
        model.load_state_dict(torch.load(path, weights_only=True))
        return model
    Trainer(model, school, RATE).train(course, report, lambda: _keep(model, path))
    return model


def _keep(model: Model, path: Path) -> None:
    part = path.with_suffix(".part")
    torch.save(model.state_dict(), part)
    part.replace(path)


def grown(model: Model, wanted: SpeechLayout, vectors: Tensor) -> Model:
    """The model with rows for all codes, those alike in sound near each other.

    Args:
        model: With text rows, `<next>` and `<end>`.
        wanted: The layout with the codec.
        vectors: `[Q, V, n]` what each code adds to the sound's features.
    """
    net = Net(Shape(wanted.total))
    width, old = net.shape.width, model.net.embed.shape[0]
    shared = torch.randn(vectors.shape[-1], width, generator=torch.Generator().manual_seed(3))
    flat = vectors.float() - vectors.float().mean(1, keepdim=True)
    flat = flat / flat.std(dim=(1, 2), keepdim=True)  # every book as loud as the others
    sound = (flat @ shared / vectors.shape[-1] ** 0.5).flatten(0, 1)
    state = {k: v for k, v in model.net.state_dict().items() if k not in ("embed", "head")}
    net.load_state_dict(state, strict=False)
    with torch.no_grad():
        net.embed[:old], net.head[:old] = model.net.embed, model.net.head
        books = torch.randn(len(vectors), 1, width).expand(-1, vectors.shape[1], -1).flatten(0, 1)
        net.embed[old:] = 0.5 * (0.8 * sound + 0.6 * books)
        net.head[old:] = 0.02 * sound
    larger = Model(net, model.tower, wanted)
    larger.last.load_state_dict(model.last.state_dict())
    larger.count.load_state_dict(model.count.state_dict())
    return larger


def lessons(
    wanted: SpeechLayout,
    work: Path,
    corpora: dict[str, Corpus],
    heard: tuple[list[Heard], list[Heard]],
    codec: Path,
    sizes: Sizes,
    seed: int,
) -> School:
    """Everything that is taught, with the codes of a codec."""
    turns, _, _, ways = chats(sizes.chat, seed)
    _, styles = said_lines(sizes.say, seed)
    codes = [encoded(work / f"{kind}_codes.npz", corpora[kind], codec) for kind in ("say", "reply")]
    said = say_bank(wanted, corpora["say"], styles, codes[0], HOP)
    replies = say_bank(wanted, corpora["reply"], ways, codes[1], HOP)
    spoken = list(zip(turns, heard[1], replies, strict=True))
    return School(wanted, said, heard[0], spoken, seed)
