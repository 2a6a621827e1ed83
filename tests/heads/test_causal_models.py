"""Draft heads on stock causal language models of many classes.

Each head learns from what its model says; then greedy decoding with drafts says what stock
`generate` says, and sampling has the distribution of the stock forward pass.
"""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import causal_zoo
import pytest
import torch
from causal_zoo import VOCABULARY, WINDOW, ZOO
from torch import Tensor

from mmfast.core.errors import ModelError
from mmfast.decoding import row as row_module
from mmfast.decoding.loop import BatchDecoder, SingleDecoder
from mmfast.decoding.row import Costs, Open
from mmfast.decoding.sampling import Sampling
from mmfast.models.decoder.backbone import Backbone, make_head

STEPS, SAID = 50, 10
CHEAP = Costs(draft=0.01, wide=0.0)  # drafts are always worth trying
SLIDING = ("mistral", "phi3", "gemma2", "gemma3", "gpt_oss")


def _prompts(n: int) -> Tensor:
    return torch.randint(VOCABULARY, (n, 9), generator=torch.Generator().manual_seed(5))


def _stock(model: Any, prompts: Tensor) -> Tensor:
    """Prompts and what stock `generate` says behind them `[B, 9 + SAID]`."""
    found: Tensor = model.generate(
        prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=SAID, do_sample=False
    )
    return found


@torch.no_grad()
def _read(backbone: Backbone, ids: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    embeds = backbone.embed(ids)
    raw = backbone.run(backbone.state(len(ids)), embeds, [ids.shape[1]] * len(ids))
    return (raw if kind == "raw" else backbone.norm(raw)), embeds


@cache
def _learned(name: str, kind: str = "mctp") -> tuple[Any, Any, Tensor, list[float]]:
    """A model, a head that has learned from what it says, that, and the losses."""
    model = causal_zoo.tiny_causal(name)
    said = _stock(model, _prompts(8))
    torch.manual_seed(1)
    head = make_head(kind, model, modules=2).train()
    optimiser = torch.optim.AdamW(head.parameters(), lr=1e-2)
    seen, losses = _read(head.trunk, said, head.reads), []
    for _ in range(STEPS):
        loss = head.loss(*seen, said).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    return model, head.eval(), said, losses


def _decode(
    head: Any, prompts: Tensor, limit: int = SAID, rows: slice | None = None, **options: Any
) -> Any:
    guides = [Open(limit, rows=rows) for _ in prompts]
    decoder = BatchDecoder(head.trunk, head, guides, costs=CHEAP, reserve=40, **options)
    decoder.feed(prompts.tolist())
    for _ in decoder:
        pass
    return [guide.said for guide in guides], decoder.stats


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("name", ZOO)
def test_fifty_steps_of_training_lower_the_loss(name: str) -> None:
    losses = _learned(name)[3]
    assert sum(losses[-5:]) < 0.95 * sum(losses[:5])


@pytest.mark.rest_is_slow(3, 1)
@pytest.mark.parametrize("name", ZOO)
def test_greedy_says_what_stock_generate_says(name: str) -> None:
    model, head, said, _ = _learned(name)
    found, stats = _decode(head, said[:, :9])
    assert found == said[:, 9:].tolist()
    tried = sum(n for each in stats for n, _ in each.by_place)
    stood = sum(n for each in stats for _, n in each.by_place)
    assert tried and stood > 0.2 * tried and sum(each.passes for each in stats) < 8 * SAID
    fresh = _prompts(11)[8:]
    lines = [fresh[0, :4], fresh[1], fresh[2, :6]]  # streams of different lengths, drafts fall
    guides = [Open(SAID) for _ in lines]
    decoder = BatchDecoder(head.trunk, head, guides, costs=CHEAP, reserve=40)
    decoder.feed([line.tolist() for line in lines])
    for _ in decoder:
        pass
    want = [_stock(model, line[None])[0, len(line) :].tolist() for line in lines]
    assert [guide.said for guide in guides] == want


@pytest.mark.parametrize("name", ["gemma3", "gpt2", "qwen2_5_vl", "gpt_oss"])
def test_independent_modules_too(name: str) -> None:
    _, head, said, losses = _learned(name, "mtp")
    assert losses[-1] < 0.95 * losses[0]
    assert _decode(head, said[:, :9])[0] == said[:, 9:].tolist()


def test_embeddings_without_positions_are_refused() -> None:
    _, head, _, _ = _learned("qwen2_5_vl")
    decoder = SingleDecoder(head.trunk, head, Open(4))
    with pytest.raises(ModelError, match="three axes"):
        decoder.feed(torch.zeros(3, head.trunk.width))


@pytest.mark.parametrize("name", SLIDING)
def test_a_forgotten_window_is_noticed(name: str) -> None:
    """The same layers that see all they have read say something else."""
    model, _, said, _ = _learned(name)
    trunk = Backbone(model, check=False)
    trunk._placers = {kind: placer.with_window(0) for kind, placer in trunk._placers.items()}
    assert {kind[1] for kind in trunk._placers} >= {WINDOW}
    guides = [Open(SAID) for _ in said]
    decoder = BatchDecoder(trunk, None, guides, reserve=40)
    decoder.feed(said[:, :9].tolist())
    for _ in decoder:
        pass
    assert [guide.said for guide in guides] != said[:, 9:].tolist()
    with pytest.raises(ModelError, match="does more"):
        trunk._check_equal()


# --- sampling -------------------------------------------------------------------------------------

FEW, LINES = slice(3, 6), 300
CRITICAL = 26.12  # chi-square of 8 degrees of freedom at 0.001
SAMPLING = Sampling(temperature=1.2, seed=11)


@torch.no_grad()
def _chances(model: Any, prompt: Tensor) -> dict[tuple[int, ...], float]:
    """Chance of every line of two tokens by the stock forward pass."""

    def after(*line: int) -> Tensor:
        ids = torch.cat([prompt, torch.tensor(line, dtype=torch.long)])[None]
        logits = model(input_ids=ids, use_cache=False).logits[0, -1, FEW].double()
        return (logits / SAMPLING.temperature).softmax(-1)

    first = after()
    tokens = range(FEW.start, FEW.stop)
    second = {token: after(token) for token in tokens}
    return {
        (a, b): float(first[a - FEW.start] * second[a][b - FEW.start])
        for a, b in itertools.product(tokens, repeat=2)
    }


def _chi_square(name: str) -> float:
    model, head, said, _ = _learned(name)
    want = _chances(model, said[0, :9])
    prompts = said[:1, :9].expand(LINES, -1)
    found, stats = _decode(head, prompts, 2, rows=FEW, sampling=SAMPLING)
    assert sum(each.drafted for each in stats) >= LINES
    counts = dict.fromkeys(want, 0)
    for line in found:
        counts[tuple(line)] += 1
    return sum((counts[line] - LINES * p) ** 2 / (LINES * p) for line, p in want.items())


@pytest.mark.rest_is_slow(3, 2)
@pytest.mark.parametrize("name", ZOO)
def test_sampling_has_the_distribution_of_the_stock_model(name: str) -> None:
    assert _chi_square(name) < CRITICAL


@pytest.mark.parametrize("name", ["gemma3", "gpt2", "qwen3_vl"])
def test_drafts_that_always_stand_are_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def always(drafts: Tensor, p: Tensor, q: Tensor, counts: Tensor, u: Tensor, v: Tensor) -> Any:
        return counts, row_module.draw(p[:, -1], v)

    monkeypatch.setattr(row_module, "accept_sampled", always)
    assert _chi_square(name) > CRITICAL
