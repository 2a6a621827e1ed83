"""Reading a part of a cache: text, what was generated, and the stored blocks that a question wants.

Everything stays in the cache, at its own position. While a prompt with media is prefilled all of
it is read; from its end on a layer reads the blocks that the queries of the question have chosen,
and a later prompt of text alone chooses anew before it reads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mmfast.caches.plan import CachePlan
from mmfast.core.kv import Retriever
from mmfast.models.kv_blocks import frames_of, index_blocks
from mmfast.models.kv_notes import CLUSTER, FRAME, KIND, PADDING, READ, VISUAL, fill
from mmfast.models.kv_parts import parted
from mmfast.models.kv_prompt import Part
from mmfast.models.lengths import is_short
from mmfast.models.probe import intercepting
from mmfast.models.raw import Raw, RawCapture
from mmfast.models.sequence import Sequences

_CHOSEN = "_mmfast_chosen"  # on a cache layer: the note READ and where it says yes


@dataclass(eq=False)
class Pending:
    """What a cache layer keeps of a prompt until it ends.

    Attributes:
        raw: Keys `[B, H, n, d]` before RoPE of each call.
        asked: `[B, Hq, T, d]` queries before RoPE, of the calls from the last media on.
        seeing: The prompt has brought media.
    """

    raw: list[Tensor] = field(default_factory=list)
    asked: Tensor | None = None
    seeing: bool = False


class _Local(threading.local):
    cache: Any = None
    part: Part | None = None
    raw: Raw | None = None
    recording: Any = None


class Reading:
    """The retrieval policy of one attached model.

    Args:
        plan: With a policy of role `retrieve`; position policies say what is always read.
        text: The text model.
        layers: Its layers of full attention.
        seeing: Tells whether the call that this thread is in brings media.
    """

    def __init__(
        self, plan: CachePlan, text: Any, layers: list[int], seeing: Callable[[], bool]
    ) -> None:
        self._retriever: Retriever = plan.retriever()
        self._plan, self._text, self._layers, self._seeing = plan, text, layers, seeing
        self._capture: RawCapture | None = None
        self._local = _Local()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Stand around the attention of the layers."""
        attentions = {self._text.layers[i].self_attn: i for i in self._layers}
        around: Any = torch.compiler.disable(self._around)
        with intercepting({module: partial(around, i) for module, i in attentions.items()}):
            yield

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Look at keys and queries before RoPE, which prompts need."""
        capture = self._capture = RawCapture(self._text)
        try:
            yield
        finally:
            capture.remove()

    def enter(self, cache: Any, part: Part | None) -> None:
        """A call begins; `part` is None where it brings no prompt, or keeps no cache."""
        self.leave()
        local = self._local
        local.cache, local.part = cache, part
        if part is not None and self._capture is not None:
            local.recording = self._capture.recording()
            local.raw = local.recording.__enter__()

    def leave(self) -> None:
        """A call has ended, perhaps with an exception."""
        local = self._local
        if local.recording is not None:
            local.recording.__exit__(None, None, None)
        local.cache, local.part, local.raw, local.recording = None, None, None, None

    def arrive(self, layer: Any, index: int, sequences: Sequences) -> None:
        """Behind a layer that has stored a part of a prompt; its notes are up to date."""
        raw = self._local.raw
        assert raw is not None
        keys, queries = raw.keys.pop(index), raw.queries.pop(index)
        notes, codes = fill(layer), frames_of(sequences).to(keys.device)
        n = keys.shape[2]
        codes = codes.expand(len(keys), n)[:, None]
        old = notes.get(FRAME)
        if old is None:
            shape = (len(keys), 1, notes[KIND].shape[-1])
            old = torch.full(shape, -1, dtype=codes.dtype, device=keys.device)
        layer.notes = {**notes, FRAME: torch.cat([old[..., : old.shape[-1] - n], codes], -1)}
        layer.pending = pending = layer.pending or Pending()
        pending.raw.append(keys)
        here = bool((codes >= 0).any())
        before = None if here else pending.asked
        pending.asked = queries if before is None else torch.cat([before, queries], 2)
        pending.seeing |= here

    def prompt_ends(self, layer: Any, drafts: int) -> None:
        """Index what came, and choose what is read from here on."""
        pending: Pending = layer.pending
        layer.pending = None
        index_blocks(layer, self._retriever, torch.cat(pending.raw, 2))
        kinds = layer.notes[KIND][:, 0]
        assert pending.asked is not None
        asked, stop = pending.asked, kinds.shape[1] - drafts
        places = [_question(mine[kinds.shape[1] - asked.shape[2] : stop]) for mine in kinds]
        self._choose(layer, [asked[b].index_select(1, mine) for b, mine in enumerate(places)])

    def _choose(self, layer: Any, queries: list[Tensor]) -> None:
        """Choose what is read from here on, by the queries `[Hq, T, d]` of each row."""
        notes = fill(layer)
        kinds, clusters = notes[KIND][:, 0], notes[CLUSTER][:, 0]
        read = torch.ones(clusters.shape, dtype=torch.bool, device=clusters.device)
        for b, found in enumerate(layer.per_row["index"]):
            if found is None:
                continue
            chosen = self._retriever.choose(queries[b], found).to(read.device)
            read[b] = (clusters[b] < 0) | chosen[clusters[b].clamp_min(0)]
            if self._plan.position:
                real = (kinds[b] != PADDING).nonzero()[:, 0]
                read[b, real] |= self._plan.standing(kinds[b, real].long())
        rest = {name: note for name, note in notes.items() if name != READ}
        # Where everything is read the layer is as stock as ever.
        layer.notes = rest if bool(read.all()) else {**rest, READ: read[:, None]}

    def _around(
        self,
        index: int,
        call: Callable[..., Any],
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        mask = attention_mask
        local = self._local
        layers = () if local.cache is None else local.cache.layers
        layer = layers[index] if index < len(layers) else None
        if layer is not None and is_short(layer) and layer.per_row:
            pending = layer.pending or Pending()
            if local.part is None and mask is None and len(key) == 1:
                key, value = _as_chosen(layer, key, value)
            elif local.part is None or not (pending.seeing or self._seeing()):
                if local.part is not None and local.raw is not None:
                    self._choose(layer, list(local.raw.queries[index]))
                read = fill(layer).get(READ)
                if read is not None:
                    key, value, mask = parted(module, query, key, value, mask, read[:, 0])
        return call(module, query, key, value, mask, *args, **kwargs)


def _as_chosen(layer: Any, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """What one conversation reads in a decode step: what was chosen, and all that came since.

    The notes need not be up to date for that, so they are not looked at again at every step.
    """
    read = layer.notes.get(READ)
    if read is None:
        return key, value
    known: tuple[Tensor, Tensor] | None = layer.__dict__.get(_CHOSEN)
    if known is None or known[0] is not read:
        known = layer.__dict__[_CHOSEN] = (read, read[0, 0].nonzero()[:, 0])
    new = torch.arange(read.shape[-1], key.shape[2], device=read.device)
    where = torch.cat([known[1], new]).to(key.device)
    return key.index_select(2, where), value.index_select(2, where)


def read_of(layer: Any) -> Tensor:
    """How many entries of each row are read, `[B]`."""
    notes = fill(layer)
    real = notes[KIND][:, 0] != PADDING
    return (real & notes[READ][:, 0] if READ in notes else real).sum(1)


def _question(kinds: Tensor) -> Tensor:
    """Places of the text behind the last visual token, at least of the last token: `[T]`."""
    real = (kinds != PADDING).nonzero()[:, 0]
    visual = (kinds == VISUAL).nonzero()[:, 0]
    behind = real if not len(visual) else real[real > visual[-1]]
    return behind if len(behind) else real[-1:]
