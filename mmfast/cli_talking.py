"""What `mmfast talk` does: turns of a recording in, one WAV of replies and their figures out."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from mmfast.core.errors import MediaError
from mmfast.core.speech import Turn
from mmfast.frontends.audio import load_audio
from mmfast.frontends.wav import WavWriter
from mmfast.pipelines.omni_chat import written
from mmfast.pipelines.speech_chat import SpeechChat
from mmfast.pipelines.spoken import KEYS
from mmfast.streams.voice_ear import RATE, Ear, ManualEar
from mmfast.streams.voice_events import VoiceEvent
from mmfast.streams.voice_models import given_options
from mmfast.streams.voice_turns import VoiceEar


def read_recording(path: str) -> Tensor:
    """A file, or standard input, as `[n]` at 16 kHz.

    Raises:
        MediaError: It is no sound.
    """
    return load_audio(sys.stdin.buffer.read() if path == "-" else path, RATE)


def voice_pipe(model: str | None, how: dict[str, Any], place: dict[str, Any]) -> SpeechChat:
    """A speech model answers."""
    return SpeechChat(model, **how, **place)


def video_pipe(
    clip: str, model: str | None, how: dict[str, Any], place: dict[str, Any]
) -> SpeechChat:
    """A video model answers about a clip; the embedded speech model listens and speaks."""
    from mmfast.pipelines.video_qa import VideoQA

    pipe = VideoQA(model, **place)

    def chat(turns: Sequence[Turn]) -> Iterator[str]:
        return pipe.stream(clip, written(turns[-1].text))

    return SpeechChat(chat=chat, **given_options(how))


class Talking:
    """One run of `mmfast talk`.

    Args:
        pipe: Converses.
        whole: The recording is one question.
    """

    def __init__(self, pipe: SpeechChat, whole: bool) -> None:
        ear: Ear = ManualEar(longest=600.0) if whole else VoiceEar()
        self.session = pipe.open(ear)
        self.rate = pipe.chatter.sample_rate
        self.turns: dict[str, dict[str, Any]] = {}

    def run(self, pcm: Tensor, target: Any) -> dict[str, Any]:
        """Converse, write what of the replies was played, and sum up.

        Raises:
            MediaError: Nobody speaks in the recording.
            MmfastError: The model failed.
        """
        sounds: dict[str, list[Tensor]] = {}
        with self.session as session:
            for event in session.run([pcm]):
                self._note(event)
                if event.pcm is not None:
                    sounds.setdefault(event.reply, []).append(event.pcm)
            stats = session.stats()
        if not self.turns:
            raise MediaError(
                "nobody speaks in the recording; give one with speech, or take it as it is: --whole"
            )
        with WavWriter(target, self.rate) as wav:
            for reply, turn in self.turns.items():
                limit = turn.pop("_samples", None)
                wav.write(torch.cat([torch.zeros(0), *sounds.get(reply, ())])[:limit])
        return self._document(wav.seconds, stats)

    def _note(self, event: VoiceEvent) -> None:
        if event.kind == "error":
            raise MediaError(f"no reply: {event.text}")
        if event.kind == "reply_started":
            self.turns[event.reply] = {"heard": "", "text": "", "interrupted": False}
        turn = self.turns.get(event.reply, {})
        if event.kind == "heard":
            turn["heard"] = event.text
        elif event.kind == "text":
            turn["text"] += event.text
        elif event.kind == "interrupted":
            turn |= {"text": event.text, "interrupted": True}
            turn["_samples"] = round(event.audio_ms * self.rate / 1e3)
        elif event.kind == "done":
            turn |= event.stats

    def _document(self, seconds: float, stats: dict[str, Any]) -> dict[str, Any]:
        turns = list(self.turns.values())
        said = {
            "text": " ".join(turn["text"].strip() for turn in turns).strip(),
            "heard": " ".join(turn["heard"] for turn in turns).strip(),
        }
        figures = {**stats, "seconds": round(seconds, 4), "turns": turns}
        first = next((t["first_audio_ms"] for t in turns if t.get("first_audio_ms")), None)
        figures["first_audio_ms"] = first
        head = {key: figures[key] for key in KEYS}
        return {"text": said["text"], **head, "heard": said["heard"], **figures}
