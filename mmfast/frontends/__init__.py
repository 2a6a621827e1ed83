"""Media front-ends: files, bytes, arrays and streams in, upright RGB frames with true times out."""

from mmfast.frontends.image import kind_of, read_image
from mmfast.frontends.live.source import LiveSource, Push, live_frames
from mmfast.frontends.source import Limits
from mmfast.frontends.video.clip import Clip
from mmfast.frontends.video.parallel import Ahead
from mmfast.frontends.video.reader import iter_video, read_video

__all__ = [
    "Ahead",
    "Clip",
    "Limits",
    "LiveSource",
    "Push",
    "iter_video",
    "kind_of",
    "live_frames",
    "read_image",
    "read_video",
]
