"""Which placeholders of an InternVL prompt are one image, and which are frames of one clip."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import tiny

from mmfast.models.families.adapter import Layout, adapter_for
from mmfast.models.families.prompt_ids import clips

CLIPS = [
    ("{video}", [12], [(12, 3, 3)]),
    ("on {video}?", [2], [(2, 3, 3)]),
    ("{video}{video}", [3, 3], [(3, 3, 3)] * 2),
    ("{video}\n{video}", [2, 2], [(2, 3, 3)] * 2),
    ("{image} {image}\n{image}", [], [(1, 3, 3)] * 3),
    ("{image}{video}{image}\n{image}", [11], [(1, 3, 3), (11, 3, 3), (1, 3, 3), (1, 3, 3)]),
    ("Image-1: {image}\nand then Image-2: {image}", [], [(1, 3, 3)] * 2),
    ("1 {image}\n2 {image}\n3 {image}\n", [], [(1, 3, 3)] * 3),
    ("Image-1: {image}\nImage-2: {image}", [], [(2, 3, 3)]),  # the one that looks like frames
]


@pytest.mark.parametrize(("text", "frames", "grids"), CLIPS)
def test_internvl_finds_its_clips_in_the_prompt(
    text: str, frames: list[int], grids: list[tuple[int, int, int]]
) -> None:
    this = tiny("internvl")
    media = {
        "images": this.images(text.count("{image}"), size=(24, 24)),
        "videos": [this.videos(1, i, n)[0] for i, n in enumerate(frames)],
    }
    inputs = this.inputs([text], **media)
    assert [
        each.grid for each in adapter_for(this.model).layout(this.model.model, "image", inputs)
    ] == grids


def test_a_prompt_that_is_not_known_leaves_tiles_alone() -> None:
    this = tiny("internvl")
    inputs = this.inputs(["{video} {image}"], videos=this.videos(1), images=this.images(1))
    call: dict[str, Any] = dict(inputs)
    adapter = adapter_for(this.model)
    tiles = [Layout(9, (1, 3, 3))] * len(call["pixel_values"])
    del call["input_ids"]
    assert adapter.layout(this.model.model, "image", call) == tiles
    call["input_ids"] = inputs["input_ids"][:, :20]
    assert adapter.layout(this.model.model, "image", call) == tiles


def test_frames_of_one_run_are_no_clip() -> None:
    ids = torch.tensor([5, 9, 9, 9, 9, 6, 1, 9, 9, 2])
    assert clips(ids, ids == 9, 2) == [[(1, 5)], [(7, 9)]]
    assert clips(ids, ids == 8, 2) == []
