"""One line per task: `mmfast.pipeline("video-qa")`."""

from __future__ import annotations

import importlib
from typing import Any

from mmfast.core.errors import MmfastError, unknown
from mmfast.pipelines.visual_qa import Answer

# Task -> (module, class); the module is imported when the task is asked for.
TASKS = {
    "image-qa": ("mmfast.pipelines.visual_qa", "ImageQA"),
    "video-qa": ("mmfast.pipelines.visual_qa", "VideoQA"),
    "video-stream": ("mmfast.pipelines.video_stream", "VideoStream"),
    "text-to-speech": ("mmfast.pipelines.speech", "TextToSpeech"),
    "speech-chat": ("mmfast.pipelines.speech", "SpeechChat"),
    "omni-chat": ("mmfast.pipelines.omni_chat", "OmniChat"),
}
ALIASES = {"image-text-to-text": "image-qa", "video-text-to-text": "video-qa"}

__all__ = ["ALIASES", "TASKS", "Answer", "pipeline"]


def pipeline(task: str, model: Any = None, **options: Any) -> Any:
    """Build the pipeline of a task.

    Args:
        task: `video-qa`, `image-qa` (or their transformers names `video-text-to-text` and
            `image-text-to-text`), `video-stream`, `text-to-speech`, `speech-chat` or `omni-chat`.
        model: Directory or hub id of a checkpoint, a `(model, processor)` pair, or None for the
            embedded model, which works offline on a CPU.
        **options: `reduce`, `cache`, `encoder`, `device`, `dtype`, `frames`, `fps`,
            `max_new_tokens`, or instead of `reduce` a target for the planner: `target_ttft_ms`,
            `target_tokens`, `max_memory`, `quality`; see `mmfast.pipelines.visual_qa.VisualQA`.
            Those of a stream are in `mmfast.pipelines.video_stream.VideoStream`, those of voice in
            `mmfast.pipelines.speech`, `.speech_chat` and `.omni_chat`.

    Raises:
        MmfastError: Unknown task; names the choices.
        SpecError: Wrong `reduce` or `cache`, before any weight is read.
        ModelError: The checkpoint cannot be loaded.

    Example:
        >>> pipe = pipeline("video-qa", reduce="evs:0.25")
        >>> pipe("clip.mp4", "Which way does the red circle move?").text
        'left'
    """
    name = ALIASES.get(task, task)
    if name not in TASKS:
        raise MmfastError(unknown("task", task, [*TASKS, *ALIASES]))
    module, cls = TASKS[name]
    return getattr(importlib.import_module(module), cls)(model, **options)
