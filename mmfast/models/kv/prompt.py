"""Where the prompt ends: stock `generate` brings it whole, in chunks, or with drafts behind it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mmfast.models.patching import override


@dataclass(frozen=True)
class PromptPart:
    """The part of a prompt that one call of the model brings.

    Attributes:
        drafts: Tokens of the call behind the prompt, which may be taken back.
        rest: Tokens of the prompt that later calls bring.
        first: The prompt begins here.
    """

    drafts: int = 0
    rest: int = 0
    first: bool = True

    @property
    def last(self) -> bool:
        """Whether the prompt ends here."""
        return self.rest == 0


class _PromptState(threading.local):
    inside = False
    begin: int = 0
    end: int | None = None


class PromptTracker:
    """Tells prompts from decode steps, per thread, of one model."""

    def __init__(self) -> None:
        self._local = _PromptState()

    @contextmanager
    def told_by_generate(self, model: Any) -> Iterator[None]:
        """Let the `generate` of a model say how long its prompt is."""
        with ExitStack() as stack:
            if hasattr(model, "_prepare_model_inputs"):  # a base model does not generate
                stack.enter_context(override(model, "generate", self._generate))
                stack.enter_context(override(model, "_prepare_model_inputs", self._inputs))
            yield

    def part(self, past: int, length: int) -> PromptPart | None:
        """What a call brings of a prompt; None for a decode step.

        Args:
            past: Tokens of earlier calls.
            length: Tokens of this call.
        """
        local = self._local
        if not local.inside:  # the caller runs the model: several tokens are a prompt
            return PromptPart() if length > 1 else None
        if local.end is None or past >= local.end:
            return None
        behind = past + length - local.end
        return PromptPart(max(0, behind), max(0, -behind), past <= local.begin)

    def _generate(self, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        local = self._local
        before = local.inside, local.begin, local.end
        local.inside, local.end = True, None
        try:
            return stock(*args, **kwargs)
        finally:
            local.inside, local.begin, local.end = before

    def _inputs(self, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        ids, name, options = stock(*args, **kwargs)
        mask: Tensor | None = options.get("attention_mask")
        # A mask spans the cache too; without one, ids are those of the whole conversation.
        end = int((ids if mask is None else mask).shape[1])
        cache = options.get("past_key_values")
        past = 0 if cache is None else int(cache.get_seq_length())
        # An answer that goes on feeds its last token again: that is no prompt.
        self._local.begin = past
        self._local.end = None if past and end - past <= 1 else end
        return ids, name, options
