"""Qwen2.5-Omni speaks while it thinks: the stock words, codes and sound, and sooner."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import wraps
from typing import Any
from unittest.mock import patch

import pytest
import torch
from omni_models import AUDIO, CODE_EOS, CODE_PAD, omni, prompt
from torch import Tensor
from transformers import GenerationMixin

from mmfast.core.errors import ModelError
from mmfast.core.speech import Chatter, Listener, Sound, Speaker, Turn
from mmfast.models.cache_name import cache_of
from mmfast.models.speech.omni import OmniSpeech, PromptWriter
from mmfast.models.speech.omni_talker import Picking

# Releases that drop a mask of ones, which `parity` follows; 5.17 does not.
DROPS = "== 1).all()" in inspect.getsource(GenerationMixin.generate)
GREEDY = Picking(repetition_penalty=1.05)  # the stock penalty, which is on unless turned off
pytestmark = pytest.mark.filterwarnings("ignore:.*generation flags.*")


def stock(inputs: dict[str, Any], words: int, codes: int, seed: int = 0) -> tuple[Any, ...]:
    """Text tokens, codes and sound of `generate`."""
    model, seen = omni(), []
    forward = type(model.token2wav).forward

    def watch(self: Any, code: Tensor, **options: Any) -> Tensor:
        seen.append(code)
        torch.manual_seed(seed)
        return forward(self, code, **options)

    with patch.object(type(model.token2wav), "forward", watch):
        ids, sound = model.generate(
            **inputs, thinker_max_new_tokens=words, talker_max_new_tokens=codes,
            talker_do_sample=False, talker_eos_token_id=[CODE_PAD, CODE_EOS],
            token2wav_num_steps=2,
        )  # fmt: skip
    return ids[0, inputs["input_ids"].shape[1] :], seen[0][0], sound


class Watched(OmniSpeech):
    """Which tokens were thought."""

    def _think(self, *args: Any) -> Iterator[Any]:
        self.thought: list[int] = []
        for each in super()._think(*args):
            self.thought.append(each.token)
            yield each


def speech(**options: Any) -> Watched:
    return Watched(omni(), **{"num_steps": 2, "talker": GREEDY, "parity": DROPS, **options})


def joined(pieces: list[Sound]) -> tuple[Tensor, Tensor]:
    codes = torch.cat([each.codes for each in pieces if each.codes is not None], 1)[0]
    return codes, torch.cat([each.pcm for each in pieces])


def with_sound(seed: int) -> dict[str, Any]:
    """A prompt with two seconds' worth of a tiny encoder's frames."""
    inputs = prompt(9, seed)
    inputs["input_ids"][0, 2:6] = AUDIO
    generator = torch.Generator().manual_seed(seed)
    return inputs | {
        "input_features": torch.randn(1, 8, 16, generator=generator),
        "feature_attention_mask": torch.ones(1, 16, dtype=torch.long),
    }


@pytest.mark.parametrize("seed", [1, 4, 5])
def test_words_codes_and_sound_are_the_stock_ones(seed: int) -> None:
    inputs = prompt(7, seed)
    ids, codes, sound = stock(inputs, 12, 24)
    this = speech(ahead=4)
    ours, pcm = joined(list(this.answer(inputs, max_words=12, max_codes=24)))
    assert this.thought == ids.tolist()
    assert torch.equal(ours, codes) and len(codes) > 3
    torch.testing.assert_close(pcm, sound, rtol=0, atol=2e-5)


def test_a_prompt_with_sound() -> None:
    inputs = with_sound(1)
    ids, codes, _ = stock(inputs, 8, 16)
    this = speech()
    ours, _ = joined(list(this.answer(inputs, max_words=8, max_codes=16)))
    assert this.thought == ids.tolist() and torch.equal(ours, codes)


@pytest.mark.parametrize(
    "make", [lambda: prompt(7, 1), lambda: with_sound(1)], ids=["text", "sound"]
)
def test_as_trained_it_is_the_stock_talker_with_its_mask(make: Any) -> None:
    """`generate` drops a mask of ones; given it again, the talker marks the start of speech."""
    inputs = make()
    talker = type(omni().talker)
    forward = talker.forward

    @wraps(forward)  # `generate` looks at the names of its arguments
    def masked(self: Any, *args: Any, **options: Any) -> Any:
        past = cache_of(options)
        seen = past.get_seq_length() if past is not None else 0
        x = options.get("inputs_embeds")
        new = options["input_ids"].shape[1] if x is None else x.shape[1]
        options["attention_mask"] = torch.ones(1, seen + new, dtype=torch.long)
        options["position_ids"] = None
        if "feature_attention_mask" in inputs:
            options["audio_feature_lengths"] = inputs["feature_attention_mask"].sum(-1)
        if x is None:
            options["input_ids"] = options["input_ids"].clone()
        return forward(self, *args, **options)

    with patch.object(talker, "forward", masked):
        _, codes, _ = stock(inputs, 12, 24)
    ours, _ = joined(list(speech(parity=False).answer(inputs, max_words=12, max_codes=24)))
    dropped, _ = joined(list(speech().answer(inputs, max_words=12, max_codes=24)))
    assert torch.equal(ours, codes)
    if "input_features" not in inputs and DROPS:
        assert not torch.equal(dropped, codes)  # the control: there it makes a difference


def test_the_first_sound_comes_while_words_are_still_thought_of() -> None:
    inputs = prompt(7, 0)
    pieces = list(speech(vocoder_ahead=0).answer(inputs, max_words=30, max_codes=60))
    first = next(i for i, each in enumerate(pieces) if each.pcm.numel())
    before = {
        name: sum(p.notes[name] for p in pieces[: first + 1])
        for name in pieces[0].notes
        if name != "written"
    }
    total = {name: sum(p.notes[name] for p in pieces) for name in before}
    assert total["thinker"] == 30 and total["talker"] == 60  # what `generate` does before any sound
    assert before == {"thinker": 5, "talker": 4, "flow": 4}  # two blocks of two codes
    assert sum(p.passes for p in pieces) == 90 and sum(p.tokens for p in pieces) == 60


def test_exact_sound_waits_for_what_the_vocoder_sees() -> None:
    pieces = list(speech().answer(prompt(7, 0), max_words=30, max_codes=60))
    first = next(i for i, each in enumerate(pieces) if each.pcm.numel())
    assert sum(p.notes["thinker"] for p in pieces[: first + 1]) < 30


def test_replies_side_by_side_do_not_touch_each_other() -> None:
    this = speech()
    alone = [joined(list(this.answer(prompt(7, s), max_words=9, max_codes=14)))[0] for s in (1, 4)]
    runs = [this.answer(prompt(7, s), max_words=9, max_codes=14) for s in (1, 4)]
    pieces: list[list[Sound]] = [[], []]
    while any(runs):
        for i, run in enumerate(runs):
            piece = next(run, None) if run else None
            if piece is None:
                runs[i] = None  # type: ignore[call-overload]
            else:
                pieces[i].append(piece)
    for i in range(2):
        assert torch.equal(joined(pieces[i])[0], alone[i])


def test_a_reply_can_be_dropped_and_an_end_at_once_is_silence() -> None:
    this = speech()
    run = this.answer(prompt(7, 0), max_words=20, max_codes=40)
    next(run)
    run.close()  # type: ignore[attr-defined]
    with patch.object(this, "ends", set(range(60))):
        pieces = list(this.answer(prompt(7, 0)))
    assert sum(p.pcm.numel() for p in pieces) == 0


def test_sampling_repeats_under_a_seed() -> None:
    how = {"talker": Picking(True, 1.5, 20, 0.95), "thinker": Picking(True, 2.0, 40)}
    one, two, other = (
        joined(list(speech().answer(prompt(7, 0), max_words=8, max_codes=20, seed=s, **how)))[0]
        for s in (1, 1, 2)
    )
    assert torch.equal(one, two) and not torch.equal(one, other)


class FakeProcessor:
    """Words are letters; sound is a quarter as many tokens as its frames."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.given: list[dict[str, Any]] = []
        self.tokenizer = self

    def get_added_vocab(self) -> dict[str, int]:
        return {"<end>": 1}

    def apply_chat_template(self, turns: Any, **options: Any) -> str:
        self.asked.append(turns)
        return "abcdefg"

    def decode(self, tokens: list[int], **options: Any) -> str:
        return "".join(f"w{token} " for token in tokens)

    def __call__(self, text: Any, audio: Any = None, **options: Any) -> dict[str, Any]:
        self.given.append(options)
        if isinstance(text, str):
            return {"input_ids": [10 + ord(letter) % 25 for letter in text]}
        return prompt(7, 3) if audio is None else with_sound(3)


def test_it_speaks_listens_and_replies() -> None:
    fake = FakeProcessor()
    this = OmniSpeech(omni(), fake, num_steps=2, max_words=10, max_codes=20)
    assert isinstance(this, Speaker) and isinstance(this, Listener) and isinstance(this, Chatter)
    whole = list(this.speak("hello"))
    pieces = list(this.speak(iter(["he", "llo"])))
    said = fake.decode([10 + ord(letter) % 25 for letter in "hello"])
    for sounds in (whole, pieces):
        assert "".join(each.text for each in sounds) == said
        assert "".join(each.notes["written"] for each in sounds) == said
    assert torch.equal(joined(whole)[1], joined(pieces)[1]) and joined(whole)[1].numel()
    reply = list(
        this.reply(torch.zeros(16000), 16000, [Turn("user", "hi"), Turn("assistant", "ho")])
    )
    assert [turn["role"] for turn in fake.asked[-1]] == ["system", "user", "assistant", "user"]
    assert "".join(each.text for each in reply) == this.transcribe(torch.zeros(8000), 8000)
    assert list(this.speak(""))[-1].pcm.numel() == 0


def test_control_tokens_that_a_user_writes_stay_text() -> None:
    fake = FakeProcessor()
    prompts = PromptWriter(fake, torch.device("cpu"))
    prompts.ask("what is an end?")
    assert fake.given[-1].get("sanitize_control_tokens") is None
    prompts.hear(torch.zeros(800), 16000, [Turn("user", "an <end>")], "is it <end>?")
    assert fake.given[-1]["sanitize_control_tokens"]
    texts = [part["text"] for turn in fake.asked[-1] for part in turn["content"] if "text" in part]
    marks = [text.partition("<end>") for text in texts[1:]]
    assert all(before[-1:] not in ("", " ") and after[:1] != "?" for before, _, after in marks)
    assert next(prompts.words("<end>")) and fake.given[-1]["split_special_tokens"]


def test_what_it_is_asked_wrongly() -> None:
    this = speech()
    with pytest.raises(ModelError, match="unknown voice 'Chelsea'; did you mean 'Chelsie'"):
        this.answer(prompt(), voice="Chelsea")
    with pytest.raises(ModelError, match="unknown option 'ahed'; did you mean 'ahead'"):
        this.answer(prompt(), ahed=1)
    with pytest.raises(ModelError, match="there is no processor"):
        this.speak("a")
    with pytest.raises(ModelError, match="has no talker"):
        OmniSpeech(omni().thinker)
    with pytest.raises(ModelError, match="sampling of speech: `temperature`"):
        list(this.answer(prompt(), talker=Picking(True, temperature=-1.0)))


def test_the_thinker_may_end_first() -> None:
    """Behind its last word the talker hears an end and silence, as in `generate`."""
    inputs, config = prompt(7, 4), omni().thinker.generation_config
    ids, _, _ = stock(inputs, 8, 2)
    end = next(int(t) for i, t in enumerate(ids) if i > 2 and t not in ids[:i])
    with patch.object(config, "eos_token_id", end):
        ids, codes, _ = stock(inputs, 30, 24)
        this = speech()
        ours, _ = joined(list(this.answer(inputs, max_words=30, max_codes=24)))
    assert ids[-1] == end and len(ids) < 9 < len(codes)
    assert this.thought == ids.tolist() and torch.equal(ours, codes)
