"""Policies that choose at every decode step, against slow versions of themselves."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracles_select as oracles
import pytest
import torch
from torch import Tensor

from mmfast.caches.plan import call_plan, plan_cache
from mmfast.caches.selection import dstp as swaps_of
from mmfast.caches.selection import slimfer as blocks_of
from mmfast.core.errors import SpecError
from mmfast.core.kv import LayerStep, StepChoice
from mmfast.core.registry import get, methods
from mmfast.ops import pages
from mmfast.streams.memory import check_plan

H, G, D = 2, 3, 8
SCALE = D**-0.5


def make(n: int, seed: int = 0, batch: int = 1) -> tuple[Tensor, Tensor]:
    """Queries `[B, H, G, d]` and keys `[B, H, n, d]`."""
    g = torch.Generator().manual_seed(seed)
    query = 2 * torch.randn(batch, H, G, D, generator=g)
    return query, torch.randn(batch, H, n, D, generator=g)


def step(query: Tensor, keys: Tensor, **more: Any) -> LayerStep:
    return LayerStep(query, keys, SCALE, **{"depth": 3, "depths": 6, **more})


def selector(spec: str) -> Any:
    plan = plan_cache(spec)
    assert plan is not None
    return plan.selector()


def read(choice: StepChoice, n: int, row: int = 0) -> list[set[int]]:
    """Places that each head reads; no place may come twice."""
    if choice.pages is None:
        return [set(range(n))] * H
    index, real = choice.entries(n)
    index = index.expand(-1, H, -1)[row]
    real = torch.ones_like(index, dtype=torch.bool) if real is None else real.expand(-1, H, -1)[row]
    found = []
    for mine, ok in zip(index, real, strict=True):
        places = mine[ok].tolist()
        assert len(places) == len(set(places)) and all(0 <= i < n for i in places)
        found.append(set(places))
    return found


def arrays(query: Tensor, keys: Tensor, row: int = 0) -> tuple[np.ndarray, np.ndarray]:
    return query[row].flatten(0, 1).double().numpy(), keys[row].double().numpy()


@pytest.mark.parametrize("n", [1, 5, 16, 17, 64, 100])
@pytest.mark.parametrize("budget", [0.1, 0.5, 12])
@pytest.mark.parametrize("page", [1, 4])
def test_quest_is_its_oracle(n: int, budget: float | int, page: int) -> None:
    query, keys = make(n, seed=n)
    found = selector(f"quest:{budget}?page={page}").choose(step(query, keys))
    assert read(found, n) == oracles.quest(*arrays(query, keys), budget, page)


@pytest.mark.parametrize("n", [1, 5, 17, 64, 100])
@pytest.mark.parametrize("budget", [0.2, 0.5, 20])
@pytest.mark.parametrize("unit", [1, 4, 8])
def test_slimfer_is_its_oracle(n: int, budget: float | int, unit: int) -> None:
    query, keys = make(n, seed=n)
    choose = selector(f"slimfer:{budget}?block=8&unit={unit}").choose
    shared, stays = dict[str, Any](), torch.zeros(n, dtype=torch.bool)
    stays[[0, n // 2, n - 1]] = True
    found = choose(step(query, keys, stays=stays, shared=shared))
    want = oracles.slimfer(*arrays(query, keys), SCALE, budget, 8, unit, {0, n // 2, n - 1})
    assert read(found, n) == want
    below = choose(step(-query, keys, stays=stays, shared=shared, same=True))  # asks another way
    assert read(below, n) == want and below.pages is found.pages and not below.nbytes
    anew = choose(step(-query, keys, shared=shared))
    assert read(anew, n) == oracles.slimfer(*arrays(-query, keys), SCALE, budget, 8, unit)


@pytest.mark.parametrize("n", [1, 5, 17, 64, 100, 333])
@pytest.mark.parametrize("budget", [0.2, 0.5, 0.9, 30])
@pytest.mark.parametrize("page", [4, 8])
def test_kinetics_is_its_oracle(n: int, budget: float | int, page: int) -> None:
    query, keys = make(n, seed=n)
    found = selector(f"kinetics:{budget}?page={page}").choose(step(query, keys))
    assert read(found, n) == oracles.kinetics(*arrays(query, keys), budget, page)
    stays = torch.zeros(n, dtype=torch.bool)
    stays[[0, n // 2, n - 1]] = True
    found = selector(f"kinetics:{budget}?page={page}").choose(step(query, keys, stays=stays))
    want = oracles.kinetics(*arrays(query, keys), budget, page, {0, n // 2, n - 1})
    assert read(found, n) == want


@pytest.mark.parametrize("share", [0.1, 0.3, 0.7])
def test_kinetics_costs_what_was_said(share: float) -> None:
    """Bytes of keys, values and means are at most the share of all bytes, less than a page off."""
    for n in (1000, 1600, 3001):
        query, keys = make(n, seed=n)
        found = selector(f"kinetics:{share}?page=16").choose(step(query, keys))
        index, _ = found.entries(n)
        entry = 2 * D * keys.element_size()
        bytes_read = H * index.shape[-1] * entry + found.nbytes
        room = round(share * n) * H * entry - bytes_read
        assert 0 <= room < 16 * H * entry, (n, share)


def test_quest_reads_what_stays() -> None:
    query, keys = make(60)
    stays = torch.zeros(60, dtype=torch.bool)
    stays[[0, 1, 30, 58]] = True
    found = selector("quest:0.2?page=4").choose(step(query, keys, stays=stays))
    want = oracles.quest(*arrays(query, keys), 0.2, 4, {0, 1, 30, 58})
    assert read(found, 60) == want and all({0, 1, 30, 58} <= mine for mine in want)


@pytest.mark.parametrize("n", [2, 9, 40])
def test_tokenselect_is_its_oracle(n: int) -> None:
    query, keys = make(n, seed=n)
    stays = torch.zeros(n, dtype=torch.bool)
    stays[0] = True
    wanted = max(1, round(0.3 * n))
    found = selector("tokenselect:0.3").choose(step(query, keys))
    assert read(found, n) == [oracles.tokenselect(*arrays(query, keys), wanted, SCALE)] * H
    found = selector("tokenselect:0.3").choose(step(query, keys, stays=stays))
    assert read(found, n) == [oracles.tokenselect(*arrays(query, keys), wanted, SCALE, {0})] * H


def test_tokenselect_votes_again_for_another_query_alone() -> None:
    query, keys = make(60)
    choose, memory = selector("tokenselect:6?similar=0.9").choose, dict[str, Any]()
    first = read(choose(step(query, keys[:, :, :50], memory=memory)), 50)
    near = query + 0.1 * query.flip(-1)
    assert oracles.cosine(query.numpy(), near.numpy()) > 0.9
    again = choose(step(near, keys[:, :, :53], memory=memory))
    assert again.nbytes == 0 and read(again, 53) == [mine | {50, 51, 52} for mine in first]
    other = choose(step(-query, keys[:, :, :53], memory=memory))
    want = oracles.tokenselect(*arrays(-query, keys[:, :, :53]), 6, SCALE)
    assert other.nbytes > 0 and read(other, 53) == [want] * H
    assert memory["vote"].trim(53) and not memory["vote"].trim(52)


def test_tidaldecode_chooses_in_two_layers_for_the_others() -> None:
    method, shared = selector("tidaldecode:0.2?skip=1&again=0.5"), dict[str, Any]()
    want: Any = None
    for depth in range(6):
        query, keys = make(40, seed=depth)
        found = method.choose(step(query, keys, depth=depth, depths=6, shared=shared))
        if depth in (1, 3):
            want = oracles.tidaldecode(*arrays(query, keys), 8, SCALE)
        whole = depth in (0, 1, 3)
        assert read(found, 40) == ([set(range(40))] * H if whole else want), depth
        assert (found.nbytes > 0) == (depth in (1, 3))


def test_tidaldecode_chooses_anew_behind_a_cut() -> None:
    """Places of a longer layer say nothing of a shorter one."""
    method, shared = selector("tidaldecode:0.2?skip=0&again=0"), dict[str, Any]()
    want: Any = None
    for depth, n in enumerate([40, 40, 20, 20, 10, 10]):
        query, keys = make(n, seed=depth)
        found = method.choose(step(query, keys, depth=depth, depths=6, shared=shared))
        if depth % 2 == 0:
            want = oracles.tidaldecode(*arrays(query, keys), n // 5, SCALE)
        assert read(found, n) == ([set(range(n))] * H if depth % 2 == 0 else want), depth


@pytest.mark.parametrize("share", [0.3, 0.7, 0.95])
@pytest.mark.parametrize("n", [3, 21, 64])
def test_twilight_is_its_oracle(share: float, n: int) -> None:
    query, keys = make(n, seed=n)
    found = selector(f"twilight:{share}?base=0.5&page=4").choose(step(query, keys))
    assert read(found, n) == oracles.twilight(*arrays(query, keys), share, 0.5, 4, SCALE)


@pytest.mark.parametrize("n", [3, 21, 65])
@pytest.mark.parametrize(("bits", "group"), [(4, 4), (2, 4), (1, 8)])
def test_specache_is_its_oracle(n: int, bits: int, group: int) -> None:
    """A step reads what the query of the step before sent for, and what came since."""
    choose, memory = selector(f"specache:0.2?bits={bits}&group={group}").choose, dict[str, Any]()
    last: Any = None
    for count in range(n, n + 7):
        query, _ = make(1, seed=count)
        keys = make(n + 7)[1][:, :, :count]
        stays = torch.zeros(count, dtype=torch.bool)
        stays[[0, count // 2]] = True
        found = choose(step(query, keys, memory=memory, stays=stays))
        forced = {0, count // 2}
        mine = oracles.specache(*arrays(query, keys), SCALE, 0.2, bits, group, forced)
        want = mine if last is None else [each | {count - 1} for each in last]
        assert read(found, count) == want, count
        full = (count - 1) // group
        size = group * D * bits // 8 + 2 * D * keys.element_size()
        assert found.nbytes == (H * full * size if found.pages is not None else 0)
        last = mine if found.pages is not None else None


def test_specache_asks_anew_where_the_asking_query_is_taken_back() -> None:
    _, keys = make(60)
    choose, memory = selector("specache:5?group=4").choose, dict[str, Any]()
    first, other = make(1, seed=7)[0], make(1, seed=8)[0]
    choose(step(first, keys[:, :, :50], memory=memory))
    choose(step(other, keys[:, :, :51], memory=memory))
    for n, asks in ((51, first), (50, other)):  # back to 50 entries, then to 49
        assert all(state.trim(n - 1) for state in memory.values())
        found = read(choose(step(other, keys[:, :, :n], memory=memory)), n)
        want = oracles.specache(*arrays(asks, keys[:, :, :50]), SCALE, 5, 2, 4)
        assert found == [each | set(range(50, n)) for each in want]


@pytest.mark.parametrize("budget", [0.3, 14])
@pytest.mark.parametrize("by_head", [False, True])
def test_sentencekv_is_its_oracle(budget: float | int, by_head: bool) -> None:
    """Tokens come one by one, and some are taken back; heads may hold other tokens."""
    generator, ends = torch.Generator().manual_seed(5), {0, 1}
    method, memory, n = selector(f"sentencekv:{budget}").choose, dict[str, Any](), 30
    _, keys = make(90)
    rows = H if by_head else 1
    ids = torch.randint(0, 9, (90,), generator=generator).tolist()
    queries, least = {i: make(1, seed=100 + i)[0] for i in range(91)}, 90
    numbers = torch.tensor([oracles.sentences(ids, ends)] * rows)
    if by_head:  # a policy before has left the second head other entries
        numbers[1] = numbers[1].where(numbers[1] != 1, 2)
    for turn in range(40):
        stays = torch.zeros(n, dtype=torch.bool)
        stays[3] = turn % 2 == 0
        sentence, query = numbers[:, :n], queries[n]
        given = {"memory": memory, "stays": stays, "sentence": sentence}
        found = read(method(step(query, keys[:, :, :n], **given)), n)
        least = min(least, min(map(len, found)))
        now = int(sentence[0, -1])
        same = [m for m in range(30, n + 1) if int(numbers[0, m - 1]) == now]
        asked = [arrays(queries[m], keys)[0] for m in same]
        for head in range(H):
            mine = sentence[head % rows].tolist()
            forced = {3} if turn % 2 == 0 else set()
            want = oracles.sentencekv(
                [q[head * G : head * G + G] for q in asked],
                keys[0, head : head + 1, :n].double().numpy(),
                mine,
                budget,
                forced,
            )
            assert found[head] == want[0], (turn, head)
        n += 1
        if turn in (9, 20, 30):
            n -= 4
            assert all(state.trim(n - 1) for state in memory.values())
    assert least < 25


@pytest.mark.parametrize("budget", [0.3, 5])
@pytest.mark.parametrize(("similar", "hold"), [(0.6, 3), (0.8, 1)])
def test_dstp_is_its_oracle(budget: float | int, similar: float, hold: int) -> None:
    """Queries drift, and jump; tokens come one by one, and some are taken back."""
    choose = selector(f"dstp:{budget}?similar={similar}&hold={hold}").choose
    memory, n, start, sizes = dict[str, Any](), 31, 31, []
    _, keys = make(90)
    visual = torch.zeros(90, dtype=torch.bool)
    visual[4:12] = visual[14:22] = True
    places, queries = set(visual.nonzero()[:, 0].tolist()), {start: make(1, seed=1)[0]}
    for i in range(start + 1, 91):
        drift = 0.95 * queries[i - 1] + 0.3 * make(1, seed=i)[0]
        queries[i] = make(1, seed=i)[0] if i % 5 == 0 else drift
    for turn in range(30):
        stays = torch.zeros(n, dtype=torch.bool)
        stays[5] = turn % 2 == 0
        found = choose(
            step(queries[n], keys[:, :, :n], memory=memory, stays=stays, visual=visual[:n])
        )
        asked = [arrays(queries[m], keys)[0] for m in range(start, n + 1)]
        mine, forced = keys[0, :, :n].double().numpy(), {5} if turn % 2 == 0 else set()
        want = oracles.dstp(asked, mine, places, SCALE, budget, similar, hold, forced)
        assert read(found, n) == want, turn
        sizes.append(sum(map(len, want)) - 2 * n)
        n += 1
        if turn in (9, 20):
            n -= 3
            assert all(state.trim(n - 1) for state in memory.values())
    assert len(set(sizes)) > 2  # more is read for a while, and again less
    anew = choose(step(queries[60], keys[:, :, :70], memory=memory, visual=visual[:70]))
    mine = keys[0, :, :70].double().numpy()
    want = oracles.dstp([arrays(queries[60], keys)[0]], mine, places, SCALE, budget)
    assert read(anew, 70) == want  # a prompt has come between


def test_dstp_reads_everything_where_nothing_is_visual() -> None:
    query, keys = make(20)
    assert selector("dstp:0.3").choose(step(query, keys)).pages is None
    few = torch.zeros(20, dtype=torch.bool)
    few[3:6] = True
    assert selector("dstp:3").choose(step(query, keys, visual=few)).pages is None


def test_flat_attention_reads_more_than_sharp() -> None:
    query, keys = make(200)
    method = selector("twilight:0.8?base=0.9&page=4")
    sizes = [
        sum(map(len, read(method.choose(step(query * scale, keys)), 200))) for scale in (0.1, 4)
    ]
    assert sizes[1] < sizes[0] / 3


@pytest.mark.parametrize(
    "spec",
    (
        "quest:0.2?page=4",
        "twilight:0.8?page=4",
        "tokenselect:0.2",
        "kinetics:0.3?page=4",
        "specache:0.2?group=4",
        "slimfer:0.2?block=4",
    ),
)
def test_a_batch_is_its_rows(spec: str) -> None:
    query, keys = make(70, batch=3)
    method = selector(spec)
    rows = [method.choose(step(query[b : b + 1], keys[b : b + 1])) for b in range(3)]
    if method.alone:
        return
    together = method.choose(step(query, keys))
    assert [read(together, 70, b) for b in range(3)] == [read(row, 70) for row in rows]


@pytest.mark.parametrize("spec", ["quest:0.2?page=4", "twilight:0.8?page=4", "kinetics:0.3?page=4"])
def test_what_is_kept_up_is_what_is_found_anew(spec: str) -> None:
    """Entries come one by one and in pieces, some are taken back and others come."""
    generator = torch.Generator().manual_seed(1)
    method, memory, n = selector(spec), dict[str, Any](), 1
    _, keys = make(400)
    for _ in range(40):
        if torch.rand(1, generator=generator) < 0.3:
            n = max(1, n - int(torch.randint(1, 9, (1,), generator=generator)))
            for name in [k for k, state in memory.items() if not state.trim(n)]:
                del memory[name]
            keys[:, :, n:] = torch.randn(keys[:, :, n:].shape, generator=generator)
        n = min(400, n + int(torch.randint(1, 20, (1,), generator=generator)))
        query = torch.randn(1, H, G, D, generator=generator)
        kept_up = method.choose(step(query, keys[:, :, :n], memory=memory))
        assert read(kept_up, n) == read(method.choose(step(query, keys[:, :, :n])), n)


def test_bounds_hold_and_are_found_once() -> None:
    query, keys = make(64)
    seen = []

    def describe(part: Tensor) -> Tensor:
        seen.append(part.shape[2])
        return pages.key_bounds(part)

    table = pages.PageTable(8, describe)
    for count in (3, 3, 8, 5, 8):
        bounds = table.grow(keys, count)
        assert bounds.shape == (1, H, count, 2 * D)
    assert seen == [3, 5]
    scores = pages.bound_scores(query[:, :, :1], bounds)  # of one query the mean is its own
    products = (query[:, :, :1] @ keys.transpose(2, 3))[:, :, 0].unflatten(2, (8, 8))
    assert bool((products <= scores[..., None] + 1e-5).all())


@pytest.mark.parametrize("bits", [4, 2, 1])
def test_few_bits_are_within_half_a_level(bits: int) -> None:
    query, keys = make(64)
    parts = keys.unflatten(2, (8, 8))
    bounds, codes = pages.key_bounds(parts), pages.level_codes(parts, bits)
    assert codes.dtype == torch.uint8 and codes.shape == (1, H, 8, 8 * D * bits // 8)
    logits = pages.level_logits(query, codes, bounds, 8, bits)
    level = (parts.amax(3) - parts.amin(3)).amax() / (2**bits - 1)
    off = (logits - query @ keys.transpose(2, 3)).abs()
    assert bool((off <= query.abs().sum(-1, keepdim=True) * level / 2 + 1e-5).all())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("filled", [False, True])
@pytest.mark.parametrize("heads", [1, H])
def test_attention_to_a_part_is_attention_under_a_mask(
    bias: bool, filled: bool, heads: int
) -> None:
    query, room = make(50, batch=2)
    query = query.flatten(1, 2)[:, :, None]
    keys, values = room[:, :, :40], torch.randn(2, H, 50, 5)[:, :, :40]  # slices of buffers
    generator = torch.Generator().manual_seed(3)
    index = torch.stack([torch.randperm(40, generator=generator)[:9] for _ in range(2 * heads)])
    index = index.view(2, heads, 9)
    real = torch.rand(2, heads, 9, generator=generator) < 0.7 if filled else None
    if real is not None:
        real[..., 0] = True
    addend = torch.randn(2, H * G, 40, generator=generator) if bias else None
    seen = torch.zeros(2, heads, 40, dtype=torch.bool)
    seen.scatter_(2, index, torch.ones_like(index, dtype=torch.bool) if real is None else real)
    logits = query @ keys.repeat_interleave(G, 1).transpose(2, 3) * 0.3
    logits = logits if addend is None else logits + addend[:, :, None]
    wide = seen.expand(2, H, 40).repeat_interleave(G, 1)[:, :, None]
    want = logits.masked_fill(~wide, -torch.inf).softmax(-1) @ values.repeat_interleave(G, 1)
    found = pages.selected_attention(query, keys, values, index, real=real, bias=addend, scale=0.3)
    torch.testing.assert_close(found, want)


FAULTS = {
    "bound_scores": lambda query, bounds: pages_bound(query, bounds.roll(D, -1)),
    "mean_scores": lambda query, means: pages_mean(query, means.roll(1, 2)),
    "pages_paid": lambda cost, n, page: int((cost - n % page) // page),  # a search for nothing
    "level_codes": lambda part: pages_codes(part.flip(-1)),
    "level_logits": lambda query, codes, bounds, page, bits: pages_logits(
        query, codes.roll(1, 2), bounds, page, bits
    ),
    "key_bounds": lambda part: pages_bounds(part * 2),
    "marked_places": lambda marks: pages_marked(marks.roll(1, -1)),
    "means": lambda unit, blocks: units_mean(unit, blocks.roll(1, -2)),
    "_within": lambda step, places, mask: swaps_within(step, places.roll(1), mask),
    "heaviest": lambda mass, share: pages_heaviest(mass, min(1.0, share + 0.2)),
}
pages_bound, pages_codes, pages_heaviest = pages.bound_scores, pages.level_codes, pages.heaviest
pages_marked = pages.marked_places
units_mean, swaps_within = blocks_of.means, swaps_of._within
pages_mean, pages_logits, pages_bounds = pages.mean_scores, pages.level_logits, pages.key_bounds


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    homes = {"bound_scores": "quest", "mean_scores": "kinetics", "pages_paid": "kinetics"}
    homes |= {"marked_places": "sentencekv", "means": "slimfer", "_within": "dstp"}
    homes |= {"level_logits": "specache", "key_bounds": "specache"}
    home = homes.get(name, "twilight")
    monkeypatch.setattr(f"mmfast.caches.selection.{home}.{name}", FAULTS[name])
    with pytest.raises(AssertionError):
        if home == "quest":
            test_quest_is_its_oracle(100, 0.1, 4)
        if home == "kinetics":
            test_kinetics_is_its_oracle(333, 0.5, 4)
        if home == "specache":
            test_specache_is_its_oracle(65, 2, 4)
        if home == "dstp":
            test_dstp_is_its_oracle(0.3, 0.6, 3)
        if home == "slimfer":
            test_slimfer_is_its_oracle(100, 0.2, 4)
        if home == "sentencekv":
            test_sentencekv_is_its_oracle(0.3, False)
        for n in (21, 64):
            test_twilight_is_its_oracle(0.7, n)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("quest", "needs a budget"),
        ("quest:0.1?page=0", "page=0"),
        ("kinetics:0.1?skip=-1", "skip=-1"),
        ("kinetics:0.03", "no more than the search, which costs 0.03125"),
        ("kinetics:0.1+quant:8", "unpacks all entries"),
        ("specache:0.1?bits=8", "bits=8, group=64; choose 4, 2 or 1 bits"),
        ("sentencekv:0.1+quant:8", "unpacks all entries"),
        ("specache:0.1?group=0", "at least 1 token"),
        ("specache:0.1+quant:8", "unpacks all entries"),
        ("snapkv:0.5?every=8+specache:0.1", "write 'snapkv:0.5\\+specache:0.1'"),
        ("h2o:0.5+specache:0.1", "all keys in host memory"),
        ("tidaldecode:0.1?again=1.5", "again=1.5"),
        ("twilight:64", "a share of the attention"),
        ("twilight:0.8?base=2.0", "base=2.0"),
        ("dstp:0.3?similar=1.5", "similar=1.5, hold=8; choose a cosine"),
        ("dstp:0.3?hold=0", "at least 1 step"),
        ("quest:0.1+tokenselect:0.1", "both of role 'select'"),
        ("rekv:4+quest:0.1", "chooses what is read, too"),
        ("quest:0.1+quant:8", "unpacks all entries"),
        ("zipvl:0.5+quest:0.1", "unpacks all entries"),
        ("window:64+snapkv:0.5+quest:0.1", "drop one of the two"),
        ("snapkv:0.5+tidaldecode:0.1", "write 'snapkv:0.5\\+quest:0.1'"),
        ("snapkv:0.5+slimfer:0.1", "write 'snapkv:0.5\\+quest:0.1'"),
        ("slimfer:0.1?block=0", "block=0, unit=4; choose blocks of whole units"),
        ("slimfer:0.1?block=16&unit=5", "block=16, unit=5"),
        ("slimfer:0.1+quant:8", "unpacks all entries"),
    ],
)
def test_what_does_not_go_is_refused_in_one_line(spec: str, words: str) -> None:
    with pytest.raises(SpecError, match=words) as error:
        call_plan(spec)
    assert "\n" not in str(error.value)


def test_streams_refuse() -> None:
    with pytest.raises(SpecError, match="which a stream does not"):
        check_plan(plan_cache("window:64+quest:0.1"))
    with pytest.raises(SpecError, match="which a stream does not"):
        check_plan(plan_cache("window:64+kinetics:0.1"))


def test_every_method_of_the_role_is_named_here() -> None:
    found = {method.name for method in methods("cache") if method.role == "select"}
    assert found == {
        "quest",
        "tokenselect",
        "tidaldecode",
        "twilight",
        "kinetics",
        "specache",
        "sentencekv",
        "slimfer",
        "dstp",
    }
    assert get("quest", "cache").example == "quest:0.1"
    assert get("twilight", "cache").example == "twilight:0.85"
    assert str(plan_cache("sink:4+quest:0.1?page=8")) == "sink:4+quest:0.1?page=8"
