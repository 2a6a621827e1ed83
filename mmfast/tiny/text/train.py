"""Train the embedded model of text: `python -m mmfast.tiny.text.train --out DIR`.

A stock Llama learns to answer about documents that start short and grow. Every sequence asks about
all facts of its document, so each one teaches many answers. Gaps between the places of sentences
stretch short documents over all distances of the longest, so what was learned short holds there.
A run that was cut off goes on where it stopped: the same command again.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from mmfast.tiny import training
from mmfast.tiny.card import write_card
from mmfast.tiny.text.evaluate import NAME, needle_rows
from mmfast.tiny.text.haystack import (
    HOPS,
    KINDS,
    LONGEST,
    FactCounts,
    make_document,
    vocabulary,
    words_of,
)

WIDTH, LAYERS, HEADS, INNER = 96, 3, 3, 256
THETA = 1e8  # half of the frequencies stand still over the longest document
SPECIAL = ("<pad>", "<s>", "<unk>")
TOKENS = 512  # of a thread's lesson, where a document is shorter
START = 128  # tokens of the first documents
FOUND = ("single", "keys", "variables")  # kinds by which documents grow; counts are learned last
GROWN, PATIENCE = 0.9, 40  # share of each of them in so many lessons at which they double
LATE = 0.4  # share of the course from which they grow, learned or not
SHORT = 512  # tokens up to which float32 is faster
IGNORE = -100
EXAM = 1 << 20  # step of which the documents of the held-out figures are
PLAIN = 0.1  # weight of the words of documents beside that of answers
HARD = ("variables", "count")  # kinds that take two steps
HARDER = 2.0  # weight of an answer to such a question beside one of the others


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of whole words and marks, which starts a text with <s>."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = {word: i for i, word in enumerate((*SPECIAL, *vocabulary()))}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", words["<s>"])]
    )
    names = {"pad_token": "<pad>", "bos_token": "<s>", "unk_token": "<unk>", "eos_token": "."}
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        model_input_names=["input_ids", "attention_mask"],
        model_max_length=LONGEST,
        padding_side="left",
        **names,
    )


def make_model(words: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    """Return an untrained model."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=2 * LONGEST,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        attention_bias=True,
        tie_word_embeddings=True,
        initializer_range=0.05,
        pad_token_id=words.pad_token_id,
        bos_token_id=words.bos_token_id,
        eos_token_id=words.eos_token_id,
    )
    model = LlamaForCausalLM(config)
    wire(model)
    return model


@torch.no_grad()
def wire(model: LlamaForCausalLM) -> None:
    """Start attention near induction heads (Olsson et al. 2022), which would take long to appear.

    Heads of the first layer look one and two tokens back; those of the others look for tokens
    behind what stands here, or behind what stands one before, and copy them. The last head looks
    behind what stands here in all places alike, however far they are, so it sees how many.
    """
    size, layers = WIDTH // HEADS, model.model.layers
    parts = [slice(head * size, (head + 1) * size) for head in range(HEADS)]
    first = layers[0].self_attn
    turn = THETA ** (-torch.arange(0, size, 2) / size)  # radians a token
    strength = torch.zeros(size // 2)
    strength[:4] = torch.tensor([7.0, 4.0, 2.0, 1.0])
    seen = nn.init.orthogonal_(torch.empty(size, WIDTH))
    for part, back in zip(parts, (1, 2), strict=False):
        first.k_proj.bias[part] = torch.cat([strength, torch.zeros_like(strength)])
        angles = -back * turn
        first.q_proj.bias[part] = torch.cat([strength * angles.cos(), strength * angles.sin()])
        first.q_proj.weight[part] *= 0.1
        first.k_proj.weight[part] *= 0.1
        first.v_proj.weight[part] = seen
        first.o_proj.weight[:, part] = 0.08 * nn.init.orthogonal_(torch.empty(WIDTH, size))
    one, two = (first.o_proj.weight[:, part].T / 0.08 for part in parts[:2])
    still = 2.0 * (turn * LONGEST < 2.0).float().repeat(2)[:, None]  # what no distance turns
    copied = nn.init.orthogonal_(torch.empty(WIDTH, WIDTH))  # by all: what one copies, others do
    for layer in (each.self_attn for each in layers[1:]):
        for part, query, key in zip(parts, (seen, one, still * seen), (one, two, one), strict=True):
            layer.q_proj.weight[part], layer.k_proj.weight[part] = 1.5 * query, 1.5 * key
        layer.v_proj.weight.copy_(copied)
        layer.o_proj.weight.copy_(0.08 * copied.T)


@dataclass(frozen=True)
class TextLesson:
    """Documents with all their questions and answers, `[B, T]` each."""

    ids: Tensor
    places: Tensor
    answers: Tensor  # the ids of answers, IGNORE elsewhere
    kinds: Tensor  # number of the kind of question at answers, IGNORE elsewhere


class TextSampler:
    """Endless documents of the training split, as lessons."""

    def __init__(self, seed: int, step: int = 0) -> None:
        self.rng = np.random.default_rng([seed, 61, step])
        self.index = {word: i for i, word in enumerate((*SPECIAL, *vocabulary()))}

    def lesson(self, length: int) -> TextLesson:
        """As many documents of `length` tokens, their questions included, as make a step."""
        rows = [self._row(length) for _ in range(max(1, TOKENS // length))]
        return TextLesson(*(torch.from_numpy(np.stack(part)) for part in zip(*rows, strict=True)))

    def _facts(self, length: int) -> FactCounts:
        """Facts that leave half of a document to other sentences, in three of four of one kind.

        Where little else is asked about, a step that answers two kinds wrong is not hidden behind
        those that it answers right.
        """
        most = max(1, length // 128)
        limits = [min(4 * most, 32), min(2 + 2 * most, 8), min(1 + 2 * most, 8)]
        drawn = [int(self.rng.integers(1, 1 + limit)) for limit in limits]
        if (only := int(self.rng.integers(1 + len(limits)))) < len(limits):
            drawn = [many if i == only else 1 for i, many in enumerate(drawn)]
        return FactCounts(*drawn)

    def _row(self, length: int) -> tuple[np.ndarray, ...]:
        facts = self._facts(length)
        asked = 1 + facts.keys + facts.chains * HOPS + facts.animals
        document = make_document(length - 6 * asked - 1, self.rng, facts)
        ids, starts = [1], [0]
        for sentence in document.sentences:
            starts.append(len(ids))
            ids += self._ids(sentence)
        answers, kinds = [IGNORE] * len(ids), [IGNORE] * len(ids)
        for question in document.questions:
            starts.append(len(ids))
            told = self._ids(f"{question.text} {question.lead}")
            found = self._ids(f"{question.answer}.")
            ids += told + found
            answers += [IGNORE] * len(told) + found
            kinds += [IGNORE] * len(told) + [KINDS.index(question.kind)] * (len(found) - 1)
            kinds.append(IGNORE)  # the mark behind an answer is not judged
        pad = max(0, length - len(ids))
        places = self._places(len(ids), starts)
        rows = (
            np.pad(ids, (0, pad)),
            np.pad(places, (0, pad), mode="edge"),
            *(np.pad(each, (0, pad), constant_values=IGNORE) for each in (answers, kinds)),
        )
        return tuple(row[:length] for row in rows)

    def _ids(self, text: str) -> list[int]:
        return [self.index[word] for word in words_of(text)]

    def _places(self, many: int, starts: Sequence[int]) -> np.ndarray:
        """Places of tokens: sentences are whole, with random gaps between them."""
        span = np.exp(self.rng.uniform(np.log(many), np.log(LONGEST + 256)))
        gaps = self.rng.exponential(size=len(starts)) ** 2
        jumps = np.zeros(many)
        jumps[starts] = gaps * (max(span - many, 0) / gaps.sum())
        return (np.arange(many) + np.cumsum(jumps)).astype(np.int64)


class TextTask(training.Task):
    """A model of text on documents, none of which comes twice."""

    parallel = True

    def __init__(self, seed: int, rate: float, longest: int) -> None:
        self.words = make_tokenizer()
        self.model = make_model(self.words, seed)
        self.optimiser = training.Optimiser.of(self.model, [], rate)
        self.sampler, self.length, self.longest = TextSampler(seed), START, longest
        self.lately = {kind: deque[float](maxlen=PATIENCE) for kind in FOUND}
        self.seed = seed
        held = TextSampler(seed, EXAM)
        self.exam = [held.lesson(length) for length in (1024, 4096)]

    def resume(self, step: int) -> None:
        """Draw other documents than before the interruption."""
        self.sampler = TextSampler(self.seed, step)

    def batches(self, step: int, done: float) -> list[TextLesson]:
        """A lesson for each thread; documents grow once most words have been found."""
        if all(sum(shares) > GROWN * PATIENCE for shares in self.lately.values()):
            self.length *= 2
            for shares in self.lately.values():
                shares.clear()
        late = START << int(6 * max(done - LATE, 0.0) / (0.9 - LATE))
        self.length = min(max(self.length, late), self.longest)
        low, draw = max(START, self.length // 8), self.sampler.rng
        length = self.length
        if draw.random() < 0.5:  # what was learned short is not forgotten
            length = int(np.exp(draw.uniform(np.log(low), np.log(length + 1))))
        return [self.sampler.lesson(length) for _ in range(training.THREADS)]

    def loss(self, batch: TextLesson) -> tuple[Tensor, training.Figures]:
        """Mean loss over the words of answers, and the share that is right."""
        scores, wanted, kinds = self._scores(batch)
        hard = torch.isin(kinds, torch.tensor([KINDS.index(kind) for kind in HARD]))
        weights = (1.0 + hard * (HARDER - 1.0)) * (wanted != IGNORE)
        apart = cross_entropy(scores, wanted, ignore_index=IGNORE, reduction="none")
        loss = (apart * weights).sum() / weights.sum()
        plain = cross_entropy(scores, batch.ids[:, 1:].flatten(), ignore_index=0)
        right = scores.argmax(-1) == wanted
        shares = _by_kind(right, kinds)
        for kind in shares.keys() & self.lately.keys():
            self.lately[kind].append(shares[kind])
        figures = {"length": batch.ids.shape[1], "loss": loss.item(), "plain": plain.item()}
        return loss + PLAIN * plain, {**figures, "right": shares}

    def _scores(self, batch: TextLesson) -> tuple[Tensor, Tensor, Tensor]:
        """Logits of the next tokens `[n, V]`, answers among these, and kinds of questions."""
        with training.fast() if batch.ids.shape[1] > SHORT else nullcontext():
            logits = self.model(input_ids=batch.ids, position_ids=batch.places).logits
        scores = logits[:, :-1].float().flatten(0, 1)
        return scores, batch.answers[:, 1:].flatten(), batch.kinds[:, 1:].flatten()

    @torch.no_grad()
    def look(self) -> training.Figures:
        """Shares of right words of answers by length of unseen documents."""
        found = {}
        for lesson in self.exam:
            scores, wanted, kinds = self._scores(lesson)
            right = scores.argmax(-1) == wanted
            found[str(lesson.ids.shape[1])] = _by_kind(right, kinds)
        return found


def _by_kind(right: Tensor, kinds: Tensor) -> dict[str, float]:
    known = {kind: right[kinds == i].float() for i, kind in enumerate(KINDS)}
    return {kind: float(marks.mean()) for kind, marks in known.items() if len(marks)}


@training.one_line
def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = training.recipe_parser(__doc__, NAME)
    add = parser.add_argument
    add("--minutes", type=float, default=40.0)
    add("--rate", type="rate", default=3e-3, help="peak learning rate")
    add("--longest", type="count", default=1024, help="tokens of the longest documents")
    add("--questions", type="count", default=95, help="of the final evaluation, at each length")
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", min(os.cpu_count() or 1, 8))))
    state = options.out / "text.pt"
    log = training.Log(options.out, fresh=not state.exists())
    log.start(seed=options.seed, minutes=options.minutes, longest=options.longest)
    task = TextTask(options.seed, options.rate, options.longest)
    course = training.Course("text", options.minutes, hold=0.6, watch=2)
    save = partial(training.save_half, task.model, options.out, task.words)
    training.train(task, course, log, save, state)
    for length in (1024, 4096, LONGEST):
        row = next(needle_rows([], [], options.questions, 1000, length, options.out))
        log({"stage": "evaluation", **row, "model": "this checkpoint"})
    log.end()
    write_card(options.out, NAME)


if __name__ == "__main__":
    main()
