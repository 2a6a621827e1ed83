"""The choice of a clip or picture: an example, or an upload, and how many frames of it are read."""

from __future__ import annotations

from typing import Any, NamedTuple

import gradio as gr

import mmfast
from mmfast.demos import examples, views
from mmfast.demos.examples import CLIPS, OWN, START
from mmfast.demos.shelf import FRAMES, Shelf
from mmfast.demos.views import polite

MEDIA = [".mp4", ".webm", ".mov", ".mkv", ".avi", ".gif", ".png", ".jpg", ".jpeg", ".webp"]
MOST = 32  # frames


class MediaInputs(NamedTuple):
    """Components that choose what is asked about."""

    upload: Any
    example: Any
    player: Any
    frames: Any
    changed: Any  # hidden; the page presses it as soon as a file is given, also one it refuses

    def wire(self, shown: list[Any], question: Any, tries: Any = None) -> None:
        """Show what is chosen; the results `shown` are of another one, and go."""
        clear: dict[str, Any] = {**views.QUICK, "queue": False}
        self.changed.click(views.emptied, None, shown, **clear)
        given, asked = (
            [self.example, self.upload],
            [question] if tries is None else [question, tries],
        )
        choose = polite(choose_several if tries is None else choose_one)
        outputs = [self.player, self.frames, *asked]
        chosen = self.example.input(views.emptied, None, shown, **clear)
        chosen.then(choose, given, outputs, **views.QUICK)
        taken = self.upload.change(own, self.upload, [self.example, self.player, *shown], **clear)
        taken.then(polite(take), given, [self.player, self.frames], **views.QUICK)


def media_inputs(name: str) -> MediaInputs:
    upload = gr.File(
        label="Your own clip or picture, up to 50 MB",
        file_types=MEDIA,
        height=170,
        elem_id=f"{name}-upload",
        elem_classes="mm-upload",
    )
    example = gr.Dropdown(
        [*examples.names(), OWN], value=START, label="Clip or picture", filterable=False
    )
    player = gr.HTML(views.player(str(CLIPS / START)))
    frames = gr.Slider(
        1, MOST, FRAMES, step=1, label="Frames read from the clip", elem_id=f"{name}-frames",
        info="A long clip loses what happens between them.",
    )  # fmt: skip
    changed = gr.Button(visible="hidden", elem_id=f"{name}-upload-changed")
    return MediaInputs(upload, example, player, frames, changed)


def own(upload: str | None) -> tuple[Any, ...]:
    """The upload is what is asked about now; what was shown before is stale."""
    return OWN, take(OWN, None)[0], *views.emptied()


def chosen(example: str | None, upload: str | None) -> str:
    if example and example != OWN:
        return str(CLIPS / example)
    if not upload:
        raise mmfast.MmfastError("there is no file yet; pick an example, or upload your own")
    return upload


def opened(shelf: Shelf, example: str | None, upload: str | None, frames: float) -> tuple[str, Any]:
    """The path of what is chosen, and that or its pixels as a pipeline takes it."""
    path = chosen(example, upload)
    return path, shelf.read(path, int(frames)) if example == OWN else path


def take(example: str | None, upload: str | None) -> tuple[str, Any]:
    """The player, and the control of frames where it is a clip."""
    if example == OWN and not upload:
        return views.note(
            "Choose a file: mp4, webm, mov, mkv, avi, gif, png, jpg, webp."
        ), gr.skip()
    path = chosen(example, upload)
    shown = views.player(path, uploaded=example == OWN)
    return shown, gr.Slider(visible=mmfast.kind_of(path) == "video")


def choose_one(example: str, upload: str | None) -> tuple[Any, ...]:
    if example == OWN:
        return *take(example, upload), gr.skip(), gr.Dataset(samples=[])
    asked = examples.questions(example)
    samples = gr.Dataset(samples=[[each] for each in asked])
    return *take(example, upload), asked[0], samples


def choose_several(example: str, upload: str | None) -> tuple[Any, ...]:
    asked = gr.skip() if example == OWN else "\n".join(examples.questions(example))
    return *take(example, upload), asked
