"""One matching for several blocks of the tower, against plain loops; other methods in the tower."""

from __future__ import annotations

from typing import Any

import merge_checks
import pytest
import torch
from merge_checks import _naive_siglip, _pairs, _steps, stage
from tower_checks import GRIDS, onevision, pixels, qwen

from mmfast import Tokens, reduce
from mmfast.attach import attach
from mmfast.core.errors import SpecError
from mmfast.core.reduction import Reduction
from mmfast.core.trace import Trace
from mmfast.models.vision.merge_pass import Carried


class Reusing:
    """Stands in for `merge_checks._merge`: the pairs of a block serve the next `reuse` - 1 too."""

    def __init__(self, reuse: int, targets: list[int]) -> None:
        self.reuse, self.targets, self.block = reuse, targets, 0
        self.pairs: list[tuple[int, int]] = []
        self.start = 0

    def __call__(self, window: list[Any], target: int) -> list[Any]:
        if self.block % self.reuse == 0:
            last = self.targets[min(self.block + self.reuse, len(self.targets)) - 1]
            self.start = len(window)
            self.pairs = _pairs(window, len(window) - last)
            for name, token in enumerate(window):
                token["name"] = name
        self.block = (self.block + 1) % len(self.targets)
        by_name = {token["name"]: token for token in window}
        for i, j in self.pairs[: self.start - target]:
            if i in by_name:
                by_name[j].setdefault("joined", []).append(by_name.pop(i))
        return [_joined(token) for token in by_name.values()]


def _joined(token: dict[str, Any]) -> dict[str, Any]:
    group = [token, *token.pop("joined", [])]
    size = sum(t["size"] for t in group)
    x = sum(t["x"] * t["size"] for t in group) / size
    patches = [p for t in group for p in t["patches"]]
    share = {p: value for t in group for p, value in t["share"].items()}
    return {**token, "x": x, "size": size, "patches": patches, "share": share}


@pytest.mark.parametrize(("reuse", "share", "left"), [(2, 0.6, 15), (3, 0.6, 15), (3, 0.8, 20)])
def test_a_plan_serves_several_blocks(
    monkeypatch: pytest.MonkeyPatch, reuse: int, share: float, left: int
) -> None:
    model, video, states, trace = onevision(), torch.randn(1, 2, 3, 20, 20), [], Trace()
    hook = model.model.multi_modal_projector.register_forward_pre_hook(
        lambda _, args: states.append(args[0])
    )
    with stage(model, f"tome@vit:{share}?reuse={reuse}", trace), torch.no_grad():
        model.model.get_video_features(video)
    with stage(model, f"tome@vit:{share}"), torch.no_grad():
        model.model.get_video_features(video)
    hook.remove()
    monkeypatch.setattr(merge_checks, "_merge", Reusing(reuse, _steps(25, left, 3)))
    with torch.no_grad():
        want, _ = _naive_siglip(model, video.flatten(0, 1), left, 3)
    torch.testing.assert_close(states[0], want, atol=1e-5, rtol=1e-5)
    assert (states[0] - states[1]).abs().max() > 1e-3  # one matching per block differs
    assert [row.tokens_out for row in trace.rows] == [2 * left]


def test_reuse_of_one_is_the_usual_merging() -> None:
    for model in (qwen("qwen2_5_vl"), qwen("qwen3_vl")):
        outs, traces = [], []
        for spec in ("tome@vit:0.6", "tome@vit:0.6?reuse=1", "tome@vit:0.6?reuse=3"):
            trace = Trace()
            with stage(model, spec, trace), torch.no_grad():
                outs.append(model.model.get_image_features(pixels(GRIDS), GRIDS).pooler_output)
            traces.append([row.tokens_out for row in trace.rows])
        assert all(map(torch.equal, outs[0], outs[1]))
        assert not all(map(torch.equal, outs[0], outs[2]))
        assert traces[0] == traces[2]
        for _, _, found in trace.reductions:
            found.check()


@pytest.mark.parametrize(("until", "blocks"), [(0.67, 2), (0.1, 1), (1.0, 3)])
def test_merging_early(monkeypatch: pytest.MonkeyPatch, until: float, blocks: int) -> None:
    """All merges in the first blocks; the sizes of tokens count in the others, too."""
    model, video, states, trace = onevision(), torch.randn(1, 2, 3, 20, 20), [], Trace()
    hook = model.model.multi_modal_projector.register_forward_pre_hook(
        lambda _, args: states.append(args[0])
    )
    with stage(model, f"tome@vit:0.6?until={until}", trace), torch.no_grad():
        model.model.get_video_features(video)
    hook.remove()
    steps = [*_steps(25, 15, blocks), *[15] * (3 - blocks)]
    monkeypatch.setattr(merge_checks, "_steps", lambda *_: steps)
    with torch.no_grad():
        want, _ = _naive_siglip(model, video.flatten(0, 1), 15, 3)
    torch.testing.assert_close(states[0], want, atol=1e-5, rtol=1e-5)
    assert [row.tokens_out for row in trace.rows] == [30]


def test_when_merging_ends_is_checked() -> None:
    for until in (0.0, 1.5, -0.5):
        with pytest.raises(SpecError, match="no share of the blocks; choose 0 to 1"):
            attach(onevision(), f"tome@vit:0.5?until={until}").__enter__()
    with pytest.raises(SpecError, match=r"until=0\.5 of 'tome' is for site 'vit'"):
        reduce(Tokens(torch.randn(10, 4)), "tome:5?until=0.5")


def test_a_carried_plan_ends_where_the_method_would() -> None:
    """In steps or at once, segments of unequal length, the same groups."""
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(16, 6, generator=generator)
    found = [reduce(Tokens(keys[:10]), "tome:6"), reduce(Tokens(keys[10:]), "tome:4")]
    whole = Reduction(
        torch.cat([found[0].keep, found[1].keep + 10]),
        torch.cat([found[0].owner, found[1].owner + 6]),
    )
    plan = Carried(whole, keys, (10, 6))
    steps = [plan.step(targets) for targets in ((9, 6), (9, 5), (6, 4))]
    total = steps[0].then(steps[1]).then(steps[2])
    assert [step.m for step in steps] == [15, 14, 10]
    assert torch.equal(total.owner, whole.owner) and torch.equal(total.keep, whole.keep)
    cosines = torch.cosine_similarity(keys, keys[whole.keep[whole.owner]])
    gone = [i for i in range(10) if i not in whole.keep.tolist()]
    first = next(i for i in range(10) if i not in steps[0].keep.tolist())
    assert first == max(gone, key=lambda i: float(cosines[i]))


@pytest.mark.parametrize("spec", ["saint@vit:0.6", "saint@vit:0.6?full=16"])
@pytest.mark.parametrize("build", [onevision, lambda: qwen("qwen2_5_vl"), lambda: qwen("qwen3_vl")])
def test_saint_runs_in_the_tower(build: Any, spec: str) -> None:
    """Its dropped tokens take the value of the most similar one that stays."""
    model, trace = build(), Trace()
    base = model.model
    if hasattr(base, "visual"):
        call = lambda: base.get_image_features(pixels(GRIDS), GRIDS).pooler_output
    else:
        call = lambda: base.get_video_features(torch.ones(1, 2, 3, 20, 20)).pooler_output
    with torch.no_grad():
        stock = call()
        with stage(model, spec, trace):
            merged = call()
    assert [row.stage for row in trace.rows] == ["vit"] * len(trace.reductions)
    for row, (_, _, found) in zip(trace.rows, trace.reductions, strict=True):
        found.check()
        assert row.tokens_out == found.m and abs(found.m - 0.6 * found.n) <= 2 * 2
    assert all(one.shape == two.shape for one, two in zip(stock, merged, strict=True))


def test_refusals() -> None:
    none = pytest.raises(SpecError, match=r"reuse=0 .*choose 1 or more")
    with none, attach(onevision(), "tome@vit:0.5?reuse=0"):
        pass
    with pytest.raises(SpecError, match="for site 'vit'"):
        reduce(Tokens(torch.randn(8, 4)), "tome:4?reuse=2")
