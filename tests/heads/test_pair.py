"""Two channels per step: the mask hides the partner, places are shared."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from codebook_models import llama
from torch import Tensor

from mmfast.heads.pair import PairHead
from mmfast.models.decoder.backbone import StreamDecoder
from mmfast.ops.stream_cache import advance, empty


def _head(**options: Any) -> PairHead:
    torch.manual_seed(0)
    head = PairHead(32, 16, ffn=32, **options).eval()
    for weight in (head.table.weight, head.channel, head.lift):
        torch.nn.init.normal_(weight, std=0.6)
    return head


def _oracle(model: Any, head: PairHead, codes: Tensor) -> Tensor:
    """What each channel says next, from everything anew: mask and places written out."""
    steps = codes.shape[2]
    sees = torch.zeros(2 * steps, 2 * steps, dtype=torch.bool)
    for i in range(2 * steps):
        for j in range(2 * steps):
            sees[i, j] = j // 2 < i // 2 or i == j
    place = torch.arange(steps).repeat_interleave(2)[None].expand(len(codes), -1)
    mask = sees[None, None].expand(len(codes), -1, -1, -1)
    with torch.no_grad():
        hidden = model.model(
            inputs_embeds=head.embed(codes), attention_mask=mask, position_ids=place
        ).last_hidden_state
        return head.logits(head.init_state(len(codes)), hidden)[1][:, :, -1].argmax(-1)


def test_the_mask_is_that_of_the_paper() -> None:
    step = advance(empty(1), 8, width=2)
    assert step.place.tolist() == [[0, 0, 1, 1, 2, 2, 3, 3]]
    want = torch.ones(8, 8).tril().bool()
    for odd in range(1, 8, 2):
        want[odd, odd - 1] = False  # b of a step does not see a of it
    assert torch.equal(step.sees[0], want)


def test_a_channel_does_not_see_its_partner_in_the_same_step() -> None:
    head, hidden = _head(layers=2), torch.randn(1, 12, 32)
    other = hidden.clone()
    other[:, 6] += 1  # channel a of step 3
    with torch.no_grad():
        one, two = (head.logits(head.init_state(1), h)[1] for h in (hidden, other))
    torch.testing.assert_close(one[:, 1, 3], two[:, 1, 3])
    assert not torch.allclose(one[:, 1, 4], two[:, 1, 4])
    assert not torch.allclose(one[:, 0, 3], two[:, 0, 3])


def test_the_loss_is_that_of_the_loop() -> None:
    head, hidden, codes = _head(), torch.randn(2, 10, 32), torch.randint(16, (2, 2, 5))
    codes[1, 0, 3] = -100
    with torch.no_grad():
        _, logits = head.logits(head.init_state(2), hidden)
        found = head.loss(hidden, codes)
    lost = [
        -float(logits[b, c, t].log_softmax(-1)[codes[b, c, t + 1]])
        for b in range(2)
        for c in range(2)
        for t in range(4)
        if codes[b, c, t + 1] >= 0
    ]
    assert len(lost) == 15
    assert float(found.loss) == pytest.approx(sum(lost) / 15, rel=1e-5)


def test_it_learns() -> None:
    torch.manual_seed(0)
    head, codes = PairHead(16, 8, heads=2, ffn=32), torch.randint(8, (1, 2, 9))
    optimiser = torch.optim.Adam(head.parameters(), 1e-2)
    for _ in range(80):
        optimiser.zero_grad()
        found = head.loss(head.embed(codes), codes)
        found.loss.backward()
        optimiser.step()
    assert float(found.right.min()) == 1


def test_a_thousand_dialogues_step_by_step_are_those_from_everything_anew() -> None:
    model, head = llama(), _head()
    decoder = StreamDecoder(model.get_decoder(), width=2)
    source = torch.Generator().manual_seed(0)
    codes = read = torch.randint(16, (1000, 2, 3), generator=source)
    kv, state = decoder.start(1000), head.init_state(1000)
    for _ in range(4):
        with torch.no_grad():
            kv, hidden = decoder.step(kv, head.embed(read))
            state, logits = head.logits(state, hidden)
        said = logits[:, :, -1].argmax(-1)
        assert torch.equal(said, _oracle(model, head, codes))
        user = torch.randint(16, (1000,), generator=source)
        read = torch.stack([user, said[:, 1]], dim=1)[:, :, None]
        codes = torch.cat([codes, read], dim=2)
    assert len(torch.unique(codes[:, 1, 3:], dim=0)) > 100


def test_without_the_mask_or_the_shared_place_it_is_another_dialogue() -> None:
    model, head = llama(), _head()
    codes = torch.randint(16, (200, 2, 6))
    decoder = StreamDecoder(model.get_decoder())  # causal, places of their own
    with torch.no_grad():
        _, hidden = decoder.step(decoder.start(200), head.embed(codes))
        _, logits = head.logits(head.init_state(200), hidden)
    assert not torch.equal(logits[:, :, -1].argmax(-1), _oracle(model, head, codes))


def test_crop_takes_steps_back() -> None:
    head, hidden = _head(), torch.randn(2, 8, 32)
    one, _ = head.draft(head.init_state(2), hidden[:, :2])
    two, want = head.draft(one, hidden[:, 2:4])
    three, _ = head.draft(two, hidden[:, 4:6])
    again, said = head.draft(head.crop(three, torch.tensor([1, 1])), hidden[:, 2:4])
    assert torch.equal(said, want)
    torch.testing.assert_close(again.keys[0], two.keys[0])
