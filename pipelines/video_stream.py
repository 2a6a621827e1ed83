"""`video-stream`: watch without end, ask at any moment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

from mmfast.attach import check_detached
from mmfast.core.errors import MmfastError, ModelError, warn
from mmfast.core.sizes import parse_bytes
from mmfast.core.spec import parse
from mmfast.frontends.changes import FrameGate
from mmfast.frontends.source import DEFAULT_LIMITS, Limits
from mmfast.models.attention import with_attn
from mmfast.models.loading import embedded_path, load
from mmfast.models.vision.frames.cache import FrameCache
from mmfast.pipelines.options import checked, named, within
from mmfast.pipelines.registry import task
from mmfast.planner.arithmetic import use_weights
from mmfast.streams import snapshots
from mmfast.streams.archive.tiers import TierQuotas
from mmfast.streams.drafts import plan_stream
from mmfast.streams.families import check_watches
from mmfast.streams.reuse.media import MediaReuse
from mmfast.streams.reuse.plan import ReusePlan, parse_reuse
from mmfast.streams.reuse.store import ReuseStore, store_of
from mmfast.streams.session import Session
from mmfast.streams.stream import StreamModel

# Trained on an endless world; the other embedded model knows short clips alone, and motion.
STREAM_MODEL, CLIP_MODEL = "tiny-stream", "tiny-scenes"
MEMORY = "sink:64+window:4096+retrieve:64"
HOST_BLOCKS = 1800
FEATURE_GOAL = 0.98  # cosine that a frame cache keeps to the features of the stock tower


@task("video-stream")
class VideoStream:
    """Sessions on one model: each a stream of its own, with a memory of its own.

    Args:
        model: None (embedded), a directory, a hub id, a model, or a `(model, processor)` pair.
        processor: As for `VisualQA`.
        model_kwargs: Arguments of `from_pretrained`; see `VisualQA`.
        reduce: Stages at `pre` that reduce every frame's tokens, such as `"stc_pruner:0.3"`.
        frame_cache: Share of a frame's patches that the encoder computes anew (0.25), or a
            `FrameCache`; None computes all. A share keeps features at a cosine of 0.98, and leaves
            towers and motions to the stock tower where it could save nothing.
        gate: Change of colour (0 to 1) under which a frame is skipped, or a `FrameGate`; None
            skips none.
        device: `cpu`, `cuda`, `cuda:1`; None picks CUDA where there is one.
        dtype: `auto`, `float32`, `bfloat16` or `float16`.
        weights: Packed weights of the decoder, as of `video-qa`; None: as loaded.
        attn: Attention back end, as of `video-qa`.
        fps: Frames per second of the streams: of frames pushed without a time, and of sources.
        system: Text of a system message; None leaves it to the chat template.
        sized_for: Some processors (Qwen3-VL) share a budget of pixels out over all frames of a
            clip; frames of a stream are as large as those of a clip of so many frames.
        batch: Frames, or temporal patches, in one call of the encoder.
        reuse: `"encoder"` keeps the encoder's output of every frame for other sessions and later
            runs, in `store`; None keeps none.
        store: A `mmfast.ReuseStore`, or a folder of one; None: 1 GB of main memory.
        decode: Draft and verify for answers, `"recycle"` or `"lookup"`: the same answers in fewer
            passes; None is one token a pass.
        clips: Answers about motion beside the embedded model: None (embedded), or a
            `(model, processor)` pair.

    Raises:
        MmfastError: An unknown option or value, before any weight is read.
        ModelError: The checkpoint cannot be loaded, or cannot watch streams.

    Example:
        >>> pipe = VideoStream()
        >>> with pipe.open(memory="sink:64+window:1152+retrieve:16") as session:
        ...     watch = session.watch("world.mp4")
        ...     "".join(session.ask("What number is at the red circle?"))
        '42'
    """

    task: str

    @checked()
    def __init__(
        self,
        model: Any = None,
        *,
        processor: Any = None,
        model_kwargs: Mapping[str, Any] | None = None,
        reduce: str | None = None,
        frame_cache: float | FrameCache | None = None,
        gate: float | FrameGate | None = None,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype = "auto",
        weights: str | None = None,
        attn: str | None = None,
        fps: float = 1.0,
        system: str | None = None,
        sized_for: int = 64,
        batch: int = 1,
        reuse: str | None = None,
        store: ReuseStore | str | Path | None = None,
        decode: str | None = None,
        clips: Any = None,
    ) -> None:
        with within(self.task):
            parse(reduce)
            drafts = plan_stream(decode)
            plan = _encoder_alone(reuse, store, frame_cache)
            model_kwargs = with_attn(model_kwargs, attn, model)
        gate = FrameGate(gate) if isinstance(gate, int | float) else gate
        source = (_path(STREAM_MODEL) or _path(CLIP_MODEL)) if model is None else model
        self.model, self.processor = load(source, device, dtype, processor, model_kwargs)
        self.packing = use_weights(self.model, weights, source)
        check_watches(self.model)
        if isinstance(frame_cache, int | float):
            frame_cache = FrameCache(self.model, frame_cache, goal=FEATURE_GOAL)
        self.stream_model = StreamModel(
            self.model,
            self.processor,
            fps=fps,
            reduce=reduce,
            frame_cache=frame_cache,
            gate=gate,
            system=system,
            sized_for=sized_for,
            batch=batch,
            reuse=plan and MediaReuse(self.model, self.processor, plan, store_of(store)),
            decode=drafts,
            clips=_clips(clips, device, dtype) if source == _path(STREAM_MODEL) else None,
        )

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "a pipeline of streams belongs to its process: make it in the other one, with "
            "pipeline('video-stream', …), and restore() a saved session there"
        )

    @checked()
    def open(
        self,
        memory: str | None = MEMORY,
        *,
        device_bytes: str | int | None = 0,
        host_bytes: str | int | None = "1GB",
        host_blocks: int | None = HOST_BLOCKS,
        disk_bytes: str | int | None = 0,
        folder: str | Path | None = None,
        history: str | int | None = "64MB",
        limits: Limits = DEFAULT_LIMITS,
    ) -> Session:
        """Begin a stream.

        Args:
            memory: Cache policies: what stays, and how what left is found again. None forgets
                nothing and grows without bound; "auto" chooses a window by the free bytes of the
                device, and `session.stats()["memory"]["spec"]` tells which.
            device_bytes: Of stored blocks beside the model, such as `"2GB"`; None sets no limit.
            host_bytes: Of those in main memory.
            host_blocks: Most of those in main memory, half an hour at a frame a second; None sets
                no limit beside `host_bytes`. The oldest go to the disk tier, or are forgotten.
            disk_bytes: Of those in files; needs `folder`.
            folder: Where the disk tier makes a folder of its own.
            history: Bytes of small pictures of all that was seen, for `Session.history`; None sets
                no limit, 0 keeps none.
            limits: Of a frame's size.

        Raises:
            SpecError: Wrong `memory`.
            MmfastError: Wrong sizes.
        """
        check_detached(self.model)
        quotas = TierQuotas.of(device_bytes, host_bytes, disk_bytes, folder, host_blocks)
        kept = parse_bytes(history)
        return Session(self.stream_model, memory, quotas=quotas, limits=limits, history=kept)

    @checked(named(open))
    def restore(self, folder: str | Path, /, **options: Any) -> Session:
        """Go on with a saved session, bit for bit, with the sizes and the folder it had.

        Args:
            folder: Where `Session.save` wrote; the newest save that is whole is read, with a
                warning for every newer one that is damaged.
            **options: Sizes and `folder` of the disk tier in place of those that were saved, and
                limits, as for `open`. Stored blocks that find no room are counted in a warning.

        Raises:
            MmfastError: Nothing readable is there, or it was saved with another model.
        """
        if "memory" in options:
            raise MmfastError("restore() takes the memory of the saved session; leave memory= out")
        passed_over: list[str] = []
        tree = snapshots.load(folder, passed_over)
        for line in passed_over:
            warn(line)
        if not isinstance(tree, dict) or "spec" not in tree:
            raise MmfastError(f"{str(folder)!r} holds no saved session; name the folder of one")
        kept = {**tree["quotas"], "history": tree.get("history", 0)}
        session = self.open(tree["spec"], **{**kept, **options})
        try:
            lost = session.stream.restore(tree)
        except BaseException:
            session.close()
            raise
        if lost:
            warn(
                f"{lost} stored blocks of {str(folder)!r} found no room and are forgotten; give "
                "restore() larger sizes, or a folder that can be written"
            )
        return session


def _encoder_alone(reuse: str | None, store: Any, frame_cache: Any) -> ReusePlan | None:
    """Return the plan of `reuse`; MmfastError for what does not act in a stream."""
    plan = parse_reuse(reuse)
    if plan is None and store is not None:
        raise MmfastError("store= keeps nothing without reuse=; give reuse='encoder' too")
    if plan is not None and plan.prefix:
        raise MmfastError(
            f"reuse={reuse!r}: a session has keys and values of its own, which `memory` bounds and "
            "finds again; give reuse='encoder'"
        )
    if plan is not None and frame_cache is not None:
        raise MmfastError(
            "reuse='encoder' does not act beside frame_cache=, whose frames depend on those before "
            "them; give one of them"
        )
    return plan


def _path(name: str) -> str | None:
    try:
        return str(embedded_path(name))
    except ModelError:
        return None


def _clips(
    given: Any, device: str | torch.device | None, dtype: str | torch.dtype
) -> Callable[[], StreamModel]:
    """Return a function that loads the embedded model of clips once, unless a pair is given."""
    return cache(lambda: StreamModel(*load(given or str(embedded_path(CLIP_MODEL)), device, dtype)))
