"""Qwen3-Omni: words and frames of the stock generate, as they are made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import talker_models
import torch
from torch import Tensor

import mmfast
from mmfast.core.errors import ModelError, SpecError
from mmfast.core.speech import Chatter, Listener, Speaker
from mmfast.models.speech.talkers.qwen3_omni import code2wav_codec
from mmfast.voice.models import load_voice

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return talker_models.qwen3_omni(tmp_path_factory.mktemp("qwen3_omni"))


@pytest.fixture(scope="module")
def voice(folder: str) -> Any:
    return load_voice(folder, "cpu", "float32")


def question() -> Tensor:
    return torch.randn(8000, generator=torch.Generator().manual_seed(0)) * 0.1


def test_reply_is_the_stock_generate(voice: Any, folder: str) -> None:
    assert all(isinstance(voice, part) for part in (Speaker, Listener, Chatter))
    inputs = voice.prompts.hear(question(), 16_000, ())
    torch.manual_seed(3)
    with torch.no_grad():
        ids, pcm = voice.model.generate(
            **inputs, speaker="ben", thinker_max_new_tokens=6, talker_max_new_tokens=15,
            thinker_eos_token_id=voice.end,
        )  # fmt: skip
    sounds = list(voice.reply(question(), voice="ben", seed=3, max_words=6, max_codes=15))
    said = voice.prompts.read(ids[0, inputs["input_ids"].shape[1] :].tolist())
    assert "".join(sound.text for sound in sounds) == said != ""
    order = ["text" if sound.text else "sound" for sound in sounds]
    assert order == sorted(order, reverse=True)  # words are told before the talker begins
    pieces = [sound.pcm for sound in sounds if len(sound.pcm)]
    assert len(pieces) > 5 and pcm.std() > 1e-3
    found = torch.cat(pieces)
    torch.testing.assert_close(found, pcm.reshape(-1), rtol=0, atol=1e-4)


def test_speak_gives_the_thinker_its_words(voice: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensor] = []
    real = voice.model.thinker.generate

    def generate(*args: Any, **named: Any) -> Any:
        out = real(*args, **named)
        seen.append(out.sequences[:, named["input_ids"].shape[1] :])
        return out

    monkeypatch.setattr(voice.model.thinker, "generate", generate)
    sounds = list(voice.speak("hello there. fine.", max_codes=10))
    assert [sound.text for sound in sounds if sound.text] == ["hello there. ", "fine."]
    assert [" ".join(text) for text in ("hello there.", "fine.")] == [
        voice.prompts.read(ids[0].tolist()) for ids in seen
    ]  # its tokenizer puts spaces between letters
    assert all(int(ids[0, -1]) == voice.end for ids in seen)


def test_a_list_is_each_text_alone(folder: str) -> None:
    how = {"do_sample": False, "max_codes": 12}
    pipe = mmfast.pipeline("text-to-speech", folder, device="cpu", dtype="float32", **how)
    texts = ["hello there.", "is it you my friend?"]
    for spoken, text in zip(pipe(texts), texts, strict=True):
        alone = pipe(text)
        assert spoken.text == alone.text == text
        torch.testing.assert_close(spoken.pcm, alone.pcm, rtol=0, atol=1e-4)


def test_it_converses(folder: str) -> None:
    chat = mmfast.pipeline(
        "speech-chat", folder, device="cpu", dtype="float32", max_words=5, max_codes=8
    )
    answer = chat((question().numpy(), 16_000))
    assert answer.text and answer.seconds > 0 and answer.rate == 24_000
    assert chat.chatter.transcribe(question())


def test_code2wav_in_pieces_is_code2wav(voice: Any) -> None:
    codec = code2wav_codec(voice.model.code2wav, 24_000)
    codes = torch.randint(32, (2, 3, 25), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = voice.model.code2wav(codes)[:, 0]
    state, pieces = codec.decoder.start(2), []
    for part in codes.split([1, 1, 7, 16], dim=2):
        state, pcm = codec.decoder.step(state, part)
        pieces.append(pcm)
    found = torch.cat([*pieces, codec.decoder.finish(state)], 1)
    torch.testing.assert_close(found[:, : wanted.shape[1]], wanted, rtol=0, atol=2e-4)
    assert wanted.std() > 1e-3


def test_wrong_options_are_one_line(voice: Any, folder: str) -> None:
    with pytest.raises(SpecError, match="unknown voice 'cleo'; choices: anna, ben"):
        list(voice.speak("hello.", voice="cleo"))
    with pytest.raises(mmfast.MmfastError, match="unknown option 'language'"):
        mmfast.pipeline("text-to-speech", folder, language="eng")
    silent = voice.model.has_talker
    voice.model.has_talker = False
    try:
        with pytest.raises(ModelError, match="has no talker"):
            type(voice)(voice.model, None)
    finally:
        voice.model.has_talker = silent


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_omni_moe"}')
    with pytest.raises(ModelError, match="cannot load model") as error:
        mmfast.pipeline("text-to-speech", str(tmp_path))
    assert "\n" not in str(error.value)
