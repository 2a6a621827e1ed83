"""Errors that a caller can cause: one line that names the value, the choices and the fix."""

from __future__ import annotations

import difflib
import sys
import warnings
from collections.abc import Iterable


class MmfastError(ValueError):
    """Base of every error that bad input or bad usage can raise; the CLI exits 2 on it."""


class SpecError(MmfastError):
    """A spec string such as ``"divprune:0.25"`` has a wrong name, site, knob or budget."""


class MediaError(MmfastError):
    """An image, video or audio input is missing, broken, too large or of the wrong kind."""


class ModelError(MmfastError):
    """A model is of an unknown family, lacks a signal, or its files cannot be loaded."""


def warn(message: str, kind: type[Warning] = UserWarning) -> None:
    """Warn at the line of the caller's code, however deep inside of the package it is noticed."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and _ours(frame.f_globals.get("__name__", "")):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, kind, stacklevel=level)


def _ours(module: str) -> bool:
    return module.partition(".")[0] == "mmfast"


def an(noun: str) -> str:
    """Return a noun behind its article, chosen by the first letter: `a list`, `an int`."""
    return f"{'an' if noun[:1].lower() in tuple('aeiou') else 'a'} {noun}"


def unknown(what: str, value: object, choices: Iterable[str], more: Iterable[str] = ()) -> str:
    """Return ``unknown method 'divprun'; did you mean 'divprune'? choices: …`` in one line.

    A name of `more` may be the nearest one, but is not listed.
    """
    names = sorted(choices)
    bare = {name.lstrip("-"): name for name in (*names, *more)}  # dashes make no likeness
    near = difflib.get_close_matches(str(value).lstrip("-"), bare, n=1, cutoff=0.5)
    hint = f"; did you mean {bare[near[0]]!r}?" if near else ";"
    return f"unknown {what} {value!r}{hint} choices: {', '.join(names)}"
