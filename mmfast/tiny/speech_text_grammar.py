"""The domain as a grammar for a recogniser, beginnings shared so that it is searched quickly."""

from __future__ import annotations

import re

from mmfast.tiny.speech_text_lines import LINES, PHRASES
from mmfast.tiny.speech_text_rules import RULES, SENTENCES

Tree = dict[str, "Tree"]
PART = re.compile(r"<[a-z ]+>|[a-z']+")
END = ""


def jsgf(dialogue: bool = False) -> str:
    """What is said, in the JSpeech Grammar Format.

    Args:
        dialogue: The lines of conversations too, not sentences and questions alone; slower.
    """
    sentences = [text for name in (*SENTENCES, "short") for text in RULES[name]]
    sentences += [*PHRASES, *(LINES if dialogue else ())]
    lead = "[<lead>] " if dialogue else ""
    top = f"public <utterance> = {lead}<sentence> | [<carrier>] <asked>;"
    texts = {"sentence": tuple(sentences), "asked": RULES["clip question"]}
    table = {**RULES, **texts}
    rules = [f"{_name(name)} = {_body(table[name])};" for name in sorted(_needed(texts))]
    return "\n".join(("#JSGF V1.0;", "grammar speech;", top, *rules)) + "\n"


def _needed(texts: dict[str, tuple[str, ...]]) -> set[str]:
    """Names of the rules that are reached."""
    table, found = {**RULES, **texts}, set[str]()
    todo = [*texts, "carrier", "lead"]
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            todo += [part[1:-1] for text in table[name] for part in _parts(text) if part[0] == "<"]
    return found


def _parts(text: str) -> list[str]:
    """Words and rules; a thing with or without its size is one rule, so beginnings are shared."""
    text = text.replace("<thing>", "<sized>") if text not in RULES["sized"] else text
    return PART.findall(text)


def _name(rule: str) -> str:
    return f"<{rule.replace(' ', '_')}>"


def _body(texts: tuple[str, ...]) -> str:
    """Alternatives as a tree whose branches part where the texts do."""
    tree: Tree = {}
    for text in texts:
        at = tree
        for part in _parts(text):
            at = at.setdefault(part, {})
        if at is not tree:
            at[END] = {}
    return _written(tree)


def _written(tree: Tree) -> str:
    options = []
    for part, behind in tree.items():
        if part == END:
            continue
        name = _name(part[1:-1]) if part[0] == "<" else part
        rest = _written(behind)
        if rest:
            rest = f" [{rest}]" if END in behind else f" ({rest})"
        options.append(name + rest)
    return " | ".join(options)
