"""Tokens of several kinds for tests of reducers."""

from __future__ import annotations

import torch
from oracle_base import Item
from torch import Tensor

from mmfast import Tokens

KINDS = ("random", "video", "frozen", "equal", "zero", "holes")


def features(kind: str, grid: tuple[int, int, int], width: int, seed: int) -> Tensor:
    """Features `[N, width]`: noise, a moving patch, repeated frames, equal, zero or some zero."""
    g = torch.Generator().manual_seed(seed)
    frames, rows, columns = grid
    if kind == "equal":
        return torch.randn(width, generator=g).expand(frames * rows * columns, width).clone()
    if kind == "zero":
        return torch.zeros(frames * rows * columns, width)
    if kind in ("random", "holes"):
        x = torch.randn(frames * rows * columns, width, generator=g)
        if kind == "holes":
            x[torch.rand(len(x), generator=g) < 0.3] = 0
        return x
    scene = torch.randn(rows, columns, width, generator=g)
    video = scene.expand(frames, rows, columns, width).clone()
    patch = 2 * torch.randn(width, generator=g)
    for frame in range(frames):
        if frame == frames // 2 and frames > 3:
            scene = torch.randn(rows, columns, width, generator=g)
        video[frame] = scene
        video[frame, rows // 2, (2 * frame) % columns] = patch
    if kind == "video":
        video += 0.25 * torch.randn(video.shape, generator=g)
    return video.reshape(-1, width)


def make(
    kind: str,
    grid: tuple[int, int, int],
    width: int = 12,
    seed: int = 0,
    *,
    with_grid: bool = True,
    sizes: bool = False,
) -> Tokens:
    """One item with every signal a reducer may ask for."""
    g = torch.Generator().manual_seed(seed + 1)
    x = features(kind, grid, width, seed)
    attn = torch.rand(len(x), generator=g)
    if kind in ("frozen", "equal"):
        attn = (attn * 4).floor() / 4  # exact ties
    signals = {"keys": x @ torch.randn(width, 8, generator=g)}
    if kind in ("frozen", "equal"):
        # A product may round equal rows differently; equal keys must be equal.
        signals["keys"] = x[:, :8].contiguous()
    signals |= _others(kind, grid, x, g)
    if sizes:
        signals["sizes"] = torch.randint(1, 5, (len(x),), generator=g).float()
    query = torch.randn(3, width, generator=g)
    return Tokens(x, attn=attn, query=query, grid=grid if with_grid else None, signals=signals)


def _others(
    kind: str, grid: tuple[int, int, int], x: Tensor, g: torch.Generator
) -> dict[str, Tensor]:
    """What the models supply beside attention and keys; see CONTRIBUTING.md for the meanings."""
    n, words = len(x), 3
    names = ("attn_first", "attn_middle", "attn_visual", "attn_window", "attn_ahead")
    names += ("attn_peak", "attn_mutual")
    scores = {name: torch.rand(n, generator=g) for name in names}
    attn_text = torch.rand(n, words, generator=g)
    scores["key_norm"] = torch.rand(n, generator=g)
    if kind in ("frozen", "equal"):
        scores = {name: (value * 4).floor() / 4 for name, value in scores.items()}
    t, h, w = grid
    place = torch.cartesian_prod(torch.arange(t), torch.arange(h), torch.arange(w))
    return {
        **scores,
        "attn_text": attn_text,
        "text_key_norm": torch.rand(words, generator=g),
        "values": x[:, :8].contiguous(),  # equal tokens have equal values
        "text_values": torch.randn(words, 2, min(8, x.shape[1]) // 2, generator=g),
        "rope": torch.randn(n, 2, generator=g),
        "drift": (torch.rand(n, generator=torch.Generator().manual_seed(n)) * 8).floor() / 8,
        "attn_before": (torch.rand(n, generator=torch.Generator().manual_seed(-n)) * 8).floor() / 8,
        "tile": torch.arange(n) * 5 // n,
        "image": torch.arange(n) * 3 // n,
        "place": place.reshape(n, 3),
        "pixels": x.repeat(1, 2),
    }


def item(tokens: Tokens) -> Item:
    """The same tokens for an oracle."""

    def wide(value: Tensor | None) -> object:
        return None if value is None else value.double().numpy()

    return Item(
        x=wide(tokens.x),
        attn=wide(tokens.attn),
        keys=wide(tokens.signal("keys")),
        sizes=wide(tokens.signal("sizes")),
        grid=tokens.grid,
        query=wide(tokens.query),
        signals={name: value.double().numpy() for name, value in tokens.signals.items()},
    )


def stacked(items: list[Tokens]) -> Tokens:
    """Items of equal shape as a batch."""

    def stack(values: list[Tensor | None]) -> Tensor | None:
        return None if values[0] is None else torch.stack(values)

    return Tokens(
        x=torch.stack([t.x for t in items]),
        attn=stack([t.attn for t in items]),
        query=stack([t.query for t in items]),
        grid=items[0].grid,
        signals={n: torch.stack([t.signals[n] for t in items]) for n in items[0].signals},
    )
