"""Codebook groups in parallel: steps = whole, the loss of the loop, batch = one by one."""

from __future__ import annotations

import pytest
import torch
from codebook_models import depth_core

from mmfast.core.errors import SpecError
from mmfast.decoding.codebooks import CodeChoice, FrameDecoder, one_by_one, parallel
from mmfast.heads.groups import GroupsHead
from mmfast.ops.codebooks import adaptive_weights, code_loss
from mmfast.ops.stream_cache import empty


def _head(**options: int) -> GroupsHead:
    torch.manual_seed(0)
    sizes = {"groups": 2, "dim": 24, "ffn": 32, "layers": 2} | options
    head = GroupsHead(32, 4, 16, **sizes).eval()  # type: ignore[arg-type]
    torch.nn.init.normal_(head.inputs.table.weight, std=0.5)
    return head


@pytest.mark.parametrize("window", [None, 4])
def test_steps_are_the_whole(window: int | None) -> None:
    head, hidden = _head(window=window), torch.randn(3, 10, 32)  # type: ignore[arg-type]
    with torch.no_grad():
        _, whole = head.logits(head.init_state(3), hidden)
        state, parts = head.init_state(3), []
        for at, n in ((0, 1), (1, 4), (5, 1), (6, 4)):
            state, part = head.logits(state, hidden[:, at : at + n])
            parts.append(part)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-4, atol=1e-5)
    assert window is None or state.kv.keys[0].shape[2] == 3  # type: ignore[union-attr]


def test_a_group_is_its_own_projection_through_the_shared_layers() -> None:
    head, hidden = _head(), torch.randn(1, 6, 32)
    with torch.no_grad():
        _, found = head.logits(head.init_state(1), hidden)
        for group in range(2):
            x = hidden @ head.project.weight[group].T
            _, x = head.stack(empty(1), x)
            for book in (2 * group, 2 * group + 1):
                want = head.norm(x) @ head.out.weight[book].T
                torch.testing.assert_close(found[:, :, book], want, rtol=1e-4, atol=1e-5)


def test_the_adaptive_weights_are_those_of_the_loop() -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 4, 5, 7) * 2
    codes = torch.randint(8, (3, 4, 5))  # 7 is no code
    found = adaptive_weights(logits, codes, power=0.3, ceiling=0.5)
    left_out = 0
    for place in torch.cartesian_prod(torch.arange(3), torch.arange(4)).tolist():
        probs, product, want = logits[*place].softmax(-1), 1.0, []
        for book, code in enumerate(codes[*place].tolist()):
            p = float(probs[book, code]) if code < 7 else 1.0
            weight = product**0.3
            if code == 7 or p > 0.5:
                weight, left_out = 0.0, left_out + 1
            want.append(weight)
            product *= p
        most = max(want)
        want = [w / most if most else 0.0 for w in want]
        assert found[*place].tolist() == pytest.approx(want, abs=1e-5)
    assert 0 < left_out < 60


def test_the_loss_is_that_of_the_loop() -> None:
    torch.manual_seed(0)
    logits, codes, weights = (
        torch.randn(2, 3, 4, 5),
        torch.randint(6, (2, 3, 4)),
        torch.rand(2, 3, 4),
    )
    total, number = 0.0, 0
    for b in range(2):
        for t in range(3):
            for q in range(4):
                if codes[b, t, q] < 5:
                    logp = logits[b, t, q].log_softmax(-1)[codes[b, t, q]]
                    total, number = total - float(weights[b, t, q] * logp), number + 1
    assert float(code_loss(logits, codes, weights).loss) == pytest.approx(total / number, rel=1e-5)


def test_it_learns_with_the_adaptive_loss() -> None:
    torch.manual_seed(0)
    head = GroupsHead(16, 4, 8, groups=2, dim=16, ffn=32, layers=1)
    hidden, codes = torch.randn(1, 6, 16), torch.randint(8, (1, 6, 4))
    optimiser = torch.optim.Adam(head.parameters(), 1e-2)
    for _ in range(80):
        optimiser.zero_grad()
        found = head.loss(hidden, codes)
        found.loss.backward()
        optimiser.step()
    assert float(found.right.min()) == 1


def test_crop_takes_steps_back() -> None:
    head, hidden = _head(), torch.randn(2, 5, 32)
    state, kept = head.init_state(2), []
    for step in range(5):
        state, _ = head.draft(state, hidden[:, step])
        kept.append(state)
    back = head.crop(state, 2)
    assert torch.equal(back.codes, kept[2].codes)
    again, codes = head.draft(back, hidden[:, 3])
    assert torch.equal(codes, kept[3].codes[:, -1]) and again.kv is not None
    torch.testing.assert_close(again.kv.keys[0], kept[3].kv.keys[0])  # type: ignore[union-attr]


def test_a_thousand_streams_together_are_those_one_by_one() -> None:
    torch.manual_seed(1)
    head = GroupsHead(32, 4, 16, groups=2, delays=(0, 1, 1, 2), dim=24, ffn=32).eval()
    hidden = torch.randn(6, 1000, 32)

    def say(rows: torch.Tensor) -> torch.Tensor:
        state, frames = head.init_state(len(rows)), []
        for step in hidden:
            state, codes = head.draft(state, step[rows])
            frames.append(codes)
        return torch.stack(frames, dim=2)

    said = say(torch.arange(1000))
    assert len(torch.unique(said.flatten(1), dim=0)) > 500
    for row in range(0, 1000, 50):
        assert torch.equal(say(torch.tensor([row]))[0], said[row])
    for start in range(0, 1000, 250):  # among other streams: the same
        order = torch.randperm(250) + start
        assert torch.equal(say(order), said[order])


def test_it_drafts_for_a_depth_transformer() -> None:
    core = depth_core("csm")
    head = GroupsHead(24, 8, 32, groups=4, dim=16, layers=0).eval()
    hidden, first = torch.randn(40, 24), torch.randint(40, (40,))
    decoder = FrameDecoder(core, parallel(head.guess))
    choice, before = CodeChoice(), torch.zeros(40, 8, dtype=torch.long)
    right = one_by_one(core, hidden, first, choice)
    assert torch.equal(decoder.frame(hidden, first, before, choice), right)


def test_groups_that_do_not_divide_are_named() -> None:
    with pytest.raises(SpecError, match=r"groups=3 .* 4 codebooks; choices: \[1, 2, 4\]"):
        GroupsHead(8, 4, 8, groups=3)
