"""Sound that is none, or not all of it: one line that says so, or what is left; never a hang."""

from __future__ import annotations

import io
import os
import random
import struct
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from audio_factory import encoded, muxed, tone

from mmfast.core.errors import MediaError
from mmfast.core.trace import Trace
from mmfast.frontends.audio.reader import iter_audio, load_audio
from mmfast.frontends.source import Limits

WAV = encoded(tone(16000), 16000)
FILES = {
    "wav": lambda: WAV,
    "flac": lambda: encoded(tone(44100), 44100, "FLAC"),
    "ogg": lambda: encoded(tone(44100), 44100, "OGG", "VORBIS"),
    "mp3": lambda: encoded(tone(44100), 44100, "MP3"),
    "m4a": lambda: muxed("ipod", "aac"),
    "mkv": lambda: muxed("matroska", "aac", picture=True),
    "ts": lambda: muxed("mpegts", "aac"),
}


def refused(read: Callable[[], Any], *parts: str) -> None:
    with pytest.raises(MediaError) as caught:
        read()
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 500
    for part in parts:
        assert part in message, message


def usable(pcm: torch.Tensor) -> bool:
    return bool(torch.isfinite(pcm).all()) and float(pcm.abs().max()) <= 1.0 and len(pcm) > 0


@pytest.mark.parametrize(
    ("data", "parts"),
    [
        (b"", ("empty",)),
        (b"hello, this is no sound at all" * 9, ("no sound that can be read", "hello, this")),
        (b"#EXTM3U\n#EXTINF:9,\nhttp://127.0.0.1:9/x.ts\n", ("no sound that can be read",)),
        (bytes(5000), ("no sound that can be read", "encoding='pcm16'")),
        (b"\x89PNG\r\n\x1a\n" + bytes(99), ("is an image (png)", "with sound")),
        (WAV[:44], ("no sound",)),
        (WAV[:20], ()),
        (b"RIFF\x10\0\0\0WAVEjunkjunkjunk", ()),
        (b"fLaC" + bytes(40), ()),
        (b"OggS" + bytes(60), ()),
        (b"ID3\x04\0\0\x7f\x7f\x7f\x7f", ()),
        (b"\xff\xfb\x90\x64" + bytes(40), ()),
        (muxed("mp4", "aac", picture=True)[:600], ()),
    ],
)
def test_what_is_no_sound(data: bytes, parts: tuple[str, ...]) -> None:
    refused(lambda: load_audio(data), *parts)
    refused(lambda: list(iter_audio(data)), *parts)


def test_a_video_without_sound(tmp_path: Path) -> None:
    import av

    path = tmp_path / "mute.mp4"
    with av.open(str(path), "w") as out:
        video = out.add_stream("mpeg4", rate=10, width=32, height=32)
        frame = av.VideoFrame.from_ndarray(np.zeros((32, 32, 3), np.uint8), format="rgb24")
        out.mux(video.encode(frame))
        out.mux(video.encode(None))
    refused(lambda: load_audio(path), "mute.mp4", "no sound", "only video", "audio track")


def test_addresses_and_paths(tmp_path: Path) -> None:
    refused(lambda: load_audio("http://127.0.0.1:9/a.wav"), "network sources are off")
    refused(lambda: load_audio("file:///etc/passwd"), "file:// addresses are refused")
    refused(lambda: load_audio("data:audio/wav;base64,AAAA"), "data: addresses")
    refused(lambda: load_audio(tmp_path / "none.wav"), "none.wav", "does not exist")
    refused(lambda: load_audio(tmp_path), "is a directory")
    refused(lambda: load_audio("a\0b.wav"), "not a path")
    refused(lambda: load_audio(io.StringIO("text")), "text, not bytes")


@pytest.mark.parametrize(
    ("media", "parts"),
    [
        (None, ("NoneType",)),
        (object(), ("no array",)),
        (3.5, ("shape ()",)),
        ("", ("path is empty",)),
        ([], ("no samples",)),
        (np.zeros(0, np.float32), ("no samples",)),
        (np.zeros((2, 0), np.float32), ("no samples",)),
        (iter([]), ("no samples",)),
        (iter([np.zeros(0, np.float32)] * 3), ("no samples",)),
        (np.zeros((2, 3, 4), np.float32), ("shape (2, 3, 4)", "[channels, n]")),
        (np.zeros((300, 400), np.float32), ("shape (300, 400)",)),
        (np.zeros(9, bool), ("bool",)),
        (np.zeros(9, complex), ("complex",)),
        (np.zeros(9, np.int64), ("int64", "full scale")),
        (np.array(["a", "b"]), ("no array",)),
        (np.full(9, 12000.0), ("12000", "divide by 32768")),
        (["one", "two"], ("str",)),
        ([b"one", b"two"], ("is bytes", "encoding='pcm16'")),
        ({"path": "x.wav"}, ("'x.wav' does not exist",)),
        ({"name": "x.wav"}, ("'array'", "name")),
        ((np.zeros(9, np.float32), 0), ("0 is no sampling rate",)),
        ((np.zeros(9, np.float32), 1e9), ("no sampling rate",)),
        ((np.zeros(9, np.float32), float("nan")), ("no sampling rate",)),
        ((np.zeros(9, np.float32), "16000"), ("the rate '16000' is no sampling rate",)),
        (("16 kHz", torch.zeros(9)), ("'16 kHz' is no sampling rate",)),
    ],
)
def test_what_is_no_array_of_samples(media: Any, parts: tuple[str, ...]) -> None:
    refused(lambda: load_audio(media), *parts)


def test_rates_and_encodings_that_are_none() -> None:
    refused(lambda: load_audio(WAV, rate=0), "the rate 0")
    refused(lambda: load_audio(WAV, rate="16k"), "'16k'")  # type: ignore[arg-type]
    refused(lambda: load_audio([0.0], media_rate=-1), "media_rate -1")
    refused(lambda: load_audio(b"ab", encoding="mp3"), "'mp3'", "pcm16")
    refused(lambda: load_audio(b"ab", encoding="pcm16", channels=0), "channels=0")
    refused(lambda: iter_audio([0.0], rate=1), "the rate 1")  # at once, not at the first piece


def test_odd_byte_counts() -> None:
    refused(lambda: load_audio(b"abc", encoding="pcm16"), "no whole number", "1 are left over")
    refused(lambda: load_audio(b"a" * 10, encoding="pcm16", channels=2), "2 are left over")
    assert len(load_audio(iter([b"a", b"bc", b"", b"de"]), encoding="pcm16")) == 2
    refused(lambda: load_audio(iter([b"a"]), encoding="pcm16"), "no samples")
    odd = bytearray(WAV + b"x")  # the header promises a byte more, which is half a sample
    odd[40:44] = (len(WAV) - 43).to_bytes(4, "little")
    assert len(load_audio(bytes(odd))) == 8000


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_samples_that_are_no_numbers(bad: float) -> None:
    samples = tone(16000)[:, 0].copy()
    samples[[4000, 4100]] = bad
    refused(lambda: load_audio(samples), "no numbers", "sample 4000")
    data = encoded(samples, 16000, subtype="FLOAT")
    refused(lambda: load_audio(data), "no numbers", "at 0.250 s")
    chunks = [samples[:3000], samples[3000:]]
    refused(lambda: load_audio(iter(chunks)), "the chunk at 0.188 s", "sample 1000")
    raw = samples.astype("<f4").tobytes()
    refused(lambda: load_audio(raw, encoding="float32"), "no numbers")


@pytest.mark.parametrize("name", ["silence", "noise", "clipped", "offset", "faint"])
def test_poor_sound_is_sound(name: str) -> None:
    noise = np.random.default_rng(0).standard_normal(8000).astype(np.float32)
    samples = {
        "silence": np.zeros(8000, np.float32),
        "noise": 0.3 * noise,
        "clipped": np.clip(20 * noise, -1, 1),
        "offset": tone(16000)[:, 0] + 0.5,
        "faint": 1e-30 * noise,
    }[name].astype(np.float32)
    for media in (samples, encoded(samples, 16000, subtype="FLOAT"), (samples, 44100)):
        assert usable(load_audio(media))


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("share", [0.05, 0.3, 0.7, 0.97])
def test_truncated_files(kind: str, share: float) -> None:
    data, trace = FILES[kind](), Trace()
    try:
        with warnings.catch_warnings(record=True, action="always") as told:
            got = load_audio(data[: int(len(data) * share)], trace=trace)
    except MediaError as error:
        assert "\n" not in str(error)
        assert share < 0.97 or kind in ("m4a", "ogg")  # index at the end; a single page
    else:
        assert usable(got)
        assert len(got) < 9300
        assert len(told) == (kind in ("wav", "mkv"))  # the others do not say how long they are
        assert trace.notes == [str(each.message) for each in told]


def riff(*chunks: tuple[bytes, bytes], size: int | None = None, name: bytes = b"RIFF") -> bytes:
    """A WAV of chunks; `size` is what that of its samples declares, that is the last one."""
    body = b"WAVE"
    for number, (kind, data) in enumerate(chunks, 1):
        length = len(data) if number < len(chunks) or size is None else size
        body += (
            kind
            + struct.pack("<I", length)
            + data
            + b"\0" * (number < len(chunks) and len(data) % 2)
        )
    return name + struct.pack("<I", len(body)) + body


def test_a_wav_that_is_cut_short_is_heard_with_a_note(tmp_path: Path) -> None:
    """Once for a file, however it is read; not of writers that could not know how long it gets."""
    fmt = (b"fmt ", struct.pack("<HHIIHH", 1, 1, 16_000, 32_000, 2, 16))
    pcm = (b"data", (tone(16_000)[:, 0] * 32_767).astype("<i2").tobytes())  # 8,000 samples
    sizes = struct.pack("<QQQI", 0, 20_000, 0, 0)
    path = tmp_path / "call.wav"
    for data, declared in (
        (riff(fmt, pcm, size=20_000), 20_044),
        (riff((b"junk", b"odd"), fmt, pcm, size=16_001), 16_057),
        (riff((b"ds64", sizes), fmt, pcm, size=0xFFFFFFFF, name=b"RF64"), 20_080),
    ):
        path.write_bytes(data)
        trace, line = Trace(), f"'{path}' is truncated: its header declares {declared:,} bytes"
        with pytest.warns(UserWarning) as told:
            assert len(load_audio(path, trace=trace)) == 8000
            assert sum(map(len, iter_audio(path))) == 8000
        (note,) = trace.notes
        assert note.endswith("it is heard up to there") and "\n" not in note
        assert [str(each.message) for each in told] == [note] * 2 and note.startswith(line)
    for data in (
        riff(fmt, pcm, (b"LIST", b"tail")),
        *(riff(fmt, pcm, size=size) for size in (0, 0x7FFFF000, 0x80000000, 0xFFFFFFFF)),
    ):
        assert len(load_audio(data)) == 8000


@pytest.mark.filterwarnings("ignore:.* is truncated")
@pytest.mark.parametrize("kind", FILES)
def test_damaged_files(kind: str) -> None:
    """Random bytes anywhere: a message, or sound of a bounded length, soon."""
    whole, draw = FILES[kind](), random.Random(kind)
    for _ in range(25):
        data = bytearray(whole)
        for _ in range(draw.choice([1, 10, 200])):
            data[draw.randrange(len(data))] = draw.randrange(256)
        begun = time.process_time()
        try:
            got = load_audio(bytes(data), limits=Limits(duration=60.0))
        except MediaError as error:
            assert "\n" not in str(error)
        else:
            assert usable(got)
        assert time.process_time() - begun < 20


def test_limits() -> None:
    long = (tone(16000, 3.0), 16000)
    for media in (long, encoded(*long), iter([long] * 3), iter([long[0][:, 0]] * 10**6)):
        refused(lambda m=media: load_audio(m, limits=Limits(duration=2.0)), "lasts", "duration=")
    refused(lambda: load_audio(WAV, limits=Limits(bytes=100)), "16,044 bytes", "Limits(bytes=")
    refused(lambda: load_audio(long, limits=Limits(decoded_bytes=1000)), "decoded_bytes")
    header = bytearray(WAV)  # a header that promises a day
    header[40:44] = (0x7FFFFFF0).to_bytes(4, "little")
    assert len(load_audio(bytes(header), limits=Limits(duration=10.0))) == 8000


@pytest.mark.parametrize("rate", [0, 1, 999, 4_000_000_000])
def test_headers_of_impossible_rates(rate: int) -> None:
    header = bytearray(WAV)
    header[24:28] = rate.to_bytes(4, "little")
    refused(lambda: load_audio(bytes(header)))


def test_a_pipe_is_no_file(tmp_path: Path) -> None:
    """Reading one would wait for ever."""
    os.mkfifo(tmp_path / "pipe.wav")
    refused(lambda: load_audio(tmp_path / "pipe.wav"), "not a regular file")


def test_a_stream_that_never_says_anything_does_not_hang() -> None:
    def mute() -> Iterator[Any]:
        while True:
            yield np.zeros(0, np.float32)

    refused(lambda: load_audio(mute(), limits=Limits(seconds=0.2)), "took over 0.2 s")


def test_an_error_of_the_caller_s_own_stream_is_his() -> None:
    def broken() -> Iterator[Any]:
        yield np.zeros(100, np.float32)
        raise RuntimeError("the microphone is gone")

    with pytest.raises(RuntimeError, match="microphone"):
        load_audio(broken())
