"""Benchmark of the server beside the continuous batching of transformers, on prompts of text."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from functools import partial
from statistics import median
from typing import Any

import torch

from mmfast.bench.registry import Tick, benchmark
from mmfast.bench.results import Row
from mmfast.bench.suites.serve.chats import CHATS, TimeSpent, answered, chat, reset, spent
from mmfast.bench.suites.serve.mix import TINY, tiny
from mmfast.bench.timing import frozen, paired
from mmfast.core.errors import MmfastError
from mmfast.models.prompt import chat_inputs
from mmfast.serve.engine.scheduler import Scheduler

_TOKENS = 40  # of each answer
_BLOCKS = 256  # pages of its cache: the default takes all free memory, and minutes for a round
_STOCK, _AGAIN = "stock `generate`, one batch", "stock again"


def _text_model(model: Any) -> Any:
    """The language model alone, with the same weights: continuous batching takes no media here."""
    from transformers import Qwen2ForCausalLM

    made = Qwen2ForCausalLM(model.config.text_config).eval()
    made.model, made.lm_head = model.get_decoder(), model.lm_head
    return made


def _paged(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    found = model.generate_batch(
        prompts,
        generation_config=GenerationConfig(max_new_tokens=_TOKENS, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(
            num_blocks=_BLOCKS, max_batch_tokens=2048
        ),
    )
    if len(found) != len(prompts):
        raise MmfastError(f"generate_batch gave {len(found)} answers to {len(prompts)} prompts")
    names = sorted(found, key=lambda name: int(name.rpartition("_")[2]))
    return [list(found[name].generated_tokens) for name in names]


def _stock(model: Any, inputs: dict[str, Any]) -> list[list[int]]:
    out = model.generate(**inputs, max_new_tokens=_TOKENS, min_new_tokens=_TOKENS, do_sample=False)
    rows: list[list[int]] = out[:, inputs["input_ids"].shape[1] :].tolist()
    return rows


def _engine(scheduler: Scheduler, texts: list[str]) -> None:
    answered(scheduler, [chat(_TOKENS, text, pictures=0) for text in texts])


@benchmark("serve", "paged")
def paged(tick: Tick, rounds: int = 5) -> list[Row]:
    """Answer 16 texts at once: stock, the engine, and `generate_batch` of transformers."""
    model, processor = tiny()
    texts = [f"{number} {'what comes next here? ' * (4 + number % 3)}" for number in range(CHATS)]
    chats = [[{"role": "user", "content": [text]}] for text in texts]
    inputs = dict(chat_inputs(processor, chats, model.device))
    rows = zip(inputs["input_ids"], inputs["attention_mask"].bool(), strict=True)
    prompts, lone = [ids[seen].tolist() for ids, seen in rows], _text_model(model)
    times: dict[str, list[TimeSpent]] = {}
    with closing(Scheduler((model, processor), name=TINY, queue=CHATS)) as scheduler, frozen():
        runs: dict[str, Callable[[], Any]] = {
            _STOCK: partial(_stock, model, inputs),
            _AGAIN: partial(_stock, model, inputs),
            "this engine": partial(_engine, scheduler, texts),
            "`generate_batch`": partial(_paged, lone, prompts),
        }
        with torch.inference_mode():
            if runs[_STOCK]() != runs["`generate_batch`"]():
                raise MmfastError("generate_batch and generate answer differently")
        for number in range(rounds + 1):  # the first round warms up
            for job in list(runs)[:: 1 if number % 2 else -1]:
                reset(scheduler)
                with torch.inference_mode():
                    taken = spent(runs[job])
                times.setdefault(job, []).extend([taken] if number else [])
            tick(TINY, number, rounds)
    walls = {job: [each.wall for each in found] for job, found in times.items()}
    shared: Row = {"model": TINY, "chats": CHATS, "tokens": _TOKENS, "n": rounds, "device": "cpu"}
    shared |= {"threads": torch.get_num_threads()}
    shared["noise"] = abs(paired(walls[_AGAIN], walls[_STOCK]) - 1)
    return [
        {
            "job": job,
            **shared,
            "seconds": median(wall),
            "to_stock": paired(wall, walls[_STOCK]),
            "blocks": _BLOCKS if "batch`" in job else None,
        }
        for job, wall in walls.items()
        if job != _AGAIN
    ]
