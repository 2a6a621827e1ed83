"""On-policy distillation: its loss by a slow way, what it gains, and what a wrong teacher costs."""

from __future__ import annotations

import copy
from typing import Any

import decode_models as small
import pytest
import torch
from torch import Tensor

from mmfast.core.errors import ModelError
from mmfast.decoding.loop import BatchDecoder
from mmfast.decoding.row import Costs, Open
from mmfast.models.decoder import distillation
from mmfast.models.decoder.backbone import Backbone, make_head
from mmfast.models.decoder.distillation import distil, draft_loss, own_text


def _prompts(n: int, seed: int) -> list[list[int]]:
    return small.sentences(n, 5, torch.Generator().manual_seed(seed)).tolist()


def _slow(model: Any, head: Any, ids: Tensor, at: int, drafts: bool) -> float:
    """One text at a time, one module at a time, the whole text read anew for every draft."""
    total = 0.0
    for line in ids:
        tokens = line[: at + 2].tolist()
        for module, weight in enumerate(head.weights()):
            text = torch.tensor([tokens])
            # The head sees the tokens in front of its modules; its states end at the place.
            hidden, _ = small.read(head.trunk, text[:, : at + 1], head.reads)
            longer = torch.cat([hidden, hidden.new_zeros(1, module + 1, hidden.shape[-1])], 1)
            mask = small.window_mask(head, longer)
            states = head(longer, head.trunk.embed(text), mask)
            q = head.output(module, states[module][:, at], slice(None)).log_softmax(-1)[0]
            p = model(input_ids=text, use_cache=False).logits[0, -1].softmax(-1)
            total += weight * float((p * (p.log() - q)).sum()) / len(ids)
            true = line[min(at + 2 + module, len(line) - 1)]  # behind the last module none is read
            tokens.append(int(q.argmax()) if drafts else int(true))
    return total


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize(("name", "window"), [("mctp", 0), ("mtp", 0), ("mctp", 1)])
def test_the_loss_is_the_divergence_behind_drafts(name: str, window: int) -> None:
    model, backbone, head = small.trained(name, window)
    ids = own_text(backbone, _prompts(3, 1), 12)
    with torch.no_grad():
        for at in (0, 6, 12):
            for share in (1.0, 0.0):
                found = float(draft_loss(head, ids, at, share=share))
                assert found == pytest.approx(_slow(model, head, ids, at, share == 1), rel=1e-5)


def _passes(head: Any, prompts: list[list[int]]) -> int:
    guides = [Open(20) for _ in prompts]
    decoder = BatchDecoder(head.trunk, head, guides, costs=Costs(0.01, 0.0))
    decoder.feed(prompts)
    list(decoder)
    return sum(stats.passes for stats in decoder.stats)


@pytest.mark.parametrize("wrong", [False, True])
def test_passes_are_saved_by_the_right_teacher_alone(
    wrong: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A teacher that is one draft late makes the head draft worse than before."""
    model = copy.deepcopy(small.trained("mctp")[0]).requires_grad_(True)
    model.zero_grad()
    backbone = Backbone(model, lean=False)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    torch.manual_seed(4)
    head = make_head("mctp", backbone, modules=3)
    unseen = _prompts(20, 2)
    if wrong:
        drafted = distillation._drafted

        def late(*given: Any) -> Any:
            line, hidden, p = drafted(*given)
            return line, hidden, p.roll(1, dims=1)

        monkeypatch.setattr(distillation, "_drafted", late)
    losses = distil(head, _prompts(48, 3), steps=50, length=20, batch=16, rate=3e-3)
    assert sum(losses[-10:]) < 0.7 * sum(losses[:10])
    alone = 20 * len(unseen)
    assert (_passes(head, unseen) < 0.6 * alone) is not wrong
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    assert all(weight.grad is None for weight in model.parameters())


def test_the_same_seed_gives_the_same_head() -> None:
    _, backbone, _ = small.trained("mtp")
    lines = []
    for seed in (0, 0, 1):
        torch.manual_seed(0)
        twin = make_head("mtp", backbone, modules=2)
        lines.append(distil(twin, _prompts(8, 5), steps=3, length=8, batch=4, seed=seed))
    assert lines[0] == lines[1] != lines[2]


def test_what_cannot_be_is_one_line() -> None:
    _, backbone, head = small.trained("mctp")
    with pytest.raises(ModelError, match="one length"):
        own_text(backbone, [[1, 2], [3]], 4)
    with pytest.raises(ModelError, match="longer texts"):
        draft_loss(head, torch.ones(1, 5, dtype=torch.long), 3)
