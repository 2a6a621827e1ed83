"""`mmfast`: ask, methods, doctor, verify, eval, bench.

Every command imports what it needs itself, so that `mmfast --help` and completion stay instant.
Results go to standard output, progress and tables' ornaments to standard error.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from mmfast import __version__
from mmfast.core.errors import MmfastError

app = typer.Typer(
    name="mmfast",
    help="Image, video and speech models that answer sooner, remember longer and cost less.",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _complete_spec(incomplete: str) -> list[str]:
    from mmfast.core.registry import methods

    head, _, last = incomplete.rpartition("+")
    prefix = f"{head}+" if head else ""
    return [prefix + m.name for m in methods("reducer") if m.name.startswith(last)]


def _complete_preset(incomplete: str) -> list[str]:
    from mmfast.bench.presets import PRESETS

    return [name for name in PRESETS if name.startswith(incomplete)]


Reduce = Annotated[
    str | None,
    typer.Option(
        help="Spec, for example evs:0.25 or divprune:0.5+fastv@llm3:0.5.",
        autocompletion=_complete_spec,
    ),
]
Reduces = Annotated[
    list[str] | None,
    typer.Option("--reduce", help="Spec; give it several times.", autocompletion=_complete_spec),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
Model = Annotated[
    str | None, typer.Option(help="Checkpoint directory or hub id; embedded if absent.")
]
Device = Annotated[
    str | None, typer.Option(help="cpu, cuda, cuda:1; CUDA where there is one if absent.")
]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        typer.echo(__version__)
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def ask(
    media: Annotated[str, typer.Argument(help="Video or image file.")],
    question: Annotated[str, typer.Argument(help="What you want to know.")],
    model: Model = None,
    reduce: Reduce = None,
    cache: Annotated[str | None, typer.Option(help="KV policy spec.")] = None,
    frames: Annotated[int, typer.Option(help="Frames sampled uniformly.")] = 8,
    fps: Annotated[float | None, typer.Option(help="Sample at this rate instead.")] = None,
    device: Device = None,
    dtype: Dtype = "auto",
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer in tokens.")] = 64,
    as_json: Json = False,
) -> None:
    """Answer one question about a video or an image, and say what it cost."""
    from mmfast.cli_output import print_answer, quiet
    from mmfast.frontends.image import kind_of
    from mmfast.models.prompt import check_question

    quiet()
    task = f"{kind_of(media)}-qa"
    check_question(question)
    from mmfast.pipelines import pipeline

    options: dict[str, Any] = {"reduce": reduce, "cache": cache, "frames": frames, "fps": fps}
    pipe = pipeline(
        task, model, device=device, dtype=dtype, max_new_tokens=max_new_tokens, **options
    )
    print_answer(pipe(media, question), as_json)


@app.command()
def methods(
    kind: Annotated[str | None, typer.Option(help="reducer or cache.")] = None,
    as_json: Json = False,
) -> None:
    """List the registered methods."""
    from mmfast.cli_output import print_methods
    from mmfast.core.registry import methods as rows

    print_methods(rows(kind), as_json)


@app.command()
def doctor(as_json: Json = False) -> None:
    """Show versions, devices and backends, what is missing and how to get it."""
    from mmfast.cli_output import print_checks
    from mmfast.doctor import checks

    rows = checks()
    print_checks(rows, as_json)
    if not all(row.ok for row in rows if row.required):
        raise typer.Exit(1)


@app.command()
def verify(
    directory: Annotated[Path, typer.Argument(help="Folder of golden vectors (*.safetensors).")],
    as_json: Json = False,
) -> None:
    """Compare every method with golden vectors; exit 1 on any mismatch."""
    from mmfast.bench.golden import verify as run
    from mmfast.cli_output import print_verify

    if not print_verify(run(directory), as_json):
        raise typer.Exit(1)


@app.command(name="eval")
def evaluate(
    reduce: Reduces = None,
    n: Annotated[int, typer.Option(help="Questions.")] = 400,
    seed: Annotated[int, typer.Option(help="Seed of the unseen clips.")] = 1000,
    model: Model = None,
    out: Annotated[Path | None, typer.Option(help="Append the rows to this .jsonl file.")] = None,
    as_json: Json = False,
) -> None:
    """Accuracy, tokens and time to first token per spec on the embedded task."""
    from mmfast.cli_output import print_eval, progress, quiet
    from mmfast.core.spec import parse

    quiet()
    for spec in reduce or []:
        parse(spec)
    if n < 1:
        raise MmfastError(f"--n {n} asks nothing; give at least 1")
    from mmfast.bench.results import append, environment, eval_rows
    from mmfast.tiny.evaluate import run_eval

    environ = environment()  # of the code that is about to run, not of the tree hours later
    with progress("eval") as tick:
        document = run_eval(
            list(reduce or []),
            n=n,
            seed=seed,
            model=model,
            progress=lambda spec, done, total: tick(done, total, spec),
        )
    if out is not None:
        append(out, eval_rows(document, environ))
    print_eval(document, as_json)


@app.command()
def bench(
    preset: Annotated[
        str, typer.Option(help="Model shape.", autocompletion=_complete_preset)
    ] = "tiny",
    reduce: Reduces = None,
    frames: Annotated[int, typer.Option(help="Frames of the clip.")] = 8,
    keep: Annotated[
        str | None, typer.Option(help="Shares for specs without budget: 0.25,0.1.")
    ] = None,
    stages: Annotated[str, typer.Option(help="Of vit, llm, decode, ttft.")] = "llm",
    device: Device = None,
    dtype: Dtype = "auto",
    threads: Annotated[int | None, typer.Option(help="CPU threads.")] = None,
    iters: Annotated[int | None, typer.Option(help="Timed rounds.")] = None,
    selection: Annotated[
        bool, typer.Option("--selection", help="Time the choosing alone, against textbook loops.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Append the rows to this .jsonl file.")] = None,
    as_json: Json = False,
) -> None:
    """Speed on real model shapes with random weights, baseline interleaved."""
    from mmfast.bench.results import append, bench_rows
    from mmfast.bench.run import run_bench
    from mmfast.cli_output import print_bench, print_selection, progress, quiet

    quiet()
    if selection:
        from mmfast.bench.selection import result_rows

        with progress("selection") as tick:
            rows = result_rows(progress=tick)
        if out is not None:
            append(out, rows)
        return print_selection(rows, as_json)
    with progress("bench") as tick:
        document = run_bench(
            preset=preset,
            reduce=list(reduce or []),
            frames=frames,
            keep=keep,
            stages=stages,
            device=device,
            dtype=dtype,
            threads=threads,
            iters=iters,
            progress=tick,
        )
    if out is not None:
        append(out, bench_rows(document))
    print_bench(document, as_json)
    if not document["ok"]:
        raise typer.Exit(1)


def main(args: list[str] | None = None) -> None:
    """Entry point: 0 fine, 1 a check failed, 2 bad usage or input, 130 interrupted."""
    # click's UsageError, wherever this typer keeps it
    usage_error: type[typer.BadParameter] = typer.BadParameter.__bases__[0]
    try:
        code = app(args=args, prog_name="mmfast", standalone_mode=False)
    except MmfastError as error:
        code = _fail(str(error))
    except usage_error as error:
        code = _fail(f"{error.format_message()} (see mmfast --help)")
    except typer.Abort:
        code = 130
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str) -> int:
    print("mmfast: error: " + " ".join(message.split()), file=sys.stderr)
    return 2
