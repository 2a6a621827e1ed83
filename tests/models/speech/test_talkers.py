"""Talkers of transformers say what the stock class says by hand, from a folder, in batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import talker_models
import torch
from torch import Tensor

import mmfast
from mmfast.core.errors import ModelError, SpecError
from mmfast.models import loading
from mmfast.models.loading import speech_families
from mmfast.models.speech.talkers.base import GeneratorState, sentences

TEXT = ("hello there. ", "how are you my friend?")
pytestmark = pytest.mark.filterwarnings("ignore")


def vits_by_hand(folder: str, texts: list[str]) -> list[Tensor]:
    from transformers import VitsModel, VitsTokenizer

    model, words = VitsModel.from_pretrained(folder), VitsTokenizer.from_pretrained(folder)
    torch.manual_seed(7)
    return [
        model(**words(text, return_tensors="pt"), speaker_id=1).waveform[0].detach()
        for text in texts
    ]


def speecht5_by_hand(folder: str, texts: list[str]) -> list[Tensor]:
    from transformers import SpeechT5ForTextToSpeech, SpeechT5HifiGan, SpeechT5Tokenizer

    model = SpeechT5ForTextToSpeech.from_pretrained(folder)
    vocoder = SpeechT5HifiGan.from_pretrained(f"{folder}/vocoder")
    words = SpeechT5Tokenizer.from_pretrained(folder)
    voice = torch.from_numpy(np.load(f"{folder}/speaker_embeddings/ben.npy"))[None]
    torch.manual_seed(7)
    return [
        model.generate_speech(
            words(text, return_tensors="pt")["input_ids"], voice, vocoder=vocoder, minlenratio=1.0
        )
        for text in texts
    ]


def bark_by_hand(folder: str, texts: list[str]) -> list[Tensor]:
    from transformers import BarkModel, BarkProcessor

    model, processor = BarkModel.from_pretrained(folder), BarkProcessor.from_pretrained(folder)
    torch.manual_seed(7)
    found = []
    for text in texts:
        inputs = processor(text, max_length=32)
        sampling = {"semantic_do_sample": True, "coarse_do_sample": True}
        found.append(model.generate(**inputs, **sampling)[0])
    return found


def seamless_by_hand(folder: str, texts: list[str]) -> list[Tensor]:
    from transformers import AutoTokenizer, SeamlessM4Tv2ForTextToSpeech

    model = SeamlessM4Tv2ForTextToSpeech.from_pretrained(folder)
    words = AutoTokenizer.from_pretrained(folder)
    found = []
    for text in texts:
        inputs = words(text, src_lang="eng", return_tensors="pt")
        pcm, length = model.generate(**inputs, tgt_lang="fra", speaker_id=2)
        found.append(pcm.reshape(-1)[: int(length)])
    return found


def dia_by_hand(folder: str, texts: list[str]) -> list[Tensor]:
    from transformers import DiaForConditionalGeneration, DiaProcessor

    model = DiaForConditionalGeneration.from_pretrained(folder)
    processor = DiaProcessor.from_pretrained(folder)
    marks = {"bos_token_id": 18, "eos_token_id": 16, "pad_token_id": 17}
    marks["delay_pattern"] = [0, 2, 3]
    torch.manual_seed(7)
    found = []
    for text in texts:
        inputs = processor(text=[f"[S1] {text}"], **marks)
        codes = model.generate(**inputs, temperature=1.5)
        found.append(processor.batch_decode(codes, **marks)[0])
    return found


Hand = Callable[[str, list[str]], list[Tensor]]
# oracle, options of one call, options with which nothing is random
KINDS: dict[str, tuple[Hand, dict[str, Any], dict[str, Any] | None]] = {
    "vits": (vits_by_hand, {"voice": "1"}, {"noise_scale": 0.0, "noise_scale_duration": 0.0}),
    "speecht5": (speecht5_by_hand, {"voice": "ben", "minlenratio": 1.0}, {"maxlenratio": 30.0}),
    "bark": (bark_by_hand, {"do_sample": True}, None),
    "seamless": (seamless_by_hand, {"voice": "2", "language": "fra", "source": "eng"}, None),
    "dia": (dia_by_hand, {"temperature": 1.5}, {"do_sample": False}),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return talker_models.folders_of(KINDS, tmp_path_factory)


@pytest.fixture(scope="module")
def pipes(folders: dict[str, str]) -> dict[str, Any]:
    return talker_models.pipes_of(folders)


@pytest.mark.parametrize("kind", KINDS)
def test_says_what_the_stock_class_says(
    kind: str, folders: dict[str, str], pipes: dict[str, Any]
) -> None:
    by_hand, options, _ = KINDS[kind]
    with torch.no_grad():
        wanted = by_hand(folders[kind], [text.strip() for text in TEXT])
    before = torch.get_rng_state()
    sounds = list(pipes[kind].stream("".join(TEXT), seed=7, **options))
    assert torch.equal(torch.get_rng_state(), before)  # nobody else's draws change
    assert [sound.text for sound in sounds] == list(TEXT)  # sound comes sentence by sentence
    for sound, pcm in zip(sounds, wanted, strict=True):
        torch.testing.assert_close(sound.pcm, pcm, rtol=0, atol=1e-6)
        assert sound.pcm.std() > 1e-3
    assert not torch.equal(sounds[0].pcm, sounds[1].pcm)


@pytest.mark.parametrize("kind", KINDS)
def test_a_list_is_each_text_alone(kind: str, pipes: dict[str, Any]) -> None:
    pipe, options = pipes[kind], KINDS[kind][2]
    texts = ["hello there. fine.", "is it you?", "how are you my friend?"]
    if kind == "speecht5":  # its dropout always draws, so what comes second differs
        texts[0] = "hello there."
    count = sum(text.count(".") + text.count("?") for text in texts)
    calls: list[int] = []
    say = pipe.talker._say
    pipe.talker._say = lambda parts, how: calls.append(len(parts)) or say(parts, how)
    try:
        many = pipe(texts, **(options or {}))
    finally:
        del pipe.talker._say
    assert calls == ([count] if options else [1] * count)  # batches where the class can
    for spoken, text in zip(many, texts, strict=True):
        alone = pipe(text, **(options or {}))
        assert spoken.text == alone.text == text
        torch.testing.assert_close(spoken.pcm, alone.pcm, rtol=0, atol=1e-5)


def test_text_is_said_as_it_comes(pipes: dict[str, Any]) -> None:
    asked = []

    def written() -> Iterator[str]:
        for piece in ("hello th", "ere. how ", "are you?"):
            asked.append(piece)
            yield piece

    first = next(iter(pipes["vits"].stream(written())))
    assert first.text == "hello there. " and len(first.pcm) and len(asked) == 2


@pytest.mark.parametrize(
    ("kind", "voices"),
    [("vits", "02"), ("speecht5", ["anna", "ben"]), ("bark", ["v2/anna", None])],
)
def test_voices_differ(kind: str, voices: Any, pipes: dict[str, Any]) -> None:
    one, two = (pipes[kind]("hello there.", voice=voice).pcm for voice in voices)
    assert not torch.equal(one, two)
    assert set(voices) - {None} <= set(pipes[kind].talker.voices)


@pytest.mark.parametrize("kind", ["vits", "speecht5"])
def test_letters_without_a_token_are_told(kind: str, pipes: dict[str, Any]) -> None:
    pipe, texts = pipes[kind], ["hello \u65e5. fine.", "fine."]
    one, other = pipe(texts)
    assert one.stats["left_out"] == pipe.talker.left_out(texts[0]) == ["\u65e5"]
    assert one.trace.notes == ["left out, as the model cannot say them: \u65e5"]
    assert "left_out" not in other.stats and not other.trace.notes
    assert pipe(texts[0]).stats["left_out"] == ["\u65e5"]


def test_marks_alone_are_told_and_not_said(pipes: dict[str, Any]) -> None:
    sounds = list(pipes["vits"].stream("hello. ... fine."))
    assert [sound.text for sound in sounds] == ["hello. ", "... ", "fine."]
    assert [len(sound.pcm) > 0 for sound in sounds] == [True, False, True]
    assert "".join(sentences(["a. b", "? c"])) == "a. b? c"


@pytest.mark.parametrize(
    ("kind", "options", "told"),
    [
        ("vits", {"voice": "7"}, "unknown voice '7'; choices: 0, 1, 2"),
        ("vits", {"mode": "turbo"}, "unknown option 'mode'"),
        ("speecht5", {"voice": "cleo"}, "unknown voice 'cleo'"),
        ("speecht5", {"speaker_embedding": [1.0, 2.0]}, "of 2 numbers does not fit"),
        ("speecht5", {"vocoder": "/no/where"}, "cannot load vocoder '/no/where'"),
        ("bark", {"voice": "v2/ben"}, "unknown voice 'v2/ben'"),
        ("seamless", {"language": "xyz"}, "unknown language 'xyz'; choices: eng, fra"),
        ("seamless", {"voice": "3"}, "unknown voice '3'"),
        ("dia", {"temperature": -1.0}, "temperature=-1.0 is not allowed"),
        ("dia", {"seed": "one"}, "seed='one' is not allowed"),
        ("dia", {"guidance_scale": "x"}, "guidance_scale='x' is not allowed; give a number"),
        ("vits", {"rate": 0}, "rate=0 is not allowed; give a number above 0"),
        ("vits", {"noise_scale": -1}, "noise_scale=-1 is not allowed; give a number of at least 0"),
        ("vits", {"noise_scale_duration": -2}, "noise_scale_duration=-2 is not allowed"),
        ("speecht5", {"threshold": 2}, "threshold=2 is not allowed; give a number from 0 to 1"),
        ("speecht5", {"minlenratio": -1}, "minlenratio=-1 is not allowed"),
        ("speecht5", {"maxlenratio": 0}, "maxlenratio=0 is not allowed"),
        ("bark", {"min_eos_p": 5}, "min_eos_p=5 is not allowed; give a number from 0 to 1"),
        ("bark", {"fine_temperature": -1}, "fine_temperature=-1 is not allowed"),
    ],
)
def test_wrong_options_are_one_line(
    kind: str, options: dict[str, Any], told: str, pipes: dict[str, Any]
) -> None:
    with pytest.raises((SpecError, ModelError, mmfast.MmfastError)) as error:
        pipes[kind]("hello there.", **options)
    assert told in str(error.value) and "\n" not in str(error.value)


def test_options_are_checked_before_weights_are_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "vits"}')  # no weights at all
    with pytest.raises(mmfast.MmfastError, match=r"unknown option 'speaker'.*choices: batch_size"):
        mmfast.pipeline("text-to-speech", str(tmp_path), speaker="1")
    with pytest.raises(ModelError, match="cannot load model"):
        mmfast.pipeline("text-to-speech", str(tmp_path), voice="1")


def test_a_class_that_is_missing_is_said(
    folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    family = replace(speech_families()["vits"], stock="VitsOfTomorrow")
    monkeypatch.setitem(loading._FAMILIES, "vits", family)
    with pytest.raises(ModelError, match=r"needs VitsOfTomorrow, which transformers \S+ does not"):
        mmfast.pipeline("text-to-speech", folders["vits"])


def test_families_are_found() -> None:
    wanted = {
        "vits", "speecht5", "bark", "seamless_m4t_v2", "dia", "higgs_audio_v2", "vibevoice",
        "pocket_tts", "qwen3_omni_moe", "csm", "moshi", "qwen2_5_omni", "lfm2_audio",
    }  # fmt: skip
    assert set(speech_families()) >= wanted


def test_draws_belong_to_one_reply() -> None:
    """Two replies that take turns draw what each would alone."""
    one, two = (GeneratorState(seed, torch.device("cpu")) for seed in (1, 2))
    found: list[Tensor] = []
    for state in (one, two, one, two):
        with state():
            found.append(torch.rand(3))
    torch.manual_seed(1)
    assert torch.equal(torch.cat([found[0], found[2]]), torch.cat([torch.rand(3), torch.rand(3)]))
    assert not torch.equal(found[0], found[1])
