"""Train the embedded speech model: `python -m mmfast.tiny.train_speech --out DIR --work DIR`.

Stages: recordings by espeak-ng; the ear alone; codec and vocoder; the language model with the ear;
draft modules. Each leaves a file in the work folder, so a run that was stopped goes on where it
was. Two CPU cores do it in under four hours.
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

from mmfast.frontends.codecs.embedded import load_embedded
from mmfast.tiny.speech_checkpoint import save_checkpoint
from mmfast.tiny.speech_lessons import Sizes
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
from mmfast.tiny.speech_trainer import School, Trainer


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
        sizes = Sizes(options.say, options.hear, options.chat)
        corpora = recordings(options.work, sizes, options.seed, self.report)
        heard = ears(options.work, corpora, options.seed)
        codec = options.out / "codec"
        ear_school = School(layout(1, 1), [], heard[0] + heard[1], [], options.seed)
        course = replace(EAR, minutes=options.ear)
        model = train_ear(options.work, ear_school, course, self.report)
        found = load_embedded(codec)
        wanted = layout(found.codebooks, found.size)
        school = lessons(wanted, options.work, corpora, heard, codec, sizes, options.seed)
        self.language(grown(model, wanted, found.encoder.books), school)

    def language(self, model: Any, school: School) -> None:
        """Speaking, listening, conversation."""
        options = self.options
        trainer = Trainer(model, school, options.rate)

        def save() -> None:
            torch.save(trainer.state(), options.work / "language.part")
            (options.work / "language.part").replace(options.work / "language.pt")
            save_checkpoint(options.out, model, school.layout)

        spent = 0.0
        if (options.work / "language.pt").exists():
            spent = trainer.restore(torch.load(options.work / "language.pt", weights_only=True))
        course = replace(LANGUAGE, minutes=options.minutes, rate=options.rate, hold=options.hold)
        trainer.train(course, self.report, save, spent)


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
