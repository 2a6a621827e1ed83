"""Optimiser of the recipes: orthogonalised momentum for matrices, AdamW for the rest.

Orthogonalised momentum ("Muon", Jordan 2024; step size matched to AdamW as in arXiv 2502.16982)
learns in about half the steps here, and on matrices this small it costs next to nothing.
"""

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

_NEWTON = (3.4445, -4.7750, 2.0315)  # quintic whose iterates pull singular values towards 1


def orthogonalise(matrices: Tensor, rounds: int = 5) -> Tensor:
    """Replace each matrix by (about) the nearest one with equal singular values: [n, a, b]."""
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = _NEWTON
    for _ in range(rounds):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    even: Tensor = x.mT if tall else x
    return even


class Mixed:
    """AdamW for vectors and embeddings, orthogonalised momentum for named matrices."""

    def __init__(
        self, matrices: Iterable[nn.Parameter], rest: Iterable[nn.Parameter], lr: float
    ) -> None:
        self.lr = lr
        self.adam = torch.optim.AdamW(list(rest), lr=lr, betas=(0.9, 0.98), weight_decay=0.01)
        self.groups: dict[tuple[int, ...], list[nn.Parameter]] = {}
        for matrix in matrices:
            self.groups.setdefault(tuple(matrix.shape), []).append(matrix)
        self.momentum = {s: torch.zeros(len(g), *s) for s, g in self.groups.items()}

    def parameters(self) -> list[nn.Parameter]:
        """All of them, in no special order."""
        adam = [p for group in self.adam.param_groups for p in group["params"]]
        return [*adam, *(p for group in self.groups.values() for p in group)]

    @torch.no_grad()
    def step(
        self, factor: float, clip: float = 1.0, over: Callable[..., Iterable[None]] = map
    ) -> float:
        """One update at `factor` times the peak rate; returns the gradient's norm.

        Args:
            factor: Of the rate.
            clip: Largest norm of the gradient.
            over: As `map`; that of a pool turns matrices of several shapes at once.
        """
        norm = nn.utils.clip_grad_norm_(self.parameters(), clip)
        for options in self.adam.param_groups:
            options["lr"] = self.lr * factor
        self.adam.step()
        list(over(lambda shape: self._turn(shape, factor), self.groups))
        for parameter in self.parameters():
            parameter.grad = None
        return float(norm)

    def _turn(self, shape: tuple[int, ...], factor: float) -> None:
        """Update the matrices of one shape."""
        with torch.no_grad():
            group = self.groups[shape]
            grads = torch.stack([p.grad if p.grad is not None else p * 0 for p in group])
            momentum = self.momentum[shape].lerp_(grads, 0.05)
            update = orthogonalise(grads.lerp(momentum, 0.95))
            rate = 2.0 * self.lr * factor
            update = update * (rate * 0.2 * math.sqrt(max(shape)))
            for parameter, change in zip(group, update, strict=True):
                parameter.mul_(1 - 0.01 * rate).sub_(change)


def split_parameters(module: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Hidden matrices of transformer layers, and everything else."""
    matrices: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for name, parameter in module.named_parameters():
        hidden = parameter.ndim == 2 and "layers." in name
        (matrices if hidden else rest).append(parameter)
    return matrices, rest


def schedule(done: float, warm: float = 0.03, hold: float = 0.5) -> float:
    """Rate factor at a share of the run: linear up, flat, then linear down to nearly zero."""
    if done < warm:
        return max(done / warm, 0.01)
    return 1.0 if done < hold else max((1 - done) / (1 - hold), 0.01)
