"""Decoding of all running answers in one pass per token, sampling, and text of tokens."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from mmfast.decoding.accept import accept_close
from mmfast.decoding.sampling import Sampling as Choice
from mmfast.decoding.sampling import draw, not_finite, process
from mmfast.decoding.speculation import EXIT
from mmfast.models.context import placeholders
from mmfast.models.decoder.few_rows import FewRows
from mmfast.models.wrappers import CONV
from mmfast.serve.engine.adapters import using
from mmfast.serve.engine.base import NoTokenError, Reason, SamplingOptions
from mmfast.serve.engine.drafts import (
    AnswerDrafts,
    BatchDrafts,
    RunningRow,
)
from mmfast.serve.engine.kv.bucket import Entries
from mmfast.serve.engine.kv.rows import AnswerRow, AnswerRows, entries, reads_trees, with_room
from mmfast.serve.engine.lane import Lane
from mmfast.serve.engine.slots import Draw, Filled

CloseDraft = tuple[int, float] | None  # a draft, and up to which loss it stands
Said = tuple[Hashable, int | Exception]  # a token of an answer, or why there is none
GREEDY = 1e-5  # a temperature below it would overflow the logits


class Chooser:
    """Chooses tokens as `generate` of a model does, without its state.

    A draw depends on the seed and on the number of the token alone, so an answer does not depend on
    the other answers of the batch.
    """

    def __init__(self, model: Any) -> None:
        config = model.generation_config
        ends = config.eos_token_id
        self.ends = frozenset([ends] if isinstance(ends, int) else ends or ())
        # repetition penalty of its generation config; 1 is none
        self.penalty = float(getattr(config, "repetition_penalty", None) or 1.0)
        blocked = placeholders(model)  # an answer has no media
        self.width = int(model.get_output_embeddings().weight.shape[0])  # of logits
        inside = sorted(i for i in {*blocked, *(config.suppress_tokens or ())} if i < self.width)
        self._blocked = torch.tensor(inside, device=model.device, dtype=torch.int64)

    def seen(self, ids: Tensor | None, sampling: SamplingOptions) -> Tensor | None:
        """Return the distinct ids of a prompt if a penalty of this request counts them."""
        counts = self.penalty != 1 or sampling.rules is not None
        return ids.unique() if counts and ids is not None else None

    def choose(
        self,
        logits: Tensor,
        draws: Sequence[Draw],
        seen: Sequence[Tensor | None],
        close: Sequence[CloseDraft] = (),
    ) -> list[int | Exception]:
        """Choose a token per row; a row without finite logits gets an error.

        The logits, `[B, V]` float32, are changed in place; `seen` is read for repetition penalties
        only. A draft that is `close` stands in place of the likeliest token.
        """
        self._block(logits)
        rules = [each.sampling.rules for each in draws]
        for row, mine in enumerate(seen):
            if rules[row] is not None:
                rules[row].row(logits[row], mine, self.penalty)
            else:
                self._penalise(logits[row], mine)
        peaks, best = logits.max(-1)
        fine, tokens = torch.isfinite(peaks).tolist(), best.tolist()
        found: list[int | Exception] = []
        for row, each in enumerate(draws):
            if not fine[row]:
                found.append(NoTokenError(not_finite()))
            elif close and (draft := close[row]) is not None and _stands(logits[row], *draft):
                found.append(draft[0])
            elif each.sampling.temperature < GREEDY:
                found.append(tokens[row])
            else:
                found.append(_drawn(logits[row], each))
        for own, token in zip(rules, found, strict=True):
            if own is not None and isinstance(token, int):
                own.chosen(token)
        return found

    def _block(self, logits: Tensor) -> None:
        if len(self._blocked):
            logits[:, self._blocked] = -torch.inf

    def _penalise(self, logits: Tensor, seen: Tensor | None) -> None:
        if seen is not None and self.penalty != 1:
            old = logits[seen]
            logits[seen] = torch.where(old < 0, old * self.penalty, old / self.penalty)

    def guess(
        self, logits: Tensor, rows: Sequence[RunningRow], depths: Sequence[int] | None = None
    ) -> list[int]:
        """Guess the tokens of rows behind their drafts, from logits `[B, V]` of a draft.

        They are chosen by the draw that decides there. Rules of an answer are left out. `depths`
        are the drafts between, where these are not all of a row.
        """
        self._block(logits)
        found = []
        depths = depths or [len(row.own.tokens) for row in rows]
        for mine, row, depth in zip(logits, rows, depths, strict=True):
            if row.sampling.rules is None:
                self._penalise(mine, _with(row.seen, row.own.tokens))
            greedy = row.sampling.temperature < GREEDY
            draw = Draw(row.sampling, row.step + depth)
            found.append(int(mine.argmax()) if greedy else _drawn(mine, draw))
        return found


def _with(seen: Tensor | None, tokens: Sequence[int]) -> Tensor | None:
    """Add tokens to distinct ids that a penalty counts."""
    if seen is None or not tokens:
        return seen
    found: Tensor = torch.cat([seen, seen.new_tensor(tokens)]).unique()
    return found


def _stands(logits: Tensor, token: int, most: float) -> bool:
    """Return True if the loss of a draft under logits `[V]` is small enough."""
    mine, ones = torch.tensor([[token]], device=logits.device), logits.new_ones(1)
    return bool(accept_close(mine, logits.expand(1, 2, -1), most, ones)[0])


def _drawn(logits: Tensor, options: Draw) -> int:
    given = options.sampling
    choice = Choice(given.temperature, given.top_k, given.top_p, min_p=given.min_p)
    chances = process(logits[None], choice, ((),))[0].softmax(-1)
    number = random.Random(f"{given.seed}/{options.step}").random()
    return int(draw(chances, torch.tensor(number, dtype=torch.float64, device=logits.device)))


@dataclass(eq=False)
class PausedAnswer:
    """An answer outside the batch, with its keys and values."""

    row: RunningRow
    held: AnswerRow

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values, those that it drafts on included."""
        view = None if self.row.drafts is None else self.row.drafts.view
        both = [*self.held.parts, *(() if view is None else view.parts)]
        parts = [part for part in both if isinstance(part, Entries)]
        return sum(part.keys.nbytes + part.values.nbytes for part in parts)


class DecodeBatch:
    """Running answers and their next tokens; at most `slots` at once.

    Raises `ModelError` if the rows of the model cannot be told apart in one pass.
    """

    def __init__(self, model: Any, slots: int = 16, lane: Lane | None = None) -> None:
        self._few_rows = FewRows(model)
        self.lane, self.most = lane or Lane(model), slots
        self._table = self.lane.decoder.get_input_embeddings()
        self.chooser = Chooser(model)
        self.store = AnswerRows(len(self.lane.kinds), self.lane.modules.keys())
        self.drafts = BatchDrafts(self.lane, self.chooser)
        self._rows: list[RunningRow] = []
        self._begun = False  # a step whose pass has not come back
        self._clock: float | None = None  # when a step of decoding alone began

    def __len__(self) -> int:
        return len(self._rows)

    def first(self, filled: Filled, sampling: SamplingOptions) -> int:
        """Choose the first token of an answer. ModelError: its logits are not finite."""
        seen = self.chooser.seen(filled.ids, sampling)
        found = self.chooser.choose(filled.logits[None].clone(), [Draw(sampling)], [seen])
        if isinstance(found[0], Exception):
            raise found[0]
        return found[0]

    @torch.inference_mode()
    def admit(
        self,
        key: Hashable,
        filled: Filled,
        token: int,
        sampling: SamplingOptions,
        drafts: AnswerDrafts | None = None,
    ) -> None:
        """Add an answer after its first token; the seed of its sampling is set.

        With `drafts` it may say several tokens in a step.
        """
        seen = None if sampling.rules is not None else self.chooser.seen(filled.ids, sampling)
        if seen is not None:
            seen = torch.cat([seen, seen.new_tensor([token])]).unique()
        made = filled.row
        if made is None:
            most = filled.length + sampling.max_tokens
            made = AnswerRow(entries(filled.kv, self.lane.kinds, self.lane.window, most))
        if drafts is not None:
            drafts.grows = (drafts.plan.branching or drafts.plan.grows) and reads_trees(made)
            made = with_room(made, drafts.plan.widest, drafts.grows)
        self.store.add(made)
        place = filled.position.tolist()
        row = RunningRow(key, sampling, token, 1, place, seen, filled.adapter, drafts)
        self._rows.append(row)
        if drafts is not None:
            if drafts.plan.kind == EXIT:
                drafts.view = filled.view
            elif drafts.plan.views and filled.view is not None:
                drafts.view = with_room(filled.view, drafts.plan.reach, views=True)
            self.drafts.admit(row, filled.ids)

    @torch.inference_mode()
    def release(self, key: Hashable) -> bool:
        """Remove an answer and free its memory; return True if it was there."""
        for number, row in enumerate(self._rows):
            if row.key == key:
                self.store.remove(number)
                self.drafts.release(row)
                self._rows[number] = self._rows[-1]
                self._rows.pop()
                self._begun = self._begun and bool(self._rows)
                return True
        return False

    @property
    def rows(self) -> Sequence[RunningRow]:
        """Running answers, in the order of the rows of `store`."""
        return self._rows

    @property
    def joins(self) -> bool:
        """A step can be part of a pass of prefill: no convolution runs from row to row."""
        return CONV not in self.lane.kinds

    @property
    def reads(self) -> bool:
        """A step reads something: not all answers wait for what drafts for them."""
        return any(row.count for row in self._rows)

    @torch.inference_mode()
    def pause(self, key: Hashable) -> PausedAnswer | None:
        """Remove an answer and return it with its memory, for `resume`; None where it must stay."""
        number = next(i for i, row in enumerate(self._rows) if row.key == key)
        if (held := self.store.take(number)) is None:
            return None
        row, self._rows[number] = self._rows[number], self._rows[-1]
        self._rows.pop()
        self.drafts.pause(row)
        return PausedAnswer(row, held)

    @torch.inference_mode()
    def resume(self, paused: PausedAnswer) -> None:
        """Go on with an answer from where it was paused."""
        self.store.add(paused.held)
        self._rows.append(paused.row)
        self.drafts.resume(paused.row)

    @torch.inference_mode()
    def step(self) -> list[Said]:
        """Return the next tokens of every answer, or the error where there is none."""
        return [each for said in self.rounds() for each in said]

    def rounds(self) -> Iterator[list[Said]]:
        """Make a step; see `end`."""
        if not self.reads:
            return iter(())
        return self.end(self._logits())

    @torch.inference_mode()
    def _logits(self) -> Tensor:
        embeds, positions = self.begin()
        assert self.store.cache is not None
        self._clock = time.perf_counter()
        attend, given = self.store.attend, (embeds[:, None], positions[..., None])
        if self.store.spread:
            attend, given = self.store.attend_flat, (embeds[None], positions[:, None])
        with using(self.adapters), self._few_rows.installed(len(embeds)):
            hidden = self.lane.run(attend, self.store.cache, *given)
            return self.lane.logits(hidden[0] if self.store.spread else hidden[:, -1])

    @property
    def adapters(self) -> list[str | None]:
        """Adapter of each token of a step."""
        return [row.adapter for row in self._rows for _ in range(row.count)]

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return self.store.nbytes + self.drafts.nbytes

    def begin(self) -> tuple[Tensor, Tensor]:
        """Begin a step: what enters the first layer, `[T, D]`, and its positions `[A, T]`.

        An answer reads its newest token and its drafts. A step whose pass failed is begun again,
        without the answers that have left since.
        """
        if self._begun:
            self.store.arrange()
        else:
            self.drafts.propose(self._rows)
            self._clock = None  # that of a pass that failed
            paths = [row.paths for row in self._rows]
            self.store.advance([row.count for row in self._rows], paths=paths)
        self._begun = True
        device = self._table.weight.device
        tokens, places = list[int](), list[list[int]]()
        for row in self._rows:
            mine = [row.token, *([] if row.drafts is None else row.drafts.tokens)]
            tokens += mine[: row.count]
            depths = range(row.count) if row.paths is None else [len(p) - 1 for p in row.paths]
            places += [[at + depth for at in row.position] for depth in depths]
        positions = torch.tensor(places, device=device).T
        return self._table(torch.tensor(tokens, device=device)), positions

    def unrepeatable(self) -> list[Hashable]:
        """Return the answers whose own caches took a token in a pass that failed."""
        rows = zip(self._rows, self.store.rows, strict=True)
        return [mine.key for mine, row in rows if self._begun and row.parts]

    def end(self, logits: Tensor) -> Iterator[list[Said]]:
        """End a step: yield the next token of all answers from logits `[T, V]`, then further ones.

        Behind a token that is the draft in its place, the answer says another one, unless it was
        released meanwhile. The iterator must be read to its end.
        """
        self._begun = False
        rows, at = [row for row in self._rows if row.count], 0
        self.drafts.learn(rows, logits)
        first, nodes = dict[RunningRow, int](), dict.fromkeys(rows, 0)
        for row in rows:
            first[row] = at
            at += row.count
            if row.drafts is not None:
                row.drafts.proposed += len(row.drafts.tokens)
        said: dict[RunningRow, list[int]] = {row: [] for row in rows}
        live, place = rows, 0
        try:
            while live:
                plain = place == 0 and at == len(rows)
                mine = logits if plain else logits[[first[row] + nodes[row] for row in live]]
                for row in live:
                    if row.drafts is not None:
                        row.drafts.node = nodes[row]
                chosen = self._chosen(live, mine)
                if self._clock is not None and any(row.drafts for row in rows):
                    seconds = time.perf_counter() - self._clock
                    self.drafts.prices.verified(len(rows), at, seconds)
                self._clock = None
                for row, token in zip(live, chosen, strict=True):
                    said[row] += [token] if isinstance(token, int) else []
                pairs = list(zip(live, chosen, strict=True))
                stands = list[RunningRow]()
                for row, token in pairs if at > len(rows) else ():
                    node = None
                    if row.drafts is not None and isinstance(token, int):
                        node = row.drafts.behind(nodes[row], token)
                    if node is not None:
                        nodes[row] = node
                        stands.append(row)
                        row.own.accepted += 1  # before the answer may end
                yield [(row.key, token) for row, token in pairs]
                live, place = [row for row in stands if row in self._rows], place + 1
        finally:
            self._settle(said, nodes)

    @torch.inference_mode()
    def _chosen(self, rows: Sequence[RunningRow], logits: Tensor) -> list[int | Exception]:
        close = [None if row.drafts is None else row.drafts.close for row in rows]
        draws = [Draw(row.sampling, row.step) for row in rows]
        chosen = self.chooser.choose(logits, draws, [row.seen for row in rows], close)
        for row, token in zip(rows, chosen, strict=True):
            row.step, row.position = row.step + 1, [place + 1 for place in row.position]
            if isinstance(token, int):
                row.token = token
                row.seen = _with(row.seen, [token])
        lost = self.store.failed
        pairs = zip(self._rows, self.store.rows, strict=True) if lost else ()
        errors = {row: lost[own] for row, own in pairs if own in lost}
        return [errors.get(row, token) for row, token in zip(rows, chosen, strict=True)]

    def _settle(self, said: dict[RunningRow, list[int]], nodes: dict[RunningRow, int]) -> None:
        """Take back the drafts that fell, of the answers that are still here.

        `nodes` are the last drafts that stand, from 1.
        """
        left = {row: said[row] for row in self._rows if row in said}
        for number, row in enumerate(self._rows):
            if row in left and row.count > 1:
                kept, paths = max(1, len(left[row])), row.paths
                path = None if paths is None else paths[nodes[row]][:kept]
                self.store.settle(number, kept, path)
        self.drafts.follow(self._rows, self.store, left)


_HALF = "\ufffd"  # a tokenizer writes this for an incomplete character


class Writer:
    """Turns the tokens of one answer into text."""

    def __init__(self, tokenizer: Any, sampling: SamplingOptions, ends: Collection[int]) -> None:
        self._sampling, self._ends, self._text = sampling, ends, _decoding(tokenizer)
        if sampling.rules is not None:
            self._ends = sampling.rules.begin(tokenizer, ends)
        self._tokens: list[int] = []
        self._start = self._read = 0  # tokens before `_start` are written; up to `_read` too
        self._pieces: dict[tuple[int, ...], str] = {}  # texts of written pieces, which recur
        self._held = ""  # text that may become a stop string
        self.over: Reason | None = None  # reason of the end; None while the answer goes on
        self.count = 0

    def push(self, token: int) -> str:
        """Take the next token; return the text that is certain now, "" if none is."""
        self.count += 1
        ended = token in self._ends
        if not ended:
            self._tokens.append(token)
        last = ended or self.count >= self._sampling.max_tokens
        text = self._held + self._decoded(last)
        for stop in self._sampling.stop if self.count >= self._sampling.min_tokens else ():
            at = text.find(stop) if stop else -1
            if at >= 0:
                text, ended = text[:at], True
                last = True
        if last:
            self.over, self._held = "stop" if ended else "length", ""
            return text
        keep = max((_overlap(text, stop) for stop in self._sampling.stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _decoded(self, last: bool) -> str:
        """Return the text of the new tokens; an incomplete character waits for its rest."""
        piece = tuple(self._tokens[self._start : self._read])
        if piece not in self._pieces:
            self._pieces[piece] = self._text([*piece])
        now = self._text(self._tokens[self._start :])
        if not last and now.endswith(_HALF):
            return ""
        # The space before a word may depend on the piece before it, so one written piece is kept.
        self._start, self._read = self._read, len(self._tokens)
        return now[len(self._pieces[piece]) :]


def _decoding(tokenizer: Any) -> Callable[[list[int]], str]:
    """Return the function from tokens to text, which is called for every token.

    Where a class of transformers only hands on what the library below it returns, that one.
    """
    stock, mine = PreTrainedTokenizerFast, type(tokenizer)
    own = isinstance(tokenizer, stock) and not tokenizer.clean_up_tokenization_spaces
    if own and (mine.decode, mine._decode) == (stock.decode, stock._decode):
        return partial(tokenizer.backend_tokenizer.decode, skip_special_tokens=True)
    return partial(tokenizer.decode, skip_special_tokens=True)


def _overlap(text: str, stop: str) -> int:
    """Return how many letters at the end of `text` may be the beginning of `stop`."""
    for n in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-n:]):
            return n
    return 0
