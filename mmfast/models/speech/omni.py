"""Qwen2.5-Omni as a voice: thinker, talker and sound at the same time.

`generate` runs them one behind the other, so the first sound comes when the last word and the last
code are there. Here every code is made as soon as the thinker has the word it needs, and every
block of codes becomes sound as soon as its look-ahead has come.
Paper: arXiv 2503.20215.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mmfast.core.errors import ModelError, unknown
from mmfast.core.speech import Sound, Turn
from mmfast.frontends.audio.reader import load_audio
from mmfast.models.loading import speech_family
from mmfast.models.prompt import marked_text
from mmfast.models.speech.omni_sound import SoundStage
from mmfast.models.speech.omni_talker import TALKER, Picker, Picking, Talker, Thought, think

# The talker was trained behind this system prompt; with another one it may fall silent.
SYSTEM = (
    "You are Qwen, a virtual human developed by the Qwen Team, Alibaba Group, capable of "
    "perceiving auditory and visual inputs, as well as generating text and speech."
)
BROKEN = "\ufffd"  # a character whose bytes are not all there yet


class PromptWriter:
    """Writes conversations as the thinker's inputs, on the device of the model."""

    def __init__(self, processor: Any, device: torch.device) -> None:
        self.processor, self.device = processor, device

    def ask(self, text: str) -> dict[str, Any]:
        """A question in writing."""
        return self._inputs([_turn("user", text)], None)

    def hear(
        self, pcm: Tensor, rate: int, history: Sequence[Turn], text: str = ""
    ) -> dict[str, Any]:
        """Speech `[n]` behind turns that were written down, with words beside it."""
        sound = load_audio(pcm, 16_000, media_rate=rate)
        content = [{"type": "audio", "audio": "speech"}, *([_words(text)] if text else [])]
        turns = [_turn(each.role, each.text) for each in history]
        return self._inputs([*turns, {"role": "user", "content": content}], sound)

    def words(self, text: str | Iterable[str]) -> Iterator[int]:
        """Tokens of text, or of its pieces as they come."""
        for piece in [text] if isinstance(text, str) else text:
            # A control token in a text is said, or not, but ends nothing.
            how = {"add_special_tokens": False, "split_special_tokens": True}
            yield from self._need().tokenizer(piece, **how)["input_ids"]

    def read(self, tokens: list[int]) -> str:
        """Tokens to text; without a processor, none."""
        if self.processor is None:
            return ""
        text: str = self.processor.tokenizer.decode(tokens, skip_special_tokens=True)
        return text

    def _inputs(self, turns: list[dict[str, Any]], sound: Tensor | None) -> dict[str, Any]:
        processor, marks = self._need(), dict[str, Any]()
        turns = [_turn("system", SYSTEM), *turns]
        for part in (each for turn in turns for each in turn["content"] if "text" in each):
            part["text"], more = marked_text(processor.tokenizer, part["text"])
            marks |= more
        text = processor.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        text = text[0] if isinstance(text, list) else text
        media = {} if sound is None else {"audio": [sound.numpy()]}
        batch = processor(text=[text], return_tensors="pt", padding=True, **media, **marks)
        return {k: v.to(self.device) for k, v in batch.items() if isinstance(v, Tensor)}

    def _need(self) -> Any:
        if self.processor is None:
            raise ModelError(
                "there is no processor; give OmniSpeech(model, processor), or call answer(inputs)"
            )
        return self.processor


class WrittenText:
    """Text as its tokens come, and how much of it has been told and said."""

    def __init__(self, prompts: PromptWriter) -> None:
        self.prompts = prompts
        self.tokens: list[int] = []
        self.text = ""
        self.told = self.said = 0

    @property
    def fresh(self) -> bool:
        """True where there is text that `take` has not given."""
        return len(self.text) > self.told

    def add(self, token: int) -> None:
        """A token more; half a character waits for its other half."""
        self.tokens.append(token)
        text = self.prompts.read(self.tokens)
        if not text.endswith(BROKEN):
            self.text = text

    def take(self) -> str:
        """Return what has been written since the last time."""
        new, self.told = self.text[self.told :], len(self.text)
        return new

    def say(self, until: int | None) -> str:
        """Whole words up to so many characters; None: all of them."""
        stop = len(self.text)
        if until is not None and until < stop:
            stop = max(self.said, self.text.rfind(" ", 0, until + 1) + 1)
        new, self.said = self.text[self.said : stop], max(self.said, stop)
        return new


def _turn(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": [_words(text)]}


def _words(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


RATE = 24_000
READ = "Read out what follows."
WRITE = "Transcribe the speech."


@dataclass(frozen=True)
class OmniOptions:
    """Options of a reply.

    `voice` is a name in the model's `speaker_map`. Words and codes are picked by `thinker` (None:
    as the checkpoint has it) and `talker`, `max_words` tokens and `max_codes` codes (50 a second)
    at most. `ahead`, `vocoder_ahead` and `num_steps` are those of `SoundStage`. `characters` are
    taken to be said in a second: they tell which text a piece carries. `parity` leaves out of the
    talker's start what `generate` leaves out (`omni_talker`); `seed` is that of everything random.
    """

    voice: str = "Chelsie"
    thinker: Picking | None = None
    talker: Picking = TALKER
    max_words: int = 1024
    max_codes: int = 4096
    ahead: int = 1
    vocoder_ahead: int | None = None
    num_steps: int = 10
    characters: float = 15.0
    parity: bool = False
    seed: int = 0


@speech_family(
    "qwen2_5_omni", "Qwen2_5OmniForConditionalGeneration", "processor", reader="AutoProcessor"
)
class OmniSpeech:
    """Speaker, listener and chatter (`core.speech`) over one stock model; streams may share it.

    `model` is a `Qwen2_5OmniForConditionalGeneration` with its talker; without its processor only
    `answer` works, and text stays token ids. `options` are `OmniOptions` for every reply; a call
    may change them. ModelError: it cannot speak, or an option is not known.
    """

    sample_rate = RATE
    option_names = tuple(OmniOptions.__dataclass_fields__)

    def __init__(self, model: Any, processor: Any = None, **options: Any) -> None:
        if not getattr(model, "has_talker", False):
            raise ModelError(
                f"{type(model).__name__} has no talker; load Qwen2_5OmniForConditionalGeneration "
                "with enable_audio_output=True"
            )
        self.model, self.prompts = model.eval(), PromptWriter(processor, model.device)
        model.token2wav.float()  # as the stock model: its flow needs it
        self.options = _changed(OmniOptions(), options)
        self.ends = _ends(model.thinker.generation_config.eos_token_id)
        talker = model.talker
        self.code_ends = {talker.codec_pad_token, talker.codec_eos_token}

    def speak(self, text: str | Iterable[str], **options: Any) -> Iterator[Sound]:
        """Text, or pieces of it as they come, to sound: the thinker is given its words."""
        inputs = self.prompts.ask(READ)
        return self._reply(inputs, _changed(self.options, options), self.prompts.words(text))

    def reply(
        self, pcm: Tensor, rate: int = 16_000, history: Sequence[Turn] = (), **options: Any
    ) -> Iterator[Sound]:
        """Answer speech `[n]` as it comes."""
        inputs = self.prompts.hear(pcm, rate, history)
        return self._reply(inputs, _changed(self.options, options), None)

    def answer(self, inputs: dict[str, Any], **options: Any) -> Iterator[Sound]:
        """A prompt of text, sound, pictures and video, from the processor, to its answer."""
        return self._reply(dict(inputs), _changed(self.options, options), None)

    def transcribe(self, pcm: Tensor, rate: int = 16_000) -> str:
        """Sound `[n]` to text."""
        inputs = self.prompts.hear(pcm, rate, (), WRITE)
        written = WrittenText(self.prompts)
        for thought in self._think(inputs, self.options, None):
            if thought.token is not None and thought.token not in self.ends:
                written.add(thought.token)
        return written.text

    def _think(
        self, inputs: dict[str, Any], how: OmniOptions, words: Iterator[int] | None
    ) -> Iterator[Thought]:
        thinker = self.model.thinker
        if words is not None:
            return think(thinker, inputs, words, set(), how.max_words)
        picking = how.thinker or _own(thinker.generation_config, how.seed)
        picker = Picker(picking, [], inputs["input_ids"].device)
        return think(thinker, inputs, picker, self.ends, how.max_words)

    def _reply(
        self, inputs: dict[str, Any], how: OmniOptions, words: Iterator[int] | None
    ) -> Iterator[Sound]:
        voices = self.model.speaker_map
        if how.voice not in voices:
            raise ModelError(unknown("voice", how.voice, voices))
        voice = voices[how.voice]
        stage = SoundStage(
            self.model.token2wav, voice, how.ahead, how.vocoder_ahead, how.seed,
            num_steps=how.num_steps,
        )  # fmt: skip
        picker = Picker(
            replace(how.talker, seed=how.seed),
            [self.model.talker.codec_bos_token],
            inputs["input_ids"].device,
        )
        talker = Talker(self.model, inputs, voice, picker, self.code_ends, how.parity)
        run = _OmniReply(self._think(inputs, how, words), self.ends, WrittenText(self.prompts), how)
        return run.sounds(talker, stage)


class _OmniReply:
    """One reply on its way: three stages, each as far as the one before lets it."""

    def __init__(
        self, thoughts: Iterator[Thought], ends: set[int], written: WrittenText, how: OmniOptions
    ) -> None:
        self.thoughts, self.ends, self.written, self.how = thoughts, ends, written, how
        self.thinks = self.talks = self.samples = 0
        self.told = (0, 0, 0)  # passes of each stage that pieces have told of
        self.codes: list[int] = []

    def sounds(self, talker: Talker, stage: SoundStage) -> Iterator[Sound]:
        first = self._thought(next(self.thoughts))
        yield self._piece(torch.zeros(1, 0), stage)
        state = stage.start()
        if first.token is not None and first.token not in self.ends:
            words = (self._thought(each).state for each in self.thoughts)
            for code in talker.talk(first.state, first.token, words, self.how.max_codes):
                self.talks += 1
                self.codes.append(code)
                state, pcm = stage.step(state, torch.tensor([[[code]]]))
                if pcm.shape[1] or self.written.fresh:
                    yield self._piece(pcm, stage)
            for thought in self.thoughts:  # the talker may end before the thinker
                self._thought(thought)
        yield self._piece(stage.finish(state), stage, last=True)

    def _thought(self, thought: Thought) -> Thought:
        self.thinks += 1
        if thought.token is not None and thought.token not in self.ends:
            self.written.add(thought.token)
        return thought

    def _piece(self, pcm: Tensor, stage: SoundStage, last: bool = False) -> Sound:
        self.samples += pcm.shape[1]
        written = self.written.take()
        seconds = self.samples / RATE
        text = self.written.say(None if last else int(seconds * self.how.characters))
        now = (self.thinks, self.talks, stage.passes)
        thinks, talks, flows = (a - b for a, b in zip(now, self.told, strict=True))
        self.told = now
        codes, self.codes = self.codes, []
        return Sound(
            pcm[0].cpu(),
            RATE,
            text,
            torch.tensor([codes], dtype=torch.long),
            passes=thinks + talks,
            tokens=len(codes),
            notes={"written": written, "thinker": thinks, "talker": talks, "flow": flows},
        )


def _changed(options: OmniOptions, changes: dict[str, Any]) -> OmniOptions:
    for name in changes:
        if name not in OmniOptions.__dataclass_fields__:
            raise ModelError(unknown("option", name, OmniOptions.__dataclass_fields__))
    return replace(options, **changes)


def _ends(tokens: int | list[int] | None) -> set[int]:
    return set() if tokens is None else {tokens} if isinstance(tokens, int) else set(tokens)


def _own(config: Any, seed: int) -> Picking:
    names = ("do_sample", "temperature", "top_k", "top_p", "repetition_penalty")
    given = {name: getattr(config, name, None) for name in names}
    return Picking(seed=seed, **{k: v for k, v in given.items() if v is not None})
