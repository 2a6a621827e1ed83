"""Recipes on a device: what is drawn depends on no worker, and labels are those of single clips."""

from dataclasses import astuple
from typing import Any

import numpy as np
import pytest
import torch

from mmfast.tiny import training
from mmfast.tiny.document.train import draw_page
from mmfast.tiny.scenes import looks
from mmfast.tiny.scenes import train as scenes_train
from mmfast.tiny.scenes.bank import SceneBank
from mmfast.tiny.scenes.facts import picture_items
from mmfast.tiny.scenes.lessons import KINDS, SceneAsk, SceneDrawer, picture_frames
from mmfast.tiny.scenes.model import make_processor
from mmfast.tiny.scenes.train import STRANGERS, SceneLanguage
from mmfast.tiny.video import scene
from mmfast.tiny.video.clips import Bank
from mmfast.tiny.video.tower import PatchTruth

WEIGHTS = dict.fromkeys(KINDS, 1.0)


@pytest.fixture(scope="module")
def bank() -> SceneBank:
    views = [looks.make_view(scene.EVAL, 7, index) for index in range(4)]
    drawn = [looks.draw(view, scene.sampled_indices(scene.FRAMES).tolist()) for view in views]
    tables = [scene.make_table(v.scene, d) for v, d in zip(views, drawn, strict=True)]
    patches, cells = (
        torch.from_numpy(np.stack([scene.patch_owners(d, side, 0.3) for d in drawn]))
        for side in (scene.PATCHES, scene.CELLS)
    )
    return SceneBank(Bank(torch.zeros(4, 8), patches, cells, tables), views)


@pytest.fixture(scope="module")
def drawer(bank: SceneBank) -> SceneDrawer:
    return SceneDrawer(bank, picture_frames(bank, 4, 0), make_processor().tokenizer)


def _same(one: Any, two: Any) -> bool:
    pairs = zip(astuple(one), astuple(two), strict=True)
    return all(np.array_equal(a, b, equal_nan=True) if isinstance(a, np.ndarray) else a == b
               for a, b in pairs)  # fmt: skip


def _request(number: int) -> SceneAsk:
    return SceneAsk((3, number), [0, 2, 1], number % 2 == 1, 6, WEIGHTS)


def test_batches_depend_on_their_number_alone(drawer: SceneDrawer) -> None:
    """Also on none that was drawn before, as after an interruption."""
    ahead = training.DrawAhead(drawer, _request)
    first = [ahead(number) for number in range(4)]
    assert all(_same(ahead(number), first[number]) for number in (3, 1, 0))
    assert not np.array_equal(first[0].packed, first[2].packed)  # another number, other questions


SHOWN = {(9, 16): ([*range(30)], [30, 31]), (16, 9): ([*range(40, 60)], [60, 61, 62])}


def test_media_and_weights_of_a_step_are_asked_again_alike() -> None:
    task: Any = object.__new__(SceneLanguage)
    task.__dict__ |= {"seed": 4, "batch": 24, "inside": 40, "strange": np.arange(50, 60),
                      "shown": SHOWN, "weights": WEIGHTS}  # fmt: skip
    asks = [task.ask(number) for number in range(24)]
    assert task.ask(5) == asks[5] and asks[5] != asks[6]
    assert {ask.still for ask in asks} == {True, False}
    sizes = set()
    for ask in asks:
        inside, strange = range(40), range(50, 60)
        if ask.still:
            size = next(size for size, (known, _) in SHOWN.items() if ask.media[0] in known)
            (inside, strange), sizes = SHOWN[size], sizes | {size}
        foreign = 2 * STRANGERS
        assert all(medium in inside for medium in ask.media[:-foreign]) and len(ask.media) == 24
        assert all(medium in strange for medium in ask.media[-foreign:])
    assert sizes == {*SHOWN}  # pictures of a batch are of one
    task.shown = {}
    assert not any(task.ask(number).still for number in range(12))


@pytest.mark.slow
def test_workers_draw_what_the_caller_draws(drawer: SceneDrawer) -> None:
    plain, ahead = (training.DrawAhead(drawer, _request, workers) for workers in (0, 2))
    assert all(_same(plain(number), ahead(number)) for number in range(5))
    assert len(ahead.waiting) == 5
    ahead.close()
    assert not ahead.path.exists()


def test_the_tokenizers_own_library_gives_its_ids(drawer: SceneDrawer) -> None:
    for text in ("Where is the red star at the END?", "I only know 47 shapes.", " red star", "数?"):
        assert drawer._encode(text) == drawer.tokenizer.encode(text, add_special_tokens=False)


def test_labels_of_many_frames_are_those_of_single_clips(bank: SceneBank) -> None:
    clips, times = torch.tensor([3, 0, 0, 2, 1]), torch.tensor([7, 0, 5, 2, 4])
    found = PatchTruth(bank.clips, torch.device("cpu"))(clips, times)
    for owners, labels in zip((bank.clips.patches, bank.clips.cells), found, strict=True):
        for line, (clip, time) in enumerate(zip(clips.tolist(), times.tolist(), strict=True)):
            want = scene.patch_labels(owners[clip], bank.clips.tables[clip])
            for name, label in labels.classes.items():
                assert torch.equal(label[line], want.classes[name][time])
            torch.testing.assert_close(labels.offset[line], want.offset[time], equal_nan=True)
    assert not found[0].offset.isnan().all()


def test_pictures_have_items(bank: SceneBank) -> None:
    frames = picture_frames(bank, 4, 2)
    rng, known = np.random.default_rng([2, 4]), []
    for clip, (view, table) in enumerate(zip(bank.views, bank.clips.tables, strict=True)):
        frame = int(rng.integers(scene.SAMPLED))
        known += [(clip, frame)] if picture_items(view, table, frame) else []
    assert frames == known and known
    blank = scene.Scene((), None, None, np.zeros((scene.FRAMES, 2)), 0)
    owner = np.zeros((scene.FRAMES, 2, 2), np.uint8)
    nothing = scene.make_table(blank, scene.Drawing(owner[..., None], owner, np.zeros(0, int)))
    empty = SceneBank(Bank(*[torch.zeros(1)] * 3, [nothing]), bank.views[:1])
    assert picture_frames(empty, 1, 0) == [] == picture_items(bank.views[0], nothing, 0)


def test_a_device_has_one_batch_a_step() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert training.side_by_side(cpu) == training.THREADS and training.side_by_side(cuda) == 1
    assert training.ready(cpu) == cpu


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--device", "cuda:99"], "'cuda:99' is not here; choices: cpu"),
        (["--device", "gpu"], "unknown device 'gpu'"),
        (["--hard", "where=much"], "'much' is no weight; give one, where=5"),
        (["--hard", "wher=3"], "'wher' is none of"),
    ],
)
def test_a_recipe_refuses_in_one_line(
    given: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        scenes_train.main(given)
    assert said in capsys.readouterr().err.splitlines()[-1]


def test_figures_may_wait_for_their_device() -> None:
    rows = [{"a": torch.tensor(1.0), "b": {"c": torch.tensor(2.0)}}, {"a": 4.0, "b": {"c": 3.0}}]
    assert training.mean_figures(rows) == {"a": 2.5, "b": {"c": 2.5}}


def test_pages_are_kept_as_the_bytes_that_the_processor_made() -> None:
    class Cut:
        def __call__(self, picture: np.ndarray, return_tensors: str) -> dict[str, list[Any]]:
            self.bytes = torch.from_numpy(picture[:9, :9].copy())
            return {"pixel_values": [self.bytes.float() / 127.5 - 1.0]}

    cut = Cut()
    for things, kind in ((4, "count"), (3, "after")):
        page = draw_page(cut, 0, things, 3)
        assert torch.equal(torch.from_numpy(page.pixels), cut.bytes)
        assert page.facts[-1].kind == kind
