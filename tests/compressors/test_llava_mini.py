"""Pre-fusion of text and a square of queries: the oracle, padding, gradients, files, training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import oracles_compressors as oracle
import pytest
import torch
from clip_lessons import clip_lessons
from torch import Tensor

import mmfast
from mmfast import ModelError, SpecError
from mmfast.compressors import base, llava_mini
from mmfast.compressors.llava_mini import LlavaMini
from mmfast.core.reduction import Reduction
from mmfast.models.loading import embedded_path, load
from mmfast.tiny import training
from mmfast.tiny.video import compressors as recipe
from mmfast.tiny.video.lessons import answer_loss
from mmfast.vllm.plan import parse_plan

GRID = (3, 4)


def make(tokens: int = 1, fresh: bool = False) -> LlavaMini:
    torch.manual_seed(tokens)
    made = LlavaMini(16, tokens, GRID, inner=12, heads=3)
    if not fresh:  # weights that start at zero, at one or without content
        torch.nn.init.normal_(made.fuse.weight, std=0.3)
        torch.nn.init.normal_(made.learned)
        for layer in (made.choose, made.offer):
            torch.nn.init.normal_(layer.weight, std=0.5)
        for name, each in made.named_parameters():
            if each.ndim == 1:
                torch.nn.init.uniform_(each, 0.5, 1.5)
            elif "layers" in name:
                each.data.mul_(2)
    return made.double().eval().requires_grad_(False)


def features(*lead: int, frames: int = 3) -> Tensor:
    torch.manual_seed(7)
    return torch.randn(*lead, frames, 12, 16, dtype=torch.float64)


def words(*lead: int, length: int = 5) -> Tensor:
    torch.manual_seed(8)
    return torch.randn(*lead, length, 16, dtype=torch.float64)


@pytest.mark.parametrize("tokens", [1, 4, 9])
def test_oracle(tokens: int) -> None:
    made, x, text = make(tokens), features(), words()
    out = made(x, text)
    weights = {name: each.numpy() for name, each in made.state_dict().items()}
    vectors, change = oracle.llava_mini(weights, made.config, x.numpy(), text.numpy())
    # The sines of positions have the precision of a float32.
    torch.testing.assert_close(out.vectors, torch.from_numpy(vectors), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(out.text, torch.from_numpy(change), rtol=1e-5, atol=1e-6)
    assert float(out.text.abs().max()) > 0.1
    for name, each in made.named_parameters():
        before = each.clone()
        each.add_(0.1 * torch.randn_like(each))
        other = made(x, text)
        parts = (other.vectors - out.vectors).abs().max(), (other.text - out.text).abs().max()
        each.copy_(before)
        fuses = name.split(".")[0] in ("read", "layers", "behind", "fuse")
        assert parts[fuses] > 1e-5 and parts[not fuses] == 0, name


def test_vectors_stand_in_the_middle_of_their_cells() -> None:
    out = make(4)(features(), words())
    assert out.place.tolist() == [[0, 2, 4, 6]] * 3
    assert out.owner[0].view(GRID).tolist() == [[0, 0, 1, 1], [2, 2, 3, 3], [2, 2, 3, 3]]


@pytest.mark.parametrize("tokens", [1, 4])
def test_untrained_the_text_stays_and_queries_see_their_own_part_most(tokens: int) -> None:
    made, x = make(tokens, fresh=True), features()
    assert torch.equal(words() + made(x, words()).text, words())
    with torch.no_grad():  # the content of patches and queries away, positions alone count
        made.enter[1].weight.zero_()
        made.learned.zero_()
    eye = torch.eye(12, 16, dtype=torch.float64)  # of each patch its share
    shares = made(eye[None], words()).vectors[0, :, :12]
    torch.testing.assert_close(shares.sum(-1), torch.ones(tokens, dtype=torch.float64))
    assert tokens == 1 or made.cell[shares.argmax(-1)].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_ragged_batch_is_its_rows(side: str) -> None:
    made, x, lengths = make(4), features(3), (5, 2, 4)
    text, known = words(3), torch.zeros(3, 5, dtype=torch.bool)
    for row, length in enumerate(lengths):
        known[row, 5 - length :] = True
    known = known if side == "left" else known.flip(-1)
    together = made(x, text, known)
    for row in range(3):
        one = made(x[row], text[row, known[row]])
        torch.testing.assert_close(together.vectors[row], one.vectors)
        torch.testing.assert_close(together.text[row, known[row]], one.text)
    assert not together.text[~known].any()
    noise = torch.where(known[..., None], text, 100 * torch.randn_like(text))
    torch.testing.assert_close(made(x, noise, known).text, together.text)


def test_several_questions_share_the_patches() -> None:
    made, x, text = make(), features(2), words(2, 3)
    together = made(x[:, None], text)
    for row in range(2):
        for question in range(3):
            one = made(x[row], text[row, question])
            torch.testing.assert_close(together.text[row, question], one.text)
            torch.testing.assert_close(together.vectors[row, 0], one.vectors)


def test_text_reads_every_patch_and_what_is_before_it() -> None:
    made, x, text = make(), features(), words()
    before = made(x, text).text
    other = text.clone()
    other[3] += 1
    changed = (made(x, other).text - before).abs().amax(-1)
    assert (changed[:3] == 0).all() and (changed[3:] > 1e-6).all()
    for frame, patch in ((0, 0), (2, 11)):
        moved = x.clone()
        moved[frame, patch] += 1
        assert ((made(moved, text).text - before).abs().amax(-1) > 1e-6).all()
    apart = torch.stack([made(x[n : n + 1], text).text for n in range(3)])
    torch.testing.assert_close(before, apart.mean(0))


def test_gradients_reach_everything() -> None:
    made = make(4).requires_grad_(True)
    x, text = features().requires_grad_(), words().requires_grad_()
    out = made(x, text)
    torch.manual_seed(1)
    total = (out.vectors * torch.randn_like(out.vectors)).sum()
    total = total + (out.text * torch.randn_like(out.text)).sum()
    total.backward()
    for name, each in (*made.named_parameters(), ("x", x), ("text", text)):
        assert each.grad is not None and (each.grad.abs().amax(-1) > 0).all(), name
    fresh = make(fresh=True).requires_grad_(True)
    fresh(x, text).text.square().add(1).log().sum().backward()
    assert fresh.fuse.weight.grad is not None  # and zero: the square of zero is flat
    fresh(x, text).text.sum().backward()
    assert (fresh.fuse.weight.grad.abs() > 0).all()


def test_files_and_specs(tmp_path: Path) -> None:
    made, x, text = make(4).float(), features().float(), words().float()
    base.save(made, path := base.file_of(tmp_path, "llava_mini", 4))
    again = base.load(path)
    assert again.config == made.config
    assert torch.equal(again(x, text).text, made(x, text).text)
    assert base.find(tmp_path, "llava_mini", 4) == path
    tokens = mmfast.Tokens(x.flatten(0, 1), grid=(3, *GRID), query=text)
    found = mmfast.reduce(tokens, f"llava_mini:4?path={path}")
    assert isinstance(found, Reduction) and found.m == 12 and found.text is not None
    found.check()
    assert torch.equal(found.apply(tokens.x), made(x, text).vectors.flatten(0, 1))
    assert torch.equal(found.text, made(x, text).text)
    after = mmfast.reduce(tokens, f"llava_mini:4?path={path}+divprune:5")
    assert isinstance(after, Reduction) and after.m == 5 and after.text is not None
    assert torch.equal(after.text, found.text)
    both = found.then(Reduction(*(torch.arange(12),) * 2, text=found.text))
    assert both.text is not None and torch.equal(both.text, 2 * found.text)
    assert torch.equal(Reduction.identity(36).then(found).text, found.text)


def test_what_does_not_fit_is_refused_in_one_line(tmp_path: Path) -> None:
    wrong = recipe.arguments(["--compressor", "llava_mini", "--tokens", "1", "3"])
    cases: list[tuple[Any, str]] = [
        (lambda: LlavaMini(16, 3, GRID), "write llava_mini:1 or llava_mini:4"),
        (lambda: LlavaMini(16, 0, GRID), "write llava_mini:1 or llava_mini:1"),
        (lambda: LlavaMini(16, 16, GRID), "4 x 4 queries over a frame of 3 x 4"),
        (lambda: LlavaMini(16, 4, (2, 2)), "choose a square of less"),
        (lambda: base.find(tmp_path, "llava_mini", 5), "write llava_mini:4 or llava_mini:9"),
        (lambda: base.find(tmp_path, "llava_mini", 4), "--compressor llava_mini --tokens 4"),
        (lambda: make()(features()), "give its embeddings"),
        (lambda: recipe.run(wrong, training.Log(tmp_path)), "llava_mini:3 is no square"),
    ]
    base.save(make(4), path := tmp_path / "four.safetensors")
    narrow = mmfast.Tokens(features().flatten(0, 1), grid=(3, 4, 3), query=words())
    cases.append((lambda: mmfast.reduce(narrow, f"llava_mini:4?path={path}"), "meets frames of"))
    for act, reason in cases:
        with pytest.raises(ModelError) as caught:
            act()
        assert reason in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(SpecError, match="looks at the question"):
        parse_plan(f"llava_mini:4?path={path}")
    with pytest.raises(SpecError, match="cannot reduce a stream"):
        mmfast.pipeline("video-stream", reduce=f"llava_mini:4?path={path}").open()


@pytest.mark.parametrize("steps, share", [(5, 0.8), pytest.param(50, 0.7, marks=pytest.mark.slow)])
def test_steps_lower_the_loss(steps: int, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe, "CLIPS", 2)
    model, processor = load(embedded_path("tiny-video"), "cpu", "float32")
    clips = clip_lessons(model, processor, 4)
    torch.manual_seed(0)
    made = LlavaMini(192, 1, (6, 6), inner=24, heads=3)
    task = recipe.CompressorTask(model, made, clips, 0, held=2, questions=2)
    (lesson,) = task.batches(0, 0.0)
    packed = recipe.alone(lesson)
    before = {name: each.clone() for name, each in made.named_parameters()}

    @torch.no_grad()
    def loss() -> float:
        states, _ = recipe.respond(model, made, lesson.tokens, packed)
        return float(answer_loss(model, states, packed.labels))

    first, fused = loss(), llava_mini.LlavaMini.fused
    for _ in range(steps):
        training.update(task, [lesson], 1.0)
    last = loss()
    assert last < share * first
    for name, each in made.named_parameters():
        assert not torch.equal(each, before[name]), name
    with monkeypatch.context() as patch:  # what was learned is in the text, too
        patch.setattr(LlavaMini, "fused", lambda *args: 0 * fused(*args))
        assert loss() > 1.05 * last
    assert 0 <= task.look()["mean"] <= 1
