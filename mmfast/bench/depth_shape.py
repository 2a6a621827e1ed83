"""What depth passes of CSM's real shape cost, random weights: `python -m mmfast.bench.depth_shape`.

A frame four ways, interleaved: the nested `generate` of the stock class, the lean module code by
code, and drafted and checked with drafts of which all, or nine in ten, are right.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mmfast.bench.results import Row, environment
from mmfast.decoding.codebook_choice import CodeChoice
from mmfast.decoding.codebook_plan import BlockPlan, FrameCount, measure_share
from mmfast.decoding.codebook_types import Drafts
from mmfast.decoding.codebooks import draft_and_check, one_by_one
from mmfast.heads.depth_core import DepthCore
from mmfast.models.depth_weights import csm_depth

WRONG = (0.0, 0.1)  # share of wrong drafts


def build(device: torch.device, **sizes: Any) -> Any:
    """The stock depth decoder of CSM-1B, or of other sizes."""
    from transformers import CsmDepthDecoderConfig, CsmDepthDecoderForCausalLM

    torch.manual_seed(0)
    model = CsmDepthDecoderForCausalLM(CsmDepthDecoderConfig(**sizes)).eval()
    torch.nn.init.normal_(model.codebooks_head.weight, std=0.05)
    return model.to(device, torch.bfloat16 if device.type == "cuda" else torch.float32)


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
    return lambda: draft_and_check(core, hidden, first, Drafts(drafts), choice, plan)


@torch.no_grad()
def rows(device: str = "cpu", repeats: int = 2, **sizes: Any) -> list[Row]:
    """A row per way, with its time relative to the lean module code by code."""
    place = torch.device(device)
    model = build(place, **sizes)
    core, config, choice = csm_depth(model), model.config, CodeChoice()
    dtype = model.model.norm.weight.dtype
    hidden = torch.randn(1, config.backbone_hidden_size, device=place, dtype=dtype)
    first = torch.randint(config.vocab_size, (1,), device=place)
    right = one_by_one(core, hidden, first, choice)
    stock = _stock(model, hidden, first, core.codes)
    same = torch.equal(stock(), right)
    tokens = torch.cat([first[:, None], right[:, :-1]], dim=1)
    frame = core.begin(hidden)
    one, all_of = (partial(core.run, frame, tokens[:, :n], 0) for n in (1, core.codes))
    share = measure_share(one, all_of, core.codes, _clock(place))
    ways: dict[str, Callable[[], Tensor]] = {
        "stock": stock,
        "code by code": lambda: one_by_one(core, hidden, first, choice),
    }
    counts = {"stock": core.codes, "code by code": core.codes}
    for wrong in WRONG:
        noise = torch.rand(right.shape, device=place) < wrong
        drafts = torch.where(noise, (right + 1) % core.size, right)
        count, name = FrameCount(core.codes), f"drafts {1 - wrong:.0%} right"
        draft_and_check(core, hidden, first, Drafts(drafts), choice, None, count)
        counts[name] = count.rounds
        ways[name] = _checked(core, hidden, first, drafts, BlockPlan(core.codes))
        same &= torch.equal(ways[name](), right)
    taken = _interleaved(ways, repeats, place)
    base = taken["code by code"]
    return [
        {
            "bench": "depth-shape",
            "way": name,
            "codes": core.codes,
            "passes": counts[name],
            "ms": round(1e3 * ms, 3),
            "speedup": round(base / ms, 3),
            "share_of_a_code": round(share, 4),
            "identical": same,
            **environment(place),
        }
        for name, ms in taken.items()
    ]


def _clock(place: torch.device) -> Callable[[], float]:
    return time.perf_counter if place.type == "cuda" else time.process_time


def _interleaved(
    ways: dict[str, Callable[[], Tensor]], repeats: int, place: torch.device
) -> dict[str, float]:
    """Median seconds of each: of the process on a CPU, by the clock on an accelerator."""
    clock = _clock(place)
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, run in ways.items():
            start = clock()
            run()
            if place.type == "cuda":
                torch.cuda.synchronize()
            taken[name].append(clock() - start)
    return {name: statistics.median(times) for name, times in taken.items()}


if __name__ == "__main__":
    for row in rows("cuda" if torch.cuda.is_available() else "cpu"):
        sys.stdout.write(json.dumps(row) + "\n")
