"""Trees that a model drafts: their shape, their masks, and what is said behind them."""

from __future__ import annotations

from collections import Counter
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from decode_models import tiny as small
from tiny_models import Tiny, build, generate, tiny
from torch import Tensor

from mmfast.attach import attach
from mmfast.core.errors import SpecError
from mmfast.decoding.accept import accept_among
from mmfast.decoding.speculation import plan_decode
from mmfast.models.decoder import speculation, token_tree
from mmfast.models.decoder.drafters import fitted
from mmfast.models.decoder.token_tree import TokenTree, TreeDrafter, grow_levels, grow_likeliest

VARIED = {"repetition_penalty": 1.3}  # tiny models repeat themselves, and drafts would all stand
FIXED = "adapt=0&least=0"


def _language(seed: int, words: int = 3) -> Any:
    """Chances `[V]` of the next word behind a text, the same for the same text."""
    table = torch.rand(4, words, words, generator=torch.Generator().manual_seed(seed)) ** 3 + 0.02

    def chances(text: tuple[int, ...]) -> Tensor:
        row = table[len(text) % 4, text[-1] if text else 0]
        return row / row.sum()

    return chances


def _grown(draft: Any, most: int, grow: Any, uniform: Any = None) -> tuple[TokenTree, int]:
    tree, passes = TokenTree(uniform), 0
    places = tree.places[:]
    while places:
        passes += 1
        for place in places:
            path = tuple(tree.tokens[node] for node in tree.path(place.node))
            tree.read(place, draft(path))
        places = grow(tree, most=most, worth=lambda _: True)
    if uniform is None:
        tree.cut(most)
    return tree, passes


def _paths(tree: TokenTree) -> set[tuple[int, ...]]:
    nodes = range(len(tree.tokens))
    return {tuple(tree.tokens[node] for node in tree.path(each)) for each in nodes}


def test_the_dynamic_tree_holds_the_likeliest_of_all_paths() -> None:
    for seed in range(3):
        draft, worth, level = _language(seed), dict[tuple[int, ...], float](), {(): 1.0}
        for _ in range(5):
            level = {
                (*path, word): value * share
                for path, value in level.items()
                for word, share in enumerate(draft(path).tolist())
            }
            worth |= level
        for most in (1, 5, 12):
            tree, passes = _grown(draft, most, grow_likeliest)
            best = sorted(worth, key=lambda each: -worth[each])[:most]
            assert _paths(tree) == set(best)
            assert passes <= max(map(len, best)) + 1


def test_levels_have_the_likeliest_children_of_every_token() -> None:
    draft = _language(5)
    want = {()}
    level = [()]
    for width in (2, 1, 3):
        level = [
            (*path, int(token))
            for path in level
            for token in draft(path).topk(width).indices.tolist()  # type: ignore[misc]
        ]
        want |= set(level)
    tree, passes = _grown(draft, 10, partial(grow_levels, branches=(2, 1, 3)))
    assert _paths(tree) == want - {()} and len(tree.tokens) == 10 and passes == 3
    chain, _ = _grown(draft, 4, partial(grow_levels, branches=(1,)))
    assert chain.parents == [-1, 0, 1, 2]


def _said(model: Any, tree: TokenTree, accept: Any, uniform: Any) -> tuple[int, ...]:
    """The first two words of a tree that is verified, and drawn from the model behind it."""
    said, here = list[int](), -1
    while len(said) < 2:
        p = model(tuple(said))
        children = (
            [i for i, parent in enumerate(tree.parents) if parent == here] if here > -2 else []
        )
        drafts = [tree.tokens[child] for child in children]
        q = torch.stack([tree.q[child] for child in children]) if children else p[:0]
        u = torch.stack([uniform() for _ in range(len(children) + 1)]).flatten()
        place, token = accept(drafts, p, q, u[:-1], u[-1:])
        said.append(token)
        here = children[place] if place < len(children) else -2
    return tuple(said)


def _excess(accept: Any, grow: Any, most: int = 5, texts: int = 150) -> float:
    """Chi-square of drawn texts beside the model's own chances, in deviations over its mean."""
    model, draft = _language(3), _language(4)
    generator = torch.Generator().manual_seed(3)
    uniform = partial(torch.rand, 1, generator=generator, dtype=torch.float64)
    counts: Counter[tuple[int, ...]] = Counter()
    for _ in range(texts):
        counts[_said(model, _grown(draft, most, grow, uniform)[0], accept, uniform)] += 1
    statistic = 0.0
    for text in product(range(3), repeat=2):
        want = texts * float(model(())[text[0]] * model(text[:1])[text[1]])
        statistic += (counts[text] - want) ** 2 / want
    return (statistic - 8) / 4.0


def _same_q(drafts: Any, p: Tensor, q: Tensor, u: Tensor, v: Tensor) -> tuple[int, int]:
    """A wrong rule: the first draft that falls leaves p as it was."""
    for place, draft in enumerate(drafts):
        if u[place] * q[place, draft] < p[draft]:
            return place, draft
    return accept_among([], p, q, u, v)


def _all_stand(drafts: Any, p: Tensor, q: Tensor, u: Tensor, v: Tensor) -> tuple[int, int]:
    """A wrong rule: the first draft stands, whatever the model says."""
    return (0, drafts[0]) if drafts else accept_among([], p, q, u, v)


@pytest.mark.parametrize(
    "grow",
    [grow_likeliest, pytest.param(partial(grow_levels, branches=(2,)), marks=pytest.mark.slow)],
)
def test_texts_from_a_tree_are_distributed_as_the_model_says(grow: Any) -> None:
    assert _excess(accept_among, grow) < 3.5
    assert _excess(_same_q, grow) > 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model itself, and one that says nearly the same."""
    home, near = tmp_path_factory.mktemp("trees"), build("llava_onevision")
    near.model.save_pretrained(home / "same")
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in near.model.parameters():
            weight += 0.1 * weight.std() * torch.randn_like(weight)
    near.model.save_pretrained(home / "near")
    return home


def _asked(this: Tiny) -> dict[str, Any]:
    return this.inputs(["on {video} what?"], **this.media("video", 1, 0))


def _run(this: Tiny, inputs: Any, spec: str, length: int = 12) -> tuple[Tensor, Any]:
    with attach(this.model, decode=spec) as trace:
        found = generate(this, inputs, length, **VARIED).sequences
    (row,) = [row for row in trace.rows if row.stage == "draft"]
    return found, row


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["draft", "self"])
def test_greedy_tokens_are_those_of_the_model(
    kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    this = tiny("llava_onevision")
    inputs, sizes = _asked(this), list[int]()
    stock = TreeDrafter.propose

    def noted(self: Any, *args: Any) -> Any:
        run = stock(self, *args)
        sizes.append(len(run.tokens[0]))
        return run

    monkeypatch.setattr(TreeDrafter, "propose", noted)
    want = generate(this, inputs, 12, **VARIED).sequences
    head = f"draft:{folder}/near" if kind == "draft" else "self:0.3"
    chain, one = _run(this, inputs, f"{head}?{FIXED}&most=5")
    assert torch.equal(chain, want) and not sizes
    found, row = _run(this, inputs, f"{head}?{FIXED}&most=5&tree=1")
    assert torch.equal(found, want) and row.tokens_out == one.tokens_out and max(sizes) == 5
    for tree in ("dynamic", "3x1"):
        found, row = _run(this, inputs, f"{head}?{FIXED}&most=9&tree={tree}")
        assert torch.equal(found, want) and row.tokens_out > 0
    assert max(sizes) == 9


@pytest.mark.slow
def test_a_tree_of_the_model_itself_stands_down_to_its_last_level(folder: Path) -> None:
    this = tiny("llava_onevision")
    inputs = _asked(this)
    _, row = _run(this, inputs, f"draft:{folder}/same?{FIXED}&most=6&tree=2x1", 20)
    # One, four passes of three drafts and one, and at the end of the room one draft and one, one.
    assert row.method.endswith("6 passes") and row.tokens_out == 13


def _near(model: Any, share: float) -> Any:
    """Change a model by a share of the spread of its weights."""
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight += share * weight.std() * torch.randn_like(weight)
    return model


def test_the_draft_reads_every_path_as_if_it_stood_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, near = small("llama", num_hidden_layers=3), small("llama", num_hidden_layers=3)
    _near(near, 0.2).save_pretrained(tmp_path)
    ids, seen = torch.tensor([[3, 4, 5, 9]]), list[tuple[list[int], Tensor]]()

    def noted(logits: Tensor, text: Any, behind: int, streams: list[list[int]]) -> Tensor:
        seen.append((streams[0], logits[0]))
        return fitted(logits, text, behind, streams)

    monkeypatch.setattr(token_tree, "fitted", noted)
    how = {"max_new_tokens": 14, "do_sample": False, "no_repeat_ngram_size": 1}
    want = model.generate(ids, **how)
    for tree in ("dynamic", "3x1", "2"):
        with attach(model, decode=f"draft:{tmp_path}?{FIXED}&most=7&tree={tree}") as trace:
            assert torch.equal(model.generate(ids, **how), want)
        (row,) = [row for row in trace.rows if row.stage == "draft"]
        assert 0 < row.tokens_out < row.tokens_in
    assert len({len(line) for line, _ in seen}) > 9
    for line, logits in seen:
        with torch.no_grad():
            alone = near(torch.cat([ids, torch.tensor([line])], 1)).logits[0, -1]
        torch.testing.assert_close(logits, alone, atol=1e-3, rtol=1e-4)


@pytest.mark.slow
def test_a_wrong_choice_in_a_tree_is_seen(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    this = tiny("llava_onevision")
    inputs = _asked(this)
    want = generate(this, inputs, 12, **VARIED).sequences
    spec = f"draft:{folder}/near?{FIXED}&most=9&tree=3x1"

    def first(self: Any, run: Any, children: list[int], scores: Tensor) -> Any:
        if children:
            return children[0], run.tokens[0][children[0] - 1]
        return None, int(scores.argmax(-1))

    monkeypatch.setattr(speculation.VerifiedDecoding, "_among", first)
    assert not torch.equal(_run(this, inputs, spec)[0], want)


@pytest.mark.slow
def test_a_batch_and_a_window_get_one_draft_after_the_other(folder: Path) -> None:
    this = tiny("llava_onevision")
    inputs = this.inputs(["a {video} b", "{video} c?"], **this.media("video", 2, 0))
    want = generate(this, inputs, 8, **VARIED).sequences
    found, row = _run(this, inputs, f"draft:{folder}/near?{FIXED}&tree=dynamic", 8)
    assert torch.equal(found, want) and row.tokens_in > 0


def test_specs_of_trees_are_read() -> None:
    plan = plan_decode("draft:small?tree=3x2x1&most=20")
    assert plan is not None and plan.branches == (3, 2, 1) and plan.grows and not plan.dynamic
    plan = plan_decode("self:0.1?tree=dynamic")
    assert plan is not None and plan.dynamic and plan.grows and plan.branches == ()
    plan = plan_decode("recycle?tree=12")
    assert plan is not None and plan.tree == 12 and not plan.grows
    for tree in ("0", "2x", "x", "wide", "65"):
        with pytest.raises(SpecError, match="3x2x1"):
            plan_decode(f"self:0.1?tree={tree}")


@pytest.mark.slow
@pytest.mark.parametrize("tree", ["dynamic", "2"])
def test_drawn_texts_of_a_model_are_distributed_as_it_says(
    tree: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    this, words, heat = tiny("llava_onevision"), (65, 66, 67), 0.5
    inputs = _asked(this)
    others = [i for i in range(len(this.processor.tokenizer)) if i not in words]
    shares: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        longer: dict[tuple[int, ...], float] = {}
        for text, share in shares.items():
            ids = torch.cat([inputs["input_ids"], torch.tensor([text], dtype=torch.long)], 1)
            given = {**inputs, "input_ids": ids, "attention_mask": torch.ones_like(ids)}
            with torch.no_grad():
                logits = this.model(**given).logits[0, -1].double()
            chances = (logits[list(words)] / heat).softmax(0).tolist()
            longer |= {(*text, w): share * p for w, p in zip(words, chances, strict=True)}
        shares = longer

    def excess(texts: int = 300) -> float:
        counts: Counter[tuple[int, ...]] = Counter()
        how = {"do_sample": True, "temperature": heat, "top_k": 0, "suppress_tokens": others}
        spec = f"draft:{folder}/near?{FIXED}&most=5&tree={tree}"
        with attach(this.model, decode=spec) as trace:
            for seed in range(texts):
                torch.manual_seed(seed)
                found = this.model.generate(**inputs, max_new_tokens=3, **how)
                counts[tuple(found[0, inputs["input_ids"].shape[1] :].tolist())] += 1
        assert sum(row.tokens_out for row in trace.rows if row.stage == "draft")
        assert set(counts) <= set(shares)
        cells = [(counts[t], s * texts) for t, s in shares.items() if s * texts >= 4]
        rest = [(counts[t], s * texts) for t, s in shares.items() if s * texts < 4]
        cells.append((sum(o for o, _ in rest), sum(e for _, e in rest) or 1e-9))
        statistic = sum((o - e) ** 2 / e for o, e in cells)
        return float((statistic - len(cells) + 1) / (2 * (len(cells) - 1)) ** 0.5)

    assert excess() < 4
    monkeypatch.setattr(speculation, "accept_among", _all_stand)
    assert excess() > 5
