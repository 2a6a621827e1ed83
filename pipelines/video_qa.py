"""`video-qa`: questions about clips."""

from __future__ import annotations

from typing import Any

from mmfast.frontends.video import read_video
from mmfast.models.adapter import check_media
from mmfast.models.prompt import Shot
from mmfast.pipelines.visual_qa import VisualQA


class VideoQA(VisualQA):
    """Answer questions about videos: path, bytes, file object, array, list of frames, iterator."""

    task = "video-qa"

    def __init__(self, model: Any = None, **options: Any) -> None:
        super().__init__(model, **options)
        check_media(self.model, "video")

    def _read(self, media: Any) -> list[Shot]:
        sampling: dict[str, Any] = {"fps": self.fps} if self.fps else {"frames": self.frames}
        clip = read_video(media, **sampling)
        return [Shot("video", clip.frames, clip.metadata())]
