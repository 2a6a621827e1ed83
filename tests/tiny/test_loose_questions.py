"""Questions put as people put them: their answers are those of the pixels."""

import re
from collections import Counter
from dataclasses import replace
from itertools import islice, product
from typing import Any

import numpy as np
import pytest

from mmfast.tiny.scenes import looks, nouns, outside
from mmfast.tiny.scenes.albums import album_items
from mmfast.tiny.scenes.evaluate import SceneAnswer, SceneCase, judge, scene_cases
from mmfast.tiny.scenes.everyday import everyday
from mmfast.tiny.scenes.facts import clip_items, describe_picture, picture_items
from mmfast.tiny.scenes.lessons import DAILY, SceneDrawer
from mmfast.tiny.scenes.loose import NUMERALS
from mmfast.tiny.scenes.questions import (
    ABSENT,
    ALONE,
    ATTRIBUTE,
    FORMS,
    MOVES,
    NOUNS,
    OUTSIDE,
    PART,
    SHORT,
    WHICH,
    SceneItem,
)
from mmfast.tiny.scenes.unasked import ASKED, EVERYDAY
from mmfast.tiny.video import scene
from mmfast.tiny.video.scene import COLOURS, SHAPES

VIEWS = [looks.make_view(scene.EVAL, 3, index) for index in range(14)]
SAMPLED = scene.sampled_indices(scene.FRAMES)


@pytest.fixture(scope="module")
def drawn() -> list[tuple[looks.SceneView, scene.Drawing, scene.Table]]:
    found = [(view, looks.draw(view)) for view in VIEWS]
    return [(view, drawing, scene.make_table(view.scene, drawing)) for view, drawing in found]


def _pixels(drawing: scene.Drawing, thing: int, frame: int) -> np.ndarray:
    """Rows and columns that belong to a thing in a sampled frame."""
    return np.argwhere(drawing.owner[SAMPLED[frame]] == thing + 1)


def _sure(texts: list[str]) -> list[SceneAnswer]:
    return [SceneAnswer(text, 1.0) for text in texts]


def _alone(items: list[SceneItem]) -> list[SceneItem]:
    return [item for item in items if item.kind == ALONE]


def test_the_object_is_the_only_one_or_they_are_counted(drawn: list[Any]) -> None:
    seen = set()
    for (view, drawing, table), frame in product(drawn, (0, 3, 7)):
        there = [i for i in range(table.count) if table.alive[i, frame]]
        for item in _alone(picture_items(view, table, frame)):
            seen.add(min(len(there), 2))
            if len(there) != 1:
                many = f"are {len(there)} objects" if there else "is no object"
                assert item.answer == f"there {many}."
                continue
            high, wide = _pixels(drawing, there[0], frame).mean(0) / drawing.owner.shape[1:] < 0.5
            where = f"{'top' if high else 'bottom'} {'left' if wide else 'right'}"
            colour, shape = table.name(there[0]).split()
            known = {"colour": colour, "shape": shape, "position": where, "place": where}
            row = item.form.removeprefix("it_")
            assert item.answer in (known.get(row), "centre") or row in ("where", "box"), item
            assert item.slots[0] in ("", *NOUNS) and shape not in item.worded(0)
    assert seen == {1, 2}
    view, _, table = drawn[0]
    bare = replace(table, number=42, shown=np.ones(8, bool), alive=np.zeros_like(table.alive))
    assert {item.answer for item in _alone(picture_items(view, bare, 3))} == {"there is no object."}


def test_a_shape_or_a_colour_alone_means_one_thing(drawn: list[Any]) -> None:
    """Short names are told apart by hand, and have the answers of the full ones."""
    forms = set()
    for view, _, table in drawn:
        items, names = clip_items(view, table), [table.name(i) for i in range(table.count)]
        known = {(i.form or i.kind, i.slots, i.answer) for i in items if i.kind != SHORT}
        for item in items:
            if item.kind != SHORT:
                continue
            full = []
            for slot in item.slots:
                word, _, noun = slot.partition(" ")
                fits = [slot]
                if slot and slot not in names and word in {*COLOURS, *SHAPES}:
                    assert noun in ("", *NOUNS)
                    fits = [name for name in names if word in name.split()]
                assert len(fits) == 1, item
                full += fits
            assert tuple(full) != item.slots and (item.form, tuple(full), item.answer) in known
            forms.add(item.form)
    assert forms >= {"direction", "position", "where", "moves", "relation", "compare", "first"}


def test_half_of_the_movements_asked_about_are_so(drawn: list[Any]) -> None:
    words = []
    for view, _, table in drawn:
        items = clip_items(view, table)
        ways = {item.slots[0]: item.answer for item in items if item.kind == "direction"}
        for item in items:
            if item.kind == MOVES:
                so = item.slots[1].split()[-1] == ways[item.slots[0]]
                assert item.answer == ("yes" if so else "no")
                words.append(item.answer)
    assert words.count("yes") == words.count("no") > 10


def test_a_thing_on_its_own_is_near_the_centre_and_as_large_as_its_box() -> None:
    shades, middles, boxes = set(), 0, 0
    for index in range(12):
        view = looks.make_view(scene.EVAL, 9, index, lone=True, shades=True)
        drawing = looks.draw(view)
        table = scene.make_table(view.scene, drawing)
        assert table.count == 1 and table.alive[0].all()
        colour = np.array(view.look.inks[view.scene.things[0].colour])
        seen = drawing.frames[7][drawing.owner[7] == 1]
        assert np.abs(np.median(seen, 0) - colour).max() < 3
        shades.add(tuple(colour.astype(int)))
        for item in _alone(picture_items(view, table, 4)):
            if item.form == "where":
                rows = _pixels(drawing, 0, 4) / drawing.owner.shape[1:] * 100
                edges = [*rows.min(0)[::-1], *rows.max(0)[::-1]]
                assert np.abs(np.array(item.answer.split(","), float) - edges).max() < 2.6
                boxes += 1
            middles += item.answer == "centre"
        ways = {item.answer for item in _alone(clip_items(view, table)) if item.form == "it_way"}
        assert len(ways) == 1 and ways <= {*scene.DIRECTIONS}
    assert len(shades) == 12 and middles and boxes > 20
    exam = list(islice(scene_cases(5, (ALONE,)), 20))
    assert {case.kind for case in exam} == {ALONE} and {c.media for c in exam} == {"video", "image"}
    assert any(case.answer.startswith("there ") for case in exam)
    found = judge(exam, _sure([case.answer for case in exam]))
    assert found["accuracy"] == 1.0
    box = SceneCase(b"", "image", ("its box?",), "10,10,29,29", ALONE, False)
    assert judge([box], _sure(["10,10,29,30"]))["accuracy"] == 1.0
    assert judge([box], _sure(["40,40,49,49"]))["accuracy"] == 0.0


def _subjects(phrase: str, names: list[str]) -> list[str]:
    """Names that "it", "the object", "the star" or "the red object" may mean."""
    words = phrase.removeprefix("the ").split()
    if phrase == "it" or words[0] in NOUNS:
        return names
    return [name for name in names if words[0] in name.split()]


def _attribute(item: SceneItem, names: list[str]) -> str:
    """The answer to a question about a colour, a shape or how many, by hand."""
    if item.form == "anything":
        return "yes" if any(item.slots[0] in name.split() for name in names) else "no"
    if item.form == "amount":
        verb, phrase = item.slots
        if phrase.startswith("more than one"):
            return "yes" if len(names) > 1 else "no"
        word = (
            phrase.removeprefix("only ").removeprefix("just ").removeprefix("exactly ").split()[0]
        )
        number = int(word) if word.isdigit() else NUMERALS.index(word)
        assert (verb == "is") == (number == 1)
        return "yes" if number == len(names) else "no"
    subject, wanted = item.slots
    found = _subjects(subject, names)
    if len(found) == 1:
        return "yes" if wanted.removeprefix("a ") in found[0].split() else "no"
    if found == names and len(names) > 1 and (subject == "it" or subject.split()[1] in NOUNS):
        return f"there are {len(names)} objects."
    return f"there is no {subject.removeprefix('the ') if subject != 'it' else 'object'}."


def _way(drawing: scene.Drawing, thing: int) -> str:
    """Where the middle of a thing goes while all of it can be seen."""
    seen = [_pixels(drawing, thing, k) for k in range(scene.SAMPLED)]
    most = max(map(len, seen))
    clear = [pixels.mean(0) for pixels in seen if len(pixels) > 0.9 * most]
    down, right = clear[-1] - clear[0]
    if abs(down) > abs(right):
        return "down" if down > 0 else "up"
    return "right" if right > 0 else "left"


def _named(phrase: str, names: dict[str, int], drawing: scene.Drawing, still: int) -> list[str]:
    """Things of which a phrase is true."""
    way = re.fullmatch(r"(?:moves|goes|is moving|is going) (?:to the )?(\w+)", phrase)
    if way:
        return [name for name, i in names.items() if _way(drawing, i) == way[1]]
    place = re.fullmatch(r"(?:is|lies|is found) in the ([a-z ]+?)( at the \w+)?", phrase)
    assert place, phrase
    frame = {" at the start": 0, " at the end": scene.SAMPLED - 1}.get(place[2] or "", still)
    found = []
    for name, i in names.items():
        pixels = _pixels(drawing, i, frame)
        if not len(pixels):
            continue
        high, left = pixels.mean(0) / drawing.owner.shape[1:] < 0.5
        corner = f"{'top' if high else 'bottom'} {'left' if left else 'right'}"
        middle = np.abs(pixels.mean(0) / drawing.owner.shape[1:] - 0.5).max() < 0.06
        found += [name] if place[1] == ("centre" if middle else corner) else []
    return found


def test_attributes_parts_and_which_are_those_of_the_pixels(drawn: list[Any]) -> None:
    words, seen = list[tuple[str, str]](), set[str]()
    single = {"crosses": "cross"} | {f"{shape}s": shape for shape in SHAPES}
    for (view, drawing, table), frame in product(drawn, (None, 3, 6)):
        there = [i for i in range(table.count) if frame is None or table.alive[i, frame]]
        names = {table.name(i): i for i in there}
        full = [table.name(i) for i in there]
        items = clip_items(view, table) if frame is None else picture_items(view, table, frame)
        for item in items:
            if item.kind == ATTRIBUTE:
                assert item.answer == _attribute(item, full), item
                words.append((item.form, item.answer))
            if item.kind == PART:
                wanted = [single.get(word, word) for word in item.slots[0].split()]
                wanted = [word for word in wanted if word.rstrip("s") not in NOUNS]
                assert {*wanted} <= {*COLOURS, *SHAPES}, item
                many = sum(all(w in name.split() for w in wanted) for name in full)
                assert item.answer == str(many), item
                seen.add(item.answer)
            if item.kind == WHICH:
                assert _named(item.slots[0], names, drawing, frame or 0) == [item.answer], item
                seen.add(item.slots[0].split()[0])
    assert seen >= {"0", "1", "2", "moves", "is", "lies"}
    for form in ("", "anything"):
        said = [word for mine, word in words if mine == form]
        assert abs(said.count("yes") - said.count("no")) < 0.2 * len(said)
    assert {word for form, word in words if form == "amount"} == {"yes", "no"}


def test_a_colour_from_outside_is_no_shade_of_one_inside() -> None:
    rng = np.random.default_rng(3)
    inside = np.array([looks._ink(rng, name) for name in COLOURS for _ in range(40)])
    for number in range(8):
        view = outside._tinted(rng, number)
        (thing,) = view.scene.things
        drawing = looks.draw(view, [8])
        seen = np.median(drawing.frames[8][drawing.owner[8] == 1], 0)
        assert np.abs(seen - view.look.inks[thing.colour]).max() < 3 and view.scene.panel is None
        assert np.linalg.norm(inside - seen, axis=1).min() > 45


def test_of_several_pictures_is_asked_what_one_of_them_alone_answers(drawn: list[Any]) -> None:
    """Against all that can be asked of each: no other answers it, and none has its things."""
    kinds = set()
    for at in range(len(drawn) - 2):
        pages = [(picture_items(view, table, 3), table, 3) for view, _, table in drawn[at : at + 3]]
        for item in album_items(pages):
            own = [items for items, _, _ in pages if item in items]
            other = [table for items, table, _ in pages if item not in items]
            texts = [describe_picture(drawn[0][0], t, 3, np.flatnonzero(t.alive[:, 3]))
                     for t in other]  # fmt: skip
            words = item.slots[0].removesuffix(" object") if item.slots else "number"
            shown = [t.replace("no number", "").split("background.")[1] for t in texts]
            assert own and not any(words in text for text in shown), (item, texts)
            kinds.add((item.kind, item.answer if item.kind == "exists" else ""))
    assert kinds >= {(k, "") for k in ("colour", "shape", "position", "number", ABSENT)}
    assert kinds >= {("exists", "yes"), ("exists", "no")}


def test_wordings_kept_back_are_kept_back_outside_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nouns, "KEPT", ("sky",))
    monkeypatch.setattr(nouns, "COMMON", ("sky",))
    rng = np.random.default_rng(8)
    trained, kept = ({outside.worldly(rng, way) for _ in range(500)} for way in (False, True))
    assert not trained & kept and any("sky" in text for text in kept)


def test_what_is_outside_is_asked_as_the_world_is() -> None:
    """Every such question has a word that is no word of the world, or the noun of a list."""
    known = {*COLOURS, *SHAPES, *(f"{shape}s" for shape in SHAPES), "crosses", *scene.DIRECTIONS}
    for rows in FORMS.values():
        known |= {word for text in rows for word in re.findall(r"[a-z]+", text.lower())}
    rng = np.random.default_rng(4)
    trained, kept = ({outside.worldly(rng, way) for _ in range(400)} for way in (False, True))
    assert not trained & kept and not any("{" in text for text in trained | kept)
    for text in trained | kept:
        assert {*re.findall(r"[a-z]+", text.lower())} - known, text
        assert not re.search(r"\ba [aeiou]", text), text
    assert not {*nouns.KEPT} & {*nouns.COMMON} and not {*nouns.KEPT, *nouns.COMMON} & known
    cases = list(islice(scene_cases(6, (OUTSIDE,)), 16))
    assert all(case.answer == outside.REFUSAL for case in cases)
    assert any(word in nouns.KEPT for case in cases if case.kept for word in case.turns[0].split())


def test_everyday_questions_are_no_questions_of_the_world(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alike in every run, without open slots or nouns that are kept back."""
    seeds = ((9, 9), (9, 9), (10, 10))
    drawn = [[everyday(rng) for _ in range(400)] for rng in map(np.random.default_rng, seeds)]
    assert drawn[0] == drawn[1] != drawn[2] and not any("{" in text for text in drawn[0])
    words = {word for text in drawn[0] for word in re.findall("[a-z]+", text.lower())}
    assert len(words & {*nouns.COMMON}) > 50 and not words & {*nouns.KEPT}
    # Training alone shows them, never an evaluation.
    monkeypatch.setattr(outside, "question", lambda rng, kept: "plain")
    monkeypatch.setattr(outside, "worldly", lambda rng, kept, said: "worldly")
    drawer = SceneDrawer.__new__(SceneDrawer)
    drawer.rng = np.random.default_rng(3)
    shares = Counter(drawer._foreign(False) for _ in range(1000))
    others = 1 - (shares["plain"] + shares["worldly"]) / 1000
    assert others == pytest.approx(DAILY, abs=0.05)
    assert {drawer._foreign(True) for _ in range(200)} == {"plain", "worldly"}


def test_questions_that_nobody_trains_are_asked_in_turn() -> None:
    cases = list(islice(scene_cases(7, (EVERYDAY,)), 4))
    assert [case.turns for case in cases] == [(text,) for text in ASKED[:4]]
    assert all(case.answer == outside.REFUSAL and case.kept for case in cases)
    assert len({*ASKED}) == len(ASKED)
    rng = np.random.default_rng(5)
    trained = {draw(rng).lower() for _ in range(3000) for draw in (everyday, outside.question)}
    assert not trained & {text.lower() for text in ASKED}
