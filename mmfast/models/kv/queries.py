"""Queries before RoPE, of a prompt or a stream: what was read, and what is expected to follow."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
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

    def most(self) -> int:
        """Queries in the sums of the row that has most."""
        return int(self.count.max())

    def halved(self) -> QuerySums:
        """Return sums with the same mean and covariance that weigh half."""
        total, products = self.total / 2, self.products / 2
        return replace(self, count=self.count / 2, total=total, products=products)

    def to_dict(self) -> dict[str, Any]:
        """Return all as plain containers and tensors."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def of(cls, tree: Mapping[str, Any], device: torch.device) -> QuerySums:
        """Return what `to_dict` gave, on a device."""
        names = ("read", "count", "total", "products")
        read, count, total, products = (tree[name].to(device) for name in names)
        cos, sin = (each.to(device) for each in tree["angles"])
        return cls(read, count, total, products, (cos, sin))


class Expectation:
    """Mean and covariance of the queries to come, as those of the prompt at later positions.

    `future` positions behind the prompt are averaged; the first `sink` tokens do not count.
    """

    def __init__(self, text: Any, future: int, sink: int) -> None:
        self._rotary, self._future, self._sink = Rotary(text), future, sink

    def angles(self, positions: Tensor, like: Tensor, index: int) -> Angles:
        """Cosines and sines of positions `[A, n]` in a layer."""
        return self._rotary.angles(positions, like, index)

    def arrive(
        self, before: QuerySums | None, queries: Tensor, kinds: Tensor, angles: Angles
    ) -> QuerySums:
        """Return the sums of a layer with the queries `[B, Hq, n, d]` of a part of a prompt.

        `kinds` `[B or 1, n]` say what is padding; `angles` `[B or 1, n, w]` are those of all
        tokens, or of the last one alone.
        """
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
        return QuerySums(read, *sums, (turned[0], turned[1]))

    def expected(
        self, sums: QuerySums, row: int, index: int, attention: Any, heads: int
    ) -> dict[str, Tensor]:
        """Signals on one row behind its prompt: `query_mean` `[H, G, d]`, `query_cov` `[.., d, d]`.

        Both are on the scale of logits: the product of a key and the mean is the mean of its
        logits. `heads` are those of keys.
        """
        count = sums.count[row].clamp_min(1)
        mean = sums.total[row] / count  # [Hq, d]
        cov = sums.products[row] / count - mean[:, :, None] * mean[:, None]
        angles = self._mean_angles((sums.angles[0][row], sums.angles[1][row]), index)
        mean = self._rotary.turn(attention, mean[:, None], angles)[:, 0]
        # Rotated from both sides: the rows of the transpose are its columns.
        for _ in range(2):
            cov = self._rotary.turn(attention, cov, angles).transpose(1, 2)
        scale = float(getattr(attention, "scaling", mean.shape[-1] ** -0.5))
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


_MANY = 1 << 17  # queries: an hour of small frames at one a second


class StreamQueries:
    """Sums over the queries of a stream, layer by layer, and what is expected to follow them.

    From `_MANY` queries on, all that came weighs half whenever as many have come again: sums stay
    exact over days, and a stream that has changed is seen as it is now.
    """

    def __init__(self, expectation: Expectation, attentions: Sequence[Any]) -> None:
        self._expectation, self._attentions = expectation, attentions
        self.sums: list[QuerySums | None] = [None] * len(attentions)

    def arrive(self, layer: int, queries: Tensor, positions: Tensor) -> None:
        """Add the queries `[Hq, n, d]` of a piece at positions `[A, n]`."""
        kinds = torch.zeros(1, queries.shape[1], dtype=torch.int64, device=queries.device)
        angles = self._expectation.angles(positions[:, -1:], queries, layer)
        found = self._expectation.arrive(self.sums[layer], queries[None], kinds, angles)
        if found.most() >= 2 * _MANY:
            found = found.halved()
        self.sums[layer] = found

    def expected(self, layer: int, heads: int) -> dict[str, Tensor]:
        """Signals of a layer at the end of the stream; see `Expectation.expected`."""
        sums, attention = self.sums[layer], self._attentions[layer]
        assert sums is not None
        return self._expectation.expected(sums, 0, layer, attention, heads)

    def snapshot(self) -> list[Any]:
        """All sums as plain containers and tensors."""
        return [None if sums is None else sums.to_dict() for sums in self.sums]

    def restore(self, tree: Sequence[Any]) -> None:
        """Take over what `snapshot` gave."""
        self.sums = [
            None if row is None else QuerySums.of(row, self._device(layer))
            for layer, row in enumerate(tree)
        ]

    def _device(self, layer: int) -> torch.device:
        found: torch.device = next(self._attentions[layer].parameters()).device
        return found


def expected_angles(angles: Angles | None, n: int, end: int, layer: Any) -> Angles:
    """Angles of the first `end` of n tokens, `[B or 1, n, w]`; ModelError where there are none."""
    if angles is None:
        raise ModelError(
            f"{type(layer).__name__} gets no position_embeddings, which this policy turns queries "
            "by; use 'snapkv', which reads attention alone"
        )
    cos, sin = angles
    return (cos[:, :end], sin[:, :end]) if cos.shape[1] == n else angles
