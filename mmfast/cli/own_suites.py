"""Suites of `mmfast eval` that ask in a way of their own: streams, speech, scenes and so on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.table import Table

from mmfast.cli import output

# The embedded models that suites of their own ask by default.
_MODELS: dict[str, tuple[str, ...]] = {
    "scenes": ("tiny-scenes",),
    "stream": ("tiny-stream",),
    "needles": ("tiny-text",),
}
_MODELS |= dict.fromkeys(("present", "history"), ("tiny-stream", "tiny-scenes"))
_MODELS |= {"speech": ("tiny-speech", "tiny-video")}


@contextmanager
def kept_results(
    given: dict[str, Any], shared: Sequence[str] | None = None, **asked: Any
) -> Iterator[Any]:
    """Yield the rows that `--out` has of earlier runs, and say behind the work which were taken.

    `shared` are keys that rows have in files alone; those that `eval_rows` writes by default.
    """
    from mmfast.bench.results import SHARED, KeptResults
    from mmfast.models.loading import embedded_path
    from mmfast.tiny.suites import SUITES, suite_of

    suite, model = given["suite"], given["model"]
    names = (suite_of(suite).model,) if suite in SUITES else _MODELS[suite]
    own = [*map(embedded_path, names)]
    asked |= {key: given[key] for key in ("suite", "n", "seed")}
    models = own if model is None else (model, *own[1:])
    kept = KeptResults(
        given["out"], asked, models, SHARED if shared is None else shared, given["resume"]
    )
    yield kept
    if kept.used:
        output.say_note(
            f"{kept.used} rows are those that {given['out']} had before; --no-resume asks again"
        )


def eval_own_suite(suite: str, given: dict[str, Any]) -> None:
    """Run a suite that asks in a way of its own."""
    if suite == "stream":
        return eval_stream(given)
    if suite in ("present", "history"):
        return eval_moments(suite, given)
    if suite == "needles":
        return eval_needles(given)
    if suite == "speech":
        return eval_speech(given)
    return eval_scenes(given)


def eval_speech(given: dict[str, Any]) -> None:
    """Run the suite and print a table a task."""
    from mmfast.bench.results import environment
    from mmfast.bench.suites.speech.quality import run_speech_eval, speech_eval_rows

    environ, asked = environment(), (given["n"], given["seed"], given["model"])
    shared = ("suite", "n", "seed", "model", "method", "knobs")
    with kept_results(given, shared) as kept, output.progress("eval") as tick:
        document = kept.document()
        if document is None:
            document = run_speech_eval(
                *asked, progress=lambda label, done, total: tick(done, total, label)
            )
            rows = speech_eval_rows(document, environ)
            output.keep_rows(given["out"], kept.new_document(rows))
    output.print_json(document) if given["as_json"] else _show(document["rows"])


_SCENES = "reduce", "cache", "accuracy", "interval", "new wordings", "facts", "overlap", "refused"


def eval_scenes(given: dict[str, Any]) -> None:
    """Ask about the larger world with all tokens, under each reducer and each cache policy."""
    from mmfast.bench.results import environment
    from mmfast.tiny.scenes.evaluate import scene_rows

    environ, rows = environment(), list[dict[str, Any]]()
    ways = (given["reduce"] or [], given["cache"] or [])
    asked = (given["n"], given["seed"], given["model"])
    with kept_results(given, ()) as kept, output.progress("eval") as tick:
        told = lambda label, done, total: tick(done, total, label)
        for row in scene_rows(*ways, *asked, told, known=kept.find):
            rows.append(row)
            output.keep_rows(given["out"], kept.new([{**row, **environ}]))
    cells = [[*(row[key] for key in _SCENES[:3]), *_parts(row)] for row in rows]
    output.print_table(rows, given["as_json"], _SCENES, cells)


def eval_needles(given: dict[str, Any]) -> None:
    """Ask about long documents whole, under each reducer and under each cache policy."""
    from mmfast.bench.results import environment
    from mmfast.tiny.text.evaluate import needle_rows

    environ, rows = environment(), list[dict[str, Any]]()
    documents = {key: given[key] for key in ("length", "aware")}
    ways: dict[str, Any] = {"reduces": given["reduce"] or [], "caches": given["cache"] or []}
    asked = {key: given[key] for key in ("n", "seed", "model")}
    with kept_results(given, (), **documents) as kept, output.progress("eval") as tick:
        told = lambda label, done, total: tick(done, total, label)
        for row in needle_rows(**ways, **asked, **documents, progress=told, known=kept.find):
            rows.append(row)
            output.keep_rows(given["out"], kept.new([{**row, **environ}]))
    kinds, cells = rows[0]["by_kind"], list[list[Any]]()
    for row in rows:
        low, high = row["interval"]
        shares = (row["accuracy"], row["kept"], *(row["by_kind"].get(kind) for kind in kinds))
        cells.append(
            [row["reduce"], row["cache"], f"{low:.3f} to {high:.3f}", *map(_share, shares)]
        )
    columns = ("reduce", "cache", "interval", "right", "kept", *kinds)
    output.print_table(rows, given["as_json"], columns, cells)


def _parts(row: dict[str, Any]) -> list[Any]:
    kinds = row["by_kind"]
    refused = [kinds[name] for name in ("outside", "strange media") if name in kinds]
    kept = row.get("kept_back", {}).get("accuracy")
    mean = sum(refused) / len(refused) if refused else None
    low, high = row["interval"]
    return [f"{low:.3f} to {high:.3f}", kept, row["facts"], row["overlap"], mean]


def _show(rows: list[dict[str, Any]]) -> None:
    said = [row for row in rows if row["task"] == "speaking"]
    heard = [row for row in rows if row["task"] == "listening"]
    replied = [row for row in rows if row["task"] == "replies"]
    if said:
        voices = list(said[0]["by_voice"])
        table = Table("said", "word errors", *voices, "tokens per pass", "as vanilla")
        for row in said:
            each = [_share(row["by_voice"].get(name)) for name in voices]
            many = f"{row['tokens_per_pass']:.2f}" if "tokens_per_pass" in row else ""
            alike = _share(row.get("identical"))
            table.add_row(row["mode"], _share(row["wer"]), *each, many, alike)
        Console().print(table)
    if heard:
        table = Table("questions", "right", "of typed", "word errors", "heard without error")
        for row in heard:
            figures = (row["accuracy"], row.get("relative"), row.get("wer"), row.get("exact"))
            table.add_row(row["mode"], *map(_share, figures))
        Console().print(table)
    if replied:
        table = Table("replies to", "right", "weakest kind", "heard without error")
        for row in replied:
            kind, worst = min(row["by_kind"].items(), key=lambda item: float(item[1]))
            weakest = f"{kind} {_share(worst)}"
            table.add_row(row["mode"], _share(row["accuracy"]), weakest, _share(row.get("exact")))
        Console().print(table)
    if both := [row for row in rows if row["task"] == "overlap"]:
        _show_overlap(both)


def _show_overlap(rows: list[dict[str, Any]]) -> None:
    bands = list(dict.fromkeys(band for row in rows for band in row["by_overlap"]))
    table = Table("two voices", "word errors", *bands, "delay")
    for row in rows:
        each = [_share(row["by_overlap"].get(band)) for band in bands]
        delay = f"{row['delay']:.1f} s" if "delay" in row else ""
        table.add_row(row["mode"], _share(row["cpwer"]), *each, delay)
    Console().print(table)


def _share(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"


def eval_stream(given: dict[str, Any]) -> None:
    """Run the suite for each reducer (none by default) and print a line a memory.

    Streams of more than LONGEST seconds are too long for an unbounded cache, which is left out.
    """
    from mmfast.bench.results import environment, eval_rows
    from mmfast.tiny.stream.needles import LONGEST, MEMORIES, Setting, run_needles

    specs: list[str | None] = [*(given["reduce"] or [])] or [None]
    environ, stdout, seconds = environment(), output.JsonRows(), given["seconds"]
    asked = (given["n"], given["seed"], given["model"])

    def keep(found: dict[str, Any]) -> None:
        output.keep_rows(given["out"], kept.new(eval_rows(found, environ)))
        if given["as_json"]:
            stdout.add(found)

    with kept_results(given, seconds=seconds) as kept, output.progress("eval") as tick:
        documents = [
            run_needles(
                given["cache"] or MEMORIES,
                *asked,
                setting=Setting(seconds),
                reduce=spec,
                unbounded=seconds <= LONGEST,
                progress=lambda memory, done, total: tick(done, total, memory),
                sink=keep,
                known=kept.find,
            )
            for spec in specs
        ]
    if given["as_json"]:
        return stdout.end()
    document = {**documents[0], "rows": [row for each in documents for row in each["rows"]]}
    bands = list(dict.fromkeys(band for row in document["rows"] for band in row["by_age"]))
    cells = []
    for row in document["rows"]:
        ages = [row["by_age"].get(band) for band in bands]
        shares = [f"{100 * age['accuracy']:.1f} % of {age['n']}" if age else "" for age in ages]
        names = row["memory"] or "unbounded", row["reduce"] or ""
        cells.append((*names, *shares, _share(row["relative"])))
    output.print_rows(("memory", "reduce", *bands, "of unbounded"), cells)


def eval_moments(suite: str, given: dict[str, Any]) -> None:
    """Ask sessions about the present of endless worlds, or about their history."""
    from mmfast.bench.results import environment, eval_rows
    from mmfast.tiny.stream.history import run_history
    from mmfast.tiny.stream.present import run_present

    environ, asked, seconds = environment(), (given["n"], given["seed"]), given["seconds"]
    with kept_results(given, seconds=seconds) as kept, output.progress("eval") as tick:

        def report(label: str, done: int, total: int) -> None:
            tick(done, total, label)

        document = kept.document()
        if document is None and suite == "present":
            document = run_present(*asked, report=report)
        elif document is None:
            document = run_history(*asked, seconds, report=report)
        if not kept.used:
            rows = kept.new_document(eval_rows(document, environ))
            output.keep_rows(given["out"], rows)
    kinds = list(dict.fromkeys(kind for row in document["rows"] for kind in row["by_kind"]))
    cells = []
    for row in document["rows"]:
        marks = [row["by_kind"].get(kind) for kind in kinds]
        shares = [f"{_share(mark['right'])} of {mark['n']}" if mark else "" for mark in marks]
        if suite == "present":
            shares = [
                f"{share} ({_share(mark['relative'])})" if mark else ""
                for share, mark in zip(shares, marks, strict=True)
            ]
        cells.append((row["way"], _share(row["accuracy"]), *shares))
    output.print_table(document["rows"], given["as_json"], ("way", "right", *kinds), cells)
