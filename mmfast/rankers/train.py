"""Train a learned ranking: `python -m mmfast.rankers.train --layers 2 --out DIR`."""

from __future__ import annotations

import importlib

RECIPE = "mmfast.tiny.rankers"  # a layer above, imported when run

if __name__ == "__main__":
    importlib.import_module(RECIPE).main()
