"""Selection: at every decode step attention reads the entries that its query chooses.

Everything stays in the cache. Prompts read all of it; a decode step, and each of several drafts for
itself, reads a part in layers of full attention. What a method keeps up about entries lies with
them (`kv.room`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmfast.caches.plan import CachePlan
from mmfast.core.errors import ModelError
from mmfast.core.kv import LayerStep, StepChoice, StepSelector
from mmfast.core.trace import SELECT, Row, StepRead, Trace
from mmfast.models.kv.host_entries import fetch, send
from mmfast.models.kv.notes import KIND, SENTENCE, VISUAL, fill, kinds_of
from mmfast.models.kv.packs import shrinkable
from mmfast.models.kv.retrieval import WHOLE, frames_of
from mmfast.models.kv.room import RoomyLayer
from mmfast.models.kv.sentences import Sentences
from mmfast.models.reduction.cache_layers import adopt, alike, is_short
from mmfast.models.reduction.call import PassState
from mmfast.models.reduction.probe import Around, intercepting
from mmfast.models.reduction.sequence import Sequences
from mmfast.ops.pages import selected, selected_attention, selected_bias

# What an attention function returns: outputs, and the weights where it makes them (eager).
_Answer = tuple[Tensor, Tensor | None]
_HIDDEN = -1e4  # an addend below this hides an entry, in half precision as well


@dataclass(eq=False)
class StepAccount:
    """One decode step in all layers: state of the method, and sums for the trace."""

    cache: Any
    shared: dict[Any, dict[str, Any]] = field(default_factory=dict)
    heads: int = 0  # of all layers and rows
    held: int = 0
    read: int = 0
    nbytes: int = 0
    fetched: int = 0
    awaited: int = 0
    ms: float = 0.0
    waited_ms: float = 0.0
    pending: int = 0  # bytes that have been sent for
    resident: int = 0


@dataclass(frozen=True)
class Part:
    """Rows of a batch whose entries are chosen together: those from `start` on, or at `where`."""

    rows: slice
    start: int = 0
    where: Tensor | None = None

    def of(self, x: Tensor) -> Tensor:
        """Keys or values `[b, H, n, d]` of these rows."""
        mine = x[self.rows] if len(x) > 1 else x
        if self.where is not None:
            return mine.index_select(2, self.where.to(x.device))
        return mine[:, :, self.start :] if self.start else mine

    def spread(self, weights: Tensor, index: Tensor, n: int) -> Tensor:
        """Attention `[b, Hq, 1, m]` to entries `index` `[b, H, m]` over all n, 0 if not read."""
        index = index.repeat_interleave(weights.shape[1] // index.shape[1], 1)
        index = index + self.start if self.where is None else self.where.to(index.device)[index]
        zeros = weights.new_zeros(*weights.shape[:3], n)
        return zeros.scatter_add(3, index[:, :, None], weights)  # fillers weigh nothing

    def bias(self, bias: Tensor | None) -> Tensor | None:
        """The addend `[b, 1 or Hq, n]` to the logits of these rows."""
        if bias is None:
            return None
        mine = bias[self.rows] if len(bias) > 1 else bias
        if self.where is None:
            return mine[..., self.start :]
        return mine.index_select(2, self.where.to(bias.device))


@dataclass(frozen=True, eq=False)
class Asked:
    """One query of a call in one layer; `turn` is its number among the drafts.

    `count` is the number of drafts and the token before them. `stock` is the attention function
    with all arguments but query, keys, values and mask, `kind` its name; `plain` where it does
    nothing but what sdpa does.
    """

    index: int
    turn: int
    count: int
    layer: Any
    stock: Callable[..., Any]
    kind: str
    plain: bool
    scale: float


class _Steps(threading.local):
    step: StepAccount | None = None
    ids: Tensor | None = None  # `[B, n]` of the call
    row: Row | None = None  # of the answer at hand
    sums: tuple[int, float, float, int] = (0, 0.0, 0.0, 0)  # its steps, and what they read


class Selection:
    """The policy of role `select` of one attached model; position policies say what is read anyway.

    The trace gets a `StepRead` for every decode step, and for every answer a row `select`: entries
    held and read per layer and head and bytes read, all as means over steps, and the milliseconds
    in which was chosen.
    """

    def __init__(
        self,
        selector: StepSelector,
        plan: CachePlan,
        layers: Collection[int],
        state: PassState,
        trace: Trace,
        sentences: Sentences | None,
    ) -> None:
        selector.check(len(layers))
        self._sentences = sentences
        self._selector, self._plan, self._state, self._trace = selector, plan, state, trace
        self._depths = {index: depth for depth, index in enumerate(layers)}
        self._order = list(layers)
        self._by_kind = any(spec.method.needs for spec in plan.position)
        self._parks = plan.select is not None and KIND in plan.select.method.needs
        self._known: dict[tuple[int, torch.device], Tensor] = {}
        self._local = _Steps()

    @classmethod
    def of(
        cls,
        plan: CachePlan,
        layers: Collection[int],
        state: PassState,
        trace: Trace,
        model: Any,
    ) -> Selection | None:
        """Return the policy of a plan; None where it has none, or one that reads everything."""
        selector = plan.selector()
        if selector is None or plan.select is None or plan.select.whole:
            return None
        method, knobs, sentences = plan.select.method, plan.select.knobs, None
        if SENTENCE in method.needs:
            sentences = Sentences(model, method.name, knobs.get("ends", ""))
        return cls(selector, plan, layers, state, trace, sentences)

    @contextmanager
    def watching(self, modules: Mapping[int, nn.Module]) -> Iterator[None]:
        """Choose what the attention of these modules reads, by decoder layer."""
        around: Any = torch.compiler.disable(self._attend)
        mine: dict[nn.Module, Around] = {m: partial(around, i) for i, m in modules.items()}
        with intercepting(mine, innermost=True):
            yield

    def attend(
        self, index: int, attention: Any, query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        """Attend with the token of a decode step of one row; see `KVStage.attend`."""
        given = attention.module, query, key, value, None, *attention.args
        found: Tensor = self._attend(index, attention.stock, *given, **attention.options)[0]
        if index == self._order[-1]:
            self.leave()
        return found

    def enter(self, cache: Any, decoding: bool, ids: Tensor | None) -> None:
        """A call begins, of a decode step or of a part of a prompt, of tokens `ids` `[B, n]`."""
        local = self._local
        local.step, local.ids = None, ids
        if not decoding:
            local.row = None
        if cache is None or not decoding:
            return
        for index in self._depths:
            if index < len(cache.layers) and not is_short(cache.layers[index]):
                shrinkable(cache, index)
            if index < len(cache.layers) and not isinstance(cache.layers[index], RoomyLayer):
                adopt(cache, index, RoomyLayer)
        self._fetching(cache, self._selector.host)
        local.step = StepAccount(cache)
        if self._selector.host:
            stored = (cache.layers[i] for i in self._depths if i < len(cache.layers))
            local.step.pending = sum(layer.move_to_host() for layer in stored)

    def arrive(self, layer: Any, sequences: Sequences) -> None:
        """Note the sentences of a part of a prompt that a layer has just got."""
        ids = self._local.ids
        if self._sentences is None:
            return
        if ids is not None and sequences.index is not None:
            ids = ids.gather(1, sequences.index.to(ids.device).clamp_min(0))
        self._sentences.arrive(layer, ids, frames_of(sequences, WHOLE), kinds_of(sequences))

    def _continue(self, layer: Any) -> None:
        """Note the sentences of new tokens of an answer."""
        ids = self._local.ids
        if self._sentences is None:
            return
        if layer.notes is None or SENTENCE not in layer.notes:
            self._trace.warn(
                f"cache '{self._plan}' reads everything: the prompt of this cache was read before "
                "attach(); attach first"
            )
            return
        frames = torch.full((1, 1), -1) if ids is None else torch.full_like(ids, -1)
        self._sentences.arrive(layer, ids, frames, torch.zeros_like(frames))

    def leave(self) -> None:
        """A call has ended, perhaps with an exception."""
        local = self._local
        step, local.step = local.step, None
        if step is not None and self._selector.host:
            self._fetching(step.cache, False)
        if step is None or not step.heads:
            return
        held, mean = step.held / step.heads, step.read / step.heads
        brought = step.fetched, step.awaited, step.waited_ms, step.resident
        read = StepRead(held, mean, step.nbytes, *brought)
        self._trace.reads.append(read)
        if local.row is None:
            local.row, local.sums = Row(SELECT, method=str(self._plan)), (0, 0.0, 0.0, 0)
            self._trace.rows.append(local.row)
        steps, held, mean, nbytes = local.sums
        steps, held, mean = steps + 1, held + read.held, mean + read.read
        nbytes += read.nbytes
        local.sums, row = (steps, held, mean, nbytes), local.row
        row.ms += step.ms
        row.tokens_in, row.tokens_out = round(held / steps), round(mean / steps)
        row.peak_bytes = nbytes // steps

    def _fetching(self, cache: Any, now: bool) -> None:
        """Say whether layers hand out entries where they lie; outside a step they bring them."""
        for layer in cache.layers:
            if isinstance(layer, RoomyLayer):
                layer.host, layer.fetched = layer.host or now, now

    def _attend(
        self,
        index: int,
        call: Around,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        step = self._local.step
        layer = None if step is None else step.cache.layers[index]
        if not isinstance(layer, RoomyLayer) or layer.room is None:
            return call(module, query, key, value, attention_mask, *args, **kwargs)
        if attention_mask is not None and not isinstance(attention_mask, Tensor):
            raise ModelError(
                f"cache '{self._plan}' cannot cut a flex attention mask; call "
                "model.set_attn_implementation('sdpa')"
            )

        self._continue(layer)

        def stock(*given: Any) -> Any:
            return call(module, *given, *args, **kwargs)

        kind = str(getattr(getattr(module, "config", None), "_attn_implementation", ""))
        plain = kind == "sdpa" and not any(kwargs.get(name) is not None for name in _OWN)
        scale = kwargs.get("scaling")
        scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
        length, found = query.shape[2], list[_Answer]()
        for turn in range(length):  # each draft chooses for itself
            n = key.shape[2] - length + turn + 1
            asked = Asked(index, turn, length, layer, stock, kind, plain, scale)
            both = key[:, :, :n], value[:, :, :n]
            mask = _mask_of(attention_mask, turn, length, n)
            found.append(self._answer(asked, query[:, :, turn : turn + 1], *both, mask))
        return found[0] if length == 1 else _joined(found, 1, 2, key.shape[2])

    def _answer(
        self, asked: Asked, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
    ) -> _Answer:
        """Outputs `[B, 1, Hq, d]` and weights `[B, Hq, 1, n]` of one query per row."""
        parts = self._parts(mask, len(key), query.device)
        choices = [self._chosen(asked, part, query, part.of(key)) for part in parts]
        token = (key.shape[-1] + value.shape[-1]) * key.element_size()
        if all(choice.pages is None for choice in choices):
            for part in parts:
                shape = part.of(key).shape
                self._count(shape[0] * shape[1], shape[2], shape[0] * shape[1] * shape[2], token)
            begin, device = time.perf_counter(), query.device
            both = key.to(device), value.to(device)
            if self._selector.host:
                count, ms = key.numel() // key.shape[-1], (time.perf_counter() - begin) * 1e3
                self._count_fetched(count, count, token, ms)
            whole: _Answer = asked.stock(query, *both, mask)
            return whole
        bias, outputs = _bias(mask), list[_Answer]()
        for part, choice in zip(parts, choices, strict=True):
            keys, values = part.of(key), part.of(value)
            index, real = _entries(choice, keys, query.device)
            heads, n = keys.shape[0] * keys.shape[1], keys.shape[2]
            read = heads * index.shape[-1] if real is None else int(real.sum())
            self._count(heads, n, read, token)
            both = keys, values
            if self._selector.host:
                both = self._brought(asked, part, choice, index, *both)
            mine = query[part.rows], *both, index, real, part.bias(bias)
            output, weights = self._read(asked, *mine)
            weights = None if weights is None else part.spread(weights, index, key.shape[2])
            outputs.append((output, weights))
        return outputs[0] if len(outputs) == 1 else _joined(outputs, 0, 0, key.shape[2])

    def _brought(
        self,
        asked: Asked,
        part: Part,
        choice: StepChoice,
        index: Tensor,
        keys: Tensor,
        values: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Bring the entries of a choice, and send for those that are read next."""
        step, memory, device = self._local.step, self._memory(asked.layer, part), index.device
        assert step is not None
        below = f"below{asked.turn}"  # each draft has what the layer before chose for it
        name = {"name": below} if below in memory else {}
        brought = fetch(choice, index, keys, values, memory, device, **name)
        step.pending -= brought.early
        if choice.ahead is not None:
            step.pending += send(choice.ahead, keys, values, memory, device)
        following = self._following(asked) if choice.onward else None
        if following is not None:
            both = _held(part, following.keys), _held(part, following.values)
            if choice.tail <= both[0].shape[2]:  # a block that drafts filled is not there yet
                there = self._memory(following, part)
                step.pending += send(choice, *both, there, device, below)
        heads, token = keys.shape[0] * keys.shape[1], (keys.shape[3] + values.shape[3])
        counts = heads * index.shape[-1], heads * brought.awaited, token * keys.element_size()
        self._count_fetched(*counts, brought.ms)
        return brought.pair

    def _following(self, asked: Asked) -> Any:
        """The next layer, where it holds the same entries but for those of this call."""
        step, depth = self._local.step, self._depths[asked.index] + 1
        index = self._order[depth] if depth < len(self._order) else -1
        if step is None or not 0 <= index < len(step.cache.layers):
            return None
        found: Any = step.cache.layers[index]
        stored = isinstance(found, RoomyLayer) and found.room is not None
        return found if stored and alike(found, asked.layer, asked.count) else None

    def _same(self, asked: Asked) -> bool:
        """The layer holds the same entries as the one before it."""
        step, depth = self._local.step, self._depths[asked.index]
        assert step is not None
        return depth > 0 and alike(step.cache.layers[self._order[depth - 1]], asked.layer)

    def _read(
        self,
        asked: Asked,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        index: Tensor,
        real: Tensor | None,
        bias: Tensor | None,
    ) -> _Answer:
        """Attention to the chosen entries, by the stock function where it does more than sdpa.

        Of entries in host memory, `keys` and `values` are the chosen ones.
        """
        host = self._selector.host
        if asked.plain and not host:
            read = partial(selected_attention, query, keys, values, index)
            return read(real=real, bias=bias, scale=asked.scale).transpose(1, 2), None
        mask = selected_bias(index, real, bias, query, keys.shape[1])
        if asked.plain:
            added = None if mask is None else mask.flatten(1, 2)
            read = partial(selected_attention, query, keys, values, bias=added)
            return read(scale=asked.scale).transpose(1, 2), None
        if mask is not None and asked.kind != "eager":
            raise ModelError(
                f"heads or rows read different numbers of entries under cache '{self._plan}', "
                f"which {asked.kind!r} attention cannot; call model.set_attn_implementation('sdpa')"
            )
        if mask is not None:
            mask = mask.flatten(1, 2)[:, :, None].clamp_min(torch.finfo(query.dtype).min)
        both = (keys, values) if host else selected(keys, values, index)
        found: _Answer = asked.stock(query, *both, mask)
        return found

    def _memory(self, layer: Any, part: Part) -> dict[str, Any]:
        """The state of the method beside the entries of some rows of a layer."""
        key = self._selector, part.rows.start, part.start
        found: dict[str, Any] = layer.room.memory.setdefault(key, {})
        return found

    def _chosen(self, asked: Asked, part: Part, query: Tensor, keys: Tensor) -> StepChoice:
        """Let the method choose for rows of a layer."""
        step = self._local.step
        assert step is not None
        begin = time.perf_counter()
        given = LayerStep(
            query=query[part.rows].unflatten(1, (keys.shape[1], -1))[:, :, :, 0],
            keys=keys,
            scale=asked.scale,
            depth=self._depths[asked.index],
            depths=len(self._depths),
            stays=self._stays(asked.layer, part, keys.shape[2], query.device),
            visual=self._visual(asked.layer, part, keys.shape[2], query.device),
            sentence=self._sentence(asked.layer, part, keys.shape[2], query.device),
            same=self._selector.host and self._selector.across and self._same(asked),
            memory=self._memory(asked.layer, part),
            shared=step.shared.setdefault((part.rows.start, asked.turn), {}),
        )
        choice = self._selector.choose(given)
        step.nbytes += choice.nbytes
        step.ms += (time.perf_counter() - begin) * 1e3
        return choice

    def _count(self, heads: int, held: int, read: int, token: int) -> None:
        """Count so many heads that hold `held` entries, of which `read` are read in all heads."""
        step = self._local.step
        assert step is not None
        step.heads, step.held = step.heads + heads, step.held + heads * held
        step.read, step.nbytes = step.read + read, step.nbytes + read * token

    def _count_fetched(self, fetched: int, awaited: int, token: int, ms: float) -> None:
        """Count entries of `token` bytes from host memory, those waited for, and how long."""
        step = self._local.step
        assert step is not None
        step.fetched, step.awaited = step.fetched + fetched * token, step.awaited + awaited * token
        step.waited_ms += ms
        step.resident = max(step.resident, fetched * token + step.pending)

    def _parts(self, mask: Tensor | None, batch: int, device: torch.device) -> list[Part]:
        """Rows that are chosen for together; a row with padding stands alone, without it."""
        real = _real(mask)
        if real is None:
            size = 1 if self._selector.alone or self._by_kind else batch
            return [Part(slice(b, b + size)) for b in range(0, batch, size)]
        found = []
        for b, mine in enumerate(real.expand(batch, -1).to(device)):
            start = int(mine.to(torch.int8).argmax())
            gaps = not bool(mine[start:].all())
            where = mine.nonzero()[:, 0] if gaps else None
            found.append(Part(slice(b, b + 1), 0 if gaps else start, where))
        return found

    def _sentence(self, layer: Any, part: Part, n: int, device: torch.device) -> Tensor | None:
        """Numbers `[1 or H, n]` of the sentences of a row; None where none is known."""
        if self._sentences is None or layer.notes is None or SENTENCE not in layer.notes:
            return None
        codes: Tensor = layer.notes[SENTENCE][part.rows.start].to(device)
        where = part.where
        mine = codes[:, part.start :] if where is None else codes[:, where.to(device)]
        return mine[:, :n] >> 1

    def _visual(self, layer: Any, part: Part, n: int, device: torch.device) -> Tensor | None:
        """Visual entries `[n]` of a row, for a method that parks some; None without any known."""
        if not self._parks:
            return None
        found = None if layer.notes is None else _kinds(layer, part, n, device) == VISUAL
        if found is None or not bool(found.any()):
            self._trace.warn(
                f"cache '{self._plan}' reads everything: this cache has no visual tokens that were "
                "read under attach(); attach before a prompt with a picture, or leave it out"
            )
            return None
        return found

    def _stays(self, layer: Any, part: Part, n: int, device: torch.device) -> Tensor | None:
        """Entries `[n]` that position policies always read."""
        if not self._plan.position:
            return None
        if self._by_kind and layer.notes is not None:
            return self._plan.standing(_kinds(layer, part, n, device))
        known = self._known.get((n, device))
        if known is None:  # the same for all layers of a step
            known = self._plan.standing(torch.zeros(n, dtype=torch.int64, device=device))
            self._known = {(n, device): known}
        return known


def _kinds(layer: Any, part: Part, n: int, device: torch.device) -> Tensor:
    """Kinds `[n]` of the entries of a row."""
    kinds = fill(layer)[KIND][part.rows.start, 0].to(device).long()
    return (kinds[part.start :] if part.where is None else kinds[part.where.to(device)])[:n]


def _joined(answers: Sequence[_Answer], rows: int, width: int, n: int) -> _Answer:
    """Outputs beside one another in dim `rows`, their weights over n entries in dim `width`."""
    weights = [F.pad(each, (0, n - each.shape[3])) for _, each in answers if each is not None]
    all_of_them = len(weights) == len(answers)
    outputs = torch.cat([output for output, _ in answers], rows)
    return outputs, torch.cat(weights, width) if all_of_them else None


_OWN = ("softcap", "s_aux", "position_bias")  # what some families add to attention


def _held(part: Part, x: Tensor) -> Tensor:
    """Keys or values of rows of a layer that has not got the tokens of the call at hand yet."""
    if part.where is None:
        return part.of(x)
    where = part.where[part.where < x.shape[2]]
    return replace(part, where=where).of(x)


def _entries(
    choice: StepChoice, keys: Tensor, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """Places `[b, H, m]` of the entries that are read, and False where one is a filler."""
    shape = (len(keys), keys.shape[1], -1)
    if choice.pages is None:
        return torch.arange(keys.shape[2], device=device).expand(shape), None
    index, real = choice.entries(keys.shape[2])
    return index.expand(shape), None if real is None else real.expand(shape)


def _mask_of(mask: Tensor | None, turn: int, length: int, n: int) -> Tensor | None:
    """The mask of one of the queries of a call, over the entries up to its own."""
    if mask is None or mask.ndim == 2:
        return mask if mask is None else mask[:, : mask.shape[1] - length + turn + 1][:, -n:]
    return mask[:, :, turn if mask.shape[2] > 1 else 0, :n][:, :, None]


def _real(mask: Tensor | None) -> Tensor | None:
    """`[B or 1, n]` False at padding; None without any."""
    if mask is None:
        return None
    if mask.ndim == 2:
        real = mask != 0
    else:
        seen = mask[:, :, 0]
        real = (seen if seen.dtype == torch.bool else seen > _HIDDEN).any(1)
    return None if bool(real.all()) else real


def _bias(mask: Tensor | None) -> Tensor | None:
    """The addend `[B or 1, 1 or Hq, n]` to the logits of entries that are no padding."""
    if mask is None or mask.ndim == 2 or mask.dtype == torch.bool:
        return None
    return mask[:, :, 0] if bool((mask.where(mask > _HIDDEN, 0) != 0).any()) else None
