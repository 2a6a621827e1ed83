"""Requests at work on one model: in one batch, or one after the other under `attach`."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from mmfast.attach import attach
from mmfast.caches.plan import call_plan, served_plan
from mmfast.core.errors import MmfastError, ModelError, SpecError
from mmfast.core.kv import KVBlock
from mmfast.core.spec import parse
from mmfast.core.trace import Trace
from mmfast.decoding.speculation import EXIT, DecodePlan, check_kind, plan_decode
from mmfast.models.cache_name import CACHE
from mmfast.models.decoder.sparse_prefill import check_prefill
from mmfast.models.families.adapter import adapter_for, token_counts
from mmfast.models.loading import twin_model
from mmfast.models.reduction.check import check, refuse_files
from mmfast.models.reduction.inputs import axes, positions_of
from mmfast.models.reduction.record import features_given
from mmfast.pipelines.planning import PipelinePlanner
from mmfast.planner.planner import PlanWarning
from mmfast.planner.target import make_target
from mmfast.prefill.plan import plan_prefill
from mmfast.serve.engine.adapters import using
from mmfast.serve.engine.batch import RunningBatch
from mmfast.serve.engine.decode import Chooser, DecodeBatch
from mmfast.serve.engine.drafts import NO_VIEW, AnswerDrafts, check_served, served_view
from mmfast.serve.engine.encoder import MediaEncoder, kept_tokens, parted
from mmfast.serve.engine.kv.bucket import taken
from mmfast.serve.engine.kv.rows import layer_bytes
from mmfast.serve.engine.lane import Lane
from mmfast.serve.engine.media import ByteCache
from mmfast.serve.engine.model import chunk_work, stated_bytes
from mmfast.serve.engine.policies import attached_row, bound
from mmfast.serve.engine.prefill import CHUNKS, PAUSE, Prefiller
from mmfast.serve.engine.request import ActiveRequest, check_storeless
from mmfast.serve.engine.reuse import PREFILL, ServedReuse
from mmfast.serve.engine.second_model import EarlyExit, LoadedDrafts, SecondModel
from mmfast.serve.engine.slicer import Slicer
from mmfast.serve.engine.slots import Draw, Filled


class AttachedAnswer:
    """An answer whose prompt is read under `attach`."""

    def __init__(self, answer: ActiveRequest) -> None:
        self.answer = answer
        self.place: _Workplace | None = None
        self.call: Generator[None, None, Tensor] | None = None  # a pass that is under way
        self.cache: Any = None
        self.position: Tensor | None = None  # [1 or 3 or 4, 1, 1] of the last token
        self.token = 0
        self.count = 0
        self.ids: Tensor | None = None  # of the prompt
        self.seen: Tensor | None = None  # distinct ids, if a penalty counts them
        self.trace = Trace()
        self.visual = 0  # tokens before reduction
        self.ms, self.length = 0.0, 0  # milliseconds of the processor, and tokens of the prompt

    def read_trace(self) -> dict[str, Any]:
        """Return the entries of the trace."""
        trace = Trace()
        trace.add("read", 0, self.length, self.ms)
        self.trace.rows.insert(0, trace.rows[0])
        facts = {"visual_tokens": self.visual, "kept_tokens": kept_tokens(self.visual, self.trace)}
        return {**self.trace.to_dict(), **facts, "prompt": self.length}


class _Workplace:
    """A twin of the model for one answer at a time, whose hooks no other pass meets."""

    def __init__(self, model: Any, reuse: ServedReuse | None) -> None:
        self.model, self.slicer = twin_model(model), Slicer()
        self.media = None if reuse is None else reuse.on(self.model, self.slicer)


class SequentialRunner:
    """Runs prompts under `attach`, and the answers that cannot decode with others step by step.

    Each answer runs on a twin of the model, attached during a pass only, and its state between two
    passes is in its cache. A pass stops when it has done as much as a chunk of prefill, whatever
    the prompt and the spec; other answers decode meanwhile. After its first token an answer that
    `join` takes is over here. `reuse` has media that requests have paid for before.
    """

    def __init__(
        self,
        model: Any,
        chooser: Chooser,
        served: Callable[[str, float], None],
        join: Callable[[AttachedAnswer], bool],
        reuse: ServedReuse | None = None,
    ) -> None:
        # never runs: a copy of a model at work would hold hooks of its pass
        self._origin = twin_model(model)
        self._chooser, self._served, self._join = chooser, served, join
        self._own: dict[str, AttachedAnswer] = {}
        self._places: list[_Workplace] = []
        self._reuse = reuse
        if reuse is not None:  # a model that it does not fit is refused now
            self._places.append(_Workplace(self._origin, reuse))

    @property
    def answers(self) -> list[ActiveRequest]:
        """All requests at work."""
        return [own.answer for own in list(self._own.values())]  # any thread may ask for health

    def start(self, answer: ActiveRequest) -> None:
        """Take a request in."""
        self._own[answer.id] = AttachedAnswer(answer)

    def cancel(self, name: str) -> None:
        """Drop a request; its memory is free at once."""
        own = self._own.pop(name, None)
        if own is not None and own.place is not None:
            if own.call is not None:
                own.call.close()
            self._places.append(own.place)
            own.place = own.call = None

    def close(self) -> None:
        """End the threads; no request is at work."""
        for place in self._places:
            place.slicer.close()
        if self._reuse is not None:
            self._reuse.close()

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        mine = list(self._own.values())
        layers = (x for own in mine if own.cache for x in list(own.cache.layers))
        return sum(layer_bytes(layer) for layer in layers)

    @property
    def waits(self) -> bool:
        """True while a prompt is still to be read."""
        return any(own.count == 0 for own in list(self._own.values()))

    @property
    def runs(self) -> bool:
        """True while an answer is being written."""
        return any(own.count for own in list(self._own.values()))

    @property
    def stopped(self) -> bool:
        """True while a step is under way, which has stopped as it reads much again."""
        return any(own.count and own.call is not None for own in list(self._own.values()))

    def read(self, budget: float | None, work: float) -> None:
        """Read a slice of the next prompt, of so many seconds and multiplications at most."""
        left = [own for own in self._own.values() if own.count == 0]
        own = max(left, key=lambda each: (each.answer.priority, each.call is not None))
        self._advance(own, budget, work)

    def step(self, budget: float, work: float) -> None:
        """Decode a token of every answer that is being written, in slices of a pass that is large.

        Answers that the slices of others left no room are the first the next time.
        """
        left = work
        for name in [name for name, own in self._own.items() if own.count]:
            if left <= 0:
                return
            own = self._own[name] = self._own.pop(name)  # to the end of the queue
            left -= self._advance(own, budget, left)

    def _advance(self, own: AttachedAnswer, budget: float | None, work: float) -> float:
        """Go on with the pass of an answer; return the multiplications done."""
        if own.place is None:
            held = self._places
            own.place = held.pop() if held else _Workplace(self._origin, self._reuse)
        slicer = own.place.slicer
        slicer.allow(budget, work)
        if own.call is None:
            blocks = self._blocks(own.answer, own.place.model) if own.count == 0 else []
            own.call = slicer.run(partial(self._logits, own, own.place.model), blocks)
        try:
            next(own.call)
        except StopIteration as end:
            own.call = None
            self._push(own, end.value)
        except Exception as error:
            own.call = None
            self._fail(own, error)
        return slicer.done

    def _push(self, own: AttachedAnswer, logits: Tensor) -> None:
        name, prompts = own.answer.id, own.count == 0
        try:
            token = self._chosen(own, logits)
            if not own.answer.push(token):
                self.cancel(name)
                own.answer.read = own.read_trace(), own.length
                own.answer.complete()
            elif prompts and self._join(own):
                self.cancel(name)
        except Exception as error:
            self._fail(own, error)

    def _fail(self, own: AttachedAnswer, error: Exception) -> None:
        self.cancel(own.answer.id)
        own.answer.fail(error)

    def _blocks(self, answer: ActiveRequest, model: Any) -> list[Any]:
        """Layers before which the call on a prompt can stop."""
        prepared, base = answer.prepared, model.base_model
        kinds = [] if prepared is None else list(features_given(prepared.inputs))
        towers = [adapter_for(model).tower_of(base, kind).blocks for kind in kinds]
        return [*model.get_decoder().layers, *(block for mine in towers for block in mine)]

    @torch.inference_mode()
    def _logits(self, own: AttachedAnswer, model: Any) -> Tensor:
        answer = own.answer
        start = time.perf_counter()
        try:
            adapter, reduce = answer.request.adapter, answer.reduce  # type: Any, Any
            if answer.reuses and self._reuse is not None:
                reduce = self._reuse.behind(answer)
            sparse = answer.prefill if own.cache is None else None
            with using((adapter,)), attach(model, reduce, answer.cache, prefill=sparse) as trace:
                own.trace = trace if own.cache is None else own.trace
                logits = (self._prompt if own.cache is None else self._token)(own, model)
        except ModelError as error:
            if not (answer.reduce or answer.cache or answer.prefill):
                raise
            raise SpecError(str(error)) from error  # specs that do not fit this model or prompt
        if not own.count:
            answer.prefill_ms = (time.perf_counter() - start) * 1e3
        return logits

    @torch.inference_mode()
    def _chosen(self, own: AttachedAnswer, logits: Tensor) -> int:
        draw = Draw(own.answer.sampling, own.count)
        (token,) = self._chooser.choose(logits[:, -1].float(), [draw], [own.seen])
        if isinstance(token, Exception):
            raise token
        own.token, own.count = token, own.count + 1
        if own.seen is not None and self._chooser.penalty != 1:
            own.seen = torch.cat([own.seen, own.seen.new_tensor([token])]).unique()
        return token

    def _prompt(self, own: AttachedAnswer, model: Any) -> Tensor:
        prepared = own.answer.prepared
        assert prepared is not None
        stock, given = prepared.inputs, self._given(own)
        ids, counted = stock["input_ids"], [int(given["input_ids"].shape[1])]
        positions = positions_of(model, given)
        own.position = positions[..., -1:]
        cache = given.pop(CACHE, None) or DynamicCache(config=model.config.get_text_config())
        if own.answer.modules is not None:
            ids = given["input_ids"]
        own.ids, own.seen = ids[0], self._chooser.seen(ids[0], own.answer.sampling)
        if read := cache.get_seq_length():  # all but the last token
            given = {"input_ids": given["input_ids"][:, read:]}
            positions = positions[..., read:]
            counted = [row.tokens_out for row in own.trace.rows if row.stage == PREFILL]
        self._served(own.answer.payer, sum(counted))
        own.cache = cache
        found: Tensor = model(
            **{**given, "position_ids": positions, CACHE: cache}, use_cache=True
        ).logits
        counts = (token_counts(model, k, stock, Trace()) for k in features_given(stock))
        own.visual = sum(n for pairs in counts for n, _ in pairs)
        own.ms, own.length = prepared.ms, prepared.length
        if own.answer.modules is not None:
            own.length = len(own.ids)
        own.answer.prepared = None  # pixels are not kept for the time of an answer
        return found

    def _given(self, own: AttachedAnswer) -> dict[str, Any]:
        """Return the inputs of the model, with what the store has of their media."""
        answer, place = own.answer, own.place
        assert answer.prepared is not None and place is not None
        if self._reuse is None or place.media is None or not answer.reuses:
            return dict(answer.prepared.inputs)
        return self._reuse.inputs(place.media, answer, own.trace)

    def _token(self, own: AttachedAnswer, model: Any) -> Tensor:
        assert own.position is not None
        own.position = own.position + 1
        self._served(own.answer.payer, 1)
        found: Tensor = model(
            input_ids=torch.tensor([[own.token]], device=own.position.device),
            position_ids=own.position,
            **{CACHE: own.cache},
            use_cache=True,
        ).logits
        return found


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
            return sum(answer.piece + answer.reserve for answer in waiting)
        waiting += self.batch.coming
        store, views = self.batch.decoder.store, self.batch.decoder.drafts.views.store
        held = views.needed([room for answer in waiting for room in answer.draft_rooms])
        held += -(-store.held_bytes // self.per_token)
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
        }

    # --- start and end of requests ------------------------------------------------------------

    def check(self, answer: ActiveRequest) -> None:
        """Check the specs and the latency target of a request."""
        plan, specs = served_plan(answer.cache), parse(answer.reduce)
        if specs:
            refuse_files(specs)
            check(specs, self.model, plan)
        if (sparse := plan_prefill(answer.prefill)) is not None:
            check_prefill(sparse, self.model)
        if (drafts := plan_decode(answer.decode)) is not None:
            lane = None if self.batch is None else self.batch.decoder.lane
            check_served(drafts, self.model, lane, specs, plan, self.seconds)
        if answer.target is not None:
            make_target(target_ttft_ms=answer.target)
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
        alone = answer.reuses or _skips_keys(answer)
        answer.adopt(early, deep, inside, self._decodes(answer) and whole and not alone)
        more = answer.sampling.max_tokens
        answer.piece = answer.prepared.length + self.ahead(answer)
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
        # Such a score is made anew at every step, and lost tokens may come back.
        steps = plan is not None and plan.score is not None and plan.score.method.moment == "always"
        revives = any(spec.method.revives for spec in parse(answer.reduce))
        return self.batch is not None and not steps and not revives

    def start(self, answer: ActiveRequest) -> None:
        """Take a request in; one with a latency target is planned now."""
        if answer.target is not None:
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
        self.encoder.slicer.close()
        self.sequential.close()
        for model in self.seconds.values():
            model.close()

    def clear(self) -> list[ActiveRequest]:
        """Drop all requests and return them."""
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
        if alone.stopped:  # before any prompt, so that its stream waits for one unit at most
            pass
        elif alone.waits and (self._prompt_turn or not (batch and batch.coming)):
            alone.read(seconds if waited else None, work)
            self._prompt_turn = False
        elif batch is not None:
            batch.unit(waited)
            self._prompt_turn = True
            for model in self.seconds.values() if not batch.coming else ():
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
        target = make_target(target_ttft_ms=answer.target)
        if not items:
            answer.reduce = None
            return
        if self._planner is None:
            # The stock call that the planner measures: no cache policy, no encoder of a pipeline.
            pipe = SimpleNamespace(model=self.model, cache=None, encoder=None, run=self._generate)
            self._planner = PipelinePlanner(pipe, self._name)
        with warnings.catch_warnings():  # out of reach: the fastest plan, as documented
            warnings.simplefilter("ignore", PlanWarning)
            plan, measuring = self._planner.plan(inputs, [items], target, answer.began)
        answer.plan_ms = (time.perf_counter() - start) * 1e3 - measuring
        answer.began += measuring / 1e3  # measuring the device happens once, for no request
        answer.reduce = plan.spec
        self.route(answer)

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
