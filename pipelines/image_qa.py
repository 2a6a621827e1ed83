"""`image-qa`: questions about still images."""

from __future__ import annotations

from typing import Any

from mmfast.core.errors import MmfastError
from mmfast.frontends.image import read_image
from mmfast.models.prompt import Shot
from mmfast.pipelines.visual_qa import VisualQA


class ImageQA(VisualQA):
    """Answer questions about images: path, bytes, file object, PIL image or array.

    A tuple of images is one input: the question is about all of them together.
    """

    task = "image-qa"

    def _read(self, media: Any) -> list[Shot]:
        images = media if isinstance(media, tuple) else (media,)
        if not images:
            raise MmfastError("no image to ask about; give an image or a tuple of images")
        return [Shot("image", read_image(image), None) for image in images]
