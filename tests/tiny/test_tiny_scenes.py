"""The larger world: what is asked agrees with what is drawn, and its recipe runs."""

import json
import math
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from mmfast.bench.report.docs import write_table
from mmfast.cli import app
from mmfast.models.loading import EMBEDDED_NAMES, load, located
from mmfast.models.prompt import Shot, chat_inputs
from mmfast.tiny.scenes import evaluate, looks, outside, train
from mmfast.tiny.scenes.bank import TRAINED, SceneBank, make_bank, view_row
from mmfast.tiny.scenes.evaluate import (
    STRANGE,
    TURNS,
    SceneAnswer,
    SceneCase,
    answers,
    judge,
    measure,
    run_scenes,
    scene_cases,
    scene_rows,
)
from mmfast.tiny.scenes.facts import clip_items, picture_items
from mmfast.tiny.scenes.lessons import (
    GREY,
    KINDS,
    Encoded,
    SceneAsk,
    SceneSampler,
    letterboxed,
    picture_frames,
    picture_sizes,
    token_weights,
)
from mmfast.tiny.scenes.model import make_model, make_processor
from mmfast.tiny.scenes.questions import (
    ABSENT,
    FORMS,
    KEPT,
    LOOSE,
    OUTSIDE,
    STILL_KINDS,
    WORDINGS,
    SceneItem,
    spelled,
    varied,
)
from mmfast.tiny.scenes.readout import ALL, BLUR, SceneReadout
from mmfast.tiny.scenes.scoring import (
    calibration,
    facts_found,
    made_up,
    overlap,
    pope,
    refused,
    score,
)
from mmfast.tiny.video import scene
from mmfast.tiny.video.clips import shrink
from mmfast.tiny.video.lessons import answer, laid_out, pack
from mmfast.tiny.video.model import ASSISTANT
from mmfast.tiny.video.scene import COLOURS, IGNORE, SHAPES
from mmfast.tiny.video.tower import scale_pixels, tower_features

VIEWS = [looks.make_view(scene.EVAL, 3, index) for index in range(14)]
WEIGHTS = dict.fromkeys(KINDS, 1.0)
MORE = [looks.make_view(scene.EVAL, 4, index) for index in range(20)]


@pytest.fixture(scope="module")
def drawn() -> list[tuple[looks.SceneView, scene.Drawing, scene.Table]]:
    found = [(view, looks.draw(view)) for view in VIEWS]
    return [(view, drawing, scene.make_table(view.scene, drawing)) for view, drawing in found]


@pytest.fixture(scope="module")
def processor() -> Any:
    return make_processor()


def _pixels(drawing: scene.Drawing, thing: int, frame: int) -> np.ndarray:
    """Rows and columns that belong to a thing in a sampled frame."""
    return np.argwhere(drawing.owner[scene.sampled_indices(scene.FRAMES)[frame]] == thing + 1)


def test_looks_vary_and_repeat() -> None:
    assert {view.look.background for view in VIEWS} == set(looks.BACKGROUNDS)
    assert len({(view.look.width, view.look.height) for view in VIEWS}) >= 4
    again = looks.make_view(scene.EVAL, 3, 5)
    assert np.array_equal(looks.draw(again, [4]).frames, looks.draw(VIEWS[5], [4]).frames)
    shown = scene.sampled_indices(scene.FRAMES)
    assert all(thing.born in shown for view in VIEWS for thing in view.scene.things)


def test_boxes_and_seconds_are_those_of_the_pixels(drawn: list[Any]) -> None:
    boxes = seconds = 0
    for view, drawing, table in drawn:
        names = {table.name(i): i for i in range(table.count)}
        for item in clip_items(view, table):
            if item.kind == "where":
                at = 0 if item.slots[1] == " at the start" else scene.SAMPLED - 1
                rows = _pixels(drawing, names[item.slots[0]], at)
                size = np.array(drawing.owner.shape[1:])
                low, high = rows.min(0) / size * 100, (rows.max(0) + 1) / size * 100
                seen = np.array([low[1], low[0], high[1], high[0]])
                assert np.abs(np.array(item.answer.split(","), float) - seen).max() < 2.6, item
                boxes += 1
            if item.kind == "when" and item.slots[0] in names:
                there = [len(_pixels(drawing, names[item.slots[0]], k)) for k in range(8)]
                assert int(np.flatnonzero(there)[0]) == int(item.answer)
                seconds += 1
    assert boxes > 20 and seconds > 5


def test_sides_are_those_of_the_pixels(drawn: list[Any]) -> None:
    signs = {"left": (1, -1), "right": (1, 1), "above": (0, -1), "below": (0, 1)}
    checked = 0
    for view, drawing, table in drawn:
        names = {table.name(i): i for i in range(table.count)}
        for item in picture_items(view, table, 3):
            if item.kind not in ("relation", "compare"):
                continue
            one, two = (_pixels(drawing, names[name], 3).mean(0) for name in item.slots[:2])
            word = item.answer if item.kind == "relation" else item.slots[3].split()[0]
            axis, sign = signs[word]
            assert ((one - two)[axis] * sign > 0) == (item.answer != "no"), item
            checked += 1
    assert checked > 20


def test_half_of_the_existence_questions_are_answered_yes(drawn: list[Any]) -> None:
    words = [
        item.answer
        for view, _, table in drawn
        for item in clip_items(view, table)
        if item.kind == "exists"
    ]
    assert words.count("yes") == words.count("no") > 40


def test_what_is_taken_for_granted_is_absent(drawn: list[Any]) -> None:
    forms, words = set(), {word for view in VIEWS for word in ("number", "object")}
    for number, (view, _, table) in enumerate(drawn):
        still = bool(number % 2)
        there = {table.name(i) for i in range(table.count) if not still or table.alive[i, 3]}
        there |= {word for name in there for word in (*name.split(), f"{name.split()[0]} object")}
        there |= {"number"} if (table.shown[3] if still else table.shown.any()) else set()
        items = picture_items(view, table, 3) if still else clip_items(view, table)
        for item in items:
            if item.kind != ABSENT:
                continue
            name = item.answer.removeprefix("there is no ").removesuffix(".")
            assert name not in there and {*name.split()} <= {*COLOURS, *SHAPES, *words}
            assert name.split()[0] in item.worded(0).lower(), item
            others = [slot for slot in item.slots if " " in slot and slot[0] != " "]
            assert all(slot in there or slot == name for slot in others), item
            forms.add(item.form)
    assert forms == {"position", "where", "when", "direction", "relation", "speed", "first",
                     "colour", "shape", "number"}  # fmt: skip


def test_the_vocabulary_is_that_of_the_shipped_model(processor: Any) -> None:
    shipped = load("tiny-scenes", "cpu", "float32")[1].tokenizer.get_vocab()
    assert processor.tokenizer.get_vocab() == shipped


def test_wordings_are_many_and_two_are_kept_back() -> None:
    for row, words in FORMS.items():
        item = SceneItem("colour", ("star", ""), "red", row)
        kept, trained = set(item.wordings(True)), set(item.wordings(False))
        assert len(set(words)) >= 12 and len(kept) == KEPT and not kept & trained
    rng = np.random.default_rng(0)
    slots = ("red star", "blue cross", " at the end", "left of")
    for words in FORMS.values():
        trained = {
            varied(word.format(*slots), rng).rstrip("?.").lower()
            for word in words[:-KEPT] for _ in range(60)
        }  # fmt: skip
        assert not trained & {word.format(*slots).rstrip("?.").lower() for word in words[-KEPT:]}
    assert {spelled("its colour", rng) for _ in range(20)} == {"its colour", "its color"}


def test_descriptions_name_everything_in_30_to_80_tokens(drawn: list[Any], processor: Any) -> None:
    lengths = []
    for view, _, table in drawn:
        for item in clip_items(view, table):
            if item.kind == "describe":
                lengths.append(len(processor.tokenizer.encode(item.answer)))
                assert all(table.name(i) in item.answer for i in range(table.count))
                assert facts_found(item.answer, item.answer) == 1.0
                half = item.answer.split(". ", 1)[1]
                assert 0.3 < facts_found(item.answer, half) < 1.0
    assert len(lengths) > 5 and min(lengths) >= 28 and max(lengths) <= 90


def test_scores_by_hand() -> None:
    assert overlap("00,00,09,09", "00,00,09,09") == 1.0
    assert overlap("00,00,09,09", "05,00,14,09") == pytest.approx(50 / 150)
    assert overlap("00,00,09,09", "20,20,29,29") == overlap("00,00,09,09", "red") == 0.0
    truth = "the red star moves up. the blue cross moves left."
    swapped = "the red star moves left. the blue cross moves up."
    assert facts_found(truth, swapped) == pytest.approx(3 / 5)  # of 2 names, 2 ways, 1 order
    assert made_up(truth, swapped) == pytest.approx(2 / 5) and made_up(truth, "red") == 0.0
    assert calibration([(0.9, True), (0.95, False), (0.2, False)]) == pytest.approx(1.05 / 3)
    found = pope([("yes", "yes"), ("yes", "no"), ("no", "yes"), ("no", "no"), ("no", "perhaps")])
    assert found["accuracy"] == 0.4 and found["precision"] == found["recall"] == found["yes"] + 0.1
    assert score("colour", "red", " Red ") == 1.0 and not refused("red")


def test_the_outside_is_outside(processor: Any) -> None:
    rng = np.random.default_rng(2)
    trained, kept = ({outside.question(rng, way) for _ in range(300)} for way in (False, True))
    assert not trained & kept and not any("{" in text for text in trained | kept)
    assert not {*outside.KEPT_PICTURES} & {*TRAINED}
    for kind in (*outside.PICTURES, *outside.PRACTICE):
        frames = outside.pictures(kind, rng)
        assert frames.shape[0] == scene.FRAMES and frames.dtype == np.uint8
    tokenizer = processor.tokenizer
    ids = tokenizer.encode(outside.REFUSAL)
    assert len(ids) < 14 and tokenizer.decode(ids) == outside.REFUSAL


@pytest.fixture(scope="module")
def sampler(processor: Any, drawn: list[Any], tmp_path_factory: Any) -> SceneSampler:
    bank = make_bank(tmp_path_factory.mktemp("bank") / "bank.npz", 3, 4, 0, 1, lambda _: None)
    frames = picture_frames(bank, 3, 0)
    clips, pictures = torch.zeros(7, 8, 36, 192), torch.zeros(len(frames), 3, 144, 192)
    encoded = Encoded(clips, pictures, frames, picture_sizes(bank, frames))
    return SceneSampler(bank, encoded, torch.zeros(192), processor.tokenizer, 0)


def test_a_bank_read_again_is_the_same(tmp_path: Path) -> None:
    path = tmp_path / "bank.npz"
    made, read = (make_bank(path, 2, 2, 1, 1, lambda _: None) for _ in range(2))
    row = view_row(looks.make_view(scene.TRAIN, 1, 1))
    assert torch.equal(made.clips.frames, read.clips.frames)
    assert np.array_equal(read.clips.frames[1].numpy(), row.frames)
    assert np.array_equal(read.clips.tables[1].place, row.table.place)
    part = read.first(1)
    assert isinstance(part, SceneBank) and len(part.clips.tables) == 2
    assert part.clips.tables[1].count == 0  # a stranger stays behind the world


def test_second_turns_have_the_tokens_of_the_chat_template(
    sampler: SceneSampler, processor: Any
) -> None:
    first = SceneItem("exists", ("star",), "yes")
    item = SceneItem("followup", (), "red", "its_colour", first)
    question, answer = sampler.draw._ids(item, False, False)
    mine = processor.tokenizer.decode([*question, ASSISTANT])
    told = mine.split("<|assistant|>")[0]
    asked = mine.split("<|user|>")[1].split("<|assistant|>")[0]
    picture = Shot("image", np.zeros((96, 96, 3), np.uint8))
    texts = ([picture, told], ["yes"], [asked])
    roles = ("user", "assistant", "user")
    chat = [{"role": r, "content": c} for r, c in zip(roles, texts, strict=True)]
    stock = chat_inputs(processor, [chat], torch.device("cpu"))["input_ids"][0].tolist()
    assert stock[-len(question) - 1 :] == [*question, ASSISTANT]
    assert processor.tokenizer.decode(answer) == "red"


def test_lessons_ask_strangers_and_the_world(sampler: SceneSampler) -> None:
    weights = dict.fromkeys(KINDS, 1.0) | {"where": 50.0}
    lesson = sampler.clips([0, 1, 5], 12, weights)
    refusal = sampler.tokenizer.encode(outside.REFUSAL)
    assert set(lesson.kinds[2]) == {OUTSIDE} and "where" in lesson.kinds[0] + lesson.kinds[1]
    labels = lesson.packed.labels[2]
    assert labels[labels != IGNORE].tolist()[: len(refusal)] == refusal
    often = sampler.clips([0, 1, 5], 12, weights | {OUTSIDE: 3.0})
    assert [kinds.count(OUTSIDE) for kinds in often.kinds[:2]] == [3, 3]
    sizes = sampler.encoded.sizes
    stranger = next(i for i, (clip, _) in enumerate(sampler.encoded.frames) if clip > 2)
    stranger = sizes.index(sizes[0], stranger)
    shown = sampler.pictures([0, stranger], 8, weights)
    assert set(shown.kinds[0]) <= {*STILL_KINDS, OUTSIDE, ABSENT, *LOOSE} and set(
        shown.kinds[1]
    ) == {OUTSIDE}


@torch.no_grad()
def test_lessons_without_media_are_what_the_model_is_given(
    sampler: SceneSampler, processor: Any
) -> None:
    """Against the stock model on each conversation alone."""
    model = load("tiny-scenes", "cpu", "float32")[0]
    lesson = sampler.clips([4, 5], 3, dict.fromkeys(KINDS, 1.0))
    states, packed = answer(model, lesson, lesson.every[:, :0]).states, lesson.packed
    checked = 0
    for row, number in product(range(2), range(3)):
        mine = packed.block[row] == number
        ids = packed.ids[row][mine]
        if (ids == ASSISTANT).sum() != 1:  # two turns
            continue
        end = ids.tolist().index(ASSISTANT)
        chat = [{"role": "user", "content": [processor.tokenizer.decode(ids[:end])]}]
        stock = chat_inputs(processor, [chat], torch.device("cpu"))["input_ids"]
        found = model.lm_head(states[row][mine][end])
        torch.testing.assert_close(found, model(stock).logits[0, -1], atol=1e-4, rtol=1e-4)
        checked += 1
    assert checked > 2


def _projected(model: Any, shown: torch.Tensor) -> torch.Tensor:
    whole = SimpleNamespace(model=model, config=model.config)
    return model.multi_modal_projector(tower_features(whole, shown))


@torch.no_grad()
@pytest.mark.parametrize("size", sorted(set(looks.CANVASES)))
def test_pictures_are_learned_as_the_image_path_shows_them(
    processor: Any, size: tuple[int, int]
) -> None:
    """The stock path from the picture itself; the lesson from the square frame of the bank."""
    view = next(v for v in VIEWS + MORE if (v.look.width, v.look.height) == size)
    frame = looks.draw(view, [5]).frames[5:6]
    chat = [{"role": "user", "content": [Shot("image", frame[0], None), "?"]}]
    inputs = chat_inputs(processor, [chat], torch.device("cpu"))
    square, canvas = torch.from_numpy(shrink(frame))[0], (size[1], size[0])
    shown = scale_pixels(torch.stack([square, letterboxed(square, canvas)]))
    assert (shown - inputs["pixel_values"][0]).abs().mean() < 0.02
    model = load("tiny-scenes", "cpu", "float32")[0].model
    stock = model.get_image_features(inputs["pixel_values"], inputs["image_sizes"])
    mine = laid_out(_projected(model, shown)[None], model.image_newline, canvas)[0, 0]
    (wanted,) = stock.pooler_output
    assert len(wanted) == len(mine) + 1  # the newline that ends a picture
    assert torch.cosine_similarity(mine, wanted[:-1], dim=-1).mean() > 0.99


@torch.no_grad()
def test_several_pictures_are_learned_as_the_image_path_shows_them(
    sampler: SceneSampler, processor: Any
) -> None:
    """The stock path from the pictures; the lesson from the square frames of the bank."""
    model = load("tiny-scenes", "cpu", "float32")[0].model
    frames = [looks.draw(view, [5]).frames[5:6] for view in VIEWS[:6]]
    shots = [Shot("image", frame[0], None) for frame in frames]
    chats = [[{"role": "user", "content": [*shots[at : at + 3], "?"]}] for at in (0, 3)]
    inputs = chat_inputs(processor, chats, torch.device("cpu"))
    media = {k: v for k, v in inputs.items() if k not in ("input_ids", "attention_mask")}
    sizes = [(view.look.height, view.look.width) for view in VIEWS[:6]]
    assert len({*sizes}) > 2
    boxed = [letterboxed(torch.from_numpy(shrink(frame))[0], size, GREY)
             for frame, size in zip(frames, sizes, strict=True)]  # fmt: skip
    tokens = _projected(model, scale_pixels(torch.stack(boxed)))[:, None].expand(-1, 3, -1, -1)
    encoded = replace(sampler.encoded, pictures=tokens)
    again = SceneSampler(sampler.bank, encoded, model.image_newline, processor.tokenizer, 0)
    draft = again.draw(SceneAsk((1,), [0, 1, 2, 2, 1, 0], True, 4, WEIGHTS, album=3))
    mine = again.lesson(replace(draft, media=[*range(6)])).tokens
    wanted = torch.cat(model.get_image_features(**media).pooler_output).unflatten(0, (2, -1))
    assert mine.shape == (2, 1, 3 * 145 - 1, 192)  # the newline behind all is the forward pass's
    assert torch.cosine_similarity(mine[:, 0], wanted[:, :-1], dim=-1).mean() > 0.99


def test_albums_of_the_world_are_never_strangers(sampler: SceneSampler) -> None:
    same = sampler.pictures([0, 0, 0], 6, WEIGHTS, 3)  # each thing is in all: nothing to ask
    assert set(same.kinds[0]) <= {OUTSIDE, ABSENT, "exists"} and not same.packed.named.any()
    assert same.things["there"].isnan().all() and same.things["numbers"].isnan().all()


def test_counts_and_descriptions_learn_which_names_are_there(sampler: SceneSampler) -> None:
    lesson = sampler.clips([0, 1, 5], 16, WEIGHTS | {"count": 50.0, "describe": 50.0})
    names = [f"{colour} {shape}" for shape, colour in product(SHAPES, COLOURS)]
    for line, clip in enumerate((0, 1)):
        table, there = sampler.bank.clips.tables[clip], lesson.things["there"][line]
        shown = {names[i] for i in there.nonzero()[:, 0].tolist()}
        assert shown == {table.name(i) for i in range(table.count) if table.alive[i].any()}
        marked = (lesson.packed.named[line] == ALL).nonzero()[:, 0]
        assert (lesson.packed.ids[line][marked] == ASSISTANT).all()
        kinds = [lesson.kinds[line][block] for block in lesson.packed.block[line][marked]]
        assert sorted(kinds) == sorted(k for k in lesson.kinds[line] if k in ("count", "describe"))
        assert "count" in kinds
    assert lesson.things["there"][2].isnan().all()
    ids = sampler.tokenizer.convert_tokens_to_ids([*"0123456789", ","])
    read, states = SceneReadout(192, ids[:10], ids[10]), torch.zeros(3, 9, 192)
    layers = [torch.cat([states, lesson.packed.ids[..., None].expand(-1, -1, 192)], 1).float()] * 4
    right = lesson.things["there"].nan_to_num()[0] * 40 - 20
    named = torch.where(lesson.packed.named == ALL, ALL, 0) * torch.tensor([[1], [0], [0]])
    losses = []
    for bias in (right, -right):  # all is known, all is taken for its contrary
        read.there.bias = torch.nn.Parameter(bias)
        found = read.loss(layers, replace(lesson.packed, named=named), lesson.things)
        losses.append(found.item())
    assert losses[1] - losses[0] == pytest.approx(0.2 * 20 * len(names), rel=1e-3)


def test_pictures_of_a_lesson_are_of_one_size(sampler: SceneSampler) -> None:
    sizes, views = sampler.encoded.sizes, sampler.bank.views
    for (clip, _), size in zip(sampler.encoded.frames, sizes, strict=True):
        assert clip > 2 or size == (views[clip].look.height, views[clip].look.width)
    other = next(i for i, size in enumerate(sizes) if size != sizes[0])
    with pytest.raises(ValueError, match="too many values"):
        sampler.pictures([0, other], 4, dict.fromkeys(KINDS, 1.0))


def test_the_reach_of_a_thing_is_half_its_box(drawn: list[Any]) -> None:
    bank = SceneBank(SimpleNamespace(tables=[t for _, _, t in drawn] + [None]), VIEWS)
    found = train.reaches(bank)
    assert found[-1].isnan().all()  # a stranger
    for number, (view, _, table) in enumerate(drawn):
        for thing in range(table.count):
            place = table.place[thing, 3].astype(np.float64)
            edges = (place[:, None] + found[number, thing].numpy()).T.ravel() * 100 / scene.SIDE
            box = view.box(thing, place)
            assert np.abs(np.clip(np.floor(edges), 0, 99) - box).max() <= 1
        assert found[number, table.count :].isnan().all()


def test_long_answers_weigh_as_the_root_of_their_length() -> None:
    packed = pack([[([5], [6]), ([5], [6] * 8)], [([5], [7, 7, 7])]])
    assert token_weights(packed).tolist() == pytest.approx([2**-0.5] * 2 + [1 / 3] * 9 + [0.5] * 4)


def test_edges_of_boxes_are_blurred_and_other_tokens_are_not(processor: Any) -> None:
    """Against loops over all numbers, from a head that is the identity on known logits."""
    ids = processor.tokenizer.convert_tokens_to_ids([*"0123456789", ","])
    read = SceneReadout(8, ids[:10], ids[10])
    texts = ("red", "03,40,59,98", "there is no red star, but")
    packed = pack([[([5], processor.tokenizer.encode(text)) for text in texts]])
    rows, places, edges = read.edges(packed.labels)
    assert rows.tolist() == [0] and edges.tolist() == [[3, 40, 59, 98]]
    size = len(processor.tokenizer)
    states = torch.randn(1, packed.ids.shape[1], size, generator=torch.Generator().manual_seed(3))
    found = read.answers(SimpleNamespace(lm_head=torch.nn.Identity()), states, packed)
    asked = packed.labels != IGNORE
    sure = states.log_softmax(-1)
    truth = sure.gather(-1, packed.labels.clamp(min=0)[..., None])[..., 0].neg()
    for number, edge in enumerate((3, 40, 59, 98)):
        mass = [math.exp(-0.5 * ((n - edge) / BLUR) ** 2) for n in range(100)]
        at = int(places[0]) + 3 * number
        tens = [sum(mass[10 * t : 10 * t + 10]) / sum(mass) for t in range(10)]
        decade = mass[edge // 10 * 10 : edge // 10 * 10 + 10]
        units = [m / sum(decade) for m in decade]
        for spot, target in ((at, tens), (at + 1, units)):
            truth[0, spot] = -sum(q * sure[0, spot, ids[d]] for d, q in enumerate(target))
    torch.testing.assert_close(found, truth[asked])


def test_names_in_lessons_know_their_things(sampler: SceneSampler) -> None:
    lesson = sampler.clips([0, 1, 5], 16, dict.fromkeys(KINDS, 1.0))
    names = 0
    for line, clip in enumerate((0, 1)):
        table, numbers = sampler.bank.clips.tables[clip], lesson.things["numbers"][line]
        ids, named = lesson.packed.ids[line], lesson.packed.named[line]
        for place in ((named > 0) & (named < ALL)).nonzero()[:, 0].tolist():
            thing = int(named[place]) - 1
            assert sampler.tokenizer.decode(ids[place - 1 : place + 1]).strip() == table.name(thing)
            names += 1
        for i in range(table.count):
            ends = numbers[1 + i, :4].view(2, 2) * scene.SIDE
            seen = table.place[i, table.alive[i]][[0, -1]]
            backwards = np.abs(ends.numpy() - seen).max() > 0.01
            assert np.allclose(ends.numpy(), seen[::-1] if backwards else seen, atol=0.01)
    assert names > 4 and lesson.things["numbers"][2].isnan().all()
    assert not lesson.packed.named[2].any()


def test_the_model_starts_as_tiny_video(processor: Any) -> None:
    model, (start, known) = make_model(processor, 0), load("tiny-video", "cpu", "float32")
    old, new = (m.get_input_embeddings().weight for m in (start, model))
    for word in ("red", " circle", "?", "7"):
        places = [t.tokenizer.encode(word)[0] for t in (known, processor)]
        assert torch.equal(old[places[0]], new[places[1]])
    one, two = (m.model.language_model.layers[3].mlp.up_proj.weight for m in (start, model))
    assert torch.equal(one, two)


def test_embedded_models_go_by_their_names(tmp_path: Path, monkeypatch: Any) -> None:
    assert Path(located("tiny-document")).name == "tiny-document"
    assert located(None) == located("tiny-scenes") and "tiny-video" in EMBEDDED_NAMES
    (tmp_path / "tiny-video").mkdir()
    monkeypatch.chdir(tmp_path)
    assert located("tiny-video") == "tiny-video"  # a folder of this name here goes first


def test_cases_take_turns_and_hold_back_wordings() -> None:
    cases = list(islice(scene_cases(5), 2 * len(TURNS)))
    assert [case.kind for case in cases] == [*TURNS, *TURNS]
    assert [case.kept for case in cases] == [False] * len(TURNS) + [True] * len(TURNS)
    assert {case.media for case in cases} == {"video", "image"}
    assert all(len(case.turns) == (3 if case.kind == "followup" else 1) for case in cases)
    assert all(c.answer == outside.REFUSAL for c in cases if c.kind in (OUTSIDE, STRANGE))
    perfect = judge(cases, _sure([case.answer for case in cases]))
    assert perfect["accuracy"] == perfect["overlap"] == perfect["facts"] == 1.0
    assert perfect["made_up"] == perfect["calibration"] == 0.0
    blind = judge(cases, _sure(["red"] * len(cases)))
    assert blind["accuracy"] < 0.2 and blind["calibration"] == 1.0 - blind["accuracy"]


def test_questions_that_tell_two_things_of_one_colour_apart_have_their_own_figure() -> None:
    slots = {"red cross": "red star", "blue cross": "red star"}
    cases = [
        SceneCase(b"", "video", (ask.format(*pair),), pair[0], "speed", bool(number % 2))
        for number, ask in enumerate(WORDINGS["speed"][-4:])
        for pair in slots.items()
    ]
    said = _sure([case.answer if "blue" in case.turns[0] else "red star" for case in cases])
    found = measure(cases, said)
    assert found["accuracy"] == 0.5
    assert (found["one_colour"]["n"], found["one_colour"]["accuracy"]) == (4, 0.0)
    assert "one_colour" not in measure(cases[1::2], said[1::2])


def _sure(texts: list[str]) -> list[SceneAnswer]:
    return [SceneAnswer(text, 1.0) for text in texts]


def test_confidence_is_the_probability_of_the_answer_alone() -> None:
    """By a forward pass over prompt and answer of each case, without a batch around it."""
    model, processor = load("tiny-video", "cpu", "float32")
    cases = list(islice(scene_cases(5, ("colour", "count", "direction")), 5))
    found = answers((model, processor), cases)
    for case, said in zip(cases, found, strict=True):
        inputs = chat_inputs(processor, [case.chat(case.shot())], model.device)
        ids = processor.tokenizer.encode(said.text, add_special_tokens=False)
        ids = torch.tensor([[*ids, model.generation_config.eos_token_id]])
        with torch.no_grad():
            known = torch.cat([inputs["input_ids"], ids], 1)
            seen = {**inputs, "input_ids": known, "attention_mask": torch.ones_like(known)}
            logits = model(**seen).logits[0, -ids.shape[1] - 1 : -1]
        truth = logits.softmax(-1).gather(-1, ids.T).prod()
        assert said.sure == pytest.approx(float(truth), rel=1e-3), said


def test_tiny_video_is_measured_by_name() -> None:
    found = run_scenes("tiny-video", 18, 2)
    assert found["n"] == 18 and found["by_kind"][OUTSIDE] == 0.0  # it answers anything


def test_a_checkpoint_may_keep_a_part_of_the_one_before(capsys: pytest.CaptureFixture[str]) -> None:
    one, two = torch.nn.Linear(2, 3), torch.nn.Linear(2, 3)
    mixed = train.blended(one, two.state_dict(), 0.75)
    torch.testing.assert_close(mixed.weight, 0.75 * one.weight + 0.25 * two.weight)
    assert mixed is not one and not torch.equal(mixed.weight, one.weight)
    with pytest.raises(SystemExit):
        train.main(["--blend", "1.5"])
    assert "--blend must be above 0 and at most 1, not 1.5" in capsys.readouterr().err


@pytest.mark.slow
def test_the_recipe_runs_from_end_to_end(tmp_path: Path) -> None:
    sizes = ["--clips", "112", "--decoder-clips", "110", "--strangers", "6", "--pictures", "20"]
    steps = ["--tower-steps", "1", "--steps", "2", "--questions", "18"]
    found = train.main(["--out", str(tmp_path), *sizes, *steps, "--blend", "0.75"])
    assert found["n"] == 18
    model, _ = load(str(tmp_path), "cpu", "auto")
    card = (tmp_path / "README.md").read_text()
    assert not model.training and all(f"| {kind} |" in card for kind in TURNS)
    assert found["absent"]["n"] == 4 and "| takes for granted what is absent (4 more" in card
    assert (tmp_path / "model.safetensors").stat().st_size < 24e6


def test_the_suite_keeps_a_row_for_each_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str | None, str | None]] = []

    def note(model: Any, reduce: str | None, cache: str | None) -> Any:
        asked.append((reduce, cache))
        return nullcontext()

    def say(pair: Any, cases: list[SceneCase], *_: Any) -> list[SceneAnswer]:
        return _sure([case.answer for case in cases])

    monkeypatch.setattr(evaluate, "attach", note)
    monkeypatch.setattr(evaluate, "answers", say)
    out = tmp_path / "rows.jsonl"
    command = ["eval", "--suite", "scenes", "--n", "20", "--reduce", "divprune:0.5"]
    found = CliRunner().invoke(app, [*command, "--cache", "snapkv:64", "--out", str(out), "--json"])
    assert found.exit_code == 0, found.output
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert asked == [("divprune:0.5", None), (None, "snapkv:64")]
    assert [row["accuracy"] for row in rows] == [1.0] * 3 and all("commit" in row for row in rows)
    lines = [line for line in write_table("scenes", rows) if line.startswith("|")][2:]
    specs = ["all tokens", "`divprune:0.5`", "cache `snapkv:64`"]
    assert [line.split(" | ")[0] for line in lines] == [f"| {spec}" for spec in specs]


@pytest.mark.slow
def test_a_cut_costs_answers_on_the_embedded_model() -> None:
    """All tokens answer most questions; a fortieth of them, taken blindly, fewer."""
    whole, cut = scene_rows(["random:0.025"], [], 72, 7, None)
    assert whole["accuracy"] > 0.6 and cut["accuracy"] < whole["accuracy"] - 0.1
    blind = evaluate.run_scenes("tiny-scenes", 72, 7, control="other")
    assert blind["accuracy"] < whole["accuracy"] - 0.2
