"""Train a learned compressor, or the model that reads what a reducer leaves.

`python -m mmfast.compressors.train --tokens 1 --out DIR`, or `--reduce key_clip:36 --out DIR`.
"""

from __future__ import annotations

import argparse
import importlib

# Recipes, a layer above, imported when run: of frames, of text, and of a LoRA under a reduction.
RECIPE, OF_TEXT = "mmfast.tiny.video.compressors", {"compllm": "mmfast.tiny.text.concepts"}
STUDENT = "mmfast.tiny.student"

if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--compressor", default="")
    parser.add_argument("--reduce")
    known, _ = parser.parse_known_args()
    recipe = OF_TEXT.get(known.compressor, RECIPE) if known.reduce is None else STUDENT
    importlib.import_module(recipe).main()
