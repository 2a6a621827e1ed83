"""Models that speak, listen or chat: loaded from a checkpoint, or a text model with a voice."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmfast.core.errors import MmfastError, ModelError, an, unknown
from mmfast.core.speech import Chatter, Listener, Sound, Speaker, Turn
from mmfast.models import loading
from mmfast.models.loading import SpeechFamily, is_text_model, speech_families
from mmfast.models.speech.lfm2_audio import KIND
from mmfast.models.text_chat import load_text

EMBEDDED = "tiny-speech"  # names the embedded model, as None does
_PARTS = {
    "stream": "listen to a stream",
    "speak": "speak",
    "transcribe": "listen",
    "reply": "chat by voice",
}


def load_voice(
    model: Any,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype = "auto",
    model_kwargs: Mapping[str, Any] | None = None,
) -> Any:
    """Load the embedded speech model (None) or a checkpoint, else ModelError; an object is kept.

    `model_kwargs` go to `from_pretrained`, of which the embedded one has none.
    """
    given = loading.check_kwargs(model, device, dtype, model_kwargs)
    if not (model is None or isinstance(model, str | Path)):
        return model
    model = None if model == EMBEDDED else model
    family = _family(model)
    if family is not None:
        where = str(model)
        names, what = (family.stock, family.reader), f"model {where!r}"
        stock, reader = (loading.stock_class(name, what) for name in names)
        return family.voice(*load_text(where, device, dtype, given, (stock, reader)))
    if given:
        raise ModelError(f"the embedded speech model takes no model_kwargs, got {', '.join(given)}")
    from mmfast.models.speech.embedded import load_speech

    return load_speech(model, device)


def _family(model: str | Path | None) -> SpeechFamily | None:
    """The family of a checkpoint; None for the embedded kind."""
    if model is None or model == EMBEDDED:
        return None
    kind = _kind_of(model)
    if kind == "llama" and (Path(model) / "speech.json").is_file():
        return None
    families = speech_families()
    if kind not in families:
        raise ModelError(unknown("speech model type", kind, [EMBEDDED, *families]))
    return families[kind]


def load_listener(
    listener: Any,
    options: Mapping[str, Any],
    device: str | torch.device | None = None,
    dtype: str | torch.dtype = "auto",
    model_kwargs: Mapping[str, Any] | None = None,
) -> Any:
    """Load a listener as `load_voice` does, with options of all its calls; None stays None.

    MmfastError: it has no such option, or what stands for it cannot listen.
    """
    given = {name: value for name, value in options.items() if value not in (None, "")}
    if listener is None and given:
        raise MmfastError(f"{', '.join(given)} without a listener; give listener=, a stock model")
    if listener is None:
        return None
    found = can(load_voice(listener, device, dtype, model_kwargs), "transcribe")
    if given and not hasattr(found, "tuned"):
        raise MmfastError(
            f"{type(found).__name__} takes no {', '.join(given)}: it is no stock model of "
            "transformers; leave it out, or take a listener such as 'Qwen/Qwen3-ASR-0.6B'"
        )
    return found.tuned(**given) if given else found


def is_text(model: Any) -> bool:
    """Return whether a directory or hub id holds a language model of text, without ears and mouth.

    ModelError: it is no directory and no hub id.
    """
    if not isinstance(model, str | Path) or model == EMBEDDED:
        return False
    kind = _kind_of(model)
    own = kind == "llama" and (Path(model) / "speech.json").is_file()
    return not own and kind not in speech_families() and is_text_model(kind)


_GIVEN = {
    "speak": {"self", "text"},
    "transcribe": {"self", "pcm", "rate"},
    "reply": {"self", "pcm", "rate", "history"},
}


def check_options(model: Any, part: str, options: Mapping[str, Any]) -> set[str] | None:
    """Return the names of the options of `speak` or `reply`, before a model is read.

    None: an object that takes any, and checks them itself. SpecError: a value that the embedded
    model refuses.
    """
    family, owner = None, model
    if model is None or isinstance(model, str | Path):
        from mmfast.models.speech import embedded

        family = _family(model)
        owner = embedded.SpeechModel if family is None else family.cls
    if not callable(getattr(owner, part, None)):
        return None  # refused when it is loaded
    found = inspect.signature(getattr(owner, part)).parameters
    names = set(getattr(owner, "option_names", found)) - _GIVEN[part]
    rest = {name for name in names & found.keys() if found[name].kind is found[name].VAR_KEYWORD}
    if owner is not model and family is None and options.keys() <= names:
        embedded.check_options(model, options)
    return None if rest and owner is model else names - rest


def _kind_of(model: str | Path) -> str:
    where = Path(model)
    if not (where / "config.json").is_file():
        if where.exists() or str(model).startswith((".", "/", "~")) or str(model).count("/") != 1:
            raise ModelError(
                f"model {str(model)!r} is no directory of a checkpoint; give one, or a hub id"
            )
        from transformers import PreTrainedConfig

        with loading.loading(f"model {str(model)!r}"):
            return _named(PreTrainedConfig.get_config_dict(str(model))[0])
    try:
        found = json.loads((where / "config.json").read_text(encoding="utf-8"))
        return _named(found)
    except (OSError, ValueError, AttributeError) as error:
        raise ModelError(f"{str(where / 'config.json')!r} cannot be read: {error}") from error


def _named(config: Mapping[str, Any]) -> str:
    """Return the model type of a configuration; that of LFM2-Audio names none."""
    return str(config.get("model_type", KIND if "depthformer" in config else None))


def can(model: Any, part: str) -> Any:
    """The model, if it can do a part; else ModelError."""
    if not callable(getattr(model, part, None)):
        other = "speakers=2" if part == "stream" else "None for the embedded one"
        raise ModelError(
            f"{type(model).__name__} cannot {_PARTS[part]}: it has no {part}(); "
            f"give a model that does, or {other}"
        )
    return model


def given_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options that are given; MmfastError for a number where a name belongs, or the reverse."""
    found = {name: value for name, value in options.items() if value is not None}
    for name in ("voice", "mode", "verify"):
        if name in found and not isinstance(found[name], str):
            raise MmfastError(f"{name}={found[name]!r} is no name; give one such as 'fast'")
    for name in ("rate", "speed", "pitch"):
        if name in found and (isinstance(found[name], bool) or not isinstance(found[name], int)):
            raise MmfastError(f"{name}={found[name]!r} is no whole number; give one")
    return found


Chat = Callable[[Sequence[Turn]], str | Iterable[str]]


def speaking(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a reply as options of `Speaker.speak`, to which `rate` is not the input's."""
    return {"rate" if name == "speed" else name: value for name, value in options.items()}


class Cascade:
    """Voices a text model: what is said becomes text, its answer becomes speech as it is written.

    `chat` answers a conversation, whose last turn is the user's, with text or pieces of it as they
    come; anything that makes text will do, and with `calls_tools` it may write calls of functions,
    which realtime sessions pass on. `talker` None leaves the answer text. ModelError: one
    of them cannot do its part; MmfastError: `chat` is no function.
    """

    def __init__(
        self, listener: Listener, chat: Chat, talker: Speaker | None, calls_tools: bool = False
    ) -> None:
        if not callable(chat):
            raise MmfastError(f"chat={chat!r} cannot be called; give a function of the turns")
        self.listener: Listener = can(listener, "transcribe")
        self.calls_tools = calls_tools
        self.chat, self.talker = chat, None if talker is None else can(talker, "speak")
        self.sample_rate = 16000 if talker is None else talker.sample_rate

    def reply(
        self, pcm: Tensor, rate: int = 16000, history: Sequence[Turn] = (), **options: Any
    ) -> Iterator[Sound]:
        """Answer speech `[n]` as it comes; no answer where no word was said.

        Options are those of the talker, its `rate` as `speed`.
        """
        heard = self.listener.transcribe(pcm, rate).strip()
        yield Sound(torch.zeros(0), self.sample_rate, heard=heard)
        if heard:
            yield from self.answer_turns((*history, Turn("user", heard)), **options)

    def answer_turns(self, turns: Sequence[Turn], **options: Any) -> Iterator[Sound]:
        """A written conversation to the answer as it comes."""
        return voiced(self.chat(turns), self.talker, self.sample_rate, options)


class VoiceParts:
    """A listener and a talker as one model that listens and speaks."""

    def __init__(self, listener: Any, talker: Any) -> None:
        self.listener, self.talker = can(listener, "transcribe"), can(talker, "speak")
        self.sample_rate = int(talker.sample_rate)
        self.voices = tuple(getattr(talker, "voices", ()))
        self.layout = getattr(talker, "layout", None)
        if hasattr(listener, "overhear"):
            self.overhear = listener.overhear
        if hasattr(talker, "left_out"):
            self.left_out = talker.left_out

    def transcribe(self, pcm: Tensor, rate: int = 16000) -> str:
        """Return what is said in sound `[n]`."""
        return str(self.listener.transcribe(pcm, rate))

    def speak(self, text: str | Iterable[str], **options: Any) -> Iterator[Sound]:
        """Say a text, or pieces of it as they come."""
        return iter(self.talker.speak(text, **options))


class Interpreted:
    """A model that answers speech, with the ears or the mouth of others.

    `listener` writes down what was said: no answer where that is no word, and the words are those
    of the history. `talker` says the text of the answer, whose own sound is left out. ModelError:
    one of them cannot do its part.
    """

    def __init__(self, chatter: Chatter, listener: Any = None, talker: Any = None) -> None:
        self.chatter: Chatter = can(chatter, "reply")
        own = chatter if hasattr(chatter, "transcribe") else None
        self.listener: Any = own if listener is None else can(listener, "transcribe")
        self._hears = listener is not None
        self.talker: Any = chatter if talker is None else can(talker, "speak")
        self._speaks = talker is not None
        self.sample_rate = int(self.talker.sample_rate)

    def reply(
        self, pcm: Tensor, rate: int = 16000, history: Sequence[Turn] = (), **options: Any
    ) -> Iterator[Sound]:
        """Answer speech `[n]` as it comes; options are those of what speaks."""
        if self._hears:
            heard = self.listener.transcribe(pcm, rate).strip()
            yield Sound(torch.zeros(0), self.sample_rate, heard=heard)
            if not heard:
                return
        sounds = self.chatter.reply(pcm, rate, history, **({} if self._speaks else options))
        if self._hears:
            sounds = (replace(sound, heard=None) for sound in sounds)
        if self._speaks:
            yield from self._said(iter(sounds), options)
        else:
            yield from sounds

    def _said(self, sounds: Iterator[Sound], options: Mapping[str, Any]) -> Iterator[Sound]:
        first = next(sounds, None)
        if first is None:
            return
        if first.heard is not None:
            yield Sound(torch.zeros(0), self.sample_rate, heard=first.heard)
        texts = (sound.text for sound in chain([first], sounds) if sound.text)
        yield from voiced(texts, self.talker, self.sample_rate, options)


def _no_answer(given: object) -> MmfastError:
    return MmfastError(
        f"the answer of chat= has {an(type(given).__name__)}; let it give a text, or pieces of one"
    )


def _as_piece(piece: object) -> str:
    if not isinstance(piece, str):
        raise _no_answer(piece)
    return piece


def voiced(
    answer: str | Iterable[str], talker: Speaker | None, rate: int, options: Mapping[str, Any]
) -> Iterator[Sound]:
    """Say an answer as it is written; without a talker it stays text, at `rate`.

    MmfastError: it is neither text nor pieces of text, such as a message with a role.
    """
    if isinstance(answer, bytes | Mapping) or not isinstance(answer, Iterable):
        raise _no_answer(answer)
    pieces = map(_as_piece, [answer] if isinstance(answer, str) else answer)
    first = next((piece for piece in pieces if piece.strip()), "")
    if first and talker is not None:
        text = answer if isinstance(answer, str) else chain([first], pieces)
        yield from talker.speak(text, **speaking(options))
    elif first:
        for piece in chain([first], pieces):
            yield Sound(torch.zeros(0), rate, text=piece)
