"""The ear for two speakers at once: a stream of words with marks of change, parted by speaker.

Token-level serialised output (t-SOT, Kanda et al. 2022, 2202.00842) over the embedded ear: a copy
of its Parakeet, with one more class for the mark. A stream is heard in chunks between context on
both sides.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from mmfast.core.errors import ModelError, SpecError
from mmfast.decoding.serialised import CHANGE, CHANNELS, ChannelSplitter, TimedWord
from mmfast.models.loading import embedded_path, part_of, pick_device
from mmfast.models.speech.ear import AROUND, FOLDER, SLOTS, scaled
from mmfast.models.speech.layout import SpeechLayout
from mmfast.models.speech.sound import LOUDNESS, resampled, samples
from mmfast.ops.audio import HOP, log_mel

FILE = "overlap.safetensors"  # in the folder of an ear
RATE = 16_000
FRAME = HOP * SLOTS  # samples to a frame of the ear: 40 ms
CHUNK, CONTEXT = 1.0, 2.0  # seconds
LONGEST, CUT = 9.0, 4.0  # seconds heard at once, as in training; longer sound is a stream of chunks
# Marks expected between two words where one is written, chosen on mixtures of lines for training;
# hardly any frame has the mark as its likeliest class.
LIKELY = 0.2
HeardFrame = tuple[int, float]  # class of a word, chance of the mark
SCALE = ".scale"  # of the difference of a matrix, one number for a group
_BASE = "base"  # entry of the metadata with the checksum of the ear for one
_MOST, _GROUP = 7, 32  # steps in 4 bits with a sign, numbers of a group


def widened(model: Any, rows: int) -> Any:
    """Give a CTC model so many classes: new ones start as silent as the old are on average."""
    old, config = model.ctc_head, model.config
    head = type(old)(old.in_channels, rows, kernel_size=1)
    with torch.no_grad():
        head.weight.zero_()
        head.weight[: len(old.weight)] = old.weight
        head.bias.fill_(float(old.bias[1:].mean()))
        head.bias[: len(old.bias)] = old.bias
    model.ctc_head, config.vocab_size = head, rows
    return model


def save_overlap(model: Any, base: Mapping[str, Tensor], folder: Path) -> None:
    """Write the weights of an ear for two into the folder of the ear for one, whose are `base`.

    Of a matrix the difference is kept, in 4 bits a number and one scale for a group of 32; so the
    file tells which ear it belongs to.
    """
    found: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        if value.ndim < 2:
            found[name] = value.contiguous()
            continue
        gap = (value - base[name]).float().flatten()
        groups = F.pad(gap, (0, -len(gap) % _GROUP)).view(-1, _GROUP)
        scale = (groups.abs().amax(1, keepdim=True) / _MOST).clamp(min=1e-7).half()
        steps = (groups / scale).round().clamp(-_MOST, _MOST).to(torch.int8) + (_MOST + 1)
        pairs = steps.to(torch.uint8).view(-1, 2)
        found[name], found[name + SCALE] = pairs[:, 0] | pairs[:, 1] << 4, scale[:, 0].contiguous()
    save_file(found, folder / FILE, {_BASE: _mark_of(base)})
    (folder / FILE).chmod(0o644)


def load_overlap(
    path: str | Path | None = None, device: str | torch.device | None = "cpu"
) -> OverlapEar:
    """Read the ear for two of a speech model's folder; None is the embedded one.

    `device` is as of `pick_device`. ModelError: the folder has none, or it is broken.
    """
    folder = embedded_path("tiny-speech") if path is None else Path(path)
    layout, file = SpeechLayout.load(folder), folder / FOLDER / FILE
    if not file.is_file():
        raise ModelError(
            f"{str(folder)!r} has no ear for two speakers ({FOLDER}/{FILE}); train one with "
            "`python -m mmfast.tiny.speech.train_overlap`, or leave speakers= out"
        )
    model = read_overlap(folder, layout, file).float().to(pick_device(device))
    return OverlapEar(model.eval(), layout)


def read_overlap(folder: Path, layout: SpeechLayout, file: Path | None) -> Any:
    """Read the ear of a speech model with a class for the mark, and its weights for two speakers.

    Without a `file` it has those of the ear for one. ModelError: the file is broken.
    """
    model = widened(part_of(folder, FOLDER, "AutoModelForCTC"), layout.texts + 1)
    if file is None:
        return model
    state = model.float().state_dict()
    try:
        with safe_open(file, "pt") as header:
            known = header.metadata()[_BASE] == _mark_of(state)
        stored = load_file(file)
        for name, value in state.items():
            scale = stored.pop(name + SCALE, None)
            if scale is not None:
                packed = stored[name]
                steps = torch.stack([packed & 15, packed >> 4], 1).float() - (_MOST + 1)
                gap = (steps.view(-1, _GROUP) * scale[:, None].float()).flatten()
                stored[name] = value + gap[: value.numel()].view(value.shape)
        model.load_state_dict(stored)
    except Exception as error:
        raise ModelError(f"{str(file)!r} is no ear for two speakers; train it again") from error
    if not known:
        raise ModelError(
            f"{str(file)!r} was trained from another ear for one than {str(folder / FOLDER)!r}; "
            "put it beside that, or train it again"
        )
    return model


def _mark_of(state: Mapping[str, Tensor]) -> str:
    """Return a checksum of float32 weights."""
    found = 0
    for name in sorted(state):
        found = zlib.crc32(state[name].contiguous().numpy().tobytes(), found)
    return f"{found:08x}"


@dataclass(frozen=True)
class SpeakerWord:
    """A word of one of two speakers (0 is heard first) and its end in seconds."""

    speaker: int
    text: str
    at: float


def speaker_texts(words: Iterable[SpeakerWord]) -> tuple[str, ...]:
    """Return the text of each of the two speakers; "" of one who says nothing."""
    said: list[list[str]] = [[] for _ in range(CHANNELS)]
    for word in words:
        said[word.speaker].append(word.text)
    return tuple(" ".join(own) for own in said)


class SpeakerParter:
    """Parts the words of frames by speaker while they come.

    A mark stands between two words where its chances between them add up.

    Args:
        layout: Meaning of the rows.
        ahead: Samples of silence in front of the sound.
    """

    def __init__(self, layout: SpeechLayout, ahead: int) -> None:
        self._layout, self._ahead, self._blank = layout, ahead, layout.id("<pad>")
        self._splitter = ChannelSplitter()
        self._letters, self._ends = [""] * CHANNELS, [0.0] * CHANNELS  # of words that have begun
        self._last, self._marks, self._begun = self._blank, 0.0, False
        self._frames = 0

    @property
    def seconds(self) -> float:
        """Seconds of sound that are written down."""
        return max(0.0, (self._frames * FRAME - self._ahead) / RATE)

    def push(self, frames: Iterable[HeardFrame]) -> Iterator[SpeakerWord]:
        """Take frames; yield the words that end in them."""
        for found, chance in frames:
            self._frames += 1
            self._marks += chance
            if found not in (self._blank, self._last):
                yield from self._row(found)
            self._last = found

    def _row(self, found: int) -> Iterator[SpeakerWord]:
        at, text = self.seconds, self._layout.rows[found]
        if self._begun and self._marks >= LIKELY:
            self._splitter.push(TimedWord(CHANGE, at))
        self._marks, self._begun = 0.0, True
        speaker = self._splitter.push(TimedWord(text, at))
        assert speaker is not None
        self._letters[speaker] += text
        self._ends[speaker] = at
        if text.endswith("_"):
            yield SpeakerWord(speaker, self._letters[speaker][:-1], at)
            self._letters[speaker] = ""

    def finish(self) -> Iterator[SpeakerWord]:
        """End the sound; yield the words that it cuts, as far as they were said."""
        for speaker, (letters, at) in enumerate(zip(self._letters, self._ends, strict=True)):
            if letters:
                yield SpeakerWord(speaker, letters, at)
        self._letters = [""] * CHANNELS


class OverlapEar:
    """Writes down two speakers, who may speak at once.

    Args:
        model: CTC model over the text rows of a layout and, last, the mark of a change.
        layout: Meaning of the rows.
    """

    def __init__(self, model: Any, layout: SpeechLayout) -> None:
        self.model, self.layout = model, layout
        self.blank, self.change = layout.id("<pad>"), layout.texts

    @torch.inference_mode()
    def frames(self, sound: Tensor) -> list[HeardFrame]:
        """Return the likeliest word of each frame of 40 ms of sound `[n]` at 16 kHz, or none.

        With it the chance that the mark of a change stands there.
        """
        mel = log_mel(F.pad(sound, (0, -len(sound) % FRAME)), torch.float32)
        whole = len(mel) // SLOTS * SLOTS
        if not whole:
            return []
        chances = self.model(scaled(mel[None, :whole]).to(self.model.device)).logits[0].softmax(-1)
        best = chances[:, : self.change].argmax(-1).tolist()
        return list(zip(best, chances[:, self.change].tolist(), strict=True))

    option_names = frozenset({"chunk", "context"})  # of a stream

    def words(self, pcm: Tensor, rate: int = RATE) -> list[SpeakerWord]:
        """Return the words of a recording `[n]`, none for silence; MediaError: it is no sound."""
        sound = samples(pcm, rate, RATE)
        if not len(sound) or float(sound.abs().max()) <= LOUDNESS:
            return []
        if len(sound) > LONGEST * RATE:
            return list(self.stream([sound], chunk=CUT, context=CONTEXT))
        parter = SpeakerParter(self.layout, AROUND[0])
        return [*parter.push(self.frames(F.pad(sound, AROUND))), *parter.finish()]

    def transcribe(self, pcm: Tensor, rate: int = RATE) -> str:
        """Return what is said, a line for each speaker; "" for silence."""
        return "\n".join(filter(None, speaker_texts(self.words(pcm, rate))))

    def stream(
        self,
        chunks: Iterable[Tensor],
        rate: int = RATE,
        chunk: float = CHUNK,
        context: float = CONTEXT,
    ) -> Iterator[SpeakerWord]:
        """Yield words while chunks of sound come.

        Args:
            chunks: Sound `[n]` at `rate`.
            rate: Samples per second.
            chunk: Seconds that are written down at once.
            context: Seconds that are heard on both sides of them; those behind must have come.

        Raises:
            SpecError: `chunk` or `context` is no number of seconds from 0.04 to 12.
            MediaError: A chunk is no sound.
        """
        session = self.open(chunk, context)
        return self._streamed(session, resampled(chunks, rate, RATE))

    def open(self, chunk: float = CHUNK, context: float = CONTEXT) -> OverlapSession:
        """Return a session that takes sound at 16 kHz as it comes; SpecError: as of `stream`."""
        for name, value in (("chunk", chunk), ("context", context)):
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise SpecError(f"{name}={value!r} is no number; give seconds from 0.04 to 12")
            if not 0.04 <= value <= 12:
                raise SpecError(f"{name}={value!r}: give seconds from 0.04 to 12")
        size, around = (round(seconds * RATE / FRAME) for seconds in (chunk, context))
        return OverlapSession(self, size, around)

    def _streamed(self, session: OverlapSession, sound: Iterable[Tensor]) -> Iterator[SpeakerWord]:
        for part in sound:
            for window in session.push(part):
                yield from window.words
        for window in session.finish():
            yield from window.words


@dataclass(frozen=True)
class HeardWindow:
    """Words of a window of sound.

    Attributes:
        words: The words that end in it.
        until: Seconds of sound that are written down with it.
        at: Seconds of sound that had to come for it.
    """

    words: list[SpeakerWord]
    until: float
    at: float


class OverlapSession:
    """A stream of two speakers, written down window by window; any split gives the same windows.

    Args:
        ear: The ear.
        size: Frames that are written down at once.
        around: Frames that are heard on both sides of them.
    """

    def __init__(self, ear: OverlapEar, size: int, around: int) -> None:
        self._ear, self._size, self._around = ear, size, around
        self._parter = SpeakerParter(ear.layout, AROUND[0])
        self._buffer, self._before, self._dropped = torch.zeros(AROUND[0]), 0, 0
        self._pushed = 0

    @property
    def pushed(self) -> float:
        """Seconds of sound so far."""
        return self._pushed / RATE

    def push(self, pcm: Tensor) -> Iterator[HeardWindow]:
        """Take sound `[n]` at 16 kHz; yield the windows that it completes.

        Samples that are no numbers are silence, as a line that breaks must not end a session.
        """
        self._pushed += len(pcm)
        clean = torch.nan_to_num(pcm.detach().float().cpu(), posinf=0.0, neginf=0.0)
        yield from self._add(clean.clamp(-1.0, 1.0))

    def finish(self) -> Iterator[HeardWindow]:
        """End the stream; yield the last windows."""
        yield from self._add(torch.zeros(AROUND[1]))
        if len(self._buffer) > self._before * FRAME:
            yield self._window(self._buffer, None)
            self._before = -(-len(self._buffer) // FRAME)
        if cut := list(self._parter.finish()):
            yield HeardWindow(cut, self._parter.seconds, self.pushed)

    def _add(self, pcm: Tensor) -> Iterator[HeardWindow]:
        self._buffer = torch.cat([self._buffer, pcm])
        while len(self._buffer) >= self._most:
            yield self._window(self._buffer[: self._most], self._before + self._size)
            drop = max(self._before + self._size - self._around, 0)
            self._buffer, self._dropped = self._buffer[drop * FRAME :], self._dropped + drop
            self._before += self._size - drop

    @property
    def _most(self) -> int:
        """Samples of a window; a later one would depend on the split."""
        return (self._before + self._size + self._around) * FRAME

    def _window(self, sound: Tensor, end: int | None) -> HeardWindow:
        """Hear a window, and write its frames from `_before` to `end` down."""
        silent = float(sound.abs().max()) <= LOUDNESS
        nothing = [(self._ear.blank, 0.0)] * -(-len(sound) // FRAME)
        found = nothing if silent else self._ear.frames(sound)
        words = list(self._parter.push(found[self._before : end]))
        came = min(self._dropped * FRAME + len(sound) - AROUND[0], self._pushed)
        return HeardWindow(words, self._parter.seconds, max(0, came) / RATE)
