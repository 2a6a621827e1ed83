"""`image-qa`: questions about still images."""

from __future__ import annotations

from typing import Any

import numpy as np

from mmfast.frontends.image import read_image
from mmfast.models.prompt import Shot
from mmfast.pipelines.visual_qa import VisualQA


class ImageQA(VisualQA):
    """Answer questions about images: path, bytes, file object, PIL image or array."""

    task = "image-qa"

    def _read(self, media: Any) -> Shot:
        image = read_image(media)
        if not self.embedded:
            return Shot("image", image, None)
        # The embedded model has only ever seen clips: a still is shown to it as one.
        frames = np.repeat(image[None], self.frames, axis=0)
        meta = {
            "total_num_frames": self.frames,
            "fps": 4.0,
            "duration": self.frames / 4.0,
            "frames_indices": list(range(self.frames)),
            "width": image.shape[1],
            "height": image.shape[0],
            "video_backend": "still",
        }
        return Shot("video", frames, meta)
