"""`mmfast peers`: this package beside other engines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from mmfast.cli import output
from mmfast.cli.options import Json, Reduces, check_threads

_HEAD = {
    "job": "engine",
    "prompt_tokens": "prompt tokens",
    "median_ms": "first token, ms",
    "speedup": "faster",
    "noise": "noise",
    "tokens_per_s": "tokens/s",
    "step_speedup": "faster",
    "step_noise": "noise",
    "peak_mb": "peak MB",
    "agree": "as the first",
}


def _shapes(incomplete: str) -> list[str]:
    from mmfast.bench.peers import SHAPES

    return [name for name in SHAPES if name.startswith(incomplete)]


def peers(
    preset: Annotated[
        str, typer.Option(help="Shape: tiny or qwen2.5-vl-0.5b.", autocompletion=_shapes)
    ] = "tiny",
    frames: Annotated[int, typer.Option(help="Frames of a clip.")] = 8,
    tokens: Annotated[int, typer.Option(help="Tokens of an answer.")] = 16,
    rounds: Annotated[int, typer.Option(help="Timed rounds.")] = 3,
    threads: Annotated[int | None, typer.Option(help="CPU threads.")] = None,
    reduce: Reduces = None,
    engines: Annotated[
        str | None,
        typer.Option(help="Only these: transformers,vllm,vllm-compiled,openvino,mmfast."),
    ] = None,
    at_once: Annotated[
        int | None, typer.Option(help="As many beside the first, if memory is short.")
    ] = None,
    envs: Annotated[
        Path | None, typer.Option(help="Folder of the environments vllm and openvino.")
    ] = None,
    install: Annotated[
        bool, typer.Option("--install", help="Make environments that are missing.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Append the rows to this .jsonl file.")] = None,
    as_json: Json = False,
) -> None:
    """First token, decoding and memory beside transformers, vLLM and OpenVINO GenAI.

    Exit 1 where none of them ran.
    """
    from mmfast.models.quiet import quiet

    quiet()
    check_threads(threads)
    output.keep_rows(out, [])
    from mmfast.bench.peers import run_peers

    chosen = [] if engines is None else [name.strip() for name in engines.split(",")]
    sizes = (preset, reduce, frames, threads, rounds, tokens)
    with output.progress("peers") as tick:
        told = lambda label, done, total: tick(done, total, label)
        ways: dict[str, Any] = {
            "envs": envs,
            "install": install,
            "engines": chosen,
            "at_once": at_once,
        }
        rows = run_peers(*sizes, **ways, tick=told)
    output.keep_rows(out, rows)
    output.print_table(rows, as_json, list(_HEAD.values()), map(_cells, rows))
    if all(row["state"] != "ok" for row in rows):
        first = "{job} {state}: {reason}".format_map(rows[0])
        typer.echo(f"mmfast: error: no engine ran; {first}", err=True)
        raise typer.Exit(1)


def _cells(row: dict[str, Any]) -> list[Any]:
    if row["state"] == "ok":
        return [row.get(key) for key in _HEAD]
    return [row["job"], None, f"{row['state']}: {row['reason']}", *[None] * (len(_HEAD) - 3)]
