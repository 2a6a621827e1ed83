"""Scope of the embedded models: quiet on what they were trained on, a line on anything else."""

from __future__ import annotations

import io
import json
import warnings
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_runs import CLIP, QUESTION, run
from PIL import Image
from transformers import AutoTokenizer

import mmfast
from mmfast.frontends.video.reader import read_video
from mmfast.models.loading import embedded_path
from mmfast.models.prompt import ScopeWarning, Shot, is_foreign, scope_note, unknown_words
from mmfast.tiny.scenes.outside import REFUSAL
from mmfast.tiny.stream.world import World
from mmfast.tiny.suites import SUITES, Suite, SuiteCase
from mmfast.tiny.video import scene
from mmfast.tiny.video.clips import write
from mmfast.tiny.video.questions import STILL_WORDINGS, WORDINGS

REFUSED = (
    "What breed is this dog?", "何が見えますか?", "Is the traffic light green?",
    "How many people are there?",
    "Who is the man on the left?", "What is the weather like?", "Was ist das?",
    "What does the sign say?", "Who made this picture?", "Where was this filmed?",
)  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(embedded_path())


@pytest.fixture(scope="module")
def embedded() -> Any:
    return mmfast.pipeline("video-qa", device="cpu")


def _shots(suite: Suite, case: SuiteCase) -> list[Shot]:
    if suite.media == "video":
        return [Shot("video", read_video(case.media[0], frames=8).frames)]
    pictures = (np.asarray(Image.open(io.BytesIO(file)).convert("RGB")) for file in case.media)
    return [Shot("image", picture) for picture in pictures]


@pytest.mark.parametrize(
    ("name", "n"),
    [
        pytest.param("video", 120, marks=pytest.mark.slow),
        pytest.param("image", 200, marks=pytest.mark.slow),
        pytest.param("multi-image", 60, marks=pytest.mark.slow),
        pytest.param("document", 40, marks=pytest.mark.slow),
        *(("video", 16), ("image", 40), ("document", 8)),
    ],
)
def test_no_alarm_on_questions_of_the_suites(name: str, n: int) -> None:
    suite = SUITES[name]
    notes = [scope_note(_shots(suite, c)) for c in islice(suite.cases(77), n)]
    assert sum(map(bool, notes)) <= n // 100, notes


def test_no_alarm_on_drawn_scenes() -> None:
    drawn = (scene.draw(scene.make_scene(scene.TRAIN, 5, i)).frames for i in range(60))
    alarms = [[is_foreign(frames), is_foreign(frames[i % 16])] for i, frames in enumerate(drawn)]
    assert np.sum(alarms) <= 1
    world = World(3)
    assert sum(is_foreign(world.frame(7.0 * i)) for i in range(40)) <= 1


def test_the_vocabulary_is_that_of_the_grammar(tokenizer: Any) -> None:
    table = [
        words for rules in (WORDINGS, STILL_WORDINGS) for each in rules.values() for words in each
    ]
    names = [f"{colour} {shape}" for colour in scene.COLOURS for shape in scene.SHAPES]
    for wording in table:
        for first, second in zip(names[::4], names[3::4], strict=False):
            for end in ("start", "end"):
                text = wording.format(first, end if "at the {1}" in wording else second)
                assert not unknown_words(tokenizer, text)
                assert not unknown_words(tokenizer, text.rstrip("?").lower())


@pytest.mark.parametrize("question", REFUSED)
def test_other_questions_are_refused(question: str, embedded: Any) -> None:
    assert embedded(CLIP, question).text == REFUSAL


def _waves(rng: np.random.Generator, mean: float, spread: float, channels: int) -> np.ndarray:
    """A picture with the spectrum of natural ones, amplitude 1 / frequency."""
    rate = np.fft.fftfreq(240)
    scale = np.hypot(rate[:, None], rate[None])
    scale[0, 0] = 1
    waves = np.fft.ifft2(np.fft.fft2(rng.normal(size=(channels, 240, 240))) / scale).real
    waves -= waves.mean((1, 2), keepdims=True)
    waves = mean + spread * waves / waves.std((1, 2), keepdims=True)
    return np.clip(np.moveaxis(waves, 0, -1), 0, 255).repeat(3 // channels, -1).astype(np.uint8)


def _foreign_pictures() -> Iterator[tuple[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    for side in (64, 96, 192, 448, 1080):
        yield f"noise {side}", rng.integers(0, 256, (side, side, 3), dtype=np.uint8)
    yield "grey noise", rng.integers(0, 256, (192, 192, 1), dtype=np.uint8).repeat(3, -1)
    yield "dim noise", rng.integers(20, 110, (192, 192, 3), dtype=np.uint8)
    for number in range(40):
        channels, mean = (1, 3)[number % 2], (90, 120, 150)[number % 3]
        yield f"waves {number}", _waves(rng, mean, 50, channels)
    slope = np.linspace(0, 255, 200)
    sky = np.full((200, 200, 3), 235.0)
    sky[..., 0], sky[..., 1] = 120 + slope[:, None] / 2, 160 + slope / 5
    yield "sky", np.clip(sky, 0, 255).astype(np.uint8)
    paper = np.full((300, 200, 3), 250, np.uint8)
    paper[20:280:12, 20:180] = 30
    yield "paper", paper


def test_foreign_pictures(embedded: Any) -> None:
    smooth = ("sky", "paper")  # as smooth as grounds are: for the model to refuse
    passed = [name for name, picture in _foreign_pictures() if not is_foreign(picture)]
    assert passed == [*smooth]
    clips = {name: np.stack([picture] * 4) for name, picture in _foreign_pictures()}
    clips["empty"] = np.full((8, 96, 96, 3), 90, np.uint8)
    assert [name for name, clip in clips.items() if not is_foreign(clip)] == [*smooth]
    for name in smooth:
        for question in ("What color is the object?", "How many objects are there?"):
            assert embedded(clips[name], question).text == REFUSAL, (name, question)


def test_photographs_of_other_packages(embedded: Any) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    photo = Path(matplotlib.get_data_path()) / "sample_data" / "grace_hopper.jpg"
    if not photo.is_file():
        pytest.skip("matplotlib came without its sample data")
    clip = np.stack([np.asarray(Image.open(photo).convert("RGB"))] * 4)
    assert is_foreign(clip) or embedded(clip, "What color is the object?").text == REFUSAL


def test_a_pipeline_warns_once_and_notes_every_answer() -> None:
    pipe = mmfast.pipeline("video-qa", max_new_tokens=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert pipe(CLIP, QUESTION).note == "" and "note" not in pipe(CLIP, QUESTION).to_dict()
        assert pipe(CLIP, "Could you find out if the red circle moves left?").note == ""
    noise = np.random.default_rng(1).integers(0, 256, (6, 96, 96, 3), dtype=np.uint8)
    with pytest.warns(ScopeWarning, match="this video is outside") as seen:
        one, two = pipe([noise, CLIP], [QUESTION, QUESTION])
        three = pipe(noise, QUESTION)
    assert len(seen) == 1 and one.note == three.note == one.to_dict()["note"] and not two.note
    named = mmfast.pipeline("video-qa", str(embedded_path()), max_new_tokens=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert named(noise, QUESTION).note == ""


def test_ask_says_it_on_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    noise = np.random.default_rng(1).integers(0, 256, (6, 96, 96, 3), dtype=np.uint8)
    write(tmp_path / "noise.mp4", noise)
    code, out, err = run(capsys, "ask", str(tmp_path / "noise.mp4"), QUESTION, "--json")
    note = json.loads(out)["note"]
    assert code == 0 and "this video is outside" in note
    assert [line for line in err.splitlines() if note in line] == [f"mmfast: note: {note}"]
    assert "note" not in run(capsys, "ask", CLIP, QUESTION)[2]
    model = ("--model", str(embedded_path()))
    assert "note" not in run(capsys, "ask", str(tmp_path / "noise.mp4"), QUESTION, *model)[2]
