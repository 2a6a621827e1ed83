"""Fewer bits: equal to a stock run whose keys and values are rounded by hand as they age."""

from __future__ import annotations

import cache_oracle
import model_oracle as oracle
import pytest
import torch
from cache_questions import SCORES, answers, ask, kinds_of, model_of
from cache_runs import MORE, close, new, rows, run
from tiny_models import ALL_FAMILIES, FAMILIES, generate, storing, tiny

from mmfast.attach import attach
from mmfast.ops.quantisation import dequantise, quantise

RESIDUAL, GROUP = 6, 4
STORE = f"quant:4?residual={RESIDUAL}&group={GROUP}"
BLOCK = max(RESIDUAL, GROUP)


def age(walk: cache_oracle.Walk, index: int, seen: torch.Tensor, start: int, stop: int) -> None:
    """Round entries number `start:stop` of those that each head still sees."""
    held = walk.cache.layers[index]
    for name, keys in (("keys", True), ("values", False)):
        whole = getattr(held, name).clone()
        for head, mine in enumerate(seen):
            where = mine.nonzero()[start:stop, 0]
            packed = quantise(whole[0, head, where], 4, GROUP, along_tokens=keys)
            whole[0, head, where] = dequantise(packed)
        setattr(held, name, whole)


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("family", ALL_FAMILIES)
@pytest.mark.parametrize("score", [None, "snapkv:0.4?window=5&kernel=3", "lookm:0.45"])
def test_decoding_equals_rounding_by_hand(family: str, score: str | None) -> None:
    """After 12 tokens the first generated ones have been packed as well."""
    this = model_of(family)
    inputs = ask(this)
    prompt, length = oracle.embed(this, inputs), inputs["input_ids"].shape[1]
    spec = STORE if score is None else f"{score}+{STORE}"
    with attach(this.model, cache=spec):
        out = generate(this, inputs, 15)
    walk = cache_oracle.Walk(this, prompt)
    everything = torch.ones(walk.cache.layers[walk.full[0]].keys.shape[1:3], dtype=torch.bool)
    visible = dict.fromkeys(walk.full, everything)
    if score is not None:
        found = answers(this, walk, kinds_of(this, inputs, prompt), *SCORES[score])
        visible = cache_oracle.apply(walk, found)
    count = int(visible[walk.full[0]][0].sum())
    done = count - RESIDUAL
    for index in walk.full:
        age(walk, index, visible[index], 0, done)
    logits = [walk.logits]
    for token in out.sequences[0, length:-1].tolist():
        if count - done >= RESIDUAL + BLOCK:
            for index in walk.full:
                age(walk, index, visible[index], done, count - RESIDUAL)
            done = count - RESIDUAL
        logits.append(walk.step(token, visible))
        visible = {i: torch.nn.functional.pad(v, (0, 1), value=True) for i, v in visible.items()}
        count += 1
    assert done > int(everything.shape[1] * 0.4) - RESIDUAL
    torch.testing.assert_close(torch.stack(logits), torch.cat(out.logits), atol=2e-5, rtol=0)


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shift", [-3, 3])
def test_the_oracle_sees_a_few_entries_too_few_or_too_many(family: str, shift: int) -> None:
    this = model_of(family)
    inputs = ask(this)
    prompt, length = oracle.embed(this, inputs), inputs["input_ids"].shape[1]
    out = run(this, inputs, STORE, tokens=3)
    walk = cache_oracle.Walk(this, prompt)
    everything = torch.ones(walk.cache.layers[0].keys.shape[1:3], dtype=torch.bool)
    for index in walk.full:
        age(walk, index, everything, 0, length - RESIDUAL + shift)
    logits = [walk.step(t) for t in out.sequences[0, length:-1].tolist()]
    assert (torch.stack(logits) - torch.cat(out.logits[1:])).abs().max() > 2e-4


MIXED = (
    STORE,
    f"snapkv:0.5?window=5+{STORE}",
    f"sink:2+window:19+{STORE}",
    f"sink:2+window:7+snapkv:9?window=4+{STORE}",
    "zipvl:0.5?high=8&low=2",
)


@pytest.mark.rest_is_slow(5)
@pytest.mark.parametrize("family", MORE)
@pytest.mark.parametrize("spec", MIXED)
def test_a_ragged_batch_and_beams_equal_single_rows(family: str, spec: str) -> None:
    this = storing(family, spec)
    batch = rows(this, [0, 1])
    together = run(this, batch, spec, tokens=9)
    beams = new(run(this, batch, spec, tokens=5, num_beams=2), batch)
    for row in range(2):
        single = rows(this, [row])
        close(together, run(this, single, spec, tokens=9), row)
        assert torch.equal(
            beams[row], new(run(this, single, spec, tokens=5, num_beams=2), single)[0]
        )


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("spec", [*MIXED[:2], MIXED[4]])
def test_chunks_drafts_and_turns(family: str, spec: str) -> None:
    this = storing(family, spec)
    inputs = rows(this, [1])
    whole = run(this, inputs, spec, tokens=14)
    close(run(this, inputs, spec, tokens=14, prefill_chunk_size=7), whole)
    looked = run(this, inputs, spec, tokens=14, prompt_lookup_num_tokens=3)
    assert torch.equal(looked.sequences, whole.sequences)
    with attach(this.model, cache=spec):
        half = generate(this, inputs, 7)
        cache = half.past_key_values
        rest = generate(this, {"input_ids": half.sequences}, 7, past_key_values=cache)
    assert torch.equal(rest.sequences, whole.sequences)


@pytest.mark.parametrize("family", FAMILIES)
def test_windows_equal_themselves_in_full_precision_where_nothing_is_rounded(family: str) -> None:
    """Entries that leave a pack are passed over, and packs without entries go."""
    this = tiny(family)
    inputs = rows(this, [1])
    window = "sink:2+window:12"
    # Sixteen evenly spaced codes are not exact; a group of one number is.
    exact = f"{window}+quant:8?residual=4&group=1"
    out, full = run(this, inputs, exact, tokens=20), run(this, inputs, window, tokens=20)
    assert torch.equal(out.sequences, full.sequences)
    close(out, full)
    layer = out.past_key_values.layers[-1]
    held = layer.rows[0].packed + layer.keys.shape[2]
    assert layer.rows[0].live.shape[1] <= 15 and held <= 2 + 12 + 3 * 8


@pytest.mark.parametrize("family", FAMILIES)
def test_bytes_are_counted(family: str) -> None:
    this = tiny(family)
    inputs = rows(this, [1])
    with attach(this.model, cache="sink:1.0") as trace:
        run_out = generate(this, inputs, 1)
    whole = trace.rows[0].peak_bytes
    for spec, most in (("quant:8?residual=0", 0.45), ("quant:2?residual=0", 0.3)):
        with attach(this.model, cache=spec) as trace:
            out = generate(this, inputs, 1)
        packed = trace.rows[0].peak_bytes
        layers = out.past_key_values.layers
        assert packed == sum(layer.nbytes for layer in layers) < most * whole
        assert [int(x.get_seq_length()) for x in layers] == [
            int(x.get_seq_length()) for x in run_out.past_key_values.layers
        ]
