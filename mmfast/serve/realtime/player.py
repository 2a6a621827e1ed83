"""Ways out for the sound of replies: deltas that a client plays, or a track that plays itself."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmfast.ops.audio import Resampler
from mmfast.serve.realtime.formats import Outgoing
from mmfast.serve.realtime.queues import Outbox
from mmfast.serve.realtime.response import Response

PIECE = 0.4  # seconds of one delta: a cancel takes back whole deltas
TRACK_RATE, FRAME = 48_000, 960  # of Opus: samples a second, and of one frame of 20 ms


class DeltaPlayer:
    """Sends sound as events: the client plays it, and says itself how much it has played."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox

    def play(self, response: Response, pcm: Tensor, rate: int) -> None:
        """Take the next samples `[n]` of a reply."""
        if response.out is None:
            response.out = Outgoing(response.settings["output"]["format"]["type"], rate)
        for piece in pcm.split(round(PIECE * rate)):
            self._pack(response, response.out.step(piece), len(piece))

    def finish(self, response: Response) -> None:
        """Send what was held back: no more sound of it comes."""
        if response.out is not None:
            self._pack(response, response.out.finish(), 0)

    def cut(self, response: Response) -> bool:
        """Take back all deltas of a reply that is being made."""
        if not response.over:
            self._outbox.purge(response.id)
        return False

    def sounding(self) -> list[Response]:
        """Return []: that is not known here."""
        return []

    def _pack(self, response: Response, packed: str, samples: int) -> None:
        playback, count = response.playback, response.held + samples
        response.held = 0 if packed else count
        if packed and playback is not None:
            event = response.delta("output_audio", packed)
            self._outbox.put(event, response.id, lambda: playback.add(count))


class _ReplySound:
    """The sound of one reply that waits for the track; `unplayed` samples are at the reply's rate.

    `over`: no more sound of it comes.
    """

    def __init__(self, response: Response, rate: int) -> None:
        self.response, self.over, self.unplayed = response, False, 0
        self._stage = Resampler(rate, TRACK_RATE)
        self._state: Any = self._stage.start()
        self._chunks: deque[Any] = deque()  # int16 [n]

    def add(self, pcm: Tensor) -> None:
        """Append samples `[n]`."""
        self._state, out = self._stage.step(self._state, pcm[None].float().cpu())
        self._append(out[0])

    def end(self) -> None:
        """Append what was held back for samples that did not come."""
        self.over = True
        self._append(self._stage.finish(self._state)[0])

    def _append(self, pcm: Tensor) -> None:
        clean = torch.nan_to_num(pcm).clamp(-1.0, 1.0)
        if len(clean):
            self._chunks.append((clean * 32767.0).round().to(torch.int16).numpy())

    def read(self, out: Any) -> int:
        """Fill `out` int16 `[n]` with the next samples; return their number."""
        at = 0
        while at < len(out) and self._chunks:
            part = self._chunks[0][: len(out) - at]
            out[at : at + len(part)] = part
            at += len(part)
            self._chunks[0] = self._chunks[0][len(part) :]
            if not len(self._chunks[0]):
                self._chunks.popleft()
        return at


class TrackPlayer:
    """Plays replies one behind the other on a track, which calls `frame` every 20 ms.

    Events tell when a reply begins to sound, has sounded, or is cut off. A reply is played in real
    time from the moment at which its turn comes, and silence where its sound is not made yet.
    """

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._lines: deque[_ReplySound] = deque()  # the first sounds

    def play(self, response: Response, pcm: Tensor, rate: int) -> None:
        """Take the next samples `[n]` of a reply."""
        line = self._line(response)
        if line is None:
            line = _ReplySound(response, rate)
            self._lines.append(line)
            if self._lines[0] is line:
                self._tell("started", line)
        line.add(pcm)
        line.unplayed += len(pcm)
        if self._lines[0] is line:
            self._begin(line)

    def finish(self, response: Response) -> None:
        """Take note that no more sound of a reply comes."""
        if (line := self._line(response)) is not None:
            line.end()

    def cut(self, response: Response) -> bool:
        """Silence a reply at once; return True if it sounded, or was about to."""
        if not response.over:
            self._outbox.purge(response.id)
        if (line := self._line(response)) is None:
            return False
        self._remove(line, "cleared")
        return True

    def sounding(self) -> list[Response]:
        """Return the replies that sound, or wait for those before them."""
        return [line.response for line in self._lines]

    def frame(self) -> Any:
        """Return the next 20 ms, int16 `[960]`: silence where nothing is to be said."""
        out, at = np.zeros(FRAME, np.int16), 0
        while self._lines and at < FRAME:
            line = self._lines[0]
            at += line.read(out[at:])
            if at == FRAME or not line.over:
                break
            self._remove(line, "stopped")
        return out

    def _line(self, response: Response) -> _ReplySound | None:
        return next((line for line in self._lines if line.response is response), None)

    def _begin(self, line: _ReplySound) -> None:
        """Count sound as played from now on: it is its turn."""
        if line.response.playback is not None:
            line.response.playback.add(line.unplayed)
        line.unplayed = 0

    def _remove(self, line: _ReplySound, how: str) -> None:
        first = self._lines[0] is line
        self._lines.remove(line)
        if first:
            self._tell(how, line)
            if self._lines:
                self._tell("started", self._lines[0])
                self._begin(self._lines[0])

    def _tell(self, how: str, line: _ReplySound) -> None:
        self._outbox.put({"type": f"output_audio_buffer.{how}", "response_id": line.response.id})


Player = DeltaPlayer | TrackPlayer
MakePlayer = Callable[[Outbox], Player]
