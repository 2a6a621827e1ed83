"""Draft and verify in `generate`: tokens, caches and positions of one-token decoding."""

from __future__ import annotations

import gc
from collections import Counter
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
from text_zoo import prompt, text_model
from tiny_models import ALL_FAMILIES, Tiny, build, generate, tiny

from mmfast.attach import attach
from mmfast.core.errors import MmfastError, ModelError, SpecError
from mmfast.decoding.speculation import Recycler
from mmfast.models.cache_name import cache_of
from mmfast.models.decoder import speculation

# Drafts of a fixed number, sure or not, so that many of them fall.
SELF = "self:0.3?adapt=0&least=0"
SHORT = "self?adapt=0&least=0&reduce=divprune:0.3"
TREE, CHAIN, LOOKUP = "recycle?adapt=0", "recycle?adapt=0&tree=0", "lookup?adapt=0"
HEAT, WORDS = 0.5, (65, 66, 67)  # a language of three words, so that draft and model overlap
VARIED = {"repetition_penalty": 1.3}  # tiny models repeat themselves, and drafts would all stand


def _asked(this: Tiny, rows: int = 1, seed: int = 0) -> dict[str, Any]:
    kind = "video" if "video" in this.facts.kinds else "image"
    texts = [f"{{{kind}}} a", f"so what is {{{kind}}} then?", f"a rather long one: {{{kind}}}!"]
    prompts = [f"on {{{kind}}} what?"] if rows == 1 else texts[:rows]
    media = this.media(kind, len(prompts), seed)
    return this.inputs(prompts, **media)


def _drafts(trace: Any) -> tuple[int, int]:
    (row,) = [row for row in trace.rows if row.stage == "draft"]
    return row.tokens_in, row.tokens_out


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_greedy_tokens_of_every_family(family: str) -> None:
    this = tiny(family)
    inputs, other = _asked(this), _asked(this, seed=1)
    want = generate(this, inputs, 12, **VARIED)
    with attach(this.model, decode=SELF) as trace:
        found = generate(this, inputs, 12, **VARIED)
    assert torch.equal(found.sequences, want.sequences) and _drafts(trace)[0] > 0
    want = generate(this, other, 12)
    with attach(this.model, decode=TREE) as trace:
        generate(this, inputs, 12)  # what it learns here is not all right there
        found = generate(this, other, 12)
    assert torch.equal(found.sequences, want.sequences)
    assert trace.rows[-1].tokens_in > 0


@pytest.mark.parametrize("cache", ["adakv:0.5", "snapkv:0.4"])
def test_every_prompt_is_seen_before_a_policy_acts_on_it(cache: str) -> None:
    """Hooks of a policy by head stay in while an answer is written, those of drafts do not."""
    this = tiny("llava_onevision")
    inputs = _asked(this)
    with attach(this.model, cache=cache):
        want = generate(this, inputs, 8, **VARIED).sequences
    with attach(this.model, cache=cache, decode=SELF):
        for _ in range(3):
            assert torch.equal(generate(this, inputs, 8, **VARIED).sequences, want)


@pytest.mark.slow
@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_other_drafts_of_every_family(family: str) -> None:
    this = tiny(family)
    inputs = _asked(this, 2)
    want = generate(this, inputs, 10, **VARIED)
    for spec in (SELF, SHORT, CHAIN, LOOKUP):
        with attach(this.model, decode=spec):
            found = generate(this, inputs, 10, **VARIED)
        assert torch.equal(found.sequences, want.sequences), spec


@pytest.mark.parametrize("spec", [SELF, CHAIN])
@pytest.mark.parametrize(
    "beside",
    [
        {"reduce": "random:0.5"},
        {"reduce": "random:0.6+fastv@llm2:0.5"},
        {"cache": "snapkv:0.5"},
        {"reduce": "random:0.5", "cache": "snapkv:0.5"},
    ],
)
def test_ragged_rows_beside_reductions_and_policies(spec: str, beside: dict[str, str]) -> None:
    this = tiny("qwen2_5_vl")
    inputs = _asked(this, 3)
    with attach(this.model, **beside):
        want = generate(this, inputs, 12, **VARIED)
    with attach(this.model, decode=spec, **beside) as trace:
        found = generate(this, inputs, 12, **VARIED)
    assert torch.equal(found.sequences, want.sequences)
    torch.testing.assert_close(
        torch.stack(found.logits), torch.stack(want.logits), atol=1e-5, rtol=0
    )
    assert _drafts(trace)[0] > 0


@pytest.mark.slow
def test_a_window_that_moves_at_every_step() -> None:
    this, cache = tiny("llava_onevision"), "sink:4+window:16"
    inputs = _asked(this, 2)
    with attach(this.model, cache=cache):
        want = generate(this, inputs, 16, **VARIED)
    for spec in (CHAIN, SHORT):
        with attach(this.model, cache=cache, decode=spec):
            found = generate(this, inputs, 16, **VARIED)
        assert torch.equal(found.sequences, want.sequences)


def test_rows_that_end_are_padded_as_stock_code_pads() -> None:
    this = tiny("llava_onevision")
    inputs = _asked(this, 3)
    free = generate(this, inputs, 12, **VARIED).sequences[:, inputs["input_ids"].shape[1] :]
    ends = [int(free[0, 2]), int(free[1, 6])]
    want = generate(this, inputs, 12, eos_token_id=ends, **VARIED)
    for spec in (SELF, CHAIN):
        with attach(this.model, decode=spec):
            found = generate(this, inputs, 12, eos_token_id=ends, **VARIED)
        assert torch.equal(found.sequences, want.sequences)


def test_a_stop_inside_of_accepted_drafts_ends_there() -> None:
    this = tiny("llava_onevision")
    inputs, words = _asked(this), this.processor.tokenizer
    free = generate(this, inputs, 20).sequences[0, inputs["input_ids"].shape[1] :]
    stop = words.decode(free[3:5])
    how = {"stop_strings": [stop], "tokenizer": words}
    want = generate(this, inputs, 20, **how)
    with attach(this.model, decode=CHAIN):
        found = generate(this, inputs, 20, **how)
    assert torch.equal(found.sequences, want.sequences)
    assert found.sequences.shape[1] < inputs["input_ids"].shape[1] + 20


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3", "lfm2_vl"])
def test_caches_after_rejections_are_those_of_stock_code(family: str) -> None:
    this = tiny(family)
    inputs = _asked(this)
    want = generate(this, inputs, 12, **VARIED).past_key_values
    for spec in (SELF, TREE):
        with attach(this.model, decode=spec):
            found = generate(this, inputs, 12, **VARIED).past_key_values
        assert found.get_seq_length() == want.get_seq_length()
        for mine, stock in zip(found.layers, want.layers, strict=True):
            if getattr(stock, "keys", None) is not None:
                torch.testing.assert_close(mine.keys, stock.keys, atol=1e-4, rtol=0)
                torch.testing.assert_close(mine.values, stock.values, atol=1e-4, rtol=0)
            else:
                last = stock.conv_states[0]
                state = mine.conv_states[0][..., -last.shape[-1] :]
                torch.testing.assert_close(state, last, atol=1e-4, rtol=0)


def test_positions_are_those_of_stock_code_on_all_axes() -> None:
    this = tiny("qwen2_5_vl")
    inputs = _asked(this)

    def positions(decode: str | None) -> dict[int, list[int]]:
        seen: dict[int, list[int]] = {}

        def note(_: Any, args: Any, kwargs: Any) -> None:
            past, where = cache_of(kwargs).get_seq_length(), kwargs["position_ids"]
            for i in range(where.shape[-1]):
                seen.setdefault(past + i, where[-3:, 0, i].tolist())

        handle = this.model.get_decoder().register_forward_pre_hook(note, with_kwargs=True)
        with attach(this.model, decode=decode):
            generate(this, inputs, 12, **VARIED)
        handle.remove()
        return seen

    stock, prompt = positions(None), inputs["input_ids"].shape[1]
    assert stock[prompt] != [prompt] * 3  # a picture spans fewer positions than tokens
    for spec in (SELF, CHAIN):
        mine = positions(spec)
        assert {place: mine[place] for place in stock} == stock


def test_a_second_turn_goes_on_from_the_cache() -> None:
    this = tiny("llava_onevision")
    inputs = _asked(this)
    texts = []
    for spec in (None, SELF, CHAIN):
        with attach(this.model, decode=spec):
            first = generate(this, inputs, 8, **VARIED)
            more = torch.cat([first.sequences, inputs["input_ids"][:, -6:]], 1)
            cache = first.past_key_values
            texts.append(generate(this, {"input_ids": more}, 8, past_key_values=cache).sequences)
    assert torch.equal(texts[0], texts[1]) and torch.equal(texts[0], texts[2])


def test_a_text_prompt_drafts_nothing_of_its_picture_and_says_so() -> None:
    this = tiny("llava_onevision")
    inputs = this.inputs(["no picture at all"])
    want = generate(this, inputs, 6)
    with attach(this.model, decode=SELF) as trace, pytest.warns(UserWarning, match="no visual"):
        found = generate(this, inputs, 6)
    assert torch.equal(found.sequences, want.sequences) and _drafts(trace) == (0, 0)


@pytest.mark.slow
def test_an_adapting_draft_is_as_exact() -> None:
    this = tiny("llava_onevision")
    inputs = _asked(this)
    want = generate(this, inputs, 30).sequences
    for spec in ("self:0.3", "recycle", "lookup"):
        with attach(this.model, decode=spec):
            assert torch.equal(generate(this, inputs, 30).sequences, want)


def test_a_sure_draft_runs_further_than_an_unsure_one() -> None:
    this = tiny("llava_onevision")
    inputs, counts = _asked(this), []
    for least in (0.0, 0.03, 1.0):
        with attach(this.model, decode=f"self:0.3?adapt=0&least={least}") as trace:
            generate(this, inputs, 14, **VARIED)
        counts.append(_drafts(trace)[0])
    assert counts[0] > counts[1] > 0 == counts[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A smaller model of the same tokens, and one that reads text alone."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    home = tmp_path_factory.mktemp("drafts")
    small = build("llava_onevision", layers=2, seed=3)
    small.model.save_pretrained(home / "small")
    words = small.model.config.get_text_config()
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    text = Qwen2ForCausalLM(Qwen2Config(vocab_size=words.vocab_size, **sizes, **heads))
    text.save_pretrained(home / "text")
    other = Qwen2ForCausalLM(Qwen2Config(vocab_size=words.vocab_size + 9, **sizes, **heads))
    other.save_pretrained(home / "other")
    return home


@pytest.mark.parametrize("knobs", ["small", "small?reduce=random:0.3", "small?media=0", "text"])
def test_a_draft_model_beside_its_own_view(folder: Path, knobs: str) -> None:
    this = tiny("llava_onevision")
    inputs = _asked(this, 2)
    want = generate(this, inputs, 10, **VARIED)
    spec = f"draft:{folder}/{knobs}"
    spec = spec.replace("?", "?adapt=0&least=0&") if "?" in spec else f"{spec}?adapt=0&least=0"
    with attach(this.model, decode=spec) as trace:
        found = generate(this, inputs, 10, **VARIED)
    assert torch.equal(found.sequences, want.sequences)
    assert _drafts(trace)[0] > 0


def test_a_draft_model_of_other_tokens_is_refused(folder: Path) -> None:
    this = tiny("llava_onevision")
    with pytest.raises(ModelError, match="same tokenizer"):
        attach(this.model, decode=f"draft:{folder}/other")
    with pytest.raises(ModelError, match="cannot load"):
        attach(this.model, decode=f"draft:{folder}/absent")


def test_a_perfect_draft_is_accepted_throughout(folder: Path) -> None:
    """All of the visual keys make the draft the model itself."""
    this = tiny("llava_onevision")
    inputs = _asked(this)
    this.model.save_pretrained(folder / "same")
    with attach(this.model, decode=f"draft:{folder}/same?adapt=0&least=0") as trace:
        generate(this, inputs, 25, **VARIED)
    proposed, accepted = _drafts(trace)
    assert proposed == accepted > 0


def _distribution(this: Tiny, inputs: dict[str, Any], length: int) -> dict[tuple[int, ...], float]:
    """Chances of all texts of `length` words, by passes without a cache."""
    shares: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        longer: dict[tuple[int, ...], float] = {}
        for text, share in shares.items():
            ids = torch.tensor([text], dtype=torch.long)
            whole = torch.cat([inputs["input_ids"], ids], 1)
            given = {**inputs, "input_ids": whole, "attention_mask": torch.ones_like(whole)}
            with torch.no_grad():
                logits = this.model(**given).logits[0, -1].double()
            chances = (logits[list(WORDS)] / HEAT).softmax(0).tolist()
            for token, p in zip(WORDS, chances, strict=True):
                longer[(*text, token)] = share * p
        shares = longer
    return shares


def _chi_square(counts: Counter[tuple[int, ...]], shares: dict[tuple[int, ...], float]) -> float:
    """Excess of the statistic over its mean, in standard deviations; rare texts are joined."""
    total = sum(counts.values())
    found = [(counts[text], share * total) for text, share in shares.items()]
    big = [pair for pair in found if pair[1] >= 5]
    rest = [pair for pair in found if pair[1] < 5]
    joined = (sum(o for o, _ in rest), sum(e for _, e in rest))
    cells = [*big, joined] if joined[1] > 0 else big
    statistic = sum((o - e) ** 2 / max(e, 1e-9) for o, e in cells)
    free = len(cells) - 1
    return float((statistic - free) / (2 * free) ** 0.5)


def _others(this: Tiny) -> list[int]:
    return [i for i in range(len(this.processor.tokenizer)) if i not in WORDS]


def _sampled(this: Tiny, rows: dict[str, Any], decode: str) -> Counter[tuple[int, ...]]:
    torch.manual_seed(0)
    with attach(this.model, decode=decode) as trace:
        found = this.model.generate(
            **rows,
            max_new_tokens=3,
            do_sample=True,
            temperature=HEAT,
            top_k=0,
            suppress_tokens=_others(this),
        )
    proposed, accepted = _drafts(trace)
    assert proposed > len(found) / 2 and accepted
    texts = found[:, rows["input_ids"].shape[1] :].tolist()
    return Counter(tuple(text) for text in texts)


def _likely(shares: dict[tuple[int, ...], float]) -> dict[int, list[int]]:
    """The token that follows each token most often, for drafts that are not drawn."""
    pairs: Counter[tuple[int, int]] = Counter()
    for text, share in shares.items():
        for one, other in pairwise(text):
            pairs[one, other] += share  # type: ignore[assignment]
    return {one: [other] for (one, other), _ in reversed(pairs.most_common())}


@pytest.mark.parametrize(
    "spec", [pytest.param("self:0.1?adapt=0&least=0", marks=pytest.mark.slow), CHAIN]
)
def test_drawn_texts_are_distributed_as_the_model_says(
    spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    this = tiny("llava_onevision")
    inputs = _asked(this)
    shares = _distribution(this, inputs, 3)
    assert len(shares) == 27 and abs(sum(shares.values()) - 1) < 1e-9
    monkeypatch.setattr(Recycler, "warm", lambda self, _: self._rows.update(_likely(shares)))
    rows = this.inputs(["on {video} what?"] * 240, videos=this.videos(1) * 240)
    counts = _sampled(this, rows, spec)
    assert set(counts) <= set(shares)
    assert _chi_square(counts, shares) < 4

    def always(drafts: Any, p: Any, q: Any, counts: Any, u: Any, v: Any) -> Any:
        from mmfast.decoding.accept import accept_sampled

        return accept_sampled(drafts, p, q, counts, torch.zeros_like(u), v)

    # A rule that lets every possible draft stand must show.
    monkeypatch.setattr(speculation, "accept_sampled", always)
    assert _chi_square(_sampled(this, rows, spec), shares) > 5


@pytest.mark.slow
def test_a_tree_draws_from_the_model_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    this = tiny("llava_onevision")
    inputs = _asked(this)
    shares = _distribution(this, inputs, 3)
    monkeypatch.setattr(Recycler, "warm", lambda self, _: self._rows.update(_likely(shares)))
    counts: Counter[tuple[int, ...]] = Counter()
    with attach(this.model, decode=TREE) as trace:
        for seed in range(100):
            torch.manual_seed(seed)
            found = this.model.generate(
                **inputs,
                max_new_tokens=3,
                do_sample=True,
                temperature=HEAT,
                top_k=0,
                suppress_tokens=_others(this),
            )
            counts[tuple(found[0, inputs["input_ids"].shape[1] :].tolist())] += 1
    assert set(counts) <= set(shares) and _chi_square(counts, shares) < 4
    assert sum(row.tokens_in for row in trace.rows if row.stage == "draft") > 0


def test_a_wrong_acceptance_of_greedy_drafts_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    this = tiny("llava_onevision")
    inputs = _asked(this)
    want = generate(this, inputs, 14, **VARIED).sequences

    def one_more(drafts: Any, best: Any, counts: Any) -> Any:
        from mmfast.decoding.accept import accept_greedy

        accepted = (accept_greedy(drafts, best, counts)[0] + 1).minimum(counts)
        return accepted, best.gather(1, accepted[:, None]).squeeze(1)

    monkeypatch.setattr(speculation, "accept_greedy", one_more)
    with attach(this.model, decode=SELF):
        assert not torch.equal(generate(this, inputs, 14, **VARIED).sequences, want)


def test_a_cache_that_goes_back_too_little_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from mmfast.models.decoder.reader import SequenceReader

    this = tiny("llava_onevision")
    inputs = _asked(this)
    want = generate(this, inputs, 14, **VARIED).sequences
    monkeypatch.setattr(SequenceReader, "rewind", lambda self, held: setattr(self, "held", held))
    with attach(this.model, decode=SHORT):
        assert not torch.equal(generate(this, inputs, 14, **VARIED).sequences, want)


def test_calls_that_are_not_decoded_so_are_refused_in_one_line() -> None:
    this = tiny("llava_onevision")
    inputs = _asked(this)
    with attach(this.model, decode=CHAIN):
        for more, words in (
            ({"num_beams": 2}, "beam"),
            ({"use_cache": False}, "needs a cache"),
            ({"cache_implementation": "static"}, "cache_implementation"),
            ({"output_hidden_states": True}, "output_hidden_states"),
            ({"custom_generate": print}, "both decode"),
            ({"prompt_lookup_num_tokens": 3}, "an assisted generation"),
        ):
            with pytest.raises(MmfastError, match=words) as found:
                generate(this, inputs, 4, **more)
            assert "\n" not in str(found.value)
    draft = attach(this.model, decode="self?reduce=divprune:0.5")
    with draft, pytest.raises(ModelError, match="needs a cache"):
        generate(this, inputs, 4, use_cache=False)
    del draft
    gc.collect()  # or it would warn as well: its draft has read nothing
    with attach(this.model, decode=SELF):  # which cuts what its draft reads from that cache
        with pytest.raises(ModelError, match="StaticCache cannot; leave out") as found:
            generate(this, inputs, 4, cache_implementation="static")
        assert "\n" not in str(found.value)
    stock = generate(this, inputs, 4)
    assert stock.sequences.shape[1] == inputs["input_ids"].shape[1] + 4


@pytest.mark.parametrize("name", ["bloom", "falcon_alibi", "opt"])
def test_models_whose_mask_tells_places_read_no_trees(name: str) -> None:
    model, ids = text_model(name), prompt(12).repeat(1, 3)
    given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 16, "do_sample": False}
    want = model.generate(ids, **given)
    with attach(model, decode=TREE) as trace:
        assert torch.equal(model.generate(ids, **given), want)
    assert _drafts(trace)[0] > 0


@pytest.mark.parametrize("name", ["mamba", "jamba"])
def test_recurrences_take_no_draft_back(name: str) -> None:
    model = text_model(name)
    with attach(model, decode=CHAIN), pytest.raises(ModelError, match="recurrences of") as found:
        model.generate(prompt(12), max_new_tokens=4, do_sample=False)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"decode": "self:0.1", "cache": "sink:4+window:16"}, "only behind a prompt"),
        ({"decode": "recycle", "cache": "h2o:0.5"}, "from pass to pass"),
        ({"decode": "recycle", "cache": "quant:8"}, "from pass to pass"),
        ({"decode": "self:0.1?score=expected_attention"}, "cannot choose by"),
        ({"decode": "self:0.1?score=adakv"}, "unknown score of decode"),
        ({"decode": "self:0.1?score=duo_attention"}, "unknown score of decode"),
        ({"decode": "self:0.1?score=qfilter"}, "the heads of a model"),
        ({"decode": "nothing"}, "choices"),
    ],
)
def test_stages_that_do_not_go_together_are_refused(how: dict[str, str], words: str) -> None:
    this = tiny("llava_onevision")
    with pytest.raises(SpecError, match=words):
        attach(this.model, **how)
    assert not [name for name in vars(this.model) if name.startswith("_mmfast")]


def test_a_model_that_was_let_go_is_stock_again() -> None:
    this = tiny("llava_onevision")
    before = {name for name in vars(this.model) if name != "generation_config"}
    handle = attach(this.model, decode=SELF)
    generate(this, _asked(this), 2)
    assert "decode self" in repr(handle)
    handle.detach()
    assert {name for name in vars(this.model) if name != "generation_config"} == before


def test_all_text_is_read_by_the_draft_and_its_share_is_exact() -> None:
    this = tiny("qwen2_5_vl")
    inputs = _asked(this, 2)
    seen: list[tuple[int, ...]] = []
    from mmfast.models.kv import view

    class Watched(view.CacheView):
        def __init__(self, whole: Any, part: Any) -> None:
            super().__init__(whole, part)
            seen.extend(tuple(layer.keys.shape[:3]) for layer in self.cache.layers)

    visual = int((inputs["input_ids"] == this.model.config.video_token_id).sum(1)[0])
    rows = inputs["attention_mask"].sum(1).tolist()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(view, "CacheView", Watched)
        with attach(this.model, decode="self:0.25?adapt=0"):
            generate(this, inputs, 3)
    want = max(n - visual + round(0.25 * visual) for n in rows)
    assert {shape[2] for shape in seen} == {want}
    assert list(product([2], [2], [want])) == sorted(set(seen))
