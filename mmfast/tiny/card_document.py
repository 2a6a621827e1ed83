"""The document model's card, written from the figures in its training log."""

from __future__ import annotations

import json
from pathlib import Path

CARD = """---
library_name: transformers
pipeline_tag: image-text-to-text
license: apache-2.0
---

# tiny-document

The decoder of `tiny-video`, trained on to find things on a page and to read the numbers printed
beside them. A page is 576 pixels wide and high; the model sees it as one overview and nine tiles
of 96 x 96: 1,440 visual tokens and 36 newlines (AnyRes of the stock
`LlavaOnevisionForConditionalGeneration`). Tower and projector are those of `tiny-video`. It exists
so that reductions can be measured where detail decides: a number is unreadable in the overview.

## What it can be asked

Of a page: the number at a named thing, the colour of a shape, the shape of a colour, how many
things there are, and in which corner of the page one lies. Answers are short lower-case words. It
knows nothing of real documents, words or layouts.

## Figures

Questions about unseen pages, exact answers, stock greedy generation, all visual tokens:

{table}

Training, from `training.jsonl` beside this card ({machine}, torch {torch}, seed {seed}):
{pages} pages, {steps} steps in {minutes:.0f} minutes, in {runs}.

## How it was trained

`python -m mmfast.tiny.document.train`: pages are drawn and encoded once by the frozen tower; the
decoder answers about ten questions a page in one pass. Most steps see a part of the tokens only
(the most diverse 10 to 30 %, sometimes a random 35 to 50 %, all of them in one step of twenty;
original positions): say so when you compare reductions on it with models that were not. In two of
the decoder's layers every visual token also owes in which cell of the page it lies, a thing's token
the number beside it and a number's token the thing; those read-outs are thrown away.{notes}
"""


def write_card(folder: Path) -> None:
    """Write README.md in a checkpoint's folder from its training.jsonl."""
    lines = (folder / "training.jsonl").read_text(encoding="utf-8").splitlines()
    log = [json.loads(line) for line in lines]
    starts = [row for row in log if row["stage"] == "start"]
    steps = [row for row in log if row["stage"] == "end"]
    (evaluation,) = [row for row in log if row["stage"] == "evaluation"]
    (whole,) = evaluation["rows"]
    kinds = list(whole["by_kind"])
    names = ["questions", "seed", "all", *kinds]
    values = [f"{100 * value:.1f} %" for value in (whole["accuracy"], *whole["by_kind"].values())]
    cells = [str(evaluation["n"]), str(evaluation["seed"]), *values]
    table = "\n".join(f"| {' | '.join(row)} |" for row in (names, ["---"] * len(names), cells))
    runs = "one run" if len(starts) == 1 else f"{len(starts)} runs, each from the one before"
    text = CARD.format(
        table=table,
        machine=starts[-1]["machine"],
        torch=starts[-1]["torch"],
        seed=starts[-1]["seed"],
        pages=starts[-1]["pages"],
        steps=sum(row["steps"] for row in steps),
        minutes=sum(row["seconds"] for row in steps) / 60,
        runs=runs,
        notes="".join(f"\n{row['note']}." for row in starts if "note" in row),
    )
    (folder / "README.md").write_text(text, encoding="utf-8")
