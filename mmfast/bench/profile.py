"""Profile of one request: time, work and bytes of each part, beside the roof of the machine.

The request runs three times. Once plainly, with nothing but clocks around its parts; once under
torch's profiler, which says how much of each part is operations and how much of that copies; once
under a counter of FLOPs and bytes. The roof of a part is the time that its work takes at the best
measured rate of a matrix product, or its bytes at that of a copy, whichever is longer.
"""

from __future__ import annotations

import html
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from mmfast.bench.stages import ceilings
from mmfast.core.errors import MmfastError
from mmfast.core.files import whole_file
from mmfast.core.trace import settled
from mmfast.models.cache_name import cache_of
from mmfast.models.wrappers import base_of, decoder_of
from mmfast.planner.auto import say

PARTS = ("prepare", "tower", "projector", "prefill", "decode", "head", "generate")
_PROJECTORS = ("multi_modal_projector", "connector", "merger", "embed_vision", "projector")
_PART, _STEP = "part ", "module "
_LONG = 64  # a pass over so many tokens is a prompt: no draft is as long
# Operations that only move numbers.
_COPIES = {
    f"aten::{name}"
    for name in ("copy_", "cat", "index_select", "gather", "index", "index_copy_", "stack")
}
_SDPA = {"_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_fused_attention"}


@dataclass
class PartCost:
    """Cost of one part of a request.

    `ms` is its own time, without parts inside it; `ops_ms` and `copies_ms` are those of operations
    and, among them, of copies; `calls` how often it ran.
    """

    calls: int = 0
    ms: float = 0.0
    ops_ms: float = 0.0
    copies_ms: float = 0.0
    flops: float = 0.0
    bytes: float = 0.0

    def row(self, part: str, total: float, roof: dict[str, float]) -> dict[str, Any]:
        """Return the row of the document; rates are None where there is nothing to rate."""
        by_work = self.flops / roof["matmul_tflop_s"] / 1e9
        by_bytes = self.bytes / roof["copy_gb_s"] / 1e6
        least = max(by_work, by_bytes)
        return {
            "part": part,
            "calls": self.calls,
            "ms": round(self.ms, 3),
            "share": round(self.ms / total, 4) if total else 0.0,
            "python_ms": round(max(0.0, self.ms - self.ops_ms), 3),
            "copies_ms": round(self.copies_ms, 3),
            "gflop": round(self.flops / 1e9, 4),
            "mbytes": round(self.bytes / 1e6, 3),
            "roof_ms": round(least, 3),
            "of_roof": round(min(1.0, least / self.ms), 4) if self.ms and least else None,
            "bound": None if not least else "work" if by_work > by_bytes else "bytes",
        }


class PartClock:
    """The part of a request that runs now, and the time of each."""

    def __init__(self) -> None:
        self.costs: dict[str, PartCost] = defaultdict(PartCost)
        self._open: list[tuple[str, Any]] = []
        self._since = 0.0

    @property
    def part(self) -> str:
        """The innermost part that is open, "" outside."""
        return self._open[-1][0] if self._open else ""

    def enter(self, part: str) -> None:
        """Begin a part; the clock of the part around it stands still."""
        self._settle()
        scope = record_function(_PART + part)
        scope.__enter__()
        self.costs[part].calls += 1
        self._open.append((part, scope))

    def leave(self) -> None:
        """End the innermost part."""
        self._settle()
        _, scope = self._open.pop()
        scope.__exit__(None, None, None)

    def _settle(self) -> None:
        now = settled()
        if self._open:
            self.costs[self.part].ms += (now - self._since) * 1e3
        self._since = now

    @contextmanager
    def around(self, part: str) -> Iterator[None]:
        """Time a block of code as a part."""
        self.enter(part)
        try:
            yield
        finally:
            self.leave()

    @contextmanager
    def watching(self, model: Any) -> Iterator[None]:
        """Time the parts of a model while it is used."""
        with ExitStack() as stack:
            for part, module in _parts(model):
                name: Any = _pass_name if part == "prefill" else part
                stack.enter_context(_scope(module, self.enter, self.leave, name))
            yield


@contextmanager
def _scope(
    module: nn.Module, enter: Callable[[str], None], leave: Callable[[], None], name: Any
) -> Iterator[None]:
    def before(_: nn.Module, args: Any, kwargs: Any) -> None:
        enter(name if isinstance(name, str) else name(args, kwargs))

    first = module.register_forward_pre_hook(before, with_kwargs=True)
    with first, module.register_forward_hook(lambda *_: leave(), always_call=True):
        yield


def _pass_name(args: Any, kwargs: Any) -> str:
    """Tell a prompt from a step: drafts are verified by short passes over a filled cache."""
    hidden, cache = kwargs.get("inputs_embeds"), cache_of(kwargs)
    length = 1 if hidden is None else hidden.shape[1]
    past = 0 if cache is None else int(cache.get_seq_length())
    return "prefill" if not past or length > _LONG else "decode"


def _parts(model: Any) -> list[tuple[str, nn.Module]]:
    base, found = base_of(model), list[tuple[str, nn.Module]]()
    tower = model.get_encoder("image")
    inside = {id(each) for each in tower.modules()}
    found.append(("tower", tower))
    for name, module in base.named_modules():
        last = name.rsplit(".", 1)[-1]
        if last in _PROJECTORS and (id(module) not in inside or last == "merger"):
            found.append(("projector", module))
    found.append(("prefill", decoder_of(model)))
    head = model.get_output_embeddings()
    return [*found, ("head", head)] if head is not None else found


class WorkCounter(TorchDispatchMode):
    """Adds the FLOPs and the bytes of every operation to the part that runs."""

    def __init__(self, clock: PartClock) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._clock = clock

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation and count it; views move nothing."""
        packet = func._overloadpacket
        if packet not in flop_registry and packet.__name__ not in _SDPA:
            with self:  # under inference_mode composite operations arrive whole
                parts = func.decompose(*args, **(kwargs or {}))
            if parts is not NotImplemented:
                return parts
        out = func(*args, **(kwargs or {}))
        cost = self._clock.costs[self._clock.part or "generate"]
        if packet in flop_registry:
            cost.flops += flop_registry[packet](*args, **(kwargs or {}), out_val=out)
        elif packet.__name__ in _SDPA:
            query, key = args[:2]
            pairs = query.shape[-2] * key.shape[-2]
            causal = bool((kwargs or {}).get("is_causal")) or (len(args) > 4 and bool(args[4]))
            heads = query.shape[0] * query.shape[1] * query.shape[3]
            cost.flops += 4 * heads * pairs * (0.5 if causal else 1)
        if not func.is_view:
            leaves = (*tree_leaves(args), *tree_leaves(kwargs), *tree_leaves(out))
            cost.bytes += sum(_moved(each) for each in leaves if isinstance(each, Tensor))
        return out


def _moved(x: Tensor) -> int:
    """Bytes of a tensor; an expanded one has no more than it stores."""
    if x.device.type == "meta":
        return 0
    return min(x.numel() * x.element_size(), x.untyped_storage().nbytes())


@dataclass
class Flame:
    """A node of a flame graph: microseconds of its own, and what it called."""

    name: str
    own: float = 0.0
    children: dict[str, Flame] = field(default_factory=dict)

    @property
    def total(self) -> float:
        """Microseconds with all that it called."""
        return self.own + sum(child.total for child in self.children.values())

    def child(self, name: str) -> Flame:
        """Return the child of a name, made where there is none."""
        return self.children.setdefault(name, Flame(name))


def profile_request(
    pipe: Any, media: Any, question: str, tick: Callable[[int, int], object] | None = None
) -> tuple[dict[str, Any], Flame]:
    """Profile one question to a pipeline; returns the document and the flame graph.

    The document has `answer`, `total_ms`, `roof` (`matmul_tflop_s`, `copy_gb_s`), `parts` (see
    `PartCost.row`), `other_ms` and the `trace` of the plain run. A first run is not counted.
    """
    tick = tick or (lambda done, total: None)
    model, dtype = pipe.model, pipe.model.dtype
    ask: Callable[[], Any] = partial(pipe, media, question)
    ask()
    tick(1, 5)
    plain, answer, total = _run(model, pipe, ask)
    tick(2, 5)
    flame = _profiled(model, pipe, ask, plain.costs)
    tick(3, 5)
    counted = PartClock()
    counter: Any = WorkCounter(counted)  # torch does not type the mode's `__enter__`
    with counter:
        _run(model, pipe, ask, counted)
    tick(4, 5)
    for part, cost in counted.costs.items():
        plain.costs[part].flops, plain.costs[part].bytes = cost.flops, cost.bytes
    roof = ceilings(model.device, dtype)
    names = [part for part in PARTS if part in plain.costs]
    tick(5, 5)
    known = sum(plain.costs[part].ms for part in names)
    document = {
        "answer": answer.text,
        "plan": answer.plan and say(answer.plan),
        "device": str(model.device.type),
        "dtype": str(dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "total_ms": round(total, 3),
        "roof": {name: round(value, 4) for name, value in roof.items()},
        "parts": [plain.costs[part].row(part, total, roof) for part in names],
        "other_ms": round(max(0.0, total - known), 3),
        "trace": answer.trace.to_dict()["rows"],
    }
    return document, flame


def _run(
    model: Any, pipe: Any, ask: Callable[[], Any], clock: PartClock | None = None
) -> tuple[PartClock, Any, float]:
    """Ask once with clocks around the parts."""
    clock = clock or PartClock()
    prepare, generate = pipe._inputs, pipe.run

    def timed(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with clock.around(part):
                return function(*args, **kwargs)

        return call

    pipe._inputs, pipe.run = timed("prepare", prepare), timed("generate", generate)
    start = time.perf_counter()
    try:
        with clock.watching(model):
            answer = ask()
    finally:
        del pipe._inputs, pipe.run
    return clock, answer, (time.perf_counter() - start) * 1e3


def _profiled(model: Any, pipe: Any, ask: Callable[[], Any], costs: dict[str, PartCost]) -> Flame:
    """Ask under torch's profiler; adds the time of operations to the parts."""
    kinds = [ProfilerActivity.CPU]
    if model.device.type == "cuda":
        kinds.append(ProfilerActivity.CUDA)
    with profile(activities=kinds, acc_events=True) as found, _module_scopes(model):
        _run(model, pipe, ask)
    root = Flame("request")
    events = found.events()
    if not events:
        raise MmfastError("torch's profiler recorded nothing; use a build of torch with Kineto")
    for event in events:
        own = float(event.self_cpu_time_total) + float(getattr(event, "self_device_time_total", 0))
        path, here = [event.name], event.cpu_parent
        while here is not None:
            path.append(here.name)
            here = here.cpu_parent
        node = root
        for name in reversed(path):
            node = node.child(name.removeprefix(_PART).removeprefix(_STEP))
        node.own += own
        part = next((name.removeprefix(_PART) for name in path if name.startswith(_PART)), "")
        scope = event.name.startswith((_PART, _STEP))
        if part and not scope:
            costs[part].ops_ms += own / 1e3
            costs[part].copies_ms += own / 1e3 if event.name in _COPIES else 0.0
    return root


@contextmanager
def _module_scopes(model: Any) -> Iterator[None]:
    """Name layers and their modules in the profile; layers share a name, so that they add up."""
    open_: list[Any] = []

    def enter(name: str) -> None:
        scope = record_function(_STEP + name)
        scope.__enter__()
        open_.append(scope)

    def leave() -> None:
        open_.pop().__exit__(None, None, None)

    with ExitStack() as stack:
        for root in (decoder_of(model), model.get_encoder("image")):
            for name, module in root.named_modules():
                last = name.rsplit(".", 1)[-1]
                if not name or isinstance(module, nn.ModuleList) or not list(module.children()):
                    continue
                label = "layer" if last.isdigit() else last
                stack.enter_context(_scope(module, enter, leave, label))
        yield


_ROW, _WIDTH = 18, 1200
_COLOURS = ("#e8a33d", "#d9743a", "#e3bf4a", "#c95d4a", "#dd9150")


def write_flame(root: Flame, target: Path, title: str) -> None:
    """Write a flame graph as one SVG that a browser shows; a box tells its time when pointed at."""
    if target.suffix not in (".svg", ".html"):
        raise MmfastError(f"--flame {str(target)!r}: write a .svg or .html file")
    boxes: list[str] = []
    depth = _boxes(root, 0.0, 0, max(root.total, 1e-9), boxes)
    height = (depth + 2) * _ROW
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        'font-family="monospace" font-size="11">'
        f'<text x="4" y="13">{html.escape(title)}</text>'
    )
    page = head + "".join(boxes) + "</svg>"
    if target.suffix == ".html":
        page = f'<!doctype html><meta charset="utf-8"><title>{html.escape(title)}</title>{page}'
    with whole_file(target) as draft:
        draft.write_text(page, encoding="utf-8")


def _boxes(node: Flame, x: float, level: int, whole: float, boxes: list[str]) -> int:
    """Draw a node and what it called, the longest first; returns the deepest level."""
    width = node.total / whole * _WIDTH
    if width < 0.5:
        return level
    y = (level + 1) * _ROW
    name, ms = html.escape(node.name), node.total / 1e3
    colour = _COLOURS[sum(map(ord, node.name)) % len(_COLOURS)]
    letters = int(width / 6.8)
    label = name if len(node.name) <= letters else html.escape(node.name[: max(0, letters - 1)])
    boxes.append(
        f"<g><title>{name}: {ms:.2f} ms, {node.total / whole:.1%}</title>"
        f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_ROW - 1}" fill="{colour}"/>'
        + (f'<text x="{x + 2:.1f}" y="{y + 13}">{label}</text>' if letters > 3 else "")
        + "</g>"
    )
    deepest = level
    for child in sorted(node.children.values(), key=lambda each: -each.total):
        deepest = max(deepest, _boxes(child, x, level + 1, whole, boxes))
        x += child.total / whole * _WIDTH
    return deepest
