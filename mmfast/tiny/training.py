"""The training loop of all recipes: optimiser, schedule, log, evaluation, checkpoints."""

from __future__ import annotations

import argparse
import json
import math
import os
import pickle
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from multiprocessing import get_context
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from mmfast.compressors.base import save
from mmfast.core.errors import MmfastError, ModelError, refused
from mmfast.core.files import whole_file
from mmfast.models.loading import pick_device
from mmfast.ops.weight_forms import has_bfloat16

THREADS = 2  # gradients of this many batches are computed side by side
CLIP = 1.0  # largest norm of the gradient
Figures = dict[str, Any]
Report = Callable[[Figures], None]
P = ParamSpec("P")
T = TypeVar("T")


POLYNOMIAL, ROUNDS = (3.4445, -4.775, 2.0315), 5  # of Jordan's iteration
MATCHED = 0.2  # root mean square of an update of AdamW


class Muon(torch.optim.Optimizer):
    """Muon with all matrices of one shape in one product, in float32.

    `torch.optim.Muon` multiplies in bfloat16, one matrix after the other: on a processor without
    instructions for it, a step of a small model took eight times as long as its gradient.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], rate: float, decay: float, momentum: float = 0.95
    ) -> None:
        super().__init__(parameters, {"lr": rate, "decay": decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Move along the nearest orthogonal matrix to each smoothed gradient."""
        for group in self.param_groups:
            alike: dict[torch.Size, list[nn.Parameter]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    alike.setdefault(parameter.shape, []).append(parameter)
            for shape, parameters in alike.items():
                found = orthogonal(torch.stack([self._smooth(p, group) for p in parameters]))
                size = group["lr"] * MATCHED * math.sqrt(max(shape))
                for parameter, direction in zip(parameters, found, strict=True):
                    parameter.mul_(1 - group["lr"] * group["decay"])
                    parameter.sub_(direction, alpha=size)

    def _smooth(self, parameter: nn.Parameter, group: Mapping[str, Any]) -> Tensor:
        gradient, state = parameter.grad, self.state[parameter]
        assert gradient is not None
        mean = state.setdefault("momentum", torch.zeros_like(parameter))
        mean.lerp_(gradient, 1 - group["momentum"])
        return gradient.lerp(mean, group["momentum"])  # Nesterov's


def orthogonal(matrices: Tensor) -> Tensor:
    """Matrices `[n, a, b]` with their singular values moved near 1 (Newton and Schulz)."""
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    a, b, c = POLYNOMIAL
    for _ in range(ROUNDS):
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class Optimiser:
    """Muon for hidden matrices `[a, b]`, AdamW for everything else, Muon at twice the peak rate.

    Muon (Jordan 2024; step size matched to AdamW, arXiv 2502.16982) needs half the steps.
    """

    def __init__(
        self,
        matrices: Iterable[nn.Parameter],
        rest: Iterable[nn.Parameter],
        rate: float,
        decay: float = 0.01,
    ) -> None:
        hidden, others = list(matrices), list(rest)
        self.parameters = [*others, *hidden]
        self.parts: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(others, rate, betas=(0.9, 0.98), weight_decay=decay)
        ]
        if hidden:
            self.parts.append(Muon(hidden, 2 * rate, decay))
        self.peaks = (rate, 2 * rate)

    @classmethod
    def of(cls, module: nn.Module, rest: Iterable[nn.Parameter], rate: float) -> Optimiser:
        """Optimiser of a module and other parameters; matrices are those of its `layers`."""
        matrices, others = list[nn.Parameter](), list(rest)
        for name, parameter in module.named_parameters():
            (matrices if parameter.ndim == 2 and "layers." in name else others).append(parameter)
        return cls(matrices, others, rate)

    @classmethod
    def by_layer(
        cls, module: nn.Module, rate: float, rest: Iterable[nn.Parameter] = ()
    ) -> Optimiser:
        """Optimiser of a module and other parameters; matrices are its linear layers' weights."""
        linear: list[Any] = [m.weight for m in module.modules() if isinstance(m, nn.Linear)]
        known = {id(weight) for weight in linear}
        others = [each for each in module.parameters() if id(each) not in known]
        return cls(linear, [*others, *rest], rate)

    def step(self, gradients: Sequence[Tensor | None], factor: float) -> None:
        """Update all parameters at `factor` times the peak rates."""
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        nn.utils.clip_grad_norm_(self.parameters, CLIP)
        for part, peak in zip(self.parts, self.peaks, strict=False):
            for group in part.param_groups:
                group["lr"] = peak * factor
            part.step()
            part.zero_grad()


def fast(device: torch.device | str = "cpu") -> Any:
    """Compute in bfloat16 where a device multiplies it, on a processor some three times as fast.

    On other processors a step would take eight times as long as in float32.
    """
    kind = torch.device(device).type
    return torch.autocast(kind, torch.bfloat16, enabled=kind != "cpu" or has_bfloat16())


def side_by_side(device: torch.device) -> int:
    """Number of batches of a step: one on each thread of a processor, one on a device."""
    return THREADS if device.type == "cpu" else 1


def ready(device: torch.device) -> torch.device:
    """Prepare a device for training: products in float32 may round as TF32 does."""
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    return device


def _device(text: str) -> torch.device:
    try:
        return pick_device(text)
    except ModelError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _number(kind: type[int] | type[float], least: int, text: str) -> float:
    try:
        value = kind(text)
    except ValueError:
        value = math.nan
    if not least <= value < math.inf:
        noun = "whole number" if kind is int else "number"
        raise argparse.ArgumentTypeError(f"{text!r} is no {noun}; give one from {least} on")
    return value


def _rate(text: str) -> float:
    value = _number(float, 0, text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no rate of learning; give 0.001 or so")
    return value


def _present(text: str) -> Path:
    if not text or not Path(text).exists():
        raise argparse.ArgumentTypeError(f"{text!r} does not exist; name a file or folder")
    return Path(text)


class RecipeParser(argparse.ArgumentParser):
    """Parser of the module with a docstring; its numbers are finite and not below 0.

    The type `count` is an integer from 1 on, `present` a file or folder that exists, and `rate` one
    of learning, above 0 and up to 1.
    """

    def __init__(self, doc: str | None, prog: str | None = None) -> None:
        super().__init__(prog=prog, description=(doc or "").partition("\n")[0])
        for kind in (int, float):
            self.register("type", kind, partial(_number, kind, 0))
        self.register("type", "count", partial(_number, int, 1))
        self.register("type", "present", _present)
        self.register("type", "rate", _rate)


def one_line(main: Callable[P, T]) -> Callable[P, T]:
    """Let what a user can mend end a command line in one line, with code 2."""

    @wraps(main)
    def run(*args: P.args, **options: P.kwargs) -> T:
        try:
            return main(*args, **options)
        except (MmfastError, OSError) as error:
            told = refused(error) if isinstance(error, OSError) else str(error)
            print("error:", " ".join(told.split()), file=sys.stderr)
            raise SystemExit(2) from None

    return run


def recipe_parser(doc: str | None, out: str) -> RecipeParser:
    """Make the parser of a recipe by the docstring of its module, with `--out` and `--seed`."""
    parser = RecipeParser(doc)
    parser.add_argument("--out", type=Path, default=Path(out), help="checkpoint folder")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def device_option(parser: argparse.ArgumentParser) -> None:
    """Add the option `--device` of a recipe, or of an evaluation."""
    help_text = "where the model is, such as cuda"
    parser.add_argument("--device", type=_device, default="cpu", help=help_text)


class FastOptimiser(Optimiser):
    """The same with Muon's products in bfloat16, while which one of two cores waits."""

    def step(self, gradients: Sequence[Tensor | None], factor: float) -> None:
        """Update all parameters at `factor` times the peak rates."""
        with fast(self.parameters[0].device):
            super().step(gradients, factor)


@dataclass(frozen=True)
class Course:
    """Length and pace of a training stage."""

    name: str  # stage in the log
    minutes: float | None = None  # length in time; None = `steps`
    steps: int = 0  # length in steps
    warm: float = 0.03  # share of the stage in which the learning rate rises
    # Share of the stage after which it falls linearly; None = half a cosine
    hold: float | None = 0.5
    watch: float = 4.0  # minutes between evaluations on held-out data
    every: int = 20  # steps between rows of the log

    def done(self, step: int, seconds: float) -> float:
        """Share of the stage that is over."""
        if self.minutes is None:
            return step / self.steps if self.steps else 1.0
        return seconds / (60 * self.minutes) if self.minutes else 1.0

    def factor(self, done: float) -> float:
        """Factor of the peak learning rate at a share of the stage."""
        rise = min(max(done / self.warm, 0.01), 1.0)
        if self.hold is None:
            return rise * (0.5 + 0.5 * math.cos(math.pi * done)) + 0.01
        return rise if done < self.hold else max((1 - done) / (1 - self.hold), 0.01)


class Task:
    """A model in training: its batches, losses and held-out figures."""

    optimiser: Optimiser  # holds the parameters that are trained
    parallel = False  # on processors, each batch of a step on a thread of its own, one core each
    device = torch.device("cpu")  # which the model is on

    def batches(self, step: int, done: float) -> list[Any]:
        """Batches of one step; `done` is the share of the stage that is over."""
        raise NotImplementedError

    def loss(self, batch: Any) -> tuple[Tensor, Figures]:
        """Loss to differentiate, and figures for the log."""
        raise NotImplementedError

    def look(self) -> Figures:
        """Figures on held-out data."""
        return {}

    def resume(self, step: int) -> None:
        """Prepare to continue behind a step of an interrupted run."""


class DrawAhead:
    """Batches 0, 1, 2, ... drawn ahead by worker processes; by the caller if there are none.

    `draw` makes a batch of arrays of what `request` says at a number. It depends on that alone and
    is pickled once; so the batches do not depend on the number of workers.
    """

    def __init__(
        self, draw: Callable[[Any], Any], request: Callable[[int], Any], workers: int = 0
    ) -> None:
        self.draw, self.request, self.workers = draw, request, workers
        self.pool: ProcessPoolExecutor | None = None
        self.waiting: dict[int, Future[Any]] = {}

    def __call__(self, number: int) -> Any:
        """Return the batch of a number; the next ones are in work."""
        if not self.workers:
            return self.draw(self.request(number))
        if self.pool is None:
            self.pool = self._start()
        for ahead in range(number, number + 3 * self.workers):
            if ahead not in self.waiting:
                self.waiting[ahead] = self.pool.submit(_drawn, self.request(ahead))
        return self.waiting.pop(number).result()

    def _start(self) -> ProcessPoolExecutor:
        # A file: each worker reads it by itself, where arguments would be sent to one at a time.
        descriptor, path = tempfile.mkstemp(suffix=".draw")
        os.close(descriptor)
        self.path = Path(path)
        self.path.write_bytes(pickle.dumps(self.draw))
        return ProcessPoolExecutor(self.workers, get_context("spawn"), _hold_draw, (self.path,))

    def close(self) -> None:
        """End the workers; a later call starts new ones."""
        if self.pool is not None:
            self.pool.shutdown(cancel_futures=True)
            self.path.unlink()
        self.pool, self.waiting = None, {}


_draws: list[Callable[[Any], Any]] = []  # of a worker process


def _hold_draw(path: Path) -> None:
    torch.set_num_threads(1)
    _draws.append(pickle.loads(path.read_bytes()))


def _drawn(request: Any) -> Any:
    return _draws[0](request)


def update(
    task: Task, batches: Sequence[Any], factor: float, over: Callable[..., Iterable[Any]] = map
) -> Figures:
    """Take one step with the summed gradient of all batches; returns the step's figures."""

    def gradients(batch: Any) -> tuple[tuple[Tensor | None, ...], Figures]:
        total, figures = task.loss(batch)
        return torch.autograd.grad(total, task.optimiser.parameters, allow_unused=True), figures

    found = list(over(gradients, batches))
    sums: list[Tensor | None] = []
    for parts in zip(*(grads for grads, _ in found), strict=True):
        known = [part for part in parts if part is not None]
        sums.append(sum(known[1:], known[0]) if known else None)
    task.optimiser.step(sums, factor)
    return mean_figures([figures for _, figures in found])


def _plain(value: Any) -> Any:
    """A figure as a number; a device is waited for here alone, when all work of a step is given."""
    return value.item() if isinstance(value, Tensor) else value


def mean_figures(rows: Sequence[Figures]) -> Figures:
    """Average figures by name; a figure is a number, a list of them, or named figures."""
    found: Figures = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [_plain(row[name]) for row in rows if name in row]
        nested = isinstance(values[0], Mapping)
        found[name] = mean_figures(values) if nested else np.mean(values, 0).round(4).tolist()
    return found


def train(
    task: Task,
    course: Course,
    report: Report,
    save: Callable[[], None] = lambda: None,
    checkpoint: Path | None = None,
) -> int:
    """Train as long as the course says, or go on from the file `checkpoint`; returns the steps."""
    step, spent = (0, 0.0) if checkpoint is None else restore(task, checkpoint)
    began = time.monotonic() - spent
    threaded = task.parallel and task.device.type == "cpu"
    looked, rows, threads = time.monotonic(), list[Figures](), torch.get_num_threads()
    if threaded:  # one core a batch: no thread waits for another within a step
        torch.set_num_threads(1)

    def log() -> None:
        seconds = round(time.monotonic() - began, 2)
        report({"stage": course.name, "step": step, "seconds": seconds, **mean_figures(rows)})
        rows.clear()

    def look() -> None:
        if figures := task.look():
            report({"stage": "held-out", "step": step, **figures})
        if checkpoint is not None:
            keep(task, checkpoint, step, time.monotonic() - began)
        save()

    with ThreadPoolExecutor(THREADS) as pool:
        over = pool.map if threaded else map
        while (done := course.done(step, time.monotonic() - began)) < 1:
            rows.append(update(task, task.batches(step, done), course.factor(done), over))
            step += 1
            if step % course.every == 0:
                log()
            if time.monotonic() - looked > 60 * course.watch:
                looked = time.monotonic()
                look()
    if rows:
        log()
    look()
    torch.set_num_threads(threads)
    return step


def teach(
    task: Task,
    log: Report,
    options: argparse.Namespace,
    path: Path,
    module: Any,
    watch: float,
    finish: Callable[[Any], Any] = lambda module: module,
    beside: Callable[[], None] = lambda: None,
) -> None:
    """Train for `options.minutes` or `options.steps`, and write what `finish` makes of a module.

    The course is named as the file, which has float16; `watch` is as of `Course`. `beside` writes
    what learns with the module.
    """
    course = Course(path.stem, options.minutes, options.steps, hold=0.3, watch=watch)

    def write() -> None:
        save(finish(module), path, torch.float16)
        beside()

    steps = train(task, course, log, write)
    size = sum(each.numel() for each in finish(module).parameters())
    log({"stage": "saved", "file": path.name, "step": steps, "parameters": size})


def teach_options(parser: argparse.ArgumentParser, rate: float, steps: int) -> None:
    """Add the options of `teach` and of its task: rate, seed, minutes and steps."""
    add = parser.add_argument
    add("--rate", type="rate", default=rate, help="of learning, at its peak")
    add("--seed", type=int, default=0)
    add("--minutes", type=float, help="time of each training; with none --steps count")
    add("--steps", type=int, default=steps, help="of each training")


def keep(task: Task, path: Path, step: int, seconds: float) -> None:
    """Write the state of a run; an interrupted write leaves the previous state in place."""
    parameters = [parameter.detach() for parameter in task.optimiser.parameters]
    optimiser = [part.state_dict() for part in task.optimiser.parts]
    state = {"parameters": parameters, "optimiser": optimiser, "step": step, "seconds": seconds}
    with whole_file(path) as draft:
        torch.save(state, draft)


@torch.no_grad()
def restore(task: Task, path: Path) -> tuple[int, float]:
    """Load the state of a run where there is one; returns its steps and seconds."""
    if not path.exists():
        return 0, 0.0
    state = torch.load(path, map_location=task.device, weights_only=True)
    for parameter, value in zip(task.optimiser.parameters, state["parameters"], strict=True):
        parameter.copy_(value)
    for part, value in zip(task.optimiser.parts, state["optimiser"], strict=True):
        part.load_state_dict(value)
    task.resume(state["step"])
    return state["step"], state["seconds"]


class Log:
    """Rows of a run: one JSON line each in `training.jsonl`, new if `fresh`, and on stderr."""

    def __init__(self, folder: Path, fresh: bool = True) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path, self.began = folder / "training.jsonl", time.monotonic()
        if fresh:
            self.path.unlink(missing_ok=True)

    def __call__(self, row: Figures) -> None:
        """Write one row."""
        text = json.dumps(row)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(text + "\n")
        print(text, file=sys.stderr, flush=True)

    @property
    def minutes(self) -> float:
        """Minutes of the run until now."""
        return (time.monotonic() - self.began) / 60

    def start(self, **settings: Any) -> None:
        """Row of the machine and the settings of a run."""
        machine = f"{platform.machine()}, {os.cpu_count()} cores"
        self({"stage": "start", "machine": machine, "torch": torch.__version__, **settings})

    def end(self, **figures: Any) -> None:
        """Row of the duration of a run."""
        self({"stage": "end", **figures, "seconds": time.monotonic() - self.began})

    @classmethod
    def record(
        cls, folder: Path, run: Callable[[Any, Log], None], options: Any, *fields: str
    ) -> None:
        """Run a recipe with its options, in the log of a folder that goes on; it begins by them."""
        log = cls(folder, fresh=False)
        log.start(**{name: getattr(options, name) for name in fields})
        run(options, log)
        log.end()

    @contextmanager
    def stage(self, name: str, **figures: Any) -> Iterator[Figures]:
        """Row of the duration of the block; the block may add figures to it."""
        start = time.monotonic()
        yield figures
        self({"stage": name, **figures, "seconds": time.monotonic() - start})


def progress(name: str, done: int, total: int) -> None:
    """Show on standard error how much of a preparation is done."""
    if done % 50 == 0 or done == total:
        print(f"\r{name} {done}/{total}", end="\n" * (done == total), file=sys.stderr, flush=True)


def save_model(model: Any, folder: Path) -> None:
    """Write a model in the ordinary Hugging Face format, readable by everybody."""
    model.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)


def save_whole(model: Any, folder: Path) -> None:
    """The same without a moment in which the folder holds half a checkpoint."""
    part = folder / "part"
    save_model(model, part)
    for file in part.iterdir():
        file.replace(folder / file.name)
    part.rmdir()


def save_half(model: Any, folder: Path, words: Any = None) -> None:
    """The same in float16, with its tokenizer if one is given."""
    half = {n: v.half() if v.is_floating_point() else v for n, v in model.state_dict().items()}
    model.save_pretrained(folder, state_dict=half)
    (folder / "model.safetensors").chmod(0o644)
    if words is not None:
        words.save_pretrained(folder)


def shares(marks: Iterable[tuple[str, bool]], names: Sequence[str] = ()) -> dict[str, float]:
    """Share of correct marks by name, in the order of `names` or of first appearance."""
    found: dict[str, list[bool]] = {name: [] for name in names}
    for name, mark in marks:
        found.setdefault(name, []).append(mark)
    return {name: sum(mine) / len(mine) for name, mine in found.items() if mine}
