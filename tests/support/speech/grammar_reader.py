"""Reads a JSpeech grammar independently of what wrote it: does it allow these words?"""

import re
from functools import cache


def accepts(grammar: str, words: list[str]) -> bool:
    """Whether the public rule of a grammar makes exactly these words."""
    rules, public = {}, ""
    for found in re.finditer(r"(public )?<([\w]+)> = ([^;]*);", grammar):
        rules[found[2]] = _alternatives(re.findall(r"<\w+>|[\w']+|[|()\[\]]", found[3]))[0]
        public = found[2] if found[1] else public

    @cache
    def ends(name: str, start: int) -> frozenset[int]:
        return _run(rules[name], start)

    def _run(node, start: int) -> frozenset[int]:
        kind, parts = node
        if kind == "or":
            return frozenset().union(*(_run(part, start) for part in parts))
        if kind == "maybe":
            return _run(parts, start) | {start}
        if kind == "row":
            at = frozenset({start})
            for part in parts:
                at = frozenset().union(*(_run(part, i) for i in at)) if at else at
            return at
        if parts.startswith("<"):
            return ends(parts[1:-1], start)
        return frozenset({start + 1} if words[start : start + 1] == [parts] else ())

    return len(words) in ends(public, 0)


def _alternatives(tokens: list[str]):
    options, row = [], []
    while tokens and tokens[0] not in (")", "]"):
        token = tokens[0]
        if token == "|":
            options.append(("row", tuple(row)))
            row, tokens = [], tokens[1:]
        elif token in "([":
            inner, tokens = _alternatives(tokens[1:])
            row.append(inner if token == "(" else ("maybe", inner))
            tokens = tokens[1:]
        else:
            row.append(("word", token))
            tokens = tokens[1:]
    return ("or", (*options, ("row", tuple(row)))), tokens
