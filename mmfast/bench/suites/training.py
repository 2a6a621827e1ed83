"""Benchmarks of training with fewer tokens: the embedded video model, LoRA on its decoder."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mmfast.attach import attach
from mmfast.bench.registry import Tick, benchmark
from mmfast.bench.results import Row
from mmfast.bench.timing import compare_jobs, extra_mb
from mmfast.core.errors import MmfastError
from mmfast.tiny.evaluate import Inputs, Subject, run_eval
from mmfast.tiny.suites import suite

SPECS = ("divprune:0.25", "divprune:0.1", "divprune:0.05", "fastv@llm2:0.1")
BUDGETS = ("divprune:0.1", "divprune:0.05")
LESSONS, EXAM = 77, 1000  # seeds of the clips that are learned from, and asked about
RANK, RATE = 16, 2e-3  # of LoRA
IGNORE = -100


def lessons(subject: Subject, steps: int, batch: int) -> list[Inputs]:
    """Batches of questions with their answers, which alone are labels."""
    cases, eos = suite(steps * batch, LESSONS), subject.processor.tokenizer.eos_token_id
    found = []
    for at in range(0, len(cases), batch):
        mine = cases[at : at + batch]
        prompt = subject.inputs(mine)
        ids = [subject.processor.tokenizer.encode(case.answer) for case in mine]
        width = 1 + max(map(len, ids))
        tail = torch.tensor([row + [eos] * (width - len(row)) for row in ids])
        labels = [row + [eos] + [IGNORE] * (width - 1 - len(row)) for row in ids]
        silent = torch.full_like(prompt["input_ids"], IGNORE)
        real = torch.tensor(labels) != IGNORE
        prompt["input_ids"] = torch.cat([prompt["input_ids"], tail], 1)
        prompt["attention_mask"] = torch.cat([prompt["attention_mask"], real.long()], 1)
        found.append({**prompt, "labels": torch.cat([silent, torch.tensor(labels)], 1)})
    return found


def learner(subject: Subject) -> Any:
    """The model with LoRA on all matrices of its decoder; MmfastError without PEFT."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise MmfastError("PEFT is not installed; pip install 'mmfast[train]'") from None
    matrices = r".*language_model.*_proj"
    config = LoraConfig(r=RANK, lora_alpha=RANK, target_modules=matrices)
    return get_peft_model(subject.model, config)


def step(model: Any, optimiser: torch.optim.Optimizer, batch: Inputs, spec: str | None) -> Tensor:
    """One step of training under a reduction; returns the loss."""
    with torch.enable_grad(), attach(model.get_base_model(), spec):
        loss: Tensor = model(**batch).loss
        loss.backward()
    optimiser.step()
    optimiser.zero_grad()
    return loss.detach()


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
    """Compare steps with all tokens and with fewer, and what they keep for the gradient."""
    subject = Subject()
    (one,) = lessons(subject, 1, batch)
    model = learner(subject).train()
    optimiser = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-5)
    jobs: dict[str, Callable[[], object]] = {
        spec or "stock": partial(step, model, optimiser, one, spec) for spec in (None, *SPECS)
    }
    extra: dict[str, Mapping[str, Any]] = {}
    for number, (name, job) in enumerate(jobs.items()):
        tick(name, number, len(jobs) + 1)
        extra[name] = {"saved_mb": saved_mb(job), "peak_mb": extra_mb(job)}
    tick("steps", len(jobs), len(jobs) + 1)
    shared = {"model": subject.name, "batch": batch, "tokens": int(one["input_ids"].shape[1])}
    rows = compare_jobs(jobs, rounds, {**shared, "dtype": "float32"}, "cpu", extra)
    return [{**row, "steps_per_s": 1e3 / row["median_ms"]} for row in rows]


def fit(model: Any, batches: Sequence[Inputs], spec: str) -> None:
    """Train on each batch once with the Trainer of transformers, under a reduction."""
    from transformers import Trainer, TrainingArguments

    with tempfile.TemporaryDirectory() as folder, attach(model.get_base_model(), spec):
        arguments = TrainingArguments(
            folder,
            max_steps=len(batches),
            per_device_train_batch_size=1,  # each item is a batch
            learning_rate=RATE,
            lr_scheduler_type="cosine",
            warmup_steps=5,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            logging_strategy="no",
            use_cpu=True,
        )
        Trainer(model, arguments, train_dataset=batches, data_collator=lambda one: one[0]).train()


@benchmark("train", "adapt")
def adapt(tick: Tick, steps: int = 60, batch: int = 16, n: int = 200) -> list[Row]:
    """Measure answers at small budgets before and after the model is trained at them."""
    rows: list[Row] = []
    for number, spec in enumerate(BUDGETS):
        subject = Subject()
        tick(f"{spec}, before", 3 * number, 3 * len(BUDGETS))
        before = exam(subject, spec, n)
        tick(f"{spec}, {steps} steps", 3 * number + 1, 3 * len(BUDGETS))
        model = learner(subject)
        fit(model, lessons(subject, steps, batch), spec)
        tick(f"{spec}, after", 3 * number + 2, 3 * len(BUDGETS))
        after = exam(subject, spec, n, model.eval().get_base_model())
        shared = {"model": subject.name, "job": spec, "steps": steps, "batch": batch, "n": n}
        shared |= {"device": "cpu", "threads": torch.get_num_threads(), "dtype": "float32"}
        for name, was, now in zip(("all tokens", spec), before, after, strict=True):
            figures = {"before": was["accuracy"], "after": now["accuracy"], "kept": now["kept"]}
            rows.append({**shared, "asked": name, **figures, "interval": now["interval"]})
    return rows


def exam(subject: Subject, spec: str, n: int, model: Any = None) -> list[Row]:
    """Rows of the evaluation with all tokens, and under a reduction."""
    pair: Any = (model or subject.model, subject.processor)
    found: list[Row] = run_eval([spec], n, EXAM, pair)["rows"]
    return found
