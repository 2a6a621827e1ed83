"""Stock encoder-decoder model of text that translates, or goes on behind what it wrote."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmfast.core.errors import ModelError, unknown
from mmfast.core.locks import WholeLock
from mmfast.decoding.simultaneous import Hypothesis
from mmfast.models import loading
from mmfast.models.interleaved import WRITE, InterleavedTranslator
from mmfast.models.patching import portable_state
from mmfast.models.stability import StabilityHead, load_head

EMBEDDED, EMBEDDED_INTERLEAVED = "tiny-translate", "tiny-interleaved"
LONGEST = 256  # tokens of a translation


class Translator:
    """A model such as Marian, T5, NLLB, M2M100 or BART with its tokenizer; greedy.

    Args:
        model: Encoder-decoder model of transformers for conditional generation.
        tokenizer: Its tokenizer.
        source, target: Codes of the languages, for tokenizers that have them, such as "eng_Latn".
        prefix: Text in front of every source, such as "translate English to German: ".
        head: What tells the words that stay, for the policy "learned:P".

    Raises:
        ModelError: The tokenizer does not have such a language, or has none to choose.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        source: str | None = None,
        target: str | None = None,
        prefix: str = "",
        head: StabilityHead | None = None,
    ) -> None:
        self.model, self.tokenizer, self.prefix = model, tokenizer, prefix
        self.head = None if head is None else head.to(model.device)
        self._lock = WholeLock()  # languages are a state of the tokenizer
        config = model.generation_config
        start = getattr(model.config, "decoder_start_token_id", None)
        start = config.decoder_start_token_id if start is None else start
        if start is None:
            raise ModelError(
                f"{type(model).__name__} names no decoder_start_token_id, so it cannot begin a "
                "translation; give a model trained to translate"
            )
        forced = config.forced_bos_token_id if target is None else self._language(target)
        self._source = source
        if source is not None:
            self._language(source)
        self._start = [start] if forced is None else [start, forced]

    def __getstate__(self) -> dict[str, Any]:
        return portable_state(self)

    def _language(self, code: str) -> int:
        words = self.tokenizer
        kinds = ("pad", "bos", "eos", "unk", "sep", "cls", "mask")
        plain = {getattr(words, f"{kind}_token", None) for kind in kinds}
        known = [str(token) for token in words.all_special_tokens if token not in plain]
        if not known:
            raise ModelError(
                f"language {code!r} cannot be chosen: the tokenizer of {type(self.model).__name__} "
                "has no codes of languages; leave source and target out"
            )
        for written in (code, f"__{code}__"):  # M2M100 writes languages so
            if written in known:
                return int(words.convert_tokens_to_ids(written))
        raise ModelError(unknown("language", code, [token.strip("_") for token in known]))

    def translate(self, texts: Sequence[str]) -> list[str]:
        """Translate whole texts as one batch; "" stays ""."""
        said = [text for text in texts if text.strip()]
        rows = iter(self._generate(said, self._start).sequences if said else ())
        begun = len(self._start)
        return [self.text(next(rows)[begun:].tolist()) if text.strip() else "" for text in texts]

    def unknown(self, text: str) -> list[str]:
        """Return the words of a text that the tokenizer has no tokens for."""
        number, words = self.tokenizer.unk_token_id, dict.fromkeys(text.split())
        return [word for word in words if number in self.tokenizer(word)["input_ids"]]

    def hypothesis(self, source: str, written: Sequence[int] = ()) -> Hypothesis:
        """Return how the translation of a text goes on behind the tokens written."""
        begin = [*self._start, *written]
        made = self._generate([source], begin, states=self.head is not None)
        rows, states, chances = self._traced(made, len(begin))
        ids, stays = rows[0].tolist(), chances[0]
        if self.head is not None:
            with torch.inference_mode():
                stays = self.head(states[0], chances[0]).sigmoid()
        words = list(self._words(ids))
        sure = [[float(row[i]) for i in range(len(ids))] for row in (chances[0], stays)]
        return Hypothesis(
            tuple(self.text([ids[i] for i in word]) for word in words),
            tuple(min(sure[0][i] for i in word) for word in words),
            tuple(tuple(ids[i] for i in word) for word in words),
            tuple(min(sure[1][i] for i in word) for word in words) if self.head else (),
        )

    def traced(self, texts: Sequence[str]) -> tuple[Tensor, Tensor, Tensor]:
        """Translate texts as one batch, and tell how.

        Returns:
            Tokens `[B, T]`, the last state of the decoder that each came of `[B, T, D]`, and its
            chance `[B, T]`.
        """
        made = self._generate([*texts], self._start, states=True)
        return self._traced(made, len(self._start))

    def _traced(self, made: Any, begun: int) -> tuple[Tensor, Tensor, Tensor]:
        ids = made.sequences[:, begun:]
        chances = torch.stack([step.float().softmax(-1) for step in made.logits], 1)
        chances = chances.gather(-1, ids[..., None])[..., 0]
        steps = [layers[-1][:, -1] for layers in made.decoder_hidden_states or ()]
        return ids, torch.stack(steps, 1) if steps else chances, chances

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of tokens."""
        found: str = self.tokenizer.decode(list(ids), skip_special_tokens=True)
        return found.strip()

    def _words(self, ids: Sequence[int]) -> Iterator[list[int]]:
        """Places of the tokens of each word: a word ends where the next token begins with a space.

        A text without spaces has a word for each token.
        """
        special, word = set(self.tokenizer.all_special_ids), list[int]()
        spaced = any(letter.isspace() for letter in self.text(ids))
        for place, token in enumerate(ids):
            if token in special:
                continue
            if word and (not spaced or self._parted(ids[word[0] : place], token)):
                yield word
                word = []
            word.append(place)
        if word:
            yield word

    def _parted(self, before: Sequence[int], token: int) -> bool:
        given = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        alone = self.tokenizer.decode([*before], **given)
        both = self.tokenizer.decode([*before, token], **given)
        return bool(both[len(alone) :][:1].isspace())

    def _room(self, source: int, begun: int) -> int:
        """Return how many tokens may be written; ModelError: there is no place for the source."""
        places: int | None = getattr(self.model.config, "max_position_embeddings", None)
        if places is None:
            return LONGEST
        if source > places or begun >= places:
            raise ModelError(
                f"a text of {max(source, begun)} tokens is too long: {type(self.model).__name__} "
                f"has {places} places; translate it in sentences"
            )
        return min(LONGEST, places - begun)

    @torch.inference_mode()
    def _generate(self, texts: list[str], begin: Sequence[int], states: bool = False) -> Any:
        with self._lock:
            if self._source is not None:
                self.tokenizer.src_lang = self._source
            inputs = self.tokenizer(
                [self.prefix + text for text in texts], padding=True, return_tensors="pt"
            ).to(self.model.device)
            inputs.pop("token_type_ids", None)
            most = self._room(inputs["input_ids"].shape[1], len(begin))
            first = torch.tensor([list(begin)] * len(texts), device=self.model.device)
            return self.model.generate(
                **inputs,
                decoder_input_ids=first,
                forced_bos_token_id=None,
                max_new_tokens=most,
                do_sample=False,
                num_beams=1,
                output_logits=True,
                output_hidden_states=states,
                return_dict_in_generate=True,
            )


AnyTranslator = Translator | InterleavedTranslator


def load_translator(
    model: Any = None,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype = "auto",
    model_kwargs: Mapping[str, Any] | None = None,
    **languages: Any,
) -> AnyTranslator:
    """Load a directory or hub id with its tokenizer, or None, the embedded model.

    A translator, or a `(model, tokenizer)` pair, is taken as it is; embedded ones go by name, too.
    `languages` are the options of `Translator`. ModelError where files are missing, or the model is
    neither an encoder-decoder nor a causal model with marks of reading and writing.
    """
    given = {name: value for name, value in languages.items() if value}
    if isinstance(model, AnyTranslator):
        return model
    if isinstance(model, tuple):
        loaded, words = model
        return _translator(loaded, words, given)
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    embedded = model is None or model in (EMBEDDED, EMBEDDED_INTERLEAVED)
    where: str | Path = loading.embedded_path(model or EMBEDDED) if embedded else model
    kwargs = loading.check_kwargs(str(where), device, dtype, model_kwargs)
    hub, place, how = loading.of_hub(kwargs), loading.pick_device(device), loading.pick_dtype(dtype)
    if embedded and how == "auto":
        how = torch.float32  # its file has half of that
    with loading.loading(f"model {str(where)!r}"):
        kind = AutoConfig.from_pretrained(str(where), trust_remote_code=False, **hub).model_type
        made = _class(str(where), kind)
        words = AutoTokenizer.from_pretrained(str(where), trust_remote_code=False, **hub)
        if made is AutoModelForCausalLM and WRITE not in words.get_vocab():
            raise ModelError(no_translator(str(where), kind))
        loaded = loading.from_pretrained(made, str(where), place, how, kwargs)
    if (head := load_head(where)) is not None and made is not AutoModelForCausalLM:
        given["head"] = head
    return _translator(loaded, words, given)


def no_translator(where: str, kind: str) -> str:
    """Return what to say of a model that cannot translate."""
    return (
        f"{where!r} is of type {kind!r}, which is no encoder-decoder of text; give one such as "
        "Marian, T5, NLLB, M2M100 or BART, or a causal model with the marks of "
        f"{EMBEDDED_INTERLEAVED}"
    )


def _class(where: str, kind: str) -> Any:
    """Return the class of transformers that loads a model of this type."""
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM
    from transformers.models.auto import modeling_auto as classes

    if kind in classes.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES:
        return AutoModelForSeq2SeqLM
    if kind in classes.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return AutoModelForCausalLM
    raise ModelError(no_translator(where, kind))


def _translator(model: Any, words: Any, languages: Mapping[str, Any]) -> AnyTranslator:
    if model.config.is_encoder_decoder:
        return Translator(model, words, **languages)
    if languages:
        raise ModelError(
            f"{', '.join(languages)}: {type(model).__name__} has no languages; leave it out"
        )
    return InterleavedTranslator(model, words)
