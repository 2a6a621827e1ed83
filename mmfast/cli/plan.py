"""`mmfast plan`: what to run for a target, what it should cost, and why."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmfast.cli import options as shared
from mmfast.cli.output import keep_rows, print_json, print_rows, print_table, progress
from mmfast.core.errors import MmfastError

if TYPE_CHECKING:
    from mmfast.planner.plan import Plan
    from mmfast.planner.target import Target


_ALWAYS = {"target_ttft_ms", "target_tokens", "max_memory", "quality", "kind", "max_new_tokens"}
_ALWAYS |= {"frames", "device", "dtype", "check", "fresh", "as_json"}


def plan(
    context: typer.Context,
    media: Annotated[str | None, typer.Argument(help="Video or image file.")] = None,
    question: Annotated[str, typer.Argument(help="What you want to know.")] = "What is this?",
    target_ttft_ms: shared.Ttft = None,
    target_tokens: shared.TokenTarget = None,
    max_memory: shared.Memory = None,
    quality: shared.Quality = None,
    kind: Annotated[str | None, typer.Option(help="image, multi-image, video or document.")] = None,
    model: shared.Model = None,
    preset: Annotated[
        str | None,
        typer.Option(help="A model shape instead of media.", autocompletion=shared.complete_preset),
    ] = None,
    frames: Annotated[int, typer.Option(help="Frames of the clip.")] = 8,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer in tokens.")] = 1,
    device: shared.Device = None,
    dtype: shared.Dtype = "auto",
    check: Annotated[bool, typer.Option("--check", help="Run the plan and compare.")] = False,
    check_all: Annotated[
        bool, typer.Option("--check-all", help="Compare predictions on all shapes; minutes.")
    ] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Measure this device anew, whatever is remembered.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="With --check-all: append rows here.")] = None,
    as_json: shared.Json = False,
) -> None:
    """Choose method, site and budget, or a KV policy, for a target, and explain the choice."""
    from mmfast.frontends.source import DEFAULT_LIMITS, open_source
    from mmfast.models.quiet import quiet

    _check_given(context)
    if media is not None:
        open_source(media, DEFAULT_LIMITS)  # before an import of torch
    from mmfast.planner.target import make_target

    quiet()
    target = make_target(target_ttft_ms, target_tokens, max_memory, quality, kind)
    if check_all:
        return _check_all(out, as_json)
    if media is None and preset is None:
        raise MmfastError("give a media file, or --preset NAME for a model shape")
    if not target:
        target = make_target(quality="balanced", kind=kind)
    if preset is not None:
        from mmfast.bench.plan import check_plan, plan_shape

        shape = (preset, frames, device, dtype)
        with progress("measuring this device") as tick:
            made = plan_shape(target, *shape, tick, fresh, max_new_tokens)
        ms = check_plan(made, *shape) if check else None
    else:
        options = {"model": model, "device": device, "dtype": dtype, "frames": frames}
        options["max_new_tokens"] = max_new_tokens
        made, ms = _of_media(context, target, str(media), question, options)
    _print(made, target, ms, as_json)


def _check_given(context: typer.Context) -> None:
    """Refuse options that the way to plan would ignore."""
    given = context.params
    if given["check_all"]:
        shared.check_taken(context, "--check-all", {"check_all", "out", "as_json"})
    elif given["preset"] is not None:
        shared.check_taken(context, "--preset", _ALWAYS | {"preset"})
    else:
        shared.check_taken(context, "plan", _ALWAYS | {"media", "question", "model"})
    shared.check_answer(given["max_new_tokens"])


def _of_media(
    context: typer.Context, target: Target, media: str, question: str, options: dict[str, Any]
) -> tuple[Plan, float | None]:
    from statistics import median

    from mmfast.models.prompt import check_question
    from mmfast.pipelines import pipeline

    check_question(question)
    task, check = shared.task_of(context, media), context.params["check"]
    pipe = pipeline(task, **options)
    if check:
        pipe(media, question)  # the first call of a process is slower in every part
    if context.params["fresh"]:
        pipe.planner.planner.learner.forget()
    with progress("measuring this device") as tick:
        made = pipe.plan(media, question, tick=tick, target=target)
    if not check:
        return made, None
    made = pipe.plan(media, question, target=target)  # again, now that everything is warm
    options |= {"model": (pipe.model, pipe.processor), "reduce": made.spec, "cache": made.cache}
    pipe = pipeline(task, **{**options, "max_new_tokens": 1})
    planning = made.ttft_ms["plan"]
    return made, planning + median(pipe(media, question).ttft_ms for _ in range(5))


def _check_all(out: Path | None, as_json: bool) -> None:
    from mmfast.bench.plan import check_rows

    with progress("plan") as tick:
        rows = check_rows(tick)
    keep_rows(out, rows)
    keys = ("preset", "stage", "reduce", "kept", "predicted_ms", "measured_ms", "ratio")
    names = [key.replace("_", " ") for key in keys]
    print_table(rows, as_json, names, [[row[key] for key in keys] for row in rows])


def _print(made: Plan, target: Target, ms: float | None, as_json: bool) -> None:
    from mmfast.core.sizes import format_bytes

    if as_json:
        return print_json(made.to_dict(ms))
    megabytes = {name: size / 1e6 for name, size in made.memory.items()}
    rows: list[tuple[object, ...]] = [
        ("reduce", made.spec or "all tokens", f"for {target}"),
        *([("cache", made.cache, "keys and values")] if made.cache else []),
        ("visual tokens", f"{made.kept_tokens} of {made.visual_tokens}", "after the last stage"),
        ("per layer", f"{made.mean_tokens:.0f}", "mean over the decoder layers"),
        ("first token", f"{made.total_ms:.0f} ms", _parts(made.ttft_ms, "{:.3g}")),
        ("memory", format_bytes(made.total_bytes), _parts(megabytes)),
    ]
    if ms is not None:
        rows.append(("measured", f"{ms:.0f} ms", f"{ms / made.total_ms:.2f} of the prediction"))
    print_rows(("plan", "", ""), rows)
    print("\n" + "\n".join(made.why) + "\n")
    print_rows(("not taken", "why"), [(each.spec, each.reason) for each in made.rejected])


def _parts(values: Any, form: str = "{:.0f} MB") -> str:
    return ", ".join(f"{name} {form.format(value)}" for name, value in values.items() if value)
