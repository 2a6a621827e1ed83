"""The tab "Voice": speak and be answered by voice, interrupt, or type and hear."""

from __future__ import annotations

import json
from functools import partial
from html import escape
from typing import Any

import gradio as gr
import numpy as np

from mmfast.demos import examples, views
from mmfast.demos.polite import polite
from mmfast.demos.shelf import Shelf
from mmfast.demos.voice_talk import CHAT

VOICES = {
    "en-us": "low",
    "en-us+m3": "low, another",
    "en-us+f2": "high",
    "en-us+f3": "high, another",
}
MODES = {
    "exact: as one token per pass": ("boost", "exact"),
    "typical: fewer passes": ("boost", "typical:0.3"),
    "one token per pass": ("vanilla", "exact"),
}
CAN_SAY = (
    "What is three plus four?",
    "What comes after nine?",
    "What is the opposite of left?",
    "and often mishears: it is small",
)
LONGEST = 300  # letters that are read out at once


def voice_tab(shelf: Shelf) -> None:
    """Lay out the tab and wire it."""
    gr.HTML(talking(), elem_id="talk")
    with gr.Accordion("Type and hear", open=True), gr.Row(equal_height=False):
        with gr.Column(scale=5, min_width=280):
            text = gr.Textbox(
                "The red circle moves to the left.", label="Text", max_length=LONGEST,
                lines=2, elem_id="say-text",
            )  # fmt: skip
            with gr.Row():
                voice = gr.Dropdown(
                    [(f"{name} ({how})", name) for name, how in VOICES.items()],
                    value="en-us", label="Voice", min_width=140,
                )  # fmt: skip
                mode = gr.Dropdown(
                    list(MODES), value=next(iter(MODES)), label="Drafting", min_width=200
                )
            button = gr.Button("Say it", variant="primary", elem_id="say")
        with gr.Column(scale=5, min_width=280):
            sound = gr.Audio(label="Speech", autoplay=True, interactive=False, buttons=["download"])
            figures = gr.HTML(views.note("Its figures come here."), elem_id="say-figures")
    how: dict[str, Any] = {"concurrency_id": "model", "concurrency_limit": 1}
    spoken = polite(partial(say, shelf))
    gr.on(
        [button.click, text.submit], spoken, [text, voice, mode], [sound, figures],
        api_visibility="private", **how,
    )  # fmt: skip


def say(shelf: Shelf, text: str, voice: str, mode: str) -> tuple[tuple[int, Any], str]:
    """Read a text out, and say what it cost."""
    schedule, rule = MODES[mode]
    spoken = shelf.speaker()(text, voice=voice, mode=schedule, verify=rule)
    pcm = (spoken.pcm.detach().float().clamp(-1, 1).cpu().numpy() * 32767).astype(np.int16)
    stats = spoken.stats
    rows = [
        ("seconds of speech", f"{spoken.seconds:.2f}"),
        ("first sound after", f"{stats['first_audio_ms']:.0f} ms"),
        ("time per second of speech", f"{stats['rtf']:.2f} s"),
        ("audio tokens a pass", f"{stats['tokens_per_pass']:.2f}"),
    ]
    return (spoken.rate, pcm), views.facts(rows, "Figures of the speech")


def talking() -> str:
    """The conversation's element; voice.js brings it to life."""
    about = [*([name, f"about: {label}"] for label, name in examples.names()), [CHAT, CHAT]]
    data = {"about": about, "voices": [[n, f"{n} ({how})"] for n, how in VOICES.items()]}
    asks = {CHAT: list(CAN_SAY)}
    asks |= {name: examples.questions(name, 4) for _, name in examples.names()}
    return (
        f"<mm-voice data-choices='{escape(json.dumps(data), quote=True)}' "
        f"data-asks='{escape(json.dumps(asks), quote=True)}'></mm-voice>"
    )
