"""WAV files written while the sound comes: readable by others, exact, and honest about faults."""

from __future__ import annotations

import io
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmfast.core.errors import MediaError
from mmfast.frontends.audio.reader import load_audio
from mmfast.frontends.audio.wav import WavWriter, write_wav

SOUND = (0.3 * torch.randn(4001, generator=torch.Generator().manual_seed(0))).clamp(-0.99, 0.99)


class Pipe(io.RawIOBase):
    """Takes bytes and cannot seek."""

    def __init__(self) -> None:
        self.data = b""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.data += bytes(data)
        return len(data)


def test_what_others_read(tmp_path: Path) -> None:
    path = tmp_path / "out.wav"
    write_wav(path, SOUND, 22050)
    with wave.open(str(path)) as file:
        assert (file.getnchannels(), file.getsampwidth(), file.getframerate()) == (1, 2, 22050)
        raw = np.frombuffer(file.readframes(9999), "<i2")
    assert np.array_equal(raw, (SOUND.double() * 32768).round().numpy())
    samples, rate = soundfile.read(path, dtype="float32")
    assert rate == 22050
    assert torch.equal(torch.from_numpy(samples), load_audio(path, rate=22050))


def test_16_bit_sound_survives_and_float_sound_is_exact() -> None:
    sound = torch.arange(-32768, 32768) / 32768
    file = io.BytesIO()
    write_wav(file, sound, 16000)
    assert torch.equal(load_audio(file.getvalue()), sound)
    file = io.BytesIO()
    write_wav(file, SOUND, 16000, "float32")
    assert torch.equal(load_audio(file.getvalue()), SOUND)


@settings(max_examples=20)
@given(st.lists(st.integers(0, 900), max_size=6), st.sampled_from(["pcm16", "float32"]))
def test_any_split_gives_the_same_file(sizes: list[int], encoding: str) -> None:
    whole, parts = io.BytesIO(), io.BytesIO()
    sound = SOUND[: sum(sizes)] if sum(sizes) else SOUND[:0]
    write_wav(whole, sound, 16000, encoding)
    with WavWriter(parts, 16000, encoding) as wav:
        for chunk in sound.split(sizes) if len(sound) == sum(sizes) and sizes else (sound,):
            wav.write(chunk)
        assert wav.seconds == len(sound) / 16000
    assert parts.getvalue() == whole.getvalue()


def test_loud_samples_and_those_that_are_none() -> None:
    file = io.BytesIO()
    write_wav(file, torch.tensor([2.0, -2.0, torch.nan, torch.inf, 1.0]), 16000)
    assert load_audio(file.getvalue()).tolist() == [32767 / 32768, -1.0, 0.0, *[32767 / 32768] * 2]


def test_a_pipe_and_a_file_that_was_not_closed() -> None:
    pipe = Pipe()
    write_wav(pipe, SOUND, 16000)
    assert len(load_audio(pipe.data)) == len(SOUND)  # sizes say "to the end"
    file = io.BytesIO()
    wav = WavWriter(file, 16000)
    wav.write(SOUND)
    assert len(load_audio(file.getvalue())) == len(SOUND)  # readable while it grows
    wav.close()
    wav.close()
    with pytest.raises(MediaError, match="is closed"):
        wav.write(SOUND)


def test_behind_other_bytes() -> None:
    file = io.BytesIO(b"head")
    file.seek(4)
    write_wav(file, SOUND, 16000)
    assert file.getvalue()[:8] == b"headRIFF"
    assert len(load_audio(file.getvalue()[4:])) == len(SOUND)


def test_an_error_inside_leaves_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "out.wav"
    with pytest.raises(RuntimeError), WavWriter(path, 16000) as wav:
        wav.write(SOUND)
        raise RuntimeError
    with wave.open(str(path)) as file:
        assert file.getnframes() == len(SOUND)


class Left(Pipe):
    """Has no reader any more."""

    def write(self, _: Any) -> int:
        raise BrokenPipeError


def test_a_pipe_without_a_reader_is_none_of_the_faults_of_media() -> None:
    with pytest.raises(BrokenPipeError):
        WavWriter(Left(), 16000)
    wav = WavWriter(pipe := Pipe(), 16000)
    vars(pipe)["flush"] = lambda: Left().write(b"")
    with pytest.raises(BrokenPipeError):
        wav.close()
    del vars(pipe)["flush"]  # Python 3.13 would flush what it collects, and say what failed


@pytest.mark.parametrize(
    ("target", "rate", "encoding", "part"),
    [
        ("no/such/folder/x.wav", 16000, "pcm16", "cannot be written"),
        (".", 16000, "pcm16", "cannot be written"),
        (None, 16000, "pcm16", "cannot be written"),
        (io.StringIO(), 16000, "pcm16", "cannot be written"),
        (io.BytesIO(), 0, "pcm16", "no sampling rate"),
        (io.BytesIO(), 16000, "mp3", "'mp3'"),
    ],
)
def test_what_cannot_be_written(target: Any, rate: int, encoding: str, part: str) -> None:
    with pytest.raises(MediaError, match=part) as caught:
        write_wav(target, SOUND, rate, encoding)
    assert "\n" not in str(caught.value)


def test_four_gigabytes_are_refused_before_they_are_written() -> None:
    with WavWriter(io.BytesIO(), 16000) as wav:
        wav.samples = 2**31 - 100
        with pytest.raises(MediaError, match="4 GiB"):
            wav.write(SOUND)
        wav.samples = 0
