"""Blocks in host memory behind a prompt cut by `slimfer`, against masks and against hand counts."""

from __future__ import annotations

import copy
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any

import numpy as np
import oracles_select as oracles
import pytest
import torch
from text_zoo import padded, prompt, text_model, written
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from mmfast.attach import attach
from mmfast.models.kv import host_entries, selection
from mmfast.models.reduction.probe import intercepting
from mmfast.models.wrappers import attention_at

LENGTH, STEPS, LAYERS = 61, 5, 8
CUT = "slimfer:0.4?tokens=text&block=4"
KEEP = "slimfer:0.3?block=4&unit=2"
TOKEN = 2 * 2 * 8 * 8  # heads, keys and values, channels, bytes of a double


@lru_cache
def deep() -> Any:
    """A model of which the five cuts leave runs of layers that hold the same."""
    torch.manual_seed(3)
    config = copy.deepcopy(text_model("llama").config)
    config.num_hidden_layers = LAYERS
    return LlamaForCausalLM(config).to(torch.float64).eval()


class MaskedBlocks:
    """The stock attention of one row under a mask, by the oracle; layers of one length ask once."""

    def __init__(self, model: Any, fault: Callable[[list[set[int]]], list[set[int]]]) -> None:
        self.fault, self.seen = fault, list[tuple[int, int, int]]()  # depth, held, read
        modules = {attention_at(model.get_decoder(), i): i for i in range(LAYERS)}
        self.around = {m: partial(self.attend, i) for m, i in modules.items()}
        self.last: tuple[int, list[set[int]]] = 0, []

    def attend(self, depth: int, call: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
        query, key, value, mask, *rest = args
        if query.shape[2] > 1:
            return call(module, *args, **kwargs)
        q, k = (x[0].double().numpy() for x in (query[:, :, 0], key))
        n, scale = key.shape[2], query.shape[-1] ** -0.5
        if not depth or n != self.last[0]:
            self.last = n, self.fault(oracles.slimfer(q, k, scale, 0.3, 4, 2))
        places = self.last[1][0]
        self.seen.append((depth, n, len(places)))
        hidden = torch.full((1, 1, 1, n), torch.finfo(query.dtype).min, dtype=query.dtype)
        hidden[..., sorted(places)] = 0.0
        added = hidden if mask is None else mask + hidden
        return call(module, query, key, value, added, *rest, **kwargs)


def masked(model: Any, fault: Callable[[Any], Any] = lambda s: s) -> tuple[Any, MaskedBlocks]:
    slow = MaskedBlocks(model, fault)
    with attach(model, CUT), intercepting(slow.around):
        return written(model, {"input_ids": prompt(LENGTH)}, STEPS), slow


def brought(model: Any, keep: str = KEEP) -> tuple[Any, Any]:
    with attach(model, CUT, cache=keep) as trace:
        return written(model, {"input_ids": prompt(LENGTH)}, STEPS), trace


def test_a_step_reads_the_blocks_of_the_oracle_and_counts_them() -> None:
    """Each segment of layers with one length waits for the blocks of its first layer alone."""
    model = deep()
    (want, slow), (found, trace) = masked(model), brought(model)
    torch.testing.assert_close(found[1], want[1], atol=1e-5, rtol=0)
    assert torch.equal(found[0], want[0]) and len(trace.reads) == STEPS - 1
    steps = np.array(slow.seen).reshape(STEPS - 1, LAYERS, 3)
    held = steps[0, :, 1].tolist()
    assert held[0] == LENGTH + 1 and held == sorted(held, reverse=True) and len(set(held)) > 1
    for each, layers in zip(trace.reads, steps, strict=True):
        lengths, read = layers[:, 1].tolist(), layers[:, 2].tolist()
        first = [not i or lengths[i] != lengths[i - 1] for i in range(LAYERS)]
        late = [r if new or r == n else 1 for n, r, new in zip(lengths, read, first, strict=True)]
        assert (each.held, each.read) == (sum(lengths) / LAYERS, sum(read) / LAYERS)
        assert each.fetched == sum(read) * TOKEN and each.awaited == sum(late) * TOKEN
        assert each.awaited < each.fetched < sum(lengths) * TOKEN and each.waited_ms > 0
        # Two layers at most: the one that reads, and the next one's without its newest entry.
        ahead = [0 if last else r - 1 for r, last in zip(read[1:], first[1:], strict=True)] + [0]
        assert each.resident == max(r + a for r, a in zip(read, ahead, strict=True)) * TOKEN


FAULTS: dict[str, Callable[[list[set[int]]], list[set[int]]]] = {
    "one place off": lambda seen: [{(i - 1) % (max(s) + 1) for i in s} for s in seen],
    "one block less": lambda seen: [s - set(sorted(s)[:4]) for s in seen],
    "nothing hidden": lambda seen: [set(range(max(s) + 1)) for s in seen],
}


@pytest.mark.parametrize("name", list(FAULTS))
def test_the_oracle_sees_planted_faults(name: str) -> None:
    model = deep()
    want, found = masked(model, FAULTS[name])[0], brought(model)[0]
    assert (found[1][:, 1] - want[1][:, 1]).abs().max() > 1e-3


@pytest.mark.parametrize(
    "fault", ["choices go on behind a cut", "values of other keys", "one more"]
)
def test_faults_of_the_fetch_are_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = deep()
    want = masked(model)[0]
    if fault == "choices behind a cut":
        monkeypatch.setattr(selection.Selection, "_same", lambda self, asked: asked.index > 0)
    elif fault == "values of other keys":
        true = host_entries.Fetch.pair

        def other(self: Any) -> tuple[Tensor, Tensor]:
            keys, values = true(self)
            return keys, values.roll(1, 2)

        monkeypatch.setattr(host_entries.Fetch, "pair", other)
    else:
        monkeypatch.setattr(host_entries.Fetch, "of", lambda self, _: self._count - 1)
    with pytest.raises((AssertionError, RuntimeError, IndexError)):
        torch.testing.assert_close(brought(model)[0][1], want[1], atol=1e-5, rtol=0)


@pytest.mark.parametrize("keep", ["slimfer:1.0", "slimfer:9999"])
def test_all_blocks_are_the_answer_without_it(keep: str) -> None:
    """A share of one attaches nothing; a budget above the cache brings all from host memory."""
    model = deep()
    with attach(model, CUT):
        stock = written(model, {"input_ids": prompt(LENGTH)}, STEPS)
    found, trace = brought(model, keep)
    assert torch.equal(found[1], stock[1]) and torch.equal(found[0], stock[0])
    whole = [each.fetched == each.held * LAYERS * TOKEN for each in trace.reads]
    assert whole == [True] * ((STEPS - 1) * (keep == "slimfer:9999"))


def test_a_ragged_batch_equals_its_rows() -> None:
    prompts = [prompt(LENGTH), prompt(37, 1), prompt(50, 2)]
    model = deep()
    with attach(model, CUT, cache=KEEP):
        logits = written(model, padded(prompts), STEPS)[1]
        alone = [written(model, {"input_ids": ids}, STEPS)[1] for ids in prompts]
    torch.testing.assert_close(logits, torch.cat(alone), atol=2e-5, rtol=0)
    with attach(model, CUT):
        stock = written(model, padded(prompts), STEPS)[1]
    assert (stock[:, 1] - logits[:, 1]).abs().max() > 1e-3


def test_beams_drafts_and_crops() -> None:
    model, ids = deep(), {"input_ids": prompt(LENGTH)}
    two = {"input_ids": ids["input_ids"].repeat(2, 1)}
    with attach(model, cache=KEEP):
        new, logits, _ = written(model, ids, 8)
        drafts = written(model, ids, 8, prompt_lookup_num_tokens=3)
    assert torch.equal(drafts[0], new)
    torch.testing.assert_close(drafts[1], logits, atol=1e-5, rtol=0)
    with attach(model, CUT, cache=KEEP):
        one, both = (written(model, each, 6, num_beams=2)[0] for each in (ids, two))
        assert torch.equal(one[0], both[0]) and torch.equal(one[0], both[1])
        cache = model(ids["input_ids"], use_cache=True).past_key_values
        tokens = prompt(3, 5)
        first = [model(tokens[:, i : i + 1], past_key_values=cache).logits for i in range(3)]
        twin = copy.deepcopy(cache)
        for each in (cache, twin):
            each.crop(-2)
            again = [model(tokens[:, i : i + 1], past_key_values=each).logits for i in (1, 2)]
            torch.testing.assert_close(again, first[1:], atol=1e-6, rtol=0)


class _Alive:
    """Bytes of all copies from host memory that are alive, and the most there were of a step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._true, self._lock = host_entries.copied, threading.Lock()
        self.now = self.most = 0
        monkeypatch.setattr(host_entries, "copied", self)

    def __call__(self, *args: Any) -> Any:
        pair = self._true(*args)
        self._add(sum(x.nbytes for x in pair))
        for each in pair:
            weakref.finalize(each, self._add, -each.nbytes)
        return pair

    def _add(self, nbytes: int) -> None:
        with self._lock:
            self.now += nbytes
            self.most = max(self.most, self.now)


def test_what_is_on_the_device_is_bounded_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """By tensors that are alive, whatever is counted: never the blocks of three layers."""
    model, alive = deep(), _Alive(monkeypatch)
    with attach(model, CUT, cache=KEEP) as trace:
        cache = model(prompt(LENGTH), use_cache=True).past_key_values
        for token in prompt(5, 5)[0]:
            alive.most = alive.now
            model(token[None, None], past_key_values=cache)
            n = LENGTH + len(trace.reads)
            largest = (round(0.3 * n / 4) + 1) * 4 * TOKEN
            assert 0 < alive.most <= 2 * largest and trace.reads[-1].resident <= 2 * largest
            assert alive.now == 0  # nothing stays between steps
            assert trace.reads[-1].fetched > alive.most  # yet all layers have read


@contextmanager
def calls_of(model: Any, log: list[tuple[str, int]]) -> Iterator[None]:
    hooks = []
    for i in range(LAYERS):
        module: nn.Module = attention_at(model.get_decoder(), i)
        hooks.append(module.register_forward_pre_hook(lambda *_, i=i: log.append(("in", i))))
        hooks.append(module.register_forward_hook(lambda *_, i=i: log.append(("out", i))))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def test_blocks_are_sent_for_a_layer_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a layer attends, before the next begins; on another thread, which may be late."""
    model, log, threads = deep(), list[tuple[str, int]](), set[str]()
    true, copied = host_entries.Fetch.__init__, host_entries.copied

    def noted(self: Any, *args: Any) -> None:
        log.append(("send", -1))
        true(self, *args)

    def late(*args: Any) -> tuple[Tensor, Tensor]:
        if threading.current_thread() is not threading.main_thread():
            threads.add(threading.current_thread().name)
            time.sleep(0.02)
        return copied(*args)

    with attach(model, cache=KEEP) as trace, calls_of(model, log):
        cache = model(prompt(LENGTH), use_cache=True).past_key_values
        quick = model(prompt(1, 5), past_key_values=copy.deepcopy(cache)).logits
        log.clear()
        monkeypatch.setattr(host_entries.Fetch, "__init__", noted)
        monkeypatch.setattr(host_entries, "copied", late)
        logits = model(prompt(1, 5), past_key_values=cache).logits
    around = [each for i in range(LAYERS) for each in (("in", i), ("send", -1), ("out", i))]
    del around[-2]  # no layer follows the last one
    assert log == around and torch.equal(logits, quick)
    assert len(threads) == 1 and "mmfast-fetch" in threads.pop()
    assert trace.reads[1].waited_ms >= (LAYERS - 1) * 15  # all but the first had their blocks late
    assert cache.layers[0].host and {x.device.type for x in cache.layers[0].room.views()} == {"cpu"}
