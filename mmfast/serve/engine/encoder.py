"""Encoder: from media and text to the embeddings that the language model reads."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from typing import Any

from mmfast.core.errors import MmfastError, SpecError
from mmfast.core.spec import Spec, parse
from mmfast.models.adapter import adapter_for, check_media
from mmfast.models.inner import AHEAD
from mmfast.models.prompt import chat_inputs
from mmfast.models.records import features_given
from mmfast.serve.engine.base import Media, Request
from mmfast.serve.engine.finish import Key, Result, finished
from mmfast.serve.engine.lru import Lru
from mmfast.serve.engine.media import Known, Unit, encode, grouped, units, whole
from mmfast.serve.engine.parts import Prepared
from mmfast.serve.engine.slicer import Slicer

__all__ = ["Encoder", "Result", "Steps", "early"]

Steps = Generator[tuple[int, Result] | None, None, None]
# Numbers of pixels that enter the tower at once; one medium may be more.
_MOST, _START = 8 << 20, 1 << 18


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

    Attributes:
        kept: What is kept.
        slicer: Stops calls of the tower that take long.
        most: Numbers of pixels that enter the tower at once while others wait for its slices,
            learnt from how long those take.
    """

    def __init__(self, model: Any, processor: Any, memory: int = 64 << 20) -> None:
        self.model, self.processor, self.most = model, processor, _START
        self.slicer = Slicer()
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
        found = dict(step for step in self.steps(batch) if step is not None)
        return [found[i] for i in range(len(batch))]

    def steps(self, batch: Sequence[Prepared]) -> Steps:
        """As `encode`, in small steps: what became of a request, by number, or None in between."""
        plans = {i: self._units(each) for i, each in enumerate(batch)}
        known: dict[Key, Known | Exception] = {}
        fresh: dict[Key, Unit] = {}
        for unit in (unit for mine in plans.values() for unit in mine):
            held = None if unit.key in fresh or unit.key in known else self.kept.get(unit.key)
            if held is not None:
                known[unit.key] = held
            elif unit.key not in known:
                fresh.setdefault(unit.key, unit)
        owed = set(fresh)  # whose encoding is nobody's yet: the first to use it pays
        yield from self._ready(batch, plans, known, owed)
        while fresh:
            needs = next(iter(fresh))[1][1]
            alike = [unit for unit in fresh.values() if unit.key[1][1] == needs]
            most = _MOST if self.slicer.budget is None else self.most
            group = next(iter(grouped(alike, most)))
            known |= yield from self._run(needs, group)
            for unit in group:
                del fresh[unit.key]
            yield from self._ready(batch, plans, known, owed)

    def _ready(
        self,
        batch: Sequence[Prepared],
        plans: dict[int, list[Unit]],
        known: dict[Key, Known | Exception],
        owed: set[Key],
    ) -> Iterator[tuple[int, Result]]:
        """Requests whose media are all known."""
        for i in [i for i, mine in plans.items() if all(unit.key in known for unit in mine)]:
            mine = plans.pop(i)
            reused = {unit.key for unit in mine} - owed
            owed -= {unit.key for unit in mine}
            yield i, finished(self.model, batch[i], mine, known, reused)

    def _units(self, prepared: Prepared) -> list[Unit]:
        needs = tuple(sorted({n for s in parse(prepared.reduce) for n in s.method.needs}))
        context = (prepared.request.tenant, needs)
        keys = {kind: [m.key for m in media] for kind, media in prepared.media.items()}
        given = list(features_given(prepared.inputs))
        if set(given) != set(keys):  # a family whose clips go in as images
            both = [key for mine in keys.values() for key in mine]
            return [whole(self.base, kind, prepared.inputs, both, context) for kind in given]
        return [
            unit
            for kind in given
            for unit in units(self.base, kind, prepared.inputs, keys[kind], context)
        ]

    def _run(
        self, needs: tuple[str, ...], group: list[Unit]
    ) -> Generator[None, None, dict[Key, Known | Exception]]:
        """Encode a group; where that fails, one by one, so that only the broken ones fail."""
        blocks = self.adapter.tower_of(self.base, group[0].kind).blocks
        try:
            found = yield from self.slicer.run(
                lambda: encode(self.base, self.adapter, needs, group), blocks
            )
        except Exception as error:
            if len(group) == 1:
                return {group[0].key: error}
            apart: dict[Key, Known | Exception] = {}
            for unit in group:
                apart |= yield from self._run(needs, [unit])
            return apart
        self._learn(group)
        ms = self.slicer.total * 1e3 / len(group)
        known = {u.key: replace(each, ms=ms) for u, each in zip(group, found, strict=True)}
        for key, each in known.items():
            self.kept.put(key, each)
        return {**known}

    def _learn(self, group: Sequence[Unit]) -> None:
        """So much enters the tower at once that a block takes no longer than a slice may."""
        budget, work = self.slicer.budget, sum(unit.work for unit in group)
        if budget is None or not work:
            return
        if self.slicer.longest > 2 * budget:  # a single block is longer than the budget
            self.most = max(1, min(self.most, work) // 2)
        elif self.slicer.longest < 1.5 * budget and 2 * work > self.most:
            self.most = min(_MOST, 2 * self.most)


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
