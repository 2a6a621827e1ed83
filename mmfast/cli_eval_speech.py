"""`mmfast eval --suite speech`: word errors of what is said, right answers to what is heard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


def eval_speech(n: int, seed: int, model: str | None, out: Path | None, as_json: bool) -> None:
    """Run the suite and print a table a task."""
    from mmfast.bench.results import append, environment
    from mmfast.bench.speech_eval import run_speech_eval, speech_eval_rows
    from mmfast.cli_output import print_json, progress

    environ = environment()
    with progress("eval") as tick:
        document = run_speech_eval(
            n, seed, model, progress=lambda label, done, total: tick(done, total, label)
        )
    if out is not None:
        append(out, speech_eval_rows(document, environ))
    print_json(document) if as_json else _show(document["rows"])


def _show(rows: list[dict[str, Any]]) -> None:
    said = [row for row in rows if row["task"] == "speaking"]
    heard = [row for row in rows if row["task"] == "listening"]
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


def _share(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"
