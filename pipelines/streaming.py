"""Text deltas while the model still generates."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Iterator
from typing import Any

from transformers import StoppingCriteria, StoppingCriteriaList, TextIteratorStreamer

from mmfast.attach import attach


class _Stop(StoppingCriteria):  # type: ignore[misc]
    """Ends generation when the reader has gone away."""

    def __init__(self, gone: threading.Event) -> None:
        self.gone = gone

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        return input_ids.new_full((input_ids.shape[0],), self.gone.is_set(), dtype=bool)


def stream_text(pipe: Any, inputs: dict[str, Any], reduce: str | None) -> Iterator[str]:
    """Generate in a thread under the spec `reduce` and yield what it writes.

    An error in the thread is raised here; leaving the iterator early stops the generation.
    """
    streamer = TextIteratorStreamer(
        pipe.processor.tokenizer, skip_prompt=True, skip_special_tokens=True
    )
    gone, failure = threading.Event(), list[BaseException]()

    def work() -> None:
        try:
            with attach(pipe.model, reduce, pipe.cache, pipe.encoder):
                criteria = StoppingCriteriaList([_Stop(gone)])
                pipe.run(inputs, streamer=streamer, stopping_criteria=criteria)
        except BaseException as error:
            failure.append(error)
            streamer.end()

    thread = threading.Thread(target=contextvars.copy_context().run, args=(work,), daemon=True)
    thread.start()
    try:
        yield from (delta for delta in streamer if delta)
    finally:
        gone.set()
        thread.join()
    if failure:
        raise failure[0]
