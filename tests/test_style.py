"""Plain English in docstrings, comments, messages and documents."""

from __future__ import annotations

import ast
import functools
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TOPS = ("mmfast", "kernels", "pipelines", "demos")
# A docstring opens with a verb or a noun phrase.
QUESTION = re.compile(r"(What|Who|Whom|Whose|Where|How|Whether|Which|When|Why)\b")
# Riddles that were found once, and what a reader was meant to guess.
RIDDLES = re.compile(
    r"none of (its|his|her|their|our) business|how manyeth|\bnobody's\b|\bnobody is\b"
    r"|thrown away|\bwhoever\b|\bwhomever\b|(?<!there )are none[.;,]|is told[.;,]"
    r"|\bsomebody else's\b",
    re.IGNORECASE,
)
DOCUMENTED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)


def _files() -> list[Path]:
    return [path for top in TOPS for path in sorted((ROOT / top).rglob("*.py"))]


Lines = list[tuple[int, str]]  # each with the number of its line


def _said(text: str) -> tuple[Lines, Lines]:
    """Docstrings of a module, and all of its strings, docstrings among them."""
    docs, strings = Lines(), Lines()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, DOCUMENTED):
            docs.append((getattr(node, "lineno", 1), ast.get_docstring(node) or ""))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            strings.append((node.lineno, node.value))
    return docs, strings


_said_in = functools.cache(lambda path: _said(path.read_text()))


def _comments(text: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def _riddles(text: str, strings: Lines) -> list[str]:
    # A comment lies in the text as it is, so most files need not be cut into tokens.
    said = [*strings, *(_comments(text) if RIDDLES.search(text) else ())]
    return sorted({f"{line}: {m[0]}" for line, words in said for m in RIDDLES.finditer(words)})


@pytest.mark.parametrize("top", TOPS)
def test_docstrings_open_with_a_verb_or_a_noun(top: str) -> None:
    bad = [
        f"{path.relative_to(ROOT)}:{line}: {doc.splitlines()[0]}"
        for path in sorted((ROOT / top).rglob("*.py"))
        for line, doc in _said_in(path)[0]
        if QUESTION.match(doc)
    ]
    assert not bad


def test_no_riddles() -> None:
    found = {
        str(path.relative_to(ROOT)): _riddles(path.read_text(), _said_in(path)[1])
        for path in _files()
    }
    assert not {name: lines for name, lines in found.items() if lines}


def test_no_riddles_in_documents() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    assert not {p.name: m[0] for p in pages for m in RIDDLES.finditer(p.read_text())}


def test_the_patterns_catch_what_they_are_for() -> None:
    assert QUESTION.match("What a stage left.") and QUESTION.match("How tokens are chosen.")
    assert not QUESTION.match("Whatever") and not QUESTION.match("Howard")
    texts = ('"""Unknown ids are none of its business."""', "x = 1  # the how manyeth token")
    assert all(_riddles(text, _said(text)[1]) for text in texts)
    parted = 'x = "none of its " "business"'
    assert _riddles(parted, _said(parted)[1]) == ["1: none of its business"]
    assert not _riddles("", _said('"""Return the kept indices."""')[1])
