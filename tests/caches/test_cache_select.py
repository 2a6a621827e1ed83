"""A decode step that reads a part of the cache equals a stock step that hides the rest."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import oracles_select as oracles
import pytest
import torch
from cache_runs import close, rows, run
from text_zoo import padded, prompt, text_model, written
from tiny_models import tiny
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import LlamaForCausalLM

from mmfast.attach import attach
from mmfast.core.errors import ModelError, SpecError
from mmfast.models.kv import host_entries
from mmfast.models.reduction.probe import intercepting
from mmfast.models.wrappers import attention_at

LENGTH, STEPS = 41, 5
SPECS = (
    "quest:0.3?page=4&skip=0",
    "quest:9?page=3&skip=1",
    "sink:2+window:6+quest:0.1?page=4&skip=0",
    "tokenselect:0.2?similar=0.7",
    "tidaldecode:0.2?skip=0&again=0",
    "twilight:0.6?base=0.6&page=4&skip=0",
    "sink:2+kinetics:0.6?page=4&skip=1",
    "sink:2+window:6+specache:0.2?group=4",
    "specache:9?bits=4&group=8",
    "sink:2+sentencekv:0.3?ends=57_71_9_83_36_11",
    "sink:2+slimfer:0.3?block=4&unit=2",
)
ENDS = {57, 71, 9, 83, 36, 11}
QUICK = ("llama", "gpt_oss", "qwen3_next")  # plain, with windows and sinks, hybrid
MORE = ("gemma3", "gpt_neox", "falcon_h1", "qwen2", "gemma2", "gpt2", "opt", "lfm2", "jamba")


def full_layers(model: Any) -> list[int]:
    kinds = getattr(model.config, "layer_types", None)
    kinds = list(kinds or ["full_attention"] * model.config.num_hidden_layers)
    full = [i for i, kind in enumerate(kinds) if kind in ("full_attention", "hybrid", "attention")]
    return [i for i in full if attention_at(model.get_decoder(), i) is not None]


class SlowSelection:
    """The stock attention function under a mask that hides what a slow policy does not read."""

    def __init__(self, model: Any, spec: str, fault: Callable[[Any], Any] = lambda s: s) -> None:
        self.layers, self.spec, self.fault = full_layers(model), spec, fault
        self.modules = {attention_at(model.get_decoder(), i): i for i in self.layers}
        self.votes: dict[int, tuple[np.ndarray, set[int], int]] = {}
        self.tidal: list[set[int]] = []
        self.read: list[int] = []
        self.asked: dict[int, list[tuple[int, np.ndarray]]] = {}
        self.ids: list[int] = []
        self.model = model
        self.guessed: dict[int, list[set[int]]] = {}

    def __enter__(self) -> SlowSelection:
        around = {m: partial(self.around, self.layers.index(i)) for m, i in self.modules.items()}
        self.stack = intercepting(around)
        self.stack.__enter__()
        self.hook = self.model.register_forward_pre_hook(self.see, with_kwargs=True)
        return self

    def __exit__(self, *error: Any) -> None:
        self.hook.remove()
        self.stack.__exit__(*error)

    def see(self, _: Any, args: Any, kwargs: Any) -> None:
        self.ids += (args[0] if args else kwargs["input_ids"])[0].tolist()

    def around(self, depth: int, call: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
        query, key, value, mask, *rest = args
        if query.shape[2] > 1:
            return call(module, *args, **kwargs)
        scale = kwargs.get("scaling") or query.shape[-1] ** -0.5
        seen = self.choose(depth, query[0, :, 0].double().numpy(), key[0].double().numpy(), scale)
        self.read.append(sum(map(len, seen)))
        self.heads, low = key.shape[1], torch.finfo(query.dtype).min
        hidden = torch.full((self.heads, key.shape[2]), low, dtype=query.dtype)
        for head, places in enumerate(self.fault(seen)):
            hidden[head, sorted(places)] = 0.0
        hidden = hidden.repeat_interleave(query.shape[1] // self.heads, 0)
        added = hidden[None, :, None] if mask is None else mask + hidden[None, :, None]
        return call(module, query, key, value, added, *rest, **kwargs)

    def choose(self, depth: int, q: np.ndarray, k: np.ndarray, scale: float) -> list[set[int]]:
        heads, n, _ = k.shape
        everything = [set(range(n))] * heads
        match SPECS.index(self.spec):
            case 0:
                return oracles.quest(q, k, 0.3, 4)
            case 1:
                return everything if depth < 1 else oracles.quest(q, k, 9, 3)
            case 2:
                return oracles.quest(q, k, 0.1, 4, {0, 1, *range(n - 6, n)})
            case 3:
                last = self.votes.get(depth)
                if last is None or oracles.cosine(q, last[0]) < 0.7:
                    chosen = oracles.tokenselect(q, k, oracles.tokens_of(0.2, n), scale)
                    last = self.votes[depth] = q, chosen, n
                return [last[1] | set(range(last[2] - 1, n))] * heads
            case 4:
                if depth:
                    return [mine | {n - 1} for mine in self.tidal]
                self.tidal = oracles.tidaldecode(q, k, oracles.tokens_of(0.2, n), scale)
                return everything
            case 6:
                return everything if depth < 1 else oracles.kinetics(q, k, 0.6, 4, {0, 1})
            case 7 | 8 as number:
                knobs = (0.2, 2, 4, {0, 1, *range(n - 6, n)}) if number == 7 else (9, 4, 8)
                mine = oracles.specache(q, k, scale, *knobs)  # of this query
                before = self.guessed.get(depth, mine)
                self.guessed[depth] = [each | {n} for each in mine]
                return before
            case 9:
                numbers = oracles.sentences(self.ids, ENDS)
                asked = self.asked.setdefault(depth, [])
                asked.append((numbers[-1], q))
                now = [query for number, query in asked if number == numbers[-1]]
                return oracles.sentencekv(now, k, numbers, 0.3, {0, 1})
            case 10:
                if not depth:
                    self.tidal = oracles.slimfer(q, k, scale, 0.3, 4, 2, {0, 1})
                return self.tidal
        return oracles.twilight(q, k, 0.6, 0.6, 4, scale)


def slow_unless(names: Any, quick: Any) -> list[Any]:
    return [n if n in quick else pytest.param(n, marks=pytest.mark.slow) for n in names]


@pytest.mark.parametrize("name", slow_unless((*QUICK, *MORE), QUICK))
def test_a_part_equals_a_mask(name: str) -> None:
    model, ids = text_model(name), {"input_ids": prompt(LENGTH)}
    for spec in SPECS:
        if spec.startswith("tidal") and len(full_layers(model)) < 2:
            continue
        with attach(model, cache=spec) as trace:
            new, logits, _ = written(model, ids, STEPS)
        with SlowSelection(model, spec) as slow:
            want = written(model, ids, STEPS)
        torch.testing.assert_close(logits, want[1], atol=1e-5, rtol=0, msg=spec)
        assert torch.equal(new, want[0]), spec
        assert len(trace.reads) == STEPS - 1, spec
        total = sum(each.read for each in trace.reads) * len(slow.layers) * slow.heads
        assert round(total) == sum(slow.read) and trace.reads[0].read < trace.reads[0].held, spec
        assert [row.stage for row in trace.rows] == ["kv", "select"]


def test_entries_and_bytes_are_counted() -> None:
    model, ids = text_model("llama"), {"input_ids": prompt(LENGTH)}
    with attach(model, cache=SPECS[0]) as trace:
        written(model, ids, STEPS)
    with SlowSelection(model, SPECS[0]) as slow:
        written(model, ids, STEPS)
    steps = np.array(slow.read).reshape(STEPS - 1, 4)  # of both heads
    for number, (each, mine) in enumerate(zip(trace.reads, steps, strict=True)):
        n = LENGTH + 1 + number
        assert (each.held, each.read) == (n, mine.sum() / 8)
        bounds = 4 * 2 * ((n - 1) // 4) * 2 * 8 * 8  # layers, heads, pages, two bounds of 8 doubles
        assert each.nbytes == mine.sum() * 2 * 8 * 8 + bounds
    row = trace.rows[-1]
    assert row.stage == "select" and row.tokens_in == round(LENGTH + 1 + (STEPS - 2) / 2)
    assert row.peak_bytes == sum(each.nbytes for each in trace.reads) // (STEPS - 1)


@pytest.mark.parametrize("fault", ["another head", "one place off", "one entry less"])
def test_the_oracle_sees_planted_faults(fault: str) -> None:
    def wrong(seen: list[set[int]]) -> list[set[int]]:
        if fault == "another head":
            return seen[::-1]
        n = max(map(max, seen)) + 1
        if fault == "one place off":
            return [{(i - 1) % n for i in mine} for mine in seen]
        return [mine - {min(mine)} for mine in seen]

    model, ids = text_model("llama"), {"input_ids": prompt(LENGTH)}
    with attach(model, cache=SPECS[0]):
        found = written(model, ids, STEPS)[1]
    with SlowSelection(model, SPECS[0], wrong):
        want = written(model, ids, STEPS)[1]
    assert (found[:, 1] - want[:, 1]).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_a_share_of_one_is_the_stock_model(name: str) -> None:
    model, ids = text_model(name), {"input_ids": prompt(LENGTH)}
    stock = written(model, ids, STEPS)[1]
    methods = ("quest", "tokenselect", "tidaldecode", "twilight", "kinetics", "specache", "slimfer")
    for method in methods:
        with attach(model, cache=f"{method}:1.0"):
            assert torch.equal(written(model, ids, STEPS)[1], stock), method
    with attach(model, cache="quest:9999?skip=0"):  # more than there are
        torch.testing.assert_close(written(model, ids, STEPS)[1], stock, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    "spec",
    slow_unless((*SPECS, "snapkv:0.5?window=5+quest:0.3?page=3&skip=0"), (SPECS[0], *SPECS[3:])),
)
def test_a_ragged_batch_equals_its_rows(spec: str) -> None:
    prompts = [prompt(LENGTH), prompt(29, 1), prompt(35, 2)]
    for name in ("llama", "gemma3") if spec == SPECS[1] else ("llama",):
        model = text_model(name)
        with attach(model, cache=spec):
            logits = written(model, padded(prompts), STEPS)[1]
            even = written(model, {"input_ids": torch.cat([prompt(29, 1), prompt(29, 3)])}, STEPS)
            alone = [written(model, {"input_ids": ids}, STEPS)[1] for ids in prompts]
            other = written(model, {"input_ids": prompt(29, 3)}, STEPS)
        torch.testing.assert_close(logits, torch.cat(alone), atol=2e-5, rtol=0)
        torch.testing.assert_close(even[1][1], other[1][0], atol=2e-5, rtol=0)


@pytest.mark.parametrize("spec", slow_unless((SPECS[0], SPECS[2], *SPECS[4:]), SPECS[:1]))
def test_beams_drafts_and_chunks(spec: str) -> None:
    model, ids = text_model("llama"), {"input_ids": prompt(LENGTH)}
    two = {"input_ids": ids["input_ids"].repeat(2, 1)}
    with attach(model, cache=spec):
        new, logits, _ = written(model, ids, 8)
        drafts = written(model, ids, 8, prompt_lookup_num_tokens=3)
        chunks = written(model, ids, 8, prefill_chunk_size=16)
        one, both = (written(model, each, 6, num_beams=2)[0] for each in (ids, two))
    assert torch.equal(drafts[0], new)
    torch.testing.assert_close(drafts[1], logits, atol=1e-5, rtol=0)
    torch.testing.assert_close(chunks[1], logits, atol=1e-5, rtol=0)
    assert torch.equal(one[0], both[0]) and torch.equal(one[0], both[1])


def test_what_a_score_leaves_is_chosen_from() -> None:
    """Against the stock function on what the first policy has left, which a page of 1 shows."""
    model, ids = text_model("llama"), {"input_ids": prompt(LENGTH)}
    evict = "snapkv:0.5?window=5"
    with attach(model, cache=f"{evict}+{SPECS[0]}") as trace:
        found = written(model, ids, STEPS)
    with attach(model, cache=evict), SlowSelection(model, SPECS[0]):
        want = written(model, ids, STEPS)
    torch.testing.assert_close(found[1], want[1], atol=1e-5, rtol=0)
    assert trace.reads[0].held == round(0.5 * LENGTH) + 1


@pytest.mark.parametrize(
    "family", slow_unless(("qwen2_5_vl", "gemma3", "lfm2_vl"), ("qwen2_5_vl",))
)
def test_prompts_with_media(family: str) -> None:
    this = tiny(family)
    spec = "quest:0.3?page=4&skip=0"
    together = run(this, rows(this, [0, 1]), spec, tokens=5)
    for row in range(2):
        close(together, run(this, rows(this, [row]), spec, tokens=5), row)


def test_a_cache_that_was_filled_elsewhere_and_goes_on_without() -> None:
    """New entries lie in spare room; copies and later calls see plain tensors."""
    model, ids = text_model("llama"), prompt(LENGTH)
    cache = model(ids, use_cache=True).past_key_values
    stock, twin = copy.deepcopy(cache), copy.deepcopy(cache)
    tokens = prompt(6, 9)[0]
    with attach(model, cache=SPECS[0]) as trace:
        model(tokens[None, :1], past_key_values=cache)
        halfway = copy.deepcopy(cache)
        model(tokens[None, 1:2], past_key_values=cache)
        room = cache.layers[0].room
        want = model(tokens[None, 1:2], past_key_values=halfway).logits
        model(tokens[None, :1], past_key_values=twin)
        again = model(tokens[None, 1:2], past_key_values=twin).logits
    assert torch.equal(want, again) and len(trace.reads) == 5
    assert halfway.layers[0].room is not room and cache.layers[0].room is room
    twin.layers[0].reset()  # begins anew in another room
    keys, _ = twin.layers[0].update(*(torch.ones(1, 2, 3, 8, dtype=torch.float64),) * 2)
    assert keys.shape[2] == 3 and twin.layers[0].get_seq_length() == 3
    for each in (cache, stock):
        each.crop(LENGTH - each.get_seq_length())
    after = [model(tokens[None, 2:3], past_key_values=each).logits for each in (cache, stock)]
    assert torch.equal(*after)  # detached: the stock model on the same entries


def test_what_cannot_act_says_so() -> None:
    model, ids = text_model("llama"), {"input_ids": prompt(LENGTH)}
    for spec, words in (
        ("quest:0.1?skip=4", "reads everything in all 4 layers"),
        ("tidaldecode:0.1?skip=3", "this model has 4"),
        ("twilight:0.8?skip=9", "skip=9"),
        ("kinetics:0.8?skip=4", "skip=4"),
    ):
        with pytest.raises(SpecError, match=words):
            attach(model, cache=spec)
    with pytest.raises(SpecError, match="anew from pass to pass"):
        attach(model, cache="quest:0.1", decode="recycle")
    with (
        attach(model, cache="quest:0.1"),
        pytest.raises(ModelError, match="leave out cache_implementation"),
    ):
        written(model, ids, 2, cache_implementation="static", disable_compile=True)


EAGER = ("quest:0.2?page=4&skip=0", "twilight:0.6?base=0.6&page=4&skip=0", "specache:9?group=8")


@pytest.mark.parametrize("spec", EAGER)
def test_eager_attention_tells_the_weights_of_what_was_read(spec: str) -> None:
    """Of the first layer, whose queries are stock: those of a stock step, the others taken off."""
    model, inputs = copy.deepcopy(text_model("llama")), padded([prompt(24, 0), prompt(15, 1)])
    model.set_attn_implementation("eager")
    both = {"output_attentions": True}
    new, _, stock = written(model, inputs, 2, **both)
    with attach(model, cache=spec):
        same, _, found = written(model, inputs, 3, **both)
    assert torch.equal(same[:, 0], new[:, 0])  # what the step below reads
    (whole, *_), layers = stock.attentions[1], found.attentions[1]
    assert len(layers) == 4 and all(each.shape == whole.shape for each in layers)
    read = layers[0] > 0
    assert bool((whole[~read] > 0).any())
    want = whole * read
    torch.testing.assert_close(layers[0], want / want.sum(-1, keepdim=True))
    alone = {name: each[:1] for name, each in inputs.items()}
    with attach(model, cache=spec):  # and each of several drafts its own
        _, _, plain = written(model, alone, 8, **both)
        _, _, drafted = written(model, alone, 8, prompt_lookup_num_tokens=3, **both)
    for one, other in zip(plain.attentions[1:], drafted.attentions[1:], strict=True):
        for a, b in zip(one, other, strict=True):
            torch.testing.assert_close(a, b[..., : a.shape[-1]])


def test_nothing_is_left_behind() -> None:
    model, ids = text_model("llama"), {"input_ids": prompt(LENGTH)}
    stock = written(model, ids, STEPS)[1]
    with attach(model, cache=SPECS[0]), nullcontext():
        written(model, ids, STEPS)
    assert torch.equal(written(model, ids, STEPS)[1], stock)
    assert isinstance(stock, Tensor)


class _AtOnce:
    """A fake mode cannot be entered by two threads."""

    def submit(self, work: Any, *args: Any) -> Future[Any]:
        done = Future[Any]()
        done.set_result(work(*args))
        return done


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_entries_lie_in_host_memory_and_are_brought(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device that is faked, any operation on tensors of two devices is an error."""
    monkeypatch.setattr(host_entries, "_worker", _AtOnce)
    config = text_model("llama").config
    with FakeTensorMode(), torch.no_grad():
        with torch.device("cuda"):
            model, ids = LlamaForCausalLM(config), torch.zeros(1, LENGTH, dtype=torch.long)
        with attach(model, cache="specache:9?group=8"):
            cache = model(ids, use_cache=True).past_key_values
            assert cache.layers[0].keys.device.type == "cuda"
            for _ in range(3):
                logits = model(ids[:, :1], past_key_values=cache).logits
                assert {layer.keys.device.type for layer in cache.layers} == {"cpu"}
                assert logits.device.type == "cuda"
            assert model(ids[:, :5], past_key_values=cache).logits.device.type == "cuda"  # a prompt
            (memory,) = cache.layers[0].room.memory.values()
            assert memory["codes"].grow(cache.layers[0].keys, 5).device.type == "cuda"
        assert model(ids[:, :1], past_key_values=cache).logits.device.type == "cuda"  # detached


def test_fetched_entries_and_those_waited_for_are_counted() -> None:
    """A step waits for its newest entry alone; the first one for all, and each after a crop."""
    model, ids = text_model("llama"), prompt(LENGTH)
    token, groups = 4 * 2 * 2 * 8 * 8, (LENGTH // 8, 8)  # of all layers and heads, in doubles
    with attach(model, cache="specache:9?group=8") as trace:
        cache = model(ids, use_cache=True).past_key_values
        for turn in range(5):
            if turn == 3:
                cache.crop(-1)
            model(ids[:, :1], past_key_values=cache)
    copy_bytes = 4 * 2 * groups[0] * (8 * 8 * 2 // 8 + 2 * 8 * 8)
    held = [LENGTH + 1, LENGTH + 2, LENGTH + 3, LENGTH + 3, LENGTH + 4]
    for turn, (each, n) in enumerate(zip(trace.reads, held, strict=True)):
        read = 9 + n - groups[0] * groups[1]
        assert (each.held, each.read) == (n, read)
        assert each.nbytes == read * token + copy_bytes and each.fetched == read * token
        assert each.awaited == (read if turn in (0, 3) else 1) * token


def test_what_was_fetched_for_other_entries_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault: a fetch that is taken for that of any choice."""
    model, ids = text_model("llama"), {"input_ids": prompt(LENGTH)}
    spec = SPECS[7]
    with SlowSelection(model, spec):
        want = written(model, ids, 8)[1]
    with attach(model, cache=spec):
        found = written(model, ids, 8, prompt_lookup_num_tokens=3)[1]
    torch.testing.assert_close(found, want, atol=1e-5, rtol=0)
    monkeypatch.setattr(host_entries.Fetch, "of", lambda self, _: self._count - 3)
    with attach(model, cache=spec), pytest.raises(AssertionError):
        torch.testing.assert_close(written(model, ids, 8)[1], want, atol=1e-5, rtol=0)
