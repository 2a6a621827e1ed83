"""Any sound to float32 mono: containers, arrays, raw bytes, streams, rates and channels."""

from __future__ import annotations

import io
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from audio_factory import encoded, muxed, tone
from hypothesis import given, settings
from hypothesis import strategies as st

from mmfast.core.speech import Sound
from mmfast.frontends.audio.reader import decode_pcm, iter_audio, load_audio
from mmfast.frontends.source import Limits
from mmfast.ops.audio import resample
from mmfast.pipelines.speech import Spoken

WANTED = torch.from_numpy(tone(16000)[:, 0])


def near(got: torch.Tensor, within: float, shift: int = 0) -> None:
    assert got.dtype == torch.float32
    assert got.ndim == 1
    assert abs(len(got) - len(WANTED)) <= 1200
    inner = slice(1000, 6500)
    assert float((got[shift:][inner] - WANTED[inner]).abs().max()) <= within


@pytest.mark.parametrize(
    ("kind", "subtype", "within"),
    [
        ("WAV", "PCM_16", 1e-4),
        ("WAV", "PCM_24", 1e-4),
        ("WAV", "PCM_32", 1e-4),
        ("WAV", "PCM_U8", 1e-2),
        ("WAV", "FLOAT", 1e-4),
        ("WAV", "DOUBLE", 1e-4),
        ("WAV", "ULAW", 1e-2),
        ("FLAC", "PCM_16", 1e-4),
        ("OGG", "VORBIS", 2e-2),
        ("OGG", "OPUS", 2e-2),
        ("MP3", "MPEG_LAYER_III", 2e-2),
        ("AIFF", "PCM_16", 1e-4),
        ("AU", "PCM_16", 1e-4),
        ("CAF", "PCM_16", 1e-4),
        ("W64", "PCM_16", 1e-4),
        ("RF64", "PCM_16", 1e-4),
        ("NIST", "PCM_16", 1e-4),
        ("PAF", "PCM_16", 1e-4),
    ],
)
def test_sound_files(kind: str, subtype: str, within: float) -> None:
    near(load_audio(encoded(tone(48000, channels=2), 48000, kind, subtype)), within)


@pytest.mark.parametrize(
    ("container", "codec", "picture"),
    [
        ("mp4", "aac", False),
        ("mp4", "aac", True),
        ("ipod", "aac", False),
        ("matroska", "aac", True),
        ("webm", "libopus", False),
        ("mov", "pcm_s16le", False),
        ("avi", "pcm_s16le", True),
        ("adts", "aac", False),
        ("mpegts", "aac", False),
        ("flv", "aac", False),
        ("ac3", "ac3", False),
        ("wv", "wavpack", False),
    ],
)
def test_containers_and_sound_of_videos(container: str, codec: str, picture: bool) -> None:
    got = load_audio(muxed(container, codec, picture=picture))
    assert abs(len(got) - 8000) <= 1200
    level = float(got[1500:6500].square().mean().sqrt())
    assert level == pytest.approx(0.4 / 2**0.5, abs=0.01)


@pytest.mark.parametrize("rate", [8000, 11025, 16000, 22050, 44100, 96000, 192000])
@pytest.mark.parametrize("channels", [1, 2, 6])
def test_rates_and_channels(rate: int, channels: int) -> None:
    samples = tone(rate, channels=channels)
    near(load_audio(encoded(samples, rate)), 1e-4)
    for layout in (samples, samples.T):  # [n, channels] and [channels, n]
        near(load_audio((layout, rate)), 1e-4)
    other = load_audio((samples, rate), rate=24000)
    assert torch.equal(other, resample(torch.from_numpy(samples).mean(1), rate, 24000).clamp(-1, 1))


def test_channels_are_averaged() -> None:
    left, right = tone(16000)[:, 0], tone(16000, hertz=1000.0)[:, 0]
    both = np.stack([left, right], axis=1)
    expected = torch.from_numpy((left + right) / 2)
    torch.testing.assert_close(load_audio(both), expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(
        load_audio(encoded(both, 16000, subtype="FLOAT")), expected, atol=1e-6, rtol=0
    )


@pytest.mark.parametrize(
    ("change", "within"),
    [
        (lambda x: x, 0.0),
        (lambda x: x.astype(np.float64), 1e-7),
        (lambda x: x.astype(">f4"), 0.0),
        (lambda x: (x * 32768).round().astype(np.int16), 2e-5),
        (lambda x: (x * 32768).round().astype(">i2"), 2e-5),
        (lambda x: (x * 2147483648.0).astype(np.int32), 1e-6),
        (lambda x: (x * 128).round().astype(np.int8), 5e-3),
        (lambda x: (x * 128 + 128).round().astype(np.uint8), 5e-3),
        (lambda x: x.tolist(), 1e-6),
        (lambda x: torch.from_numpy(x), 0.0),
        (lambda x: torch.from_numpy(x).double().requires_grad_(), 1e-7),
        (lambda x: torch.from_numpy(x).half(), 1e-3),
        (lambda x: torch.from_numpy(x).bfloat16(), 5e-3),
        (lambda x: x[::-1][::-1], 0.0),
        (lambda x: np.broadcast_to(x[None], (2, len(x))), 1e-7),
        (lambda x: x[:, None], 0.0),
    ],
)
def test_types_and_layouts_of_arrays(change: Any, within: float) -> None:
    got = load_audio(change(tone(16000)[:, 0]))
    torch.testing.assert_close(got, WANTED, atol=within, rtol=0)


def test_where_the_rate_may_stand() -> None:
    samples = tone(8000)[:, 0]
    expected = load_audio((samples, 8000))
    for media in (
        (8000, samples),
        (np.int64(8000), samples),
        {"array": samples, "sampling_rate": 8000},
        {"raw": samples, "rate": 8000},
        (samples.tolist(), 8000.0),
    ):
        assert torch.equal(load_audio(media), expected)
    assert torch.equal(load_audio(samples, media_rate=8000), expected)
    assert torch.equal(load_audio([samples[:100], samples[100:]], media_rate=8000), expected)
    assert torch.equal(load_audio(samples), WANTED[:0].new_tensor(samples))  # the wanted one


def test_what_datasets_torchcodec_and_pipelines_give(tmp_path: Path) -> None:
    sound, data = torch.from_numpy(tone(8000)[:, 0]), encoded(tone(16000), 16000, subtype="FLOAT")
    expected = load_audio((sound, 8000))
    decoder = SimpleNamespace(
        get_all_samples=lambda: SimpleNamespace(data=sound[None], sample_rate=8000)
    )
    said = Spoken(sound, 8000, "hello")
    for media in (decoder, decoder.get_all_samples(), said, [said], Sound(sound, 8000, "hello")):
        assert torch.equal(load_audio(media), expected)
    (tmp_path / "x.wav").write_bytes(data)
    undecoded = {"bytes": None, "path": str(tmp_path / "x.wav")}
    for media in (undecoded, {"bytes": data, "path": "nowhere.wav"}):
        assert torch.equal(load_audio(media), WANTED)


def test_paths_and_file_objects(tmp_path: Path) -> None:
    data = encoded(tone(16000), 16000, subtype="FLOAT")
    path = tmp_path / "Tön e.xyz"  # the bytes say what it is, not the name
    path.write_bytes(data)
    file = io.BytesIO(data)
    for media in (path, str(path), file, memoryview(data), bytearray(data)):
        assert torch.equal(load_audio(media), WANTED)
    assert file.tell() == 0
    with path.open("rb") as opened:
        assert torch.equal(load_audio(opened), WANTED)


def test_a_tag_before_another_format() -> None:
    data = encoded(tone(16000), 16000, "FLAC")
    tagged = b"ID3\x04\0\0" + bytes([0, 0, 2, 5]) + bytes(261) + data
    assert torch.equal(load_audio(tagged), load_audio(data))


@pytest.mark.parametrize("encoding", ["pcm16", "float32", "pcm8", "mulaw", "alaw"])
def test_raw_bytes(encoding: str) -> None:
    samples = tone(16000)[:, 0]
    data = {
        "pcm16": lambda: (samples * 32768).round().astype("<i2").tobytes(),
        "float32": lambda: samples.astype("<f4").tobytes(),
        "pcm8": lambda: (samples * 128 + 128).round().astype("u1").tobytes(),
        "mulaw": lambda: encoded(samples, 16000, "RAW", "ULAW"),
        "alaw": lambda: encoded(samples, 16000, "RAW", "ALAW"),
    }[encoding]()
    near(load_audio(data, encoding=encoding), 1e-2)
    pieces = [data[at : at + 37] for at in range(0, len(data), 37)]  # samples lie across
    assert torch.equal(
        load_audio(iter(pieces), encoding=encoding), load_audio(data, encoding=encoding)
    )


def test_all_codes_of_g711_as_ffmpeg_reads_them() -> None:
    codes = bytes(range(256))
    for encoding, tag in (("mulaw", 7), ("alaw", 6)):
        fmt = np.array([tag, 1], "<u2").tobytes() + np.array([8000, 8000], "<u4").tobytes()
        fmt += np.array([1, 8], "<u2").tobytes()
        size = np.array([256], "<u4").tobytes()
        body = b"WAVEfmt \x10\0\0\0" + fmt + b"data" + size + codes
        wav = b"RIFF" + np.array([len(body)], "<u4").tobytes() + body
        assert torch.equal(decode_pcm(codes, encoding)[0], load_audio(wav, rate=8000))


def test_interleaved_channels_of_raw_bytes() -> None:
    both = np.stack([tone(16000)[:, 0], np.zeros(8000, np.float32)], axis=1)
    data = (both * 32768).round().astype("<i2").tobytes()
    got = load_audio(data, encoding="pcm16", channels=2)
    torch.testing.assert_close(got, WANTED / 2, atol=2e-5, rtol=0)


@settings(max_examples=30)
@given(
    st.sampled_from([8000, 16000, 44100, 48000]),
    st.lists(st.sampled_from([0, 1, 100, 441, 4000]), min_size=1, max_size=8),
)
def test_any_split_of_a_stream_gives_the_same_sound(rate: int, sizes: list[int]) -> None:
    samples = tone(rate, seconds=(sum(sizes) + 10) / rate)[: sum(sizes) + 10, 0]
    cuts = np.cumsum([0, *sizes, 10])
    chunks = [samples[a:b] for a, b in pairwise(cuts)]
    assert torch.equal(load_audio(iter(chunks), media_rate=rate), load_audio((samples, rate)))


def test_a_stream_comes_out_as_it_goes_in() -> None:
    """Never more than the reach of the filter behind, and without an end."""

    def endless() -> Iterator[np.ndarray[Any, Any]]:
        while True:
            yield tone(48000, 0.02)[:, 0]

    given, got = 0, 0
    for piece in iter_audio(endless(), media_rate=48000):
        given, got = given + 320, got + len(piece)
        assert given - got <= 18
        if given > 16000:
            break


def test_chunks_may_say_their_rate_and_change_it() -> None:
    first, second = tone(8000, 0.2)[:, 0], tone(48000, 0.3)[:, 0]
    got = load_audio(iter([(8000, first), (48000, second)]))
    assert torch.equal(got, torch.cat([load_audio((first, 8000)), load_audio((second, 48000))]))


def test_a_file_piece_by_piece() -> None:
    data = encoded(tone(44100, 3.0), 44100, "FLAC")
    pieces = list(iter_audio(data))
    assert len(pieces) > 4
    assert max(map(len, pieces)) < 16000
    assert torch.equal(torch.cat(pieces), load_audio(data))


def test_loud_samples_are_cut_at_full_scale() -> None:
    loud = tone(16000)[:, 0] * 5
    for media in (loud, encoded(loud, 16000, subtype="FLOAT"), (np.repeat(loud, 3), 48000)):
        got = load_audio(media)
        assert float(got.max()) == 1.0
        assert float(got.min()) == -1.0


def test_ten_minutes_and_ten_milliseconds() -> None:
    long = np.zeros(8000 * 600, np.int16)
    long[::1000] = 1000
    assert len(load_audio((long, 8000), rate=8000)) == 600 * 8000
    assert len(load_audio(encoded(long, 8000))) == 600 * 16000
    for rate in (8000, 44100, 192000):
        assert len(load_audio((tone(rate, 0.01), rate))) == 160
        assert len(load_audio(encoded(tone(rate, 0.01), rate))) in (160, 161)
    assert len(load_audio(np.zeros(1, np.float32))) == 1


def test_limits_can_be_raised_and_lowered() -> None:
    sound = (tone(16000, 2.0), 16000)
    assert len(load_audio(sound, limits=Limits(duration=2.0))) == 32000
