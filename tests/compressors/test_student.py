"""Students: a LoRA under a reduction, its lessons, its training, and the folder it leaves."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from clip_lessons import clip_lessons
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import nn

import mmfast
from mmfast.cli import main
from mmfast.compressors.base import load as load_compressor
from mmfast.core.errors import MmfastError, ModelError, SpecError
from mmfast.models.adapters import WEIGHTS, save_lora, unload, with_lora
from mmfast.models.loading import embedded_path, load
from mmfast.tiny import student as recipe
from mmfast.tiny import training
from mmfast.tiny.evaluate import BATCH, Subject, run_eval
from mmfast.tiny.suites import suite, suite_of
from mmfast.tiny.video import compressors

NAME, SPEC = "tiny-video", "key_clip:36"
CLIP, QUESTION = "assets/clips/number.mp4", "What number is on the screen?"


def fresh() -> Subject:
    return Subject(NAME, "cpu", suite_of("video"))


def school(subject: Subject, *specs: str | None) -> recipe.StudentSchool:
    return recipe.StudentSchool(subject, specs, 0)


@pytest.fixture(scope="module")
def lessons() -> list[recipe.StudentLesson]:
    """Two lessons about six clips."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipe, "BATCH", 6)
        return school(fresh(), SPEC).group(2)


def shake(learner: Any, size: float = 0.2) -> None:
    """Fill the matrices that start at zero, so that the adapter changes answers."""
    torch.manual_seed(3)
    with torch.no_grad():
        for name, each in learner.named_parameters():
            if "lora_B" in name:
                each.normal_(std=size)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter that changes answers."""
    learner = with_lora(load(NAME, "cpu", "auto")[0], 4)
    shake(learner)
    path = tmp_path_factory.mktemp("student")
    save_lora(learner, path, NAME)
    return path


def alone(subject: Subject, inputs: Any, row: int) -> dict[str, Any]:
    """A row of a batch without its padding, its clip encoded anew."""
    ids = inputs["input_ids"][row][inputs["attention_mask"][row] > 0][None]
    features = inputs["mm_encoder_outputs"]["video"].pooler_output[row][None]
    hidden = subject.model.get_input_embeddings()(ids)
    place = ids == subject.model.config.video_token_id
    rows = features.reshape(-1, hidden.shape[-1])
    assert len(rows) in (int(place.sum()), int(place.sum()) - 1)
    newline = subject.model.model.image_newline[None]
    rows = rows if len(rows) == int(place.sum()) else torch.cat([rows, newline])
    return {"inputs_embeds": hidden.masked_scatter(place[..., None], rows)}


@torch.no_grad()
def test_lessons_ask_for_the_answers_of_each_row_alone(lessons: Any) -> None:
    subject = fresh()
    for lesson in lessons:
        labels, ids = lesson.labels, lesson.inputs["input_ids"]
        width = labels.shape[1]
        told = labels != recipe.IGNORE
        assert torch.equal(labels[told], ids[:, -width:][told]) and bool(told[:, -1].all())
        assert bool((labels[:, -1] == subject.processor.tokenizer.eos_token_id).all())
        logits, done = lesson.logits(subject.model), 0
        for row, mark in enumerate(told):
            many = int(mark.sum())
            own = subject.model(**alone(subject, lesson.inputs, row)).logits[0]
            mine = logits[done : done + many]
            torch.testing.assert_close(mine, own[-many - 1 : -1], rtol=1e-3, atol=1e-3)
            done += many
        assert done == len(logits)
    assert {len(set(lesson.kinds)) > 1 for lesson in lessons} == {True}
    pairs = zip(*(lesson.kinds for lesson in lessons), strict=True)
    assert all(one != two for one, two in pairs)  # kinds take turns
    one, two = (lesson.inputs["mm_encoder_outputs"]["video"] for lesson in lessons)
    assert one is two  # encoded once


def test_clips_of_lessons_are_in_no_evaluation() -> None:
    asked = {case.media for seed in (0, 1000) for case in suite(6, seed)}
    source = school(fresh(), SPEC).media
    assert not asked & {next(source)[0]() for _ in range(6)}


@torch.no_grad()
def test_the_student_reads_what_attach_leaves_and_the_teacher_more(lessons: Any) -> None:
    subject, (lesson, _) = fresh(), lessons
    learner = with_lora(subject.model, 4)
    shake(learner)
    task = recipe.StudentTask(learner, (SPEC, None), lessons, lessons, rate=1e-3)
    read = task.read(lesson)
    with mmfast.attach(learner, SPEC):
        told = lesson.logits(learner)
    assert torch.equal(read, told) and not torch.equal(read, lesson.logits(learner))
    stock = lesson.logits(fresh().model)
    torch.testing.assert_close(task.teach(lesson), stock, rtol=1e-2, atol=1e-2)
    assert torch.equal(task.teach(lesson), task.teach(lesson))
    clips = recipe.StudentTask(learner, (SPEC, "key_clip:0.5"), lessons, lessons, rate=1e-3)
    lesson.taught.clear()
    with mmfast.attach(fresh_model := fresh().model, "key_clip:0.5"):
        half = lesson.logits(fresh_model)
    torch.testing.assert_close(clips.teach(lesson), half, rtol=1e-2, atol=1e-2)
    lesson.taught.clear()


def test_the_lora_alone_learns(lessons: Any) -> None:
    subject = fresh()
    before = {name: each.clone() for name, each in subject.model.state_dict().items()}
    learner = with_lora(subject.model, 4)
    task = recipe.StudentTask(learner, (SPEC, None), lessons, lessons, rate=5e-3)
    with torch.no_grad():
        first = [float(task.loss(lesson)[0]) for lesson in lessons]
    assert all(task.batches(0, 0)[0] is not task.batches(0, 0)[0] for _ in range(3))
    for _ in range(6):
        training.update(task, [lessons[0]], 1.0)
    with torch.no_grad():
        last = [float(task.loss(lesson)[0]) for lesson in lessons]
    assert last[0] < 0.7 * first[0]
    figures = task.look()
    assert 0 <= figures["mean"] <= 1 and 0.5 < figures["teacher"] <= 1 and figures["kinds"]
    unload(subject.model)
    for name, each in subject.model.state_dict().items():
        assert torch.equal(each, before[name]), name
    for lesson in lessons:
        lesson.taught.clear()


@pytest.mark.parametrize(
    "spec", ["pool:8", "evs:0.1", "visionzip:0.1", "tome@vit:0.5", "fastv@llm2:0.25"]
)
def test_a_run_of_any_reducer_leaves_an_adapter(
    spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipe, "BATCH", 2)
    monkeypatch.setattr(recipe, "SETS", 2)
    words = ["--reduce", spec, "--clips", "4", "--steps", "1", "--lora", "2"]
    recipe.main([*words, "--out", str(tmp_path)])
    rows = [json.loads(line) for line in (tmp_path / "training.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row["stage"] == "held-out"] == [0, 1]
    assert {"start", "lessons", "student", "saved", "end"} <= {row["stage"] for row in rows}
    assert load(str(tmp_path), "cpu", "auto")[0].name_or_path == str(tmp_path)


# --- the folder, wherever a model is taken ------------------------------------------------------


@torch.no_grad()
def test_the_folder_answers_the_same_wherever_a_model_is_taken(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    held = PeftModel.from_pretrained(load(NAME, "cpu", "auto")[0], folder).eval()
    subject = Subject((held, load(NAME, "cpu", "auto")[1]), "cpu", suite_of("video"))
    cases = suite(8, 5)
    inputs = subject.inputs(cases)
    with mmfast.attach(held, SPEC):
        wanted = subject.answers(inputs)
    pipe = mmfast.pipeline("video-qa", str(folder), reduce=SPEC)
    asked = [pipe(case.media[0], case.question) for case in cases]
    assert [answer.text.lower() for answer in asked] == wanted
    assert {answer.kept_tokens for answer in asked} == {36}
    plain = load(NAME, "cpu", "auto")[0]
    with mmfast.attach(held, SPEC), mmfast.attach(pipe.model, SPEC), mmfast.attach(plain, SPEC):
        own, loaded, stock = (each(**inputs).logits for each in (held, pipe.model, plain))
    torch.testing.assert_close(loaded, own, rtol=1e-3, atol=1e-3)
    assert (stock - own).abs().max() > 0.1  # the adapter acts
    words = ["--model", str(folder), "--reduce", SPEC, "--n", "8", "--seed", "5", "--json"]
    with pytest.raises(SystemExit, match="0"):
        main(["eval", "--suite", "video", *words])
    rows = json.loads(capsys.readouterr().out)["rows"]
    merged: Any = held.merge_and_unload()
    expected = run_eval([SPEC], 8, 5, (merged, subject.processor))["rows"]
    assert [row["by_kind"] for row in rows] == [row["by_kind"] for row in expected]
    right = sum(text == case.answer for text, case in zip(wanted, cases, strict=True))
    assert rows[1]["accuracy"] == right / len(cases) and len(cases) <= BATCH


def test_a_folder_of_another_model_is_refused(folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "adapter_config.json").read_text())
    weights = {n: t[:, :-1] if "lora_A" in n else t for n, t in _adapter(folder).items()}
    save_file({n: each.contiguous() for n, each in weights.items()}, tmp_path / WEIGHTS)
    for base, told in (
        (NAME, "its matrices have other sizes"),
        ("", "names ''"),
        (None, "names None"),
        (str(folder), "names"),  # an adapter of an adapter
        ("./nowhere", "does not exist"),
    ):
        text = json.dumps({**config, "base_model_name_or_path": base})
        (tmp_path / "adapter_config.json").write_text(text)
        with pytest.raises(MmfastError, match=told) as error:
            mmfast.pipeline("video-qa", str(tmp_path))
        assert "\n" not in str(error.value)
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    (tmp_path / WEIGHTS).unlink()
    with pytest.raises(MmfastError, match=r"has no adapter_model\.safetensors"):
        load(str(tmp_path), "cpu", "auto")


# --- a compressor and a LoRA that learn together ------------------------------------------------


@pytest.fixture
def clips() -> Iterator[tuple[Any, Any]]:
    model, processor = load(embedded_path(NAME), "cpu", "float32")
    yield model, clip_lessons(model, processor, 12)


def test_a_compressor_and_a_lora_learn_together(
    clips: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, sampler = clips
    monkeypatch.setattr(compressors, "CLIPS", 2)
    words = ["--out", str(tmp_path), "--tokens", "4", "--steps", "2", "--lora", "2"]
    options = compressors.arguments(words)
    options.held = 4
    before = {name: each.clone() for name, each in model.state_dict().items()}
    (lesson,) = [sampler.lesson([0, 1], 2, dict.fromkeys(compressors.KINDS, 1.0))]
    with training.fast():
        stock = compressors.teach(model, lesson).logits
    taught = list[torch.Tensor]()
    teach = compressors.teach

    def noted(model: Any, batch: Any) -> Any:
        taught.append(teach(model, lesson).logits)
        return teach(model, batch)

    def shaken(model: Any, rank: int) -> Any:
        learner = with_lora(model, rank)
        shake(learner)
        return learner

    monkeypatch.setattr(compressors, "with_lora", shaken)
    monkeypatch.setattr(compressors, "teach", noted)
    compressors.train_all(options, training.Log(tmp_path / "compressors"), model, sampler)
    assert len(taught) == 2 and all(torch.equal(each, stock) for each in taught)
    unload(model)
    for name, each in model.state_dict().items():
        assert torch.equal(each, before[name]), name
    start = with_lora(model, 2)
    shake(start)
    first = {n.replace(".default", ""): t for n, t in start.state_dict().items()}
    unload(model)
    learned = [not torch.equal(t, first[n]) for n, t in _adapter(tmp_path).items() if "lora_B" in n]
    assert learned and all(learned)
    file = tmp_path / "compressors" / "query_compressor-4.safetensors"
    assert load_compressor(file).config["tokens"] == 4
    pipe = mmfast.pipeline("video-qa", str(tmp_path), reduce="query_compressor:4")
    assert pipe(CLIP, QUESTION).kept_tokens == 32  # its own weights, beside the adapter
    pipe = mmfast.pipeline("video-qa", str(tmp_path), reduce="query_compressor:1")
    with pytest.raises(ModelError, match="has no compressors/query_compressor-1"):
        pipe(CLIP, QUESTION)


def _adapter(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / WEIGHTS)


# --- errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--reduce", "key_clip:1.0"], "nothing to learn"),
        (["--reduce", "divprune:1.0+pool:1.0"], "nothing to learn"),
        (["--reduce", "fastv@llm2:0.5?tokens=all"], "drops text"),
        (["--reduce", SPEC, "--teacher", "fastv@llm2:0.5?tokens=text"], "drops text"),
        (["--reduce", "key_clop:36"], "key_clip"),
        (["--reduce", SPEC, "--lora", "0"], "rank 0"),
        (["--reduce", SPEC, "--lora", "99999"], "rank 99999 is wider than all layers"),
        (["--reduce", SPEC, "--model", "./nowhere"], "does not exist"),
    ],
)
def test_what_cannot_learn_ends_in_one_line(
    words: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        recipe.main([*words, "--out", str(tmp_path)])
    text = capsys.readouterr().err.splitlines()[-1]
    assert end.value.code == 2 and text.startswith("error: ") and told in text


@pytest.mark.parametrize(
    "words",
    [["--reduce", SPEC, "--clips", "16"], ["--suite", "video"], ["--reduce", SPEC, "--rate", "0"]],
)
def test_wrong_arguments_are_refused(words: list[str]) -> None:
    with pytest.raises(SystemExit) as end:
        recipe.arguments(words)
    assert end.value.code == 2


def test_one_lora_a_folder() -> None:
    with pytest.raises(SystemExit) as end:
        compressors.arguments(["--tokens", "1", "4", "--lora", "4"])
    assert end.value.code == 2


def test_without_peft_or_linear_layers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(NAME, "cpu", "auto")[0]
    bare = load(NAME, "cpu", "auto")[0]
    bare.model.language_model = nn.Sequential(nn.Identity())
    with pytest.raises(ModelError, match="no linear layer"):
        with_lora(bare, 4)
    monkeypatch.setitem(sys.modules, "peft", None)
    for make in (lambda: with_lora(model, 4), lambda: load(str(folder), "cpu", "auto")):
        with pytest.raises(MmfastError, match=r"pip install \"mmfast\[train\]\""):
            make()


def test_a_spec_is_checked_before_anything_is_loaded() -> None:
    with pytest.raises(SpecError):
        recipe.check("key_clip:0", None)
