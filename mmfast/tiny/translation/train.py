"""Trains the embedded translator, a small Marian, on endless new sentences of the grammar.

`python -m mmfast.tiny.translation.train` takes some minutes on two CPU cores. The model learns
whole sentences alone, as an offline translator does; what it writes behind a part, policies decide.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter
from transformers import MarianConfig, MarianMTModel, PreTrainedTokenizerFast

from mmfast.tiny import training
from mmfast.tiny.card import write_card
from mmfast.tiny.translation.grammar import Pair, sentence, vocabulary

WIDTH, LAYERS, HEADS, INNER = 128, 3, 4, 384
BATCH, EXAM = 32, 300  # sentences
LONGEST = 64  # words of a sentence
SPECIAL = ("<pad>", "</s>", "<unk>")
LOST = 0.01  # share of the words that are unknown in training, as what is misheard may be


def word_tokenizer(
    special: Sequence[str], form: str, begin: str | None = None
) -> PreTrainedTokenizerFast:
    """Return a tokenizer of whole words in both languages.

    Args:
        special: Marks, the first numbers.
        form: Template of a text, such as "$A </s>".
        begin: The mark that opens a text.
    """
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    words = {word: i for i, word in enumerate((*special, *vocabulary()))}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.normalizer = normalizers.Sequence(
        [normalizers.Lowercase(), normalizers.Replace(",", " "), normalizers.Replace(".", " ")]
    )
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    ends = [(mark, words[mark]) for mark in special if mark in form]
    made.post_processor = processors.TemplateProcessing(single=form, special_tokens=ends)
    names = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    names |= {} if begin is None else {"bos_token": begin}
    more = [mark for mark in special if mark not in names.values()]
    given: dict[str, Any] = {**names, **({"extra_special_tokens": more} if more else {})}
    return PreTrainedTokenizerFast(
        tokenizer_object=made, model_input_names=["input_ids", "attention_mask"], **given
    )


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of whole words in both languages."""
    return word_tokenizer(SPECIAL, "$A </s>")


def make_model(words: int, seed: int) -> MarianMTModel:
    """Return an untrained translator of so many words."""
    torch.manual_seed(seed)
    both = {"layers": LAYERS, "attention_heads": HEADS, "ffn_dim": INNER}
    sizes = {
        f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in both.items()
    }
    config = MarianConfig(
        vocab_size=words,
        d_model=WIDTH,
        max_position_embeddings=LONGEST,
        dropout=0.0,
        pad_token_id=0,
        eos_token_id=1,
        forced_eos_token_id=None,
        decoder_start_token_id=0,
        **sizes,
    )
    return MarianMTModel(config)


class TranslationTask(training.Task):
    """A translator on sentences, none of which comes twice."""

    parallel = True

    def __init__(self, seed: int, rate: float) -> None:
        self.words = make_tokenizer()
        self.model = make_model(len(self.words), seed)
        hidden, others = list[Parameter](), list[Parameter]()
        for name, weight in self.model.named_parameters():
            matrix = ".layers." in name and weight.ndim == 2 and "bias" not in name
            if weight.requires_grad:  # the places of words are fixed
                (hidden if matrix else others).append(weight)
        self.optimiser = training.Optimiser(hidden, others, rate)
        self.rng = np.random.default_rng([seed, 51])
        exam = np.random.default_rng([seed, 52])
        self.exam = self._batch([sentence(exam, "eval") for _ in range(EXAM)])

    def batches(self, step: int, done: float) -> list[dict[str, Tensor]]:
        """Two batches of new sentences, in which some words are unknown."""
        found = []
        for _ in range(training.THREADS):
            batch = self._batch([sentence(self.rng) for _ in range(BATCH)])
            ids = batch["input_ids"]
            lost = torch.from_numpy(self.rng.random(ids.shape) < LOST) & (ids >= len(SPECIAL))
            found.append({**batch, "input_ids": ids.masked_fill(lost, SPECIAL.index("<unk>"))})
        return found

    def _batch(self, pairs: Sequence[Pair]) -> dict[str, Tensor]:
        source, target = (
            self.words([pair[side] for pair in pairs], padding=True, return_tensors="pt")
            for side in (0, 1)
        )
        labels = target["input_ids"].masked_fill(target["attention_mask"] == 0, -100)
        return {**source, "labels": labels}

    def loss(self, batch: dict[str, Tensor]) -> tuple[Tensor, training.Figures]:
        """Mean loss over the words of translations, and the share that is right."""
        loss, right, _ = self._judge(batch)
        return loss, {"translation": [loss.item(), right]}

    def _judge(self, batch: dict[str, Tensor]) -> tuple[Tensor, float, float]:
        output = self.model(**batch)
        wanted = batch["labels"] >= 0
        good = (output.logits.argmax(-1) == batch["labels"]) | ~wanted
        share = float(good[wanted].float().mean())
        return output.loss, share, float(good.all(1).float().mean())

    @torch.no_grad()
    def look(self) -> training.Figures:
        """Loss, share of words, and share of unseen sentences all of whose words are right."""
        loss, right, whole = self._judge(self.exam)
        return {"translation": [round(float(loss), 4), round(right, 4), round(whole, 4)]}


@training.one_line
def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = training.recipe_parser(__doc__, "tiny-translate")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--rate", type="rate", default=3e-3)
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    log = training.Log(options.out)
    log.start(seed=options.seed, minutes=options.minutes)
    task = TranslationTask(options.seed, options.rate)
    save = partial(training.save_half, task.model, options.out, task.words)
    training.train(task, training.Course("translation", options.minutes, watch=1), log, save)
    log.end()
    write_card(options.out, "tiny-translate")


if __name__ == "__main__":
    main()
