"""The embedded speech model: it speaks, it listens, it answers speech with speech.

Stock models: one over text and audio rows that speaks, with draft modules and a codec, one that
writes down what is heard, and one that words replies. Long texts are said sentence by sentence,
long sound is heard piece by piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmfast.core.errors import MmfastError, ModelError, SpecError, an, unknown
from mmfast.core.speech import Codec, Sound, Turn
from mmfast.decoding.accept import PassStats, Stats
from mmfast.decoding.drafting import DEFAULT_MODE, DraftMode, parse_mode
from mmfast.decoding.loop import SingleDecoder
from mmfast.decoding.row import Guide
from mmfast.decoding.sampling import Sampling
from mmfast.frontends.codecs.embedded.codec import load_embedded
from mmfast.frontends.text_normalisation import SpokenStream, spoken, unspoken
from mmfast.models.decoder.backbone import Backbone, load_head
from mmfast.models.loading import embedded_path, part_of
from mmfast.models.speech.ear import FOLDER as EAR
from mmfast.models.speech.ear import SpeechEar
from mmfast.models.speech.layout import LONGEST as LONGEST_WORD
from mmfast.models.speech.layout import MARKS, SpeechGuide, SpeechLayout
from mmfast.models.speech.prefix_search import PrefixSearch, next_words
from mmfast.models.speech.reply import FOLDER as REPLY
from mmfast.models.speech.reply import ReplyModel
from mmfast.models.speech.sound import cut, samples
from mmfast.models.speech.turn_end import Overheard


class UtteranceFrames:
    """Collects one utterance; `starts` has the frame at which each group begins.

    A code of the wrong book (unverified drafts) does not shift those behind it: frames begin at
    codes of book 0, and what a frame lacks is taken from the one before.
    """

    def __init__(self, layout: SpeechLayout) -> None:
        self.layout, self.count, self.starts = layout, 0, [0]
        self._open: list[int] = []
        self._before = [0] * layout.books
        self._ready: list[list[int]] = []

    def push(self, token: int) -> None:
        """An audio token, or the end of a group's sound."""
        place = token - self.layout.base
        if place < 0:
            self._close()
            self.starts.append(self.count)
            return
        book, code = divmod(place, self.layout.entries)
        if book == 0:
            self._close()
        if book == len(self._open):
            self._open.append(code)
        if len(self._open) == self.layout.books:
            self._close()

    def _close(self) -> None:
        if self._open:
            self._before = self._open + self._before[len(self._open) :]
            self._ready.append(self._before)
            self.count += 1
            self._open = []

    def take(self) -> Tensor:
        """Whole frames since the last call `[Q, t]`."""
        found = torch.tensor(self._ready, dtype=torch.long).reshape(-1, self.layout.books).T
        self._ready = []
        return found


class SpeakerVoice:
    """One speaker's stream of sound, over all sentences."""

    def __init__(self, layout: SpeechLayout, codec: Codec) -> None:
        self.layout, self.codec = layout, codec
        self._state = codec.decoder.start(1)
        self._samples = 0  # made so far
        self._frames = 0  # of sentences before this one
        self._passes = self._drafts = self._tokens = 0
        self._first = True  # no word has been said
        self._words: list[tuple[int, str]] = []  # sample at which it begins, text; not yet said
        self._spelled: list[str] = []  # words that are no rows, not yet reported
        self.left_out: Callable[[], list[str]] = list  # what was not said, not yet reported
        self._cut: list[str] = []  # ends of words that are too long, likewise
        self._collected = UtteranceFrames(layout)
        self.begin((), Stats())

    def begin(self, said: Sequence[str], stats: Stats) -> None:
        """The next sentence; `said` grows as its words are handed over, `stats` with its drafts."""
        self._said, self._stats = said, stats
        self._judged = [[0, 0] for _ in range(self.layout.books)]  # drafts reported, per book
        self._frames += self._collected.count
        self._collected = UtteranceFrames(self.layout)
        self._noted = 0  # groups whose start has been noted

    def step(self, step: PassStats) -> Iterator[Sound]:
        """Yield what a pass made certain."""
        self._passes += step.passes
        self._drafts += step.draft_passes
        for token in step.tokens:
            if token >= self.layout.texts:
                self._tokens += 1
                self._collected.push(token)
        self._note()
        codes = self._collected.take()
        if codes.shape[1]:
            self._state, pcm = self.codec.decoder.step(self._state, codes[None])
            yield self._sound(pcm[0], codes)

    def finish(self) -> Iterator[Sound]:
        """The rest."""
        pcm = self.codec.decoder.finish(self._state)[0]
        self._words = [(min(at, self._samples), text) for at, text in self._words]
        found = self._sound(pcm, None)
        if len(pcm) or found.text or found.notes:
            yield found

    def _note(self) -> None:
        """Words whose sound begins: the start of each group that has a frame."""
        starts = self._collected.starts
        begun = len(starts) - (starts[-1] == self._collected.count)
        known = list(self._said)
        while self._noted < min(begun, len(known)):
            text = known[self._noted]
            lead = "" if self._first or text in MARKS else " "
            at = (self._frames + starts[self._noted]) * self.codec.hop
            self._words.append((at, lead + text))
            if len(self.layout.group(text)) > 1:
                self._spelled.append(text)
                self._cut += [text[LONGEST_WORD:]] if len(text) > LONGEST_WORD else []
            self._first = False
            self._noted += 1

    def _sound(self, pcm: Tensor, codes: Tensor | None) -> Sound:
        end = self._samples + len(pcm) if codes is not None else 1 << 60
        now = [word for word in self._words if word[0] < end]
        self._words = self._words[len(now) :]
        starts = [max(0, at - self._samples) for at, text in now if text not in MARKS]
        spelled, self._spelled = self._spelled, []
        placed: dict[str, Any] = {"starts": starts, "spelled": spelled}
        placed["left_out"], self._cut = [*self.left_out(), *self._cut], []
        sound = Sound(
            pcm.to(torch.float32),
            self.codec.sample_rate,
            text="".join(text for _, text in now),
            codes=codes,
            passes=self._passes,
            drafts=self._drafts,
            tokens=self._tokens,
            notes={**{name: each for name, each in placed.items() if each}, **self._verified()},
        )
        self._samples += len(pcm)
        self._passes = self._drafts = self._tokens = 0
        return sound

    def _verified(self) -> dict[str, list[int]]:
        """Drafts verified and accepted since the piece before, one number a codebook."""
        books = range(self.layout.books)
        now = [list(self._stats.by_book.get(book, (0, 0))) for book in books]
        tried, stood = ([now[b][i] - self._judged[b][i] for b in books] for i in range(2))
        self._judged = now
        return {"drafted": tried, "accepted": stood} if any(tried) else {}


HEADS = ("mctp", "mtp")
Make = Callable[[Guide], SingleDecoder]


def _check_head(head: str) -> None:
    if head not in HEADS:
        raise SpecError(unknown("head", head, HEADS))


def check_options(path: str | Path | None, options: Mapping[str, Any]) -> None:
    """Refuse values that `speak` and `reply` would refuse, before the model is read (SpecError)."""
    layout = SpeechLayout.load(embedded_path(EMBEDDED) if path is None else Path(path))
    rate = options.get("rate", options.get("speed"))
    layout.style(options.get("voice", layout.voices[0]), rate, options.get("pitch"))
    parse_mode(options.get("mode", DEFAULT_MODE), options.get("verify"), options.get("schedule"))
    _check_head(options.get("head", HEADS[0]))


RATE = 16000
LONGEST, SHORTEST = 9.0, 4.0  # seconds of a piece that is cut from longer sound


def pieces(pcm: Tensor, rate: int = RATE) -> list[Tensor]:
    """Cut sound `[n]` where it is quietest, into pieces at 16 kHz that can be understood at once.

    There are none where all is silence. MediaError: another shape or type, or no numbers.
    """
    sound = samples(pcm, rate, RATE)
    return cut(sound - sound.mean() if len(sound) else sound, RATE, LONGEST, SHORTEST)


ENDS = (".", "?")
PAUSE = 12  # groups behind which a comma ends a sentence, too
MOST = 24  # groups of a sentence


class Sentence:
    """Words and marks of a sentence as they come; ends with a full stop if nothing else."""

    def __init__(self, source: Iterator[str]) -> None:
        self._source, self.said = source, list[str]()
        self._over = False

    def __iter__(self) -> Iterator[str]:
        """The words and marks."""
        last = ""
        while not self._over:
            group = next(self._source, None)
            if group is None:
                break
            self.said.append(group)
            last = group
            many = len(self.said)
            self._over = group in ENDS or (many >= PAUSE and group in MARKS) or many >= MOST
            yield group
        self._over = True
        if last and last not in MARKS:
            yield "."


def sentences(text: str | Iterable[str], stream: SpokenStream) -> Iterator[Sentence]:
    """Sentences of a text, read by `stream`, each to be used up before the next is asked for."""
    source = groups(text, stream)
    while (first := next(source, None)) is not None:
        yield Sentence(chain([first], source))


def groups(text: str | Iterable[str], stream: SpokenStream) -> Iterator[str]:
    """Words and marks of text, or of pieces of text as they come."""
    for piece in [text] if isinstance(text, str) else text:
        if not isinstance(piece, str):
            raise MmfastError(f"text holds {an(type(piece).__name__)}; give strings")
        yield from stream.push(piece)
    yield from stream.finish()


EMBEDDED = "tiny-speech"
LAST = 2  # words that tell whether a sentence has ended
PAST = 240  # ids of what was said before that a reply sees


class SpeechModel:
    """Implements `Speaker`, `Listener` and `Chatter` of `mmfast.core.speech`."""

    def __init__(
        self,
        backbone: Backbone,
        heads: dict[str, Any],
        ear: SpeechEar,
        layout: SpeechLayout,
        codec: Any,
        replies: ReplyModel,
    ) -> None:
        self.backbone, self.heads, self.ear = backbone, heads, ear
        self.layout, self.codec, self.replies = layout, codec, replies
        prior = partial(next_words, replies.backbone, [layout.id("<user>")])
        self._search = PrefixSearch(prior, ear.blank, layout.id("<done>"))
        self.sample_rate: int = codec.sample_rate
        self.voices = layout.voices  # names for `voice=`

    def left_out(self, text: str) -> list[str]:
        """Return what `speak` does not say of a text, such as words in other letters."""
        long = [word[LONGEST_WORD:] for word in spoken(text) if len(word) > LONGEST_WORD]
        return [*unspoken(text), *long]

    def speak(
        self,
        text: str | Iterable[str],
        *,
        voice: str | None = None,
        rate: int | None = None,
        pitch: int | None = None,
        mode: str = DEFAULT_MODE,
        verify: str | None = None,
        schedule: str | Sequence[int] | None = None,
        head: str = "mctp",
        sampling: Sampling | None = None,
    ) -> Iterator[Sound]:
        """Say a text.

        Args:
            text: All of it, or pieces as they come: sound comes as soon as three words are there.
            voice: One of `voices`; the first one if not given.
            rate: Words per minute; the nearest that was learned is taken.
            pitch: 0 to 99; likewise.
            mode: `exact` (what one token per pass says), `fast` (typical drafts are accepted) or
                `turbo` (a looser rule, on drafts the head is confident of).
            verify: Another rule: `exact`, `typical:ε`, or `none`, whose drafts nothing verifies.
            schedule: Other drafts behind passes: `vanilla`, `balance`, `boost`, or counts.
            head: Draft modules, `mctp` or `mtp`.
            sampling: How tokens are chosen; the likeliest unless told.

        Yields:
            A piece per pass of the backbone that makes sound or text certain.

        Raises:
            SpecError: An unknown voice, mode, rule, schedule or head, a rate or pitch out of reach.
            MmfastError: Nothing to say.
        """
        style = self.layout.style(voice or self.voices[0], rate, pitch)
        make = self._decoding(parse_mode(mode, verify, schedule), head, sampling)
        return self._say(text, style, make)

    def _say(self, text: str | Iterable[str], style: list[int], make: Make) -> Iterator[Sound]:
        said, lost = False, list[str]()
        for sound in self._sounds(text, style, make):
            said = said or bool(sound.text) or sound.codes is not None
            lost += sound.notes.get("left_out", ())
            if said:
                yield sound
        if not said:
            what = f"nothing of {' '.join(lost)[:60]!r} can be said" if lost else "nothing is said"
            raise MmfastError(
                f"{what}: the text has no word in the letters of this voice; give words in Latin "
                "letters or digits, or another model"
            )

    def _sounds(self, text: str | Iterable[str], style: list[int], make: Make) -> Iterator[Sound]:
        voice, stream = SpeakerVoice(self.layout, self.codec), SpokenStream()
        voice.left_out = stream.left_out
        for sentence in sentences(text, stream):
            guide = SpeechGuide(self.layout, map(self.layout.group, sentence))
            prompt = [self.layout.id("<speak>"), *style, *guide.opening()]
            if guide.done:
                continue
            decoder = make(guide)
            decoder.feed(prompt)
            voice.begin(sentence.said, decoder.stats)
            for step in decoder:
                yield from voice.step(step)
        yield from voice.finish()

    def transcribe(self, pcm: Tensor, rate: int = 16000) -> str:
        """Return what was said in lower-case words without marks, "" for silence.

        `pcm` is `[n]` float. MediaError: another shape or type, or no numbers.
        """
        return self._written(pieces(pcm, rate))

    def _written(self, parts: Sequence[Tensor], search: PrefixSearch | None = None) -> str:
        found = (self.layout.text(self.ear.hear(part, search)[0]) for part in parts)
        return " ".join(filter(None, found))

    def overhear(self, pcm: Tensor, rate: int = 16000) -> Overheard:
        """Return what `transcribe` does, and how likely more is to come."""
        found, sure = list[str](), 1.0
        for piece in pieces(pcm, rate):
            ids, chances = self.ear.hear(piece)
            found.append(self.layout.text(ids))
            sure = min(chances[-LAST:], default=1.0)
        text = " ".join(text for text in found if text)
        return Overheard(text, sure, self.ending(text) if text else None)

    def ending(self, text: str) -> float:
        """Return the probability that people say no more behind these words."""
        *words, done = self.layout.history([("user", text)])[1:]
        return float(self._search.prior([tuple(words)])[0, done].exp())

    def reply(
        self,
        pcm: Tensor,
        rate: int = 16000,
        history: Sequence[Turn] = (),
        *,
        voice: str | None = None,
        speed: int | None = None,
        pitch: int | None = None,
        mode: str = DEFAULT_MODE,
        verify: str | None = None,
        schedule: str | Sequence[int] | None = None,
        head: str = "mctp",
        sampling: Sampling | None = None,
    ) -> Iterator[Sound]:
        """Answer speech `[n]`; yields the answer as it comes, and first what was heard.

        `history` is what was said before, oldest first. `speed` is the `rate` of `speak`, the other
        options are as there, and so are the errors; MediaError is as of `transcribe`. Where no word
        is understood, there is no answer: silence, noise and other languages get none.
        """
        style = self.layout.style(voice or self.voices[0], speed, pitch)
        make = self._decoding(parse_mode(mode, verify, schedule), head, sampling)
        return self._reply(pieces(pcm, rate), history, style, make, sampling)

    def _reply(
        self,
        parts: Sequence[Tensor],
        history: Sequence[Turn],
        style: list[int],
        make: Make,
        sampling: Sampling | None,
    ) -> Iterator[Sound]:
        heard = self._written(parts, self._search)  # as what people say in conversations
        yield Sound(torch.zeros(0), self.sample_rate, heard=heard)
        if heard:
            past = self._past([*history, Turn("user", heard)])
            yield from self._sounds(self.replies.words(past, sampling), style, make)

    def _past(self, history: Sequence[Turn]) -> list[int]:
        found: list[int] = []
        for turn in reversed(history):
            text = " ".join(spoken(turn.text))
            ids = self.layout.history([(turn.role, text)])
            if len(found) + len(ids) > PAST:
                break
            found = ids + found
        return found

    def _decoding(self, mode: DraftMode, head: str, sampling: Sampling | None) -> Make:
        """Return a function that makes a decoder for a guide; wrong choices are refused at once."""
        _check_head(head)
        drafts = mode.schedule.most > 0
        module = self.heads.get(head) if drafts else None
        if drafts and module is None:
            raise ModelError(f"the model has no head {head!r}; use schedule='vanilla'")
        return lambda guide: SingleDecoder(
            self.backbone, module, guide, mode=mode, sampling=sampling
        )


def load_speech(
    path: str | Path | None = None, device: str | torch.device | None = "cpu"
) -> SpeechModel:
    """The embedded speech model, or one of its kind from a folder; ModelError for bad files.

    `device` is as of `pick_device`; the codec, which counts samples in float64, stays on the CPU.
    """
    folder = Path(path) if path is not None else embedded_path(EMBEDDED)
    layout = SpeechLayout.load(folder)
    part = partial(part_of, folder, device=device)
    backbone = Backbone(part("", "AutoModelForCausalLM"))
    heads = {
        name: load_head(file, backbone)
        for name in HEADS
        if (file := folder / "heads" / f"{name}.safetensors").is_file()
    }
    codec, ear = load_embedded(folder / "codec"), SpeechEar(part(EAR, "AutoModelForCTC"), layout)
    replies = ReplyModel(Backbone(part(REPLY, "AutoModelForCausalLM")), layout)
    return SpeechModel(backbone, heads, ear, layout, codec, replies)
