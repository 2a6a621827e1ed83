"""Reduce the tokens of a stream: frame by frame, with a memory of fixed size."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mmfast.core.budget import count
from mmfast.core.errors import MmfastError, SpecError
from mmfast.core.reduction import Mix, Reduction
from mmfast.core.registry import Method, methods
from mmfast.core.spec import Spec, parse, run
from mmfast.core.tokens import Tokens

Memory = Mapping[str, Tensor]


@dataclass(frozen=True)
class ReducerState:
    """What a stream's reducers remember; a value, as large after a day as after two frames.

    Attributes:
        memories: Of each stage, what its method keeps; None where it keeps nothing.
        frames: Frames reduced so far.
    """

    memories: tuple[Memory | None, ...]
    frames: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors held."""
        tensors = [t for memory in self.memories for t in (memory or {}).values()]
        return sum(t.numel() * t.element_size() for t in tensors)

    def snapshot(self) -> dict[str, Any]:
        """The state as plain containers and tensors."""
        memories = [None if m is None else dict(m) for m in self.memories]
        return {"memories": memories, "frames": self.frames}

    @classmethod
    def restore(cls, tree: Mapping[str, Any]) -> ReducerState:
        """The state of a snapshot."""
        return cls(tuple(tree["memories"]), tree["frames"])


class StreamReducer:
    """A spec that works on a stream: frame by frame, so any split of it gives the same tokens.

    A share holds exactly for every frame, the first one included, and a whole number is tokens
    per frame. Methods that compare frames carry what they need from one to the next (`dtd` the
    last kept token of every place, `evs` the frame before, `stc_pruner` one level per channel);
    methods for single images run on each frame by itself. Without a budget a frame in which
    nothing changed may keep no token at all.
    """

    def __init__(self, spec: str, signals: Collection[str] = ()) -> None:
        """Read the spec.

        Args:
            spec: Stages of site `pre`, such as `dtd:0.25`.
            signals: Signals that the tokens will carry besides `x` and `grid`.

        Raises:
            SpecError: The spec is wrong, or a method of it cannot work on a stream; names those
                that can.
        """
        self.specs = parse(spec)
        if not self.specs:
            raise SpecError(f"spec {spec!r} holds no method; choices: {_choices(signals)}")
        for each in self.specs:
            _check(each, signals)
        for each in self.specs[1:]:
            if each.method.stream is not None:
                raise SpecError(
                    f"'{each}' compares frames that '{self.specs[0]}' has reduced already; "
                    f"write '{each.method.name}' first"
                )

    def start(self) -> ReducerState:
        """The state before the first frame."""
        return ReducerState((None,) * len(self.specs))

    @torch.no_grad()
    def step(self, state: ReducerState, tokens: Tokens) -> tuple[ReducerState, Reduction]:
        """Reduce the next frames of the stream.

        Args:
            state: Of the frames before.
            tokens: `x` `[N, D]` of one or more frames, with their `grid`.

        Returns:
            The state behind them, and the Reduction of their N tokens.

        Raises:
            MmfastError: The tokens have no grid, or leading dims.
            SpecError: The budget is more than a frame has.
        """
        if tokens.grid is None or tokens.x.ndim != 2:
            raise MmfastError(
                f"a stream's tokens are [N, D] with a grid, got {list(tokens.x.shape)} and grid "
                f"{tokens.grid}; pass Tokens(x, grid=(frames, rows, columns)) of one stream"
            )
        memories, found = state.memories, []
        for frame in _frames(tokens):
            memories, reduction = self._frame(memories, frame)
            found.append(reduction)
        return ReducerState(memories, state.frames + len(found)), joined(found)

    def _frame(
        self, memories: tuple[Memory | None, ...], frame: Tokens
    ) -> tuple[tuple[Memory | None, ...], Reduction]:
        total = Reduction.identity(frame.n, device=frame.x.device)
        after = []
        for spec, memory in zip(self.specs, memories, strict=True):
            if not frame.n:
                after.append(memory)
                continue
            memory, step = _stage(spec, memory, frame)
            after.append(memory)
            total = total.then(step)
            if not step.m:
                break  # nothing changed; a later stage has no memory
            if step.m < step.n:
                frame = _reduced(frame, step)
        return (*after, *memories[len(after) :]), total


def _stage(spec: Spec, memory: Memory | None, frame: Tokens) -> tuple[Memory | None, Reduction]:
    if spec.method.stream is None or spec.whole:
        found = run(spec, frame)
        if isinstance(found, list):
            raise MmfastError("a stream's tokens are [N, D], one frame after the other")
        return memory, found
    budget = count(spec.budget, frame.n)
    found, memory = spec.method.stream(frame, budget, memory, **spec.knobs)
    return memory, found


def _frames(tokens: Tokens) -> Iterator[Tokens]:
    """The frames of `tokens`, each with its part of the signals that are there per token."""
    frames, rows, columns = tokens.grid or (1, 1, tokens.n)
    n, total = rows * columns, tokens.n
    for start in range(0, total, n):
        part = slice(start, start + n)
        yield replace(
            tokens,
            x=tokens.x[part],
            attn=None if tokens.attn is None else tokens.attn[part],
            grid=(1, rows, columns),
            signals={
                name: value[part] if frames > 1 and value.shape[:1] == (total,) else value
                for name, value in tokens.signals.items()
            },
        )


def _reduced(frame: Tokens, step: Reduction) -> Tokens:
    """What the next stage looks at: kept features, and signals of the kept sources."""
    signals = {k: v[step.keep] if v.shape[:1] == (step.n,) else v for k, v in frame.signals.items()}
    attn = None if frame.attn is None else frame.attn[step.keep]
    return replace(frame, x=step.apply(frame.x), attn=attn, grid=None, signals=signals)


def joined(parts: Sequence[Reduction]) -> Reduction:
    """Reductions of consecutive frames as one of all their tokens."""
    if len(parts) == 1:
        return parts[0]
    keep, owner, order, mixes = [], [], [], []
    n = m = 0
    for part in parts:
        keep.append(part.keep + n)
        owner.append(torch.where(part.owner < 0, part.owner, part.owner + m))
        order.append(m + (torch.arange(part.m).to(keep[-1]) if part.order is None else part.order))
        if part.mix is not None:
            mixes.append(Mix(part.mix.output + m, part.mix.source + n, part.mix.weight))
        n, m = n + part.n, m + part.m
    plain = all(part.weight is None for part in parts)
    return Reduction(
        torch.cat(keep),
        torch.cat(owner),
        None if plain else torch.cat([part.share() for part in parts]),
        _joined_mix(mixes) if len(mixes) == len(parts) else None,
        torch.cat(order) if any(part.order is not None for part in parts) else None,
        pure=all(part.pure for part in parts),
    )


def _joined_mix(mixes: Sequence[Mix]) -> Mix:
    return Mix(
        torch.cat([mix.output for mix in mixes]),
        torch.cat([mix.source for mix in mixes]),
        torch.cat([mix.weight for mix in mixes]),
    )


def _check(spec: Spec, signals: Collection[str]) -> None:
    method = spec.method
    if spec.site != "pre":
        raise SpecError(f"'{spec}' runs inside the model; a stream's tokens are reduced at 'pre'")
    if not _works(method, signals):
        raise SpecError(f"'{spec}' cannot reduce a stream; choices: {_choices(signals)}")


def _works(method: Method, signals: Collection[str]) -> bool:
    """Whether a method can do with one frame, or carries what it needs of the others."""
    alone = method.stream is not None or not method.temporal
    given = {"x", "grid", *signals}
    return alone and method.scope == "item" and "pre" in method.sites and given >= {*method.needs}


def _choices(signals: Collection[str]) -> str:
    return ", ".join(m.name for m in methods("reducer") if _works(m, signals))
