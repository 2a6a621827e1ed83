"""Benchmarks of training with fewer tokens: the decoder of the embedded video model."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmfast.attach import attach
from mmfast.bench.registry import Tick, benchmark
from mmfast.bench.results import Row, load
from mmfast.bench.timing import compare_jobs, extra_mb
from mmfast.core.spec import parse
from mmfast.models.adapters import with_lora
from mmfast.models.reduction.inputs import encoded
from mmfast.models.reduction.record import record_of, remember
from mmfast.models.reduction.training import IGNORE
from mmfast.tiny.evaluate import Inputs, Subject, run_eval
from mmfast.tiny.student import answered
from mmfast.tiny.suites import suite
from mmfast.tiny.text import drafts, exits
from mmfast.tiny.text.evaluate import NAME

SPECS = ("divprune:0.25", "divprune:0.1", "divprune:0.05", "fastv@llm2:0.1")
ASKED = ("visionzip:0.1", "visionzip:0.05")
LESSONS, EXAM = 77, 1000  # seeds of the clips that are learned from, and asked about
RATE = 5e-4  # peak of the learning rate
DRAFTERS: dict[str, tuple[Any, str]] = {  # recipes, and what they are told
    "exit:FILE": (exits, "--layer 1 --steps 600 --out exit.safetensors"),
    "draft:DIR": (drafts, "--steps 300 --prompts 1000 --out draft"),
}


def lessons(subject: Subject, steps: int, batch: int) -> list[Inputs]:
    """Batches of questions with their answers, which alone are labels."""
    cases, tokenizer = suite(steps * batch, LESSONS), subject.processor.tokenizer
    found = []
    for at in range(0, len(cases), batch):
        mine = cases[at : at + batch]
        ids = [[*tokenizer.encode(case.answer), tokenizer.eos_token_id] for case in mine]
        inputs, told = answered(subject.inputs(mine), ids, tokenizer.pad_token_id)
        labels = torch.full_like(inputs["input_ids"], IGNORE)
        labels[:, -told.shape[1] :] = told
        found.append({**inputs, "labels": labels})
    return found


def step(subject: Subject, model: Any, optimiser: Any, batch: Inputs, spec: str | None) -> None:
    """One step of training under a reduction."""
    with torch.enable_grad(), attach(subject.model, spec):
        model(**batch).loss.backward()
    optimiser.step()
    optimiser.zero_grad()


def saved_mb(job: Callable[[], object]) -> float:
    """Megabytes of the tensors that the forward pass keeps for the gradient."""
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        job()
    return sum(sizes.values()) / 1e6


@benchmark("train", "speed")
def speed(tick: Tick, rounds: int = 7, batch: int = 16) -> list[Row]:
    """Compare steps of LoRA with all tokens and with fewer, and what they keep for the gradient."""
    subject = Subject()
    (one,) = lessons(subject, 1, batch)
    model = with_lora(subject.model, 16, scale=1.0).train()
    optimiser = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-5)
    jobs: dict[str, Callable[[], object]] = {
        spec or "all": partial(step, subject, model, optimiser, one, spec)
        for spec in (None, *SPECS)
    }
    extra: dict[str, Mapping[str, Any]] = {}
    for number, (name, job) in enumerate(jobs.items()):
        tick(name, number, len(jobs) + 1)
        extra[name] = {"saved_mb": saved_mb(job), "peak_mb": extra_mb(job)}
    tick("steps", len(jobs), len(jobs) + 1)
    shared = {"model": subject.name, "batch": batch, "dtype": "float32"}
    rows = compare_jobs(jobs, rounds, shared, "cpu", extra)
    return [{**row, "steps_per_s": 1e3 / row["median_ms"]} for row in rows]


def fit(subject: Subject, batches: Sequence[Inputs], spec: str, epochs: int = 1) -> None:
    """Train LoRA on the batches with the Trainer of transformers, under a reduction."""
    from transformers import Trainer, TrainingArguments

    model = with_lora(subject.model, 16, scale=1.0)
    with tempfile.TemporaryDirectory() as folder, attach(subject.model, spec):
        arguments = TrainingArguments(
            folder,
            num_train_epochs=epochs,
            per_device_train_batch_size=1,  # an example is a batch
            learning_rate=RATE,
            warmup_steps=5,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        )
        Trainer(model, arguments, train_dataset=batches, data_collator=lambda one: one[0]).train()


@benchmark("train", "adapt")
def adapt(tick: Tick, steps: int = 60, batch: int = 16, epochs: int = 3, n: int = 200) -> list[Row]:
    """Measure answers at small budgets before and after training at the smallest one."""
    subject = Subject()
    tick("lessons", 0, 4)
    batches = [_encoded(subject, each) for each in lessons(subject, steps, batch)]
    tick("before", 1, 4)
    before = _exam(subject, n)
    tick(f"{steps * epochs} steps", 2, 4)
    fit(subject, batches, ASKED[-1], epochs)
    tick("after", 3, 4)
    shared = {"model": subject.name, "job": ASKED[-1], "steps": steps * epochs, "batch": batch}
    shared |= {"n": n, "device": "cpu", "threads": torch.get_num_threads()}
    rows = list[Row]()
    for old, new in zip(before, _exam(subject, n), strict=True):
        figures = {"before": old["accuracy"], "after": new["accuracy"], "kept": new["kept"]}
        rows.append({**shared, "reduce": new["reduce"], **figures})
    return rows


@dataclass(eq=False)
class _Features:
    """Features as the tower returns them, but no mapping.

    Of a mapping the Trainer would make another one, without what was noted about the features.
    """

    pooler_output: Any

    def to_tuple(self) -> tuple[Any, ...]:
        """Return the fields that are set, as an output of transformers does."""
        return (self.pooler_output,)


def _encoded(subject: Subject, batch: Inputs) -> Inputs:
    """A batch with the features of its clips, so that the frozen tower runs once."""
    needs = {need for spec in parse(ASKED[-1]) for need in spec.method.needs}
    found = encoded(subject.model, batch, needs)
    output = found["mm_encoder_outputs"]["video"]
    kept = _Features(output.pooler_output)
    remember(kept, record_of(output))
    return {**found, "mm_encoder_outputs": {"video": kept}}


def _exam(subject: Subject, n: int) -> list[Row]:
    pair: Any = (subject.model.eval(), subject.processor)
    found: list[Row] = run_eval(ASKED, n, EXAM, pair)["rows"]
    return found


@benchmark("train", "drafts")
def drafters(tick: Tick, more: Sequence[str] = ()) -> list[Row]:
    """Train what drafts for `tiny-text` by its recipe; `more` are further options of all recipes.

    A row for each course of a recipe, and for an adapter before any, has the figures of its log
    on held-out texts: the share of tokens that are drafted right, and the loss.
    """
    rows, shared = list[Row](), {"device": "cpu", "threads": torch.get_num_threads()}
    for number, (job, (recipe, options)) in enumerate(DRAFTERS.items()):
        tick(job, number, len(DRAFTERS))
        *argv, name = options.split()
        with tempfile.TemporaryDirectory() as folder:
            recipe.main([*argv, str(Path(folder, name)), *more])
            (log,) = map(load, Path(folder).rglob("training.jsonl"))
        told: Row = {"model": NAME, "job": job, "options": options, **shared}
        told |= {key: log[-2][key] for key in ("parameters", "of") if key in log[-2]}
        rows += [{**told, "course": course, **row} for course, row in held_out(log).items()]
    return rows


def held_out(log: Sequence[Row]) -> dict[str, Row]:
    """Last figures on held-out data of every course of a recipe's log, and of one untrained."""
    found, course = dict[str, Row](), ""
    for row in log:
        held = row["stage"] == "held-out"
        if "right" in row and not held:
            course = row["stage"]
        if held or course == row["stage"] == "untrained":
            found[course] = {"drafted": row["right"], "loss": row["loss"]}
    return found
