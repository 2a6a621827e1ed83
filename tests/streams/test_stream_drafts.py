"""Drafts of answers in a stream: the tokens and the branch are those of one token a pass."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from stream_checks import FAMILIES, model_of, remark, stream

from mmfast.caches.plan import plan_cache
from mmfast.core.errors import SpecError
from mmfast.core.trace import Trace
from mmfast.decoding.speculation import plan_decode
from mmfast.pipelines import pipeline
from mmfast.streams.drafts import DraftMemory
from mmfast.streams.engine import Branch, Engine
from mmfast.streams.reply import Reply, Sampler

SPECS = ["lookup?adapt=false&most=4", "recycle?adapt=false&most=4"]


class Words:
    """Writes ids as numbers."""

    def decode(self, ids: list[int], **_: Any) -> str:
        """Return ids with spaces between them."""
        return " ".join(map(str, ids))


def written(
    family: str,
    spec: str | None,
    heat: float = 0.0,
    memory: str = "",
    learnt: DraftMemory | None = None,
) -> Any:
    """Ids of an answer behind a stream, what `keep` appended to it, and counts of drafts."""
    model = model_of(family)
    engine = Engine(model)
    held = engine.memory(plan_cache(memory or None))
    for piece in stream(family, model, 8, 3):
        engine.append(held, piece)
    branch = engine.branch(held)
    logits, prompt = branch.extend(remark(family, model, 5, 9)), [1, 2, 3, 1, 2, 3]
    plan = plan_decode(spec)
    reply = Reply(
        branch,
        logits,
        tokenizer=Words(),
        sampler=Sampler((), heat, 1.0, 5),
        stops=(),
        limit=14,
        trace=Trace(),
        started=0.0,
        ended=lambda reply: reply.keep(),
        prompt=prompt,
        drafter=None if plan is None else (learnt or DraftMemory()).drafter(plan, prompt),
    )
    assert reply.read()
    rows = [row for row in reply.trace.rows if row.stage == "draft"]
    counts = (rows[0].tokens_in, rows[0].tokens_out) if rows else None
    keys = [buffer.read(0, 0, buffer.length).clone() for buffer in held.buffers]
    return reply.ids, keys, [block.start for block in held.blocks], counts


@pytest.mark.parametrize(
    "family", [FAMILIES[0], *(pytest.param(each, marks=pytest.mark.slow) for each in FAMILIES[1:])]
)
def test_drafts_change_no_token_and_nothing_that_is_kept(family: str) -> None:
    ids, keys, starts, none = written(family, None)
    assert none is None
    accepted, learnt = 0, DraftMemory()
    specs = SPECS if family != FAMILIES[0] else SPECS[1:]
    for spec in (*specs, SPECS[1]):  # the last one knows what follows each token
        found, mine, places, counts = written(family, spec, learnt=learnt)
        assert found == ids and places == starts
        for one, other in zip(mine, keys, strict=True):
            torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
        accepted += counts[1]
        assert counts[0] >= counts[1]
    assert accepted > 0


def taught(ids: list[int]) -> DraftMemory:
    """What drafts an answer in which no token recurs: two tokens right, and the third wrong."""
    memory, plan = DraftMemory(), plan_decode(SPECS[1])
    assert plan is not None
    memory.drafter(plan, ())
    for place, (token, other) in enumerate(pairwise(ids)):
        memory._known[plan.width].learn([token], [[other + (place % 3 == 2)]])
    return memory


@pytest.mark.slow
def test_drawn_tokens_are_those_of_their_seed() -> None:
    ids = written(FAMILIES[0], None, heat=1.0)[0]
    found, *_, counts = written(FAMILIES[0], SPECS[1], heat=1.0, learnt=taught(ids))
    assert found == ids and counts[0] > counts[1] > 0
    assert written(FAMILIES[0], None)[0] != ids


@pytest.mark.slow
def test_stored_blocks_are_chosen_at_the_same_tokens() -> None:
    memory = "sink:8+window:45+rekv:2?every=3"
    ids = written(FAMILIES[0], None, memory=memory)[0]
    found, *_, counts = written(FAMILIES[0], SPECS[1], memory=memory, learnt=taught(ids))
    assert found == ids and counts[0] > counts[1] > 0


@pytest.mark.slow
def test_a_draft_that_stands_although_it_was_not_said_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All drafts stay on the branch: what comes behind them is another answer."""
    ids, keys = written(FAMILIES[0], None)[:2]
    stand = Branch.stand

    def all_of_them(self: Branch, count: int) -> None:
        assert self._ahead is not None
        stand(self, len(self._ahead[1]))

    monkeypatch.setattr(Branch, "stand", all_of_them)
    mine, held = written(FAMILIES[0], SPECS[1], learnt=taught(ids))[:2]
    assert mine != ids or any(len(a[0]) != len(b[0]) for a, b in zip(held, keys, strict=True))


@pytest.mark.slow
def test_sessions_take_it_from_the_pipeline_or_the_question() -> None:
    rng = random.Random(2)
    pipe = pipeline("video-stream", decode="recycle?adapt=false")
    with pipe.open(memory="window:256", history=0) as session:
        for second in range(3):
            frame = np.full((64, 64, 3), rng.randrange(256), np.uint8)
            session.push(frame, float(second))
        ask = "What number is at the red circle?"
        plain = session.ask(ask, decode="none", max_new_tokens=8)
        mine = session.ask(ask, max_new_tokens=8)
        assert plain.read() == mine.read()
        stages = [[row.stage for row in each.trace.rows] for each in (plain, mine)]
        assert "draft" not in stages[0] and "draft" in stages[1]
        with pytest.raises(SpecError, match=r"'self:0.1'.*use 'recycle' or 'lookup'"):
            session.ask(ask, decode="self:0.1")
    with pytest.raises(SpecError, match="draft:x"):
        pipeline("video-stream", decode="draft:x")
