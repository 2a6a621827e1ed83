"""Train the embedded video model: `python -m mmfast.tiny.video.train --out DIR`.

Four stages: make a bank of clips; teach tower and projector what every patch shows; run them
over the bank once; teach the decoder to answer. Two CPU cores do it in under three hours.
Progress goes to standard error, figures to OUT/training.jsonl, and the model card is written
from those figures.
"""

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import LlavaOnevisionForConditionalGeneration, LlavaOnevisionProcessor

from mmfast.tiny.card import write_card
from mmfast.tiny.evaluate import run_eval
from mmfast.tiny.video.build import make_model, make_processor
from mmfast.tiny.video.clips import Bank, make_bank
from mmfast.tiny.video.language import POLISH, LanguageTrainer, StagePlan
from mmfast.tiny.video.lessons import Gallery, LessonSampler
from mmfast.tiny.video.tower import encode_bank, settle_scale, train_tower

Report = Callable[[dict[str, object]], None]


def train(out: Path, options: argparse.Namespace, report: Report) -> None:
    """Run all stages and leave a loadable checkpoint in `out`, also while still training."""
    seed = options.seed
    processor = make_processor()
    model = make_model(len(processor.tokenizer), seed)
    bank = _bank(options.clips, seed, report)
    train_tower(model, bank, options.tower_steps, seed, report)
    settle_scale(model, bank, 0.5)
    bank = bank.first(options.decoder_clips)
    tokens = encode_bank(model, bank, report)
    gallery = Gallery(model, bank, min(len(bank.tables), 4000), processor.tokenizer, seed)
    for number, plan in enumerate(plans(options)):
        school = LessonSampler(bank, tokens, processor.tokenizer, seed + number)
        trainer = LanguageTrainer(model, school, plan, seed + number, gallery)
        trainer.train(report, lambda: save_checkpoint(model, processor, out))


def plans(options: argparse.Namespace) -> list[StagePlan]:
    """The decoder's two stages: clips, then clips and pictures at a lower rate."""
    share = options.polish / (options.steps + options.polish)
    minutes = options.minutes
    main = replace(
        StagePlan(), steps=options.steps, minutes=None if minutes is None else minutes * (1 - share)
    )
    polish = replace(
        POLISH, steps=options.polish, minutes=None if minutes is None else minutes * share
    )
    return [main, polish]


def save_checkpoint(
    model: LlavaOnevisionForConditionalGeneration, processor: LlavaOnevisionProcessor, out: Path
) -> None:
    """Write model and processor in the ordinary Hugging Face format."""
    model.save_pretrained(out)
    processor.save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)


def _bank(clips: int, seed: int, report: Report) -> Bank:
    start = time.monotonic()

    def progress(done: int) -> None:
        if done % 200 == 0:
            print(f"\rclips {done}/{clips}", end="", file=sys.stderr, flush=True)

    bank = make_bank(clips, seed, os.cpu_count() or 1, progress)
    print(file=sys.stderr)
    report({"stage": "bank", "clips": clips, "seconds": time.monotonic() - start})
    return bank


def _reporter(path: Path) -> Report:
    """Log to a file, one JSON line each, and briefly to standard error."""

    def report(row: dict[str, object]) -> None:
        with path.open("a") as log:
            log.write(json.dumps(row) + "\n")
        short = {k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}
        print(" ".join(f"{k}={v}" for k, v in short.items()), file=sys.stderr, flush=True)

    return report


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("tiny-video"), help="checkpoint folder")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clips", type=int, default=10000, help="clips that the tower learns from")
    parser.add_argument("--decoder-clips", type=int, default=6000, help="of them for the decoder")
    parser.add_argument("--tower-steps", type=int, default=520)
    parser.add_argument("--steps", type=int, default=StagePlan.steps, help="decoder steps on clips")
    parser.add_argument(
        "--polish", type=int, default=POLISH.steps, help="with pictures, after that"
    )
    parser.add_argument(
        "--minutes", type=float, help="fit the decoder's stages into this time instead"
    )
    parser.add_argument("--questions", type=int, default=400, help="of the final evaluation")
    options = parser.parse_args(argv)
    if not StagePlan.held + StagePlan.batch <= options.decoder_clips <= options.clips:
        least = StagePlan.held + StagePlan.batch
        parser.error(
            f"--decoder-clips {options.decoder_clips} must be {least} to --clips {options.clips}"
        )
    return options


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Command line; returns the evaluation that the card shows."""
    options = _arguments(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    log = options.out / "training.jsonl"
    log.unlink(missing_ok=True)
    report = _reporter(log)
    # Threads of more than one machine's worth of cores only wait for each other on such matrices.
    torch.set_num_threads(min(os.cpu_count() or 1, 8))
    start = time.monotonic()
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    report({"stage": "start", "seed": options.seed, "machine": machine, "torch": torch.__version__})
    train(options.out, options, report)
    result = run_eval([], options.questions, options.seed, options.out)
    report({"stage": "evaluation", **result, "model": "this checkpoint"})
    report({"stage": "end", "seconds": time.monotonic() - start})
    write_card(options.out)
    return result


if __name__ == "__main__":
    main()
