"""Trains the embedded interleaved translator, a small Llama that reads and writes in one sequence.

`python -m mmfast.tiny.translation.train_interleaved` takes some minutes on a CPU core. Every
lesson is a new sentence of the grammar at a random latency; one of four writes the transcript, too.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from mmfast.models.interleaved import END, WRITE
from mmfast.tiny import training
from mmfast.tiny.card import write_card
from mmfast.tiny.translation.grammar import Split, aligned
from mmfast.tiny.translation.serial import LATES, MARKS, interleaved, own_places
from mmfast.tiny.translation.train import BATCH, LOST, SPECIAL, word_tokenizer

WIDTH, LAYERS, HEADS, INNER = 128, 4, 4, 384
EXAM = 120  # sentences
PARTS = 2  # batches of a step, each of sentences of like lengths
JOINT = 0.2  # share of the lessons with a transcript
LONGEST = 512  # tokens of a sequence
BEGIN = "<s>"


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of whole words in both languages and of the marks."""
    return word_tokenizer((*SPECIAL, BEGIN, *MARKS), f"{BEGIN} $A", BEGIN)


def make_model(words: int, seed: int) -> LlamaForCausalLM:
    """Return an untrained model of so many words."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=words,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        max_position_embeddings=LONGEST,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=SPECIAL.index("<unk>") + 1,
    )
    return LlamaForCausalLM(config)


class InterleavedTask(training.Task):
    """A causal model on sequences of reading and writing, none of which comes twice."""

    def __init__(self, seed: int, rate: float, start: Path | None = None) -> None:
        self.words = make_tokenizer()
        self.model = make_model(len(self.words), seed)
        if start is not None:
            self.model = LlamaForCausalLM.from_pretrained(start, dtype=torch.float32)
        self.optimiser = training.Optimiser.of(self.model, (), rate)
        self.rng = np.random.default_rng([seed, 54])
        exam = np.random.default_rng([seed, 55])
        self.exam = self._batch(self._lessons(exam, EXAM, "eval"), lost=0.0)

    def batches(self, step: int, done: float) -> list[dict[str, Tensor]]:
        """Batches of new sentences of like lengths, in which some source words are unknown."""
        drawn = sorted(self._lessons(self.rng, BATCH, "train"), key=len)
        size = len(drawn) // PARTS
        return [self._batch(drawn[i * size : (i + 1) * size], LOST) for i in range(PARTS)]

    def _lessons(self, rng: np.random.Generator, count: int, split: Split) -> list[list[str]]:
        found = []
        for _ in range(count):
            late, joint = int(rng.integers(len(LATES))), bool(rng.random() < JOINT)
            found.append(interleaved(aligned(rng, split), late, joint))
        return found

    def _batch(self, lessons: Sequence[list[str]], lost: float) -> dict[str, Tensor]:
        number = self.words.convert_tokens_to_ids
        rows, marks = list[Tensor](), list[Tensor]()
        for words in lessons:
            own = torch.tensor([False, *own_places(words)])
            ids = torch.tensor(number([BEGIN, *words]))
            source = ~own & (ids >= len(SPECIAL) + 1 + len(MARKS))
            gone = torch.from_numpy(self.rng.random(len(ids)) < lost) & source
            rows.append(ids.masked_fill(gone, SPECIAL.index("<unk>")))
            marks.append(own)
        ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        own = nn.utils.rnn.pad_sequence(marks, batch_first=True)
        labels = ids.masked_fill(ids == SPECIAL.index("<unk>"), -100)  # nobody can foresee those
        return {"input_ids": ids, "own": own, "labels": labels.masked_fill(ids == 0, -100)}

    def loss(self, batch: dict[str, Tensor]) -> tuple[Tensor, training.Figures]:
        """Mean loss over the sequences; shares of words and of decisions that are right."""
        loss, *shares = self._judge(batch)
        return loss, {"interleaved": [loss.item(), *shares[:2]]}

    def _judge(self, batch: dict[str, Tensor]) -> tuple[Tensor, float, float, float]:
        """Return the loss and shares of written words, decisions and whole sequences."""
        output = self.model(input_ids=batch["input_ids"], labels=batch["labels"])
        logits, wanted = output.logits[:, :-1].detach(), batch["labels"][:, 1:]
        number = self.words.convert_tokens_to_ids
        write = number(WRITE)
        own = batch["own"][:, 1:] & (wanted != write)
        source = ~batch["own"][:, 1:] & (wanted >= 0) & (wanted != number(END))
        good = (logits.argmax(-1) == wanted) | ~own
        decided = source | (wanted == write)
        chosen = logits.softmax(-1)[..., write] >= 0.5
        kept = (chosen == (wanted == write)) | ~decided
        whole = (good & kept).all(1).float().mean()
        words, choices = good[own].float().mean(), kept[decided].float().mean()
        return output.loss, float(words), float(choices), float(whole)

    @torch.no_grad()
    def look(self) -> training.Figures:
        """Loss, and shares on unseen sentences: words, decisions, whole sequences."""
        loss, *shares = self._judge(self.exam)
        return {"interleaved": [round(float(loss), 4), *(round(share, 4) for share in shares)]}


@training.one_line
def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = training.recipe_parser(__doc__, "tiny-interleaved")
    parser.add_argument("--minutes", type=float, default=14.0)
    parser.add_argument("--rate", type="rate", default=3e-3)
    parser.add_argument("--start", type="present", help="go on from this checkpoint's weights")
    parser.add_argument("--note", help="a sentence about the run for the model card")
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    log = training.Log(options.out, fresh=options.start is None)
    note = {} if options.note is None else {"note": options.note}
    log.start(seed=options.seed, minutes=options.minutes, **note)
    task = InterleavedTask(options.seed, options.rate, options.start)
    save = partial(training.save_half, task.model, options.out, task.words)
    training.train(task, training.Course("interleaved", options.minutes, watch=2), log, save)
    log.end(processor_seconds=round(time.process_time()))
    write_card(options.out, "tiny-interleaved")


if __name__ == "__main__":
    main()
