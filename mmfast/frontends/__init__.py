"""Media front-ends: files, bytes, arrays and streams in, upright RGB frames with true times out."""

from mmfast.frontends.clip import Clip
from mmfast.frontends.image import kind_of, read_image
from mmfast.frontends.limits import Limits
from mmfast.frontends.video import iter_video, read_video

__all__ = ["Clip", "Limits", "iter_video", "kind_of", "read_image", "read_video"]
