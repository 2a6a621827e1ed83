"""Plans of cache specs such as ``"sink:64+window:4096+retrieve:64"``: policies by role.

A spec is read as ``name[:budget][?knob=value&…]`` joined by ``+``. Roles:

* `position`: keeps by place and kind alone; any number, a token stays if any of them keeps it.
* `score`: keeps by keys or attention; at most one, and it chooses among the tokens that no position
  policy keeps, so that budgets add up.
* `heads`: shares the budget of the score policy out over the heads of a layer, which then keep
  unlike numbers, or says what each head keeps; at most one.
* `retrieve`: keeps all and reads a part, chosen by a question or while it is answered; at most one.
* `select`: keeps all and reads a part, chosen anew at every decode step; at most one. Position
  policies beside it say what is always read, a score policy chooses what it chooses from.
* `store`: fewer bits; at most one.

An integer counts tokens (for `retrieve` frames, for `store` bits), a share is of the tokens
present. A cache that is smaller than an integer is kept whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mmfast.caches.quantised import Probes
from mmfast.core.errors import MmfastError, SpecError, unknown
from mmfast.core.kv import StepSelector
from mmfast.core.reduction import Reduction
from mmfast.core.registry import EVERY, methods
from mmfast.core.spec import Spec, count, parse
from mmfast.core.tokens import Tokens
from mmfast.ops.eviction import call, evict, evict_beside, keep_marked, marks
from mmfast.ops.quantisation import Quantiser
from mmfast.ops.ragged import ChannelPruner

ROLES = ("position", "score", "retrieve", "select", "store", "heads")


@dataclass(frozen=True)
class CachePlan:
    """The policies of one spec string, by role."""

    position: tuple[Spec, ...] = ()
    score: Spec | None = None
    retrieve: Spec | None = None
    store: Spec | None = None
    select: Spec | None = None
    heads: Spec | None = None

    @property
    def parts(self) -> tuple[Spec, ...]:
        """All policies, by role."""
        rest = (self.score, self.heads, self.retrieve, self.select, self.store)
        return (*self.position, *(spec for spec in rest if spec is not None))

    def __str__(self) -> str:
        return "+".join(str(spec).replace("@kv", "", 1) for spec in self.parts)

    @cached_property
    def needs(self) -> tuple[str, ...]:
        """Signals that `reduce` reads beside the keys."""
        read = (*self.position, *(spec for spec in (self.score, self.heads) if spec is not None))
        found = {need for spec in read for need in spec.method.needs}
        return tuple(sorted(found - {"x", SCORE}))

    @property
    def window(self) -> int:
        """Last queries that `attn_window` or `attn_counted` is of; 0 where nothing reads it."""
        return int(self._knob("window", 0)) if WINDOWED & set(self.needs) else 0

    @property
    def follows(self) -> int:
        """First tokens whose positions follow the window, by `sink?positions=new`; 0 for none."""
        moved = (spec for spec in self.position if spec.knobs.get("positions") == "new")
        return next((int(spec.budget or 0) for spec in moved), 0)

    @property
    def rereads(self) -> int | None:
        """Last tokens of a prompt that must pass the model though their keys and values are known.

        None means all of them: the plan reads queries, states, or sums of all attention.
        """
        sums = self.retrieve is not None or self.future or self.mutual or "attn_sum" in self.needs
        if sums or self.repeats or self.vision or self.gated or self.probes is not None:
            return None
        pruner = self.pruner()
        return max(self.window, 0 if pruner is None else pruner.window)

    @property
    def every(self) -> int:
        """New tokens after which the plan chooses again; 0 where it does so behind a prompt only.

        `attn_window` is then the attention of the last of them, at most `window`.
        """
        return int(self._knob(EVERY, 0))

    @property
    def rechoice(self) -> int:
        """Tokens after which `retrieve` chooses again; 0 where it does so at a question alone."""
        return 0 if self.retrieve is None else int(self.retrieve.knobs.get(EVERY, 0))

    @property
    def future(self) -> tuple[int, int] | None:
        """Positions to come that `query_mean` averages over, and first queries that do not count.

        None where nothing reads it.
        """
        if "query_mean" not in self.needs:
            return None
        return int(self._knob("future", 512)), int(self._knob("sink", 0))

    @cached_property
    def mutual(self) -> tuple[int, int, int] | None:
        """Tokens of the chunks that `attn_mutual` is taken in, and first and last ones without.

        None where nothing reads it.
        """
        if "attn_mutual" not in self.needs:
            return None
        chunk, sink, recent = (int(self._knob(name, 0)) for name in ("chunk", "sink", "recent"))
        return chunk, sink, recent

    @cached_property
    def vision(self) -> int:
        """Last visual tokens that `attn_vision` is of; 0 where nothing reads it."""
        return int(self._knob("window", 32)) if "attn_vision" in self.needs else 0

    @property
    def probes(self) -> Probes | None:
        """Queries that `attn_probed` is of; None where nothing reads it."""
        if "attn_probed" not in self.needs:
            return None
        recent, random = (float(self._knob(name, 0.05)) for name in ("recent", "random"))
        return Probes(recent, random, int(self._knob("seed", 0)), self.every)

    @property
    def gated(self) -> bool:
        """`key_gate` is read: what gates of the model say of the states of tokens."""
        return "key_gate" in self.needs

    @property
    def repeats(self) -> int:
        """Tokens of the chunks in which a prompt is read again for `attn_repeated`; 0 for never."""
        return int(self._knob("chunk", 0)) if "attn_repeated" in self.needs else 0

    @property
    def asks_model(self) -> bool:
        """The choice reads layers of the model itself: a second pass, or what enters them."""
        return bool(self.repeats) or self.gated

    @cached_property
    def composes(self) -> bool:
        """Layers share one budget, by the attention of a second reading (`kvcompose`)."""
        return "layers_attn" in self.needs

    @property
    def asks(self) -> float | None:
        """Share of each of these chunks whose tokens alone are read again; None for all, asked."""
        if self.composes:
            return 1.0
        share = self._knob("asks", None) if self.repeats else None
        return None if share is None else float(share)

    @cached_property
    def bits(self) -> tuple[int, int] | None:
        """Bits of the tokens that `reduce` keeps and of those it does not: `zipvl`, `zipcache`.

        None means that the latter leave the cache. With a pair nothing leaves: keys and values of
        a layer are stored in two packs (`models.kv.packs`); 16 bits are the values as they are.
        """
        high, low = self._knob("high", 0), self._knob("low", 0)
        return (int(high), int(low)) if high and low else None

    def _knob(self, name: str, default: Any) -> Any:
        spec = self.score
        if spec is None:
            return default
        return spec.knobs.get(name, spec.method.knobs.get(name, default))

    def quantiser(self) -> Quantiser | None:
        """The `Quantiser` of `store`, None without one."""
        found = None if self.store is None else _call(self.store)
        return found if isinstance(found, Quantiser) else None

    def pruner(self) -> ChannelPruner | None:
        """The `ChannelPruner` of `store`, None without one, or where all channels stay."""
        found = None if self.store is None or self.store.whole else _call(self.store)
        return found if isinstance(found, ChannelPruner) else None

    def retriever(self) -> Any:
        """The `Retriever` of `retrieve`, None without one."""
        return None if self.retrieve is None else _call(self.retrieve)

    def selector(self) -> StepSelector | None:
        """The `StepSelector` of `select`, None without one."""
        found: StepSelector | None = None if self.select is None else _call(self.select)
        return found

    def standing(self, kind: Tensor) -> Tensor:
        """Mask `[..., N]` of the tokens that position policies keep; none stands without them."""
        stays = torch.zeros_like(kind, dtype=torch.bool)
        rows = Tokens(torch.zeros(*kind.shape, 1, device=kind.device), signals={"kind": kind})
        for spec in self.position:
            stays |= evict(spec, rows).owner >= 0
        return stays

    def reduce(self, tokens: Tokens) -> Reduction:
        """The entries that stay in the cache of one layer, behind a prompt or whenever it is full.

        From keys `x` `[..., H, N, d]`, the signals in `needs` and `kind` `[..., N]` to a Reduction
        with leading dims `[..., H]`. SpecError for a missing signal or a wrong knob; MmfastError
        for NaN or infinity, or where conversations of a batch keep different numbers of tokens.
        """
        if not self.position and self.score is None:
            return Reduction.identity(tokens.n, tuple(tokens.x.shape[:-2]), tokens.x.device)
        if self.heads is not None:
            raise SpecError(f"{self} keeps unlike numbers in the heads of a layer; call `marks`")
        if self.score is None:
            return keep_marked(self._mask(tokens), tokens)
        whole, tables = tokens.n, tokens.signal("layers_attn") if self.composes else None
        if tables is not None:  # layers that hold unlike numbers share a budget
            whole = round(float((tables >= 0).sum(-1).double().mean()))
        if not self.position:
            return evict(self.score, tokens, whole)
        return evict_beside(self._mask(tokens), tokens, self.score, whole)

    def marks(self, tokens: Tokens) -> Tensor:
        """Mark the entries `[..., H, N]` that stay in each head, under a policy of role `heads`.

        The arguments and errors are those of `reduce`.
        """
        assert self.heads is not None
        stands = self._mask(tokens) if self.position else None
        return marks(stands, tokens, self.score, self.heads)

    def marks_apart(self, heads: Sequence[Tokens]) -> list[Tensor]:
        """Mark `[n_h]` per head as `marks`, of heads that hold unlike numbers, `[1, n_h, d]` each.

        A share is of the mean number.
        """
        rule = self.heads
        assert rule is not None
        if self.score is None:
            return [self.marks(tokens)[0] for tokens in heads]
        mean = sum(tokens.n for tokens in heads) // len(heads)
        stands = [self.standing(tokens.need("kind")) for tokens in heads]
        most = count(self.score.budget, mean)
        assert most is not None
        budget = min(most + max(int(s.sum()) for s in stands), mean)
        longest = max(tokens.n for tokens in heads)
        scores = [
            F.pad(
                call(self.score, tokens, min(most, tokens.n))[0].double().masked_fill(s, torch.inf),
                (longest - tokens.n, 0),
                value=-torch.inf,
            )
            for tokens, s in zip(heads, stands, strict=True)
        ]
        together = Tokens(heads[0].x, signals={SCORE: torch.stack(scores)})
        found: Tensor = rule.method.fn(together, budget, **rule.knobs)
        return [mine[longest - t.n :] for mine, t in zip(found, heads, strict=True)]

    def _mask(self, tokens: Tokens) -> Tensor:
        shape = (*tokens.x.shape[:-3], tokens.n)
        kind = tokens.signal("kind")
        if kind is None and any("kind" in spec.method.needs for spec in self.position):
            raise SpecError(f"{self} needs 'kind', which this cache is not given")
        if kind is None:
            kind = torch.zeros(shape, dtype=torch.int64, device=tokens.x.device)
        mask = self.standing(kind.expand(shape))
        totals = mask.sum(-1)
        if totals.ndim and bool((totals != totals.flatten()[0]).any()):
            raise MmfastError(
                f"{self} keeps {totals.unique().tolist()} tokens of the conversations of a batch; "
                "reduce them one by one"
            )
        return mask


def plan_cache(text: str | None) -> CachePlan | None:
    """Read a cache spec such as `"sink:4+window:4096+quant:4"`; None or "" is no policy at all.

    A wrong name, knob or budget, or a role that occurs twice, is a SpecError that names the
    choices.
    """
    specs = parse(text, kind="cache")
    if not specs:
        return None
    by_role: dict[str, list[Spec]] = {role: [] for role in ROLES}
    for spec in specs:
        by_role[spec.method.role].append(spec)
    for role in ROLES[1:]:
        _at_most_one(role, by_role[role])
    one = {role: found[0] if found else None for role, found in by_role.items()}
    plan = CachePlan(tuple(by_role["position"]), *(one[role] for role in _FIELDS))
    if plan.heads is not None:
        plan = _shared_out(plan, plan.heads)
    plan.quantiser()  # a wrong number of bits or a wrong knob shows here
    plan.retriever()
    if plan.rechoice < 0:
        raise SpecError(f"'{plan}' has a negative every=; choose 0 (never) or more new tokens")
    for need, knob in (("attn_repeated", "chunk"), ("attn_vision", "window")):
        if plan.score and need in plan.needs and int(plan._knob(knob, 1)) < 1:
            name, value = plan.score.method.name, plan._knob(knob, 1)
            raise SpecError(f"knob {knob}={value} of {name!r}: choose 1 or more tokens")
    if plan.score and plan.asks is not None and not 0 < plan.asks <= 1:
        name = plan.score.method.name
        raise SpecError(f"knob asks={plan.asks} of {name!r}: choose a share in (0, 1]")
    _check_select(plan)
    _check_sinks(plan)
    if plan.every and plan.score:
        name = plan.score.method.name
        if plan.every < 0 or (plan.bits and plan.probes is None):
            reason = "is negative; choose 0 (never) or more new tokens"
            if plan.every > 0:
                reason = "does not go with two precisions, of which nothing leaves; leave it out"
            raise SpecError(f"knob every={plan.every} of {name!r} {reason}")
    if plan.pruner() is not None and plan.retrieve is not None:
        name = plan.retrieve.method.name
        raise SpecError(f"'{plan.store}' leaves out channels that {name!r} reads; drop one of them")
    if plan.bits and plan.store and plan.score:
        names = f"{plan.score.method.name!r} and {plan.store.method.name!r}"
        away = ""
        if plan.probes is None:
            away = f", or write '{plan.score.method.name}?low=0' to let the other tokens go"
        raise SpecError(f"{names} both choose bits; drop one of them{away}")
    return plan


_FIELDS = ("score", "retrieve", "store", "select", "heads")  # of a plan, behind position
WINDOWED = frozenset({"attn_window", "attn_counted"})  # signals of the last queries
SCORE = "score"  # the signal that a policy of role `heads` reads: what the policy beside it says


def _shared_out(plan: CachePlan, rule: Spec) -> CachePlan:
    """The plan with the score policy whose budget a rule shares out; SpecError where it cannot."""
    name, score = rule.method.name, plan.score
    other = plan.retrieve or plan.select or plan.store
    if other is not None:
        raise SpecError(
            f"{name!r} leaves unlike numbers of entries in the heads of a layer, which "
            f"{other.method.name!r} cannot read; drop one of the two"
        )
    if SCORE not in rule.method.needs:
        if score is not None:
            two = score.method.name
            raise SpecError(f"{name!r} says what heads keep, and so does {two!r}; drop one")
        return plan
    if score is None:
        budget = "" if rule.budget is None else f":{rule.budget}"
        (score,) = parse(f"{rule.knobs.get(SCORE, rule.method.knobs[SCORE])}{budget}", kind="cache")
    elif rule.budget is not None or SCORE in rule.knobs:
        raise SpecError(
            f"{name!r} shares out the budget of {score.method.name!r}; write "
            f"'{score}+{name}'".replace("@kv", "")
        )
    if not score.method.gives_scores:
        choices = [m.name for m in methods("cache") if m.gives_scores]
        raise SpecError(
            f"{name!r} needs scores, which {score.method.name!r} does not tell; choices: "
            + ", ".join(choices)
        )
    if score.knobs.get(EVERY):
        raise SpecError(
            f"knob every={score.knobs[EVERY]} does not go with {name!r}, which acts behind the "
            "prompt; leave one of the two out"
        )
    if score.method.moment == "always":
        raise SpecError(
            f"{name!r} acts behind the prompt, and {score.method.name!r} at every step; use "
            f"'snapkv:0.25+{name}'"
        )
    return replace(plan, score=score, heads=replace(rule, budget=None))


def _check_sinks(plan: CachePlan) -> None:
    """Refuse sinks that follow anything but one window."""
    known = ("original", "new")
    for spec in plan.position:
        given = spec.knobs.get("positions", known[0])
        if given not in known:
            raise SpecError(unknown(f"value of knob 'positions' of '{spec}'", given, known))
        others = [part for part in plan.parts if part is not spec]
        alone = [part.method.name for part in others] == ["window"]
        if given == "new" and not (alone and isinstance(spec.budget, int)):
            raise SpecError(
                f"positions=new of '{plan}' is of a number of sinks before one window; write "
                "'sink:4?positions=new+window:1024'"
            )


def _check_select(plan: CachePlan) -> None:
    """Refuse what does not go with a choice at every decode step."""
    selector, chosen = plan.selector(), plan.select
    if selector is None or chosen is None:
        return
    name, score = chosen.method.name, plan.score
    other = plan.retrieve or plan.store or (score if plan.bits else None)
    if other is not None:
        two = other.method.name
        does = "chooses what is read, too" if plan.retrieve else "unpacks all entries at a step"
        raise SpecError(f"{name!r} reads a part of a plain cache, and {two!r} {does}; drop one")
    if score is not None and plan.position:
        raise SpecError(
            f"{plan.position[0].method.name!r} says what {name!r} always reads, and "
            f"{score.method.name!r} evicts beside it; drop one of the two"
        )
    if score is not None and selector.host and (plan.every or score.method.moment == "always"):
        raise SpecError(
            f"{score.method.name!r} chooses while an answer is written, and {name!r} has all keys "
            f"in host memory; write 'snapkv:0.5+{chosen}'".replace("@kv", "")
        )
    if score is not None and selector.across:
        raise SpecError(
            f"{score.method.name!r} leaves other entries in each layer, and {name!r} reads at the "
            f"places of an earlier one; write '{score}+quest:0.1'".replace("@kv", "")
        )


def _call(spec: Spec) -> Any:
    return spec.method.fn(spec.budget, **{k: v for k, v in spec.knobs.items() if k != EVERY})


def _at_most_one(role: str, specs: Sequence[Spec]) -> None:
    if len(specs) > 1:
        names = " and ".join(repr(spec.method.name) for spec in specs)
        raise SpecError(f"{names} are both of role {role!r}, of which a cache has one; keep one")


def call_plan(text: str | CachePlan | None) -> CachePlan | None:
    """Read the cache spec of `attach`, as `plan_cache`; a plan is returned as it is."""
    plan = text if isinstance(text, CachePlan) else plan_cache(text)
    if plan is not None and plan.retrieve is not None and plan.rechoice:
        raise SpecError(
            f"knob every={plan.rechoice} of {plan.retrieve.method.name!r} acts in sessions "
            "alone, in their memory=; leave it out"
        )
    if plan is not None and plan.retrieve is not None and plan.score is not None:
        names = plan.score.method.name, plan.retrieve.method.name
        raise SpecError(
            f"{names[0]!r} evicts what {names[1]!r} would find again; drop one of them, or keep by "
            "place, such as 'sink:4+window:256+retrieve:8'"
        )
    return plan
