"""Train a learned compressor: `python -m mmfast.compressors.train --tokens 1 --out DIR`."""

from __future__ import annotations

import importlib

RECIPE = "mmfast.tiny.video.compressors"  # a layer above, imported when run

if __name__ == "__main__":
    importlib.import_module(RECIPE).main()
