"""How the page looks: one theme, system fonts, nothing from elsewhere."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import gradio as gr

TITLE = "mmfast"
HEAD = (
    '<header class="mm-head"><h1>mmfast</h1><p>Image, video and speech models that answer sooner, '
    "remember longer and cost less.</p></header>"
)
SCRIPTS = ("page.js", "voice.js")


def theme() -> Any:
    """Quiet, with the fonts of the visitor's system."""
    return gr.themes.Base(
        primary_hue="teal",
        secondary_hue="teal",
        neutral_hue="slate",
        radius_size="lg",
        font=("system-ui", "-apple-system", "Segoe UI", "Roboto", "sans-serif"),
        font_mono=("ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "monospace"),
    ).set(
        button_primary_background_fill="*primary_700",
        button_primary_background_fill_hover="*primary_800",
        button_primary_background_fill_dark="*primary_700",
        button_primary_text_color="white",
        body_text_color_subdued="*neutral_600",
        body_text_color_subdued_dark="*neutral_300",
        block_label_text_color="*neutral_600",
        block_label_text_color_dark="*neutral_300",
        block_shadow="none",
        block_label_text_size="*text_sm",
    )


def dress() -> dict[str, Any]:
    """Options of `mount_gradio_app` that say how the page looks."""
    here = files("mmfast.demos")
    scripts = "".join(here.joinpath(name).read_text(encoding="utf-8") for name in SCRIPTS)
    css, phone = (
        here.joinpath(name).read_text(encoding="utf-8") for name in ("page.css", "phone.css")
    )
    # What Gradio makes of `css` does not hold inside @media.
    head = f"<style>{phone}</style><script>{scripts}</script>"
    return {"theme": theme(), "css": css, "head": head}
