"""Cuts of text in language models: against the stock model, which hides what is dropped."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import text_oracle as oracle
import torch
from text_zoo import DENSE, HYBRID, TEXTS, padded, prompt, text_model, written
from tiny_models import tiny
from transformers import DynamicCache

import mmfast
from mmfast.attach import attach
from mmfast.core.errors import ModelError, SpecError
from mmfast.models.reduction.decoder_signals import WINDOW

LENGTH = 48
# Before layer 2 reads an attention layer in every model of the zoo.
CUTS = {
    "fastv@llm2:0.5?tokens=text": 1,
    "fastkv@llm2:0.4?tokens=all": WINDOW,
    "slimfer:0.5?tokens=text&block=4": WINDOW,
    "pyramiddrop:0.4?tokens=text": 1,
    "gemfilter:0.5?tokens=text&positions=original": 1,
    "random@llm1:0.6?tokens=text": 1,
}
WHOLE = [spec.replace(spec.partition(":")[2][:3], "1.0", 1) for spec in CUTS]
FEW = ("llama", "gemma3", "gpt_neox", "gpt_oss", "qwen3_moe")
LAST = {**CUTS, "random@llm0:0.5?tokens=text+fastv@llm3:12?tokens=text": 1}


def cut(name: str, spec: str, tokens: int = 5, **more: Any) -> tuple[Any, Any, Any]:
    model = text_model(name)
    with attach(model, spec) as trace:
        new, logits, out = written(model, {"input_ids": prompt(LENGTH)}, tokens, **more)
    return new, logits[0], (trace, out)


def expected(name: str, new: torch.Tensor, trace: Any, last: int) -> torch.Tensor:
    """Logits of the last prompt token and of those written, nothing dropped."""
    whole = torch.cat([prompt(LENGTH), new[:, :-1]], 1)
    cuts = oracle.living(LENGTH, trace.reductions, last)
    return oracle.hidden_from(text_model(name), whole, cuts)[LENGTH - 1 :].float()


SLOW = pytest.mark.slow


def some_slow(names: Any, quick: Any) -> list[Any]:
    return [name if name in quick else pytest.param(name, marks=SLOW) for name in names]


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("spec", some_slow([*CUTS][:5], [*CUTS][:3]))
def test_a_cut_equals_hiding_what_is_dropped(name: str, spec: str) -> None:
    if name == "gpt2":
        with pytest.raises(ModelError, match="the length of the prompt"):
            attach(text_model(name), spec)
        return
    model, ids = text_model(name), prompt(LENGTH)
    with attach(model, spec) as trace:
        logits = model(ids).logits[0]
    cuts = oracle.living(LENGTH, trace.reductions, CUTS[spec])
    alive = cuts[-1][1]
    share = float(spec.partition(":")[2].partition("?")[0])
    assert int(alive.sum()) == round(share * (LENGTH - CUTS[spec])) + CUTS[spec] == len(logits)
    assert alive[-CUTS[spec] :].all()
    want = oracle.hidden_from(model, ids, cuts)[alive]
    torch.testing.assert_close(logits, want, atol=1e-5, rtol=0)
    stock = model(ids).logits[0, -1]
    assert (logits[-1] - stock).abs().max() > 1e-3  # what is dropped was missed


@pytest.mark.parametrize("name", [n for n in TEXTS if n != "gpt2"])
def test_a_share_of_one_is_the_stock_model(name: str) -> None:
    model, ids = text_model(name), prompt(LENGTH)
    stock = model(ids).logits
    for spec in WHOLE[:-1]:
        with attach(model, spec) as trace:
            assert torch.equal(model(ids).logits, stock), spec
        assert not trace.reductions and trace.rows
    assert torch.equal(model(ids).logits, stock)


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("name", (*FEW, "qwen3_next", "falcon_h1"))
@pytest.mark.parametrize("spec", ["pyramiddrop:0.4?tokens=text", "fastkv:0.4?tokens=text"])
def test_what_is_written_equals_a_pass_without_a_cache(name: str, spec: str) -> None:
    new, logits, (trace, out) = cut(name, spec)
    want = expected(name, new, trace, CUTS.get(spec, WINDOW))
    torch.testing.assert_close(logits, want, atol=1e-5, rtol=0)
    assert [int(n) for n in (out.past_key_values.get_seq_length(i) for i in (1, 3))] == [52, 52]


def test_the_oracle_sees_a_fault() -> None:
    """Tokens counted anew, and one token too many."""
    new, logits, (trace, _) = cut("llama", "fastv@llm2:0.5?tokens=text")
    right = expected("llama", new, trace, 1)
    for site, number, reduction in trace.reductions:
        keep = reduction.keep.clone()
        keep[0] = int((~torch.isin(torch.arange(reduction.n), keep)).nonzero()[0])
        other = mmfast.Reduction.prune(keep, reduction.n)
        trace.reductions[0] = (site, number, other)
    wrong = expected("llama", new, trace, 1)
    assert (logits - right).abs().max() < 1e-5 < 1e-3 < (logits - wrong).abs().max()
    _, anew, _ = cut("llama", "gemfilter:0.5?tokens=text&positions=new")
    _, kept, _ = cut("llama", "gemfilter:0.5?tokens=text&positions=original")
    assert (anew - kept).abs().max() > 1e-3


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("name", some_slow((*FEW, *HYBRID), ("llama", "gemma3", "qwen3_next")))
@pytest.mark.parametrize("spec", ["pyramiddrop:0.4?tokens=text", "gemfilter:0.5?tokens=text"])
def test_a_ragged_batch_equals_its_rows(name: str, spec: str) -> None:
    model = text_model(name)
    prompts = [prompt(LENGTH), prompt(23, 1), prompt(37, 2)]
    with attach(model, spec) as trace:
        new, logits, _ = written(model, padded(prompts), 4)
        alone = [written(model, {"input_ids": ids}, 4) for ids in prompts]
    for row, (mine, own, _) in enumerate(alone):
        assert torch.equal(new[row], mine[0])
        torch.testing.assert_close(logits[row], own[0], atol=2e-5, rtol=0)
    kept = [r.keep.tolist() for _, _, r in trace.reductions]
    cuts = len(kept) // 6
    together = [kept[i * 3 + row] for row in range(3) for i in range(cuts)]
    assert together == kept[3 * cuts :]


@pytest.mark.parametrize("name", some_slow(("llama", "gemma3", "gpt_neox"), ("llama",)))
@pytest.mark.parametrize("spec", some_slow([*LAST][-3:], [*LAST][-2:]))
def test_generation_modes(name: str, spec: str) -> None:
    """Beams, drafts, a static cache and no cache write what plain decoding writes."""
    model, new = text_model(name), cut(name, spec, 6)[0]
    ids = {"input_ids": prompt(LENGTH)}
    with attach(model, spec):
        assert torch.equal(written(model, ids, 6, use_cache=False)[0], new)
        assert torch.equal(written(model, ids, 6, prompt_lookup_num_tokens=3)[0], new)
        static = {"cache_implementation": "static", "disable_compile": True}
        assert torch.equal(written(model, ids, 6, **static)[0], new)
        both = padded([prompt(LENGTH), prompt(30, 1)])
        beams = model.generate(**both, max_new_tokens=5, num_beams=3, do_sample=False)
        single = model.generate(**ids, max_new_tokens=5, num_beams=3, do_sample=False)
        assert torch.equal(beams[0, -5:], single[0, -5:])
        with pytest.raises(ModelError, match="leave out prefill_chunk_size"):
            written(model, ids, 2, prefill_chunk_size=16)


@pytest.mark.parametrize("spec", ["fastv@llm2:0.4?tokens=text", "slimfer@llm2:0.4?tokens=text"])
def test_a_static_cache_of_windows_alone_is_not_padding_behind_them(spec: str) -> None:
    """A window's mask hides what is far as it hides padding; rows say which is which."""
    model = text_model("mistral_window")
    both = padded([prompt(LENGTH), prompt(30, 1)])
    with attach(model, spec):
        new, logits, _ = written(model, both)
        static = {"cache_implementation": "static", "disable_compile": True}
        again = written(model, both, **static)
    assert torch.equal(again[0], new)
    torch.testing.assert_close(again[1], logits, atol=1e-5, rtol=0)


def test_a_budget_above_a_chunk_is_refused_as_one_below() -> None:
    """A chunk of no more tokens than the budget is no short prompt, of which all may stay."""
    model, ids = text_model("llama"), {"input_ids": prompt(LENGTH)}
    for spec in ("gemfilter:20?tokens=text", "fastv@llm2:20?tokens=text"):
        with (
            attach(model, spec),
            pytest.raises(ModelError, match="leave out prefill_chunk_size"),
        ):
            written(model, ids, 2, prefill_chunk_size=16)
    stock = written(model, ids, 2)[0]
    with attach(model, "fastv@llm2:48?tokens=text"):
        assert torch.equal(written(model, ids, 2, prefill_chunk_size=16)[0], stock)


def test_an_assistant_leaves_the_answer_as_it_is() -> None:
    model, draft = text_model("llama"), text_model("mistral", 2.5)
    spec = "fastv@llm1:0.5?tokens=text"
    new = cut("llama", spec, 8)[0]
    with attach(model, spec):
        out = model.generate(
            prompt(LENGTH), assistant_model=draft, max_new_tokens=8, do_sample=False
        )
    assert torch.equal(out[:, LENGTH:], new)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_choice_is_that_of_eager_attention(attention: str) -> None:
    model = text_model("qwen3")
    ids = prompt(LENGTH)
    model.set_attn_implementation("eager")
    weights = model(ids, output_attentions=True).attentions
    model.set_attn_implementation(attention)
    best = {
        "fastv@llm2:0.3": weights[1][0, :, -1].mean(0)[: LENGTH - 1],
        # A sum of logarithms of attention is that of products less a constant.
        "gemfilter:0.3?layer=3&kernel=1": weights[3][0, :, -1].log().sum(0)[: LENGTH - 1],
    }
    try:
        for spec, score in best.items():
            knob = "&" if "?" in spec else "?"
            with attach(model, f"{spec}{knob}tokens=text") as trace:
                model(ids)
            kept = trace.reductions[0][2].keep.tolist()
            assert kept == sorted(score.topk(round(0.3 * (LENGTH - 1))).indices.tolist())
    finally:
        model.set_attn_implementation("sdpa")


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_neox", "qwen3_next"])
def test_gemfilter_counts_anew_as_the_stock_model_on_the_short_prompt(name: str) -> None:
    model, ids, spec = text_model(name), prompt(LENGTH), "gemfilter:0.4?tokens=text"
    with attach(model, spec) as trace:
        new, logits, _ = written(model, {"input_ids": ids}, 5)
        free = written(model, {"input_ids": ids}, 5, use_cache=False)[1]
        out = model(ids, use_cache=True)
        cache, steps = out.past_key_values, [out.logits[0, -1]]
        steps += [  # a caller that gives no positions
            model(token[None, None], past_key_values=cache).logits[0, -1] for token in new[0, :-1]
        ]
    short = ids[:, torch.cat([trace.reductions[0][2].keep, torch.tensor([LENGTH - 1])])]
    want = written(model, {"input_ids": short}, 5)
    assert torch.equal(new, want[0]) and torch.equal(logits, want[1])
    torch.testing.assert_close(free, logits, atol=1e-5, rtol=0)
    torch.testing.assert_close(torch.stack(steps), logits[0].to(steps[0]), atol=1e-5, rtol=0)


def test_a_second_turn_is_cut_by_itself_and_counts_on() -> None:
    model, first, second = text_model("llama"), prompt(30), prompt(24, 1)
    for spec in ("gemfilter:0.5?tokens=text", "fastv@llm2:0.5?tokens=text"):
        cache = DynamicCache(config=model.config)
        with attach(model, spec) as trace:
            model(first, past_key_values=cache)
            logits = model(second, past_key_values=cache).logits[0]
        a, b = (r.keep for _, _, r in trace.reductions)
        if spec.startswith("gem"):
            short = torch.cat([first[:, a], first[:, -1:], second[:, b], second[:, -1:]], 1)
            want = model(short).logits[0, len(a) + 1 :]
        else:
            alive = torch.zeros(54, dtype=torch.bool)
            alive[torch.cat([a, torch.tensor([29]), b + 30, torch.tensor([53])])] = True
            whole = torch.cat([first, second], 1)
            want = oracle.hidden_from(model, whole, [(2, alive)])[30:][alive[30:]]
        torch.testing.assert_close(logits, want, atol=1e-5, rtol=0)


def test_a_short_prompt_is_kept_whole() -> None:
    model, ids = text_model("llama"), prompt(LENGTH)
    stock = model(ids).logits
    with attach(model, "fastkv:1024?tokens=text") as trace:
        assert torch.equal(model(ids).logits, stock)
        assert model(prompt(5)).logits.shape[1] == 5  # nothing but the last tokens
        assert model(ids[:, :1]).logits.shape[1] == 1
    assert [(row.tokens_in, row.tokens_out) for row in trace.rows] == [(40, 40), (0, 0)]


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("fastv@llm2:0.5", r"write 'fastv@llm2:0.5\?tokens=text'"),
        ("evs:0.5", "reducers of text: .*fastkv"),
        ("adaptinfer:0.5", "reducers of text"),
        ("fastv@llm2:0.5?tokens=words", "choices: all, media, text"),
        ("random:0.5?tokens=text", "write 'random@llm2'"),
        ("adaptinfer:0.5?tokens=text", "it has none"),
        ("fastv@llm2:0.5?tokens=text+fastv@llm2:0.5?tokens=all", "put them at different layers"),
        ("gemfilter:0.5?tokens=text&positions=old", "choices: auto, new, original"),
    ],
)
def test_errors_name_the_choices(spec: str, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        attach(text_model("llama"), spec)


def test_layers_that_cannot() -> None:
    with pytest.raises(ModelError, match="a recurrence; choose llm2"):
        attach(text_model("qwen3_next"), "fastv@llm1:0.5?tokens=text")
    model = text_model("qwen3_next")
    rows = padded([prompt(30), prompt(20, 1)])
    with attach(model, "random@llm1:0.5?tokens=text"):
        cache = model(**rows, use_cache=True).past_key_values
        more = torch.cat([rows["attention_mask"], torch.ones(2, 8, dtype=torch.int64)], 1)
        more[1, -8:-4] = 0
        with pytest.raises(ModelError, match="continue them one by one"):
            model(prompt(8).expand(2, -1), attention_mask=more, past_key_values=cache)
    with attach(text_model("llama"), "gemfilter:0.5?tokens=text"):
        static = {"cache_implementation": "static", "disable_compile": True}
        with pytest.raises(ModelError, match="positions=original"):
            written(text_model("llama"), {"input_ids": prompt(20)}, 2, **static)
    with pytest.raises(SpecError, match="positions=original"):
        attach(tiny("qwen2_5_vl").model, "gemfilter:0.5?positions=new")


def test_a_prompt_without_media_warns_once_and_notes_it() -> None:
    this = tiny("llava_onevision")
    inputs = this.inputs(["no picture here"])
    with attach(this.model, "fastv@llm2:0.5") as trace, warnings.catch_warnings(record=True) as w:
        warnings.simplefilter("always")
        this.model(**inputs)
        this.model(**inputs)
    assert len([x for x in w if "tokens=all" in str(x.message)]) == 1
    assert any("has no image, video or sound" in note for note in trace.notes)
    with attach(this.model, "fastv@llm2:0.5?tokens=all") as trace:
        out = this.model(**inputs).logits
    assert out.shape[1] < inputs["input_ids"].shape[1] and not trace.notes


def test_dense_models_are_many() -> None:
    assert len(DENSE) >= 15 and len(HYBRID) >= 5
