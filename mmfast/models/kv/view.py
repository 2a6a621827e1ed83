"""Part of the keys and values of a prompt, on which the same model drafts.

The draft reads all text and separators, and of the visual entries those that a score chooses, layer
by layer and head by head. It gets no prompt of its own: its cache is cut from the model's, and what
the model has verified since is taken over at every pass.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from mmfast.caches.plan import CachePlan, plan_cache
from mmfast.core.errors import SpecError
from mmfast.core.reduction import Reduction
from mmfast.core.registry import Method
from mmfast.core.spec import Budget, Spec, count
from mmfast.core.tokens import Tokens
from mmfast.core.trace import Trace
from mmfast.models.decoder.reader import refuse_uncroppable
from mmfast.models.decoder.rotary import Angles
from mmfast.models.kv import notes
from mmfast.models.kv.eviction import Eviction
from mmfast.models.kv.patterns import SIGNALS
from mmfast.models.kv.policy import KVStage
from mmfast.models.reduction.cache_layers import shorten
from mmfast.models.reduction.call import PassState, is_static
from mmfast.models.reduction.sequence import Sequences
from mmfast.ops.eviction import evict_beside, pooled_votes
from mmfast.ops.ranking import stable_topk


def _attention(tokens: Tokens, budget: int, *, window: int = 32, kernel: int = 7) -> Reduction:
    """Keep what the last `window` queries of the prompt attend to, neighbours included.

    The votes of SnapKV (arXiv 2404.14469) without its window, which is text and stays anyway.
    """
    votes = pooled_votes(tokens.need("attn_window"), kernel, "max")
    return Reduction.prune(stable_topk(votes, budget), tokens.n)


_SCORE = Method(
    "attention",
    "cache",
    "2404.14469",
    ("attn_window",),
    "Attention of the last tokens.",
    _attention,
    sites=("kv",),
    role="score",
    knobs={"window": 32, "kernel": 7},
)


@dataclass(frozen=True)
class ViewPlan(CachePlan):
    """Plan that keeps what is no visual content, and of that a budget by its score."""

    def standing(self, kind: Tensor) -> Tensor:
        """Mark all but visual content, `[..., N]`."""
        return kind != notes.VISUAL

    def reduce(self, tokens: Tokens) -> Reduction:
        """Choose among the visual entries alone: a share is of those."""
        assert self.score is not None
        stands = self.standing(tokens.need("kind"))
        visual = int((~stands).sum())
        if not visual:
            return Reduction.identity(tokens.n, tuple(tokens.x.shape[:-2]), tokens.x.device)
        budget = self.score.budget
        if isinstance(budget, float):
            budget = count(budget, visual)
        return evict_beside(stands, tokens, replace(self.score, budget=budget))


def view_plan(score: str, budget: Budget) -> ViewPlan:
    """Plan of the keys and values that a draft reads; SpecError where a policy cannot choose."""
    if score == _SCORE.name:
        return ViewPlan(score=Spec(_SCORE, "kv", None, budget))
    plan = plan_cache(f"{score}:{budget}")
    assert plan is not None
    if SIGNALS & set(plan.needs) or plan.heads is not None:
        raise SpecError(
            f"decode 'self' cannot choose by {score!r}, which reads or parts the heads of a model; "
            "use 'attention' or 'snapkv'"
        )
    reads = plan.future or plan.mutual or plan.repeats or plan.vision or plan.gated
    if plan.every or plan.bits or reads or plan.score is None:
        raise SpecError(
            f"decode 'self' cannot choose by {score!r}, which does more than to choose behind a "
            "prompt; use 'attention' or 'snapkv'"
        )
    return ViewPlan(score=plan.score)


@dataclass
class ViewNotes:
    """Notes on the entries of one layer, beside the layer itself; a policy had `evicted` others."""

    keys: Tensor
    evicted: int = 0
    notes: dict[str, Tensor] | None = None
    gone: int = 0
    extra: int = 0
    is_initialized: bool = True


class ViewStage(KVStage):
    """A stage that chooses behind every prompt what a draft reads, and evicts nothing."""

    _first = True

    def __init__(self, model: Any, plan: ViewPlan, state: PassState) -> None:
        super().__init__(model, plan, Trace(), state)
        self._sides: weakref.WeakKeyDictionary[Any, dict[int, ViewNotes]] = (
            weakref.WeakKeyDictionary()
        )
        self._views: weakref.WeakKeyDictionary[Any, Cache] = weakref.WeakKeyDictionary()

    def arrive(
        self,
        cache: Any,
        index: int,
        sequences: Sequences,
        masses: Mapping[str, Tensor],
        raw: tuple[Tensor, Tensor] | None,
        past: Tensor | None = None,
        turned: Angles | None = None,
    ) -> None:
        """Note what a part of a prompt has stored in a layer, beside the layer."""
        layer = cache.layers[index]
        sides = self._sides.setdefault(cache, {})
        if not sides and is_static(cache):  # others are asked when they record what goes
            refuse_uncroppable(cache, self._model)
        side: Any = sides.get(index)
        gone = getattr(layer, "gone", 0)
        if side is None or side.evicted != gone:  # what is left counts as text
            side = sides[index] = ViewNotes(layer.keys, evicted=gone)
            before = layer.keys.shape[2] - sequences.length
            notes.begin(side, before, past, len(layer.keys))
        side.keys = layer.keys
        notes.arrive(side, notes.kinds_of(sequences))
        notes.add_masses(side, masses)

    def prompt_ends(self, cache: Any, index: int, drafts: int = 0) -> None:
        """Choose what the draft reads of a layer."""
        view = self._views.get(cache)
        if view is None or len(view.layers) > index:
            view = self._views[cache] = Cache(layers=[])
        for layer in cache.layers[len(view.layers) : index + 1]:
            view.layers.append(_shared(layer))
        mine = shorten(view, index)
        side = self._sides[cache][index]
        mine.notes = dict(side.notes or {})
        notes.remember_basis(mine)
        self._eviction.prompt_ends(view, index, drafts)
        assert side.notes is not None
        side.notes = {k: v for k, v in side.notes.items() if k != notes.WINDOW}
        mine.notes = None

    def choose_by(self, plan: ViewPlan) -> None:
        """Let another plan of the same score choose from the next prompt on."""
        self.plan, self._eviction = plan, Eviction(plan, self._state, self._modules)

    def view(self, cache: Any) -> CacheView:
        """Return what a draft reads of a cache whose prompt has just ended."""
        return CacheView(cache, self._views.pop(cache, None))


class CacheView:
    """The cache of a draft, which follows the cache that it is a part of."""

    def __init__(self, whole: Any, part: Any = None) -> None:
        self._whole = whole
        self.cache = Cache(layers=[_shared(layer) for layer in whole.layers])
        self._chosen: dict[int, tuple[Tensor, Tensor, int]] = {}
        for index, layer in enumerate(part.layers if part is not None else ()):
            if layer.__dict__.get("chosen") is None or not hasattr(layer, "keys"):
                continue
            self.cache.layers[index] = layer
            start = whole.layers[index].keys.shape[2]
            self._chosen[index] = layer.keys, layer.values, start

    def sync(self) -> None:
        """Take over what the whole cache holds behind the prompt, and drop drafts."""
        for index, layer in enumerate(self._whole.layers):
            mine = self.cache.layers[index]
            if index not in self._chosen:
                mine.__dict__.update(_shared(layer).__dict__)
                continue
            keys, values, start = self._chosen[index]
            mine.keys = torch.cat([keys, layer.keys[:, :, start:]], dim=2)
            mine.values = torch.cat([values, layer.values[:, :, start:]], dim=2)

    @property
    def entries(self) -> tuple[int, int]:
        """Entries of the chosen layers that the draft reads behind the prompt, and of the whole."""
        pairs = [(k.shape[2], start) for k, _, start in self._chosen.values()]
        return sum(a for a, _ in pairs), sum(b for _, b in pairs)


def _shared(layer: Any) -> Any:
    """The same tensors in a layer of its own; drafts replace them and write into none."""
    found = copy.copy(layer)
    for name, value in vars(layer).items():
        if isinstance(value, dict):
            setattr(found, name, dict(value))
    return found
