"""Models that speak, listen or chat: loaded from a checkpoint, or a text model with a voice."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmfast.core.errors import MmfastError, ModelError, unknown
from mmfast.core.speech import Listener, Sound, Speaker, Turn
from mmfast.models import loading
from mmfast.models.loading import SpeechFamily, speech_families

_PARTS = {"speak": "speak", "transcribe": "listen", "reply": "chat by voice"}


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
    family = _family(model)
    if family is not None:
        return _of_family(str(model), family, device, dtype, given)
    if given:
        raise ModelError(f"the embedded speech model takes no model_kwargs, got {', '.join(given)}")
    from mmfast.models.speech.embedded import load_speech

    return load_speech(model)


def _family(model: str | Path | None) -> SpeechFamily | None:
    """The family of a checkpoint; None for the embedded kind."""
    kind = "llama" if model is None else _kind_of(model)
    if model is None or (kind == "llama" and (Path(model) / "speech.json").is_file()):
        return None
    families = speech_families()
    if kind not in families:
        raise ModelError(unknown("speech model type", kind, ["tiny-speech", *families]))
    return families[kind]


def _of_family(
    model: str,
    family: SpeechFamily,
    device: str | torch.device | None,
    dtype: str | torch.dtype,
    given: Mapping[str, Any],
) -> Any:
    """A stock checkpoint with its tokenizer, and the class here that gives it a voice."""
    import transformers

    stock, reader = (getattr(transformers, name) for name in (family.stock, family.reader))
    place, how = loading.pick_device(device), loading.pick_dtype(dtype)
    hub = {name: given[name] for name in loading.HUB if name in given}
    with loading.loading(f"model {model!r}"):
        loaded = loading.from_pretrained(stock, model, place, how, given)
        words = reader.from_pretrained(model, trust_remote_code=False, **hub)
    return family.voice(loaded, words)


_GIVEN = {"speak": {"self", "text"}, "reply": {"self", "pcm", "rate", "history"}}


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
        from transformers import AutoConfig

        with loading.loading(f"model {str(model)!r}"):
            return str(AutoConfig.from_pretrained(str(model), trust_remote_code=False).model_type)
    try:
        found = json.loads((where / "config.json").read_text(encoding="utf-8"))
        return str(found.get("model_type"))
    except (OSError, ValueError, AttributeError) as error:
        raise ModelError(f"{str(where / 'config.json')!r} cannot be read: {error}") from error


def can(model: Any, part: str) -> Any:
    """The model, if it can do a part; else ModelError."""
    if not callable(getattr(model, part, None)):
        raise ModelError(
            f"{type(model).__name__} cannot {_PARTS[part]}: it has no {part}(); "
            "give a model that does, or None for the embedded one"
        )
    return model


def given_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options that are given; MmfastError for a number where a name belongs, or the reverse."""
    found = {name: value for name, value in options.items() if value is not None}
    for name in ("voice", "mode", "verify"):
        if name in found and not isinstance(found[name], str):
            raise MmfastError(f"{name}={found[name]!r} is no name; give one such as 'turbo'")
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
    come; anything that makes text will do. `speaker` None leaves the answer text. ModelError: one
    of them cannot do its part; MmfastError: `chat` is no function.
    """

    def __init__(self, listener: Listener, chat: Chat, speaker: Speaker | None) -> None:
        if not callable(chat):
            raise MmfastError(f"chat={chat!r} cannot be called; give a function of the turns")
        self.listener: Listener = can(listener, "transcribe")
        self.chat, self.speaker = chat, None if speaker is None else can(speaker, "speak")
        self.sample_rate = 16000 if speaker is None else speaker.sample_rate

    def reply(
        self, pcm: Tensor, rate: int = 16000, history: Sequence[Turn] = (), **options: Any
    ) -> Iterator[Sound]:
        """Answer speech `[n]` as it comes; no answer where no word was said.

        Options are those of the speaker, its `rate` as `speed`.
        """
        heard = self.listener.transcribe(pcm, rate).strip()
        yield Sound(torch.zeros(0), self.sample_rate, heard=heard)
        if heard:
            yield from self.answer_turns((*history, Turn("user", heard)), **options)

    def answer_turns(self, turns: Sequence[Turn], **options: Any) -> Iterator[Sound]:
        """A written conversation to the answer as it comes."""
        return voiced(self.chat(turns), self.speaker, self.sample_rate, options)


def voiced(
    answer: str | Iterable[str], speaker: Speaker | None, rate: int, options: Mapping[str, Any]
) -> Iterator[Sound]:
    """Say an answer as it is written; without a speaker it stays text, at `rate`."""
    pieces = iter([answer] if isinstance(answer, str) else answer)
    first = next((piece for piece in pieces if piece.strip()), "")
    if first and speaker is not None:
        text = answer if isinstance(answer, str) else chain([first], pieces)
        yield from speaker.speak(text, **speaking(options))
    elif first:
        for piece in chain([first], pieces):
            yield Sound(torch.zeros(0), rate, text=piece)
