"""Media front-ends: files, bytes, arrays and streams in, upright RGB frames with true times out."""

from mmfast.frontends.clip import Clip
from mmfast.frontends.image import kind_of, read_image
from mmfast.frontends.limits import Limits
from mmfast.frontends.live import Live, live_frames
from mmfast.frontends.live_push import Push
from mmfast.frontends.long_file_queue import Ahead
from mmfast.frontends.video import iter_video, read_video

__all__ = [
    "Ahead",
    "Clip",
    "Limits",
    "Live",
    "Push",
    "iter_video",
    "kind_of",
    "live_frames",
    "read_image",
    "read_video",
]
