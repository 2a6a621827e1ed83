"""A language model of text that answers a conversation piece by piece, for a voice around it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mmfast.core.errors import ModelError
from mmfast.core.speech import Turn
from mmfast.models import loading
from mmfast.models.context import check_length
from mmfast.models.kv.room import growing_cache
from mmfast.models.prompt import marked
from mmfast.models.text_stream import stream_text

LONGEST = 256  # tokens of an answer, unless the checkpoint says another number


class TextChat:
    """A stock causal language model with a chat template; a function of turns.

    The answer comes in pieces as it is written, drawn or greedy as the checkpoint's generation
    config says. ModelError: the tokenizer has no chat template.
    """

    def __init__(self, model: Any, tokenizer: Any) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ModelError(
                f"the tokenizer of this {type(model).__name__} has no chat template, so it is no "
                "model to talk to; give an instruction-tuned one, or chat= with a function"
            )
        self.model, self.tokenizer = model, tokenizer
        self.lock = threading.Lock()  # answers of one model come one after the other

    def __call__(self, turns: Sequence[Turn]) -> Iterator[str]:
        """Yield the answer to a conversation, oldest turn first; leaving early stops it."""
        chat, marks = self._marked(turns)
        text = self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        inputs = self.tokenizer(text, add_special_tokens=False, return_tensors="pt", **marks).to(
            self.model.device
        )
        check_length(self.model, inputs)
        most = self._options()

        def generate(streamer: Any, criteria: Any) -> None:
            with self.lock, torch.inference_mode():
                self.model.generate(**inputs, **most, streamer=streamer, stopping_criteria=criteria)

        return stream_text(self.tokenizer, generate)

    def _marked(self, turns: Sequence[Turn]) -> tuple[list[dict[str, str]], Mapping[str, Any]]:
        """Return what the chat template reads, and the arguments of what reads its marks."""
        said = [{"role": turn.role, "content": [turn.text]} for turn in turns]
        read, _, marks = marked(self.tokenizer, said, {})
        return [{**turn, "content": turn["content"][0]} for turn in read], marks

    def _options(self) -> dict[str, Any]:
        """Return the arguments of `generate`."""
        config = self.model.generation_config
        most: dict[str, Any] = {} if config.max_new_tokens else {"max_new_tokens": LONGEST}
        return most | growing_cache(self.model, {})


def load_text(
    model: str | Path,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype = "auto",
    model_kwargs: Mapping[str, Any] | None = None,
    classes: tuple[Any, Any] | None = None,
) -> tuple[Any, Any]:
    """Load a causal language model and its tokenizer: "tiny-text", a directory or a hub id.

    `classes` load another kind of model, and what reads for it. ModelError where files are missing.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    stock, reader = classes or (AutoModelForCausalLM, AutoTokenizer)
    where, given = loading.located(model), dict(model_kwargs or {})
    place, how, hub = loading.pick_device(device), loading.pick_dtype(dtype), loading.of_hub(given)
    with loading.loading(f"model {where!r}"):
        loaded = loading.from_pretrained(stock, where, place, how, given)
        return loaded, reader.from_pretrained(where, trust_remote_code=False, **hub)


def load_text_chat(
    model: str | Path,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype = "auto",
    model_kwargs: Mapping[str, Any] | None = None,
) -> TextChat:
    """Load a directory or hub id with its tokenizer; ModelError where files are missing."""
    return TextChat(*load_text(model, device, dtype, model_kwargs))
