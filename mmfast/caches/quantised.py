"""Quant: the same tokens in fewer bits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmfast.core.errors import SpecError
from mmfast.core.reduction import Reduction
from mmfast.core.registry import policy
from mmfast.core.spec import Budget
from mmfast.core.tokens import Tokens
from mmfast.ops.quantisation import BITS, Quantiser, check_bits
from mmfast.ops.ranking import stable_topk


@policy("quant", paper="2402.02750", needs=(), adaptive=True, role="store", moment="always")
def quant(bits: Budget, *, group: int = 32, residual: int = 128) -> Quantiser:
    """Store keys and values in 8, 4 or 2 bits, the most recent tokens as they are.

    After KIVI (Liu et al., ICML 2024): keys share a scale along the tokens of a channel, values
    along the channels of a token. The scale of a group is asymmetric, between its extremes.

    Args:
        bits: 8, 4 or 2: the place of the budget in `quant:4`.
        group: Numbers that share a scale, 32 as published.
        residual: Most recent tokens that stay in full precision, 128 as published; 0 is none.

    Raises:
        SpecError: Other bits, no group, a negative residual.
    """
    if bits not in BITS or isinstance(bits, float):
        raise SpecError(f"'quant' stores 8, 4 or 2 bits, not {bits}; write 'quant:8' or 'quant:4'")
    if residual < 0:
        raise SpecError(f"knob residual={residual} of 'quant' is negative; choose 0 or more")
    check_bits(bits, group)
    return Quantiser(int(bits), group, residual)


@policy("zipvl", paper="2410.08584", needs=("attn_sum",), adaptive=True, role="score")
def zipvl(
    tokens: Tokens, budget: int | None, *, mass: float = 0.975, high: int = 4, low: int = 2
) -> Reduction:
    """Find the tokens that hold most of a layer's attention; they get more bits than the others.

    He et al. (2024): the number of important tokens is the smallest that holds a given part of the
    attention, so easy layers keep few; the attention that each received from the queries that could
    see it decides which ones. All heads of a layer agree. The cache stores important tokens in
    `high` bits and the others in `low`; nothing leaves, unless `low` is 0, as in the second version
    of the paper.

    Args:
        tokens: Keys `x` `[..., H, N, d]`, one conversation where there is no budget, and `attn_sum`
            `[..., H, N]`, the attention received from all queries. `behind` `[..., N]`, how many
            queries see each token, is N, N - 1 … 1 where it is missing.
        budget: Important tokens; a share is of all tokens. None lets `mass` decide.
        mass: Part of the attention that the important tokens hold, in (0, 1].
        high: Bits of important tokens, 16 (as they are), 8, 4 or 2.
        low: Bits of the others, or 0 to let them go.
    """
    if not 0 < mass <= 1:
        raise SpecError(f"knob mass={mass} of 'zipvl' is no share; choose one in (0, 1]")
    _check_pair("zipvl", high, low, least=0)
    received = tokens.need("attn_sum").double()  # [..., H, N]
    heads = received.shape[-2:-1] if tokens.x.ndim > 2 else torch.Size()
    received = received.sum(-2) if heads else received
    number = _holding(received, mass) if budget is None else budget
    behind = tokens.signal("behind")
    if behind is None:
        behind = torch.arange(tokens.n, 0, -1, device=received.device)
    keep = stable_topk(received / behind, number)
    keep = keep[..., None, :].expand(*keep.shape[:-1], *heads, -1) if heads else keep
    return Reduction.prune(keep, tokens.n)


def _holding(received: Tensor, mass: float) -> int:
    """The smallest number of tokens that hold `mass` of the attention `[..., N]` of every row."""
    sums = received.sort(dim=-1, descending=True).values.cumsum(-1)
    short = sums < mass * sums[..., -1:] * (1 - 1e-12)  # a rounded sum is still the whole
    return min(int(short.sum(-1).max()) + 1, received.shape[-1])


@policy("zipcache", paper="2405.14256", needs=("attn_probed",), role="score")
def zipcache(
    tokens: Tokens,
    budget: int,
    *,
    recent: float = 0.05,
    random: float = 0.05,
    seed: int = 0,
    every: int = 100,
    high: int = 4,
    low: int = 2,
) -> Reduction:
    """Store the tokens that a few probe queries attend to most in more bits than the others.

    He et al. (NeurIPS 2024): the saliency of a token is the mean attention that it receives from
    the probes that see it, so that early tokens do not win by being seen more often; no attention
    but that of the probes is computed a second time. All heads of a layer agree. Keys have a scale
    for each channel; values are divided by the root of the largest magnitude of their channel, and
    each token then has one scale for all heads. Tokens of an answer are split and packed `every` so
    many, by the probes among them; nothing is packed twice, and nothing leaves.

    Args:
        tokens: Keys `x` `[..., H, N, d]`, of which H and N alone are read, and `attn_probed`
            `[..., H, N]`, the mean attention received from the probes that see each token.
        budget: Salient tokens; a share is of all tokens, and holds for those of an answer, too.
        recent: Share of the tokens, the last ones, whose queries are probes; one at least.
        random: Share of the others that are probes by chance.
        seed: Seed of that chance, a hash of the number of the token.
        every: New tokens of an answer that are packed together; 0 leaves them as they are.
        high: Bits of salient tokens, 16 (as they are), 8, 4 or 2.
        low: Bits of the others, alike.
    """
    _check_pair("zipcache", high, low, least=2)
    Probes(recent, random, seed, every).check()
    saliency = tokens.need("attn_probed").double()  # [..., H, N]
    heads = saliency.shape[-2:-1] if tokens.x.ndim > 2 else torch.Size()
    keep = stable_topk(saliency.sum(-2) if heads else saliency, budget)
    keep = keep[..., None, :].expand(*keep.shape[:-1], *heads, -1) if heads else keep
    return Reduction.prune(keep, tokens.n)


@dataclass(frozen=True)
class Probes:
    """Rule that names the probes of `zipcache` among queries, by the number of their token.

    A token is the same probe in whatever chunk, batch row or device it comes, padded or not.
    """

    recent: float
    random: float
    seed: int
    every: int

    def check(self) -> None:
        """Refuse (SpecError) shares outside of [0, 1]."""
        for name in ("recent", "random"):
            if not 0 <= (share := getattr(self, name)) <= 1:
                raise SpecError(
                    f"knob {name}={share} of 'zipcache' is no share; choose one in [0, 1]"
                )

    def of_prompt(self, numbers: Tensor, n: int) -> Tensor:
        """Mark the probes `[c]` among tokens `numbers` `[c]` of a prompt that ends with token n."""
        return (numbers >= n - self._last(n)) | self._drawn(numbers)

    def of_answer(self, numbers: Tensor, places: Tensor) -> Tensor:
        """Mark the probes `[c]` among tokens of an answer, `places` `[c]` from the last pack on."""
        last = places % max(1, self.every) >= self.every - self._last(self.every)
        return last | self._drawn(numbers)

    def _last(self, n: int) -> int:
        return max(1, round(self.recent * n))

    def _drawn(self, numbers: Tensor) -> Tensor:
        """Mark tokens whose hash, a number below 2^32, is below the share."""
        mixed = numbers.long() + ((self.seed + 1) * 0x9E3779B9 & 0xFFFFFFFF)
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
            mixed = mixed & 0xFFFFFFFF
            mixed = (mixed ^ (mixed >> shift)) * factor
        mixed = mixed & 0xFFFFFFFF
        return mixed ^ (mixed >> 16) < round(self.random * 2**32)


def _check_pair(name: str, high: int, low: int, least: int) -> None:
    choices = (16, 8, 4, 2)
    if high not in choices or (low not in choices and (low or least)):
        away = "" if least else ", and low=0 to let tokens go"
        raise SpecError(
            f"knobs high={high}, low={low} of {name!r}: choose bits 16, 8, 4 or 2{away}"
        )
