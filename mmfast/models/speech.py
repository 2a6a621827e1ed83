"""The embedded speech model: it speaks, it listens, it answers speech with speech.

A stock language model over text and audio rows, draft modules, a tower that hears, a codec that
sounds. Long texts are said sentence by sentence, long sound is heard piece by piece.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmfast.core.errors import MmfastError, ModelError
from mmfast.core.speech import Sound, Turn
from mmfast.decoding.loop import Decoder
from mmfast.decoding.sampling import Sampling
from mmfast.frontends.codecs.embedded import load_embedded
from mmfast.frontends.spoken import spoken
from mmfast.models.backbone import Backbone
from mmfast.models.backbone_heads import load_head
from mmfast.models.loading import embedded_path
from mmfast.models.speech_guide import HearingGuide, SpeechGuide
from mmfast.models.speech_hearing import embeddings, pieces
from mmfast.models.speech_layout import SpeechLayout
from mmfast.models.speech_text import sentences
from mmfast.models.speech_tower import Tower, load_tower
from mmfast.models.speech_voice import Voice
from mmfast.models.speech_ways import HEADS, Make, decoding

EMBEDDED = "tiny-speech"
HEARD = 80  # words of one piece of sound
PAST = 240  # ids of what was said before that a reply sees


class SpeechModel:
    """Implements `Speaker`, `Listener` and `Chatter` of `mmfast.core.speech`.

    Args:
        backbone: Over the language model.
        heads: Draft modules by name.
        tower: Log-mel to embeddings.
        layout: Rows.
        codec: Codes to sound.
    """

    def __init__(
        self,
        backbone: Backbone,
        heads: dict[str, Any],
        tower: Tower,
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
        voice, said = Voice(self.layout, self.codec), False
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
        """What was said, in lower-case words without marks; nothing where nobody spoke.

        Args:
            pcm: `[n]` float.
            rate: Samples per second.

        Raises:
            MediaError: Samples of another shape or type, or that are no numbers.
        """
        listen = self._decoding("vanilla", "none", HEADS[0], None)
        heard = [self._heard(piece, listen)[0] for piece in pieces(pcm, rate)]
        return " ".join(text for text in heard if text)

    def _heard(
        self, piece: Tensor, make: Make, before: Sequence[int] = ()
    ) -> tuple[str, Decoder, list[int]]:
        """Words of one piece, the decoder behind them, and what it still has to read."""
        guide = HearingGuide(self.layout, HEARD)
        decoder = make(guide)
        row = decoder.batch.rows[0]
        chosen, row.sampling = row.sampling, Sampling()  # what was heard is not drawn by lot
        first = torch.tensor([*before, self.layout.id("<listen>")])
        last = torch.tensor([self.layout.id("<heard>")])
        with torch.inference_mode():
            sound, embed = embeddings(self.tower, piece), self.backbone.embed
            decoder.feed(torch.cat([embed(first), sound, embed(last)]))
        for _ in decoder:
            pass
        row.sampling = chosen
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
        """Answer speech.

        Args:
            pcm: What was said `[n]`.
            rate: Its samples per second.
            history: What was said before, oldest first.
            voice: As of `speak`.
            speed: Its `rate`.
            pitch: As of `speak`.
            mode: Likewise.
            verify: Likewise.
            head: Likewise.
            sampling: Likewise.

        Yields:
            The answer as it comes; the first piece says what was heard.

        Raises:
            SpecError: As of `speak`.
            MediaError: As of `transcribe`.
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
        voice = Voice(layout, self.codec)
        voice.begin_own(guide, decoder.stats)
        told = " ".join(text for text in (*earlier, heard) if text)
        yield Sound(torch.zeros(0), self.sample_rate, heard=told)
        for step in decoder:
            yield from voice.step(step)
        yield from voice.finish()

    def _past(self, history: list[Turn]) -> list[int]:
        """Ids of the last turns that fit."""
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
        """What makes a decoder for a guide; all options are checked now."""
        return decoding(self.backbone, self.heads, mode, verify, head, sampling)


def load_speech(path: str | Path | None = None) -> SpeechModel:
    """The embedded speech model, or one of its kind from a folder.

    Raises:
        ModelError: Files are missing or of something else.
    """
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
