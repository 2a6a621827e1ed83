"""Requests at work on one model: in one batch, or one after the other under `attach`."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from mmfast.caches.plan import CachePlan, call_plan
from mmfast.core.errors import MmfastError, ModelError, SpecError
from mmfast.core.kv import KVBlock
from mmfast.core.spec import Spec, parse
from mmfast.core.trace import Trace
from mmfast.decoding.speculation import BILD, EXIT, DecodePlan, check_kind, plan_decode
from mmfast.models.decoder.draft_stage import check_decode
from mmfast.models.decoder.draft_weights import DraftWeights
from mmfast.models.decoder.sparse_prefill import check_prefill
from mmfast.models.kv.policy import KVStage
from mmfast.models.kv.view import view_plan
from mmfast.models.reduction.call import PassState
from mmfast.models.reduction.check import check, refuse_files
from mmfast.models.reduction.inputs import axes
from mmfast.models.reduction.record import features_given
from mmfast.models.wrappers import CONV, SLIDING
from mmfast.pipelines.planning import PipelinePlanner
from mmfast.planner.auto import say
from mmfast.planner.planner import PlanWarning
from mmfast.prefill.plan import plan_prefill
from mmfast.serve.engine.batch import RunningBatch
from mmfast.serve.engine.checks import AnswerChecks
from mmfast.serve.engine.decode import Chooser, DecodeBatch
from mmfast.serve.engine.drafts import AnswerDrafts
from mmfast.serve.engine.encoder import MediaEncoder, parted
from mmfast.serve.engine.kv.bucket import taken
from mmfast.serve.engine.kv.byte_cache import ByteCache
from mmfast.serve.engine.lane import Lane
from mmfast.serve.engine.model import chunk_work, stated_bytes
from mmfast.serve.engine.policies import attached_row, bound
from mmfast.serve.engine.prefill import CHUNKS, PAUSE, Prefiller
from mmfast.serve.engine.request import ActiveRequest, check_storeless
from mmfast.serve.engine.reuse import ServedReuse
from mmfast.serve.engine.second_model import EarlyExit, LoadedDrafts, SecondModel, WholeRows
from mmfast.serve.engine.sequential import AttachedAnswer, SequentialRunner
from mmfast.serve.engine.slots import Filled


class ModelRunner:
    """All requests at work on one model, and the memory they take.

    At most `slots` requests and `limit` bytes of keys and values, those of finished prompts
    included; `served` gets the payer and the tokens of each piece of work. `batch` is None where
    the model's rows cannot have different lengths in one pass.
    """

    def __init__(
        self,
        encoder: MediaEncoder,
        slots: int,
        chunk: int | None,
        limit: int,
        served: Callable[[str, float], None],
        name: Any,
        reuse: ServedReuse | None = None,
        decode: DecodePlan | None = None,
    ) -> None:
        self.encoder, self.model, self.processor = encoder, encoder.model, encoder.processor
        self._slots, self.limit, self._name = slots, limit, name
        self._chunk = chunk or CHUNKS[0]
        self.chooser = Chooser(self.model)
        self.batch: RunningBatch | None = None
        try:
            lane = Lane(self.model)
            parts = Prefiller(self.model, chunk, lane), DecodeBatch(self.model, slots, lane)
            self.batch = RunningBatch(self.encoder, *parts, limit // 4, served)
            self.per_token = self.batch.per_token
        except ModelError:  # layers whose rows cannot be told apart
            self.per_token = stated_bytes(self.model)
        # what was loaded to draft, by the name of its spec
        self.seconds: dict[str, LoadedDrafts] = {}
        self._drafts = decode
        if self.batch is not None and decode is not None and decode.weights and decode.shares:
            drafts, light = self.batch.decoder.drafts, DraftWeights(self.model, decode.weights)
            drafts.views.weights = light
            drafts.models[""] = WholeRows(self.batch.decoder, light)
        if self.batch is not None and decode is not None and decode.loads:
            check_kind(decode)
            if decode.kind == EXIT:
                made: LoadedDrafts = EarlyExit(decode, self.model, self.batch.decoder)
            else:
                made = SecondModel(decode, self.model, self.chooser, chunk, limit, served)
            self.seconds[decode.model] = made
            self.batch.decoder.drafts.models |= self.seconds
        self.reuse = reuse
        self.sequential = SequentialRunner(self.model, self.chooser, served, self._join, reuse)
        self.checks = AnswerChecks(self.sequential.twin, served)
        self._planner: PipelinePlanner | None = None
        self._prompt_turn = False

    # --- memory -------------------------------------------------------------------------------

    @property
    def answers(self) -> list[ActiveRequest]:
        """All requests at work."""
        return [*(self.batch.answers if self.batch else ()), *self.sequential.answers]

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values of requests at work."""
        return (self.batch.nbytes if self.batch else 0) + self.sequential.nbytes

    def worst(self, more: Sequence[ActiveRequest] = ()) -> int:
        """Return the most tokens that the requests at work, and `more`, may come to hold."""
        waiting = [*self.sequential.answers, *more]
        if self.batch is None:
            return self.checks.held + sum(each.piece + each.reserve for each in waiting)
        waiting += self.batch.coming
        store, views = self.batch.decoder.store, self.batch.decoder.drafts.views.store
        held = views.needed([room for answer in waiting for room in answer.draft_rooms])
        held += -(-store.held_bytes // self.per_token) + self.checks.held
        for model in self.seconds.values():
            held += -(-model.needed([*self.answers, *more]) // self.per_token)
        # Until it is copied to its row, a prompt lies in a tensor of its own.
        return store.needed([a.reserve for a in waiting]) + held + sum(a.piece for a in waiting)

    def check_fits(self, answer: ActiveRequest) -> None:
        """Refuse a request that is too large even alone, naming the bytes needed and available."""
        tokens = taken([answer.reserve]) + taken(answer.draft_rooms) + answer.piece
        bytes_ = tokens * self.per_token
        bytes_ += sum(model.alone(answer.drafts) for model in self.seconds.values())
        if bytes_ > self.limit:
            raise MmfastError(
                f"this request takes {bytes_:,} bytes of keys and values, and "
                f"there are {self.limit:,}; ask for fewer tokens, or give the server more memory"
            )

    def fits(self, answer: ActiveRequest) -> bool:
        """Return True if a request can start now; finished prompts make room.

        Where all slots are taken, a less urgent one is paused for it, whose memory still counts.
        """
        if self.worst([answer]) * self.per_token > self.limit:
            return False
        return self._free or (self.batch is not None and self.batch.pause(answer))

    @property
    def _free(self) -> bool:
        """True while a slot is free; paused requests have none."""
        paused = len(self.batch.paused) if self.batch else 0
        return len(self.answers) - paused < self._slots

    def resume(self, first: ActiveRequest | None) -> None:
        """Go on with paused requests where slots are free; `first` is the next to be begun."""
        while self.batch is not None and self._free and self.batch.resume(first):
            pass

    def _holds(self, tokens: int) -> bool:
        """Return True if there is memory for so many tokens beside all requests at work."""
        return (self.worst() + tokens) * self.per_token <= self.limit

    def gauges(self) -> dict[str, float]:
        """Return the figures for `Health`."""
        kept, prefixes = self.encoder.kept, self.batch.prefixes.held if self.batch else None
        caches: list[ByteCache[Any]] = [kept, *([] if prefixes is None else [prefixes])]
        gaps = [gap for gap, _ in tuple(self.batch.gaps)] if self.batch else []
        return {
            "decode_gap_ms": 1e3 * max(gaps, default=0.0),
            "chunk_ms": 1e3 * (self.batch.pace if self.batch else 0.0),
            "kv_bytes": float(self.nbytes),
            "kv_bytes_limit": float(self.limit),
            "kv_bytes_per_token": float(self.per_token),
            "prefix_bytes": float(prefixes.nbytes if prefixes is not None else 0),
            "encoder_bytes": float(kept.nbytes),
            "cache_hits": float(sum(each.hits for each in caches)),
            "cache_misses": float(sum(each.misses for each in caches)),
            **({} if self.reuse is None else self.reuse.gauges()),
            **self.checks.gauges(),
        }

    # --- start and end of requests ------------------------------------------------------------

    def check(self, answer: ActiveRequest) -> None:
        """Check the specs of a request."""
        plan, specs = call_plan(answer.cache), parse(answer.reduce)
        flash = self.batch is not None and "flash" in self.batch.decoder.lane.name
        if plan is not None and flash and (plan.select or plan.heads):
            raise SpecError(
                f"cache {str(plan)!r} hides entries from heads, which flash attention cannot; use "
                "'snapkv:1024', or start the server with --attn sdpa"
            )
        if plan is not None:
            try:
                KVStage(self.model, plan, Trace(), PassState())
            except ModelError as error:  # the model lacks patterns of heads, or gates
                raise SpecError(str(error)) from error
        if specs:
            refuse_files(specs)
            check(specs, self.model, plan)
        if (sparse := plan_prefill(answer.prefill)) is not None:
            check_prefill(sparse, self.model)
        if (drafts := plan_decode(answer.decode)) is not None:
            lane = None if self.batch is None else self.batch.decoder.lane
            mine = self._drafts  # a second model has no weights for drafts of the model itself
            same = mine is not None and mine.shares == drafts.shares
            own = mine.weights if mine is not None and same else ""
            check_served(drafts, self.model, lane, specs, plan, self.seconds, own)
            if drafts.kind == BILD and answer.sampling.temperature:
                raise SpecError(
                    f"decode={drafts.text!r} takes the likeliest tokens of both models; give "
                    f"temperature 0, or 'draft:{drafts.model}', which draws as the model does"
                )
        if self.reuse is None:
            check_storeless(answer.request.options)
        else:
            self.reuse.check(answer)

    def route(self, answer: ActiveRequest) -> None:
        """Decide how the prompt of a request is read, and what its row will hold."""
        assert answer.prepared is not None
        plan, specs = call_plan(answer.cache), tuple(parse(answer.reduce))
        specs = check(specs, self.model, plan) if specs else ()
        early, deep, inside, whole = parted(specs)
        answer.reuses = self.reuse is not None and self.reuse.acts(answer)
        alone = answer.reuses or _skips_keys(answer) or (plan is not None and plan.asks_model)
        answer.adopt(early, deep, inside, self._decodes(answer) and whole and not alone)
        more = answer.sampling.max_tokens
        answer.piece = answer.prepared.length + self.ahead(answer) + (plan.repeats if plan else 0)
        answer.reserve = bound(plan, answer.piece, more, self.model.dtype.itemsize)
        if (drafts := plan_decode(answer.decode)) is not None:
            answer.drafts = AnswerDrafts(drafts, answer.request.tenant, notes=answer.notes)
            answer.reserve += drafts.widest + 1  # drafts may fall where a window goes on
            if drafts.loads:
                self.seconds[drafts.model].adopt(answer.drafts, answer.prepared, more)
            elif view := served_view(
                drafts, features_given(answer.prepared.inputs), answer.batched
            ):
                answer.prepared = replace(answer.prepared, view=view)
                answer.drafts.room = answer.piece + more + drafts.reach + 1
            elif drafts.views:
                answer.notes.append(NO_VIEW.format(drafts.text))

    def ahead(self, answer: ActiveRequest) -> int:
        """Return how many tokens of modules stand before the question of a request."""
        return 0 if self.reuse is None else self.reuse.ahead(answer)

    def _decodes(self, answer: ActiveRequest) -> bool:
        """Return True if the row of a request can decode with others."""
        plan = call_plan(answer.cache)
        # Such a score is made anew at every step or of what enters a layer, and lost tokens may
        # come back.
        steps = plan is not None and plan.score is not None and plan.score.method.moment == "always"
        steps |= plan is not None and plan.gated and plan.every > 0
        # Sentences end at tokens that a pass of many rows does not know.
        steps |= plan is not None and plan.select is not None and bool(plan.select.method.needs)
        revives = any(spec.method.revives for spec in parse(answer.reduce))
        return self.batch is not None and not steps and not revives

    def start(self, answer: ActiveRequest) -> None:
        """Take a request in; one with a target is planned now."""
        if answer.target:
            try:
                self._plan(answer)
            except Exception as error:
                answer.fail(error)
                return
        if self.batch is not None and answer.batched:
            self.batch.start(answer)
        else:
            self.sequential.start(answer)
        if self.batch is not None:
            self.batch.prefixes.shrink(self.limit - self.worst() * self.per_token)

    def cancel(self, name: str) -> None:
        """Drop a request; its memory is free at once."""
        if self.batch is not None:
            self.batch.cancel(name)
        self.sequential.cancel(name)

    def close(self) -> None:
        """Drop all requests and end the threads of encoders."""
        self.clear()
        self.checks.close()
        self.encoder.slicer.close()
        self.sequential.close()
        for model in self.seconds.values():
            model.close()

    def clear(self) -> list[ActiveRequest]:
        """Drop all requests and return them."""
        self.checks.clear()
        dropped = self.answers
        for answer in dropped:
            self.cancel(answer.id)
        return dropped

    # --- work ---------------------------------------------------------------------------------

    def round(self) -> None:
        """Do one unit of work on prompts, then decode one token of every answer.

        All of it together is less than two chunks of prefill.
        """
        batch, alone = self.batch, self.sequential
        waited = alone.runs or (batch is not None and bool(len(batch.decoder)))
        pace, chunk = (batch.pace, batch.prefiller.chunk) if batch else (PAUSE, self._chunk)
        seconds, work = 0.7 * pace, chunk_work(self.model, chunk)
        if batch is not None:
            batch.waited = waited
        prompts = alone.waits or bool(batch and batch.coming)
        if alone.stopped:  # before any prompt, so that its stream waits for one unit at most
            pass
        elif self.checks.takes(prompts, self._holds):
            self.checks.step(seconds, work)
        elif alone.waits and (self._prompt_turn or not (batch and batch.coming)):
            alone.read(seconds if waited else None, work)
            self._prompt_turn = False
        elif batch is not None:
            batch.unit(waited)
            self._prompt_turn = True
            for model in self.seconds.values():
                if model.urgent or not batch.coming:
                    model.read()
        if batch is not None:
            batch.decode()
        alone.step(seconds, work / 2)  # what steps read again is no more than half a chunk

    @torch.inference_mode()
    def _join(self, own: AttachedAnswer) -> bool:
        """Decode an answer that was read under `attach` with the others, if that is possible."""
        answer, batch = own.answer, self.batch
        if batch is None or not self._decodes(answer):
            return False
        assert own.position is not None
        plan = call_plan(answer.cache)
        more = answer.sampling.max_tokens
        row = attached_row(self.model, batch.decoder.lane, own.cache, plan, more)
        position = axes(self.model, own.position, 1)[:, -1] + 1
        answer.read = own.read_trace(), own.length
        adapter = answer.request.adapter
        filled = Filled(KVBlock(), position, torch.empty(0), 0, own.ids, row, adapter)
        batch.join(answer, filled, own.token)
        return True

    def _plan(self, answer: ActiveRequest) -> None:
        assert answer.prepared is not None
        start, inputs = time.perf_counter(), answer.prepared.inputs
        items = sum(len(media) for media in answer.prepared.media.values())
        if not items:
            answer.reduce = None
            return
        target, raised = answer.target, self.checks.budget(answer)
        with warnings.catch_warnings():  # out of reach: the fastest plan, as documented
            warnings.simplefilter("ignore", PlanWarning)
            given = inputs, [items], target, answer.began
            plan, measuring = self.planner.plan(*given, raised=raised)
        answer.plan_ms = (time.perf_counter() - start) * 1e3 - measuring
        answer.began += measuring / 1e3  # measuring the device happens once, for no request
        answer.reduce = plan.spec
        answer.notes.append(f"plan: {say(plan)}")
        if raised is not None:
            self.checks.keep(answer, plan, raised)
        self.route(answer)

    @property
    def planner(self) -> PipelinePlanner:
        """Made when it is first asked for: most engines never plan."""
        if self._planner is None:
            # The stock call that the planner measures: no cache policy, no encoder of a pipeline.
            pipe = SimpleNamespace(model=self.model, cache=None, encoder=None, run=self._generate)
            self._planner = PipelinePlanner(pipe, self._name)
        return self._planner

    def _generate(self, inputs: dict[str, Any], **extra: Any) -> Any:
        with torch.inference_mode():
            return self.model.generate(**inputs, do_sample=False, **extra)


def _skips_keys(answer: ActiveRequest) -> bool:
    """Return True if sparse prefill may choose in a prompt: it is read in one piece then.

    Chunks would choose each for itself, of keys that came before; layer by layer, under `attach`,
    running answers wait no longer than for a chunk all the same.
    """
    plan, prepared = plan_prefill(answer.prefill), answer.prepared
    if plan is None or plan.whole or prepared is None:
        return False
    return prepared.length >= plan.selector().least


def check_served(
    plan: DecodePlan,
    model: Any,
    lane: Lane | None,
    specs: Sequence[Spec],
    cache: CachePlan | None,
    seconds: Collection[str] = (),
    weights: str = "",
) -> None:
    """Refuse (SpecError, ModelError) drafts that the batch cannot verify, or not beside the rest.

    `lane` is None where the rows of the model cannot be told apart, `seconds` are the second
    models at hand, and `weights` the form in which this server drafts.
    """
    spec = f"decode={plan.text!r}"
    check_kind(plan)
    if lane is None or CONV in lane.kinds:
        raise SpecError(
            f"{spec} takes drafts back, which a batch of {type(model).__name__} cannot: its layers "
            "keep no keys to drop; leave out decode=, or use a pipeline"
        )
    if plan.loads and plan.model not in seconds:  # no request names a file to read
        how = "by an adapter" if plan.kind == EXIT else "from a second prompt"
        raise SpecError(
            f"{spec} drafts {how}, and this server was not started for that; start "
            f"it with --decode {spec[7:]}, or use 'self:0.1', 'recycle' or 'lookup'"
        )
    if plan.weights not in ("", weights):
        raise SpecError(
            f"{spec} drafts on weights that this server does not hold; start it with --decode "
            f"{spec[7:]}, or leave out weights="
        )
    own = plan.kind == EXIT or (plan.shares and not plan.views)
    if own and SLIDING in lane.kinds:
        raise SpecError(
            f"{spec} reads on in the rows of answers, which needs full attention in all layers, "
            f"and {type(model).__name__} has windows; use decode='recycle'"
        )
    check_decode(plan, model, specs, cache)
    if cache is not None and cache.heads is not None:
        raise SpecError(
            f"{spec} takes drafts back, which a row under cache {str(cache)!r} cannot; leave out "
            "decode= (decode='none' where the server has one)"
        )
    if plan.views and cache is not None:
        raise SpecError(
            f"{spec} and cache {str(cache)!r} both choose behind a prompt, of which the server "
            "does one; leave out one of them, or use decode='recycle'"
        )


NO_VIEW = "decode {!r} drafted nothing: no visual keys to leave out; use decode='recycle' for text"


def served_view(plan: DecodePlan, media: Collection[Any], batched: bool) -> CachePlan | None:
    """Return the choice of what the model drafts on; None where that is not a part of its keys.

    `media` are those of the prompt, and `batched` tells if it is read in the batch: else SpecError.
    """
    if not plan.views or not media:
        return None
    if not batched:
        raise SpecError(
            f"decode={plan.text!r} needs a prompt that is read in the batch, which this one is "
            "not, for its reducers, sparse prefill or stored media; use decode='recycle', or leave "
            "them out"
        )
    return view_plan(plan.score, plan.budget)
