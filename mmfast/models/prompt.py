"""From decoded media and questions to the inputs of a stock model.

Questions and media unlike those that the embedded models were trained on are noted.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image

from mmfast.core.errors import MediaError, MmfastError, ModelError, an, unknown
from mmfast.models.context import check_length
from mmfast.models.encoder_names import renamed


class UnevenClipsError(MediaError):
    """Clips of different numbers of frames, of which the model takes one number at a time."""


@dataclass(frozen=True)
class Shot:
    """One decoded image (uint8 RGB `[H, W, 3]`) or clip (`[T, H, W, 3]`).

    A clip has the fields of transformers' `VideoMetadata`, so that the processor keeps the true
    timestamps and never samples a second time.
    """

    kind: str
    pixels: np.ndarray[Any, Any]
    metadata: Mapping[str, Any] | None = None


def check_question(question: object) -> str:
    """Refuse a question that is no text, or blank (MmfastError)."""
    if not isinstance(question, str):
        raise MmfastError(f"question is {an(type(question).__name__)}; give a string")
    if not question.strip():
        raise MmfastError(f"question {question!r} is empty; ask something about the media")
    return check_characters("question", question).strip()


def check_characters(what: str, text: str) -> str:
    """Return a text of characters; MmfastError for half of a pair, or a byte that is not UTF-8."""
    broken = next((c for c in text if "\ud800" <= c <= "\udfff"), None)
    if broken is not None:  # a shell hands over such a byte
        short = text if len(text) <= 80 else text[:80] + "…"
        raise MmfastError(
            f"{what} {short!r} holds {broken!r}, which is no character; give it in UTF-8"
        )
    return text


def build_inputs(
    processor: Any, shots: Sequence[Sequence[Shot]], questions: Sequence[str], device: torch.device
) -> dict[str, Any]:
    """Inputs of `forward` and `generate` for a batch of questions, left-padded.

    The shots of each question are all of one kind. ModelError for a processor without a chat
    template, which writes the prompt.
    """
    chats = [
        [{"role": "user", "content": [*mine, question]}]
        for mine, question in zip(shots, questions, strict=True)
    ]
    return chat_inputs(processor, chats, device)


def chat_inputs(
    processor: Any,
    chats: Sequence[Sequence[Mapping[str, Any]]],
    device: torch.device,
    template: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Inputs of `forward` and `generate` for a batch of conversations, left-padded.

    A message has a `role` and a `content`, a list of texts and shots in order; further keys are for
    the template. `template` holds arguments of the chat template, `options` of the processor.
    ModelError for a processor without a chat template, UnevenClipsError for clips that its model
    does not take together.
    """
    if getattr(processor, "chat_template", None) is None:
        raise ModelError(f"{type(processor).__name__} has no chat template; give one that has")
    texts = [
        processor.apply_chat_template(
            [
                {**message, "content": [_part(part) for part in message["content"]]}
                for message in chat
            ],
            **{"add_generation_prompt": True, **(template or {})},
            tokenize=False,
        )
        for chat in chats
    ]
    shots = [
        [part for message in chat for part in message["content"] if isinstance(part, Shot)]
        for chat in chats
    ]
    given = {**media_arguments(processor, shots), **(options or {})}
    try:
        batch = processor(text=texts, padding=True, return_tensors="pt", **given)
    except ValueError:  # of stacking them
        frames = sorted({len(s.pixels) for mine in shots for s in mine if s.kind == "video"})
        if len(frames) < 2:
            raise
        raise UnevenClipsError(
            f"clips of {' and '.join(map(str, frames))} frames do not go into one prompt of "
            f"{type(processor).__name__}; ask about one at a time, or give as many frames of each"
        ) from None
    batch = renamed(batch)
    return {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}


def user_inputs(
    processor: Any,
    chats: Sequence[Sequence[Mapping[str, Any]]],
    model: Any,
    reduced: bool = False,
) -> dict[str, Any]:
    """Inputs as `chat_inputs` returns them, with the control tokens that users wrote as text.

    ContextError for more than the model reads; see `check_length` for `reduced` media.
    """
    read = [marked(processor.tokenizer, chat, {}) for chat in chats]
    options = {name: value for _, _, more in read for name, value in more.items()}
    written = [chat for chat, _, _ in read]
    inputs = chat_inputs(processor, written, model.device, None, options)
    check_length(model, inputs, reduced)
    return inputs


def marked_text(tokenizer: Any, text: str) -> tuple[str, Mapping[str, Any]]:
    """A user's text with its control tokens marked, and the arguments of what reads the marks."""
    (turn,), _, marks = marked(tokenizer, [{"role": "user", "content": [text]}], {})
    return turn["content"][0], marks


def marked(
    tokenizer: Any, chat: Sequence[Mapping[str, Any]], template: Mapping[str, Any]
) -> tuple[Sequence[Mapping[str, Any]], Mapping[str, Any], Mapping[str, Any]]:
    """Mark the control tokens that the texts of a conversation hold, so that they stay text.

    Returns the conversation, the arguments of the template, and those of the processor, which reads
    the marks. Texts of one message that together make a control token become one text.

    Raises:
        MmfastError: A text holds a control token, and transformers is older than 5.23.
    """
    names = sorted(tokenizer.get_added_vocab(), key=len, reverse=True)
    if not names:
        return chat, template, {}
    control = re.compile("|".join(map(re.escape, names)))
    chat = [{**message, "content": _united(message["content"], control)} for message in chat]
    from transformers.processing_utils import TextKwargs

    if "sanitize_control_tokens" in TextKwargs.__annotations__:
        from transformers.utils.chat_template_utils import mark_control_tokens as mark
    else:
        mark = _refused
    found = [
        {
            name: [p if isinstance(p, Shot) else mark(p, control) for p in value]
            if name == "content"
            else mark(value, control)
            for name, value in message.items()
        }
        for message in chat
    ]
    arguments = mark(dict(template), control)
    if found == chat and arguments == template:
        return chat, template, {}
    return found, arguments, {"sanitize_control_tokens": True}


def _refused(value: Any, control: re.Pattern[str]) -> Any:
    """Refuse control tokens: processors of transformers read their marks from 5.23 on."""
    found = control.findall(value) if isinstance(value, str) else []
    if long := [each for each in found if len(each) > 1]:  # a character is the same as text
        raise MmfastError(
            f"a text holds {long[0]!r}, a control token of this model, which stays text from "
            "transformers 5.23 on; leave it out, or update transformers"
        )
    rest = value.values() if isinstance(value, Mapping) else value
    for each in rest if isinstance(value, (Mapping, list, tuple)) else ():
        _refused(each, control)
    return value


def _united(content: Sequence[Shot | str], control: re.Pattern[str]) -> list[Shot | str]:
    texts = [part for part in content if isinstance(part, str)]
    whole = "".join(texts), "".join(text.strip() for text in texts)
    apart = sum(len(control.findall(text)) for text in texts)
    if max(len(control.findall(text)) for text in whole) == apart:
        return list(content)
    return [*(part for part in content if isinstance(part, Shot)), whole[1]]


def _part(part: Shot | str) -> dict[str, str]:
    return {"type": part.kind} if isinstance(part, Shot) else {"type": "text", "text": part}


def media_arguments(processor: Any, shots: Sequence[Sequence[Shot]]) -> dict[str, Any]:
    """Return the arguments of a processor for the media of each prompt of a batch."""
    from transformers.video_utils import VideoMetadata

    media: dict[str, Any] = {}
    clips = [shot for mine in shots for shot in mine if shot.kind == "video"]
    images = [[shot.pixels for shot in mine if shot.kind == "image"] for mine in shots]
    if any(images):
        first = _channels_first([pixels for mine in images for pixels in mine])
        media["images"] = [[first(pixels) for pixels in mine] for mine in images]
        if type(processor).__name__ == "GotOcr2Processor":  # images of a list are pages of one
            media["images"] = [first(pixels) for mine in images for pixels in mine]
    if clips:
        first = _channels_first([shot.pixels for shot in clips])
        media["videos"] = [first(shot.pixels) for shot in clips]
        if type(processor).__name__ == "SmolVLMProcessor":  # counts by prompt before 5.23
            rest = iter(media["videos"])
            counts = [sum(shot.kind == "video" for shot in mine) for mine in shots]
            media["videos"] = [[next(rest) for _ in range(count)] for count in counts]
        media["video_metadata"] = [VideoMetadata(**(shot.metadata or {})) for shot in clips]
        media["do_sample_frames"] = False
        if hasattr(getattr(processor, "video_processor", None), "use_token_compression"):
            media["use_token_compression"] = False  # VideoLLaMA3 drops tokens of its own
    return media


def _channels_first(pixels: Sequence[Any]) -> Callable[[Any], Any]:
    """Put channels before rows `[.., 3, h, w]` if a picture `[.., h, w, 3]` has few rows.

    A processor takes a first axis of one, three or four for the channels. It looks at one of them.
    """
    if not any(each.shape[-3] in (1, 3, 4) for each in pixels):
        return lambda each: each
    return lambda each: each.swapaxes(-1, -2).swapaxes(-2, -3)


def summed(counts: Sequence[tuple[int, int]], items: Sequence[int]) -> list[tuple[int, int]]:
    """Counts of images or clips added up by question, `items` of them to each."""
    rest = iter(counts)
    groups = [[next(rest) for _ in range(n)] for n in items]
    return [(sum(n for n, _ in group), sum(m for _, m in group)) for group in groups]


ROLES = ("system", "user", "assistant")
SOURCES = {
    "text": ("text",),
    "image": ("image", "url", "path", "base64"),
    "video": ("video", "url", "path"),
}


@dataclass(frozen=True)
class MediaPart:
    """An image or a clip of a conversation that is not read yet."""

    kind: str
    source: Any


def is_chat(value: Any) -> bool:
    """Return True for a list of messages as chat templates take them."""
    several = isinstance(value, (list, tuple)) and len(value) > 0
    return several and all(isinstance(m, Mapping) and {"role", "content"} & {*m} for m in value)


def read_chat(messages: Sequence[Mapping[str, Any]], given: Sequence[Any]) -> list[dict[str, Any]]:
    """Messages with their content as a list of texts and `MediaPart`, in order.

    Parts without a source take the next of `given`. MmfastError for an unknown role, part or key,
    for media that are left over, and where no user asks last.
    """
    rest, found = iter(given), list[dict[str, Any]]()
    for message in messages:
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise MmfastError(unknown("role", role, ROLES))
        if not isinstance(content, (str, list, tuple)):
            raise MmfastError(f"content is {an(type(content).__name__)}; give a text or a list")
        parts = [content] if isinstance(content, str) else content
        read = [part if isinstance(part, str) else _source(part, rest) for part in parts]
        found.append({"role": role, "content": read})
    if left := len(list(rest)):
        raise MmfastError(f"{left} of {len(given)} media have no place; write a part for each")
    texts = [part for part in found[-1]["content"] if isinstance(part, str)]
    if found[-1]["role"] != "user" or not "".join(texts).strip():
        raise MmfastError("the last message asks nothing; end with a text of role 'user'")
    return found


def _source(part: Any, rest: Iterator[Any]) -> str | MediaPart:
    if not isinstance(part, Mapping):
        raise MmfastError(
            f"a part of a message is {an(type(part).__name__)}; give a text or a dict"
        )
    filled = {key: value for key, value in part.items() if value is not None}
    kind = str(filled.pop("type", None))
    if (url := filled.pop(kind, None) if kind.endswith("_url") else None) is not None:
        kind = kind.removesuffix("_url")  # as clients of OpenAI write it
        filled["url"] = url.get("url") if isinstance(url, Mapping) else url
    if kind not in SOURCES:
        raise MmfastError(unknown("type of part", kind, SOURCES))
    for key in filled.keys() - {*SOURCES[kind]}:
        raise MmfastError(unknown(f"key of a part of type {kind}", key, SOURCES[kind]))
    filled = filled or {"": next(rest, None) if kind != "text" else None}
    (key, source), *more = filled.items()
    if source is None or more or (kind == "text" and not isinstance(source, str)):
        ways = ", ".join(SOURCES[kind])
        raise MmfastError(f"a part of type {kind} has no {kind}, or several; give one of: {ways}")
    if key == "base64":
        try:
            source = base64.b64decode(source, validate=True)
        except (binascii.Error, ValueError, TypeError):
            raise MmfastError("base64 of an image cannot be decoded; give its bytes") from None
    return source if kind == "text" else MediaPart(kind, source)


SIDE = 96  # pixels of an edge at which pictures are compared


class ScopeWarning(UserWarning):
    """A picture is unlike all that the embedded model was trained on, or there is none."""


def unknown_words(tokenizer: Any, question: str) -> list[str]:
    """Return the words of a question that the grammar of an embedded model has not."""

    def pieces(text: str) -> int:  # one for a word of the grammar
        return len(tokenizer.encode(text, add_special_tokens=False))

    words = dict.fromkeys(re.findall(r"[^\W\d_]+", question.lower()))
    return [word for word in words if min(pieces(word), pieces(f" {word}")) > 1]


def scope_note(shots: Sequence[Shot]) -> str:
    """Return one line on what is unlike the training data of the embedded model, or "".

    Words are none of it: the model takes questions in words that it was not taught, and says
    itself what is outside of its world.
    """
    parts = [] if shots else ["a question without an image or a clip"]
    parts += [f"this {shot.kind}" for shot in shots if is_foreign(shot.pixels)][:1]
    told = "the embedded model was trained on drawn shapes, numbers and colours alone; "
    end = " is outside of that, so the answer means little: name a model"
    return told + " and ".join(parts) + end if parts else ""


def scope_note_of(contents: Iterable[Sequence[Any]]) -> str:
    """Return the same of the contents of all messages of a user, `Shot` or text each."""
    return scope_note([part for each in contents for part in each if isinstance(part, Shot)])


def is_foreign(pixels: Any) -> bool:
    """Tell whether an image `[H, W, 3]` or clip `[T, H, W, 3]` is rough or bare.

    Drawn frames, also as H.264 and JPEG and before textures, have median steps of at most 9 in
    light and 3 in colour between neighbours, and something in every clip. What passes here and is
    outside nevertheless is for the model to refuse.
    """
    frames = pixels.reshape(-1, *pixels.shape[-3:])
    chosen = sorted({0, len(frames) // 2, len(frames) - 1})
    light, colour, spread = np.mean([_figures(frames[i]) for i in chosen], 0)
    return bool(light > 10 or colour > 5 or (len(frames) > 1 and spread < 1))


def _figures(frame: Any) -> tuple[float, ...]:
    """Median steps between neighbours in light and in colour, and the spread of all values."""
    small = Image.fromarray(frame).resize((SIDE, SIDE), Image.Resampling.BOX)
    picture = np.asarray(small, np.float32)
    light = picture.mean(-1, keepdims=True)
    steps = [np.abs(np.diff(each, axis=1)).max(-1) for each in (light, picture - light)]
    return (*map(np.median, steps), picture.std())
