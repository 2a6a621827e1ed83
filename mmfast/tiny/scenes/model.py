"""The model of the larger world before its training: tiny-video with another vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken
from transformers import LlavaOnevisionForConditionalGeneration, LlavaOnevisionProcessor

from mmfast.models.loading import load
from mmfast.tiny.scenes import outside
from mmfast.tiny.scenes.looks import BACKGROUNDS
from mmfast.tiny.scenes.questions import ALIKE, PREFIXES, SUFFIXES, WORDINGS, spelled
from mmfast.tiny.video import model as base
from mmfast.tiny.video.scene import COLOURS, DIRECTIONS, SHAPES

VOCABULARY = 1400
START = "tiny-video"  # whose weights the training starts from
ANSWERS = (
    *base.ANSWERS, *BACKGROUNDS, "above", "below", "yes", "no",
    "there are no objects on a plain background.", "there is one object on a plain background.",
    "there are objects on a plain background. the red circle is in the top left.",
    "the red circle moves left, appears at second and stays until the end. no number is shown.",
    "the red circle moves left, is there from the start and leaves at second.",
    "the number appears at second. the number is shown.", outside.REFUSAL,
)  # fmt: skip


def vocabulary_texts() -> Iterator[str]:
    """Texts that fix the vocabulary: questions of the world, answers, some from outside."""
    rng = np.random.default_rng(0)
    names = [f"{colour} {shape}" for colour in COLOURS for shape in SHAPES]
    fills = [*names, *COLOURS, *SHAPES, "number"]
    for wordings in WORDINGS.values():
        for wording in wordings:
            for name in fills:
                end = (" at the start", " at the end")[int(rng.integers(2))]
                side = ("left of", "right of", "above", "below")[int(rng.integers(4))]
                yield spelled(wording.format(name, name, end, side), rng)
    alike = (word for words in ALIKE.values() for word in words)
    for text in (*ANSWERS, *PREFIXES, *SUFFIXES, *alike, *DIRECTIONS):
        yield from [text] * 30
    yield from (outside.question(rng) for _ in range(3000))


def make_processor() -> LlavaOnevisionProcessor:
    """Make the processor of tiny-video with this vocabulary; "I" alone keeps its capital."""
    processor = base.make_processor(vocabulary_texts(), VOCABULARY)
    processor.tokenizer.add_tokens([AddedToken("I", single_word=True, normalized=False)])
    return processor


@torch.no_grad()
def make_model(
    processor: Any, seed: int, start_from: str = START
) -> LlavaOnevisionForConditionalGeneration:
    """Make the model with the weights of another; words that both know keep their rows."""
    model = base.make_model(len(processor.tokenizer), seed)
    start, known = load(start_from, "cpu", "float32")
    weights = start.state_dict()
    rows = weights.pop("model.language_model.embed_tokens.weight")
    weights.pop("lm_head.weight", None)
    missing = model.load_state_dict(weights, strict=False)
    assert not missing.unexpected_keys
    table = model.get_input_embeddings().weight
    table.mul_(rows.std() / table.std())
    old, new = known.tokenizer.get_vocab(), processor.tokenizer.get_vocab()
    for word, place in new.items():
        if word in old:
            table[place] = rows[old[word]]
    model.tie_weights()
    model.generation_config.max_new_tokens = 128  # a description is longer than a word
    return model
