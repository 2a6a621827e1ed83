"""One line per task: `mmfast.pipeline("video-qa")`."""

from __future__ import annotations

from mmfast.pipelines.registry import ALIASES, TASKS, pipeline, task

__all__ = ["ALIASES", "TASKS", "pipeline", "task"]
