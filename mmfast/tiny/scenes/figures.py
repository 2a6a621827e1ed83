"""Outlines of figures that the world has not: polygons of corners `[k, 2]`, in radii."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mmfast.tiny.scenes.looks import CORNERS, Outline
from mmfast.tiny.video.scene import Floats

ROUND = 64  # corners of what is round


def _around(angles: Floats, radii: Floats | float = 1.0) -> Floats:
    found = np.stack([np.sin(angles), -np.cos(angles)], 1) * np.asarray(radii).reshape(-1, 1)
    return np.asarray(found)


def _polygon(rng: np.random.Generator) -> Outline:
    """A regular polygon of five to seven corners."""
    many = int(rng.integers(5, 8))
    return (_around(np.arange(many) * 2 * np.pi / many, 1.05),)


def _arrow(rng: np.random.Generator) -> Outline:
    """An arrow that points to the right, thick or thin."""
    neck, barb = rng.uniform(-0.2, 0.4), rng.uniform(0.55, 1.0)
    shaft = rng.uniform(0.15, 0.5) * barb
    half = [(-1, -shaft), (neck, -shaft), (neck, -barb), (1, 0)]
    return (np.array([*half, *[(x, -y) for x, y in half[-2::-1]]], np.float64),)


def _crescent(rng: np.random.Generator) -> Outline:
    """A disc without the part that another one covers."""
    wide, thick = rng.uniform(0.6, 1.0) * np.pi / 2, rng.uniform(0.35, 0.65)
    edge = _around(np.linspace(-wide, wide, ROUND // 2))
    horns = np.array([0.0, edge[0, 1]])
    inner = horns + (edge - horns) * np.array([1.0, 1 - thick])
    return (np.concatenate([edge, inner[-2:0:-1]]) + np.array([0.0, 0.5]),)


def _half(rng: np.random.Generator) -> Outline:
    """Half of a disc, or three quarters of it."""
    part = rng.choice((1.0, 1.5)) * np.pi
    edge = _around(np.linspace(0, part, ROUND // 2))
    return (edge if part < 4 else np.concatenate([edge, [[0.0, 0.0]]]),)


def _blob(rng: np.random.Generator) -> Outline:
    """A splash with lobes of unlike size, but not five, as a star has."""
    lobes = int(rng.choice((3, 4, 6)))
    angles = np.linspace(0, 2 * np.pi, ROUND, endpoint=False)
    waves = 0.3 * np.sin(lobes * angles) + 0.2 * np.sin(2 * angles + rng.uniform(0, 6))
    return (_around(angles, 0.8 + waves),)


def _freeform(rng: np.random.Generator) -> Outline:
    """A polygon of unlike corners, one of them far in, sharp or rounded.

    Figures of a few kinds alone do not teach what others have in common: that no name fits.
    """
    many = int(rng.integers(4, 10))
    radii = rng.uniform(0.4, 1.1, many)
    radii[int(rng.integers(many))] = 0.25
    angles = (np.arange(many) + rng.uniform(-0.35, 0.35, many)) * 2 * np.pi / many
    edge = _around(angles, radii)
    for _ in range(int(rng.integers(4))):  # cutting corners off rounds them (Chaikin, 1974)
        after = np.roll(edge, -1, axis=0)
        edge = np.stack([3 * edge + after, edge + 3 * after], 1).reshape(-1, 2) / 4
    return (edge * 1.1 / np.abs(edge).max(),)


def _hollow(rng: np.random.Generator) -> Outline:
    """A known shape of which only the line around it is drawn."""
    disc = _around(np.linspace(0, 2 * np.pi, ROUND, endpoint=False))
    known = [disc, *(CORNERS[name] for name in ("square", "triangle", "star"))]
    line = known[int(rng.integers(len(known)))]
    return (line, line * rng.uniform(0.55, 0.85))


def _heart(rng: np.random.Generator) -> Outline:
    t = np.linspace(0, 2 * np.pi, ROUND, endpoint=False)
    low = 13 * np.cos(t) - 5 * np.cos(2 * t) - 2 * np.cos(3 * t) - np.cos(4 * t)
    return (np.stack([16 * np.sin(t) ** 3, -low], 1) / 16,)


def _bolt(rng: np.random.Generator) -> Outline:
    half = np.array([(0.35, -1.1), (-0.6, 0.15), (0.0, 0.15)])
    return (np.concatenate([half, -half]),)


def _drop(rng: np.random.Generator) -> Outline:
    edge = _around(np.linspace(0.35 * np.pi, 1.65 * np.pi, ROUND)) * 0.75 + np.array([0.0, 0.3])
    return (np.concatenate([edge, [[0.0, -1.15]]]),)


Figure = Callable[[np.random.Generator], Outline]
TRAINED: tuple[Figure, ...] = (
    _polygon, _polygon, _arrow, _crescent, _half, _blob, _hollow, _hollow, *[_freeform] * 8,
)  # fmt: skip
KEPT: tuple[Figure, ...] = (_heart, _bolt, _drop)  # never in training
