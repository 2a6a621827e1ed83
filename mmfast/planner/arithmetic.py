"""`weights="fastest"`: the fastest form of weights here, measured once per device and shape.

Small products of the model's true widths run in every form, in turn: few rows as a step of decoding
has them, its weights read from memory anew, many as a prompt and the vision tower have. Of the
forms whose products err by at most `error` (relative, on random numbers; 1 % unless the spec says
otherwise, `"fastest?error=0.02"`), the fastest is taken for each of the three, and the stock layer
where none gains a tenth. Prompts take the form of steps where it is as fast within a tenth, so that
weights are held once.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmfast.core.errors import ModelError, unknown
from mmfast.models.loading import device_name
from mmfast.models.packing import (
    FASTEST,
    STOCK,
    PackedWeights,
    WeightPlan,
    pack_weights,
    plan_weights,
)
from mmfast.models.wrappers import decoder_of, layers_of, stock_model
from mmfast.ops.weight_forms import FORMS, has_fbgemm, pack
from mmfast.planner.rates import measured_path, write_measured

ERROR = 0.01
GAIN = 1.1  # below it, a form is not worth its rounding
VERSION = 3
_MOST = (4096, 1024)  # outputs and inputs of what is measured: quick to pack, and wide
_ROWS = {"few": 1, "many": 256, "tower": 256}
_CACHES = 1 << 25  # float32 numbers that drive everything else out of a processor's caches
_ROUNDS, _SLOW = 12, 3.0
Times = dict[str, tuple[float, float]]  # form -> (milliseconds, relative error)


@dataclass(frozen=True)
class FastestSpec:
    """Options of `"fastest?error=0.02"`."""

    error: float = ERROR


def parse_fastest(weights: Any) -> FastestSpec | None:
    """Read `"fastest"` with its limit of error; None for another form; ModelError for a knob."""
    head, mark, knobs = str(weights).partition("?")
    if head != FASTEST:
        return None
    if not mark:
        return FastestSpec()
    name, _, value = knobs.partition("=")
    if name != "error":
        raise ModelError(unknown("knob of weights='fastest'", name, ("error",)))
    try:
        error = float(value)
    except ValueError:
        error = math.nan
    if not 0 < error < 1:
        raise ModelError(f"weights={weights!r}: error={value!r} is no share between 0 and 1")
    return FastestSpec(error)


def check_weights(weights: Any) -> None:
    """Refuse an unknown form before a model is read (ModelError)."""
    if parse_fastest(weights) is None:
        plan_weights(weights)


def use_weights(model: Any, weights: str | None, given: Any = None) -> PackedWeights | None:
    """Pack a model that was just loaded from `given`; None where nothing is asked for.

    ModelError for a model that the caller has, too: packing would change it under their hands.
    """
    if weights is None:
        return None
    if not (given is None or isinstance(given, (str, Path))):
        raise ModelError(
            f"weights={weights!r} would change the {type(stock_model(model)).__name__} given; give "
            "a directory or a hub id, or call mmfast.models.packing.pack_weights on it"
        )
    wanted = parse_fastest(weights)
    if wanted is None:
        return pack_weights(model, weights)
    if stock_model(model).device.type != "cpu":
        return PackedWeights(
            WeightPlan(why=f"fastest is measured on CPUs alone, not {model.device}")
        )
    plan = fastest(model, wanted)
    return pack_weights(model, plan) if plan else PackedWeights(plan)


def fastest(model: Any, wanted: FastestSpec | None = None) -> WeightPlan:
    """The fastest forms within the limit of error, measured now or read from an earlier run."""
    limit = (wanted or FastestSpec()).error
    found = measured(model)
    chosen = {part: choose(times, limit) for part, times in found.items()}
    step, prompt = chosen["decode"], found["prefill"]
    if step in prompt and prompt[step][0] <= GAIN * prompt[chosen["prefill"]][0]:
        chosen["prefill"] = step  # as fast, and weights are held once
    words = [f"{part} {_said(chosen[part], found[part])}" for part in chosen]
    few, many, tower = (chosen.get(part, STOCK) for part in ("decode", "prefill", "tower"))
    return WeightPlan(few, many, tower, why=f"error at most {limit:.2g}: {', '.join(words)}")


def choose(times: Mapping[str, tuple[float, float]], limit: float) -> str:
    """The fastest form that errs by at most `limit`, the stock layer unless it gains a tenth."""
    fine = {name: ms for name, (ms, error) in times.items() if error <= limit}
    best = min(fine, key=lambda name: fine[name])
    return best if fine[best] * GAIN <= times[STOCK][0] else STOCK


def _said(form: str, times: Times) -> str:
    if form == STOCK:
        return "as loaded"
    ms, error = times[form]
    return f"{form} ({times[STOCK][0] / ms:.1f}x, error {error:.1g})"


def measured(model: Any) -> dict[str, Times]:
    """Times and errors of `decode`, `prefill` and `tower`, each by form."""
    stock = stock_model(model)
    shapes = _shapes(stock)
    key = {
        "version": VERSION,
        "device": device_name(torch.device("cpu")),
        "torch": torch.__version__,
        "dtype": str(stock.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "shapes": {part: list(shape) for part, shape in shapes.items()},
    }
    if (known := _read(key)) is not None:
        return known
    with torch.inference_mode():
        found = {
            "decode": _times(shapes["decoder"], _ROWS["few"], stock.dtype, tuple(FORMS)),
            "prefill": _times(shapes["decoder"], _ROWS["many"], stock.dtype, _of_many()),
        }
        if "tower" in shapes:
            found["tower"] = _times(shapes["tower"], _ROWS["tower"], stock.dtype, _of_many())
    write_measured("weights", key, times=found)
    return found


def _of_many() -> tuple[str, ...]:
    """Forms that may gain on many rows, and `int8`, which steps may want in memory anyway."""
    return ("bfloat16", "float16", "int8", "int8-dynamic")


def _shapes(model: Any) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of the largest linear layer of a decoder layer and of the tower."""
    found = {"decoder": _largest(layers_of(decoder_of(model))[0])}
    if hasattr(model.config, "vision_config"):
        tower = _largest(model.get_encoder("image"))
        found |= {"tower": tower} if tower != (0, 0) else {}
    return found


def _largest(module: nn.Module) -> tuple[int, int]:
    shapes = [(m.out_features, m.in_features) for m in module.modules() if type(m) is nn.Linear]
    return max(shapes, key=math.prod, default=(0, 0))


def _times(shape: tuple[int, int], rows: int, dtype: torch.dtype, forms: tuple[str, ...]) -> Times:
    """Least milliseconds and relative error of a product in each form, in turn.

    Work beside it only adds to a time: two threads that wait for a third differ by nothing else.
    """
    outputs, width = map(min, shape, _MOST)
    noise = torch.Generator().manual_seed(0)
    weight = (torch.randn(outputs, width, generator=noise) * width**-0.5).to(dtype)
    x = torch.randn(rows, width, generator=noise).to(dtype)
    alone = () if has_fbgemm() else ("float16", "int8-dynamic")
    jobs: dict[str, Any] = {STOCK: partial(F.linear, x, weight)}
    jobs |= {name: partial(pack(name, weight).product, x) for name in forms if name not in alone}
    exact = F.linear(x.double(), weight.double())
    # A model is larger than any cache: a step finds none of its weights there.
    others = torch.zeros(_CACHES) if rows == _ROWS["few"] else torch.zeros(0)
    taken, errors = dict[str, list[float]](), dict[str, float]()
    for name, job in jobs.items():
        errors[name] = 0.0 if name == STOCK else _relative(job(), exact)  # kernels are made here
        others.add_(1)
        taken[name] = [_timed(job)]  # which tells of hopeless ones
    first = {name: ms[0] for name, ms in taken.items()}
    for _ in range(_ROUNDS):
        for name, job in jobs.items():
            if first[name] <= _SLOW * first[STOCK]:
                others.add_(1)
                taken[name].append(_timed(job))
    return {name: (min(ms), errors[name]) for name, ms in taken.items()}


def _timed(job: Any) -> float:
    start = time.perf_counter()
    job()
    return (time.perf_counter() - start) * 1e3


def _relative(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def _read(key: Mapping[str, Any]) -> dict[str, Times] | None:
    """Times that an earlier run measured; None too where the file is not what we wrote."""
    try:
        document = json.loads(measured_path("weights", key).read_text(encoding="utf-8"))
        found = {
            str(part): {str(name): (float(ms), float(error)) for name, (ms, error) in each.items()}
            for part, each in document["times"].items()
        }
        known = {"stock", *FORMS}
        whole = document["key"] == dict(key) and {"decode", "prefill"} <= found.keys()
        fine = all(STOCK in each and each.keys() <= known for each in found.values())
        return found if whole and fine else None
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, AttributeError):
        return None
