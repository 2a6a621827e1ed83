"""Calls of functions in a model's text: `<tool_call>{"name": …, "arguments": …}</tool_call>`."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

OPEN, CLOSE = "<tool_call>", "</tool_call>"


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


def choice_fault(choice: Any, named: str | None, names: Collection[str]) -> str:
    """Return why a `tool_choice`, which may be one by name, does not go with the tools; or ""."""
    if choice != "required" and (named is None or named in names):
        return ""
    text = "tool_choice='required'" if named is None else f"tool_choice names {named[:80]!r}; it"
    if not names:
        return f"{text} needs tools"
    return "" if named is None else f"{text} is none of the tools: {', '.join(names)[:300]}"


def call_schema(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON schema of one call of a function, by the parameters of each by its name."""
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "arguments": given or {"type": "object"}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for name, given in parameters.items()
    ]
    return calls[0] if len(calls) == 1 else {"anyOf": calls}


def before_call(text: str) -> int:
    """Return the letters of an unfinished text that stand before a tag, or what may become one."""
    if (at := text.find(OPEN)) >= 0:
        return at
    return len(text) - next(n for n in range(len(OPEN) - 1, -1, -1) if text.endswith(OPEN[:n]))


def without_calls(pieces: Iterable[str], calls: list[str]) -> Iterator[str]:
    """Yield the text as it comes, without the calls in it, which are appended to `calls`."""
    held, inside = "", False
    for piece in pieces:
        held += piece
        while tag := re.search(f"{OPEN}|{CLOSE}" if inside else OPEN, held):
            text, held = held[: tag.start()], held[tag.end() :]
            if inside:
                calls.append(text)
            elif text:
                yield text
            inside = tag[0] == OPEN  # some models open the next call without closing the last
        if not inside and (at := before_call(held)):
            yield held[:at]
            held = held[at:]
    if inside:
        calls.append(held)
    elif held:
        yield held


def read_calls(text: str, names: Collection[str]) -> list[tuple[str, str]]:
    """Return name and arguments, as JSON, of each call of a named function in a JSON text.

    The text is one call or a list of them; what is none is left out.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return []
    calls = []
    for each in found if isinstance(found, list) else [found]:
        if isinstance(each, dict) and isinstance(name := each.get("name"), str) and name in names:
            given = each.get("arguments", each.get("parameters", {}))
            calls.append((name, given if isinstance(given, str) else json.dumps(given)))
    return calls
