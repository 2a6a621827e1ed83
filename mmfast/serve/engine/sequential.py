"""Requests read under `attach`, one after the other, on twins of the model."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from mmfast.attach import attach
from mmfast.core.errors import ModelError, SpecError
from mmfast.core.trace import SELECT, Row, Trace
from mmfast.models.cache_name import CACHE
from mmfast.models.families.adapter import adapter_for, token_counts
from mmfast.models.loading import twin_model
from mmfast.models.reduction.inputs import positions_of
from mmfast.models.reduction.masks import shrinkage
from mmfast.models.reduction.record import features_given
from mmfast.serve.engine.adapters import using
from mmfast.serve.engine.decode import Chooser
from mmfast.serve.engine.encoder import kept_tokens
from mmfast.serve.engine.kv.rows import layer_bytes
from mmfast.serve.engine.request import ActiveRequest
from mmfast.serve.engine.reuse import PREFILL, ServedReuse
from mmfast.serve.engine.slicer import Slicer
from mmfast.serve.engine.slots import Draw

_READ = ("held", "read", "nbytes")  # of a decode step, in the order of a row


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
        self.steps = Trace()  # of the steps that were made under `attach`, too
        self.visual = 0  # tokens before reduction
        self.ms, self.length = 0.0, 0  # milliseconds of the processor, and tokens of the prompt

    def read_trace(self) -> dict[str, Any]:
        """Return the entries of the trace."""
        trace = Trace()
        trace.add("read", 0, self.length, self.ms)
        self.trace.rows.insert(0, trace.rows[0])
        if reads := self.steps.reads:
            mean = [sum(getattr(each, k) for each in reads) / len(reads) for k in _READ]
            ms = sum(row.ms for row in self.steps.rows)
            self.trace.rows.append(Row(SELECT, round(mean[0]), round(mean[1]), ms, int(mean[2])))
        facts = {"visual_tokens": self.visual, "kept_tokens": kept_tokens(self.visual, self.trace)}
        return {**self.trace.to_dict(), **facts, "prompt": self.length}


class _Workplace:
    """A twin of the model for one answer at a time, whose hooks no other pass meets."""

    def __init__(self, model: Any, reuse: ServedReuse | None) -> None:
        self.model, self.slicer = twin_model(model), Slicer()
        self.media = None if reuse is None else reuse.on(self.model)


def stops_of(model: Any, inputs: Mapping[str, Any]) -> list[Any]:
    """Return the layers before which the call of a model on a prompt can stop."""
    adapter, base = adapter_for(model), model.base_model
    towers = [adapter.tower_of(base, kind).blocks for kind in features_given(inputs)]
    return [*model.get_decoder().layers, *(block for mine in towers for block in mine)]


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

    def twin(self) -> Any:
        """Return a twin of the model."""
        return twin_model(self._origin)

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
            prepared = own.answer.prepared if own.count == 0 else None
            blocks = [] if prepared is None else stops_of(own.place.model, prepared.inputs)
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
                own.steps.reads += trace.reads
                own.steps.rows += [row for row in trace.rows if row.stage == SELECT]
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
        own.position = own.position - shrinkage(cache)
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
