"""Stock encoder-decoder model of text that translates, or goes on behind what it wrote."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mmfast.core.errors import ModelError, unknown
from mmfast.decoding.simultaneous import Hypothesis
from mmfast.models import loading

EMBEDDED = "tiny-translate"
LONGEST = 256  # tokens of a translation


class Translator:
    """A model such as Marian, T5, NLLB, M2M100 or BART with its tokenizer; greedy.

    Args:
        model: Encoder-decoder model of transformers for conditional generation.
        tokenizer: Its tokenizer.
        source, target: Codes of the languages, for tokenizers that have them, such as "eng_Latn".
        prefix: Text in front of every source, such as "translate English to German: ".

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
    ) -> None:
        self.model, self.tokenizer, self.prefix = model, tokenizer, prefix
        self._lock = threading.Lock()  # languages are a state of the tokenizer
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
        rows = iter(self._generate(said, self._start)[0] if said else ())
        begun = len(self._start)
        return [self.text(next(rows)[begun:].tolist()) if text.strip() else "" for text in texts]

    def unknown(self, text: str) -> list[str]:
        """Return the words of a text that the tokenizer has no tokens for."""
        number, words = self.tokenizer.unk_token_id, dict.fromkeys(text.split())
        return [word for word in words if number in self.tokenizer(word)["input_ids"]]

    def hypothesis(self, source: str, written: Sequence[int] = ()) -> Hypothesis:
        """Return how the translation of a text goes on behind the tokens written."""
        begin = [*self._start, *written]
        rows, scores = self._generate([source], begin)
        ids = rows[0, len(begin) :].tolist()
        chances = [float(row[0].softmax(-1)[i]) for row, i in zip(scores, ids, strict=False)]
        words = list(self._words(ids))
        return Hypothesis(
            tuple(self.text([ids[i] for i in word]) for word in words),
            tuple(min(chances[i] for i in word) for word in words),
            tuple(tuple(ids[i] for i in word) for word in words),
        )

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

    @torch.inference_mode()
    def _generate(self, texts: list[str], begin: Sequence[int]) -> tuple[Any, Any]:
        with self._lock:
            if self._source is not None:
                self.tokenizer.src_lang = self._source
            inputs = self.tokenizer(
                [self.prefix + text for text in texts], padding=True, return_tensors="pt"
            ).to(self.model.device)
            inputs.pop("token_type_ids", None)
            first = torch.tensor([list(begin)] * len(texts), device=self.model.device)
            made = self.model.generate(
                **inputs,
                decoder_input_ids=first,
                forced_bos_token_id=None,
                max_new_tokens=LONGEST,
                do_sample=False,
                num_beams=1,
                output_logits=True,
                return_dict_in_generate=True,
            )
        return made.sequences, made.logits


def load_translator(
    model: Any = None,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype = "auto",
    model_kwargs: Mapping[str, Any] | None = None,
    **languages: Any,
) -> Translator:
    """Load a directory or hub id with its tokenizer, or None, the embedded model.

    A `Translator`, or a `(model, tokenizer)` pair, is taken as it is. `languages` are the options
    of `Translator`. ModelError where files are missing, or the model is no encoder-decoder.
    """
    given = {name: value for name, value in languages.items() if value}
    if isinstance(model, Translator):
        return model
    if isinstance(model, tuple):
        return Translator(*model, **given)
    from transformers import AutoConfig, AutoModelForSeq2SeqLM, AutoTokenizer
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES as KINDS,
    )

    embedded = model is None or model == EMBEDDED
    where: str | Path = loading.embedded_path(EMBEDDED) if embedded else model
    kwargs = loading.check_kwargs(str(where), device, dtype, model_kwargs)
    hub = {name: kwargs[name] for name in loading.HUB if name in kwargs}
    place, how = loading.pick_device(device), loading.pick_dtype(dtype)
    if embedded and how == "auto":
        how = torch.float32  # its file has half of that
    with loading.loading(f"model {str(where)!r}"):
        kind = AutoConfig.from_pretrained(str(where), trust_remote_code=False, **hub).model_type
        if kind not in KINDS:
            raise ModelError(
                f"{str(where)!r} is of type {kind!r}, which is no encoder-decoder of text; give "
                "one such as Marian, T5, NLLB, M2M100 or BART"
            )
        loaded = loading.from_pretrained(AutoModelForSeq2SeqLM, str(where), place, how, kwargs)
        words = AutoTokenizer.from_pretrained(str(where), trust_remote_code=False, **hub)
    return Translator(loaded, words, **given)
