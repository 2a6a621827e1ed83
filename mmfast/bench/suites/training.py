"""Benchmarks of training with fewer tokens: the decoder of the embedded video model."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mmfast.attach import attach
from mmfast.bench.registry import Tick, benchmark
from mmfast.bench.results import Row
from mmfast.bench.timing import compare_jobs, extra_mb
from mmfast.core.spec import parse
from mmfast.models.adapters import with_lora
from mmfast.models.reduction.inputs import encoded
from mmfast.models.reduction.record import record_of, remember
from mmfast.models.reduction.training import IGNORE
from mmfast.tiny.evaluate import Inputs, Subject, run_eval
from mmfast.tiny.student import answered
from mmfast.tiny.suites import suite

SPECS = ("divprune:0.25", "divprune:0.1", "divprune:0.05", "fastv@llm2:0.1")
ASKED = ("visionzip:0.1", "visionzip:0.05")
LESSONS, EXAM = 77, 1000  # seeds of the clips that are learned from, and asked about
RATE = 5e-4  # peak of the learning rate


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
