"""Media that requests have paid for before, found again at any place of a prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from mmfast.caches.plan import call_plan
from mmfast.core.errors import SpecError
from mmfast.core.spec import Spec, parse
from mmfast.core.trace import Trace
from mmfast.models.reduction.check import check
from mmfast.models.reduction.record import features_given
from mmfast.serve.engine.adapters import adapters_of
from mmfast.serve.engine.request import ActiveRequest
from mmfast.serve.engine.slicer import Slicer
from mmfast.streams.reuse.media import MediaReuse
from mmfast.streams.reuse.plan import ReusePlan, check_beside, parse_reuse
from mmfast.streams.reuse.store import ReuseStore
from mmfast.streams.stream import WeightChecksum

ENCODER, PREFILL = "reuse encoder", "reuse kv"  # rows of a trace


class ServedReuse:
    """Prompts of an engine about media that its store may have.

    Every prompt is read on a twin of the model, one after the other; what one has paid for, the
    next one finds. Values belong to a tenant and an adapter, and no other finds them. `taken` and
    `computed` count tokens of prompts.
    """

    def __init__(self, model: Any, processor: Any, plan: ReusePlan, store: ReuseStore) -> None:
        self.model, self.plan, self.store = model, plan, store
        self._processor, self._weights = processor, WeightChecksum(model)
        self._writer = ThreadPoolExecutor(1, "mmfast-reuse")  # no answer waits for the disk
        self.taken = self.computed = 0

    def check(self, answer: ActiveRequest) -> None:
        """Refuse (MmfastError) a request whose own `reuse` is wrong or does not act."""
        if answer.request.options.reuse is None:
            return
        plan = self._plan(answer)
        if plan.prefix and not self.plan.prefix:
            raise SpecError(
                f"reuse={str(plan)!r}: this server keeps outputs of the vision tower alone; give "
                "'encoder', or leave it out"
            )
        check_beside(plan, answer.reduce, call_plan(answer.cache), prefill=answer.prefill)

    def acts(self, answer: ActiveRequest) -> bool:
        """Return True if the prompt of a request is read here: it has media, and specs fit."""
        prepared = answer.prepared
        if prepared is None or not features_given(prepared.inputs):
            return False
        try:
            mine = answer.reduce, call_plan(answer.cache)
            check_beside(self._plan(answer), *mine, prefill=answer.prefill)
        except SpecError:  # of this request alone, which is read as without a store
            return False
        return True

    def on(self, model: Any, slicer: Slicer) -> MediaReuse:
        """Return the reuse on a twin, whose calls run in slices.

        ModelError: keys and values of the model cannot be moved.
        """
        store: Any = _WholeCalls(self.store, slicer)
        weights: Any = _WholeCalls(self._weights, slicer)
        media = MediaReuse(model, self._processor, self.plan, store, weights)
        media.fingerprint()  # here, since computing a part of it holds a lock, too
        return media

    def behind(self, answer: ActiveRequest) -> list[Spec]:
        """Return the stages of a request that are left to act inside the model."""
        return (
            [] if self._plan(answer).prefix else [s for s in self._specs(answer) if s.site != "vit"]
        )

    def inputs(self, media: MediaReuse, answer: ActiveRequest, trace: Trace) -> dict[str, Any]:
        """Return the inputs of the model for a request, with all that is reused."""
        assert answer.prepared is not None
        request, known = answer.request, adapters_of(self.model)
        key = known.keys.get(request.adapter or "", "")
        tower = key if request.adapter in known.visual else ""
        specs = self._specs(answer)
        media.plan = self._plan(answer)
        given = media.encoded(answer.prepared.inputs, specs, None, trace, _owner(request, tower))
        if media.plan.prefix:
            given = media.prompt(given, specs, trace, _owner(request, key))
        rows = {row.stage: row for row in trace.rows}
        counted = rows.get(PREFILL, rows[ENCODER])
        self.taken += counted.tokens_in - counted.tokens_out
        self.computed += counted.tokens_out
        both = (rows[stage] for stage in (ENCODER, PREFILL) if stage in rows)
        answer.cached = max(row.tokens_in - row.tokens_out for row in both)
        self._writer.submit(self.store.flush)
        return given

    def _plan(self, answer: ActiveRequest) -> ReusePlan:
        return parse_reuse(answer.request.options.reuse) or self.plan

    def _specs(self, answer: ActiveRequest) -> Sequence[Spec]:
        specs = parse(answer.reduce)
        return check(specs, self.model, call_plan(answer.cache)) if specs else ()

    def gauges(self) -> dict[str, float]:
        """Return figures for `Health`: finds of the store, its bytes, and tokens of prompts."""
        return {
            "reuse_hits": float(self.store.hits),
            "reuse_misses": float(self.store.misses),
            "reuse_bytes": float(self.store.nbytes),
            "reuse_tokens": float(self.taken),
            "reuse_computed_tokens": float(self.computed),
        }

    def close(self) -> None:
        """Write what is not on disk yet."""
        self._writer.shutdown()


def _owner(request: Any, adapter: str) -> str:
    """Name of a tenant and an adapter; "" is everyone, as in a pipeline."""
    nobody = request.tenant in ("", "/")  # neither a key nor a user
    return "" if nobody and not adapter else repr((request.tenant, adapter))


class _WholeCalls:
    """Methods of an object that hold a lock, in calls that may stop at any function of torch."""

    def __init__(self, target: Any, slicer: Slicer) -> None:
        self._target, self._slicer = target, slicer

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._target, name)
        return partial(self._call, found) if callable(found) else found

    def _call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._slicer.whole():
            return method(*args, **kwargs)
