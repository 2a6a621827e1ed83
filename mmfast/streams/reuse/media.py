"""Prompts about media that were paid for before: their encoder outputs, their keys and values."""

from __future__ import annotations

import importlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.utils import ModelOutput

from mmfast.core.errors import ModelError, SpecError
from mmfast.core.reduction import Mix, Reduction
from mmfast.core.source import name_of
from mmfast.core.spec import Spec
from mmfast.core.trace import Trace
from mmfast.models.cache_name import CACHE
from mmfast.models.cost import timed
from mmfast.models.encoder_names import takes_features
from mmfast.models.families.adapter import Layout, adapter_for, check_apart
from mmfast.models.reduction.inputs import PromptRows, compressed, prompt_rows
from mmfast.models.reduction.record import features_given
from mmfast.models.reduction.sequence import Sequences
from mmfast.models.reduction.site import Chain
from mmfast.models.vision.units import MediaUnit, Merge, UnitFeatures, encode, joined, units
from mmfast.models.wrappers import base_of, stock_model
from mmfast.streams.archive.files import value
from mmfast.streams.reuse.anchors import AnchorPool, SegmentContext, mean_of
from mmfast.streams.reuse.levels import AGAIN
from mmfast.streams.reuse.plan import ALL, ReusePlan
from mmfast.streams.reuse.prefill import PrefilledPrompt, ReusePrefill, SeenPart
from mmfast.streams.reuse.store import ReuseStore, digest, key_of
from mmfast.streams.stream import WeightChecksum

TEXT = 64  # tokens of text that are stored together; a rest is read again
for _kind in (Layout, Mix, Reduction, Merge, Chain):
    value(_kind)


@dataclass(frozen=True)
class PromptSegment:
    """Tokens `start:stop` of a prompt that are stored together.

    `chain` names them with all before them, `place` media alone, wherever they stand (None: text).
    """

    start: int
    stop: int
    chain: str
    place: str | None


class MediaReuse:
    """Encoder outputs, keys and values of one model's prompts, kept in a store and taken from it.

    ModelError where the plan reuses keys and values, and the model has none that could be moved.
    """

    def __init__(
        self,
        model: Any,
        processor: Any,
        plan: ReusePlan,
        store: ReuseStore,
        weights: WeightChecksum | None = None,  # of a model with the same ones
    ) -> None:
        past = f"reuse={str(plan)!r}" if plan.prefix else ""
        self.model, self.processor = stock_model(model, past), processor
        self.plan, self.store = plan, store
        self.base, self.adapter = base_of(self.model), adapter_for(self.model)
        if plan.prefix:
            check_apart(self.adapter, f"reuse={str(plan)!r}")
        self._weights = weights or WeightChecksum(self.model)
        if store.deadline_ms is not None and plan.mode != "prefix":
            raise SpecError(
                f"a store with deadline_ms={store.deadline_ms:g} chooses bits of a prompt's "
                f"beginning, and reuse={str(plan)!r} is not 'prefix'; give that, or leave "
                "deadline_ms out"
            )
        self.prefill = ReusePrefill(self.model) if plan.prefix else None
        self.fetched = ""  # bits of what the last prompt took from files under a deadline

    @cached_property
    def _settings(self) -> str:
        """Name of all that computes beside the weights: config, processor, and where it runs."""
        config = json.dumps(self.model.config.to_dict(), sort_keys=True, default=repr)
        parts = {"tokenizer": None} if self.processor is None else self.processor.to_dict()
        parts = json.dumps(parts, sort_keys=True, default=repr)
        where = (
            self.model.device.type,
            str(self.model.dtype),
            self.model.config._attn_implementation,
        )
        return key_of(type(self.model).__name__, config, parts, repr(where))

    def fingerprint(self, reduce: str = "", owner: str = "") -> str:
        """Name of model, processor, reduction and owner: values of others are never found.

        Nor are those that `torch.autocast` rounded, without it.
        """
        device = self.model.device.type
        cast = torch.is_autocast_enabled(device)
        mine = [f"autocast {torch.get_autocast_dtype(device)}"] if cast else []
        mine += [owner] if owner else []
        return key_of(self._weights.value(), self._settings, reduce, *mine)

    def inputs(
        self,
        inputs: Mapping[str, Any],
        specs: Sequence[Spec],
        how: str | None,
        beams: int = 1,
        trace: Trace | None = None,
    ) -> dict[str, Any]:
        """Inputs of `generate` for one prompt, with all that the plan reuses."""
        given = self.encoded(inputs, specs, how, trace)
        if self.plan.prefix:
            given = self.prompt(given, specs, trace)
            if beams > 1:
                given[CACHE].batch_repeat_interleave(beams)
        return given

    def encoded(
        self,
        inputs: Mapping[str, Any],
        specs: Sequence[Spec] = (),
        how: str | None = None,
        trace: Trace | None = None,
        owner: str = "",
    ) -> dict[str, Any]:
        """Inputs with encoder outputs in place of pixels, those of one prompt or of a batch.

        `specs` are all stages: those before and inside the tower act here; signals that the others
        need are recorded. `how` the tower runs (`encoder=`) is part of the key. ModelError where a
        model is to take them that takes pixels alone.
        """
        if not (self.plan.prefix or takes_features(self.model)):
            raise ModelError(
                f"reuse={str(self.plan)!r} hands features to the model in place of pixels, which "
                f"transformers {transformers.__version__} does not take; give 'prefix', leave "
                "reuse out, or use transformers 5.18 or later"
            )
        trace, outputs = trace or Trace(), {}
        tower = [spec for spec in specs if spec.site in ("pixel", "vit")]
        needs = tuple(sorted({need for spec in specs for need in spec.method.needs}))
        head = self.fingerprint(f"{name_of(tower)} {needs} {how}", owner)
        start, fresh, every, item, spent_ms = time.perf_counter(), 0, 0, 0, 0.0
        for kind in [kind for kind, given in features_given(inputs).items() if given is None]:
            parts = []
            for unit, layouts in self._units(kind, inputs):
                found, ms = self._features(unit, f"{head} {layouts}", needs, tower)
                parts.append(found)
                size = sum(len(layout.content()) for layout in found.layouts)
                every, fresh, spent_ms = every + size, fresh + size * (ms > 0), spent_ms + ms
            outputs[kind] = joined(kind, parts)
            for merge in (merge for part in parts for merge in part.merges):
                trace.record("vit", item, merge.found)
                trace.add("vit", merge.found.n, merge.found.m, merge.ms, merge.method)
                item += 1
        ms = (time.perf_counter() - start) * 1e3 - spent_ms  # that of the tower has its own row
        trace.add("reuse encoder", every, fresh, ms)
        spent = {name for unit in outputs for name in _pixels(inputs, unit)}
        rest = {name: each for name, each in inputs.items() if name not in spent}
        given = inputs.get("mm_encoder_outputs") or {}
        return {**rest, "mm_encoder_outputs": {**given, **outputs}}

    def frames(self, given: Mapping[str, Tensor], encode: Callable[[], list[Any]]) -> list[Any]:
        """Units of a stream's frames by their pixels; `encode` makes those that are not known."""
        parts = [f"{name} {digest(each).hex()}" for name, each in sorted(given.items())]
        key = key_of("frames", self.fingerprint(), *parts)
        found: list[Any] | None = self.store.get(key, self.model.device)
        if found is None:
            found = encode()
            self.store.put(key, found)
            self.store.flush()
        return found

    def _units(
        self, kind: str, inputs: Mapping[str, Any]
    ) -> Iterator[tuple[MediaUnit, list[Layout]]]:
        """Media that are encoded together, and their layouts, which some prompts decide."""
        layouts = self.adapter.layout(self.base, kind, inputs)
        names = [str(number) for number in range(len(layouts))]
        found = units(self.base, kind, inputs, names, ())
        single = len(found) == len(layouts)
        for number, unit in enumerate(found):
            yield unit, [layouts[number]] if single else layouts

    def _features(
        self, unit: MediaUnit, head: str, needs: Sequence[str], tower: Sequence[Spec]
    ) -> tuple[UnitFeatures, float]:
        """Features of a unit, and the milliseconds of the tower, 0 where they were known."""
        parts = [head, unit.kind]
        for name, each in sorted(unit.call.items()):
            parts += [name, digest(each).hex() if isinstance(each, Tensor) else repr(each)]
        if any("query" in spec.method.needs for spec in tower):
            parts.append(digest(unit.ids).hex())
        key = key_of("features", *parts)
        tree = self.store.get(key, self.model.device)
        if tree is not None:
            return _features_of(tree), 0.0
        (found,), ms = timed(partial(encode, self.base, self.adapter, needs, [unit], tower))
        self.store.put(key, _tree_of(found))
        return found, ms

    def prompt(
        self,
        inputs: Mapping[str, Any],
        specs: Sequence[Spec] = (),
        trace: Trace | None = None,
        owner: str = "",
    ) -> dict[str, Any]:
        """Inputs of `generate` for one prompt, with a cache of all tokens but the last.

        Takes what `encoded` returns; `specs` are stages at `pixel` and `pre`.
        """
        assert self.prefill is not None
        trace = trace or Trace()
        early = [spec for spec in specs if spec.site != "vit"]
        rest, sequences = compressed(self.model, inputs, early, trace)
        rows = prompt_rows(self.model, rest, inputs["mm_encoder_outputs"])
        start, ids = time.perf_counter(), rest["input_ids"]
        known, length = self.read(rows, ids[0], sequences, name_of(specs), owner)
        ms = (time.perf_counter() - start) * 1e3
        trace.add("reuse kv", length, known.computed, ms, self.fetched)
        return {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "position_ids": rest["position_ids"],
            CACHE: known.cache(self.prefill.decoder.config, length),
        }

    def read(
        self,
        rows: PromptRows,
        ids: Tensor,
        sequences: Sequences,
        reduce: str = "",
        owner: str = "",
    ) -> tuple[PrefilledPrompt, int]:
        """Keys and values of all tokens of a prompt but the last, and how many these are."""
        assert self.prefill is not None
        length, head = len(ids) - 1, self.fingerprint(reduce, owner)
        every = self._pieces(rows, ids, sequences, head)
        pieces = [piece for piece in every if piece.stop <= length]
        hurry = self.store.deadline_ms is not None
        seen = list(self._in_time(pieces) if hurry else self._seen(pieces))
        if self.plan.corrected:
            seen = self._corrected(seen, rows, head)
        begun = self.store.now()
        # Behind text that is read again nothing is from elsewhere: all of it is taken as it is.
        known = self.prefill.run(rows, seen, ALL if hurry else self.plan, length)
        self.store.clock.read(known.computed, (self.store.now() - begun) * 1e3)
        # What follows an approximation is one.
        if all(part.exact for part in seen) and not self.fetched:
            self._keep(pieces, known, rows, head)
        return known, length

    def _seen(self, pieces: Sequence[PromptSegment]) -> Iterator[SeenPart]:
        exact, device = True, self.model.device
        for piece in pieces:
            held = self.store.get(piece.chain, device) if exact else None
            exact = held is not None
            if held is None and self.plan.anywhere and piece.place is not None:
                held = self._elsewhere(piece.place)
            if held is not None and held["block"].n == piece.stop - piece.start:
                yield SeenPart(piece.start, held["block"], exact, held["impact"], held.get("mean"))
            else:
                exact = False

    def _in_time(self, pieces: Sequence[PromptSegment]) -> Iterator[SeenPart]:
        """Parts of a prompt's beginning from files, in bits that keep the store's deadline."""
        store, exact, told = self.store, True, Counter[str]()
        assert store.deadline_ms is not None
        end = store.now() + store.deadline_ms / 1e3
        sizes = [store.sizes(piece.chain) for piece in pieces]
        for i, piece in enumerate(pieces):
            bits, own = None, sizes[i]
            if own:
                left = [(each, p) for each, p in zip(sizes[i:], pieces[i:], strict=True) if each]
                files, n = [each for each, _ in left], [p.stop - p.start for _, p in left]
                bits = store.clock.next_bits(files, n, (end - store.now()) * 1e3)
                told[f"{bits} bits" if bits else "read again"] += 1
            if bits == AGAIN:  # when all the rest is there
                end -= store.clock.token_ms * (piece.stop - piece.start) / 1e3
            held = None
            if own != {} and bits != AGAIN:
                held = store.get(piece.chain, self.model.device, bits)
            exact = exact and held is not None
            if held is not None:
                yield SeenPart(piece.start, held["block"], exact, held["impact"], held["mean"])
        self.fetched = ", ".join(f"{count} x {what}" for what, count in sorted(told.items()))

    def _elsewhere(self, place: str) -> Any:
        """Return what is kept of media that were seen, wherever; None if they were not."""
        at = self.store.get(place)
        return None if at is None else self.store.get(at, self.model.device)

    def _corrected(self, seen: Sequence[SeenPart], rows: PromptRows, head: str) -> list[SeenPart]:
        """All that was seen, as anchors expect it here; the exact alone if they do not tell.

        Nothing is taken from elsewhere beside media that are read in full: what was read behind it
        could not become an anchor.
        """
        exact = [part for part in seen if part.exact]
        first = max((part.stop for part in exact), default=0)
        found = list(exact)
        if int(rows.visual[first:].sum()) > sum(p.block.n for p in seen if not p.exact):
            return exact
        for part in seen[len(exact) :]:
            pool = AnchorPool(self.store, head, part.block.relative, self.plan)
            context = self._context(rows, part.start, part.stop, part.mean)
            block = None if context is None else pool.moved(part.block, context)
            if block is None:
                return exact
            found.append(replace(part, block=block))
        return found

    def _context(
        self, rows: PromptRows, start: int, stop: int, base: Tensor | None
    ) -> SegmentContext | None:
        if base is None:
            return None
        content = rows.hidden[start:stop].detach().cpu()
        before = mean_of(rows.hidden, start).cpu()
        return SegmentContext(content, base.cpu(), before)

    def _keep(
        self, pieces: Sequence[PromptSegment], known: PrefilledPrompt, rows: PromptRows, head: str
    ) -> None:
        assert self.prefill is not None
        for piece in pieces:
            if piece.start < known.first:
                continue
            span = piece.start, piece.stop
            impact = known.impact(*span, self.prefill.scaling) if piece.place else None
            block, older = known.part(*span, rows.positions), None
            if self.plan.corrected and piece.place is not None:
                older = self._elsewhere(piece.place)
                context = self._context(rows, *span, (older or {}).get("mean"))
                if context is None:  # never seen, or kept without its beginning
                    older = None
                elif self.store.get(piece.place) != piece.chain:
                    pool = AnchorPool(self.store, head, block.relative, self.plan)
                    pool.learn(older["block"], block, context)
            mean = mean_of(rows.hidden, piece.start) if piece.place else None
            self.store.put(piece.chain, {"block": block, "impact": impact, "mean": mean})
            if piece.place is not None and older is None:  # offsets lead from the first place
                self.store.put(piece.place, piece.chain)

    def _pieces(
        self, rows: PromptRows, ids: Tensor, sequences: Sequences, head: str
    ) -> Iterator[PromptSegment]:
        """Cut a prompt at the borders of its media, and text into pieces of `TEXT` tokens."""
        chain = head
        for start, stop, media in _spans(rows.visual.cpu(), sequences):
            positions = rows.positions[:, start:stop]
            relative = positions - positions[:, :1]
            parts = [digest(ids[start:stop]), digest(relative)]
            if media:
                first = int(rows.visual[:start].sum())
                span = slice(first, first + stop - start)
                planes = [digest(plane[span]) for plane in rows.planes]
                parts += [digest(rows.hidden[start:stop]), *planes]
            content = key_of(*parts)
            chain = key_of("chain", chain, content, digest(positions))
            yield PromptSegment(
                start, stop, chain, key_of("place", head, content) if media else None
            )


def _spans(visual: Tensor, sequences: Sequences) -> Iterator[tuple[int, int, bool]]:
    """First and last + 1 token of each piece of a prompt, and whether it is of media.

    A rest of text is a piece only where media follow it.
    """
    n = len(visual)
    starts = {int(item.where.min()) for item in sequences.items if item.n}
    turns = {i for i in range(1, n) if visual[i] != visual[i - 1]}
    turns |= {i for i in starts if i and visual[i - 1]}
    borders = [0, *sorted(turns), n]
    for start, stop in pairwise(borders):
        if visual[start]:
            yield start, stop, True
            continue
        for at in range(start, stop, TEXT):
            if at + TEXT <= stop or stop < n:
                yield at, min(at + TEXT, stop), False


def _pixels(inputs: Mapping[str, Any], kind: str) -> list[str]:
    names = {"image": "pixel_values", "video": "pixel_values_videos"}
    return [name for name in inputs if name == names.get(kind)]


def _tree_of(found: UnitFeatures) -> dict[str, Any]:
    """Return features as a tree that can be saved."""
    return {
        **{name: each for name, each in vars(found).items() if name != "output"},
        "output": f"{found.output.__module__}:{found.output.__qualname__}",
    }


def _features_of(tree: Mapping[str, Any]) -> UnitFeatures:
    """The inverse of `_tree_of`; ModelError for an output class that is none of transformers'."""
    module, _, name = tree["output"].partition(":")
    kind = None
    if module.startswith("transformers."):
        kind = getattr(importlib.import_module(module), name, None)
    if not (isinstance(kind, type) and issubclass(kind, ModelOutput)):
        raise ModelError(f"stored features are of class {tree['output']!r}, which is no output")
    return UnitFeatures(**{**tree, "output": kind})
