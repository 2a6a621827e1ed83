"""What runs in a decoding process: the front-ends under the server's limits.

Imports no torch, so that a process that decodes starts at once and weighs little.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from mmfast.core.errors import MediaError
from mmfast.frontends.container import open_video
from mmfast.frontends.headers import check_header
from mmfast.frontends.image import open_image, read_image
from mmfast.frontends.limits import Limits
from mmfast.frontends.source import IMAGE_KINDS, Source, open_source
from mmfast.frontends.video import read_video
from mmfast.serve.guard.decode_sound import read_sound

Array = np.ndarray[Any, Any]
ANIMATED = ("gif", "webp", "png", "avif")
_PILLOW = 40  # times that Pillow takes for a frame what a video decoder takes


def decode(job: dict[str, Any], path: str) -> tuple[Array, dict[str, Any]]:
    """Decode one input.

    Args:
        job: `kind`, `limits` (fields of `Limits`), and for a clip `frames` or `fps`,
            `frame_pixels` and `clip_pixels`.
        path: The encoded input.

    Returns:
        Samples or pixels, and what else there is to know of them.

    Raises:
        MediaError: It is broken, too large, or not of that kind.
    """
    limits = Limits(**job["limits"])
    if job["kind"] == "image":
        return read_image(path, limits=limits), {}
    if job["kind"] == "sound":
        return read_sound(open_source(path, limits, job_kind), limits)
    source = open_source(path, limits)
    tight = _tightened(source, limits, job["frame_pixels"], job["clip_pixels"])
    sampling = {k: job[k] for k in ("frames", "fps") if job.get(k) is not None}
    # PyAV reads every kind; decord's own threads would outgrow the limits of this process.
    clip = read_video(path, limits=tight, backend="pyav", **sampling)
    return np.ascontiguousarray(clip.frames), {"metadata": clip.metadata()}


def job_kind(name: str, head: bytes) -> str:
    """See `sniff_sound`."""
    from mmfast.frontends.audio_kinds import sniff_sound

    return sniff_sound(name, head)


def _tightened(source: Source, limits: Limits, frame: int, clip: int) -> Limits:
    """Limits on the frames of a source, from the size of one: before any is decoded."""
    if source.kind in IMAGE_KINDS:
        if source.kind not in ANIMATED:
            raise MediaError(f"{source.name} is a still image ({source.kind}): give it as an image")
        with open_image(source, limits) as image:
            width, height = image.size
        most = clip // _PILLOW // (width * height)
    else:
        check_header(source)
        with open_video(source, replace(limits, pixels=frame)) as (_, stream):
            width, height = stream.width, stream.height
        replace(limits, pixels=frame).check_picture(source.name, width, height)
        most = clip // (width * height)
    return replace(limits, pixels=min(limits.pixels, frame), frames=min(limits.frames, most))
