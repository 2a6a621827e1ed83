"""Bounded streams against a slow oracle, a prompt of the live tokens, and policies by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from stream_checks import FAMILIES, frame, model_of, positions, same, state, stock, stream, text
from stream_oracle import SlowStream
from tiny_models import build
from torch import Tensor

from mmfast.caches.plan import plan_cache
from mmfast.core.errors import MmfastError, SpecError
from mmfast.core.reduction import Reduction
from mmfast.core.registry import methods, register, unregister
from mmfast.core.tokens import Tokens
from mmfast.models.kv import queries as kv_queries
from mmfast.ops.eviction import evict
from mmfast.streams.buffers import RAW, ROTATED, VALUES
from mmfast.streams.engine import Engine, score_policies
from mmfast.streams.memory import Memory
from mmfast.streams.script import Piece

CLOSE = {"atol": 5e-5, "rtol": 5e-5}
SCORES = {m.name for m in methods(kind="cache") if m.role == "score"}
UNEVEN = {"pyramidkv", "simlayerkv"}
# They see prompts alone.
BLIND = {
    "criticalkv",
    "qfilter",
    "finch",
    "compactor",
    "kvzip",
    "kvsquared",
    "kvcompose",
    "fastkvzip",
}
POLICIES = sorted(SCORES - UNEVEN - BLIND - {"zipcache", "zipvl"})


def long_stream(family: str, model: Any) -> list[Piece]:
    return [piece for seed in range(3) for piece in stream(family, model, 6, 10 * seed)]


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("slack", [0.0, 0.25, 2.0])
@pytest.mark.parametrize("family", FAMILIES)
def test_sinks_and_window_against_the_slow_stream(family: str, slack: float) -> None:
    model = model_of(family)
    engine = Engine(model)
    memory = engine.memory(plan_cache("sink:8+window:45"), slack=slack)
    slow = SlowStream(model, 8, 45, slack=slack)
    question = text(family, model, 6, 99)
    for piece in long_stream(family, model):
        engine.append(memory, piece)
        slow.append(piece)
        assert memory.tokens() == sum(len(block.tokens[0]) for block in slow.blocks) <= 53
        logits = engine.branch(memory).extend(question)
        torch.testing.assert_close(logits.double(), slow.ask(question), **CLOSE)
    rebases = memory.stats()["rebases"]
    assert rebases > 5 if slack == 0 else rebases > 0 if slack < 1 else True
    assert memory.stats()["evicted_tokens"] > 100
    engine.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_one_layer_is_the_stock_model_over_the_live_tokens(family: str) -> None:
    model = model_of(family, layers=1)
    engine = Engine(model)
    memory = engine.memory(plan_cache("sink:8+window:45"), slack=0)
    pieces = long_stream(family, model)
    question = text(family, model, 6, 99)
    for piece in pieces:
        engine.append(memory, piece)
        reference = stock(model, [*_live(memory, pieces), question], _places(memory, 6))[-1]
        logits = engine.branch(memory).extend(question)
        torch.testing.assert_close(logits, reference, atol=1e-5, rtol=1e-5)
    engine.close()


def _live(memory: Memory, pieces: list[Piece]) -> list[Piece]:
    found = []
    for block in memory.blocks:
        piece, held = pieces[block.number], block.tokens(0)
        if held is None:
            found.append(piece)
            continue
        visual = None if piece.visual is None else piece.visual[held]
        planes: tuple[Tensor, ...] = ()
        if piece.planes and piece.visual is not None and visual is not None and bool(visual.any()):
            rank = piece.visual.cumsum(0) - 1
            planes = tuple(plane[rank[held][visual]] for plane in piece.planes)
        found.append(
            Piece(
                piece.embeds[held],
                piece.relative[:, held],
                piece.advance,
                piece.kind,
                piece.fresh,
                None,
                visual if planes else None,
                planes,
            )
        )
    return found


def _places(memory: Memory, n: int) -> Tensor:
    places = torch.cat([block.positions(0) for block in memory.blocks], 1)
    top = max(block.top(block.start) for block in memory.blocks)
    return torch.cat([places, top + 1 + torch.arange(n).expand(len(places), n)], 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_that_hold_different_tokens(family: str) -> None:
    model = build(family).model
    for name, weight in model.named_parameters():
        if "k_norm" in name:  # all ones would make all keys equally long
            weight.uniform_(0.2, 2.0)
    engine = Engine(model)
    memory = engine.memory(plan_cache("sink:8+window:45+keynorm:7"), slack=0)
    slow = SlowStream(model, 8, 45, norms=7)
    question = text(family, model, 6, 99)
    for piece in long_stream(family, model):
        engine.append(memory, piece)
        slow.append(piece)
        logits = engine.branch(memory).extend(question)
        torch.testing.assert_close(logits.double(), slow.ask(question), **CLOSE)
    frames = [block for block in memory.blocks if block.kind == "frame"]
    assert any(not torch.equal(block.held[0], block.held[-1]) for block in frames)
    engine.close()


def test_texts_outlive_frames_in_a_window_of_their_own() -> None:
    model = model_of("qwen2_5_vl")
    engine = Engine(model)
    memory = engine.memory(plan_cache("streamingvlm:64?sink=8&text=16"), slack=0)
    for piece in long_stream("qwen2_5_vl", model):
        engine.append(memory, piece)
        assert memory.tokens() <= 64
    numbers = [block.number for block in memory.blocks]
    assert numbers == sorted(numbers)
    kinds = {
        kind: [b.number for b in memory.blocks if b.kind == kind] for kind in ("text", "frame")
    }
    assert 0 in kinds["text"]
    assert min(kinds["text"][1:]) < min(kinds["frame"])
    engine.close()


def test_what_cannot_be_bounded_is_refused() -> None:
    model = model_of("llava_onevision")
    engine = Engine(model)
    with pytest.raises(SpecError, match="share by 'window'"):
        engine.memory(plan_cache("window:0.5"))
    with pytest.raises(SpecError, match="add a window"):
        engine.memory(plan_cache("sink:4"))
    assert score_policies() == POLICIES
    for name in sorted(UNEVEN | BLIND):
        with pytest.raises(SpecError, match=f"'{name}' .*; choices: cam, "):
            engine.memory(plan_cache(f"sink:4+{name}:16"))
    with pytest.raises(SpecError, match="'snapkv' needs"):
        engine.memory(plan_cache("window:64+snapkv:0.5"))
    memory = engine.memory(plan_cache("sink:4+window:10"))
    engine.append(memory, text("llava_onevision", model, 5, 0))
    with pytest.raises(MmfastError, match="12 tokens does not fit into 'sink:4"):
        engine.append(memory, frame("llava_onevision", model, 0))
    assert memory.tokens() == 5
    piece = frame("qwen3_vl", model_of("qwen3_vl"), 0)
    with pytest.raises(MmfastError, match="this model needs"):
        engine.append(memory, piece)
    engine.close()


def test_a_policy_that_merges_is_refused_and_the_stream_stays() -> None:
    @register("folding", kind="cache", sites=("kv",), role="score")
    def folding(tokens: Tokens, budget: int) -> Reduction:
        """Fold all tokens into the first few."""
        keep = torch.arange(budget).expand(*tokens.x.shape[:-2], budget)
        owner = torch.arange(tokens.n).clamp_max(budget - 1).expand(tokens.x.shape[:-1])
        return Reduction(keep, owner)

    try:
        family = FAMILIES[0]
        model = model_of(family)
        memory = (engine := Engine(model)).memory(plan_cache("sink:8+window:45+folding:3"))
        engine.append(memory, text(family, model, 6, 1))
        held = memory.tokens()
        with pytest.raises(SpecError, match="'folding' merges keys"):
            engine.append(memory, frame(family, model, 0))
        assert memory.tokens() == held == 6
    finally:
        unregister("folding", "cache")


def consistent(memory: Memory) -> bool:
    """Rotated keys are those before RoPE at the places of the blocks, in every layer."""
    for layer, buffer in enumerate(memory.buffers):
        where = torch.cat([block.positions(layer) for block in memory.blocks], 1)
        turned = memory.turner.rotate(layer, buffer.read(RAW), where)
        if where.shape[1] != buffer.length or not torch.equal(turned, buffer.read(ROTATED)):
            return False
    return True


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_memory_by_score_is_bounded_at_every_step(family: str, policy: str) -> None:
    engine = Engine(model_of(family))
    memory = engine.memory(plan_cache(f"sink:6+{policy}:48"))
    top = []
    for i, piece in enumerate(stream(family, engine.model, 40)):
        engine.append(memory, piece)
        assert all(buffer.length <= 54 for buffer in memory.buffers)
        assert memory.blocks[0].number == 0 and memory.blocks[0].size_at(0) >= 5
        top.append(memory.next_start[0])
        if i % 8 == 3:
            assert bool(
                engine.branch(memory).extend(text(family, engine.model, 5, i)).isfinite().all()
            )
    assert consistent(memory) and memory.stats()["evicted_tokens"] > 300
    if family == "llava_onevision":  # as many positions as tokens, give or take the slack
        layers = len(memory.buffers)
        assert max(top) <= 54 * layers * 1.25 + 12
    engine.close()


@pytest.mark.parametrize("policy", ["keydiff", "curdkv", "lagkv", "keynorm", "infinipot_v"])
def test_what_stays_is_what_the_policy_keeps(policy: str) -> None:
    """Layer 0 alone: its keys do not depend on what has left."""
    family = "qwen2_5_vl"
    engine = Engine(model_of(family))
    memory, everything = engine.memory(plan_cache(f"sink:6+{policy}:48")), engine.memory()
    spec = plan_cache(f"{policy}:48").score
    kept = frames = spots = torch.arange(0)
    for number, piece in enumerate(stream(family, engine.model, 20)):
        n, shown = len(piece.embeds), piece.kind == "frame"
        frames = torch.cat([frames, torch.full((n,), number if shown else -1)])
        spots = torch.cat([spots, torch.arange(n) if shown else torch.full((n,), -1)])
        start = everything.tokens()
        engine.append(memory, piece)
        engine.append(everything, piece)
        kept = torch.cat([kept, torch.arange(start, everything.tokens())])
        keys, values = (everything.buffers[0].read(p)[:, kept] for p in (RAW, VALUES))
        kinds = torch.cat([block.kinds for block in everything.blocks])[kept]
        if len(kept) > 54:
            rows = [x[:, 6:].transpose(0, 1).flatten(1) for x in (keys, values)]
            signals = {"values": rows[1], "kind": kinds[6:]}
            signals |= {"frame": frames[kept][6:], "spot": spots[kept][6:]}
            chosen = evict(spec, Tokens(rows[0], signals=signals)).keep
            kept = torch.cat([kept[:6], kept[6:][chosen]])
        assert torch.equal(memory.buffers[0].read(RAW), everything.buffers[0].read(RAW)[:, kept])
    engine.close()


def _turned(rows: np.ndarray, places: np.ndarray, theta: float) -> np.ndarray:
    """Rows `[.., n, d]` rotated to places `[n]`, by the definition of RoPE."""
    half = rows.shape[-1] // 2
    angle = places[:, None] * theta ** (-np.arange(half) / half)
    a, b, cos, sin = rows[..., :half], rows[..., half:], np.cos(angle), np.sin(angle)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def _expected(
    queries: np.ndarray, keys: np.ndarray, values: np.ndarray, at: int, theta: float, future: int
) -> np.ndarray:
    """Expected attention times value length `[N]`, added up over the key heads of a layer."""
    heads, n, d = keys.shape
    ahead = np.arange(at + 1, at + 1 + future)
    one = np.eye(d)[:, None].repeat(future, 1)  # where each coordinate goes at every place ahead
    turn = _turned(one, ahead, theta).mean(1).T
    total = np.zeros(n)
    group = len(queries) // heads
    for head, mine in enumerate(queries):
        mean, cov = turn @ mine.mean(0), turn @ np.cov(mine.T, bias=True) @ turn.T
        key = keys[head // group]
        logits = key @ mean / d**0.5 + np.einsum("nd,de,ne->n", key, cov, key) / d / 2
        logits[:4] = -np.inf  # they stay
        power = np.exp(logits - logits.max())
        total += power / power.sum() / group * np.linalg.norm(values[head // group], axis=-1)
    return total


def test_expected_attention_keeps_what_all_queries_of_the_stream_expect() -> None:
    """Layer 0 alone, by definition: its queries do not depend on what has left."""
    family, future = "llava_onevision", 24
    engine = Engine(build(family).model)
    module, theta = engine.attentions[0], engine.decoder.config.rope_parameters["rope_theta"]
    for each in (module.q_proj, module.k_proj):  # small weights would leave nothing to choose by
        each.weight.data *= 20
    seen: dict[str, list[Tensor]] = {name: [] for name in ("q_proj", "k_proj", "v_proj")}
    for name, outputs in seen.items():
        getattr(module, name).register_forward_hook(lambda *call, o=outputs: o.append(call[2][0]))
    memory = engine.memory(plan_cache(f"sink:6+expected_attention:48?future={future}"))
    kept, dropped, recent = np.arange(0), 0, 0
    for piece in stream(family, engine.model, 24):
        held = [block.positions(0)[0] for block in memory.blocks]
        start, n = memory.next_start[0], len(piece.embeds)
        engine.append(memory, piece)
        q, k, v = (
            torch.cat(outputs).unflatten(1, (-1, module.head_dim)).transpose(0, 1).double().numpy()
            for outputs in seen.values()
        )
        kept = np.concatenate([kept, np.arange(k.shape[1] - n, k.shape[1])])
        if len(kept) > 54:
            places = torch.cat([*held, start + piece.relative[0]]).numpy()
            keys = _turned(k[:, kept], places, theta)[:, 6:]
            at = (q[:, 4:], keys, v[:, kept[6:]], int(places[-1]), theta, future)
            score = _expected(*at)
            score[:4] = np.inf
            chosen = np.sort(np.argsort(-score, kind="stable")[:48])
            dropped += len(kept) - 54
            recent += int((chosen >= len(score) - 6).sum())
            kept = np.concatenate([kept[:6], kept[6:][chosen]])
        raw = memory.buffers[0].read(RAW).double().numpy()
        np.testing.assert_allclose(raw, k[:, kept], rtol=1e-5, atol=1e-6)
    assert dropped > 100 and recent < dropped  # not a window
    engine.close()


def test_sums_of_queries_forget_half_and_never_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_queries, "_MANY", 64)
    family = "llava_onevision"
    engine = Engine(model_of(family))
    memory = engine.memory(plan_cache("sink:6+expected_attention:48?future=1&sink=0"))
    queries, gen = memory.queries, torch.Generator().manual_seed(0)
    assert queries is not None
    heads, d = engine.decoder.config.num_attention_heads, engine.attentions[0].head_dim
    weights, rows = np.zeros(0), np.zeros((heads, 0, d))
    for step in range(40):
        new = torch.randn(heads, 12, d, generator=gen) + step / 10
        queries.arrive(0, new, torch.arange(12)[None])
        weights = np.concatenate([weights, np.ones(12)])
        rows = np.concatenate([rows, new.double().numpy()], 1)
        if weights.sum() >= 128:
            weights /= 2
        sums = queries.sums[0]
        assert sums is not None and sums.most() < 128
        mean = (rows * weights[:, None]).sum(1) / weights.sum()
        np.testing.assert_allclose((sums.total[0] / sums.count[0]).numpy(), mean, rtol=1e-4)
    engine.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_is_that_of_the_stock_model(family: str) -> None:
    """Nothing has left yet: sums and means of the weights that eager attention reports."""
    model = build(family).model
    engine, pieces = Engine(model), stream(family, model, 6)
    memory = engine.memory(plan_cache("sink:6+lookm:4096"))
    latest = engine.memory(plan_cache("sink:6+snapkv:4096?window=5"))
    vision = engine.memory(plan_cache("sink:6+livevlm:4096?window=5"))
    for piece in pieces:
        engine.append(memory, piece)
        engine.append(latest, piece)
        engine.append(vision, piece)
    assert pieces[-1].kind == "text"  # which asks nothing
    starts = [sum(len(p.embeds) for p in pieces[:i]) for i in range(len(pieces))]
    seen_last = [(p, at) for p, at in zip(pieces, starts, strict=True) if p.kind == "frame"][-1]
    asks = seen_last[1] + seen_last[0].visual.nonzero()[-5:, 0]
    extra: dict[str, Any] = {}
    if any(piece.planes for piece in pieces):
        none = [torch.zeros(len(p.embeds), dtype=torch.bool) for p in pieces]
        seen = [n if p.visual is None else p.visual for p, n in zip(pieces, none, strict=True)]
        extra["visual_pos_masks"] = torch.cat(seen)[None]
        extra["deepstack_visual_embeds"] = [
            torch.cat([p.planes[i] for p in pieces if p.planes]) for i in range(2)
        ]
    embeds, places = torch.cat([p.embeds for p in pieces])[None], positions(pieces)
    stock = build(family).model
    stock.set_attn_implementation("eager")
    with torch.no_grad():
        weights = stock.get_decoder()(
            inputs_embeds=embeds,
            position_ids=places[:, None] if len(places) > 1 else places,
            attention_mask=torch.ones(1, embeds.shape[1], dtype=torch.int64),
            output_attentions=True,
            use_cache=False,
            **extra,
        ).attentions
    for layer, rows in enumerate(weights):
        mean = rows[0].mean(0)  # [q, m]
        torch.testing.assert_close(
            memory.masses[layer]["attn_sum"], mean.sum(0), atol=1e-4, rtol=1e-4
        )
        torch.testing.assert_close(
            latest.masses[layer]["attn_window"], mean[-5:].mean(0), atol=1e-5, rtol=1e-4
        )
        torch.testing.assert_close(
            vision.masses[layer]["attn_vision"], mean[asks].mean(0), atol=1e-5, rtol=1e-4
        )
    engine.close()


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize(
    "policy",
    ["snapkv:48", "lookm:48", "cam:48", "capkv:48", "expected_attention:48", "keynorm:48+rekv:2"],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_memory_by_score_goes_on_bit_for_bit(family: str, policy: str) -> None:
    engine, spec = Engine(model_of(family)), plan_cache(f"sink:6+{policy}")
    pieces, question = stream(family, engine.model, 20), text(family, engine.model, 5, 1)
    one, two = engine.memory(spec), engine.memory(spec)
    for piece in pieces[:12]:
        engine.append(one, piece)
    two.restore(one.snapshot())
    for piece in pieces[12:]:
        branches = [engine.branch(one), engine.branch(two)]
        assert torch.equal(*(branch.extend(question) for branch in branches))
        engine.append(one, piece)
        engine.append(two, piece)
        assert torch.equal(*(branch.token(3) for branch in branches))
    assert same(state(one), state(two))
    engine.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_recall_beside_a_score_reads_no_live_token_twice(family: str) -> None:
    engine = Engine(model_of(family))
    memory = engine.memory(plan_cache("sink:6+keydiff:48+rekv:3"))
    for piece in stream(family, engine.model, 20):
        engine.append(memory, piece)
    branch = engine.branch(memory)
    lengths = [buffer.length for buffer in branch.buffers]
    branch.extend(text(family, engine.model, 5, 1))
    assert branch.found and any(branch.found.values())
    for layer, buffer in enumerate(branch.buffers):
        keys = buffer.read(RAW, 0, buffer.length - 5).transpose(0, 1).flatten(1)
        assert len(keys) > lengths[layer] and len(keys.unique(dim=0)) == len(keys)
    engine.close()


@pytest.mark.parametrize("spec", ["snapkv:48+quant:4", "zipvl:48", "sink:6+zipvl:48", "snapkv:0.5"])
def test_a_score_that_cannot_hold_a_stream_is_refused(spec: str) -> None:
    engine = Engine(model_of("qwen3_vl"))
    with pytest.raises(SpecError):
        engine.memory(plan_cache(spec))
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_many_frames_under_a_score(policy: str) -> None:
    """`bench --stream score` goes on to 20,000."""
    family = "llava_onevision"
    engine = Engine(model_of(family))
    memory = engine.memory(plan_cache(f"sink:6+{policy}:96"))
    engine.append(memory, text(family, engine.model, 6, 0))
    held = []
    for i in range(120):
        engine.append(memory, frame(family, engine.model, i))
        assert memory.tokens() <= 102
        held.append(memory.stats()["bytes"])
    assert len(set(held[10:])) == 1 and consistent(memory)
    engine.close()
