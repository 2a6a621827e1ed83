"""`mmfast methods`, `mmfast doctor` and `mmfast verify`."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib.resources import files
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any

import typer

import mmfast
from mmfast.cli.options import Json
from mmfast.cli.output import print_json, print_rows, print_table
from mmfast.core.errors import MmfastError, unknown
from mmfast.core.files import json_lines
from mmfast.core.registry import NAMED_TOO, Method, listed

# Files of rows by kind of media, and fields to sort by, the best first.
_KINDS = ("video", "image", "multi-image", "document", "table")
_MEASURED = {kind: f"eval-{kind}" for kind in _KINDS}
_MEASURED["kv"] = "eval-cache"
_SORTS = {"accuracy": ("accuracy", -1), "ttft": ("ttft_ms", 1)}
_AT = "0.1"  # the budget to sort at: the smallest one that every kind of media was measured at


def methods(
    name: Annotated[str | None, typer.Argument(help="Show this one in full.")] = None,
    kind: Annotated[
        str | None, typer.Option(help="reducer, cache, head, prefill, compressor or ranker.")
    ] = None,
    sort: Annotated[str | None, typer.Option(help="accuracy or ttft, as measured.")] = None,
    media: Annotated[
        str | None, typer.Option("--for", help=f"Measured on {', '.join(_MEASURED)}.")
    ] = None,
    as_json: Json = False,
) -> None:
    """List the registered methods, show one in full, or sort them by what was measured."""
    if name is not None:
        if sort or media:
            raise MmfastError(f"--sort and --for list all methods; leave them or {name!r} out")
        return _show([m for m in listed(kind) if m.name == name], name, kind, as_json)
    if sort or media:
        kind, of = "cache" if media == "kv" else "reducer", kind
        if of not in (None, kind):
            other = "; give --for kv" if of == "cache" else "; leave --kind out"
            raise MmfastError(f"--for {media or 'video'} is about kind {kind}, not {of}{other}")
        return _show_measured(listed(kind), media or "video", sort or "accuracy", as_json)
    cells = []
    for m in listed(kind):
        role, sites, needs = map(" ".join, ((m.kind, m.role), m.sites, m.needs))
        cells.append((m.name, role.strip(), sites, m.paper, needs, m.summary))
    names = ("name", "kind", "sites", "paper", "needs", "summary")
    print_table([m.to_dict() for m in listed(kind)], as_json, names, cells)


def _show(found: Sequence[Method], name: str, kind: str | None, as_json: bool) -> None:
    """Print all about the methods of a name, of which a reducer and a policy may share one."""
    if not found:
        raise MmfastError(unknown("method", name, {method.name for method in listed(kind)}))
    pages = []
    for m in found:
        page = m.to_dict() | {"sites": list(m.sites), "budgets": m.takes if m.example else ""}
        page |= {"role": m.role, "acts": m.moment} if m.kind == "cache" else {}
        knobs = {k: "required" if v is Parameter.empty else v for k, v in m.knobs.items()}
        pages.append(page | {"knobs": knobs, "example": _example(m)})
    if as_json:
        return print_json(pages[-1] | ({"also": pages[:-1]} if len(pages) > 1 else {}))
    for page in pages:
        knobs, lines, page["signals"] = page.pop("knobs"), page.pop("example"), page.pop("needs")
        shown = {k: " ".join(v) if isinstance(v, list) else v for k, v in page.items()}
        print_rows(("method", shown.pop("name")), shown.items())
        print_rows(("knob" if knobs else "no knobs", "default" if knobs else ""), knobs.items())
        print("", *lines.values(), "", sep="\n")


def _example(method: Method) -> dict[str, str]:
    reduces = method.kind in ("reducer", *NAMED_TOO["reducer"])
    option = "reduce" if reduces else method.kind
    spec = f'{option}="{method.example}"'
    task, file = ("image-qa", "a.jpg") if method.sites[0] == "pixel" else ("video-qa", "a.mp4")
    if method.kind == "head":
        return {"import": f"from {method.fn.__module__} import {method.fn.__name__}"}
    if method.role == "retrieve":  # acts on streams alone
        memory = f'"sink:64+window:1152+{method.example}"'
        opened = f'mmfast.pipeline("video-stream").open(memory={memory})'
        return {"pipeline": opened, "command": f"mmfast watch a.mp4 --memory {memory}"}
    return {
        "attach": f"mmfast.attach(model, {spec})",
        "pipeline": f'mmfast.pipeline("{task}", {spec})',
        "command": f'mmfast ask {file} "What moves?" --{option} {method.example}',
    }


def _figures(media: str) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the figures of each method by budget; "" is the model as it is."""
    if media not in _MEASURED:
        raise MmfastError(unknown("--for", media, _MEASURED))
    file = files("mmfast.assets").joinpath(f"results/{_MEASURED[media]}.jsonl")
    found = dict[str, dict[str, dict[str, Any]]]()
    for row in json_lines(file.read_text(encoding="utf-8")):
        spec = " ".join(filter(None, (row["reduce"], row.get("cache"))))
        if plain := re.fullmatch(r"(?:(\w+):([\d.]+))?", spec):  # no site, knob or other stage
            keys = ("accuracy", "interval", "kept", "ttft_ms", "n", "model")
            figures = {key: row[key] for key in keys}
            found.setdefault(plain[1] or "", {})[plain[2] or ""] = figures
    return found


def _show_measured(rows: Sequence[Method], media: str, sort: str, as_json: bool) -> None:
    if sort not in _SORTS:
        raise MmfastError(unknown("--sort", sort, _SORTS))
    (field, sign), found = _SORTS[sort], _figures(media)
    lines = [(m.to_dict(), found.get(m.name, {})) for m in rows]
    lines.sort(key=lambda line: sign * line[1][_AT][field] if _AT in line[1] else float("inf"))
    if as_json:
        return print_json([row | {"measured": figures} for row, figures in lines])
    budgets = sorted({b for _, at in lines for b in at}, key=float, reverse=True)
    lines.insert(0, ({"name": "as it is", "summary": "All tokens."}, found[""]))
    keys = [("accuracy", budget) for budget in (*budgets, "")] + [("ttft_ms", _AT)]
    cells = [
        (row["name"], *(at[b][k] if b in at else None for k, b in keys), row["summary"])
        for row, at in lines
    ]
    told = found[""][""]
    print_rows(("method", *budgets, "all", f"ttft ms at {_AT}", "summary"), cells)
    text = f"right answers to {told['n']} questions about {media} to {told['model']} by budget"
    typer.echo(text, err=True)


def doctor(as_json: Json = False) -> None:
    """Show versions, devices and backends, what is missing and how to get it."""
    rows = [row if not row.ok else replace(row, fix="") for row in checks()]
    cells = [(r.what, "ok" if r.ok else "missing", r.found, r.fix) for r in rows]
    print_table([asdict(row) for row in rows], as_json, ("what", "", "found", "fix"), cells)
    if not all(row.ok for row in rows if row.required):
        raise typer.Exit(1)


def verify(
    directory: Annotated[Path, typer.Argument(help="Folder of golden vectors (*.safetensors).")],
    as_json: Json = False,
) -> None:
    """Compare every method with golden vectors; exit 1 on any mismatch."""
    from mmfast.bench.gate import verify as run

    rows = run(directory)
    document = {"ok": all(row.ok for row in rows), "rows": [asdict(row) for row in rows]}
    cells = [(r.file, r.method, "ok" if r.ok else "FAILED", r.detail) for r in rows]
    print_table(document, as_json, ("file", "method", "", "detail"), cells)
    if not document["ok"]:
        raise typer.Exit(1)


@dataclass(frozen=True)
class Check:
    """One line of `mmfast doctor`; only a missing `required` one makes it exit 1."""

    what: str
    ok: bool
    found: str
    fix: str = ""
    required: bool = True


def checks() -> list[Check]:
    """Look at the interpreter, packages, devices, attention backends and embedded models."""
    return [
        Check("mmfast", True, mmfast.__version__),
        Check("python", sys.version_info >= (3, 11), platform.python_version(), "use Python 3.11+"),
        *map(_package, ("torch", "torchvision", "transformers", "timm", "av", "rich")),
        _package("decord", required=False, fix="none needed: PyAV reads video instead"),
        _package("triton", required=False, fix="only used on CUDA devices"),
        *_devices(),
        _embedded(),
    ]


def _package(name: str, required: bool = True, fix: str = "") -> Check:
    try:
        importlib.import_module(name)
        return Check(name, True, importlib.metadata.version(name), required=required)
    except (ImportError, OSError) as error:  # OSError: a shared library behind it is missing
        reason = " ".join(str(error).split())[:80]
        return Check(name, False, reason, fix or f"pip install {name}", required)


def _devices() -> list[Check]:
    import torch

    rows = [Check("cpu", True, f"{torch.get_num_threads()} threads of {os.cpu_count()} cores")]
    for index in range(torch.cuda.device_count()):
        props = torch.cuda.get_device_properties(index)
        rows.append(
            Check(f"cuda:{index}", True, f"{props.name}, {props.total_memory / 2**30:.0f} GiB")
        )
    if len(rows) == 1:
        rows.append(
            Check("cuda", False, "no device", "optional: a CUDA GPU and driver", required=False)
        )
    return rows


def _embedded() -> Check:
    from mmfast.models.loading import EMBEDDED, embedded_path

    try:
        path = embedded_path()
    except mmfast.ModelError as error:
        return Check(f"model {EMBEDDED}", False, str(error), "reinstall mmfast")
    size = sum(file.stat().st_size for file in path.iterdir() if file.is_file())
    return Check(f"model {EMBEDDED}", True, f"{size / 1e6:.1f} MB")
