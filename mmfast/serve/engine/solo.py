"""The lane of requests that need hooks inside the model, or a cache of their own."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from mmfast.attach import attach
from mmfast.core.errors import ModelError, SpecError
from mmfast.core.trace import Trace
from mmfast.models.counts import token_counts
from mmfast.models.records import features_given
from mmfast.serve.engine.answer import Answer
from mmfast.serve.engine.finish import left
from mmfast.serve.engine.parts import Draw
from mmfast.serve.engine.sample import Chooser


class _Own:
    """One answer with a cache of its own."""

    def __init__(self, answer: Answer) -> None:
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
    def answers(self) -> list[Answer]:
        """All requests at work."""
        return [own.answer for own in list(self._own.values())]  # health is of any thread

    def start(self, answer: Answer) -> None:
        """Take a request in."""
        self._own[answer.id] = _Own(answer)

    def cancel(self, name: str) -> Answer | None:
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
