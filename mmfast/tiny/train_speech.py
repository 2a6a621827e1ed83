"""Train the embedded speech model: `python -m mmfast.tiny.train_speech --out DIR --work DIR`.

Stages: codec and vocoder; recordings by espeak-ng; the ear alone; the language model with the ear;
draft modules. Each leaves files, so a run that was stopped goes on where it was. Two CPU cores do
it in under four hours.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from mmfast.frontends.codecs.embedded import load_embedded, save_embedded
from mmfast.models.speech import load_speech
from mmfast.models.speech_layout import SpeechLayout
from mmfast.tiny.card_speech import write_card
from mmfast.tiny.speech_checkpoint import save_checkpoint
from mmfast.tiny.speech_codec import fit_codec
from mmfast.tiny.speech_codec_corpus import recordings as codec_recordings
from mmfast.tiny.speech_codec_vocoder import fit_vocoder
from mmfast.tiny.speech_drafts import DraftTrainer, places
from mmfast.tiny.speech_heads import HeadCourse, HeadTrainer, own_words
from mmfast.tiny.speech_lessons import Sizes
from mmfast.tiny.speech_losses import Model
from mmfast.tiny.speech_net import from_llama
from mmfast.tiny.speech_school import School
from mmfast.tiny.speech_stages import (
    EAR,
    LANGUAGE,
    RATE,
    ears,
    grown,
    layout,
    lessons,
    recordings,
    train_ear,
)
from mmfast.tiny.speech_trainer import Trainer


class Recipe:
    """The stages in their order."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.log = options.out / "training.jsonl"

    def report(self, row: dict[str, Any]) -> None:
        """A line of the log, and of standard error."""
        with self.log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), file=sys.stderr, flush=True)

    def run(self) -> None:
        """All stages; those whose files are there are not done again."""
        options = self.options
        codec = self.codec()
        sizes = Sizes(options.say, options.hear, options.chat)
        corpora = recordings(options.work, sizes, options.seed, self.report)
        heard = ears(options.work, corpora, options.seed)
        found = load_embedded(codec)
        wanted = layout(found.codebooks, found.size)
        ear_school = School(layout(1, 1), [], heard[0] + heard[1], [], options.seed)
        course = replace(EAR, minutes=options.ear, rate=options.rate)
        ear = train_ear(options.work, ear_school, course, self.report)
        school = lessons(wanted, options.work, corpora, heard, codec, sizes, options.seed)
        model = self.language(grown(ear, wanted, found.encoder.books), school)
        self.modules(model, wanted)
        write_card(options.out)

    def codec(self) -> Path:
        """Codebooks and vocoder; the folder they are in."""
        folder: Path = self.options.out / "codec"
        if not (folder / "config.json").exists():
            corpus, seed = list(codec_recordings(1600, self.options.seed)), self.options.seed
            books, bias = fit_codec(corpus, seed)
            steps = self.options.vocoder
            net = fit_vocoder(corpus, books, bias, seed, steps, report=self.report)
            save_embedded(folder, books, bias, net)
        return folder

    def language(self, model: Model, school: School) -> Model:
        """Speaking, listening, conversation."""
        options, kept = self.options, self.options.work / "language.pt"
        trainer = Trainer(model, school, options.rate)

        def save() -> None:
            torch.save(trainer.state(), kept.with_suffix(".part"))
            kept.with_suffix(".part").replace(kept)
            save_checkpoint(options.out, model, school.layout)

        spent = trainer.restore(torch.load(kept, weights_only=True)) if kept.exists() else 0.0
        course = replace(LANGUAGE, minutes=options.minutes, rate=options.rate, hold=options.hold)
        if spent < 60 * course.minutes:
            trainer.train(course, self.report, save, spent)
        return model

    def modules(self, model: Model, wanted: SpeechLayout) -> None:
        """Draft modules, taught by what the model says."""
        options = self.options
        backbone = load_speech(options.out).backbone
        start = time.monotonic()
        said = own_words(backbone, wanted, options.own, options.seed)
        self.report({"stage": "own words", "seconds": round(time.monotonic() - start)})
        net = from_llama(backbone.model.state_dict(), model.net.shape)
        drafts = DraftTrainer(net, backbone, wanted, options.seed)
        many = max(1, len(said) // 20)
        data, held = (places(net, wanted, s, options.seed) for s in (said[many:], said[:many]))
        drafts.train(data, held, options.drafts, options.rate, self.report)
        drafts.save(options.out)
        trainer = HeadTrainer(net, backbone, wanted, said, options.seed)
        course = HeadCourse(options.heads, options.rate)
        trainer.train(course, self.report, lambda: trainer.save(options.out))


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("tiny-speech"), help="checkpoint folder")
    parser.add_argument("--work", type=Path, default=Path("tiny-speech-work"), help="its makings")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--say", type=int, default=12000, help="recordings of what is said")
    parser.add_argument("--hear", type=int, default=12000, help="of what is heard")
    parser.add_argument("--chat", type=int, default=6000, help="conversations")
    parser.add_argument("--ear", type=float, default=EAR.minutes, help="minutes for the ear alone")
    parser.add_argument("--minutes", type=float, default=LANGUAGE.minutes, help="for all together")
    parser.add_argument("--vocoder", type=int, default=4500, help="steps of the vocoder")
    parser.add_argument("--own", type=int, default=4000, help="texts that draft modules learn from")
    parser.add_argument("--drafts", type=float, default=40, help="minutes for chained modules")
    parser.add_argument("--heads", type=float, default=8, help="minutes for independent ones")
    parser.add_argument("--rate", type=float, default=RATE)
    parser.add_argument("--hold", type=float, default=LANGUAGE.hold)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    options = _arguments(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    options.work.mkdir(parents=True, exist_ok=True)
    recipe = Recipe(options)
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()}
    for name in ("out", "work"):
        del settings[name]
    start = time.monotonic()
    recipe.report({"stage": "start", "machine": machine, "torch": torch.__version__, **settings})
    torch.manual_seed(options.seed)
    recipe.run()
    recipe.report({"stage": "end", "seconds": round(time.monotonic() - start)})


if __name__ == "__main__":
    main()
