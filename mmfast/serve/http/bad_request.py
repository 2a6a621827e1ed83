"""From what pydantic finds wrong to one line that names the value, the choices and the fix."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Sequence
from typing import Any

from mmfast.core.errors import unknown
from mmfast.serve.guard.errors import ApiError
from mmfast.serve.http import chat_request as chat
from mmfast.serve.http.speech_request import SpeechRequest

_WHY = {
    "n": "ask once per answer",
    "logprobs": "probabilities are not given; leave it out",
    "top_logprobs": "probabilities are not given; leave it out",
    "presence_penalty": "penalties are not supported; leave it out",
    "frequency_penalty": "penalties are not supported; leave it out",
    "logit_bias": "biases are not supported; leave it out",
    "response_format": "answers are plain text; leave it out",
    "modalities": "answers are text here; for speech ask /v1/audio/speech or /v1/realtime",
    "tools": "the model calls no tools; leave it out",
    "tool_choice": "the model calls no tools; leave it out",
    "store": "nothing is stored; leave it out",
    "service_tier": "there is one tier; see mmfast.priority",
}
_NESTED: dict[str, type[chat.Strict]] = {
    "mmfast": chat.MmfastOptions,
    "stream_options": chat.StreamOptions,
    "image_url": chat.ImageUrl,
    "video_url": chat.VideoUrl,
    "input_audio": chat.Sound,
}
_ROLES: dict[str, type[chat.Strict]] = {
    "user": chat.UserMessage,
    "system": chat.SystemMessage,
    "developer": chat.SystemMessage,
    "assistant": chat.AssistantMessage,
}


def refusal(errors: Sequence[dict[str, Any]], body: Any, path: str = "") -> ApiError:
    """The error to answer with.

    Args:
        errors: As pydantic lists them.
        body: What was sent.
        path: Of the route, whose parameters are then known.
    """
    found = max(errors, key=lambda error: len(_walk(error["loc"], body)[0]))
    kind, ctx = str(found["type"]), found.get("ctx", {})
    if kind == "json_invalid":
        return _error(f"the body is no JSON ({ctx.get('error', 'cut short')}); send a JSON object")
    keys, value = _walk(found["loc"], body)
    if not keys:
        return _error("the body is no JSON object; send one, as Content-Type: application/json")
    param = _dotted(keys)
    if kind == "missing":
        return _error(f"{param} is missing; give it", "missing_required_parameter", param)
    if kind == "extra_forbidden":
        text = unknown("parameter", param, [_dotted([*keys[:-1], n]) for n in _names(keys, body)])
        return _error(text, "unknown_parameter", param)
    if kind.startswith("union_tag"):
        return _tag(found, param, value)
    why = _WHY.get(str(keys[0]))
    if why is not None:
        return _error(f"{param}={_short(value)}: {why}", "unsupported_parameter", str(keys[0]))
    return _error(f"{param}={_short(value)} is wrong: {_said(found)}", "invalid_value", param)


def _error(text: str, code: str = "invalid_json", param: str | None = None) -> ApiError:
    return ApiError(400, text, code=code, param=param)


def _tag(found: dict[str, Any], param: str, value: Any) -> ApiError:
    """A role or a kind of part that is not taken."""
    ctx = found.get("ctx", {})
    name = str(ctx.get("discriminator", "type")).strip("'")
    given = value.get(name) if isinstance(value, dict) else None
    if given is None:
        where = f"{param}.{name}"
        return _error(f"{where} is missing; give it", "missing_required_parameter", where)
    choices = re.findall(r"'([^']*)'", str(ctx.get("expected_tags", "")))
    where = f"{param}.{name}"
    return _error(unknown(where, _plain(given), choices), "invalid_value", where)


def _said(found: dict[str, Any]) -> str:
    text = str(found["msg"])
    return text[:1].lower() + text[1:]


def _walk(loc: Sequence[Any], body: Any) -> tuple[list[str | int], Any]:
    """The keys of `loc` that lead into the body, without pydantic's names of alternatives."""
    keys: list[str | int] = []
    steps = [step for step in loc if step != "body"]
    for i, step in enumerate(steps):
        inside = isinstance(body, list) and isinstance(step, int) and step < len(body)
        if inside or (isinstance(body, dict) and step in body):
            keys, body = [*keys, step], body[step]
        elif isinstance(body, dict) and i == len(steps) - 1:
            return [*keys, step], None  # what is missing
    return keys, body


def _dotted(keys: Sequence[str | int]) -> str:
    text = "".join(f"[{k}]" if isinstance(k, int) else f".{_plain(k)}" for k in keys)
    return text.lstrip(".")


def _names(keys: Sequence[str | int], body: Any) -> list[str]:
    """Parameters that there are beside the last of `keys`."""
    if len(keys) == 1:
        top: type[chat.Strict] = chat.ChatRequest
        if isinstance(body, dict) and "messages" not in body and "input" in body:
            top = SpeechRequest
        return list(top.model_fields)
    for key in keys[:-1]:
        body = body[key]
    model = _NESTED.get(str(keys[-2]))
    if model is None and isinstance(body, dict):
        model = _ROLES.get(str(body.get("role")))
    return list(model.model_fields) if model is not None else ["type", "text"]


def _short(value: Any) -> str:
    text = repr(value[:60]) if isinstance(value, str) else reprlib.repr(value)
    return _plain(text if len(text) <= 60 else text[:57] + "…")


def _plain(text: object) -> str:
    """On one line, and fit to be sent."""
    return " ".join(str(text)[:400].encode("utf-8", "replace").decode().split())[:200]
