"""Accuracy on questions of one's own, a JSON object a line: `mmfast eval --data mine.jsonl`.

Generated text is compared with the accepted answers after normalisation. Of `choices`, the one
counts that the model gives as its whole answer with the highest probability: a sum over its tokens
and the end. A match of generated text would miss a right choice that comes in other words.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import re
import time
import unicodedata
from collections.abc import Callable, Sequence
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mmfast.attach import attach
from mmfast.bench.results import Row, append, code_of_specs, kept_rows, state_of
from mmfast.core.errors import MediaError, MmfastError, unknown
from mmfast.core.spec import parse
from mmfast.frontends.image import kind_of, read_image
from mmfast.frontends.video.reader import read_video
from mmfast.models.context import placeholders
from mmfast.models.cost import FirstToken, timed
from mmfast.models.families.adapter import check_media, token_counts
from mmfast.models.loading import embedded_path, load, located
from mmfast.models.prompt import Shot, build_inputs, check_question
from mmfast.models.reduction.inputs import encoded
from mmfast.streams.reply import stop_ids
from mmfast.tiny.evaluate import in_tower, interval
from mmfast.tiny.training import shares

KEYS = ("media", "question", "answer", "choices", "kind")
EXAMPLE = '{"media": "clip.mp4", "question": "What colour is the cross?", "answer": "white"}'
SCORING = {"answer": "match of generated text", "choices": "log-likelihood of each choice"}
_NUMBER = r"[-+]?(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+)(?:e[-+]?\d{1,3})?"
_TOKEN = re.compile(rf"(?<!\w)({_NUMBER})(?!\w)|[^\W_]+")
Way = tuple[str | None, str | None]  # a spec and a KV policy


def normal(text: str) -> tuple[object, ...]:
    """Words and numbers of a text without case, punctuation and articles, but never nothing.

    Numbers compare by value: 4.0 is 4, 1,000 is 1000.
    """
    text = unicodedata.normalize("NFKC", text).casefold().strip().replace("\u2212", "-")
    found = _TOKEN.finditer(re.sub(r"(?<=\w)['\u2019](?=\w)", "", text))
    words = [Decimal(m[1].replace(",", "")) if m[1] else m[0] for m in found]
    return tuple(w for w in words if w not in ("a", "an", "the")) or tuple(words) or (text,)


def mcnemar(first: Sequence[bool], second: Sequence[bool]) -> float:
    """Two-sided p of McNemar's exact test (1947) on paired right answers."""
    pairs = list(zip(first, second, strict=True))
    return _binomial(*sorted((pairs.count((True, False)), pairs.count((False, True)))))


@cache
def _binomial(fewer: int, more: int) -> float:
    """Two-sided p of a fair coin that fell so many times on either side."""
    tail = sum(math.comb(fewer + more, k) for k in range(fewer + 1))
    return min(1.0, float(2 * tail / 2 ** (fewer + more)))


def paired_interval(first: Sequence[bool], second: Sequence[bool], seed: int = 0) -> list[float]:
    """95 % interval of the difference in accuracy by 10,000 resamples of the questions."""
    found, n = [int(b) - int(a) for a, b in zip(first, second, strict=True)], len(first)
    # A draw of questions with replacement is a draw of how many get worse, stay and get better.
    return [*_resampled(n, found.count(-1), found.count(0), found.count(1), seed)]


@cache
def _resampled(n: int, worse: int, same: int, better: int, seed: int) -> tuple[float, float]:
    odds = [worse / n, same / n, better / n]
    drawn = np.random.default_rng(seed).multinomial(n, odds, 10_000)
    low, high = np.percentile((drawn[:, 2] - drawn[:, 0]) / n, [2.5, 97.5])
    return float(low), float(high)


def read_questions(path: Path) -> list[Row]:
    """Lines as {line, media, question, expected, choices, kind}; MmfastError names a wrong line."""
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "no UTF-8 text"
        raise MmfastError(f"cannot read {str(path)!r} ({why}); give lines like {EXAMPLE}") from None
    asked: list[Row] = []
    for number, line in enumerate(lines, 1):
        try:
            asked += [{"line": number, **_checked(json.loads(line))}] if line.strip() else []
        except (ValueError, RecursionError) as error:
            why = str(error) if isinstance(error, MmfastError) else f"no JSON ({error})"
            raise MmfastError(f"{path.name}, line {number}: {why}; write like {EXAMPLE}") from None
    if not asked:
        raise MmfastError(f"{str(path)!r} holds no question; give lines like {EXAMPLE}")
    return asked


def _checked(row: Any) -> Row:
    if not isinstance(row, dict):
        raise MmfastError("no JSON object")
    for key in row.keys() - KEYS:
        raise MmfastError(unknown("key", key, KEYS))
    for key in (key for key in KEYS[:3] if row.get(key) is None):
        raise MmfastError(f"{key!r} is missing")
    media = row["media"] if isinstance(row["media"], list) else [row["media"]]
    if not media or not all(isinstance(file, str) and file.strip() for file in media):
        raise MmfastError(f"media {row['media']!r} is no path and no list of paths")
    choices, expected = _texts(row.get("choices", [])), _texts(row["answer"])
    if "choices" in row and len(set(choices)) < max(2, len(choices)):
        raise MmfastError(f"choices {row['choices']!r} are not two or more different texts")
    if choices and isinstance(row["answer"], list):
        raise MmfastError("a list of accepted answers beside choices; give one answer")
    if not expected:
        raise MmfastError("answer [] accepts nothing")
    expected = [_choice(expected[0], choices)] if choices else expected
    kind = str(row.get("kind") or ("choices" if choices else "answer"))
    asked = {"media": media, "question": check_question(row["question"]), "expected": expected}
    return {**asked, "choices": choices, "kind": kind}


def _texts(value: Any) -> list[str]:
    items = value if isinstance(value, list) else [value]
    for each in items:
        if isinstance(each, bool | list | dict | None) or not str(each).strip():
            raise MmfastError(f"{each!r} is no answer; give a text or a number")
    return [str(each).strip() for each in items]


def _choice(answer: str, choices: Sequence[str]) -> str:
    """The choice that is meant by its text, else by its letter."""
    same = [each for each in choices if normal(each) == normal(answer)]
    letters = {chr(65 + place): each for place, each in enumerate(choices)}
    letter = answer.strip("(). ").upper()
    if answer not in choices and len(same) != 1 and letter not in letters:
        raise MmfastError(unknown("answer", answer, choices) + f"; or a letter to {max(letters)}")
    return answer if answer in choices else same[0] if len(same) == 1 else letters[letter]


def draw(asked: list[Row], n: int | None, seed: int) -> list[Row]:
    """Draw `n` questions, all for None; in the order of the file."""
    if n is None or n <= len(asked):
        drawn = asked if n is None else random.Random(seed).sample(asked, n)
        return sorted(drawn, key=lambda row: int(row["line"]))
    raise MmfastError(f"--n {n} of {len(asked)} questions; give at most {len(asked)}")


def read_media(files: Sequence[Path], frames: int) -> list[Shot]:
    """Decode what a question is about; MediaError where a file cannot be read."""
    kinds = {kind_of(file) for file in files}
    if len(kinds) > 1:
        raise MediaError(f"{[file.name for file in files]} mixes images and clips; give one kind")
    if kinds == {"image"}:
        return [Shot("image", read_image(file), None) for file in files]
    clips = [read_video(file, frames=frames) for file in files]
    return [Shot("video", clip.frames, clip.metadata()) for clip in clips]


class AskedModel:
    """A model that answers questions under several specs, the media encoded once."""

    def __init__(self, model: str | None, ways: Sequence[Way]) -> None:
        self.model, self.processor = load(model, None, "auto")
        stages = [stage for spec, _ in ways if not in_tower(parse(spec)) for stage in parse(spec)]
        self._needs = {need for stage in stages for need in stage.method.needs}

    def prepare(self, shots: Sequence[Shot], question: str) -> None:
        """Make the prompt and encode its media."""
        self._kind = shots[0].kind
        check_media(self.model, self._kind)
        self._raw = build_inputs(self.processor, [shots], [question], self.model.device)
        self._encoded, self._ms = timed(lambda: encoded(self.model, self._raw, self._needs))

    def answer(self, asked: Row, way: Way) -> Row:
        """Answer, whether it is right, visual tokens kept and milliseconds to the first token."""
        if not asked["choices"]:
            text, kept, ms = self._generate(way)
            right = normal(text) in map(normal, asked["expected"])
            return {"answer": text, "right": right, "kept": kept, "ttft_ms": ms}
        encode = self.processor.tokenizer
        ids = [encode(each, add_special_tokens=False)["input_ids"] for each in asked["choices"]]
        said = [self._generate(way, each) for each in ids]
        logs = [each[0] for each in said]
        text = asked["choices"][logs.index(max(logs))]
        row = {"answer": text, "right": text == asked["expected"][0], "kept": said[0][1]}
        return {**row, "ttft_ms": said[0][2], "log_likelihoods": logs}

    @torch.inference_mode()
    def _generate(self, way: Way, forced: Sequence[int] | None = None) -> tuple[Any, int, float]:
        """Text, or the log-likelihood of `forced` ids and the end; tokens kept; ms to the first."""
        inputs, ahead = (self._raw, 0.0) if in_tower(parse(way[0])) else (self._encoded, self._ms)
        ends, first = sorted(stop_ids(self.model)), FirstToken()
        how: dict[str, Any] = {"max_new_tokens": 64}
        how["suppress_tokens"] = sorted(placeholders(self.model)) or None
        if forced is not None:  # one token allowed at each step; the logits are those before that
            steps = iter([*forced, *ends[:1]])
            how = {"prefix_allowed_tokens_fn": lambda *_: [next(steps)], "output_logits": True}
            how |= {"max_new_tokens": len(forced) + len(ends[:1]), "return_dict_in_generate": True}
        with attach(self.model, *way) as trace:
            start = time.perf_counter()
            out = self.model.generate(**inputs, **how, do_sample=False, streamer=first)
        ms = ahead + (first.at - start) * 1e3
        kept = sum(n for _, n in token_counts(self.model, self._kind, self._raw, trace))
        if forced is None:
            new = out[0, self._raw["input_ids"].shape[1] :]
            return self.processor.decode(new, skip_special_tokens=True).strip(), kept, ms
        logs = torch.stack(out.logits)[:, 0].double().log_softmax(-1)  # [T, V]
        said = sum(float(log[token]) for log, token in zip(logs, forced, strict=False))
        return said + (float(logs[-1, ends].logsumexp(-1)) if ends else 0.0), kept, ms


def run_data(
    path: Path,
    ways: Sequence[Way],
    n: int | None = None,
    seed: int = 0,
    model: str | None = None,
    frames: int = 8,
    out: Path | None = None,
    strict: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
    resume: bool = True,
) -> tuple[Row, list[Row]]:
    """Ask `n` questions of a file (all by default, else drawn by `seed`) in several ways.

    The first way is what the others are compared with. Answers go to `out` one by one and, with
    `resume`, are not asked for again while file, media, checkpoint and methods stay. Media that
    cannot be read leave all rows and are listed in `failed`; with `strict` they raise a MediaError
    before a model is loaded.
    Returns the document of `mmfast eval --data --json` and a row for each answer.
    """
    asked, known = draw(read_questions(path), n, seed), kept_rows(out, "data") if resume else {}
    name, where = model or embedded_path().name, Path(located(model))
    base = [str(where.resolve()), state_of(where), frames]
    code = {way: code_of_specs(*way) for way in ways}
    subject: AskedModel | None = None
    rows, failed = list[Row](), list[Row]()

    def media(row: Row) -> list[Shot]:
        try:
            return read_media([path.parent / file for file in row["media"]], frames)
        except (OSError, ValueError) as error:
            raise MediaError(f"{path.name}, line {row['line']}: {error}") from None

    for row in asked if strict else ():
        media(row)
    for done, row in enumerate(asked, 1):
        files = [[file, state_of(path.parent / file)] for file in row["media"]]
        known_by = [json.dumps([base, {**row, "line": 0}, files, way, code[way]]) for way in ways]
        keys = [hashlib.sha256(each.encode()).hexdigest()[:32] for each in known_by]
        try:
            shots = media(row) if set(keys) - known.keys() else []
        except MediaError as error:
            failed.append({"line": row["line"], "media": row["media"], "error": str(error)})
            continue
        if shots:
            subject = subject or AskedModel(model, ways)
            subject.prepare(shots, row["question"])
            for key, way in zip(keys, ways, strict=True):
                if key not in known:
                    head = {"suite": "data", "key": key, "reduce": way[0], "cache": way[1]}
                    known[key] = {**head, **row, **subject.answer(row, way)}
                    append(out, [known[key]]) if out is not None else None
        rows += [{**known[key], "line": row["line"]} for key in keys]
        progress(done, len(asked))
    if not rows:
        raise MediaError(f"no question can be asked; {failed[0]['error']}")
    document = {"suite": "data", "n": len(asked), "seed": seed, "model": name}
    table = [_summary(rows, way, ways[0], seed) for way in ways]
    return {**document, "rows": table, "failed": failed, "scoring": SCORING}, rows


def _summary(rows: Sequence[Row], way: Way, first: Way, seed: int) -> Row:
    mine, before = ([r for r in rows if (r["reduce"], r["cache"]) == w] for w in (way, first))
    right, stock, n = [r["right"] for r in mine], [r["right"] for r in before], len(mine)
    row = {"reduce": way[0], "cache": way[1], "accuracy": sum(right) / n}
    row |= {"interval": interval(sum(right), n), "kept": sum(r["kept"] for r in mine) / n}
    row |= {"by_kind": shares((r["kind"], r["right"]) for r in mine)}
    row |= {"ttft_ms": sorted(r["ttft_ms"] for r in mine)[n // 2]}
    if way == first:
        return {**row, "difference": None, "difference_interval": None, "p": None}
    row |= {"difference": (sum(right) - sum(stock)) / n, "p": mcnemar(stock, right)}
    return {**row, "difference_interval": paired_interval(stock, right, seed)}
