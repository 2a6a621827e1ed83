"""Eviction of entries of a cache: keys keep the positions they were rotated to.

Assisted decoding brings several tokens at once. Under a policy that acts at every step the cache is
thinned before the call only, as the drafts may be taken back; entries that would have left by the
turn of a draft are hidden from it by a mask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mmfast.caches.plan import CachePlan
from mmfast.caches.store import beside, leave
from mmfast.core.errors import ModelError
from mmfast.core.reduction import Reduction
from mmfast.core.spec import Spec, count
from mmfast.core.tokens import Tokens
from mmfast.core.trace import Trace
from mmfast.models.kv.heads import alike, choose_by_head, evict_heads, held_by_heads
from mmfast.models.kv.notes import (
    BASIS,
    COUNTED,
    FRAME,
    GATED,
    KIND,
    MUTUAL,
    PADDING,
    PINNED,
    PLACE,
    PROBED,
    REPEATED,
    SPOT,
    TOTAL,
    VISION,
    WINDOW,
    entries,
    fill,
    note_mutual,
    note_vision,
    real_entries,
    saliency,
    warn_of_unscored,
)
from mmfast.models.kv.output import added_lengths
from mmfast.models.kv.packs import keep_packed, settle
from mmfast.models.kv.patterns import SIGNALS, known_heads
from mmfast.models.kv.queries import Expectation
from mmfast.models.kv.sinks import FollowingSinks
from mmfast.models.reduction.cache_layers import is_short, regroup
from mmfast.models.reduction.call import PassState
from mmfast.models.reduction.probe import replacing

_ALONE = "they count as attended to by none"
# `(row, where [n])` -> the Reduction of these entries of a batch row, leading dims `[H]`.
Choose = Callable[[int, Tensor], Reduction]
# From the number of entries, in order of time, to those that leave before the next token.
Leaving = Callable[[int], Sequence[int]]


def evict(cache: Any, index: int, choose: Choose, drafts: int = 0) -> tuple[int, int]:
    """Let a policy, called once per batch row, choose what stays in one shortened layer with notes.

    The last `drafts` entries stay, as they may be taken back. Returns entries per head before and
    after, of all rows together.
    """
    layer = cache.layers[index]
    notes, length = fill(layer), entries(layer)
    where = real_entries(notes[KIND])
    reductions = [
        beside(choose(b, mine[: len(mine) - drafts] if drafts else mine), drafts)
        if mine.shape[0]
        else Reduction.identity(0, layer.keys.shape[1:2], layer.keys.device)
        for b, mine in enumerate(where)  # the first chunks of a short row may be padding alone
    ]
    before, after = sum([mine.shape[0] for mine in where]), sum([r.m for r in reductions])
    if before == after and all(r.pure for r in reductions):
        if before < length * len(where):  # the model's mask is that of a layer without its padding
            layer.valid = notes[KIND][:, 0] != PADDING
        regroup(cache, index)
        return before, after
    if layer.in_packs and all(r.pure for r in reductions):
        nothing = layer.keys.new_empty(*layer.keys.shape[:2], length, 0)
        left = leave(nothing, nothing, notes, where, reductions)
        keep_packed(layer, [r.keep for r in reductions])
    else:
        if layer.in_packs:
            layer.open()  # what is merged is packed once more
        left = leave(layer.keys, layer.values, notes, where, reductions)
        (layer.keys,), (layer.values,) = left.kv.keys, left.kv.values
        if layer.in_packs:
            layer.front = left.gaps
    settle(cache, index, left, length)
    return before, after


def basis(layer: Any, row: int) -> int:
    """Tokens that a row held behind its last prompt; later shares refer to them."""
    return int(layer.notes[BASIS][row, 0, -1]) if BASIS in layer.notes else 0


def chooser(
    plan: CachePlan,
    layer: Any,
    index: int,
    prompt: bool = True,
    layers: Mapping[int, Any] | None = None,
    expectation: Expectation | None = None,
) -> Choose:
    """Choice of a plan among the entries of a layer, behind a prompt or a later step.

    `layers` are the attention modules of the decoder layers that the plan acts on.
    """
    whole = whole_of(layer)

    def choose(row: int, where: Tensor) -> Reduction:
        keys, signals, shared = seen(plan, layer, index, layers, expectation, whole, row, where)
        mine = plan if prompt else settled(plan, basis(layer, row))
        if alike(shared):
            signals |= {name: each[0] for name, each in shared.items()}
            return mine.reduce(Tokens(keys, signals=signals))
        return choose_by_head(mine, keys, signals, shared)

    return choose


def whole_of(layer: Any) -> tuple[Tensor, Tensor]:
    """Return all keys and values of a layer, whatever it has packed."""
    return layer.whole() if layer.in_packs else (layer.keys, layer.values)


def seen(
    plan: CachePlan,
    layer: Any,
    index: int,
    layers: Mapping[int, Any] | None,
    expectation: Expectation | None,
    whole: tuple[Tensor, Tensor],
    row: int,
    where: Tensor,
) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Keys and signals of a policy on the entries `where` of a row, and what heads may share.

    `whole` are all keys and values of the layer; the last are `[1 or H, n]`, by name.
    """
    keys, values = [_pick(x[row], where, 1) for x in whole]
    read = layer.notes.keys() - {PLACE, BASIS}  # of which no policy knows
    notes = {k: _pick(layer.notes[k][row], where, -1) for k in read}
    shared = {k: notes[k] for k in (KIND, FRAME, SPOT) if k in notes}
    signals = signals_of(values, shared[KIND][0], notes)
    about = {"layer": index}
    if layers:
        about |= {"depth": [*layers].index(index), "depths": len(layers)}
        if "values_out" in plan.needs:
            signals["values_out"] = added_lengths(layers[index], values)
        if expectation is not None:
            signals |= expectation.expected(
                layer.pending, row, index, layers[index], layer.keys.shape[1]
            )
        signals |= known_heads(plan.needs, layers[index])
    if plan.composes:
        signals["layers_attn"] = layer.pending[row].to(keys.device).expand(len(keys), -1, -1)
    for name in about.keys() & plan.needs:
        signals[name] = torch.tensor(about[name], device=keys.device)
    return keys, signals, shared


_NOTED = (
    (COUNTED, "attn_counted"),
    (GATED, "key_gate"),
    (MUTUAL, "attn_mutual"),
    (REPEATED, "attn_repeated"),
    (VISION, "attn_vision"),
)


def signals_of(values: Tensor, kinds: Tensor, notes: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Signals for a policy: values `[.., H, n, d]`, kinds `[n]`, attention of `notes`."""
    signals = {"values": values, "kind": kinds}
    if WINDOW in notes:
        mass = notes[WINDOW]  # the rows of a softmax add up to one each
        signals["attn_window"] = mass / mass.sum(-1, keepdim=True).round().clamp_min(1)
    if TOTAL in notes:
        signals["attn_sum"] = notes[TOTAL]
    if PROBED in notes:
        signals["attn_probed"] = saliency(notes)
    for note, name in _NOTED:
        if note in notes:
            signals[name] = notes[note]
    return signals


def _pick(x: Tensor, where: Tensor, dim: int) -> Tensor:
    return x if where.shape[0] == x.shape[dim] else x.index_select(dim, where)


def stayer(plan: CachePlan, layer: Any) -> Choose:
    """Behind the prompt: position policies go on, and what a policy pinned there stays."""

    def choose(row: int, where: Tensor) -> Reduction:
        kinds = layer.notes[KIND][row].index_select(-1, where).long()
        stays = settled(plan, basis(layer, row)).standing(kinds)  # [1 or H, n]
        if PINNED in layer.notes:
            stays = stays | layer.notes[PINNED][row].index_select(-1, where)
        stays = stays.expand(layer.keys.shape[1], -1)
        most = int(stays.sum(-1).max())
        # Recent tokens first: a stable sort puts what stays last, in order.
        keep = stays.to(torch.int8).argsort(dim=-1, stable=True)[:, -most:]
        return Reduction.prune(keep, len(where))

    return choose


def pin(plan: CachePlan, layer: Any, drafts: int = 0) -> None:
    """Remember what position policies do not hold: it was chosen behind the prompt, for good.

    The last `drafts` entries, which may be taken back, count neither as pinned nor as a position.
    """
    kinds = fill(layer)[KIND]
    pinned = torch.zeros(kinds.shape, dtype=torch.bool, device=kinds.device)
    for number, (row, mine) in enumerate(zip(pinned, kinds, strict=True)):
        where = (mine[0] != PADDING).nonzero()[:, 0]
        where = where[: len(where) - drafts]
        row[:, where] = ~settled(plan, basis(layer, number)).standing(mine[:, where].long())
    layer.notes = {**layer.notes, PINNED: pinned}


def settled(plan: CachePlan, n: int) -> CachePlan:
    """The plan with every share as the number of tokens that it is of `n`.

    A policy that acts at every step would otherwise take a share of a share for ever.
    """
    specs = (*plan.position, *((plan.score,) if plan.score else ()))
    if not any(isinstance(spec.budget, float) for spec in specs):
        return plan
    score = None if plan.score is None else _settled(plan.score, n)
    return replace(plan, position=tuple(_settled(s, n) for s in plan.position), score=score)


def _settled(spec: Spec, n: int) -> Spec:
    return replace(spec, budget=count(spec.budget, n)) if isinstance(spec.budget, float) else spec


@dataclass(eq=False)
class Slid:
    """Result of `slide` on one layer, for the next ones, which hold the same.

    `before` has its notes, and how many entries it had and had lost by then; `where` has the
    entries that stay.
    """

    before: tuple[Any, int, int]
    kinds: Tensor
    where: Tensor
    layer: Any


# By tokens of a layer, and tokens that shares refer to: where the entries are that stay.
Known = dict[tuple[int, int, torch.device], Tensor]
_MANY = 256  # lengths that are remembered; in the long run a window has one


def slide(cache: Any, index: int, plan: CachePlan, memo: list[Slid], known: Known) -> bool:
    """Let position policies evict from one conversation, where all its layers hold the same.

    `memo` has the result for the layer before, `known` the choices that depend on numbers of tokens
    alone, kept from step to step. False where rows, heads or packs call for `evict`, and nothing
    was done.
    """
    layer = cache.layers[index]
    if layer.in_packs or PINNED in layer.notes:
        return False
    before = (layer.notes, entries(layer), layer.gone)
    last = memo[0] if memo else None
    if last is not None and last.before[0] is before[0] and last.before[1:] == before[1:]:
        _follow(layer, last)
        return True
    notes = fill(layer)
    kinds = notes[KIND]
    if len(kinds) > 1 or any(note.shape[1] > 1 for note in notes.values()):
        return False
    if last is None or not torch.equal(last.kinds, kinds):
        if bool((kinds == PADDING).any()):
            return False
        where = _standing(plan, layer, kinds, known)
    else:
        where = last.where.to(kinds.device)
    if len(where) < kinds.shape[-1]:
        _keep_only(layer, where)
        layer.notes = {name: note.index_select(-1, where) for name, note in notes.items()}
        layer.gone = before[2] + kinds.shape[-1] - len(where)
        regroup(cache, index)
    if last is not None and _alike(layer, last.layer):
        layer.notes = last.layer.notes  # from here on it is enough to see that it is the same
    memo[:] = [Slid(before, kinds, where, layer)]
    return True


def _standing(plan: CachePlan, layer: Any, kinds: Tensor, known: Known) -> Tensor:
    shares = any(isinstance(spec.budget, float) for spec in plan.position)
    whole = basis(layer, 0) if shares else 0
    key = (kinds.shape[-1], whole, kinds.device)
    if key in known:
        return known[key]
    where = settled(plan, whole).standing(kinds[0, 0].long()).nonzero()[:, 0]
    if not any(spec.method.needs for spec in plan.position) and len(known) < _MANY:
        known[key] = where
    return where


def _follow(layer: Any, last: Slid) -> None:
    if len(last.where) < last.before[1]:
        _keep_only(layer, last.where)
        layer.gone, layer.group = last.layer.gone, last.layer.group
        layer.uneven = last.layer.uneven
    layer.notes = last.layer.notes


def _keep_only(layer: Any, where: Tensor) -> None:
    gone = layer.keys.shape[2] - len(where)
    here = where.to(layer.keys.device)
    layer.keys, layer.values = (x.index_select(2, here) for x in (layer.keys, layer.values))
    layer.dropped, layer.valid = layer.dropped + gone, None


def _alike(one: Any, other: Any) -> bool:
    return (
        (one.gone, one.dropped, one.notes.keys()) == (other.gone, other.dropped, other.notes.keys())
        and one.uneven == other.uneven
        and all(
            a.device == b.device and torch.equal(a, b)
            for a, b in zip(one.notes.values(), other.notes.values(), strict=True)
        )
    )


class Eviction:
    """Eviction under one plan, from the caches of one attached model.

    A plan that stores in two precisions, or retrieves, evicts nothing; nor do position policies
    beside a choice at every step. Entries leave if `acts`, at every step if `always`; `rescores`
    computes the score anew for that. `layers` are the attention modules of the decoder layers it
    acts on.
    """

    def __init__(self, plan: CachePlan, state: PassState, layers: Mapping[int, Any]) -> None:
        self._plan, self._state, self._layers = plan, state, layers
        self.trace: Trace | None = None
        self.expectation: Expectation | None = None
        self.sinks: FollowingSinks | None = None
        self._known = Known()
        self._leaving: dict[int, Leaving] = {}
        self._gone: dict[tuple[int, int], Sequence[int]] = {}
        specs = (*plan.position, *(s for s in (plan.score, plan.heads) if s is not None))
        read = plan.retrieve or (plan.select if plan.score is None else None)
        kept = any(spec.whole for spec in specs) or plan.bits or read
        always = [spec.method.moment == "always" for spec in specs]
        shares = any(isinstance(spec.budget, float) for spec in specs)
        self.acts = bool(specs) and not kept
        self.always = self.acts and any(always)
        self.rescores = plan.score is not None and plan.score.method.moment == "always"
        self._every = plan.every if self.acts else 0
        if self._every:  # the whole plan acts then, as it does behind a prompt
            self.always = self.rescores = True
        if plan.heads is not None:  # what each head holds is no matter of numbers
            self.always = self.rescores = False
        self._by_number = all(always) and not shares

    def prompt_ends(self, cache: Any, index: int, drafts: int) -> tuple[int, int]:
        """Evict behind a prompt, but for drafts at its end; see `evict` for what it returns."""
        layer, mutual = cache.layers[index], self._plan.mutual
        if mutual is not None:
            unscored = note_mutual(layer, *mutual, drafts)
            if self.trace is not None:
                warn_of_unscored(self.trace, unscored, "scores the tokens of one prompt", _ALONE)
        if self._plan.vision:
            note_vision(layer, whole_of(layer)[0], self._plan.vision, drafts)
        if self._plan.heads is not None:
            look = partial(seen, self._plan, layer, index, self._layers, self.expectation)
            found = evict_heads(cache, index, self._plan, look, drafts)
        else:
            found = evict(cache, index, self._choose(layer, index, True), drafts)
        if self.always and not self.rescores and self._plan.score is not None:
            pin(self._plan, layer, drafts)
        for name in (WINDOW, COUNTED):  # of this prompt
            layer.notes.pop(name, None)
        layer.chosen = layer.gone + entries(layer) - drafts
        if self.expectation is not None or self._plan.composes:
            layer.pending = None
        return found

    @property
    def by_head(self) -> bool:
        """Heads of a layer keep unlike numbers of entries, which masks of their own hide."""
        return self._plan.heads is not None

    def votes(self, layer: Any) -> bool:
        """The query of the token that came last counts in `attn_window` of the next choice."""
        return self._new(layer) > self._every - self._plan.window

    @staticmethod
    def _new(layer: Any) -> int:
        return int(layer.gone) + entries(layer) - int(layer.chosen)

    @property
    def alike(self) -> bool:
        """All layers of a prompt can be chosen from at once, and later numbers alone count."""
        specs = (*self._plan.position, *((self._plan.score,) if self._plan.score else ()))
        lone = {"layer", "depth", "values_out", "query_mean", FRAME}
        queried = {"attn_mutual", "attn_repeated", "attn_vision", "key_gate"}
        apart = (lone | queried | SIGNALS) & set(self._plan.needs)
        uneven = self.by_head or any(s.budget is None or s.method.uneven for s in specs)
        fixed = not apart and not uneven
        return fixed and not (self.always and self.leaving(0) is None)

    def left(
        self, keys: Tensor, values: Tensor, kinds: Tensor, masses: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return what is left of layers `[L, H, n, d]` of a prompt whose tokens have `kinds` `[n]`.

        `masses` `[L, H, n]` are the attention received, by note; see `alike`.
        """
        signals = signals_of(values, kinds.long(), masses)
        chosen = self._plan.reduce(Tokens(keys, signals=signals))
        if chosen.m == chosen.n and chosen.pure:
            return keys, values
        return chosen.apply_keys(keys), chosen.apply(values)

    def step(self, cache: Any, index: int, over: bool, memo: list[Slid]) -> None:
        """Evict before a call, when nothing that the last one brought can be taken back any more.

        A prompt that is not over is thinned between its chunks where all policies act at every
        step, on numbers of tokens.
        """
        self._thin(cache, index, over, memo)
        if self.sinks is not None:
            self.sinks.follow(cache.layers[index], index)

    def _thin(self, cache: Any, index: int, over: bool, memo: list[Slid]) -> None:
        layer, plan = cache.layers[index], self._plan
        if not self.always or not (self._by_number or (over and BASIS in layer.notes)):
            return
        if self._plan.score is None and slide(cache, index, self._plan, memo, self._known):
            return
        if self._new(layer) < self._every:
            return
        again = self.rescores
        if again and self._lacks(layer):  # an earlier turn was read under another policy
            return
        evict(cache, index, self._choose(layer, index, False) if again else stayer(plan, layer))
        if self._every:
            layer.notes = {k: note for k, note in layer.notes.items() if k != WINDOW}
            layer.chosen = layer.gone + entries(layer)

    def _lacks(self, layer: Any) -> bool:
        """Return True if no prompt has noted the attention that the plan reads."""
        noted = {"attn_sum": TOTAL, "attn_window": WINDOW} | {name: k for k, name in _NOTED}
        return any(noted.get(need, KIND) not in layer.notes for need in self._plan.needs)

    def _choose(self, layer: Any, index: int, prompt: bool) -> Choose:
        return chooser(self._plan, layer, index, prompt, self._layers, self.expectation)

    def leaving(self, basis: int) -> Leaving | None:
        """Return what leaves a row at each step; None if that is no matter of numbers.

        Shares refer to `basis` tokens; rows of equally many get one function.
        """
        specs = self._plan.position
        needs = any(spec.method.needs for spec in specs)
        if self._plan.score is not None or needs or self.sinks is not None:
            return None
        return self._leaving.setdefault(basis, partial(self._numbers, basis))

    def _numbers(self, whole: int, n: int) -> Sequence[int]:
        if (whole, n) not in self._gone:
            stays = settled(self._plan, whole).standing(torch.zeros(n, dtype=torch.int64))
            self._gone[whole, n] = (~stays).nonzero()[:, 0].tolist()
        return self._gone[whole, n]

    @contextmanager
    def masking(self, modules: dict[int, nn.Module]) -> Iterator[None]:
        """Hide entries from drafts, or of some heads, in attention modules by decoder layer."""
        if self.by_head:
            with replacing(modules, self._masked_heads):
                yield
            return
        if not self.always or self.rescores:
            yield
            return
        with replacing(modules, self._masked):
            yield

    def _masked(
        self, index: int, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any
    ) -> tuple[Tensor, Tensor, Any]:
        cache = self._state.cache
        drafts = cache is not None and self._state.part is None and query.shape[2] > 1
        if drafts and self.sinks is not None:
            raise ModelError(
                f"cache '{self._plan}' has other positions for every draft; leave out positions=new"
            )
        if drafts and index < len(cache.layers):
            layer = cache.layers[index]
            if is_short(layer) and layer.notes is not None:
                seen = self._seen(layer, query.shape[2])
                mask = hidden(module, query, mask, seen)
        return key, value, mask

    def _masked_heads(
        self, index: int, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any
    ) -> tuple[Tensor, Tensor, Any]:
        cache = self._state.cache
        layer = cache.layers[index] if cache is not None and index < len(cache.layers) else None
        return key, value, self.mask_of_heads(layer, module, query, mask)

    def mask_of_heads(self, layer: Any, module: nn.Module, query: Tensor, mask: Any = None) -> Any:
        """Return a mask that hides from heads what they do not hold; as given where it need not."""
        real = held_by_heads(layer) if self.by_head and layer is not None else None
        return mask if real is None else hidden(module, query, mask, real)

    def _seen(self, layer: Any, drafts: int) -> Tensor:
        """Entries that each of the last tokens sees, `[B, 1 or H, drafts, n]`."""
        notes = fill(layer)
        kinds = notes[KIND].long()
        groups = max(note.shape[1] for note in notes.values())
        kinds = kinds.expand(-1, groups, -1)
        seen = torch.zeros(*kinds.shape[:2], drafts, kinds.shape[2], dtype=torch.bool)
        for b in range(len(kinds)):
            plan = settled(self._plan, basis(layer, b))
            for g in range(groups):
                pinned = notes[PINNED][b].expand(groups, -1)[g] if PINNED in notes else None
                seen[b, g] = _turns(plan, kinds[b, g].cpu(), pinned, drafts)
        return seen.to(kinds.device)


def _turns(plan: CachePlan, kinds: Tensor, pinned: Tensor | None, drafts: int) -> Tensor:
    n = len(kinds)
    alive = (kinds[: n - drafts] != PADDING).nonzero()[:, 0]
    seen = torch.zeros(drafts, n, dtype=torch.bool)
    for turn in range(drafts):
        if turn:  # the cache is thinned before the first of them already
            stays = plan.standing(kinds[alive])
            stays = stays if pinned is None else stays | pinned.cpu()[alive]
            alive = alive[stays]
        alive = torch.cat([alive, torch.tensor([n - drafts + turn])])
        seen[turn, alive] = True
    return seen


def hidden(module: Any, query: Tensor, mask: Any, seen: Tensor) -> Any:
    """Hide all but `seen` `[B, 1 or Hkv, L or 1, S]` in a mask; ModelError where it takes none."""
    kind = str(getattr(getattr(module, "config", None), "_attn_implementation", ""))
    if "flash" in kind or not (mask is None or isinstance(mask, Tensor)):
        raise ModelError(
            f"tokens of one call see different entries under this cache policy, which {kind!r} "
            "attention cannot; call model.set_attn_implementation('sdpa'), ask one by one, or "
            "leave out the draft"
        )
    if seen.shape[1] > 1:
        seen = seen.repeat_interleave(query.shape[1] // seen.shape[1], 1)
    if mask is not None and mask.dtype == torch.bool:
        return seen & mask[..., : seen.shape[-1]]
    if mask is None and kind != "eager":
        return seen
    low = torch.finfo(query.dtype).min
    if mask is None:
        mask = torch.zeros(1, dtype=query.dtype, device=query.device)
        return mask.expand(seen.shape).masked_fill(~seen, low)
    return mask[..., : seen.shape[-1]].masked_fill(~seen, low)
