"""Requests at work on one model: in one batch, or one after the other under `attach`."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from mmfast.attach import attach
from mmfast.caches.plan import call_plan
from mmfast.core.errors import MmfastError, ModelError, SpecError
from mmfast.core.spec import parse
from mmfast.core.trace import Trace
from mmfast.models.families.adapter import token_counts
from mmfast.models.reduction.check import check
from mmfast.models.reduction.record import features_given
from mmfast.pipelines.planning import PipelinePlanner
from mmfast.planner.planner import PlanWarning
from mmfast.planner.target import make_target
from mmfast.serve.engine.batch import RunningBatch
from mmfast.serve.engine.decode import Chooser, DecodeBatch
from mmfast.serve.engine.encoder import MediaEncoder, early, kept_tokens
from mmfast.serve.engine.media import ByteCache
from mmfast.serve.engine.prefill import Prefiller
from mmfast.serve.engine.request import ActiveRequest
from mmfast.serve.engine.slots import CacheSlots, Draw


class _AttachedAnswer:
    def __init__(self, answer: ActiveRequest) -> None:
        self.answer = answer
        self.cache: Any = None
        self.position: Tensor | None = None  # [1 or 3 or 4, 1, 1] of the last token
        self.token = 0
        self.count = 0
        self.seen: Tensor | None = None
        self.trace = Trace()
        self.visual = 0  # tokens before reduction
        self.read = 0.0, 0  # milliseconds of the processor, and tokens of the prompt


class SequentialRunner:
    """Runs answers under `attach`, one step of one answer at a time.

    The hooks are attached during a step only, so no other request meets them; the state between two
    steps is in the answer's cache.
    """

    def __init__(self, model: Any, chooser: Chooser, served: Callable[[str, float], None]) -> None:
        self._model, self._chooser, self._served = model, chooser, served
        self._own: dict[str, _AttachedAnswer] = {}

    @property
    def answers(self) -> list[ActiveRequest]:
        """All requests at work."""
        return [own.answer for own in list(self._own.values())]  # any thread may ask for health

    def start(self, answer: ActiveRequest) -> None:
        """Take a request in."""
        self._own[answer.id] = _AttachedAnswer(answer)

    def cancel(self, name: str) -> None:
        """Drop a request; its memory is free at once."""
        self._own.pop(name, None)

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        mine = list(self._own.values())
        layers = (x for own in mine if own.cache for x in list(own.cache.layers))
        return sum(_layer_bytes(layer) for layer in layers)

    @property
    def waits(self) -> bool:
        """True while a prompt is still to be read."""
        return any(own.cache is None for own in list(self._own.values()))

    def step(self, prompts: bool) -> None:
        """Read a prompt, or decode a token, of the next answer in turn; see `prompts`."""
        own = next((o for o in self._own.values() if (o.cache is None) == prompts), None)
        if own is None:
            return
        name = own.answer.id
        self._own[name] = self._own.pop(name)  # to the end of the queue
        try:
            with torch.inference_mode():
                token = self._next(own)
            if not own.answer.push(token):
                del self._own[name]
                self._finish(own)
        except Exception as error:
            self._own.pop(name, None)
            own.answer.fail(error)

    def _next(self, own: _AttachedAnswer) -> int:
        answer = own.answer
        start = time.perf_counter()
        try:
            with attach(self._model, answer.reduce, answer.cache) as trace:
                logits = self._prompt(own) if own.cache is None else self._token(own)
        except ModelError as error:
            if not (answer.reduce or answer.cache):
                raise
            raise SpecError(str(error)) from error  # specs that do not fit this model or prompt
        if not own.count:
            own.trace = trace
            answer.prefill_ms = (time.perf_counter() - start) * 1e3
        draw = Draw(answer.sampling, own.count)
        (token,) = self._chooser.choose(logits[:, -1].float(), [draw], [own.seen])
        if isinstance(token, Exception):
            raise token
        own.token, own.count = token, own.count + 1
        if own.seen is not None and self._chooser.penalty != 1:
            own.seen = torch.cat([own.seen, own.seen.new_tensor([token])]).unique()
        return token

    def _prompt(self, own: _AttachedAnswer) -> Tensor:
        prepared = own.answer.prepared
        assert prepared is not None
        inputs, model = dict(prepared.inputs), self._model
        ids = inputs["input_ids"]
        positions = model._prepare_position_ids_for_generation(ids, dict(inputs))
        own.position = positions[..., -1:]
        own.cache = DynamicCache(config=model.config.get_text_config())
        own.seen = ids[0].unique()
        self._served(own.answer.payer, ids.shape[1])
        found: Tensor = model(
            **inputs, position_ids=positions, past_key_values=own.cache, use_cache=True
        ).logits
        counts = (token_counts(model, k, inputs, Trace()) for k in features_given(inputs))
        own.visual = sum(n for pairs in counts for n, _ in pairs)
        own.read = prepared.ms, prepared.length
        own.answer.prepared = None  # pixels are not kept for the time of an answer
        return found

    def _token(self, own: _AttachedAnswer) -> Tensor:
        assert own.position is not None
        own.position = own.position + 1
        self._served(own.answer.payer, 1)
        found: Tensor = self._model(
            input_ids=torch.tensor([[own.token]], device=own.position.device),
            position_ids=own.position,
            past_key_values=own.cache,
            use_cache=True,
        ).logits
        return found

    def _finish(self, own: _AttachedAnswer) -> None:
        answer, (ms, length) = own.answer, own.read
        trace = Trace()
        trace.add("read", 0, length, ms)
        own.trace.rows.insert(0, trace.rows[0])
        facts = {"visual_tokens": own.visual, "kept_tokens": kept_tokens(own.visual, own.trace)}
        answer.read = {**own.trace.to_dict(), **facts, "prompt": length}, length
        answer.complete()


def _layer_bytes(layer: Any) -> int:
    known = getattr(layer, "nbytes", None)
    if isinstance(known, int):
        return known
    both = (getattr(layer, "keys", None), getattr(layer, "values", None))
    return sum(each.nbytes for each in both if isinstance(each, Tensor))


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
        chunk: int,
        limit: int,
        served: Callable[[str, float], None],
        name: Any,
    ) -> None:
        self.encoder, self.model, self.processor = encoder, encoder.model, encoder.processor
        self._slots, self.limit, self._name = slots, limit, name
        self.chooser = Chooser(self.model)
        self.sequential = SequentialRunner(self.model, self.chooser, served)
        self.batch: RunningBatch | None = None
        try:
            parts = Prefiller(self.model, chunk), DecodeBatch(self.model, slots)
            self.batch = RunningBatch(self.encoder, *parts, limit // 4, served)
            self.per_token = self.batch.per_token
        except ModelError:  # sliding windows, convolutions, images that attend forward
            self.per_token = _stated_bytes(self.model)
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
        mine = [answer for answer in more if self.batched(answer)]
        own = [*self.sequential.answers, *(answer for answer in more if not self.batched(answer))]
        rows = pieces = 0
        if self.batch is not None:
            waiting = [*self.batch.coming, *mine]
            rows = self.batch.decoder.slots.needed([answer.reserve for answer in waiting])
            # Until it is copied to its row, a prompt lies in a tensor of its own.
            pieces = sum(answer.reserve - answer.sampling.max_tokens for answer in waiting)
        return rows + pieces + sum(answer.reserve for answer in own)

    def check_fits(self, answer: ActiveRequest) -> None:
        """Refuse a request that is too large even alone, naming the bytes needed and available."""
        tokens = answer.reserve
        if self.batched(answer):
            rows, room = CacheSlots(0, self._slots).shape([answer.reserve])
            tokens = rows * room + answer.reserve - answer.sampling.max_tokens
        if tokens * self.per_token > self.limit:
            raise MmfastError(
                f"this request takes {tokens * self.per_token:,} bytes of keys and values, and "
                f"there are {self.limit:,}; ask for fewer tokens, or give the server more memory"
            )

    def fits(self, answer: ActiveRequest) -> bool:
        """Return True if a request can start now; finished prompts make room."""
        if len(self.answers) >= self._slots:
            return False
        return self.worst([answer]) * self.per_token <= self.limit

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
        }

    # --- start and end of requests ------------------------------------------------------------

    def check(self, answer: ActiveRequest) -> None:
        """Check the specs and the latency target of a request."""
        plan, specs = call_plan(answer.cache), parse(answer.reduce)
        if not early(specs):
            check(specs, self.model, plan)
        if answer.target is not None:
            make_target(target_ttft_ms=answer.target)

    def batched(self, answer: ActiveRequest) -> bool:
        """Return True if a request runs in the batch."""
        return self.batch is not None and not answer.cache and early(answer.reduce)

    def start(self, answer: ActiveRequest) -> None:
        """Take a request in; one with a latency target is planned now."""
        if answer.target is not None:
            try:
                self._plan(answer)
            except Exception as error:
                answer.fail(error)
                return
        if self.batch is not None and self.batched(answer):
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

    def clear(self) -> list[ActiveRequest]:
        """Drop all requests and return them."""
        dropped = self.answers
        for answer in dropped:
            self.cancel(answer.id)
        return dropped

    # --- work ---------------------------------------------------------------------------------

    def round(self) -> None:
        """Do one unit of work on prompts, then decode one token of every answer in the batch."""
        batch = self.batch
        # The hooks of a prompt would act on a call of the tower that is under way.
        free = self.sequential.waits and not (batch and batch.encoding)
        if free and (self._prompt_turn or not (batch and batch.coming)):
            self.sequential.step(prompts=True)
            self._prompt_turn = False
        elif batch is not None:
            start = time.perf_counter()
            # Small units share a step: each step costs as much as a few of them.
            while batch.work(new=not self.sequential.waits):
                if time.perf_counter() - start > batch.pace / 3:
                    break
            self._prompt_turn = True
        if batch is not None:
            batch.decode()
        self.sequential.step(prompts=False)

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
        answer.adopt(plan.spec)

    def _generate(self, inputs: dict[str, Any], **extra: Any) -> Any:
        with torch.inference_mode():
            return self.model.generate(**inputs, do_sample=False, **extra)


def _stated_bytes(model: Any) -> int:
    """Return the bytes of keys and values of one token from the configuration."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * heads * width * model.dtype.itemsize)
