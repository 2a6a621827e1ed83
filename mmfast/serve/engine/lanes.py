"""Who goes which way: the batched lane, or a lane of its own; and whether there is room."""

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
from mmfast.serve.engine.encoder import MediaEncoder, early, left
from mmfast.serve.engine.prefill import Prefiller
from mmfast.serve.engine.request import ActiveRequest
from mmfast.serve.engine.slots import CacheSlots, Draw


class _Own:
    """One answer with a cache of its own."""

    def __init__(self, answer: ActiveRequest) -> None:
        self.answer = answer
        self.cache: Any = None
        self.position: Tensor | None = None  # [1 or 3 or 4, 1, 1] of the last token
        self.token = 0
        self.count = 0
        self.seen: Tensor | None = None
        self.trace = Trace()
        self.visual = 0  # tokens before anything was reduced
        self.read = 0.0, 0  # milliseconds of writing the prompt, and its tokens


class Solo:
    """Steps of answers under `attach`, one after the other.

    The hooks are in only while a step runs, so that nothing else feels them; all that lasts from
    one step to the next is in the answer's cache.

    Args:
        model: A stock model of a known family.
        chooser: How tokens are chosen.
        served: Told the tenant and how many tokens of work it was given.
    """

    def __init__(self, model: Any, chooser: Chooser, served: Callable[[str, float], None]) -> None:
        self._model, self._chooser, self._served = model, chooser, served
        self._own: dict[str, _Own] = {}

    @property
    def answers(self) -> list[ActiveRequest]:
        """All requests at work."""
        return [own.answer for own in list(self._own.values())]  # health is of any thread

    def start(self, answer: ActiveRequest) -> None:
        """Take a request in."""
        self._own[answer.id] = _Own(answer)

    def cancel(self, name: str) -> ActiveRequest | None:
        """Let a request go; its memory is free at once."""
        own = self._own.pop(name, None)
        return None if own is None else own.answer

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        mine = list(self._own.values())
        layers = (x for own in mine if own.cache for x in list(own.cache.layers))
        return sum(_nbytes(layer) for layer in layers)

    @property
    def waits(self) -> bool:
        """Whether a prompt is still to be read."""
        return any(own.cache is None for own in list(self._own.values()))

    def step(self, prompts: bool) -> bool:
        """A prompt, or a token, of the answer whose turn it is; whether there was one.

        Args:
            prompts: Read a prompt; else say a token.
        """
        own = next((o for o in self._own.values() if (o.cache is None) == prompts), None)
        if own is None:
            return False
        name = own.answer.id
        self._own[name] = self._own.pop(name)  # the others' turns first
        try:
            with torch.inference_mode():
                token = self._next(own)
            if not own.answer.push(token):
                del self._own[name]
                self._finish(own)
        except Exception as error:
            self._own.pop(name, None)
            own.answer.fail(error)
        return True

    def _next(self, own: _Own) -> int:
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
        if own.seen is not None:
            own.seen = torch.cat([own.seen, own.seen.new_tensor([token])]).unique()
        return token

    def _prompt(self, own: _Own) -> Tensor:
        prepared = own.answer.prepared
        assert prepared is not None
        inputs, model = dict(prepared.inputs), self._model
        ids = inputs["input_ids"]
        positions = model._prepare_position_ids_for_generation(ids, dict(inputs))
        own.position = positions[..., -1:]
        own.cache = DynamicCache(config=model.config.get_text_config())
        if self._chooser.penalty != 1:
            own.seen = ids[0].unique()
        self._served(own.answer.payer, ids.shape[1])
        found: Tensor = model(
            **inputs, position_ids=positions, past_key_values=own.cache, use_cache=True
        ).logits
        own.read, own.visual = (prepared.ms, prepared.length), self._visual(inputs)
        own.answer.prepared = None  # pixels are not kept for as long as an answer takes
        return found

    def _visual(self, inputs: dict[str, Any]) -> int:
        counts = (token_counts(self._model, k, inputs, Trace()) for k in features_given(inputs))
        return sum(n for pairs in counts for n, _ in pairs)

    def _token(self, own: _Own) -> Tensor:
        assert own.position is not None
        own.position = own.position + 1
        self._served(own.answer.payer, 1)
        device = own.position.device
        found: Tensor = self._model(
            input_ids=torch.tensor([[own.token]], device=device),
            position_ids=own.position,
            past_key_values=own.cache,
            use_cache=True,
        ).logits
        return found

    def _finish(self, own: _Own) -> None:
        answer, length = own.answer, own.read[1]
        if answer.broken:
            answer.over = True
            return
        own.trace.rows.insert(0, _read(*own.read))
        told = own.trace.to_dict()
        facts = {"visual_tokens": own.visual, "kept_tokens": left(own.visual, own.trace)}
        answer.finish({**told, **facts, "prompt": length}, length)


def _read(ms: float, length: int) -> Any:
    trace = Trace()
    trace.add("read", 0, length, ms)
    return trace.rows[0]


def _nbytes(layer: Any) -> int:
    known = getattr(layer, "nbytes", None)
    if isinstance(known, int):
        return known
    both = (getattr(layer, "keys", None), getattr(layer, "values", None))
    return sum(each.nbytes for each in both if isinstance(each, Tensor))


class Lanes:
    """All that is at work on one model.

    Args:
        encoder: Of the model and its processor.
        slots: Requests at once.
        chunk: Tokens of prompts in one pass.
        limit: Bytes of keys and values, those of finished prompts included.
        served: Told the tenant and how many tokens of work it was given.
        name: The model as the caller named it; None is the embedded one.

    Attributes:
        batch: None where the model's rows cannot be at different lengths in one pass.
        per_token: Bytes of keys and values of one token.
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
        self.solo = Solo(self.model, self.chooser, served)
        self.batch: RunningBatch | None = None
        try:
            parts = Prefiller(self.model, chunk), DecodeBatch(self.model, slots)
            self.batch = RunningBatch(self.encoder, *parts, limit // 4, served)
            self.per_token = self.batch.per_token
        except ModelError:  # windows, convolutions, images that see forward: one by one
            self.per_token = _stated_bytes(self.model)
        self._planner: PipelinePlanner | None = None
        self._prompt_turn = False

    # --- room ---------------------------------------------------------------------------------

    @property
    def answers(self) -> list[ActiveRequest]:
        """All requests at work."""
        return [*(self.batch.answers if self.batch else ()), *self.solo.answers]

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values of requests at work."""
        return (self.batch.nbytes if self.batch else 0) + self.solo.nbytes

    def worst(self, more: Sequence[ActiveRequest] = ()) -> int:
        """Tokens of memory that all at work may come to hold, with more requests beside them."""
        mine = [answer for answer in more if self.batched(answer)]
        own = [*self.solo.answers, *(answer for answer in more if not self.batched(answer))]
        rows = pieces = 0
        if self.batch is not None:
            waiting = [*self.batch.coming, *mine]
            rows = self.batch.decoder.slots.needed([answer.reserve for answer in waiting])
            # Until it is copied to its row, a prompt lies in a piece of its own.
            pieces = sum(answer.reserve - answer.sampling.max_tokens for answer in waiting)
        return rows + pieces + sum(answer.reserve for answer in own)

    def check_fits(self, answer: ActiveRequest) -> None:
        """Refuse a request that is too large even alone.

        Raises:
            MmfastError: Says by how much.
        """
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
        """Whether a request can start now; finished prompts make room."""
        if len(self.answers) >= self._slots:
            return False
        return self.worst([answer]) * self.per_token <= self.limit

    def gauges(self) -> dict[str, float]:
        """Figures for `Health`."""
        kept, prefixes = self.encoder.kept, self.batch.prefixes.held if self.batch else None
        hits, misses = kept.hits, kept.misses
        if prefixes is not None:
            hits, misses = hits + prefixes.hits, misses + prefixes.misses
        gaps = [gap for gap, _ in tuple(self.batch.gaps)] if self.batch else []
        return {
            "decode_gap_ms": 1e3 * max(gaps, default=0.0),
            "chunk_ms": 1e3 * (self.batch.pace if self.batch else 0.0),
            "kv_bytes": float(self.nbytes),
            "kv_bytes_limit": float(self.limit),
            "kv_bytes_per_token": float(self.per_token),
            "prefix_bytes": float(prefixes.nbytes if prefixes is not None else 0),
            "encoder_bytes": float(kept.nbytes),
            "cache_hits": float(hits),
            "cache_misses": float(misses),
        }

    # --- in and out ---------------------------------------------------------------------------

    def check(self, answer: ActiveRequest) -> None:
        """Read the specs of a request.

        Raises:
            SpecError: One is wrong.
            MmfastError: A target beside a spec, or a target that cannot be.
        """
        plan, specs = call_plan(answer.cache), parse(answer.reduce)
        if not early(specs):
            check(specs, self.model, plan)
        if answer.target is not None:
            make_target(target_ttft_ms=answer.target)

    def batched(self, answer: ActiveRequest) -> bool:
        """Whether a request goes the batched way."""
        return self.batch is not None and not answer.cache and early(answer.reduce)

    def start(self, answer: ActiveRequest) -> None:
        """Take a request in; one with a target is planned now."""
        if answer.target is not None:
            try:
                self._plan(answer)
            except Exception as error:
                answer.fail(error)
                return
        if self.batched(answer):
            assert self.batch is not None
            self.batch.start(answer)
        else:
            self.solo.start(answer)
        if self.batch is not None:
            self.batch.prefixes.shrink(self.limit - self.worst() * self.per_token)

    def cancel(self, name: str) -> None:
        """Let a request go; its memory is free at once."""
        if self.batch is not None:
            self.batch.cancel(name)
        self.solo.cancel(name)

    def clear(self) -> list[ActiveRequest]:
        """Let everything go; the requests it was."""
        gone = self.answers
        for answer in gone:
            self.cancel(answer.id)
        return gone

    # --- work ---------------------------------------------------------------------------------

    def round(self) -> None:
        """One unit of work on prompts, then a token for every answer of the batch."""
        batch = self.batch
        # A prompt under hooks would be heard by a call of the tower that is under way.
        free = self.solo.waits and not (batch and batch.encoding)
        if free and (self._prompt_turn or not (batch and batch.coming)):
            self.solo.step(prompts=True)
            self._prompt_turn = False
        elif batch is not None:
            start = time.perf_counter()
            # Small units share a step: each step costs as much as a few of them.
            while batch.work(new=not self.solo.waits):
                if time.perf_counter() - start > batch.pace / 3:
                    break
            self._prompt_turn = True
        if batch is not None:
            batch.decode()
        self.solo.step(prompts=False)

    def _plan(self, answer: ActiveRequest) -> None:
        assert answer.prepared is not None
        if self._planner is None:
            pipe = SimpleNamespace(model=self.model, cache=None, run=self._generate)
            self._planner = PipelinePlanner(pipe, self._name)
        start, inputs = time.perf_counter(), answer.prepared.inputs
        items = sum(len(media) for media in answer.prepared.media.values())
        target = make_target(target_ttft_ms=answer.target)
        if not items:
            answer.reduce = None
            return
        with warnings.catch_warnings():  # out of reach: the fastest plan, as documented
            warnings.simplefilter("ignore", PlanWarning)
            plan, measuring = self._planner.plan(inputs, [items], target, answer.began)
        answer.plan_ms = (time.perf_counter() - start) * 1e3 - measuring
        answer.began += measuring / 1e3  # the device, once and for all: no part of answering
        answer.adopt(plan.spec)

    def _generate(self, inputs: dict[str, Any], **extra: Any) -> Any:
        with torch.inference_mode():
            return self.model.generate(**inputs, do_sample=False, **extra)


def _stated_bytes(model: Any) -> int:
    """Bytes of keys and values of one token, by the configuration."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * heads * width * model.dtype.itemsize)
