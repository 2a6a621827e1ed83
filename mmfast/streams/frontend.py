"""The front end of a stream: gate, temporal patches, stock encoder and reducer, frame by frame.

A frame comes out as it would in a whole clip: towers look at one frame, or one temporal patch, at
a time, so the split of a stream does not matter. The state of a stream is a value.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mmfast.core.errors import MmfastError, SpecError
from mmfast.core.reduction import Mix, Reduction
from mmfast.core.registry import Method, methods
from mmfast.core.spec import Spec, count, parse, run
from mmfast.core.tokens import Tokens
from mmfast.frontends.changes import FrameGate, GateState
from mmfast.models.encoder_names import encode_media, encoder_arguments, planes_of
from mmfast.models.families.adapter import adapter_for
from mmfast.streams.archive.files import value
from mmfast.streams.script import EncodedUnit

Frame = NDArray[np.uint8]  # [H, W, 3]
Shot = tuple[Frame, float]  # a frame and its time in seconds


class FrameEncoder:
    """The vision side of a stock model; holds no state of a stream.

    Some processors share a budget of pixels out over all frames of a clip, and a stream has no end:
    its frames are as large as those of a clip of `sized_for` frames. `cache` is a `FrameCache` that
    computes only what changed, or None. `reuse` (`reuse.media.MediaReuse`) has the units that other
    streams have encoded; a frame cache, whose units depend on what came before, goes without.
    """

    def __init__(
        self,
        model: Any,
        processor: Any,
        *,
        sized_for: int = 64,
        cache: Any = None,
        reuse: Any = None,
    ) -> None:
        self.base, self.adapter = model.base_model, adapter_for(model)
        self.device = model.device
        self.processor = processor.video_processor
        self.options = _shared(self.processor, model.config.model_type, sized_for)
        self.cache, self.reuse = cache, reuse
        self._takes = encoder_arguments(self.base, "video")

    @torch.no_grad()
    def __call__(self, groups: Sequence[Sequence[Shot]], state: Any = None) -> list[EncodedUnit]:
        """Features of frames, or of temporal patches: groups of frames and times, all of one size.

        `state` is what the frame cache remembers of the stream; None encodes without it.
        """
        clips = [np.stack([frame for frame, _ in group]) for group in groups]
        inputs = self.processor(
            videos=clips, do_sample_frames=False, return_tensors="pt", **self.options
        )
        given = {k: v.to(self.device) for k, v in inputs.items() if k in self._takes}
        if self.reuse is None or state is not None:
            units = self._encode(inputs, given, state)
        else:
            units = self.reuse.frames(given, lambda: self._encode(inputs, given, None))
        pairs = zip(units, groups, strict=True)
        return [replace(unit, times=tuple(time for _, time in group)) for unit, group in pairs]

    def _encode(self, inputs: Any, given: dict[str, Any], state: Any) -> list[EncodedUnit]:
        """Units without times."""
        using = nullcontext() if state is None else self.cache.using(state)
        with using:
            output = encode_media(self.base, "video", given, return_dict=True)
        units = []
        for item, layout in enumerate(self.adapter.layout(self.base, "video", inputs)):
            content = layout.content().to(self.device)
            planes = planes_of(output)
            assert layout.grid is not None
            units.append(
                EncodedUnit(
                    _rows(output.pooler_output[item], content),
                    layout.grid[1:],
                    (),
                    planes=tuple(_rows(plane[item], content) for plane in planes),
                )
            )
        return units


def _rows(features: Tensor, content: Tensor) -> Tensor:
    return features.reshape(-1, features.shape[-1])[content].clone()


def _shared(processor: Any, family: str, frames: int) -> dict[str, Any]:
    """Sizes for one patch that give its frames the pixels they would have in a longer clip."""
    if not family.startswith("qwen"):
        return {}
    size, patch = processor.size, processor.temporal_patch_size
    low, high = int(size["shortest_edge"]), int(size["longest_edge"])
    factor = processor.patch_size * processor.merge_size
    capped = bool(processor.cap_pixels_per_frame)
    if family == "qwen3_vl":  # edges are pixels of all frames together
        if capped:
            most = processor.max_video_tokens * factor**2
            high = max(min(most, high // frames), int(low * 1.05)) * frames
        low, high = low * patch // frames, high * patch // frames
    elif capped:
        total = int(processor.max_video_tokens * factor**2 * 0.9)
        high = max(min(high, total * patch // frames), int(low * 1.05))
    sides = {"shortest_edge": max(low, 1), "longest_edge": max(high, 1)}
    return {"size": sides, "cap_pixels_per_frame": False}


ReducerMemory = dict[str, Tensor]


@value
@dataclass(frozen=True)
class ReducerState:
    """State of a stream's reducers; a value, as large after a day as after two frames.

    `memories` has, for each stage, what its method keeps; `frames` counts those reduced so far.
    """

    memories: tuple[ReducerMemory | None, ...]
    frames: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors held."""
        tensors = [t for memory in self.memories for t in (memory or {}).values()]
        return sum(t.numel() * t.element_size() for t in tensors)


class StreamReducer:
    """A spec that works on a stream: frame by frame, so any split of it gives the same tokens.

    A share holds exactly for every frame, the first one included, and a whole number is tokens
    per frame. Methods that compare frames carry what they need from one to the next (`dtd` the
    last kept token of every place, `evs` the frame before, `stc_pruner` one level per channel);
    methods for single images run on each frame by itself. Without a budget a frame in which
    nothing changed may keep no token at all.
    """

    def __init__(self, spec: str, signals: Collection[str] = ()) -> None:
        """Read a spec of stages of site `pre`, such as `dtd:0.25`.

        `signals` are those that the tokens will carry besides `x` and `grid`. SpecError: the spec
        is wrong, or a method of it cannot work on a stream; the error names those that can.
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
        """Reduce the next frames; SpecError for a budget above the tokens of a frame."""
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
        self, memories: tuple[ReducerMemory | None, ...], frame: Tokens
    ) -> tuple[tuple[ReducerMemory | None, ...], Reduction]:
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


def _stage(
    spec: Spec, memory: ReducerMemory | None, frame: Tokens
) -> tuple[ReducerMemory | None, Reduction]:
    if spec.method.stream is None or spec.whole:
        found = run(spec, frame)
        if isinstance(found, list):
            raise MmfastError("a stream's tokens are [N, D], one frame after the other")
        return memory, found
    budget = count(spec.budget, frame.n)
    found, memory = spec.method.stream(frame, budget, memory, **spec.knobs)
    return memory, found


def _frames(tokens: Tokens) -> Iterator[Tokens]:
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
        slots = torch.arange(part.m).to(keep[-1]) if part.order is None else part.order
        order.append(torch.where(slots < 0, slots, slots + m))
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
    """Tell whether a method needs one frame only, or carries a state from frame to frame."""
    alone = method.stream is not None or not method.temporal
    given = {"x", "grid", *signals}
    return alone and method.scope == "item" and "pre" in method.sites and given >= {*method.needs}


def _choices(signals: Collection[str]) -> str:
    return ", ".join(m.name for m in methods("reducer") if _works(m, signals))


@dataclass(frozen=True, eq=False)
class FrontEndState:
    """State of the front end of one stream.

    `waiting` are frames of a temporal patch that is not full yet, `size` is height and width of the
    last frame, `gated` counts frames that the gate skipped, `resized` changes of size. The state of
    the cache changes in place while a frame is encoded.
    """

    waiting: tuple[Shot, ...] = ()
    size: tuple[int, int] | None = None
    gate: GateState | None = None
    cache: Any = None
    reducer: ReducerState | None = None
    gated: int = 0
    resized: int = 0


class FrontEnd:
    """Gate, encoder and reducer of one model; holds no state of a stream.

    A unit has `frames` frames: 1, or 2 where the model joins two to a temporal patch. `gate` skips
    frames that look like the last one let through; `reducer` drops or merges tokens of every unit.
    `batch` is units in one call of the encoder: 1 makes every split of a stream the same bit for
    bit; more are faster on a GPU, and differ by rounding.
    """

    def __init__(
        self,
        encoder: FrameEncoder,
        frames: int,
        *,
        gate: FrameGate | None = None,
        reducer: StreamReducer | None = None,
        batch: int = 1,
    ) -> None:
        self.encoder, self.frames, self.gate, self.reducer = encoder, frames, gate, reducer
        # a frame cache compares each frame with the one before
        self.batch = 1 if encoder.cache is not None else batch

    def start(self) -> FrontEndState:
        """The state before the first frame."""
        return FrontEndState(
            gate=None if self.gate is None else self.gate.start(),
            cache=None if self.encoder.cache is None else self.encoder.cache.start(),
            reducer=None if self.reducer is None else self.reducer.start(),
        )

    def step(
        self, state: FrontEndState, shots: Sequence[Shot]
    ) -> tuple[FrontEndState, list[EncodedUnit]]:
        """Take the next frames."""
        groups: list[tuple[Shot, ...]] = []
        units: list[EncodedUnit] = []
        for shot in shots:
            size = shot[0].shape[0], shot[0].shape[1]
            if state.size not in (None, size):  # units of two sizes do not go together
                state, more = self._encode(state, [*groups, *self._rest(state)])
                groups, units, state = [], [*units, *more], self._resized(state)
            state, passes = self._gated(replace(state, size=size), shot)
            if passes:
                waiting = (*state.waiting, shot)
                full = len(waiting) == self.frames
                groups += [waiting] if full else []
                state = replace(state, waiting=() if full else waiting)
        state, more = self._encode(state, groups)
        return state, [*units, *more]

    def rest(self, state: FrontEndState) -> list[EncodedUnit]:
        """Encode frames that still wait, the last one doubled as stock processors do.

        The frame cache is left out, since its state changes in place.
        """
        return self._encode(replace(state, cache=None), self._rest(state))[1]

    def flush(self, state: FrontEndState) -> tuple[FrontEndState, list[EncodedUnit]]:
        """Encode frames that still wait; none waits afterwards."""
        return self._encode(replace(state, waiting=()), self._rest(state))

    def _rest(self, state: FrontEndState) -> list[tuple[Shot, ...]]:
        waiting = state.waiting
        return [(*waiting, *[waiting[-1]] * (self.frames - len(waiting)))] if waiting else []

    def _resized(self, state: FrontEndState) -> FrontEndState:
        """The gate sees a new size by itself; caches and reducers compare place by place."""
        fresh = self.start()
        return replace(
            state, waiting=(), cache=fresh.cache, reducer=fresh.reducer, resized=state.resized + 1
        )

    def _gated(self, state: FrontEndState, shot: Shot) -> tuple[FrontEndState, bool]:
        if self.gate is None or state.gate is None:
            return state, True
        gate, passes = self.gate.step(state.gate, shot[0])
        return replace(state, gate=gate, gated=state.gated + (not passes)), passes

    def _encode(
        self, state: FrontEndState, groups: Sequence[Sequence[Shot]]
    ) -> tuple[FrontEndState, list[EncodedUnit]]:
        units = []
        for at in range(0, len(groups), self.batch):
            for unit in self.encoder(groups[at : at + self.batch], state.cache):
                if self.reducer is not None and state.reducer is not None:
                    tokens = Tokens(unit.features, grid=(1, *unit.grid))
                    reducer, found = self.reducer.step(state.reducer, tokens)
                    state, unit = replace(state, reducer=reducer), unit.reduced(found)
                units.append(unit)
        return state, units

    def snapshot(self, state: FrontEndState) -> dict[str, Any]:
        """Return a state as a tree for saving."""
        parts = {
            name: None if part is None else part.snapshot()
            for name, part in (("gate", state.gate), ("cache", state.cache))
        }
        waiting = [(torch.from_numpy(frame.copy()), time) for frame, time in state.waiting]
        return {**vars(state), **parts, "waiting": waiting}

    def restore(self, tree: Mapping[str, Any]) -> FrontEndState:
        """Return the state of a snapshot; a part that this front end lacks or has anew is fresh."""
        fresh, found = self.start(), dict(tree)
        for name in ("gate", "cache"):
            part, saved = getattr(fresh, name), tree[name]
            renewed = part is None or saved is None
            found[name] = part if renewed else type(part).restore(saved)
        if fresh.reducer is None or tree["reducer"] is None:
            found["reducer"] = fresh.reducer
        found["waiting"] = tuple((frame.numpy(), time) for frame, time in tree["waiting"])
        return FrontEndState(**found)
