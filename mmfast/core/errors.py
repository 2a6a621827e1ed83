"""Errors that a caller can cause: one line that names the value, the choices and the fix."""

from __future__ import annotations

import difflib
import os
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


class ContextError(MmfastError):
    """A prompt, or it and its answer, are longer than the context of the model."""


def an(noun: str) -> str:
    """Return a noun behind its article, chosen by the first letter: `a list`, `an int`."""
    return f"{'an' if noun[:1].lower() in tuple('aeiou') else 'a'} {noun}"


def unknown(what: str, value: object, choices: Iterable[str], more: Iterable[str] = ()) -> str:
    """Return ``unknown method 'divprun'; did you mean 'divprune'? choices: …`` in one line.

    A name of `more` may be the nearest one, but is not listed.
    """
    names = sorted(choices)
    # dashes and capitals make no likeness
    bare = {name.lstrip("-").casefold(): name for name in (*names, *more)}
    near = difflib.get_close_matches(str(value).lstrip("-").casefold(), bare, n=1, cutoff=0.5)
    hint = f"; did you mean {bare[near[0]]!r}?" if near else ";"
    if names:
        return f"unknown {what} {value!r}{hint} choices: {', '.join(names)}"
    return f"unknown {what} {value!r}{hint if near else '; there is none to choose'}"


def refused(error: OSError) -> str:
    """Return what the system refused, and of which file: a full disk, a file without rights."""
    reason = error.strerror or str(error) or type(error).__name__
    if error.filename is None:
        return f"a file or the output cannot be read or written: {reason}"
    return f"{os.fsdecode(error.filename)!r} cannot be read or written: {reason}"


# Packages between a warning and the line of the caller's that it is about.
_BETWEEN = ("contextlib", "mmfast", "torch", "transformers")


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line of the caller that stands outside mmfast and the libraries it calls.

    The number of frames between them depends on decorators, hooks and how the model is called.
    """
    level, frame = 2, sys._getframe(1)
    while frame.f_back and str(frame.f_globals.get("__name__")).split(".")[0] in _BETWEEN:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)
