"""`mmfast batch`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from mmfast.cli_options import Cache, Device, Dtype, Json, Model, Reduce


def batch(
    folder: Annotated[Path, typer.Argument(help="Searched for clips and images to any depth.")],
    question: Annotated[
        list[str] | None, typer.Option("--question", "-q", help="Give it several times.")
    ] = None,
    questions: Annotated[
        Path | None, typer.Option(help="File with more questions, one a line.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="The result.")] = Path("answers.parquet"),
    model: Model = None,
    reduce: Reduce = None,
    cache: Cache = None,
    frames: Annotated[int, typer.Option(help="Frames sampled uniformly.")] = 8,
    fps: Annotated[float | None, typer.Option(help="Sample at this rate instead.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer in tokens.")] = 64,
    device: Device = None,
    dtype: Dtype = "auto",
    pattern: Annotated[
        str | None, typer.Option(help="Which files: '*.mp4', 'day1/*'; by suffix if absent.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="So many files at most.")] = None,
    engine: Annotated[
        str, typer.Option(help="ray, or inproc: in this process, one after the other.")
    ] = "ray",
    workers: Annotated[
        int | None, typer.Option(help="Models; one per GPU, or per two cores if absent.")
    ] = None,
    address: Annotated[
        str, typer.Option(help="A running Ray cluster's; local starts one here.")
    ] = "local",
    batch_size: Annotated[int, typer.Option(help="Questions in one forward pass.")] = 1,
    resume: Annotated[
        bool, typer.Option(help="Go on from what is there; --no-resume begins anew.")
    ] = True,
    retry_errors: Annotated[
        bool, typer.Option(help="Answer those again whose answer is an error.")
    ] = False,
    as_json: Json = False,
) -> int:
    """Ask about every clip and image of a folder; kill it and run it again: it goes on."""
    from mmfast.cli_output import print_json, progress, quiet
    from mmfast.serve.ray.batch_job import Job, read_questions

    quiet()
    runner = _runner()
    asked = read_questions(question or [], questions)
    how: dict[str, Any] = {"model": model, "reduce": reduce, "cache": cache, "dtype": dtype}
    how |= {"frames": frames, "fps": fps, "max_new_tokens": max_new_tokens, "device": device}
    job = Job(folder.resolve(), asked, **how, batch_size=batch_size)
    way = runner.Way(engine, workers, address, pattern, limit, resume, retry_errors)
    target = out.parent.resolve() / out.name
    with progress("answers") as tick:
        done = runner.run_batch(job, target, way, tick=tick, warn=_warn)
    if as_json:
        print_json(done.to_dict())
    else:
        print(done.out)
        _warn(_said(done))
    return int(done.failed > 0)


def _said(done: Any) -> str:
    return (
        f"{done.answers} answers about {done.files} files, {done.before} of them from before, "
        f"{done.failed} failed; {done.seconds:.1f} s"
    )


def _runner() -> Any:
    from mmfast.core.errors import MmfastError

    try:
        from mmfast.serve.ray import batch
    except ImportError as error:
        raise MmfastError(f'mmfast batch needs {error.name}: pip install "mmfast[ray]"') from None
    return batch


def _warn(line: str) -> None:
    typer.echo(line, err=True)
