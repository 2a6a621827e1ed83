"""`data:` URLs: strict base64, measured before it is decoded, and claimed media types."""

from __future__ import annotations

import base64
import binascii
import re

from mmfast.serve.guard.errors import ApiError, bad_request

# Type and subtype, parameters, and base64; no other form is accepted.
_HEAD = re.compile(r"data:([a-z]+/[a-z0-9.+-]+)?((?:;[a-z0-9.+-]+=[^;,]*)*);base64,", re.IGNORECASE)
_LONGEST_HEAD = 256
# Media type -> kinds that the first bytes may show; other types are not checked.
_CLAIMS = {
    "image/png": ("png",), "image/jpeg": ("jpeg",), "image/jpg": ("jpeg",), "image/gif": ("gif",),
    "image/webp": ("webp",), "image/bmp": ("bmp",), "image/tiff": ("tiff",),
    "image/avif": ("avif",), "video/mp4": ("mp4",), "video/quicktime": ("mp4",),
    "video/webm": ("mkv",), "video/x-matroska": ("mkv",), "video/x-msvideo": ("avi",),
    "audio/wav": ("wav",), "audio/x-wav": ("wav",), "audio/mpeg": ("mp3",), "audio/mp3": ("mp3",),
    "audio/flac": ("flac",), "audio/ogg": ("ogg",),
}  # fmt: skip


def parse(url: str, most: int, param: str | None = None) -> tuple[str, bytes]:
    """Return the media type and the bytes of a `data:` URL; `ApiError` 400 or 413 if it is bad."""
    head = _HEAD.match(url[:_LONGEST_HEAD])
    if head is None:
        raise bad_request(
            "a data: URL has the form data:image/png;base64,...: give a media type and base64",
            "invalid_data_url",
            param,
        )
    return (head[1] or "").lower(), decode(url, most, param, head.end())


def decode(text: str, most: int, param: str | None = None, start: int = 0) -> bytes:
    """Decode strict base64 from `start` on; 400 where it is malformed, 413 where too large."""
    size = (len(text) - start) // 4 * 3
    if size - 2 > most:
        raise too_large(size, most, param)
    try:
        data = binascii.a2b_base64(text[start:].encode("ascii"), strict_mode=True)
    except (binascii.Error, UnicodeEncodeError):
        raise bad_request(
            "the base64 is broken: send it whole, without spaces", "invalid_base64", param
        ) from None
    if not data:
        raise bad_request("the media are empty: send them whole", "invalid_media", param)
    return data


def too_large(size: int, most: int, param: str | None) -> ApiError:
    """Return the error 413 for media of more than `most` bytes."""
    text = f"media of {size:,} bytes or more, the limit is {most:,}: cut or re-encode them"
    return ApiError(413, text, code="media_too_large", param=param)


def check_claim(claimed: str, kind: str, wanted: str, param: str | None = None) -> None:
    """Refuse media that differ from their media type or from the purpose of the field.

    `claimed` is the media type, `kind` follows from the first bytes (both "" where unknown), and
    `wanted` is `image`, `video` or `sound`.
    """
    top = claimed.partition("/")[0]
    allowed = {"image": ("image",), "video": ("video", "image"), "sound": ("audio", "video")}
    generic = top in ("", "application", "binary")  # application/octet-stream claims nothing
    right = generic or top in allowed[wanted]
    claims = _CLAIMS.get(claimed)
    if not right or (claims is not None and kind not in claims):
        raise bad_request(
            f"the {wanted} claims to be {claimed!r} but is {kind or 'something else'!s}: "
            f"give {wanted} data and its true media type",
            "media_type_mismatch",
            param,
        )


def encode(data: bytes, claimed: str) -> str:
    """Return the `data:` URL of some bytes."""
    return f"data:{claimed};base64,{base64.b64encode(data).decode()}"
