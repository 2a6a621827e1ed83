"""The model card, written from the figures in the training log and from nothing else."""

import json
from pathlib import Path
from typing import Any

CARD = """---
library_name: transformers
pipeline_tag: video-text-to-text
license: apache-2.0
---

# tiny-video

A LLaVA-OneVision of {parameters:.1f} million parameters that answers questions about short clips
of moving shapes and numbers. It exists so that every claim about quality is measured on a model
that has learned something; it knows nothing of the world outside such clips.

Stock classes (`LlavaOnevisionForConditionalGeneration`, `LlavaOnevisionProcessor`), ordinary
format, no code of its own. Eight frames, uniformly sampled, 96 x 96: 36 visual tokens a frame,
288 a clip and one newline token.

## What it can be asked

Of a clip: colour, shape, number of objects, direction of movement, which of two is faster, corner
at the start or the end, which of two appeared first, and a two-digit number that is on screen for
part of the clip. Of a picture: colour, shape, number of objects, corner, number. Answers are short
lower-case words. Clips have a textured background, camera shake, 1 to 4 objects that hide each
other, a grey bar in some, and are H.264 files, in training too.

Comparisons are only asked, in evaluation, where they are clear: speeds that differ by 1.6 times or
more, of things in sight together in 5 of the 8 frames; first appearances 3 or more of the 8 frames
apart. Training has closer ones too.

## Figures

Questions about unseen clips, exact answers, stock greedy generation, all visual tokens:

{table}

Training, from `training.jsonl` beside this card ({machine}, torch {torch}, seed {seed}):

{stages}

## How it was trained

`python -m mmfast.tiny.video.train --seed {seed}`: (1) clips are drawn, encoded and read back;
(2) tower and projector learn what every patch shows (shape, colour, digit, row, column, offset
to the object's centre), labels that the generator knows; (3) they are frozen and run over the
clips once; (4) the decoder learns to answer, about ten questions a clip in one pass, half of the
clips played backwards; (5) the same at a lower rate with some single pictures among the clips.
In (4) and (5) two of its layers also owe, at every visual token, how the object there moves,
and in (5) where a question names an object, how that one moves; those read-outs are thrown away.

Parts of the visual tokens were dropped in half of the steps (random, uniform, by change between
frames, or by diversity; 8 to 60 % kept, original positions), so that the model is used to
answering from fewer: say so when you compare reductions on it with models that were not.
"""


def write_card(folder: Path) -> None:
    """Write README.md of a checkpoint folder from its training.jsonl."""
    lines = (folder / "training.jsonl").read_text().splitlines()
    log = [json.loads(line) for line in lines]
    start = _last(log, "start")
    size = (folder / "model.safetensors").stat().st_size
    text = CARD.format(
        parameters=size / 4e6,
        table=_table([row for row in log if row["stage"] == "evaluation"]),
        stages=_stages(log),
        machine=start["machine"],
        torch=start["torch"],
        seed=start["seed"],
    )
    (folder / "README.md").write_text(text)


def _last(log: list[dict[str, Any]], stage: str) -> dict[str, Any]:
    return [row for row in log if row["stage"] == stage][-1]


def _table(evaluations: list[dict[str, Any]]) -> str:
    kinds = list(evaluations[0]["rows"][0]["by_kind"])
    head = ["seed", "questions", "all", *kinds]
    rows = [head, ["---"] * len(head)]
    for found in evaluations:
        row = found["rows"][0]
        shares = [row["accuracy"], *(row["by_kind"][k] for k in kinds)]
        cells = [str(found["seed"]), str(found["n"]), *(f"{100 * s:.1f} %" for s in shares)]
        rows.append(cells)
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _stages(log: list[dict[str, Any]]) -> str:
    tower, held = _last(log, "tower"), _last(log, "held-out")
    language = _last(log, "language")
    cells = ", ".join(f"{k} {100 * tower['cells'][k]:.1f} %" for k in ("shape", "colour", "digit"))
    found = [
        f"- clips: {_last(log, 'bank')['clips']} made in {_minutes(_last(log, 'bank'))}, "
        f"{_last(log, 'encode')['clips']} of them used for the decoder",
        f"- tower and projector: {tower['step'] + 1} steps in {_minutes(tower)}; "
        f"right on pooled tokens that show something: {cells}",
        f"- decoder: {language['step']} steps in {_minutes(language)}",
    ]
    polish = [row for row in log if row["stage"] == "polish"]
    if polish:
        found.append(f"- with pictures: {polish[-1]['step']} steps in {_minutes(polish[-1])}")
    mean, worst = held["mean"], min(held["kinds"], key=held["kinds"].get)
    found.append(
        f"- at the end, on clips of the bank kept back, close comparisons included: "
        f"{100 * mean:.1f} % of questions, lowest {worst} with {100 * held['kinds'][worst]:.1f} %"
    )
    if "note" in log[0]:
        found.append(f"- {log[0]['note']}")
    ends = [row for row in log if row["stage"] == "end"]
    if ends:
        found.append(f"- whole run: {_minutes(ends[-1])}")
    return "\n".join(found)


def _minutes(row: dict[str, Any]) -> str:
    return f"{row['seconds'] / 60:.0f} minutes"
