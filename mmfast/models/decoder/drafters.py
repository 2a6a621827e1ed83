"""Sources of drafts for text: the model itself on part of its cache, another model, statistics."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from mmfast.core.errors import ModelError
from mmfast.decoding.row import DraftLength
from mmfast.decoding.sampling import draw
from mmfast.decoding.speculation import DecodePlan, PromptIndex, Recycler
from mmfast.models.cache_name import NEW, OLD, returned_cache
from mmfast.models.decoder.reader import SequenceReader

GUESS = 0.5  # confidence of a draft that no model stands behind: only its record tells


@dataclass
class DraftRun:
    """Drafts of one pass, by row of the batch.

    `tokens` continue what a row has said; `sure` are the confidences of the draft in its likeliest
    tokens; `q` `[V]` its probabilities, None where drafts were not drawn. `parents` are those of a
    tree (one row), -1 for the last token said; None for a chain.
    """

    tokens: list[list[int]]
    sure: list[list[float]]
    q: list[list[Tensor]] | None = None
    parents: list[int] | None = None
    passes: int = 0
    seconds: float = 0.0


@dataclass
class BatchText:
    """Tokens of a batch: the ids `[B, P]` of its prompt, and what each row has said since.

    `process(ids, logits)` are the logits processors of `generate`; `generators` draw tokens, None
    takes the likeliest; `over` marks rows that have ended.
    """

    prompt: Tensor
    process: Callable[[Tensor, Tensor], Tensor]
    generators: list[torch.Generator | None] | None
    said: list[list[int]] = field(default_factory=list)
    over: list[bool] = field(default_factory=list)

    def ids(self, streams: Sequence[Sequence[int]]) -> Tensor:
        """Ids `[B, P + n]` of the prompt and streams of n tokens behind it."""
        more = torch.tensor([list(s) for s in streams], dtype=torch.long)
        return torch.cat([self.prompt, more.to(self.prompt.device)], dim=1)

    def uniform(self, row: int, count: int) -> Tensor:
        """Uniform draws `[count]` of a row."""
        assert self.generators is not None
        return torch.rand(count, generator=self.generators[row], dtype=torch.float64)


class Drafter(Protocol):
    """A source of drafts for one call of `generate`."""

    def propose(self, text: BatchText, held: int, length: DraftLength, most: int) -> DraftRun:
        """Draft behind what rows have said, of which the model holds `held` tokens."""

    def learn(self, streams: Sequence[Sequence[int]], logits: Tensor) -> None:
        """Take in what the model said behind tokens that it has read, `[B, n, V]`."""

    def tell(self, row: int, tokens: Sequence[int]) -> None:
        """Take in tokens that stand."""


class DraftReader(Protocol):
    """Reads tokens for a draft: a `SequenceReader`, or what looks like one."""

    model: Any
    held: int

    def read(self, tokens: Tensor, depths: Tensor | None = None, mask: Any = None) -> Tensor:
        """Read tokens `[B, n]`; returns their logits `[B, n, V]`."""

    def rewind(self, held: int) -> None:
        """Go back to the first `held` new tokens."""


class DraftLessons(Protocol):
    """Learns from drafts that fell, in one call of `generate`."""

    def read(
        self, text: BatchText, held: int, streams: Sequence[Sequence[int]], logits: Tensor
    ) -> None:
        """Take in what the verifying model said behind `streams`, which begin at token `held`."""

    def judged(self, row: int) -> None:
        """Take in that a row has said what stands."""


class ModelDrafter:
    """Drafts of a model over a cache of its own, token by token, all rows at once."""

    def __init__(
        self,
        reader: DraftReader,
        plan: DecodePlan,
        vocabulary: int,
        sync: Callable[[], None] | None = None,
        lessons: DraftLessons | None = None,
    ) -> None:
        self.reader, self.plan, self._sync = reader, plan, sync
        self._vocabulary, self._lessons = vocabulary, lessons
        self._seen: tuple[BatchText, int] | None = None

    def begin(self, held: int) -> None:
        """Let the cache of the draft hold what the verifying model does, `held` tokens, or less."""
        if self._sync is not None:
            self._sync()
            self.reader.held = held
        else:
            self.reader.rewind(min(held, self.reader.held))

    def propose(self, text: BatchText, held: int, length: DraftLength, most: int) -> DraftRun:
        """Draft until the rows are unsure of what follows, or `most` tokens."""
        start = time.perf_counter()
        self.begin(held)
        self._seen = text, held
        run = DraftRun([[] for _ in text.said], [[] for _ in text.said])
        if text.generators is not None:
            run.q = [[] for _ in text.said]
        waiting = [said[self.reader.held :] for said in text.said]
        given = min(map(len, waiting))
        limit = held + 1 + most  # tokens that the verifying pass reads at most
        while True:
            logits = self.read([mine[:given] for mine in waiting])
            waiting = [mine[given:] for mine in waiting]
            given = 1
            if not self._draft(text, run, waiting, logits, length):
                break
            if self.reader.held + 1 >= limit:
                break
        run.seconds = time.perf_counter() - start
        return run

    def read(
        self,
        tokens: Sequence[Sequence[int]],
        depths: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Logits `[B, V]` behind the last of the next tokens of all rows.

        With `depths` `[n]` and a `mask`, those `[n, V]` behind all n nodes of a tree.
        """
        ids = torch.tensor([list(each) for each in tokens], device=self.reader.model.device)
        logits = self.reader.read(ids, depths, mask)
        logits = logits[:, -1] if mask is None else logits[0]
        missing = self._vocabulary - logits.shape[-1]  # checkpoints pad their vocabularies
        return F.pad(logits, (0, missing), value=-torch.inf)

    def _draft(
        self,
        text: BatchText,
        run: DraftRun,
        waiting: list[list[int]],
        logits: Tensor,
        length: DraftLength,
    ) -> bool:
        """Add a draft to each row that has nothing left to read; False where the run ends."""
        run.passes += 1
        free = [row for row, mine in enumerate(waiting) if not mine]
        if not free:
            return True
        streams = [said + drafts for said, drafts in zip(text.said, run.tokens, strict=True)]
        behind = self.reader.held
        logits = fitted(logits, text, behind, streams)
        shares = logits.softmax(-1)
        best = shares.amax(-1).tolist()
        live = [row for row in free if not text.over[row]]
        sure = sum(best[row] for row in live) / max(1, len(live))
        if live and length.doubts(sure):
            return False
        for row in free:
            if run.q is None or text.over[row]:
                token = int(logits[row].argmax())
            else:
                token = int(draw(shares[row][None].cpu(), text.uniform(row, 1)))
            if run.q is not None:
                run.q[row].append(shares[row])
            run.tokens[row].append(token)
            run.sure[row].append(best[row])
            waiting[row].append(token)
        if len(free) < len(waiting) or not self.plan.adapt:
            return True
        return length.more(sure)

    def learn(self, streams: Sequence[Sequence[int]], logits: Tensor) -> None:
        """Hand on what the model said, if anything learns from it."""
        if self._lessons is not None and self._seen is not None:
            self._lessons.read(*self._seen, streams, logits)
            self._seen = None

    def tell(self, row: int, tokens: Sequence[int]) -> None:
        """Hand on that a row was judged."""
        if self._lessons is not None:
            self._lessons.judged(row)


def fitted(
    logits: Tensor, text: BatchText, behind: int, streams: Sequence[Sequence[int]]
) -> Tensor:
    """Logits `[B, V]` behind the first tokens of `streams`, processed as the model's own are."""
    ids = text.ids([stream[:behind] for stream in streams])
    return text.process(ids, logits)


class RecycleDrafter:
    """Drafts of a `Recycler`; a tree where one row is decoded and the model can read one."""

    def __init__(self, recycler: Recycler, plan: DecodePlan, trees: bool) -> None:
        self._recycler, self._plan, self._trees = recycler, plan, trees

    def propose(self, text: BatchText, held: int, length: DraftLength, most: int) -> DraftRun:
        """Draft from the candidates behind the last tokens."""
        start = time.perf_counter()
        if self._trees and len(text.said[0]) == held + 1:
            nodes = min(self._plan.tree, 3 * most)
            tokens, parents = self._recycler.tree(text.said[0][-1], nodes, most)
            run = DraftRun([tokens], [[GUESS] * len(tokens)], parents=parents)
        else:
            chains = [self._recycler.chain(said[-1], most) for said in text.said]
            run = DraftRun(chains, [[GUESS] * len(chain) for chain in chains])
        run.seconds = time.perf_counter() - start
        return run

    def learn(self, streams: Sequence[Sequence[int]], logits: Tensor) -> None:
        """Note the likeliest tokens behind all tokens that were read, refused drafts as well."""
        width = min(self._recycler.width, logits.shape[-1])
        best = logits.topk(width, dim=-1).indices.tolist()
        for stream, candidates in zip(streams, best, strict=True):
            self._recycler.learn(stream, candidates)

    def tell(self, row: int, tokens: Sequence[int]) -> None:
        """Learn nothing beyond that."""


class LookupDrafter:
    """Drafts of what followed the last tokens in the prompt or the answer."""

    def __init__(self, prompt: Tensor, plan: DecodePlan) -> None:
        self._rows = [PromptIndex(plan.ngram) for _ in prompt]
        for index, ids in zip(self._rows, prompt.tolist(), strict=True):
            index.push(ids)

    def propose(self, text: BatchText, held: int, length: DraftLength, most: int) -> DraftRun:
        """Draft the continuation of the longest known run."""
        start = time.perf_counter()
        found = [index.find(most) for index in self._rows]
        seconds = time.perf_counter() - start
        return DraftRun(found, [[GUESS] * len(each) for each in found], seconds=seconds)

    def learn(self, streams: Sequence[Sequence[int]], logits: Tensor) -> None:
        """Learn nothing: only what stands counts."""

    def tell(self, row: int, tokens: Sequence[int]) -> None:
        """Append tokens that stand."""
        self._rows[row].push(tokens)


def prompt_reader(
    model: Any, inputs: Mapping[str, Any], without: Collection[int] | None = None
) -> SequenceReader:
    """Let a draft model read a prompt; the reader of what follows.

    Stock `generate` prepares positions, masks, media and cache, and hands them over. The assistant
    of transformers' own loop gets no media. For `without` see `own_inputs`.
    """
    given = own_inputs(model, inputs, without)
    given = {k: v.to(model.device) if isinstance(v, Tensor) else v for k, v in given.items()}
    found: list[SequenceReader] = []

    def capture(
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **kwargs: Any,
    ) -> Tensor:
        out = model._prefill(input_ids, generation_config, kwargs)
        found.append(SequenceReader(model, kwargs, returned_cache(out)))
        return input_ids

    try:
        model.generate(**given, custom_generate=capture, max_new_tokens=1, do_sample=False)
    except (ValueError, RuntimeError, IndexError, TypeError, StopIteration) as error:
        reason = " ".join(str(error).split())[:200]
        raise ModelError(
            f"the draft model cannot read this prompt ({reason}); let it read text alone with "
            "'?media=false', or use decode='recycle'"
        ) from error
    return found[0]


# Arguments of the main model's call that say nothing to another model.
_UNSHARED = {NEW, OLD, "use_cache", "inputs_embeds", "labels", "logits_to_keep"}
_UNSHARED |= {"output_attentions", "output_hidden_states", "return_dict"}


def own_inputs(
    model: Any, inputs: Mapping[str, Any], without: Collection[int] | None = None
) -> dict[str, Any]:
    """Return the inputs of another model that a draft model reads.

    Arguments that it does not know stay out; with ids `without`, so do these and all media.
    """
    if without is not None:
        return _text_alone(inputs["input_ids"], inputs.get("attention_mask"), without)
    known = set(inspect.signature(model.forward).parameters) - _UNSHARED
    return {name: value for name, value in inputs.items() if name in known}


def _text_alone(ids: Tensor, mask: Tensor | None, without: Collection[int]) -> dict[str, Any]:
    """Ids and mask without placeholders, left-padded anew."""
    keep = ~torch.isin(ids, torch.tensor(sorted(without), device=ids.device))
    if mask is not None:
        keep &= mask.bool()
    rows = [row[mine] for row, mine in zip(ids, keep, strict=True)]
    longest = max(map(len, rows))
    out = ids.new_zeros(len(rows), longest)
    seen = torch.zeros_like(out)
    for place, row in enumerate(rows):
        out[place, longest - len(row) :], seen[place, longest - len(row) :] = row, 1
    return {"input_ids": out, "attention_mask": seen}
