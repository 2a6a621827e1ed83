"""Mamba layers before pooling: the scan, the compressor against its oracle, training and use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import oracles_compressors as oracle
import pytest
import torch
from clip_lessons import clip_lessons
from torch import Tensor
from transformers import MambaConfig
from transformers.models.mamba.modeling_mamba import MambaMixer

import mmfast
from mmfast import ModelError, SpecError
from mmfast.attach import attach
from mmfast.compressors import base
from mmfast.compressors.query_compressor import cells_of
from mmfast.compressors.storm import MambaLayer, Storm, selective_scan
from mmfast.core.reduction import Reduction
from mmfast.frontends.video.reader import read_video
from mmfast.models.loading import embedded_path, load
from mmfast.models.prompt import Shot, build_inputs
from mmfast.tiny import training
from mmfast.tiny.video import compressors as recipe
from mmfast.tiny.video.lessons import answer_loss
from mmfast.vllm.plan import parse_plan

GRID = (3, 4)
CLIP = Path(__file__).parents[2] / "assets" / "clips" / "red-circle.mp4"


def make(tokens: int, stride: int = 1) -> Storm:
    torch.manual_seed(tokens)
    made = Storm(16, tokens, GRID, inner=12, states=3, stride=stride)
    for weight in (made.change.weight, made.change.bias):  # which start at zero
        torch.nn.init.normal_(weight, std=0.3)
    return made.eval().requires_grad_(False)


def features(*lead: int, frames: int = 5) -> Tensor:
    torch.manual_seed(7)
    return torch.randn(*lead, frames, 12, 16)


@pytest.mark.parametrize("length", [1, 2, 3, 15, 16, 17, 40])
def test_the_scan_is_the_recurrence(length: int) -> None:
    torch.manual_seed(length)
    rate = -torch.rand(2, length, 5, 3, dtype=torch.float64) * 4
    rate[:, ::7] = -200  # all is forgotten
    gain = torch.randn(2, length, 5, 3, dtype=torch.float64)
    rate, gain = rate.requires_grad_(), gain.requires_grad_()
    state, states = torch.zeros(2, 5, 3, dtype=torch.float64), []
    for now in range(length):
        state = rate[:, now].exp() * state + gain[:, now]
        states.append(state)
    plain, found = torch.stack(states, 1), selective_scan(rate, gain)
    torch.testing.assert_close(found, plain, rtol=1e-12, atol=1e-12)
    weight = torch.randn_like(plain)
    theirs = torch.autograd.grad((plain * weight).sum(), (rate, gain))
    mine = torch.autograd.grad((found * weight).sum(), (rate, gain))
    torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


def test_a_layer_is_that_of_transformers() -> None:
    torch.manual_seed(1)
    layer = MambaLayer(24, 4).eval()
    config = MambaConfig(
        hidden_size=24, state_size=4, expand=2, conv_kernel=4, time_step_rank=2, num_hidden_layers=1
    )
    stock = MambaMixer(config, 0).eval()
    stock.load_state_dict(layer.state_dict())
    x = torch.randn(2, 37, 24)
    torch.testing.assert_close(layer(x), stock(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tokens, stride", [(1, 1), (4, 1), (12, 1), (1, 4), (2, 3)])
def test_oracle(tokens: int, stride: int) -> None:
    made, x = make(tokens, stride).double(), features().double()
    out = made(x)
    cells = []
    for count in range(1, stride + 1):
        number = cells_of(GRID, tokens * count).tolist()
        cells.append([[p for p in range(12) if number[p] == n] for n in range(tokens * count)])
    weights = {name: each.numpy() for name, each in made.state_dict().items()}
    expected = oracle.storm(weights, made.config, cells, x.numpy())
    assert out.place.tolist() == [[place for place, _ in frame] for frame in expected]
    vectors = np.stack([[vector for _, vector in frame] for frame in expected])
    torch.testing.assert_close(out.vectors, torch.from_numpy(vectors), rtol=1e-5, atol=1e-6)
    for name in ("ahead.0.A_log", "back.1.dt_proj.bias", "ahead.1.D", "back.0.conv1d.weight"):
        changed = make(tokens, stride).double()
        dict(changed.named_parameters())[name].add_(0.1)
        assert not torch.allclose(changed(x).vectors, out.vectors, rtol=1e-6, atol=1e-6), name


def test_each_output_tells_of_the_past_and_of_the_future() -> None:
    made, x = make(2), features()
    before = made(x).vectors
    for moved in (0, 4):
        other = x.clone()
        other[moved] = torch.randn(12, 16)
        changed = (made(other).vectors - before).abs().amax((-1, -2))
        assert bool((changed > 1e-7).all())


def test_untrained_it_pools() -> None:
    torch.manual_seed(0)
    x = features()
    fresh = Storm(16, 3, (3, 4), inner=12, states=3)
    number = cells_of(GRID, 3)
    for frame, vectors in zip(x, fresh(x).vectors, strict=True):
        means = torch.stack([frame[number == n].mean(0) for n in range(3)])
        found = sorted(vectors.tolist())
        torch.testing.assert_close(torch.tensor(found), torch.tensor(sorted(means.tolist())))
    over_time = Storm(16, 3, (3, 4), inner=12, states=3, stride=4)(x).vectors[:4].flatten(0, 1)
    torch.testing.assert_close(over_time.mean(0), x[:4].mean((0, 1)))


def test_rows_of_a_batch_are_those_of_one_by_one() -> None:
    made, x = make(2, 3), features(2)
    together = made(x)
    for row in range(2):
        one = made(x[row])
        torch.testing.assert_close(together.vectors[row], one.vectors, rtol=1e-5, atol=1e-5)
        assert torch.equal(together.place[row], one.place)
    assert torch.equal(made(x, torch.randn(2, 6, 16)).vectors, together.vectors)


def test_a_spec_counts_tokens_of_a_frame_and_stages_follow(tmp_path: Path) -> None:
    made, x = make(2, 3), features()
    base.save(made, path := tmp_path / "two.safetensors")
    again = base.load(path)
    assert again.config == made.config
    assert torch.equal(again(x).vectors, made(x).vectors)
    tokens = mmfast.Tokens(x.flatten(0, 1), grid=(5, *GRID))
    found = mmfast.reduce(tokens, f"storm:2?path={path}")
    assert isinstance(found, Reduction)
    found.check()
    assert found.m == 10 and torch.equal(found.apply(tokens.x), made(x).vectors.flatten(0, 1))
    mine = found.owner.view(5, 12)  # three frames share six cells, the last two four
    number = cells_of(GRID, 6)
    for n in range(6):
        assert len(set(mine[:3, number == n].flatten().tolist())) == 1
    assert set(mine[:3].flatten().tolist()) == set(range(6))
    assert set(mine[3:].flatten().tolist()) == {6, 7, 8, 9}
    sampled = mmfast.reduce(tokens, f"storm:2?path={path}+token_sampling:5")
    assert isinstance(sampled, Reduction) and sampled.m == 5


def test_what_does_not_fit_is_refused_in_one_line(tmp_path: Path) -> None:
    base.save(make(2), path := tmp_path / "two.safetensors")
    tokens = mmfast.Tokens(features().flatten(0, 1), grid=(5, 4, 3))
    for spec, grid in (("storm:2", (5, 4, 3)), ("storm:3", (5, *GRID))):
        with pytest.raises(ModelError, match="meets frames of") as caught:
            mmfast.reduce(mmfast.Tokens(tokens.x, grid=grid), f"{spec}?path={path}")
        assert "\n" not in str(caught.value)
    with pytest.raises(ModelError, match="holds a 'storm'"):
        asked = mmfast.Tokens(tokens.x, grid=(5, *GRID), query=torch.randn(3, 16))
        mmfast.reduce(asked, f"query_compressor:2?path={path}")
    with pytest.raises(ModelError, match="choose less of one"):
        Storm(16, 4, GRID, stride=4)
    with pytest.raises(SpecError, match="weights of one model"):
        parse_plan(f"storm:2?path={path}")
    with pytest.raises(SpecError, match="cannot reduce a stream"):
        mmfast.pipeline("video-stream", reduce=f"storm:2?path={path}").open()


@pytest.fixture(scope="module")
def subject() -> Iterator[tuple[Any, Any]]:
    yield load(embedded_path("tiny-video"), "cpu", "float32")


def test_the_loss_falls_and_attach_and_pipelines_use_what_was_saved(
    subject: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipe, "CLIPS", 2)
    model, processor = subject
    clips = clip_lessons(model, processor, 6)
    torch.manual_seed(0)
    made = Storm(192, 4, (6, 6), inner=24, states=4)
    task = recipe.CompressorTask(model, made, clips, 0, held=2, questions=2)
    (lesson,) = task.batches(0, 0.0)
    packed = recipe.alone(lesson)

    @torch.no_grad()
    def loss() -> float:
        states, _ = recipe.respond(model, made, lesson.tokens, packed)
        return float(answer_loss(model, states, packed.labels))

    first = loss()
    for _ in range(4):
        training.update(task, [lesson], 1.0)
    assert loss() < 0.98 * first
    assert 0 <= task.look()["mean"] <= 1
    base.save(made, path := tmp_path / "four.safetensors")
    clip = read_video(CLIP, frames=8)
    shot = Shot("video", clip.frames, clip.metadata())
    inputs = dict(build_inputs(processor, [[shot]], ["How many objects are there?"], "cpu"))
    hidden, places = by_hand(model, path, inputs)
    with torch.no_grad():
        whole = model.model.language_model(inputs_embeds=hidden, position_ids=places)
        expected = model.lm_head(whole.last_hidden_state)[0, -1]
        with attach(model, f"storm:4?path={path}") as trace:
            out = model(**inputs).logits[0, -1]
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    assert [(r.n, r.m) for _, _, r in trace.reductions] == [(288, 32)]
    pipe = mmfast.pipeline("video-qa", "tiny-video", reduce=f"storm:4?path={path}")
    row = next(r for r in pipe(str(CLIP), "How many?").trace.rows if r.method == "storm")
    assert (row.tokens_in, row.tokens_out) == (288, 32)


@torch.no_grad()
def by_hand(model: Any, path: Path, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Embeddings and positions of one prompt with the vectors of 8 frames in it."""
    ids = inputs["input_ids"][0]
    first = int((ids == model.config.video_token_id).nonzero()[0])
    stock = model.model.get_video_features(inputs["pixel_values_videos"]).pooler_output
    rows = torch.cat([each.reshape(-1, 192) for each in stock])  # 288 patches and a newline
    if len(rows) == 288:  # the forward of transformers 5.17 appends the newline
        rows = torch.cat([rows, model.model.image_newline[None]])
    out = base.load(path)(rows[:288].view(8, 36, 192))
    words = model.get_input_embeddings()(ids)
    hidden = torch.cat([words[:first], out.vectors.flatten(0, 1), rows[288:], words[first + 289 :]])
    kept = (out.place + 36 * torch.arange(8)[:, None]).flatten()
    behind = torch.arange(first + 288, len(ids))
    return hidden[None], torch.cat([torch.arange(first), first + kept, behind])[None]
