"""Things that are turned, and figures that the world has not, against their pixels."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw

from mmfast.tiny.scenes import bank, figures, looks, outside
from mmfast.tiny.scenes.evaluate import scene_cases
from mmfast.tiny.scenes.model import make_model, make_processor
from mmfast.tiny.scenes.train import SceneTower
from mmfast.tiny.video import scene
from mmfast.tiny.video.clips import Bank

TURNS = (0.0, 0.4, np.pi / 4, np.pi, 5.0)
RADIUS = 30.0  # units: 60 pixels
CENTRE = np.array([96.0, 96.0])


def _owned(shape: str, style: scene.Style) -> np.ndarray:
    """Pixels `[192, 192]` that a thing covers."""
    owner = np.zeros((scene.PIXELS, scene.PIXELS), np.uint8)
    thing = scene.Thing(shape, "red", RADIUS, (48.0, 48.0), (0.0, 0.0), 0, scene.FRAMES)
    scene.paint(np.zeros((*owner.shape, 3)), owner, thing, 0, CENTRE, style)
    return owner > 0


def _filled(polygons: list[np.ndarray]) -> np.ndarray:
    """The same by another library: the last polygon is cut out of the first."""
    big = 4 * scene.PIXELS
    paper = Image.new("L", (big, big))
    for polygon, ink in zip(polygons, (255, 0), strict=False):
        points = ((polygon * RADIUS * scene.SCALE + CENTRE) * 4).ravel().tolist()
        ImageDraw.Draw(paper).polygon(points, fill=ink)
    return np.asarray(paper.reduce(4)) > 127


@pytest.mark.parametrize("shape", [*scene.SHAPES])
@pytest.mark.parametrize("turn", [*TURNS])
def test_extents_of_turned_shapes_are_those_of_their_pixels(shape: str, turn: float) -> None:
    style = scene.Style(turn=turn)
    rows, columns = np.nonzero(_owned(shape, style))
    seen = np.array([[columns.min(), rows.min()], [columns.max() + 1, rows.max() + 1]])
    told = looks.extents(shape, style) * RADIUS * scene.SCALE + CENTRE
    tips = 6.0 if shape in ("star", "triangle") else 1.6  # smoothing takes the ends of points
    assert np.abs(seen - told).max() < tips


@pytest.mark.parametrize("shape", [*looks.CORNERS])
@pytest.mark.parametrize("turn", [*TURNS])
def test_a_turned_shape_is_its_polygon_turned(shape: str, turn: float) -> None:
    cos, sin, corners = np.cos(turn), np.sin(turn), looks.CORNERS[shape]
    turned = np.stack([corners @ (cos, -sin), corners @ (sin, cos)], 1)
    owned = _owned(shape, scene.Style(turn=turn))
    assert np.mean(owned != _filled([turned])) < 0.012


ALL = [*dict.fromkeys((*figures.TRAINED, *figures.KEPT))]


@pytest.mark.parametrize("figure", ALL)
def test_figures_are_painted_as_their_polygons(figure: figures.Figure) -> None:
    outline = figure(np.random.default_rng(5))
    owned = _owned("circle", scene.Style(outline=outline))
    assert np.mean(owned != _filled([*outline])) < 0.006
    assert owned.any() and np.abs(np.concatenate(outline)).max() <= 1.3


def test_figures_are_of_no_shape_of_the_world() -> None:
    rng = np.random.default_rng(0)
    for figure in [*ALL, *[figures._freeform] * 12]:
        outline = figure(rng)
        owned = _owned("circle", scene.Style(outline=outline))
        for shape in scene.SHAPES:
            for turn in np.linspace(0, 2 * np.pi, 24, endpoint=False):
                known = _owned(shape, scene.Style(turn=turn))
                share = (owned & known).sum() / (owned | known).sum()
                assert share < 0.96, (figure, shape, turn)


def test_every_third_thing_of_the_lessons_is_turned() -> None:
    views = [bank.lesson_view(1, index * 12) for index in range(60)]
    turned = [turn != 0 for view in views for turn in view.look.turns]
    assert 0.2 < np.mean(turned) < 0.5
    assert any("triangle" in view.look.outlines for view in views)
    plain = looks.make_view(scene.EVAL, 3, 5)
    assert not plain.look.turns and not plain.look.outlines


def test_foreign_figures_are_seen_on_their_clips() -> None:
    rng = np.random.default_rng(3)
    for kind in ("shaped", "figures"):
        for _ in range(3):
            assert outside.pictures(kind, rng)[7].std() > 1


def test_questions_about_figures_are_to_be_refused() -> None:
    cases = list(islice(scene_cases(5, (outside.FIGURES,)), 6))
    assert {case.answer for case in cases} == {outside.REFUSAL}
    assert {case.media for case in cases} == {"image", "video"}
    assert all(len(case.turns) == 1 for case in cases)
    plain = list(islice(scene_cases(5, ("shape",)), 6))
    assert outside.REFUSAL not in {case.answer for case in plain}


@pytest.mark.parametrize("kind", ["shaped", "noise"])
def test_foreign_things_have_places_but_no_labels(kind: str) -> None:
    row = bank.outside_row(kind, np.random.default_rng(4))
    assert row.patches.any() == (kind == "shaped") and row.table.count == 0
    sides = scene.SIDE / 12 * (np.stack(np.meshgrid(*[np.arange(12)] * 2), -1).reshape(-1, 2) + 0.5)
    for time, owners in enumerate(row.patches):
        for thing in {*owners[owners > 0].tolist()} & {*range(1, scene.THINGS + 1)}:
            middle = sides[owners == thing].mean(0)  # a part of it may be hidden or off the screen
            assert np.abs(middle - row.table.place[thing - 1, time]).max() < 16
    inside = bank.view_row(bank.lesson_view(1, 2))
    assert row.patches.shape == inside.patches.shape and inside.table.count


def test_the_tower_learns_which_things_are_foreign() -> None:
    """A tower that tells both kinds apart has a smaller loss than one that does not."""
    rows = [bank.view_row(bank.lesson_view(1, n)) for n in range(2)]
    rows += [bank.outside_row("shaped", np.random.default_rng(4)) for _ in range(2)]
    frames, patches, cells, tables = zip(
        *((r.frames, r.patches, r.cells, r.table) for r in rows), strict=True
    )
    parts = (torch.from_numpy(np.stack(each)) for each in (frames, patches, cells))
    held = bank.SceneBank(Bank(*parts, [*tables]), [bank.lesson_view(1, n) for n in range(2)])
    task = SceneTower(make_model(make_processor(), 0), held, 0)
    clips, times = torch.tensor([0, 1, 2, 3]), torch.tensor([5, 5, 5, 5])
    widths = [read.in_features for read in task.foreign]
    features, tokens = torch.zeros(4, 144, widths[0]), torch.zeros(4, 36, widths[1])
    features[2:, :, 0] = tokens[2:, :, 0] = 1.0
    with torch.no_grad():
        plain, _ = task.judge_frames(features, tokens, clips, times)
        for read in task.foreign:
            read.weight[0, 0], read.bias[0] = 8.0, -4.0
        told, figures = task.judge_frames(features, tokens, clips, times)
    assert told < plain - 1 and figures["foreign"] == {"patch": 1.0, "cell": 1.0}
