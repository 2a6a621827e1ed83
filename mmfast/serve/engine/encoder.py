"""Encoder: from media and text to the embeddings that the language model reads."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any

import torch

from mmfast.core.errors import MmfastError, SpecError
from mmfast.core.spec import Spec, parse
from mmfast.core.trace import Trace
from mmfast.models.adapter import adapter_for, check_media
from mmfast.models.compress import compress
from mmfast.models.inner import AHEAD
from mmfast.models.prompt import chat_inputs
from mmfast.serve.engine.base import Media, Request
from mmfast.serve.engine.embed import embedded, identities
from mmfast.serve.engine.lru import Lru
from mmfast.serve.engine.media import Known, Unit, encode, grouped, joined, units
from mmfast.serve.engine.parts import Embedded, Prepared

Result = Embedded | Exception


def early(reduce: str | None) -> bool:
    """Whether a spec acts on inputs alone, between vision tower and language model.

    Raises:
        SpecError: It cannot be read.
    """
    return all(_is_early(spec) for spec in parse(reduce))


def _is_early(spec: Spec) -> bool:
    return spec.site == "pre" and AHEAD not in spec.method.needs


class Encoder:
    """Encodes media of several requests in one call of the vision tower.

    What a medium became is kept for the tenant it came from, and for nobody else.

    Args:
        model: A stock model of a known family.
        processor: Its processor.
        memory: Bytes of encoded media that are kept.
        most: Numbers of pixels that enter the tower at once; one medium may be more.

    Attributes:
        kept: What is kept.
    """

    def __init__(
        self, model: Any, processor: Any, memory: int = 64 << 20, most: int = 8 << 20
    ) -> None:
        self.model, self.processor, self.most = model, processor, most
        self.base, self.adapter = model.base_model, adapter_for(model)
        self.kept: Lru[Known] = Lru(memory, lambda known: known.nbytes)
        self._lock = threading.Lock()  # tokenizers are not for two threads at once

    def prepare(self, request: Request, reduce: str | None = None) -> Prepared:
        """Write the prompt; of any thread.

        Raises:
            MmfastError: Nothing is asked, or the media do not fit the model.
            SpecError: `reduce` is wrong, or acts elsewhere than at site `pre`.
        """
        start = time.perf_counter()
        if not early(reduce):
            raise SpecError(f"{reduce!r} acts inside the model; the encoder takes site 'pre' only")
        media = _media(request)
        for kind in media:
            check_media(self.model, kind)
        chat = [
            {
                "role": message.role,
                "content": [p.shot if isinstance(p, Media) else p for p in message.content],
            }
            for message in request.messages
        ]
        try:
            with self._lock:
                inputs = chat_inputs(self.processor, [chat], self.model.device)
        except MmfastError:
            raise
        except Exception as error:
            reason = " ".join(str(error).split())[:200]
            raise MmfastError(f"the model's processor takes no such request: {reason}") from error
        ms = (time.perf_counter() - start) * 1e3
        return Prepared(request, inputs, media, reduce or None, ms)

    def encode(self, batch: Sequence[Prepared]) -> list[Result]:
        """Encode, reduce and embed; a request that cannot gets its error, the others go on."""
        steps = self.steps(batch)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                found: list[Result] = end.value
                return found

    def steps(self, batch: Sequence[Prepared]) -> Generator[None, None, list[Result]]:
        """As `encode`, with a pause behind every call of the tower."""
        plans = [self._units(each) for each in batch]
        known: dict[tuple[Any, ...], Known | Exception] = {}
        fresh: dict[tuple[Any, ...], Unit] = {}
        for mine in plans:
            for unit in mine:
                held = self.kept.get(unit.key) if unit.key not in fresh else None
                if held is not None:
                    known[unit.key] = held
                elif unit.key not in known:
                    fresh.setdefault(unit.key, unit)
        for needs in dict.fromkeys(key[1][1] for key in fresh):
            waiting = [unit for unit in fresh.values() if unit.key[1][1] == needs]
            for group in grouped(waiting, self.most):
                known |= self._run(needs, group)
                yield
        first = set(fresh)
        results: list[Result] = []
        for prepared, mine in zip(batch, plans, strict=True):
            reused = {unit.key for unit in mine} - first
            first -= {unit.key for unit in mine}
            results.append(self._finished(prepared, mine, known, reused))
        return results  # the value of the generator

    def _units(self, prepared: Prepared) -> list[Unit]:
        needs = tuple(sorted({n for s in parse(prepared.reduce) for n in s.method.needs}))
        context = (prepared.request.tenant, needs)
        return [
            unit
            for kind, media in prepared.media.items()
            for unit in units(
                self.base, kind, prepared.inputs, [each.key for each in media], context
            )
        ]

    def _run(
        self, needs: tuple[str, ...], group: list[Unit]
    ) -> dict[tuple[Any, ...], Known | Exception]:
        """Encode a group; where that fails, one by one, so that only the broken ones fail."""
        start = time.perf_counter()
        try:
            found = encode(self.base, self.adapter, needs, group)
        except Exception as error:
            if len(group) == 1:
                return {group[0].key: error}
            apart = [self._run(needs, [unit]) for unit in group]
            return {key: value for each in apart for key, value in each.items()}
        ms = (time.perf_counter() - start) * 1e3 / len(group)
        known = {u.key: replace(each, ms=ms) for u, each in zip(group, found, strict=True)}
        for key, each in known.items():
            self.kept.put(key, each)
        return {**known}

    def _finished(
        self,
        prepared: Prepared,
        mine: Sequence[Unit],
        known: dict[tuple[Any, ...], Known | Exception],
        reused: set[tuple[Any, ...]],
    ) -> Result:
        try:
            return self._embedded(prepared, mine, known, reused)
        except Exception as error:
            return error

    @torch.no_grad()
    def _embedded(
        self,
        prepared: Prepared,
        mine: Sequence[Unit],
        known: dict[tuple[Any, ...], Known | Exception],
        reused: set[tuple[Any, ...]],
    ) -> Embedded:
        parts: dict[str, list[Known]] = {}
        ms = 0.0
        for unit in mine:
            each = known[unit.key]
            if isinstance(each, Exception):
                raise each
            parts.setdefault(unit.kind, []).append(each)
            ms += 0.0 if unit.key in reused else each.ms
        outputs = {kind: joined(kind, each) for kind, each in parts.items()}
        visual = sum(len(y.content()) for p in parts.values() for k in p for y in k.layouts)
        again = sum(
            y.length
            for unit in mine
            if unit.key in reused
            for k in [known[unit.key]]
            if isinstance(k, Known)
            for y in k.layouts
        )
        trace = Trace()
        trace.add("read", 0, prepared.length, prepared.ms)
        trace.add("encode", visual, visual, ms)
        inputs = {**prepared.inputs, "mm_encoder_outputs": outputs}
        rest = compress(self.model, inputs, prepared.reduce, trace)
        named = identities(mine, parts, prepared.reduce)
        found = embedded(self.model, rest, outputs, named)
        kept = visual if not trace.reductions else _left(visual, trace)
        told = trace.to_dict()
        return Embedded(
            **found,
            whole=prepared.inputs["input_ids"][0],
            reused=again,
            visual_tokens=visual,
            kept_tokens=kept,
            rows=told["rows"],
            reductions=told["reductions"],
        )


def _left(visual: int, trace: Trace) -> int:
    """Visual tokens behind all reductions."""
    chains: dict[int, tuple[int, int]] = {}
    for _, item, reduction in trace.reductions:
        chains[item] = (chains.get(item, (reduction.n, 0))[0], reduction.m)
    return visual - sum(before - after for before, after in chains.values())


def _media(request: Request) -> dict[str, tuple[Media, ...]]:
    """Media of a request by kind.

    Raises:
        MmfastError: Nothing is asked.
    """
    if not request.messages or request.messages[-1].role != "user":
        raise MmfastError("the last message is not the user's; nothing is asked")
    parts = [part for message in request.messages for part in message.content]
    last = request.messages[-1].content
    if not any(isinstance(part, Media) or part.strip() for part in last):
        raise MmfastError("the last message is empty; ask something")
    found: dict[str, tuple[Media, ...]] = {}
    for part in parts:
        if isinstance(part, Media):
            found[part.shot.kind] = (*found.get(part.shot.kind, ()), part)
    return found
