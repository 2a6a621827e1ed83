"""Checkpoints in folders get their voice by their type: CSM speaks, Moshi converses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from codebook_models import csm, moshi
from tokenizers import Tokenizer, models, pre_tokenizers
from tone_models import HumEar, HumModel, hum
from transformers import PreTrainedTokenizerFast

import mmfast
from mmfast.core.errors import ModelError
from mmfast.core.speech import Turn
from mmfast.voice.channel import VoiceEvent

PAUSE = torch.zeros(12000)


def tokenizer(size: int) -> Any:
    """Letters to ids below `size`."""
    letters = " abcdefghijklmnopqrstuvwxyz[]0123456789.?!"[: size - 3]
    vocab = {letter: index + 3 for index, letter in enumerate(letters)}
    found = Tokenizer(models.WordLevel({**vocab, "<unk>": 0, "<s>": 1, "</s>": 2}, "<unk>"))
    found.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=found, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


def saved(model: Any, words: Any, folder: Path) -> str:
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def csm_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved(csm(), tokenizer(60), tmp_path_factory.mktemp("csm"))


@pytest.fixture(scope="module")
def moshi_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved(moshi(), tokenizer(50), tmp_path_factory.mktemp("moshi"))


def test_csm_speaks(csm_folder: str) -> None:
    pipe = mmfast.pipeline("text-to-speech", csm_folder, dtype="float32", seconds=0.4)
    spoken = pipe("hello there. and you?")
    assert spoken.rate == 24000 and 0 < spoken.seconds <= 1.0
    assert spoken.text == "hello there. and you?"
    assert spoken.stats["passes"] and spoken.stats["first_audio_ms"]


def test_csm_voices_any_text_model(csm_folder: str) -> None:
    """Its text comes a sentence at a time, so which words were heard is reckoned by length."""

    def chat(turns: Sequence[Turn]) -> str:
        return "one two three four five six."

    pipe = mmfast.pipeline(
        "speech-chat", chat=chat, listener=HumModel(), talker=csm_folder, seconds=2.0
    )
    session = pipe.open(ear=HumEar(), ahead=30.0)
    events = list(drive(session, torch.cat([hum("go"), PAUSE])))
    made = sum(len(event.pcm) for event in events if event.pcm is not None) / 24000
    session.push(torch.zeros(round(16000 * made / 2)))
    session.push(hum("no"))
    cut = next(event for event in session.poll() if event.kind == "interrupted")
    assert "one two three four five six.".startswith(cut.text)
    assert 0 < cut.audio_ms < 1e3 * made


def drive(session: Any, pcm: torch.Tensor) -> Any:
    session.push(pcm)
    yield from session.poll()
    while session.step():
        yield from session.poll()


def test_moshi_converses(moshi_folder: str) -> None:
    pipe = mmfast.pipeline("speech-chat", moshi_folder, dtype="float32", seconds=0.8)
    events: list[VoiceEvent] = list(pipe.run([hum("hello"), PAUSE], ear=HumEar()))
    assert sum(event.kind == "audio" for event in events) >= 1
    assert {event.rate for event in events if event.kind == "audio"} == {24000}
    assert [event.status for event in events if event.kind == "done"] == ["completed"]
    with pytest.raises(ModelError, match="cannot speak"):
        mmfast.pipeline("text-to-speech", moshi_folder)
