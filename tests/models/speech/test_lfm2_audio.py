"""LFM2-Audio on stock classes, beside what the package liquid-audio gave for the same weights."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import lfm2_audio_checkpoint as checkpoint
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import mmfast
from mmfast.core.errors import ModelError, SpecError
from mmfast.core.speech import Chatter, Listener, Speaker, Turn
from mmfast.models.speech.lfm2_audio import CODES, Lfm2AudioModel, SoundDraw
from mmfast.models.speech.mimi_weights import load_mimi
from mmfast.voice.models import load_voice

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "lfm2_audio.json").read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return checkpoint.write(tmp_path_factory.mktemp("lfm2_audio"))


@pytest.fixture(scope="module")
def mimi(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small Mimi: the rate and the codes of the published one."""
    from transformers import MimiConfig, MimiModel

    where = tmp_path_factory.mktemp("mimi")
    torch.manual_seed(0)
    MimiModel(MimiConfig(**checkpoint.SMALL_MIMI)).save_pretrained(where)
    return str(where)


@pytest.fixture(scope="module")
def voice(folder: str) -> Any:
    return load_voice(folder, "cpu", "float32")


def prompt(voice: Any) -> list[tuple[str, Tensor]]:
    text = torch.tensor(GOLDEN["text"])
    parts = [("text", text[:5]), *voice._heard(checkpoint.question(), 16_000)]
    return [
        *parts,
        ("text", text[5:7]),
        ("codes", torch.tensor(GOLDEN["codes"])),
        ("text", text[7:]),
    ]


def test_a_prompt_of_text_sound_and_codes_is_read_as_by_the_package(voice: Any) -> None:
    parts = prompt(voice)
    close = {"atol": 2e-5, "rtol": 1e-4}
    mel = parts[1][1]
    torch.testing.assert_close(mel.T[::16, ::10].flatten(), torch.tensor(GOLDEN["mel"]), **close)
    with torch.no_grad():
        heard = voice.model.encoder(mel[None]).last_hidden_state[0]
    torch.testing.assert_close(heard[::3].flatten(), torch.tensor(GOLDEN["encoded"]), **close)
    found = voice.model.read(parts)[0]
    torch.testing.assert_close(found[::3].flatten(), torch.tensor(GOLDEN["prompt"]), **close)


@pytest.mark.parametrize("run", GOLDEN["runs"], ids=lambda run: f"{run['mode']}-{run['seed']}")
def test_tokens_are_those_of_the_package(voice: Any, run: dict[str, Any]) -> None:
    names = {"audio_temperature": "temperature", "audio_top_k": "top_k"}
    draw = SoundDraw(**{names.get(name, name): value for name, value in run["draw"].items()})
    embeds = voice.model.read(prompt(voice))
    torch.manual_seed(run["seed"])
    steps = voice.model.generate(embeds, 40, draw, interleaved=run["mode"] == "interleaved")
    assert [token.tolist() for token in steps] == run["tokens"]


def test_runs_have_all_that_can_happen() -> None:
    """Sound begins, ends and goes on behind the end of text; a turn ends."""
    runs = {(run["mode"], run["seed"]): run["tokens"] for run in GOLDEN["runs"]}
    assert [CODES] * 8 in runs["interleaved", 0] and [130] in runs["interleaved", 0]
    assert runs["sequential", 0][-1] == [7] and [128] in runs["sequential", 2]


def test_it_answers_reads_aloud_and_writes_down(voice: Any, mimi: str) -> None:
    assert all(isinstance(voice, part) for part in (Speaker, Listener, Chatter))
    history = [Turn("user", "Hi."), Turn("assistant", "Hello.")]
    given: dict[str, Any] = {"codec": mimi, "max_new_tokens": 30, "seed": 1}
    sounds = list(voice.reply(checkpoint.question(), 16_000, history, **given))
    parts = voice._prompt("Respond with interleaved text and audio.", history, prompt(voice)[1:2])
    draw, embeds = SoundDraw(temperature=1.0, top_k=4), voice.model.read(parts)
    torch.manual_seed(1)
    tokens = list(voice.model.generate(embeds, 30, draw, interleaved=True))
    words = [int(token) for token in tokens if len(token) == 1]
    shown = voice.tokenizer.decode(words, skip_special_tokens=True)
    assert "".join(sound.text for sound in sounds) == shown
    codes = torch.stack([token for token in tokens if len(token) > 1 and token.max() < CODES], 1)
    said = [sound.codes for sound in sounds if sound.codes is not None]
    assert torch.equal(torch.cat(said, 1), codes) and codes.shape[1] > 5
    pcm = torch.cat([sound.pcm for sound in sounds])
    whole = voice._codec(mimi).decode(codes[None])[0]
    torch.testing.assert_close(pcm, whole, atol=1e-4, rtol=0)

    aloud = list(voice.speak("So it is.", voice="uk_male", text_temperature=1.0, **given))
    assert "".join(sound.text for sound in aloud) == "So it is."
    assert voice.transcribe(checkpoint.question()) == voice.transcribe(checkpoint.question()) != ""


def test_its_own_mimi_sounds_and_hears_as_by_the_package(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = Path(folder) / "tokenizer-e351c8d8-checkpoint125.safetensors"
    weights = checkpoint.mimi_weights(GOLDEN["mimi"]["shapes"])
    save_file(weights, file)
    small = functools.partial(load_mimi, **checkpoint.SMALL_MIMI)
    monkeypatch.setattr("mmfast.models.speech.talkers.lfm2_audio.load_mimi", small)
    voice = load_voice(folder, "cpu", "float32")
    codec = voice._codec(None)
    codes = torch.arange(40).view(1, 8, 5) * 51 % CODES
    pcm = torch.tensor(GOLDEN["mimi"]["pcm"])
    torch.testing.assert_close(codec.decode(codes)[0, ::64], pcm, atol=2e-6, rtol=1e-4)
    heard = torch.tensor(GOLDEN["mimi"]["codes"])[:, :12]  # the 13th frame is half a one
    assert torch.equal(codec.encode(checkpoint.question()[None])[0, :, :12], heard)
    assert any(len(sound.pcm) for sound in voice.reply(checkpoint.question(), max_new_tokens=12))
    save_file({**weights, "extra": torch.ones(1)}, file)
    with pytest.raises(ModelError, match="does not fit Mimi: extra"):
        small(file)
    file.unlink()


def test_a_pipeline_takes_the_directory(folder: str, mimi: str) -> None:
    chat = mmfast.pipeline("speech-chat", model=folder, device="cpu", codec=mimi, max_new_tokens=12)
    assert chat is not None
    with pytest.raises(mmfast.MmfastError, match="unknown option 'speaker'"):
        mmfast.pipeline("text-to-speech", model=folder, speaker="1")


def test_what_is_said_ends_no_turn(voice: Any) -> None:
    assert 7 in voice._ids("<|im_end|>\n", mark=True)
    assert 7 not in voice._ids("I say <|im_end|>.")


def test_other_files_are_refused(folder: str, tmp_path: Path, voice: Any, mimi: str) -> None:
    with pytest.raises(SpecError, match=r"unknown voice 'anna'.*us_male"):
        list(voice.speak("Hi.", voice="anna", codec=mimi))
    with pytest.raises(ModelError, match="without variant; choices: dtype, revision"):
        load_voice(folder, "cpu", model_kwargs={"variant": "fp16"})
    (tmp_path / "config.json").write_text(json.dumps(checkpoint.config()))
    with pytest.raises(ModelError, match="has no weights of LFM2-Audio"):
        Lfm2AudioModel.from_pretrained(str(tmp_path))
    weights = load_file(f"{folder}/model.safetensors")
    weights["depthformer.extra"] = weights.pop("depth_linear.bias")
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"missing .'depth_in.bias'., unknown .'depth.extra'."):
        Lfm2AudioModel.from_pretrained(str(tmp_path))
    other = checkpoint.config()
    other["encoder"]["conv_norm_type"] = "layer_norm"
    (tmp_path / "config.json").write_text(json.dumps(other))
    with pytest.raises(ModelError, match="conv_norm_type='layer_norm', and 'batch_norm' alone"):
        Lfm2AudioModel.from_pretrained(str(tmp_path))
