"""`reduce="auto"`: what is measured is announced, and a model plans at its first call."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from mmfast.core.errors import MmfastError, SpecError
from mmfast.core.spec import AUTO
from mmfast.core.trace import Trace
from mmfast.models.families.adapter import adapter_for
from mmfast.models.families.prompt_ids import alike_ids
from mmfast.models.loading import EMBEDDED
from mmfast.models.patching import override
from mmfast.models.reduction.record import features_given
from mmfast.models.wrappers import base_of
from mmfast.planner.calibration import Tick
from mmfast.planner.learner import Learner
from mmfast.planner.plan import Plan
from mmfast.planner.planner import Planner
from mmfast.planner.rates import measured_path
from mmfast.planner.target import Target, automatic

_VISUAL = "reduce='auto' plans images and clips"  # no accuracy under sound was measured


@contextmanager
def announced(learner: Learner) -> Iterator[Tick]:
    """A bar on standard error, if that is a terminal and anything is measured at all."""
    console, task = Console(stderr=True), None
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:

        def tick(done: int, total: int, label: str | None = None) -> None:
            nonlocal task
            if task is None and console.is_terminal:
                kept = "nowhere"
                with suppress(MmfastError):  # a user without a home
                    kept = kept if learner.key is None else str(measured_path("rates", learner.key))
                console.print(
                    f"Measuring this device, once for it and this model; kept in {kept}",
                    style="dim",
                    soft_wrap=True,
                )
            task = bar.add_task("measuring") if task is None else task
            bar.update(task, completed=done, total=total, description=label or "measuring")

        yield tick


def say(plan: Plan) -> str:
    """A plan in a row of a trace."""
    cache = plan.cache and f"cache {plan.cache}"
    said = plan.note or plan.spec or cache or "all tokens"
    said += "" if plan.met or plan.note else ", the nearest to a target out of reach"
    return f"{said}, raised by {plan.rung}" if plan.rung > 0 else said


def row_name(name: Any) -> str:
    """Name of a model in accuracy rows: the last part of a directory, else the name itself."""
    if name is None:
        return EMBEDDED
    return Path(name).name if Path(name).is_dir() else str(name)


def plan_once(
    model: Any,
    name: Any,
    inputs: Mapping[str, Any],
    tick: Tick | None = None,
    kind: str | None = None,
) -> Plan:
    """The plan of `reduce="auto"` for one request, with a bar of its own unless `tick` is given.

    `kind` is that of the media, where the caller knows better than the inputs.
    """
    planner, target = Planner(model, row_name(name)), automatic(AUTO, Target(kind=kind))[1]
    with nullcontext(tick) if tick else announced(planner.learner) as tick:
        return planner.plan(inputs, target, kind=_kind_of(planner.model, inputs), tick=tick)


def _kind_of(model: Any, inputs: Mapping[str, Any]) -> str:
    """Return the kind of media that inputs hold, by which accuracy was measured."""
    given = features_given(inputs)
    if "video" in given or "image" not in given:
        return "video"
    images = adapter_for(model).layout(model.base_model, "image", inputs)
    return "multi-image" if len(images) > len(inputs["input_ids"]) else "image"


@contextmanager
def planned(
    model: Any, install: Callable[[str | None], Iterator[Any]], trace: Trace
) -> Iterator[None]:
    """Plan at the first call that brings media, and leave in place what it installs.

    `install` gives what enters the model for a spec. Later calls run under the same plan.
    SpecError: the prompts of this model have no media.
    """
    _check_media(model)
    chosen = list[Plan]()
    with ExitStack() as stack:

        def call(
            name: str, names: Sequence[str], stock: Callable[..., Any], *args: Any, **kwargs: Any
        ) -> Any:
            given = dict(zip(names, args, strict=False)) | kwargs
            kinds = features_given(given).keys()
            if chosen or kinds <= {"audio"}:
                trace.calls += not chosen
                if kinds and not chosen:
                    trace.warn(f"{_VISUAL}, and a prompt has sound alone: all tokens")
                return stock(*args, **kwargs)
            start = time.perf_counter()
            chosen.append(plan_once(model, model.name_or_path, _with_ids(model, given)))
            trace.add("plan", 0, 0, (time.perf_counter() - start) * 1e3, say(chosen[0]))
            for stage in install(chosen[0].spec):
                stack.enter_context(stage)
            return getattr(model, name)(*args, **kwargs)  # through what was put in its way

        for name in ("generate", "forward"):
            names = list(inspect.signature(getattr(model, name)).parameters)
            stack.enter_context(override(model, name, partial(call, name, names)))
        yield


def _with_ids(model: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call with `input_ids`, by whatever name the prompt came."""
    ids = next((given[n] for n in ("input_ids", "inputs") if given.get(n) is not None), None)
    if ids is None:
        ids = alike_ids(base_of(model), given["inputs_embeds"])
    return {**given, "input_ids": ids}


def _check_media(model: Any) -> None:
    adapter, name = adapter_for(model), type(model).__name__
    if adapter.alone:
        raise SpecError(
            f"reduce='auto' plans prompts with media, and {name} is a vision encoder alone; name "
            "a reducer, such as 'tome@vit:0.5'"
        )
    if not adapter.media:
        raise SpecError(
            f"reduce='auto' plans tokens of media, and {name} reads text alone; leave it out, or "
            "give cache=, such as 'snapkv:1024'"
        )
    if {"audio"}.issuperset(adapter.media):
        raise SpecError(
            f"{_VISUAL}, and {name} hears sound alone; name a reducer, such as 'a_tome:0.5'"
        )
