"""The speech model's card, written from its configuration and the figures in its training log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mmfast.models.speech.layout import SpeechLayout

CARD = """---
library_name: transformers
pipeline_tag: text-to-speech
license: apache-2.0
language: en
---

# tiny-speech

A language model over words and sound: it says any sentence of its domain (numbers, colours,
shapes, motions, positions, times, short dialogue), understands the same spoken, and answers
speech with speech. It exists so that draft modules, verification, streaming and conversation are
measured on a model that has learned to speak; outside its {words} words it spells, badly.

| part | what |
|---|---|
| backbone | stock `LlamaForCausalLM`, {layers} layers of width {width} |
| rows | {total}: {texts} of text, then `<next>`, `<end>`, {books} x {entries} codes |
| codec | `codec/`: 16 kHz, 25 frames a second, {books} codes each; a harmonic-plus-noise vocoder |
| ear | `tower.safetensors`: causal convolutions over log-mel, 25 embeddings a second |
| draft modules | `heads/`: `mctp` (10 chained modules), `mtp` (5 independent ones) |
| tokenizer | words of the domain whole, other words letter by letter; `_` ends a word |

{size:.1f} MB in all. Voices {voices}; {speeds} words per minute; pitch {pitches}.

`mmfast.models.speech.embedded.load_speech()` speaks, listens and answers; the backbone alone
loads with `AutoModelForCausalLM`.

## Layout

Speaking: `<speak> voice speed pitch`, three groups of text (a group is a word or a mark), then the
sound of the first, `<next>`, the fourth group, the sound of the second, `<next>` … `<done>` behind
the last group, `<end>` behind the last sound. Text runs two groups ahead; what kind a token is of
is known from outside, so choices and losses are over text rows or over audio rows alone. The group
that a `<next>` owes may come up to twelve tokens late, as it does when drafts run past it.
Listening: `<listen>`, embeddings, `<heard>`, words, `<done>`. Conversation: the past as `<user>`
and `<answer>` text, then the last question heard and its answer said.

## Training

`python -m mmfast.tiny.speech.train`, on recordings of espeak-ng alone: {recordings}.
{runs}
Speech to be understood is in eleven voices at 125 to 210 words per minute, with gain, noise, DC
offset, telephone band and silence around it. Texts for evaluation are kept apart by their
checksum. The ear is trained alone first; each of its states also owes the word that has just
ended, behind layer 7 of the backbone (this read-out is thrown away). States also owe the next five
tokens of sound, each through a matrix that is thrown away: it is what makes drafts from them right.
Draft modules were trained last, the backbone frozen, on what the backbone itself says.

Unseen lessons, per task and kind of token its mean loss (nats) and the share guessed right:

{table}

Draft modules, share of the backbone's own choices guessed right, module by module (teacher-forced):

{heads}

Word errors and speed: `mmfast eval --suite speech`, `mmfast bench --speech`.
{notes}"""


def write_card(folder: Path) -> None:
    """Write README.md in a checkpoint's folder from its training.jsonl."""
    lines = (folder / "training.jsonl").read_text(encoding="utf-8").splitlines()
    log = [json.loads(line) for line in lines]
    layout = SpeechLayout.load(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    words = sum(name.endswith("_") and len(name) > 2 for name in layout.rows)
    text = CARD.format(
        words=words,
        layers=config["num_hidden_layers"],
        width=config["hidden_size"],
        total=layout.total,
        texts=layout.texts,
        books=layout.books,
        entries=layout.entries,
        size=sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 1e6,
        voices=", ".join(f"`{name}`" for name in layout.voices),
        speeds=", ".join(map(str, layout.speeds)),
        pitches=", ".join(map(str, layout.pitches)),
        recordings=_recordings(log),
        runs=_runs(log),
        table="\n".join(_table(log)),
        heads="\n".join(_heads(log)),
        notes="".join(f"\n{row['note']}\n" for row in log if "note" in row),
    )
    (folder / "README.md").write_text(text, encoding="utf-8")


def _recordings(log: list[dict[str, Any]]) -> str:
    rows = [row["of_sound"] for row in log if "of_sound" in row]
    if not rows:
        return "not noted"
    names = {"say": "to say", "hear": "to hear", "ask": "questions", "reply": "answers"}
    return ", ".join(f"{rows[-1][k] / 3600:.1f} hours {v}" for k, v in names.items())


def _runs(log: list[dict[str, Any]]) -> str:
    """How long each stage took."""
    last: dict[str, dict[str, Any]] = {}
    for row in log:
        if "step" in row and "seconds" in row:
            last[row["stage"]] = row
    machine = next((row for row in log if "machine" in row), {})
    stages = ", ".join(
        f"{name} {row['step']} steps in {row['seconds'] / 60:.0f} minutes"
        for name, row in last.items()
    )
    where = f" ({machine['machine']}, torch {machine['torch']}, seed {machine['seed']})"
    return f"Stages: {stages}{where if machine else ''}."


def _table(log: list[dict[str, Any]]) -> list[str]:
    latest: dict[str, Any] = {}
    for row in log:
        if row["stage"] == "held-out":
            latest |= row
    lines = ["| lesson | loss | right |", "|---|---|---|"]
    for name, value in sorted(latest.items()):
        if isinstance(value, list):
            lines.append(f"| {name} | {value[0]:.2f} | {100 * value[1]:.0f} % |")
    return lines


def _heads(log: list[dict[str, Any]]) -> list[str]:
    rows = [row for row in log if row["stage"] in ("heads", "drafts")]
    lines = ["| head | right |", "|---|---|"]
    for name in ("mctp", "mtp"):
        mine = [row for row in rows if name in row]
        shares = [row[name] for row in mine if "held" in row][-1:] or [r[name] for r in mine[-5:]]
        if shares:
            mean = [sum(column) / len(column) for column in zip(*shares, strict=True)]
            lines.append(f"| {name} | {', '.join(f'{100 * m:.0f}' for m in mean)} % |")
    return lines
