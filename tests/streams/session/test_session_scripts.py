"""A stream is written as the stock processor writes the whole clip: ids, embeddings, positions."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from stream_tools import EMBEDDED, FAMILIES, Watcher, seconds, seen_by_decoder, shot, stock, watcher

from mmfast.core.errors import MmfastError, ModelError
from mmfast.streams.families import positions_of, prove, script_for
from mmfast.streams.frontend import FrameEncoder
from mmfast.streams.script import EncodedUnit, Piece, Script, WrittenState

QUESTION = "what moves?"


def script_of(this: Watcher, fps: float = 2.0, **options: Any) -> Script:
    script = script_for(this.model, this.processor, fps, **options)
    prove(script)
    return script


def write(
    this: Watcher,
    script: Script,
    state: WrittenState,
    shots: list[Any],
    split: int = 1,
    **options: Any,
) -> tuple[WrittenState, list[Piece]]:
    """Frames to pieces, `split` units in one call of the encoder; an odd last frame is doubled."""
    encoder = FrameEncoder(this.model, this.processor, **{"sized_for": len(shots), **options})
    groups = [shots[i : i + script.frames] for i in range(0, len(shots), script.frames)]
    groups = [group + group[-1:] * (script.frames - len(group)) for group in groups]
    pieces: list[Piece] = []
    for at in range(0, len(groups), split):
        for unit in encoder(groups[at : at + split]):
            state, new = script.patch(state, unit)
            pieces += new
    return state, pieces


def check(this: Watcher, script: Script, pieces: list[Piece], inputs: Any) -> None:
    """Pieces against what the text model gets in the stock forward pass."""
    seen = seen_by_decoder(this, inputs)
    ids = torch.cat([piece.ids for piece in pieces if piece.ids is not None])
    assert ids.tolist() == inputs["input_ids"][0].tolist()
    stock = this.model._prepare_position_ids_for_generation(inputs["input_ids"], dict(inputs))
    assert torch.equal(positions_of(pieces), stock.reshape(-1, len(ids))[-script.axes :])
    embeds = torch.cat([piece.embeds for piece in pieces])
    torch.testing.assert_close(embeds, seen["inputs_embeds"][0], atol=1e-5, rtol=1e-5)
    planes = seen.get("deepstack_visual_embeds") or []
    for plane, wanted in enumerate(planes):
        mine = torch.cat([piece.planes[plane] for piece in pieces if piece.planes])
        torch.testing.assert_close(mine, wanted, atol=1e-5, rtol=1e-5)
    if planes:
        none = torch.zeros(0, dtype=torch.bool)
        visual = [
            torch.zeros(len(p.embeds), dtype=torch.bool) if p.visual is None else p.visual
            for p in pieces
        ]
        assert torch.equal(torch.cat([none, *visual]), seen["visual_pos_masks"][0])


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("family", [*FAMILIES, EMBEDDED])
@pytest.mark.parametrize(("frames", "split", "fps"), [(7, 1, 2.0), (6, 3, 0.7), (3, 2, 25.0)])
def test_a_clip(family: str, frames: int, split: int, fps: float) -> None:
    this = watcher(family)
    if family == "qwen2_5_vl" and 2 / fps % 1:
        placed = inspect.signature(this.model.base_model.get_vision_position_ids)
        if isinstance(placed.parameters["time_interval"].default, int):
            pytest.skip("stock Qwen2.5-VL of this release counts whole seconds between patches")
    script = script_of(this, fps)
    shots = list(zip(this.clip(frames), seconds(frames, fps), strict=True))
    state, pieces = write(this, script, WrittenState(), shots, split)
    pieces += script.question(state, QUESTION)
    clip = shot([f for f, _ in shots], [t for _, t in shots], fps)
    check(this, script, pieces, stock(this, [clip, QUESTION]))


@pytest.mark.parametrize("family", FAMILIES)
def test_an_exchange_and_the_video_goes_on(family: str) -> None:
    this = watcher(family)
    script = script_of(this)
    clips = [list(zip(this.clip(4, i), seconds(4, start=3.0 * i), strict=True)) for i in (0, 1)]
    state, pieces = write(this, script, WrittenState(), clips[0], sized_for=4)
    pieces += script.question(state, QUESTION)
    pieces.append(script.text(script.wording.text("a ball")))
    state, more = write(this, script, script.answered(state), clips[1], sized_for=4)
    pieces += [*more, *script.question(state, "and now?")]
    first, second = (shot([f for f, _ in c], [t for _, t in c]) for c in clips)
    turns = [first, QUESTION], ["a ball"], [second, "and now?"]
    check(this, script, pieces, stock(this, *turns))


@pytest.mark.parametrize("family", FAMILIES)
def test_questions_without_frames(family: str) -> None:
    this = watcher(family)
    script = script_of(this)
    check(this, script, script.question(WrittenState(), QUESTION), stock(this, [QUESTION]))
    shots = list(zip(this.clip(2), seconds(2), strict=True))
    state, pieces = write(this, script, WrittenState(), shots)
    pieces += script.question(state, QUESTION)
    pieces.append(script.text(script.wording.text("a ball")))
    pieces += script.question(script.answered(state), "sure?")
    clip = shot([f for f, _ in shots], [t for _, t in shots])
    check(this, script, pieces, stock(this, [clip, QUESTION], ["a ball"], ["sure?"]))


@pytest.mark.parametrize("family", [*FAMILIES, EMBEDDED])
def test_control_tokens_that_a_user_writes_stay_text(family: str) -> None:
    this = watcher(family)
    script, tokenizer = script_of(this), this.processor.tokenizer
    names = sorted({tokenizer.eos_token, "<|end|>", "<|im_end|>"} & {*tokenizer.get_added_vocab()})
    assert names
    asked = f"what is {' or '.join(names)}?"
    shots = list(zip(this.clip(2), seconds(2), strict=True))
    state, pieces = write(this, script, WrittenState(), shots)
    pieces += script.question(state, asked)
    pieces.append(script.text(script.wording.text("a ball")))
    pieces += script.question(script.answered(state), asked)
    clip = shot([f for f, _ in shots], [t for _, t in shots])
    inputs = stock(this, [clip, asked], ["a ball"], [asked])
    check(this, script, pieces, inputs)
    plain = stock(this, [clip, "what is it?"], ["a ball"], ["what is it?"])["input_ids"].tolist()
    for number in tokenizer.convert_tokens_to_ids(names):
        assert inputs["input_ids"].tolist()[0].count(number) == plain[0].count(number)
    first = torch.cat([piece.ids for piece in script.question(WrittenState(), asked)])
    assert first.tolist() == stock(this, [asked])["input_ids"][0].tolist()


def test_uneven_times_of_qwen2_5() -> None:
    """Times off the stream's rate are followed on the time axis, and nothing is lost on the way."""
    this = watcher("qwen2_5_vl")
    script = script_of(this, fps=1.0)
    shots = list(zip(this.clip(8), [10.0, 11.0, 12.0, 12.3, 15.1, 15.2, 18.0, 19.0], strict=True))
    state, pieces = write(this, script, WrittenState(), shots)
    positions = positions_of(pieces)[0, len(pieces[0].embeds) :]
    n = len(pieces[1].embeds)
    rate = this.model.config.vision_config.tokens_per_second
    wanted = [int(rate * t + 0.01) for t in (0.0, 2.0, 5.1, 8.0)]
    assert (positions[::n] - positions[0]).tolist() == wanted
    (tail,) = script.question(state, QUESTION)
    assert tail.level and positions_of([*pieces, tail])[:, -1].unique().numel() == 1


def test_frames_share_the_pixels_of_a_long_clip() -> None:
    """Qwen3-VL makes the frames of long clips smaller; a stream does as for a clip of so many."""
    this = watcher("qwen3_vl")
    processor = copy.deepcopy(this.processor)
    processor.video_processor.size = {"shortest_edge": 16, "longest_edge": 8 * 24 * 40}
    small = Watcher(this.family, this.model, processor, this.size)
    script = script_of(small)
    shots = list(zip(small.clip(8), seconds(8), strict=True))
    state, pieces = write(small, script, WrittenState(), shots)
    pieces += script.question(state, QUESTION)
    clip = shot([f for f, _ in shots], [t for _, t in shots])
    inputs = stock(small, [clip, QUESTION])
    full = stock(this, [clip, QUESTION])
    assert inputs["input_ids"].shape[1] < full["input_ids"].shape[1]
    check(small, script, pieces, inputs)


@pytest.mark.parametrize("family", FAMILIES)
def test_reduced_frames_keep_their_places(family: str) -> None:
    """Dropped tokens leave gaps; a frame that keeps none moves what follows just the same."""
    this = watcher(family)
    script = script_of(this)
    encoder = FrameEncoder(this.model, this.processor, sized_for=6)
    shots = list(zip(this.clip(6), seconds(6), strict=True))
    groups = [shots[i : i + script.frames] for i in range(0, 6, script.frames)]
    full, part = WrittenState(), WrittenState()
    want: list[torch.Tensor] = []
    pieces: list[Piece] = []
    for i, unit in enumerate(encoder(groups)):
        keep = torch.arange(1, unit.n, 3)[: 0 if i == 1 else None]
        full, pieces_full = script.patch(full, unit)
        planes = tuple(plane[keep] for plane in unit.planes)
        short = EncodedUnit(unit.features[keep], unit.grid, unit.times, keep, planes)
        part, pieces_part = script.patch(part, short)
        want, pieces = [*want, *pieces_full], [*pieces, *pieces_part]
    want += script.question(full, QUESTION)
    pieces += script.question(part, QUESTION)
    everything = {tuple(p) for p in positions_of(want).T.tolist()}
    positions = positions_of(pieces)
    assert {tuple(p) for p in positions.T.tolist()} <= everything
    assert torch.equal(positions[:, -1], positions_of(want)[:, -1])


def test_what_cannot_be_streamed() -> None:
    this = watcher("qwen2_5_vl")
    script = script_of(this)
    with pytest.raises(MmfastError, match="placeholder"):
        script.question(WrittenState("video"), "what is <|video_pad|>?")
    with pytest.raises(MmfastError, match="empty"):
        script.question(WrittenState("video"), " ")
    processor = copy.copy(this.processor)
    processor.chat_template = "{{ messages[0]['content'][1]['text'] }}<|video_pad|>"
    with pytest.raises(ModelError, match="before the video"):
        script_for(this.model, processor, 2.0)
    processor.chat_template = None
    with pytest.raises(ModelError, match="no chat template"):
        script_for(this.model, processor, 2.0)


def test_a_system_message() -> None:
    this = watcher("llava_onevision")
    script = script_of(this, system="be brief")
    opening = script.wording.tokenizer.decode(script.wording.opening())
    assert opening.startswith("<system>\nbe brief<|end|>\n<user>\n")
