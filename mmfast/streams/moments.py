"""Moments of a stream as small pictures, in bytes that are bounded, for questions about hours."""

from __future__ import annotations

import io
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from PIL import Image

from mmfast.core.errors import warn
from mmfast.streams.recent import APART, CUT, colour_change, small_picture

PICTURES = 8  # of a moment, at least `STEP` seconds apart
STEP = 1.0
_KNOWN = 64  # things about which a moment remembers what it was asked


@dataclass(eq=False)
class StreamMoment:
    """Up to `PICTURES` successive pictures without a cut, as JPEG, with their seconds.

    `begins` tells that a cut or a gap lies before it; `end` is the time of the first frame behind
    it, or of its own last one; `known` has what was found out about it, by question.
    """

    times: list[float]
    files: list[bytes]
    begins: bool
    end: float
    known: dict[str, Any] = field(default_factory=dict)

    @property
    def start(self) -> float:
        """Seconds of its first picture."""
        return self.times[0]

    @property
    def nbytes(self) -> int:
        """Bytes of its pictures."""
        return sum(map(len, self.files))

    def shot(self, most: int = PICTURES) -> tuple[list[Any], list[float]]:
        """Return at most so many of its pictures, `[H, W, 3]` uint8 each, and their seconds."""
        count = min(most, len(self.files))
        spread = np.linspace(0, len(self.files) - 1, count).round().astype(int)
        files = (io.BytesIO(self.files[i]) for i in spread)
        pictures = [np.array(Image.open(file).convert("RGB")) for file in files]
        return pictures, [self.times[i] for i in spread]

    def learn(self, question: str, found: Any) -> Any:
        """Keep and return what was found out."""
        if len(self.known) >= _KNOWN:
            self.known.clear()
        self.known[question] = found
        return found


class MomentAlbum:
    """All moments of a stream that fit into `limit` bytes, None for any number.

    When they no longer fit, the oldest moments lose every second picture until two are left; then
    the oldest is forgotten, from which time on `whole` is False. A limit below one picture leaves
    nothing, and is warned of once.
    """

    def __init__(self, limit: int | None) -> None:
        self.limit, self.whole = limit, True
        self._moments: list[StreamMoment] = []
        self._bytes, self._warned = 0, False
        self._last: tuple[float, Any] | None = None  # its time, and the last frame as it was

    def moments(self) -> list[StreamMoment]:
        """Return them in order of time, as they are now: the last one still grows."""
        if not self._moments:
            return []
        *done, last = (replace(moment) for moment in self._moments)
        last = replace(last, times=list(last.times), files=list(last.files), known={})
        return [*done, last]

    def stats(self) -> dict[str, Any]:
        """Figures as plain numbers."""
        return {"moments": len(self._moments), "bytes": self._bytes, "whole": self.whole}

    def add(self, frame: Any, time: float) -> None:
        """Take a frame `[H, W, 3]` uint8 and its seconds; one too close to the last is left out."""
        if self._last is not None and time < self._last[0] + STEP - 1e-3:
            return
        shown = small_picture(np.asarray(frame))
        apart = self._last is None or time > self._last[0] + APART
        cut = apart or (self._last is not None and colour_change(self._last[1], shown) > CUT)
        if self._moments:
            now = self._moments[-1]
            now.end = now.times[-1] if apart else time
        self._last, file = (time, shown), _jpeg(shown)
        self._bytes += len(file)
        if cut or not self._moments or len(self._moments[-1].files) >= PICTURES:
            self._moments.append(StreamMoment([time], [file], cut, time))
        else:
            now = self._moments[-1]
            now.times.append(time)
            now.files.append(file)
            now.end = time
            now.known.clear()
        self._fit()
        if not self._moments and not self._warned:
            self._warned = True
            warn(
                f"a picture of {len(file)} bytes finds no room in a history of {self.limit} bytes; "
                "open(history='64MB') keeps hours"
            )

    def _fit(self) -> None:
        while self.limit is not None and self._bytes > self.limit and self._moments:
            moment = next((m for m in self._moments[:-1] if len(m.files) > 2), self._moments[0])
            self._bytes -= moment.nbytes
            if len(moment.files) > 2:
                moment.times, moment.files = moment.times[::2], moment.files[::2]
                self._bytes += moment.nbytes
            else:
                self._moments.pop(0)
                self.whole = False

    def snapshot(self) -> dict[str, Any]:
        """Return all state as a tree of plain containers and tensors."""
        moments = []
        for m in self._moments:
            data = torch.frombuffer(bytearray(b"".join(m.files)), dtype=torch.uint8)
            moments.append([list(m.times), [len(f) for f in m.files], data, m.begins, m.end])
        last = None if self._last is None else [self._last[0], torch.from_numpy(self._last[1])]
        return {"whole": self.whole, "moments": moments, "last": last}

    def restore(self, tree: dict[str, Any]) -> None:
        """Take over a snapshot."""
        self.whole, self._moments = tree["whole"], []
        for times, sizes, data, begins, end in tree["moments"]:
            whole, at, files = data.numpy().tobytes(), 0, list[bytes]()
            for size in sizes:
                files.append(whole[at : at + size])
                at += size
            self._moments.append(StreamMoment(list(times), files, begins, end))
        self._bytes = sum(m.nbytes for m in self._moments)
        self._last = None if tree["last"] is None else (tree["last"][0], tree["last"][1].numpy())
        self._fit()


def _jpeg(picture: Any) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, "JPEG", quality=90, subsampling=0)
    return buffer.getvalue()
