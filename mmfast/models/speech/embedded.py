"""The embedded speech model: it speaks, it listens, it answers speech with speech.

A stock language model over text and audio rows, draft modules, a tower that hears, a codec that
sounds. Long texts are said sentence by sentence, long sound is heard piece by piece.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mmfast.core.errors import MediaError, MmfastError, ModelError, SpecError, unknown
from mmfast.core.speech import Codec, Sound, Turn
from mmfast.decoding.accept import PassStats, Stats, parse_rule
from mmfast.decoding.drafting import parse_schedule
from mmfast.decoding.loop import SingleDecoder
from mmfast.decoding.row import Guide
from mmfast.decoding.sampling import Sampling
from mmfast.frontends.codecs.embedded.codec import load_embedded
from mmfast.frontends.text_normalisation import SpokenStream, spoken
from mmfast.models.decoder.backbone import Backbone, load_head
from mmfast.models.loading import embedded_path
from mmfast.models.speech.layout import MARKS, HearingGuide, SpeechGuide, SpeechLayout
from mmfast.models.speech.tower import FRAMES, SpeechTower, load_tower
from mmfast.ops.audio import HOP, log_mel, resample


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
        self._collected = UtteranceFrames(layout)
        self.begin((), Stats())

    def begin(self, said: Sequence[str] | SpeechGuide, stats: Stats) -> None:
        """The next sentence; `said` grows as its words are handed over, `stats` with its drafts.

        A guide stands for a sentence in the model's own words.
        """
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
        if len(pcm) or self._words:
            yield self._sound(pcm, None)

    def _groups(self) -> list[str]:
        if not isinstance(self._said, SpeechGuide):
            return list(self._said)
        return re.sub(r"([,.?])", r" \1", self.layout.text(self._said.text)).split()

    def _note(self) -> None:
        """Words whose sound begins: the start of each group that has a frame."""
        starts = self._collected.starts
        begun = len(starts) - (starts[-1] == self._collected.count)
        known = self._groups()
        while self._noted < min(begun, len(known)):
            text = known[self._noted]
            lead = "" if self._first or text in MARKS else " "
            at = (self._frames + starts[self._noted]) * self.codec.hop
            self._words.append((at, lead + text))
            self._first = False
            self._noted += 1

    def _sound(self, pcm: Tensor, codes: Tensor | None) -> Sound:
        end = self._samples + len(pcm) if codes is not None else 1 << 60
        now = [word for word in self._words if word[0] < end]
        self._words = self._words[len(now) :]
        starts = [max(0, at - self._samples) for at, text in now if text not in MARKS]
        sound = Sound(
            pcm.to(torch.float32),
            self.codec.sample_rate,
            text="".join(text for _, text in now),
            codes=codes,
            passes=self._passes,
            drafts=self._drafts,
            tokens=self._tokens,
            notes={**({"starts": starts} if starts else {}), **self._verified()},
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
    parse_schedule(options.get("mode", "turbo"))
    parse_rule(options.get("verify", "exact"))
    _check_head(options.get("head", HEADS[0]))


RATE = 16000
LONGEST, SHORTEST = 9 * RATE, 4 * RATE  # of a piece that is cut from longer sound
LOUDNESS = 1e-3  # sound that never is louder is silence: -60 dB
WINDOW = RATE // 10
AROUND = (3200, 1600)  # samples of silence that a piece gets in front and behind


def pieces(pcm: Tensor, rate: int = RATE) -> list[Tensor]:
    """Cut sound `[n]` where it is quietest, into pieces at 16 kHz that can be understood at once.

    There are none where all is silence. MediaError: another shape or type, or no numbers.
    """
    if pcm.dim() != 1 or not pcm.is_floating_point():
        raise MediaError(f"pcm is {tuple(pcm.shape)} {pcm.dtype}; give float samples [n]")
    if not bool(pcm.isfinite().all()):
        raise MediaError("pcm has samples that are NaN or infinite; clean them first")
    sound = resample(pcm.float().clamp(-1, 1), rate, RATE)
    if len(sound):
        sound = sound - sound.mean()
    found = []
    while len(sound) > LONGEST:
        cut = SHORTEST + quietest(sound[SHORTEST:LONGEST])
        found.append(sound[:cut])
        sound = sound[cut:]
    found.append(sound)
    return [part for part in found if len(part) and float(part.abs().max()) > LOUDNESS]


def quietest(sound: Tensor) -> int:
    """Sample in the middle of the quietest tenth of a second."""
    loud = F.avg_pool1d(sound.square()[None], WINDOW, WINDOW // 4)[0]
    return int(loud.argmin()) * (WINDOW // 4) + WINDOW // 2


def embeddings(tower: SpeechTower, sound: Tensor) -> Tensor:
    """Sound at 16 kHz `[n]`, silence around it, to embeddings `[t, D]`, one for 640 samples.

    What was learned from never began at once: without silence in front first words get lost.
    """
    around = F.pad(sound, AROUND)
    whole = F.pad(around, (0, -len(around) % (HOP * FRAMES)))
    found: Tensor = tower(log_mel(whole[None]))[0]
    return found.to(torch.float32)


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


def sentences(text: str | Iterable[str]) -> Iterator[Sentence]:
    """Sentences of a text, each to be used up before the next is asked for."""
    source = groups(text)
    while (first := next(source, None)) is not None:
        yield Sentence(chain([first], source))


def groups(text: str | Iterable[str]) -> Iterator[str]:
    """Words and marks of text, or of pieces of text as they come."""
    stream = SpokenStream()
    for piece in [text] if isinstance(text, str) else text:
        if not isinstance(piece, str):
            raise MmfastError(f"text holds a {type(piece).__name__}; give strings")
        yield from stream.push(piece)
    yield from stream.finish()


EMBEDDED = "tiny-speech"
HEARD = 80  # words of one piece of sound
LAST = 3  # tokens that tell whether a sentence has ended
PAST = 240  # ids of what was said before that a reply sees


class SpeechModel:
    """Implements `Speaker`, `Listener` and `Chatter` of `mmfast.core.speech`."""

    def __init__(
        self,
        backbone: Backbone,
        heads: dict[str, Any],
        tower: SpeechTower,
        layout: SpeechLayout,
        codec: Any,
    ) -> None:
        self.backbone, self.heads, self.tower = backbone, heads, tower
        self.layout, self.codec = layout, codec
        self.sample_rate: int = codec.sample_rate
        self.voices = layout.voices  # names for `voice=`

    def speak(
        self,
        text: str | Iterable[str],
        *,
        voice: str | None = None,
        rate: int | None = None,
        pitch: int | None = None,
        mode: str | Sequence[int] = "turbo",
        verify: str = "exact",
        head: str = "mctp",
        sampling: Sampling | None = None,
    ) -> Iterator[Sound]:
        """Say a text.

        Args:
            text: All of it, or pieces as they come: sound comes as soon as three words are there.
            voice: One of `voices`; the first one if not given.
            rate: Words per minute; the nearest that was learned is taken.
            pitch: 0 to 99; likewise.
            mode: `vanilla`, `balance`, `boost`, `turbo`, or another schedule.
            verify: `none`, `exact` or `typical:ε`; `none` is faster and less intelligible.
            head: Draft modules, `mctp` or `mtp`.
            sampling: How tokens are chosen; the likeliest unless told.

        Yields:
            A piece per pass of the backbone that makes sound or text certain.

        Raises:
            SpecError: An unknown voice, mode, rule or head, a rate or pitch out of reach.
            MmfastError: Nothing to say.
        """
        style = self.layout.style(voice or self.voices[0], rate, pitch)
        make = self._decoding(mode, verify, head, sampling)
        return self._say(text, style, make)

    def _say(self, text: str | Iterable[str], style: list[int], make: Make) -> Iterator[Sound]:
        voice, said = SpeakerVoice(self.layout, self.codec), False
        for sentence in sentences(text):
            guide = SpeechGuide(self.layout, map(self.layout.group, sentence))
            prompt = [self.layout.id("<speak>"), *style, *guide.opening()]
            if guide.done:
                continue
            said = True
            decoder = make(guide)
            decoder.feed(prompt)
            voice.begin(sentence.said, decoder.stats)
            for step in decoder:
                yield from voice.step(step)
        if not said:
            raise MmfastError("the text has no word that can be said; give words")
        yield from voice.finish()

    def transcribe(self, pcm: Tensor, rate: int = 16000) -> str:
        """Return what was said in lower-case words without marks, "" for silence.

        `pcm` is `[n]` float. MediaError: another shape or type, or no numbers.
        """
        listen = self._decoding("vanilla", "none", HEADS[0], None)
        heard = [self._heard(piece, listen)[0] for piece in pieces(pcm, rate)]
        return " ".join(text for text in heard if text)

    def overhear(self, pcm: Tensor, rate: int = 16000) -> tuple[str, float]:
        """Return what `transcribe` does, and the least probability of the last words and the end.

        The model has learned whole sentences: of one that breaks off it guesses the end.
        """
        listen = self._decoding("vanilla", "none", HEADS[0], None)
        found, sure = list[str](), 1.0
        for piece in pieces(pcm, rate):
            guide = HearingGuide(self.layout, HEARD)
            fed = self._listen(piece, listen(guide))
            found.append(self.layout.text(guide.words))
            with torch.inference_mode():
                said = torch.tensor(guide.said)
                whole = torch.cat([fed, self.backbone.embed(said)])[None]
                rows, at = guide.rows(), len(fed) - 1
                logits = self.backbone.model(inputs_embeds=whole).logits[0, at:-1, rows]
                chances = logits.softmax(-1).gather(1, said[:, None] - rows.start)
                sure = float(chances[-LAST:].min())
        return " ".join(text for text in found if text), sure

    def _listen(self, piece: Tensor, decoder: SingleDecoder, before: Sequence[int] = ()) -> Tensor:
        """Write one piece down into the decoder's guide; return the embeddings `[n, D]` it read."""
        row = decoder.batch.rows[0]
        chosen, row.sampling = row.sampling, Sampling()  # what was heard is not drawn by lot
        first = torch.tensor([*before, self.layout.id("<listen>")])
        last = torch.tensor([self.layout.id("<heard>")])
        with torch.inference_mode():
            sound, embed = embeddings(self.tower, piece), self.backbone.embed
            fed = torch.cat([embed(first), sound, embed(last)])
            decoder.feed(fed)
        for _ in decoder:
            pass
        row.sampling = chosen
        return fed

    def _heard(
        self, piece: Tensor, make: Make, before: Sequence[int] = ()
    ) -> tuple[str, SingleDecoder, list[int]]:
        """Words of one piece, the decoder behind them, and what it still has to read."""
        guide = HearingGuide(self.layout, HEARD)
        decoder = make(guide)
        self._listen(piece, decoder, before)
        return self.layout.text(guide.words), decoder, guide.owed

    def reply(
        self,
        pcm: Tensor,
        rate: int = 16000,
        history: Sequence[Turn] = (),
        *,
        voice: str | None = None,
        speed: int | None = None,
        pitch: int | None = None,
        mode: str | Sequence[int] = "turbo",
        verify: str = "exact",
        head: str = "mctp",
        sampling: Sampling | None = None,
    ) -> Iterator[Sound]:
        """Answer speech `[n]`; yields the answer as it comes, and first what was heard.

        `history` is what was said before, oldest first. `speed` is the `rate` of `speak`, the other
        options are as there, and so are the errors; MediaError is as of `transcribe`.
        """
        style = self.layout.style(voice or self.voices[0], speed, pitch)
        make = self._decoding(mode, verify, head, sampling)
        return self._reply(pieces(pcm, rate), list(history), style, make)

    def _reply(
        self, parts: list[Tensor], history: list[Turn], style: list[int], make: Make
    ) -> Iterator[Sound]:
        layout, parts = self.layout, parts or [torch.zeros(1600)]
        listen = self._decoding("vanilla", "none", HEADS[0], None)
        earlier = [self._heard(part, listen)[0] for part in parts[:-1]]
        heard, decoder, owed = self._heard(parts[-1], make, self._past(history))
        guide = SpeechGuide(layout)
        decoder.guide(guide)
        decoder.feed([*owed, layout.id("<answer>"), *style])
        voice = SpeakerVoice(layout, self.codec)
        voice.begin(guide, decoder.stats)
        told = " ".join(text for text in (*earlier, heard) if text)
        yield Sound(torch.zeros(0), self.sample_rate, heard=told)
        for step in decoder:
            yield from voice.step(step)
        yield from voice.finish()

    def _past(self, history: list[Turn]) -> list[int]:
        found: list[int] = []
        for turn in reversed(history):
            text = " ".join(spoken(turn.text))
            ids = self.layout.history([(turn.role, text)])
            if len(found) + len(ids) > PAST:
                break
            found = ids + found
        return found

    def _decoding(
        self, mode: str | Sequence[int], verify: str, head: str, sampling: Sampling | None
    ) -> Make:
        """Return a function that makes a decoder for a guide; wrong choices are refused at once."""
        schedule, rule = parse_schedule(mode), parse_rule(verify)
        _check_head(head)
        module = self.heads.get(head) if schedule.most else None
        if schedule.most and module is None:
            raise ModelError(f"the model has no head {head!r}; use mode='vanilla'")
        how: Any = {"schedule": schedule, "verify": rule, "sampling": sampling}
        return lambda guide: SingleDecoder(self.backbone, module, guide, **how)


def load_speech(path: str | Path | None = None) -> SpeechModel:
    """The embedded speech model, or one of its kind from a folder; ModelError for bad files."""
    from transformers import AutoModelForCausalLM

    folder = Path(path) if path is not None else embedded_path(EMBEDDED)
    layout = SpeechLayout.load(folder)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            str(folder), dtype=torch.float32, use_safetensors=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ModelError(f"cannot load speech model {str(folder)!r}: {reason}") from error
    backbone = Backbone(model.eval())
    heads = {
        name: load_head(file, backbone)
        for name in HEADS
        if (file := folder / "heads" / f"{name}.safetensors").is_file()
    }
    return SpeechModel(backbone, heads, load_tower(folder), layout, load_embedded(folder / "codec"))
