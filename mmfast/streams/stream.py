"""A model that watches streams, and one stream of it without threads.

The model has engine, script and front end, shared by all its sessions; a stream has what was taken,
written and counted, and the memory of it.
"""

from __future__ import annotations

import hashlib
import math
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any

from torch import Tensor

from mmfast.caches.plan import plan_cache
from mmfast.core.errors import MediaError, MmfastError
from mmfast.core.locks import WholeLock
from mmfast.core.spec import parse
from mmfast.core.trace import Trace, free_bytes
from mmfast.decoding.speculation import DecodePlan
from mmfast.frontends.changes import FrameGate
from mmfast.frontends.live.source import FAR
from mmfast.models.context import placeholders
from mmfast.models.prompt import unknown_words
from mmfast.models.reduction.check import ranked
from mmfast.models.wrappers import stock_model
from mmfast.streams.archive.files import raw, value
from mmfast.streams.archive.tiers import TierQuotas
from mmfast.streams.drafts import DraftMemory
from mmfast.streams.engine import Engine, attended
from mmfast.streams.families import prove, script_for
from mmfast.streams.frontend import FrameEncoder, FrontEnd, Shot, StreamReducer
from mmfast.streams.memory import AUTO, auto_memory
from mmfast.streams.moments import MomentAlbum
from mmfast.streams.recent import RecentFrames
from mmfast.streams.reply import Reply, stop_ids
from mmfast.streams.script import EncodedUnit, Script, WrittenState


class WeightChecksum:
    """Checksum of all weights of a model; 2 GB a second, computed anew only after a change.

    A change is a tensor in the place of another, or an in-place operation that autograd counts.
    Which adapters of PEFT act, and how much, is a part of it, since no weight tells.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._seen: list[tuple[weakref.ref[Tensor], int]] = []
        self._value = ""
        self._lock = WholeLock()

    def value(self) -> str:
        """Return names, types, shapes and contents of all weights as 16 hexadecimal digits."""
        with self._lock:
            state = self._model.state_dict(keep_vars=True)
            named = {k: x for k, x in state.items() if isinstance(x, Tensor)}
            seen = [(weakref.ref(x), _changes(x)) for x in named.values()]
            if not self._value or not _same(seen, self._seen):
                whole = hashlib.sha256()
                for name, tensor in named.items():
                    for part in _plain_parts(tensor.detach()):
                        row = name, str(part.dtype), list(part.shape), _crc(part)
                        whole.update(repr(row).encode())
                self._value, self._seen = whole.hexdigest()[:16], seen
            acting = _adapters(self._model)
            if not acting:
                return self._value
            return hashlib.sha256(repr((self._value, acting)).encode()).hexdigest()[:16]


def _adapters(model: Any) -> list[tuple[str, ...]]:
    """Layers of PEFT, the adapters that act in them, and their factors."""
    return [
        (name, *(repr(getattr(part, a, None)) for a in ("active_adapters", "scaling")))
        for name, part in model.named_modules()
        if hasattr(part, "active_adapters")
        and not getattr(part, "disable_adapters", False)
        and hasattr(part, "base_layer")
    ]


_Seen = Sequence[tuple["weakref.ref[Tensor]", int]]


def _same(a: _Seen, b: _Seen) -> bool:
    """Compare by identity: all references to one living tensor are one object."""
    return len(a) == len(b) and all(x is y and n == m for (x, n), (y, m) in zip(a, b, strict=True))


def _changes(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _plain_parts(tensor: Tensor) -> list[Tensor]:
    """Return the tensor, or those that a quantised one is made of."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [part for name in names for part in _plain_parts(getattr(tensor, name))]


def _crc(tensor: Tensor) -> int:
    # A meta tensor is offloaded: its contents are not here.
    return 0 if tensor.is_meta else zlib.crc32(raw(tensor.cpu().contiguous()))


@dataclass(eq=False)
class StreamModel:
    """A model that watches streams; made once, used by any number of sessions.

    `fps` is that of the streams: of frames pushed without a time, and of sources. `reduce` has
    stages at `pre` for the tokens of every frame; `frame_cache` encodes only what changed; `gate`
    skips frames that look like the last one let through; each may be None. `system` is the text of
    a system message, None leaves it to the chat template. See `FrameEncoder` for `sized_for`,
    `FrontEnd` for `batch`. `clips` loads a model that answers questions about motion in its place
    (see `mmfast.streams.recent`); None where it answers them itself. `reuse` has units that other
    streams have encoded (see `FrameEncoder`). `decode` drafts answers, which it verifies.
    """

    model: Any
    processor: Any
    fps: float = 1.0
    reduce: str | None = None
    frame_cache: Any = None
    gate: FrameGate | None = None
    system: str | None = None
    sized_for: int = 64
    batch: int = 1
    clips: Callable[[], StreamModel] | None = None
    reuse: Any = None
    decode: DecodePlan | None = None
    drafting: DraftMemory = field(init=False, default_factory=DraftMemory)
    engine: Engine = field(init=False)
    script: Script = field(init=False)
    frontend: FrontEnd = field(init=False)
    weights: WeightChecksum = field(init=False)

    def __post_init__(self) -> None:
        if not isinstance(self.fps, int | float) or not 0 < self.fps < float("inf"):
            raise MmfastError(f"fps={self.fps!r} is no frame rate; give a number such as 1 or 0.5")
        for name in ("sized_for", "batch"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise MmfastError(f"{name}={value!r} is not allowed; give a whole number from 1")
        self.reduce = self.reduce if parse(self.reduce) else None
        reducer = None if self.reduce is None else StreamReducer(self.reduce)
        # layers of PEFT stay where they are
        self.model = model = stock_model(self.model, "a stream")
        if reducer is not None:  # a learned ranking is that of the model
            reducer.specs = tuple(ranked(spec, model) for spec in reducer.specs)
        processor = self.processor
        self.script = script_for(model, processor, float(self.fps), self.system)
        prove(self.script)
        encoder = FrameEncoder(
            model,
            processor,
            sized_for=self.sized_for,
            cache=self.frame_cache,
            reuse=self.reuse,
        )
        self.frontend = FrontEnd(
            encoder, self.script.frames, gate=self.gate, reducer=reducer, batch=self.batch
        )
        self.engine, self.weights = Engine(model), WeightChecksum(model)
        self.blocked, self.stops = placeholders(model), stop_ids(model)
        penalty = getattr(model.generation_config, "repetition_penalty", None)
        self.penalty = 1.0 if penalty is None else float(penalty)

    @property
    def tokenizer(self) -> Any:
        """Writes ids as text."""
        return self.processor.tokenizer

    def auto_memory(self) -> str:
        """Return the spec that `auto` stands for now: by the free bytes of the model's device."""
        config, weight = self.model.config.get_text_config(), self.script.embed.weight
        attention: Any = self.engine.attentions[0]
        width = int(attention.head_dim) * config.num_key_value_heads
        token = 3 * config.num_hidden_layers * width * weight.element_size()
        positions = getattr(config, "max_position_embeddings", None) or 32_768
        return auto_memory(free_bytes(weight.device), token, positions)

    def signature(self) -> dict[str, Any]:
        """Return what a saved session must share: with other weights its keys mean nothing."""
        config, gate = self.model.config.get_text_config(), self.gate
        return {
            "family": self.model.config.model_type,
            "layers": config.num_hidden_layers,
            "width": config.hidden_size,
            "dtype": str(self.script.embed.weight.dtype).removeprefix("torch."),
            "weights": self.weights.value(),
            "fps": float(self.fps),
            "reduce": self.reduce,
            "system": self.system,
            "gate": None if gate is None else gate.settings,
        }


def _number(time: object) -> float:
    """Return a time as a float; NaN for what is none, infinity for one that no float holds."""
    if isinstance(time, bool) or not isinstance(time, Real):
        return math.nan
    try:
        return float(time)
    except OverflowError:
        return math.inf


# Seconds behind the last frame up to which a frame is late; further back the source restarted.
LATE = 1.0


@value
@dataclass(frozen=True)
class Timeline:
    """Seconds of the stream so far; a value.

    `last` is that of the last frame; `offset` leads from the source's seconds to the stream's.
    Frames are left out that repeat a time (`repeated`) or come out of order (`late`); a source may
    go back in time (`jumps`). `fresh`: the next frame is of another source, whose times need not
    ascend from here.
    """

    last: float | None = None
    offset: float = 0.0
    repeated: int = 0
    late: int = 0
    jumps: int = 0
    fresh: bool = False

    def step(self, time: object, interval: float) -> tuple[Timeline, float | None]:
        """Take the time of the next frame; MediaError for one that is no number of seconds."""
        if time is None:
            now = 0.0 if self.last is None else self.last + interval
            return replace(self, last=now, fresh=False), now
        given = _number(time)
        if not math.isfinite(given):
            raise MediaError(f"time={time!r} of a frame is no number of seconds; give e.g. 1.5")
        if abs(given) >= FAR:  # steps of a frame would be lost in its last digits
            raise MediaError(
                f"time={time!r} of a frame is more than {FAR:g} s; give seconds such as 1.5, or "
                "of time.time()"
            )
        now = given + self.offset
        if self.last is None or now > self.last:
            return replace(self, last=now, fresh=False), now
        if not self.fresh and now == self.last:
            return replace(self, repeated=self.repeated + 1), None
        if not self.fresh and now >= self.last - LATE:
            return replace(self, late=self.late + 1), None
        jumps, now = self.jumps + (not self.fresh), self.last + interval
        offset = now - given
        return replace(self, last=now, offset=offset, jumps=jumps, fresh=False), now

    def again(self) -> Timeline:
        """Before the first frame of another source."""
        return replace(self, fresh=True)


class Stream:
    """The state of a session, changed by one thread at a time.

    `spec` has the cache policies, None forgets nothing; `quotas` are bytes per tier of what left
    the window, `history` those of small pictures of all that was seen (0 keeps none, None sets no
    limit), which `album` holds. `seen` is the state of gate, frame cache and reducer, and frames
    that wait for a partner; `written` tells how far the conversation is written; `version` counts
    what was written, to see whether the stream went on; `spent` are milliseconds by stage.
    """

    def __init__(
        self,
        model: StreamModel,
        spec: str | None,
        quotas: TierQuotas | None,
        history: int | None = 0,
    ) -> None:
        spec = model.auto_memory() if spec == AUTO else spec
        self.model, self.spec, self.quotas = model, spec, quotas or TierQuotas()
        self.memory = model.engine.memory(plan_cache(spec), tiers=quotas)
        self.timeline = Timeline()
        self.recent = None if model.clips is None else RecentFrames()
        self.album = None if history == 0 else MomentAlbum(history)
        self._clip: tuple[list[float], Stream] | None = None  # the last one, with its times
        self.seen = model.frontend.start()
        self.written = WrittenState()
        self.version = 0
        self.counts = dict.fromkeys(("frames", "units", "tokens", "questions", "events"), 0)
        self.spent = {"encode_ms": 0.0, "prefill_ms": 0.0, "answer_ms": 0.0}

    def take(self, frames: Sequence[Any], times: Sequence[Any]) -> list[EncodedUnit]:
        """Take frames `[H, W, 3]` with the times of their source; returns the units written."""
        timeline, shots = self.timeline, list[Shot]()
        for frame, stamp in zip(frames, times, strict=True):
            timeline, now = timeline.step(stamp, 1 / self.model.fps)
            if now is not None:
                shots.append((frame, now))
                self.glance(frame, now)
                if self.album is not None:
                    self.album.add(frame, now)
        start = time.perf_counter()
        self.seen, units = self.model.frontend.step(self.seen, shots)
        self.spent["encode_ms"] += (time.perf_counter() - start) * 1e3
        self.timeline = timeline
        self.counts["frames"] += len(frames)
        for unit in units:
            self._write(unit)
        return units

    def glance(self, frame: Any, time: float) -> None:
        """Keep a frame as a picture alone, if its model needs pictures for some questions."""
        if self.recent is not None:
            self.recent.add(frame, time)

    def answering(self, question: str, trace: Trace) -> tuple[Stream, str]:
        """Return the stream that answers a question, and its words there.

        It is this one, or a clip of its last frames, kept for the next question about them.
        """
        if self.recent is None or self.model.clips is None:
            return self, question
        strange = bool(unknown_words(self.model.tokenizer, question))
        if not self.recent.asked(question, strange):
            return self, question
        with trace.stage("clip") as row:
            frames, times = self.recent.clip()
            if self._clip is None or self._clip[0] != times:
                clip = Stream(self.model.clips(), None, None)
                clip.take(frames, times)
                self._clip = times, clip
            clip = self._clip[1]
            row.tokens_in, row.tokens_out = len(frames), clip.counts["tokens"]
        return clip, self.recent.worded(question)

    def flush(self) -> None:
        """Write frames that wait for a partner, the last one doubled."""
        self.seen, units = self.model.frontend.flush(self.seen)
        for unit in units:
            self._write(unit)

    def _write(self, unit: EncodedUnit) -> None:
        start = time.perf_counter()
        written, pieces = self.model.script.patch(self.written, unit)
        for piece in pieces:
            self.model.engine.append(self.memory, piece)
            self.version += 1
            if piece.kind == "text":  # a video has begun, whether or not its frame fits
                self.written = WrittenState("video", since=unit.times[0])
        self.written = written
        self.counts["units"] += 1
        self.counts["tokens"] += len(unit.features)
        self.spent["prefill_ms"] += (time.perf_counter() - start) * 1e3

    def branch(self, question: str, trace: Trace | None = None) -> tuple[Any, Any]:
        """A branch with a question on it, and the logits `[V]` where the answer begins."""
        with (trace or Trace()).stage("question") as row:
            state, pieces = self.written, []
            for unit in self.model.frontend.rest(self.seen):
                state, new = self.model.script.patch(state, unit)
                pieces += new
            pieces += self.model.script.question(state, question)
            branch, logits = self.model.engine.branch(self.memory), None
            for piece in pieces:
                logits = branch.extend(piece, retrieve=piece is pieces[-1])
            row.tokens_in, row.tokens_out = sum(len(piece.embeds) for piece in pieces), 1
        return branch, logits

    def words(self, question: str) -> list[int]:
        """Text of the prompt that a question is asked with, for the rule against repetition."""
        script = self.model.script
        pieces = script.question(self.written, question)
        asked = [int(id) for piece in pieces if piece.ids is not None for id in piece.ids]
        return [*script.wording.opening(), *asked]

    def remember(self, reply: Reply, question: str, version: int) -> None:
        """Keep an exchange that was begun when the stream was at `version`."""
        script = self.model.script
        if version == self.version and not attended(self.memory.plan):
            reply.keep()
        else:  # the stream went on meanwhile, or its policy reads what the exchange looks at
            pieces, ids = script.question(self.written, question), reply.ids
            if reply.tokenizer is not self.model.tokenizer:  # a model of clips has other words
                ids = self.model.tokenizer.encode(reply.text, add_special_tokens=False)
            pieces += [script.text(ids)] if ids else []
            for piece in pieces:
                self.model.engine.append(self.memory, piece)
        self.version += 1
        self.written = script.answered(self.written)

    def snapshot(self) -> dict[str, Any]:
        """All state as a tree of plain containers and tensors."""
        return {
            "model": self.model.signature(),
            "spec": self.spec,
            "quotas": self.quotas.options(),
            "timeline": self.timeline,
            "frontend": self.model.frontend.snapshot(self.seen),
            "written": self.written,
            "counts": dict(self.counts),
            "spent": dict(self.spent),
            "memory": self.memory.snapshot(),
            "recent": None if self.recent is None else self.recent.snapshot(),
            "history": 0 if self.album is None else self.album.limit,
            "album": None if self.album is None else self.album.snapshot(),
        }

    def restore(self, tree: dict[str, Any]) -> int:
        """Take over a snapshot; MmfastError for one of another model.

        Returns the number of stored blocks for which the quotas have no room.
        """
        here, there = self.model.signature(), tree["model"]
        odd = [f"{k} {there.get(k)!r}, here {here[k]!r}" for k in here if there.get(k) != here[k]]
        if odd:
            raise MmfastError(
                f"the session was saved with another model or other options ({'; '.join(odd)}); "
                "restore it with those it was saved with"
            )
        self.memory.restore(tree["memory"])
        self.timeline, self.written = tree["timeline"], tree["written"]
        self.seen = self.model.frontend.restore(tree["frontend"])
        self.counts, self.spent = dict(tree["counts"]), dict(tree["spent"])
        if self.recent is not None and tree.get("recent"):
            self.recent.restore(tree["recent"])
            self._clip = None
        if self.album is not None and tree.get("album"):
            self.album.restore(tree["album"])
        elif self.album is not None:  # what was seen before is missing
            self.album.whole = not self.counts["frames"]
        archive = self.memory.archive
        if archive is None:
            return 0
        return sum(map(len, tree["memory"]["archive"]["tiers"].values())) - len(archive)

    def close(self) -> None:
        """Release stored blocks; files of saved sessions stay."""
        if self.memory.archive is not None:
            self.memory.archive.close()

    def stats(self) -> dict[str, Any]:
        """Figures as plain numbers."""
        return {
            **self.counts,
            "seconds": self.timeline.last,
            "waiting": len(self.seen.waiting),
            "gated": self.seen.gated,
            **{name: round(ms, 3) for name, ms in self.spent.items()},
            "memory": self.memory.stats(),
            "history": None if self.album is None else self.album.stats(),
        }


class Clock:
    """The machine's monotonic clock; a thread may wait for some of its seconds to pass."""

    def now(self) -> float:
        """Seconds since an arbitrary moment; they never go back."""
        return time.monotonic()

    def wait(self, condition: threading.Condition, until: float | None = None) -> None:
        """Wait on a held condition until notified or `until`; it may wake early, so check again."""
        left = None if until is None else until - self.now()
        if left is None or left > 0:
            condition.wait(left)


class FakeClock(Clock):
    """A clock that stands still until `advance`: time-dependent code becomes deterministic."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start
        self._waiting: dict[object, tuple[threading.Condition, float]] = {}
        self._changed = threading.Condition()  # guards both above

    def now(self) -> float:
        """Seconds set by hand."""
        with self._changed:
            return self._now

    def wait(self, condition: threading.Condition, until: float | None = None) -> None:
        """Wait on a held condition until it is notified or `advance` reaches `until`."""
        if until is None:
            condition.wait()
            return
        # Registered before the time is read: an advance in between finds the condition, and
        # cannot notify before `condition.wait` has released its lock. No wake-up is lost.
        with self._changed:
            self._waiting[ticket := object()] = condition, until
            passed = self._now >= until
            self._changed.notify_all()
        try:
            if not passed:
                condition.wait()
        finally:
            with self._changed:
                del self._waiting[ticket]

    def advance(self, seconds: float) -> None:
        """Move the clock and wake everybody who waits for it."""
        with self._changed:
            self._now += seconds
            waiting = {condition for condition, _ in self._waiting.values()}
        for condition in waiting:
            with condition:
                condition.notify_all()

    def settle(self, sleepers: int = 1, patience: float = 10.0) -> None:
        """Wait in real time until so many threads wait for a later moment; else TimeoutError."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._sleepers() >= sleepers, patience):
                raise TimeoutError(f"{self._sleepers()} of {sleepers} threads wait")

    def _sleepers(self) -> int:
        return sum(until > self._now for _, until in self._waiting.values())
