"""Offsets between beginnings (KVCOMM): by hand, what anchors do not tell, pools, prompts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles_prefill import kvcomm
from tiny_models import tiny
from torch import Tensor

from mmfast.core.errors import SpecError
from mmfast.core.kv import KVBlock
from mmfast.core.trace import Trace
from mmfast.models.cache_name import CACHE
from mmfast.streams.reuse.anchors import NEAR, AnchorPool, SegmentContext
from mmfast.streams.reuse.media import MediaReuse
from mmfast.streams.reuse.plan import parse_reuse
from mmfast.streams.reuse.store import ReuseStore

N, LAYERS = 6, 3
RELATIVE = torch.arange(N)[None]


def _block(seed: int) -> KVBlock:
    rng = torch.Generator().manual_seed(seed)
    keys, values = (
        tuple(torch.randn(2, N, 4, generator=rng) for _ in range(LAYERS)) for _ in range(2)
    )
    return KVBlock(keys, values, RELATIVE, RELATIVE[:, -1] + 1)


def _context(seed: int, base: int = 0, before: int = 1) -> SegmentContext:
    def drawn(number: int, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(number))

    return SegmentContext(drawn(100 + seed, N, 8), drawn(base, 8), drawn(before, 8))


def _pool(spec: str = "kvcomm?least=2", store: ReuseStore | None = None) -> AnchorPool:
    plan = parse_reuse(spec)
    assert plan is not None
    return AnchorPool(store or ReuseStore(), "model", RELATIVE, plan)


def _gap(a: KVBlock, b: KVBlock) -> float:
    pairs = zip((*a.keys, *a.values), (*b.keys, *b.values), strict=True)
    return max(float((x - y).abs().max()) for x, y in pairs)


def test_an_anchor_of_the_same_picture_gives_its_keys_and_values_back() -> None:
    pool, here = _pool(), [_block(10 + i) for i in range(3)]
    for i, now in enumerate(here):
        pool.learn(_block(i), now, _context(i))
    for i, now in enumerate(here):
        found = pool.moved(_block(i), _context(i))
        assert found is not None and _gap(found, now) < 1e-5
        assert _gap(_block(i), now) > 1  # without an offset


def test_offsets_between_anchors_by_hand() -> None:
    pool, anchors = _pool(), []
    for i in range(3):
        at = replace(_context(i), content=_context(0).content + 0.05 * i)
        pool.learn(_block(i), _block(10 + i), at)
        anchors.append((at, _block(i), _block(10 + i)))
    asked = replace(_context(0), content=_context(0).content + 0.06)
    found, expected = pool.moved(_block(5), asked), kvcomm(_block(5), asked, anchors)
    assert found is not None
    for name in ("keys", "values"):
        for layer in range(LAYERS):
            want = torch.tensor(expected[name][layer])
            assert torch.allclose(getattr(found, name)[layer], want, atol=1e-4)
    assert _gap(found, _block(5)) > 0.1


def test_anchors_that_do_not_tell() -> None:
    pool, asked = _pool(), _context(5)
    assert pool.moved(_block(5), asked) is None
    pool.learn(_block(0), _block(10), _context(5))
    assert pool.moved(_block(5), asked) is not None  # the same picture
    twice = replace(asked, content=_context(6).content + 0.01)
    assert pool.moved(_block(5), twice) is None  # a single other one
    pool.learn(_block(1), _block(11), _context(6))
    assert pool.moved(_block(5), twice) is not None
    strict = _pool("kvcomm:0.3?least=2", pool.store)
    assert strict.moved(_block(5), twice) is not None  # one of both is near
    assert _pool("kvcomm?least=3", pool.store).moved(_block(5), twice) is None
    for other in (_context(5, base=3), _context(5, before=3)):
        assert pool.moved(_block(5), other) is None  # another agent's
    between = replace(asked, content=(_context(5).content + _context(6).content) / 2)
    assert strict.moved(_block(5), between) is None  # as near to the one as to the other
    assert _pool(store=pool.store).moved(_block(5), between) is not None
    wide = AnchorPool(pool.store, "other model", RELATIVE, pool.plan)
    assert wide.moved(_block(5), asked) is None


def test_beginnings_that_are_near_are_one_agent() -> None:
    pool, asked = _pool(), _context(5)
    for i in (5, 6):
        pool.learn(_block(i), _block(10 + i), _context(i))
    for much, taken in ((0.5 * NEAR, True), (2 * NEAR, False)):
        other = asked.before * (1 + much)  # its norm is the larger one
        found = pool.moved(_block(5), replace(asked, before=other))
        assert (found is not None) == taken


def test_a_pool_is_bounded_and_keeps_what_is_used() -> None:
    pool = _pool("kvcomm?anchors=6&least=2")
    for i in range(20):
        pool.learn(_block(i), _block(100 + i), _context(i))
        if i:
            found = pool.moved(_block(0), _context(0))
            assert found is not None and _gap(found, _block(100)) < 1e-5  # number 0 stays
        assert len(pool.store.get(pool._name)) == min(i + 1, 6)
    last = [_pool(store=pool.store).moved(_block(i), _context(i)) for i in (19, 3)]
    gaps = [_gap(found, _block(100 + i)) for i, found in zip((19, 3), last, strict=True) if found]
    assert gaps[0] < 1e-5 and gaps[1] > 0.1  # number 3 left


def test_agents_do_not_push_out_each_others_anchors() -> None:
    pool = _pool("kvcomm?anchors=3&least=3")
    for i in range(3):
        for agent in range(1, 6):
            pool.learn(_block(i), _block(50 * agent + i), _context(i, before=agent))
    for agent in range(1, 6):
        found = pool.moved(_block(2), _context(2, before=agent))
        assert found is not None and _gap(found, _block(50 * agent + 2)) < 1e-5
        assert pool.moved(_block(9), _context(9, before=agent)) is not None


def test_a_pool_in_a_folder(tmp_path: Path) -> None:
    """The list of anchors is written anew, and another process finds the last one."""
    pool = _pool(store=ReuseStore(folder=tmp_path))
    for i in range(3):
        pool.learn(_block(i), _block(10 + i), _context(i))
        pool.store.flush()
    found = _pool(store=ReuseStore(folder=tmp_path)).moved(_block(2), _context(2))
    assert found is not None and _gap(found, _block(12)) < 1e-5


AGENTS = ("see", "count with great care and say", "you know")


def _agent(this: Any, agent: str, number: int, seed: int = 0) -> Any:
    picture = this.images(1, 10 * seed + number)[0]
    return this.inputs([f"{agent} {{image}} which?"], images=[picture])


@pytest.mark.parametrize("family", ["llava_onevision", "qwen2_5_vl"])
def test_agents_take_what_one_of_them_read(family: str) -> None:
    this, plan = tiny(family), parse_reuse("kvcomm?least=2")
    assert plan is not None
    store = ReuseStore()
    reuse = MediaReuse(this.model, this.processor, plan, store)
    plain = MediaReuse(this.model, this.processor, parse_reuse("blend:0"), store)  # type: ignore[arg-type]
    full = MediaReuse(this.model, this.processor, parse_reuse("prefix"), ReuseStore())  # type: ignore[arg-type]
    for number in range(6):
        for turn, agent in enumerate(AGENTS[:2]):
            inputs, trace = _agent(this, agent, number), Trace()
            given = reuse.prompt(reuse.encoded(inputs), trace=trace)
            read, pictures = _read(this, inputs, trace)
            assert read >= pictures or (turn and number > 1)  # new pictures, and anchors
    assert read < 0.6 * inputs["input_ids"].shape[1] and pictures > read / 2
    whole = full.prompt(full.encoded(inputs))[CACHE]
    turned = plain.prompt(plain.encoded(inputs))[CACHE]
    gaps = [
        sum(
            float((a.values - b.values).norm()) for a, b in zip(x.layers, whole.layers, strict=True)
        )
        for x in (given[CACHE], turned)
    ]
    assert gaps[0] < gaps[1]
    inputs, trace = _agent(this, AGENTS[2], 5), Trace()  # an agent that is new reads in full
    reuse.prompt(reuse.encoded(inputs), trace=trace)
    read, pictures = _read(this, inputs, trace)
    assert read >= pictures


def _read(this: Any, inputs: Any, trace: Trace) -> tuple[int, int]:
    """Tokens of a prompt that were read, and those of its picture."""
    row = next(row for row in trace.rows if row.stage == "reuse kv")
    return row.tokens_out, int((inputs["input_ids"] == this.model.config.image_token_id).sum())


@pytest.mark.parametrize(
    "spec",
    [
        "kvcomm:2",
        "kvcomm?anchors=4",
        "kvcomm?window=3",
        "kvcomm?least=0",
        "kvcomm?least",
        "blend:0.1?anchors=9",
        "prefix?a=1",
        "kvcomm:nan",
    ],
)
def test_specs_that_are_wrong(spec: str) -> None:
    with pytest.raises(SpecError, match="write"):
        parse_reuse(spec)


def test_specs() -> None:
    for spec in ("kvcomm:0.3", "kvcomm:1?anchors=30&least=3", "blend:0.15", "prefix"):
        assert str(parse_reuse(spec)) == spec
    assert str(parse_reuse("kvcomm")) == "kvcomm:1"
    assert str(parse_reuse("kvcomm?least=20")) == "kvcomm:1?least=20"
