"""The router: against loops, row by row in models, its files, its recipe and what it is worth."""

from __future__ import annotations

import json
import math
from pathlib import Path

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
from mmfast.rankers import file_of, route
from mmfast.rankers.route import BudgetRouter, way_of
from mmfast.streams.frontend import StreamReducer
from mmfast.tiny import router as recipe
from mmfast.tiny import training
from mmfast.vllm.plan import parse_plan

WAYS = ("uniform:2", "divprune:4", "all")
EMBEDDED = Path(__file__).parents[2] / "assets" / "models" / "tiny-video"


def make(width: int = 32, seed: int = 0, ways: tuple[str, ...] = WAYS) -> BudgetRouter:
    torch.manual_seed(seed)
    made = BudgetRouter(width, ways, inner=24)
    for weight in made.parameters():
        torch.nn.init.normal_(weight, std=0.4)
    return made.eval().requires_grad_(False)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "router.safetensors"
    save(make(), path)
    return path


def odds(judge: BudgetRouter, question: Tensor) -> list[float]:
    """Log-odds of a question `[T, D]` by loops, in float64."""
    weights = {name: each.double().numpy() for name, each in judge.state_dict().items()}
    mean = sum(question.double().numpy()) / len(question)
    inside = oracle.linear(oracle.norm(mean, weights, "enter.0"), weights, "enter.1")
    act = np.array([0.5 * h * (1 + math.erf(h / math.sqrt(2))) for h in inside])
    return [float(each) for each in oracle.linear(act, weights, "leave")]


def way(judge: BudgetRouter, question: Tensor, sure: float) -> int:
    """The first way that is trusted, else the last."""
    for number, value in enumerate(odds(judge, question)):
        if 1 / (1 + math.exp(-value)) >= sure:
            return number
    return len(judge.config["ways"]) - 1


def questions(count: int, width: int = 32) -> Tensor:
    torch.manual_seed(3)
    return torch.randn(count, 5, width)


def test_it_goes_the_way_of_the_loops(weights: Path) -> None:
    judge, asked = make(), questions(40)
    with torch.no_grad():
        found = judge(asked.mean(1))
    known = torch.tensor([odds(judge, each) for each in asked])
    torch.testing.assert_close(found, known.float(), rtol=1e-4, atol=1e-5)
    for name in ("enter.0.weight", "enter.1.bias", "leave.weight"):  # planted faults
        other = make()
        dict(other.named_parameters())[name].mul_(1.2)
        assert not torch.allclose(other(asked.mean(1)), known.float(), 1e-4)
    x, seen = torch.randn(12, 32), set()
    for each in asked:
        number = way(judge, each, 0.6)
        tokens = mmfast.Tokens(x, query=each, grid=(3, 2, 2))
        found = mmfast.reduce(tokens, f"route?sure=0.6&path={weights}")
        alone = None if WAYS[number] == "all" else mmfast.reduce(tokens, WAYS[number])
        assert found.keep.tolist() == (list(range(12)) if alone is None else alone.keep.tolist())
        chance = [1 / (1 + math.exp(-value)) for value in odds(judge, each)]
        why = f"others at most {max(chance):.2f}" if number == 2 else f"{chance[number]:.2f}"
        assert found.note == f"{WAYS[number]} ({why} sure)"
        seen.add(number)
    assert seen == {0, 1, 2}


@pytest.mark.parametrize("sure", [0.0, 1.0])
def test_the_threshold_is_the_least_certainty(weights: Path, sure: float) -> None:
    tokens = mmfast.Tokens(torch.randn(12, 32), query=questions(1)[0])
    found = mmfast.reduce(tokens, f"route?sure={sure}&path={weights}")
    assert found.m == (2 if sure == 0.0 else 12)


@torch.no_grad()
def test_rows_of_a_batch_go_their_own_ways(tmp_path: Path) -> None:
    """A head that is sure of the first row alone; each row is then as under its way by itself."""
    this = tiny("llava")
    texts = ["a {image} what?", "some more {image} what?"]
    embed = this.model.get_input_embeddings()
    width = embed.weight.shape[1]
    picture = np.random.default_rng(0).integers(0, 255, (56, 112, 3), np.uint8)
    inputs = this.inputs(texts, images=[picture, picture])
    judge = make(width, ways=("uniform:2", "all"))
    path = tmp_path / "router.safetensors"
    save(judge, path)
    asked: list[Tensor] = []
    stock = BudgetRouter.choose

    def noted(self: BudgetRouter, question: Tensor, sure: float) -> tuple[Tensor, Tensor]:
        asked.append(question)
        return stock(self, question, sure)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BudgetRouter, "choose", noted)
        with attach(this.model, f"route?path={path}"):
            this.model(**inputs)
    chances = [float(judge(each).sigmoid()) for each in asked]
    assert len(chances) == 2 and abs(chances[0] - chances[1]) > 1e-4
    sure = sum(chances) / 2
    with attach(this.model, f"route?sure={sure}&path={path}") as trace:
        this.model(**inputs)
    kept = [reduction.m for _, _, reduction in trace.reductions]
    easy = chances.index(max(chances))
    assert kept[easy] == 2 and kept[1 - easy] == trace.reductions[0][2].n > 2
    ways = ["uniform:2" if row == easy else "all" for row in (0, 1)]
    assert [note.split(" (")[0] for note in trace.notes] == [
        f"route, item {row}: {ways[row]}" for row in (0, 1)
    ]
    alone = this.inputs([texts[easy]], images=[picture])
    with attach(this.model, "uniform:2"):
        expected = this.model(**alone).logits
    with attach(this.model, f"route?sure={sure}&path={path}"):
        assert torch.equal(this.model(**alone).logits, expected)


def test_where_it_cannot_act_it_is_refused(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build("llava_onevision").model
    with pytest.raises(ModelError, match=r"rankers.train --ranker route.*file: route.path=FILE"):
        check(parse("route"), model)
    with pytest.raises(SpecError, match=r"takes no budget.*write 'route'"):
        parse("route:0.25")
    with pytest.raises(SpecError, match="cannot run at site 'llm2'"):
        parse("route@llm2")
    with pytest.raises(SpecError, match=r"a request must not.*write 'route'"):
        refuse_files(parse(f"route?path={weights}"))
    with pytest.raises(SpecError, match="looks at the question"):
        parse_plan("route")
    with pytest.raises(SpecError, match="cannot reduce a stream"):
        StreamReducer(f"route?path={weights}")
    tokens = mmfast.Tokens(torch.randn(12, 32), query=questions(1)[0])
    with pytest.raises(SpecError, match=r"sure=1.5"):
        mmfast.reduce(tokens, f"route?sure=1.5&path={weights}")
    with pytest.raises(ModelError, match="width 32, and these have 16"):
        small = mmfast.Tokens(torch.randn(12, 16), query=questions(1, 16)[0])
        mmfast.reduce(small, f"route?path={weights}")
    for text in ("visionzip:0.25", "fastv@llm2:0.5", "divprune:8+uniform:4", "route"):
        with pytest.raises(SpecError, match="no way for a router"):
            way_of(text)
    with pytest.raises(SpecError, match="two ways or more"):
        BudgetRouter(32, ("all",))
    (tmp_path / "rankers").mkdir()
    weights.rename(file_of(tmp_path, "route"))
    monkeypatch.setattr(model, "name_or_path", str(tmp_path))
    (spec,) = check(parse("route"), model)
    assert spec.knobs["path"] == str(file_of(tmp_path, "route"))


def lessons(n: int = 400, seed: int = 0) -> recipe.RouteLessons:
    """Questions that are easy where a direction of their embedding says so, 9 times in 10."""
    rng = torch.Generator().manual_seed(seed)
    question = torch.randn(n, 16, generator=rng)
    likely = torch.rand(n, generator=rng) < 0.9
    same = torch.stack([(question[:, 2] > 0) == likely, torch.ones(n, dtype=torch.bool)], 1)
    tokens = torch.tensor([4, 64]).expand(n, 2)
    return recipe.RouteLessons(question, same, same, same[:, 1], tokens)


def test_sixty_steps_teach_which_questions_are_easy(tmp_path: Path) -> None:
    text = ["--out", str(tmp_path), "--steps", "60", "--rate", "5e-3", "--ways", "uniform:4"]
    options = recipe.arguments([*text, "uniform:64"])
    log = training.Log(tmp_path / "rankers")
    judge = recipe.train_one(options, log, lessons())
    rows = {
        row["stage"]: row
        for row in map(json.loads, (tmp_path / "rankers/training.jsonl").read_text().splitlines())
    }
    assert rows["held-out"]["loss"] < 0.8 * rows["held-out"]["blind"]
    assert route.load(file_of(tmp_path, "route")).config["ways"] == ["uniform:4", "uniform:64"]
    figures = {row["way"]: row for row in recipe.examine(judge, lessons(seed=1))}
    routed = figures["route?sure=0.7"]
    assert routed["gain_interval"][0] > 0.05 and 20 < routed["tokens"] < 50
    assert routed["right"] > figures["always uniform:4"]["right"] + 0.2
    other = lessons(seed=1)  # a planted fault: answers of other questions
    other = recipe.RouteLessons(**{**vars(other), "right": other.right.roll(1, 0)})
    blind = {row["way"]: row for row in recipe.examine(judge, other)}["route?sure=0.7"]
    assert blind["gain_interval"][0] < 0.02


def test_the_gain_is_over_a_draw_of_the_same_frequencies() -> None:
    rng = np.random.default_rng(0)
    ways, right = rng.integers(0, 3, 30), rng.random((30, 3)) < 0.6
    known = []
    for row in range(30):
        chance = sum(right[row, w] for w in ways) / 30
        known.append(float(right[row, ways[row]]) - chance)
    found = recipe.gain(torch.from_numpy(ways), torch.from_numpy(right))
    np.testing.assert_allclose(found.numpy(), known, atol=1e-6)
    same = torch.from_numpy(right[:, :1]).expand(30, 3)  # all ways alike: nothing to win
    assert recipe.gain(torch.from_numpy(ways), same).abs().max() < 1e-6
    low, high = recipe.gain_interval(torch.from_numpy(ways), torch.from_numpy(right))
    assert low < np.mean(known) < high and high - low < 0.5


@pytest.mark.parametrize(
    "text", ["--ways divprune:8", "--ways none:8 all", "--ranker top", "--exam 1"]
)
def test_wrong_arguments_are_refused(text: str) -> None:
    with pytest.raises(SystemExit):
        recipe.arguments(text.split())


@pytest.mark.slow
def test_with_its_weights_questions_go_their_own_ways_everywhere() -> None:
    """The pipeline, a batch and the server agree; colours are read off few tokens."""
    from scheduling import answers, ask

    from mmfast.frontends.video.reader import read_video
    from mmfast.models.prompt import Shot
    from mmfast.serve.engine.base import Finish, Media
    from mmfast.serve.engine.scheduler import Scheduler

    clip = EMBEDDED.parents[1] / "clips" / "red-circle.mp4"
    asked = [
        "Which colour is the circle?",
        "Which appears first, the red circle or the white cross?",
    ]
    pipe = mmfast.pipeline("video-qa", "tiny-video", reduce="route", batch_size=2)
    found = pipe([str(clip)] * 2, asked)
    alone = [pipe(str(clip), question) for question in asked]
    assert [each.text for each in found] == [each.text for each in alone]
    assert found[0].kept_tokens < found[1].kept_tokens
    assert [each.kept_tokens for each in found] == [each.kept_tokens for each in alone]
    notes = [note for note in found[0].trace.notes if note.startswith("route, ")]
    assert len(notes) == 2 and notes[0].startswith("route, item 0: divprune:8 (")
    assert (
        mmfast.pipeline("video-qa", "tiny-video", reduce="route?sure=1.0")(
            str(clip), asked[0]
        ).kept_tokens
        == 288
    )
    video = read_video(str(clip), frames=8)
    media = Media(Shot("video", video.frames, video.metadata()), "red-circle")
    engine = Scheduler((pipe.model, pipe.processor), chunk=512, memory="200MB")
    try:
        requests = [ask(str(i), media, q, tokens=8, reduce="route") for i, q in enumerate(asked)]
        served = answers(engine, requests)
    finally:
        engine.close()
    for (text, end), known in zip(served, alone, strict=True):
        assert isinstance(end, Finish) and text.strip() == known.text
        assert end.trace["kept_tokens"] == known.kept_tokens
        assert [note.split(": ")[1] for note in end.trace["notes"]] == [
            note.split(": ")[1] for note in known.trace.notes if note.startswith("route, ")
        ]
