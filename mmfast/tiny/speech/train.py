"""Train the embedded speech model: `python -m mmfast.tiny.speech.train --out DIR --work DIR`.

An interrupted run has its codec, recordings and steps of the language; its ear, replies and draft
modules begin anew. Each stage takes the minutes that its option gives.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from mmfast.frontends.codecs.embedded.codec import load_embedded, save_embedded
from mmfast.frontends.codecs.embedded.features import FRAME
from mmfast.models.speech.embedded import load_speech
from mmfast.models.speech.layout import SpeechLayout, specials, vocabulary
from mmfast.tiny import training
from mmfast.tiny.card import write_card
from mmfast.tiny.speech import bank
from mmfast.tiny.speech.codec import fit_codec, fit_vocoder
from mmfast.tiny.speech.codec import recordings as codec_recordings
from mmfast.tiny.speech.dialogue import WORDS
from mmfast.tiny.speech.drafts import (
    ChainedTask,
    ParallelTask,
    SoundPlaces,
    make_places,
    own_words,
)
from mmfast.tiny.speech.ear import train_ear
from mmfast.tiny.speech.model import (
    Part,
    TrainingModel,
    continued,
    losses,
    make_backbone,
    place_codes,
)
from mmfast.tiny.speech.recordings import Corpus
from mmfast.tiny.speech.reply import train_replies
from mmfast.tiny.speech.text import PITCHES, SPEEDS, VOICE_NAMES

HELD = 96  # recordings that are never trained on
EAR_RATE = 3e-3
SHORT = 110  # tokens of the sentences at the start
SHORT_SHARE = 0.04  # share of the stage with short sentences alone
BATCHES = 4  # of a step
WATCH = 3.0  # minutes between evaluations on held-out lessons


def layout(books: int, entries: int) -> SpeechLayout:
    """Rows of the model for a codec of that size."""
    marks = specials(len(VOICE_NAMES), len(SPEEDS), len(PITCHES))
    rows = vocabulary(WORDS, marks)
    return SpeechLayout(rows, books, entries, VOICE_NAMES, SPEEDS, PITCHES)


@dataclass
class Curriculum:
    """All lessons and the order in which they are taken."""

    layout: SpeechLayout
    said: list[bank.SpokenText]
    seed: int = 0
    tokens: int = 900
    held: int = HELD

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng([self.seed, 31])
        self._queue = self._endless()

    def _endless(self) -> Iterator[Any]:
        lengths = [each.length for each in self.said[: -self.held]]
        while True:
            yield from bank.buckets(lengths, self.tokens, self.rng)

    def batch(self, longest: int = 0) -> bank.PaddedBatch:
        """The next batch; with `longest`, one without longer sequences."""
        while True:
            chosen = (self.said[int(i)] for i in next(self._queue))
            lines = [bank.speaking(self.layout, each, self.rng) for each in chosen]
            if not longest or max(len(line.ids) for line in lines) <= longest:
                return bank.stack(lines)

    def exam(self) -> list[bank.PaddedBatch]:
        """Lessons that are never trained on."""
        rng = np.random.default_rng(5)
        lines = [bank.speaking(self.layout, each, rng) for each in self.said[-self.held :]]
        lines.sort(key=lambda line: len(line.ids))
        return [bank.stack(lines[i : i + 16]) for i in range(0, self.held, 16)]


class SpeechTask(training.Task):
    """Speaking, several batches a step."""

    parallel = True

    def __init__(self, model: TrainingModel, lessons: Curriculum, rate: float) -> None:
        self.model, self.lessons = model, lessons
        self.optimiser = training.Optimiser.of(model, (), rate)

    def batches(self, step: int, done: float) -> list[bank.PaddedBatch]:
        """The next batches; at the start only short sentences."""
        longest = SHORT if done < SHORT_SHARE else 0
        return [self.lessons.batch(longest) for _ in range(BATCHES)]

    def loss(self, batch: bank.PaddedBatch) -> tuple[Tensor, training.Figures]:
        """Loss per predicted token, and for each part its mean loss and share correct."""
        total, parts = losses(self.model, batch)
        count = sum(places for _, places, _ in parts.values())
        return total / max(count, 1), _means([parts])

    @torch.no_grad()
    def look(self) -> training.Figures:
        """Mean losses and shares correct on held-out lessons."""
        return _means([losses(self.model, batch)[1] for batch in self.lessons.exam()])

    def resume(self, step: int) -> None:
        """Draw other lessons than the interrupted run did."""
        self.lessons.rng = np.random.default_rng([self.lessons.seed, 31, step])


def _means(rows: Sequence[dict[str, Part]]) -> training.Figures:
    found = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        parts = [row[name] for row in rows if name in row]
        loss, count, right = (sum(column) for column in zip(*parts, strict=True))
        if count:
            found[f"say {name}"] = [round(loss / count, 3), round(right / count, 3)]
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
    """Write backbone (float16), tokenizer and layout, each file replaced as a whole."""
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent) as place:
        part = Path(place)
        half = {name: value.half() for name, value in model.lm.state_dict().items()}
        model.lm.save_pretrained(part, state_dict=half)
        tokenizer(model.layout).save_pretrained(part)
        model.layout.save(part)
        for file in part.iterdir():
            file.chmod(0o644)
            file.replace(folder / file.name)


class Recipe:
    """The stages in their order."""

    def __init__(self, options: argparse.Namespace, log: training.Log) -> None:
        self.options, self.log = options, log
        self.sizes = bank.Sizes(options.say, options.hear)

    def run(self) -> None:
        """Run all stages."""
        options, seed = self.options, self.options.seed
        codec = load_embedded(self.codec())
        with self.log.stage("recordings") as figures:
            corpora = bank.recorded(options.work / "corpus", self.sizes, seed)
            figures["of_sound"] = {kind: round(each.seconds) for kind, each in corpora.items()}
        wanted = layout(codec.codebooks, codec.size)
        heard = bank.hear_bank(options.work / "hear.pt", wanted, corpora["hear"], seed)
        train_ear(options.out, wanted, heard, options.ear, seed, EAR_RATE, self.log)
        train_replies(
            options.out, wanted, options.replies, seed, options.rate, self.log, options.start
        )
        torch.manual_seed(seed)
        if options.start is None:
            model = TrainingModel(make_backbone(wanted), wanted)
            place_codes(model, codec.encoder.books)
        else:
            lm = continued(options.start, wanted, SpeechLayout.load(options.start))
            model = TrainingModel(lm, wanted)
        course = training.Course(
            "language", options.minutes, warm=0.02, hold=options.hold, watch=WATCH
        )
        lessons = Curriculum(wanted, self.said(wanted, corpora["say"]), seed)
        task = SpeechTask(model, lessons, options.rate)
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

    def said(self, wanted: SpeechLayout, corpus: Corpus) -> list[bank.SpokenText]:
        """Lessons to say, with the codes of the codec."""
        _, styles = bank.said_lines(self.sizes.say, self.options.seed)
        codes = bank.encoded(self.options.work / "say_codes.pt", corpus, self.options.out / "codec")
        return bank.say_bank(wanted, corpus, styles, codes, FRAME)

    def modules(self, wanted: SpeechLayout) -> None:
        """Train the draft modules on what the model says."""
        options, seed = self.options, self.options.seed
        backbone = load_speech(options.out).backbone
        said, places = self.own(backbone, wanted)
        chained = ChainedTask(backbone, wanted, *places, seed, options.rate)
        course = training.Course("drafts", options.drafts, hold=0.3, watch=20, every=50)
        training.train(chained, course, self.log, partial(chained.save, options.out))
        independent = ParallelTask(backbone, wanted, said, seed, options.rate)
        course = training.Course("heads", options.heads, hold=0.4, watch=2)
        training.train(independent, course, self.log, partial(independent.save, options.out))

    def own(
        self, backbone: Any, wanted: SpeechLayout
    ) -> tuple[list[bank.SpokenText], tuple[SoundPlaces, SoundPlaces]]:
        """Return what the model says, and places of it: those to learn from, and held out."""
        with self.log.stage("own words"):
            said = own_words(backbone, wanted, self.options.own, self.options.seed)
        many = max(1, len(said) // 20)
        parts, seed = (said[many:], said[:many]), self.options.seed
        data, held = (make_places(backbone.model, wanted, part, seed) for part in parts)
        return said, (data, held)

    def again(self) -> None:
        """Train the last chained module of a finished model, which runs again behind itself."""
        options, speech = self.options, load_speech(self.options.start)
        places = self.own(speech.backbone, speech.layout)[1]
        given = (speech.backbone, speech.layout, *places, options.seed, options.rate)
        task = ChainedTask(*given, head=speech.heads["mctp"])
        course = training.Course("again", options.again, hold=0.3, watch=2)
        training.train(task, course, self.log, partial(task.save, options.out))


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = training.recipe_parser(__doc__, "tiny-speech")
    add = parser.add_argument
    add("--work", type=Path, default=Path("tiny-speech-work"), help="intermediate files")
    add("--fit", type="count", default=1600, help="recordings that the codec is fitted to")
    add("--say", type="count", default=16000, help="recordings of what is said")
    add("--hear", type="count", default=12000, help="of what is heard")
    add("--start", type="present", help="checkpoint to go on from, of whatever words")
    add("--ear", type=float, default=40, help="minutes for the ear")
    add("--replies", type=float, default=30, help="for the replies")
    add("--minutes", type=float, default=120, help="for speaking")
    add("--vocoder", type=int, default=4500, help="steps of the vocoder")
    add("--own", type="count", default=4000, help="texts that draft modules learn from")
    add("--drafts", type=float, default=40, help="minutes for chained modules")
    add("--heads", type=float, default=8, help="minutes for independent ones")
    add("--again", type=float, help="minutes for the last chained module of --start, and no more")
    add("--rate", type="rate", default=2e-3)
    add("--hold", type=float, default=0.45)
    options = parser.parse_args(argv)
    if options.again is not None and options.start is None:
        parser.error("--again trains on at a finished model; name its folder with --start")
    return options


@training.one_line
def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    options = _arguments(argv)
    options.work.mkdir(parents=True, exist_ok=True)
    log = training.Log(options.out, fresh=False)
    settings = {k: v for k, v in vars(options).items() if not isinstance(v, Path)}
    log.start(**settings)
    torch.manual_seed(options.seed)
    recipe = Recipe(options, log)
    if options.again is None:
        recipe.run()
    else:
        recipe.again()
    log.end()


if __name__ == "__main__":
    main()
