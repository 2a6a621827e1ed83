"""From frames to units: gate, pairs of frames, encoder, reducer; a stream's state is a value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from mmfast.core.tokens import Tokens
from mmfast.frontends.frame_gate import FrameGate, GateState
from mmfast.streams.encode import Encoder, Shot
from mmfast.streams.reducing import ReducerState, StreamReducer
from mmfast.streams.script import Unit


@dataclass(frozen=True, eq=False)
class Taken:
    """What an intake remembers of a stream.

    Attributes:
        waiting: Frames of a temporal patch that is not full yet.
        size: Height and width of the last frame.
        gate: State of the frame gate.
        cache: State of the frame cache; it changes in place while a frame is encoded.
        reducer: State of the reducer.
        gated: Frames that the gate skipped.
        resized: How often the size of the frames changed.
    """

    waiting: tuple[Shot, ...] = ()
    size: tuple[int, int] | None = None
    gate: GateState | None = None
    cache: Any = None
    reducer: ReducerState | None = None
    gated: int = 0
    resized: int = 0


class Intake:
    """Gate, encoder and reducer of one model; holds no state of a stream.

    Args:
        encoder: With or without a frame cache.
        frames: Per unit: 1, or 2 where the model joins two frames to a temporal patch.
        gate: Skips frames that look like the last one let through; None lets all through.
        reducer: Drops or merges tokens of every unit; None keeps them.
        batch: Units in one call of the encoder. 1 makes every split of a stream the same bit for
            bit; more are faster on a GPU, and differ by rounding.
    """

    def __init__(
        self,
        encoder: Encoder,
        frames: int,
        *,
        gate: FrameGate | None = None,
        reducer: StreamReducer | None = None,
        batch: int = 1,
    ) -> None:
        self.encoder, self.frames, self.gate, self.reducer = encoder, frames, gate, reducer
        # a frame cache compares each frame with the one before
        self.batch = 1 if encoder.cache is not None else batch

    def start(self) -> Taken:
        """The state before the first frame."""
        return Taken(
            gate=None if self.gate is None else self.gate.start(),
            cache=None if self.encoder.cache is None else self.encoder.cache.start(),
            reducer=None if self.reducer is None else self.reducer.start(),
        )

    def step(self, state: Taken, shots: Sequence[Shot]) -> tuple[Taken, list[Unit]]:
        """Take the next frames.

        Args:
            state: Of the frames before.
            shots: Frames `[H, W, 3]` uint8 with their times.

        Returns:
            The state behind them, and the units that are full.
        """
        groups: list[tuple[Shot, ...]] = []
        units: list[Unit] = []
        for shot in shots:
            size = shot[0].shape[0], shot[0].shape[1]
            if state.size not in (None, size):  # units of two sizes do not go together
                rest = [self._doubled(state.waiting)] if state.waiting else []
                state, units = self._flush(state, [*groups, *rest], units)
                groups, state = [], self._resized(state)
            state, passes = self._gated(replace(state, size=size), shot)
            if passes:
                waiting = (*state.waiting, shot)
                full = len(waiting) == self.frames
                groups += [waiting] if full else []
                state = replace(state, waiting=() if full else waiting)
        return self._flush(state, groups, units)

    def rest(self, state: Taken) -> list[Unit]:
        """The unit of frames that still wait, the last one doubled as stock processors do."""
        if not state.waiting:
            return []
        (unit,) = self.encoder([self._doubled(state.waiting)])
        return [self._reduced(state.reducer, unit)[1]]

    def flush(self, state: Taken) -> tuple[Taken, list[Unit]]:
        """The same, and nothing waits any more."""
        groups = [self._doubled(state.waiting)] if state.waiting else []
        return self._flush(replace(state, waiting=()), groups, [])

    def _doubled(self, waiting: Sequence[Shot]) -> tuple[Shot, ...]:
        return (*waiting, *[waiting[-1]] * (self.frames - len(waiting)))

    def _resized(self, state: Taken) -> Taken:
        """The gate sees a new size by itself; caches and reducers compare place by place."""
        fresh = self.start()
        return replace(
            state,
            waiting=(),
            cache=fresh.cache,
            reducer=fresh.reducer,
            resized=state.resized + 1,
        )

    def _gated(self, state: Taken, shot: Shot) -> tuple[Taken, bool]:
        if self.gate is None or state.gate is None:
            return state, True
        gate, passes = self.gate.step(state.gate, shot[0])
        return replace(state, gate=gate, gated=state.gated + (not passes)), passes

    def _flush(
        self, state: Taken, groups: Sequence[Sequence[Shot]], units: list[Unit]
    ) -> tuple[Taken, list[Unit]]:
        for at in range(0, len(groups), self.batch):
            for unit in self.encoder(groups[at : at + self.batch], state.cache):
                reducer, unit = self._reduced(state.reducer, unit)
                state, units = replace(state, reducer=reducer), [*units, unit]
        return state, units

    def _reduced(self, state: ReducerState | None, unit: Unit) -> tuple[ReducerState | None, Unit]:
        if self.reducer is None or state is None:
            return state, unit
        state, found = self.reducer.step(state, Tokens(unit.features, grid=(1, *unit.grid)))
        features, *planes = (found.apply(x) for x in (unit.features, *unit.planes))
        return state, replace(unit, features=features, planes=tuple(planes), keep=found.keep)

    def snapshot(self, state: Taken) -> dict[str, Any]:
        """A state as plain containers and tensors."""
        waiting = [(torch.from_numpy(frame.copy()), time) for frame, time in state.waiting]
        parts = {
            name: None if part is None else part.snapshot()
            for name, part in (("gate", state.gate), ("cache", state.cache))
        }
        reducer = None if state.reducer is None else state.reducer.snapshot()
        rest = {"size": state.size, "gated": state.gated, "resized": state.resized}
        return {"waiting": waiting, "reducer": reducer, **parts, **rest}

    def restore(self, tree: Mapping[str, Any]) -> Taken:
        """The state of a snapshot; a part that this intake lacks, or has anew, starts afresh."""
        fresh = self.start()
        gate, cache, reducer = fresh.gate, fresh.cache, fresh.reducer
        if gate is not None and tree["gate"] is not None:
            gate = GateState.restore(tree["gate"])
        if cache is not None and tree["cache"] is not None:
            cache = type(cache).restore(tree["cache"])
        if reducer is not None and tree["reducer"] is not None:
            reducer = ReducerState.restore(tree["reducer"])
        waiting = tuple((frame.numpy(), time) for frame, time in tree["waiting"])
        size = tree["size"]
        return Taken(
            waiting,
            None if size is None else (size[0], size[1]),
            gate,
            cache,
            reducer,
            tree["gated"],
            tree["resized"],
        )
