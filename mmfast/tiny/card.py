"""Model cards: the template in `cards/` filled with the figures of a checkpoint's training log."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from mmfast.core.files import json_lines
from mmfast.models.speech.layout import SpeechLayout
from mmfast.tiny.document import fonts, prints

TEMPLATES = Path(__file__).with_name("cards")
Row = dict[str, Any]


def write_card(folder: Path, name: str) -> None:
    """Write README.md of the checkpoint `name`, such as "tiny-video", from its training.jsonl."""
    log: list[Row] = json_lines((folder / "training.jsonl").read_text(encoding="utf-8"))
    notes = (row["note"].rstrip(".") for row in _rows(log, "start", "note") if "note" in row)
    start = _rows(log, "start")[-1]
    shared = {key: start[key] for key in ("machine", "torch", "seed")}
    shared["notes"] = "".join(f"\n\n{note[0].upper()}{note[1:]}." for note in notes)
    text = (TEMPLATES / f"{name}.md").read_text(encoding="utf-8")
    card = text.format(**shared, **FIGURES[name](folder, log))
    (folder / "README.md").write_text(card, encoding="utf-8")


def _rows(log: Iterable[Row], *stages: str) -> list[Row]:
    return [row for row in log if row["stage"] in stages]


def _minutes(*rows: Row) -> str:
    return f"{sum(row['seconds'] for row in rows) / 60:.0f} minutes"


def _percent(share: float, digits: int = 1) -> str:
    return f"{100 * share:.{digits}f} %"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = (head, ["---"] * len(head), *rows)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _evaluations(log: list[Row], suite: str | None = None) -> str:
    mine = (row for row in _rows(log, "evaluation") if suite in (None, row["suite"]))
    found = [(each, each["rows"][0]) for each in mine]
    kinds = list(found[0][1]["by_kind"])
    rows = []
    for each, row in found:
        right = [row["accuracy"], *(row["by_kind"][kind] for kind in kinds)]
        rows.append((str(each["seed"]), str(each["n"]), *map(_percent, right)))
    return _table(("seed", "questions", "all", *kinds), rows)


def _video(folder: Path, log: list[Row]) -> Row:
    bank, encoded = _rows(log, "bank")[-1], _rows(log, "encode")[-1]
    tower, held = _rows(log, "tower")[-1], _rows(log, "held-out")[-1]
    steps = tower["step"] + (_rows(log, "tower")[0]["step"] == 0)  # old logs count from 0
    cells = ", ".join(f"{k} {_percent(tower['cells'][k])}" for k in ("shape", "colour", "digit"))
    worst = min(held["kinds"], key=held["kinds"].get)
    stages = [
        f"clips: {bank['clips']} made in {_minutes(bank)}, {encoded['clips']} of them used for the "
        "decoder",
        f"tower and projector: {steps} steps in {_minutes(tower)}; right on pooled tokens that "
        f"show something: {cells}",
    ]
    for name, label in (("language", "decoder"), ("polish", "with pictures")):
        if rows := _rows(log, name):
            stages.append(f"{label}: {rows[-1]['step']} steps in {_minutes(rows[-1])}")
    stages.append(
        "at the end, on clips of the bank kept back, close comparisons included: "
        f"{_percent(held['mean'])} of questions, lowest {worst} with "
        f"{_percent(held['kinds'][worst])}"
    )
    stages += [f"whole run: {_minutes(row)}" for row in _rows(log, "end")]
    return {
        "parameters": (folder / "model.safetensors").stat().st_size / 4e6,
        "table": _evaluations(log),
        "stages": "\n".join(f"- {stage}" for stage in stages),
    }


def _scenes(folder: Path, log: list[Row]) -> Row:
    bank, encoded = _rows(log, "bank")[-1], _rows(log, "encode")[-1]
    found = _rows(log, "evaluation")[-1]
    parts = [found, *(found[name] for name in ("trained", "kept_back") if name in found)]
    names = ("all", "wordings of the training", "wordings kept back")
    kinds = list(found["by_kind"])
    head = ("", *names[: len(parts)])
    table = [("questions", *(str(part["n"]) for part in parts))]
    table.append(("right", *(_percent(part["accuracy"]) for part in parts)))
    table += [(kind, *(_share(part["by_kind"].get(kind)) for part in parts)) for kind in kinds]
    for name, label in (("overlap", "mean overlap of boxes"), ("facts", "facts of descriptions")):
        table.append((label, *(_share(part[name]) for part in parts)))
    for name in ("precision", "recall", "f1", "yes"):
        table.append((f"existence, {name}", *(_share(part["pope"][name]) for part in parts)))
    table.append(("refused though inside", *(_share(part["refused_inside"]) for part in parts)))
    more = {
        "absent": "takes for granted what is absent",
        "loose": "asks as people do",
        "freely": "asks in words that nobody trained",
        "everyday": "asks about everyday life",
        "figures": "shows a heart, bolt or drop, which it does not know",
    }
    for kind, label in more.items():
        if figures := found.get(kind):
            label += f" ({figures['n']} more questions)"
            table.append((label, _percent(figures["accuracy"]), *[""] * (len(parts) - 1)))
    stages = [f"clips: {bank['clips']} of the world and {bank['strangers']} outside it"]
    for name, label in (("tower", "tower and projector"), ("language", "decoder")):
        if rows := _rows(log, name):
            stages.append(f"{label}: {rows[-1]['step']} steps in {_minutes(rows[-1])}")
    stages.append(f"of them for the decoder: {encoded['clips']}")
    stages += [f"whole run: {_minutes(row)}" for row in _rows(log, "end")]
    return {
        "parameters": (folder / "model.safetensors").stat().st_size / 4e6,
        "table": _table(head, table),
        "questions_seed": found["seed"],
        "stages": "\n".join(f"- {stage}" for stage in stages),
    }


def _share(share: float | None) -> str:
    return "" if share is None else _percent(share)


def _document(_: Path, log: list[Row]) -> Row:
    starts, ends = _rows(log, "start"), _rows(log, "end")
    count, drawn = len(starts), {row["seed"]: row for row in reversed(starts)}  # of each seed
    read = _rows(log, "print")
    after = [*read[1:], {"step": 0}]
    reading = [a for a, b in zip(read, after, strict=True) if b["step"] < a["step"]]  # last ones
    return {
        "table": _evaluations(log, "document"),
        "printed": _evaluations(log, "table"),
        "reading": f"{sum(row['step'] for row in reading)} steps in {_minutes(*reading)}",
        "pages": sum(row["pages"] for row in drawn.values()),
        "prints": sum(row.get("prints", 0) for row in drawn.values()),
        "words": len(prints.WORDS),
        "fonts": len(fonts.TRAINED),
        "kept": len(fonts.KEPT),
        "steps": sum(row["steps"] for row in ends),
        "minutes": _minutes(*ends),
        "runs": "one run" if count == 1 else f"{count} runs, each from the one before",
    }


def _stream(folder: Path, log: list[Row]) -> Row:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    start, ends, found = _rows(log, "start")[-1], _rows(log, "end"), _rows(log, "evaluation")
    rows = [(each, row) for each in found for row in each["rows"]]
    bands = list(dict.fromkeys(band for _, row in rows for band in row["by_age"]))
    lines = []
    for each, row in rows:
        stream = f"{row['seconds'] / 60:.0f} minutes, seed {each['seed']}"
        memory = f"`{row['memory']}`" if row["memory"] else "unbounded"
        lines.append((stream, memory, *(_band(row["by_age"].get(band)) for band in bands)))
    kinds = "not measured"
    if found:
        first, last = (found[0]["rows"][i]["by_kind"] for i in (0, -1))
        kinds = ", ".join(
            f"{kind} {100 * first[kind]:.0f} and {_percent(last[kind], 0)}" for kind in first
        )
    return {
        "table": _table(("stream", "memory", *bands), lines),
        "kinds": kinds,
        "factor": config["text_config"]["rope_parameters"]["factor"],
        "runs": ", then ".join(f"{end['steps']} steps in {_minutes(end)}" for end in ends),
        "facts": start["facts"],
        "scenes": start["scenes"],
    }


def _band(share: Row | None) -> str:
    return f"{_percent(share['accuracy'])} of {share['n']}" if share else ""


def _speech(folder: Path, log: list[Row]) -> Row:
    layout = SpeechLayout.load(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    sounds = [row["of_sound"] for row in log if "of_sound" in row][-1:]
    kinds = {"say": "to say", "hear": "to hear"}
    hours = [f"{each[k] / 3600:.1f} hours {v}" for each in sounds for k, v in kinds.items()]
    last = {row["stage"]: row for row in log if "step" in row and "seconds" in row}
    held: Row = {}
    for row in _rows(log, "held-out"):
        held |= row
    losses = [
        (name, f"{value[0]:.2f}", _percent(value[1], 0))
        for name, value in sorted(held.items())
        if " " in name  # such as "say book0"
    ]
    heard = (_percent(held[k]) if k in held else "not measured" for k in ("whole", "wordless"))
    _, words, talks, *_ = held.get("reply", (0.0, 0.0, 0.0))
    return {
        "words": sum(name.endswith("_") and len(name) > 2 for name in layout.rows),
        "layers": config["num_hidden_layers"],
        "width": config["hidden_size"],
        **{name: getattr(layout, name) for name in ("total", "texts", "books", "entries")},
        "size": sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 1e6,
        "voices": ", ".join(f"`{name}`" for name in layout.voices),
        **{name: ", ".join(map(str, getattr(layout, name))) for name in ("speeds", "pitches")},
        "recordings": ", ".join(hours) or "not noted",
        "runs": ", ".join(f"{k} {row['step']} steps in {_minutes(row)}" for k, row in last.items()),
        "table": _table(("lesson", "loss", "correct"), losses),
        "ear": "Unseen recordings written down without an error: {}; of those without a word in "
        "our language: {}.".format(*heard),
        "replies": f"Unseen conversations: {_percent(words)} of the words of replies, and of whole "
        f"conversations {_percent(talks)}.",
        "heads": _heads(log),
    }


def _heads(log: list[Row]) -> str:
    lines = []
    for name in ("mctp", "again", "mtp"):
        mine = [row for row in log if name in row]
        shares = [row[name] for row in mine if "held" in row or row["stage"] == "held-out"][-1:]
        shares = shares or [row[name] for row in mine[-5:]]
        means = [sum(column) / len(column) for column in zip(*shares, strict=True)]
        lines += [(name, f"{', '.join(f'{100 * m:.0f}' for m in means)} %")] if means else []
    return _table(("head", "correct"), lines)


def _translate(folder: Path, log: list[Row]) -> Row:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    run, held = _rows(log, "translation")[-1], _rows(log, "held-out")[-1]["translation"]
    return {
        "size": (folder / "model.safetensors").stat().st_size / 1e6,
        **{
            name: config[name]
            for name in ("encoder_layers", "decoder_layers", "d_model", "vocab_size")
        },
        "run": f"{run['step']} steps in {_minutes(run)}",
        "words": _percent(held[1]),
        "whole": _percent(held[2]),
        "head": _stability(folder / "stability.jsonl"),
    }


def _stability(log: Path) -> str:
    if not log.is_file():
        return ""
    row = json.loads(log.read_text(encoding="utf-8"))
    return (
        "\n\n`stability.safetensors` is a head on the last states of the decoder that tells which "
        f"words stay\nwhen more of the source comes. It learned from {row['tokens']:,} words of "
        f"the beginnings of {row['sentences']} sentences\n(`python -m "
        f"mmfast.tiny.translation.train_stability`: {row['processor_seconds']} seconds of "
        f"processor time, seed {row['seed']}).\nOf pairs of a word that stays and one that does "
        f"not, in unseen sentences, it puts {_percent(row['auc'])} in order, the\nprobability of "
        f"the word {_percent(row['auc_chance'])}."
    )


def _interleaved(folder: Path, log: list[Row]) -> Row:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    words = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    marks = (token["content"] for token in words["added_tokens"])
    late = sorted(int(mark[6:-1]) for mark in marks if mark.startswith("<late:"))
    run, held = _rows(log, "interleaved")[-1], _rows(log, "held-out")[-1]["interleaved"]
    return {
        "size": (folder / "model.safetensors").stat().st_size / 1e6,
        **{name: config[name] for name in ("num_hidden_layers", "hidden_size", "vocab_size")},
        "latencies": f"{late[0]} to {late[-1]}",
        "run": f"{run['step']} steps in {_minutes(run)}",
        "processor": round(_rows(log, "end")[-1]["processor_seconds"] / 60),
        "words": _percent(held[1]),
        "choices": _percent(held[2]),
        "whole": _percent(held[3]),
    }


def _text(folder: Path, log: list[Row]) -> Row:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    found, run = _rows(log, "evaluation"), _rows(log, "text")[-1]
    lines = []
    for row in found:
        low, high = row["interval"]
        right = f"{_percent(row['accuracy'])} ({100 * low:.0f} to {100 * high:.0f})"
        kinds = (_percent(share, 0) for share in row["by_kind"].values())
        lines.append((f"{row['length']:,}", str(row["n"]), right, *kinds))
    return {
        "size": (folder / "model.safetensors").stat().st_size / 1e6,
        **{name: config[name] for name in ("num_hidden_layers", "hidden_size", "vocab_size")},
        "run": f"{run['step']} steps in {_minutes(run)}",
        "longest": f"{_rows(log, 'start')[-1]['longest']:,}",
        "table": _table(("tokens", "questions", "right", *found[0]["by_kind"]), lines),
    }


FIGURES: dict[str, Callable[[Path, list[Row]], Row]] = {
    "tiny-video": _video,
    "tiny-scenes": _scenes,
    "tiny-document": _document,
    "tiny-stream": _stream,
    "tiny-speech": _speech,
    "tiny-translate": _translate,
    "tiny-interleaved": _interleaved,
    "tiny-text": _text,
}
