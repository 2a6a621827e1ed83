"""Reader of any sound to float32 mono at the wanted rate, whole or as a stream.

Samples may be of any usual type and layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from numbers import Real
from typing import Any

import av
import numpy as np
import torch
from torch import Tensor

from mmfast.core.errors import MediaError, warn
from mmfast.core.trace import Trace
from mmfast.frontends.audio.packets import OTHER, decoded_sound, mix_channels, sniff_sound
from mmfast.frontends.headers import cut_note
from mmfast.frontends.source import (
    DEFAULT_LIMITS,
    Budget,
    Limits,
    MediaSource,
    is_encoded,
    open_source,
)
from mmfast.ops.audio import Resampler, check_rate

LOUDEST = 16.0  # of float samples, 24 dB above full scale: more is a wrong scale
_CHANNELS = 64
_SCALES = {
    torch.uint8: (128.0, 128.0),
    torch.int8: (0.0, 128.0),
    torch.int16: (0.0, 32768.0),
    torch.int32: (0.0, 2147483648.0),
}  # type -> silence, full scale
ENCODINGS = {"pcm16": 2, "float32": 4, "pcm8": 1, "mulaw": 1, "alaw": 1}  # -> bytes of a sample


def to_mono(samples: Any, name: str = "the sound") -> Tensor:
    """Bring samples to float32 mono `[n]`; peaks above 1 are left to the caller.

    Takes a NumPy or torch array, or a list of numbers: `[n]`, `[channels, n]` or `[n, channels]`
    (the shorter axis is the channels, averaged); float in -1..1, or int8, int16, int32, or uint8
    around 128. A MediaError names another shape, type or scale, and NaN or infinite samples.
    """
    return check(mix(samples, name), name)


def mix(samples: Any, name: str, axis: int | None = None) -> Tensor:
    """`to_mono` without a check of the values; `axis` is that of the channels, if known."""
    pcm = _tensor(samples, name)
    if pcm.ndim == 1:
        return _scaled(pcm, name)
    if pcm.ndim == 2:
        channels = axis if axis is not None else int(pcm.shape[0] > pcm.shape[1])
        if 1 <= pcm.shape[channels] <= _CHANNELS:
            mixed: Tensor = mix_channels(_scaled(pcm, name).movedim(channels, 0))
            return mixed
        if pcm.numel() == 0:
            return torch.zeros(0)
    raise MediaError(
        f"{name} has shape {tuple(pcm.shape)}: one sound is [n], [channels, n] or [n, channels] "
        f"with at most {_CHANNELS} channels"
    )


def check(pcm: Tensor, name: str, before: float = 0.0, rate: int = 0) -> Tensor:
    """Return float samples `[n]` if finite and plausible; messages count from `before` seconds."""
    if not pcm.numel():
        return pcm
    low, high = torch.aminmax(pcm)
    if bool(torch.isfinite(low) & torch.isfinite(high)):
        if max(-float(low), float(high)) > LOUDEST:
            raise MediaError(
                f"{name} has float samples up to {max(-float(low), float(high)):g}, full scale is "
                f"1.0: divide by 32768 if they were 16-bit integers"
            )
        return pcm
    at = int((~torch.isfinite(pcm)).nonzero()[0, 0])
    where = f"at {before + at / rate:.3f} s" if rate else f"sample {at}"
    raise MediaError(
        f"{name} has samples that are no numbers (NaN or infinite), the first {where}: "
        f"repair it, or replace them with numpy.nan_to_num"
    )


def _tensor(samples: Any, name: str) -> Tensor:
    if isinstance(samples, Tensor):
        return samples.detach().cpu()  # filters of resampling lie there
    try:
        array = np.asarray(samples)
        if array.dtype.kind not in "iuf" or array.dtype.itemsize > 8:
            raise TypeError
        # A copy in native order: torch takes neither read-only nor foreign ones.
        return torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("=")))
    except (TypeError, ValueError, RuntimeError, OverflowError):
        shown = getattr(getattr(samples, "dtype", None), "name", type(samples).__name__)
        raise MediaError(
            f"{name} is no array of samples ({shown}): give float32 in -1..1, int16, int32 or "
            f"uint8, [n] or [channels, n]"
        ) from None


def _scaled(pcm: Tensor, name: str) -> Tensor:
    if pcm.dtype in _SCALES:
        silence, full = _SCALES[pcm.dtype]
        wide = pcm.double() if pcm.dtype is torch.int32 else pcm.float()
        return ((wide - silence) / full).float()
    if not pcm.is_floating_point():
        raise MediaError(
            f"{name} has samples of type {str(pcm.dtype).removeprefix('torch.')}, which has no "
            f"customary full scale: convert it to float32 in -1..1, int16, int32 or uint8"
        )
    return pcm.float()


def decode_pcm(data: bytes, encoding: str, channels: int = 1) -> tuple[Tensor, bytes]:
    """Decode raw little-endian samples (pcm8 is unsigned, mulaw and alaw are G.711) to mono.

    Returns float32 `[n]`, and the bytes of an incomplete sample, which belong to the next chunk.
    """
    if encoding not in ENCODINGS:
        raise MediaError(f"encoding {encoding!r} is unknown; choices: {', '.join(ENCODINGS)}")
    if not isinstance(channels, int) or not 1 <= channels <= _CHANNELS:
        raise MediaError(f"channels={channels!r}: give a number from 1 to {_CHANNELS}")
    each = ENCODINGS[encoding] * channels
    whole = len(data) // each * each
    raw = np.frombuffer(data[:whole], dtype={2: "<i2", 4: "<f4", 1: "u1"}[ENCODINGS[encoding]])
    if encoding in ("mulaw", "alaw"):
        raw = _g711(encoding)[raw]
    pcm = _scaled(torch.from_numpy(np.array(raw, dtype=raw.dtype.newbyteorder("="))), "the sound")
    mixed: Tensor = mix_channels(pcm.view(-1, channels).T)
    return mixed, data[whole:]


@cache
def _g711(encoding: str) -> Any:
    """16-bit values of all 256 codes (ITU-T G.711), by FFmpeg."""
    codec: Any = av.CodecContext.create(f"pcm_{encoding}", "r")
    codec.sample_rate, codec.layout = 8000, "mono"
    return codec.decode(av.Packet(bytes(range(256))))[0].to_ndarray().flatten()


Piece = tuple[Tensor, int]  # samples [n] float32 mono, their rate
_SECONDS = 0.5  # of a piece: a packet may be 1 ms


def sound_pieces(
    source: MediaSource, limits: Limits, trace: Trace | None = None
) -> Iterator[Piece]:
    """Decode a file without its damaged packets; the rate may change between pieces.

    Behind a file that is cut short, a warning tells; `trace` notes it, too.
    """
    seconds, rate = 0.0, 0
    waiting: list[Tensor] = []
    for pcm, at in decoded_sound(source, limits):
        if waiting and (at != rate or sum(map(len, waiting)) >= rate * _SECONDS):
            yield torch.cat(waiting), rate
            waiting = []
        rate = check_rate(at, f"the rate of {source.name}")
        waiting.append(check(torch.from_numpy(pcm), source.name, seconds, rate))
        seconds += len(pcm) / rate
    if waiting:
        yield torch.cat(waiting), rate
    if note := cut_note(source):
        (warn if trace is None else trace.warn)(note)


# Keys of a mapping; those of a file are what datasets has of a sound that is not decoded.
_ARRAYS, _RATES = ("array", "raw", "samples", "bytes", "path"), ("sampling_rate", "rate")
_HELD = (("pcm", "rate"), ("data", "sample_rate"))  # of `Spoken` and `Sound`, and of torchcodec


@dataclass(frozen=True)
class _SampleOptions:
    """The caller's description of samples without a header."""

    rate: int
    encoding: str | None
    channels: int


_WHOLE = _SampleOptions(16_000, None, 1)


def load_audio(
    media: object,
    rate: int = 16_000,
    *,
    media_rate: int | None = None,
    encoding: str | None = None,
    channels: int = 1,
    limits: Limits = DEFAULT_LIMITS,
    trace: Trace | None = None,
) -> Tensor:
    """Read one sound to its end: `[n]` float32 in -1..1 at `rate` samples per second.

    Takes a path, bytes or file object of a sound or a video (wav, flac, ogg, mp3, m4a, mp4, mkv,
    …); an array `[n]`, `[channels, n]` or `[n, channels]` of float in -1..1, int16, int32, int8 or
    uint8; `(array, rate)` in either order; a mapping with "array" and "sampling_rate", or with the
    "bytes" or the "path" of a file; a decoder of torchcodec; what a pipeline said; raw bytes, with
    `encoding` ("pcm16", "float32", "pcm8", "mulaw", "alaw") and interleaved `channels`; or an
    iterator of arrays, of `(array, rate)`, or of raw bytes. Media without a header have
    `media_rate`, else `rate`. Channels are averaged, but where they cancel each other, which would
    be silence, one of them is taken; peaks above full scale are cut. A file that is cut short is
    read up to there, with a warning, which `trace` notes.

    Raises:
        MediaError: It is not sound, damaged beyond use, empty, too long, of an impossible rate or
            scale, has samples that are NaN or infinite, or is a network address.
    """
    given = _given(rate, media_rate, encoding, channels)
    budget = Budget(limits, "the sound")
    parts, count = [], 0
    for part in _resampled(_timed(_pieces(media, given, limits, trace), limits, budget), rate):
        parts.append(part)
        count += len(part)
        if 4 * count > limits.decoded_bytes:
            raise MediaError(
                f"the sound needs more than {limits.decoded_bytes:,} bytes at {rate:,} Hz: cut it "
                f"into parts, or raise Limits(decoded_bytes=...)"
            )
    if not count:
        raise MediaError("the sound has no samples: record it again")
    return torch.cat(parts)


def iter_audio(
    media: object,
    rate: int = 16_000,
    *,
    media_rate: int | None = None,
    encoding: str | None = None,
    channels: int = 1,
    limits: Limits = DEFAULT_LIMITS,
) -> Iterator[Tensor]:
    """Yield pieces `[n]` of `load_audio` as soon as they are certain, in bounded memory.

    A file gives half a second at a time. An iterator of chunks may be endless: its duration is not
    limited, and its samples are out at most 2 ms later. The joined pieces equal `load_audio`.
    """
    given = _given(rate, media_rate, encoding, channels)
    pieces = _pieces(media, given, limits.untimed())
    return (part for part in _resampled(pieces, rate) if len(part))


def _given(
    rate: int, media_rate: int | None, encoding: str | None, channels: int
) -> _SampleOptions:
    check_rate(rate)
    own = rate if media_rate is None else check_rate(media_rate, "media_rate")
    if encoding is not None and encoding not in ENCODINGS:
        raise MediaError(f"encoding {encoding!r} is unknown; choices: {', '.join(ENCODINGS)}")
    return _SampleOptions(own, encoding, channels)


def _pieces(
    media: Any, given: _SampleOptions, limits: Limits, trace: Trace | None = None
) -> Iterator[Piece]:
    media, given = _unwrapped(media, given)
    if is_encoded(media):
        if given.encoding is None:
            return sound_pieces(open_source(media, limits, sniff_sound), limits, trace)
        return _raw_pieces(media, given, limits)
    if isinstance(media, Iterable) and not _is_samples(media):
        return _stream_pieces(media, given)
    return iter([(to_mono(media), given.rate)])


def is_recording(media: Any) -> bool:
    """Return True for a whole sound, in any form that `load_audio` takes but an iterator."""
    return is_encoded(media) or _is_samples(media) or _unwrapped(media, _WHOLE)[0] is not media


def is_batch(media: Any) -> bool:
    """Return True for a list of sounds, which may be empty, and not of the samples of one."""
    return isinstance(media, list) and not (media and _is_samples(media))


def _is_samples(media: Any) -> bool:
    if hasattr(media, "__array__") or isinstance(media, Tensor):
        return True
    return isinstance(media, list | tuple) and (not media or isinstance(media[0], Real))


def _unwrapped(media: Any, given: _SampleOptions) -> tuple[Any, _SampleOptions]:
    """Take the rate off `(array, rate)`, `(rate, array)`, mappings, and objects that hold both."""
    media = media.get_all_samples() if hasattr(media, "get_all_samples") else media
    held = next((names for names in _HELD if all(hasattr(media, name) for name in names)), None)
    if held is not None:
        media = tuple(getattr(media, name) for name in held)
    if isinstance(media, Mapping):
        array = next((media[key] for key in _ARRAYS if media.get(key) is not None), None)
        rate = next((media[key] for key in _RATES if media.get(key) is not None), given.rate)
        if array is None:
            keys = ", ".join(sorted(map(str, media))[:8])
            raise MediaError(f"a sound as a mapping has 'array' and 'sampling_rate', not: {keys}")
    elif isinstance(media, tuple) and [_is_rate(m, media) for m in media] in _ONE_NUMBER:
        array, rate = media if _is_rate(media[1], media) else media[::-1]
    else:
        return media, given
    return array, replace(given, rate=check_rate(rate))


_ONE_NUMBER = ([True, False], [False, True])


def _is_rate(part: Any, pair: tuple[Any, ...]) -> bool:
    """Return True for a number, or for text beside samples, which was meant as one."""
    return isinstance(part, Real) or (isinstance(part, str) and any(map(_is_samples, pair)))


def _raw_pieces(media: Any, given: _SampleOptions, limits: Limits) -> Iterator[Piece]:
    source = open_source(media, limits, lambda *_: OTHER)
    with source.open() as file:
        data = file.read()
    pcm, rest = decode_pcm(data, str(given.encoding), given.channels)
    if rest:
        raise MediaError(
            f"{source.name} of {len(data):,} bytes is no whole number of {given.encoding} samples "
            f"in {given.channels} channels, {len(rest)} are left over: check encoding and channels"
        )
    return iter([(to_mono(pcm, source.name), given.rate)])


def _stream_pieces(chunks: Iterable[Any], given: _SampleOptions) -> Iterator[Piece]:
    """Read chunks of a stream; a sample may lie across two chunks; half a sample is dropped."""
    rest, seconds = b"", 0.0
    for chunk in chunks:
        array, mine = _unwrapped(chunk, given)
        name = f"the chunk at {seconds:.3f} s"
        if isinstance(array, bytes | bytearray | memoryview):
            if mine.encoding is None:
                raise MediaError(
                    f"{name} is bytes: say encoding='pcm16' if they are raw samples, or join the "
                    f"chunks if they are a file"
                )
            pcm, rest = decode_pcm(rest + bytes(array), mine.encoding, mine.channels)
        else:
            pcm = array
        pcm = to_mono(pcm, name)
        seconds += len(pcm) / mine.rate
        yield pcm, mine.rate


def _timed(pieces: Iterator[Piece], limits: Limits, budget: Budget) -> Iterator[Piece]:
    """Refuse sound that lasts too long or takes too long to decode."""
    seconds = 0.0
    for pcm, rate in pieces:
        seconds += len(pcm) / rate
        limits.check_duration("the sound", seconds)
        budget.clock()
        yield pcm, rate


def _resampled(pieces: Iterator[Piece], rate: int) -> Iterator[Tensor]:
    """Bring pieces to one rate; where theirs changes, a new filter starts."""
    stage: Resampler | None = None
    state: Any = None
    for pcm, given in pieces:
        if stage is None or stage.source != given:
            if stage is not None:
                yield stage.finish(state)[0].clamp(-1.0, 1.0)
            stage = Resampler(given, rate)
            state = stage.start()
        state, out = stage.step(state, pcm[None])
        yield out[0].clamp(-1.0, 1.0)
    if stage is not None:
        yield stage.finish(state)[0].clamp(-1.0, 1.0)
