"""Drafts of running answers, which a step of their batch verifies beside the others' next tokens.

A token of an answer is a function of its logits, its seed and its number, drawn ones included (see
`Chooser`). So a draft stands exactly where the answer would have said it: with the probability of
the rule of exact sampling for a draft that was not drawn, and without a change to what a seed says.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mmfast.caches.plan import CachePlan
from mmfast.core.errors import SpecError
from mmfast.core.spec import Spec
from mmfast.decoding.row import Costs, DraftLength
from mmfast.decoding.speculation import (
    LOOKUP,
    RECYCLE,
    SELF,
    DecodePlan,
    Recycler,
    TextDrafts,
    check_kind,
)
from mmfast.models.decoder.draft_stage import check_decode
from mmfast.models.decoder.drafters import GUESS
from mmfast.models.kv.view import view_plan
from mmfast.models.wrappers import CONV
from mmfast.serve.engine.adapters import using
from mmfast.serve.engine.base import SamplingOptions
from mmfast.serve.engine.kv.bucket import Entries
from mmfast.serve.engine.kv.rows import AnswerRow, AnswerRows
from mmfast.serve.engine.lane import Lane

_OWNERS = 16  # tenants whose statistics of what follows a token are kept
_PLAIN = 64  # steps after which one without drafts is timed again


def check_served(
    plan: DecodePlan, model: Any, lane: Lane | None, specs: Sequence[Spec], cache: CachePlan | None
) -> None:
    """Refuse (SpecError, ModelError) drafts that the batch cannot verify, or not beside the rest.

    `lane` is None where the rows of the model cannot be told apart.
    """
    spec = f"decode={plan.text!r}"
    check_kind(plan)
    if lane is None or CONV in lane.kinds:
        raise SpecError(
            f"{spec} takes drafts back, which a batch of {type(model).__name__} cannot: its layers "
            "keep no keys to drop; leave out decode=, or use a pipeline"
        )
    check_decode(plan, model, specs, cache)
    if plan.views and cache is not None:
        raise SpecError(
            f"{spec} and cache {str(cache)!r} both choose behind a prompt, of which the server "
            "does one; leave out one of them, or use decode='recycle'"
        )


NO_VIEW = (  # a note of an answer, about its spec
    "decode {!r} drafted nothing: the prompt has no visual keys to leave out; use decode='recycle' "
    "for text"
)


def served_view(plan: DecodePlan, media: Collection[Any], batched: bool) -> CachePlan | None:
    """Return the choice of what the model drafts on; None where that is not a part of its keys.

    `media` are those of the prompt, and `batched` tells if it is read in the batch: else SpecError.
    """
    if not plan.views or not media:
        return None
    if not batched:
        raise SpecError(
            f"decode={plan.text!r} needs a prompt that is read in the batch, which this one is "
            "not, for its reducers, sparse prefill or stored media; use decode='recycle', or leave "
            "them out"
        )
    return view_plan(plan.score, plan.budget)


@dataclass(eq=False)
class AnswerDrafts:
    """Drafts of one answer, and what became of them.

    `tokens` are those of the step at hand, and `sure` the confidences in them; `view` are the keys
    and values that the model itself drafts on, until they are copied, and `room` the most entries
    that they take.
    """

    plan: DecodePlan
    owner: str = ""  # tenant whose statistics it shares
    view: AnswerRow | None = None
    room: int = 0
    length: DraftLength | None = None  # None: as many drafts as there may be
    text: TextDrafts | None = None  # None: the model itself drafts
    tokens: list[int] = field(default_factory=list)
    sure: list[float] = field(default_factory=list)
    proposed: int = 0
    accepted: int = 0
    seconds: float = 0.0

    def verified(self, accepted: int) -> None:
        """Learn how many drafts of the step stood."""
        if self.tokens and self.length is not None:
            self.length.end(self.sure, accepted)
        self.tokens, self.sure = [], []


@dataclass(eq=False)
class RunningRow:
    """An answer of a batch: its newest token, which is read next, and the drafts behind it.

    `step` counts the tokens said, `position` `[A]` is that of the newest, and `seen` are the
    distinct ids that a repetition penalty counts.
    """

    key: Hashable
    sampling: SamplingOptions
    token: int
    step: int
    position: list[int]
    seen: Tensor | None
    adapter: str | None
    drafts: AnswerDrafts | None = None

    @property
    def own(self) -> AnswerDrafts:
        """Its drafts, where it has any."""
        assert self.drafts is not None
        return self.drafts

    @property
    def count(self) -> int:
        """Tokens that it reads in the step at hand."""
        return 1 if self.drafts is None else 1 + len(self.drafts.tokens)


class StepPrices:
    """Prices of drafts as shares of what one token of an answer costs, by the clock.

    They decide how many drafts are made, and never what is said.
    """

    def __init__(self) -> None:
        self.costs = {RECYCLE: Costs(0.001), LOOKUP: Costs(0.001), SELF: Costs(0.6)}
        for each in self.costs.values():
            each.wide = 0.1
        self._plain: dict[int, float] = {}  # seconds of a step without drafts, by its rows
        self._since = 0

    def due(self, rows: int) -> bool:
        """Return True if a step of so many rows is to be timed without drafts."""
        self._since += 1
        if rows in self._plain and self._since < _PLAIN:
            return False
        self._since = 0
        return True

    def verified(self, rows: int, tokens: int, seconds: float) -> None:
        """Take in the seconds of a step of so many rows that read so many tokens."""
        plain = self._plain.get(rows)
        if tokens == rows:
            self._plain[rows] = seconds if plain is None else plain + 0.3 * (seconds - plain)
        elif plain is not None:
            price = max(0.0, seconds / plain - 1) * rows / (tokens - rows)
            for costs in self.costs.values():
                costs.wide += 0.3 * (min(4.0, price) - costs.wide)

    def drafted(self, rows: int, tokens: int, seconds: float) -> None:
        """Take in the seconds in which the model itself made so many drafts for a batch."""
        if (plain := self._plain.get(rows)) is not None and tokens:
            costs = self.costs[SELF]
            costs.draft += 0.3 * (min(4.0, seconds / tokens * rows / plain) - costs.draft)


class BatchDrafts:
    """Sources of drafts for the answers of one batch.

    Statistics of what follows a token are shared by the answers of a tenant, and by no others.
    """

    def __init__(self, lane: Lane, chooser: Any) -> None:
        self.lane, self._chooser = lane, chooser
        self.prices = StepPrices()
        self.views = AnswerRows(len(lane.kinds), lane.modules.keys())
        self._viewing: list[RunningRow] = []  # answers of the rows of `views`
        self._ran = False  # the model has drafted in the step at hand
        self._known: OrderedDict[tuple[str, int], Recycler] = OrderedDict()

    # --- answers come and go --------------------------------------------------------------------

    def admit(self, row: RunningRow, ids: Tensor | None) -> None:
        """Begin to draft for an answer that has said its first token."""
        own = row.own
        plan, prompt = own.plan, [] if ids is None else ids.tolist()
        if plan.adapt:
            own.length = DraftLength(self.prices.costs[plan.kind], plan.least)
        if not plan.views:
            shared = self._recycler(own.owner, plan.width) if plan.kind == RECYCLE else None
            own.text = TextDrafts(plan, shared, [*prompt, row.token])
        if own.view is not None:
            self.views.add(own.view)
            self._viewing.append(row)
            own.view = None

    def _recycler(self, owner: str, width: int) -> Recycler:
        found = self._known.setdefault((owner, width), Recycler(width))
        self._known.move_to_end((owner, width))
        while len(self._known) > _OWNERS:
            self._known.popitem(last=False)
        return found

    def release(self, row: RunningRow) -> None:
        """Forget an answer."""
        if row in self._viewing:
            number = self._viewing.index(row)
            self.views.remove(number)
            self._moved(number)

    def pause(self, row: RunningRow) -> None:
        """Take the entries of an answer out, for `resume`."""
        if row in self._viewing and row.drafts is not None:
            number = self._viewing.index(row)
            row.drafts.view = self.views.take(number)
            self._moved(number)

    def resume(self, row: RunningRow) -> None:
        """Put them back."""
        if row.drafts is not None and row.drafts.view is not None:
            self.views.add(row.drafts.view)
            self._viewing.append(row)
            row.drafts.view = None

    def _moved(self, number: int) -> None:
        self._viewing[number] = self._viewing[-1]
        self._viewing.pop()

    # --- a step ---------------------------------------------------------------------------------

    @torch.inference_mode()
    def propose(self, rows: Sequence[RunningRow]) -> None:
        """Draft for the answers of a step, as many tokens as are worth it and have room."""
        self._ran = False
        drafting = [row for row in rows if row.drafts is not None]
        if not drafting:
            return
        due = self.prices.due(len(rows))
        wanted: dict[RunningRow, int] = {}
        for row in drafting:
            own = row.own
            own.tokens, own.sure = [], []
            most = min(own.plan.most, row.sampling.max_tokens - row.step - 1)
            if own.length is not None:
                most = 0 if due else own.length.begin(max(0, most))
            if most <= 0:
                continue
            if row in self._viewing:
                wanted[row] = most
                continue
            start = time.perf_counter()
            if own.text is not None:
                own.tokens = own.text.find(row.token, most)
            own.sure = [GUESS] * len(own.tokens)
            own.seconds += time.perf_counter() - start
        if wanted:
            start = time.perf_counter()
            made = self._by_model(wanted)
            seconds = time.perf_counter() - start
            self.prices.drafted(len(rows), made, seconds)
            for row in wanted:
                row.own.seconds += seconds / len(wanted)

    def _by_model(self, wanted: dict[RunningRow, int]) -> int:
        """Let the model draft on the entries that it was given; returns how many it made."""
        table, rows, made = self.lane.decoder.get_input_embeddings(), self._viewing, 0
        device = table.weight.device
        live, place = [row for row in rows if row in wanted], 0
        while live:
            counts = [int(row in live) for row in rows]
            self.views.advance(counts, further=place > 0)
            self._ran = True
            tokens = [(row.own.tokens or [row.token])[-1] for row in live]
            spots = [[at + place for at in row.position] for row in live]
            embeds = table(torch.tensor(tokens, device=device))[None]
            positions = torch.tensor(spots, device=device).T[:, None]
            with using([row.adapter for row in live]):
                hidden = self.lane.run(self.views.attend_flat, self.views.cache, embeds, positions)
                logits = self.lane.logits(hidden[0])
            sure = logits.softmax(-1).amax(-1).tolist()
            found = self._chooser.guess(logits, live, place)
            place, going = place + 1, []
            for row, token, chance in zip(live, found, sure, strict=True):
                own = row.own
                if own.length is not None and own.length.doubts(chance):
                    continue
                own.tokens.append(token)
                own.sure.append(chance)
                made += 1
                more = own.length is None or own.length.more(chance)
                if more and place < wanted[row]:
                    going.append(row)
            live = going
        return made

    def learn(self, rows: Sequence[RunningRow], logits: Tensor) -> None:
        """Note what the model said behind all tokens that were read, `[T, V]`."""
        at, places, tokens = 0, list[int](), list[tuple[Recycler, int]]()
        for row in rows:
            text = None if row.drafts is None else row.drafts.text
            if text is not None and text.recycler is not None:
                read = [row.token, *row.own.tokens]
                places += range(at, at + len(read))
                tokens += [(text.recycler, token) for token in read]
            at += row.count
        if not places:
            return
        width = max(recycler.width for recycler, _ in tokens)
        best = logits[places].topk(min(width, logits.shape[-1]), dim=-1).indices.tolist()
        for (recycler, token), mine in zip(tokens, best, strict=True):
            recycler.learn([token], [mine])

    def settle(self, row: RunningRow, said: Sequence[int]) -> None:
        """Note the tokens that an answer has said in a step, the last one not yet read."""
        own = row.own
        if own.text is not None:
            own.text.push(said)
        own.verified(max(0, len(said) - 1))

    @torch.inference_mode()
    def follow(
        self, rows: Sequence[RunningRow], store: AnswerRows, kept: dict[RunningRow, int]
    ) -> None:
        """Let views take over from `store` what was read and stands, in place of their drafts."""
        for number, row in enumerate(self._viewing):
            if row not in kept:
                continue
            if self._ran:
                self.views.settle(number, 0)
            self.views.copy_from(store, rows.index(row), number, kept[row])
        self._ran = False


def with_room(row: AnswerRow, most: int, views: bool = False) -> AnswerRow:
    """Let the entries of a row whose oldest leave have room for drafts, which may fall.

    Those of `views` may stand still while others draft, and have a place for that.
    """
    for part in row.parts:
        if isinstance(part, Entries) and (views or part.leaving is not None):
            part.most += most + 1
    return row
