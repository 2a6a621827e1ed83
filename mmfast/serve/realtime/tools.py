"""Functions of the client that a model may call: their prompt, and calls in the text it writes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from mmfast.core.errors import ModelError
from mmfast.serve.realtime.protocol import EventError

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def checked_tools(tools: Sequence[Any] | None, calls: bool, where: str) -> list[dict[str, Any]]:
    """Return the functions; `EventError` for other tools, and where the model calls none."""
    if tools and not calls:
        raise EventError("this model calls no tools; send an empty list", param=where)
    for number, tool in enumerate(tools or ()):
        if tool.get("type") != "function" or not isinstance(tool.get("name"), str):
            text = "a tool is of type 'function' and has a name; others are not called here"
            raise EventError(text, param=f"{where}.{number}")
    return [dict(tool) for tool in tools or ()]


def prompt_of(tools: Sequence[Mapping[str, Any]], choice: Any) -> str:
    """Return the instructions that tell a model of its functions; "" where there are none."""
    if not tools or choice == "none":
        return ""
    names = ("name", "description", "parameters")
    told = [json.dumps({name: tool[name] for name in names if name in tool}) for tool in tools]
    must = choice.get("name") if isinstance(choice, Mapping) else None
    duty = "Call one now." if choice == "required" else f"Call {must} now." if must else ""
    lines = ["Functions that you can call, as JSON:", *told]
    form = f'{OPEN}{{"name": "...", "arguments": {{...}}}}{CLOSE}'
    return "\n".join([*lines, f"Write {form} to call one. {duty}".strip()])


def without_calls(pieces: Iterable[str], calls: list[str]) -> Iterator[str]:
    """Yield the text as it comes, without the calls in it, which are appended to `calls`."""
    held, inside = "", False
    for piece in pieces:
        held += piece
        while (at := held.find(CLOSE if inside else OPEN)) >= 0:
            text, held = held[:at], held[at + len(CLOSE if inside else OPEN) :]
            if inside:
                calls.append(text)
            elif text:
                yield text
            inside = not inside
        if not inside:  # what may be the beginning of a tag waits
            keep = next(n for n in range(len(OPEN), -1, -1) if held.endswith(OPEN[:n]))
            text, held = held[: len(held) - keep], held[len(held) - keep :]
            if text:
                yield text
    if inside:
        calls.append(held)
    elif held:
        yield held


def read_call(text: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """Return name and arguments, as JSON, of a call; `ModelError` if it is none of a function."""
    try:
        found = json.loads(text)
        name, arguments = found["name"], found.get("arguments", {})
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ModelError("the model wrote a call that is no JSON with a name") from None
    if name not in [tool["name"] for tool in tools]:
        raise ModelError("the model called a function that was not given to it")
    return name, arguments if isinstance(arguments, str) else json.dumps(arguments)
