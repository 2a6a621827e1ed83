"""Run one cache policy, alone or on what other policies leave."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mmfast.core.errors import MmfastError, SpecError
from mmfast.core.reduction import Mix, Reduction, Segments, gather_rows
from mmfast.core.registry import EVERY
from mmfast.core.spec import Spec, count
from mmfast.core.tokens import Tokens, all_finite, choosing
from mmfast.ops.merging import segment_merge
from mmfast.ops.ranking import RoughScores, best_places, complement, marked
from mmfast.ops.similarity import nearest, unit_rows

OTHERS = ("query_", "layers_")  # how signals begin that are about no token of the layer
_MOST = torch.finfo(torch.float64).max


def evict(spec: Spec, tokens: Tokens, total: int | None = None) -> Reduction:
    """Run a policy of role `position` or `score` on keys `x` `[..., H, N, d]` and signals.

    A share is of `total` tokens, None is N; a whole number above N keeps all.
    """
    budget = _budget(spec, tokens.n, total)
    if budget == tokens.n:
        return _all(tokens)
    rough = None if budget is None else _rough(spec, tokens, budget)
    found = call(spec, tokens, budget) if rough is None else rough
    if isinstance(found, Tensor | RoughScores):
        assert budget is not None
        return Reduction.prune(best_places(found, budget), tokens.n, ordered=True)
    reduction: Reduction = found
    if budget is not None and reduction.m != budget and not spec.method.uneven:
        raise MmfastError(
            f"{spec.method.name!r} kept {reduction.m} tokens instead of {budget}; report this"
        )
    return reduction


def call(spec: Spec, tokens: Tokens, budget: int | None) -> Any:
    """Return what the function of a policy answers: a Reduction, scores, or marks."""
    missing = [need for need in spec.method.needs if not tokens.has(need)]
    if missing:
        raise SpecError(
            f"{spec.method.name!r} needs {', '.join(map(repr, missing))}, which this cache is not "
            "given; pass it in Tokens.signals"
        )
    _check_finite(spec, tokens)
    with choosing(tokens.x.device):
        knobs = {name: value for name, value in spec.knobs.items() if name != EVERY}
        return spec.method.fn(tokens, budget, **knobs)


def _rough(spec: Spec, tokens: Tokens, budget: int) -> RoughScores | None:
    """Return scores that are exact only where the choice hangs on them; None without any.

    An accelerator would wait for the CPU to see where that is.
    """
    tell, x = spec.method.rough, tokens.x
    if tell is None or not x.is_cpu or x.dtype == torch.float64:
        return None
    if not all(tokens.has(need) for need in spec.method.needs):
        return None
    with choosing(x.device):
        knobs = {name: value for name, value in spec.knobs.items() if name != EVERY}
        found: RoughScores | None = tell(tokens, budget, **knobs)
        return found


def marks(
    stands: Tensor | None, tokens: Tokens, score: Spec | None, rule: Spec, total: int | None = None
) -> Tensor:
    """Mark `[..., H, N]` what stays where heads keep unlike numbers, as a policy of role `heads`.

    What `stands` `[..., N]` stays beside it; the rule reads the scores of the policy `score`, whose
    budget it shares out, as signal `score`.
    """
    if stands is not None and bool(stands.any()):
        heads = tokens.x.shape[-3:-2]
        rest = marked(~stands)
        mine = marks(None, _some(tokens, rest, heads), score, rule, tokens.n)
        found: Tensor = _each(stands.to(torch.int8), heads).bool()
        return found.scatter(-1, _each(rest, heads), mine)
    budget = _budget(rule if score is None else score, tokens.n, total)
    if budget == tokens.n:
        return torch.ones(tokens.x.shape[:-1], dtype=torch.bool, device=tokens.x.device)
    if score is not None:
        # What stays anyway has a score of infinity.
        scores = call(score, tokens, budget).double().clamp_max(_MOST)
        tokens = Tokens(tokens.x, signals={**tokens.signals, "score": scores})
    kept: Tensor = call(rule, tokens, budget)
    return kept


def evict_beside(stands: Tensor, tokens: Tokens, spec: Spec, total: int | None = None) -> Reduction:
    """Keep the tokens that stand, `[..., N]` bool, and of the others what a policy chooses.

    A share is of `total` tokens, None is N.
    """
    heads = tokens.x.shape[-3:-2]
    fixed = _each(marked(stands), heads)  # [..., H, S]
    if fixed.shape[-1] == tokens.n:
        return _all(tokens)
    rest = marked(~stands)  # [..., R]
    found = evict(spec, _some(tokens, rest, heads), tokens.n if total is None else total)
    wide = _each(rest, heads)
    keep = torch.cat([fixed, wide.gather(-1, found.keep)], -1)
    if found.pure:
        return Reduction.prune(keep, tokens.n)
    if found.mix is not None:
        return mixed_beside(found, fixed, wide, tokens.n)
    joined = wide.gather(-1, found.keep).gather(-1, found.owner.clamp_min(0))
    joined = joined.masked_fill(found.owner < 0, -1)  # [..., H, R] the source that each joins
    target = torch.arange(tokens.n, device=keep.device).expand(*keep.shape[:-1], -1).clone()
    weight = torch.ones(target.shape, dtype=found.share().dtype, device=keep.device)
    return Reduction.merge(
        keep, target.scatter_(-1, wide, joined), weight.scatter_(-1, wide, found.share())
    )


def mixed_beside(found: Reduction, more: Tensor, where: Tensor, n: int) -> Reduction:
    """Keep the tokens `more` `[..., S]` of n, too, untouched, beside a reduction with a mix.

    `where` `[..., R]` are the places among n of the tokens that it reduces. What comes back is
    merged into nothing.
    """
    mix, own = found.mix, where.gather(-1, found.keep)
    assert mix is not None
    all_kept = Reduction.prune(torch.cat([own, more], -1), n)
    slot, source = all_kept.owner, where.gather(-1, mix.source)
    output = slot.gather(-1, own.gather(-1, mix.output))
    now = slot.gather(-1, source)
    weight = mix.weight.masked_fill((now >= 0) & (now != output), 0)
    mixed = Mix(
        torch.cat([output, slot.gather(-1, more)], -1),
        torch.cat([source, more], -1),
        torch.cat([weight, torch.ones_like(more, dtype=weight.dtype)], -1),
    )
    return replace(found, keep=all_kept.keep, owner=slot, mix=mixed)


def keep_marked(stands: Tensor, tokens: Tokens) -> Reduction:
    """Keep the tokens that stand, `[..., N]` bool, equally many in every row, in every head."""
    keep = _each(marked(stands), tokens.x.shape[-3:-2])
    return _all(tokens) if keep.shape[-1] == tokens.n else Reduction.prune(keep, tokens.n)


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
    wide, run = _each(index, heads), _run(index)

    def pick(value: Tensor) -> Tensor:
        if value.ndim == 0:  # the number of a layer, for example
            return value
        rows = value.ndim == tokens.x.ndim  # keys and values, which may differ in width
        if run is not None:  # read where they lie
            return value.narrow(-2 if rows else -1, run, len(index))
        if rows:
            return gather_rows(value, wide)
        return value.gather(-1, wide if value.ndim == wide.ndim else index)

    signals = {
        name: value if name.startswith(OTHERS) else pick(value)
        for name, value in tokens.signals.items()
    }
    signals["behind"] = tokens.n - index  # how many queries see each of them
    return Tokens(pick(tokens.x), signals=signals)


def _run(index: Tensor) -> int | None:
    """The first of ascending indices `[K]` where they are a run; None where they are not."""
    if index.ndim > 1 or not len(index) or index.is_cuda:
        return None
    first, last = int(index[0]), int(index[-1])
    return first if last - first == len(index) - 1 else None


def pooled_votes(score: Tensor, kernel: int, pool: str = "mean", *, padded: bool = True) -> Tensor:
    """Mean or maximum of `[..., N]` over `kernel` (odd) places around each token, in float64.

    Where `padded`, a mean counts places beyond the ends as zeros, as `snapkv` and its heirs do.
    """
    if kernel < 1 or kernel % 2 == 0:
        raise SpecError(f"knob kernel={kernel} is not odd; choose 1, 3, 5, 7 …")
    if pool not in ("mean", "max"):
        raise SpecError(f"unknown pool {pool!r}; choices: max, mean")
    rows, side = score.double().reshape(-1, 1, score.shape[-1]), kernel // 2
    if pool == "max":
        return F.max_pool1d(rows, kernel, stride=1, padding=side).view(score.shape)
    means = F.avg_pool1d(rows, kernel, stride=1, padding=side, count_include_pad=padded)
    return means.view(score.shape)


def window_votes(
    attn: Tensor, budget: int, *, window: int, kernel: int, pool: str = "mean"
) -> Tensor:
    """Scores `[..., H, N]`: infinity at the last tokens, before them what they vote for.

    `attn` `[..., H, N]` is that of the last `window` queries, which stay, or half of the budget
    where that is less: a small cache of nothing but the question would be of no use. See
    `pooled_votes` for kernel and pool.
    """
    if window < 1:
        raise SpecError(f"knob window={window} holds no query; choose 1 or more")
    last = min(window, max(budget // 2, 1))
    votes = pooled_votes(attn[..., : attn.shape[-1] - last], kernel, pool)
    return F.pad(votes, (0, last), value=torch.inf)


_NUMBERS = 1 << 22  # float64 numbers of a temporary of all heads that are scored at once, 32 MB


def by_heads(score: Callable[..., Tensor], copies: int, x: Tensor, *more: Tensor) -> Tensor:
    """Scores `[..., H, N]` of keys `x` `[..., H, N, d]` and `more`, of so many heads at a time.

    `score` takes them with the leading dims `[h]`, and makes temporaries of as many numbers as
    `copies` of the keys; one head at a time is all that a long prompt leaves room for.
    """
    lead = x.shape[:-2]
    some = max(1, _NUMBERS // max(1, copies * x.shape[-2:].numel()))
    parts = zip(
        *(t.reshape(-1, *t.shape[len(lead) :]).split(some) for t in (x, *more)), strict=True
    )
    return torch.cat([score(*mine) for mine in parts]).view(*lead, -1)


def with_last(chosen: Tensor, last: int, n: int) -> Reduction:
    """Keep the tokens `chosen` `[..., K]`, all before the last ones, and the last ones."""
    tail = torch.arange(n - last, n, device=chosen.device).expand(*chosen.shape[:-1], -1)
    return Reduction.prune(torch.cat([chosen, tail], -1), n)


FOLDS = ("averaged", "pivotal", "weighted", "none")
_ROWS = 256  # evicted tokens compared at once, in a table that stays in the cache of a core


def fold_evicted(keep: Tensor, keys: Tensor, joins: Tensor, fold: str) -> Reduction:
    """Every evicted token joins the kept one whose key points most nearly the same way.

    `keep` `[..., M]` is ascending, keys are `[..., N, d]`; evicted tokens that do not join (`[...,
    N]` bool) are dropped. A kept token k takes in its m tokens e by `fold`: `averaged`, the mean of
    all; `pivotal`, the mean of k and of every (k + e) / 2; `weighted`, the mean by cosine, k at 1
    and opposite ones at 0; `none`, not at all. The weights of each of the M tokens add up to 1.
    """
    if fold not in FOLDS:
        raise SpecError(f"unknown merge {fold!r}; choices: {', '.join(sorted(FOLDS))}")
    n = keys.shape[-2]
    if fold == "none" or keep.shape[-1] == n:
        return Reduction.prune(keep, n)
    gone = complement(keep, n)  # [..., E]
    units = unit_rows(keys)
    slot, cosine = _partners(gather_rows(units, gone), gather_rows(units, keep))
    lost = ~joins.expand(*keep.shape[:-1], n).gather(-1, gone)
    pull = {"averaged": torch.ones_like(cosine), "weighted": cosine.clamp_min(0)}.get(fold)
    pull = torch.full_like(cosine, 0.5) if pull is None else pull  # what it weighs, a kept one 1
    pull = pull.masked_fill(lost, 0)
    pulls = segment_merge(pull[..., None], Segments(slot, keep.shape[-1]))[..., 0]  # [..., M]
    own = 1 + pulls if fold == "pivotal" else torch.ones_like(pulls)
    total = own + pulls
    target = torch.arange(n, device=keep.device).expand(*keep.shape[:-1], n)
    target = target.scatter(-1, gone, keep.gather(-1, slot).masked_fill(lost, -1))
    weight = torch.zeros_like(target, dtype=pull.dtype).scatter_(-1, keep, own / total)
    return Reduction.merge(keep, target, weight.scatter_(-1, gone, pull / total.gather(-1, slot)))


def _partners(gone: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """The first most similar kept row of each evicted row, and their cosine, both `[..., E]`."""
    slots, cosines = [], []
    for rows in gone.split(_ROWS, dim=-2):
        table = rows @ kept.transpose(-1, -2)  # [..., e, M]
        slots.append(nearest(table))
        cosines.append(table.gather(-1, slots[-1][..., None]).squeeze(-1))
    return torch.cat(slots, -1), torch.cat(cosines, -1)
