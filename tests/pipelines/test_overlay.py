"""Heat maps against plain loops, pictures pixel by pixel, and the command line's refusals."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from cli_runs import CLIP, QUESTION, ROOT, fails, run
from PIL import Image
from pixel_checks import STACK, flat_video
from tiny_models import ALL_FAMILIES, tiny

import mmfast
from mmfast import Trace
from mmfast.attach import attach
from mmfast.bench.report import kept
from mmfast.core.errors import MmfastError
from mmfast.core.reduction import Mix, Reduction
from mmfast.core.trace import View, fate_of, tile_places
from mmfast.models.families.adapter import raster_places
from mmfast.pipelines.overlay import check_target, frame_pictures, save_sheet


def by_hand(n: int, chain: list[Reduction]) -> list[float]:
    """What each token's part is, followed through every stage one token at a time."""
    parts = []
    for token in range(n):
        at, part = token, 1.0
        for reduction in chain:
            slot = int(reduction.owner[at])
            if slot < 0:
                part = 0.0
                break
            mine = [i for i in range(reduction.n) if int(reduction.owner[i]) == slot]
            weight = reduction.weight
            part *= 1 / len(mine) if weight is None else float(weight[at])
            at = slot
        parts.append(part)
    return parts


def watched(family: str, spec: str, **media: Any) -> Trace:
    this = tiny(family)
    prompt = "{video}?" if "videos" in media else "{image}{image}?"[: 8 * len(media["images"])]
    inputs = this.inputs([prompt], **media)
    with attach(this.model, spec) as trace, torch.no_grad():
        this.model(**inputs)
    return trace


def test_heatmap_of_stacked_stages_reaches_the_pixel_grid() -> None:
    trace = watched("qwen2_5_vl", STACK, videos=[flat_video()])
    maps = np.stack([trace.heatmap(frame) for frame in range(4)])
    assert maps.shape == (4, 5, 7) and maps.dtype == np.float32
    want = by_hand(140, [reduction for _, _, reduction in trace.reductions])
    assert np.allclose(maps.ravel(), want)
    assert set(np.unique(maps)) == {0.0, 1.0} and maps.sum() == trace.rows[-1].tokens_out


@pytest.mark.parametrize("spec", ["tome:0.4", "evs:0.7+tome:0.5+divprune:0.5", "visionzip:0.3"])
def test_heatmap_of_merging_adds_up_to_the_tokens_left(spec: str) -> None:
    this = tiny("llava_onevision")
    trace = watched("llava_onevision", spec, videos=this.videos(1))
    chain = [reduction for _, _, reduction in trace.reductions]
    maps = [trace.heatmap(frame) for frame in range(4)]
    assert np.allclose(np.concatenate(maps).ravel(), by_hand(chain[0].n, chain), atol=1e-6)
    if "divprune" not in spec:  # a dropped output takes the parts of all its sources along
        assert np.isclose(sum(each.sum() for each in maps), chain[-1].m, rtol=1e-3)


def test_heatmap_of_tiles_is_the_mosaic_then_the_overview() -> None:
    trace = watched("llava_onevision", "divprune:0.5", images=tiny("llava_onevision").images(1))
    ((_, _, reduction),) = trace.reductions
    mosaic, overview = trace.heatmap(0), trace.heatmap(1)
    assert overview.shape == (6, 6) and mosaic.shape[0] > 6
    kept = (reduction.owner >= 0).float().numpy()
    assert np.array_equal(overview.ravel(), kept[:36])
    assert np.array_equal(mosaic.ravel(), kept[36:])
    drawn = frame_pictures(tiny("llava_onevision").images(1)[0], trace)
    left = [f"{int(kept[36:].sum())} of {kept.size - 36}", f"{int(kept[:36].sum())} of 36"]
    names = ("tiles", "overview")
    assert [line for _, line in drawn] == [
        f"{name}: {count} left, 0 merged in" for name, count in zip(names, left, strict=True)
    ]
    with pytest.raises(MmfastError, match=r"frame 2 of item 0.*0 to 1"):
        trace.heatmap(2)
    with pytest.raises(MmfastError, match="no picture of item 3; items: 0"):
        trace.heatmap(0, item=3)


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_every_family_can_be_drawn(family: str) -> None:
    """Every token has a place of its own, so nothing kept is hidden."""
    this = tiny(family)
    for kind in set(this.facts.kinds) - {"audio"}:
        media = this.media(kind, 1)
        inputs = this.inputs([f"{{{kind}}} what?"], **media)
        with attach(this.model, "divprune:0.5") as trace, torch.no_grad():
            this.model(**inputs)
        ((_, _, reduction),) = trace.reductions
        cells = trace.cells(0)
        assert sum(int(cell.stands.sum()) for cell in cells) == reduction.m
        assert sum(float(cell.share.sum()) for cell in cells) == reduction.m
        assert sum(cell.share.numel() for cell in cells) == reduction.n
        (frames,) = media.popitem()[1]
        assert mmfast.overlay(frames, trace).mode == "RGB"


def test_tiles_whose_arrangement_only_the_picture_tells() -> None:
    trace = watched("internvl", "divprune:0.5", images=tiny("internvl").images(1))
    ((_, _, reduction),) = trace.reductions
    strip, overview = trace.cells(0)
    side = overview.share.shape[0]
    tiles = reduction.n // side**2 - 1
    assert strip.share.shape == (side, tiles * side) and overview.share.shape == (side, side)
    kept = (reduction.owner >= 0).float().reshape(tiles + 1, side, side)
    assert torch.equal(overview.share, kept[-1])  # it comes last
    assert torch.equal(strip.share, torch.cat(list(kept[:-1]), dim=1))
    column = trace.cells(0, aspect=0.01)[0]
    assert torch.equal(column.share, torch.cat(list(kept[:-1]), dim=0))
    tile = torch.arange(1, 7).repeat_interleave(4)
    assert tile_places(tile, 3)[-1].tolist() == [0, 3, 5]
    assert View(tile_places(tile), tile, loose=True).shaped(1.5).place[-1].tolist() == [0, 3, 5]
    assert tile_places(torch.tensor([1, 1, 1, 2])) is None


def test_heatmap_of_the_latest_call() -> None:
    this = tiny("qwen3_vl")
    with attach(this.model, "divprune:0.5") as trace, torch.no_grad():
        for count in (2, 1):
            prompt = "{image}" * count + "?"
            this.model(**this.inputs([prompt], images=this.images(count, seed=count)))
    assert len(trace.reductions) == 3
    kept = (trace.reductions[-1][2].owner >= 0).float().numpy()
    assert np.array_equal(trace.heatmap(0).ravel(), kept)
    kept = (trace.reductions[1][2].owner >= 0).float().numpy()
    assert np.array_equal(trace.heatmap(0, item=1).ravel(), kept)


@pytest.mark.parametrize("family", ["llava_onevision", "qwen2_5_vl"])
def test_merging_in_the_tower_counts_too(family: str) -> None:
    this = tiny(family)
    trace = watched(family, "tome@vit:0.5", videos=this.videos(1))
    ((site, _, merged),) = trace.reductions
    part = merged.sizes()[merged.owner].float().reciprocal()
    fold = trace.heatmap(0)
    frames = len(trace.cells(0))
    assert site == "vit" and fold.min() > 0 and fold.max() <= 1
    cells = trace.cells(0, patches=True)
    patches = np.stack([cell.share.numpy() for cell in cells])
    assert patches.shape[0] == frames and patches.size == merged.n
    assert np.allclose(patches.ravel(), part.numpy())
    if family == "qwen2_5_vl":  # a token is the mean of 2 x 2 patches
        t, h, w = patches.shape
        blocks = patches.reshape(t, h // 2, 2, w // 2, 2).mean((2, 4))
        assert np.allclose(fold, blocks[0], atol=1e-6)


def test_mixes_and_chunks() -> None:
    mix = Mix(torch.tensor([0, 0, 1, 1]), torch.tensor([0, 2, 1, 2]), torch.tensor([2.0, 1, 1, 3]))
    fate = fate_of(4, [Reduction(torch.tensor([0, 1]), torch.tensor([0, 1, -1, -1]), mix=mix)])
    assert torch.allclose(fate.share, torch.tensor([2 / 3, 1 / 4, 3 / 4, 0]))
    assert fate.owner.tolist() == [0, 1, 1, -1] and fate.keep.tolist() == [0, 1]
    with pytest.raises(MmfastError, match="prefill_chunk_size"):
        fate_of(5, [Reduction.identity(4)])


def _trace(chain: list[Reduction], grid: tuple[int, int, int]) -> Trace:
    trace = Trace()
    trace.views[0] = View(raster_places(grid))
    for reduction in chain:
        trace.record("pre", 0, reduction)
    return trace


def test_picture_of_kept_merged_and_dropped() -> None:
    """Tokens 0 and 3 merge into 0, token 1 is kept, token 2 dropped."""
    trace = _trace([Reduction(torch.tensor([0, 1]), torch.tensor([0, 1, -1, 0]))], (1, 2, 2))
    frame = np.full((96, 96, 3), 120, np.uint8)
    sheet = np.asarray(mmfast.overlay(frame, trace))
    side, top, left = 240, 8 + 32, 8
    at = lambda y, x: sheet[top + side * y + side // 2, left + side * x + side // 2].tolist()
    assert at(0, 1) == [120, 120, 120] and max(at(1, 0)) < 30
    assert at(0, 0) == at(1, 1) and max(at(0, 0)) - min(at(0, 0)) > 60
    corner = sheet[top + 3, left + 3].tolist()
    assert corner != at(0, 0) and max(corner) == 255  # only the standing one is framed
    assert sheet[top + side + 3, left + side + 3].tolist() == at(1, 1)


def test_contact_sheet_of_a_clip_and_of_several_items(tmp_path: Path) -> None:
    video = flat_video()
    trace = watched("qwen2_5_vl", STACK, videos=[video])
    sheet = mmfast.overlay(video, trace)  # four pictures of eight frames
    assert sheet.width == 4 * (224 + 8) + 8
    assert mmfast.overlay([Image.fromarray(f) for f in video], trace).tobytes() == sheet.tobytes()
    shown = np.asarray(sheet)[8 + 32 : 8 + 32 + 160, 8 : 8 + 224].astype(float)
    kept = trace.heatmap(0) > 0
    light = shown.reshape(5, 32, 7, 32, 3).mean((1, 3, 4))
    assert light[kept].min() > light[~kept].max()
    save_sheet([sheet, sheet], tmp_path / "two.jpg")
    with Image.open(tmp_path / "two.jpg") as both:
        assert both.height == 2 * sheet.height
    with pytest.raises(MmfastError, match=r"shapes \[\[4, 4\]\]"):
        mmfast.overlay([np.zeros((4, 4))], trace)


def test_what_cannot_be_drawn_on_is_named() -> None:
    trace = _trace([Reduction.identity(4)], (1, 2, 2))
    frame = np.full((40, 40, 3), 0.5, np.float32)  # black as uint8
    for wrong, words in (("clip.mp4", r"shapes \[\[\]\]"), (frame, "float32"), ([frame], "uint8")):
        with pytest.raises(MmfastError, match=words):
            mmfast.overlay(wrong, trace)
    with pytest.raises(MmfastError, match="is no trace"):
        mmfast.overlay(frame.astype(np.uint8), SimpleNamespace(trace=trace))


def test_only_the_middle_square_was_seen() -> None:
    frame = np.zeros((40, 80, 3), np.uint8)
    frame[:, 20:60] = 200
    trace = _trace([Reduction.identity(4)], (1, 2, 2))
    sheet = np.asarray(mmfast.overlay(frame, trace, square=True))
    assert (sheet[40 : 40 + 480, 8 : 8 + 480] == 200).all()


def test_check_target(tmp_path: Path) -> None:
    for name, words in (("x.bmp2", ".png"), ("no/x.png", "No such file"), ("", "suffix")):
        with pytest.raises(MmfastError, match=words):
            check_target(tmp_path / name)
    (tmp_path / "dir.png").mkdir()
    with pytest.raises(MmfastError, match="directory"):
        check_target(tmp_path / "dir.png")
    assert check_target(tmp_path / "new.png") == tmp_path / "new.png"
    assert not (tmp_path / "new.png").exists()
    (tmp_path / "old.png").write_bytes(b"keep me")
    check_target(tmp_path / "old.png")
    assert (tmp_path / "old.png").read_bytes() == b"keep me"


def test_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "kept.png"
    spec = "evs:0.5+tome:0.5"
    command = ["ask", CLIP, QUESTION, "--reduce", spec, "--save-overlay", str(out), "--json"]
    code, text, _ = run(capsys, *command)
    assert code == 0 and set(json.loads(text)) >= {"answer", "trace"}
    with Image.open(out) as sheet:
        assert sheet.size[0] > 4 * 200
    bad = str(tmp_path / "kept.txt")
    assert ".txt" in fails(capsys, "ask", CLIP, QUESTION, "--save-overlay", bad)
    bad = str(tmp_path / "nowhere" / "kept.png")
    model = str(tmp_path)  # no model there either: the path is refused before one is looked for
    assert "nowhere" in fails(
        capsys, "ask", CLIP, QUESTION, "--save-overlay", bad, "--model", model
    )


def test_the_picture_of_the_front_page_is_what_its_command_draws(tmp_path: Path) -> None:
    kept.main(["--out", str(tmp_path / "kept.png")])
    files = tmp_path / "kept.png", *(ROOT / name for name in kept.FILES)
    new, old, copy = (np.asarray(Image.open(each).convert("RGB"), float) for each in files)
    assert new.shape == old.shape and (old == copy).all()
    assert (np.abs(new - old).max(-1) < 32).mean() > 0.97  # a patch at a threshold may differ
    bare = tmp_path / "bare"
    bare.mkdir()
    with pytest.raises(MmfastError, match=r"no README.md in 'bare'"):
        kept.main([], bare)


def test_pipeline_draws_every_picture_it_was_asked_about() -> None:
    images = tuple(np.full((96, 96, 3), 60 * i, np.uint8) for i in (1, 2))
    pipe = mmfast.pipeline("image-qa", reduce="uniform:0.25")
    answer = pipe(images, "Which one is brighter?")
    assert len(pipe.overlay(images, answer.trace)) == 2
    assert answer.trace.heatmap(0, item=1).mean() == 0.25


def test_pipeline_draws_what_it_answered() -> None:
    pipe = mmfast.pipeline("video-qa")
    answer = pipe(CLIP, QUESTION)
    assert (answer.trace.heatmap(7) == 1).all() and answer.trace.heatmap(7).shape == (6, 6)
    (sheet,) = pipe.overlay(CLIP, answer.trace)
    assert sheet.mode == "RGB"
