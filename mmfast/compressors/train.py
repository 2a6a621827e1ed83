"""Train a learned compressor: `python -m mmfast.compressors.train --tokens 1 --out DIR`."""

from __future__ import annotations

import argparse
import importlib

# Recipes, a layer above, imported when run: of frames, and of text.
RECIPE, OF_TEXT = "mmfast.tiny.video.compressors", {"compllm": "mmfast.tiny.text.concepts"}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--compressor", default="")
    known, _ = parser.parse_known_args()
    importlib.import_module(OF_TEXT.get(known.compressor, RECIPE)).main()
