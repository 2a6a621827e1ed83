"""Drafts of running answers, which a step of their batch verifies beside the others' next tokens.

A token of an answer is a function of its logits, its seed and its number, drawn ones included (see
`Chooser`). So a draft stands exactly where the answer would have said it: with the probability of
the rule of exact sampling for a draft that was not drawn, and without a change to what a seed says.
Under `bild:` a draft stands where the model does not find it too unlikely, and its answer waits for
the small model, so that it depends on nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from cachetools import LRUCache
from torch import Tensor
from torch.nn import functional as F

from mmfast.decoding.row import Costs, DraftLength
from mmfast.decoding.speculation import (
    BILD,
    DRAFT,
    EXIT,
    LOOKUP,
    RECYCLE,
    SELF,
    DecodePlan,
    Recycler,
    TextDrafts,
)
from mmfast.models.decoder.draft_weights import DraftWeights
from mmfast.models.decoder.drafters import GUESS
from mmfast.models.decoder.token_tree import BatchTree, TokenTree
from mmfast.serve.engine.adapters import using
from mmfast.serve.engine.base import LOG, SamplingOptions
from mmfast.serve.engine.kv.rows import AnswerRow, AnswerRows, reads_trees
from mmfast.serve.engine.lane import Lane

_OWNERS = 16  # tenants whose statistics of what follows a token are kept
CATCH_UP = 64  # tokens of one answer that a model that drafts reads at most before it does
_PLAIN = 64  # steps after which one without drafts is timed again


@dataclass(eq=False)
class AnswerDrafts:
    """Drafts of one answer, and what became of them.

    `tokens` are those of the step at hand, and `sure` the confidences in them. A model that drafts
    has read a `prompt` of its own and the first `held` tokens of `said`, in this step `read` more;
    the first of them is at `start` `[A]`. `view` are its keys and values until they are copied, or
    while the answer is `paused`, and `room` the most entries that they take.
    """

    plan: DecodePlan
    owner: str = ""  # tenant whose statistics it shares
    prompt: Any = None  # what a second model is to read, until it begins
    view: AnswerRow | None = None
    room: int = 0
    piece: int = 0  # tokens of that prompt
    paused: bool = False
    waits: bool = False  # its answer stands still until the model drafts for it
    length: DraftLength | None = None  # None: as many drafts as there may be
    text: TextDrafts | None = None  # None: a model drafts
    tokens: list[int] = field(default_factory=list)
    node: int = 0  # the draft behind which a token is chosen, 0 the newest token
    grows: bool = False  # its row can read a tree
    parents: list[int] | None = None  # of the tokens of a tree, -1 for the newest token
    sure: list[float] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # those of the request
    said: list[int] = field(default_factory=list)
    start: list[int] = field(default_factory=list)
    held: int = 0
    read: int = 0
    tree: BatchTree | None = None  # which a model drafts
    early: Tensor | None = None  # states `[n, D]` of this step in front of an early exit
    proposed: int = 0
    accepted: int = 0
    seconds: float = 0.0

    @property
    def unread(self) -> list[int]:
        """Tokens that the model that drafts has not read."""
        at, behind = self.held + self.read, len(self.said)
        return [*self.said[at:], *self.tokens[max(0, at - behind) :]]

    @property
    def upcoming(self) -> list[int]:
        """Tokens that it reads next."""
        grown = self.tree is not None and self.tree.begun
        return self.tree.tokens if grown else self.unread[:CATCH_UP]  # type: ignore[union-attr]

    def doubts(self, chance: float) -> bool:
        """Return True if a chain ends in front of a draft of this confidence."""
        if not self.plan.exact:
            return chance < self.plan.least
        return self.length is not None and self.length.doubts(chance)

    @property
    def close(self) -> tuple[int, float] | None:
        """The draft behind `node`, and up to which loss it stands.

        None where only the token of the model stands.
        """
        if self.plan.rollback is None or self.node >= len(self.tokens):
            return None
        return self.tokens[self.node], self.plan.rollback

    def behind(self, node: int, token: int) -> int | None:
        """Return the draft, from 1, that is this token behind a draft, 0 the newest token."""
        parents = range(-1, len(self.tokens) - 1) if self.parents is None else self.parents
        pairs = enumerate(zip(self.tokens, parents, strict=True), start=1)
        return next((i for i, both in pairs if both == (token, node - 1)), None)

    def adopt(self, tree: TokenTree, most: int) -> None:
        """Take at most so many drafts of a tree that has grown."""
        tree.cut(most)
        self.tokens, self.sure, self.parents = tree.tokens, tree.sure, tree.parents or None
        self.tree = None

    def verified(self, said: Sequence[int]) -> None:
        """Learn how many drafts of the step stood."""
        stood = [0]
        for token in said:
            if (node := self.behind(stood[-1], token)) is None:
                break
            stood.append(node)
        if self.tokens and self.length is not None:
            # those that stand, those in the place of the first that fell, and the rest
            beside = [i for i, p in enumerate(self.parents or (), 1) if p == stood[-1] - 1]
            order = dict.fromkeys([*stood[1:], *beside, *range(1, len(self.tokens) + 1)])
            self.length.end([self.sure[node - 1] for node in order], max(0, len(said) - 1))
        self.tokens, self.sure, self.parents = [], [], None


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
        if self.drafts is None:
            return 1
        return 0 if self.drafts.waits else 1 + len(self.drafts.tokens)

    @property
    def paths(self) -> list[list[int]] | None:
        """The ways from its newest token to each that it reads; None where these are a chain."""
        if self.drafts is None or self.drafts.parents is None:
            return None
        found = [[0]]
        for node, parent in enumerate(self.drafts.parents, start=1):
            found.append([*found[parent + 1], node])
        return found


class StepPrices:
    """Prices of drafts as shares of what one token of an answer costs, by the clock.

    They decide how many drafts are made, and never what is said.
    """

    def __init__(self) -> None:
        self.costs = {RECYCLE: Costs(0.001), LOOKUP: Costs(0.001)}
        self.costs |= {SELF: Costs(0.6), **{kind: Costs(0.3) for kind in (DRAFT, EXIT, BILD)}}
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

    def drafted(self, kind: str, rows: int, tokens: int, seconds: float) -> None:
        """Take in the seconds in which a model read so many tokens to draft for a batch.

        Several of one answer at once cost less, so that one that lags is tried again.
        """
        if (plain := self._plain.get(rows)) is not None and tokens:
            costs = self.costs[kind]
            costs.draft += 0.3 * (min(4.0, seconds / tokens * rows / plain) - costs.draft)


class DraftRows:
    """Rows of keys and values on which a model drafts for answers of a batch.

    Drafts have logits of the vocabulary of the `chooser`, which may be larger than its own.
    """

    kind = SELF

    def __init__(self, lane: Lane, chooser: Any) -> None:
        self.lane, self._chooser = lane, chooser
        self.store = AnswerRows(len(lane.kinds), lane.modules.keys())
        self.rows: list[RunningRow] = []  # answers for which it drafts

    @property
    def order(self) -> Sequence[RunningRow]:
        """Answers of the rows of `store`, in their order."""
        return self.rows

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return self.store.nbytes

    def begin(self, row: RunningRow) -> None:
        """Begin to draft for an answer."""
        self.add(row)

    def add(self, row: RunningRow) -> None:
        """Take the entries that an answer has, if it has any now."""
        own = row.own
        if own.view is not None and not own.paused:
            own.grows = own.grows and reads_trees(own.view)
            self.store.add(own.view)
            self.rows.append(row)
            own.view, own.waits = None, False

    def release(self, row: RunningRow) -> None:
        """Forget an answer."""
        if row in self.rows:
            number = self.rows.index(row)
            self.store.remove(number)
            self._moved(number)

    def take(self, row: RunningRow) -> None:
        """Give an answer its entries back."""
        if row in self.rows:
            number = self.rows.index(row)
            row.own.view = self.store.take(number)
            self._moved(number)

    def _moved(self, number: int) -> None:
        self.rows[number] = self.rows[-1]
        self.rows.pop()

    def draft(self, wanted: dict[RunningRow, int]) -> int:
        """Draft so many tokens for these answers, fewer where unsure; returns how many were read.

        One that lags far behind its answer reads on, and does not draft yet.
        """
        count, first = 0, True
        live = [row for row in self.order if row in wanted]
        for row in live:
            made = BatchTree(row.own.plan, row.own.length, wanted[row])
            row.own.tree = made if row.own.grows else None
        while live:
            reads = {row: row.own.upcoming for row in live}
            trees = {row: tree for row in live if (tree := row.own.tree) and tree.begun}
            paths = {row: tree.paths(row.own.read) for row, tree in trees.items()}
            counts = [len(reads.get(row, ())) for row in self.order]
            self.store.advance(counts, not first, [paths.get(row) for row in self.order])
            logits, first = self._logits(reads, paths), False
            count += sum(counts)
            ready = [row for row in live if not row.own.unread]
            chains = [row for row in ready if row.own.tree is None]
            further = self._chained(chains, logits, wanted) if chains else set()
            for row in ready:
                if row.own.tree is not None:
                    self._grown(row, row.own.tree, logits[row])
            live = [
                row for row in ready if row in further or (row.own.tree and row.own.tree.places)
            ]
        for number, row in enumerate(self.order):
            if row in wanted and row.own.tree is not None:
                self.store.settle(number, row.own.read)
                row.own.adopt(row.own.tree.tree, wanted[row])
        return count

    def _chained(
        self,
        rows: list[RunningRow],
        logits: dict[RunningRow, Tensor],
        wanted: dict[RunningRow, int],
    ) -> set[RunningRow]:
        """Draft the next token of chains; returns those that go on."""
        both, further = torch.cat([logits[row] for row in rows]), set[RunningRow]()
        tokens = self._chooser.guess(both, rows)
        sure = both.softmax(-1).amax(-1).tolist()
        for row, token, chance in zip(rows, tokens, sure, strict=True):
            own = row.own
            if own.doubts(chance):
                continue
            own.tokens.append(token)
            own.sure.append(chance)
            more = own.length is None or own.length.more(chance)
            if more and len(own.tokens) < wanted[row]:
                further.add(row)
        return further

    def _grown(self, row: RunningRow, tree: BatchTree, logits: Tensor) -> None:
        """Let a tree grow by logits `[n, V]`: first the draws that decide, then what is likely."""
        tokens = self._chooser.guess(logits, [row] * len(logits), tree.depths)
        shares = logits.softmax(-1).cpu()
        for mine, token in zip(shares, tokens, strict=True):
            if float(mine[token]) < (best := float(mine.amax())):
                mine[token] = 1.001 * best
        tree.take(shares)

    def _logits(
        self, reads: dict[RunningRow, list[int]], whole: Collection[RunningRow]
    ) -> dict[RunningRow, Tensor]:
        """Read tokens of answers, in the order of their rows; logits `[1, V]` behind the last.

        Of those in `whole`, which read nodes of trees, they are `[n, V]` behind all.
        """
        hidden = self._hidden(reads)
        ends, names, stop = list[int](), list[str | None](), 0
        for row, mine in reads.items():
            start, stop = stop, stop + len(mine)
            ends += range(start if row in whole else stop - 1, stop)
            names += [row.adapter] * (len(ends) - len(names))
            row.own.read += 0 if row in whole else len(mine)
        with using(names):
            logits = self.lane.logits(hidden[ends])
        logits = F.pad(logits, (0, self._chooser.width - logits.shape[-1]), value=-torch.inf)
        counts = [len(mine) if row in whole else 1 for row, mine in reads.items()]
        return dict(zip(reads, logits.split(counts), strict=True))

    def _hidden(self, reads: dict[RunningRow, list[int]]) -> Tensor:
        """Last states `[T, D]` of tokens of answers."""
        return self._pass(self.lane.run, self.store, reads)

    def _pass(
        self, run: Callable[..., Tensor], store: AnswerRows, reads: dict[RunningRow, list[int]]
    ) -> Tensor:
        table, places = self.lane.decoder.get_input_embeddings(), []
        for row, mine in reads.items():
            own = row.own
            grown = own.tree is not None and own.tree.begun
            steps = [i - 1 for i in own.tree.depths] if own.tree and grown else range(len(mine))
            at = own.held + own.read
            places += [[start + at + i for start in own.start] for i in steps]
        device = table.weight.device
        tokens = [token for mine in reads.values() for token in mine]
        embeds = table(torch.tensor(tokens, device=device))[None]
        positions = torch.tensor(places, device=device).T[:, None]
        with using([row.adapter for row, mine in reads.items() for _ in mine]):
            return run(store.attend_flat, store.cache, embeds, positions)[0]

    def settle(self, kept: dict[RunningRow, int]) -> None:
        """Keep what was read and stands, where answers have said so many tokens in a step."""
        for number, row in enumerate(self.rows):
            own = row.own
            if row in kept and own.read:
                stands = min(own.read, len(own.said) - own.held + kept[row] - 1)
                self.store.settle(number, stands)
                own.held, own.read = own.held + stands, 0


class ViewRows(DraftRows):
    """Rows with a part of the keys of the model itself, which take what it has verified.

    `weights` are those of the model in fewer bits, where it drafts on them.
    """

    weights: DraftWeights | None = None

    def draft(self, wanted: dict[RunningRow, int]) -> int:
        """Draft so many tokens for these answers, fewer where unsure; returns how many were read.

        The weights stand in the layers meanwhile alone, so that a copy of the model has none.
        """
        if self.weights is None:
            return super().draft(wanted)
        with self.weights.installed(), self.weights.drafting():
            return super().draft(wanted)

    def follow(
        self, rows: Sequence[RunningRow], store: AnswerRows, kept: dict[RunningRow, int]
    ) -> None:
        """Take over from `store` what was read and stands, in place of drafts."""
        for number, row in enumerate(self.rows):
            if row not in kept:
                continue
            if row.own.read:
                self.store.settle(number, 0)
            self.store.copy_from(store, rows.index(row), number, kept[row])
            row.own.held, row.own.read = row.own.held + kept[row], 0


class BatchDrafts:
    """Sources of drafts for the answers of one batch.

    Statistics of what follows a token are shared by the answers of a tenant, and by no others.
    `models` are what else was loaded to draft, by the name of a spec; "" is the model itself on
    all of its keys.
    """

    def __init__(self, lane: Lane, chooser: Any) -> None:
        self.prices = StepPrices()
        self.views = ViewRows(lane, chooser)
        self.models: dict[str, DraftRows] = {}
        self._known: LRUCache[tuple[str, int], Recycler] = LRUCache(_OWNERS)

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values of models that draft."""
        return sum(rows.nbytes for rows in self._sources)

    @property
    def _sources(self) -> list[DraftRows]:
        return [self.views, *list(self.models.values())]  # any thread may ask for health

    # --- answers come and go --------------------------------------------------------------------

    def admit(self, row: RunningRow, ids: Tensor | None) -> None:
        """Begin to draft for an answer that has said its first token."""
        own = row.own
        plan, prompt = own.plan, [] if ids is None else ids.tolist()
        own.said, own.start = [row.token], row.position
        if plan.adapt:
            own.length = DraftLength(self.prices.costs[plan.kind], plan.least)
        own.waits = not plan.exact  # what is said must not depend on when drafts begin
        if plan.loads or plan.shares:
            self._source(plan).begin(row)
        else:
            shared = self._recycler(own.owner, plan.width) if plan.kind == RECYCLE else None
            own.text = TextDrafts(plan, shared, [*prompt, row.token])

    def _source(self, plan: DecodePlan) -> DraftRows:
        own = plan.shares and not plan.views
        return self.models[plan.model] if plan.loads or own else self.views

    def _recycler(self, owner: str, width: int) -> Recycler:
        found: Recycler = self._known.setdefault((owner, width), Recycler(width))
        return found

    def release(self, row: RunningRow) -> None:
        """Forget an answer."""
        for rows in self._sources:
            rows.release(row)

    def pause(self, row: RunningRow) -> None:
        """Take the entries of an answer out, for `resume`."""
        if row.drafts is not None:
            row.drafts.paused = True
            for rows in self._sources:
                rows.take(row)

    def resume(self, row: RunningRow) -> None:
        """Put them back."""
        if row.drafts is not None:
            row.drafts.paused = False
            self._source(row.drafts.plan).add(row)

    # --- a step ---------------------------------------------------------------------------------

    @torch.inference_mode()
    def propose(self, rows: Sequence[RunningRow]) -> None:
        """Draft for the answers of a step, as many tokens as are worth it and have room."""
        drafting = [row for row in rows if row.drafts is not None]
        if not drafting:
            return
        due = self.prices.due(len(rows))
        wanted: dict[RunningRow, int] = {}
        for row in drafting:
            own = row.own
            own.tokens, own.sure, own.parents = [], [], None
            most = min(own.plan.most, row.sampling.max_tokens - row.step - 1)
            if own.length is not None:
                most = 0 if due else own.length.begin(max(0, most))
            if most <= 0 or own.waits:
                continue
            if own.text is None:
                wanted[row] = most
                continue
            start = time.perf_counter()
            if own.grows and own.text.recycler is not None:
                nodes = min(own.plan.tree, 3 * most)
                own.tokens, own.parents = own.text.recycler.tree(row.token, nodes, most)
            else:
                own.tokens = own.text.find(row.token, most)
            own.sure = [GUESS] * len(own.tokens)
            own.seconds += time.perf_counter() - start
        for source in self._sources if wanted else ():
            if mine := {row: most for row, most in wanted.items() if row in source.rows}:
                start = time.perf_counter()
                read = self._drafted(source, mine)
                seconds = time.perf_counter() - start
                self.prices.drafted(source.kind, len(rows), read, seconds)
                for row in mine:
                    row.own.seconds += seconds / len(mine)

    def _drafted(self, source: DraftRows, wanted: dict[RunningRow, int]) -> int:
        """Let a model draft; where that fails its answers go on without drafts."""
        try:
            return source.draft(wanted)
        except Exception as error:
            LOG.exception("drafts failed")
            for row in wanted:
                source.release(row)
                row.own.tokens, row.own.sure, row.own.parents = [], [], None
                row.own.notes.append(
                    f"decode {row.own.plan.text!r} drafted no longer: {type(error).__name__}"
                )
        return 0

    def learn(self, rows: Sequence[RunningRow], logits: Tensor) -> None:
        """Note what the model said behind all tokens that were read, `[T, V]`."""
        at, places, tokens = 0, list[int](), list[tuple[Recycler, int]]()
        early = self.views.lane.early
        early = None if early is None else early.flatten(0, 1)[-len(logits) :]
        for row in rows:
            if row.drafts is not None and row.own.plan.kind == EXIT and early is not None:
                row.own.early = early[at : at + row.count]
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

    @torch.inference_mode()
    def follow(
        self, rows: Sequence[RunningRow], store: AnswerRows, said: dict[RunningRow, list[int]]
    ) -> None:
        """Note the tokens that answers have said in a step, the last ones not yet read.

        Views take over from `store` what was read and stands.
        """
        kept = {row: max(1, len(mine)) for row, mine in said.items()}
        self.views.follow(rows, store, kept)
        for model in self.models.values():
            model.settle(kept)
        for row, mine in said.items():
            if (own := row.drafts) is not None:
                own.said += mine
                if own.text is not None:
                    own.text.push(mine)
                own.verified(mine)
