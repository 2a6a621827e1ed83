"""Benchmark of the server: requests of different specs at once, beside stock `generate`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch

from mmfast.bench.cases import fill_
from mmfast.bench.presets import get_preset
from mmfast.bench.registry import Tick, benchmark
from mmfast.bench.results import Row
from mmfast.bench.suites.serve.chats import CHATS, TimeSpent, answered, chat, reset, spent
from mmfast.bench.timing import frozen, paired
from mmfast.models.loading import load
from mmfast.models.prompt import chat_inputs
from mmfast.serve.engine.base import Options, Request
from mmfast.serve.engine.scheduler import Scheduler

_STOCK, _PLAIN, _AGAIN, _MIXED = "stock `generate`, one batch", "no spec", "no spec again", "mixed"
SPECS = (
    Options(reduce="fastv@llm1:0.5"),
    *(Options(cache=spec) for spec in ("snapkv:16", "sink:4+window:64", "quant:8", "retrieve:2")),
)
# Policies that read a part of a row at every step, and drafts of the model itself.
CHOOSING = (
    *(Options(cache=f"{spec}:0.1") for spec in ("quest", "tidaldecode", "specache", "slimfer")),
    *(Options(decode=f"self:0.1{knobs}") for knobs in ("", "?tree=dynamic")),
)
MODEL, _TOKENS = "tiny-video", 40  # its answers are as long
_WIDE = "llava-onevision-0.5b"
# The tiny LLaVA-OneVision of the tests: where it spends its time is in Python.
TINY = "llava-onevision, 32 channels"
_TILE, _PICTURE = 24, (40, 56)  # pixels
_TEXT = (32, 64, 4, 4, 2)
_VISION = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
_VISION |= {"num_attention_heads": 2, "image_size": _TILE, "patch_size": 4}
_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def tiny() -> tuple[Any, Any]:
    """Return a tiny random LLaVA-OneVision, which cuts pictures into tiles, and its processor."""
    model, processor = load(MODEL, "cpu", "float32")
    config, processor = copy.deepcopy(model.config), copy.deepcopy(processor)
    text = dict(zip((*_SIZES, "num_key_value_heads"), _TEXT, strict=True))
    for part, values in ((config.text_config, text), (config.vision_config, _VISION)):
        for name, value in values.items():
            setattr(part, name, value)
    config.text_config.layer_types = config.text_config.layer_types[: text["num_hidden_layers"]]
    grids = [[_TILE * rows, _TILE * columns] for rows in (1, 2, 3) for columns in (1, 2, 3)]
    config.image_grid_pinpoints = grids
    images = type(processor.image_processor)
    side = {"height": _TILE, "width": _TILE}
    processor.image_processor = images(size=side, image_grid_pinpoints=grids)
    processor.num_image_tokens = (_TILE // _VISION["patch_size"]) ** 2
    made = type(model)(config).eval()
    fill_(made, 0)
    made.generation_config = model.generation_config
    made.generation_config.eos_token_id = None
    return made, processor


def shaped(preset: str | None) -> tuple[Any, Any]:
    """Return the embedded model and its processor.

    A preset names another shape of the language model, with random weights.
    """
    model, processor = load(MODEL, "cpu", "float32")
    model.generation_config.eos_token_id = None  # else answers are one word
    if preset is None:
        return model, processor
    config, text = copy.deepcopy(model.config), get_preset(preset).text
    for name, value in {**text, "vocab_size": config.text_config.vocab_size}.items():
        if name not in ("model_type", "rope_parameters"):
            setattr(config.text_config, name, value)
    layers = text["num_hidden_layers"]
    config.text_config.layer_types = config.text_config.layer_types[:1] * layers
    wide = type(model)(config).eval()
    fill_(wide, 0)
    wide.generation_config = model.generation_config
    return wide, processor


Size = tuple[int, int, tuple[int, int]]  # tokens of an answer, pictures, and their pixels


def _requests(options: Sequence[Options], size: Size) -> list[Request]:
    made, (tokens, pictures, pixels) = [], size
    for number in range(CHATS):
        request = chat(tokens, pictures=pictures, size=pixels)
        made.append(replace(request, options=options[number % len(options)]))
    return made


def _answers(scheduler: Scheduler, size: Size, options: Sequence[Options]) -> None:
    answered(scheduler, _requests(options, size))


def _stock(model: Any, processor: Any, size: Size) -> None:
    requests, tokens = _requests([Options()], size), size[0]
    chats = [[message.chat for message in request.messages] for request in requests]
    inputs = chat_inputs(processor, chats, model.device)
    with torch.inference_mode():
        model.generate(**inputs, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)


def _rows(
    preset: str | None,
    jobs: dict[str, Sequence[Options]],
    tick: Tick,
    rounds: int,
    pictures: int,
    clock: str = "wall",
) -> list[Row]:
    size = _TOKENS, pictures, _PICTURE if preset == TINY else (96, 96)
    model, processor = tiny() if preset == TINY else shaped(preset)
    names = {None: MODEL, TINY: TINY}
    name = names.get(preset, f"{MODEL}, language model of {preset}")
    times: dict[str, list[TimeSpent]] = {_STOCK: [], **{job: [] for job in jobs}}
    with closing(Scheduler((model, processor), name=name, queue=CHATS)) as scheduler, frozen():
        runs: dict[str, Callable[[], None]] = {
            _STOCK: partial(_stock, model, processor, size),
            **{job: partial(_answers, scheduler, size, mine) for job, mine in jobs.items()},
        }
        for number in range(rounds + 1):  # the first round warms up
            for job in list(runs)[:: 1 if number % 2 else -1]:
                reset(scheduler)
                taken = spent(runs[job])
                times[job] += [taken] if number else []
            tick(name, number, rounds)
    shared = {"model": name, "chats": CHATS, "pictures": pictures, "tokens": _TOKENS, "n": rounds}
    shared |= {"device": "cpu", "threads": torch.get_num_threads()}
    return [
        {"job": job, **shared, **_compared(times, job, clock)} for job in times if job != _AGAIN
    ]


def _compared(times: dict[str, list[TimeSpent]], job: str, clock: str) -> Row:
    mine, plain, again, stock = (
        [getattr(each, clock) for each in times[name]] for name in (job, _PLAIN, _AGAIN, _STOCK)
    )
    return {
        "seconds": median(each.wall for each in times[job]),
        "cpu_seconds": median(each.cpu for each in times[job]),
        "to_plain": paired(mine, plain),
        "to_stock": paired(mine, stock),
        "noise": abs(paired(again, plain) - 1),
    }


@benchmark("serve", "mix")
def mix(tick: Tick, rounds: int = 9, wide_rounds: int = 2) -> list[Row]:
    """Answer 16 chats at once: stock, without a spec, with each spec, and with all specs mixed."""
    named = {option.reduce or str(option.cache): (option,) for option in SPECS}
    plain: dict[str, Sequence[Options]] = {_PLAIN: (Options(),), _AGAIN: (Options(),)}
    jobs: dict[str, Sequence[Options]] = {**plain, **named, _MIXED: SPECS}
    rows = [row for shape in ("tiny", None) for row in _rows(shape, jobs, tick, rounds, 4)]
    rows = [*_rows(TINY, jobs, tick, rounds, 1), *rows]
    return [*rows, *_rows(_WIDE, {**plain, _MIXED: SPECS}, tick, wide_rounds, 1)]


@benchmark("serve", "choosing")
def choosing(tick: Tick, rounds: int = 5) -> list[Row]:
    """Answer 16 chats at once under policies that choose at every step, and under own drafts."""
    jobs: dict[str, Sequence[Options]] = {_PLAIN: (Options(),), _AGAIN: (Options(),)}
    jobs |= {str(option.cache or option.decode): (option,) for option in CHOOSING}
    return _rows(None, jobs, tick, rounds, 4, "cpu")
