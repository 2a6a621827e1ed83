"""Text of a stock `generate` as it is written, from a thread that ends with its reader."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from transformers import StoppingCriteria, StoppingCriteriaList, TextIteratorStreamer

# Generates; takes the streamer and the criteria for `generate`.
Generate = Callable[[TextIteratorStreamer, StoppingCriteriaList], Any]


class _ReaderGone(StoppingCriteria):  # type: ignore[misc]
    """Ends generation when the reader has gone away."""

    def __init__(self, gone: threading.Event) -> None:
        self.gone = gone

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        return input_ids.new_full((input_ids.shape[0],), self.gone.is_set(), dtype=bool)


def reader_left(criteria: Sequence[Any]) -> bool:
    """Return True if the reader of a text has gone away, of whose criteria these are."""
    return any(isinstance(each, _ReaderGone) and each.gone.is_set() for each in criteria)


def stream_text(
    tokenizer: Any, generate: Generate, criteria: Sequence[Any] = (), **decode: Any
) -> Iterator[str]:
    """Generate in a thread and yield what it writes, without the prompt and special tokens.

    `decode` are arguments of the tokenizer's `decode`. An error in the thread is raised here;
    leaving the iterator early stops the generation (`reader_left`).
    """
    how = {"skip_special_tokens": True, **decode}
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, **how)
    gone, failure = threading.Event(), list[BaseException]()

    def work() -> None:
        try:
            generate(streamer, StoppingCriteriaList([*criteria, _ReaderGone(gone)]))
        except BaseException as error:
            failure.append(error)
            streamer.end()

    thread = threading.Thread(target=contextvars.copy_context().run, args=(work,), daemon=True)
    thread.start()
    try:
        yield from (delta for delta in streamer if delta)
    except BaseException:
        gone.set()
        raise
    finally:
        thread.join()
    if failure:
        raise failure[0]


def stripped(pieces: Iterator[str]) -> Iterator[str]:
    """Yield a text without the space around it, as its pieces come; spaces wait for what follows.

    Closing it closes `pieces`, where they can be closed.
    """
    begun, space = False, ""
    try:
        for piece in pieces:
            text = space + piece if begun else piece.lstrip()
            shown = text.rstrip()
            space = text[len(shown) :]
            if shown:
                begun = True
                yield shown
    finally:
        if (close := getattr(pieces, "close", None)) is not None:
            close()
