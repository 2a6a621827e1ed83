"""BAViT's classifier of background: against loops, in models, its files, and its recipe."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import oracles_compressors as oracle
import pytest
import torch
from tiny_models import build, tiny
from torch import Tensor

import mmfast
from mmfast import ModelError, SpecError
from mmfast.attach import attach
from mmfast.compressors.base import save
from mmfast.core.spec import parse
from mmfast.models.reduction.check import check, refuse_files
from mmfast.rankers import bavit, file_of
from mmfast.rankers.bavit import BackgroundVit
from mmfast.streams.frontend import StreamReducer
from mmfast.tiny import training
from mmfast.tiny.video import background as recipe
from mmfast.vllm.plan import parse_plan

GRID = (2, 3, 4)
N = math.prod(GRID)


def clip(*lead: int, width: int = 32, seed: int = 5) -> Tensor:
    torch.manual_seed(seed)
    return torch.randn(*lead, N, width)


def make(width: int = 32, seed: int = 0) -> BackgroundVit:
    torch.manual_seed(seed)
    made = BackgroundVit(width, inner=24, heads=3)
    for weight in made.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    made.eval().requires_grad_(False)
    frames = clip(width=width).unflatten(0, (GRID[0], -1))
    made.head.bias -= made(frames, GRID[1:]).median() + 0.02  # half of a clip is foreground
    return made


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "judge.safetensors"
    save(make(), path)
    return path


def judged(judge: BackgroundVit, frame: Tensor, grid: tuple[int, int]) -> list[float]:
    """Logits of one frame `[P, D]` by loops over tokens and heads, in float64."""
    weights = {name: each.double().numpy() for name, each in judge.state_dict().items()}
    inner, heads = judge.config["inner"], judge.config["heads"]
    size, rows = inner // heads, []
    for at, token in enumerate(frame.double().numpy()):
        inside = oracle.linear(oracle.norm(token, weights, "enter.0"), weights, "enter.1")
        row, column = divmod(at, grid[1])
        rates = [100.0 ** -(i / (inner // 4)) for i in range(inner // 4)]
        spot = [
            f(place * rate)
            for place in (row, column)
            for f in (math.sin, math.cos)
            for rate in rates
        ]
        rows.append(inside + np.array(spot))
    for layer in range(judge.config["depth"]):
        name, asked, keys, values = f"layers.{layer}", [], [], []
        for row in rows:
            normed = oracle.norm(row, weights, f"{name}.before")
            parts = oracle.linear(normed, weights, f"{name}.mix").reshape(3, heads, size)
            for part, where in zip(parts, (asked, keys, values), strict=True):
                where.append(part)
        after = []
        for row, query in zip(rows, asked, strict=True):
            mixed = []
            for head in range(heads):
                power = [math.exp(float(query[head] @ key[head]) / math.sqrt(size)) for key in keys]
                mixed.append(
                    sum(p / sum(power) * v[head] for p, v in zip(power, values, strict=True))
                )
            row = row + oracle.linear(np.concatenate(mixed), weights, f"{name}.out")
            up = oracle.linear(oracle.norm(row, weights, f"{name}.between"), weights, f"{name}.up")
            act = np.array([0.5 * h * (1 + math.erf(h / math.sqrt(2))) for h in up])
            after.append(row + oracle.linear(act, weights, f"{name}.down"))
        rows = after
    ends = (oracle.linear(oracle.norm(row, weights, "leave"), weights, "head") for row in rows)
    return [float(end[0]) for end in ends]


def scores(judge: BackgroundVit, x: Tensor) -> list[float]:
    """Logits of a clip, frame by frame."""
    return [
        each for frame in x.unflatten(0, (GRID[0], -1)) for each in judged(judge, frame, GRID[1:])
    ]


def best(score: list[float], count: int) -> list[int]:
    return sorted(sorted(range(len(score)), key=lambda i: (-score[i], i))[:count])


def kept(x: Tensor, spec: str) -> Any:
    return mmfast.reduce(mmfast.Tokens(x, grid=GRID), spec)


def test_it_keeps_what_loops_take_for_foreground(weights: Path) -> None:
    x = clip()
    known = scores(make(), x)
    assert kept(x, f"bavit:5?path={weights}").keep.tolist() == best(known, 5)
    front = [at for at, score in enumerate(known) if score > 0]
    assert 0 < len(front) < N
    assert kept(x, f"bavit?path={weights}").keep.tolist() == front
    with torch.no_grad():
        found = make()(x.unflatten(0, (2, -1)), GRID[1:]).flatten()
        np.testing.assert_allclose(found.numpy(), known, rtol=1e-4, atol=1e-5)
        # planted faults: each part counts, rows are not columns, and frames do not see each other
        for name in ("enter.1.bias", "layers.0.mix.weight", "layers.1.down.bias", "leave.weight"):
            other = make()
            dict(other.named_parameters())[name].mul_(1.2)
            assert not np.allclose(other(x.unflatten(0, (2, -1)), GRID[1:]).flatten(), known, 1e-4)
        turned = make()(x.unflatten(0, (2, -1)), (4, 3)).flatten()
        together = make()(x[None], (6, 4)).flatten()
    assert not np.allclose(turned, known, 1e-3) and not np.allclose(together, known, 1e-3)


def test_a_picture_of_background_alone_keeps_its_best_token(tmp_path: Path) -> None:
    judge = make()
    judge.head.bias -= 100.0
    save(judge, tmp_path / "none.safetensors")
    x = clip()
    found = kept(x, f"bavit?path={tmp_path}/none.safetensors")
    assert found.keep.tolist() == best(scores(make(), x), 1)


def test_rows_of_a_batch_are_those_of_one_by_one(weights: Path) -> None:
    x, spec = clip(3), f"bavit:4?path={weights}"
    together = kept(x, spec)
    for row in range(3):
        assert torch.equal(kept(x[row], spec).keep, together.keep[row])


@torch.no_grad()
def test_in_a_model_a_ragged_batch_keeps_what_the_loops_keep(weights: Path) -> None:
    """Two pictures of different rasters, each judged by its own rows and columns."""
    this = tiny("qwen2_5_vl")
    pictures = [
        np.random.default_rng(n).integers(0, 255, (h, w, 3), np.uint8)
        for n, (h, w) in enumerate([(56, 112), (112, 84)])
    ]
    inputs = this.inputs(["a {image} what?", "some more {image} what?"], images=pictures)
    features = this.model.model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"])
    with attach(this.model, f"bavit:4?path={weights}") as trace:
        this.model(**inputs)
    reductions = [reduction for _, _, reduction in trace.reductions]
    grids = (inputs["image_grid_thw"] // torch.tensor([1, 2, 2])).tolist()
    assert len(reductions) == 2 and grids[0] != grids[1]
    for found, x, (_, rows, columns) in zip(reductions, features.pooler_output, grids, strict=True):
        assert found.keep.tolist() == best(judged(make(), x, (rows, columns)), 4)


def test_a_share_of_one_is_the_stock_model_and_needs_no_weights() -> None:
    this = tiny("llava_onevision")
    inputs = this.inputs(["a {video} what?"], videos=this.videos(1))
    with torch.no_grad():
        expected = this.model(**inputs).logits
        with attach(this.model, "bavit:1.0"):
            assert torch.equal(this.model(**inputs).logits, expected)


def test_a_stream_judges_frame_by_frame(weights: Path) -> None:
    x = clip()
    reducer = StreamReducer(f"bavit:3?path={weights}")
    _, found = reducer.step(reducer.start(), mmfast.Tokens(x, grid=GRID))
    known = scores(make(), x)
    first, second = best(known[: N // 2], 3), best(known[N // 2 :], 3)
    assert found.keep.tolist() == first + [at + N // 2 for at in second]


def test_where_it_cannot_act_it_is_refused(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build("llava_onevision").model
    bad = tmp_path / "bad.safetensors"
    bad.write_bytes(b"no weights")
    wrong = {
        "bavit:0.25": "python -m mmfast.rankers.train --ranker bavit",
        f"bavit:0.25?path={tmp_path}/none": "no file",
    }
    for spec, words in wrong.items():
        with pytest.raises(ModelError) as caught:
            check(parse(spec), model)
        assert words in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(ModelError, match="cannot be read"):
        kept(clip(), f"bavit:4?path={bad}")
    with pytest.raises(ModelError, match="is no file"):
        kept(clip(), "bavit:4")
    with pytest.raises(ModelError, match="width 32, and these have 16"):
        kept(clip(width=16), f"bavit:4?path={weights}")
    with pytest.raises(SpecError, match="a request must not"):
        refuse_files(parse(f"bavit:4?path={weights}"))
    with pytest.raises(SpecError, match="weights of one model"):
        parse_plan("bavit:0.25")
    with pytest.raises(SpecError, match="cannot run at site 'llm2'"):
        parse("bavit@llm2:0.25")
    (tmp_path / "rankers").mkdir()
    weights.rename(file_of(tmp_path, "bavit"))
    monkeypatch.setattr(model, "name_or_path", str(tmp_path))
    (spec,) = check(parse("bavit:0.25"), model)
    assert spec.knobs["path"] == str(file_of(tmp_path, "bavit"))


def test_forty_steps_teach_what_is_background(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Things light up one channel of features that are noise otherwise."""
    torch.manual_seed(0)
    monkeypatch.setattr(recipe, "FRAMES", 16)
    shown = (torch.rand(20, 8, 9) < 0.2).to(torch.int8)
    features = torch.randn(20, 8, 9, 16)
    features[..., 3] += 4.0 * shown
    options = recipe.arguments(["--out", str(tmp_path), "--steps", "40", "--rate", "5e-3"])
    recipe.train_one(options, training.Log(tmp_path / "rankers"), features, shown)
    log = (tmp_path / "rankers" / "training.jsonl").read_text()
    rows = {row["stage"]: row for row in map(json.loads, log.splitlines())}
    assert rows["untrained"]["right"] < 0.85 and rows["held-out"]["right"] > 0.9
    assert rows["saved"]["file"] == "bavit.safetensors"
    judge = bavit.load(file_of(tmp_path, "bavit"))
    task = recipe.BackgroundTask(judge, features, shown, 0, 1e-3)
    assert task.look()["right"] > 0.9  # what was written is what was trained
    blind = recipe.BackgroundTask(judge, features, shown.flip(-1), 0, 1e-3)
    assert blind.look()["right"] < 0.8  # a planted fault: labels of other tokens


@pytest.mark.parametrize("text", ["--clips none", "--ranker top", "--step"])
def test_wrong_arguments_are_refused(text: str) -> None:
    with pytest.raises(SystemExit):
        recipe.arguments(text.split())
