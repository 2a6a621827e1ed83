"""Train the embedded speech model: `python -m mmfast.tiny.speech.train --out DIR --work DIR`.

Each stage leaves files, so an interrupted run continues. Two CPU cores need less than four hours.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from mmfast.core.speech import Turn
from mmfast.frontends.codecs.embedded.codec import load_embedded, save_embedded
from mmfast.frontends.codecs.embedded.features import FRAME
from mmfast.models.speech.embedded import load_speech
from mmfast.models.speech.layout import SpeechLayout, specials, vocabulary
from mmfast.models.speech.tower import FILE as TOWER
from mmfast.models.speech.tower import SpeechTower
from mmfast.tiny import training
from mmfast.tiny.card import write_card
from mmfast.tiny.speech import bank
from mmfast.tiny.speech.codec import fit_codec, fit_vocoder
from mmfast.tiny.speech.codec import recordings as codec_recordings
from mmfast.tiny.speech.drafts import ChainedTask, ParallelTask, make_places, own_words
from mmfast.tiny.speech.model import Part, TrainingModel, add_codes, losses, make_backbone
from mmfast.tiny.speech.recordings import Corpus
from mmfast.tiny.speech.text import PITCHES, VOICE_NAMES, WORDS

HELD = 96  # recordings of each task that are never trained on
SHORT = 110  # tokens of the sentences at the start
SHORT_SHARE = 0.04  # share of the language stage with short sentences alone
# The encoder alone first: it needs no codes, and learning to speak does not undo what it learns.
EAR = ("hear", "hear")
LANGUAGE = ("say", "say", "chat", "say", "hear")
SHARES = {"say": 1.0, "hear": 1.0, "chat": 0.7}  # weights of the tasks' losses
WATCH = 3.0  # minutes between evaluations on held-out lessons


def layout(books: int, entries: int) -> SpeechLayout:
    """Rows of the model for a codec of that size."""
    marks = specials(len(VOICE_NAMES), len(bank.SPEEDS), len(PITCHES))
    rows = vocabulary(WORDS, marks)
    return SpeechLayout(rows, books, entries, VOICE_NAMES, bank.SPEEDS, PITCHES)


@dataclass
class Curriculum:
    """All lessons and the order in which they are taken."""

    layout: SpeechLayout
    said: list[bank.SpokenText]
    heard: list[bank.HeardSpeech]
    chats: list[tuple[list[Turn], bank.HeardSpeech, bank.SpokenText]]
    seed: int = 0
    tokens: dict[str, int] = field(default_factory=lambda: {"say": 900, "hear": 800, "chat": 850})
    held: int = HELD

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng([self.seed, 31])
        self._queues: dict[str, Iterator[Any]] = {}

    def line(self, task: str, index: int, rng: np.random.Generator) -> bank.LineBuilder:
        """One lesson."""
        if task == "say":
            return bank.speaking(self.layout, self.said[index], rng)
        if task == "hear":
            return bank.listening(self.layout, self.heard[index])
        return bank.chatting(self.layout, *self.chats[index], rng)

    def lengths(self, task: str) -> list[int]:
        """Approximate tokens of each lesson of a task, those held out included."""
        if task != "chat":
            return [each.length for each in (self.said if task == "say" else self.heard)]
        return [
            heard.length + said.length + sum(len(turn.text) // 4 for turn in turns[:-2])
            for turns, heard, said in self.chats
        ]

    def _endless(self, task: str) -> Iterator[Any]:
        lengths = self.lengths(task)[: -self.held]
        while True:
            yield from bank.buckets(lengths, self.tokens[task], self.rng)

    def batch(self, task: str, longest: int = 0) -> bank.PaddedBatch:
        """The next batch of a task; with `longest`, one without longer sequences."""
        queue = self._queues.setdefault(task, self._endless(task))
        while True:
            lines = [self.line(task, int(i), self.rng) for i in next(queue)]
            if not longest or max(len(line.ids) for line in lines) <= longest:
                return bank.stack(lines)

    def exam(self, task: str) -> list[bank.PaddedBatch]:
        """Lessons that are never trained on."""
        rng, count = np.random.default_rng(5), len(self.lengths(task))
        lines = [self.line(task, i, rng) for i in range(count - self.held, count)]
        lines.sort(key=lambda line: len(line.ids))
        return [bank.stack(lines[i : i + 16]) for i in range(0, self.held, 16)]


class SpeechTask(training.Task):
    """Speaking, listening and conversation, one batch of each of the named tasks a step."""

    parallel = True

    def __init__(
        self, model: TrainingModel, lessons: Curriculum, tasks: Sequence[str], rate: float
    ) -> None:
        self.model, self.lessons, self.tasks = model, lessons, tasks
        self.optimiser = training.Optimiser.of(model, (), rate)

    def batches(self, step: int, done: float) -> list[tuple[str, bank.PaddedBatch]]:
        """A batch of each task; at the start of the language stage only short sentences."""
        longest = SHORT if self.tasks == LANGUAGE and done < SHORT_SHARE else 0
        return [(t, self.lessons.batch(t, longest if t == "say" else 0)) for t in self.tasks]

    def loss(self, batch: tuple[str, bank.PaddedBatch]) -> tuple[Tensor, training.Figures]:
        """Loss per predicted token, and for each part its mean loss and share correct."""
        task, lesson = batch
        total, parts = losses(self.model, lesson)
        count = sum(parts[name][1] for name in parts if name not in ("last", "count"))
        return total / max(count, 1) * SHARES[task], _means(task, [parts])

    @torch.no_grad()
    def look(self) -> training.Figures:
        """Mean losses and shares correct on held-out lessons."""
        found: training.Figures = {}
        for task in dict.fromkeys(self.tasks):
            batches = self.lessons.exam(task)
            found |= _means(task, [losses(self.model, batch)[1] for batch in batches])
        return found

    def resume(self, step: int) -> None:
        """Draw other lessons than the interrupted run did."""
        self.lessons.rng = np.random.default_rng([self.lessons.seed, 31, step])


def _means(task: str, rows: Sequence[dict[str, Part]]) -> training.Figures:
    found = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        parts = [row[name] for row in rows if name in row]
        loss, count, right = (sum(column) for column in zip(*parts, strict=True))
        if count:
            found[f"{task} {name}"] = [round(loss / count, 3), round(right / count, 3)]
    return found


def tokenizer(layout: SpeechLayout) -> PreTrainedTokenizerFast:
    """Text and audio rows as an ordinary tokenizer: words of the domain whole, others spelled."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    codes = [f"<{chr(97 + q)}{c}>" for q in range(layout.books) for c in range(layout.entries)]
    names = [*layout.rows, "<next>", "<end>", *codes]
    table = {name: i for i, name in enumerate(names)}
    core = Tokenizer(models.WordPiece(table, unk_token="<pad>", continuing_subword_prefix=""))
    ends = normalizers.Replace(Regex(r"(?<=[a-z'])(?![a-z'])"), "_")
    core.normalizer = normalizers.Sequence([normalizers.Lowercase(), ends])
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[a-z']+_|[,.?]"), "removed", invert=True)
    core.decoder = decoders.Sequence([decoders.Fuse(), decoders.Replace("_", " ")])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="<end>",
        additional_special_tokens=[name for name in names if name.startswith("<")],
        model_max_length=4096,
        clean_up_tokenization_spaces=False,
    )


def save_checkpoint(folder: Path, model: TrainingModel) -> None:
    """Write backbone (float16), tokenizer, encoder and layout, each file replaced as a whole."""
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent) as place:
        part = Path(place)
        half = {name: value.half() for name, value in model.lm.state_dict().items()}
        model.lm.save_pretrained(part, state_dict=half)
        tokenizer(model.layout).save_pretrained(part)
        tower = {name: value.detach().half() for name, value in model.tower.state_dict().items()}
        save_file(tower, part / TOWER)
        model.layout.save(part)
        for file in part.iterdir():
            file.chmod(0o644)
            file.replace(folder / file.name)


class Recipe:
    """The stages in their order; those whose files exist are not repeated."""

    def __init__(self, options: argparse.Namespace, log: training.Log) -> None:
        self.options, self.log = options, log
        self.sizes = bank.Sizes(options.say, options.hear, options.chat)

    def run(self) -> None:
        """Run all stages."""
        options, seed = self.options, self.options.seed
        folder, text = self.codec(), layout(1, 1)
        with self.log.stage("recordings") as figures:
            corpora = bank.recorded(options.work / "corpus", self.sizes, seed)
            figures["of_sound"] = {kind: round(each.seconds) for kind, each in corpora.items()}
        heard = [
            bank.hear_bank(options.work / f"{kind}.pt", text, corpora[kind], seed)
            for kind in ("hear", "ask")
        ]
        codec = load_embedded(folder)
        wanted = layout(codec.codebooks, codec.size)
        torch.manual_seed(seed)
        ear = TrainingModel(make_backbone(text, codes=False), SpeechTower(), text)
        lessons = Curriculum(ear.layout, [], heard[0] + heard[1], [], seed)
        course = training.Course("ear", options.ear, hold=1.0, watch=WATCH)
        task = SpeechTask(ear, lessons, EAR, options.rate)
        training.train(task, course, self.log, checkpoint=options.work / "ear.pt")
        model = add_codes(ear, wanted, codec.encoder.books)
        course = training.Course(
            "language", options.minutes, warm=0.02, hold=options.hold, watch=WATCH
        )
        task = SpeechTask(
            model, self.lessons(wanted, corpora, heard, folder), LANGUAGE, options.rate
        )
        save = partial(save_checkpoint, options.out, model)
        training.train(task, course, self.log, save, options.work / "language.pt")
        self.modules(wanted)
        write_card(options.out, "tiny-speech")

    def codec(self) -> Path:
        """Fit codebooks and vocoder; returns their folder."""
        folder: Path = self.options.out / "codec"
        if not (folder / "config.json").exists():
            seed = self.options.seed
            corpus = list(codec_recordings(self.options.fit, seed))
            books, bias = fit_codec(corpus, seed)
            net = fit_vocoder(corpus, books, bias, seed, self.options.vocoder, self.log)
            save_embedded(folder, books, bias, net)
        return folder

    def lessons(
        self,
        wanted: SpeechLayout,
        corpora: dict[str, Corpus],
        heard: Sequence[list[bank.HeardSpeech]],
        codec: Path,
    ) -> Curriculum:
        """Lessons of all tasks, with the codes of a codec."""
        seed, work = self.options.seed, self.options.work
        turns, _, _, replying = bank.chats(self.sizes.chat, seed)
        _, saying = bank.said_lines(self.sizes.say, seed)
        banks = []
        for kind, styles in (("say", saying), ("reply", replying)):
            codes = bank.encoded(work / f"{kind}_codes.pt", corpora[kind], codec)
            banks.append(bank.say_bank(wanted, corpora[kind], styles, codes, FRAME))
        said, replies = banks
        spoken = list(zip(turns, heard[1], replies, strict=True))
        return Curriculum(wanted, said, heard[0], spoken, seed)

    def modules(self, wanted: SpeechLayout) -> None:
        """Train the draft modules on what the model says."""
        options, seed = self.options, self.options.seed
        backbone = load_speech(options.out).backbone
        with self.log.stage("own words"):
            said = own_words(backbone, wanted, options.own, seed)
        many = max(1, len(said) // 20)
        data, held = (
            make_places(backbone.model, wanted, s, seed) for s in (said[many:], said[:many])
        )
        chained = ChainedTask(backbone, wanted, data, held, seed, options.rate)
        course = training.Course("drafts", options.drafts, hold=0.3, watch=20, every=50)
        training.train(chained, course, self.log, partial(chained.save, options.out))
        independent = ParallelTask(backbone, wanted, said, seed, options.rate)
        course = training.Course("heads", options.heads, hold=0.4, watch=2)
        training.train(independent, course, self.log, partial(independent.save, options.out))


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--out", type=Path, default=Path("tiny-speech"), help="checkpoint folder")
    add("--work", type=Path, default=Path("tiny-speech-work"), help="intermediate files")
    add("--seed", type=int, default=0)
    add("--fit", type=int, default=1600, help="recordings that the codec is fitted to")
    add("--say", type=int, default=12000, help="recordings of what is said")
    add("--hear", type=int, default=12000, help="of what is heard")
    add("--chat", type=int, default=6000, help="conversations")
    add("--ear", type=float, default=12, help="minutes for the speech encoder alone")
    add("--minutes", type=float, default=120, help="for all together")
    add("--vocoder", type=int, default=4500, help="steps of the vocoder")
    add("--own", type=int, default=4000, help="texts that draft modules learn from")
    add("--drafts", type=float, default=40, help="minutes for chained modules")
    add("--heads", type=float, default=8, help="minutes for independent ones")
    add("--rate", type=float, default=2e-3)
    add("--hold", type=float, default=0.45)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    options = _arguments(argv)
    options.work.mkdir(parents=True, exist_ok=True)
    log = training.Log(options.out, fresh=False)
    settings = {k: v for k, v in vars(options).items() if not isinstance(v, Path)}
    log.start(**settings)
    torch.manual_seed(options.seed)
    Recipe(options, log).run()
    log.end()


if __name__ == "__main__":
    main()
