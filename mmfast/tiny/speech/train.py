"""Train the embedded speech model: `python -m mmfast.tiny.speech.train --out DIR --work DIR`.

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
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from mmfast.frontends.codecs.embedded.codec import load_embedded, save_embedded
from mmfast.frontends.codecs.embedded.features import FRAME as HOP
from mmfast.models.speech.embedded import load_speech
from mmfast.models.speech.layout import SpeechLayout, specials, vocabulary
from mmfast.models.speech.tower import FILE as TOWER
from mmfast.models.speech.tower import SpeechTower
from mmfast.tiny.card_speech import write_card
from mmfast.tiny.optim import Mixed, schedule
from mmfast.tiny.speech.bank import (
    HeardSpeech,
    PaddedBatch,
    encoded,
    hear_bank,
    load_heard,
    save_heard,
    say_bank,
)
from mmfast.tiny.speech.codec import fit_codec, fit_vocoder
from mmfast.tiny.speech.codec import recordings as codec_recordings
from mmfast.tiny.speech.corpus import Corpus
from mmfast.tiny.speech.drafts import DraftTrainer, HeadCourse, HeadTrainer, own_words, places
from mmfast.tiny.speech.lessons import SPEEDS, Sizes, chats, recorded, said_lines
from mmfast.tiny.speech.losses import Curriculum, Part, TrainingModel, Weights, losses, matrices
from mmfast.tiny.speech.net import BackboneShape, Net, from_llama, llama_config, to_llama
from mmfast.tiny.speech.text import PITCHES, VOICE_NAMES, WORDS

THREADS = 2
SHORT = 110  # tokens of the sentences at the start
SHARES = {"say": 1.0, "hear": 1.0, "chat": 0.7}


@dataclass(frozen=True)
class Course:
    """A stage of the training: its tasks, in every step, and its length."""

    name: str
    tasks: tuple[str, ...]
    minutes: float
    rate: float = 2e-3
    hold: float = 0.5
    warm: float = 0.03
    short: float = 0.0  # share of the stage with short sentences alone
    watch: float = 3.0  # minutes between looks


class SpeechTrainer:
    """Takes courses; keeps model, optimiser and figures between them."""

    def __init__(self, model: TrainingModel, school: Curriculum, rate: float) -> None:
        self.model, self.school = model, school
        self.parameters = list(model.parameters())
        # A batch per core, each on one thread: no core waits for another within a step.
        torch.set_num_threads(1)
        self.pool = ThreadPoolExecutor(THREADS)
        hidden, rest = matrices(model)
        self.optimiser = Mixed(hidden, rest, rate)
        self.steps, self.spent = 0, 0.0

    def train(
        self, course: Course, report: Report, save: Callable[[], None], spent: float = 0.0
    ) -> None:
        """Take a course; `spent` seconds of it are over already."""
        start = looked = time.monotonic() - spent
        looked += spent
        seen: dict[str, list[Part]] = defaultdict(list)
        tokens = 0
        while (now := time.monotonic() - start) < 60 * course.minutes:
            self.spent = now
            done = now / (60 * course.minutes)
            tokens += self.step(course, done, seen)
            self.steps += 1
            if self.steps % 20 == 0:
                rate = round(tokens / (time.monotonic() - start - spent))
                report(
                    {"stage": course.name, "step": self.steps, "seconds": round(now), "rate": rate}
                    | _means(seen)
                )
                seen.clear()
            if time.monotonic() - looked > 60 * course.watch:
                looked = time.monotonic()
                report({"stage": "held-out", "step": self.steps, **self.look(course.tasks)})
                save()
        report({"stage": "held-out", "step": self.steps, **self.look(course.tasks)})
        save()

    def state(self) -> dict[str, Any]:
        """All that is needed to go on."""
        return {
            "model": self.model.state_dict(),
            "adam": self.optimiser.adam.state_dict(),
            "momentum": list(self.optimiser.momentum.values()),
            "steps": self.steps,
            "spent": self.spent,
        }

    def restore(self, state: dict[str, Any]) -> float:
        """Go on from there; returns the seconds spent."""
        self.model.load_state_dict(state["model"])
        self.optimiser.adam.load_state_dict(state["adam"])
        self.optimiser.momentum = dict(zip(self.optimiser.momentum, state["momentum"], strict=True))
        self.steps, self.spent = int(state["steps"]), float(state["spent"])
        self.school.rng = np.random.default_rng([self.school.seed, 31, self.steps])
        return self.spent

    def step(self, course: Course, done: float, seen: dict[str, list[Part]]) -> int:
        """One update; returns the tokens."""
        longest = SHORT if done < course.short else 0
        batches = [
            self.school.batch(task, longest if task == "say" else 0) for task in course.tasks
        ]
        found = list(self.pool.map(self._gradients, course.tasks, batches))
        for parameter, *parts in zip(self.parameters, *(grads for grads, _ in found), strict=True):
            known = [part for part in parts if part is not None]
            parameter.grad = sum(known[1:], known[0]) if known else None
        for task, (_, figures) in zip(course.tasks, found, strict=True):
            for name, part in figures.items():
                seen[f"{task} {name}"].append(part)
        self.optimiser.step(schedule(done, course.warm, course.hold), over=self.pool.map)
        return sum(batch.ids.numel() for batch in batches)

    def _gradients(
        self, task: str, batch: PaddedBatch
    ) -> tuple[tuple[Tensor | None, ...], dict[str, Part]]:
        """One batch's share of the gradient; runs in a thread of its own."""
        total, parts = losses(self.model, self.school.layout, batch, Weights())
        owed = sum(parts[name][1] for name in parts if name not in ("last", "count"))
        loss = total / max(owed, 1) * SHARES[task]
        return torch.autograd.grad(loss, self.parameters, allow_unused=True), parts

    @torch.no_grad()
    def look(self, tasks: Sequence[str]) -> dict[str, Any]:
        """Losses and shares right on lessons that are never trained on."""
        seen: dict[str, list[Part]] = defaultdict(list)
        for task in dict.fromkeys(tasks):
            for batch in self.school.exam(task):
                for name, part in losses(self.model, self.school.layout, batch, Weights())[
                    1
                ].items():
                    seen[f"{task} {name}"].append(part)
        return _means(seen)


def _means(seen: dict[str, list[Part]]) -> dict[str, Any]:
    """Per part its mean loss and share right."""
    found = {}
    for name, parts in seen.items():
        loss, count, right = (sum(column) for column in zip(*parts, strict=True))
        if count:
            found[name] = [round(loss / count, 3), round(right / count, 3)]
    return found


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


def ears(
    work: Path, corpora: dict[str, Corpus], seed: int
) -> tuple[list[HeardSpeech], list[HeardSpeech]]:
    """Log-mel of what is heard: sentences, and the last questions of conversations."""
    found = []
    for kind in ("hear", "ask"):
        path = work / f"{kind}.npz"
        if not path.exists():
            save_heard(path, hear_bank(layout(1, 1), corpora[kind], seed))
        found.append(load_heard(path))
    return found[0], found[1]


def train_ear(work: Path, school: Curriculum, course: Course, report: Report) -> TrainingModel:
    """Stage 2: speech to text."""
    torch.manual_seed(school.seed)
    model = TrainingModel(Net(BackboneShape(school.layout.base)), SpeechTower(), school.layout)
    path = work / "ear.pt"
    if path.exists():
        model.load_state_dict(torch.load(path, weights_only=True))
        return model
    SpeechTrainer(model, school, RATE).train(course, report, lambda: _keep(model, path))
    return model


def _keep(model: TrainingModel, path: Path) -> None:
    part = path.with_suffix(".part")
    torch.save(model.state_dict(), part)
    part.replace(path)


def grown(model: TrainingModel, wanted: SpeechLayout, vectors: Tensor) -> TrainingModel:
    """The model with rows for all codes, those alike in sound near each other.

    Args:
        model: With text rows, `<next>` and `<end>`.
        wanted: The layout with the codec.
        vectors: `[Q, V, n]` what each code adds to the sound's features.
    """
    net = Net(BackboneShape(wanted.total))
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
    larger = TrainingModel(net, model.tower, wanted)
    larger.last.load_state_dict(model.last.state_dict())
    larger.count.load_state_dict(model.count.state_dict())
    return larger


def lessons(
    wanted: SpeechLayout,
    work: Path,
    corpora: dict[str, Corpus],
    heard: tuple[list[HeardSpeech], list[HeardSpeech]],
    codec: Path,
    sizes: Sizes,
    seed: int,
) -> Curriculum:
    """Everything that is taught, with the codes of a codec."""
    turns, _, _, ways = chats(sizes.chat, seed)
    _, styles = said_lines(sizes.say, seed)
    codes = [encoded(work / f"{kind}_codes.npz", corpora[kind], codec) for kind in ("say", "reply")]
    said = say_bank(wanted, corpora["say"], styles, codes[0], HOP)
    replies = say_bank(wanted, corpora["reply"], ways, codes[1], HOP)
    spoken = list(zip(turns, heard[1], replies, strict=True))
    return Curriculum(wanted, said, heard[0], spoken, seed)


def tokenizer(layout: SpeechLayout) -> PreTrainedTokenizerFast:
    """Text and audio rows as an ordinary tokenizer: words of the domain whole, others spelled."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    codes = [f"<{chr(97 + q)}{c}>" for q in range(layout.books) for c in range(layout.entries)]
    names = [*layout.rows, "<next>", "<end>", *codes]
    core = Tokenizer(
        models.WordPiece(
            {name: i for i, name in enumerate(names)},
            unk_token="<pad>",
            continuing_subword_prefix="",
        )
    )
    ends = normalizers.Replace(Regex(r"(?<=[a-z'])(?![a-z'])"), "_")
    core.normalizer = normalizers.Sequence([normalizers.Lowercase(), ends])
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[a-z']+_|[,.?]"), "removed", invert=True)
    core.decoder = decoders.Sequence([decoders.Fuse(), decoders.Replace("_", " ")])
    marks = [name for name in names if name.startswith("<")]
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="<end>",
        additional_special_tokens=marks,
        model_max_length=4096,
        clean_up_tokenization_spaces=False,
    )


def save_checkpoint(folder: Path, model: TrainingModel, layout: SpeechLayout) -> None:
    """Write backbone (float16), tokenizer, ear and layout; what reads it meanwhile sees no half."""
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent) as place:
        _write(Path(place), model, layout)
        for file in Path(place).iterdir():
            file.chmod(0o644)
            file.replace(folder / file.name)


def _write(folder: Path, model: TrainingModel, layout: SpeechLayout) -> None:
    config = llama_config(model.net.shape, layout.id("<pad>"), layout.end)
    stock: Any = LlamaForCausalLM(config)
    stock.load_state_dict(to_llama(model.net))
    stock.half().save_pretrained(folder)
    tokenizer(layout).save_pretrained(folder)
    ear = {name: value.detach().half() for name, value in model.tower.state_dict().items()}
    save_file(ear, folder / TOWER)
    layout.save(folder)


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
        ear_school = Curriculum(layout(1, 1), [], heard[0] + heard[1], [], options.seed)
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

    def language(self, model: TrainingModel, school: Curriculum) -> TrainingModel:
        """Speaking, listening, conversation."""
        options, kept = self.options, self.options.work / "language.pt"
        trainer = SpeechTrainer(model, school, options.rate)

        def save() -> None:
            torch.save(trainer.state(), kept.with_suffix(".part"))
            kept.with_suffix(".part").replace(kept)
            save_checkpoint(options.out, model, school.layout)

        spent = trainer.restore(torch.load(kept, weights_only=True)) if kept.exists() else 0.0
        course = replace(LANGUAGE, minutes=options.minutes, rate=options.rate, hold=options.hold)
        if spent < 60 * course.minutes:
            trainer.train(course, self.report, save, spent)
        return model

    def modules(self, model: TrainingModel, wanted: SpeechLayout) -> None:
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
