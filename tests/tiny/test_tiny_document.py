"""The document model, its pages, and the suites of pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import mmfast
from mmfast.core.errors import MmfastError
from mmfast.frontends.image import read_image
from mmfast.models.loading import embedded_path, load
from mmfast.tiny.card import write_card
from mmfast.tiny.document import pages
from mmfast.tiny.document.pages import make_page, page_facts, page_labels
from mmfast.tiny.document.train import draw_pages, encode_pages
from mmfast.tiny.evaluate import interval, run_eval
from mmfast.tiny.suites import ALBUM, SUITES, SuiteCase, suite, suite_of
from mmfast.tiny.video.scene import COLOURS, EVAL, IGNORE, SHAPES, TRAIN

HOME = embedded_path("tiny-document")
SIDE = pages.CELLS * 12


def test_pages_are_stable_and_their_colours_true() -> None:
    one, again = make_page(EVAL, 3, 5), make_page(EVAL, 3, 5)
    assert np.array_equal(one.picture, again.picture) and one.entries == again.entries
    assert make_page(TRAIN, 3, 5).entries != one.entries
    for index in range(6):
        page = make_page(EVAL, 4, index)
        for number, entry in enumerate(page.entries, start=1):
            row, column = np.argwhere(page.things == number).mean(0).round().astype(int)
            assert (row // 12, column // 12) == entry.cell
            seen = page.picture[row * 16 : row * 16 + 16, column * 16 : column * 16 + 16]
            gaps = {c: np.abs(seen.reshape(-1, 3) - v).sum(1).min() for c, v in COLOURS.items()}
            assert min(gaps, key=gaps.__getitem__) == entry.colour


def test_facts_have_one_answer() -> None:
    for index in range(20):
        page = make_page(EVAL, 9, index)
        found = [(fact.kind, fact.slots) for fact in page_facts(page)]
        assert len(found) == len(set(found))
        names = [entry.name for entry in page.entries]
        assert len(set(names)) == len(names)


def test_labels_point_at_what_came_before() -> None:
    page = make_page(TRAIN, 2, 3)
    labels = page_labels(page)
    assert labels.shape == (len(pages.PARTS), 144 + SIDE * (SIDE + 1) - 1)
    tens, units = labels[2], labels[3]
    assert ((tens != IGNORE) == (units != IGNORE)).all()
    numbers = {entry.number for entry in page.entries}
    where = tens != IGNORE
    assert set((10 * tens[where] + units[where]).tolist()) <= numbers
    own = labels[6] != IGNORE
    assert set((10 * labels[6] + labels[7])[own].tolist()) == numbers - {None}


def test_labels_say_the_look_of_things() -> None:
    page = make_page(TRAIN, 2, 3)
    labels, side = page_labels(page), SIDE // pages.CELLS
    last = torch.full((len(labels), 1), IGNORE)
    lines = torch.cat([labels[:, 144:], last], 1).view(-1, SIDE, SIDE + 1)
    begun, *looks = (lines[[*pages.PARTS].index(n)] for n in ("begun", "own colour", "own shape"))
    for entry in page.entries:
        row, column = (each * side for each in entry.cell)
        said = [look[row : row + side, column : column + side].unique() for look in looks]
        colour, shape = ([int(each) for each in one if each != IGNORE] for one in said)
        assert [tuple(COLOURS)[each] for each in colour] == [entry.colour]
        assert [SHAPES[each] for each in shape] == [entry.shape]
    assert all(((look == IGNORE) == (begun == IGNORE)).all() for look in looks)


def test_labels_count_things_as_they_begin() -> None:
    for index in range(6):
        page = make_page(TRAIN, 2, index)
        begun = page_labels(page)[8]
        for view in (begun[:144], begun[144:]):
            seen = view[view != IGNORE].tolist()
            assert seen[0] == 1 and max(seen) == len(page.entries)
            fresh = [n for i, n in enumerate(seen) if n not in seen[:i]]
            assert fresh == sorted(fresh) == list(range(1, max(seen) + 1))


def test_lessons_follow_the_image_path() -> None:
    """The recipe's layout of overview, tiles and newlines is the stock one."""
    model, processor = load(str(HOME), "cpu", "float32")
    drawn = draw_pages(processor.image_processor, 1, 0, 0)
    lesson = encode_pages(model, processor, drawn, 0)[0].lesson([0], 3)
    batch = processor(
        text=["<image>"], images=[make_page(TRAIN, 0, 0).picture], return_tensors="pt"
    )
    with torch.no_grad():
        stock = model.get_image_features(batch["pixel_values"], batch["image_sizes"])
    rows = stock.pooler_output[0]
    assert len(rows) == batch["input_ids"].shape[1] == lesson.tokens.shape[2] + 1
    assert torch.allclose(rows[:-1], lesson.tokens[0, 0], atol=2e-2)


@pytest.mark.parametrize("name", SUITES)
def test_suites_are_stable_and_even(name: str) -> None:
    asked, cases = suite_of(name), suite(6, 4, name)
    assert [c.kind for c in cases] == [asked.kinds[i % len(asked.kinds)] for i in range(6)]
    assert cases[:2] == suite(2, 4, name) != suite(2, 5, name)
    assert {len(case.media) for case in cases} == {ALBUM if name == "multi-image" else 1}
    if asked.media == "image":
        assert read_image(cases[0].media[0]).ndim == 3


def test_an_unknown_suite_names_the_choices() -> None:
    with pytest.raises(MmfastError, match=r"unknown suite 'page'.*document"):
        suite(1, 0, "page")


def test_interval_covers_the_share() -> None:
    low, high = interval(97, 100)
    assert 0.91 < low < 0.92 and 0.98 < high < 0.99  # Wilson, as tables of it give
    assert interval(0, 5)[0] == 0.0 and interval(5, 5)[1] == 1.0
    wide, narrow = interval(9, 10), interval(900, 1000)
    assert wide[1] - wide[0] > 5 * (narrow[1] - narrow[0])


def test_encoding_once_changes_no_answer() -> None:
    """A spec behind the encoder gets the same rows as one whose run encodes for itself."""
    specs = ["visionzip:0.2", "hired:0.3", "tome@vit:0.9"]
    together = run_eval(specs, 10, 3, name="image")["rows"]
    alone = [run_eval([spec], 10, 3, name="image")["rows"][1] for spec in specs]
    for row, other in zip(together[1:], alone, strict=True):
        same = ("reduce", "accuracy", "by_kind", "kept")
        assert [row[key] for key in same] == [other[key] for key in same]
    pipe = mmfast.pipeline("image-qa", "tiny-video", reduce="visionzip:0.2")
    cases = suite(10, 3, "image")
    answers = pipe([case.media[0] for case in cases], [case.question for case in cases])
    right = [a.text.lower() == c.answer for a, c in zip(answers, cases, strict=True)]
    assert sum(right) / 10 == together[1]["accuracy"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "least"), [("image", 0.9), ("multi-image", 0.8), ("document", 0.8), ("table", 0.8)]
)
def test_unseen_questions(name: str, least: float) -> None:
    (row,) = run_eval([], 40, 1234, name=name)["rows"]
    low, high = row["interval"]
    assert row["accuracy"] >= least and low < row["accuracy"]
    assert row["accuracy"] < high or row["accuracy"] == high == 1.0  # all are right


def _stock_answer(pipe: Any, case: SuiteCase) -> str:
    """What the stock model says to all pictures of a case, by its own processor alone."""
    content: list[Any] = [{"type": "image", "image": read_image(file)} for file in case.media]
    chat = [{"role": "user", "content": [*content, {"type": "text", "text": case.question}]}]
    how = {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
    inputs = pipe.processor.apply_chat_template(chat, add_generation_prompt=True, **how)
    ids = pipe.model.generate(**inputs, do_sample=False, max_new_tokens=64)
    new = ids[0, inputs["input_ids"].shape[1] :]
    return str(pipe.processor.decode(new, skip_special_tokens=True)).strip()


def test_several_pictures_are_one_question() -> None:
    pipe = mmfast.pipeline("image-qa")
    cases = suite(8, 11, "multi-image")
    answers = [pipe(case.media, case.question) for case in cases]
    assert [answer.text.lower() for answer in answers] == [case.answer for case in cases]
    assert {answer.visual_tokens for answer in answers} == {ALBUM * 144}
    assert [answer.text for answer in answers] == [_stock_answer(pipe, case) for case in cases]
    with pytest.raises(MmfastError, match="no image"):
        pipe((), "What number is on the screen?")


def test_card_shows_the_figures_of_its_log(tmp_path: Path) -> None:
    (tmp_path / "training.jsonl").symlink_to(HOME / "training.jsonl")
    write_card(tmp_path, "tiny-document")
    assert (tmp_path / "README.md").read_text() == (HOME / "README.md").read_text()


def test_checkpoint_is_small_and_says_nothing_of_its_making() -> None:
    assert sum(f.stat().st_size for f in HOME.iterdir()) < 16e6
    assert (HOME / "model.safetensors").stat().st_mode & 0o044 == 0o044
    picture = Image.fromarray(make_page(EVAL, 1, 1).picture)
    pipe = mmfast.pipeline("image-qa", model=str(HOME), reduce="divprune:0.5")
    answer = pipe(picture, "How many objects are there?")
    assert answer.visual_tokens == 1440 and answer.kept_tokens == 720
