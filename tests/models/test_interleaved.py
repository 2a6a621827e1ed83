"""Translators that read and write in one sequence: the growing cache against none at all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from mmfast.core.errors import ModelError, SpecError
from mmfast.models.interleaved import InterleavedTranslator
from mmfast.models.translation import EMBEDDED_INTERLEAVED, load_translator
from mmfast.tiny.translation.grammar import sentence
from mmfast.tiny.translation.train import make_tokenizer as plain_tokenizer
from mmfast.tiny.translation.train_interleaved import make_tokenizer

SMALL: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 3,
}  # fmt: skip
CLASSES = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen2": (Qwen2Config, Qwen2ForCausalLM)}


def random_translator(kind: str) -> InterleavedTranslator:
    """A model with large random weights whose marks are likely enough to come."""
    words = make_tokenizer()
    config, made = CLASSES[kind]
    torch.manual_seed(0)
    model = made(config(vocab_size=len(words), **SMALL)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(0.5 * torch.randn_like(weight))
    return InterleavedTranslator(model, words)


@torch.no_grad()
def from_nothing(
    translator: InterleavedTranslator, source: Sequence[str], late: int, joint: bool
) -> list[int]:
    """The sequence of a sentence, all of it computed anew for every token, without a cache."""
    words, model = translator.tokenizer, translator.model
    marks = {name: words.convert_tokens_to_ids(f"<{name}>") for name in ("write", "read", "end")}
    text = f"<late:{late}>{' <joint>' * joint}"
    ids = list(words(text)["input_ids"])

    def chances() -> torch.Tensor:
        return model(torch.tensor([ids]), use_cache=False).logits[0, -1].double().softmax(-1)

    def write(last: int) -> None:
        free = {last} | (set(words("<heard> <said>").input_ids[1:]) if joint else set())
        for _ in range(64):
            order = chances().argsort(descending=True).tolist()
            token = next(t for t in order if t in free or t not in words.all_special_ids)
            ids.append(token)
            if token == last:
                return
        ids.append(last)

    for word in source:
        ids.append(words.convert_tokens_to_ids(word))
        if chances()[marks["write"]] >= 0.5:
            ids.append(marks["write"])
            write(marks["read"])
    ids.append(marks["end"])
    write(words.eos_token_id)
    return ids


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("kind", [*CLASSES, "embedded"])
def test_a_growing_cache_is_full_recomputation(kind: str, joint: bool) -> None:
    embedded = kind == "embedded"
    translator = load_translator(EMBEDDED_INTERLEAVED) if embedded else random_translator(kind)
    assert isinstance(translator, InterleavedTranslator)
    rng = np.random.default_rng(3)
    for late in (0, 2):
        source = sentence(rng, "eval")[0].split()
        sequence = translator.open(late, joint)
        found = sequence.read(source[:3])
        begun = list(sequence.ids)
        found += sequence.read(source[3:]) + sequence.finish()
        assert sequence.ids[: len(begun)] == begun  # nothing that was read or written changes
        assert sequence.ids == from_nothing(translator, source, late, joint)
        assert sequence.written == found and sequence.finish() == []
        # Each token once, and not the end; of a text that is too long, nor its last word.
        assert len(sequence.ids) - sequence.computed in ((1,) if embedded else (1, 2))
        assert sequence.passes <= sequence.computed


def test_latency_is_set_by_a_mark_in_front() -> None:
    translator = load_translator(EMBEDDED_INTERLEAVED)
    assert translator.latencies == (0, 1, 2, 3, 4, 5, 6)
    source = ["the", "red", "circle", "is", "next", "to", "the", "blue", "star"]
    starts = []
    for late in (0, 2, 4):
        sequence = translator.open(late)
        starts.append(next(n for n, word in enumerate(source) if sequence.read([word])) + 1)
    assert starts == [3, 5, 7]  # "the red circle" is needed


def test_whole_texts() -> None:
    translator = load_translator(EMBEDDED_INTERLEAVED)
    assert translator.translate(["", "the red circle moves left"]) == ["", "ronda ruva levo mira"]
    assert translator.unknown("the red lamp") == ["lamp"]


def test_models_without_marks_are_refused() -> None:
    model = random_translator("llama").model
    with pytest.raises(ModelError, match="<write>"):
        InterleavedTranslator(model, plain_tokenizer())
    translator = random_translator("llama")
    with pytest.raises(SpecError, match="latency '9'"):
        translator.open(9)
    with pytest.raises(ModelError, match="LlamaForCausalLM has no languages"):
        load_translator((translator.model, translator.tokenizer), target="deu_Latn")
    assert load_translator((translator.model, translator.tokenizer)).model is translator.model
