"""The embedded speech model as it is shipped: stock classes, size, speaking, listening."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from mmfast.core.errors import MediaError, MmfastError, SpecError
from mmfast.core.speech import Chatter, Listener, Speaker, Turn
from mmfast.models.loading import embedded_path
from mmfast.models.speech.embedded import load_speech
from mmfast.models.speech.layout import SpeechLayout
from mmfast.pipelines.speech import TextToSpeech

TEXTS = (
    "the red circle moves left.",
    "there are three blue stars.",
    "it is quarter past nine.",
    "what colour is the square?",
    "hello, how are you?",
)


@pytest.fixture(scope="module")
def folder() -> Path:
    return embedded_path("tiny-speech")


@pytest.fixture(scope="module")
def model() -> Any:
    return load_speech()


def codes(model: Any, text: str, **options: Any) -> torch.Tensor:
    found = [sound.codes for sound in model.speak(text, **options)]
    return torch.cat([each for each in found if each is not None], 1)


def pcm(model: Any, text: str, **options: Any) -> torch.Tensor:
    return torch.cat([sound.pcm for sound in model.speak(text, **options)])


def test_everything_together_is_small(folder: Path) -> None:
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    assert size < 30e6  # three models: 16 MB speak, 8 of which draft, 5 hear, 3 word replies
    for name in ("README.md", "codec/config.json", "heads/mctp.safetensors", "heads/mtp.json"):
        assert (folder / name).is_file(), name


def test_stock_classes_load_backbone_and_tokenizer(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    layout = SpeechLayout.load(folder)
    stock = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert type(stock).__name__ == "LlamaForCausalLM"
    assert stock.config.vocab_size == layout.total == len(tokenizer)
    text = "The red circle, zebra."
    expected = [i for group in layout.groups(text.lower()) for i in group]
    assert tokenizer(text).input_ids == expected
    assert layout.text(expected) == "the red circle, zebra."
    assert tokenizer.convert_ids_to_tokens([layout.next, layout.end]) == ["<next>", "<end>"]


def test_it_is_all_three(model: Any) -> None:
    for protocol in (Speaker, Listener, Chatter):
        assert isinstance(model, protocol)


def test_an_unseen_sentence_can_be_understood(model: Any) -> None:
    pytest.importorskip("pocketsphinx")
    from mmfast.bench.suites.speech.quality import (
        Recogniser,
        WordErrors,
        count_errors,
        unseen_lines,
    )

    recogniser, found = Recogniser(), WordErrors()
    for line in unseen_lines(4, 1):
        heard = recogniser.transcribe(pcm(model, line.text, schedule="vanilla", **line.options))
        found = found + count_errors(line.text, heard)
    assert found.rate < 0.3


def test_it_understands_recordings(model: Any) -> None:
    pytest.importorskip("espeakng_loader")
    from mmfast.bench.suites.speech.quality import WordErrors, count_errors, unseen_lines
    from mmfast.tiny.speech.recordings import say

    found = WordErrors()
    for line in unseen_lines(6, 2):
        heard = model.transcribe(say(line.text, line.voice).pcm)
        found = found + count_errors(line.text, heard)
    assert found.rate < 0.3


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("head", ["mctp", "mtp"])
def test_exact_is_one_token_per_pass(model: Any, head: str) -> None:
    passes = tokens = 0
    for text in TEXTS[:3]:
        plain = codes(model, text, schedule="vanilla")
        sounds = list(model.speak(text, mode="exact", head=head))
        fast = torch.cat([s.codes for s in sounds if s.codes is not None], 1)
        assert torch.equal(plain, fast), text
        passes += sum(s.passes for s in sounds)
        tokens += sum(s.tokens for s in sounds)
    assert tokens > 1.3 * passes


def test_the_words_of_all_pieces_are_what_was_said(model: Any) -> None:
    for text in TEXTS:
        sounds = list(model.speak(text, verify="none"))
        assert "".join(s.text for s in sounds) == text
        assert sum(len(s.pcm) for s in sounds) == 640 * sum(
            s.codes.shape[1] for s in sounds if s.codes is not None
        )
    assert sounds[0].passes == 1 and sounds[0].codes is not None  # sound from the first pass


def test_text_may_come_as_it_is_written(model: Any) -> None:
    whole = codes(model, "the red circle moves left. it is nine o'clock.")
    pieces = codes(model, iter(["the", "red cir cle moves left. it is nine o'clock."]))
    assert not torch.equal(whole, pieces)  # "cir cle" is two words
    slow = codes(model, iter(["the red ", "circle mo", "ves left. it", " is nine o'clock."]))
    assert torch.equal(whole, slow)


def test_long_texts_and_long_words_end(model: Any) -> None:
    text = " ".join(TEXTS * 2) + " " + "a" * 200 + " yes"
    sounds = list(model.speak(text))
    assert sum(len(s.pcm) for s in sounds) < 60 * 16000
    assert "".join(s.text for s in sounds).endswith("yes")


def spoken(text: str, voice: int = 0) -> torch.Tensor:
    from mmfast.tiny.speech.recordings import EspeakVoice, say
    from mmfast.tiny.speech.text import VOICE_NAMES

    return say(text, EspeakVoice(VOICE_NAMES[voice], 165, 50)).pcm


def test_a_reply_says_what_was_heard_and_is_right(model: Any) -> None:
    sounds = list(model.reply(spoken("what is two plus three?")))
    assert sounds[0].heard == "what is two plus three"
    assert "".join(s.text for s in sounds) == "two plus three is five."
    assert sum(len(s.pcm) for s in sounds) > 16000


def test_what_was_told_is_remembered(model: Any) -> None:
    past = [Turn("user", "My name is Emma."), Turn("assistant", "hello emma.")]
    past += [Turn("user", "what day comes after monday"), Turn("assistant", "tuesday.")]
    told = list(model.reply(spoken("what is my name?", 2), history=past))
    assert "".join(s.text for s in told) == "your name is emma."
    untold = list(model.reply(spoken("what is my name?", 2)))
    assert "".join(s.text for s in untold) == "you did not tell me."


@pytest.mark.slow
def test_most_replies_to_unseen_questions_are_right(model: Any) -> None:
    from mmfast.bench.suites.speech.replies import reply_rows

    single, following, other = reply_rows(model, 40, 5, lambda *_: None)
    assert single["accuracy"] >= 0.8, single
    assert following["accuracy"] >= 0.75, following
    assert other["invented"] <= 1, other


def test_sound_that_asks_nothing_gets_no_answer(model: Any) -> None:
    from mmfast.tiny.speech.recordings import EspeakVoice, say

    draw = torch.Generator().manual_seed(0)
    german = say("wo ist denn heute das kleine haus?", EspeakVoice("de", 160)).pcm
    for pcm in (torch.zeros(16000), 0.05 * torch.randn(24000, generator=draw), german):
        sounds = list(model.reply(pcm))
        assert [s.heard for s in sounds] == [""] and not len(sounds[0].pcm)


def test_words_that_are_not_known_are_reported(model: Any) -> None:
    sounds = list(model.speak("the red zebra moves left."))
    assert [word for s in sounds for word in s.notes.get("spelled", ())] == ["zebra"]


def test_what_cannot_be_said_is_told(model: Any) -> None:
    """In pieces, in the trace and by a warning; of nothing else there is an error."""
    long, pipe = "abcdefghijklmnopqrstuvwxyz", TextToSpeech(model)
    text = f"it is \u65e5\u672c red {long} \U0001f600"
    lost = ["\u65e5\u672c", "\U0001f600", "yz"]
    with pytest.warns(UserWarning, match="left out, as the model cannot say them") as seen:
        said = pipe(text)
    (line,) = [str(each.message) for each in seen]
    assert all(each in line for each in lost) and model.left_out(text) == lost
    assert sorted(said.stats["left_out"]) == sorted(lost) and said.text == f"it is red {long}"
    (note,) = said.trace.notes
    assert note == said.note and line in note and "spelled" in note
    sounds = list(pipe.stream(iter(["it is \u65e5", "\u672c red"])))
    assert [each for s in sounds for each in s.notes.get("left_out", ())] == ["\u65e5\u672c"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not pipe("it is red.").trace.notes
    with pytest.raises(MmfastError, match="nothing of '\u65e5\u672c' can be said") as caught:
        pipe("\u65e5\u672c")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"voice": "nobody"}, "en-us"),
        ({"rate": 900}, "165"),
        ({"pitch": -3}, "50"),
        ({"mode": "warp"}, "turbo"),
        ({"verify": "maybe"}, "exact"),
        ({"head": "tail"}, "mctp"),
    ],
)
def test_wrong_options_name_the_choices(model: Any, options: dict[str, Any], wanted: str) -> None:
    with pytest.raises(SpecError, match=wanted) as caught:
        model.speak("hello.", **options)
    assert "\n" not in str(caught.value)


def test_nothing_to_say_and_no_sound_are_told_apart(model: Any) -> None:
    with pytest.raises(MmfastError, match="no word"):
        list(model.speak(" 。 "))
    assert model.transcribe(torch.zeros(16000)) == ""
    assert model.transcribe(torch.zeros(0)) == ""
    with pytest.raises(MediaError, match="NaN"):
        model.transcribe(torch.tensor([0.1, float("nan")]))
    with pytest.raises(MediaError, match=r"\[n\]"):
        model.transcribe(torch.zeros(2, 100))
