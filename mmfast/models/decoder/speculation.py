"""Draft and verify inside stock `generate`: what is said is what the model alone would say.

`generate` prepares prompt, media, positions, cache, processors and criteria, and then calls the
loop below in the place of its own. The loop of transformers for assisted generation is not used: it
takes one row, its assistant never sees the media, it counts no drafts, and it has no trees. What it
is made of is used: `_prefill`, `prepare_inputs_for_generation` and `crop` are the stock ones, so
that every family keeps its positions and masks.

Rows of a batch accept different numbers of drafts. The cache goes back to the row that accepted
fewest; what the others have said is read once more with the next pass, in front of new drafts. So
caches have no holes, which windows, convolutions and stock masks could not read over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mmfast.core.errors import ModelError
from mmfast.decoding.accept import accept_among, accept_close, accept_greedy, accept_sampled
from mmfast.decoding.row import Costs, DraftLength
from mmfast.decoding.sampling import draw
from mmfast.decoding.speculation import DecodePlan
from mmfast.models.cache_name import CACHE, returned_cache
from mmfast.models.decoder.drafters import BatchText, Drafter, DraftRun
from mmfast.models.decoder.few_rows import few_rows
from mmfast.models.decoder.grouped import grouped
from mmfast.models.decoder.reader import SequenceReader

MakeDrafter = Callable[[SequenceReader, BatchText], Drafter | None]  # None: nothing drafts


class VerifiedDecoding:
    """One call of `generate`: prompt, then passes that verify drafts.

    Args:
        model: A stock model.
        ids: Prompt `[B, P]`.
        config: Generation config, prepared.
        tools: `logits_processor`, `stopping_criteria` and `streamer` (or None) of the call.
        plan: What drafts.
        costs: What drafts and passes cost, kept from call to call.
        seed: Of the draws of every row; None uses the generator of torch.
    """

    def __init__(
        self,
        model: Any,
        ids: Tensor,
        config: Any,
        tools: dict[str, Any],
        plan: DecodePlan,
        costs: Costs,
        seed: int | None = None,
    ) -> None:
        self.model, self.config, self.plan, self.costs = model, config, plan, costs
        self._criteria, self._streamer = tools["stopping_criteria"], tools["streamer"]
        generators: list[torch.Generator | None] | None = None
        if config.do_sample:
            generators = [
                None if seed is None else torch.Generator().manual_seed(seed) for _ in ids
            ]
        rows = len(ids)
        self.text = BatchText(
            ids, tools["logits_processor"], generators, [[] for _ in ids], [False] * rows
        )
        self._ends: list[int | None] = [None] * rows
        # Stock code writes padding behind a row that has ended only where there is an end token.
        self._pads = any(hasattr(each, "eos_token_id") for each in self._criteria)
        pad = config._pad_token_tensor
        self._pad = 0 if pad is None else int(pad.flatten()[0])
        self._shown = 0
        self._kept: list[list[tuple[Tensor, Tensor]]] = [[] for _ in ids]
        self._length = DraftLength(costs, plan.least)
        self.proposed, self.accepted, self.passes = 0, 0, 0
        self.drafting = 0.0

    def run(self, kwargs: dict[str, Any], make: MakeDrafter) -> Any:
        """Decode behind the prompt that `kwargs` bring; returns what `generate` returns."""
        text = self.text
        if self.config.max_length <= text.prompt.shape[1]:
            raise ModelError("max_length leaves no room for a token behind the prompt; raise it")
        out = self.model._prefill(text.prompt, self.config, kwargs)
        logits = out.logits[:, -1:].to(dtype=torch.float32, device=text.prompt.device)
        reader = SequenceReader(self.model, kwargs, returned_cache(out))
        del out
        self._judge(0, [[] for _ in text.said], logits)
        self._show()
        drafter = None if all(text.over) else make(reader, text)
        for row, said in enumerate(text.said):
            if drafter is not None:
                drafter.tell(row, said)
        with grouped(self.model), few_rows(self.model), self.model._optimize_model_for_decode():
            while not self._finished():
                self._pass(reader, drafter)
        return self._output(reader)

    def _pass(self, reader: SequenceReader, drafter: Drafter | None) -> None:
        text, held = self.text, reader.held
        run = self._drafted(drafter, held)
        begin = time.perf_counter()
        before = [len(said) for said in text.said]
        if run.parents is not None and run.tokens[0]:
            width = self._tree(reader, drafter, run)
        else:
            width = self._chain(reader, drafter, run)
        seconds = time.perf_counter() - begin
        drafts = run.passes or max(map(len, run.tokens))
        self.costs.time(width, seconds, drafts, max(run.seconds, 1e-9))
        self.passes += 1
        self.drafting += run.seconds
        for row, start in enumerate(before):
            if drafter is not None:
                drafter.tell(row, text.said[row][start:])
            if text.over[row] and self._pads:
                text.said[row] += [self._pad] * (reader.held + 1 - len(text.said[row]))
        self._show()

    def _drafted(self, drafter: Drafter | None, held: int) -> DraftRun:
        """Drafts for the next pass, as many as are worth it and as there is room for."""
        text, plan = self.text, self.plan
        shortest = min(len(text.said[row]) for row in self._active)
        room = self.config.max_length - text.prompt.shape[1] - shortest - 1
        most = min(plan.most, room)
        if plan.adapt:
            most = self._length.begin(max(0, most))
        if most <= 0 or drafter is None:
            return DraftRun([[] for _ in text.said], [[] for _ in text.said])
        return drafter.propose(text, held, self._length, most)

    def _chain(self, reader: SequenceReader, drafter: Drafter | None, run: DraftRun) -> int:
        """Verify a run of drafts of each row; returns the tokens of a row that were read."""
        text, held = self.text, reader.held
        most = min(len(text.said[row]) for row in self._active) - held + self.plan.most
        pairs = zip(text.said, run.tokens, strict=True)
        streams = [[*said[held:], *drafts][:most] for said, drafts in pairs]
        width = max(len(streams[row]) for row in self._active)
        streams = [(stream + [self._pad] * width)[:width] for stream in streams]
        logits = reader.read(torch.tensor(streams, device=text.prompt.device))
        if drafter is not None:
            drafter.learn(streams, logits)
        read = self._judge(held + 1, streams, logits, run, held)
        reader.rewind(min(read))
        return width

    def _judge(
        self,
        first: int,
        streams: list[list[int]],
        logits: Tensor,
        run: DraftRun | None = None,
        held: int = 0,
    ) -> list[int]:
        """Let all rows say what `logits` `[B, n, V]` make certain.

        Place i is of new token `first + i`. Returns how many new tokens of each row may stay in the
        cache.
        """
        text, count = self.text, logits.shape[1]
        raw = logits.clone() if self._keeps("logits") else logits
        starts = [len(said) - first for said in text.said]
        known = [said[:held] + stream for said, stream in zip(text.said, streams, strict=True)]
        scores = torch.empty_like(logits)
        for i in range(min(starts[row] for row in self._active), count):
            scores[:, i] = text.process(text.ids([k[: first + i] for k in known]), logits[:, i])
        read = [held + len(stream) for stream in streams]
        for row in self._active:
            start = starts[row]
            if start >= count:  # far ahead of the others: it has only read what it had said
                continue
            drafts = streams[row][start + 1 :] if run is not None else []
            real = 0 if run is None else min(len(drafts), len(run.tokens[row]))
            drafts = drafts[:real]
            q = None if run is None or run.q is None else run.q[row][:real]
            mine = scores[row, start : start + real + 1]
            accepted, token = self._accept(row, drafts, mine, q)
            read[row] = len(text.said[row]) + accepted
            self._count(run, row, real, accepted)
            for i, each in enumerate([*drafts[:accepted], token]):
                self._keep(row, scores[row, start + i], raw[row, start + i])
                self._say(row, each)
                if text.over[row] and self._pads:
                    break
        return read

    def _accept(
        self, row: int, drafts: list[int], scores: Tensor, q: list[Tensor] | None
    ) -> tuple[int, int]:
        """Drafts that stand, by the exact rule but for `bild`, and the token behind them."""
        text = self.text
        mine = torch.tensor([drafts], dtype=torch.long, device=scores.device)
        counts = torch.tensor([len(drafts)], device=scores.device)
        if self.plan.rollback is not None:
            accepted, token = accept_close(mine, scores[None], self.plan.rollback, counts)
            return int(accepted), int(token)
        if text.generators is None:
            accepted, token = accept_greedy(mine, scores.argmax(-1)[None], counts)
            return int(accepted), int(token)
        p = scores.softmax(-1)[None]
        if q is None:  # drafts that were not drawn: all of their probability is on them
            shares = F.one_hot(mine, p.shape[-1]).to(p.dtype)
        else:
            shares = torch.stack(q)[None] if q else p[:, :0]
        u, v = (text.uniform(row, n).to(p.device) for n in (len(drafts), 1))
        accepted, token = accept_sampled(mine, p, shares, counts, u[None], v)
        return int(accepted), int(token)

    def _count(self, run: DraftRun | None, row: int, verified: int, accepted: int) -> None:
        if run is None or self.text.over[row]:
            return
        self.proposed += verified
        self.accepted += accepted
        if verified and self.plan.adapt:
            self._length.end(run.sure[row][:verified], accepted)

    def _tree(self, reader: SequenceReader, drafter: Drafter | None, run: DraftRun) -> int:
        """Verify a tree of drafts of one row in one pass, and keep the path that stands."""
        text, parents = self.text, run.parents
        assert parents is not None
        device = text.prompt.device
        tokens = [text.said[0][-1], *run.tokens[0]]
        seen, depths = tree_mask(parents)
        ids = torch.tensor([tokens], device=device)
        logits = reader.read(ids, depths, reader.tree_mask(seen))
        if drafter is not None:
            drafter.learn([tokens], logits)
        path, here = [0], 0
        while True:
            ids = text.ids(text.said)
            scores = text.process(ids, logits[:, here].clone())
            children = [i + 1 for i, p in enumerate(parents) if p == here - 1]
            stands, token = self._among(run, children, scores[0])
            self._keep(0, scores[0], logits[0, here])
            self._say(0, token)
            if stands is None or text.over[0]:
                break
            here = stands
            path.append(here)
        reader.keep_path(path, len(tokens))
        self.proposed += len(tokens) - 1
        self.accepted += len(path) - 1
        if self.plan.adapt:
            tried = path[1:] + children[:1] if stands is None else path[1:]
            sure = [run.sure[0][node - 1] for node in tried]
            more = int(depths.max()) - len(sure)
            self._length.end(sure + sure[-1:] * more, len(path) - 1)
        return len(tokens)

    def _among(self, run: DraftRun, children: list[int], scores: Tensor) -> tuple[int | None, int]:
        """Return the child of a tree that stands behind scores `[V]`, if any, and the token."""
        text, drafts = self.text, [run.tokens[0][child - 1] for child in children]
        if text.generators is not None and run.q is not None and drafts:
            q = torch.stack([run.q[0][child - 1] for child in children])
            u, v = (text.uniform(0, n).to(scores.device) for n in (len(drafts), 1))
            place, token = accept_among(drafts, scores.softmax(-1), q.to(scores.device), u, v)
            return (children[place] if place < len(children) else None), token
        if text.generators is None:
            token = int(scores.argmax(-1))
        else:
            token = int(draw(scores.softmax(-1)[None], text.uniform(0, 1).to(scores.device)))
        return next((c for c, d in zip(children, drafts, strict=True) if d == token), None), token

    def _say(self, row: int, token: int) -> None:
        """Let a row say a token, and note where it ends."""
        text = self.text
        text.said[row].append(token)
        if text.over[row]:
            return
        ids = torch.cat(
            [text.prompt[row], torch.tensor(text.said[row], device=text.prompt.device)]
        )[None]
        if bool(self._criteria(ids, None)[0]):
            text.over[row], self._ends[row] = True, len(text.said[row])

    @property
    def _active(self) -> list[int]:
        """Rows that go on: those that have ended, too, where stock code lets them."""
        return [row for row, over in enumerate(self.text.over) if not (over and self._pads)]

    def _finished(self) -> bool:
        if not all(self.text.over):
            return False
        return self._pads or min(map(len, self.text.said)) >= self._final

    @property
    def _final(self) -> int:
        return max(end for end in self._ends if end is not None)

    def _show(self) -> None:
        """Hand the streamer what all rows have said, column by column."""
        if self._streamer is None:
            return
        text = self.text
        ready = min(
            len(said)
            for said, over in zip(text.said, text.over, strict=True)
            if not (over and self._pads) or all(text.over)
        )
        for place in range(self._shown, min(ready, self._final) if all(text.over) else ready):
            column = [said[place] if place < len(said) else self._pad for said in text.said]
            self._streamer.put(torch.tensor(column))
            self._shown = place + 1

    def _keeps(self, name: str) -> bool:
        return bool(
            self.config.return_dict_in_generate and getattr(self.config, f"output_{name}", False)
        )

    def _keep(self, row: int, scores: Tensor, logits: Tensor) -> None:
        if self._keeps("scores") or self._keeps("logits"):
            self._kept[row].append((scores.clone(), logits.clone()))

    def _output(self, reader: SequenceReader) -> Any:
        text, final = self.text, self._final
        rows = [(said + [self._pad] * final)[:final] for said in text.said]
        if self._pads:
            rows = [
                row[:end] + [self._pad] * (final - (end or 0))
                for row, end in zip(rows, self._ends, strict=True)
            ]
        ids = text.ids(rows)
        text.said[:] = rows
        self._show()
        if self._streamer is not None:
            self._streamer.end()
        if not self.config.return_dict_in_generate:
            return ids
        if reader.held < final - 1:  # later turns go on from a whole cache
            reader.read(ids[:, text.prompt.shape[1] + reader.held : -1])
        reader.rewind(final - 1)
        from transformers.generation.utils import GenerateDecoderOnlyOutput

        columns = [self._column(i) for i in range(final)]
        return GenerateDecoderOnlyOutput(
            sequences=ids,
            scores=tuple(s for s, _ in columns) if self._keeps("scores") else None,
            logits=tuple(x for _, x in columns) if self._keeps("logits") else None,
            **{CACHE: reader.cache},
        )

    def _column(self, place: int) -> tuple[Tensor, Tensor]:
        """Scores and logits `[B, V]` of one step; those of a row that had ended are its last."""
        if not self._kept[0]:
            return torch.empty(0), torch.empty(0)
        pairs = [mine[min(place, len(mine) - 1)] for mine in self._kept]
        return torch.stack([s for s, _ in pairs]), torch.stack([x for _, x in pairs])


def tree_mask(parents: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Sight `[T + 1, T + 1]` bool of the nodes of a tree, and their depths `[T + 1]`.

    Node 0 is the root; `parents` `[T]` are those of the others, counted from 0 without the root,
    -1 for the root. A node sees itself and what it descends from.
    """
    count = len(parents) + 1
    seen, depths = torch.zeros(count, count, dtype=torch.bool), torch.zeros(count, dtype=torch.long)
    seen[0, 0] = True
    for node, parent in enumerate(parents, start=1):
        seen[node] = seen[parent + 1]
        seen[node, node] = True
        depths[node] = depths[parent + 1] + 1
    return seen, depths
