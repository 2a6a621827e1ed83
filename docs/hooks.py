"""Hook of mkdocs: lay the package out as an installed one, so that the Python pages are found.

kernels/, pipelines/ and demos/ lie beside mmfast/ in a checkout, and inside it once installed.
"""

from __future__ import annotations

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
