"""Commands that answer questions about files: `mmfast ask`, `mmfast batch`."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer

from mmfast.cli import options as shared
from mmfast.cli.output import print_answer, print_comparison, print_json, print_rows, progress
from mmfast.core.errors import MmfastError

_Compare = Annotated[
    str | None,
    typer.Option(metavar="[SPEC]", help="Time SPEC, or --reduce and --cache, and all tokens."),
]
_Check = Annotated[bool, typer.Option("--check", help="Say which words are probably made up.")]
_Guard = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="Refuse harmful pictures: JSON of an ImageGuard, or a CLIP."),
]
_Overlay = Annotated[
    Path | None,
    typer.Option(help="Picture of the kept, merged and dropped patches: .png, .jpg, .webp."),
]


def ask(
    context: typer.Context,
    media: Annotated[str, typer.Argument(help="Video or image file.")],
    question: Annotated[str, typer.Argument(help="What you want to know.")],
    model: shared.Model = None,
    reduce: shared.Reduce = None,
    cache: shared.Cache = None,
    decode: shared.Decode = None,
    prefill: shared.Prefill = None,
    attn: shared.Attn = None,
    reuse: shared.Reuse = None,
    reuse_folder: shared.ReuseFolder = None,
    frames: Annotated[int, typer.Option(help="Frames sampled uniformly.")] = 8,
    fps: Annotated[float | None, typer.Option(help="Sample at this rate instead.")] = None,
    device: shared.Device = None,
    dtype: shared.Dtype = "auto",
    weights: shared.Weights = None,
    target_ttft_ms: shared.Ttft = None,
    target_tokens: shared.TokenTarget = None,
    max_memory: shared.Memory = None,
    quality: shared.Quality = None,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer in tokens.")] = 128,
    check: _Check = False,
    guard: _Guard = None,
    compare: _Compare = None,
    save_overlay: _Overlay = None,
    as_json: shared.Json = False,
) -> None:
    """Answer one question about a video or an image, and say what it cost."""
    from mmfast.models.quiet import quiet

    _check_files(media, save_overlay)
    reduce, cache = _compared(compare, reduce, cache, check)
    _check_values(reduce, cache, prefill, guard)
    quiet()
    from mmfast.models.prompt import ScopeWarning, check_question
    from mmfast.pipelines import pipeline
    from mmfast.pipelines.overlay import check_target, save_sheet

    task = shared.task_of(context, media)
    check_question(question)
    if save_overlay is not None:
        check_target(save_overlay)
    options: dict[str, Any] = {"frames": frames, "fps": fps, "max_new_tokens": max_new_tokens}
    given = {"reduce": reduce, "cache": cache, "prefill": prefill, "attn": attn, "weights": weights}
    how = {"decode": decode, "check": check, "max_memory": max_memory, **_kept(reuse, reuse_folder)}
    how |= {"target_ttft_ms": target_ttft_ms, "target_tokens": target_tokens, "quality": quality}
    pipe = pipeline(task, model, device=device, dtype=dtype, guard=guard, **options, **given, **how)
    pipe.tick = shared.silent if as_json else pipe.tick
    with warnings.catch_warnings(action="ignore", category=ScopeWarning):  # noted in the answer
        answer = pipe(media, question)
    if save_overlay is not None:
        save_sheet(pipe.overlay(media, answer.trace), save_overlay)
    if compare is None:
        return print_answer(answer, as_json)
    pipe.embedded = False  # its answer is noted; the other one would not spend time on that
    stock = pipeline(task, (pipe.model, pipe.processor), **options)
    found = {"reduce": reduce, "cache": cache, "note": answer.note, **answer.noted}
    print_comparison({**_beside(stock, pipe, media, question), **found}, as_json)


def _kept(reuse: str | None, folder: Path | None) -> dict[str, Any]:
    """Return what later questions find, and the folder of it, as options of a pipeline."""
    from mmfast.planner.rates import cache_folder

    if reuse is None and folder is not None:
        raise MmfastError("--reuse-folder keeps nothing without --reuse; give --reuse prefix, too")
    if reuse is None:
        return {}
    return {"reuse": reuse, "store": folder or cache_folder() / "reuse"}


def _check_files(media: str, overlay: Path | None) -> None:
    """Refuse what is wrong with the files, which needs no import of torch."""
    from mmfast.frontends.source import DEFAULT_LIMITS, open_source

    open_source(media, DEFAULT_LIMITS)
    shared.check_apart("--save-overlay", overlay, media)


def _beside(stock: Any, pipe: Any, media: str, question: str) -> dict[str, Any]:
    """Return the times and answers of two pipelines, measured in turn."""
    from mmfast.bench.compare import compare_answers

    with progress("comparing") as tick:
        return compare_answers(stock, pipe, media, question, tick)


def _compared(
    spec: str | None, reduce: str | None, cache: str | None, check: bool
) -> tuple[str | None, str | None]:
    """Return the reduction and the policy that `--compare` sets beside all tokens."""
    from mmfast.core.registry import listed

    if spec is not None and check:
        raise MmfastError("--compare prints no doubts; leave out --check, or ask without --compare")
    if spec is not None and (reduce if spec else not (reduce or cache)):
        raise MmfastError(
            "--compare sets one spec beside all tokens: --compare evs:0.25, or alone "
            "beside --reduce and --cache"
        )
    name = re.split("[@:?+]", spec or "")[0]
    if spec and not cache and [m.kind for m in listed() if m.name == name] == ["cache"]:
        return None, spec
    return spec or reduce, cache


def _check_values(
    reduce: str | None, cache: str | None, prefill: str | None, guard: str | None
) -> None:
    """Refuse wrong specs, a self-check that skips the only answer, and a guard that is none."""
    from mmfast.core.spec import check_names, is_auto, self_check
    from mmfast.models.image_guard import read_guard

    check_names([reduce], [cache], [prefill])
    check = self_check(str(reduce)) if is_auto(reduce) else None
    if check is not None and check.every > 1:
        raise MmfastError(
            f"--reduce {reduce!r} checks one answer of {check.every}; leave out every=, here is one"
        )
    read_guard(guard)


def batch(
    context: typer.Context,
    folder: Annotated[Path, typer.Argument(help="Searched for clips and images to any depth.")],
    question: Annotated[
        list[str] | None, typer.Option("--question", "-q", help="Give it several times.")
    ] = None,
    questions: Annotated[
        Path | None, typer.Option(help="File with more questions, one a line.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="The result.")] = Path("answers.parquet"),
    model: shared.Model = None,
    reduce: shared.Reduce = None,
    cache: shared.Cache = None,
    decode: shared.Decode = None,
    frames: Annotated[int, typer.Option(help="Frames sampled uniformly.")] = 8,
    fps: Annotated[float | None, typer.Option(help="Sample at this rate instead.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer in tokens.")] = 128,
    device: shared.Device = None,
    dtype: shared.Dtype = "auto",
    weights: shared.Weights = None,
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
    as_json: shared.Json = False,
) -> int:
    """Ask about every clip and image of a folder; kill it and run it again: it goes on."""
    from mmfast.models.quiet import quiet
    from mmfast.serve.batch.job import BatchJob, read_questions

    shared.check_sampling(context)
    quiet()
    runner = _runner()
    asked = read_questions(question or [], questions)
    how: dict[str, Any] = {"model": model, "reduce": reduce, "cache": cache, "dtype": dtype}
    how |= {"frames": frames, "fps": fps, "max_new_tokens": max_new_tokens, "device": device}
    how |= {"packed": weights, "decode": decode}
    job = BatchJob(folder.resolve(), asked, **how, batch_size=batch_size)
    way = runner.BatchOptions(engine, workers, address, pattern, limit, resume, retry_errors)
    target = out.parent.resolve() / out.name
    with progress("answers", f"answers kept in {target}.parts, run again to resume") as tick:
        done = runner.run_batch(job, target, way, tick=tick, warn=_warn)
    _show_batch(done, as_json)
    return int(done.failed > 0)


def _show_batch(done: Any, as_json: bool) -> None:
    if as_json:
        print_json(done.to_dict())
        return
    print(done.out)
    _warn(
        f"{done.answers} answers about {done.files} files, {done.before} of them from before, "
        f"{done.failed} failed; {done.seconds:.1f} s"
    )
    if done.errors:
        print_rows(done.errors[0], [each.values() for each in done.errors], errors=True)


def _runner() -> Any:
    try:
        from mmfast.serve.batch import run
    except ImportError as error:
        raise MmfastError(f'mmfast batch needs {error.name}: pip install "mmfast[ray]"') from None
    return run


def _warn(line: str) -> None:
    typer.echo(line, err=True)
