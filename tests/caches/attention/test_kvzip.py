"""KVzip: passes over the prompt behind it, against the same by hand, in every way of asking."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cache_oracle
import decode_models
import model_oracle as oracle
import pytest
import repeat_walk
import torch
from cache_questions import ask
from scored_caches import generated, noted, same
from tiny_models import build
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import DynamicCache, PreTrainedTokenizerFast

import mmfast
from mmfast.attach import attach
from mmfast.caches.plan import plan_cache
from mmfast.core.errors import SpecError
from mmfast.models.kv.repetition import WORDS, request_ids
from mmfast.models.kv.view import view_plan
from mmfast.streams.engine import check_score

ALL = "kvzip:4000?chunk=9"  # the prompt is repeated, and nothing leaves
IDS = [[1 + (i * k) % 23 for i in range(n)] for n, k in ((31, 5), (24, 7), (40, 11))]


@pytest.fixture
def spoken(tmp_path: Path) -> Any:
    """A model of text whose folder has a tokenizer: one id a word or mark."""
    pieces = Regex(r"\n| |\w+|[,:]")
    split = pre_tokenizers.Split(pieces, "isolated")
    found = {p for text in WORDS for p, _ in split.pre_tokenize_str(text)}
    tokenizer = Tokenizer(
        models.WordLevel({p: i for i, p in enumerate(["?", *sorted(found)])}, "?")
    )
    tokenizer.pre_tokenizer = split
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path)
    model = decode_models.tiny().eval()
    model.name_or_path = str(tmp_path)
    return model


def by_hand(ids: list[int], chunk: int, words: Any = ((), (), ())) -> Any:
    """Scores by layer, of passes through the stock layers without sdpa."""
    model = decode_models.tiny(attn_implementation="eager").eval()
    embeds = model.get_input_embeddings()(torch.tensor(ids)).detach()
    prompt = oracle.Prompt(embeds, torch.arange(len(ids)), [])
    this = SimpleNamespace(model=model, facts=SimpleNamespace(blocks=None, prefix=False))
    with torch.no_grad():
        walk = cache_oracle.Walk(this, prompt)
    return repeat_walk.received(walk, prompt, chunk, words)


def scored(cache: Any, row: int = 0) -> list[Any]:
    """What the real entries of a row have received, by layer."""
    return noted(cache, "repeated", row)


def asked(model: Any, ids: Any, spec: str | None = ALL, **options: Any) -> Any:
    return generated(model, ids, spec, **options)


@pytest.mark.parametrize("chunk", [1, 9, 100])
def test_a_request_stands_before_every_chunk(spoken: Any, chunk: int) -> None:
    words = request_ids(spoken)
    assert words is not None and all(words) and 0 not in {i for each in words for i in each}
    found = scored(asked(spoken, IDS[:1], f"kvzip:4000?chunk={chunk}").past_key_values)
    same(found, by_hand(IDS[0], chunk, words).values())
    mute = by_hand(IDS[0], chunk)
    off = [(a - torch.tensor(b)).abs().max() for a, b in zip(found, mute.values(), strict=True)]
    assert max(map(float, off)) > 1e-3


def test_a_model_without_a_tokenizer_is_not_asked() -> None:
    model = decode_models.tiny().eval()
    with attach(model, cache=ALL) as trace:
        cache = model(torch.tensor(IDS[:1]), use_cache=True).past_key_values
    same(scored(cache), by_hand(IDS[0], 9).values())
    assert trace.notes == ["no tokenizer beside the model: prompts are repeated unasked"]


def test_nothing_of_the_passes_stays(spoken: Any) -> None:
    out, stock = (asked(spoken, IDS, spec, max_new_tokens=6) for spec in (ALL, None))
    assert torch.equal(out.sequences, stock.sequences)
    assert torch.equal(torch.stack(out.logits), torch.stack(stock.logits))
    for mine, its in zip(out.past_key_values.layers, stock.past_key_values.layers, strict=True):
        assert torch.equal(mine.keys, its.keys) and torch.equal(mine.values, its.values)
        assert int(mine.get_seq_length()) == int(its.get_seq_length())
        assert mine.pending is None and "number" not in mine.notes


def test_rows_parts_and_drafts_change_nothing(spoken: Any) -> None:
    alone = [scored(asked(spoken, [row]).past_key_values) for row in IDS]
    for options in ({}, {"prefill_chunk_size": 7}):
        cache = asked(spoken, IDS, **options).past_key_values
        for row, mine in enumerate(alone):
            same(scored(cache, row), mine)
    spec, options = "kvzip:0.4?chunk=9", {"max_new_tokens": 12}
    greedy = asked(spoken, IDS[:1], spec, **options)
    looked = asked(spoken, IDS[:1], spec, **options, prompt_lookup_num_tokens=3)
    assert torch.equal(greedy.sequences, looked.sequences)


def test_the_prompt_of_a_second_turn_is_repeated_alone(spoken: Any) -> None:
    cache = DynamicCache(config=spoken.config)
    more = [3, 9, 4, 17, 8]
    with attach(spoken, cache="kvzip:12?chunk=9"):
        spoken(torch.tensor(IDS[:1]), past_key_values=cache)
        before = [x.clone() for x in scored(cache)]
        spoken(torch.tensor([[7]]), past_key_values=cache)
    with attach(spoken, cache=ALL):
        spoken(torch.tensor([more]), past_key_values=cache)
    for mine, its in zip(scored(cache), before, strict=True):
        assert torch.equal(mine[:, :12], its) and bool((mine[:, 12] == 1).all())
        assert mine.shape[1] == 18 and bool((mine[:, 13:] < 1).all())


@pytest.mark.parametrize(
    "spec",
    ["kvzip:12?chunk=9", "kvsquared:12?chunk=9", "kvcompose:12?chunk=9", "compactor:12?chunk=9"],
)
def test_what_came_before_the_policy_is_told(spoken: Any, spec: str) -> None:
    """Nothing is known of it, so that it would stay, or leave, whatever is asked."""
    cache, more = DynamicCache(config=spoken.config), torch.tensor([[3, 9, 4, 17, 8]])
    spoken(torch.tensor(IDS[:1]), past_key_values=cache)
    with attach(spoken, cache=spec) as trace, pytest.warns(UserWarning, match="31 entries .* came"):
        spoken(more, past_key_values=cache)
    assert len(trace.notes) == 1
    cache = DynamicCache(config=spoken.config)
    with attach(spoken, cache=spec) as trace:
        spoken(torch.tensor(IDS[:1]), past_key_values=cache)
        spoken(more, past_key_values=cache)
    assert not trace.notes


def test_threads_do_not_meet(spoken: Any) -> None:
    alone, found = [scored(asked(spoken, [row]).past_key_values) for row in IDS], {}
    with attach(spoken, cache=ALL):

        def work(row: int) -> None:
            for _ in range(4):
                out = spoken(torch.tensor([IDS[row]]), use_cache=True)
                found.setdefault(row, []).append(scored(out.past_key_values))

        threads = [threading.Thread(target=work, args=(row,)) for row in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for row, mine in enumerate(alone):
        for each in found[row]:
            same(each, mine)


REDUCED = [
    ("llava_onevision", "tome:0.5"),
    ("qwen2_5_vl", "tome:0.5"),
    ("qwen2_5_vl", "evs:0.5"),
    ("qwen3_vl", "evs:0.5"),  # merged planes of DeepStack are those of the token that stays
]


@pytest.mark.parametrize("family, reduce", REDUCED)
def test_what_a_reducer_left_is_repeated(family: str, reduce: str) -> None:
    """Tokens as they enter the first layer, merged ones too, at the positions that they keep."""
    this, slow, seen = build(family), build(family, attention="eager"), []
    inputs, layer = ask(this), this.model.get_decoder().layers[0]
    with attach(this.model, reduce=reduce, cache=ALL) as trace, torch.no_grad():
        look = layer.register_forward_pre_hook(
            lambda _m, args, kwargs: seen.append((*args, kwargs.get("hidden_states"))[0]),
            with_kwargs=True,
        )
        cache = this.model(**inputs, use_cache=True).past_key_values
        look.remove()
        whole = oracle.embed(slow, inputs)
        keep = oracle.kept_places(whole, trace.reductions)
        planes = [plane[keep] for plane in whole.planes]
        short = oracle.Prompt(seen[0][0], whole.positions[..., keep], [], planes)
        walk = cache_oracle.Walk(slow, short)
    assert len(keep) < len(whole.embeds) and len(keep) == len(short.embeds)
    same(scored(cache), repeat_walk.received(walk, short, 9).values())


def test_tokens_that_are_counted_anew_are_repeated_so() -> None:
    model = decode_models.tiny().eval()
    with attach(model, reduce="gemfilter:0.5?tokens=all&positions=new", cache=ALL) as trace:
        cache = model(torch.tensor(IDS[:1]), use_cache=True).past_key_values
    ((_, _, reduction),) = trace.reductions
    keep = sorted({*reduction.keep.tolist(), 30})  # the last token stays
    same(scored(cache), by_hand([IDS[0][place] for place in keep], 9).values())


def test_heads_share_a_budget_and_packs_hold_the_same(spoken: Any) -> None:
    words = request_ids(spoken)
    hand = by_hand(IDS[0], 9, words)
    out = asked(spoken, IDS[:1], "kvzip:12?chunk=9+adakv?alpha=0.0").past_key_values
    for index, scores in hand.items():
        flat = torch.tensor(scores).flatten()
        marks = torch.zeros(len(flat), dtype=torch.bool)
        marks[flat.topk(24).indices] = True
        assert torch.equal(cache_oracle.kept(out, index, 31), marks.view(scores.shape))
    plain, packed = (
        asked(spoken, IDS[:1], f"kvzip:12?chunk=9{more}").past_key_values
        for more in ("", "+quant:8")
    )
    for index in hand:
        seen = [cache_oracle.kept(each, index, 31) for each in (plain, packed)]
        assert torch.equal(*seen) and bool((seen[0].sum(1) == 12).all())


def test_a_pipeline_asks_with_its_own_tokenizer() -> None:
    pipe = mmfast.pipeline("video-qa", cache="kvzip:0.5")
    answer = pipe(
        Path(__file__).parents[3] / "assets/clips/red-circle.mp4",
        "Which way does the red circle move?",
    )
    (row,) = [row for row in answer.trace.rows if row.stage == "kv"]
    assert answer.text and row.tokens_out == round(0.5 * row.tokens_in)
    assert not [note for note in answer.trace.notes if "tokenizer" in note]


def test_it_is_refused_where_it_cannot_act(spoken: Any) -> None:
    with pytest.raises(SpecError, match="needs attn_repeated, which a stream does not have"):
        check_score(plan_cache("kvzip:64"))
    with pytest.raises(SpecError, match="decode 'self' cannot choose by 'kvzip'"):
        view_plan("kvzip", 0.5)
    with pytest.raises(SpecError, match="chunk=0 of 'kvzip': choose 1 or more"):
        attach(spoken, cache="kvzip:0.5?chunk=0")
    with pytest.raises(SpecError, match="every"):
        attach(spoken, cache="kvzip:0.5?every=4")
