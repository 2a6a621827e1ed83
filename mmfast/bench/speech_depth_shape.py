"""What depth passes of CSM's real shape cost, with random weights.

A frame four ways, interleaved: the nested `generate` of the stock class, the lean module code by
code, and drafted and checked with drafts of which all, or nine in ten, are right.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mmfast.bench.named import Tick
from mmfast.bench.results import Row
from mmfast.bench.timing import frozen, interleave, one_thread, paired
from mmfast.decoding.codebooks import (
    BlockPlan,
    CodeChoice,
    FrameCount,
    FrameDrafts,
    draft_and_check,
    measure_share,
    one_by_one,
)
from mmfast.heads.depth import DepthCore
from mmfast.models.speech.depth_weights import csm_depth

WRONG = (0.0, 0.1)  # share of wrong drafts


def build(**sizes: Any) -> Any:
    """The stock depth decoder of CSM-1B, or of other sizes."""
    from transformers import CsmDepthDecoderConfig, CsmDepthDecoderForCausalLM

    torch.manual_seed(0)
    model = CsmDepthDecoderForCausalLM(CsmDepthDecoderConfig(**sizes)).eval()
    torch.nn.init.normal_(model.codebooks_head.weight, std=0.05)
    return model


def _stock(model: Any, hidden: Tensor, first: Tensor, codes: int) -> Callable[[], Tensor]:
    ids = torch.nn.functional.pad(first[:, None], (1, 0))

    def run() -> Tensor:
        said: Tensor = model.generate(
            input_ids=ids,
            backbone_last_hidden_state=hidden.clone(),
            min_new_tokens=codes,
            max_new_tokens=codes,
            do_sample=False,
        )
        return said[:, 2:]

    return run


def _checked(
    core: DepthCore, hidden: Tensor, first: Tensor, drafts: Tensor, plan: BlockPlan
) -> Callable[[], Tensor]:
    choice = CodeChoice()
    return lambda: draft_and_check(core, hidden, first, FrameDrafts(drafts), choice, plan)


def rows(progress: Tick) -> list[Row]:
    """A row per way, with its time relative to the lean module code by code."""
    return measure(2, progress)


@torch.no_grad()
def measure(rounds: int, progress: Tick, **sizes: Any) -> list[Row]:
    """The same for another number of rounds, or other sizes than CSM's."""
    model = build(**sizes)
    core, config, choice = csm_depth(model), model.config, CodeChoice()
    dtype = model.model.norm.weight.dtype
    hidden = torch.randn(1, config.backbone_hidden_size, dtype=dtype)
    first = torch.randint(config.vocab_size, (1,))
    right = one_by_one(core, hidden, first, choice)
    stock = _stock(model, hidden, first, core.codes)
    same = torch.equal(stock(), right)
    tokens = torch.cat([first[:, None], right[:, :-1]], dim=1)
    frame = core.begin(hidden)
    one, all_of = (partial(core.run, frame, tokens[:, :n], 0) for n in (1, core.codes))
    share = measure_share(one, all_of, core.codes, time.process_time)
    ways: dict[str, Callable[[], Tensor]] = {
        "stock": stock,
        "code by code": lambda: one_by_one(core, hidden, first, choice),
    }
    counts = {"stock": core.codes, "code by code": core.codes}
    for wrong in WRONG:
        noise = torch.rand(right.shape) < wrong
        drafts = torch.where(noise, (right + 1) % core.size, right)
        count, name = FrameCount(core.codes), f"drafts {1 - wrong:.0%} right"
        draft_and_check(core, hidden, first, FrameDrafts(drafts), choice, None, count)
        counts[name] = count.rounds
        ways[name] = _checked(core, hidden, first, drafts, BlockPlan(core.codes))
        same &= torch.equal(ways[name](), right)
    jobs = {name: partial(_timed, name, run, progress) for name, run in ways.items()}
    with one_thread(), frozen():
        taken = interleave(jobs, rounds)
    times = {name: [each["ms"] for each in samples] for name, samples in taken.items()}
    return [
        {
            "job": name,
            "preset": "csm",
            "codebooks": core.codes,
            "passes_per_frame": counts[name],
            "median_ms": statistics.median(spent),
            "score": paired(times["code by code"], spent),
            "share_of_a_code": share,
            "identical": float(same),
            "clock": "processor time of the process",
            "n": rounds,
            "device": "cpu",
        }
        for name, spent in times.items()
    ]


def _timed(name: str, run: Callable[[], Tensor], progress: Tick) -> dict[str, float]:
    start = time.process_time()
    run()
    spent = time.process_time() - start
    progress(name, 0, 0)
    return {"ms": 1e3 * spent}
