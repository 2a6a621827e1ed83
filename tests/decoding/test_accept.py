"""The rules of acceptance: exact ones change no distribution, and wrong ones are noticed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mmfast.core.errors import SpecError
from mmfast.decoding.accept import (
    accept_greedy,
    accept_sampled,
    accept_typical,
    parse_rule,
)
from mmfast.decoding.sampling import draw

TRIALS, SIZE = 60_000, 5
Accept = Callable[..., tuple[Tensor, Tensor]]


def _tables(seed: int) -> tuple[Tensor, Tensor]:
    """P `[V, V]` and q: of the first token in row 0 of `[0]`, of the second given the first."""
    generator = torch.Generator().manual_seed(seed)
    p = torch.randn(SIZE + 1, SIZE, generator=generator, dtype=torch.float64).mul(1.5).softmax(-1)
    q = torch.randn(SIZE + 1, SIZE, generator=generator, dtype=torch.float64).mul(1.5).softmax(-1)
    p[0, 1], q[0, 2] = 0, 0  # tokens that one of both never says
    return p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)


def _said(accept: Accept, seed: int) -> Tensor:
    """Shares `[V, V]` of the first two tokens that drafting two and verifying them says."""
    p, q = _tables(seed)
    generator = torch.Generator().manual_seed(seed + 100)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    first = draw(q[0].expand(TRIALS, -1), uniform(TRIALS))
    second = draw(q[first + 1], uniform(TRIALS))
    drafts = torch.stack((first, second), 1)
    third = p[0].expand(TRIALS, -1)  # the place behind both: not looked at here
    target = torch.stack((p[0].expand(TRIALS, -1), p[first + 1], third), 1)
    draft = torch.stack((q[0].expand(TRIALS, -1), q[first + 1]), 1)
    counts = torch.full((TRIALS,), 2)
    accepted, token = accept(drafts, target, draft, counts, uniform(TRIALS, 2), uniform(TRIALS))
    one = torch.where(accepted > 0, first, token)
    # Where only the first stands, the token behind it is the second; where none, p goes on.
    two = torch.where(accepted > 1, second, token)
    two = torch.where(accepted > 0, two, draw(p[one + 1], uniform(TRIALS)))
    return torch.bincount(one * SIZE + two, minlength=SIZE**2).view(SIZE, SIZE) / TRIALS


def _distance(accept: Accept, seed: int) -> float:
    p, _ = _tables(seed)
    want = p[0][:, None] * p[1:]
    return float((_said(accept, seed) - want).abs().sum() / 2)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_sampling_says_what_the_backbone_alone_would(seed: int) -> None:
    assert _distance(accept_sampled, seed) < 0.013


def _always(drafts: Tensor, p: Tensor, q: Tensor, counts: Tensor, u: Tensor, v: Tensor) -> Any:
    return counts, draw(p[:, -1], v)


def _by_p(drafts: Tensor, p: Tensor, q: Tensor, counts: Tensor, u: Tensor, v: Tensor) -> Any:
    return accept_sampled(drafts, p, q, counts, u * 0 + u / _of(q, drafts).clamp(min=1e-9), v)


def _of(table: Tensor, drafts: Tensor) -> Tensor:
    return table.gather(-1, drafts[..., None]).squeeze(-1)


def _from_p(drafts: Tensor, p: Tensor, q: Tensor, counts: Tensor, u: Tensor, v: Tensor) -> Any:
    accepted, _ = accept_sampled(drafts, p, q, counts, u, v)
    return accepted, draw(p.gather(1, accepted[:, None, None].expand(-1, 1, SIZE))[:, 0], v)


def _swapped(drafts: Tensor, p: Tensor, q: Tensor, counts: Tensor, u: Tensor, v: Tensor) -> Any:
    accepted, token = accept_sampled(drafts, torch.cat((q, p[:, 2:]), 1), p[:, :2], counts, u, v)
    return accepted, token


@pytest.mark.parametrize("wrong", [_always, _by_p, _from_p, _swapped])
def test_wrong_rules_are_noticed(wrong: Accept) -> None:
    assert max(_distance(wrong, seed) for seed in (0, 1, 2)) > 0.03


def test_counts_per_stream() -> None:
    """A stream with fewer drafts ends there and says a token of its own next place."""
    p = torch.eye(4, dtype=torch.float64)[torch.tensor([[1, 2, 3], [1, 2, 3], [1, 2, 3]])]
    q, drafts = p[:, :2].clone(), torch.tensor([[1, 2], [1, 2], [0, 0]])
    counts = torch.tensor([2, 1, 0])
    u, v = torch.full((3, 2), 0.5), torch.full((3,), 0.5)
    accepted, token = accept_sampled(drafts, p, q, counts, u, v)
    assert accepted.tolist() == [2, 1, 0] and token.tolist() == [3, 2, 1]
    accepted, token = accept_greedy(drafts, p.argmax(-1), counts)
    assert accepted.tolist() == [2, 1, 0] and token.tolist() == [3, 2, 1]


def test_all_mass_on_one_token() -> None:
    """P and q agree on one token: it stands, whatever the numbers, and nothing divides by 0."""
    p = torch.zeros(2, 2, 3).index_fill_(2, torch.tensor([1]), 1.0)
    for q, want in ((p[:, :1], [1, 1]), (torch.zeros(2, 1, 3), [0, 0])):
        for u in (0.0, 0.999999):
            accepted, token = accept_sampled(
                torch.tensor([[1], [1]]) if want[0] else torch.tensor([[0], [2]]),
                p,
                q if want[0] else q.index_fill(2, torch.tensor([0, 2]), 0.5),
                torch.tensor([1, 1]),
                torch.full((2, 1), u),
                torch.tensor([0.0, 0.999999]),
            )
            assert accepted.tolist() == want and token.tolist() == [1, 1]


def test_equal_up_to_rounding_never_leaves_nothing_to_say() -> None:
    p = torch.full((1, 2, 4), 0.25)
    q = p[:, :1] * (1 + 1e-7)
    drafts, one = torch.tensor([[2]]), torch.tensor([1])
    accepted, token = accept_sampled(drafts, p, q, one, torch.tensor([[1.0]]), torch.tensor([0.3]))
    assert accepted.tolist() == [0] and token.tolist() == [1]


def test_typical_asks_for_more_where_the_backbone_is_sure() -> None:
    sure = torch.tensor([[0.9, 0.06, 0.02, 0.02]])
    open_ = torch.tensor([[0.28, 0.26, 0.24, 0.22]])
    for p, token, want in ((sure, 0, 1), (sure, 1, 0), (open_, 3, 1)):
        assert accept_typical(torch.tensor([token]), p, 0.3) == want
    # What stands behind a draft that falls does not count.
    both = torch.cat((open_, sure, open_))
    for tokens, want in (([3, 0, 0], 3), ([3, 1, 0], 1), ([0, 0, 2], 3)):
        assert accept_typical(torch.tensor(tokens), both, 0.3) == want
    entropy = -(open_ * open_.log()).sum()
    least = 0.3**0.5 * torch.exp(-entropy)
    assert 0.06 < least < 0.22


def test_typical_is_its_formula_and_asks_for_few_entropies(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, entr = list[int](), torch.special.entr
    monkeypatch.setattr(torch.special, "entr", lambda p: (rows.append(len(p)), entr(p))[1])
    generator = torch.Generator().manual_seed(0)
    doubted = 0
    for i in range(300):
        epsilon = (0.003, 0.01, 0.1, 0.3)[i % 4]
        p = (6 * torch.randn(6, 40, generator=generator)).softmax(-1)
        p[5] = torch.nan if i % 3 else p[5]
        drafts = p.nan_to_num(0.1).multinomial(1, generator=generator).squeeze(1)
        chosen = p.double().gather(1, drafts[:, None]).squeeze(1)
        least = (epsilon**0.5 * entr(p.double()).sum(1).neg().exp()).clamp(max=epsilon)
        stand = [bool(each) for each in chosen >= least]
        assert accept_typical(drafts, p, epsilon) == [*stand, False].index(False)
        doubted += sum(not bool(each) for each in chosen >= epsilon)
    assert sum(rows) == doubted < 6 * 300 / 2


def test_drawing_never_says_the_impossible() -> None:
    table = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]])
    ends = torch.tensor([0.0, 0.25, 0.5, 0.75, 1 - 2**-53], dtype=torch.float64)
    assert draw(table.expand(5, -1), ends).tolist() == [1, 1, 3, 3, 3]


@pytest.mark.parametrize("spec", ["exakt", "typical:2", "typical:x", "none:1", "typical:0", ""])
def test_unknown_rules(spec: str) -> None:
    with pytest.raises(SpecError, match="choices") as error:
        parse_rule(spec)
    assert "\n" not in str(error.value)


def test_rules() -> None:
    assert parse_rule("exact").kind == "exact" and parse_rule("none").kind == "none"
    assert parse_rule("typical").epsilon == parse_rule("typical:0.3").epsilon == 0.3
