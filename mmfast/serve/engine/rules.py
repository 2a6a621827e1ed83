"""Rules of one answer for the choice of its tokens: penalties, biases, ends, grammar."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmfast.core.errors import MmfastError
from mmfast.serve.engine.base import SamplingOptions, TokenChance


def check_ids(given: SamplingOptions, size: int) -> None:
    """Raise `MmfastError` where the options name a token outside a vocabulary of `size`."""
    for name, ids in (
        ("logit_bias", [token for token, _ in given.logit_bias]),
        ("stop_token_ids", given.stop_token_ids),
    ):
        if wrong := [token for token in ids if not 0 <= token < size]:
            raise MmfastError(f"{name} names token {wrong[0]}; give ids from 0 to {size - 1}")


class TokenRules:
    """State of one answer beside its cache: the tokens so far, and the place in its grammar.

    `rows` changes and reads nothing but its own row of logits, so an answer does not depend on the
    other answers of a batch. `begin` is called once, before the first token.
    """

    def __init__(self, sampling: SamplingOptions) -> None:
        self._sampling = sampling
        self._tokens: Counter[int] = Counter()
        self._prompt: Tensor | None = None  # distinct tokens of the prompt
        self._raw: Tensor | None = None  # log-probabilities of the model at this place
        self._told: list[TokenChance] = []
        self._ends: tuple[int, ...] = ()
        self._tokenizer: Any = None
        self._matcher: Any = None

    def begin(self, tokenizer: Any, ends: Collection[int]) -> frozenset[int]:
        """Compile the grammar; return the tokens that end the answer.

        MmfastError: a token id outside the vocabulary, or a grammar that cannot be compiled.
        """
        given = self._sampling
        check_ids(given, len(tokenizer))
        own = () if given.ignore_eos and given.grammar is None else ends
        self._ends = tuple(sorted({*own, *given.stop_token_ids}))
        if given.logprobs is not None or given.grammar is not None:
            self._tokenizer = byte_tokenizer(tokenizer, self._ends)
        if given.grammar is not None:
            self._matcher = matcher(given.grammar, self._tokenizer)
        return frozenset(self._ends)

    def row(self, logits: Tensor, seen: Tensor | None, penalty: float) -> None:
        """Change the logits `[V]` of the next token in place.

        `seen` are the distinct tokens of the prompt, read before the first token; `penalty` is the
        repetition penalty of the model, which the request may replace.
        """
        given = self._sampling
        if given.logprobs is not None:
            self._raw = logits.log_softmax(-1)
        if not self._tokens:
            self._prompt = seen
        self._penalise(logits, penalty)
        for token, bias in given.logit_bias:
            logits[token] += bias
        if self._matcher is not None:
            logits[~self._allowed(len(logits)).to(logits.device)] = -torch.inf
        if self._tokens.total() < given.min_tokens:
            rest = logits.clone()
            rest[list(self._ends)] = -torch.inf
            if bool(torch.isfinite(rest.max())):  # a grammar may leave nothing but the end
                logits.copy_(rest)

    def _allowed(self, size: int) -> Tensor:
        """Return the tokens that the grammar takes here, `[V]` bool; the ends after its end."""
        found = np.zeros(size, bool)
        if self._matcher.is_stopped():
            found[list(self._ends)] = True
        else:
            bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
            known = np.unpackbits(bits, bitorder="little")[:size]
            found[: len(known)] = known
        return torch.from_numpy(found)

    def _penalise(self, logits: Tensor, penalty: float) -> None:
        given, tokens = self._sampling, self._tokens
        if given.repetition_penalty is not None:
            penalty = given.repetition_penalty
        said = torch.tensor(list(tokens), device=logits.device, dtype=torch.int64)
        if penalty != 1:
            both = said if self._prompt is None else torch.cat([self._prompt, said]).unique()
            old = logits[both]
            logits[both] = torch.where(old < 0, old * penalty, old / penalty)
        if tokens and (given.presence_penalty or given.frequency_penalty):
            counts = torch.tensor(list(tokens.values()), device=logits.device)
            logits[said] -= given.presence_penalty + given.frequency_penalty * counts

    def chosen(self, token: int) -> None:
        """Note the next token."""
        self._tokens[token] += 1
        if self._matcher is not None and not self._matcher.is_stopped():
            self._matcher.consume_token(token)
        if self._raw is None or self._sampling.logprobs is None:
            return
        best = self._raw.topk(self._sampling.logprobs)
        top = tuple(
            (self._bytes(other), chance)
            for other, chance in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        )
        if token not in self._ends:
            chance = TokenChance(self._bytes(token), float(self._raw[token]), top)
            self._told.append(chance)

    def told(self) -> tuple[TokenChance, ...]:
        """Return the log-probabilities that were not returned before."""
        found, self._told = tuple(self._told), []
        return found

    def _bytes(self, token: int) -> bytes:
        found: bytes = self._tokenizer.decode_bytes([token])
        return found


def needed(sampling: SamplingOptions) -> bool:
    """Return True if temperature, top-k, top-p and min-p alone do not state the choice."""
    plain = SamplingOptions()
    names: tuple[str, ...] = (
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "logit_bias",
    )
    names += ("min_tokens", "ignore_eos", "stop_token_ids", "logprobs", "grammar")
    return any(getattr(sampling, name) != getattr(plain, name) for name in names)


def matcher(grammar: str, tokenizer: Any) -> Any:
    """Return the matcher of a grammar of llguidance; MmfastError where it is none."""
    from llguidance import LLMatcher

    found = LLMatcher(tokenizer, grammar, log_level=0)
    if found.is_error():
        raise MmfastError(f"the format cannot be compiled: {found.get_error()}"[:300])
    return found


# Steps of a normalizer after which a text is another one.
_LOSSY = ("Lowercase", "NFC", "NFD", "NFKC", "NFKD", "StripAccents", "BertNormalizer", "Strip")


@lru_cache(maxsize=4)
def byte_tokenizer(tokenizer: Any, ends: tuple[int, ...]) -> Any:
    """Return the tokenizer of llguidance, which knows the bytes of each token.

    It writes the texts that a grammar forces without the steps that change letters: a key `Name`
    of a schema stays one for a tokenizer of lower case. MmfastError: the tokenizer is no fast one.
    """
    try:
        from llguidance import LLTokenizer
    except ImportError:
        text = 'logprobs and response_format need llguidance; pip install "mmfast[serve]"'
        raise MmfastError(text) from None
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise MmfastError(f"{type(tokenizer).__name__} is no fast tokenizer, which this needs")
    document = json.loads(backend.to_str())
    document |= {"truncation": None, "padding": None}
    steps = document.get("normalizer") or {}
    kept = [each for each in steps.get("normalizers", [steps]) if each.get("type") not in _LOSSY]
    kept = [each for each in kept if each]
    document["normalizer"] = {"type": "Sequence", "normalizers": kept} if kept else None
    return LLTokenizer(json.dumps(document), eos_token=list(ends) or tokenizer.eos_token_id)


def json_grammar(schema: Any) -> str:
    """Return the grammar of a JSON schema, with at most one space between two parts.

    A model that is unsure would write spaces for ever, and properties that a schema does not name
    are written only where it says so. MmfastError: the schema cannot be used.
    """
    from llguidance import LLMatcher

    made: str = LLMatcher.grammar_from_json_schema(
        json.dumps(_closed(schema)), defaults={"whitespace_pattern": r"[ \n]?"}
    )
    if error := LLMatcher.validate_grammar(made):
        raise MmfastError(f"the schema cannot be used: {' '.join(str(error).split())[:200]}")
    return made


def _closed(schema: Any) -> Any:
    """Close the objects of a schema that lists their properties; parts of `allOf` stay open."""
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    kept = ("allOf", "enum", "const", "default", "examples")
    maps = ("properties", "$defs", "definitions", "patternProperties", "dependentSchemas")
    found: dict[str, Any] = {}
    for name, value in schema.items():
        if name in maps and isinstance(value, dict):
            found[name] = {key: _closed(each) for key, each in value.items()}
        else:
            found[name] = value if name in kept else _closed(value)
    more = ("additionalProperties", "patternProperties", "unevaluatedProperties", "allOf", "$ref")
    if isinstance(schema.get("properties"), dict) and not any(name in schema for name in more):
        found["additionalProperties"] = False
    return found
