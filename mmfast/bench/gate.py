"""The correctness gate: no speed is printed for a method that is not what it claims to be."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mmfast.bench.specs import Recording, Twins
from mmfast.bench.stages import Outcome, Stage
from mmfast.core.errors import MmfastError, ModelError, SpecError
from mmfast.core.schedule import expand, wanted


@dataclass
class Checked:
    """One spec behind the gate: its outcome, and what is wrong with it (nothing, one hopes)."""

    twins: Twins
    outcome: Outcome | None
    faults: list[str]

    @property
    def kept(self) -> int | None:
        """Visual tokens left at the end of the model, or None where none was counted."""
        results = [r for rec in self.twins.recordings for r in rec.results]
        if not results or self.outcome is None or not self.outcome.lengths:
            return None
        return results[0].n - sum(r.n - r.m for r in results)


def check(stage: Stage, twins: Twins, stock: Outcome, whole: bool = True) -> Checked:
    """Compare keep 1.0 with the stock model, and the pruned run with what the methods decided.

    Args:
        stage: Runs the model.
        twins: The spec.
        stock: What the stock model gave.
        whole: Check keep 1.0 too; once is enough for all budgets of a spec.

    Raises:
        SpecError: The spec asks for a signal or site this model does not have.
        ModelError: The model cannot run it.
    """
    try:
        return _check(stage, twins, stock, whole)
    except (SpecError, ModelError):
        raise
    except MmfastError as error:
        return Checked(twins, None, [f"{twins.asked}: {error}"])


def _check(stage: Stage, twins: Twins, stock: Outcome, whole: bool) -> Checked:
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


def _check_lengths(stage: Stage, twins: Twins, stock: Outcome, seen: Outcome) -> list[str]:
    faults = []
    expected = expected_lengths(twins, stock.lengths)
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


def expected_lengths(twins: Twins, stock: list[int]) -> list[int]:
    """Tokens per decoder layer that the recorded decisions leave of the stock ones."""
    lengths = list(stock)
    for recording in twins.recordings:
        if recording.spec.site not in ("pre", "llm"):
            continue
        for result, first in zip(recording.results, _firsts(recording, len(stock)), strict=True):
            removed = result.n - result.m
            lengths = [n - removed if i >= first else n for i, n in enumerate(lengths)]
    return lengths


def _firsts(recording: Recording, layers: int) -> list[int]:
    """The decoder layer before which each recorded call ran."""
    spec = recording.spec
    if not spec.staged:
        return [spec.layer or 0] * len(recording.results)
    cuts = expand((spec,), layers)
    entered: dict[int, int] = {}
    by_size: dict[int, int] = {}
    n = recording.results[0].n if recording.results else 0
    for cut in cuts if n else ():
        left = wanted(cut, n, entered)
        if left is None:  # the method decides, and every cut called it
            share = len(recording.results) // len(cuts)
            return [each.layer or 0 for each in cuts for _ in range(share)]
        if left != n:  # else nothing was called
            by_size[n] = cut.layer or 0
        n = left
    return [by_size.get(result.n, cuts[0].layer or 0) for result in recording.results]
