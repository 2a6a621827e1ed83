"""Tables of accuracy: by method and share, by kind of question, by age of a fact, by voice."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from mmfast.bench.report.table import (
    DERIVED,
    NOT_MEASURED,
    Columns,
    ReportTable,
    Rows,
    at,
    pivot,
    score,
    stamp,
)
from mmfast.bench.results import Row, share
from mmfast.core.errors import SpecError
from mmfast.core.registry import methods
from mmfast.core.spec import parse

SHARES = (0.5, 0.25, 0.1, 0.05)
ALL = "all tokens"
Points = dict[str, list[tuple[float, float]]]  # method: (kept share, accuracy)


@cache
def label(reduce: str | None) -> str:
    """A spec without its budgets: its name across budgets."""
    if not reduce:
        return ALL
    try:
        stages = parse(reduce)
    except SpecError:
        return reduce
    parts = []
    for stage in stages:
        default = stage.method.sites[0]
        usual = stage.site == default and stage.layer in (None, stage.method.layer)
        knobs = "&".join(f"{key}={value}" for key, value in stage.knobs.items())
        name = stage.method.name if usual else f"{stage.method.name}@{stage.where}"
        parts.append(name + (f"?{knobs}" if knobs else ""))
    return "+".join(parts)


def by_share(rows: Rows) -> dict[str, Mapping[float, Row]]:
    """Rows without a cache policy by method and kept share, the latest of each."""
    total = next((row["kept"] for row in rows if not row["reduce"]), 0.0)
    kept = [(share(r["reduce"], r["kept"], total), r) for r in rows if not r.get("cache")]
    mine = [{**row, "share": round(part, 4)} for part, row in kept if part is not None]
    lines = pivot(mine, lambda row: label(row["reduce"]), lambda row: row["share"])
    return {line["name"]: line["at"] for line in lines}


def points(rows: Rows) -> Points:
    """(kept share, accuracy) by method, ascending."""
    return {
        name: sorted((kept, row["score"]) for kept, row in found.items())
        for name, found in by_share(rows).items()
    }


def by_policy(rows: Rows) -> dict[str, Row]:
    """Rows of runs with a cache policy and no reduction, by spec; "" is the whole cache."""
    return {row["cache"] or "": row for row in rows if "cache" in row and not row["reduce"]}


def _questions(what: str) -> Callable[[Rows], str]:
    def text(rows: Rows) -> str:
        last = rows[-1]
        return (
            f"{last['n']} questions about {what.format(**last)}, seed {last['seed']}, "
            f"model `{last['model']}`, {stamp(*rows)}."
        )

    return text


def _whole(what: str, row: Row | None) -> str:
    shown = score(row) if row else NOT_MEASURED
    return f"{what}: {shown}. Right answers in per cent, in brackets the 95 % interval."


def _all_tokens(rows: Rows) -> str:
    return _whole("All tokens", by_share(rows).get(ALL, {}).get(1.0))


def _accuracy(source: str, every: bool = False) -> ReportTable:

    def lines(rows: Rows) -> list[Row]:
        found = by_share(rows)
        listed = [label(f"{method.name}:0.5") for method in methods("reducer")] if every else []
        names = [name for name in dict.fromkeys([*listed, *found]) if name != ALL]
        return [{"name": name, "at": found.get(name, {})} for name in names]

    def columns(rows: Rows) -> Columns:
        measured = {kept for name, row in by_share(rows).items() for kept in row if name != ALL}
        shares = [kept for kept in SHARES if every or kept in measured]
        return {"reducer": "`{name}`", **{f"{100 * kept:.0f} %": at(kept) for kept in shares}}

    return ReportTable(
        source, columns, lines=lines, before=_all_tokens, after=_questions("unseen media")
    )


RANKED = "eval-video rankers"  # learned rankings, and the reducers that they are compared with
_SEEDS = (1000, 2000, 3000)  # of clips that learned compressors are asked about


def _first(rows: Rows) -> list[Row]:
    return [row for row in rows if row["seed"] == _SEEDS[0]]


def _on_other_clips(rows: Rows) -> list[Row]:
    """Specs that were asked about all clips, a line each."""
    lines = pivot(rows, lambda row: row["reduce"] or ALL, lambda row: row["seed"])
    return [line for line in lines if len(line["at"]) == len(_SEEDS)]


def _trained(rows: Rows) -> list[Row]:
    return [row for row in rows if row["model"] != "tiny-video"]


def _students(rows: Rows) -> list[Row]:
    """Rows of models that were trained for a spec, and of what they compete with."""
    specs = {row["reduce"] for row in _trained(rows)} | {None, "divprune:32", "query_compressor:4"}
    mine = [row for row in _first(rows) if row["reduce"] in specs]
    return sorted(mine, key=lambda row: (-row["kept"], -row["score"]))


def _ranked(rows: Rows) -> list[Row]:
    names = [each.name for each in methods("ranker")] + ["fastv", "divprune", "random"]
    found = by_share(rows)
    return [{"name": name, "at": found[name]} for name in names if name in found]


def _best(rows: Rows) -> list[Row]:
    """The best reducers at a tenth of the tokens, one line each, and the random baseline."""
    found = by_share([row for row in rows if "@llm" not in (row["reduce"] or "")])
    ranked = sorted(found, key=lambda n: -found[n][0.1]["score"] if 0.1 in found[n] else 0.0)
    names = [*[name for name in ranked if name != ALL][:9], "random"]
    return [{"name": name, "at": found[name]} for name in names if name in found]


def _best_kept(rows: Rows) -> list[Row]:
    whole = [row for row in rows if not row["reduce"]][-1:]
    kept = [[r for r in rows if r["reduce"] and share(r["reduce"], 0, 0) == s] for s in (0.25, 0.1)]
    return whole + [max(part, key=lambda row: float(row["score"])) for part in kept if part]


def _kinds(rows: Rows) -> list[Row]:
    shown = _best_kept(rows)
    kinds = shown[0]["by_kind"] if shown and not shown[0]["reduce"] else {}
    return [{"kind": kind.replace("_", " "), "of": kind} for kind in kinds]


def _kind_columns(rows: Rows) -> Columns:
    def cell(row: Row) -> Callable[[Row], str]:
        return lambda line: f"{100 * row['by_kind'][line['of']]:.1f} %"

    heads = {f"`{row['reduce']}`" if row["reduce"] else ALL: cell(row) for row in _best_kept(rows)}
    return {"kind of question": "{kind}", **heads}


def _policies(rows: Rows) -> list[Row]:
    found = by_policy(rows)
    roles = ("position", "score", "heads", "select")
    names = [m.name for m in methods("cache") if m.role in roles]
    shares = {name: {s: f"{name}:{s}" for s in SHARES[:3]} for name in names}
    return [
        {"name": name, "at": {s: found[spec] for s, spec in specs.items() if spec in found}}
        for name, specs in shares.items()
    ]


def _other_policies(rows: Rows) -> list[Row]:
    """Runs whose spec is no share of one policy; policies come and go, rows stay."""
    table = {f"{line['name']}:{s}" for line in _policies(rows) for s in SHARES[:3]}
    found = by_policy(rows)
    return [row for spec, row in found.items() if spec and spec not in table and _known(spec)]


def _known(spec: str) -> bool:
    try:
        return bool(parse(spec, kind="cache"))
    except SpecError:
        return False


def _policy_note(rows: Rows) -> str:
    return (
        _whole("The whole cache", by_policy(rows).get("")) + " The first token of an answer comes "
        "from the pass that reads the prompt, before anything leaves the cache; the tokens behind "
        "it, such as a second digit, read what is left. Policies that choose at every step read "
        "that share of all (`kinetics`, `quest`, `sentencekv`, `slimfer`, `specache`, "
        "`tidaldecode`, `tokenselect`); that of `twilight` is of the attention, of `dstp` of the "
        "visual tokens."
    )


def _ages(rows: Rows) -> list[Row]:
    return list({(row["memory"] or "", row["reduce"] or ""): row for row in rows}.values())


def _age_columns(rows: Rows) -> Columns:
    def cell(band: str) -> Callable[[Row], str]:
        def text(row: Row) -> str:
            age = row["past"] if band == "past" else row["by_age"].get(band)
            shown = score(age, "accuracy", 0) if age else NOT_MEASURED
            return shown.replace(")", f", n {age['n']})") if age else shown

        return text

    def name(row: Row) -> str:
        memory = f"`{row['memory']}`" if row["memory"] else "unbounded"
        return memory + (f", `{row['reduce']}`" if row["reduce"] else "")

    def part(row: Row) -> str:
        known = row["memory"] and row["relative"] is not None
        return f"{100 * row['relative']:.1f} %" if known else ""

    bands = dict.fromkeys(band for row in _ages(rows) for band in row["by_age"])
    ages = {band: cell(band) for band in bands}
    return {"memory": name, **ages, "all past the window": cell("past"), "of unbounded": part}


def _stream(rows: Rows) -> str:
    last = rows[-1]
    return (
        f"Streams of {last['seconds'] / 60:.0f} minutes at {last['fps']:g} frame/s, window "
        f"{last['window']} frames; age of the fact in windows. Right answers in per cent, in "
        "brackets the 95 % interval."
    )


def _kinds_by_way(rows: Rows) -> list[Row]:
    """A line a kind of question, with the marks of each way under its name."""
    kinds = dict.fromkeys(kind for row in rows for kind in row["by_kind"])
    return [
        {"kind": kind, "of": {row["way"]: row["by_kind"].get(kind) for row in rows}}
        for kind in kinds
    ]


def _mark(way: str, key: str) -> Callable[[Row], str]:
    def text(line: Row) -> str:
        mark = line["of"][way]
        return "" if not mark or mark[key] is None else f"{100 * mark[key]:.1f}"

    return text


def _asked(way: str) -> Callable[[Row], str]:
    return lambda line: str(line["of"][way]["n"]) if line["of"][way] else ""


def _present_columns(rows: Rows) -> Columns:
    found: dict[str, Any] = {"question": "{kind}"}
    for row in rows:
        way = row["way"]
        found[f"{way}: asked"] = _asked(way)
        found[f"{way}: clip of the same seconds, %"] = _mark(way, "clip")
        found[f"{way}: session, %"] = _mark(way, "right")
        found[f"{way}: of the clip, %"] = _mark(way, "relative")
    return found


def _history_columns(rows: Rows) -> Columns:
    found: dict[str, Any] = {"question": "{kind}"}
    if rows:
        found["asked"] = _asked(rows[0]["way"])
    return found | {f"{row['way']}, % right": _mark(row["way"], "right") for row in rows}


def _history_note(rows: Rows) -> str:
    row = rows[0]
    return (
        f"Streams of {row['seconds'] / 60:.0f} minutes at 1 frame/s with `{row['memory']}` and "
        f"{row['bytes'] / 1e6:.1f} MB of pictures; {row['looked']:.0f} of {row['moments']:.0f} "
        f"moments were looked at for a question. {_questions('{streams} unseen streams')(rows)}"
    )


def _scene_columns(rows: Rows) -> Columns:
    def share(*path: str) -> Callable[[Row], str]:
        def text(row: Row) -> str:
            value: Any = row
            for key in path:
                value = value[key]
            return f"{100 * value:.0f}"

        return text

    def mean(*kinds: str) -> Callable[[Row], str]:
        return lambda row: f"{100 * sum(row['by_kind'][k] for k in kinds) / len(kinds):.0f}"

    return {
        "spec": "`{reduce}` or cache `{cache}` or all tokens",
        "right": score,
        "new wordings": share("kept_back", "accuracy"),
        "digits": mean("number"),
        "order and seconds": mean("first", "when"),
        "facts described": share("facts"),
        "made up": share("made_up"),
        "overlap of boxes": share("overlap"),
        "yes and no, F1": share("pope", "f1"),
        "share of yes": share("pope", "yes"),
        "outside refused": mean("outside", "strange media"),
        "inside refused": share("refused_inside"),
        "calibration error": share("calibration"),
    }


def _columns_by_kind(rows: Rows) -> Columns:
    """A column in per cent for each kind of question of the first row."""

    def of(kind: str) -> Callable[[Row], str]:
        return lambda row: f"{100 * row['by_kind'][kind]:.0f}"

    return {kind: of(kind) for kind in rows[0]["by_kind"]} if rows else {}


def _compressor_columns(rows: Rows) -> Columns:
    head: Columns = {"spec": "`{reduce}` or all tokens", "tokens a clip": "{kept:.0f}"}
    return {**head, "right": score, **_columns_by_kind(rows)}


def _scene_note(rows: Rows) -> str:
    return f"All in per cent; in brackets the 95 % interval. {_questions('unseen media')(rows)}"


def _needles(row: Row) -> str:
    return score(row, "accuracy", 0)


def _needle_policies(rows: Rows) -> list[Row]:
    """Cache policies on documents of each length, the best at a quarter of the cache first."""
    found = dict[tuple[int, str], dict[Any, Row]]()
    for row in rows:
        if row["cache"] and _known(row["cache"]):
            name, part, rest = re.split(r":([\d.]+)", row["cache"], maxsplit=1)
            key = int(row["length"]), name + rest
            found.setdefault(key, {})[float(part), row["aware"]] = row

    def order(line: Row) -> tuple[int, float]:
        row = line["at"].get((0.25, False))
        return line["length"], 1.0 - row["accuracy"] if row else 1.0

    lines = ({"length": n, "name": name, "at": line} for (n, name), line in found.items())
    return sorted(lines, key=order)


def _needle_columns(rows: Rows) -> Columns:
    shares = {f"{100 * s:.0f} %": at((s, False), _needles) for s in SHARES}
    known = {f"{100 * s:.0f} %, asked first": at((s, True), _needles) for s in SHARES[1:]}
    return {"tokens": "{length:,}", "policy": "`{name}`", **shares, **known}


def _needle_whole(rows: Rows) -> str:
    told = list[str]()
    for length in sorted({int(row["length"]) for row in rows if row["cache"]}):
        many = [r["n"] for r in rows if r["cache"] and r["length"] == length]
        whole = [r for r in rows if not r["cache"] and r["length"] == length]
        shown = {r["aware"]: _needles(r) for r in whole}
        told.append(
            f"{max(many)} questions about documents of {length:,} tokens. "
            f"The whole cache: {shown.get(False, NOT_MEASURED)}; "
            f"with the question read before the cut: {shown.get(True, NOT_MEASURED)}."
        )
    return " ".join(told)


def _needle_lengths(rows: Rows) -> list[Row]:
    """The whole cache at each length: the run with the most questions."""
    mine = [row for row in rows if not row["cache"] and not row["aware"]]
    found = {row["length"]: row for row in sorted(mine, key=lambda row: int(row["n"]))}
    return [found[length] for length in sorted(found)]


def _needle_kinds(rows: Rows) -> Columns:
    head: Columns = {"tokens": "{length:,}", "questions": "{n}", "right": _needles}
    return {**head, **_columns_by_kind(rows)}


def _voice_columns(rows: Rows) -> Columns:
    voices = list(rows[0]["by_voice"]) if rows else []
    named = {"recordings": "espeak-ng itself", "codec": "the codec alone"}

    def spoken(voice: str) -> Callable[[Row], str]:
        return lambda row: f"{100 * row['by_voice'][voice]:.1f}" if voice in row["by_voice"] else ""

    return {
        "said by": lambda row: named.get(row["mode"], f"`{row['mode']}`"),
        "word errors, %": lambda row: score(row, "wer", 0),
        **{f"`{voice}`": spoken(voice) for voice in voices},
        "tokens per pass": "{tokens_per_pass:.2f}",
        "codes": "{identical:.0%} as vanilla",
    }


def _task(name: str) -> Callable[[Rows], Rows]:
    return lambda rows: list({row["mode"]: row for row in rows if row["task"] == name}.values())


def _voice_note(rows: Rows) -> str:
    last = rows[-1]
    return (
        f"{last['n']} unseen sentences and {last['n']} unseen questions, seed {last['seed']}, "
        f"model `{last['model']}`, in brackets 95 % intervals, {stamp(*rows)}."
    )


DERIVED.update(
    right_answers=score,
    right=lambda row: score(row, "accuracy", 0),
    of_typed=lambda row: 100 * row["relative"],
    word_errors=lambda row: 100 * row["wer"],
)
TABLES: dict[str, tuple[ReportTable, ...]] = {
    "accuracy": (_accuracy("eval-video", every=True),),
    "best": (
        ReportTable(
            "eval-video",
            {"reducer": "`{name}`", "25 % kept": at(0.25), "10 % kept": at(0.1)},
            lines=_best,
            before=_all_tokens,
            after=_questions("unseen clips"),
        ),
    ),
    "kinds": (ReportTable("eval-video", _kind_columns, lines=_kinds),),
    "image": (_accuracy("eval-image"),),
    "album": (_accuracy("eval-multi-image"),),
    "document": (_accuracy("eval-document"),),
    "printed": (_accuracy("eval-table"),),
    "cache_accuracy": (
        ReportTable(
            "eval-cache",
            {"policy": "`{name}`", **{f"{100 * s:.0f} %": at(s) for s in SHARES[:3]}},
            lines=_policies,
            before=_policy_note,
        ),
        ReportTable(
            "eval-cache",
            "cache: `{cache}` | right answers: {right_answers}",
            lines=_other_policies,
            after=_questions("unseen clips"),
        ),
    ),
    "weights_accuracy": (
        ReportTable(
            "eval-weights",
            "questions: {n} of {suite} | weights: `{weights}` | reducer: `{reduce}` or none | "
            "right answers: {right_answers}",
            keys=("suite", "n", "weights", "reduce"),
            after=lambda rows: f"Model `{rows[-1]['model']}`, {stamp(*rows)}.",
        ),
    ),
    "recall": (
        ReportTable(
            "eval-stream",
            _age_columns,
            split=("seconds",),
            lines=_ages,
            before=_stream,
            after=_questions("{streams} unseen streams"),
        ),
    ),
    "present": (
        ReportTable(
            "eval-present",
            _present_columns,
            keys=("way",),
            lines=_kinds_by_way,
            after=lambda rows: (
                f"Memory `{rows[0]['memory']}`, seed {rows[0]['seed']}, models `tiny-stream` and "
                f"`tiny-scenes`, {stamp(*rows)}."
            ),
        ),
    ),
    "history": (
        ReportTable(
            "eval-history",
            _history_columns,
            keys=("way",),
            lines=_kinds_by_way,
            after=_history_note,
        ),
    ),
    "scenes": (
        ReportTable("eval-scenes", _scene_columns, keys=("reduce", "cache"), after=_scene_note),
    ),
    "needles": (
        ReportTable(
            "needles",
            _needle_kinds,
            keys=("length", "aware", "cache", "n"),
            lines=_needle_lengths,
        ),
        ReportTable(
            "needles",
            _needle_columns,
            keys=("length", "aware", "cache"),
            lines=_needle_policies,
            before=_needle_whole,
            after=lambda rows: f"Seed {rows[-1]['seed']}, model `tiny-text`, {stamp(*rows)}.",
        ),
    ),
    "texts": (
        ReportTable(
            "texts",
            lambda rows: {
                "tokens": "{length:,}",
                "spec": "`{reduce}` or all tokens",
                "left": "{kept:.0%}",
                "right": score,
                **_columns_by_kind(rows),
            },
            keys=("length", "reduce"),
            lines=lambda rows: sorted(rows, key=lambda row: (row["length"], -row["score"])),
            after=_questions("unseen documents"),
        ),
    ),
    "compressors": (
        ReportTable(
            "compressors",
            _compressor_columns,
            keys=("seed", "reduce"),
            lines=lambda rows: sorted(_first(rows), key=lambda row: (-row["kept"], -row["score"])),
            after=lambda rows: f"All in per cent. {_questions('unseen clips')(_first(rows))}",
        ),
        ReportTable(
            "compressors",
            {"spec": "`{name}`"} | {f"clips of seed {seed}": at(seed) for seed in _SEEDS},
            keys=("seed", "reduce"),
            lines=_on_other_clips,
        ),
    ),
    "students": (
        ReportTable(
            "compressors students",
            lambda rows: {"model": "`{model}`", **_compressor_columns(rows)},
            keys=("seed", "model", "reduce"),
            lines=_students,
            before=lambda rows: "" if _trained(rows) else f"Students: {NOT_MEASURED}.",
            after=lambda rows: (
                f"All in per cent. {rows[-1]['n']} questions about unseen clips, seed {_SEEDS[0]}, "
                f"{stamp(*_students(rows))}."
            ),
        ),
    ),
    "ranked": (
        ReportTable(
            RANKED,
            lambda rows: {"spec": "`{name}`", **{f"{100 * s:.0f} %": at(s) for s in SHARES[1:3]}},
            lines=_ranked,
            before=_all_tokens,
            after=_questions("unseen clips"),
        ),
    ),
    "speech": (
        ReportTable("eval-speech", _voice_columns, lines=_task("speaking")),
        ReportTable(
            "eval-speech",
            "questions about clips: {mode} | right, %: {right} | of typed, %: {of_typed:.1f} | "
            "word errors, %: {word_errors:.1f}",
            lines=_task("listening"),
        ),
        ReportTable(
            "eval-speech",
            "replies to speech: {mode} | right, %: {right}",
            lines=_task("replies"),
            after=_voice_note,
        ),
    ),
}
