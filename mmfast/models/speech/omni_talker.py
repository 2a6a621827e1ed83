"""Qwen2.5-Omni's talker beside the thinker: a code per pass, from the word that has just come.

Code k hears the thinker on word k + 1, so the talker can run one word behind it; behind the last
word it hears an end, then silence. Given the same words, its codes are those of the stock talker,
which `generate` runs when the thinker is done. `generate` of transformers 5.23 drops a mask of
ones, and the talker, which goes by that mask, then leaves out the codes that mark the start of
speech, and the positions of pictures and sound. They are there here; `parity=True` leaves them out,
too.

The thinker runs a token at a time. Positions are given to every pass: nothing is kept on the model,
so several streams may share it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmfast.core.errors import ModelError
from mmfast.models.cache_name import CACHE, returned_cache


@dataclass(frozen=True)
class Picking:
    """Settings of `generate` under their names there; greedy unless `do_sample`."""

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 50
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    seed: int = 0


TALKER = Picking(True, 0.9, 40, 0.8, 1.05)  # as the stock talker speaks


class Picker:
    """Picks the next token of one stream, never one of `suppress`; ModelError for a bad setting."""

    def __init__(self, how: Picking, suppress: list[int], device: torch.device) -> None:
        self.how = how
        self.processors = _processors(how, suppress, device)
        self.generator = torch.Generator(device=device).manual_seed(how.seed)

    def __call__(self, ids: Tensor, logits: Tensor) -> int:
        """From what came before `[1, n]` and logits `[1, V]`."""
        scores = logits.float()
        for processor in self.processors:
            scores = processor(ids, scores)
        if not self.how.do_sample:
            return int(scores.argmax(-1))
        return int(torch.multinomial(scores.softmax(-1), 1, generator=self.generator))


def _processors(how: Picking, suppress: list[int], device: torch.device) -> list[Any]:
    """In the order in which `generate` applies them."""
    from transformers.generation import logits_process as stock

    made: list[Any] = []
    try:
        if how.repetition_penalty != 1.0:
            made.append(stock.RepetitionPenaltyLogitsProcessor(float(how.repetition_penalty)))
        if suppress:
            made.append(stock.SuppressTokensLogitsProcessor(suppress, device=str(device)))
        if how.do_sample:
            made.append(stock.TemperatureLogitsWarper(float(how.temperature)))
            made.append(stock.TopKLogitsWarper(how.top_k))
            made.append(stock.TopPLogitsWarper(float(how.top_p)))
    except ValueError as error:
        raise ModelError(f"sampling of speech: {' '.join(str(error).split())}") from error
    return made


MEDIA = {
    "input_features": "audio_token_index",
    "pixel_values": "image_token_index",
    "pixel_values_videos": "video_token_index",
}
SPANS = ("image_grid_thw", "video_grid_thw", "video_second_per_grid", "use_audio_in_video")


@dataclass
class Thought:
    """Result of one pass of the thinker: the token it picked, None behind the last.

    `state` `[1, n, D]` is what it tells the talker of the tokens that went in.
    """

    state: Tensor
    token: int | None


@torch.no_grad()
def think(
    thinker: Any, inputs: dict[str, Any], picker: Picker | Iterator[int], ends: set[int], limit: int
) -> Iterator[Thought]:
    """Think pass by pass: the prompt, then each token that was picked, until one ends the answer.

    `inputs` is what the processor gives for one prompt, on its device; `picker` may be the tokens
    themselves (words to be said). Tokens in `ends` are not fed; `limit` is the most tokens.
    """
    ids = inputs["input_ids"]
    mask = inputs.get("attention_mask")
    mask = torch.ones_like(ids) if mask is None else mask
    positions, _ = place(thinker, ids, mask, inputs)
    media = {k: v for k, v in inputs.items() if k not in ("input_ids", "attention_mask")}
    cache: Any = None
    feed, extra, count = ids, media, 0
    while True:
        out = thinker(
            input_ids=feed,
            attention_mask=mask,
            position_ids=positions,
            **{CACHE: cache},
            use_cache=True,
            output_hidden_states=True,
            **extra,
        )
        cache = returned_cache(out)
        state = _told(thinker, feed, out.hidden_states, inputs if not count else {})
        token = _pick(picker, ids, out.logits[:, -1])
        yield Thought(state, token)
        count += 1
        if token is None or token in ends or count == limit:
            return
        feed, extra = ids.new_tensor([[token]]), {}
        ids, mask = torch.cat([ids, feed], 1), torch.cat([mask, mask.new_ones(1, 1)], 1)
        positions = positions[..., -1:] + 1


def place(model: Any, ids: Tensor, mask: Tensor, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Positions `[4, 1, n]` of a prompt, and how far later ones are ahead of theirs `[1, 1]`."""
    heard = inputs.get("feature_attention_mask")
    lengths = inputs.get("audio_feature_lengths") if heard is None else heard.sum(-1)
    grid = {name: inputs.get(name) for name in SPANS}
    spatial, delta = model.get_rope_index(
        ids,
        grid["image_grid_thw"],
        grid["video_grid_thw"],
        mask,
        bool(grid["use_audio_in_video"]),
        lengths,
        grid["video_second_per_grid"],
    )
    text = (mask.long().cumsum(-1) - 1).clamp(min=0)
    return torch.cat([text[None], spatial.to(text)]), delta.reshape(1, 1).to(text)


def _told(thinker: Any, feed: Tensor, states: tuple[Tensor, ...], inputs: dict[str, Any]) -> Tensor:
    """Last hidden state and embedding, added; of sound and pictures the state alone."""
    embedded = states[0]
    for name, index in MEDIA.items():
        if inputs.get(name) is not None:
            gone = feed == getattr(thinker.config, index)
            embedded = embedded.masked_fill(gone[..., None], 0)
    return states[-1] + embedded


def _pick(picker: Picker | Iterator[int], ids: Tensor, logits: Tensor) -> int | None:
    return picker(ids, logits) if isinstance(picker, Picker) else next(picker, None)


class Talker:
    """The codes of one reply.

    `voice` is an entry of `speaker_map`; codes in `ends` end the reply; `parity` leaves out what
    `generate` leaves out.
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
        """Yield code by code, `limit` at most.

        `prompt` `[1, n, D]` is what the thinker told of the prompt, `first` its first token.
        `words` gives what it told of each of its tokens `[1, 1, D]`; they are asked for when
        needed, and end behind the last.
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
            **{CACHE: self.cache},
            use_cache=True,
        )
        self.cache = returned_cache(out)
        logits: Tensor = talker.codec_head(out.last_hidden_state[:, -1])
        return logits

    def _word(self, token: int) -> Tensor:
        word: Tensor = self.embed(self.inputs["input_ids"].new_tensor([[token]]))
        return word


def _then(words: Iterator[Tensor], tail: list[Tensor]) -> Iterator[Tensor]:
    yield from words
    yield from tail
    while True:
        yield tail[-1]
