"""SentenceKV: sentences by their mean key, the others stay in host memory."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from mmfast.caches.selection.quest import tokens_of
from mmfast.core.kv import LayerStep, StepChoice, StepSelector
from mmfast.core.registry import policy
from mmfast.ops.pages import marked_places, mean_scores


@policy("sentencekv", paper="2504.00970", needs=("sentence",), role="select", moment="always")
def sentencekv(budget: int | float, *, ends: int | str = "") -> StepSelector:
    """Keep all in host memory, and fetch the sentences whose mean key suits the one being written.

    Zhu et al. (COLM 2025): the tokens of a sentence lie together, and its mean key on the device
    stands for it. The mean query of the sentence that is being written is compared with these, and
    the best sentences are fetched for every head until the budget is spent. The sentence being
    written is read as a whole. A frame of a video, and a picture, is a sentence. Sentences end
    where the tokenizer beside the model says so.

    Args:
        budget: Tokens to fetch for every head, in whole sentences; a share is of the tokens held at
            the step. One sentence is always fetched.
        ends: Ids of tokens that end a sentence, as `13_30`, in place of those that the tokenizer
            writes as full stops and the like, line breaks, or marks of its own.
    """
    return MeanSentences(budget)


@dataclass(eq=False)
class SentenceMeans:
    """Mean keys `[H, S, d]` of the first S sentences, how many tokens each has, and their ends."""

    means: Tensor
    counts: Tensor  # [H, S]
    ends: Tensor  # [S], the place behind the last token

    @classmethod
    def none(cls, keys: Tensor, device: torch.device) -> SentenceMeans:
        """No sentences of keys `[1, H, n, d]`."""
        heads, width = keys.shape[1], keys.shape[3]
        means = torch.empty(heads, 0, width, dtype=keys.dtype, device=device)
        counts = torch.empty(heads, 0, dtype=torch.int64, device=device)
        return cls(means, counts, counts[0])

    def trim(self, entries: int) -> bool:
        """Forget sentences behind which nothing is left."""
        done = int((self.ends < entries).sum())
        self.means, self.counts = self.means[:, :done], self.counts[:, :done]
        self.ends = self.ends[:done]
        return True

    def grow(self, keys: Tensor, number: Tensor, total: int) -> None:
        """Add sentences up to `total` of keys `[1, H, n, d]`, by the sentence `[H, n]` of each."""
        done, (heads, n) = len(self.ends), number.shape
        if done >= total:
            return
        new = (number >= done) & (number < total)
        start = int(new.any(0).to(torch.int8).argmax())
        part = keys[0, :, start:].to(number.device)
        into = (number - done).masked_fill(~new, total - done)[:, start:]  # the last one is waste
        places = torch.arange(start, n, device=number.device).expand(heads, -1) + 1
        blank = part.new_zeros(heads, total - done + 1, part.shape[2], dtype=torch.float32)
        sums = blank.scatter_add(1, into[..., None].expand(part.shape), part.float())[:, :-1]
        counts = torch.zeros_like(blank[..., 0], dtype=torch.int64)
        last = counts.scatter_reduce(1, into, places, "amax")[:, :-1].amax(0)
        counts = counts.scatter_add(1, into, torch.ones_like(into))[:, :-1]
        means = (sums / counts.clamp_min(1)[..., None]).to(part.dtype)
        self.means = torch.cat([self.means, means], 1)
        self.counts = torch.cat([self.counts, counts], 1)
        self.ends = torch.cat([self.ends, last.cummax(0).values])


_KNOWN = 24  # sums of queries that are kept, in case entries are taken back


@dataclass(eq=False)
class SentenceQuery:
    """Queries of the sentence being written: entries, sentence, sum `[1, H, G, d]` and number."""

    sums: list[tuple[int, int, Tensor, int]] = field(default_factory=list)

    def trim(self, entries: int) -> bool:
        """Forget queries that were taken back."""
        self.sums = [each for each in self.sums if each[0] <= entries]
        return True

    def mean(self, query: Tensor, n: int, sentence: int) -> Tensor:
        """Add the query of entry n, and return the mean over its sentence."""
        self.trim(n - 1)
        total, count = query.float(), 1
        if self.sums and self.sums[-1][1] == sentence:
            total, count = total + self.sums[-1][2], self.sums[-1][3] + 1
        self.sums = [*self.sums[1 - _KNOWN :], (n, sentence, total, count)]
        return total / count


@dataclass(frozen=True)
class MeanSentences:
    """Sentences by the product of their mean key and the mean query of the one being written."""

    budget: int | float
    alone: bool = True  # rows have sentences of their own
    across: bool = False
    host: bool = True
    beside: float = 0.5  # at most a key for each entry

    def check(self, depths: int) -> None:
        """Every layer chooses."""

    def choose(self, step: LayerStep) -> StepChoice:
        """The best sentences of every head, and what belongs to none."""
        if step.sentence is None:
            return StepChoice()
        heads, wanted = step.keys.shape[1], tokens_of(self.budget, step.n)
        number = step.sentence.expand(heads, -1)  # [H, n]
        newest = int(number[:, -1].max())
        query = step.memory.setdefault("asked", SentenceQuery()).mean(step.query, step.n, newest)
        if wanted >= step.n - 1 or newest < 1:
            return StepChoice()
        if "means" not in step.memory:
            step.memory["means"] = SentenceMeans.none(step.keys, number.device)
        table: SentenceMeans = step.memory["means"]
        table.grow(step.keys, number, newest)
        score = mean_scores(query, table.means[None])[0].masked_fill(table.counts == 0, -torch.inf)
        order = score.argsort(dim=-1, descending=True, stable=True)
        fits = table.counts.gather(1, order).cumsum(1) <= wanted
        fits[:, 0] = True
        best = torch.zeros_like(fits).scatter(1, order, fits)
        old = (number >= 0) & (number < newest)
        read = torch.where(old, best.gather(1, number.clamp(0, newest - 1)), True)
        if step.stays is not None:
            read |= step.stays
        index, real = marked_places(read[None, :, :-1])
        nbytes = table.means.numel() * table.means.element_size()
        return StepChoice(index, 1, step.n - 1, real, nbytes)
