"""Write the README's tables, the charts and the pages of docs/ from the registry and the rows.

python -m mmfast.bench.report.docs            writes what is stale
python -m mmfast.bench.report.docs --check    exits 1 where a file is stale
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from mmfast.bench.report import accuracy, catalogue, named, ranking, scaling, speed
from mmfast.bench.report.accuracy import SHARES, Points, by_policy, by_share, points
from mmfast.bench.report.catalogue import (
    ROOT,
    acts,
    paper,
    press_cases,
    press_release,
    sites,
    vectors,
)
from mmfast.bench.report.charts import (
    accuracy_svg,
    delay_svg,
    delays,
    scaling_svg,
    speed_svg,
    speeds,
)
from mmfast.bench.report.table import EMPTY, NOT_MEASURED, ReportTable, markdown, score, stamp
from mmfast.bench.results import Row, load, share
from mmfast.caches.plan import plan_cache
from mmfast.core.errors import MmfastError, unknown
from mmfast.core.registry import EVERY, START, Method, methods

TABLES: dict[str, tuple[ReportTable, ...]] = {
    **catalogue.TABLES,
    **accuracy.TABLES,
    **named.TABLES,
    **ranking.TABLES,
    **scaling.TABLES,
    **speed.TABLES,
}
_MARKER = re.compile(r"(<!-- table:(\w+) -->\n).*?(<!-- /table:\2 -->)", re.DOTALL)


def write_table(name: str, rows: Sequence[Row]) -> list[str]:
    """Lines of Markdown of a table; a MmfastError names the choices and the nearest."""
    if name not in TABLES:
        raise MmfastError(unknown("table", name, TABLES))
    parts = [table.markdown(rows) for table in TABLES[name]]
    measured = [part for part in parts if part != EMPTY] or [EMPTY]
    return [line for part in measured for line in ("", *part)][1:]


def read_rows(folder: Path, suite: str) -> list[Row]:
    """Rows of all files `SUITE*.jsonl` of a folder by file name; suites are parted by a blank."""
    files = [file for each in suite.split() for file in sorted(folder.glob(f"{each}*.jsonl"))]
    return [row for file in files for row in load(file)]


def render(text: str, folder: Path) -> str:
    """`text` with everything between its table markers written anew from rows in `folder`."""

    def fill(match: re.Match[str]) -> str:
        name = match[2]
        rows = read_rows(folder, TABLES[name][0].source) if name in TABLES else []
        body = "\n".join(write_table(name, rows))
        return f"{match[1]}\n{body}\n\n{match[3]}"

    return _MARKER.sub(fill, text)


CHARTS = ("accuracy.svg", "speed.svg", "translation.svg", "scaling.svg")
BEST, BASELINES = 7, ("random", "uniform", "pool", "downsample")  # lines of the accuracy chart
SUITES = {
    "eval-video": "clips",
    "eval-image": "single images",
    "eval-multi-image": "three images a prompt",
    "eval-document": "pages",
    "eval-table": "printed tables",
}
_PIPELINE = """```python
import mmfast

pipe = mmfast.pipeline("{task}", {options})
answer = pipe("{media}", "{question}")
print(answer.text, answer.kept_tokens, "of", answer.visual_tokens)
```"""
_CLIP = ("assets/clips/red-circle.mp4", "Which way does the red circle move?")
_PAGES = {
    "reducer": "reducers",
    "cache": "policies",
    "prefill": "prefill",
    "ranker": "rankers",
}
_SESSION = """```python
import mmfast

with mmfast.pipeline("video-stream").open(memory="{memory}") as session:
    session.watch("assets/clips/four-shapes.mp4")
    print("".join(session.ask("How many objects are there?")))
```"""


@lru_cache
def notes(root: Path) -> Mapping[str, Mapping[str, Any]]:
    """Facts of assets/methods.json about each method: the paper's name, the deviations from it."""
    found: Mapping[str, Mapping[str, Any]] = json.loads((root / "assets/methods.json").read_text())
    return found


def method_page(method: Method, root: Path = ROOT) -> str:
    """The page of one reducer, KV policy, learned ranking or method of sparse prefill."""
    from griffe import Docstring  # of the extra `docs`

    sections = {
        part.kind.value: part.value
        for part in Docstring(inspect.getdoc(method.fn) or "").parse("google", warnings=False)
    }
    _, _, body = str(sections["text"]).partition("\n")
    known = notes(root).get(f"{method.kind}/{method.name}", {})
    parts = [f"# `{method.name}`", _origin(method, known), f"**{method.summary}**", body.strip()]
    parts += ["\n".join(markdown(("property", "value"), _properties(method)))]
    parts += ["## Knobs", *_knobs(method, sections.get("parameters", ()))]
    parts += ["## Differences from the paper", *_differences(method, known)]
    folder = root / "assets" / "results"
    measured = {
        "reducer": _reducer_rows,
        "cache": _policy_rows,
        "prefill": _prefill_rows,
        "ranker": _ranker_rows,
    }[method.kind]
    parts += ["## Accuracy and cost", *measured(method, folder), "## Example", _example(method)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _origin(method: Method, known: Mapping[str, Any]) -> str:
    name = known.get("title", "")
    if not method.paper:
        return name or "A baseline of this project, without a paper."
    return f"{name + ', ' if name else ''}{method.archive[0]} {paper(method)}."


def _properties(method: Method) -> list[tuple[str, str]]:
    if method.kind == "cache":
        return [
            ("role", method.role),
            ("acts", acts(method)),
            ("signals", " ".join(f"`{need}`" for need in method.needs) or "none"),
            ("budget", method.takes),
        ]
    if method.kind == "prefill":
        return [("budget", method.takes), ("acts", "in parts of a prompt of `least` tokens")]
    depths = ", ".join(f"{100 * depth:g} %" for depth in method.stages)
    cuts = f"at {depths} of the decoder's depth"
    if START in method.knobs:
        cuts = f"before every layer from `{START}` on"
    rows = [
        ("sites, the default first", sites(method)),
        ("signals", " ".join(f"`{need}`" for need in method.needs)),
        ("budget", method.takes),
    ]
    if method.stages and "llm" in method.sites:
        rows.append(("cuts of a spec without a layer", cuts))
    if method.stream is not None:
        rows.append(("streams", "frame by frame, with a state of fixed size"))
    if method.scope == "prompt":
        rows.append(("scope", "all images of a prompt at once"))
    return rows


_EVERY = (
    "New tokens of an answer after which the policy chooses again among all it holds, down to its "
    "budget; 0 chooses behind the prompt alone."
)
_RECHOICE = (
    "Tokens of an answer, in a stream, after which the policy chooses again by the query of the "
    "token at hand; 0 chooses at the question alone."
)


def _knobs(method: Method, parameters: Any) -> list[str]:
    told = {EVERY: _RECHOICE if method.role == "retrieve" else _EVERY}
    told |= {each.name: " ".join(each.description.split()) for each in parameters}
    cells = [(f"`{k}`", f"`{_shown(v)}`", told.get(k, "")) for k, v in method.knobs.items()]
    return ["\n".join(markdown(("knob", "default", "meaning"), cells)) if cells else "None."]


def _shown(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value) or '""'


def _differences(method: Method, known: Mapping[str, Any]) -> list[str]:
    told = [f"- {text}" for text in known.get("differs", ())]
    count, presses = vectors(method), press_cases(method)
    if count:
        told.append(
            f"- Checked against {count} recorded outputs of the authors' code "
            "(`mmfast verify tests/golden`)."
        )
    elif method.paper:
        source = known.get("source", "the paper")
        lacking = "no recorded outputs of the authors' code were available"
        if presses:
            lacking = "no outputs of the authors' own repository are recorded"
        told.append(
            f"- Written from {source} and checked against an independent slow version; {lacking}."
        )
    if presses:
        told.append(
            f"- Keeps the same entries of a random Llama as the press of {press_release()}: "
            f"{', '.join(f'`{spec}`' for spec in presses)} (`tests/caches/test_kvpress.py`)."
        )
    return ["\n".join(told) or "There is no paper to differ from."]


def _reducer_rows(method: Method, folder: Path) -> list[str]:
    cells = []
    for suite, what in SUITES.items():
        lines = by_share(read_rows(folder, suite))
        found, whole = lines.get(method.name, {}), lines.get("all tokens", {}).get(1.0)
        if found and whole:
            parts = [score(found[s]) if s in found else NOT_MEASURED for s in SHARES]
            cells.append((what, score(whole), *parts))
    head = ("media", "all tokens", *(f"{100 * part:.0f} %" for part in SHARES))
    told = ["Accuracy: not measured; the embedded models do not have this site."]
    if cells:
        told = [
            "Right answers of the embedded models in per cent by kept share, in brackets the 95 % "
            "interval:",
            "\n".join(markdown(head, cells)),
        ]
    return [*told, *_reducer_cost(method, folder)]


def _prefill_gains(method: Method, folder: Path) -> list[str]:
    """A line for each device: the shape measured last, with the gain of every budget."""
    found: dict[str, list[Row]] = {}
    for row in read_rows(folder, "bench"):
        spec = row["reduce"] or ""
        named = spec.partition(":")[0] == method.name and share(spec, 0, 0) != 1.0
        if row["stage"] == "llm" and named:
            found.setdefault(_device(row), []).append(row)
    lines = []
    for device, rows in found.items():
        shape = rows[-1]["preset"]
        latest = {row["reduce"]: row for row in rows if row["preset"] == shape}
        gains = (
            f"`{spec}` {row['speedup']:.2f}x (ideal by FLOPs {row['ideal']:.2f}x)"
            for spec, row in latest.items()
        )
        told = f"{', '.join(gains)}, {stamp(*latest.values())}"
        lines.append(f"- Prefill of {shape} behind the encoder on {device}: {told}.")
    return lines


def _device(row: Row) -> str:
    return "the CPU" if row["device"] == "cpu" else str(row["processor"])


def _reducer_cost(method: Method, folder: Path) -> list[str]:
    rows = [r for r in read_rows(folder, "kernels") if r["bench"] == "reducers"]
    found = {row["n"]: row for row in rows if row["method"] == method.name}
    lines = [
        f"- Choosing a quarter of {n:,} x {row['d']:,} tokens: {row['median_ms']:.1f} ms, "
        f"{row['operations']} operations, {row['extra_mb']:.0f} MB more, one thread of "
        f"{row['processor']}, {stamp(row)}."
        for n, row in found.items()
    ]
    lines += _prefill_gains(method, folder)
    return ["\n".join(lines) or "Cost of the choice: not measured."]


def _policy_rows(method: Method, folder: Path) -> list[str]:
    rows = read_rows(folder, "eval-cache")
    found = by_policy(rows)
    mine = [row for spec, row in found.items() if spec and _about(method.name, spec)]
    cells = [(f"`{row['cache']}`", score(row)) for row in mine]
    told = ["Accuracy on short clips: not measured."]
    if cells:
        whole = score(found[""])
        told = [
            f"Right answers of the embedded model in per cent, in brackets the 95 % interval "
            f"({whole} with the whole cache):",
            "\n".join(markdown(("cache", "right answers"), cells)),
        ]
    recall = {row["memory"]: row for row in read_rows(folder, "eval-stream") if row["memory"]}
    lines = [
        f"- `{spec}` over {row['seconds'] / 60:.0f} minutes of stream: "
        f"{100 * row['past']['accuracy']:.1f} % of questions about facts older than the window "
        f"(n {row['past']['n']}), {stamp(row)}."
        for spec, row in recall.items()
        if _about(method.name, spec)  # a sink stands beside every score
        and not (method.role == "position" and _scored(spec))
    ]
    steps = [r for r in read_rows(folder, "decode") if r["bench"] == "hooks" and r.get("cache")]
    lines += [
        f"- `{row['cache']}` adds {row['overhead_us']:+.0f} us ({100 * row['overhead']:+.1f} %, "
        f"noise {100 * row['noise']:.1f} %) to a decoding step of {row['preset']} on "
        f"{_device(row)}, {stamp(row)}."
        for row in steps
        if _about(method.name, row["cache"]) and not row["reduce"]
    ]
    steps = [r for r in read_rows(folder, "decode") if r["bench"].startswith("selection")]
    lines += [  # of the policy alone: what packed weights add to it stands with the results
        f"- `{row['job']}`: a decoding step of {row['preset']} behind {row['tokens']:,} tokens in "
        f"{row['dtype']} on the CPU is {row['speedup']:.2f}x faster (ideal by bytes "
        f"{row['ideal']:.2f}x), {stamp(row)}."
        for row in steps
        if _about(method.name, row["job"]) and ", weights " not in row["job"]
    ]
    return [*told, "\n".join(lines) or "Cost of a decoding step: not measured."]


def _prefill_rows(method: Method, folder: Path) -> list[str]:
    lines = [
        f"- `{row['job']}` at {row['tokens']:,} synthetic visual tokens on the CPU: "
        f"{row['speedup']:.2f}x faster than dense attention with {row['mass']:.1%} of its mass "
        f"and {row['read_share']:.0%} of its pairs, {stamp(row)}."
        for row in read_rows(folder, "prefill")
        if _about(method.name, row["job"])
    ]
    return ["\n".join(lines) or "Not measured."]


def _ranker_rows(method: Method, folder: Path) -> list[str]:
    how = f"--layers {method.layer}" if method.sites[0] == "llm" else f"--ranker {method.name}"
    command = f"python -m mmfast.rankers.train {how}"
    if not _shipped(method, folder.parent):
        return [f"Not measured here: weights fit one model; `{command}` trains some."]
    told = f"`tiny-video` has weights, which `{command}` trained"
    if found := by_share(read_rows(folder, accuracy.RANKED)).get(method.name):
        parts = [f"{score(row)} on {100 * kept:.0f} % of the tokens" for kept, row in found.items()]
        return [
            f"{told}. Right answers in per cent, in brackets the 95 % interval: {', '.join(parts)} "
            "([beside others](../../guides/compressors.md#learned-rankings))."
        ]
    return [f"{told}; the log beside them has the figures of questions about other clips."]


def _shipped(method: Method, assets: Path) -> bool:
    stem = f"{method.name}-{method.layer}" if method.sites[0] == "llm" else method.name
    return (assets / "models" / "tiny-video" / "rankers" / f"{stem}.safetensors").is_file()


def _scored(spec: str) -> bool:
    plan = plan_cache(spec)
    return plan is not None and plan.score is not None


def _about(name: str, spec: str) -> bool:
    return any(part.partition(":")[0].partition("?")[0] == name for part in spec.split("+"))


def _example(method: Method) -> str:
    task, (media, question) = "video-qa", _CLIP
    if method.role == "retrieve":
        return _SESSION.format(memory=f"sink:64+window:1152+{method.example}")
    if method.kind in ("cache", "prefill"):
        options = f'{method.kind}="{method.example}"'
    elif method.sites[0] == "pixel":
        task, media = "image-qa", "photo.jpg"
        question = "What is in the picture?"
        options = f'model="Qwen/Qwen2.5-VL-7B-Instruct", reduce="{method.example}"'
    elif method.kind == "ranker":
        name = "tiny-video" if _shipped(method, ROOT / "assets") else "DIR"
        options = f'model="{name}", reduce="{method.example}"'
    else:
        options = f'reduce="{method.example}"'
    return _PIPELINE.format(task=task, options=options, media=media, question=question)


def drawn(found: Points) -> Points:
    """Lines that a chart can hold: the best methods at 10 %, and the baselines to beat."""
    ranked = sorted(found, key=lambda name: -dict(found[name]).get(0.1, 0.0))
    best = [name for name in ranked if name != "all tokens"][:BEST]
    return {name: found[name] for name in found if name in {*best, *BASELINES, "all tokens"}}


def outputs(root: Path) -> dict[Path, str]:
    """Every generated file under `root`, a checkout, and the text that it should hold."""
    readme, folder = root / "README.md", root / "assets" / "results"
    if not readme.is_file():
        raise MmfastError(f"no README.md in {root.name!r}: run this from a checkout")
    charts = (
        accuracy_svg(drawn(points(read_rows(folder, "eval-video")))),
        speed_svg(*speeds(read_rows(folder, "bench"))),
        delay_svg(delays(read_rows(folder, "speech"))),
        scaling_svg(*scaling.curves(read_rows(folder, scaling.SUITE))),
    )
    files = {}
    for name, chart in zip(CHARTS, charts, strict=True):
        if chart:
            files[root / "assets" / "images" / name] = chart
            files[root / "docs" / "images" / name] = chart
    for kind, home in _PAGES.items() if (root / "assets/methods.json").is_file() else ():
        for method in methods(kind):
            files[root / "docs" / "methods" / home / f"{method.name}.md"] = method_page(
                method, root
            )
    for path in [readme, *sorted((root / "docs").rglob("*.md"))]:
        if path not in files:
            files[path] = render(path.read_text(encoding="utf-8"), folder)
    return files


def leftover(root: Path) -> list[Path]:
    """Pages of methods that are no longer registered."""
    pages = (root / "docs" / "methods").glob("*/*.md")
    known = {(home, m.name) for kind, home in _PAGES.items() for m in methods(kind)}
    return [page for page in pages if (page.parent.name, page.stem) not in known]


def main(args: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Write what is stale, or only name it with `--check`; returns the exit code."""
    asked = list(sys.argv[1:] if args is None else args)
    if asked not in ([], ["--check"]):
        print(f"unknown arguments {asked}; the only one is --check", file=sys.stderr)
        return 2
    stale = {
        path: text
        for path, text in outputs(root).items()
        if not path.is_file() or path.read_text(encoding="utf-8") != text
    }
    gone = leftover(root)
    for path in [*stale, *gone]:
        name = path.relative_to(root)
        if asked:
            print(f"{name} is stale; run python -m mmfast.bench.report.docs", file=sys.stderr)
        elif path in stale:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(stale[path], encoding="utf-8")
            print(f"wrote {name}")
        else:
            path.unlink()
            print(f"deleted {name}")
    return 1 if asked and (stale or gone) else 0


if __name__ == "__main__":
    sys.exit(main())
