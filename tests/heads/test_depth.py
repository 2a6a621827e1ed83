"""The depth head: one pass says what code by code says, its loss is that of the obvious loop."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from codebook_models import KINDS, depth_core, llama

from mmfast.core.registry import get, methods
from mmfast.decoding.codebooks import BlockPlan, CodeChoice, FrameDecoder, copy_frame
from mmfast.heads.base import save_head
from mmfast.heads.depth import DepthHead
from mmfast.models.decoder.backbone import load_head, make_head


def test_the_heads_are_registered() -> None:
    assert {"depth", "groups", "pair"} <= {m.name for m in methods("head")}
    assert get("depth", "head").paper == "2410.00037"


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("depth", {"codes": 4, "size": 16, "delays": [0, 1, 1, 2], "per_step": False}),
        ("groups", {"codes": 4, "size": 16, "groups": 4, "window": 9}),
        ("pair", {"size": 16, "layers": 2}),
    ],
)
def test_heads_are_made_and_kept_as_the_others(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    model = llama()
    head = make_head(name, model, **options).eval()
    save_head(head, tmp_path / "head.safetensors")
    again = load_head(tmp_path / "head.safetensors", model)
    assert again.config == head.config and again.config["head"] == name
    for one, two in zip(head.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, two)
    if name != "pair":
        assert again.delays == head.delays


@pytest.mark.parametrize("kind", KINDS)
def test_any_stretch_of_codebooks_is_one_pass(kind: str) -> None:
    core = depth_core(kind)
    hidden, tokens = torch.randn(3, 24), torch.randint(32, (3, 8))
    with torch.no_grad():
        whole = core.whole(hidden, tokens)
        for cuts in ([0, 8], [0, 1, 2, 3, 4, 5, 6, 7, 8], [0, 3, 4, 8], [0, 7, 8]):
            frame = core.begin(hidden)
            core.run(frame, torch.zeros(3, 8, dtype=torch.long), 0)  # refused: it leaves no trace
            pairs = list(itertools.pairwise(cuts))
            parts = [core.run(frame, tokens[:, a:b], a) for a, b in pairs]
            torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_code_depends_on_no_later_one(kind: str) -> None:
    core = depth_core(kind)
    hidden, tokens = torch.randn(2, 24), torch.randint(32, (2, 8))
    other = tokens.clone()
    other[:, 5:] = torch.randint(32, (2, 3))
    with torch.no_grad():
        one, two = core.whole(hidden, tokens), core.whole(hidden, other)
    torch.testing.assert_close(one[:, :5], two[:, :5])
    assert not torch.equal(one[:, 5:], two[:, 5:])


def test_the_loss_is_that_of_the_loop() -> None:
    torch.manual_seed(0)
    head = DepthHead(16, 4, 8, first=5, dim=16, ffn=16).eval()
    hidden, codes = torch.randn(2, 5, 16), torch.randint(9, (2, 5, 4))  # 8 is no code
    codes[0, 0, 1] = -100
    first = torch.randint(5, (2, 5))
    each: list[list[float]] = [[], [], [], []]
    with torch.no_grad():
        for row in range(2):
            for step in range(5):
                frame = head.begin(hidden[row, step][None])
                token = first[row, step]
                for book in range(4):
                    logits = head.run(frame, token[None, None], book)[0, 0]
                    target = codes[row, step, book]
                    if 0 <= target < 8:
                        each[book].append(-float(logits.log_softmax(-1)[target]))
                    token = target if 0 <= target < 8 else torch.tensor(8)
    found = head.loss(hidden, codes, first)
    flat = [x for book in each for x in book]
    assert float(found.loss.detach()) == pytest.approx(sum(flat) / len(flat), rel=1e-4)
    for book in range(4):
        assert float(found.each[book]) == pytest.approx(sum(each[book]) / len(each[book]), rel=1e-4)


def test_it_learns_and_gradients_reach_the_backbone() -> None:
    torch.manual_seed(0)
    head = DepthHead(16, 4, 8, dim=16, ffn=32)
    hidden = torch.randn(1, 6, 16, requires_grad=True)
    codes = torch.randint(8, (1, 6, 4))
    optimiser = torch.optim.Adam(head.parameters(), 1e-2)
    for _ in range(60):
        optimiser.zero_grad()
        found = head.loss(hidden, codes)
        found.loss.backward()
        optimiser.step()
    assert float(found.loss.detach()) < 0.1 and float(found.right.min()) == 1
    assert hidden.grad is not None and hidden.grad.abs().sum() > 0
    state, said = head.init_state(6), None
    state, said = head.draft(state, hidden[0].detach())
    assert torch.equal(said, codes[0])


def test_crop_takes_frames_back() -> None:
    head = DepthHead(16, 4, 8, dim=16, ffn=16).eval()
    one, _ = head.draft(head.init_state(2), torch.randn(2, 16))
    two, _ = head.draft(one, torch.randn(2, 16))
    assert torch.equal(head.crop(two, 1).codes, one.codes)
    assert torch.equal(head.crop(two, 9).codes, head.init_state(2).codes)


@pytest.mark.parametrize("kind", KINDS)
def test_a_thousand_frames_drafted_are_those_code_by_code(kind: str) -> None:
    torch.manual_seed(1)
    head = DepthHead(32, 4, 16, delays=(0, 1, 1, 2), dim=24, ffn=32, **KINDS[kind]).eval()
    before, said = torch.zeros(1000, 4, dtype=torch.long), []
    hidden, choice = torch.randn(5, 1000, 32), CodeChoice()
    for drafter, share in ((None, 0.0), (copy_frame, 0.0), (copy_frame, 0.3)):
        decoder, codes, frames = FrameDecoder(head, drafter, BlockPlan(4, share)), before, []
        for step in hidden:
            codes = decoder.frame(step, head.fronts(step), codes, choice)
            frames.append(codes)
        said.append(torch.stack(frames, dim=2))
    assert torch.equal(said[0], said[1]) and torch.equal(said[0], said[2])
    assert len(torch.unique(said[0].flatten(1), dim=0)) > 500  # they say different things
