"""Prompts for `mmfast calibrate`: a user's own, or those of a generated suite."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from mmfast.bench.own_data import read_media, read_questions
from mmfast.core.errors import MmfastError, unknown
from mmfast.core.files import check_directory
from mmfast.models.adapters import base_named
from mmfast.models.loading import is_text_model, load
from mmfast.models.prompt import build_inputs, chat_inputs
from mmfast.models.text_chat import load_text
from mmfast.tiny.evaluate import Subject
from mmfast.tiny.scenes.evaluate import scene_cases
from mmfast.tiny.suites import SUITES, suite_of
from mmfast.tiny.text.evaluate import documents

CALIBRATING = (*SUITES, "scenes", "needles")  # suites whose prompts can be read
FRAMES = 8  # of a clip, as in `mmfast eval --data`
Inputs = dict[str, Any]


def load_pair(folder: str) -> tuple[Any, Any]:
    """Load a model with its processor, or a language model with its tokenizer."""
    from transformers import AutoConfig

    if base_named(folder) is not None:
        return load(folder, None, "auto")
    check_directory(folder)
    kind = AutoConfig.from_pretrained(folder, trust_remote_code=False).model_type
    return load_text(folder) if is_text_model(kind) else load(folder, None, "auto")


def own_prompts(pair: tuple[Any, Any], data: Path, count: int, length: int) -> Iterator[Inputs]:
    """At most `count` prompts of a file.

    A `.txt` is cut into pieces of `length` tokens; any other is read as questions of `mmfast eval
    --data`, with as many frames of a clip.
    """
    model, reader = pair
    if data.suffix == ".txt":
        try:
            text = data.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise MmfastError(f"cannot read {str(data)!r} ({error}); give a text") from None
        if not text.strip():
            raise MmfastError(f"{str(data)!r} holds no words; give a text to read prompts from")
        words = getattr(reader, "tokenizer", reader)
        ids = words(text, return_tensors="pt").input_ids.to(model.device)
        yield from ({"input_ids": some} for some in ids.split(length, 1)[:count])
        return
    for row in read_questions(data)[:count]:
        shots = read_media([data.parent / file for file in row["media"]], FRAMES)
        yield build_inputs(reader, [shots], [row["question"]], model.device)


def suite_prompts(
    pair: tuple[Any, Any], suite: str, count: int, length: int, seed: int = 0
) -> Iterator[Inputs]:
    """Make `count` prompts of a suite with media or documents that its evaluation does not show.

    Documents have `length` tokens.
    """
    model, reader = pair
    if suite not in CALIBRATING:
        raise MmfastError(unknown("suite", suite, CALIBRATING))
    if suite == "needles":
        for document in islice(documents(seed, length), count):
            ids = reader([document.text], add_special_tokens=True, return_tensors="pt").input_ids
            yield {"input_ids": ids.to(model.device)}
    elif suite == "scenes":
        for case in islice(scene_cases(seed), count):
            yield chat_inputs(reader, [case.chat(case.shot())], model.device)
    else:
        subject = Subject(pair, asked=suite_of(suite))
        for one in islice(subject.asked.cases(seed), count):
            yield subject.inputs([one])
