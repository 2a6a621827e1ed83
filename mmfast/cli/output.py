"""Output of the commands: rich tables for people, one JSON document for programs."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from mmfast.cli import KEPT
from mmfast.core.errors import MmfastError

_PLAIN: dict[str, Any] = {"markup": False, "emoji": False}  # names of files may have brackets
_err = Console(stderr=True, **_PLAIN)


class Tick(Protocol):
    """Moves a progress bar, and renames it where `label` is given."""

    def __call__(self, done: int, total: int, label: str | None = None) -> None:
        """Report that `done` of `total` steps are finished."""


def check_writable(option: str, path: Path | None) -> None:
    """Refuse (MmfastError) a file that cannot be written, before long work; leaves none behind."""
    if path is None:
        return
    there = path.exists()
    try:
        with path.open("ab"):
            pass
        if not there:
            path.unlink()
    except OSError as error:
        raise MmfastError(
            f"{option} {str(path)!r} cannot be written: {error.strerror}; give a file in a folder "
            "that exists and that you may write to"
        ) from None


@contextlib.contextmanager
def progress(label: str, kept: str = "") -> Iterator[Tick]:
    """Show a bar on standard error; yields `tick(done, total)`.

    `kept` says for Ctrl-C where what is done is kept.
    """
    text, count = TextColumn("{task.description}", markup=False), MofNCompleteColumn()
    columns = (text, BarColumn(), count, TimeRemainingColumn())
    with Progress(*columns, console=_err, transient=True, disable=not _err.is_terminal) as bar:
        task = bar.add_task(label, total=None)

        def tick(done: int, total: int, label: str | None = None) -> None:
            if kept:
                KEPT[kept] = done
            bar.update(task, completed=done, total=total, description=label)

        yield tick


def keep_rows(out: Path | None, rows: Any) -> None:
    """Append result rows to a file, where one is given, and count them for Ctrl-C.

    Without rows yet, MmfastError where the file cannot be written or holds something else: before
    the work, not behind it.
    """
    if out is not None and not rows:
        with contextlib.suppress(OSError):
            out.parent.mkdir(parents=True, exist_ok=True)
        check_writable("--out", out)
        if out.is_file():
            with out.open("rb") as file:
                if file.read(1) not in (b"", b"{"):
                    raise MmfastError(f"--out {str(out)!r} is no file of rows; name a .jsonl file")
    where = f"in {out}" if out is not None else "as --out names no file"
    KEPT[f"rows kept {where}"] += len(rows) if out is not None else 0
    if out is not None and rows:
        from mmfast.bench.results import append

        append(out, rows)


def print_json(document: Any) -> None:
    """Print one document on standard output; NaN is not JSON, so it is refused."""
    print(_json(document))


def _json(document: Any) -> str:
    """Return a document with its letters escaped where standard output, or UTF-8, lacks them."""
    text = json.dumps(document, ensure_ascii=False, allow_nan=False)
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        return json.dumps(document, allow_nan=False)
    return text


class JsonRows:
    """One JSON document on standard output, each row of which is written when it is known."""

    def __init__(self) -> None:
        self._begun = False

    def add(self, document: dict[str, Any]) -> None:
        """Write the rows of a document, and before the first of all what stands beside them."""
        rows, head = [_json(row) for row in document["rows"]], _json(document | {"rows": []})
        start = "," if self._begun else head.removesuffix("]}") + "\n"
        print(start + "\n,".join(rows), flush=True)
        self._begun = True

    def end(self) -> None:
        """Complete the document."""
        print("]}")


def _out() -> Console:
    """Return a console on standard output; a pipe has no width to fold to."""
    return Console(width=None if sys.stdout.isatty() else 200, **_PLAIN)


def _table(console: Console, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in columns:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*(_cell(value) for value in row))
    console.print(table)


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
    return "-" if value is None else str(value)


def print_rows(
    columns: Sequence[str], rows: Iterable[Sequence[object]], errors: bool = False
) -> None:
    """Print a table on standard output, or on standard error, where a pipe folds no reason."""
    wide = Console(stderr=True, width=None if _err.is_terminal else 2000, **_PLAIN)
    _table(wide if errors else _out(), columns, rows)


def print_table(
    document: Any, as_json: bool, columns: Sequence[str], rows: Iterable[Sequence[object]]
) -> None:
    """Print a document: as JSON, or these rows of it as a table."""
    print_json(document) if as_json else print_rows(columns, rows)


def say_note(note: str) -> None:
    """Print a remark as one line on standard error."""
    if note:
        print(f"mmfast: note: {note}", file=sys.stderr)


def say_dim(text: str) -> None:
    """Print figures beside a result as one line on standard error."""
    _err.print(text, style="dim", highlight=False, soft_wrap=True)


def print_answer(answer: Any, as_json: bool) -> None:
    """Print the text on standard output and its trace on standard error, or one document."""
    say_note(answer.note)
    if as_json:
        return print_json(answer.to_dict())
    print(answer.text)
    say_dim(
        f"{answer.kept_tokens} of {answer.visual_tokens} visual tokens, "
        f"first token after {answer.ttft_ms:.0f} ms"
    )
    if answer.doubts:
        say_dim(made_up(answer.doubts))
    if answer.plan is not None:
        from mmfast.planner.auto import say

        told = f"planned: {say(answer.plan)}, predicted after {answer.plan.total_ms:.0f} ms"
        say_dim(told)
    for note in answer.trace.notes:
        if note.startswith(("weights: ", "route, ")):  # others were warned of
            say_dim(note)
    rows = [
        (r.label, r.tokens_in, r.tokens_out, r.ms, r.peak_bytes / 1e6) for r in answer.trace.rows
    ]
    print_rows(("stage", "tokens in", "out", "ms", "peak MB"), rows, errors=True)


def made_up(doubts: Sequence[Any]) -> str:
    """Return a line with the five pieces of an answer that are most probably made up, if any."""
    worst = sorted((each for each in doubts if each.chance > 0.5), key=lambda each: -each.chance)
    told = ", ".join(f"{each.text.strip()} {each.chance:.2f}" for each in worst[:5])
    return f"probably made up: {told}" if told else "no word is probably made up"


def print_comparison(document: dict[str, Any], as_json: bool) -> None:
    """Print both answers, and the times of all tokens and of a spec by stage."""
    note = document.pop("note")
    say_note(note)
    if as_json:
        return print_json(document | ({"note": note} if note else {}))
    spec = " ".join(filter(None, map(document.get, ("reduce", "cache"))))
    cells = []
    for row in document["rows"]:
        ratio = "=" if row["equal"] else f"{row['speedup']:.2f}x"
        cells.append((row["stage"], row["all_ms"], row["median_ms"], ratio, f"{row['noise']:.1%}"))
    print_rows(("stage", "all tokens ms", f"{spec} ms", "speed-up", "noise"), cells)
    print("all tokens: {all}\n{0}: {spec}".format(spec, **document["answers"]))
    print("the answers agree" if document["agree"] else "the answers differ")
    say_dim(f"{document['kept_tokens']} of {document['visual_tokens']} visual tokens")


def print_eval(document: dict[str, Any], as_json: bool) -> None:
    """Print one line for each spec; accuracy by kind of question is in the JSON document."""
    rows = []
    for row in document["rows"]:
        kind, worst = min(row["by_kind"].items(), key=lambda item: float(item[1]))
        name = row["reduce"] or "all tokens"
        name += f", {row['cache']}" if row.get("cache") else ""
        between = "{:.3f} to {:.3f}".format(*row["interval"])
        figures = (row["accuracy"], between, f"{kind} {worst:.3g}", row["kept"], row["ttft_ms"])
        rows.append((name, *figures))
    names = ("reduce", "accuracy", "95 % interval", "weakest kind", "kept", "ttft ms")
    print_table(document, as_json, names, rows)


_BENCH = {key: key.replace("_", " ") for key in ("reduce", "stage", "median_ms")}
_BENCH |= {"speedup": "speed-up", "ideal": "ideal", "of_ideal": "of ideal"}
_BENCH |= {"of_oracle": "of oracle", "of_ceiling": "of ceiling", "selection_ms": "selection ms"}
_BENCH |= {"reducing_share": "of run", "peak_mb": "peak MB", "scoring_over": "over sdpa"}


def print_bench(document: dict[str, Any], as_json: bool) -> None:
    """Print one line for each spec and stage."""
    if as_json:
        return print_json(document)
    for fault in document["faults"]:
        _err.print(f"gate: {fault}; no speed is printed", style="red", soft_wrap=True)
    print_bench_rows(document["rows"])
    for stage, floor in document["noise"].items():
        say_dim(f"{stage}: noise {floor:.1%} (stock against stock)")
    best = document["ceilings"]
    say_dim(
        f"ceilings: copy {best['copy_gb_s']:.3g} GB/s, "
        f"matrix product {best['matmul_tflop_s']:.3g} TFLOP/s"
    )


def print_bench_rows(found: Sequence[dict[str, Any]]) -> None:
    """Print one line for each row; columns that no row fills are left out."""
    rows = [{**row, "reduce": row["reduce"] or "stock"} for row in found]
    for row in rows:
        if row["equal"]:  # the difference drowns in the noise
            row["speedup"] = "="
        if row["stage"] == "selection":
            row["reducing_share"] = row["share"]
    keys = [key for key in _BENCH if any(row.get(key) is not None for row in rows)]
    print_rows([_BENCH[key] for key in keys], [[row.get(key) for key in keys] for row in rows])
