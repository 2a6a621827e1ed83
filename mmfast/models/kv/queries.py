"""Queries of a prompt before RoPE: what was read, and what is expected to follow it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmfast.core.errors import ModelError
from mmfast.models.decoder.rotary import Angles, Raw, RawCapture, Rotary
from mmfast.models.kv.notes import PADDING


class _RawState(threading.local):
    raw: Raw | None = None
    recording: Any = None


class RawPrompt:
    """Keys and queries before RoPE of the prompts that threads read in an attached model."""

    def __init__(self, text: Any) -> None:
        self._text, self._local = text, _RawState()
        self._capture: RawCapture | None = None

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Look at keys and queries, which prompts need."""
        capture = self._capture = RawCapture(self._text)
        try:
            yield
        finally:
            capture.remove()

    def enter(self, prompting: bool) -> None:
        """A call begins, with a part of a prompt or not."""
        self.leave()
        local = self._local
        if prompting and self._capture is not None:
            local.recording = self._capture.recording()
            local.raw = local.recording.__enter__()

    def leave(self) -> None:
        """A call has ended, perhaps with an exception."""
        local = self._local
        if local.recording is not None:
            local.recording.__exit__(None, None, None)
        local.raw, local.recording = None, None

    @property
    def raw(self) -> Raw | None:
        """Keys and queries of the call that this thread is in."""
        return self._local.raw

    def captured(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and queries of a layer, of the call that this thread is in."""
        raw = self._local.raw
        assert raw is not None
        return raw.keys.pop(index), raw.queries.pop(index)


@dataclass(eq=False)
class QuerySums:
    """Sums over the queries of a prompt in one layer; `angles` are those of the last of each row.

    `read` tokens of each row have come, `count` of them are in the sums.
    """

    read: Tensor  # [B]
    count: Tensor  # [B]
    total: Tensor  # [B, Hq, d]
    products: Tensor  # [B, Hq, d, d]
    angles: Angles  # [B, 1, w] each


class Expectation:
    """Mean and covariance of the queries to come, as those of the prompt at later positions.

    `future` positions behind the prompt are averaged; the first `sink` tokens do not count.
    """

    def __init__(self, text: Any, future: int, sink: int) -> None:
        self._rotary, self._future, self._sink = Rotary(text), future, sink

    def angles(self, positions: Tensor, like: Tensor, index: int) -> Angles:
        """Cosines and sines of positions `[A, n]` in a layer."""
        return self._rotary.angles(positions, like, index)

    def arrive(self, layer: Any, queries: Tensor, kinds: Tensor, angles: Angles) -> None:
        """Add the queries `[B, Hq, n, d]` of a part of a prompt to the sums on its cache layer.

        `kinds` `[B or 1, n]` say what is padding; `angles` `[B or 1, n, w]` are those of all
        tokens, or of the last one alone.
        """
        before: QuerySums | None = layer.pending
        batch, _, n, _ = queries.shape
        real = (kinds != PADDING).expand(batch, n).to(queries.device)
        seen = real.cumsum(1)
        last = seen.argmax(1)[:, None, None]  # the first of the largest: padding may follow
        if before is not None:
            seen = seen + before.read[:, None]
        read, real = seen[:, -1], real & (seen > self._sink)
        rows = queries.float() * real[:, None, :, None]
        sums = real.sum(1), rows.sum(2), rows.transpose(2, 3) @ rows
        turned = tuple(
            x[:, -1:].expand(batch, -1, -1)
            if x.shape[1] == 1
            else x.expand(batch, -1, -1).gather(1, last.expand(-1, 1, x.shape[-1]))
            for x in angles
        )
        if before is not None:
            sums = before.count + sums[0], before.total + sums[1], before.products + sums[2]
        layer.pending = QuerySums(read, *sums, (turned[0], turned[1]))

    def expected(self, layer: Any, row: int, index: int, attention: Any) -> dict[str, Tensor]:
        """Signals on one row behind its prompt: `query_mean` `[H, G, d]`, `query_cov` `[.., d, d]`.

        Both are on the scale of logits: the product of a key and the mean is the mean of its
        logits.
        """
        sums: QuerySums = layer.pending
        count = sums.count[row].clamp_min(1)
        mean = sums.total[row] / count  # [Hq, d]
        cov = sums.products[row] / count - mean[:, :, None] * mean[:, None]
        angles = self._mean_angles((sums.angles[0][row], sums.angles[1][row]), index)
        mean = self._rotary.turn(attention, mean[:, None], angles)[:, 0]
        # Rotated from both sides: the rows of the transpose are its columns.
        for _ in range(2):
            cov = self._rotary.turn(attention, cov, angles).transpose(1, 2)
        scale = float(getattr(attention, "scaling", mean.shape[-1] ** -0.5))
        heads = layer.keys.shape[1]
        return {
            "query_mean": (mean * scale).unflatten(0, (heads, -1)),
            "query_cov": (cov * scale**2).unflatten(0, (heads, -1)),
        }

    def _mean_angles(self, last: Angles, index: int) -> Angles:
        """Mean cosines and sines `[1, 1, w]` of the positions behind one of `[1, w]`."""
        steps = torch.arange(self._future + 1).expand(self._rotary.axes, -1)
        cos, sin = (x[0].float() for x in self._rotary.angles(steps, last[0].float(), index))
        scale = cos[:1].clamp_min(1e-6)  # of the attention, where there is one
        ahead = [(x[1:] / scale).mean(0, keepdim=True) for x in (cos, sin)]
        c, s = last[0].float(), last[1].float()
        return (c * ahead[0] - s * ahead[1])[None], (s * ahead[0] + c * ahead[1])[None]


def expected_angles(angles: Angles | None, n: int, end: int, layer: Any) -> Angles:
    """Angles of the first `end` of n tokens, `[B or 1, n, w]`; ModelError where there are none."""
    if angles is None:
        raise ModelError(
            f"{type(layer).__name__} gets no position_embeddings, which this policy turns queries "
            "by; use 'snapkv', which reads attention alone"
        )
    cos, sin = angles
    return (cos[:, :end], sin[:, :end]) if cos.shape[1] == n else angles
