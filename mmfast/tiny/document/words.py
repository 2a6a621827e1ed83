"""The decoder of pages: words that it reads as one token, and RoPE that turns slowly."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from mmfast.tiny.document import prints
from mmfast.tiny.video.model import wrapped

# Base of RoPE: under 1,000, that of tiny-video, all but 4 of 32 numbers of a head turn on a page,
# so that a question hardly finds what it names by content; it did not learn to in 70 minutes.
BASE = 1e5


def with_words(tokenizer: Any, words: Iterable[str]) -> PreTrainedTokenizerFast:
    """The tokenizer with each word as one token, alone and behind a space; other text unchanged."""
    core = tokenizer.backend_tokenizer
    for word in words:
        for text in (word, f" {word}"):
            pieces = core.encode(text, add_special_tokens=False).tokens
            known = json.loads(core.to_str())
            vocabulary, merges = known["model"]["vocab"], known["model"]["merges"]
            while len(pieces) > 1:  # behind all merges there are, so those come first
                merges.append(pieces[:2])
                pieces[:2] = ["".join(pieces[:2])]
                vocabulary.setdefault(pieces[0], len(vocabulary))
            core = Tokenizer.from_str(json.dumps(known))
    return wrapped(core)


def learn_words(model: Any, processor: Any) -> None:
    """Give model and processor the words of printed pages, where they lack them."""
    asked = re.findall(
        r"[a-z]+", " ".join(t for ts in prints.WORDINGS.values() for t in ts).lower()
    )
    processor.tokenizer = with_words(processor.tokenizer, dict.fromkeys((*prints.WORDS, *asked)))
    model.resize_token_embeddings(len(processor.tokenizer))


def turn_slowly(model: Any) -> None:
    """Give the decoder RoPE of base BASE."""
    lm = model.model.language_model
    lm.config.rope_parameters = {**lm.config.rope_parameters, "rope_theta": BASE}
    lm.rotary_emb = type(lm.rotary_emb)(lm.config).to(model.device)
