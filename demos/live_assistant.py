"""A live assistant: watches a camera, the screen or a file, and speaks when something happens.

python -m mmfast.demos.live_assistant world.mp4 "What number is on the screen now?" 55 \
    "What number is at the white triangle?"
"""

import sys
from typing import Any

import mmfast


def assist(source: Any, until: str, yes: str, *questions: str, **given: Any) -> Any:
    """Wait until the answer to `until` is `yes` or the source ends, then ask the questions."""
    model, timeout = given.pop("model", None), given.pop("timeout", 120.0)
    with mmfast.pipeline("video-stream", model).open(memory=given.pop("memory", "auto")) as session:
        watch = session.watch(source, background=True, **given)
        event = session.wait_until(until, timeout=timeout, yes=yes.split(","), no=None)
        print("it never came" if event is None else f"[{event.time:.1f} s] {until} {yes}")
        watch.join(timeout)  # the rest of a file; a camera goes on until the time is up
        for question in questions:
            reply = session.ask(question)
            print(question, reply.read(), f"({len(reply.recalled)} frames read again)")
        return event, session.stats()


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit("give: SOURCE (0, screen or a file) QUESTION ANSWER [QUESTION ...]")
    source, *asked = sys.argv[1:]
    try:
        assist(int(source) if source.isdecimal() else source, *asked)
    except mmfast.MmfastError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
