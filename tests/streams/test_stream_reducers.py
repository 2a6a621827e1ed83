"""Reducers of a stream: any split is one piece, exact shares, states of fixed size."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mmfast.core.errors import MmfastError, SpecError
from mmfast.core.reduction import Reduction
from mmfast.core.registry import methods
from mmfast.core.spec import parse, run
from mmfast.core.tokens import Tokens
from mmfast.streams import snapshots
from mmfast.streams.frontend import ReducerState, StreamReducer, joined

ROWS, COLUMNS, WIDTH, FRAMES = 3, 4, 6, 7
N = ROWS * COLUMNS
CASES = ["dtd:0.25", "dtd", "dtd:3", "evs:0.25", "evs", "evs?threshold=0.5", "stc_pruner:0.3"]
CASES += ["divprune:0.5", "tome:0.5", "saint", "uniform:5", "dtd:0.5+divprune:2", "stc_pruner:1.0"]


def video(frames: int = FRAMES, seed: int = 0, still: float = 0.6) -> Tensor:
    """Frames in which a part of the places repeats what was there before, `[T * n, D]`."""
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(frames, N, WIDTH, generator=gen)
    for t in range(1, frames):
        same = torch.rand(N, generator=gen) < still
        x[t, same] = x[t - 1, same]
    return x.flatten(0, 1)


def pieces(x: Tensor, cuts: list[int], reducer: StreamReducer) -> tuple[ReducerState, Reduction]:
    state, found = reducer.start(), []
    for start, end in zip([0, *cuts], [*cuts, len(x) // N], strict=True):
        if end > start:
            part = Tokens(x[start * N : end * N], grid=(end - start, ROWS, COLUMNS))
            state, reduction = reducer.step(state, part)
            found.append(reduction)
    return state, joined(found)


def same(a: Reduction, b: Reduction, x: Tensor) -> bool:
    return all(
        torch.equal(p, q)
        for p, q in [(a.keep, b.keep), (a.owner, b.owner), (a.apply(x), b.apply(x))]
    )


@settings(max_examples=60)
@given(
    spec=st.sampled_from(CASES),
    cuts=st.lists(st.integers(0, FRAMES), max_size=4).map(sorted),
    seed=st.integers(0, 5),
)
def test_any_split_is_one_piece(spec: str, cuts: list[int], seed: int) -> None:
    x, reducer = video(seed=seed), StreamReducer(spec)
    whole_state, whole = pieces(x, [], reducer)
    state, split = pieces(x, cuts, reducer)
    assert same(whole, split, x)
    assert state.frames == whole_state.frames == FRAMES
    for mine, other in zip(state.memories, whole_state.memories, strict=True):
        assert (mine is None) == (other is None)
        assert all(torch.equal(mine[key], other[key]) for key in mine or {})


@pytest.mark.parametrize("spec", CASES)
def test_a_prefix_gives_a_prefix(spec: str) -> None:
    x, reducer = video(), StreamReducer(spec)
    _, whole = pieces(x, [], reducer)
    _, part = pieces(x[: 4 * N], [], reducer)
    assert torch.equal(whole.keep[: part.m], part.keep)
    assert torch.equal(whole.owner[: 4 * N], part.owner)


@pytest.mark.parametrize(("spec", "count"), [("dtd:0.25", 3), ("evs:5", 5), ("stc_pruner:0.3", 4)])
def test_every_frame_keeps_its_exact_share(spec: str, count: int) -> None:
    _, found = pieces(video(), [2, 3], StreamReducer(spec))
    found.check()
    assert torch.bincount(found.keep // N, minlength=FRAMES).tolist() == [count] * FRAMES


@pytest.mark.parametrize(
    "spec", ["evs", "evs?threshold=0.3", "dtd", "dtd?threshold=0.4", "dtd?parity=true"]
)
def test_without_a_budget_a_stream_keeps_what_the_whole_video_keeps(spec: str) -> None:
    x = video(seed=3)
    offline = run(parse(spec)[0], Tokens(x, grid=(FRAMES, ROWS, COLUMNS)))
    _, streamed = pieces(x, [1, 2, 5], StreamReducer(spec))
    assert isinstance(offline, Reduction)
    assert torch.equal(offline.keep, streamed.keep)


def test_dtd_sees_a_slow_change_and_fills_a_new_scene_in() -> None:
    slow = torch.zeros(FRAMES, N, WIDTH)
    slow[:, :, 0] = 1.0
    slow[:, 0, 1] = torch.linspace(0, 1.2, FRAMES)  # a little each frame
    _, found = pieces(slow.flatten(0, 1), [], StreamReducer("dtd?threshold=0.2"))
    later = found.keep[found.keep >= N]
    assert len(later) and bool((later % N == 0).all())
    _, evs = pieces(slow.flatten(0, 1), [], StreamReducer("evs?threshold=0.2"))
    assert evs.m == N  # the frame before never differs by that much
    still = torch.randn(N, WIDTH).repeat(4, 1)
    _, filled = pieces(still, [], StreamReducer("dtd:0.25"))
    assert sorted((filled.keep % N).tolist()) == list(range(N))  # four frames show all places once


def test_a_still_stream_keeps_nothing_more() -> None:
    x = video(1).repeat(3, 1)
    _, found = pieces(x, [1, 2], StreamReducer("dtd+divprune:4"))
    assert found.m == 4
    assert found.apply(x).shape == (4, WIDTH)


@pytest.mark.parametrize("spec", ["dtd:0.25", "evs:0.25", "stc_pruner:0.25", "divprune:0.25"])
def test_the_state_does_not_grow(spec: str) -> None:
    reducer = StreamReducer(spec)
    state, _ = pieces(video(2), [], reducer)
    later, _ = pieces(video(40), [], reducer)
    assert later.nbytes == state.nbytes <= N * WIDTH * 8


@pytest.mark.parametrize("spec", ["dtd:0.25", "evs", "stc_pruner:0.25"])
def test_a_restored_snapshot_goes_on_alike(tmp_path: Path, spec: str) -> None:
    x, reducer = video(), StreamReducer(spec)
    state, _ = pieces(x[: 3 * N], [], reducer)
    rest = Tokens(x[3 * N :], grid=(FRAMES - 3, ROWS, COLUMNS))
    snapshots.save(tmp_path, state)
    again = snapshots.load(tmp_path)
    assert isinstance(again, ReducerState)
    first, second = reducer.step(state, rest)[1], reducer.step(again, rest)[1]
    assert torch.equal(first.keep, second.keep)


@pytest.mark.parametrize("spec", ["dtd:0.5", "evs:0.5"])
def test_another_raster_starts_anew(spec: str) -> None:
    reducer = StreamReducer(spec)
    state, _ = pieces(video(2), [], reducer)
    wide = Tokens(torch.randn(2 * 20, WIDTH), grid=(2, 4, 5))
    fresh = reducer.step(reducer.start(), wide)[1]
    assert torch.equal(reducer.step(state, wide)[1].keep, fresh.keep)


def test_signals_are_cut_into_frames() -> None:
    x, attn = video(), torch.rand(FRAMES * N)
    tokens = Tokens(x, attn=attn, grid=(FRAMES, ROWS, COLUMNS))
    reducer = StreamReducer("fastv@pre:2", signals=("attn",))
    _, found = reducer.step(reducer.start(), tokens)
    want = attn.unflatten(0, (FRAMES, N)).topk(2).indices.sort().values
    assert torch.equal(found.keep.unflatten(0, (FRAMES, 2)) % N, want)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("dycoke:0.5", "choices: a_tome, "),
        ("holitom:0.1", "dtd, evs"),
        ("cdpruner:0.1", "choices:"),
        ("fastv@llm2:0.5", "'pre'"),
        ("divprune:0.5+dtd:0.5", "write 'dtd' first"),
        ("", "holds no method"),
        ("dtd:0.5@pre", "budget"),
    ],
)
def test_what_cannot_stream_is_refused_in_one_line(spec: str, words: str) -> None:
    with pytest.raises(SpecError, match=r".") as error:
        StreamReducer(spec)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_wrong_tokens_are_refused() -> None:
    reducer = StreamReducer("dtd:0.5")
    for tokens in (Tokens(torch.randn(6, 4)), Tokens(torch.randn(2, 6, 4), grid=(1, 2, 3))):
        with pytest.raises(MmfastError, match="one stream"):
            reducer.step(reducer.start(), tokens)
    with pytest.raises(SpecError, match="more than the 6 tokens"):
        StreamReducer("dtd:7").step(reducer.start(), Tokens(torch.randn(12, 4), grid=(2, 2, 3)))
    with pytest.raises(SpecError, match="share of every frame"):
        bad = StreamReducer("evs:0.5?parity=true")
        bad.step(bad.start(), Tokens(torch.randn(6, 4), grid=(1, 2, 3)))


def test_joined_keeps_merges_and_orders() -> None:
    x = video(2)
    parts = [run(parse("tome:0.5")[0], Tokens(x[i * N : (i + 1) * N])) for i in range(2)]
    both = joined([p for p in parts if isinstance(p, Reduction)])
    alone = [p.apply(x[i * N : (i + 1) * N]) for i, p in enumerate(parts)]  # type: ignore[union-attr]
    assert torch.allclose(both.apply(x), torch.cat(alone))
    order = torch.tensor([1, 0])
    ordered = replace(Reduction.prune(torch.tensor([0, 2]), 3), order=order)
    pair = joined([Reduction.prune(torch.tensor([1]), 2), ordered])
    assert pair.order is not None and pair.order.tolist() == [0, 2, 1]


def test_methods_with_a_stream_are_those_of_the_issue() -> None:
    assert {m.name for m in methods("reducer") if m.stream} == {"dtd", "evs", "stc_pruner"}
