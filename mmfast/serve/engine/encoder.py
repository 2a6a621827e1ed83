"""Encoding of media and text into the embeddings that the language model reads."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mmfast.caches.plan import call_plan
from mmfast.core.errors import MmfastError, ModelError, SpecError
from mmfast.core.registry import MEDIA
from mmfast.core.spec import Spec, parse
from mmfast.core.trace import Trace
from mmfast.models.families.adapter import adapter_for, check_apart, check_media
from mmfast.models.prompt import chat_inputs, marked
from mmfast.models.reduction.decoder_signals import AHEAD, BEFORE, ROPE
from mmfast.models.reduction.inputs import compressed, prompt_rows
from mmfast.models.reduction.record import features_given
from mmfast.models.reduction.sequence import Sequences
from mmfast.models.reduction.site import sites_of
from mmfast.models.vision.units import (
    MediaUnit,
    UnitFeatures,
    encode,
    grouped,
    joined,
    units,
    whole,
)
from mmfast.serve.engine.adapters import adapters_of, using
from mmfast.serve.engine.base import Media, Request
from mmfast.serve.engine.kv.byte_cache import ByteCache
from mmfast.serve.engine.model import settled
from mmfast.serve.engine.policies import PromptRecipe
from mmfast.serve.engine.slicer import Slicer
from mmfast.serve.engine.slots import Embedded, Prepared

BLOCK = 16  # tokens; prefixes are compared in steps of these


def embedded(
    model: Any,
    rest: Mapping[str, Any],
    whole: Mapping[str, Any],
    named: Mapping[str, Tensor],
    adapter: str | None = None,
) -> dict[str, Any]:
    """Return the fields of `Embedded` that the language model reads.

    `rest` are inputs, or what `compressed` returns of them, and `whole` the encoder outputs before
    reduction, by kind. A kind without identities `[n]` in `named` is hashed.
    """
    rows = prompt_rows(model, rest, whole)
    marks = rest["input_ids"][0].clone()
    for kind, place in rows.places.items():
        marks[place] = named[kind] if kind in named else hashes(rows.hidden[place])
    marks[rows.fused] = hashes(rows.hidden[rows.fused])  # it tells of media behind it, too
    return {
        "embeds": rows.hidden,
        "positions": rows.positions,
        "blocks": chain(marks, rows.positions, adapter),
        "adapter": adapter,
        "visual": rows.visual if rows.planes else None,
        "planes": rows.planes,
    }


def identities(
    mine: Sequence[MediaUnit], parts: Mapping[str, Sequence[UnitFeatures]], reduce: str | None
) -> dict[str, Tensor]:
    """Return the identity `[n]` of each feature by kind; nothing where features are reduced."""
    found: dict[str, Tensor] = {}
    for kind, known in () if reduce else parts.items():
        keys = [unit.key for unit in mine if unit.kind == kind]
        rows = [
            _digest(repr(key).encode()) + torch.arange(len(each.features))
            for key, each in zip(keys, known, strict=True)
        ]
        found[kind] = torch.cat(rows).to(known[0].features.device)
    return found


def hashes(rows: Tensor) -> Tensor:
    """Hash the bytes of each row of `[n, D]` to a number; `[n]` int64."""
    data = rows.contiguous().view(torch.uint8).cpu().numpy()
    return torch.tensor([_digest(row.tobytes()) for row in data], device=rows.device).long()


def chain(marks: Tensor, positions: Tensor, adapter: str | None = None) -> tuple[bytes, ...]:
    """Return a hash of the prompt and its adapter up to the end of each of its blocks."""
    data = torch.cat([marks[None], positions]).T.contiguous().cpu().numpy()
    found, before = [], (adapter or "").encode()
    for stop in range(BLOCK, len(data) + 1, BLOCK):
        piece = data[stop - BLOCK : stop].tobytes()
        before = hashlib.blake2b(before + piece, digest_size=16).digest()
        found.append(before)
    return tuple(found)


def _digest(data: bytes) -> int:
    # 62 bits: adding the number of a feature stays within int64.
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big") >> 2


Key = tuple[Any, ...]
Result = Embedded | Exception


def finished(
    model: Any,
    prepared: Prepared,
    mine: Sequence[MediaUnit],
    known: Mapping[Key, UnitFeatures | Exception],
    reused: AbstractSet[Key],
) -> Result:
    """Return the prompt as the language model reads it, or the error where there is none.

    `known` holds results of units by key; `reused` are the keys not encoded for this request.
    """
    try:
        parts = []
        for unit in mine:
            found = known[unit.key]
            if isinstance(found, Exception):
                return found
            parts.append((unit, found))
        return _joined(model, prepared, parts, reused)
    except Exception as error:
        return error


@torch.no_grad()
def _joined(
    model: Any,
    prepared: Prepared,
    parts: Sequence[tuple[MediaUnit, UnitFeatures]],
    reused: AbstractSet[Key],
) -> Embedded:
    kinds = dict.fromkeys(unit.kind for unit, _ in parts)
    known = {kind: [each for unit, each in parts if unit.kind == kind] for kind in kinds}
    outputs = {kind: joined(kind, each) for kind, each in known.items()}
    again = [each for unit, each in parts if unit.key in reused]
    visual = sum(len(y.content()) for _, each in parts for y in each.layouts)
    trace = Trace()
    trace.add("read", 0, prepared.length, prepared.ms)
    fresh = (each.ms for unit, each in parts if unit.key not in reused)
    trace.add("encode", visual, visual, sum(fresh))
    for own in known.values():
        for item, merge in enumerate(each for part in own for each in part.merges):
            trace.record("vit", item, merge.found)
            trace.add("vit", merge.found.n, merge.found.m, merge.ms, merge.method)
    inputs = {**prepared.inputs, "mm_encoder_outputs": outputs}
    rest: Mapping[str, Any] = inputs
    sequences: Sequences | None = None
    try:
        places = prepared.deep or prepared.cache or prepared.view  # need the places of tokens
        if prepared.reduce or places:
            with using((prepared.request.adapter,)):
                rest, sequences = compressed(model, inputs, prepared.reduce, trace)
    except ModelError as error:
        if not prepared.reduce:
            raise
        raise SpecError(str(error)) from error  # reducers that do not fit this model or prompt
    named = identities([unit for unit, _ in parts], known, prepared.reduce)
    document = trace.to_dict()
    return Embedded(
        **embedded(model, rest, outputs, named, prepared.request.adapter),
        whole=prepared.inputs["input_ids"][0],
        reused=sum(y.length for each in again for y in each.layouts),
        visual_tokens=visual,
        kept_tokens=kept_tokens(visual, trace),
        rows=document["rows"],
        reductions=document["reductions"],
        notes=list(trace.notes),
        images=_images(model, prepared.inputs, sequences),
        recipe=_recipe(prepared, sequences, trace),
    )


def _images(model: Any, inputs: Mapping[str, Any], sequences: Sequences | None) -> Tensor | None:
    """Return the image `[m]` inside which a token sees forward, -1 outside; None in most models."""
    blocks = adapter_for(model).blocks(inputs)
    if blocks is None:
        return None
    index = None if sequences is None else sequences.index
    return blocks[0] if index is None else blocks[0][index[0]]


def _recipe(prepared: Prepared, sequences: Sequences | None, trace: Trace) -> PromptRecipe | None:
    plan = prepared.view or call_plan(prepared.cache)
    if sequences is None or (plan is None and not prepared.deep):
        return None
    sites, drafts = tuple(sites_of(prepared.deep)), prepared.view is not None
    return PromptRecipe(sites, plan, sequences, trace, drafts)


def kept_tokens(visual: int, trace: Trace) -> int:
    """Return the number of visual tokens after all reductions, from the number before."""
    ends: dict[int, tuple[int, int]] = {}
    for site, item, reduction in trace.reductions:
        if site != "vit":  # inside the encoder the count is of patches
            ends[item] = (ends.get(item, (reduction.n, 0))[0], reduction.m)
    return visual - sum(before - after for before, after in ends.values())


Features = dict[Key, UnitFeatures]
Steps = Generator[tuple[int, Result] | None, None, None]
# Values of pixels that enter the tower at once; a single medium may have more.
_MOST, _START = 8 << 20, 1 << 18


def parted(specs: Sequence[Spec]) -> tuple[str | None, tuple[Spec, ...], Spec | None, bool]:
    """Part specs by where a prompt that is read in a batch meets them.

    Returns those between vision tower and language model, those inside the language model, the one
    inside the tower, and True if these are all.
    """
    between = [spec for spec in specs if early([spec])]
    inner = [spec for spec in specs if spec.site == "llm" or AHEAD in spec.method.needs]
    deep = tuple(
        s
        for s in inner
        if not (s.method.revives or s.method.bypasses)
        and not {BEFORE, ROPE} & set(s.method.needs)
        and s.tokens == MEDIA
    )
    inside = [spec for spec in specs if spec.site == "vit"][:1]
    whole = len(between) + len(deep) + len(inside) == len(specs)
    return "+".join(map(str, between)) or None, deep, inside[0] if inside else None, whole


def early(reduce: str | Sequence[Spec] | None) -> bool:
    """Return True if a spec acts on inputs alone, before or behind the vision tower."""
    specs = parse(reduce)
    return all(s.site in ("pixel", "pre") and AHEAD not in s.method.needs for s in specs)


class MediaEncoder:
    """Encodes media of several requests in one call of the vision tower.

    Results are cached for the tenant that sent the media, and for no other one.
    """

    def __init__(self, model: Any, processor: Any, memory: int = 64 << 20) -> None:
        # most: values of pixels in the tower at once while answers wait, learnt from its slices
        self.model, self.processor, self.most = model, settled(processor), _START
        self.slicer = Slicer()
        self.base, self.adapter = model.base_model, adapter_for(model)
        check_apart(self.adapter, "the server")
        self.kept: ByteCache[UnitFeatures] = ByteCache(memory, lambda known: known.nbytes)
        self._lock = threading.Lock()  # a tokenizer serves one thread at a time

    def prepare(
        self,
        request: Request,
        reduce: str | None = None,
        deep: tuple[Spec, ...] = (),
        cache: str | None = None,
    ) -> Prepared:
        """Run the processor on a request; any thread may call this.

        `deep` are reducers inside the language model and `cache` is a KV policy, for later stages.
        Raises `SpecError` if `reduce` is wrong or does not act at site `pixel` or `pre`.
        """
        start = time.perf_counter()
        if not early(reduce):
            raise SpecError(
                f"{reduce!r} acts inside the model; the encoder takes sites pixel and pre"
            )
        media = _media(request)
        for kind in media:
            check_media(self.model, kind)
        try:
            with self._lock:
                inputs = self._inputs(request)
        except MmfastError:
            raise
        except Exception as error:
            reason = " ".join(str(error).split())[:200]
            raise MmfastError(f"the model's processor takes no such request: {reason}") from error
        ms = (time.perf_counter() - start) * 1e3
        return Prepared(request, inputs, media, reduce or None, ms, deep, cache)

    def _inputs(self, request: Request) -> dict[str, Any]:
        options, processor = request.options, self.processor
        tokenizer, device = processor.tokenizer, self.model.device
        if isinstance(options.raw, str):
            found = tokenizer(options.raw, return_tensors="pt")
            return {name: found[name].to(device) for name in ("input_ids", "attention_mask")}
        if options.raw is not None:
            ids = torch.tensor([options.raw], device=device)
            if int(ids.max()) >= len(tokenizer):
                raise MmfastError(f"token {int(ids.max())} of the prompt is none of the model's")
            return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        chat: Sequence[Mapping[str, Any]] = [message.chat for message in request.messages]
        for name in options.processor:
            if not hasattr(getattr(processor, "image_processor", None), name):
                raise MmfastError(f"the processor of this model has no {name!r}; leave it out")
        if options.template.get("tools") and "tools" not in str(processor.chat_template):
            raise MmfastError(
                "the chat template of this model has no tools; leave tools out, or name the one to "
                "call as tool_choice"
            )
        chat, template, more = marked(tokenizer, chat, options.template)
        return chat_inputs(processor, [chat], device, template, {**options.processor, **more})

    def encode(self, batch: Sequence[Prepared]) -> list[Result]:
        """Encode, reduce and embed; a request that fails gets its error, the others go on."""
        found = dict(step for step in self.steps(batch) if step is not None)
        return [found[i] for i in range(len(batch))]

    def part(self, prepared: Prepared, number: int, parts: int) -> Generator[None, None, Features]:
        """Encode one of several parts of the media of a request; yields as `Slicer.run` does.

        Of media that cannot be told apart, the first part has all. The values go to `steps`.
        """
        found: Features = {}
        mine = {unit.key: unit for unit in self._units(prepared)[number::parts]}
        for key in list(mine):
            if (known := self.kept.get(key)) is not None:
                found[key] = known
                del mine[key]
        while mine:
            most = _MOST if self.slicer.budget is None else self.most
            group = next(iter(grouped(list(mine.values()), most)))
            _, needs, _, adapter = group[0].key[1]
            ended = yield from self._run(needs, prepared.tower_specs, adapter, group)
            for unit in group:
                result = ended[mine.pop(unit.key).key]
                if isinstance(result, Exception):
                    raise result
                found[unit.key] = result
        return found

    def steps(self, batch: Sequence[Prepared], given: Features | None = None) -> Steps:
        """Encode in small steps: yield number and result of a request, or None in between.

        `given` are media that were encoded for these requests elsewhere.
        """
        plans = {i: self._units(each) for i, each in enumerate(batch)}
        towers = {each.tower: each.tower_specs for each in batch}
        elsewhere = given or {}
        known: dict[Key, UnitFeatures | Exception] = {**elsewhere}
        fresh: dict[Key, MediaUnit] = {}
        for key, features in elsewhere.items():
            self.kept.put(key, features)
        for unit in (unit for mine in plans.values() for unit in mine):
            held = None if unit.key in fresh or unit.key in known else self.kept.get(unit.key)
            if held is not None:
                known[unit.key] = held
            elif unit.key not in known:
                fresh.setdefault(unit.key, unit)
        owed = {
            *fresh,
            *elsewhere,
        }  # the first request that uses a unit is charged with its encoding
        yield from self._ready(batch, plans, known, owed)
        while fresh:
            needs, tower, adapter = next(iter(fresh))[1][1:]
            alike = [unit for unit in fresh.values() if unit.key[1][1:] == (needs, tower, adapter)]
            most = _MOST if self.slicer.budget is None else self.most
            group = next(iter(grouped(alike, most)))
            known |= yield from self._run(needs, towers[tower], adapter, group)
            for unit in group:
                del fresh[unit.key]
            if self.slicer.budget is not None:
                yield None  # reducing features is a unit of work of its own
            yield from self._ready(batch, plans, known, owed)

    def _ready(
        self,
        batch: Sequence[Prepared],
        plans: dict[int, list[MediaUnit]],
        known: dict[Key, UnitFeatures | Exception],
        owed: set[Key],
    ) -> Steps:
        """Yield the requests whose media are all encoded."""
        for i in [i for i, mine in plans.items() if all(unit.key in known for unit in mine)]:
            mine = plans.pop(i)
            reused = {unit.key for unit in mine} - owed
            owed -= {unit.key for unit in mine}
            end = partial(finished, self.model, batch[i], mine, known, reused)
            if self.slicer.budget is None or not batch[i].reduce:
                yield i, end()
            else:  # reducers may take longer than the tower
                yield i, (yield from self.slicer.run(end))

    def _units(self, prepared: Prepared) -> list[MediaUnit]:
        needs = tuple(sorted({n for s in parse(prepared.reduce) for n in s.method.needs}))
        # An adapter that acts behind the tower alone shares the encodings of the others.
        adapter = prepared.request.adapter
        adapter = adapter if adapter in adapters_of(self.model).visual else None
        context = (prepared.request.tenant, needs, prepared.tower, adapter)
        keys = {kind: [m.key for m in media] for kind, media in prepared.media.items()}
        given = list(features_given(prepared.inputs))
        if set(given) != set(keys):  # a family that encodes clips as images
            both = [key for mine in keys.values() for key in mine]
            return [whole(self.base, kind, prepared.inputs, both, context) for kind in given]
        return [
            unit
            for kind in given
            for unit in units(self.base, kind, prepared.inputs, keys[kind], context)
        ]

    def _run(
        self,
        needs: tuple[str, ...],
        specs: Sequence[Spec],
        adapter: str | None,
        group: list[MediaUnit],
    ) -> Generator[None, None, dict[Key, UnitFeatures | Exception]]:
        """Encode a group; after an error one by one, so that only the broken units fail."""
        blocks = self.adapter.tower_of(self.base, group[0].kind).blocks

        def call() -> list[UnitFeatures]:
            with using((adapter,)):
                return encode(self.base, self.adapter, needs, group, specs)

        try:
            found = yield from self.slicer.run(call, blocks)
        except Exception as error:
            if len(group) == 1:
                return {group[0].key: error}
            apart: dict[Key, UnitFeatures | Exception] = {}
            for unit in group:
                apart |= yield from self._run(needs, specs, adapter, [unit])
            return apart
        self._learn(group)
        ms = self.slicer.total * 1e3 / len(group)
        known = {u.key: replace(each, ms=ms) for u, each in zip(group, found, strict=True)}
        for key, each in known.items():
            self.kept.put(key, each)
        return {**known}

    def _learn(self, group: Sequence[MediaUnit]) -> None:
        """Adjust the size of groups so that a block takes no longer than a slice may."""
        budget, work = self.slicer.budget, sum(unit.work for unit in group)
        if budget is None or not work:
            return
        if self.slicer.longest > 2 * budget:  # a single block is longer than the budget
            self.most = max(1, min(self.most, work) // 2)
        elif self.slicer.longest < 1.5 * budget and 2 * work > self.most:
            self.most = min(_MOST, 2 * self.most)


def _media(request: Request) -> dict[str, tuple[Media, ...]]:
    parts = [part for message in request.messages for part in message.content]
    asks = any(isinstance(part, Media) or part.strip() for part in parts)
    if not asks and not request.options.raw:
        raise MmfastError("the messages are empty; ask something")
    found: dict[str, tuple[Media, ...]] = {}
    for part in parts:
        if isinstance(part, Media):
            found[part.shot.kind] = (*found.get(part.shot.kind, ()), part)
    return found
