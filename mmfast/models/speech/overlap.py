"""The ear for two speakers at once: a stream of words with marks of change, parted by speaker.

Token-level serialised output (t-SOT, Kanda et al. 2022, 2202.00842) over the embedded ear: a copy
of its Parakeet, with one more class for the mark. A stream is heard in chunks between context on
both sides.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
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
from mmfast.models.speech.sound import LOUDNESS, resampled, samples, taken
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
        return list(self._words([self.frames(F.pad(sound, AROUND))], AROUND[0]))

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
        for name, value in (("chunk", chunk), ("context", context)):
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise SpecError(f"{name}={value!r} is no number; give seconds from 0.04 to 12")
            if not 0.04 <= value <= 12:
                raise SpecError(f"{name}={value!r}: give seconds from 0.04 to 12")
        size, around = (round(seconds * RATE / FRAME) for seconds in (chunk, context))
        sound = resampled(chunks, rate, RATE)
        return self._words(self._windows(_framed(sound), size, around), AROUND[0])

    def _windows(
        self, sound: Iterator[Tensor], size: int, around: int
    ) -> Iterator[list[HeardFrame]]:
        """`size` frames after another, each heard with `around` frames on both sides."""
        buffer, before, going = torch.zeros(0), 0, True
        while going:
            most = (before + size + around) * FRAME  # a later sample would depend on the split
            buffer, going = taken(buffer, sound, most)
            if len(buffer) <= before * FRAME:
                return
            window = buffer[:most]
            silent = float(window.abs().max()) <= LOUDNESS
            nothing = [(self.blank, 0.0)] * -(-len(window) // FRAME)
            found = nothing if silent else self.frames(window)
            yield found[before : before + size if going else None]
            drop = max(before + size - around, 0) if going else 0
            buffer, before = buffer[drop * FRAME :], before + size - drop

    def _words(self, parts: Iterable[list[HeardFrame]], ahead: int) -> Iterator[SpeakerWord]:
        """Part the words of frames; a mark stands where its chances between two words add up."""
        splitter, last, letters = ChannelSplitter(), self.blank, [""] * CHANNELS
        marks, begun = 0.0, False
        for frame, (found, chance) in enumerate(chain.from_iterable(parts), 1):
            marks += chance
            if found not in (self.blank, last):
                at = max(0.0, (frame * FRAME - ahead) / RATE)
                if begun and marks >= LIKELY:
                    splitter.push(TimedWord(CHANGE, at))
                marks, begun, text = 0.0, True, self.layout.rows[found]
                speaker = splitter.push(TimedWord(text, at))
                assert speaker is not None
                letters[speaker] += text
                if text.endswith("_"):
                    yield SpeakerWord(speaker, letters[speaker][:-1], at)
                    letters[speaker] = ""
            last = found


def _framed(sound: Iterable[Tensor]) -> Iterator[Tensor]:
    """Sound with the silence around it that the ear is used to."""
    yield torch.zeros(AROUND[0])
    yield from sound
    yield torch.zeros(AROUND[1])
