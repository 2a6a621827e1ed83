"""Write the sample clips and their questions: `python -m mmfast.tiny.clips [FOLDER]`."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

from mmfast.tiny.questions import Fact, facts
from mmfast.tiny.render import draw
from mmfast.tiny.scene import CLIPS, Scene, make_scene
from mmfast.tiny.table import make_table
from mmfast.tiny.video_io import encode

Wish = Callable[[Scene, list[Fact]], bool]


def _asks(known: list[Fact], kind: str, *slots: str) -> bool:
    return any(f.kind == kind and f.slots[: len(slots)] == slots for f in known)


WISHES: dict[str, Wish] = {
    "red-circle": lambda s, k: len(s.things) == 2 and _asks(k, "direction", "red circle"),
    "four-shapes": lambda s, k: len(s.things) == 4 and _asks(k, "count"),
    "number": lambda s, k: len(s.things) == 2 and _asks(k, "number"),
    "fast-and-slow": lambda s, k: len(s.things) == 2 and _asks(k, "speed") and not s.panel,
    "latecomer": lambda s, k: len(s.things) == 3 and _asks(k, "first"),
    "behind-a-bar": lambda s, k: s.bar is not None and len(s.things) == 3,
}


def write_clips(folder: Path) -> None:
    """Write one clip per wish, the first that fits, and clips.json with questions and answers."""
    folder.mkdir(parents=True, exist_ok=True)
    listing = {}
    for number, (name, wish) in enumerate(WISHES.items()):
        scene, known = _find(wish, number)
        (folder / f"{name}.mp4").write_bytes(encode(draw(scene).frames))
        listing[f"{name}.mp4"] = [
            {"question": fact.ask(0), "answer": fact.answer, "kind": fact.kind} for fact in known
        ]
    (folder / "clips.json").write_text(json.dumps(listing, indent=1) + "\n")


def _find(wish: Wish, seed: int) -> tuple[Scene, list[Fact]]:
    index = 0
    while True:
        scene = make_scene(CLIPS, seed, index)
        known = facts(make_table(scene, draw(scene)), margin=True)
        if wish(scene, known):
            return scene, known
        index += 1


if __name__ == "__main__":
    write_clips(Path(sys.argv[1] if len(sys.argv) > 1 else "assets/clips"))
