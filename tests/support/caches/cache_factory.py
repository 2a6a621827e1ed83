"""Keys of one layer and their signals, for tests of cache policies."""

from __future__ import annotations

import numpy as np
import torch
from oracles_caches import Layer
from torch import Tensor

from mmfast import Tokens

KINDS = ("random", "ties", "equal", "zero", "text", "film")


def kinds_of(kind: str, n: int, generator: torch.Generator) -> Tensor:
    """A question around a film: 0 text, 1 visual, 2 separators, `[n]`."""
    if kind in ("text", "film"):
        return torch.full((n,), int(kind == "film"))
    row = torch.ones(n, dtype=torch.int64)
    row[torch.rand(n, generator=generator) < 0.1] = 2
    row[: n // 6] = 0
    row[n - n // 5 :] = 0
    return row


def make(kind: str, heads: int, n: int, width: int = 8, seed: int = 0) -> Tokens:
    """Keys `[heads, n, width]` with every signal that a policy may ask for."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(heads, n, width, generator=g)
    window, total = torch.rand(2, heads, n, generator=g)
    if kind in ("ties", "equal"):
        window, total = ((value * 4).floor() / 4 for value in (window, total))
        x = torch.randint(-1, 2, x.shape, generator=g).float()  # few directions, few lengths
    if kind == "equal":
        x = torch.randn(heads, 1, width, generator=g).expand(heads, n, width).contiguous()
        window, total = torch.ones(2, heads, n) / n
    if kind == "zero":
        x, window, total = torch.zeros_like(x), torch.zeros(heads, n), torch.zeros(heads, n)
    kinds = kinds_of(kind, n, g)
    seen = (kinds == 1).cumsum(0) - 1  # the first frame has 3 tokens, the others 5
    signals = {
        "frame": torch.where(kinds == 1, 7 + (seen + 2) // 5, -1),
        "spot": torch.where(kinds == 1, (seen + 2) % 5, -1),
        "values": torch.randn(heads, n, width, generator=g),
        "values_out": torch.ones(heads, n) if kind in ("equal", "zero") else window.flip(-1),
        "query_mean": torch.randn(heads, 4, width, generator=g),
        "query_cov": _covariances(heads, 4, width, g),
        "query_filter": torch.randn(heads, width, generator=g),
        "kind": kinds,
        "attn_window": window,
        "attn_counted": 9 * total.flip(-1),
        "attn_mutual": 2 * window.roll(3, -1),
        "attn_repeated": (window + total.flip(-1)) / 2,
        "key_gate": (window.roll(2, -1) + total) / 2,
        "attn_vision": (window.roll(5, -1) + total) / 2,
        "attn_probed": (window.flip(-1) + total) / 2,
        "attn_sum": total,
        "layers_attn": _composed((window + total.flip(-1)) / 2),
        "layer": torch.tensor(seed % 5),
        "depth": torch.tensor(0),  # one layer alone: its budget is the mean
        "depths": torch.tensor(1),
    }
    return Tokens(x, signals=signals)


def _composed(attn: Tensor) -> Tensor:
    """A table of one layer alone, for every head."""
    joint = (attn + attn.mean(0)).double().sort(-1, descending=True).values.mean(0)
    return joint.expand(len(attn), 1, -1).contiguous()


def _covariances(heads: int, groups: int, width: int, generator: torch.Generator) -> Tensor:
    rows = torch.randn(heads, groups, 3, width, generator=generator)
    return rows.transpose(-1, -2) @ rows / 6


def layer_of(tokens: Tokens) -> Layer:
    """The same tokens for an oracle."""

    def wide(name: str) -> np.ndarray:
        return tokens.signals[name].double().numpy()

    return Layer(
        keys=tokens.x.double().numpy(),
        kind=[int(k) for k in tokens.signals["kind"]],
        window=wide("attn_window"),
        total=wide("attn_sum"),
        number=int(tokens.signals["layer"]),
        depth=(int(tokens.signals["depth"]), int(tokens.signals["depths"])),
        values=wide("values"),
        out=wide("values_out"),
        mean=wide("query_mean"),
        cov=wide("query_cov"),
        frame=tokens.signals["frame"].tolist(),
        spot=tokens.signals["spot"].tolist(),
        filters=wide("query_filter"),
        counted=wide("attn_counted"),
        mutual=wide("attn_mutual"),
        repeated=wide("attn_repeated"),
        layers=[wide("attn_repeated")],
        vision=wide("attn_vision"),
        gated=wide("key_gate"),
        probed=wide("attn_probed"),
    )


def stacked(items: list[Tokens]) -> Tokens:
    """Conversations of equal shape as a batch; they agree on numbers of layers."""
    signals = {
        name: torch.stack([item.signals[name] for item in items])
        for name in items[0].signals
        if items[0].signals[name].ndim
    }
    return Tokens(
        torch.stack([item.x for item in items]),
        signals=signals | {k: v for k, v in items[0].signals.items() if v.ndim == 0},
    )
