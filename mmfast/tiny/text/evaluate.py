"""The `needles` suite: questions about long documents, whole, under policies and under reducers.

A document is read once; every question goes on from its own copy of what the policy left. Nobody
knows the question then, as when a document is kept for many users. With `aware` the question is
read before the cache is cut, with the last WINDOW tokens of the document, as SnapKV assumes.
A reducer cuts a prompt that has the document and one question.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmfast.attach import attach
from mmfast.core.errors import MmfastError
from mmfast.models.cache_name import CACHE, returned_cache
from mmfast.models.text_chat import load_text
from mmfast.tiny.evaluate import interval
from mmfast.tiny.text.haystack import (
    KINDS,
    LONGEST,
    FactCounts,
    Haystack,
    NeedleQuestion,
    make_document,
)
from mmfast.tiny.training import shares
from mmfast.tiny.video.scene import EVAL

NAME = "tiny-text"
FACTS = FactCounts()
SHORTEST = 512  # tokens of a document, half of which its facts take
WINDOW = 29  # last tokens of a document that are read with a question: 32 in all
BATCH = 10  # questions answered side by side
MOST = 2  # tokens of an answer, the mark behind it included
Progress = Callable[[str, int, int], None]


def documents(seed: int, length: int) -> Iterator[Haystack]:
    """Endless documents of the evaluation, of a length in tokens; the same for the same seed."""
    if not SHORTEST <= length <= LONGEST:
        raise MmfastError(
            f"--length {length} is no length of a document; give {SHORTEST} to {LONGEST} tokens"
        )
    rng = np.random.default_rng([EVAL, seed, length])
    while True:
        yield make_document(length, rng, FACTS)


@dataclass(frozen=True)
class DocumentReader:
    """A causal language model of text and its tokenizer."""

    model: Any
    words: Any

    def _ids(self, texts: Sequence[str], start: bool = False) -> Tensor:
        ids = self.words(list(texts), add_special_tokens=start, return_tensors="pt").input_ids
        return ids.to(self.model.device)  # type: ignore[no-any-return]

    def _read(self, ids: Tensor, cache: Any) -> tuple[Tensor, Any]:
        """Logits `[B, V]` behind ids `[B, T]`, and the cache with them."""
        out = self.model(input_ids=ids, use_cache=True, **({} if cache is None else {CACHE: cache}))
        return out.logits[:, -1], returned_cache(out)

    def answers(
        self,
        document: Haystack,
        asked: Sequence[NeedleQuestion],
        spec: str | None,
        aware: bool = False,
        reduce: str | None = None,
    ) -> tuple[list[str], float]:
        """Answers to questions about a document, and the share of its entries that stayed.

        `spec` is a cache policy; under `reduce` it is the share of the tokens of prompts.
        """
        if reduce is not None:
            return self._reduced(document, asked, reduce)
        return (self._informed if aware else self._later)(document, asked, spec)

    def _reduced(
        self, document: Haystack, asked: Sequence[NeedleQuestion], reduce: str
    ) -> tuple[list[str], float]:
        """Answer prompts of the document and a question, one by one, as their user would."""
        found = list[str]()
        with attach(self.model, reduce) as trace:
            for each in asked:
                ids = self._ids([f"{document.text} {each.text} {each.lead}"], start=True)
                given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": MOST}
                out = self.model.generate(ids, do_sample=False, **given)
                found += self._texts(out[:, ids.shape[1] :])
        return found, _kept(trace)

    @torch.inference_mode()
    def _later(
        self, document: Haystack, asked: Sequence[NeedleQuestion], spec: str | None
    ) -> tuple[list[str], float]:
        """Read, cut, then ask: token by token, as a prompt of several would be cut again."""
        found = list[str]()
        with self._policy(spec) as trace:
            _, read = self._read(self._ids([document.text], start=True), None)
            for some in _batches(asked):
                cache = _copies(read, len(some))
                for column in self._ids([f"{q.text} {q.lead}" for q in some]).T:
                    logits, cache = self._read(column[:, None], cache)
                found += self._write(logits, cache)
        return found, _kept(trace)

    @torch.inference_mode()
    def _informed(
        self, document: Haystack, asked: Sequence[NeedleQuestion], spec: str | None
    ) -> tuple[list[str], float]:
        """Read all but the end of a document, its end with a question, cut, then answer."""
        ids, found = self._ids([document.text], start=True), list[str]()
        _, read = self._read(ids[:, :-WINDOW], None)
        with self._policy(spec) as trace:
            for some in _batches(asked):
                end = ids[:, -WINDOW:].expand(len(some), -1)
                question = self._ids([q.text for q in some])
                _, cache = self._read(torch.cat([end, question], 1), _copies(read, len(some)))
                lead = self._ids([q.lead for q in some])
                logits, cache = self._read(lead, cache)
                found += self._write(logits, cache)
        return found, _kept(trace)

    def _write(self, logits: Tensor, cache: Any) -> list[str]:
        """Greedy answers behind logits `[B, V]`."""
        ids = [logits.argmax(-1)]
        while len(ids) < MOST:
            logits, cache = self._read(ids[-1][:, None], cache)
            ids.append(logits.argmax(-1))
        return self._texts(torch.stack(ids, 1))

    def _texts(self, ids: Tensor) -> list[str]:
        """Answers in ids `[B, T]`, up to the first mark."""
        texts = self.words.batch_decode(ids, clean_up_tokenization_spaces=False)
        return [text.split(".")[0].strip() for text in texts]

    def _policy(self, spec: str | None) -> AbstractContextManager[Any]:
        return nullcontext() if spec is None else attach(self.model, cache=spec)


def _batches(asked: Sequence[NeedleQuestion]) -> Iterator[Sequence[NeedleQuestion]]:
    for at in range(0, len(asked), BATCH):
        yield asked[at : at + BATCH]


def _copies(cache: Any, many: int) -> Any:
    """A cache of one row as one of many, of its own."""
    mine = copy.deepcopy(cache)
    mine.reorder_cache(torch.zeros(many, dtype=torch.long))
    return mine


def _kept(trace: Any) -> float:
    """Share of what went in that is left behind all stages; beside a cache policy, of entries."""
    rows, share = [] if trace is None else trace.rows, 1.0
    stages = dict.fromkeys(row.stage for row in rows)  # in one order, as is their product
    for stage in ["kv"] if "kv" in stages else stages:
        mine = [row for row in rows if row.stage == stage]
        if before := sum(row.tokens_in for row in mine):
            share *= sum(row.tokens_out for row in mine) / before
    return share


def needle_rows(
    reduces: Sequence[str],
    caches: Sequence[str],
    n: int,
    seed: int,
    length: int,
    model: str | Path | None = None,
    aware: bool = False,
    progress: Progress | None = None,
    known: Callable[[str | None, str | None], dict[str, Any] | None] = lambda spec, cache: None,
) -> Iterator[dict[str, Any]]:
    """Rows of results about the same documents: the whole cache, then each reducer and policy.

    A row that is `known` by its reducer and policy is not asked again.
    """
    source = documents(seed, length)
    first = next(source)  # refuses a wrong length before a model is loaded
    reader = DocumentReader(*load_text(model or NAME, "cpu", "float32"))
    papers, many = [first], len(first.questions)
    while many < n:
        papers.append(next(source))
        many += len(papers[-1].questions)
    ways = [(None, None), *((each, None) for each in reduces), *((None, each) for each in caches)]
    for reduce, spec in ways:
        if (row := known(reduce, spec)) is not None:
            yield row
            continue
        marks, kept = list[tuple[str, bool]](), list[float]()
        for paper in papers:
            asked = paper.questions[: n - len(marks)]
            texts, share = reader.answers(paper, asked, spec, aware, reduce)
            marks += [(q.kind, q.answer == t) for q, t in zip(asked, texts, strict=True)]
            kept.append(share)
            if progress is not None:
                progress(reduce or spec or "the whole cache", len(marks), n)
        right = sum(mark for _, mark in marks)
        yield {
            "suite": "needles", "n": n, "seed": seed, "model": Path(model or NAME).name,
            "length": length, "aware": aware, "reduce": reduce, "cache": spec,
            "score": right / n, "accuracy": right / n, "interval": interval(right, n),
            "by_kind": shares(marks, KINDS), "kept": sum(kept) / len(kept),
        }  # fmt: skip
