"""A model that watches streams: engine, script and front end, shared by all its sessions."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import Any

from mmfast.core.errors import MmfastError
from mmfast.frontends.changes import FrameGate
from mmfast.streams.engine import Engine
from mmfast.streams.families import prove, script_for
from mmfast.streams.frontend import FrameEncoder, FrontEnd, StreamReducer
from mmfast.streams.reply import placeholders, stop_ids
from mmfast.streams.script import Script


@dataclass(eq=False)
class StreamModel:
    """A model that watches streams; made once, used by any number of sessions.

    `fps` is that of the streams: of frames pushed without a time, and of sources. `reduce` has
    stages at `pre` for the tokens of every frame; `frame_cache` encodes only what changed; `gate`
    skips frames that look like the last one let through; each may be None. `system` is the text of
    a system message, None leaves it to the chat template. See `FrameEncoder` for `sized_for`,
    `FrontEnd` for `batch`.
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
    engine: Engine = field(init=False)
    script: Script = field(init=False)
    frontend: FrontEnd = field(init=False)

    def __post_init__(self) -> None:
        if not isinstance(self.fps, int | float) or not 0 < self.fps < float("inf"):
            raise MmfastError(f"fps={self.fps!r} is no frame rate; give a number such as 1 or 0.5")
        for name in ("sized_for", "batch"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise MmfastError(f"{name}={value!r} is not allowed; give a whole number from 1")
        reducer = None if self.reduce is None else StreamReducer(self.reduce)
        model, processor = self.model, self.processor
        self.script = script_for(model, processor, float(self.fps), self.system)
        prove(self.script)
        encoder = FrameEncoder(model, processor, sized_for=self.sized_for, cache=self.frame_cache)
        self.frontend = FrontEnd(
            encoder, self.script.frames, gate=self.gate, reducer=reducer, batch=self.batch
        )
        self.engine = Engine(model)
        self.blocked, self.stops = placeholders(model), stop_ids(model)
        penalty = getattr(model.generation_config, "repetition_penalty", None)
        self.penalty = 1.0 if penalty is None else float(penalty)

    @property
    def tokenizer(self) -> Any:
        """Writes ids as text."""
        return self.processor.tokenizer

    def signature(self) -> dict[str, Any]:
        """Properties that a saved session must share: with other weights its keys mean nothing."""
        config = self.model.config.get_text_config()
        weight = self.script.embed.weight
        probe = weight[:8].detach().float().cpu().contiguous()
        return {
            "family": self.model.config.model_type,
            "layers": config.num_hidden_layers,
            "width": config.hidden_size,
            "dtype": str(weight.dtype).removeprefix("torch."),
            "weights": zlib.crc32(probe.numpy().tobytes()),
            "fps": float(self.fps),
        }
