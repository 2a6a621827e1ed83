"""Hooks of mkdocs: where the package lies for the Python pages, and bars in the code of tables.

kernels/, pipelines/ and demos/ lie beside mmfast/ in a checkout, and inside it once installed.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def on_startup(**_: Any) -> None:
    """Link every part of the package into `.typing/mmfast`, the source of the Python pages."""
    home = ROOT / ".typing" / "mmfast"
    home.mkdir(parents=True, exist_ok=True)
    beside = [ROOT / name for name in ("kernels", "pipelines", "demos")]
    for part in [*(ROOT / "mmfast").iterdir(), *beside]:
        link = home / part.name
        if not link.exists():
            link.symlink_to(part)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return a page with bars in the code of tables as they are; GitHub alone wants an escape."""
    bars = lambda line: re.sub(r"`[^`]*`", lambda code: code[0].replace(r"\|", "|"), line[0])
    return re.sub(r"^\|.*$", bars, markdown, flags=re.MULTILINE)
