"""What one pass costs: of the backbone at some widths, of a draft module."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mmfast.models.backbone import Backbone


def pass_costs(
    backbone: Backbone,
    head: Any,
    rows: slice,
    *,
    past: int = 300,
    widths: Sequence[int] = (1, 4, 11),
    rounds: int = 20,
) -> dict[str, float]:
    """Milliseconds of processor time, medians, all kinds of passes in turn.

    A pass is all that stands between tokens: embedding, layers, norms, the rows of the output
    head, the choice.

    Args:
        backbone: The trunk.
        head: A head that drafts along time.
        rows: Rows of the vocabulary to choose from.
        past: Tokens that were read before.
        widths: Tokens read at once: by the backbone, and by the modules to catch up.
        rounds: Times of each.

    Returns:
        `main_<width>` per pass of the backbone, and `draft_<width>` per module where the modules
        catch up on so many tokens.
    """
    with torch.inference_mode():
        jobs = {f"main_{width}": _main(backbone, rows, past, width) for width in widths}
        for width in widths:
            jobs[f"draft_{width}"] = _draft(backbone, head, rows, past, width)
        times: dict[str, list[float]] = {name: [] for name in jobs}
        for number in range(rounds + 2):  # two to warm up
            for name, job in jobs.items():
                start = time.thread_time()
                job()
                if number > 1:
                    times[name].append(1e3 * (time.thread_time() - start))
    share = {name: head.modules_count if "draft" in name else 1 for name in jobs}
    return {name: statistics.median(found) / share[name] for name, found in times.items()}


def _random(backbone: Backbone, n: int) -> Tensor:
    return torch.randn(1, n, backbone.width, device=backbone.device).to(backbone.dtype)


def _main(backbone: Backbone, rows: slice, past: int, width: int) -> Callable[[], None]:
    state = backbone.state(1, past + width)
    backbone.run(state, _random(backbone, past), [past])
    ids = torch.zeros(1, width, dtype=torch.int64, device=backbone.device)

    def job() -> None:
        state.crop([past])
        hidden = backbone.norm(backbone.run(state, backbone.embed(ids), [width]))
        backbone.logits(hidden[0], rows).max(-1)[1].tolist()

    return job


def _draft(backbone: Backbone, head: Any, rows: slice, past: int, width: int) -> Callable[[], None]:
    state = head.init_state(1, past + width)
    read = _random(backbone, past)
    head.observe(state, read, read, [past])
    token = torch.zeros(1, dtype=torch.int64, device=backbone.device)

    def pick(logits: Tensor, i: int) -> Tensor:
        confidence, best = logits.softmax(-1).max(-1)
        confidence.tolist()
        return best + (rows.start or 0)

    def job() -> None:
        for filled in state.filled:
            filled[0] = min(filled[0], past - width)
        head.draft(state, token, head.modules_count, rows, pick)

    head.draft(state, token, head.modules_count, rows, pick)
    return job
