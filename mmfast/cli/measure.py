"""`mmfast eval` and `mmfast bench`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from mmfast.cli import options, output
from mmfast.cli.options import (
    Attn,
    Caches,
    Device,
    Dtype,
    Json,
    Model,
    Prefill,
    Reduces,
    Weights,
    complete_preset,
)
from mmfast.cli.own_suites import eval_own_suite, kept_results
from mmfast.core.errors import MmfastError
from mmfast.tiny.names import OWN_SUITES, SUITES, check_suite


def bench_full(
    device: str | None, preset: str | None, minutes: float, out: Path | None, as_json: bool
) -> None:
    """Everything for one device; rows reach `out` step by step."""
    from mmfast.bench.full import run_full
    from mmfast.bench.results import Row

    console = Console(stderr=True)

    def sink(rows: list[Row]) -> None:
        output.keep_rows(out, rows)

    def tell(text: str) -> None:
        console.print(text, style="dim", highlight=False, markup=False)

    with output.progress("full") as tick:
        document = run_full(device, preset, minutes, tick, sink, tell)
    if as_json:
        output.print_json(document)
    else:
        output.print_bench_rows([row for row in document["rows"] if row["suite"] == "bench"])
        keys = ("label", "state", "seconds", "rows")
        output.print_rows(keys, [[step[key] for key in keys] for step in document["steps"]])
    if not document["ok"]:
        raise typer.Exit(1)


def bench_break_even(
    preset: str, threads: int | None, device: str | None, out: Path | None, as_json: bool
) -> None:
    """Find the number of tokens, and of answers at once, from which reducing pays."""
    from mmfast.bench.run import run_break_even

    with output.progress("break-even") as tick:
        rows = run_break_even(preset, threads, device, tick)
    output.keep_rows(out, rows)
    keys = ("bench", "stage", "reduce", "tokens", "batch", "stock_ms", "median_ms", "speedup")
    names = ("by", "stage", "reduce", "tokens", "batch", "stock ms", "ms", "speed-up", "pays")
    pays = {None: "=", True: "yes", False: "no"}
    cells = [[*(row[key] for key in keys), pays[row["pays"]]] for row in rows]
    output.print_table(rows, as_json, names, cells)


# What every row carries to be repeated, and a person does not need to see.
_HIDDEN = {"suite", "bench", "versions", "commit", "date", "processor", "clock", "knobs", "dtype"}


def completer(suite: str) -> Callable[[str], list[str]]:
    """Completes the names of a suite's benchmarks on a command line."""

    def complete(incomplete: str) -> list[str]:
        from mmfast.bench.registry import names

        return [name for name in names(suite) if name.startswith(incomplete)]

    return complete


def bench_named(
    suite: str,
    name: str,
    out: Path | None,
    as_json: bool,
    peer: Path | None = None,
    only: str | None = None,
) -> None:
    """Measure `name` of `suite`, or `only` some cases, append the rows to `out`, print them."""
    from mmfast.bench.registry import named_rows

    with output.progress(name) as tick:
        told = lambda label, done, total: tick(done, total, label)
        keep = lambda row: output.keep_rows(out, [row])  # what takes hours may be cut short
        rows = named_rows(
            suite, name, told, None if peer is None else str(peer), keep, only and only.split(",")
        )
    keys = [key for key in dict.fromkeys(k for row in rows for k in row) if key not in _HIDDEN]
    output.print_table(rows, as_json, keys, [[row.get(key) for key in keys] for row in rows])


def _suites(incomplete: str) -> list[str]:
    return [name for name in (*SUITES, *OWN_SUITES) if name.startswith(incomplete)]


_Suite = Annotated[
    str,
    typer.Option(
        help="video, image, multi-image, document, table, scenes, stream, present, history, "
        "speech, needles.",
        autocompletion=_suites,
    ),
]
_Length = Annotated[int, typer.Option(help="Tokens of documents (--suite needles).")]
_Seconds = Annotated[float, typer.Option(help="Length of streams (--suite stream, history).")]
_Aware = Annotated[bool, typer.Option("--aware", help="Ask before the cut (--suite needles).")]
_Data = Annotated[
    Path | None,
    typer.Option(
        help="Your questions, a line each: {media, question, answer}, with choices if you like. "
        "Answers are matched as generated text, choices scored by log-likelihood."
    ),
]
_Frames = Annotated[int, typer.Option(help="Frames sampled uniformly from a clip (--data).")]
_Strict = Annotated[
    bool, typer.Option("--strict", help="Stop at media that cannot be read (--data).")
]
_Report = Annotated[Path | None, typer.Option(help="Write a page of HTML with charts (--data).")]
_Resume = Annotated[
    bool, typer.Option(help="Take rows that --out has of an earlier run; --no-resume asks again.")
]
_Csv = Annotated[Path | None, typer.Option(help="Write the answers as a table (--data).")]


def evaluate(
    context: typer.Context,
    reduce: Reduces = None,
    cache: Caches = None,
    n: Annotated[int, typer.Option(help="Questions.")] = 400,
    seed: Annotated[int, typer.Option(help="Seed of the unseen clips.")] = 1000,
    suite: _Suite = "video",
    seconds: _Seconds = 960,
    length: _Length = 4096,
    aware: _Aware = False,
    model: Model = None,
    weights: Weights = None,
    prefill: Prefill = None,
    attn: Attn = None,
    data: _Data = None,
    frames: _Frames = 8,
    strict: _Strict = False,
    report: _Report = None,
    csv: _Csv = None,
    out: Annotated[Path | None, typer.Option(help="Append the rows to this .jsonl file.")] = None,
    resume: _Resume = True,
    as_json: Json = False,
) -> None:
    """Accuracy, tokens and time to first token per spec on the embedded task."""
    from mmfast.core.spec import is_auto
    from mmfast.models.quiet import quiet

    quiet()
    reduce, cache = ([*dict.fromkeys(specs or [])] for specs in (reduce, cache))
    _check_asked(reduce, cache, prefill, n, seed)
    _check_given(context, "eval" if data is None else "data")
    given = context.params | {"reduce": reduce, "cache": cache}
    if data is not None:
        return eval_data(given, context.get_parameter_source("n"))
    _check_suite(suite, given)
    output.keep_rows(out, [])  # from here on Ctrl-C tells of them
    from mmfast.caches.plan import call_plan, plan_cache

    asked: dict[str, Any] = {"weights": weights, "prefill": prefill, "attn": attn}
    for spec in cache:  # a stream reads again what its score policy has let go
        plan_cache(spec) if suite == "stream" else call_plan(spec)
    if suite in OWN_SUITES:
        return eval_own_suite(suite, given)
    from mmfast.bench.results import environment, eval_rows
    from mmfast.tiny.evaluate import run_eval

    environ = environment()  # of the code that is about to run, not of the tree hours later
    specs = [_chosen(model, suite, as_json) if is_auto(spec) else spec for spec in reduce]
    with kept_results(given, **asked) as kept, output.progress("eval") as tick:
        document = run_eval(
            specs,
            **dict(asked, n=n, seed=seed, model=model, name=suite, caches=cache),
            progress=lambda spec, done, total: tick(done, total, spec),
            sink=lambda document: output.keep_rows(out, kept.new(eval_rows(document, environ))),
            known=kept.find,
        )
    output.print_eval(document, as_json)


def _check_asked(
    reduce: list[str], cache: list[str], prefill: str | None, n: int, seed: int
) -> None:
    """Refuse unknown names in specs, what asks nothing, and a seed that is none."""
    from mmfast.core.spec import check_names, is_auto

    check_names(reduce, cache, [prefill])
    if odd := [spec for spec in reduce if is_auto(spec) and spec != "auto"]:
        raise MmfastError(f"--reduce {odd[0]!r} checks the answers of a pipeline; write 'auto'")
    if n < 1:
        raise MmfastError(f"--n {n} asks nothing; give at least 1")
    if seed < 0:
        raise MmfastError(f"--seed {seed} is no seed; give 0 or more")


def _check_suite(suite: str, given: dict[str, Any]) -> None:
    """Refuse an unknown suite, what one would ignore, and an unknown form of weights and so on."""
    check_suite(suite, own=True)
    if suite != "needles" and (given["aware"] or given["length"] != 4096):
        raise MmfastError(f"--suite {suite} takes no --length and no --aware; leave them out")
    if suite not in ("stream", "history") and given["seconds"] != 960:
        raise MmfastError(f"--suite {suite} takes no --seconds; leave it out")
    if suite == "speech" and (given["reduce"] or given["cache"]):
        raise MmfastError("--suite speech takes no --reduce and no --cache; leave them out")
    if suite in ("present", "history") and (given["reduce"] or given["cache"] or given["model"]):
        raise MmfastError(
            f"--suite {suite} asks the embedded models of streams and of clips in one memory; "
            "leave --reduce, --cache and --model out"
        )
    if suite == "needles" and given["reduce"] and not given["aware"]:
        raise MmfastError("--suite needles: --reduce cuts a prompt with its question; add --aware")
    for name in ("weights", "prefill", "attn"):
        if given[name] is not None and suite in OWN_SUITES:
            raise MmfastError(f"--suite {suite} takes no --{name}; leave it out")
    if given["weights"] or given["prefill"] or given["attn"]:  # their checks import torch
        from mmfast.models.attention import check_attn
        from mmfast.models.packing import plan_weights
        from mmfast.prefill.plan import plan_prefill

        plan_weights(given["weights"])
        plan_prefill(given["prefill"])
        check_attn(given["attn"])


def eval_data(given: dict[str, Any], source_of_n: Any) -> None:
    """Ask a user's own questions with all tokens and in each of the ways given."""
    from importlib.util import find_spec

    from mmfast.bench.own_data import read_questions, run_data
    from mmfast.bench.report.answers import HEAD, cells, write_csv, write_html
    from mmfast.bench.results import append, environment, eval_rows
    from mmfast.core.spec import AUTO

    if AUTO in (given["reduce"] or []):
        raise MmfastError("--reduce auto chooses for one request; give --data a spec")
    data, out, *files = (given[key] for key in ("data", "out", "report", "csv"))
    if files[0] is not None and files[0].suffix.lower() not in (".html", ".htm"):
        raise MmfastError(f"--report {str(files[0])!r}: write a .html or .htm file")
    if files[0] is not None and find_spec("matplotlib") is None:
        raise MmfastError('--report draws with matplotlib: pip install "mmfast[docs]"')
    read_questions(data)  # before a file is made
    targets = [file for file in (out, *files) if file is not None]
    if len({file.resolve() for file in (data, *targets)}) <= len(targets):
        raise MmfastError("--data, --out, --report and --csv name one file twice; give others")
    for file in targets:
        append(file, [])
    specs, caches = ([None, *(given[key] or [])] for key in ("reduce", "cache"))
    ways = list(dict.fromkeys((spec, cache) for cache in caches for spec in specs))
    n = given["n"] if source_of_n.name == "COMMANDLINE" else None
    environ = environment()
    how = (n, given["seed"], given["model"], given["frames"], out, given["strict"])
    with output.progress("questions", f"questions answered{f' in {out}' if out else ''}") as tick:
        document, rows = run_data(data, ways, *how, progress=tick, resume=given["resume"])
    output.keep_rows(out, eval_rows(document, environ))
    for file, write in zip(files, (write_html, write_csv), strict=True):
        if file is not None:
            write(file, document, rows, data.parent)
    for failed in document["failed"]:
        typer.echo(f"failed: {failed['error']}", err=True)
    output.print_table(document, given["as_json"], HEAD, map(cells, document["rows"]))


def _chosen(model: str | None, suite: str, as_json: bool) -> str | None:
    """Plan for the first question of a suite; None where all tokens are kept."""
    from mmfast.planner.auto import plan_once, say
    from mmfast.planner.target import KINDS
    from mmfast.tiny.evaluate import Subject
    from mmfast.tiny.suites import suite as questions
    from mmfast.tiny.suites import suite_of

    subject = Subject(model, asked=suite_of(suite))
    inputs = subject.inputs(questions(1, 0, suite))
    kind = suite if suite in KINDS else "document"  # a table is one
    tick = options.silent if as_json else None
    plan = plan_once(subject.model, subject.name, inputs, tick, kind)
    typer.echo(f"auto: {say(plan)}", err=True)
    return plan.spec


def _named(suite: str, what: str) -> Any:
    return typer.Option(help=f"A benchmark of {what} instead.", autocompletion=completer(suite))


_Preset = Annotated[
    str | None, typer.Option(help="Model shape; tiny if absent.", autocompletion=complete_preset)
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


_Peer = Annotated[
    Path | None, typer.Option(help="A checkout of ToMe, measured beside --encoder timm.")
]

_Only = Annotated[str | None, typer.Option(help="Cases to run: snapkv,keynorm of --stream score.")]

# What else each way to measure takes, beside --json; the last one is without any of the others.
_TAKES = {
    "compare": {"fail_above", "out"},  # --out is refused with a reason
    "full": {"device", "preset", "minutes", "out"},
    "break_even": {"preset", "threads", "device", "out"},
    "selection": {"out"},
    "eval": {"reduce", "cache", "n", "seed", "suite", "seconds", "model", "out", "weights"}
    | {"length", "aware", "resume"}
    | {"prefill", "attn"},
    "data": {"reduce", "cache", "n", "seed", "model", "out", "frames", "strict", "report", "csv"}
    | {"resume"},
    "encoder": {"out", "peer"},
    "stream": {"out", "only"},
    "speech": {"out", "only"},
    "decode": {"out", "peer"},
    "bench": {"preset", "reduce", "frames", "keep", "stages", "device", "dtype", "threads", "iters"}
    | {"out"},
}


def _check_given(context: typer.Context, way: str) -> None:
    """Refuse options that `way` would ignore, by name."""
    named = {"bench": "bench", "eval": "eval without --data"}
    shown = named.get(way, f"--{way.replace('_', '-')}")
    options.check_taken(context, shown, _TAKES.get(way, {"out"}) | {way, "as_json"})
    if context.params["out"] is None and not context.params.get("resume", True):
        raise MmfastError("--no-resume asks again what --out has; give --out, too, or neither")


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
    prefill: Annotated[str | None, _named("prefill", "sparse prefill")] = None,
    encoder: Annotated[str | None, _named("encoder", "the encoder")] = None,
    peer: _Peer = None,
    only: _Only = None,
    train: Annotated[str | None, _named("train", "training")] = None,
    out: Annotated[Path | None, typer.Option(help="Append the rows to this .jsonl file.")] = None,
    as_json: Json = False,
) -> None:
    """Speed on real model shapes with random weights, baseline interleaved."""
    from mmfast.bench.registry import SUITES
    from mmfast.bench.results import bench_rows
    from mmfast.bench.run import run_bench
    from mmfast.models.quiet import quiet

    quiet()
    way = next((name for name in (*SUITES, *_TAKES) if context.params.get(name)), "bench")
    _check_given(context, way)
    options.check_threads(threads)
    output.keep_rows(out, [])
    if way in SUITES:
        return bench_named(way, context.params[way], out, as_json, peer, only)
    if compare is not None:
        return bench_compare(compare, fail_above, out, as_json)
    if full:
        return bench_full(device, preset, minutes, out, as_json)
    if break_even:
        return bench_break_even(preset or "tiny", threads, device, out, as_json)
    if selection:
        return _bench_selection(out, as_json)
    with output.progress("bench") as tick:
        wanted = (preset or "tiny", list(reduce or []), frames, keep, stages)
        document = run_bench(*wanted, device, dtype, threads, iters, tick)
    output.keep_rows(out, bench_rows(document))
    output.print_bench(document, as_json)
    if not document["ok"] or document["interrupted"]:
        raise typer.Exit(130 if document["interrupted"] else 1)


def _bench_selection(out: Path | None, as_json: bool) -> None:
    from mmfast.bench.suites.selection import result_rows

    with output.progress("selection") as tick:
        rows = result_rows(progress=tick)
    output.keep_rows(out, rows)
    columns = {
        **{key: key.replace("_", " ") for key in ("case", "ms", "textbook_ms")},
        "speedup": "faster",
        "same_indices": "same indices",
        "noise": "noise",
        # of a few cases
        "extra_mb": "peak MB",
        "textbook_extra_mb": "textbook peak MB",
    }
    cells = [[row.get(key) for key in columns] for row in rows]
    output.print_table(rows, as_json, list(columns.values()), cells)


def bench_compare(
    files: tuple[Path, Path], fail_above: float | None, out: Path | None, as_json: bool
) -> None:
    """Print old, new and ratio of every row; exit 1 only where `fail_above` asks for it."""
    from mmfast.bench.compare import compare
    from mmfast.bench.results import load

    if out is not None:
        raise MmfastError("--compare measures nothing, so --out has no rows; leave one of them out")
    if fail_above is not None and not fail_above >= 0:
        raise MmfastError(f"--fail-above {fail_above} is no slow-down; give per cent, 0 or more")
    found = compare(*(load(file) for file in files))
    beyond = found.beyond(fail_above) if fail_above is not None else ()
    if as_json:
        output.print_json({"ok": not beyond, "fail_above": fail_above, **found.to_dict()})
    else:
        cells = [
            (pair.name, pair.metric, pair.old, pair.new, f"{pair.new / pair.old:.3f}", pair.verdict)
            for pair in found.pairs
        ]
        output.print_rows(("row", "metric", "old", "new", "new / old", ""), cells)
        _tell(found.notes, found.only_old, found.only_new)
    if beyond:
        raise typer.Exit(1)


def _tell(notes: tuple[str, ...], only_old: tuple[str, ...], only_new: tuple[str, ...]) -> None:
    console = Console(stderr=True)
    for note in notes:
        console.print(f"differs: {note}", style="yellow", highlight=False, markup=False)
    for label, names in (("first", only_old), ("second", only_new)):
        for name in names:
            text = f"only in the {label} file: {name}"
            console.print(text, style="dim", highlight=False, markup=False)
