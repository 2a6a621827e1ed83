"""Stock causal model that translates while it reads: source and target share one sequence.

Marks in the sequence say when to write and when to read, and one in front sets the latency, as in
interleaved simultaneous translation (2504.09570). Nothing in the sequence ever changes, so its keys
and values are computed once.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mmfast.core.errors import ModelError, SpecError, unknown
from mmfast.decoding.serialised import HEARD, SAID
from mmfast.models.cache_name import CACHE
from mmfast.models.patching import portable_state

WRITE, READ, END, JOINT = "<write>", "<read>", "<end>", "<joint>"
LATE = re.compile(r"<late:(\d+)>")
LONGEST = 64  # tokens that are written at once


def late_mark(words: int) -> str:
    """Return the mark that sets the latency of a sequence."""
    return f"<late:{words}>"


class InterleavedTranslator:
    """A causal model with its tokenizer, whose vocabulary has the marks of reading and writing.

    Args:
        model: Causal language model of transformers.
        tokenizer: Its tokenizer.

    Raises:
        ModelError: The tokenizer lacks a mark.
    """

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model, self.tokenizer = model, tokenizer
        known = tokenizer.get_vocab()
        self.latencies = tuple(sorted(int(m[1]) for m in map(LATE.fullmatch, known) if m))
        if lacking := [mark for mark in (WRITE, READ, END) if mark not in known]:
            raise ModelError(
                f"the tokenizer of {type(model).__name__} has no {lacking[0]}, so the model cannot "
                "read and write in turn; give one trained for it, or an encoder-decoder"
            )
        if not self.latencies:
            raise ModelError(f"the tokenizer of {type(model).__name__} has no <late:N>; train one")
        self.joint = all(mark in known for mark in (JOINT, HEARD, SAID))
        self.eos = int(tokenizer.eos_token_id)

    def __getstate__(self) -> dict[str, Any]:
        return portable_state(self)

    def number(self, mark: str) -> int:
        """Return the token of a mark."""
        return int(self.tokenizer.convert_tokens_to_ids(mark))

    def open(self, late: int, joint: bool = False) -> InterleavedSequence:
        """Return a sequence that reads so many words beyond those that a word needs.

        Raises:
            SpecError: The model was not trained for such a latency, or to write transcripts.
        """
        if late not in self.latencies:
            raise SpecError(unknown("latency", str(late), [str(n) for n in self.latencies]))
        if joint and not self.joint:
            raise SpecError(
                f"{type(self.model).__name__} writes no transcripts; choose interleaved:N"
            )
        return InterleavedSequence(self, late, joint)

    def translate(self, texts: Sequence[str]) -> list[str]:
        """Translate whole texts, one after the other; "" stays ""."""
        return [self._translate(text.split()) for text in texts]

    def _translate(self, words: Sequence[str]) -> str:
        if not words:
            return ""
        sequence = self.open(self.latencies[-1])
        sequence.read(words)
        sequence.finish()
        return self.text(sequence.written)

    def unknown(self, text: str) -> list[str]:
        """Return the words of a text that the tokenizer has no tokens for."""
        number, words = self.tokenizer.unk_token_id, dict.fromkeys(text.split())
        return [word for word in words if number in self.ids(word)]

    def ids(self, word: str) -> list[int]:
        """Return the tokens of a word."""
        return list(self.tokenizer(f" {word}", add_special_tokens=False)["input_ids"])

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, without marks."""
        found: str = self.tokenizer.decode(list(ids), skip_special_tokens=True)
        return found.strip()


class InterleavedSequence:
    """One sentence that is read and written; keys and values are only added.

    Attributes:
        ids: The whole sequence so far.
        written: Tokens of the translation, and of the transcript with its marks.
        passes: How often the model was asked.
        computed: Tokens whose keys and values were computed.
    """

    def __init__(self, translator: InterleavedTranslator, late: int, joint: bool) -> None:
        from transformers import DynamicCache

        self._translator, self._cache = translator, DynamicCache(config=translator.model.config)
        begin = translator.tokenizer.bos_token_id
        marks = [late_mark(late), *([JOINT] if joint else [])]
        self.ids = [*([] if begin is None else [int(begin)]), *map(translator.number, marks)]
        self.written: list[int] = []
        self.passes = self.computed = 0
        self._over = False
        self._write, self._read = translator.number(WRITE), translator.number(READ)
        size = translator.model.get_output_embeddings().weight.shape[0]
        allowed = torch.ones(size, dtype=torch.bool)
        allowed[[i for i in translator.tokenizer.all_special_ids if i < size]] = False
        if joint:
            allowed[[translator.number(HEARD), translator.number(SAID)]] = True
        self._allowed = allowed.to(translator.model.device)

    def read(self, words: Sequence[str]) -> list[int]:
        """Read words of the source, each after the other; return the tokens written between."""
        found = list[int]()
        for word in words:
            self.ids += self._translator.ids(word)
            chances = self._step().softmax(-1)
            if float(chances[self._write]) >= 0.5:
                self.ids.append(self._write)
                found += self._go_on(self._read)
        return found

    def finish(self) -> list[int]:
        """End the source; return the tokens of the rest of the translation."""
        if self._over:
            return []
        self._over = True
        self.ids.append(self._translator.number(END))
        return self._go_on(self._translator.eos)

    def _go_on(self, last: int) -> list[int]:
        """Write up to the mark `last`, which is added to the sequence, too."""
        found, allowed = list[int](), self._allowed.clone()
        allowed[last] = True
        for _ in range(LONGEST):
            token = int(self._step().masked_fill(~allowed, -torch.inf).argmax())
            if token == last:
                break
            self.ids.append(token)
            found.append(token)
        self.ids.append(last)
        self.written += found
        return found

    @torch.inference_mode()
    def _step(self) -> Tensor:
        """Add what is new to the cache; return the logits `[V]` behind it."""
        new = self.ids[self.computed :]
        model = self._translator.model
        output = model(
            input_ids=torch.tensor([new], device=model.device),
            use_cache=True,
            logits_to_keep=1,
            **{CACHE: self._cache},
        )
        self.passes += 1
        self.computed += len(new)
        logits: Tensor = output.logits[0, -1].float()
        return logits
