"""Kinds of sound files by their first bytes.

Imports no torch: the confined process that decodes the media of clients must stay light.
"""

from __future__ import annotations

from mmfast.core.errors import MediaError
from mmfast.frontends.source import IMAGE_KINDS, VIDEO_KINDS, MediaSource, magic_kind

# kind -> FFmpeg's demuxer; containers with a picture may hold sound, too
AUDIO_KINDS = {
    "wav": "wav", "w64": "w64", "aiff": "aiff", "au": "au", "caf": "caf", "flac": "flac",
    "wavpack": "wv", "mp3": "mp3", "aac": "aac", "ac3": "ac3", "amr": "amr",
}  # fmt: skip
OTHER = "other"  # unknown magic, which libsndfile may know (NIST, VOC, PAF, RF64, …)

# mp4: any brand, also those that announce pictures
_MAGIC = (
    ("wav", 0, b"RF64"), ("w64", 0, b"riff\x2e\x91\xcf\x11"), ("aiff", 8, b"AIFF"),
    ("aiff", 8, b"AIFC"), ("au", 0, b".snd"), ("caf", 0, b"caff"), ("wavpack", 0, b"wvpk"),
    ("ac3", 0, b"\x0bw"), ("amr", 0, b"#!AMR"), ("mp4", 4, b"ftyp"),
)  # fmt: skip


def sniff_sound(name: str, head: bytes) -> str:
    """Kind of a file by its first bytes (`AUDIO_KINDS`, `VIDEO_KINDS`, `OTHER`); no images."""
    kind = next((k for k, at, magic in _MAGIC if head[at : at + len(magic)] == magic), "")
    kind = kind or magic_kind(head)
    if kind in IMAGE_KINDS:
        raise MediaError(f"{name} is an image ({kind}): give a file with sound, such as a WAV")
    return kind if kind in AUDIO_KINDS or kind in VIDEO_KINDS else OTHER


def demuxer(source: MediaSource) -> str:
    """Return FFmpeg's demuxer for a sound file, read after an ID3 tag, which any kind may have."""
    if source.kind != "mp3":
        return AUDIO_KINDS.get(source.kind) or VIDEO_KINDS[source.kind]
    with source.open() as file:
        head = file.read(10)
        if head[:3] == b"ID3" and len(head) == 10:
            size = 0
            for byte in head[6:]:  # seven bits of each count
                size = size << 7 | byte & 0x7F
            file.seek(10 + size)
            behind = magic_kind(file.read(16))
            return AUDIO_KINDS.get(behind, "mp3")
    return "mp3"


def not_sound(source: MediaSource) -> MediaError:
    """Return the error for a file without sound."""
    with source.open() as file:
        head = file.read(12)
    return MediaError(
        f"{source.name} is no sound that can be read, it starts with {head!r}: give one of "
        f"{', '.join((*AUDIO_KINDS, *VIDEO_KINDS))}, or raw samples with encoding='pcm16'"
    )
