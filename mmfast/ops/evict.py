"""Run one cache policy, alone or on what other policies leave."""

from __future__ import annotations

import torch
from torch import Tensor

from mmfast.core.budget import count
from mmfast.core.errors import MmfastError, SpecError
from mmfast.core.reduction import Reduction
from mmfast.core.spec import Spec
from mmfast.core.tokens import Tokens, all_finite
from mmfast.ops.complement import complement
from mmfast.ops.gather_rows import gather_rows
from mmfast.ops.grouped_topk import marked


def evict(spec: Spec, tokens: Tokens, total: int | None = None) -> Reduction:
    """Run a policy of role `position` or `score`.

    Args:
        spec: The policy with its budget; a whole number above N keeps all.
        tokens: Keys `x` `[..., H, N, d]` and signals.
        total: Tokens that a share is of; None is N.

    Returns:
        A Reduction with the leading dims of `x`.

    Raises:
        SpecError: A signal is missing, or a knob is wrong.
        MmfastError: NaN or infinity in what the policy reads.
    """
    budget = _budget(spec, tokens.n, total)
    if budget == tokens.n:
        return _all(tokens)
    missing = [need for need in spec.method.needs if not tokens.has(need)]
    if missing:
        raise SpecError(
            f"{spec.method.name!r} needs {', '.join(map(repr, missing))}, which this cache is not "
            "given; pass it in Tokens.signals"
        )
    _check_finite(spec, tokens)
    with torch.no_grad():
        reduction: Reduction = spec.method.fn(tokens, budget, **spec.knobs)
    if budget is not None and reduction.m != budget:
        raise MmfastError(
            f"{spec.method.name!r} kept {reduction.m} tokens instead of {budget}; report this"
        )
    return reduction


def evict_beside(stands: Tensor, tokens: Tokens, spec: Spec) -> Reduction:
    """Keep the tokens that stand, and of the others what a policy chooses; budgets add up.

    Args:
        stands: `[..., N]` bool, equally many in every row, the same for all heads.
        tokens: Keys `x` `[..., H, N, d]` and signals.
        spec: A policy of role `score`; a share is of all N.
    """
    heads = tokens.x.shape[-3:-2]
    fixed = _each(marked(stands), heads)  # [..., H, S]
    if fixed.shape[-1] == tokens.n:
        return _all(tokens)
    rest = complement(marked(stands), tokens.n)  # [..., R]
    found = evict(spec, _some(tokens, rest, heads), tokens.n)
    wide = _each(rest, heads)
    keep = torch.cat([fixed, wide.gather(-1, found.keep)], -1)
    if found.pure:
        return Reduction.prune(keep, tokens.n)
    joined = wide.gather(-1, found.keep).gather(-1, found.owner.clamp_min(0))
    joined = joined.masked_fill(found.owner < 0, -1)  # [..., H, R] the source that each joins
    target = torch.arange(tokens.n, device=keep.device).expand(*keep.shape[:-1], -1).clone()
    weight = torch.ones(target.shape, dtype=found.share().dtype, device=keep.device)
    return Reduction.merge(
        keep, target.scatter_(-1, wide, joined), weight.scatter_(-1, wide, found.share())
    )


def keep_marked(stands: Tensor, tokens: Tokens) -> Reduction:
    """Keep the tokens that stand, `[..., N]` bool, equally many in every row, in every head."""
    keep = _each(marked(stands), tokens.x.shape[-3:-2])
    whole = keep.shape[-1] == tokens.n
    return Reduction.prune(keep, tokens.n) if not whole else _all(tokens)


def _all(tokens: Tokens) -> Reduction:
    return Reduction.identity(tokens.n, tuple(tokens.x.shape[:-2]), tokens.x.device)


def _budget(spec: Spec, n: int, total: int | None) -> int | None:
    if isinstance(spec.budget, int):
        return min(spec.budget, n)
    wanted = count(spec.budget, n if total is None else total)
    return None if wanted is None else min(wanted, n)


def _check_finite(spec: Spec, tokens: Tokens) -> None:
    tokens.check_finite()
    for name in set(spec.method.needs) - {"x"}:
        values = tokens.need(name)
        if values.is_floating_point() and not all_finite(values):
            raise MmfastError(
                f"signal {name!r} of {spec.method.name!r} is not finite; look for the layer of the "
                "model that made NaN or infinity"
            )


def _each(index: Tensor, heads: torch.Size) -> Tensor:
    """The same indices `[..., K]` for every head, `[..., H, K]`; without heads as they are."""
    if not heads:
        return index
    return index[..., None, :].expand(*index.shape[:-1], *heads, -1)


def _some(tokens: Tokens, index: Tensor, heads: torch.Size) -> Tokens:
    """The tokens `index` `[..., R]` with their signals."""
    wide = _each(index, heads)

    def pick(value: Tensor) -> Tensor:
        if value.ndim == 0:  # the number of a layer, for example
            return value
        if value.shape == tokens.x.shape:  # values beside keys
            return gather_rows(value, wide)
        return value.gather(-1, wide if value.ndim == wide.ndim else index)

    signals = {name: pick(value) for name, value in tokens.signals.items()}
    signals["behind"] = tokens.n - index  # how many queries see each of them
    return Tokens(pick(tokens.x), signals=signals)
