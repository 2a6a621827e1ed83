"""What a visitor did wrong is one line on the page, without a path of this machine."""

from __future__ import annotations

import functools
import html
import re
from collections.abc import Callable
from typing import Any, TypeVar

import gradio as gr

import mmfast

F = TypeVar("F", bound=Callable[..., Any])
_FOLDERS = re.compile(r"(?<![\w.:/])/(?:[^/\s'\"]+/)+")


def one_line(error: object) -> str:
    """A message without line breaks and folders."""
    return _FOLDERS.sub("", " ".join(str(error).split()))


def polite(fn: F) -> F:
    """Show an `MmfastError` of an event as a message on the page."""

    @functools.wraps(fn)
    def told(*args: Any, **options: Any) -> Any:
        try:
            return fn(*args, **options)
        except mmfast.MmfastError as error:
            message = html.escape(one_line(error))
            raise gr.Error(message, print_exception=False) from None

    return told  # type: ignore[return-value]
