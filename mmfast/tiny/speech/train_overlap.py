"""Train the ear for two speakers: `python -m mmfast.tiny.speech.train_overlap --out DIR`.

It goes on from the ear of a speech model, on mixtures of two voices; its target is one stream of
both speakers' words in order of their ends (t-SOT, Kanda et al. 2022, 2202.00842), by CTC.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import ParakeetForCTC

from mmfast.decoding.serialised import CHANGE, TimedWord, serialise_channels
from mmfast.models.loading import embedded_path
from mmfast.models.speech.ear import SLOTS
from mmfast.models.speech.layout import SpeechLayout
from mmfast.models.speech.overlap import (
    FRAME,
    OverlapEar,
    read_overlap,
    save_overlap,
    speaker_texts,
)
from mmfast.ops.audio import log_mel
from mmfast.tiny import training
from mmfast.tiny.speech.bank import HeardSpeech, heard_lines
from mmfast.tiny.speech.ear import FRAMES, EarTask
from mmfast.tiny.speech.overlap import LONGEST, VoiceMixture, cp_errors, mixed
from mmfast.tiny.speech.recordings import RATE, Corpus, build_corpus, worsen
from mmfast.tiny.speech.unheard import clatter, is_foreign

ALONE, NOISE = 0.12, 0.03  # share of mixtures with one voice, and with none
HELD = 40  # recordings whose mixtures are held out
PAIRS = 48  # mixtures that batches of about one length are cut from


def placed_stream(layout: SpeechLayout, words: Sequence[TimedWord], frames: int) -> HeardSpeech:
    """Return a stream as ids, each in a frame of its own as near to its time as there is one.

    `mel` is left empty; words that do not fit into the frames have none.
    """
    ids, at, free = list[int](), list[int](), 0
    for word in words:
        wanted = int(word.at * RATE / FRAME) - (word.text == CHANGE)
        for each in [layout.texts] if word.text == CHANGE else layout.group(word.text):
            free = max(free, wanted)
            ids.append(each)
            at.append(free)
            free += 1
    count = np.searchsorted(np.array(at), np.arange(frames), side="right")
    return HeardSpeech(np.zeros((0, 0), np.float16), ids, np.array([0, *ids])[count], count)


def lesson(layout: SpeechLayout, mixture: VoiceMixture, rng: np.random.Generator) -> HeardSpeech:
    """Return a mixture through a bad line, and the stream to be written of it."""
    sound, before = worsen(mixture.pcm, rng)
    mel = log_mel(torch.from_numpy(sound), torch.float32)
    mel = mel[: len(mel) // SLOTS * SLOTS]
    later = [
        [TimedWord(word.text, word.at + before / RATE) for word in own] for own in mixture.channels
    ]
    found = placed_stream(layout, serialise_channels(later), len(mel) // SLOTS)
    return HeardSpeech(mel.numpy().astype(np.float16), found.words, found.last, found.count)


class OverlapTask(EarTask):
    """An ear on mixtures that are drawn as it goes."""

    def __init__(
        self,
        layout: SpeechLayout,
        ear: ParakeetForCTC,
        corpus: Corpus,
        seed: int,
        rate: float,
        held: int = HELD,
    ) -> None:
        self.layout, self.ear, self.corpus = layout, ear, corpus
        self.optimiser = training.Optimiser.of(ear, (), rate)
        self.rng, self.done = np.random.default_rng([seed, 52]), 0.0
        self.fresh: list[list[HeardSpeech]] = []
        lines = [
            i
            for i, row in enumerate(corpus.recordings)
            if not is_foreign(row.voice) and len(row.words) <= LONGEST + 2
        ]
        self.lines, exam = lines[held:], lines[:held]
        own = np.random.default_rng([seed, 53])
        self.exam = [
            mixed(corpus[a], corpus[b], own) for a, b in zip(exam[::2], exam[1::2], strict=True)
        ]

    def mixture(self) -> VoiceMixture:
        """Draw two lines of different voices, one line, or noise."""
        draw, rows = self.rng.random(), self.corpus.recordings
        if draw < NOISE:
            return VoiceMixture(clatter(self.rng).astype(np.float32), ())
        first, second = (int(i) for i in self.rng.choice(self.lines, 2))
        alone = draw < NOISE + ALONE or rows[first].voice.name == rows[second].voice.name
        return mixed(self.corpus[first], None if alone else self.corpus[second], self.rng)

    def batches(self, step: int, done: float) -> list[list[HeardSpeech]]:
        """Mixtures of about one length."""
        self.done = done
        if not self.fresh:
            drawn = [lesson(self.layout, self.mixture(), self.rng) for _ in range(PAIRS)]
            drawn.sort(key=lambda each: len(each.last))
            batch = list[HeardSpeech]()
            for each in drawn:
                if batch and len(each.last) * (len(batch) + 1) > FRAMES // 2:
                    self.fresh.append(batch)
                    batch = []
                batch.append(each)
            self.fresh.append(batch)
            self.rng.shuffle(self.fresh)
        return [self.fresh.pop()]

    @torch.no_grad()
    def look(self) -> training.Figures:
        """Word errors of held-out mixtures, by the best assignment to speakers."""
        self.ear.eval()
        ear, errors, words = OverlapEar(self.ear, self.layout), 0, 0
        for each in self.exam:
            found = speaker_texts(ear.words(torch.from_numpy(each.pcm)))
            wrong, many = cp_errors(each.words, [text.split() for text in found])
            errors, words = errors + wrong, words + many
        return {"cpwer": round(errors / max(1, words), 4)}


@training.one_line
def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = training.RecipeParser(__doc__)
    add = parser.add_argument
    add("--model", type="present", help="folder of a speech model; the embedded one")
    add("--out", type=Path, default=Path("tiny-overlap"), help="folder of the weights")
    add("--start", type="present", help="weights of an ear for two to go on from")
    add("--work", type=Path, default=Path("tiny-overlap-work"), help="recordings")
    add("--hear", type="count", default=3000, help="recordings that are mixed")
    add("--seed", type=int, default=0)
    add("--minutes", type=float, default=6)
    add("--rate", type="rate", default=1.5e-3)
    options = parser.parse_args(argv)
    folder = options.model or embedded_path("tiny-speech")
    run(folder, options)


def run(folder: Path, options: Any) -> None:
    """Train by the options of a command line, from the ear in a folder."""
    log, layout = training.Log(options.out), SpeechLayout.load(folder)
    log.start(**{k: v for k, v in vars(options).items() if not isinstance(v, Path)})
    torch.manual_seed(options.seed)
    with log.stage("recordings"):
        known = any(options.work.glob("*.json"))
        lines = heard_lines(options.hear, options.seed)
        corpus = Corpus(options.work) if known else build_corpus(options.work, lines)
    base = read_overlap(folder, layout, None).float().state_dict()
    ear = read_overlap(folder, layout, options.start).float()
    task = OverlapTask(layout, ear, corpus, options.seed, options.rate)
    log({"stage": "before", **task.look()})
    course = training.Course("overlap", options.minutes, hold=0.45, watch=3)
    training.train(task, course, log, partial(save_overlap, ear, base, options.out))
    log.end()


if __name__ == "__main__":
    main()
