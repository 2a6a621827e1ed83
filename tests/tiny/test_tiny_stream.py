"""The stream model: its recipe against the stock model, and its answers through real sessions."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import mmfast
from mmfast.bench.report.docs import write_table
from mmfast.bench.results import load as load_rows
from mmfast.cli import main as cli
from mmfast.core.errors import MmfastError
from mmfast.models.loading import embedded_path, load
from mmfast.streams.frontend import FrameEncoder
from mmfast.streams.memory import Memory
from mmfast.tiny.card import write_card
from mmfast.tiny.stream.lessons import (
    PATCHES,
    StreamLesson,
    StreamSampler,
    bounded,
    make_clips,
    unbounded,
)
from mmfast.tiny.stream.needles import BANDS, MEMORIES, WINDOW, Setting, needles, run_needles
from mmfast.tiny.stream.train import frame_scores, run_lesson
from mmfast.tiny.stream.world import World
from mmfast.tiny.video.model import USER

HOME = embedded_path("tiny-stream")


@pytest.fixture(scope="module")
def school() -> StreamSampler:
    torch.manual_seed(0)
    model, processor = load(str(HOME), "cpu", "float32")
    facts, scenes = make_clips(model, True, 60, 3), make_clips(model, False, 24, 3)
    made = StreamSampler(facts, scenes, processor.tokenizer, 0)
    made.model = model  # type: ignore[attr-defined]
    return made


def _stock(model: object, lesson: StreamLesson, row: int, at: torch.Tensor) -> torch.Tensor:
    """Last states of a row's first question by the stock decoder on a plain prompt."""
    lm = model.model.language_model  # type: ignore[attr-defined]
    mine = lesson.packed.block[row] == 0
    ids = lesson.packed.ids[row][mine]
    text = lm.embed_tokens(ids)
    text[0] = model.model.image_newline  # type: ignore[attr-defined]
    opening = lm.embed_tokens(torch.tensor([USER]))
    embeds = torch.cat([opening, lesson.tokens[row], text])[None]
    # Without a mask transformers takes gaps in the positions for the ends of packed sequences.
    mask = torch.ones(embeds.shape[:2], dtype=torch.long)
    given = {"position_ids": at[None], "attention_mask": mask, "use_cache": False}
    out = lm(inputs_embeds=embeds, **given)
    return out.last_hidden_state[0, -len(ids) :]


@pytest.mark.parametrize("thin", [True, False])
def test_lessons_give_the_stock_models_numbers(school: StreamSampler, thin: bool) -> None:
    model = school.model  # type: ignore[attr-defined]
    lesson = school.lesson(2, thin, (3, 2))
    for seed in range(9):
        layout = unbounded(lesson, np.random.default_rng(seed))
        if not layout.own[torch.isfinite(layout.own)].any():  # no token counts as several
            break
    else:
        pytest.fail("every layout weighs tokens")
    with torch.no_grad():
        outcome = run_lesson(model, lesson, layout)
        for row in range(2):
            mine = lesson.packed.block[row] == 0
            at = torch.cat([layout.at[row], layout.text_at[row][mine]])
            want = _stock(model, lesson, row, at)
            assert torch.allclose(outcome.states[row][mine], want, atol=2e-4)


def test_questions_see_frames_where_they_were_moved_to(school: StreamSampler) -> None:
    model = school.model  # type: ignore[attr-defined]
    lesson = school.lesson(2, True, (3, 2))
    layout, _ = bounded(lesson, 5, np.random.default_rng(2))
    everything = [moved + 700 for moved in layout.moved]
    frames_alone = replace(layout, moved=everything)
    with torch.no_grad():
        plain, apart = run_lesson(model, lesson, layout), run_lesson(model, lesson, frames_alone)
        both = run_lesson(model, lesson, replace(frames_alone, text_at=layout.text_at + 700))
    assert torch.allclose(both.states, plain.states, atol=1e-3)
    assert (apart.states - plain.states).abs().max() > 0.1
    for one, other in zip(plain.keys, apart.keys, strict=True):
        assert torch.equal(one, other)  # before RoPE, and frames do not see questions


def test_bounded_lessons_read_retrieved_frames_where_a_session_puts_them(
    school: StreamSampler,
) -> None:
    lesson = school.lesson(2, False, (6, 3))
    for seed in range(5):
        layout, answerable = bounded(lesson, 5, np.random.default_rng(seed))
        assert answerable[lesson.target == 0].all()
        size = len(lesson.frame) + 1
        for moved, seen in zip(layout.moved, layout.seen, strict=True):
            there = torch.isfinite(seen[0, 0, 0, :size])
            # What the last frame saw is what every layer's question sees, and more.
            assert not (torch.isfinite(layout.own[-1]) & ~there).any()
            at = moved[0][there]
            # Whole frames: contiguous from the opening to the question, in order of time.
            assert at.tolist() == list(range(len(at)))
            assert int(layout.text_at[0, 0]) == len(at) and len(at) % PATCHES == 1
        text = lesson.packed.block[0, 0]
        assert int(text) == 0


def test_names_of_facts_appear_once_in_a_lesson(school: StreamSampler) -> None:
    for _ in range(10):
        order = school.order(8, 5)
        names = [clip.names for clip in school.draw(order)]
        for fact, mine in zip(order, names, strict=True):
            assert not fact or sum(mine[0] in each for each in names) == 1


def test_keys_of_a_fact_match_the_question_about_it(school: StreamSampler) -> None:
    model = school.model  # type: ignore[attr-defined]
    lesson = school.lesson(4, True, (12, 1))
    layout = unbounded(lesson, np.random.default_rng(0))
    with torch.no_grad():
        scores = frame_scores(run_lesson(model, lesson, layout), lesson)
    asks = lesson.target > 0
    clip = torch.tensor(lesson.slots.clip)
    right = (lesson.target[..., None] - 1 == clip)[asks]
    for layer in range(1, 5):
        best = scores[layer][asks].topk(4, -1).indices
        assert right.gather(1, best).any(-1).float().mean() > 0.9


def test_needles_are_asked_when_the_answer_was_seen() -> None:
    setting = Setting(600.0)
    for seed in range(4):
        world = World(seed, every=30)
        asked = needles(world, setting)
        assert asked == needles(world, setting)
        assert {needle.band for needle in asked} <= set(BANDS)
        for needle in asked:
            question = needle.question
            assert question.asked == needle.frame / setting.fps
            windows = question.age / WINDOW
            assert (needle.band == "in the window") == (windows < 1 and "now" not in question.kind)
            events = [e for e in world.events() if f"the {e.name}?" in question.text]
            if "now" in question.kind:
                assert question.age == 0 and needle.band == "now"
                continue
            (event,) = events
            frames = range(int(np.ceil(event.start)), needle.frame + 1)
            assert any(world.event_at(float(frame)) == event for frame in frames)


@pytest.mark.slow
def test_answers_through_sessions() -> None:
    document = run_needles(n=30, seed=21, setting=Setting(180.0))
    free, window, found = document["rows"]
    assert [row["memory"] for row in (free, window, found)] == [None, *MEMORIES]
    assert document["suite"] == "stream" and all(row["seconds"] == 180 for row in (free, window))
    for row in (free, found):
        assert row["by_age"]["in the window"]["accuracy"] >= 0.7
        assert row["accuracy"] >= 0.7


@pytest.mark.slow
def test_retrieval_recalls_what_the_window_has_lost() -> None:
    free, window, found = run_needles(n=80, seed=22, setting=Setting(300.0))["rows"]
    assert free["past"]["n"] >= 30 and free["past"]["accuracy"] >= 0.85
    assert found["relative"] >= 0.9 and window["relative"] <= 0.4
    assert window["past_by_kind"]["entry"]["accuracy"] <= 0.2


def test_a_file_of_the_world_is_watched(tmp_path: Path) -> None:
    world = World(3, every=15)
    event = world.event(1)
    world.save(tmp_path / "world.mp4", int(event.stop) + 12)
    with mmfast.pipeline("video-stream").open(MEMORIES[1]) as session:
        session.watch(tmp_path / "world.mp4", fps=1)
        answer = "".join(session.ask(f"What number is at the {event.name}?"))
    assert answer == str(event.number)


@pytest.mark.slow
def test_rows_from_the_command_line_make_a_table(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "eval-stream.jsonl"
    asked = ["eval", "--suite", "stream", "--n", "3", "--cache", MEMORIES[1], "--out", str(out)]
    with pytest.raises(SystemExit) as stop:
        cli([*asked, "--json"])
    document = json.loads(capsys.readouterr().out)
    assert not stop.value.code and [row["memory"] for row in document["rows"]] == [
        None,
        MEMORIES[1],
    ]
    rows = load_rows(out)
    assert [row["score"] for row in rows] == [row["accuracy"] for row in document["rows"]]
    text = "\n".join(write_table("recall", rows))
    assert f"| `{MEMORIES[1]}` |" in text and "16 minutes at 1 frame/s" in text
    assert "not measured" in text  # nothing is older than the window yet
    assert write_table("recall", []) == ["Not measured."]


@pytest.mark.slow
def test_a_run_that_is_killed_leaves_its_finished_rows(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    asked = ["eval", "--suite", "stream", "--n", "3", "--cache", MEMORIES[1]]
    asked += ["--cache", "sink:64+window:512", "--cache", "sink:64+window:256"]
    command = [sys.executable, "-c", "from mmfast.cli import main; main()", *asked]
    command += ["--json", "--out", str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        lines = [child.stdout.readline() for _ in range(3)]  # the head, and two rows
        child.kill()
        rest = child.stdout.read()
    rows = json.loads("".join(lines) + rest + "]}")["rows"]
    assert len(rows) >= 2 and [row["memory"] for row in rows[:2]] == [None, MEMORIES[1]]
    assert [row["score"] for row in load_rows(out)][:2] == [row["accuracy"] for row in rows[:2]]
    assert len(rows) < 4  # it was killed before the end


def test_a_row_tells_the_most_tokens_held_and_frames_are_encoded_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls, encode = list[int](), FrameEncoder._encode
    monkeypatch.setattr(
        FrameEncoder, "_encode", lambda self, *given: calls.append(1) or encode(self, *given)
    )
    specs = ("sink:64+window:288", "sink:64+expected_attention:256", "sink:64+livevlm:256")
    asked = {"n": 4, "seed": 5, "setting": Setting(48.0)}
    rows = run_needles(specs, **asked)["rows"]
    free, *bounded = [row["most_tokens"] for row in rows]
    frames = len(calls)  # of four memories
    assert bounded[0] <= 352 and bounded[1:] == [320, 320] and free > 36 * (frames - 1)
    calls.clear()
    (alone,) = run_needles(specs[2:], unbounded=False, **asked)["rows"]
    assert len(calls) == frames  # of one
    assert alone["by_age"] == rows[-1]["by_age"] and alone["by_kind"] == rows[-1]["by_kind"]


def test_a_memory_beyond_its_bound_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = Memory.tokens
    monkeypatch.setattr(Memory, "tokens", lambda self: tokens(self) + 1)
    with pytest.raises(MmfastError, match="held 129 tokens"):
        run_needles(["sink:64+keynorm:64"], 3, setting=Setting(24.0), unbounded=False)


def test_nothing_asked_is_refused() -> None:
    with pytest.raises(MmfastError, match="n=0"):
        run_needles(n=0)
    with pytest.raises(MmfastError, match="stream of 5 seconds"):
        Setting(5)


def test_card_shows_the_figures_of_its_log(tmp_path: Path) -> None:
    for name in ("training.jsonl", "config.json"):
        (tmp_path / name).symlink_to(HOME / name)
    write_card(tmp_path, "tiny-stream")
    assert (tmp_path / "README.md").read_text() == (HOME / "README.md").read_text()


def test_checkpoint_is_small_and_its_vision_is_the_video_models() -> None:
    assert sum(f.stat().st_size for f in HOME.iterdir()) < 16e6
    assert (HOME / "model.safetensors").stat().st_mode & 0o044 == 0o044
    mine, theirs = (load(str(p), "cpu", "float32")[0] for p in (HOME, embedded_path("tiny-video")))
    for part in ("vision_tower", "multi_modal_projector"):
        own, other = (getattr(m.model, part).state_dict() for m in (mine, theirs))
        assert all(torch.equal(own[k], other[k]) for k in own)


@pytest.mark.slow
def test_recipe_from_end_to_end(tmp_path: Path) -> None:
    from mmfast.tiny.stream.train import main

    sizes = ["--facts", "240", "--scenes", "80", "--minutes", "0.02", "--batch", "2"]
    extra = ["--evaluate", "6", "--seconds", "80", "--cache", str(tmp_path / "cache")]
    main(["--out", str(tmp_path / "out"), *sizes, *extra])
    lines = (tmp_path / "out/training.jsonl").read_text().splitlines()
    stages = [json.loads(line)["stage"] for line in lines]
    assert stages[0] == "start" and {"bank", "stream", "held-out", "end"} < set(stages)
    assert "tiny-stream" in (tmp_path / "out/README.md").read_text()
    model, _ = load(str(tmp_path / "out"), "cpu", "float32")
    assert model.config.text_config.rope_parameters["rope_type"] == "llama3"
