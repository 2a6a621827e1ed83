"""A CUDA graph of the vision tower per input shape: one launch instead of hundreds.

What a tower computes from grids on the host (positions, boundaries of frames and windows) is
computed before, and handed to it, so that recording meets no wait for the device. A graph reads
and writes memory of its own: inputs are copied in, and what it gives is copied out.
"""

from __future__ import annotations

import inspect
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import vision_utils

from mmfast.core.errors import ModelError
from mmfast.models.patching import override
from mmfast.models.towers import Tower, attention_of

KEPT = 4  # shapes; each holds the activations of its pass
Run = Callable[[], Any]


def capture(run: Run) -> tuple[Run, Any]:
    """Record `run`, after it warmed up; returns what repeats it, and its output's memory."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = run()
    return graph.replay, output


class Graphs:
    """Recorded passes of one tower, the least recently used dropped first."""

    def __init__(self, record: Callable[[Run], tuple[Run, Any]] = capture) -> None:
        self._record = record
        self._known: OrderedDict[Any, tuple[Tensor, Run, Any]] = OrderedDict()
        self._lock = threading.Lock()  # a graph has one set of buffers

    def __len__(self) -> int:
        return len(self._known)

    def around(self, tower: Tower, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Around the tower's forward; one whose attention is watched, or trained, runs as it is."""
        gates = (attention_of(block).__dict__ for block in tower.blocks)
        if torch.is_grad_enabled() or any("_mmfast_gate" in gate for gate in gates):
            return call(*args, **kwargs)
        pixels, *args = args or (kwargs.pop("pixel_values"),)  # type: ignore[assignment]
        weights = next(tower.module.parameters()).data_ptr()  # another one where a model moved
        key = (pixels.shape, pixels.dtype, weights, _key(args), _key(kwargs))
        with self._lock:
            if key not in self._known:
                if tower.packed:
                    kwargs |= prepared(tower, *args, **kwargs)
                still = pixels.clone()
                repeat, output = self._record(partial(call, still, *args, **kwargs))
                self._known[key] = still, repeat, output
                while len(self._known) > KEPT:
                    self._known.popitem(last=False)
            self._known.move_to_end(key)
            still, repeat, output = self._known[key]
            still.copy_(pixels)
            repeat()
            return _copied(output)


# Kept from one call to the next, since recording takes several passes; gone with the tower.
_GRAPHS: WeakKeyDictionary[nn.Module, Graphs] = WeakKeyDictionary()


@contextmanager
def graphed(tower: Tower) -> Iterator[None]:
    """Replay the tower's forward as a CUDA graph per shape; they serve later contexts, too.

    Raises:
        ModelError: The tower pads its inputs, so what it computes depends on more than shapes.
    """
    masks = {"patch_attention_mask", "pixel_attention_mask"} & {
        *inspect.signature(type(tower.module).forward).parameters
    }
    if masks or not len(tower.blocks):
        why = f"takes a {masks.pop()}" if masks else "has no blocks"
        raise ModelError(
            f"encoder='graph' repeats passes of one shape; {type(tower.module).__name__} {why}; "
            "use encoder='compile'"
        )
    graphs = _GRAPHS.setdefault(tower.module, Graphs())
    with override(tower.module, "forward", partial(graphs.around, tower)):
        yield


def prepared(tower: Tower, grid_thw: Tensor, **_: Any) -> dict[str, Any]:
    """What a Qwen tower derives from its grids, on the tower's device, under its own names."""
    module, config = tower.module, tower.module.config
    device = next(module.parameters()).device
    grid, merge = grid_thw.cpu(), module.spatial_merge_size
    ends = vision_utils.get_vision_cu_seqlens(grid)
    found: dict[str, Any] = {
        "position_ids": vision_utils.get_vision_position_ids(grid, merge),
        "cu_seqlens": ends,
        "max_seqlen": int(ends.diff().max()),
    }
    if hasattr(module, "window_size"):
        order, windows = vision_utils.get_vision_window_index(
            grid,
            spatial_merge_size=merge,
            window_size=module.window_size,
            patch_size=module.patch_size,
        )
        found |= {"window_index": order, "cu_window_seqlens": windows}
        found["max_window_seqlen"] = int(windows.diff().max())
    if hasattr(module, "num_grid_per_side"):
        rows, weights = vision_utils.get_vision_interpolation_indices_and_weights(
            grid,
            num_grid_per_side=module.num_grid_per_side,
            mode=module.interpolation_mode,
            align_corners=module.interpolation_align_corners,
            spatial_merge_size=config.spatial_merge_size,
        )
        found |= {"interp_indices": rows, "interp_weights": weights}
    return {k: v.to(device) if isinstance(v, Tensor) else v for k, v in found.items()}


def _key(value: Any) -> Any:
    """Something that tells calls apart: a graph has small tensors, such as grids, baked in."""
    if isinstance(value, Tensor):
        return (str(value.dtype), *value.shape, *value.flatten().tolist())
    if isinstance(value, dict):
        return tuple((name, _key(value[name])) for name in sorted(value))
    if isinstance(value, (list, tuple)):
        return tuple(map(_key, value))
    return value if isinstance(value, (int, float, str, bool, type(None))) else id(value)


def _copied(output: Any) -> Any:
    """The same kind of output with tensors of its own."""
    if isinstance(output, Tensor):
        return output.clone()
    if isinstance(output, (list, tuple)):
        return type(output)([_copied(each) for each in output])
    if isinstance(output, dict):  # transformers' ModelOutput is one
        return type(output)(**{name: _copied(each) for name, each in output.items()})
    return output
