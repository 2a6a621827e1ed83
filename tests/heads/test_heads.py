"""Heads: losses against a loop, drafts against fresh states, files, and what they cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import decode_models as small
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mmfast.core.errors import ModelError, SpecError
from mmfast.core.registry import get, methods
from mmfast.heads.base import save_head
from mmfast.models.decoder.backbone import Backbone, load_head, make_head

NAMES = ("mctp", "mtp")


def _made(name: str, **options: Any) -> tuple[Backbone, Any]:
    backbone = Backbone(small.tiny("llama").double().requires_grad_(False), lean=False)
    torch.manual_seed(4)
    head = make_head(name, backbone, modules=3, start="random", **options)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    return backbone, head


def _chain(head: Any, backbone: Backbone, hidden: Tensor, embeds: Tensor, t: int) -> list[Tensor]:
    """States of all modules at position t, from the definition, one prefix at a time."""
    states: list[Tensor] = []
    before = hidden
    for k, layer in enumerate(head.layers):
        if t + k + 1 >= len(embeds):
            break
        line = []
        for s in range(t + 1):  # every position of the history anew
            inside = range(max(0, s - head.window + 1) if head.window else 0, s + 1)
            xs = [_input(head, k, before[i], embeds[i + k + 1]) for i in inside]
            places = torch.tensor([list(inside)])
            angles = backbone.decoder.rotary_emb(hidden, places)
            out = layer(torch.stack(xs)[None], position_embeddings=angles)[0, -1]
            line.append(backbone.final_norm(out) if head.name == "mctp" else out)
        before = torch.stack(line)
        states.append(before[-1] if head.name == "mctp" else head.norms[k](before[-1]))
    return states


def _input(head: Any, k: int, hidden: Tensor, embed: Tensor) -> Tensor:
    if head.name == "mtp":
        return hidden
    pair = torch.cat((head.norms_e[k](embed), head.norms_h[k](hidden)))
    return pair @ head.projs[k].weight.T


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("window", [0, 1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_loss_equals_a_loop(name: str, window: int) -> None:
    backbone, head = _made(name, window=window, ffn=24)
    ids = torch.randint(0, 24, (2, 8), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :4] = labels[1, 6] = -100
    hidden, embeds = small.read(backbone, ids, head.reads)
    want, terms = torch.zeros((), dtype=torch.float64), []
    for k in range(3):
        each = []
        for b in range(2):
            for t in range(8 - k - 2):
                if labels[b, t + k + 2] != -100:
                    state = _chain(head, backbone, hidden[b], embeds[b], t)[k]
                    logits = head.output(k, state[None], slice(None)).float()
                    each.append(F.cross_entropy(logits, labels[b, t + k + 2][None]))
        terms.append(float(torch.stack(each).mean().detach()))
        want = want + (1 / 3 if name == "mctp" else 0.8 ** (k + 1)) * torch.stack(each).mean()
    found = head.loss(hidden, embeds, labels)
    torch.testing.assert_close(found.loss.detach(), want.detach(), atol=1e-5, rtol=1e-5)
    assert found.each.tolist() == pytest.approx(terms, abs=1e-5)
    grads = torch.autograd.grad(found.loss, list(head.parameters()))
    others = torch.autograd.grad(want, list(head.parameters()))
    for mine, other in zip(grads, others, strict=True):
        torch.testing.assert_close(mine, other, atol=2e-5, rtol=1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_learning_makes_guesses_better_and_leaves_the_backbone(name: str) -> None:
    backbone, head = _made(name)
    ids = small.sentences(16, 20, torch.Generator().manual_seed(0))
    hidden, embeds = small.read(backbone, ids, head.reads)
    optimiser = torch.optim.AdamW(head.train().parameters(), lr=5e-3)
    losses = []
    for _ in range(20):
        found = head.loss(hidden, embeds, ids)
        optimiser.zero_grad()
        found.loss.backward()
        optimiser.step()
        losses.append(float(found.loss.detach()))
    assert losses[-1] < 0.9 * losses[0]
    assert all(p.grad is None for p in backbone.model.parameters())


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("window", [0, 1, 4])
@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_state_is_that_of_the_tokens_that_stand(name: str, lean: bool, window: int) -> None:
    """Whatever was drafted and taken back, drafts are those of a fresh state, of each stream."""
    backbone = Backbone(small.tiny("qwen3", seed=1).double(), lean=lean)
    torch.manual_seed(0)
    head = make_head(name, backbone, modules=4, window=window).eval()
    generator = torch.Generator().manual_seed(7)

    def chance(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    lines: list[list[int]] = [[], []]
    unread = [[chance(0, 24) for _ in range(3 + i)] for i in range(2)]
    cache, state = backbone.state(2, 8), head.init_state(2, 8)
    with torch.no_grad():
        for turn in range(12):
            n = max(map(len, unread))
            ids = torch.tensor([line + [0] * (n - len(line)) for line in unread])
            counts = [len(line) for line in unread]
            embeds = backbone.embed(ids)
            raw = backbone.run(cache, embeds, counts)
            fed = raw if head.reads == "raw" else backbone.norm(raw)
            head.observe(state, embeds, fed, counts)
            for line, new in zip(lines, unread, strict=True):  # some of the drafts fall
                line += new[: chance(1, len(new) + 1)]
            cache.crop([len(line) for line in lines])
            head.crop(state, [len(line) for line in lines])
            limit = chance(1, 5) if turn < 11 else 4
            token = torch.tensor([chance(0, 24), chance(0, 24)])
            mixed = _drafts(head, state, token, limit)
            for i, line in enumerate(lines):
                fresh = head.init_state(1, 8)
                hidden, own = small.read(backbone, torch.tensor([line]), head.reads)
                head.observe(fresh, own, hidden, [len(line)])
                alone = _drafts(head, fresh, token[i : i + 1], limit)
                torch.testing.assert_close(mixed[:, i], alone[:, 0], atol=1e-5, rtol=1e-5)
            drafts = mixed.argmax(-1).T.tolist()
            unread = [[int(t), *d[: chance(0, 5)]] for t, d in zip(token, drafts, strict=True)]
            if turn % 3 == 2:  # all of them are forgotten unread
                head.crop(state, [len(line) for line in lines])
                unread = [[chance(0, 24)], [chance(0, 24), chance(0, 24)]]


def _drafts(head: Any, state: Any, token: Tensor, limit: int) -> Tensor:
    """Logits `[limit, B, V]` of drafts that are always the likeliest."""
    found: list[Tensor] = []

    def pick(logits: Tensor, i: int) -> Tensor:
        assert i == len(found)
        found.append(logits)
        return logits.argmax(-1)

    with torch.no_grad():
        assert head.draft(state, token, limit, slice(None), pick) == limit
    return torch.stack(found)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_one_stream_in_few_operations_drafts_what_the_modules_do(family: str) -> None:
    """Biases of all layers included; the stock layers are the reference."""
    more = {"mlp_bias": True} if family == "llama" else {}
    model, found = small.tiny(family, seed=2, **more).double(), []
    for lean in (False, True):
        backbone = Backbone(model, lean=lean)
        torch.manual_seed(6)
        head = make_head("mctp", backbone, modules=4, window=1, ffn=24, start="random").eval()
        with torch.no_grad():
            for parameter in head.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
        state = head.init_state(1, 8)
        hidden, embeds = small.read(backbone, torch.tensor([[3, 9, 4]]), head.reads)
        head.observe(state, embeds, hidden, [3])
        found.append(_drafts(head, state, torch.tensor([7]), 4))
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [0, 1, 4])
@pytest.mark.parametrize("lean", [False, True])
def test_the_last_module_runs_again(lean: bool, window: int, tmp_path: Path) -> None:
    """A head that repeats it is one whose further modules are copies of it, of fewer weights."""
    backbone = Backbone(small.tiny("qwen3", seed=3).double(), lean=lean)
    torch.manual_seed(8)
    options: dict[str, Any] = {"window": window, "start": "random"}
    short = make_head("mctp", backbone, modules=2, repeats=3, **options).eval()
    long = make_head("mctp", backbone, modules=5, **options).eval()
    state = {
        name.replace(".1.", f".{k}."): value
        for name, value in short.state_dict().items()
        for k in ((1, 2, 3, 4) if ".1." in name else (0,))
    }
    long.load_state_dict(state)
    assert sum(p.numel() for p in short.parameters()) < sum(p.numel() for p in long.parameters())
    save_head(short, tmp_path / "head.safetensors")
    ids, found = torch.randint(0, 24, (1, 9), generator=torch.Generator().manual_seed(2)), []
    for head in (short, long, load_head(tmp_path / "head.safetensors", backbone)):
        hidden, embeds = small.read(backbone, ids, head.reads)
        place = head.init_state(1, 8)
        head.observe(place, embeds, hidden, [9])
        found.append((_drafts(head, place, torch.tensor([7]), 5), head.loss(hidden, embeds, ids)))
    for drafts, loss in found[1:]:
        torch.testing.assert_close(found[0][0], drafts, atol=1e-12, rtol=1e-12)
        torch.testing.assert_close(found[0][1].each, loss.each)
    with pytest.raises(ModelError, match="-1 times"):
        make_head("mctp", backbone, modules=2, repeats=-1)


@pytest.mark.parametrize("name", NAMES)
def test_drafting_computes_what_training_did(name: str) -> None:
    backbone, head = _made(name)
    ids = torch.randint(0, 24, (1, 12), generator=torch.Generator().manual_seed(5))
    hidden, embeds = small.read(backbone, ids, head.reads)
    with torch.no_grad():
        states = head(hidden, embeds)
        for t in (0, 4, 7):
            state = head.init_state(1, 4)
            head.observe(state, embeds[:, : t + 1], hidden[:, : t + 1], [t + 1])
            forced = iter(ids[0, t + 2 :])

            def pick(logits: Tensor, i: int) -> Tensor:
                want = head.output(i, states[i][:, t], slice(None))  # noqa: B023
                torch.testing.assert_close(logits, want, atol=1e-6, rtol=1e-6)
                return next(forced)[None]  # noqa: B023

            assert head.draft(state, ids[:, t + 1], 3, slice(None), pick) == 3


def test_a_module_that_lags_far_starts_anew() -> None:
    backbone, head = _made("mctp", history=5)
    ids = torch.randint(0, 24, (1, 40), generator=torch.Generator().manual_seed(5))
    hidden, embeds = small.read(backbone, ids)
    state = head.init_state(1, 8)
    head.observe(state, embeds, hidden, [40])
    _drafts(head, state, ids[:, 3], 3)
    assert [first[0] for first in state.first] == [35, 35, 35]
    assert [filled[0] for filled in state.filled] == [40, 40, 40]


@pytest.mark.parametrize(
    ("name", "options"), [("mctp", {"ffn": 16, "window": 1}), ("mtp", {"own_output": True})]
)
def test_files(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    backbone, head = _made(name, **options)
    path = tmp_path / "heads" / f"{name}.safetensors"
    save_head(head, path)
    again = load_head(path, backbone)
    assert again.config == head.config and not again.training
    for mine, other in zip(head.state_dict().values(), again.state_dict().values(), strict=True):
        assert torch.equal(mine, other)
    save_head(head, path, torch.float16)
    assert path.stat().st_size < sum(p.numel() for p in head.parameters()) * 2 + 9000
    assert next(load_head(path, backbone).parameters()).dtype == torch.float64
    other = Backbone(small.tiny("llama", hidden_size=64))
    with pytest.raises(ModelError, match="own model"):
        load_head(path, other)
    path.with_suffix(".json").unlink()
    with pytest.raises(ModelError, match="save_head") as error:
        load_head(path, backbone)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("family", small.FAMILIES)
def test_heads_for_every_family(family: str) -> None:
    model = small.tiny(family)
    for name in NAMES:
        head = make_head(name, model, modules=2).eval()
        state = head.init_state()
        ids = torch.tensor([[1, 2, 3, 4]])
        head.observe(state, *reversed(small.read(head.trunk, ids, head.reads)), [4])
        assert _drafts(head, state, torch.tensor([5]), 2).isfinite().all()


def test_registry_and_errors() -> None:
    rows = {row.name: row for row in methods("head")}
    assert rows["mctp"].paper == "2505.03739" and rows["mtp"].paper == "2504.04060"
    assert all(get(name, "head").summary for name in NAMES)
    model = small.tiny("llama")
    with pytest.raises(SpecError, match="mctp"):
        make_head("mctpp", model)
    for options in ({"modules": 0}, {"start": "first"}, {"windows": 3}):
        with pytest.raises(ModelError) as error:
            make_head("mctp", model, **options)
        assert "\n" not in str(error.value)
