"""What `mmfast bench --encoder NAME` measured, as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mmfast.bench.report.named import Cells, Table, markdown, named_tables
from mmfast.bench.report.tables import NOT_MEASURED
from mmfast.bench.results import Row
from mmfast.core.errors import SpecError
from mmfast.core.registry import Method
from mmfast.core.registry import methods as registered
from mmfast.core.spec import parse


def encoder_tables(rows: Sequence[Row]) -> list[str]:
    """A table per benchmark of `mmfast bench --encoder`; of a job the latest row."""
    return named_tables(rows, "encoder", _TABLES, ("job", "shape", "tower", "device", "dtype"))


def _gain(row: Row) -> str:
    if row["speedup"] == 1.0:
        return "1"
    return "=" if abs(row["speedup"] - 1) <= row["noise"] else f"{row['speedup']:.2f}x"


def _part(row: Row) -> str:
    return f"{row['tower']}, {row['layers']} of {row['of_layers']} blocks, {row['device']}"


def _job(row: Row) -> str:
    return f"`{row['job']}`" if "@" in row["job"] else row["job"]


def _attention(row: Row) -> Cells:
    what = f"{row['shape']}, {row['segments']} segments of {row['tokens']:,} tokens"
    return (f"{what}, {row['device']}", row["job"], f"{row['median_ms']:.1f}", _gain(row))


def _batch(row: Row) -> Cells:
    ms = f"{row['median_ms'] / row['frames']:.0f}"
    return (_part(row), row["job"], ms, _gain(row), f"{row['peak_mb']:.0f}")


def _patch(row: Row) -> Cells:
    shape = f"{row['shape']}, {row['device']}"
    return (shape, row["dtype"], row["job"], f"{row['median_ms']:.1f}", _gain(row))


def _merge(row: Row) -> Cells:
    share = f"{100 * row['merging_ms'] / row['median_ms']:.1f} %" if row["reduce"] else ""
    ideal = f"{row['ideal']:.2f}x" if row["reduce"] else ""
    return (_part(row), _job(row), f"{row['median_ms']:.0f}", _gain(row), ideal, share)


def _modes(row: Row) -> Cells:
    first = f"{row['first_call_s']:.0f}" if "first_call_s" in row else ""
    return (_part(row), row["job"], f"{row['median_ms']:.0f}", _gain(row), first)


_TABLES: dict[str, Table] = {
    "merge": (
        "Merging inside the tower; ideal by FLOPs of the blocks",
        ("tower", "stage", "ms", "faster", "ideal", "of it to choose and merge"),
        _merge,
    ),
    "compile": (
        'Whole tower with `encoder="fast"` and `"compile"`',
        ("tower", "mode", "ms", "faster", "first call, s"),
        _modes,
    ),
    "patch": (
        "Patch embedding by a matrix product",
        ("patches", "numbers", "way", "ms", "faster"),
        _patch,
    ),
    "attention": (
        "Attention of one block over packed segments",
        ("segments", "way", "ms", "faster"),
        _attention,
    ),
    "batch": (
        "Frames a call",
        ("tower", "way", "ms a frame", "faster", "peak MB"),
        _batch,
    ),
}


@dataclass(frozen=True)
class _Goal:
    """One goal for a GPU: the row of `bench` whose case begins so says whether it is met."""

    bench: str
    case: str
    way: str
    bound: str
    told: Callable[[Row], str]


def _ms(row: Row) -> str:
    return f"{row['median_ms']:.2f} ms"


def _us(row: Row) -> str:
    return f"{1e3 * row['median_ms']:.0f} us"


def _of_copy(row: Row) -> str:
    return f"{100 * row['of_copy']:.0f} %"


_GOALS = (
    _Goal("attention-column-sums", "7B prefill of 6,336", "ours", "at most 0.45 ms", _ms),
    _Goal("attention-column-sums", "32 frames of 729", "ours", "at most 0.30 ms", _ms),
    _Goal("max-min-select", "627 of 6,272", "ours", "at most 2 ms", _ms),
    _Goal("max-min-select", "1,568 of 6,272", "ours", "at most 4 ms", _ms),
    _Goal("temporal-difference", "1,024 frames", "ours, cosine", "70 % of a copy", _of_copy),
    _Goal("segment-merge", "mean of 6,272 onto 1,568", "ours", "at most 25 us", _us),
)


def kernels(rows: Sequence[Row]) -> list[str]:
    """Every kernel's goals on a GPU, and what the latest row of one says."""
    lines = []
    for goal in _GOALS:
        found = [row for row in rows if _speaks(row, goal)]
        told = f"{goal.told(found[-1])} ({found[-1]['processor']})" if found else NOT_MEASURED
        lines.append((f"`{goal.bench.replace('-', '_')}`", goal.case, goal.bound, told))
    return markdown(("kernel", "case, bfloat16", "goal on an H200", "measured"), lines)


def _speaks(row: Row, goal: _Goal) -> bool:
    named = row["bench"] == goal.bench and row.get("way") == goal.way
    on_gpu = named and row["device"] == "cuda" and row["dtype"] == "bfloat16"
    return on_gpu and row["case"].startswith(goal.case)


def reducers(rows: Sequence[Row]) -> list[str]:
    """Choosing a quarter of a video's and of an image's tokens, by every reducer."""
    latest = {(row["method"], row["n"]): row for row in rows if row["bench"] == "reducers"}
    if not latest:
        return [NOT_MEASURED]
    sizes = sorted({n for _, n in latest}, reverse=True)
    names = sorted({name for name, _ in latest})
    some = next(iter(latest.values()))
    where = f"{some['processor']}, {some['date']}, commit `{some['commit'] or 'none'}`"
    what = " and ".join(f"{n:,} x {some['d']:,}" for n in sizes)
    lines = [f"A quarter of {what} tokens, one thread of {where}.", ""]
    head = [f"{n:,}: ms (operations, MB more)" for n in sizes]
    cells = [(f"`{name}`", *(_cost(latest.get((name, n))) for n in sizes)) for name in names]
    return lines + markdown(("reducer", *head), cells)


def _cost(row: Row | None) -> str:
    if row is None:
        return NOT_MEASURED
    ms = row["median_ms"]
    shown = f"{ms:.1f}" if ms < 10 else f"{ms:,.0f}"
    return f"{shown} ({row['operations']}, {row['extra_mb']:.0f})"


def decode_tables(rows: Sequence[Row]) -> list[str]:
    """A table per benchmark of `mmfast bench --decode`; of a job the latest row."""
    mine = [row for row in rows if row["bench"] in _DECODE_TABLES]
    return named_tables(mine, "decode", _DECODE_TABLES, _KEYS)


def _hooks(row: Row) -> Cells:
    share = f"{100 * row['overhead']:+.1f} %"
    quiet = abs(row["overhead"]) <= row["noise"]
    return (
        f"{row['preset']}, {row['device']}",
        f"`{row['job']}`".replace("|", "\\|"),  # a bar would end the cell
        row["work"] if row["work"] != "none" else "",
        f"{row['twin_ms']:.1f}",
        "=" if quiet else share,
        f"{row['overhead_us']:+.0f}",
        f"{100 * row['noise']:.1f} %, {row['noise_us']:.0f}",
    )


def _compiled(row: Row) -> Cells:
    again = f"{row['recompiles']} / {row['recompiles_attached_anew']}"
    return (
        f"{row['preset']}, {row['device']}",
        f"`{row['reduce']}`" if row["reduce"] else "stock",
        f"{row['eager_ms']:.2f}",
        f"{row['compiled_ms']:.2f}",
        f"{row['speedup']:.2f}x",
        f"{row['graphs']} / {row['breaks']} / {again}",
        "yes" if row["same_tokens"] else "no",
        f"{row['compile_s']:.0f}",
    )


def _frame(row: Row) -> Cells:
    ms, goal = row["median_ms"], row.get("goal_ms")
    shape = (row["preset"], row["device"] if ms is not None else "", str(row["batch"]), row["job"])
    goal_ms = "" if goal is None else f"{goal:.1f}"
    if ms is None:
        return (*shape, NOT_MEASURED, "", f"{row['mb'] / 1e3:.1f} GB", goal_ms, "")
    floor = f"{row['floor_ms']:.2f} ms"
    same = f"{100 * row['same_codes']:.0f} %"
    return (*shape, f"{ms:.2f}", f"{row['p99_ms']:.2f}", floor, goal_ms, same)


_KEYS = ("preset", "device", "job", "reduce", "batch")
_DECODE_TABLES: dict[str, Table] = {
    "hooks": (
        "What attach() adds to a decode step, beside a stock cache of the same lengths",
        ("shape", "attached", "work of its own", "step, ms", "added", "us", "A/A noise, us"),
        _hooks,
    ),
    "compiled": (
        "Compiled decoding on a static cache behind a reduced prompt",
        (
            "shape",
            "attached",
            "eager, ms",
            "compiled, ms",
            "gain",
            "graphs / breaks / compiled again / attached anew",
            "same tokens",
            "first step, s",
        ),
        _compiled,
    ),
    "moshi-frame": (
        "A frame of Moshi (80 ms of sound in and out), beside the floor by bytes",
        (
            "shape",
            "device",
            "batch",
            "way",
            "median, ms",
            "p99, ms",
            "floor by bytes",
            "goal, ms",
            "same codes",
        ),
        _frame,
    ),
}


SHARES = (0.5, 0.25, 0.1)
ACTS = {"prefill": "behind the prompt", "always": "always"}
Found = dict[str, Row]  # the latest row of each cache spec, "" without one


def caches(_: Sequence[Row]) -> list[str]:
    """One line a registered policy."""
    lines = ["| policy | paper | role | acts | needs | what it does |", "|---|" + "---|" * 5]
    for m in registered("cache"):
        paper = f"[{m.paper}](https://arxiv.org/abs/{m.paper})" if m.paper else "baseline"
        acts = "at a question" if m.role == "retrieve" else ACTS[m.moment]
        cells = (f"`{m.name}`", paper, m.role, acts, " ".join(m.needs), m.summary)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return lines


def latest(rows: Sequence[Row]) -> Found:
    """Rows of runs that asked for caches and for no reduction, by cache spec."""
    return {row["cache"] or "": row for row in rows if "cache" in row and not row["reduce"]}


def relative(name: str, share: float, found: Found) -> float | None:
    """Accuracy of a policy at a share, relative to the whole cache; None if it was not measured."""
    whole, row = found.get(""), found.get(f"{name}:{share}")
    if whole is None or row is None or not whole["score"]:
        return None
    return float(row["score"]) / float(whole["score"])


def cache_accuracy(rows: Sequence[Row]) -> list[str]:
    """Policies by the share of keys and values that is left, then the other specs."""
    found = latest(rows)
    head = " | ".join(f"{100 * share:.0f} %" for share in SHARES)
    lines = [
        f"The whole cache: {_cell(found.get(''))}. Right answers in per cent, in brackets the "
        "95 % interval. The first token of an answer comes from the pass that reads the prompt, "
        "before anything leaves the cache; those behind it, such as a second digit, read what is "
        "left.",
        "",
        f"| policy | {head} |",
        "|---|" + "---|" * len(SHARES),
    ]
    table = [m.name for m in registered("cache") if _by_share(m)]
    for name in table:
        cells = " | ".join(_cell(found.get(f"{name}:{share}")) for share in SHARES)
        lines.append(f"| `{name}` | {cells} |")
    shown = {"", *(f"{name}:{share}" for name in table for share in SHARES)}
    others = [spec for spec in found if spec not in shown and _known(spec)]
    if others:
        lines += ["", "| cache | right answers |", "|---|---|"]
        lines += [f"| `{spec}` | {_cell(found[spec])} |" for spec in others]
    return [*lines, "", _basis(rows)] if rows else lines


def _by_share(method: Method) -> bool:
    return method.role in ("position", "score")


def _known(spec: str) -> bool:
    """Whether a spec still means something; policies come and go, rows stay."""
    try:
        return bool(parse(spec, kind="cache"))
    except SpecError:
        return False


def _cell(row: Row | None) -> str:
    if row is None:
        return NOT_MEASURED
    bounds = row.get("interval")
    between = f" ({100 * bounds[0]:.1f} to {100 * bounds[1]:.1f})" if bounds else ""
    return f"{100 * row['score']:.1f}{between}"


def _basis(rows: Sequence[Row]) -> str:
    last = rows[-1]
    return (
        f"{last['n']} questions about unseen clips, seed {last['seed']}, model `{last['model']}`, "
        f"{last['date']}, commit `{last['commit'] or 'none'}`."
    )
