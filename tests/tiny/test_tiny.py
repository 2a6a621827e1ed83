"""The generator of the embedded video model: deterministic, and its labels are true."""

from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mmfast.tiny import training
from mmfast.tiny.evaluate import suite
from mmfast.tiny.training import Course, Optimiser, Task, mean_figures, train
from mmfast.tiny.video.clips import decode, encode, make_row
from mmfast.tiny.video.lessons import SUBSETS, choose, pack
from mmfast.tiny.video.model import (
    ASSISTANT,
    DecoderLayout,
    make_model,
    make_processor,
    make_tokenizer,
    run_decoder,
)
from mmfast.tiny.video.questions import KINDS, WORDINGS, facts
from mmfast.tiny.video.scene import (
    COLOURS,
    DIGITS,
    EVAL,
    FRAMES,
    PIXELS,
    SAMPLED,
    TRAIN,
    Scene,
    draw,
    make_scene,
    make_table,
    motion_labels,
    patch_labels,
    sampled_indices,
)

SCENES = [make_scene(EVAL, 77, i) for i in range(12)]


def test_same_seed_same_clip_and_purposes_never_meet() -> None:
    first, again = make_scene(TRAIN, 3, 5), make_scene(TRAIN, 3, 5)
    assert first.things == again.things and first.panel == again.panel
    assert encode(draw(first).frames) == encode(draw(again).frames)
    assert make_scene(EVAL, 3, 5).things != first.things


def test_suite_is_stable_and_even() -> None:
    cases = suite(16, seed=4)
    assert [c.kind for c in cases] == [*KINDS, *KINDS]
    assert cases[:8] == suite(8, seed=4)
    assert cases[:8] != suite(8, seed=5)


def test_colour_at_the_true_centre_after_h264() -> None:
    checked = 0
    for scene in SCENES:
        drawing = draw(scene)
        frames, table = decode(encode(drawing.frames)), make_table(scene, drawing)
        for i, thing in enumerate(scene.things):
            for t, frame in enumerate(sampled_indices(FRAMES)):
                # Where it is drawn is computed here from the scene, not from the table.
                at = np.asarray(thing.start) + frame * np.asarray(thing.velocity)
                x, y = ((at + scene.shake[frame]) * PIXELS / 96).round().astype(int)
                if not thing.born <= frame < thing.gone or table.seen[i, t] < 0.99:
                    continue
                seen = frames[t, y - 3 : y + 4, x - 3 : x + 4].reshape(-1, 3).mean(0)
                gap = np.abs(seen - np.asarray(COLOURS[thing.colour])).max()
                assert gap < 30, (scene, thing, frame, seen)
                checked += 1
    assert checked > 100


def test_number_is_readable_from_the_decoded_file() -> None:
    patterns = np.array([[[r >> b & 1 for b in (4, 3, 2, 1, 0)] for r in d] for d in DIGITS])
    scene = next(s for s in SCENES if s.panel)
    panel = scene.panel
    assert panel is not None
    frame = decode(encode(draw(scene).frames), FRAMES)[panel.born + 1].mean(-1)
    left, top = (2 * c for c in panel.corner)
    digits = []
    for place in range(2):
        glyph = frame[top + 6 : top + 41, left + 3 + 32 * place : left + 28 + 32 * place]
        dots = glyph.reshape(7, 5, 5, 5).mean((1, 3)) > 120
        digits.append(int((patterns == dots).mean((1, 2)).argmax()))
    assert digits[0] * 10 + digits[1] == panel.number


def test_answers_follow_from_the_trajectories() -> None:
    kinds = set()
    for scene in SCENES:
        by_name = {t.name: t for t in scene.things}
        for fact in facts(make_table(scene, draw(scene))):
            kinds.add(fact.kind)
            named = [by_name[slot] for slot in fact.slots if slot in by_name]
            if fact.kind == "direction":
                vx, vy = named[0].velocity
                sides = ("left", "right") if abs(vx) > abs(vy) else ("up", "down")
                assert fact.answer == sides[int((vx if abs(vx) > abs(vy) else vy) > 0)]
            elif fact.kind == "speed":
                assert fact.answer == max(named, key=lambda t: np.hypot(*t.velocity)).name
            elif fact.kind == "first":
                assert fact.answer == min(named, key=lambda t: t.born).name
            elif fact.kind == "position":
                frame = 0 if fact.slots[1] == "start" else FRAMES - 1
                x, y = named[0].path()[frame] + scene.shake[frame]
                assert fact.answer == f"{'top' if y < 48 else 'bottom'} " + (
                    "left" if x < 48 else "right"
                )
                assert named[0].alive()[frame]
            elif fact.kind == "count":
                assert fact.answer == str(len(scene.things))
            elif fact.kind == "number":
                assert scene.panel is not None and fact.answer == str(scene.panel.number)
            else:
                same = [t for t in scene.things if fact.slots[0] in (t.shape, t.colour)]
                assert [fact.answer] == [getattr(t, fact.kind) for t in same]
    assert kinds == set(KINDS)


def _reversed(scene: Scene) -> Scene:
    """Play a scene backwards."""
    things = []
    for thing in scene.things:
        vx, vy = thing.velocity
        x, y = thing.start
        end = (x + vx * (FRAMES - 1), y + vy * (FRAMES - 1))
        born, gone = FRAMES - thing.gone, FRAMES - thing.born
        things.append(replace(thing, start=end, velocity=(-vx, -vy), born=born, gone=gone))
    panel = scene.panel
    if panel is not None:
        panel = replace(panel, born=FRAMES - panel.gone, gone=FRAMES - panel.born)
    return replace(scene, things=tuple(things), panel=panel, shake=scene.shake[::-1])


def test_backwards_facts_are_the_facts_of_the_reversed_scene() -> None:
    for scene in SCENES[:6]:
        back = _reversed(scene)
        direct = make_table(back, draw(back))
        assert np.allclose(back.things[0].path(), scene.things[0].path()[::-1])
        turned = make_table(scene, draw(scene)).backwards()
        # Sampling is symmetric in time, so both ways to turn a clip agree.
        assert np.array_equal(sampled_indices(FRAMES), FRAMES - 1 - sampled_indices(FRAMES)[::-1])
        assert np.array_equal(direct.alive, turned.alive)
        assert set(facts(direct)) == set(facts(turned))


def test_dense_labels_name_what_the_patch_shows() -> None:
    for scene in SCENES[:4]:
        row = make_row(scene)
        dense = patch_labels(torch.from_numpy(row.patches), row.table)
        motion = motion_labels(torch.from_numpy(row.patches), row.table)
        for t in range(SAMPLED):
            for patch in np.flatnonzero(row.patches[t] > 0):
                owner = row.patches[t, patch]
                if owner > 4:
                    assert scene.panel is not None
                    digit = divmod(scene.panel.number, 10)[owner - 5]
                    assert dense.classes["digit"][t, patch] == 1 + digit + 10 * (owner - 5)
                    continue
                thing = scene.things[owner - 1]
                assert dense.classes["colour"][t, patch] == 1 + list(COLOURS).index(thing.colour)
                spot = np.array([patch % 12 + 0.5, patch // 12 + 0.5]) + np.asarray(
                    dense.offset[t, patch]
                )
                place = row.table.place[owner - 1, t] / 8
                assert np.allclose(spot, place, atol=1e-3)
                way = int(motion["way"][t, patch])
                if way >= 0:
                    main = int(np.abs(thing.velocity).argmax())
                    assert way == 2 * main + (thing.velocity[main] > 0)


def test_packed_questions_equal_single_questions() -> None:
    torch.manual_seed(0)
    model = make_model(440, 0)
    lm = model.model.language_model.eval()
    for parameter in lm.parameters():
        if parameter.ndim == 2:  # the small initial weights make attention flat and tests blind
            torch.nn.init.normal_(parameter, 0, 0.08)
    packed = pack([[([7, 8, 9], [11]), ([12, 13], [14, 15])], [([7, 9], [11]), ([20], [21])]])
    prefix = torch.randn(2, 17, 192) * 0.3
    at = torch.cat([torch.arange(16), torch.tensor([40])]).expand(2, -1)  # tokens were dropped
    text_at = 41 + packed.within
    embed = lm.embed_tokens
    with torch.no_grad():
        layout = DecoderLayout(at, text_at, [packed.bias(torch.zeros(2, 17))])
        out = run_decoder(lm, prefix, embed(packed.ids), layout).states
        for row in range(2):
            for number in range(2):
                mine = packed.block[row] == number
                alone = torch.cat([prefix[row], embed(packed.ids[row, mine])])[None]
                places = torch.cat([at[row], text_at[row, mine]])[None]
                mask = torch.ones(1, alone.shape[1], alone.shape[1], dtype=torch.bool).tril()[None]
                stock = lm(inputs_embeds=alone, position_ids=places, attention_mask=mask)
                assert torch.allclose(stock.last_hidden_state[0, 17:], out[row, mine], atol=2e-5)
    assert (packed.labels[0] >= 0).sum() == 5  # answers and their ends


@pytest.mark.parametrize("way", SUBSETS)
def test_augmentation_keeps_exactly_what_was_asked(way: str) -> None:
    still = torch.randn(2, 1, 299, 16)
    assert choose(still, 30, way, torch.Generator()).shape == (2, 30)
    tokens = torch.randn(3, 8, 36, 16)
    for keep in (1, 29, 287):
        kept = choose(tokens, keep, way, torch.Generator().manual_seed(0))
        assert kept.shape == (3, keep)
        assert keep == 1 or bool((kept.diff(dim=1) > 0).all())


class _Fit(Task):
    """A matrix and a vector that are fitted to noise."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.weight = torch.nn.Parameter(torch.randn(24, 60) * 0.1)
        self.shift = torch.nn.Parameter(torch.zeros(24))
        self.optimiser = Optimiser([self.weight], [self.shift], 0.02)
        self.resumed = -1

    def batches(self, step: int, done: float) -> list[torch.Tensor]:
        draw = torch.Generator().manual_seed(step)
        return [torch.randn(8, 60, generator=draw) for _ in range(2)]

    def loss(self, batch: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
        loss = (batch @ self.weight.T + self.shift - 1).square().mean()
        return loss, {"loss": loss.item()}

    def look(self) -> dict[str, float]:
        return {"norm": float(self.weight.detach().norm())}

    def resume(self, step: int) -> None:
        self.resumed = step


@pytest.mark.parametrize("parallel", [False, True])
def test_an_interrupted_run_continues_where_it_was(tmp_path: Path, parallel: bool) -> None:
    """Parameters, momentum and steps of two runs are those of one."""
    path = tmp_path / "run.pt"
    rows: list[dict[str, object]] = []
    whole, first, second = _Fit(), _Fit(), _Fit()
    for task in (whole, first, second):
        task.parallel = parallel
    flat: dict[str, Any] = {"warm": 1e-9, "hold": 1.0, "every": 5}
    assert train(whole, Course("fit", steps=20, **flat), rows.append) == 20
    train(first, Course("fit", steps=8, **flat), rows.append, checkpoint=path)
    train(second, Course("fit", steps=20, **flat), rows.append, checkpoint=path)
    assert second.resumed == 8
    assert torch.allclose(whole.weight, second.weight, atol=1e-5)
    assert torch.allclose(whole.shift, second.shift, atol=1e-5)
    losses = [row["loss"] for row in rows if row["stage"] == "fit"][:4]
    assert losses[-1] < 0.8 * losses[0]
    assert [row["step"] for row in rows if row["stage"] == "held-out"] == [20, 8, 20]


def test_figures_are_averaged_by_name() -> None:
    rows = [{"a": 1.0, "b": [0, 2], "c": {"d": 1}}, {"b": [1, 4], "c": {"d": 2, "e": 5}}]
    assert mean_figures(rows) == {"a": 1.0, "b": [0.5, 3.0], "c": {"d": 1.5, "e": 5.0}}


def test_tokenizer_is_robust_to_case_and_unknown_words() -> None:
    tokenizer = make_tokenizer()
    asked = tokenizer("Which WAY does the red circle move?").input_ids
    assert asked == tokenizer("which way does the red circle move?").input_ids
    assert len(asked) == 8
    assert tokenizer.decode(tokenizer("Wo ist der Kreis? 数").input_ids) == "wo ist der kreis? 数"
    number = tokenizer("47").input_ids
    assert len(number) == 2 and tokenizer.decode(number) == "47"
    longest = max(len(tokenizer(w).input_ids) for ws in WORDINGS.values() for w in ws)
    assert longest < 24


def test_chat_template_puts_the_video_first() -> None:
    processor = make_processor()
    content = [{"type": "text", "text": "What?"}, {"type": "video"}]
    chat = [{"role": "user", "content": content}]
    text = processor.apply_chat_template(chat, add_generation_prompt=True)
    assert text == "<|user|><video>What?<|assistant|>"
    assert processor.tokenizer.convert_tokens_to_ids("<|assistant|>") == ASSISTANT


@pytest.mark.parametrize("native", [False, True])
def test_training_is_in_bfloat16_where_the_processor_multiplies_it(
    monkeypatch: pytest.MonkeyPatch, native: bool
) -> None:
    monkeypatch.setattr(training, "has_bfloat16", lambda: native)
    with training.fast():
        product = torch.ones(2, 3) @ torch.ones(3, 4)
    assert product.dtype == (torch.bfloat16 if native else torch.float32)


RECIPES = ["rankers", "router", "student", "video.background", "video.compressors", "video.folding"]
RECIPES += ["text.concepts", "text.drafts", "text.exits", "text.train", "translation.train"]
RECIPES += ["translation.train_interleaved", "scenes.doubts", "scenes.train", "document.train"]
RECIPES += ["speech.train", "speech.train_overlap", "stream.train", "video.train"]


@pytest.mark.parametrize("value", ["nan", "inf", "-1", "soon"])
@pytest.mark.parametrize("name", RECIPES)
def test_numbers_that_no_recipe_can_take_end_it(
    name: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        import_module(f"mmfast.tiny.{name}").main(["--minutes", value])
    told = capsys.readouterr().err.splitlines()[-1]
    assert f"argument --minutes: {value!r} is no number; give one from 0 on" in told


@pytest.mark.parametrize("name", [*RECIPES, "speech.turns", "translation.train_stability"])
def test_a_folder_that_cannot_be_written_ends_a_recipe_before_its_work(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "file"
    file.touch()
    more = ["--reduce", "key_clip:36"] if name == "student" else []
    with pytest.raises(SystemExit, match=r"^2$"):
        import_module(f"mmfast.tiny.{name}").main([*more, "--out", str(file / "out" / "of")])
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith(f"error: '{file}") and "written: Not a directory" in told


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        ("text.concepts", ["--tokens", "0"], "--tokens: '0' is no whole number; give one from 1"),
        ("video.compressors", ["--tokens", "37"], "--tokens must be 1 to 36, the patches of a"),
        ("video.folding", ["--seed", "1.5"], "--seed: '1.5' is no whole number; give one from 0"),
        ("text.exits", ["--data", "nowhere.txt"], "--data: 'nowhere.txt' does not exist; name"),
        ("speech.train", ["--start", ""], "--start: '' does not exist; name a file or folder"),
    ],
)
def test_what_a_recipe_cannot_use_is_named(
    name: str, given: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        import_module(f"mmfast.tiny.{name}").main(given)
    assert said in capsys.readouterr().err.splitlines()[-1]
