"""Specs of a benchmark, and the private twins of a spec that are measured beside it.

`python -m mmfast.bench.specs` prints the specs of the accuracy tables.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from mmfast.core.errors import MmfastError
from mmfast.core.reduction import Reduction
from mmfast.core.registry import get, methods, register, unregister
from mmfast.core.spec import Spec, check_budget, count, parse
from mmfast.core.tokens import Tokens
from mmfast.models.reduction.tower_signals import from_tower

STAGES = ("vit", "llm", "decode", "ttft", "selection")
DEFAULT = ("evs", "fastv", "uniform", "divprune", "holitom")
DEFAULT_KEEP = (0.25, 0.1)
LAST = "llm4"  # the last of the embedded models' five layers
OTHER_SITES = ("fastv", "holitom_inner")


def accuracy_specs() -> list[str]:
    """Specs without budgets that the accuracy tables measure.

    Every registered method at its default site, some also before the last layer, where they lose
    least. Dropping at `pixel` needs a tower that packs patches, which the embedded models lack.
    """
    found = [m.name for m in methods("reducer") if m.sites[0] != "pixel" or m.resizes]
    return [*found, *(f"{name}@{LAST}" for name in OTHER_SITES)]


def parse_stages(text: str | Sequence[str]) -> tuple[str, ...]:
    """Parse `"vit,llm"` into a tuple in the order of `STAGES`."""
    asked = [s.strip() for s in (text.split(",") if isinstance(text, str) else text)]
    for name in asked:
        if name not in STAGES:
            raise MmfastError(f"unknown stage {name!r}; choices: {', '.join(STAGES)}")
    if not asked:
        raise MmfastError(f"no stage to measure; choices: {', '.join(STAGES)}")
    return tuple(s for s in STAGES if s in asked)


def parse_keep(text: str | Sequence[float] | None) -> tuple[float | int, ...]:
    """Parse `"0.25,0.1"` into budgets; None is none."""
    if text is None:
        return ()
    parts = text.split(",") if isinstance(text, str) else list(text)
    budgets: list[float | int] = []
    for part in parts:
        try:
            whole = isinstance(part, int) or bool(re.fullmatch(r"\s*[+-]?\d+\s*", str(part)))
            budget = check_budget(int(part) if whole else float(part))
        except MmfastError:
            raise
        except ValueError:
            raise MmfastError(
                f"--keep {part!r} is no number; write shares such as 0.25,0.1 or tokens such as 64"
            ) from None
        budgets += [] if budget is None else [budget]
    return tuple(budgets)


def expand(reduce: Sequence[str], keep: Sequence[float | int]) -> list[str]:
    """Give every spec without a budget each of `keep`; one that chooses its own only if asked."""
    specs, fixed = list[str](), list[str]()
    for text in reduce or DEFAULT:
        bare = re.fullmatch(r"([^+:?]+)(\?[^+]*)?", text.strip())
        method = get(bare[1].partition("@")[0]) if bare else None
        if bare is None or method is None or (method.adaptive and not keep and reduce):
            fixed.append(text.strip())
            specs.append(fixed[-1])
            continue
        specs += [f"{bare[1]}:{b}{bare[2] or ''}" for b in keep or DEFAULT_KEEP]
    for spec in specs:
        parse(spec)
    if keep and fixed:
        told = f"--keep acts on specs without a budget, and {', '.join(fixed)} "
        told += "has one" if len(fixed) == 1 else "have one"
        if len(fixed) == len(specs):
            raise MmfastError(f"{told}; leave --keep out")
        warnings.warn(f"{told}, which stays", stacklevel=2)
    return list(dict.fromkeys(specs))


@dataclass
class StageRecording:
    """Inputs and decisions of one stage of a spec, in order of its calls."""

    spec: Spec
    calls: list[tuple[Tokens, int | None]] = field(default_factory=list)
    results: list[Reduction] = field(default_factory=list)

    def wrong(self) -> str | None:
        """Describe the first call that did not keep the requested number of tokens."""
        for (tokens, budget), result in zip(self.calls, self.results, strict=True):
            # Each block of the tower and each cut of a schedule gets a part of the budget;
            # elsewhere one call gets all of it.
            shared = self.spec.site == "vit" or self.spec.staged
            asked = budget if shared else count(self.spec.budget, tokens.n)
            less = self.spec.method.resizes and asked is not None and result.m < asked
            if asked is not None and result.m != asked and not less:
                return (
                    f"{self.spec.method.name} kept {result.m} of {tokens.n} tokens, asked {asked}"
                )
            try:
                result.check()
            except MmfastError as error:
                return f"{self.spec.method.name}: {error}"
        return None


class Twins:
    """Private copies of the methods of one spec, registered under names of their own.

    All run through `attach`, so hooks, gathers and masks are the same: `plain` is the spec itself;
    `recorded` also keeps inputs and choices; `fixed` returns that choice without computing it.
    """

    def __init__(self, text: str, key: str, towerless: bool, asked: str | None = None) -> None:
        self.asked = asked or text
        self.stages = parse(text)
        self.recordings = [StageRecording(stage) for stage in self.stages]
        self.towerless = towerless
        self._names = {
            role: [f"bench-{role}-{key}-{i}" for i in range(len(self.stages))]
            for role in ("plain", "recorded", "fixed")
        }

    def spec(self, role: str = "plain", keep: float | None = None) -> str:
        """Return the spec string of a role, every budget replaced by `keep` if given."""
        stages = [s if keep is None else replace(s, budget=keep) for s in self.stages]
        if role == "plain" and not any(map(self._made_up, self.stages)):
            return "+".join(map(str, stages))
        names = self._names[role]
        return "+".join(
            str(replace(s, method=replace(s.method, name=n), knobs={}))
            for s, n in zip(stages, names, strict=True)
        )

    @property
    def whole(self) -> str:
        """The spec at keep 1.0, the same for all its budgets."""
        return "+".join(str(replace(stage, budget=1.0)) for stage in self.stages)

    @contextmanager
    def registered(self) -> Iterator[None]:
        """Register the copies; remove them from the registry at the end."""
        makers = {"plain": self._plain, "recorded": self._recorded, "fixed": _fixed}
        try:
            for role, make in makers.items():
                for name, recording in zip(self._names[role], self.recordings, strict=True):
                    spec = recording.spec
                    absent, own = self._made_up(spec), spec.method
                    kept = tuple(need for need in own.needs if need not in absent)
                    needs = ("x",) if role == "fixed" else kept
                    where: dict[str, Any] = {"sites": (spec.site,), "scope": own.scope}
                    where |= {"stages": own.stages, "adaptive": True, "resizes": own.resizes}
                    register(name, needs=needs, **where)(make(recording))
            yield
        finally:
            for name in (n for names in self._names.values() for n in names):
                unregister(name)

    def _made_up(self, spec: Spec) -> frozenset[str]:
        """Return tower signals that `spec` needs where no tower runs."""
        absent = self.towerless and spec.site == "pre"
        return frozenset(from_tower(spec.method.needs)) if absent else frozenset()

    def _plain(self, recording: StageRecording) -> Callable[..., Reduction]:
        spec, made_up = recording.spec, self._made_up(recording.spec)

        def plain(tokens: Tokens, budget: int | None) -> Reduction:
            """Run the method as it is."""  # the registry wants a summary
            seen = _with_signals(tokens, made_up) if made_up else tokens
            result: Reduction = spec.method.fn(seen, budget, **spec.knobs)
            return result

        return plain

    def _recorded(self, recording: StageRecording) -> Callable[..., Reduction]:
        plain = self._plain(recording)

        def recorded(tokens: Tokens, budget: int | None) -> Reduction:
            """Run the method and record its input and choice."""
            result = plain(tokens, budget)
            recording.calls.append((tokens, budget))
            recording.results.append(result)
            return result

        return recorded

    def selection(self) -> list[Callable[[], Any]]:
        """Return the calls of one forward pass, to be timed outside the model."""
        return [partial(self._plain(rec), *call) for rec in self.recordings for call in rec.calls]


def _fixed(recording: StageRecording) -> Callable[..., Reduction]:
    def fixed(tokens: Tokens, budget: int | None) -> Reduction:
        """Return the recorded choice: the cost of a free selection.

        It is a plain gather, but in the tower, whose output needs every patch: there it merges.
        """
        tower, shape = recording.spec.site == "vit", tokens.x.shape[:-1]
        chosen = next(
            found
            for found in recording.results
            if found.owner.shape == shape and (not tower or found.m == budget)
        )
        return Reduction(chosen.keep, chosen.owner, pure=not tower)

    return fixed


def _with_signals(tokens: Tokens, names: frozenset[str]) -> Tokens:
    """Make up tower signals from the features: softmax rows and low-rank keys."""
    made = {
        name: tokens.x[..., :64] if name == "keys" else tokens.x[..., place].float().softmax(-1)
        for place, name in enumerate(sorted(names))
    }
    attn = made.pop("attn", tokens.attn)
    return replace(tokens, attn=attn, signals={**tokens.signals, **made})


if __name__ == "__main__":
    print("\n".join(accuracy_specs()))
