"""`mmfast eval` and `mmfast bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from mmfast.cli_bench_named import bench_named, completer
from mmfast.cli_options import Caches, Device, Dtype, Json, Model, Reduces, complete_preset
from mmfast.core.errors import MmfastError


def _suites(incomplete: str) -> list[str]:
    from mmfast.tiny.suites import SUITES

    return [name for name in (*SUITES, "stream", "speech") if name.startswith(incomplete)]


def evaluate(
    reduce: Reduces = None,
    cache: Caches = None,
    n: Annotated[int, typer.Option(help="Questions.")] = 400,
    seed: Annotated[int, typer.Option(help="Seed of the unseen clips.")] = 1000,
    suite: Annotated[
        str,
        typer.Option(
            help="video, image, multi-image, document, stream, speech.", autocompletion=_suites
        ),
    ] = "video",
    seconds: Annotated[float, typer.Option(help="Length of streams (--suite stream).")] = 960,
    model: Model = None,
    out: Annotated[Path | None, typer.Option(help="Append the rows to this .jsonl file.")] = None,
    as_json: Json = False,
) -> None:
    """Accuracy, tokens and time to first token per spec on the embedded task."""
    from mmfast.cli_output import print_eval, progress, quiet
    from mmfast.core.spec import parse
    from mmfast.models.kv_plan import call_plan

    quiet()
    for spec in reduce or []:
        parse(spec)
    for spec in cache or []:
        call_plan(spec)
    if n < 1:
        raise MmfastError(f"--n {n} asks nothing; give at least 1")
    if suite == "stream":
        from mmfast.cli_eval_stream import eval_stream

        return eval_stream(reduce or [], cache or [], n, seed, seconds, model, out, as_json)
    if suite == "speech":
        from mmfast.cli_eval_speech import eval_speech

        if reduce or cache:
            raise MmfastError("--suite speech takes no --reduce and no --cache; leave them out")
        return eval_speech(n, seed, model, out, as_json)
    from mmfast.bench.results import append, environment, eval_rows
    from mmfast.tiny.evaluate import run_eval
    from mmfast.tiny.suites import suite_of

    suite_of(suite)
    environ = environment()  # of the code that is about to run, not of the tree hours later
    with progress("eval") as tick:
        document = run_eval(
            list(reduce or []),
            n=n,
            seed=seed,
            model=model,
            name=suite,
            caches=list(cache or []),
            progress=lambda spec, done, total: tick(done, total, spec),
        )
    if out is not None:
        append(out, eval_rows(document, environ))
    print_eval(document, as_json)


def _named(suite: str, what: str) -> Any:
    return typer.Option(help=f"A benchmark of {what} instead.", autocompletion=completer(suite))


_Preset = Annotated[
    str | None,
    typer.Option(help="Model shape; tiny if absent.", autocompletion=complete_preset),
]
_Stages = Annotated[str, typer.Option(help="Of vit, llm, decode, ttft, selection.")]
_Selection = Annotated[
    bool, typer.Option("--selection", help="Time the choosing alone, against textbook loops.")
]
_Full = Annotated[bool, typer.Option("--full", help="Everything for one device, in minutes.")]
_Minutes = Annotated[float, typer.Option(help="What --full may take.")]
_BreakEven = Annotated[
    bool, typer.Option("--break-even", help="From how many tokens reducing pays.")
]
_Compare = Annotated[
    tuple[Path, Path] | None,
    typer.Option(metavar="OLD NEW", help="Two files of rows: what got faster, what slower."),
]
_FailAbove = Annotated[
    float | None, typer.Option(help="--compare exits 1 on a slow-down of more per cent.")
]


# What else each way to measure takes, beside --json; the last one is without any of the others.
_TAKES = {
    "compare": {"fail_above", "out"},  # --out is refused with a reason
    "full": {"device", "preset", "minutes", "out"},
    "break_even": {"preset", "threads", "device", "out"},
    "selection": {"out"},
    "bench": {"preset", "reduce", "frames", "keep", "stages", "device", "dtype", "threads", "iters"}
    | {"out"},
}


def _check_given(context: typer.Context, way: str) -> None:
    """Nothing that was asked for is left out in silence.

    Raises:
        MmfastError: An option that `way` does not read; names it.
    """
    taken = _TAKES.get(way, {"out"}) | {way, "as_json"}
    for name, value in context.params.items():
        source = context.get_parameter_source(name)
        given = value is not None and source is not None and source.name == "COMMANDLINE"
        if given and name not in taken:
            shown = "bench" if way == "bench" else f"--{way.replace('_', '-')}"
            raise MmfastError(f"{shown} does not use --{name.replace('_', '-')}; leave it out")


def bench(
    context: typer.Context,
    preset: _Preset = None,
    reduce: Reduces = None,
    frames: Annotated[int, typer.Option(help="Frames of the clip.")] = 8,
    keep: Annotated[
        str | None, typer.Option(help="Shares for specs without budget: 0.25,0.1.")
    ] = None,
    stages: _Stages = "llm",
    device: Device = None,
    dtype: Dtype = "auto",
    threads: Annotated[int | None, typer.Option(help="CPU threads.")] = None,
    iters: Annotated[int | None, typer.Option(help="Timed rounds.")] = None,
    selection: _Selection = False,
    full: _Full = False,
    minutes: _Minutes = 6.0,
    break_even: _BreakEven = False,
    compare: _Compare = None,
    fail_above: _FailAbove = None,
    stream: Annotated[str | None, _named("stream", "streams")] = None,
    speech: Annotated[str | None, _named("speech", "speech")] = None,
    serve: Annotated[str | None, _named("serve", "the server")] = None,
    kernels: Annotated[str | None, _named("kernels", "a kernel")] = None,
    decode: Annotated[str | None, _named("decode", "decoding steps")] = None,
    encoder: Annotated[str | None, _named("encoder", "the encoder")] = None,
    out: Annotated[Path | None, typer.Option(help="Append the rows to this .jsonl file.")] = None,
    as_json: Json = False,
) -> None:
    """Speed on real model shapes with random weights, baseline interleaved."""
    from mmfast.bench.named import SUITES
    from mmfast.bench.results import append, bench_rows
    from mmfast.bench.run import run_bench
    from mmfast.cli_bench_full import bench_break_even, bench_full
    from mmfast.cli_compare import bench_compare
    from mmfast.cli_output import print_bench, progress, quiet

    quiet()
    way = next((name for name in (*SUITES, *_TAKES) if context.params.get(name)), "bench")
    _check_given(context, way)
    if way in SUITES:
        return bench_named(way, context.params[way], out, as_json)
    if compare is not None:
        return bench_compare(compare, fail_above, out, as_json)
    if full:
        return bench_full(device, preset, minutes, out, as_json)
    if break_even:
        return bench_break_even(preset or "tiny", threads, device, out, as_json)
    if selection:
        return _bench_selection(out, as_json)
    with progress("bench") as tick:
        wanted = (preset or "tiny", list(reduce or []), frames, keep, stages)
        document = run_bench(*wanted, device, dtype, threads, iters, tick)
    if out is not None:
        append(out, bench_rows(document))
    print_bench(document, as_json)
    if not document["ok"]:
        raise typer.Exit(1)


def _bench_selection(out: Path | None, as_json: bool) -> None:
    """The choosing alone, against textbook loops."""
    from mmfast.bench.results import append
    from mmfast.bench.selection import result_rows
    from mmfast.cli_output import print_selection, progress

    with progress("selection") as tick:
        rows = result_rows(progress=tick)
    if out is not None:
        append(out, rows)
    print_selection(rows, as_json)
