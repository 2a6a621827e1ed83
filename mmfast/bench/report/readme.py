"""Write the README's tables and its charts from the registry and assets/results/*.jsonl.

python -m mmfast.bench.report.readme            rewrites README.md and its charts
python -m mmfast.bench.report.readme --check    exits 1 where they are stale
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mmfast.bench.full import goals
from mmfast.bench.matrix import matrix
from mmfast.bench.report.breakeven import break_even
from mmfast.bench.report.charts import accuracy_svg, speed_svg, speeds
from mmfast.bench.report.models import (
    cache_accuracy,
    caches,
    decode_tables,
    encoder_tables,
    kernels,
    reducers,
)
from mmfast.bench.report.plan import plan
from mmfast.bench.report.sessions import (
    serve_load,
    speech_cost,
    speech_words,
    stream_cost,
    stream_recall,
)
from mmfast.bench.report.systems import table as systems
from mmfast.bench.report.tables import Points, accuracy, bench, kinds, points, selection, subset
from mmfast.bench.results import Row, load
from mmfast.core.errors import MmfastError
from mmfast.core.registry import methods as registered

ROOT = Path(__file__).resolve().parents[3]
GOLDEN = ROOT / "tests" / "golden"
CHART, SPEED_CHART = Path("assets/images/accuracy.svg"), Path("assets/images/speed.svg")
BEST, BASELINES = 7, ("random", "uniform", "pool")  # lines of the chart
_MARKER = re.compile(r"(<!-- table:(\w+) -->\n).*?(<!-- /table:\2 -->)", re.DOTALL)


def methods(_: Sequence[Row]) -> list[str]:
    """One line a registered method; parity counts the golden vectors it is checked against."""
    lines = ["| method | paper | sites | needs | parity | what it does |", "|---|" + "---|" * 5]
    for m in registered("reducer"):
        vectors = len(list(GOLDEN.glob(f"{m.name}-*.safetensors")))
        parity = f"{vectors} vectors" if vectors else ""
        paper = f"[{m.paper}](https://arxiv.org/abs/{m.paper})" if m.paper else "baseline"
        sites = " ".join("llm&lt;K&gt;" if site == "llm" else site for site in m.sites)
        needs = " ".join(m.needs)
        summary = m.summary.replace("|", "\\|")
        lines.append(f"| `{m.name}` | {paper} | {sites} | {needs} | {parity} | {summary} |")
    return lines


SECTIONS: dict[str, tuple[str, Callable[[Sequence[Row]], list[str]]]] = {
    "methods": ("", methods),
    "accuracy": ("eval-video", accuracy),
    "kinds": ("eval-video", kinds),
    "image": ("eval-image", subset),
    "album": ("eval-multi-image", subset),
    "document": ("eval-document", subset),
    "caches": ("", caches),
    "cache_accuracy": ("eval-cache", cache_accuracy),
    "systems": ("eval-video eval-cache", systems),
    "recall": ("eval-stream", stream_recall),
    "stream": ("stream", stream_cost),
    "speech": ("eval-speech", speech_words),
    "speech_cost": ("speech", speech_cost),
    "serve": ("serve", serve_load),
    "bench": ("bench", bench),
    "goals": ("bench", goals),
    "breakeven": ("breakeven", break_even),
    "selection": ("selection", selection),
    "kernels": ("kernels", kernels),
    "reducers": ("kernels", reducers),
    "decode": ("decode", decode_tables),
    "encoder": ("encoder", encoder_tables),
    "matrix": ("matrix", matrix),
    "plan": ("plan", plan),
}


def read_rows(folder: Path, suite: str) -> list[Row]:
    """Rows of all files `SUITE*.jsonl` of a folder by file name; suites are parted by a blank."""
    files = [file for each in suite.split() for file in sorted(folder.glob(f"{each}*.jsonl"))]
    return [row for file in files for row in load(file)]


def render(text: str, folder: Path) -> str:
    """`text` with everything between its table markers written anew.

    Raises:
        MmfastError: A marker names no known table.
    """

    def fill(match: re.Match[str]) -> str:
        name = match[2]
        if name not in SECTIONS:
            raise MmfastError(f"unknown table {name!r}; choices: {', '.join(SECTIONS)}")
        suite, build = SECTIONS[name]
        body = "\n".join(build(read_rows(folder, suite)))
        return f"{match[1]}{body}\n{match[3]}"

    return _MARKER.sub(fill, text)


def outputs(root: Path) -> dict[Path, str]:
    """Every generated file under `root` and what it should hold."""
    readme, folder = root / "README.md", root / "assets" / "results"
    if not readme.is_file():
        raise MmfastError(f"no README.md in {root.name!r}: run this from a checkout")
    charts = {
        root / CHART: accuracy_svg(_drawn(points(read_rows(folder, "eval-video")))),
        root / SPEED_CHART: speed_svg(*speeds(read_rows(folder, "bench"))),
    }
    files = {readme: render(readme.read_text(encoding="utf-8"), folder)}
    return files | {path: chart for path, chart in charts.items() if chart}


def _drawn(found: Points) -> Points:
    """What a chart can hold: the best methods at 10 %, and the baselines to beat."""
    ranked = sorted(found, key=lambda name: -dict(found[name]).get(0.1, 0.0))
    best = [name for name in ranked if name != "all tokens"][:BEST]
    return {name: found[name] for name in found if name in {*best, *BASELINES, "all tokens"}}


def main(args: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Rewrite what is stale, or only say so with `--check`; returns the exit code."""
    asked = list(sys.argv[1:] if args is None else args)
    if asked not in ([], ["--check"]):
        print(f"unknown arguments {asked}; the only one is --check", file=sys.stderr)
        return 2
    stale = {
        path: text
        for path, text in outputs(root).items()
        if not path.is_file() or path.read_text(encoding="utf-8") != text
    }
    for path, text in stale.items():
        name: Any = path.relative_to(root)
        if asked:
            print(f"{name} is stale; run python -m mmfast.bench.report.readme", file=sys.stderr)
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(f"wrote {name}")
    return 1 if asked and stale else 0


if __name__ == "__main__":
    sys.exit(main())
