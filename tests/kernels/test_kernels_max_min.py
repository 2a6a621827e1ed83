"""Max-min selection on a GPU, without one: interpreted, compiled for real chips, and broken."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton has wheels for Linux on x86-64 only")

from kernel_tools import (
    CAPABILITIES,
    assert_clean,
    compiled,
    has_wide_loads,
    interpreted,
    planted,
)

# Rows of a larger poisoned buffer: whatever is read outside would win.
SELECT = """
import torch
from mmfast.kernels.max_min_select import SAME, max_min_select, nearest_other
from mmfast.ops.max_min import max_min_plain
from mmfast.ops.similarity import unit_rows

def poisoned(matrix):
    items, n, columns = matrix.shape
    buffer = torch.full((items, n + 3, columns + 5), -torch.inf)
    buffer[:, :n, :columns] = matrix
    return buffer, buffer[:, :n, :columns]

def cosines(x):
    rows = unit_rows(x)
    return (rows @ rows.transpose(1, 2)).clamp_(max=SAME)

torch.manual_seed(0)
for items, n, count in [(1, 1, 1), (1, 2, 2), (1, 31, 31), (2, 17, 5), (3, 33, 9), (1, 100, 20)]:
    similarity = cosines(torch.randn(items, n, 12))
    buffer, view = poisoned(similarity)
    first = torch.arange(items) % n
    picks = max_min_select(view, first, count)
    assert picks.equal(max_min_plain(similarity, first, count)), (items, n, count)

# Whole numbers of eighths: many exact ties, the lowest index wins.
similarity = torch.randint(-4, 5, (2, 29, 29)).float() / 8
similarity = similarity + similarity.transpose(1, 2)
first = torch.tensor([3, 28])
assert max_min_select(similarity, first, 29).equal(max_min_plain(similarity, first, 29))
assert max_min_select(torch.full((1, 9, 9), SAME), first[:1], 4).tolist() == [[3, 0, 1, 2]]
print("same picks")
"""

NEAREST = """
import torch
from mmfast.kernels.max_min_select import SAME, nearest_other

torch.manual_seed(0)
for items, n in [(1, 1), (1, 5), (2, 16), (3, 45)]:
    x = torch.randn(items, n, 6) * 3
    if n > 4:
        x[:, 4] = x[:, 1] * 2
    gram = torch.full((items, n, n + 3), torch.nan)
    gram[:, :, :n] = x @ x.transpose(1, 2)
    scale = 1 / x.norm(dim=-1)
    expected = (gram[:, :, :n] * scale[:, :, None] * scale[:, None]).clamp(max=SAME)
    others = expected.masked_fill(torch.eye(n, dtype=torch.bool), -torch.inf).amax(-1)
    for start in range(0, n, 7):
        part = gram[:, start : start + 7].clone()
        found = nearest_other(part, scale, start, store=False)
        torch.testing.assert_close(found, others[:, start : start + 7])
        assert part[:, :, :n].equal(gram[:, start : start + 7, :n])
    found = nearest_other(gram, scale)
    torch.testing.assert_close(found, others)
    torch.testing.assert_close(gram[:, :, :n], expected)
    assert gram[:, :, n:].isnan().all()
print("same similarities")
"""

# The whole op as on a GPU, in both ways, against the search on the host.
WHOLE = """
import torch
from mmfast.ops.max_min import max_min, max_min_device

torch.manual_seed(0)
def check(x, count, block):
    expected = max_min(x, count)
    for largest in (len(x), 0):
        found = max_min_device(x[None], count, largest=largest, block=block)[0]
        assert found.tolist() == expected.tolist(), (x.shape, x.dtype, count, block, largest)

for n, count, block in [(1, 1, 4), (2, 2, 4), (5, 3, 2), (31, 31, 8), (64, 40, 16), (150, 60, 16)]:
    check(torch.randn(n, 12), count, block)
check(torch.randn(40, 16).bfloat16(), 20, 8)
check(torch.randn(40, 9).half(), 30, 64)
check(torch.randn(7, 12).repeat(4, 1), 20, 4)  # rows equal to a pick come last
check(torch.ones(9, 4), 5, 4)
check(torch.zeros(9, 4), 9, 4)
holes = torch.randn(30, 6)
holes[::3] = 0
check(holes, 30, 8)
both = torch.randn(2, 3, 20, 8)
assert max_min_device(both.reshape(6, 20, 8), 7).reshape(2, 3, 7).equal(max_min(both, 7))
print("same picks")
"""

BLOCK = """
import torch
from mmfast.kernels.max_min_select import SAME, pick_block, raise_bounds

torch.manual_seed(0)
n = 37
x = torch.nn.functional.normalize(torch.randn(n, 5), dim=-1)
scale, product = torch.ones(n), x @ x.T
product = (product * 4).round() / 4  # ties
for size in (1, 6, 20):
    for seen, count in (([0], 12), ([0, 5, 9], 12), ([0, 5], 3)):
        bound = torch.full((n + 300,), -torch.inf)
        bound[:n] = product[seen].amax(0).clamp(max=SAME)
        bound[seen] = torch.inf
        wanted, expected, done = bound[:n].clone(), list(seen), []
        order = sorted(range(n), key=lambda i: (float(wanted[i]), i))
        index, other = sorted(order[:size]), order[size]
        while len(expected) < count:
            best = min(index, key=lambda i: (float(wanted[i]), i))
            if (float(wanted[best]), best) >= (float(wanted[other]), other):
                break
            done.append(best)
            expected.append(best)
            wanted[index] = torch.maximum(wanted[index], product[best][index].clamp(max=SAME))
            wanted[best] = torch.inf
        behind = torch.full((count + 9,), -7)
        picks = behind[:count]
        picks[: len(seen)] = torch.tensor(seen)
        taken, place = torch.tensor([len(seen)]), torch.tensor(index)
        part = torch.full((size + 1, n), torch.nan)
        part[:size] = product[place]
        new = pick_block(part[:size], scale, bound[:n], place, torch.tensor([other]), picks, taken)
        assert picks[: int(taken)].tolist() == expected and (behind[int(taken) :] == -7).all()
        assert place[new.bool()].tolist() == sorted(done)
        for i in done:
            bound[:n] = torch.maximum(bound[:n], product[i].clamp(max=SAME))
        bound[done] = torch.inf
        raised = torch.full((n + 300,), -torch.inf)
        raised[:n] = product[seen].amax(0).clamp(max=SAME)
        raised[seen] = torch.inf
        raise_bounds(part[:size], scale, raised[:n], place, new)
        assert raised.equal(bound), (size, seen)
print("same block")
"""

BUGS = {
    SELECT: [
        # the highest index on ties
        (
            "pick = tl.argmin(nearest, axis=0).to",
            "pick = tl.max(tl.where(nearest == tl.min(nearest, 0), columns, -1), 0).to",
        ),
        ('nearest = tl.where(columns == pick, float("inf"), nearest)', "pass"),  # picked again
        ('mask=columns < n, other=float("inf")', "mask=columns < block"),  # no tail
        ("item * item_stride + pick", "pick"),  # the first item for all
        ("nearest = tl.maximum(nearest, similarity)", "nearest = similarity"),
    ],
    NEAREST: [
        ("columns != start + row", "columns != row"),
        ('products + columns, mask=inside, other=-float("inf")', "products + columns"),
        ("best = tl.maximum(best, ", "best = (best * 0 + "),
        ("* own * other, same)", "* own, same)"),
    ],
    BLOCK: [
        ("(best < limit) |", "(best <= limit) |"),
        ("| ((best == limit) & (pick < other))", ""),
        ("while (taken < count) & (", "while (taken < count + 1) & ("),
        ('tl.where(slots == at, float("inf"), tl.maximum(bound, similarity))', "bound + 1"),
        ('mask=other < n, other=float("inf")', 'mask=other < 0, other=float("inf")'),
        ("if tl.load(new_ptr + slot) != 0:", "if slot >= 0:"),
        ("tl.store(bound_ptr + columns, bound, mask=inside)", "tl.store(bound_ptr + columns, 3.0)"),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("gate", [SELECT, NEAREST, BLOCK], ids=["select", "nearest", "block"])
def test_every_planted_bug_fails_its_gate(gate: str) -> None:
    """The kernel as it is passes the same gate in the same process."""
    planted("max_min_select", gate, *BUGS[gate])


@pytest.mark.slow
def test_the_way_of_a_gpu_picks_what_the_host_picks() -> None:
    assert "same picks" in interpreted(WHOLE)


def jobs() -> list[dict[str, object]]:
    floats, ints = "*fp32", "*i64"
    select = {
        "fn": "_select",
        "signature": {
            "similarity_ptr": floats,
            "first_ptr": ints,
            "picks_ptr": ints,
            **dict.fromkeys(["n", "count", "item_stride", "row_stride"], "i32"),
        },
        "aligned": ["similarity_ptr", "first_ptr", "picks_ptr", "n", "item_stride", "row_stride"],
    }
    similarity = {
        "fn": "_similarity",
        "signature": {
            **dict.fromkeys(["gram_ptr", "scale_ptr", "nearest_ptr"], floats),
            **dict.fromkeys(["n", "start", "item_stride", "row_stride"], "i32"),
            "same": "fp32",
        },
        "constexprs": {"store": True, "block": 1024},
        "aligned": ["gram_ptr", "scale_ptr", "n", "item_stride", "row_stride"],
    }
    pointers = ["product_ptr", "scale_ptr", "bound_ptr"]
    pick = {
        "fn": "_pick_block",
        "signature": {
            **dict.fromkeys(pointers, floats),
            **dict.fromkeys(["index_ptr", "outside_ptr", "picks_ptr", "taken_ptr"], ints),
            "new_ptr": "*i32",
            "same": "fp32",
            **dict.fromkeys(["n", "count", "size"], "i32"),
        },
        "constexprs": {"block": 128},
        "num_warps": 1,
    }
    lift = {
        "fn": "_raise",
        "signature": {
            **dict.fromkeys(pointers, floats),
            "index_ptr": ints,
            "new_ptr": "*i32",
            "n": "i32",
            "size": "i32",
            "same": "fp32",
        },
        "constexprs": {"block": 256},
    }
    from mmfast.kernels.max_min_select import warps

    def sized(block: int, capability: int) -> dict[str, object]:
        return select | {
            "constexprs": {"block": block},
            "num_warps": warps(block),
            "capability": capability,
        }

    largest = [sized(16384, c) for c in CAPABILITIES]
    others = [{**job, "capability": c} for c in CAPABILITIES for job in (similarity, pick, lift)]
    return [*largest, *others, sized(256, 90), sized(8192, 90)]


@pytest.mark.slow
def test_compiles_for_real_chips_without_spills() -> None:
    for binary in compiled("max_min_select", jobs()):
        assert_clean(binary)
        if binary.label.startswith(("_select", "_similarity")):
            assert has_wide_loads(binary) or "'block': 256}" in binary.label, binary.label


def test_bad_arguments_are_refused() -> None:
    from mmfast.kernels.max_min_select import max_min_select

    first = torch.zeros(1, dtype=torch.int64)
    for shape, count in [((1, 4, 5), 2), ((1, 4, 4), 5), ((1, 4, 4), 0)]:
        with pytest.raises(ValueError, match="picks"):
            max_min_select(torch.zeros(shape), first, count)
    with pytest.raises(ValueError, match="float64"):
        max_min_select(torch.zeros(1, 4, 4, dtype=torch.float64), first, 2)


def test_formula_picks_the_farthest_row_each_time() -> None:
    from mmfast.ops.max_min import max_min_plain

    rows = torch.nn.functional.normalize(torch.randn(2, 23, 6, dtype=torch.float64), dim=-1)
    picks = max_min_plain(rows @ rows.transpose(1, 2), torch.tensor([4, 0]), 23).tolist()
    for item, order in zip(rows, picks, strict=True):
        assert sorted(order) == list(range(23))
        for step in range(1, 23):
            left = [i for i in range(23) if i not in order[:step]]
            apart = (1 - item @ item[order[:step]].T).amin(-1)
            assert order[step] == max(left, key=lambda i: float(apart[i]))


@pytest.mark.slow
def test_bench_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    from mmfast import MmfastError
    from mmfast.bench.suites import kernels as bench

    cases = (bench.PickCase(1, (2, 6, 7), 16, 20), bench.PickCase(3, (1, 5, 5), 16, 6))
    monkeypatch.setitem(bench.PICKS, "cpu", cases)
    monkeypatch.setattr(bench, "ROUNDS", 2)
    if not torch.cuda.is_available():
        rows = bench.max_min_select(lambda label, done, total: None)
        assert [row["way"] for row in rows] == ["ours", "loop", "reference", "ours", "loop"]
        assert all(row["median_ms"] > 0 and row["goal_ms"] is None for row in rows)
        assert rows[1]["speedup"] == 1 and rows[0]["cover"] == pytest.approx(rows[1]["cover"])
        assert rows[0]["case"] == "20 of 84 tokens x 16"
        assert rows[3]["case"] == "3 times 6 of 25 tokens x 16"
    first = torch.arange(20).expand(1, -1)
    monkeypatch.setattr(bench, "max_min", lambda x, count: first)
    with pytest.raises(MmfastError, match="above the lowest one"):
        bench._pick_rows(cases[0], torch.float32, "cpu")
    monkeypatch.setattr(bench, "max_min", lambda x, count: first * 0)
    with pytest.raises(MmfastError, match="repeats picks"):
        bench._pick_rows(cases[0], torch.float32, "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("n", [1, 2, 300, 1568, 6272])
@pytest.mark.parametrize("largest", [0, 16_384], ids=["blocks", "matrix"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_device_picks_what_the_host_picks(n: int, largest: int, dtype: torch.dtype) -> None:
    from mmfast.ops.max_min import max_min, max_min_device

    x = torch.randn(n, 64, generator=torch.Generator().manual_seed(n)).to(dtype)
    count = max(1, n // 4)
    found = max_min_device(x.cuda()[None], count, largest=largest)[0]
    assert set(found.tolist()) == set(max_min(x, count).tolist())
    still = x[: max(1, n // 3)].repeat(4, 1)[:n]
    found = max_min_device(still.cuda()[None], n, largest=largest)[0]
    assert sorted(found.tolist()) == list(range(n))
