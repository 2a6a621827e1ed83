"""The vLLM plugin against stand-ins: counts, choices, prompt and positions fit together."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm_stubs import (
    MERGE,
    START,
    VIDEO,
    WIDTH,
    Registry,
    Server,
    laid_out,
    media_positions,
    qwen3_positions,
    vllm,
)

import mmfast
from mmfast.core.errors import MmfastError, ModelError, SpecError
from mmfast.core.registry import methods
from mmfast.vllm import MODELS, choices, parse_plan, read_plan, register
from mmfast.vllm.processor import recount

__all__ = ["vllm"]
ROOT = Path(__file__).resolve().parents[2]
FAMILIES = ["Qwen3VL", "Qwen2_5_VL"]
GRID, OTHER = [4, 6, 8], [3, 4, 4]  # patches; tokens are (4, 3, 4) and (3, 2, 2)


def features(grid: list[int], seed: int = 0, width: int = WIDTH) -> torch.Tensor:
    """A tower's output for one video, `[N, width]`."""
    n = grid[0] * grid[1] * grid[2] // MERGE**2
    return torch.randn(n, width, generator=torch.Generator().manual_seed(seed))


def of_tokens(grid: list[int]) -> tuple[int, int, int]:
    """Frames, rows and columns of tokens."""
    return grid[0], grid[1] // MERGE, grid[2] // MERGE


@settings(max_examples=120, deadline=None)
@given(
    name=st.sampled_from(choices()),
    grid=st.tuples(*[st.integers(1, 5)] * 3),
    budget=st.one_of(
        st.integers(1, 80), st.floats(0.001, 1.0).map(lambda share: round(share, 3) or 0.001)
    ),
    seed=st.integers(0, 3),
)
def test_counts_are_exact_and_choices_are_ours(
    name: str, grid: tuple[int, int, int], budget: float, seed: int
) -> None:
    n = grid[0] * grid[1] * grid[2]
    x = torch.randn(n, 6, generator=torch.Generator().manual_seed(seed))
    plan = parse_plan(f"{name}:{budget}")
    chosen = plan.reduce(x, grid)
    kept = min(budget, n) if isinstance(budget, int) else budget
    stock = mmfast.reduce(mmfast.Tokens(x, grid=grid), f"{name}:{kept}")
    assert chosen.m == plan.count(n) == stock.m == len(set(chosen.keep.tolist()))
    assert torch.equal(chosen.keep, stock.keep)
    assert torch.equal(chosen.apply(x), stock.apply(x))
    if plan.count(n) == n:
        assert torch.equal(chosen.apply(x), x)


@settings(max_examples=30, deadline=None)
@given(first=st.floats(0.05, 1.0), second=st.integers(1, 40), n=st.integers(1, 40))
def test_stages_one_after_the_other(first: float, second: int, n: int) -> None:
    plan = parse_plan(f"evs:{first:.3f}+divprune:{second}")
    assert plan.reduce(features([1, 2, 2 * n]), (1, 1, n)).m == plan.count(n) <= second


def test_choices_are_what_looks_at_the_output_alone() -> None:
    assert {"divprune", "evs", "uniform", "random", "vidcom2", "tome"} <= {*choices()}
    for method in methods("reducer"):
        if method.name in choices():
            assert "pre" in method.sites and {*method.needs} <= {"x", "grid"}


REFUSED = {
    "cdpruner:0.25": "question",
    "catp:0.25": "question",
    "script:0.25": "question",
    "fastv@llm2:0.5": "needs attn",
    "pyramiddrop@llm:0.5": "one length",
    "visionzip:0.25": "needs attn, keys",
    "divprune@llm3:0.5": "after the vision tower",
    "tome@vit:0.5": "after the vision tower",
    "pixelprune": "one length",
    "evs": "must know the count",
    "  ": "empty",
    "evs:0.25?parity=true": "parity",
    "evz:0.25": "did you mean 'evs'",
    "divprune:0": "keeps nothing",
}


@pytest.mark.parametrize("spec", REFUSED)
def test_refused_in_one_line(spec: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_plan(spec)
    text = str(caught.value)
    assert REFUSED[spec] in text and "\n" not in text, text
    if REFUSED[spec] in ("question", "one length"):
        assert "divprune" in text and "uniform" in text  # what to take instead


def test_where_the_spec_is_read_from() -> None:
    on = SimpleNamespace(video_pruning_rate=0.75, mm_processor_kwargs=None)
    asked = SimpleNamespace(
        video_pruning_rate=0.75, mm_processor_kwargs={"mmfast_reduce": "evs:0.5"}
    )
    config, environ = SimpleNamespace(mmfast_reduce="uniform:7"), {"MMFAST_VLLM_REDUCE": "divprune"}
    assert str(read_plan(asked, config, environ)) == "evs@pre:0.5"
    assert str(read_plan(on, config, environ)) == "uniform@pre:7"
    plan = read_plan(on, SimpleNamespace(), environ)
    assert plan is not None and plan.count(100) == 25  # vLLM's rate, where there is no budget
    assert read_plan(on, SimpleNamespace(), {}) is None
    with pytest.raises(SpecError, match="--video-pruning-rate"):
        read_plan(SimpleNamespace(video_pruning_rate=None), config, {})
    chain = parse_plan("evs+divprune:0.5", rate=0.5)
    assert chain.count(100) == 25


@pytest.fixture(autouse=True)
def _no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MMFAST_VLLM_REDUCE", raising=False)


SPECS = [
    "divprune:0.25",
    "evs:0.4",
    "evs:5",
    "uniform:5",
    "tome:0.5",
    "evs:0.5+random:0.5",
    "divprune:1",
]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("family", FAMILIES)
def test_served(vllm: Registry, family: str, spec: str) -> None:
    """Two videos and an image in a prompt: what reaches the LLM is what `mmfast.reduce` keeps."""
    server = Server(vllm, family, {"mmfast_reduce": spec})
    grids, plan = [GRID, OTHER], parse_plan(spec)
    embeds = [features(GRID, 1), features(OTHER, 2)]
    ids, videos = server.serve(grids, embeds)
    for grid, x, (rows, positions) in zip(grids, embeds, videos, strict=True):
        tokens = mmfast.Tokens(x, grid=of_tokens(grid))
        chosen = mmfast.reduce(tokens, spec)
        assert not isinstance(chosen, list)
        assert chosen.m == plan.count(len(x))
        if family == "Qwen3VL":
            times = [0.5 * i for i in range(grid[0])]
            n = len(x) // grid[0]
            per_frame = torch.bincount(chosen.keep // n, minlength=grid[0]).tolist()
            layout = torch.tensor(laid_out(times, per_frame))
            is_video = layout == VIDEO
            whole = laid_out(times, [n] * grid[0])
            where = qwen3_positions(whole, grid)[:, torch.tensor(whole) == VIDEO]
            assert (rows[~is_video, 0].long() == layout[~is_video]).all()  # timestamps between
        else:
            is_video = torch.ones(len(rows), dtype=torch.bool)
            where = media_positions(grid, MERGE, 2, 1)[:, :3].T
        assert torch.equal(rows[is_video], chosen.apply(x))
        assert torch.equal(positions[:, is_video], where[:, chosen.keep])
    if family == "Qwen3VL":
        assert ids.count(VIDEO) == sum(plan.count(len(x)) for x in embeds)
        assert ids.count(START) == 1 + GRID[0] + OTHER[0]  # the image's, and each frame's
    assert 2 in ids  # the image is whole


@pytest.mark.parametrize("family", FAMILIES)
def test_everything_kept_is_the_stock_model(vllm: Registry, family: str) -> None:
    embeds = [features(GRID, 1), features(OTHER, 2)]
    kept = Server(vllm, family, {"mmfast_reduce": "divprune:1.0"}, rate=0.1)
    ids, videos = kept.serve([GRID, OTHER], embeds)
    stock = Server(vllm, family, rate=None).serve([GRID, OTHER], embeds)[1]
    for x, (rows, _), (plain, _) in zip(embeds, videos, stock, strict=True):
        assert torch.equal(rows[rows.std(dim=1) > 0], x)  # a timestamp's row is constant here
        assert torch.equal(plain, x)
    assert family != "Qwen3VL" or ids.count(VIDEO) == sum(map(len, embeds))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rate", [None, 0.5])
def test_without_a_spec_it_is_vllm(vllm: Registry, family: str, rate: float | None) -> None:
    ours = Server(vllm, family, rate=rate)
    parents = type(ours.model).__mro__[2], type(ours.processor).__mro__
    x = features(GRID)
    ids, ((rows, positions),) = ours.serve([GRID], [x])
    ours.model.__class__ = parents[0]
    ours.processor.__class__ = next(c for c in parents[1] if c.__module__ == "vllm_stubs")
    stock_ids, ((stock_rows, stock_positions),) = ours.serve([GRID], [x])
    assert ids == stock_ids and torch.equal(rows, stock_rows)
    assert torch.equal(positions, stock_positions)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_video_gives_the_same_tokens(vllm: Registry, family: str) -> None:
    """Results are stored under the hash of a video: nothing around it may matter."""
    server = Server(vllm, family, {"mmfast_reduce": "divprune:0.3"})
    x, other = features(GRID, 1), features(OTHER, 2)
    (alone,) = server.serve([GRID], [x])[1]
    for grids, embeds in ([[OTHER, GRID], [other, x]], [[GRID, GRID], [x, x]]):
        again = server.serve(grids, embeds)[1][1]
        assert torch.equal(alone[0], again[0]) and torch.equal(alone[1], again[1])
    (fresh,) = Server(vllm, family, {"mmfast_reduce": "divprune:0.3"}).serve([GRID], [x])[1]
    assert torch.equal(alone[0], fresh[0])


def test_deepstack_follows_the_main_channels(vllm: Registry) -> None:
    server = Server(vllm, "Qwen3VL", {"mmfast_reduce": "divprune:6"})
    x = features(GRID, 1, 3 * WIDTH)
    (got,) = server.serve([GRID], [x])[1]
    chosen = mmfast.reduce(mmfast.Tokens(x[:, :WIDTH].clone(), grid=of_tokens(GRID)), "divprune:6")
    assert not isinstance(chosen, list)
    assert {tuple(row.tolist()) for row in x[chosen.keep]} <= {tuple(r.tolist()) for r in got[0]}


def test_values_that_are_not_finite_end_no_server(vllm: Registry) -> None:
    x = features(GRID)
    x[3] = float("nan")
    x[5, 0] = float("inf")
    server = Server(vllm, "Qwen2_5_VL", {"mmfast_reduce": "divprune:0.25"})
    ((rows, _),) = server.serve([GRID], [x])[1]
    assert len(rows) == 12


def test_a_request_has_no_spec_of_its_own(vllm: Registry) -> None:
    server = Server(vllm, "Qwen3VL", {"mmfast_reduce": "evs:0.5"})
    server.serve([GRID], [features(GRID)], mmfast_reduce="evs:0.5", fps=2.0)
    with pytest.raises(SpecError, match="keeps one spec"):
        server.serve([GRID], [features(GRID)], mmfast_reduce="evs:0.25")
    with pytest.raises(SpecError, match="keeps one spec"):
        Server(vllm, "Qwen3VL").serve([GRID], [features(GRID)], mmfast_reduce="evs:0.25")


def test_a_wrong_spec_ends_the_server_at_start(vllm: Registry) -> None:
    with pytest.raises(SpecError, match="choices"):
        Server(vllm, "Qwen3VL", hf={"mmfast_reduce": "cdpruner:0.25"})
    with pytest.raises(SpecError, match="--video-pruning-rate"):
        Server(vllm, "Qwen3VL", hf={"mmfast_reduce": "evs:0.25"}, rate=None)


def test_another_release_is_named(vllm: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    models = sys.modules["vllm.model_executor.models.qwen3_vl"]
    monkeypatch.delattr(models.Qwen3VLForConditionalGeneration, "_create_final_video_embeddings")
    with pytest.raises(ModelError, match="_create_final_video_embeddings"):
        Server(vllm, "Qwen3VL", {"mmfast_reduce": "evs:0.25"})
    Server(vllm, "Qwen3VL")  # without a spec nothing of ours is needed


def test_registered_again_and_again(vllm: Registry) -> None:
    for _ in range(3):
        register()
    assert vllm.models == MODELS
    assert not [name for name in sys.modules if name.startswith("mmfast.vllm.qwen")]


@pytest.mark.slow
def test_importing_needs_no_vllm() -> None:
    code = "import sys, mmfast.vllm; assert 'vllm' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_recount() -> None:
    names: dict[str, Any] = {"video": 1, "start": 3, "end": 4}
    ids = [9, 3, 2, 2, 4, 8, 3, 1, 1, 4, 7, 3, 4, 6, 3]
    assert recount(ids, [1, 2], **names) == [9, 3, 2, 2, 4, 8, 3, 1, 4, 7, 3, 1, 1, 4, 6, 3]
    assert recount(ids, [0, 0], **names) == [9, 3, 2, 2, 4, 8, 3, 4, 7, 3, 4, 6, 3]
    for counts in ([1], [1, 2, 3]):
        with pytest.raises(MmfastError, match="2 frames"):
            recount(ids, counts, **names)
