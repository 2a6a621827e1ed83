"""Media of requests: from a URL or bytes to pixels and samples, within the limits of the server."""

from __future__ import annotations

import asyncio
import atexit
import hashlib
import logging
import threading
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from mmfast.core.errors import MediaError
from mmfast.frontends.audio.packets import sniff_sound
from mmfast.frontends.audio.reader import load_audio
from mmfast.frontends.image import kind_of
from mmfast.frontends.source import IMAGE_KINDS, VIDEO_KINDS, magic_kind
from mmfast.models.image_guard import judge_of
from mmfast.models.prompt import Shot
from mmfast.serve.config import ServerConfig
from mmfast.serve.engine.base import Media
from mmfast.serve.guard.decoders import Decoders
from mmfast.serve.guard.errors import ApiError, bad_request, scrub
from mmfast.serve.guard.fetch import check_claim, decode_base64, fetch, parse_data_url, too_large

Kind = Literal["image", "video"]
_HEAD = 512
logger = logging.getLogger("mmfast")
_shared: dict[tuple[int, int, int], Decoders] = {}
_lock = threading.Lock()


async def load_media(
    source: str | bytes,
    kind: Kind,
    config: ServerConfig,
    *,
    frames: int | None = None,
    fps: float | None = None,
    most: int | None = None,
    param: str | None = None,
) -> Media:
    """Decode an image or a clip that a client sent; return pixels and a key for reuse.

    `source` is a `data:` URL, an http(s) URL of an allowed host, or the encoded bytes; the key
    hashes the content and its sampling. Without `frames` and `fps` the server's number of frames is
    taken. A picture of more than `most` pixels is reduced. `ApiError` is 4xx for a wrong source,
    and 429 if too many wait.
    """
    data, claimed = await _bytes(source, config, param)
    found = magic_kind(data[:_HEAD])
    check_claim(claimed, found, kind, param)
    _check_kind(found, kind, param)
    job = _job(kind, config) | {"pixels": most}
    sampling = ""
    if kind == "video":
        frames = _frames(frames, fps, config, param)
        job |= {"frames": frames, "fps": fps}
        job |= {"frame_pixels": config.max_video_pixels, "clip_pixels": config.max_clip_pixels}
        sampling = f":{frames}:{fps}"
    pixels, facts = await _decode(data, job, config, param)
    if kind == "video" and len(pixels) > config.max_frames:
        raise bad_request(
            f"fps={fps} gives {len(pixels)} frames, the limit is {config.max_frames}: ask for "
            f"fewer a second, or for a number of frames",
            "too_many_frames",
            param,
        )
    if isinstance(mended := facts.get("mended"), int) and mended > 0:
        facts["note"] = f"a clip has {mended} frames without a later time: they were spread"
    note = _told(facts)
    if facts.get("reduced"):
        sampling = f":{pixels.shape}"
    shot = Shot(kind, pixels, facts.get("metadata"))
    if config.guard is not None:
        await asyncio.to_thread(_guarded, shot, config, param)
    return Media(shot, hashlib.sha256(data).hexdigest() + f":{kind}{sampling}", note)


def _guarded(shot: Shot, config: ServerConfig, param: str | None) -> None:
    try:
        judge_of(str(config.guard), config.device).look([shot], tell=logger.warning)
    except MediaError as error:
        raise bad_request(str(error), "refused_media", param) from None


async def load_sound(
    source: str | bytes,
    config: ServerConfig,
    *,
    format: str | None = None,
    rate: int = 16_000,
    param: str | None = None,
) -> tuple[Tensor, int, str]:
    """Decode a sound that a client sent, such as the `data` of an `input_audio` part.

    `source` is base64, or as for `load_media`. Returns samples `[n]` float32 in -1..1 at `rate`
    samples per second, that rate, and a note on what of it was not heard, or "". `ApiError` is 4xx
    for a wrong source, and 429 if too many wait.
    """
    if isinstance(source, str) and ":" not in source[:16]:
        source = await asyncio.to_thread(decode_base64, source, config.max_body_bytes, param)
    data, claimed = await _bytes(source, config, param)
    try:
        found = sniff_sound("the sound", data[:_HEAD])
    except MediaError as error:
        raise ApiError(400, scrub(str(error)), code="invalid_media", param=param) from None
    claimed = claimed or (f"audio/{format.lower()}" if format else "")
    check_claim(claimed, found, "sound", param)
    samples, facts = await _decode(data, _job("sound", config), config, param)
    if facts.get("cut"):
        facts["note"] = "a sound is shorter than its header says: it is heard up to its end"
    pcm = await asyncio.to_thread(_resampled, samples, facts["runs"], rate)
    return pcm, rate, _told(facts)


def _told(facts: dict[str, Any]) -> str:
    """Return the note on an input, and log it."""
    note = str(facts.get("note", ""))
    if note:
        logger.warning("%s", note)
    return note


def _resampled(samples: Any, runs: list[list[int]], rate: int) -> Tensor:
    parts, start = [], 0
    for own, count in runs:
        parts.append((torch.from_numpy(samples[start : start + count]), int(own)))
        start += count
    return load_audio(iter(parts), rate)


async def _bytes(source: str | bytes, config: ServerConfig, param: str | None) -> tuple[bytes, str]:
    if isinstance(source, bytes):
        if len(source) > config.max_body_bytes:
            raise too_large(len(source), config.max_body_bytes, param)
        return source, ""
    scheme = source[:8].partition(":")[0].lower()
    if scheme == "data":
        claimed, data = await asyncio.to_thread(
            parse_data_url, source, config.max_body_bytes, param
        )
        return data, claimed
    if scheme in ("http", "https"):
        claimed, data = await fetch(source, config, param)
        return data, claimed
    raise bad_request(
        "media are given as data: URLs (data:image/png;base64,...); paths and other schemes "
        "are refused",
        "invalid_url",
        param,
    )


def _check_kind(found: str, wanted: Kind, param: str | None) -> None:
    known = found in IMAGE_KINDS or (wanted == "video" and found in VIDEO_KINDS)
    if not known:
        kinds = IMAGE_KINDS if wanted == "image" else (*VIDEO_KINDS, "gif", "webp")
        raise bad_request(
            f"the {wanted} is {found or 'of no kind that is known'}: give one of "
            f"{', '.join(kinds)}",
            "invalid_media",
            param,
        )


def _frames(
    frames: int | None, fps: float | None, config: ServerConfig, param: str | None
) -> int | None:
    if fps is not None and frames is not None:
        raise bad_request("give frames or fps, not both", "invalid_value", param)
    if fps is not None:
        return None
    wanted = config.frames if frames is None else frames
    if not 0 < wanted <= config.max_frames:
        raise bad_request(
            f"frames={wanted} is not allowed: give 1 to {config.max_frames}", "invalid_value", param
        )
    return wanted


def _job(kind: str, config: ServerConfig) -> dict[str, Any]:
    limits = {
        "bytes": max(config.max_body_bytes, config.remote_bytes),
        "pixels": config.max_pixels,
        "decoded_bytes": config.max_media_bytes,
        "duration": config.max_media_seconds,
        "seconds": config.decode_seconds,
    }
    memory = config.decode_bytes
    return {"kind": kind, "limits": limits, "seconds": config.decode_seconds, "memory": memory}


async def _decode(
    data: bytes, job: dict[str, Any], config: ServerConfig, param: str | None
) -> tuple[np.ndarray[Any, Any], dict[str, Any]]:
    try:
        return await decoders(config).decode(data, job)
    except MediaError as error:
        raise ApiError(400, scrub(str(error)), code="invalid_media", param=param) from None


def decoders(config: ServerConfig) -> Decoders:
    """Return the decoding processes; servers of the same limits share them."""
    key = (config.decode_workers, config.decode_queue, config.held_bytes)
    with _lock:
        if key not in _shared:
            _shared[key] = Decoders(*key)
        return _shared[key]


def read_upload(
    path: str, config: ServerConfig | None = None, frames: int | None = None
) -> tuple[Any, str]:
    """Decode an uploaded file in a process with limits, as the server decodes those of clients.

    Returns pixels of a clip `[T, H, W, 3]` or an image `[H, W, 3]`, and a note on what of it was
    not read, or "".
    """
    given = ServerConfig() if config is None else config
    data, kind = Path(path).read_bytes(), kind_of(path)
    try:
        media = asyncio.run(load_media(data, kind, given, frames=frames))
    except ApiError as error:
        raise MediaError(str(error)) from None
    return media.shot.pixels, media.note


@atexit.register
def close() -> None:
    """End all decoding processes; the next input starts them again."""
    with _lock:
        for each in _shared.values():
            each.close()
        _shared.clear()
