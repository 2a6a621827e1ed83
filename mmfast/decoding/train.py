"""Train the adapter of an early exit: `python -m mmfast.decoding.train --layer 2 --out FILE`."""

from __future__ import annotations

import importlib

RECIPE = "mmfast.tiny.text.exits"  # a layer above, imported when run

if __name__ == "__main__":
    importlib.import_module(RECIPE).main()
