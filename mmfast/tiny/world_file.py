"""An endless world as a file to watch: `python -m mmfast.tiny.world_file world.mp4`.

Beside the mp4 goes what can be asked at its end, one JSON line a question.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from mmfast.core.errors import MmfastError
from mmfast.tiny.world import FACTS, World
from mmfast.tiny.world_questions import past_questions, present_questions


def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path, help="mp4 to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--fps", type=int, default=1)
    parser.add_argument("--every", type=float, help="seconds from fact to fact; 20 facts if absent")
    options = parser.parse_args(argv)
    every = options.seconds / FACTS if options.every is None else options.every
    try:
        world = World(options.seed, every=every)
        world.save(options.path, options.seconds, options.fps)
    except MmfastError as error:
        parser.error(str(error))
    last = (options.seconds * options.fps - 1) // 1 / options.fps
    asked = [*past_questions(world, last), *present_questions(world, last)]
    lines = "".join(json.dumps({**asdict(q), "age": q.age}) + "\n" for q in asked)
    options.path.with_suffix(".jsonl").write_text(lines, encoding="utf-8")
    print(f"{options.path.name}: {len(asked)} questions beside it", file=sys.stderr)


if __name__ == "__main__":
    main()
