"""Small language models and heads that have learned a little, and guides, for decoding tests."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from mmfast.models.decoder.backbone import Backbone, make_head

VOCABULARY = 24
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
FAMILIES = {
    "llama": (LlamaForCausalLM, LlamaConfig, {"num_key_value_heads": 2, "attention_bias": True}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {"num_key_value_heads": 2}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"num_key_value_heads": 2, "head_dim": 16}),
    "mistral": (
        MistralForCausalLM,
        MistralConfig,
        {"num_key_value_heads": 4, "sliding_window": None},
    ),
    "gpt_neox": (GPTNeoXForCausalLM, GPTNeoXConfig, {}),
}


def tiny(family: str = "llama", seed: int = 0, scale: float = 3.0, **changes: Any) -> Any:
    """A random model, its weights large enough for its logits to differ."""
    make, config, more = FAMILIES[family]
    torch.manual_seed(seed)
    model = make(config(**{**SMALL, **more, **changes})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(scale)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def sentences(batch: int, length: int, generator: torch.Generator) -> Tensor:
    """A language `[B, n]` with some chance: mostly steps of a size that the row keeps to."""
    step = torch.randint(1, 4, (batch, 1), generator=generator)
    first = torch.randint(0, VOCABULARY, (batch, 1), generator=generator)
    line = (first + step * torch.arange(length)) % VOCABULARY
    odd = torch.rand(batch, length, generator=generator) < 0.15
    return torch.where(odd, (line * 7 + 3) % VOCABULARY, line)


@cache
def trained(head: str, window: int = 0) -> tuple[Any, Backbone, Any]:
    """A model that has seen a little of the language, its backbone, and a head for it."""
    torch.manual_seed(1)
    generator = torch.Generator().manual_seed(2)
    model = LlamaForCausalLM(LlamaConfig(**{**SMALL, "num_key_value_heads": 2}))
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        ids = sentences(24, 24, generator)
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    model = model.double().eval().requires_grad_(False)
    backbone = Backbone(model, lean=False)
    made = make_head(head, backbone, modules=4, window=window).train()
    optimiser = torch.optim.AdamW(made.parameters(), lr=5e-3)
    for _ in range(40):
        ids = sentences(24, 24, generator)
        loss = made.loss(*read(backbone, ids, made.reads), ids).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return model, backbone, made.eval()


def read(backbone: Backbone, ids: Tensor, kind: str = "normed") -> tuple[Tensor, Tensor]:
    """Hidden states and embeddings `[B, T, D]` of whole sequences."""
    embeds = backbone.embed(ids)
    with torch.no_grad():
        raw = backbone.run(backbone.state(len(ids)), embeds, [ids.shape[1]] * len(ids))
        return (raw if kind == "raw" else backbone.norm(raw)), embeds


def window_mask(head: Any, like: Tensor) -> Tensor | None:
    """What `whole` takes where a head looks back to some places alone."""
    if not head.window:
        return None
    n = like.shape[1]
    far = torch.arange(n)[:, None] - torch.arange(n)
    seen = (far >= 0) & (far < head.window)
    mask = torch.zeros(1, 1, n, n, dtype=like.dtype)
    return mask.masked_fill(~seen, torch.finfo(like.dtype).min)


def greedy(model: Any, prompts: Tensor, n: int) -> list[list[int]]:
    """What stock `generate` says, one token per pass."""
    found = model.generate(
        prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=n, do_sample=False
    )
    said: list[list[int]] = found[:, prompts.shape[1] :].tolist()
    return said


class Spelling:
    """A guide as speech has it: sounds from row 8 on, and behind each 8 a forced word.

    Args:
        limit: Most sounds.
        foresee: Whether it tells what would be forced behind drafts.
        words: The words it owes.
        every: It also owes a word behind so many sounds, unannounced; 0 does not.
    """

    def __init__(
        self,
        limit: int,
        foresee: bool = True,
        words: Sequence[int] = range(1, 8),
        every: int = 0,
    ) -> None:
        self.every = every
        self.draft_rows = slice(8, VOCABULARY)
        self.limit, self.foresee, self.words = limit, foresee, list(words)
        self.said: list[int] = []
        self.line: list[int] = []  # with forced words
        self.owed = 0
        self.done = False

    def forced(self) -> list[int]:
        now = [self._word(len(self.line) + i) for i in range(self.owed)]
        self.line += now
        self.owed = 0
        return now

    def ahead(self, drafts: Sequence[int]) -> list[int]:
        if not self.foresee:
            return []
        return [self._word(len(self.line) + len(drafts))] if 8 in drafts else []

    def rows(self) -> slice:
        return self.draft_rows

    def guesses(self, token: int, place: int) -> slice:
        return self.draft_rows

    def stops(self, token: int) -> bool:
        return token == 8

    def push(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.said.append(token)
            self.line.append(token)
            self.owed += token == 8
            self.owed += bool(self.every) and len(self.said) % self.every == 0
            self.done = self.done or len(self.said) >= self.limit

    def book(self, token: int) -> int | None:
        return None if token == 8 else token % 2

    def _word(self, place: int) -> int:
        return self.words[place % len(self.words)]
