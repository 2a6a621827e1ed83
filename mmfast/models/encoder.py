"""A faster vision tower, on request: `encoder="fast"`, `"compile"` or `"graph"`.

Nothing here drops or merges anything. Features are those of the stock tower up to rounding, since
sums run in another order; what is merely left out (blocks behind the feature layer, a pooled head
that nobody reads) changes no bit.
"""

from __future__ import annotations

import inspect
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache, partial
from os import environ
from typing import Any

import torch
from torch import Tensor, nn

from mmfast.core.errors import MmfastError, SpecError, unknown
from mmfast.core.spec import Spec
from mmfast.models.adapter import adapter_for
from mmfast.models.encoder_graph import graphed
from mmfast.models.encoder_patches import as_linear, patch_convolutions
from mmfast.models.encoder_segments import fused_attention
from mmfast.models.patching import override
from mmfast.models.towers import Tower, attention_of, kinds_of

MODES = ("fast", "compile", "graph")


def check_encoder(mode: str | None, device: torch.device | None = None) -> None:
    """Refuse a mode that does not exist, or that the machine cannot run.

    Raises:
        SpecError: Unknown mode; names the choices.
        MmfastError: `compile` on a CPU without a C++ compiler, `graph` without CUDA.
    """
    if mode is None:
        return
    if mode not in MODES:
        raise SpecError(unknown("encoder", str(mode), MODES))
    if device is None:
        return
    compilers = (environ.get("CXX", "g++"), "g++", "clang++")
    if mode == "compile" and device.type == "cpu" and not any(map(shutil.which, compilers)):
        raise MmfastError(
            "encoder='compile' needs a C++ compiler on the CPU; install g++ or use encoder='fast'"
        )
    if mode == "graph" and device.type != "cuda":
        raise MmfastError(
            f"encoder='graph' records CUDA graphs, and the tower is on {device}; use "
            "encoder='compile' or move the model to CUDA"
        )


def check_alone(mode: str, specs: Sequence[Spec]) -> None:
    """Refuse stages that make every pass of the tower another one, where passes are recorded.

    Raises:
        SpecError: Names the stage.
    """
    inside = [str(spec) for spec in specs if spec.site in ("pixel", "vit") and not spec.whole]
    if mode == "graph" and inside:
        raise SpecError(
            f"encoder='graph' repeats one pass of the tower, and {inside[0]!r} makes each another; "
            "use encoder='compile' beside it"
        )


@contextmanager
def fast_encoder(model: Any, mode: str | None) -> Iterator[None]:
    """Speed the vision tower of a model up for as long as the `with` lasts.

    Args:
        model: A stock model of a known family.
        mode: None leaves it stock. `fast` embeds patches by a matrix product, computes attention
            by SDPA with the windows or frames of a packed tower in one call, and skips blocks and
            pooled heads whose output is not used. `compile` also compiles the tower's blocks, when
            they first run (tens of seconds on a CPU; a new shape may compile again). `graph`
            records `fast` once per input shape as a CUDA graph and replays it.

    Raises:
        SpecError: Unknown mode.
        MmfastError: The machine cannot run it.
        ModelError: Unknown family.
    """
    check_encoder(mode)
    if mode is None:
        yield
        return
    tower = adapter_for(model).tower(model.base_model)
    check_encoder(mode, next(tower.module.parameters()).device)
    with ExitStack() as stack:
        for conv in patch_convolutions(tower.module):
            stack.enter_context(override(conv, "forward", partial(as_linear, conv)))
        stack.enter_context(fused_attention(tower))
        stack.enter_context(_skipping(tower))
        if mode == "compile":
            for block in tower.blocks:
                stack.enter_context(override(block, "forward", partial(_compiled, block)))
        if mode == "graph":
            stack.enter_context(graphed(tower))
        yield


@lru_cache
def _compile(forward: Callable[..., Any]) -> Callable[..., Any]:
    """One compiled function for all blocks of a class: their weights are its arguments."""
    return torch.compile(forward)


def _compiled(block: nn.Module, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around a block; one whose attention somebody watches runs as it is."""
    if watched(block):
        return call(*args, **kwargs)
    return _compile(type(block).forward)(block, *args, **kwargs)


def watched(block: Any) -> bool:
    """Whether signals are read from a block's attention."""
    return "_mmfast_gate" in attention_of(block).__dict__


@contextmanager
def _skipping(tower: Tower) -> Iterator[None]:
    """Leave out what no feature depends on, inside `get_image_features` and its likes."""
    if tower.packed or not len(tower.blocks):
        yield
        return
    work = threading.local()
    with ExitStack() as stack:
        for kind in {"image", "video"} & set(kinds_of(tower.base)):
            around = partial(_needed, tower, kind, work)
            stack.enter_context(override(tower.base, f"get_{kind}_features", around))
        for index, block in enumerate(tower.blocks):
            stack.enter_context(override(block, "forward", partial(_skip_block, work, index)))
        head = getattr(tower.module, "head", None)
        if isinstance(head, nn.Module):
            stack.enter_context(override(head, "forward", partial(_skip_head, work)))
        yield


def _needed(
    tower: Tower, kind: str, work: Any, call: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Note the last block that features depend on, for as long as they are computed."""
    signature = inspect.signature(getattr(tower.base, f"get_{kind}_features"))
    arguments = signature.bind(*args, **kwargs).arguments
    whole = kwargs.get("output_hidden_states") or tower.base.config.output_hidden_states
    if whole or getattr(work, "last", None) is not None:
        return call(*args, **kwargs)
    work.last = tower.last_used(arguments)
    try:
        return call(*args, **kwargs)
    finally:
        work.last = None


def _skip_block(
    work: Any, index: int, call: Callable[..., Any], hidden: Tensor, *args: Any, **kwargs: Any
) -> Any:
    last = getattr(work, "last", None)
    return call(hidden, *args, **kwargs) if last is None or index <= last else hidden


def _skip_head(work: Any, call: Callable[..., Any], hidden: Tensor, *args: Any) -> Any:
    skip = getattr(work, "last", None) is not None
    return hidden[:, 0] if skip else call(hidden, *args)
