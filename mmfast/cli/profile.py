"""`mmfast profile`: time and bytes of the parts of one request."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from mmfast.cli import options as shared
from mmfast.cli.output import check_writable, print_json, print_rows, progress
from mmfast.core.errors import MmfastError

_HEAD = ("part", "calls", "ms", "share", "python ms", "copies ms", "GFLOP", "MB", "roof ms")
_KEYS = ("part", "calls", "ms", "share", "python_ms", "copies_ms", "gflop", "mbytes", "roof_ms")


def profile(
    context: typer.Context,
    media: Annotated[str, typer.Argument(help="Video or image file.")],
    question: Annotated[str, typer.Argument(help="What you want to know.")],
    model: shared.Model = None,
    reduce: shared.Reduce = None,
    cache: shared.Cache = None,
    decode: shared.Decode = None,
    prefill: shared.Prefill = None,
    attn: shared.Attn = None,
    encoder: Annotated[
        str | None, typer.Option(help="Vision tower: fast, compile, graph (CUDA), or riformer:2.")
    ] = None,
    frames: Annotated[int, typer.Option(help="Frames sampled uniformly.")] = 8,
    fps: Annotated[float | None, typer.Option(help="Sample at this rate instead.")] = None,
    device: shared.Device = None,
    dtype: shared.Dtype = "auto",
    weights: shared.Weights = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer in tokens.")] = 64,
    flame: Annotated[
        Path | None, typer.Option(help="Write a flame graph here: .svg or .html.")
    ] = None,
    as_json: shared.Json = False,
) -> None:
    """Say where time and bytes of one request go, beside the roof of the machine."""
    # torch's profiler logs an error where there is no GPU driver, also if only the CPU is asked for
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")
    from mmfast.core.spec import check_names
    from mmfast.frontends.source import DEFAULT_LIMITS, open_source
    from mmfast.models.quiet import quiet

    open_source(media, DEFAULT_LIMITS)
    check_names([reduce], [cache], [prefill])
    _check_flame(flame)
    shared.check_threads(threads)
    quiet()
    from mmfast.bench.profile import profile_request, write_flame
    from mmfast.bench.timing import threads_set
    from mmfast.models.prompt import check_question
    from mmfast.pipelines import pipeline

    check_question(question)
    given: dict[str, Any] = {"reduce": reduce, "cache": cache, "decode": decode}
    given |= {"weights": weights, "prefill": prefill, "attn": attn}
    given |= {"encoder": encoder, "frames": frames, "fps": fps, "max_new_tokens": max_new_tokens}
    task = shared.task_of(context, media)
    pipe = pipeline(task, model, device=device, dtype=dtype, **given)
    if as_json:
        pipe.tick = shared.silent
    with progress("profile") as tick, nullcontext() if threads is None else threads_set(threads):
        document, graph = profile_request(pipe, media, question, tick)
    document |= {"reduce": reduce, "cache": cache, "decode": decode, "encoder": encoder}
    document |= {"weights": weights, "prefill": prefill, "attn": attn}
    if flame is not None:
        write_flame(graph, flame, f"{media}: {question}")
        document["flame"] = str(flame)
    show_profile(document, as_json)


def show_profile(document: dict[str, Any], as_json: bool) -> None:
    """Print a row a part, what is left and the whole, and the roof on standard error."""
    if as_json:
        return print_json(document)
    rows = [[*(row[key] for key in _KEYS), _rated(row)] for row in document["parts"]]
    other = document["other_ms"] / max(document["total_ms"], 1e-9)
    rows.append(["other", None, document["other_ms"], other, *[None] * 6])
    rows.append(["all", None, document["total_ms"], 1.0, *[None] * 6])
    for row in rows:
        row[3] = None if row[3] is None else f"{row[3]:.1%}"
    print_rows((*_HEAD, "of roof"), rows)
    roof = document["roof"]
    typer.echo(
        f"roof, {document['dtype']} on {document['threads']} threads: "
        f"{roof['matmul_tflop_s']:.3f} TFLOP/s, {roof['copy_gb_s']:.1f} GB/s",
        err=True,
    )
    if document["plan"] is not None:
        typer.echo(f"planned: {document['plan']}", err=True)
    if "flame" in document:
        typer.echo(f"flame graph: {document['flame']}", err=True)
    return None


def _rated(row: dict[str, Any]) -> str | None:
    return None if row["of_roof"] is None else f"{row['of_roof']:.1%} of {row['bound']}"


def _check_flame(file: Path | None) -> None:
    if file is not None and file.suffix not in (".svg", ".html"):
        raise MmfastError(f"--flame {str(file)!r}: write a .svg or .html file")
    check_writable("--flame", file)
