"""The stream model's card, written from the figures in its training log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CARD = """---
library_name: transformers
pipeline_tag: video-text-to-text
license: apache-2.0
---

# tiny-stream

The decoder of `tiny-video`, trained on to answer about a video that never ends: about what is on
screen now, and about things that were shown once, for a few seconds, minutes or hours ago. Tower,
projector and vocabulary are those of `tiny-video`. It exists so that memories of streams are
measured on a model that has learned to use one; it knows nothing of the world outside such videos.

Stock classes (`LlavaOnevisionForConditionalGeneration`, `LlavaOnevisionProcessor`), ordinary
format, no code of its own. Frames of 96 x 96, 36 visual tokens each; trained at 1 frame a second.
One thing in the configuration differs: rotary frequencies slower than a turn in 300 to 400
positions are stretched {factor:.0f}-fold (`rope_type` "llama3"), so that they stand still for
hours and a match counts the same at any age.

## What it can be asked

Of the past: the number that was shown beside a thing ("What number is at the red circle?") and the
corner that it was in ("In which corner is the red circle?"), where the stream has shown a thing of
that name once. Of the present, with the word "now": colour, shape, corner, and the number on the
screen. Answers are short lower-case words. It no longer answers `tiny-video`'s
questions about movement, speed and order.

The videos (`mmfast.tiny.stream.world`): ordinary scenes of one to three moving things, some
with a number that belongs to nothing, 10 to 60 seconds long, in hard cuts; and facts, 4 to 6
seconds long. A stream has at most 20 facts, because 20 of the 30 names are kept for them.

## Figures

Questions about unseen streams through real sessions, exact answers; age of the fact in windows of
32 frames, `mmfast eval --suite stream`:

{table}

By kind, unbounded and the last memory of the first stream length: {kinds}. It has not learned to
count what is on screen; say so when you average over kinds.

Training, from `training.jsonl` beside this card ({machine}, torch {torch}, seed {seed}): {facts}
clips of facts and {scenes} of scenes; {runs}.

## How it was trained

`python -m mmfast.tiny.stream.train`: clips are drawn (half of them go through H.264) and encoded
once by the frozen tower; a training stream is 13 of them (8 facts, 5 scenes; 36 frames,
of which only the 18 or 10 tokens that differ most from their frame are kept) or, in 3 steps of
10, 8 of them with all tokens. About 14 questions a stream are answered in one pass, in half of the
steps with an unbounded cache (random gaps of up to 400 frames between clips; each token of an
ordinary scene counts as up to 64 like it, as in a longer stream), in the other half in the layout
of a session: frames that saw a window only, and a question that sees sinks, some earlier frames at
contiguous positions, others in each layer, and the window.

Two losses beside the answers': the last two rows of a fact's tokens owe its name, number and corner
after each layer but the last (these read-outs are thrown away); and in every layer the mean query
of a question, before RoPE, must match the mean keys of the fact's frames better than those of the
other frames. The latter is what retrieval by mean keys (ReKV) goes by: say so when you compare
retrieval on it with models that were not trained for it.{notes}
"""


def write_card(folder: Path) -> None:
    """Write README.md in a checkpoint's folder from its training.jsonl."""
    lines = (folder / "training.jsonl").read_text(encoding="utf-8").splitlines()
    log = [json.loads(line) for line in lines]
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    starts = [row for row in log if row["stage"] == "start"]
    ends = [row for row in log if row["stage"] == "end"]
    found = [row for row in log if row["stage"] == "evaluation"]
    runs = ", then ".join(
        f"{end['steps']} steps in {end['seconds'] / 60:.0f} minutes" for end in ends
    )
    text = CARD.format(
        table="\n".join(_table(found)),
        kinds=_kinds(found[0]["rows"][0], found[0]["rows"][-1]) if found else "not measured",
        factor=config["text_config"]["rope_parameters"]["factor"],
        runs=runs,
        notes="".join(f"\n\n{row['note']}" for row in starts if "note" in row),
        **{key: starts[-1][key] for key in ("machine", "torch", "seed", "facts", "scenes")},
    )
    (folder / "README.md").write_text(text, encoding="utf-8")


def _kinds(*rows: dict[str, Any]) -> str:
    """Such as "entry 95 and 96 %, corner 100 and 100 %"."""
    shares = {
        kind: [f"{100 * row['by_kind'][kind]:.0f}" for row in rows] for kind in rows[0]["by_kind"]
    }
    return ", ".join(f"{kind} {' and '.join(each)} %" for kind, each in shares.items())


def _table(found: list[dict[str, Any]]) -> list[str]:
    rows = [(each, row) for each in found for row in each["rows"]]
    bands = list(dict.fromkeys(band for _, row in rows for band in row["by_age"]))
    names = ("stream", "memory", *bands)
    lines = [f"| {' | '.join(names)} |", "|---|---|" + "---|" * len(bands)]
    for each, row in rows:
        ages = [row["by_age"].get(band) for band in bands]
        cells = [f"{100 * age['accuracy']:.1f} % of {age['n']}" if age else "" for age in ages]
        memory = f"`{row['memory']}`" if row["memory"] else "unbounded"
        length = f"{row['seconds'] / 60:.0f} minutes, seed {each['seed']}"
        lines.append(f"| {' | '.join([length, memory, *cells])} |")
    return lines
