"""A stream that is watched and a conversation about it, side by side."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

from mmfast.pipelines.speech_chat import stream_of
from mmfast.streams.session import Session
from mmfast.streams.voice_ear import RATE
from mmfast.streams.voice_events import VoiceEvent
from mmfast.streams.voice_session import VoiceSession


class OmniSession:
    """Frames go into `video`, speech into `voice`; a spoken question is about what was seen.

    Any thread may push frames while another converses.

    Attributes:
        video: The stream: `push`, `watch`, `stats`; see `mmfast.streams.session.Session`.
        voice: The conversation: `push`, `poll`, `step`, `start`, `events`, `truncate` and so on;
            see `mmfast.streams.voice_session.VoiceSession`.
    """

    def __init__(self, video: Session, voice: VoiceSession) -> None:
        self.video, self.voice = video, voice

    def push_frame(self, frame: Any, time: Any = None) -> int:
        """Take the next frame; see `Session.push`."""
        return self.video.push(frame, time)

    def watch(self, source: Any, **options: Any) -> Any:
        """Watch a source; see `Session.watch`."""
        return self.video.watch(source, **options)

    def run(
        self, chunks: Any, rate: int = RATE, frames: Iterable[tuple[float, Any]] = ()
    ) -> Iterator[VoiceEvent]:
        """Converse until the sound ends; frames are seen when the sound has come so far.

        Args:
            chunks: Sound, as for `SpeechChat.run`.
            rate: Samples per second.
            frames: `(seconds, frame)`, ascending; those behind the end of the sound are seen
                at its end.

        Yields:
            Events of the conversation.
        """
        sound, rate = stream_of(chunks, rate)
        yield from self.voice.run(self._with_frames(sound, rate, iter(frames)), rate)

    def _with_frames(
        self, sound: Iterable[Any], rate: int, frames: Iterator[tuple[float, Any]]
    ) -> Iterator[Any]:
        following = next(frames, None)
        for chunk in self.voice.inlet.blocks(sound, rate, max(rate // 50, 1)):
            now = self.voice.inlet.samples / RATE
            while following is not None and following[0] <= now:
                self.push_frame(following[1], following[0])
                following = next(frames, None)
            yield chunk
        for time, frame in chain([following] if following else [], frames):
            self.push_frame(frame, time)

    def stats(self) -> dict[str, Any]:
        """Figures of both."""
        return {"video": self.video.stats(), "voice": self.voice.stats()}

    def close(self) -> None:
        """End both."""
        self.voice.close()
        self.video.close()

    def __enter__(self) -> OmniSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
