"""`mmfast leaderboard`: all methods on all suites at all budgets, with tests between them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from mmfast.cli import output
from mmfast.cli.options import Json, check_taken
from mmfast.core.errors import MmfastError


def _list(what: str) -> Any:
    return typer.Option(help=f"{what}, separated by commas.")


_Compare = Annotated[
    tuple[Path, Path] | None,
    typer.Option(metavar="A.json B.json", help="Tell whether two runs agree; exit 1 if not."),
]
_Out = Annotated[
    Path, typer.Option(help="Folder of cells.jsonl, leaderboard.json and leaderboard.html.")
]


def leaderboard(
    context: typer.Context,
    grid: Annotated[str, typer.Option(help="reduced, or full.")] = "reduced",
    methods: Annotated[str, _list("Methods, cache/NAME for a KV policy")] = "",
    suites: Annotated[str, _list("Suites")] = "",
    budgets: Annotated[str, _list("Shares of the visual tokens")] = "",
    seeds: Annotated[str, _list("Seeds of the unseen media")] = "",
    n: Annotated[int | None, typer.Option(help="Questions of a seed.")] = None,
    speed: Annotated[bool, typer.Option(help="Measure times to the first token, too.")] = True,
    compare: _Compare = None,
    out: _Out = Path("leaderboard"),
    as_json: Json = False,
) -> None:
    """Rank all methods on the embedded models, or tell whether two such runs agree."""
    if compare is not None:
        return _compare(context, compare, as_json)
    from mmfast.models.quiet import quiet

    quiet()
    from mmfast.bench.leaderboard.grid import make_grid

    parts: list[list[str]] = [_parts(text) for text in (methods, suites, budgets, seeds)]
    made = make_grid(grid, parts[0], parts[1], parts[2], parts[3], n, speed)
    from mmfast.bench.leaderboard.measure import run_grid, stored_rows
    from mmfast.bench.leaderboard.page import write_board
    from mmfast.bench.leaderboard.standing import standing

    cells = out / "cells.jsonl"
    with output.progress("leaderboard", f"units of work kept in {cells}") as tick:
        rows = run_grid(made, cells, tick)
    mine = {row["key"] for row in rows}
    before = [row for row in stored_rows(cells) if row["key"] not in mine]
    document = standing([*before, *rows], made.to_dict())
    write_board(document, out)
    for failed in document["failed"]:
        name = f"{failed['media']} {failed['method']} {100 * failed['budget']:g} %"
        typer.echo(f"not measured: {name}: {failed['error']}", err=True)
    if not as_json:
        typer.echo(f"wrote {out / 'leaderboard.json'} and {out / 'leaderboard.html'}", err=True)
    _print(document, as_json)


def _parts(text: str) -> list[str]:
    parts = [part.strip() for part in text.split(",")] if text.strip() else []
    if not all(parts):
        raise MmfastError(f"{text!r} has an empty part; write names separated by single commas")
    return parts


def _print(document: dict[str, Any], as_json: bool) -> None:
    """Print the methods of each suite by rank at its smallest budget."""
    if as_json:
        return output.print_json(document)
    known = {(row["suite"], row["method"], row["budget"]): row for row in document["rows"]}
    cells = list[Sequence[object]]()
    for rank in document["ranks"]:
        row = known[rank["suite"], rank["method"], rank["budget"]]
        between = "{:g} to {:g}".format(*rank["rank_interval"])
        accuracy = "{:.3f} ({:.3f} to {:.3f})".format(row["accuracy"], *row["interval"])
        shown = (rank["suite"], f"{100 * rank['budget']:g} %", rank["method"])
        beats = f"{rank['beats']} / {rank['beaten_by']}"
        cells.append((*shown, f"{rank['rank']:g}", between, accuracy, beats, row["speedup_1"]))
    names = ("suite", "budget", "method", "rank", "95 %", "accuracy", "beats / beaten", "speed-up")
    output.print_rows(names, cells)


def _compare(context: typer.Context, files: tuple[Path, Path], as_json: bool) -> None:
    check_taken(context, "--compare", {"compare", "as_json"})
    from mmfast.bench.leaderboard.agreement import agree, read_board

    document = agree(*map(read_board, files))
    cells = [
        (
            *(row["suite"], f"{row['method']} {100 * row['budget']:g} %", row["first"]),
            *(row["second"], "{:+.3f} to {:+.3f}".format(*row["difference_interval"])),
            *(row["p_holm"], "yes" if row["agree"] else "NO"),
        )
        for row in document["rows"]
    ]
    names = ("suite", "method", "first", "second", "95 % of the difference", "p", "agree")
    output.print_table(document, as_json, names, cells)
    if not document["agree"]:
        raise typer.Exit(1)
