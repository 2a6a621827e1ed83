"""Correctness gate of the benchmarks, and comparison with golden vectors for `mmfast verify`."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from mmfast.bench.parity import DRIVERS
from mmfast.bench.specs import Twins
from mmfast.bench.stages import MeasuredStage, RunOutcome
from mmfast.core.errors import MmfastError, ModelError, SpecError, unknown
from mmfast.core.reduction import Reduction
from mmfast.core.spec import Spec, expand, wanted


@dataclass
class Checked:
    """Result of the gate for one spec: its outcome and its faults."""

    twins: Twins
    outcome: RunOutcome | None
    faults: list[str]

    @property
    def kept(self) -> int | None:
        """Visual tokens kept up to the end of the model, or None where none was counted."""
        behind = (rec for rec in self.twins.recordings if rec.spec.site != "vit")
        results = [r for rec in behind for r in rec.results]
        if not results or self.outcome is None or not self.outcome.lengths:
            return None
        return results[0].n - sum(r.n - r.m for r in results)


def check(stage: MeasuredStage, twins: Twins, stock: RunOutcome, whole: bool = True) -> Checked:
    """Compare keep 1.0 with the stock model, and a pruned run with the methods' decisions."""
    try:
        return _check(stage, twins, stock, whole)
    except (SpecError, ModelError):
        raise
    except MmfastError as error:
        return Checked(twins, None, [f"{twins.asked}: {error}"])


def _check(stage: MeasuredStage, twins: Twins, stock: RunOutcome, whole: bool) -> Checked:
    faults = []
    if whole:
        same = stage.run(twins.spec(keep=1.0))
        if not torch.equal(same.values, stock.values) or same.lengths != stock.lengths:
            faults.append("keep 1.0 is not bit-identical to the stock model")
    seen = stage.observe(twins.spec("recorded"))
    faults += [wrong for rec in twins.recordings if (wrong := rec.wrong())]
    if not bool(torch.isfinite(seen.values).all()):
        faults.append("the result is not finite")
    if stage.group != "vit":
        faults += _check_lengths(stage, twins, stock, seen)
    return Checked(twins, seen, [f"{twins.asked}: {fault}" for fault in faults])


def _check_lengths(
    stage: MeasuredStage, twins: Twins, stock: RunOutcome, seen: RunOutcome
) -> list[str]:
    faults = []
    expected = expected_lengths(twins, stock.lengths, stage.case.batch)
    if seen.lengths != expected:
        layer = next(
            i for i, (a, b) in enumerate(zip(seen.lengths, expected, strict=True)) if a != b
        )
        faults.append(
            f"layer {layer} holds {seen.lengths[layer]} tokens, {expected[layer]} were asked for"
        )
    fixed = stage.run(twins.spec("fixed"))
    if fixed.lengths != seen.lengths:
        faults.append("the fixed-index run does not hold the same tokens")
    pure = all(r.pure for rec in twins.recordings for r in rec.results)
    if pure and not torch.equal(fixed.values, seen.values):
        faults.append("the same indices do not give the same logits")
    return faults


def expected_lengths(twins: Twins, stock: list[int], batch: int = 1) -> list[int]:
    """Return tokens per decoder layer after the decisions for the first of `batch` prompts."""
    lengths = list(stock)
    for recording in twins.recordings:
        if recording.spec.site not in ("pre", "llm") and not recording.spec.method.resizes:
            continue
        results = recording.results[::batch]
        for result, first in zip(
            results, _firsts(recording.spec, results, len(stock)), strict=True
        ):
            removed = result.n - result.m
            lengths = [n - removed if i >= first else n for i, n in enumerate(lengths)]
    return lengths


def _firsts(spec: Spec, results: Sequence[Reduction], layers: int) -> list[int]:
    if not spec.staged:
        return [spec.layer or 0] * len(results)
    cuts = expand((spec,), layers)
    entered: dict[int, int] = {}
    by_size: dict[int, int] = {}
    n = results[0].n if results else 0
    for cut in cuts if n else ():
        left = wanted(cut, n, entered)
        if left is None:  # the method decides, and ran at every cut
            share = len(results) // len(cuts)
            return [each.layer or 0 for each in cuts for _ in range(share)]
        if left != n:  # else the method did not run
            by_size[n] = cut.layer or 0
        n = left
    return [by_size.get(result.n, cuts[0].layer or 0) for result in results]


FORMAT = "mmfast-golden/1"
_RTOL, _ATOL = 1e-4, 1e-5


@dataclass(frozen=True)
class ParityRow:
    """The comparison of one golden file with the reducers."""

    file: str
    method: str
    ok: bool
    detail: str


def verify(directory: Path) -> list[ParityRow]:
    """Compare every golden file (tests/golden/README.md) with the reducers, one row a file."""
    if not directory.is_dir():
        raise MmfastError(
            f"{str(directory)!r} is no directory; give a folder of golden vectors (*.safetensors)"
        )
    files = sorted(path for path in directory.iterdir() if path.suffix == ".safetensors")
    if not files:
        raise MmfastError(
            f"no golden file in {str(directory)!r}; give a folder of *.safetensors files, "
            "such as tests/golden"
        )
    return [_verify_file(path) for path in files]


def _verify_file(path: Path) -> ParityRow:
    method = path.stem.rpartition("-")[0] or path.stem
    try:
        arrays, metadata = _load(path)
        method = metadata["method"]
        ok, detail = _compare_file(arrays, metadata)
    except Exception as error:  # of a broken file; the error is the result of this row
        reason = " ".join(str(error).split()) or "no reason given"
        ok, detail = False, f"{type(error).__name__}: {reason}"
    return ParityRow(path.name, method, ok, detail)


def _load(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    with safe_open(str(path), framework="pt") as file:
        metadata: dict[str, str] = file.metadata() or {}
        if metadata.get("format") != FORMAT:
            raise MmfastError(f"format is {metadata.get('format')!r} instead of {FORMAT!r}")
        missing = {"method", "params"} - metadata.keys()
        if missing:
            raise MmfastError(f"metadata lacks {', '.join(sorted(missing))}")
        return {name: file.get_tensor(name) for name in file.keys()}, metadata  # noqa: SIM118


def _compare_file(arrays: Mapping[str, Tensor], metadata: Mapping[str, str]) -> tuple[bool, str]:
    if metadata["method"] not in DRIVERS:
        raise MmfastError(unknown("method", metadata["method"], DRIVERS))
    drive, read, knobs = DRIVERS[metadata["method"]]
    params = json.loads(metadata["params"])
    named = {n.removeprefix("param.") for n in metadata if n.startswith("param.")}
    inputs = {n.removeprefix("in."): a for n, a in arrays.items() if n.startswith("in.")}
    inputs = {n: a.float() if a.is_floating_point() else a for n, a in inputs.items()}
    wanted = {n.removeprefix("out."): a for n, a in arrays.items() if n.startswith("out.")}
    _check_names("parameter", params, knobs.split(), named)
    _check_names("array", [f"in.{n}" for n in inputs], [f"in.{n}" for n in read.split()])
    with torch.no_grad():
        found, faults = drive(inputs, params)
    how: dict[str, str] = json.loads(metadata.get("compare", "{}"))
    known = [f"out.{n}" + "?" * (bool(how) and n not in how) for n in found]
    results = [n for n in arrays if not n.startswith("in.")]
    _check_names("array", results, known, [f"out.{n}" for n in how])
    for name, array in wanted.items():
        exact = how.get(name, "close" if array.is_floating_point() else "exact") != "close"
        fault = _difference(found[name], array, exact)
        if fault:
            faults.append(f"{name}: {fault}")
    if faults:
        return False, "; ".join(faults)
    return True, f"{len(wanted)} arrays: {', '.join(sorted(wanted))}"


def _check_names(
    what: str, given: Collection[str], known: Collection[str], more: Collection[str] = ()
) -> None:
    """Refuse names that are not `known`, and known ones not `given`, but those that end in `?`."""
    names = {name.rstrip("?") for name in known}
    for name in sorted({*given, *more} - names):
        raise MmfastError(unknown(what, name, names))
    if missing := sorted({name for name in known if not name.endswith("?")} - set(given)):
        raise MmfastError(f"the file lacks {what} {', '.join(missing)}")


def _difference(found: Tensor, wanted: Tensor, exact: bool) -> str:
    if found.shape != wanted.shape:
        return f"shape {list(found.shape)} instead of {list(wanted.shape)}"
    ours, theirs = found.double(), wanted.double()
    equal = ours == theirs if exact else torch.isclose(ours, theirs, rtol=_RTOL, atol=_ATOL)
    if equal.all():
        return ""
    at = (~equal).nonzero()[0].tolist()
    value, truth = float(ours[tuple(at)]), float(theirs[tuple(at)])
    wrong = int((~equal).sum())
    return f"{wrong} of {equal.numel()} differ, at {at} {value:g} instead of {truth:g}"
