"""The guard for images: its verdicts against a slow rule, the shared tower, and what it does."""

from __future__ import annotations

import asyncio
import copy
import io
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from cli_runs import run
from guard_clips import save_clip
from PIL import Image
from tiny_base import Shape
from tiny_clip import vision_config
from tiny_models import build, tiny
from transformers import AutoProcessor, CLIPModel

from mmfast import ImageGuard, MediaError, MmfastError, ModelError, pipeline
from mmfast.core.trace import Trace
from mmfast.models.image_guard import SceneJudge, judge_of, read_guard
from mmfast.models.prompt import Shot
from mmfast.serve.config import ServerConfig
from mmfast.serve.guard.errors import ApiError
from mmfast.serve.guard.media import load_media

SCENES = {
    "neutral": ["a field", "a house"],
    "fire": ["flames"],
    "flood": ["water", "rain", "a dam"],
}
VISION = {k: v for k, v in vision_config(Shape()).items() if k != "model_type"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CLIP of random weights."""
    path = tmp_path_factory.mktemp("guard")
    save_clip(path, VISION, seed=1)
    return path


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CLIP whose vision side is the tower of the tiny LLaVA."""
    path = tmp_path_factory.mktemp("shared")
    model = save_clip(path, VISION)
    model.vision_model.load_state_dict(build("llava").model.base_model.vision_tower.state_dict())
    model.save_pretrained(path)
    return path


def pictures(count: int = 8) -> list[Any]:
    """Pictures of a few coloured squares each, which are less alike than noise."""
    rng = np.random.default_rng(3)
    cells = [rng.integers(0, 256, (5, 7, 3), dtype=np.uint8) for _ in range(count)]
    return [each.repeat(8, 0).repeat(8, 1) for each in cells]


def slow(model: Any, folder: Path, picture: Any, scenes: Any) -> tuple[str, float]:
    """The rule in words: of each scene the mean share of its texts in the softmax of all."""
    processor = AutoProcessor.from_pretrained(folder)
    logits = []
    for texts in scenes.values():
        mine = []
        for text in texts:
            # SigLIP was trained on padded texts
            padding = "max_length" if "siglip" in model.config.model_type else False
            image = Image.fromarray(picture)
            inputs = processor(text=[text], images=image, return_tensors="pt", padding=padding)
            with torch.no_grad():
                out = model(**inputs)
            image_embeds, text_embeds = out.image_embeds[0].double(), out.text_embeds[0].double()
            cosine = float(image_embeds @ text_embeds / image_embeds.norm() / text_embeds.norm())
            mine.append(math.exp(cosine * math.exp(float(model.logit_scale))))
        logits.append(mine)
    whole = sum(map(sum, logits))
    means = [sum(mine) / whole / len(mine) for mine in logits]
    best = max(range(len(means)), key=means.__getitem__)
    return list(scenes)[best], means[best] / sum(means)


@pytest.mark.parametrize(("kind", "seed"), [("clip", 1), ("siglip", 5)])
def test_verdicts_follow_the_slow_rule(tmp_path: Path, kind: str, seed: int) -> None:
    model = save_clip(tmp_path, VISION, seed=seed, kind=kind)
    found = SceneJudge(ImageGuard(str(tmp_path), SCENES), "cpu").judge(pictures())
    for picture, verdict in zip(pictures(), found, strict=True):
        scene, chance = slow(model, tmp_path, picture, SCENES)
        assert verdict.scene == scene and verdict.chance == pytest.approx(chance, abs=2e-3)
        assert verdict.harmful == (scene != "neutral")
    assert len({each.scene for each in found}) > 1


def test_the_least_probability_of_a_harmful_scene(folder: Path) -> None:
    plain = SceneJudge(ImageGuard(str(folder), SCENES), "cpu").judge(pictures())
    chances = sorted(each.chance for each in plain if each.harmful)
    assert len(chances) > 1
    strict = SceneJudge(ImageGuard(str(folder), SCENES, least=chances[-1]), "cpu")
    assert [each.harmful for each in strict.judge(pictures())].count(True) == 1


def harmful_of(folder: Path) -> tuple[Any, Any]:
    """A picture that is refused, and one that passes."""
    found = SceneJudge(ImageGuard(str(folder), SCENES), "cpu").judge(pictures())
    bad = next(i for i, each in enumerate(found) if each.harmful)
    good = next(i for i, each in enumerate(found) if not each.harmful)
    return pictures()[bad], pictures()[good]


def pipe_of(folder: Path, **more: Any) -> Any:
    this = build("llava")
    this.processor.chat_template = CHAT
    guard = ImageGuard(str(folder), SCENES, action=more.pop("action", "block"))
    return pipeline("image-qa", (this.model, this.processor), guard=guard, max_new_tokens=2, **more)


CHAT = (
    "{% for m in messages %}{% for part in m['content'] %}{% if part['type'] == 'image' %}"
    "<|image_pad|>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize("which", ["folder", "shared"])
def test_a_harmful_picture_never_reaches_the_decoder(
    which: str, request: pytest.FixtureRequest
) -> None:
    path: Path = request.getfixturevalue(which)
    bad, good = harmful_of(path)
    pipe, runs = pipe_of(path), list[int]()
    assert pipe.guard.shared == (which == "shared")
    pipe.model.get_decoder().register_forward_pre_hook(lambda *_: runs.append(1))
    with pytest.raises(MediaError, match=r"looks like '(fire|flood)' \(\d+%\), which the guard"):
        pipe(bad, "what?")
    assert not runs
    answer = pipe(good, "what?")
    (row,) = [row for row in answer.trace.rows if row.stage == "guard"]
    assert runs and (row.tokens_in, row.tokens_out) == (1, 1)
    with pytest.raises(MediaError, match="medium 2 of 2 looks like"):
        pipe([good, bad], ["what?", "who?"], batch_size=2)


def test_a_shared_tower_judges_as_a_second_one_would_and_runs_once(shared: Path) -> None:
    second = SceneJudge(ImageGuard(str(shared), SCENES), "cpu").judge(pictures())
    pipe, seen, towers = pipe_of(shared, action="warn"), list[Any](), list[int]()
    judge = pipe.guard.verdicts
    pipe.guard.verdicts = lambda embeds: seen.extend(judge(embeds)) or judge(embeds)
    pipe.model.base_model.vision_tower.register_forward_hook(lambda *_: towers.append(1))
    with pytest.warns(UserWarning, match="guard: medium . of 8 looks like"):
        pipe(pictures(), ["what?"] * 8, batch_size=8)
    assert [each.scene for each in seen] == [each.scene for each in second]
    assert [each.chance for each in seen] == pytest.approx([e.chance for e in second], abs=1e-4)
    assert len(towers) == 1 and not hasattr(pipe.guard._clip, "vision_model")


def test_rows_that_beams_repeat_are_judged_once(shared: Path) -> None:
    judge, trace = SceneJudge(ImageGuard(str(shared), SCENES, least=1.0), "cpu"), Trace()
    rows = torch.randn(2, VISION["hidden_size"]).repeat_interleave(3, 0)
    judge.tower_seen(SimpleNamespace(pooler_output=rows), 2, trace)
    assert [row.tokens_in for row in trace.rows] == [2]
    _, good = harmful_of(shared)
    answer = pipe_of(shared)(good, "what?", num_beams=3)
    (row,) = [row for row in answer.trace.rows if row.stage == "guard"]
    assert row.tokens_in == 1


@pytest.mark.parametrize(
    "more", [{"reuse": "encoder"}, {"encoder": "fast"}, {"reduce": "tome@vit:0.5"}]
)
def test_a_tower_that_may_not_run_as_it_is_is_not_shared(shared: Path, more: Any) -> None:
    bad, good = harmful_of(shared)
    pipe = pipe_of(shared, **more)
    assert not pipe.guard.shared
    pipe(good, "what?")
    with pytest.raises(MediaError, match="the guard refuses"):
        pipe(bad, "what?")


def test_a_guard_that_warns_answers_and_notes_it(folder: Path) -> None:
    bad, _ = harmful_of(folder)
    with pytest.warns(UserWarning, match="guard: medium looks like"):
        answer = pipe_of(folder, action="warn")(bad, "what?")
    assert [note for note in answer.trace.notes if note.startswith("guard: medium looks like")]
    (row,) = [row for row in answer.trace.rows if row.stage == "guard"]
    assert (row.tokens_in, row.tokens_out) == (1, 0)


def test_a_clip_is_judged_by_its_worst_frame(folder: Path) -> None:
    bad, good = harmful_of(folder)
    judge = SceneJudge(ImageGuard(str(folder), SCENES), "cpu")
    judge.look([Shot("video", np.stack([good] * 20))])
    with pytest.raises(MediaError, match="the guard refuses"):
        judge.look([Shot("video", np.stack([good] * 18 + [bad, good]))])


def test_copies_of_a_pipeline_are_guarded(folder: Path) -> None:
    bad, _ = harmful_of(folder)
    with pytest.raises(MediaError, match="the guard refuses"):
        copy.deepcopy(pipe_of(folder))(bad, "what?")


def test_the_server_refuses_with_an_error_of_the_picture(folder: Path, tmp_path: Path) -> None:
    bad, good = harmful_of(folder)
    file = tmp_path / "guard.json"
    file.write_text(json.dumps({"model": str(folder), "scenes": SCENES}))
    config = ServerConfig(guard=str(file), device="cpu")
    assert asyncio.run(load_media(png(good), "image", config)).shot.kind == "image"
    with pytest.raises(ApiError, match="the guard refuses") as error:
        asyncio.run(load_media(png(bad), "image", config, param="messages[0]"))
    assert (error.value.status, error.value.code) == (400, "refused_media")
    assert judge_of(str(file), "cpu") is judge_of(str(file), "cpu")


def png(picture: Any) -> bytes:
    out = io.BytesIO()
    Image.fromarray(picture).save(out, "PNG")
    return out.getvalue()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"scenes": {"neutral": ["x"]}}, "'neutral' and a harmful one"),
        ({"scenes": {"fire": ["x"], "flood": ["y"]}}, "'neutral' and a harmful one"),
        ({"scenes": {"neutral": ["x"], "fire": "flames"}}, "scene 'fire'"),
        ({"scenes": {"neutral": ["x"], "fire": [" "]}}, "scene 'fire'"),
        ({"action": "blok"}, "did you mean 'block'"),
        ({"least": 2}, "least=2"),
        ({"modle": "x"}, "cannot be read"),
    ],
)
def test_wrong_settings_say_what_is_right(given: Any, said: str, tmp_path: Path) -> None:
    file = tmp_path / "guard.json"
    file.write_text(json.dumps({"model": "somewhere", **given}))
    with pytest.raises(MmfastError, match=said):
        read_guard(str(file))


def test_what_is_no_guard_is_refused_before_a_model_is_read(tmp_path: Path) -> None:
    with pytest.raises(MmfastError, match="image-qa: guard=3 is not allowed"):
        pipeline("image-qa", str(tmp_path / "none"), guard=3)
    with pytest.raises(MmfastError, match="cannot be read"):
        pipeline("image-qa", str(tmp_path / "none"), guard=str(tmp_path / "none.json"))
    tiny("llava").model.save_pretrained(tmp_path / "llava")
    tiny("llava").processor.save_pretrained(tmp_path / "llava")
    with pytest.raises(ModelError, match="compares no pictures with texts"):
        SceneJudge(ImageGuard(str(tmp_path / "llava"), SCENES), "cpu")


def test_the_command_takes_a_guard(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad, _ = harmful_of(folder)
    (tmp_path / "bad.png").write_bytes(png(bad))
    (tmp_path / "guard.json").write_text(json.dumps({"model": str(folder), "scenes": SCENES}))
    asked = ("ask", str(tmp_path / "bad.png"), "What is it?", "--guard")
    code, _, error = run(capsys, *asked, str(tmp_path / "guard.json"))
    assert code == 2 and "the guard refuses" in error
    code, _, error = run(capsys, *asked, str(tmp_path / "none.json"))
    assert code == 2 and "none.json" in error


COLOURS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 70, 220)}
COLOURS["yellow"] = (230, 210, 50)
PATTERNS = ("plain", "rows", "columns", "checks")


def drawn(pattern: str, colour: str, rng: np.random.Generator) -> Any:
    """A noisy picture of a pattern in a colour on grey, at a random offset."""
    y, x = np.mgrid[:24, :24] + rng.integers(0, 8, 2)[:, None, None]
    on = {
        "plain": y >= 0,
        "rows": y // 4 % 2 == 0,
        "columns": x // 4 % 2 == 0,
        "checks": (x // 4 + y // 4) % 2 == 0,
    }[pattern]
    shade = np.where(on[..., None], np.array(COLOURS[colour]), rng.integers(60, 200))
    return (shade + rng.normal(0, 12, shade.shape)).clip(0, 255).astype(np.uint8)


def trained(folder: Path, steps: int = 300) -> None:
    """Teach a small CLIP what the pictures show, from nothing, and save it."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "image_size": 24, "patch_size": 8}
    save_clip(folder, sizes, seed=0)
    model = CLIPModel.from_pretrained(folder).train()
    processor = AutoProcessor.from_pretrained(folder)
    names = [(pattern, colour) for pattern in PATTERNS for colour in COLOURS]
    words = processor.tokenizer([f"{c} {p}" for p, c in names], padding=True, return_tensors="pt")
    rng, right = np.random.default_rng(0), torch.arange(len(names)).repeat_interleave(2)
    learner = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.01)
    pace = torch.optim.lr_scheduler.OneCycleLR(learner, 5e-3, total_steps=steps)
    for _ in range(steps):
        images = [drawn(*name, rng) for name in names for _ in range(2)]
        pixels = processor.image_processor(
            images, return_tensors="pt", input_data_format="channels_last"
        )
        out = model(**words, **pixels)
        learner.zero_grad()
        torch.nn.functional.cross_entropy(out.logits_per_image, right).backward()
        learner.step()
        pace.step()
    model.eval().save_pretrained(folder)


@pytest.mark.slow
def test_a_trained_clip_refuses_the_pattern_that_is_forbidden(tmp_path: Path) -> None:
    """The figures of docs/guides/guard.md: shares of 200 forbidden and 600 other pictures."""
    torch.manual_seed(0)
    trained(tmp_path)
    scenes = {
        name: [f"{colour} {pattern}" for pattern in patterns for colour in COLOURS]
        for name, patterns in (("neutral", PATTERNS[:3]), ("forbidden", PATTERNS[3:]))
    }
    judge = SceneJudge(ImageGuard(str(tmp_path), scenes), "cpu")
    rng = np.random.default_rng(99)
    refused = {
        pattern: sum(
            each.harmful
            for each in judge.judge([drawn(pattern, c, rng) for c in COLOURS for _ in range(50)])
        )
        for pattern in PATTERNS
    }
    print(refused)
    assert refused["checks"] >= 190 and sum(refused[p] for p in PATTERNS[:3]) <= 12
