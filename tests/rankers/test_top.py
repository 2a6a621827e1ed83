"""ToP's learned ranking: head and loss against oracles, lessons of stock models, files, use."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import oracles_compressors as oracle
import pytest
import torch
from safetensors.torch import save_file
from tiny_models import FAMILIES, build, tiny
from torch import Tensor

import mmfast
from mmfast import ModelError, SpecError
from mmfast.attach import attach
from mmfast.compressors.base import save
from mmfast.core.registry import get
from mmfast.core.spec import parse
from mmfast.models.reduction.check import check, refuse_files
from mmfast.rankers import file_of, top
from mmfast.rankers.top import RankHead
from mmfast.tiny import rankers as recipe
from mmfast.tiny import training
from mmfast.vllm.plan import parse_plan

LAYER = 2


def make(width: int = 32, layer: int = LAYER, seed: int = 0) -> RankHead:
    torch.manual_seed(seed)
    made = RankHead(width, layer, inner=24, heads=3)
    for weight in made.parameters():
        torch.nn.init.normal_(weight, std=0.5)
    return made.eval().requires_grad_(False)


def judged(head: RankHead, x: Tensor, last: Tensor) -> list[float]:
    """Scores by a loop over tokens and heads."""
    weights = {name: each.double().numpy() for name, each in head.state_dict().items()}
    heads, inner = head.config["heads"], head.config["inner"]
    size = inner // heads
    query = oracle.linear(oracle.norm(last.double().numpy(), weights, "asked"), weights, "query")
    scores = []
    for token in x.double().numpy():
        seen = oracle.norm(token, weights, "seen")
        key, own = oracle.linear(seen, weights, "key"), oracle.linear(seen, weights, "own")
        total = 0.0
        for h in range(heads):
            part = slice(h * size, (h + 1) * size)
            total += math.exp(float(query[part] @ key[part]) / math.sqrt(size) + float(own[h]))
        scores.append(math.log(total / heads))
    return scores


def best(scores: list[float], count: int) -> list[int]:
    return sorted(sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:count])


def judged_loss(score: list[float], target: list[float]) -> float:
    """LambdaRank by a loop over pairs, each of which is exchanged and the gain counted anew."""
    n, total = len(score), sum(target)
    order = sorted(range(n), key=lambda i: (-score[i], i))

    def gained(order: list[int]) -> float:
        return sum(target[i] / total / math.log2(at + 2) for at, i in enumerate(order))

    ideal = gained(sorted(range(n), key=lambda i: -target[i]))
    loss = 0.0
    for i in range(n):
        for j in range(n):
            if target[i] > target[j]:
                other = list(order)
                a, b = other.index(i), other.index(j)
                other[a], other[b] = j, i
                change = abs(gained(other) - gained(order)) / ideal
                loss += change * math.log(1 + math.exp(score[j] - score[i]))
    return loss


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "top-2.safetensors"
    save(make(), path)
    return path


def states(*lead: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(5)
    return torch.randn(*lead, 11, 32), torch.randn(*lead, 4, 32)


def test_head_against_a_loop() -> None:
    x, text = states()
    head = make().double()
    found = head(x.double(), text[-1].double())
    np.testing.assert_allclose(found.numpy(), judged(head, x, text[-1]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "name", ["seen.weight", "asked.bias", "query.weight", "key.weight", "key.bias", "own.weight"]
)
def test_the_oracle_sees_every_part(name: str) -> None:
    x, text = states()
    head = make()
    scores = judged(head, x, text[-1])
    dict(head.named_parameters())[name].mul_(1.1)
    assert not np.allclose(head(x, text[-1]).numpy(), scores, rtol=1e-4, atol=1e-4)


def test_reducer_keeps_the_best_of_the_head_and_asks_the_last_word(weights: Path) -> None:
    x, text = states()
    found = mmfast.reduce(mmfast.Tokens(x, query=text), f"top@llm2:4?path={weights}")
    assert not isinstance(found, list)
    assert found.keep.tolist() == best(judged(make(), x, text[-1]), 4)
    first = best(judged(make(), x, text[0]), 4)  # a planted fault: the wrong word is asked
    assert found.keep.tolist() != first


def test_rows_of_a_batch_are_those_of_one_by_one(weights: Path) -> None:
    x, text = states(3)
    spec = f"top@llm2:4?path={weights}"
    together = mmfast.reduce(mmfast.Tokens(x, query=text), spec)
    assert not isinstance(together, list)
    for row in range(3):
        one = mmfast.reduce(mmfast.Tokens(x[row], query=text[row]), spec)
        assert not isinstance(one, list) and torch.equal(one.keep, together.keep[row])


@pytest.mark.parametrize("n", [1, 2, 3, 9])
def test_loss_against_exchanged_pairs(n: int) -> None:
    torch.manual_seed(n)
    score, target = torch.randn(n, dtype=torch.float64), torch.rand(n, dtype=torch.float64)
    found = float(recipe.lambda_loss(score, target))
    assert found == pytest.approx(judged_loss(score.tolist(), target.tolist()), rel=1e-9)
    if n > 2:  # planted faults: the order turned round, and pairs that all count alike
        assert found != pytest.approx(judged_loss((-score).tolist(), target.tolist()), rel=1e-3)
        plain = sum(
            math.log(1 + math.exp(float(score[j] - score[i])))
            for i in range(n)
            for j in range(n)
            if target[i] > target[j]
        )
        assert found != pytest.approx(plain, rel=1e-3)


def test_loss_is_less_in_the_right_order_and_equal_tokens_cost_nothing() -> None:
    target = torch.tensor([0.5, 0.3, 0.15, 0.05])
    right = torch.tensor([3.0, 2.0, 1.0, 0.0])
    assert recipe.lambda_loss(right, target) < recipe.lambda_loss(right.flip(0), target)
    assert float(recipe.lambda_loss(right, torch.full((4,), 0.25))) == 0.0
    assert float(recipe.lambda_loss(right, torch.zeros(4))) == 0.0


def test_figures_by_hand() -> None:
    target = torch.tensor([0.4, 0.1, 0.3, 0.2])
    assert recipe.correlation(target, target) == pytest.approx(1.0)
    assert recipe.correlation(-target, target) == pytest.approx(-1.0)
    assert recipe.captured(target, target, 0.5) == pytest.approx(1.0)
    assert recipe.captured(-target, target, 0.5) == pytest.approx(0.3 / 0.7)


def prompt(this: Any, words: tuple[str, ...]) -> Any:
    """A clip and a question for each text, padded on the left."""
    return this.inputs(
        [f"{text} {{video}} what?" for text in words], videos=this.videos(len(words))
    )


def places_of(this: Any, ids: Tensor) -> Tensor:
    """Places of the tokens of the clip in one row, without the separator at the end."""
    found = (ids == this.model.config.video_token_id).nonzero()[:, 0]
    return found[:-1] if this.family == "llava_onevision" else found


@torch.no_grad()
def stock(family: str, inputs: Any) -> tuple[list[Tensor], list[Tensor]]:
    """What enters each layer, and its attention weights, in the stock eager model.

    `output_hidden_states` would be what leaves the layer before, without DeepStack planes.
    """
    model, entered = tiny(family, "eager").model, list[Tensor]()

    def note(_: Any, args: Any, kwargs: Any) -> None:
        entered.append(args[0] if args else kwargs["hidden_states"])

    layers = model.model.language_model.layers
    handles = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in layers]
    try:
        out = model(**inputs, output_attentions=True)
    finally:
        for handle in handles:
            handle.remove()
    return entered, list(out.attentions)


@pytest.mark.parametrize("family", FAMILIES)
def test_lessons_are_what_the_stock_model_sees_and_attends_to(family: str) -> None:
    this = tiny(family)
    inputs = prompt(this, ("a", "some more"))
    found = recipe.observe(this.model, inputs, [1, LAYER])
    hidden, attention = stock(family, inputs)
    for layer, lessons in found.items():
        assert len(lessons) == 2
        for row, lesson in enumerate(lessons):
            at = places_of(this, inputs["input_ids"][row])
            close = {"rtol": 1e-4, "atol": 1e-5}
            torch.testing.assert_close(lesson.x, hidden[layer][row, at], **close)
            torch.testing.assert_close(lesson.last, hidden[layer][row, -1], **close)
            target = attention[-1][row, :, -1].mean(0)[at]
            torch.testing.assert_close(lesson.target, target, **close)
            # a planted fault: another layer is not the final one
            assert not torch.allclose(
                lesson.target, attention[-2][row, :, -1].mean(0)[at], atol=1e-3
            )
    with torch.no_grad():
        assert torch.equal(this.model(**inputs).logits, this.model(**inputs).logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_in_a_model_the_kept_tokens_are_the_oracles_and_a_batch_is_its_rows(
    family: str, weights: Path
) -> None:
    this, spec = tiny(family), f"top@llm2:5?path={weights}"
    texts = ("a", "some more")
    inputs = prompt(this, texts)
    hidden, _ = stock(family, inputs)
    with torch.no_grad(), attach(this.model, spec) as trace:
        together = this.model(**inputs).logits[:, -1]
    kept = [reduction.keep.tolist() for _, _, reduction in trace.reductions]
    for row in range(2):
        at = places_of(this, inputs["input_ids"][row])
        scores = judged(make(), hidden[LAYER][row, at], hidden[LAYER][row, -1])
        assert kept[row] == best(scores, 5)
    clips = this.videos(2)
    for row, text in enumerate(texts):
        one = this.inputs([f"{text} {{video}} what?"], videos=clips[row : row + 1])
        with torch.no_grad(), attach(this.model, spec):
            alone = this.model(**one).logits[0, -1]
        torch.testing.assert_close(together[row], alone, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_share_of_one_is_the_stock_model_and_needs_no_weights(family: str) -> None:
    this = tiny(family)
    inputs = prompt(this, ("a",))
    with torch.no_grad():
        expected = this.model(**inputs).logits
        with attach(this.model, "top:1.0"):
            assert torch.equal(this.model(**inputs).logits, expected)


def test_files_round_trip(tmp_path: Path) -> None:
    head, x = make(), states()[0]
    path = file_of(tmp_path, "top", LAYER)
    save(head, path)
    again = top.load(path)
    assert again.config == head.config and path == tmp_path / "rankers" / "top-2.safetensors"
    assert torch.equal(again(x, x[0]), head(x, x[0]))
    save(head, path, torch.float16)
    assert path.stat().st_size < 12_000
    torch.testing.assert_close(top.load(path)(x, x[0]), head(x, x[0]), rtol=0.05, atol=0.05)


def test_without_weights_one_line_names_the_command(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build("qwen2_5_vl").model
    bad = tmp_path / "bad.safetensors"
    save_file({"x": torch.zeros(1)}, bad, {"compressor": json.dumps({"name": "storm"})})
    wrong = {
        "top:0.25": "python -m mmfast.rankers.train --layers 2",
        f"top@llm3:0.25?path={weights}": "head of layer 2, not of 3",
        f"top@llm2:0.25?path={tmp_path}/none": "no file",
        f"top:0.25?path={bad}": "cannot be read",
    }
    for spec, words in wrong.items():
        with pytest.raises(ModelError) as caught:
            attach(model, spec)
        assert words in str(caught.value) and "\n" not in str(caught.value)
    (tmp_path / "rankers").mkdir()
    weights.rename(tmp_path / "rankers" / weights.name)
    monkeypatch.setattr(model, "name_or_path", str(tmp_path))
    (spec,) = check(parse("top:0.25"), model)
    assert spec.knobs["path"] == str(tmp_path / "rankers" / weights.name)
    with pytest.raises(ModelError, match="heads of layers 2"):
        check(parse("top@llm3:0.25"), model)


def test_where_it_cannot_act_it_is_refused(weights: Path) -> None:
    spec = f"top@llm2:4?path={weights}"
    with pytest.raises(SpecError, match="a request must not"):
        refuse_files(parse(spec))
    with pytest.raises(SpecError, match="vLLM"):
        parse_plan("top:0.25")
    with pytest.raises(SpecError, match="cannot run at site 'pre'"):
        parse("top@pre:0.25")
    with pytest.raises(ModelError, match="is no file"):
        mmfast.reduce(mmfast.Tokens(states()[0], query=states()[1]), "top:4")
    with pytest.raises(ModelError, match="width 32, and these have 16"):
        mmfast.reduce(mmfast.Tokens(states()[0][:, :16], query=states()[1][:, :16]), spec)
    assert get("top").kind == "ranker"


def test_fifty_steps_teach_the_final_layers_order() -> None:
    this = tiny("qwen2_5_vl")
    inputs = [prompt(this, ("a", "some more")), prompt(this, ("which", "how"))]
    lessons = recipe.gather(this.model, inputs, [LAYER])[LAYER]
    torch.manual_seed(0)
    head = RankHead(32, LAYER, inner=24, heads=3)
    task = recipe.RankTask(head, lessons, lessons, 0, 3e-3)
    before = task.look()
    frozen = {name: each.clone() for name, each in this.model.state_dict().items()}
    for step in range(50):
        training.update(task, task.batches(step, step / 50), 1.0)
    after = task.look()
    assert after["loss"] < 0.8 * before["loss"]
    assert after["correlation"] > before["correlation"] + 0.2
    assert after["captured@0.25"] > before["captured@0.25"]
    assert all(torch.equal(each, frozen[name]) for name, each in this.model.state_dict().items())


def test_a_run_leaves_a_file_and_a_log(tmp_path: Path) -> None:
    options = recipe.arguments(["--out", str(tmp_path), "--steps", "2"])
    torch.manual_seed(2)
    lessons = [
        recipe.RankLesson(torch.randn(9, 8 * 6), torch.randn(48), torch.rand(9)) for _ in range(4)
    ]
    log = training.Log(tmp_path / "rankers")
    recipe.train_head(options, log, LAYER, lessons)
    assert top.load(file_of(tmp_path, "top", LAYER)).config["width"] == 48
    rows = [json.loads(line) for line in log.path.read_text().splitlines()]
    assert [row["stage"] for row in rows] == ["untrained", "top-2", "held-out", "saved"]


@pytest.mark.parametrize(
    "text", ["--prompts 1", "--layers none", "--layer-s 2 --x 1", "--rate 0", "--rate 9"]
)
def test_wrong_arguments_are_refused(text: str) -> None:
    with pytest.raises(SystemExit):
        recipe.arguments(text.split())
