"""`mmfast codec`: sound to a file of codes and back, embedded and from a folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from codec_cases import mimi, pocket_tokenizer
from safetensors.torch import load_file

from mmfast.cli import main
from mmfast.frontends.audio.reader import load_audio
from mmfast.frontends.audio.wav import write_sound
from mmfast.models.loading import load_codec

Run = Callable[..., tuple[int, str, str]]
FAST_MIMI = partial(mimi, sampling_rate=1600, frame_rate=100.0)  # at a rate that files can have
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*args: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as left:
            main(["codec", *map(str, args)])
        return (int(left.value.code or 0), *capsys.readouterr())

    return call


@pytest.fixture
def tone(tmp_path: Path) -> Path:
    pcm = 0.3 * torch.sin(0.1 * torch.arange(16_000))
    write_sound(tmp_path / "tone.wav", pcm, 16_000)
    return tmp_path / "tone.wav"


def test_codes_are_written_and_read(run: Run, tone: Path, tmp_path: Path) -> None:
    codec = load_codec()
    code, printed, _ = run(tone, "-o", tmp_path / "codes.safetensors", "--json")
    found = json.loads(printed)
    assert code == 0 and found["frames"] == 25 and found["bits_per_second"] == 500.0
    codes = load_file(tmp_path / "codes.safetensors")["codes"]
    assert torch.equal(codes, codec.encode(load_audio(tone, 16_000))[0])
    assert run(tmp_path / "codes.safetensors", "-o", tmp_path / "back.wav")[0] == 0
    assert run(tone, "-o", tmp_path / "through.wav")[0] == 0
    back, through = (load_audio(tmp_path / f"{name}.wav") for name in ("back", "through"))
    assert torch.equal(back, through) and len(back) == 16_000 and back.std() > 0.01


@pytest.mark.parametrize("build", [FAST_MIMI, pocket_tokenizer])
def test_a_codec_of_a_folder(build: Callable[[], object], run: Run, tmp_path: Path) -> None:
    model = build()
    model.save_pretrained(tmp_path / "codec")  # type: ignore[attr-defined]
    pcm = torch.randn(9600, generator=torch.Generator().manual_seed(0)).clamp(-1, 1) * 0.2
    write_sound(tmp_path / "in.wav", pcm, 9600)
    place = ("--model", tmp_path / "codec", "--device", "cpu")
    code, printed, _ = run(tmp_path / "in.wav", "-o", tmp_path / "c.safetensors", *place, "--json")
    found, codec = json.loads(printed), load_codec(model)
    assert code == 0 and found["codec"] == codec.name and found["frames"] == 100  # type: ignore[attr-defined]
    codes = load_file(tmp_path / "c.safetensors")["codes"]
    wanted = codec.encode(load_audio(tmp_path / "in.wav", codec.sample_rate))[0]
    torch.testing.assert_close(codes, wanted, rtol=0, atol=1e-5)


def test_wrong_files_are_one_line(run: Run, tone: Path, tmp_path: Path) -> None:
    codes = tmp_path / "codes.safetensors"
    assert run(tone, "-o", codes)[0] == 0
    pocket_tokenizer().save_pretrained(tmp_path / "codec")
    (tmp_path / "broken.safetensors").write_bytes(b"no")
    (tmp_path / "folder.safetensors").mkdir()
    for args, told in (
        ((codes, "-o", tmp_path / "b.safetensors"), "both files are .safetensors"),
        ((codes, "-o", tmp_path / "b.wav", "--model", tmp_path / "codec"), "holds codes of"),
        ((tmp_path / "broken.safetensors", "-o", tmp_path / "b.wav"), "holds no codes"),
        ((tone, "-o", tmp_path / "no" / "b.safetensors"), "cannot be written"),
        ((tone, "-o", tmp_path / "folder.safetensors"), "Is a directory"),
        ((tone, "-o", tmp_path / "b.wav", "--codebooks", 3), "takes no options"),
        ((tone, "-o", tmp_path / "b.wav", "--model", tmp_path), "config.json"),
    ):
        code, printed, error = run(*args)
        assert (code, printed, error.count("\n")) == (2, "", 1) and told in error, error
