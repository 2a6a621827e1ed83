"""Prompts of modules that were read once, each at the positions that a schema reserves for it.

A module is read on its own, or together with the modules of a scaffold, and its keys and values are
kept. A prompt takes those of its modules and reads arguments of parameters and the question, which
see all that stands before them (Prompt Cache, Gim et al., 2311.04934).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from mmfast.core.errors import MmfastError, ModelError
from mmfast.core.kv import KVBlock
from mmfast.core.source import name_of
from mmfast.core.spec import Spec
from mmfast.core.trace import Trace
from mmfast.models.cache_name import CACHE
from mmfast.models.cost import encoder_timer
from mmfast.models.prompt import Shot, check_question, media_arguments
from mmfast.models.reduction.inputs import PromptRows, axes, compressed, positions_of, prompt_rows
from mmfast.models.wrappers import position_axes
from mmfast.streams.reuse.media import MediaReuse
from mmfast.streams.reuse.plan import ALL
from mmfast.streams.reuse.prefill import SeenPart
from mmfast.streams.reuse.schema import MEDIA, ModuleParameter, ModulePrompt, PromptSchema
from mmfast.streams.reuse.store import digest, key_of

HEAD = ""  # module of all prompts: what the chat template writes before a question
_MARK = "mmfastmodules"
Read = Callable[[Any], Sequence[Shot]]


@dataclass(frozen=True, eq=False)
class _ModulePart:
    """A part of a module: `extent` positions, and `inputs` of one that is a picture or a clip.

    `name` tells the content from others; `parameter` is None in all but places of arguments.
    """

    ids: Tensor  # `[n]`, before any reduction
    extent: int
    name: str
    inputs: Mapping[str, Any] | None = None
    parameter: str | None = None
    content: int = 0  # tokens of a picture or clip that are no separators


@dataclass(frozen=True, eq=False)
class PlacedModule:
    """A module at the first of its reserved positions."""

    start: int
    parts: tuple[_ModulePart, ...]

    @property
    def stop(self) -> int:
        """Position behind the last one that is reserved."""
        return self.start + sum(part.extent for part in self.parts)


Places = WeakKeyDictionary[PromptSchema, dict[str, PlacedModule]]


@dataclass(eq=False)
class _Assembly:
    """Tokens of a prompt in order: their ids and positions `[A, n]`, and those that were seen."""

    axes: int
    ids: list[Tensor] = field(default_factory=list)
    positions: list[Tensor] = field(default_factory=list)
    seen: list[SeenPart] = field(default_factory=list)
    length: int = 0

    def take(self, ids: Tensor, positions: Tensor, block: KVBlock) -> None:
        self.seen.append(SeenPart(self.length, block, exact=False))
        self._add(ids, positions)

    def read(self, ids: Tensor, start: int) -> None:
        self._add(ids, (start + torch.arange(len(ids))).expand(self.axes, -1))

    def _add(self, ids: Tensor, positions: Tensor) -> None:
        self.ids.append(ids.cpu())
        self.positions.append(positions.cpu())
        self.length += len(ids)


class PromptModules:
    """Modules of schemas for one model, in the store of its `MediaReuse`.

    Args:
        reuse: What keeps keys and values, of any mode but `encoder`.
        read: Decodes a picture or a clip of a module.
        specs: Checked stages at `pixel`, `vit` and `pre`, which act on each medium by itself.
        how: How the tower runs (`encoder=`).
        owner: Whose values are read and written; "" is everyone.
        placed: Places of schemas that are known, of the same processor.

    Raises:
        MmfastError: No keys and values are kept, or a stage reads the question.
        ModelError: The processor has no chat template, or one that writes no question.
    """

    def __init__(
        self,
        reuse: MediaReuse | None,
        read: Read,
        specs: Sequence[Spec] = (),
        how: str | None = None,
        owner: str = "",
        placed: Places | None = None,
    ) -> None:
        if reuse is None or reuse.prefill is None:
            given = "is not given" if reuse is None else f"is {str(reuse.plan)!r}"
            raise MmfastError(
                f"modules of a prompt are keys and values that are kept, and reuse= {given}; give "
                "reuse='prefix'"
            )
        for spec in specs:
            if "query" in spec.method.needs or spec.method.fuses:
                raise MmfastError(
                    f"{str(spec)!r} reads the question, and modules are read before there is one; "
                    "take another stage, or leave modules out"
                )
        self.reuse, self._read, self._specs, self._how = reuse, read, list(specs), how
        self._owner = owner
        self._placed: Places = WeakKeyDictionary() if placed is None else placed
        self._axes = position_axes(reuse.prefill.decoder)
        self._frames: dict[str, tuple[str, str]] = {}

    def inputs(
        self, prompt: ModulePrompt, question: str, beams: int = 1, trace: Trace | None = None
    ) -> dict[str, Any]:
        """Inputs of `generate`, with a cache of all tokens of a prompt but the last.

        MmfastError: an argument is longer than its parameter, or a question is empty.
        """
        trace, found = trace or Trace(), _Assembly(self._axes)
        assert self.reuse.prefill is not None
        placed, kept = self.placed(prompt.schema), self._kept(prompt, trace)
        for name in (HEAD, *prompt.names):
            self._put(found, placed[name], kept[name], prompt.arguments)
        end = max(placed[name].stop for name in (HEAD, *prompt.names))
        tail = self._ids(self._frame()[1], control=True)
        found.read(torch.cat([self._ids(check_question(question)), tail]), end)
        with trace.stage("reuse kv", found.length - 1) as row:
            rows = self._rows(found)
            known = self.reuse.prefill.run(rows, found.seen, ALL, found.length - 1)
            row.tokens_out = known.computed
        cache = known.cache(self.reuse.prefill.decoder.config, found.length - 1)
        if beams > 1:
            cache.batch_repeat_interleave(beams)
        ids = torch.cat(found.ids)[None].to(self.reuse.model.device)
        return {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "position_ids": self._given(rows.positions),
            CACHE: cache,
        }

    def _kept(self, prompt: ModulePrompt, trace: Trace) -> dict[str, Any]:
        """Segments of the modules of a prompt; what is not in the store is encoded."""
        placed, kept = self.placed(prompt.schema), dict[str, Any]()
        start, mine, fresh = time.perf_counter(), len(trace.rows), 0
        with encoder_timer(self.reuse.model) as tower:
            for names in [(HEAD,), *prompt.pieces()]:
                held, new = self._piece(names, placed, trace)
                kept, fresh = kept | held, fresh + new
        ms = (time.perf_counter() - start) * 1e3 - tower.ms  # the tower has a row of its own
        ms -= sum(row.ms for row in trace.rows[mine:] if row.stage != "vit")
        every = sum(len(part.get("ids", ())) for parts in kept.values() for part in parts)
        trace.add("reuse modules", every, fresh, ms)
        return kept

    def placed(self, schema: PromptSchema) -> dict[str, PlacedModule]:
        """Return the places of all modules of a schema; media are decoded, not encoded."""
        known = self._placed.get(schema)
        if known is None:
            known = {HEAD: PlacedModule(0, tuple(self._text(self._frame()[0], control=True)))}
            start = known[HEAD].stop
            for names in schema.groups():
                for name in names:
                    parts = [each for part in schema.modules[name] for each in self._part(part)]
                    known[name] = PlacedModule(start, tuple(parts))
                start = max(known[name].stop for name in names)
            self._placed[schema] = known
        return known

    def counts(self, prompt: ModulePrompt, ids: Tensor) -> tuple[int, int]:
        """Tokens of media of a prompt before any reduction, and those left in `ids` `[1, n]`.

        Separators do not count; no stage drops them.
        """
        placed = self.placed(prompt.schema)
        parts = [part for name in prompt.names for part in placed[name].parts if part.inputs]
        content = sum(part.content for part in parts)
        return content, self._visual(ids) - sum(self._visual(p.ids) for p in parts) + content

    def _visual(self, ids: Tensor) -> int:
        config = self.reuse.base.config
        kinds = (getattr(config, f"{kind}_token_id", None) for kind in MEDIA)
        return sum(int((ids == kind).sum()) for kind in kinds if kind is not None)

    def _frame(self, kind: str = "") -> tuple[str, str]:
        """Text that the chat template writes before a question and behind it; or of a medium."""
        processor = self.reuse.processor
        if getattr(processor, "chat_template", None) is None:
            raise ModelError(f"{type(processor).__name__} has no chat template; give one that has")
        if kind not in self._frames:
            media = [{"type": kind}] if kind else []
            chat = [{"role": "user", "content": [*media, {"type": "text", "text": _MARK}]}]
            text = processor.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
            before, mark, after = text.partition(_MARK)
            if not mark:
                raise ModelError("the chat template does not write the question as it is")
            if kind:
                before = _added(self._frame()[0], before)
            self._frames[kind] = before, after
        return self._frames[kind]

    def _ids(self, text: str, control: bool = False) -> Tensor:
        """Tokens `[n]` of a text, in which names of control tokens are text unless it is ours."""
        tokenizer = self.reuse.processor.tokenizer
        given = tokenizer(text, add_special_tokens=False, split_special_tokens=not control)
        return torch.tensor(given["input_ids"], dtype=torch.long)

    def _text(self, text: str, control: bool = False) -> Iterator[_ModulePart]:
        ids = self._ids(text, control)
        if len(ids):
            yield _ModulePart(ids, len(ids), key_of("text", digest(ids)))

    def _part(self, part: Any) -> Iterator[_ModulePart]:
        if isinstance(part, ModuleParameter):
            ids = torch.full((part.tokens,), self._filler)
            name = key_of("parameter", str(part.tokens))
            yield _ModulePart(ids, part.tokens, name, parameter=part.name)
        elif isinstance(part, str):
            yield from self._text(part)
        else:
            yield from map(self._medium, self._read(part))

    @property
    def _filler(self) -> int:
        """Token that stands for an argument which is not known yet."""
        tokenizer = self.reuse.processor.tokenizer
        each = (tokenizer.unk_token_id, tokenizer.pad_token_id, tokenizer.eos_token_id)
        return next((int(i) for i in each if i is not None), 0)

    def _medium(self, shot: Shot) -> _ModulePart:
        """A picture or clip, with a token behind it that tells where it ends."""
        text = self._frame(shot.kind)[0]
        processor, media = self.reuse.processor, media_arguments(self.reuse.processor, [[shot]])
        options = {"add_special_tokens": False, "return_tensors": "pt", **media}
        device, model = self.reuse.model.device, self.reuse.model
        inputs = dict(processor(text=[text], **options))
        inputs = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in inputs.items()}
        ids = inputs["input_ids"]
        for name, filler in (
            ("input_ids", self._filler),
            ("attention_mask", 1),
            ("token_type_ids", 0),
            ("mm_token_type_ids", 0),
        ):
            if name in inputs:
                inputs[name] = torch.cat([inputs[name], ids.new_full((1, 1), filler)], 1)
        where = axes(model, positions_of(model, inputs), ids.shape[1] + 1)
        pixels = torch.from_numpy(shot.pixels)
        name = key_of(shot.kind, text, digest(pixels), repr(shot.metadata))
        layouts = self.reuse.adapter.layout(self.reuse.base, shot.kind, inputs)
        content = sum(len(layout.content()) for layout in layouts)
        extent = int(where[:, -1].max())
        return _ModulePart(ids[0].cpu(), extent, name, inputs, content=content)

    def _piece(
        self, names: Sequence[str], placed: Mapping[str, PlacedModule], trace: Trace
    ) -> tuple[dict[str, Any], int]:
        """Segments by module of what is encoded together, and tokens that were encoded now."""
        told = [f"{placed[n].start} {[part.name for part in placed[n].parts]}" for n in names]
        reduce = f"{name_of(self._specs)} {self._how}"
        key = key_of("modules", self.reuse.fingerprint(reduce, self._owner), *told)
        held = self.reuse.store.get(key, self.reuse.model.device)
        if held is not None:  # by number: two schemas may call one module by other names
            return dict(zip(names, held, strict=True)), 0
        every = [self._encodable(placed[name], trace) for name in names]
        if not any(every):  # a template that writes nothing before the question
            return {name: [] for name in names}, 0
        rows = _joined([rows for parts in every for rows, _ in parts])
        assert self.reuse.prefill is not None
        known, at = self.reuse.prefill.run(rows), 0
        segments: list[list[dict[str, Any]]] = []
        for name, parts in zip(names, every, strict=True):
            segments.append([])
            for part, (own, ids) in zip(placed[name].parts, parts, strict=True):
                stop = at + len(own.hidden)
                where = own.positions.cpu()
                if part.parameter is not None or stop == at:
                    segments[-1].append({"first": int(where.min()) if stop > at else 0})
                else:
                    block = known.part(at, stop, rows.positions)
                    segments[-1].append({"ids": ids, "positions": where, "block": block})
                at = stop
        self.reuse.store.put(key, segments)
        return dict(zip(names, segments, strict=True)), at

    def _encodable(self, module: PlacedModule, trace: Trace) -> list[tuple[PromptRows, Tensor]]:
        """Rows of the parts of a module at their positions, and their ids `[n]`."""
        start, found = module.start, []
        for part in module.parts:
            rows, ids = self._text_rows(part.ids), part.ids
            if part.inputs is not None:
                rows, ids = self._media_rows(part.inputs, trace)
            where = rows.positions + start
            found.append((replace(rows, positions=where), ids))
            start += part.extent
        return found

    def _text_rows(self, ids: Tensor) -> PromptRows:
        words = self.reuse.base.get_input_embeddings()
        hidden = words(ids.to(words.weight.device))
        where = torch.arange(len(ids), device=hidden.device).expand(self._axes, -1)
        none = torch.zeros(len(ids), dtype=torch.bool, device=hidden.device)
        return PromptRows(hidden, where, {}, none, (), none)

    def _media_rows(self, inputs: Mapping[str, Any], trace: Trace) -> tuple[PromptRows, Tensor]:
        reuse = self.reuse
        given = reuse.encoded(inputs, self._specs, self._how, trace, self._owner)
        early = [spec for spec in self._specs if spec.site != "vit"]
        rest, _ = compressed(reuse.model, given, early, trace)
        rows = prompt_rows(reuse.model, rest, given["mm_encoder_outputs"])
        n = len(rows.hidden) - 1  # without the token behind it
        cut = PromptRows(
            rows.hidden[:n], rows.positions[:, :n], {}, rows.visual[:n], rows.planes, rows.fused[:n]
        )
        return cut, rest["input_ids"][0, :n].cpu()

    def _put(
        self,
        found: _Assembly,
        module: PlacedModule,
        segments: Sequence[Mapping[str, Any]],
        arguments: Mapping[str, str],
    ) -> None:
        for part, segment in zip(module.parts, segments, strict=True):
            if "block" in segment:
                found.take(segment["ids"], segment["positions"], segment["block"])
                continue
            text = arguments.get(part.parameter or "", "")
            ids = self._ids(text) if text else torch.zeros(0, dtype=torch.long)
            if len(ids) > part.extent:
                raise MmfastError(
                    f"{part.parameter}={text!r} has {len(ids)} tokens, and its parameter "
                    f"{part.extent}; shorten it, or give the schema a larger number"
                )
            if len(ids):
                found.read(ids, segment["first"])

    def _rows(self, found: _Assembly) -> PromptRows:
        """Rows of a prompt, with embeddings where tokens are read, zeros where they were."""
        words = self.reuse.base.get_input_embeddings()
        device = words.weight.device
        hidden = words(torch.cat(found.ids).to(device))
        positions = torch.cat(found.positions, 1).to(device)
        none = torch.zeros(found.length, dtype=torch.bool, device=device)
        return PromptRows(hidden, positions, {}, none, (), none)

    def _given(self, positions: Tensor) -> Tensor:
        """Positions as `generate` takes them: under M-RoPE behind a row of plain ones."""
        if self._axes == 1:
            return positions
        plain = torch.arange(positions.shape[1], device=positions.device)
        return torch.cat([plain[None], positions])[:, None]


def _added(plain: str, text: str) -> str:
    """Return what `text` has more than `plain`, in one place."""
    first = _alike(plain, text)
    rest = _alike(plain[first:][::-1], text[first:][::-1])
    return text[first : len(text) - rest]


def _alike(a: str, b: str) -> int:
    """Return how many characters two texts begin with together."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def _joined(every: Sequence[PromptRows]) -> PromptRows:
    """Rows one behind the other."""
    first = every[0].hidden
    planes = [each.planes for each in every if each.planes]
    return PromptRows(
        torch.cat([each.hidden.to(first) for each in every]),
        torch.cat([each.positions.to(first.device) for each in every], 1),
        {},
        torch.cat([each.visual.to(first.device) for each in every]),
        tuple(torch.cat(parts) for parts in zip(*planes, strict=True)),
        torch.cat([each.fused.to(first.device) for each in every]),
    )
