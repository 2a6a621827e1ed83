"""Cheap weights and video-like inputs: nothing is downloaded, nothing is degenerate."""

from __future__ import annotations

import torch
from torch import Tensor, nn

# A prime: rows of a weight that repeats this many values never line up with one another.
_PERIOD = 1_048_583


@torch.no_grad()
def fill_(model: nn.Module, seed: int = 0) -> None:
    """Give every parameter a sane value at memory speed; 7 billion of them take seconds.

    Matrices hold normal noise with variance 1 / fan-in, so that activations neither vanish nor
    explode and attention is not flat; embeddings have variance 1, norms are 1, biases small.
    Zeros would run faster than real weights do.
    """
    noise = torch.randn(_PERIOD, generator=torch.Generator().manual_seed(seed))
    for index, (name, parameter) in enumerate(model.named_parameters()):
        if parameter.ndim == 1 and name.endswith("weight"):
            parameter.fill_(1.0)
            continue
        scale = 0.02 if parameter.ndim == 1 else _scale(name, parameter)
        values = (noise * scale).to(parameter.device, parameter.dtype)
        _tile(parameter.view(-1), values, start=index * 7919 % _PERIOD)


def _scale(name: str, parameter: Tensor) -> float:
    embedding = "embed_tokens" in name or "position_embedding" in name or "pos_embed" in name
    return 1.0 if embedding else float(parameter[0].numel() ** -0.5)


def _tile(target: Tensor, values: Tensor, start: int) -> None:
    """Fill `target` [P] with `values` [R] over and over, from `values[start]` on."""
    done = 0
    while done < target.numel():
        part = values[start : start + target.numel() - done]
        target[done : done + part.numel()] = part
        done, start = done + part.numel(), 0


def video_features(grid: tuple[int, int, int], width: int, seed: int = 0) -> Tensor:
    """Features of a clip with a textured still background, one moving block and noise.

    Cosine similarity of a background patch with itself a frame later is about 0.94, as on real
    clips, so methods that look for what repeats (EVS, HoliTom) find something to do. One camera
    cut at two thirds replaces the background.

    Returns:
        `[T * H * W, width]` float32, about unit variance.
    """
    frames, rows, columns = grid
    gen = torch.Generator().manual_seed(seed)
    textures = torch.randn(12, width, generator=gen)
    scenes = []
    for _ in range(2):
        coarse = torch.randint(12, (rows // 3 + 1, columns // 3 + 1), generator=gen)
        patches = coarse.repeat_interleave(3, 0).repeat_interleave(3, 1)[:rows, :columns]
        own = torch.randn(rows, columns, width, generator=gen)
        scenes.append(0.8 * textures[patches] + 0.6 * own)
    thing = torch.randn(max(1, rows // 4), max(1, columns // 4), width, generator=gen)
    x = torch.empty(frames, rows, columns, width)
    for t in range(frames):
        x[t] = scenes[int(t >= max(1, frames * 2 // 3))]
        top = (t * 2) % (rows - thing.shape[0] + 1)
        left = (t * 3) % (columns - thing.shape[1] + 1)
        x[t, top : top + thing.shape[0], left : left + thing.shape[1]] = thing
    x += 0.25 * torch.randn(x.shape, generator=gen)
    return x.reshape(-1, width)  # [N, D]
