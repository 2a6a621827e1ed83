"""Qwen2.5-Omni's talker beside the thinker: a code per pass, from the word that has just come.

Code k hears the thinker on word k + 1, so the talker can run one word behind it; behind the last
word it hears an end, then silence. Given the same words, its codes are those of the stock talker,
which `generate` runs when the thinker is done.

One thing `generate` of transformers 5.23 does not do: it drops a mask of ones, and the talker,
which goes by that mask, then leaves out the codes that mark the start of speech, and the positions
of pictures and sound. They are there here; `parity=True` leaves them out, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from mmfast.models.omni_choice import Picker
from mmfast.models.omni_thinker import place


class Talker:
    """One reply.

    Args:
        model: A `Qwen2_5OmniForConditionalGeneration`.
        inputs: The thinker's.
        voice: An entry of `speaker_map`.
        picker: How codes are picked.
        ends: Codes that end the reply.
        parity: Leave out what `generate` leaves out.
    """

    def __init__(
        self,
        model: Any,
        inputs: dict[str, Any],
        voice: Any,
        picker: Picker,
        ends: set[int],
        parity: bool = False,
    ) -> None:
        self.model, self.talker, self.inputs = model, model.talker, inputs
        self.embed = model.thinker.get_input_embeddings()
        self.voice, self.picker, self.ends = voice, picker, ends
        self.parity = parity
        self.cache: Any = None

    @torch.no_grad()
    def talk(
        self, prompt: Tensor, first: int, words: Iterator[Tensor], limit: int
    ) -> Iterator[int]:
        """Code by code.

        Args:
            prompt: What the thinker told of the prompt `[1, n, D]`.
            first: Its first token.
            words: What it told of each of its tokens `[1, 1, D]`; asked for when needed, and
                ended behind the last.
            limit: Most codes.
        """
        talker = self.talker
        start = next(words)
        tail = [self._word(talker.text_eos_token), self._word(talker.text_pad_token)]
        heard = _then(words, tail)
        ids, embedded, positions, mask, delta = self._begin(prompt, first, start)
        for count in range(1, limit + 1):
            logits = self._step(embedded, positions, mask)
            code = self.picker(ids, logits)
            if code in self.ends:
                return
            yield code
            if count == limit:
                return
            last = ids.new_tensor([[code]])
            ids, mask = torch.cat([ids, last], 1), torch.cat([mask, mask.new_ones(1, 1)], 1)
            embedded = talker.get_input_embeddings()(last) + next(heard)
            positions = (mask.shape[1] - 1 + delta).expand(3, 1, 1)

    def _begin(self, prompt: Tensor, first: int, start: Tensor) -> tuple[Tensor, ...]:
        """The first pass: the prompt, the voice, the first word; with codes that mean a start."""
        talker, ids = self.talker, self.inputs["input_ids"]
        voice = ids.new_tensor([[int(self.voice["bos_token"])]])
        embedded = torch.cat([prompt, self.embed(voice), start], 1)
        marks = [talker.codec_pad_token, talker.codec_bos_token]
        codes = torch.cat(
            [torch.full_like(ids, talker.codec_mask_token), ids.new_tensor([marks])], 1
        )
        text = torch.cat([ids, voice, ids.new_tensor([[first]])], 1)
        mask = self.inputs.get("attention_mask")
        mask = torch.ones_like(ids) if mask is None else mask
        mask = torch.cat([mask, mask.new_ones(1, 2)], 1)
        if self.parity and bool(mask.all()):
            places = torch.arange(mask.shape[1], device=ids.device).expand(3, 1, -1)
            return codes, embedded, places, mask, ids.new_zeros(1, 1)
        added = talker.get_input_embeddings()(ids.new_tensor([marks]))
        embedded = torch.cat([embedded[:, :-2], embedded[:, -2:] + added], 1)
        places, delta = place(talker, text, mask, self.inputs)
        delta = delta - (1 - mask).sum(-1, keepdim=True)
        return codes, embedded, places[1:], mask, delta

    def _step(self, embedded: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        talker = self.talker
        out = talker.model(
            inputs_embeds=talker.thinker_to_talker_proj(embedded),
            position_ids=positions,
            attention_mask=mask,
            past_key_values=self.cache,
            use_cache=True,
        )
        self.cache = out.past_key_values
        logits: Tensor = talker.codec_head(out.last_hidden_state[:, -1])
        return logits

    def _word(self, token: int) -> Tensor:
        word: Tensor = self.embed(self.inputs["input_ids"].new_tensor([[token]]))
        return word


def _then(words: Iterator[Tensor], tail: list[Tensor]) -> Iterator[Tensor]:
    """The words, then the end, then silence for ever."""
    yield from words
    yield from tail
    while True:
        yield tail[-1]
