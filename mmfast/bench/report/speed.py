"""Tables of speed: model shapes beside the ideal, break-even, cost of a choice, predictions."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

from mmfast.bench.full import judged
from mmfast.bench.report.table import (
    DERIVED,
    NOT_MEASURED,
    Columns,
    ReportTable,
    Rows,
    at,
    fill,
    pivot,
    stamp,
)
from mmfast.bench.results import Row

STAGES = {
    "vit": "vision tower",
    "llm": "prefill behind the encoder",
    "decode": "one decoding step",
    "ttft": "time to first token",
    "selection": "choosing and compacting inside the run",
}
_PLANNED = {"llm": "behind the encoder", "ttft": "with the encoder", "generate": "`generate`"}
_SHAPE = ("preset", "processor", "dtype", "threads", "frames", "stage")
_EVEN = ("preset", "processor", "dtype", "threads", "bench")


def _where(row: Row) -> str:
    return str(row["processor"]) + (f", {row['threads']} threads" if row["device"] == "cpu" else "")


def _shape(rows: Rows) -> str:
    one = rows[-1]
    clock = f", {one['clock']}" if "clock" in one else ""
    inside = f" ({STAGES[one['share_of']]})" if one["stage"] == "selection" else ""
    best = one.get("ceilings")
    ceilings = best and (
        f"; ceilings: copy {best['copy_gb_s']:.3g} GB/s, matrix product "
        f"{best['matmul_tflop_s']:.3g} TFLOP/s"
    )
    return (
        f"**{one['preset']}, {STAGES[one['stage']]}{inside}**: {one['frames']} frames, "
        f"{one['tokens']} visual tokens, {_where(one)}{clock}, {one['dtype']}, {one['n']} rounds, "
        f"noise {100 * one['noise']:.1f} %, torch {one['versions']['torch']}, "
        f"{stamp(*rows)}{ceilings or ''}."
    )


def _spread(row: Row) -> str:
    digits = 0 if row["median_ms"] >= 100 else 1
    low, middle, high = (f"{row[key]:.{digits}f}" for key in ("p20_ms", "median_ms", "p80_ms"))
    return f"{middle} ({low} to {high})"


def _gain(row: Row) -> str:
    return "=" if row["equal"] else f"{row['speedup']:.2f}x"


_RUN = (
    "reduce: [reduce]`{reduce}` or stock | kept: {kept} | ms (p20 to p80): {spread} | "
    "speed-up: [reduce]{gain_or_equal} or 1 | ideal: [reduce]{ideal:.2f}x or 1 | "
    "of ideal: [reduce]{of_ideal:.2f} | of oracle: [reduce]{of_oracle:.2f} | "
    "selection ms: [reduce]{selection_ms:.1f} | peak MB: {peak_mb:.0f} | "
    "of ceiling: {of_ceiling:.2f} | over SDPA: {scoring_over:+.1%}"
)
_CHOICE = (
    "reduce: [reduce]`{reduce}` or stock | kept: {kept} | in the run, ms (p20 to p80): {spread} | "
    "of it compacting, ms: {compact_ms:.1f} | alone, ms: {selection_ms:.1f} | "
    "share of the run: {share:.2%}"
)
DERIVED.update(spread=_spread, gain_or_equal=_gain)


def _shape_columns(rows: Rows) -> str:
    return _CHOICE if rows and rows[-1]["stage"] == "selection" else _RUN


def _even_title(rows: Rows) -> str:
    one, noise = rows[-1], 100 * max(row["noise"] for row in rows)
    answers = f"answers at once, {one['tokens']:,} visual tokens each"
    return (
        f"**{one['preset']}, by {'visual tokens' if one['bench'] == 'tokens' else answers}**: "
        f"{_where(one)}, {one['clock']}, {one['dtype']}, noise up to {noise:.1f} %, {stamp(*rows)}."
    )


def _even_lines(rows: Rows) -> list[Row]:
    return pivot(
        sorted(rows, key=lambda row: bool(row["stage"] != "llm")),
        lambda row: f"{STAGES[row['stage']]}|`{row['reduce']}`",
        lambda row: int(row[row["bench"]]),
    )


def _even_columns(rows: Rows) -> Columns:
    counts = sorted({int(row[row["bench"]]) for row in rows})
    return {
        "": lambda line: line["name"].split("|")[0],
        "reduce": lambda line: line["name"].split("|")[1],
        **{f"{n:,}": at(n, "{even_gain}") for n in counts},
        "pays from": _pays_from,
    }


def _pays_from(line: Row) -> str:
    """The smallest count from which on every measured one pays."""
    found: Mapping[int, Row] = line["at"]
    smallest = None
    for count in sorted(found, reverse=True):
        if found[count]["pays"] is not True:
            break
        smallest = count
    return "nowhere here" if smallest is None else f"{smallest:,}"


def _planned(rows: Rows) -> str:
    one, off = rows[-1], [abs(row["ratio"] - 1) for row in rows]
    return (
        f"Median error {100 * median(off):.0f} %, largest {100 * max(off):.0f} %, over {len(off)} "
        f"predictions; {one['processor']}, {one['threads']} threads, torch "
        f"{one['versions']['torch']}, {stamp(*rows)}."
    )


def _sizes(rows: Rows) -> list[int]:
    return sorted({int(row["n"]) for row in rows}, reverse=True)


def _reducer_title(rows: Rows) -> str:
    sizes = " and ".join(f"{n:,} x {rows[0]['d']:,}" for n in _sizes(rows))
    return f"A quarter of {sizes} tokens, one thread of {rows[0]['processor']}, {stamp(*rows)}."


def _reducer_columns(rows: Rows) -> Columns:
    heads = {f"{n:,}: ms (operations, MB more)": at(n, choice_cost) for n in _sizes(rows)}
    return {"reducer": "`{name}`", **heads}


def choice_cost(row: Row) -> str:
    """Milliseconds, operations and MB of one choice of tokens."""
    digits = "{median_ms:.1f}" if row["median_ms"] < 10 else "{median_ms:,.0f}"
    return fill(digits + " ({operations}, {extra_mb:.0f})", row)


_SUMS, _PICK = "attention-column-sums", "max-min-select"
_ON_GPU = (  # benchmark, way, start of the case, goal, text of a row
    (_SUMS, "ours", "7B prefill of 6,336", "at most 0.45 ms", "{median_ms:.2f} ms"),
    (_SUMS, "ours", "32 frames of 729", "at most 0.30 ms", "{median_ms:.2f} ms"),
    (_PICK, "ours", "627 of 6,272", "at most 2 ms", "{median_ms:.2f} ms"),
    (_PICK, "ours", "1,568 of 6,272", "at most 4 ms", "{median_ms:.2f} ms"),
    ("temporal-difference", "ours, cosine", "1,024 frames", "70 % of a copy", "{of_copy:.0%}"),
    ("segment-merge", "ours", "mean of 6,272 onto 1,568", "at most 25 us", "{us:.0f} us"),
    ("selected-attention", "ours", "1,638 of 16,384", "twice a gathered copy", "{speedup:.1f}x"),
)


def _kernel_lines(rows: Rows) -> list[Row]:
    on_gpu = [row for row in rows if (row["device"], row["dtype"]) == ("cuda", "bfloat16")]
    lines = []
    for bench, way, case, bound, text in _ON_GPU:
        mine = [r for r in on_gpu if (r["bench"], r.get("way")) == (bench, way)]
        found = [r for r in mine if r["case"].startswith(case)][-1:]
        told = [f"{fill(text, row)} ({row['processor']})" for row in found]
        name = f"`{bench.replace('-', '_')}`"
        lines.append({"kernel": name, "case": case, "bound": bound, "told": told})
    return lines


DERIVED.update(
    even_gain=lambda row: "=" if row.get("pays") is None else f"{row['speedup']:.2f}x",
    measured_on=lambda line: line["told"][0] if line["told"] else NOT_MEASURED,
    planned=lambda row: _PLANNED[row["stage"]],
    same_choice=lambda row: "yes" if row["same_indices"] else "no",
    us=lambda row: 1e3 * row["median_ms"],
)


def _peers_title(rows: Rows) -> str:
    one = max(rows, key=len)
    noises = [f"{100 * one[key]:.1f} %" for key in ("noise", "step_noise") if key in one]
    found = f", noise {noises[0]} of first tokens, {noises[1]} of steps" if noises else ""
    return (
        f"**{one['preset']}**: {one['frames']} frames, {one['visual']:,} visual tokens, "
        f"{one['answer_tokens']} answer tokens, {_where(one)}, {one.get('n', 0)} rounds{found}, "
        f"load {max(row['load'] for row in rows):.0f}, {stamp(*rows)}."
    )


TABLES: dict[str, tuple[ReportTable, ...]] = {
    "bench": (
        ReportTable(
            "bench",
            _shape_columns,
            keys=(*_SHAPE, "reduce"),
            split=_SHAPE,
            before=_shape,
            spare=True,
        ),
    ),
    "goals": (
        ReportTable(
            "bench",
            "what: {what} | at least: {bound} | measured: {told} | met: {met}",
            keys=(*_SHAPE, "reduce"),
            lines=judged,
        ),
    ),
    "breakeven": (
        ReportTable(
            "breakeven",
            _even_columns,
            keys=(*_EVEN, "stage", "reduce", "tokens", "batch"),
            split=_EVEN,
            lines=_even_lines,
            before=_even_title,
        ),
    ),
    "peers": (
        ReportTable(
            "peers",
            "engine: {job} {versions[peer]} or {job} | prompt tokens: {prompt_tokens} | "
            "first token, ms: [median_ms]{median_ms:,.0f} or {state}: {reason} | "
            "faster: {speedup:.2f}x | tokens/s: {tokens_per_s:.1f} | "
            "steps faster: {step_speedup:.2f}x | peak MB: {peak_mb:,.0f} | "
            "as the first: {agree:.0%}",
            keys=("preset", "frames", "threads", "processor", "job"),
            split=("preset", "frames", "threads", "processor"),
            before=_peers_title,
        ),
    ),
    "plan": (
        ReportTable(
            "plan",
            "model shape: {preset}, {layers} layers, {frames} frames or {preset}, {frames} frames "
            "| what: {planned} | reduce: [reduce]`{reduce}` or all tokens | kept: {kept} | "
            "predicted ms: {predicted_ms:.0f} | measured ms: {measured_ms:.0f} | "
            "ratio: {ratio:.2f}",
            keys=("preset", "stage", "frames", "reduce"),
            before=_planned,
        ),
    ),
    "selection": (
        ReportTable(
            "selection",
            "selection: {case} | textbook ms: {textbook_ms:.1f} | mmfast ms: {median_ms:.1f} | "
            "faster: {speedup:.1f}x | same tokens: {same_choice}",
            keys=("case",),
            before=lambda rows: (
                f"Choosing alone, one thread of {rows[-1]['processor']}, {stamp(*rows)}."
            ),
        ),
        ReportTable(
            "selection",
            "peak memory above the inputs: {case} | textbook MB: {textbook_extra_mb:.0f} | "
            "mmfast MB: {extra_mb:.0f}",
            keys=("case",),
            lines=lambda rows: [row for row in rows if "extra_mb" in row],
        ),
    ),
    "kernels": (
        ReportTable(
            "kernels",
            "kernel: {kernel} | case, bfloat16: {case} | goal on an H200: {bound} | "
            "measured: {measured_on}",
            lines=_kernel_lines,
        ),
    ),
    "reducers": (
        ReportTable(
            "kernels",
            _reducer_columns,
            bench="reducers",
            keys=("method", "n"),
            lines=lambda rows: sorted(
                pivot(rows, "{method}", lambda row: int(row["n"])), key=lambda line: line["name"]
            ),
            before=_reducer_title,
        ),
    ),
}
