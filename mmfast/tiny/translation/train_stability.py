"""Trains the head that tells which words of a translation stay when more of the source comes.

`python -m mmfast.tiny.translation.train_stability` takes some minutes on a CPU core. Labels need no
right translation: beginnings of sentences are translated, and what the translation of the whole
sentence has at the same place stays. With `--model` and `--texts` the head is that of any
encoder-decoder.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from mmfast.core.errors import MmfastError
from mmfast.core.files import text_lines
from mmfast.models.stability import StabilityHead, doubt
from mmfast.models.translation import Translator, load_translator
from mmfast.tiny import training
from mmfast.tiny.translation.grammar import Split, sentence

SENTENCES, EXAM = 500, 60
STEPS, BATCH = 3000, 512
RATE = 3e-3


class StabilityLessons(NamedTuple):
    """States `[n, D]` of tokens of hypotheses, their chances and whether they stayed `[n]`."""

    states: Tensor
    chances: Tensor
    stays: Tensor


def beginnings(text: str) -> list[str]:
    """Return all beginnings of a text, the whole at the end."""
    words = text.split()
    return [" ".join(words[:count]) for count in range(1, len(words) + 1)]


def agreed(ids: Tensor, whole: Tensor) -> Tensor:
    """Tell which tokens `[n]` are those of `whole` `[m]`, with all before them: `[n]` bool."""
    size = min(len(ids), len(whole))
    same = torch.zeros(len(ids), dtype=torch.bool)
    same[:size] = ids[:size] == whole[:size]
    return same.long().cumprod(0).bool()


def lessons_of(translator: Translator, texts: Sequence[str]) -> Iterator[StabilityLessons]:
    """Yield the lessons of each text: all tokens of the translations of its beginnings."""
    special = torch.tensor(translator.tokenizer.all_special_ids)
    for text in texts:
        rows, states, chances = translator.traced(beginnings(text))
        whole = rows[-1]
        for ids, state, chance in zip(rows, states, chances, strict=True):
            ends = torch.isin(ids, special)  # an end is padded with others
            kept = ends.cumsum(0) == 0
            if kept.any():
                yield StabilityLessons(state[kept], chance[kept], agreed(ids, whole)[kept])


def gather(translator: Translator, texts: Sequence[str]) -> StabilityLessons:
    """Return the lessons of all texts."""
    found = [*lessons_of(translator, texts)]
    return StabilityLessons(*(torch.cat(column) for column in zip(*found, strict=True)))


def fit(lessons: StabilityLessons, seed: int, steps: int = STEPS) -> StabilityHead:
    """Return a head trained on lessons."""
    torch.manual_seed(seed)
    head = StabilityHead(lessons.states.shape[-1])
    both = torch.cat([lessons.states, doubt(lessons.chances)[:, None]], -1)
    head.mean, head.scale = both.mean(0), both.std(0) + 1e-4
    optimiser = torch.optim.AdamW(head.parameters(), RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LinearLR(optimiser, 1.0, 0.02, steps)
    for _ in range(steps):
        rows = torch.randint(len(lessons.stays), (BATCH,))
        logits = head(lessons.states[rows], lessons.chances[rows])
        loss = nn.functional.binary_cross_entropy_with_logits(logits, lessons.stays[rows].float())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
    return head.eval()


@torch.no_grad()
def judged_head(head: StabilityHead, lessons: StabilityLessons) -> dict[str, float]:
    """Return how well a head, and the chance alone, tell words that stay from others (AUC)."""
    logits = head(lessons.states, lessons.chances)
    return {
        "stays": round(float(lessons.stays.float().mean()), 4),
        "auc": round(area(logits, lessons.stays), 4),
        "auc_chance": round(area(lessons.chances, lessons.stays), 4),
    }


def area(scores: Tensor, marks: Tensor) -> float:
    """Return the share of pairs of a marked and another entry in which the marked has more."""
    order = scores.double().argsort()
    ranks = torch.empty(len(scores), dtype=torch.float64)
    ranks[order] = torch.arange(1, len(scores) + 1, dtype=torch.float64)
    good = int(marks.sum())
    bad = len(marks) - good
    return float((ranks[marks].sum() - good * (good + 1) / 2) / max(1, good * bad))


def new_texts(count: int, seed: int, split: Split) -> list[str]:
    """Return so many English sentences of the grammar."""
    rng = np.random.default_rng([seed, 56])
    return [sentence(rng, split)[0] for _ in range(count)]


@training.one_line
def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = training.RecipeParser(__doc__)
    parser.add_argument("--model", help="folder of an encoder-decoder; the embedded one")
    parser.add_argument("--texts", type="present", help="a source sentence a line; the grammar's")
    parser.add_argument("--out", type=Path, default=Path("tiny-translate"), help="folder")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sentences", type="count", default=SENTENCES)
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)  # or refuse before the work
    start, translator = time.monotonic(), load_translator(options.model)
    if not isinstance(translator, Translator):
        raise MmfastError(f"{options.model!r} is no encoder-decoder; give one such as Marian")
    if options.texts is None:
        texts = new_texts(options.sentences, options.seed, "train")
        exam = new_texts(EXAM, options.seed, "eval")
    else:
        given = text_lines(options.texts.read_text(encoding="utf-8"))[: options.sentences]
        texts, exam = given[: -(len(given) // 10) or None], given[-(len(given) // 10) :]
    lessons = gather(translator, texts)
    head = fit(lessons, options.seed)
    figures = judged_head(head, gather(translator, exam))
    head.save(options.out)
    spent = {
        "seconds": round(time.monotonic() - start),
        "processor_seconds": round(time.process_time()),
    }
    row = {"stage": "stability", "sentences": len(texts), "tokens": len(lessons.stays)}
    row |= {"seed": options.seed, **figures, **spent}
    with (options.out / "stability.jsonl").open("w", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    print(json.dumps(row))


if __name__ == "__main__":
    main()
