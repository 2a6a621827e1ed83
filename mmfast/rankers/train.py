"""Train a learned ranking: `python -m mmfast.rankers.train --layers 2 --out DIR`."""

from __future__ import annotations

import argparse
import importlib

# Recipes, a layer above, imported when run.
RECIPES = {"top": "mmfast.tiny.rankers", "bavit": "mmfast.tiny.video.background"}
RECIPES |= {"route": "mmfast.tiny.router"}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--ranker", default="top", choices=sorted(RECIPES))
    known, _ = parser.parse_known_args()
    importlib.import_module(RECIPES[known.ranker]).main()
