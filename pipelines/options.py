"""Options of pipelines: names and values are checked before a model is read."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from os import PathLike
from typing import Any, TypeVar, cast

from mmfast.caches.plan import plan_cache
from mmfast.core.errors import MmfastError, unknown
from mmfast.core.sizes import parse_bytes
from mmfast.frontends.source import Limits
from mmfast.models import loading
from mmfast.models.attention import check_attn
from mmfast.models.image_guard import read_guard
from mmfast.models.patching import portable_state
from mmfast.models.vision.acceleration import check_encoder
from mmfast.planner.arithmetic import check_weights
from mmfast.prefill.plan import plan_prefill
from mmfast.streams.reuse.plan import parse_reuse

F = TypeVar("F", bound=Callable[..., Any])


def _of_kind(name: str, value: Any, kind: Any, words: str) -> None:
    if not isinstance(value, kind):
        raise MmfastError(f"{name}={value!r} is not allowed; give {words}")


def named(method: Callable[..., Any]) -> frozenset[str]:
    """Names of the options that a function declares."""
    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    found = inspect.signature(method).parameters.values()
    return frozenset(p.name for p in found if p.kind in kinds and p.name != "self")


def _of_making(kind: type) -> set[str]:
    """Names of the options that a class declares for its construction."""
    made = (vars(each)["__init__"] for each in kind.__mro__ if "__init__" in vars(each))
    return {name for method in made for name in named(method)}


ABOVE, MOST = math.ulp(0.0), sys.float_info.max
RANGES = (
    ("a whole number of at least 1", 1, MOST, "batch batch_size frames host_blocks max_new_tokens"),
    ("a whole number of at least 1", 1, MOST, "max_codes max_words num_beams num_diffusion_steps"),
    ("a whole number of at least 1", 1, MOST, "num_flow_steps sized_for"),
    ("a whole number of at least 0", 0, MOST, "top_k"),
    ("a whole number from 0 to 2**63 - 1", 0, 2**63 - 1, "seed"),
    ("a number", -MOST, MOST, "eos_threshold"),
    ("a number above 0", ABOVE, MOST, "ahead fine_temperature fps maxlenratio rate"),
    ("a number above 0", ABOVE, MOST, "repetition_penalty seconds"),
    ("a number of at least 0", 0, MOST, "delay guidance_scale minlenratio noise_scale"),
    ("a number of at least 0", 0, MOST, "noise_scale_duration quiet temperature"),
    ("a number above 0 and at most 1", ABOVE, 1, "frame_cache top_p typical_p"),
    ("a number from 0 to 1", 0, 1, "gate min_eos_p min_p threshold"),
    ("True or False", 0, 1, "check do_sample translate"),
)
NUMBERS = {name: (each[1], each[2], each[0]) for each in RANGES for name in each[3].split()}
READERS: dict[str, Callable[[Any], Any]] = {
    "memory": lambda spec: None if spec == "auto" else plan_cache(spec),
    "encoder": check_encoder,
    "guard": read_guard,
    "reuse": parse_reuse,
    "weights": check_weights,
    "prefill": plan_prefill,
    "attn": check_attn,
    "language": lambda value: _of_kind("language", value, str, "a name such as 'en'"),
    "limits": lambda value: _of_kind("limits", value, Limits, "mmfast.frontends.source.Limits"),
    "folder": lambda value: _of_kind("folder", value, (str, PathLike), "the path of a folder"),
    "device": loading.pick_device,
    "dtype": loading.pick_dtype,
    **dict.fromkeys(("device_bytes", "host_bytes", "disk_bytes"), parse_bytes),
}
OBJECTS = ("frame_cache", "gate")  # a number, or an object that checks itself


@contextmanager
def within(task: str) -> Iterator[None]:
    """Name the task in the errors of its options."""
    try:
        yield
    except MmfastError as error:
        raise type(error)(f"{task}: {error}") from None


def check_values(task: str, given: Mapping[str, Any]) -> None:
    """Refuse a value that an option can never have (MmfastError)."""
    with within(task):
        where = given.get("device"), given.get("dtype", "auto"), given.get("model_kwargs")
        loading.check_kwargs(given.get("model"), *where)
    for name, value in given.items():
        if value is None or (name in OBJECTS and not isinstance(value, (int, float, str))):
            continue
        with within(task):
            if name in READERS:
                READERS[name](value)
            least, most, words = NUMBERS.get(name, (0, 0, ""))
            kind = bool if "True" in words else int if "whole" in words else (int, float)
            fine = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
            if words and not (fine and least <= value <= most):
                raise MmfastError(f"{name}={value!r} is not allowed; give {words}")


def check_made(task: str, given: Mapping[str, Any], names: Collection[str]) -> None:
    """Refuse, in a call, the options that are of the making of a pipeline."""
    for name in sorted(given.keys() & {*names}):
        raise MmfastError(
            f"{task}: {name} is set when the pipeline is made, not in a call: "
            f"pipeline({task!r}, {name}={given[name]!r})"
        )


def check_names(
    task: str, given: Collection[str], choices: Collection[str], more: Collection[str] = ()
) -> None:
    """Refuse options that are neither in `choices` nor in `more`, which a message leaves out."""
    for name in given:
        if name in loading.FIXED:
            loading.check_fixed({name: not loading.FIXED[name]})
        if name not in choices and name not in more:
            if name == "num_return_sequences":
                raise MmfastError(
                    f"{task}: {name} is not taken, an input has one answer; give it in a list as "
                    "often as you want answers, with do_sample=True"
                )
            place = name in loading.MODEL_KWARGS and "model_kwargs" in choices
            hint = f" (it belongs into model_kwargs={{{name!r}: …}})" if place else ""
            raise MmfastError(f"{task}: {unknown('option', name, choices, more)}{hint}")


def checked(listed: Collection[str] = (), more: Collection[str] = ()) -> Callable[[F], F]:
    """Decorate a method of a pipeline, so that its options are checked before its body runs.

    Allowed are those that it declares, `listed` and `more`; messages leave out the last.
    """

    def decorate(method: F) -> F:
        order = list(inspect.signature(method).parameters)[1:]
        choices = named(method) | frozenset(listed)

        @wraps(method)
        def call(self: Any, *args: Any, **options: Any) -> Any:
            task = getattr(self, "task", type(self).__name__)
            odd = {name: options[name] for name in options.keys() - choices - {*more}}
            check_made(task, odd, _of_making(type(self)))
            check_names(task, options, choices, more)
            check_values(task, {**dict(zip(order, args, strict=False)), **options})
            return method(self, *args, **options)

        return cast(F, call)

    return decorate


def portable(pipe: Any) -> dict[str, Any]:
    """Return the state of a pipeline for another process: its weights, and no hooks of calls.

    MmfastError: it holds what is of this process alone.
    """
    try:
        return portable_state(pipe)
    except TypeError as error:
        raise MmfastError(
            f"{pipe.task}: this pipeline has parts of this process alone, and cannot be copied or "
            f"pickled ({error}); make one where it is needed, and leave reuse= out of copies"
        ) from None
