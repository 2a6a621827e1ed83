"""The tab "About": what the embedded models know, and what runs here."""

from __future__ import annotations

import platform
from importlib.metadata import version
from typing import Any

import gradio as gr

import mmfast
from mmfast.demos import views
from mmfast.demos.shelf import Shelf

TEXT = """
### What can be asked here

The models inside are small on purpose: they load in a second, answer on a laptop, and were
trained for this page's clips. They know nothing of the world outside.

* **Ask**: short clips of one to four moving shapes, and single frames of them. Colour, shape,
  number of objects, direction, which is faster, corner at the start or the end, which came
  first, and a two-digit number on the screen. Your own film gives an answer, too, but a
  meaningless one. A real checkpoint takes the place of the small one with `mmfast demo --model
  Qwen/Qwen2.5-VL-7B-Instruct`.
* **Watch**: the same shapes without end. What is on the screen *now*, and the number or the
  corner of a thing that was shown for some seconds, however long ago.
* **Voice**: numbers, colours, shapes, motions, positions, times and short dialogue in English;
  other words are spelt, badly. It speaks in four voices.

### What happens to what you give

All work is done on the machine that serves this page; the page asks no other one for anything.
Uploads are removed after an hour at most, frames of the camera and sound of the microphone are
not kept at all, and a stream ends when its page is closed.

### What the figures mean

"First token after" is measured here and now, with this machine's other work; figures that were
made with care are in the README. "Same answer" compares the two texts. Links to papers leave
this machine when you follow them.
"""


def about_tab(shelf: Shelf) -> None:
    """Lay out the tab."""
    gr.Markdown(TEXT)
    gr.HTML(views.facts(versions(shelf), "Versions"))


def versions(shelf: Shelf) -> list[tuple[str, str]]:
    """What runs here."""
    names = ("torch", "transformers", "gradio")
    found: list[tuple[str, Any]] = [("mmfast", mmfast.__version__), ("model", shelf.name)]
    return [*found, *((name, version(name)) for name in names),
            ("python", platform.python_version())]  # fmt: skip
