"""A cache that grows in place gives `generate` the same logits and copies nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from text_zoo import TEXTS, padded, prompt, text_model, written
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.cache_utils import DynamicCache

import mmfast
from mmfast.models.cache_name import CACHE
from mmfast.models.kv.room import RoomyLayer, growing_cache
from mmfast.models.reduction.cache_layers import is_short

TOKENS = 12
# Layers whose whole state is a room: no window, convolution or recurrence.
PLAIN = [name for name in TEXTS if name in ("llama", "qwen3", "gpt_neox", "mixtral")]


class JoinedNumbers(TorchDispatchMode):
    """Numbers of caches that were copied to join them with new ones."""

    def __init__(self, held: int) -> None:
        super().__init__()
        self._held, self.count = held, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.cat.default and args[1:] in ((2,), (-2,)):
            joined = [x for x in args[0] if x.ndim == 4 and x.shape[2] >= self._held]
            self.count += sum(x.numel() for x in joined)
        return func(*args, **(kwargs or {}))


def _written(name: str, given: bool, **more: Any) -> Any:
    model = text_model(name)
    batch = padded([prompt(40), prompt(23, seed=1)])
    cache = growing_cache(model, more) if given else {}
    with torch.inference_mode():
        return (*written(model, batch, TOKENS, **cache, **more)[:2], cache.get(CACHE))


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("name", TEXTS)
def test_logits_are_those_of_the_stock_cache(name: str) -> None:
    tokens, logits, _ = _written(name, False)
    ours, found, _ = _written(name, True)
    assert torch.equal(tokens, ours)
    # Gemma 2 in double precision gives rows with padding no numbers, by either cache.
    torch.testing.assert_close(found, logits, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", PLAIN)
def test_steps_copy_no_entries(name: str) -> None:
    with JoinedNumbers(40) as stock:
        _written(name, False)
    with JoinedNumbers(40) as grown:
        cache = _written(name, True)[2]
    assert stock.count > 0 and grown.count == 0
    assert all(isinstance(layer, RoomyLayer) for layer in cache.layers)


@pytest.mark.parametrize(
    "how",
    [
        {"num_beams": 2},
        {"num_return_sequences": 2},
        {"use_cache": False},
        {"cache_implementation": "static"},
        {"prompt_lookup_num_tokens": 2},
        {CACHE: DynamicCache()},
    ],
)
def test_calls_that_want_another_cache_keep_theirs(how: dict[str, Any]) -> None:
    model = text_model("llama")
    assert growing_cache(model, how) == {} and growing_cache(model, {})


def test_an_entry_is_never_written_over_for_copies() -> None:
    """What a copy of the cache holds stays, whatever the cache it was made of reads next."""
    import copy

    cache = growing_cache(text_model("llama"), {})[CACHE]
    first, more, other = (torch.full((1, 2, n, 8), float(n)) for n in (5, 1, 2))
    cache.update(first, first, 0)
    twin = copy.deepcopy(cache)
    shallow = copy.copy(cache.layers[0])
    cache.update(more, more, 0)
    twin.update(other, other, 0)
    shallow.update(2 * more, 2 * more)
    held = [each.keys[0, 0, 5:, 0].tolist() for each in (cache.layers[0], twin.layers[0], shallow)]
    assert held == [[1.0], [2.0, 2.0], [2.0]]


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize(
    "options", [{}, {"reduce": "evs:0.5"}, {"cache": "snapkv:0.5"}, {"cache": "sentencekv:0.5"}]
)
def test_pipelines_answer_with_it(options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from mmfast.pipelines import visual_qa

    made: list[Any] = []

    def growing(model: Any, how: Any) -> Any:
        made.append(growing_cache(model, how))
        return made[-1]

    pipe = mmfast.pipeline("video-qa", device="cpu", **options)
    words = "assets/clips/red-circle.mp4", "Describe the clip."
    monkeypatch.setattr(visual_qa, "growing_cache", lambda *_: {})
    stock = pipe(*words).text
    monkeypatch.setattr(visual_qa, "growing_cache", growing)
    with JoinedNumbers(24) as joined:
        assert pipe(*words).text == stock
    layers = made[0][CACHE].layers
    assert joined.count == 0 and all(isinstance(layer, RoomyLayer) for layer in layers)


@pytest.mark.parametrize("given", [False, True])
def test_selection_makes_layers_able_to_lose_entries(given: bool) -> None:
    """Also those that have room already, of a prompt that was read before."""
    model = text_model("llama")
    cache = growing_cache(model, {})[CACHE] if given else DynamicCache(config=model.config)
    with torch.inference_mode():
        model(input_ids=prompt(40), **{CACHE: cache})
        with mmfast.attach(model, cache="quest:0.5?page=4"):
            model(input_ids=prompt(1), **{CACHE: cache})
    assert all(is_short(each) and isinstance(each, RoomyLayer) for each in cache.layers)
