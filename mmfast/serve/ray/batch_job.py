"""What a run over a folder answers: the questions, the model, and what is reduced how far."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mmfast.core.errors import MmfastError
from mmfast.core.spec import parse
from mmfast.frontends.guard import quote
from mmfast.frontends.sampling import Ask
from mmfast.models.kv_plan import call_plan
from mmfast.models.loading import embedded_path, pick_device, pick_dtype
from mmfast.models.prompt import check_question

_EDGE = 1 << 20  # bytes of a weight file's start and end that tell it from another one


@dataclass(frozen=True)
class Job:
    """One job; two jobs that differ in `identity()` never share a file of answers.

    Attributes:
        folder: Of the media.
        questions: Asked about each of them.
        model: Directory or hub id; None is the embedded model.
        reduce: Spec string of reducers.
        cache: Spec string of cache policies.
        dtype: `auto`, `float32`, `bfloat16` or `float16`.
        frames: Frames sampled uniformly from a clip.
        fps: Sample at this rate instead.
        max_new_tokens: Longest answer in tokens.
        device: Where it runs; no part of the identity, and neither is the next.
        batch_size: Questions answered in one forward pass.
    """

    folder: Path
    questions: tuple[str, ...]
    model: str | None = None
    reduce: str | None = None
    cache: str | None = None
    dtype: str = "auto"
    frames: int = 8
    fps: float | None = None
    max_new_tokens: int = 64
    device: str | None = None
    batch_size: int = 1

    def check(self) -> None:
        """Refuse what can never run, before anything is read or started.

        Raises:
            MmfastError: One line; see `mmfast.core.errors`.
        """
        if not self.questions:
            raise MmfastError("no question: give --question TEXT or --questions FILE")
        for question in self.questions:
            check_question(question)
        if len(set(self.questions)) < len(self.questions):
            twice = next(q for q in self.questions if self.questions.count(q) > 1)
            raise MmfastError(f"question {quote(twice)} is given twice; drop one of them")
        parse(self.reduce)
        call_plan(self.cache)
        pick_dtype(self.dtype)
        pick_device(self.device)
        Ask.parse(None if self.fps else self.frames, self.fps, None)
        for name in ("max_new_tokens", "batch_size"):
            if getattr(self, name) < 1:
                raise MmfastError(
                    f"{name}={getattr(self, name)}; give a whole number of at least 1"
                )

    def identity(self) -> dict[str, Any]:
        """What the answers depend on, as JSON can say it."""
        known = asdict(self) | {"folder": str(self.folder), "questions": list(self.questions)}
        del known["device"], known["batch_size"]
        return known | {"weights": weights(self.model)}


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Which parts of two identities differ, for a message; "" where none does."""
    parts = []
    for name in sorted({*old, *new}):
        before, after = old.get(name), new.get(name)
        if before == after:
            continue
        told = name == "weights"
        parts.append("other weights" if told else f"{name} was {quote(before)}, is {quote(after)}")
    return "; ".join(parts)


def weights(model: str | None) -> str:
    """Tells checkpoints apart: of a directory its config and its weight files, else the name."""
    folder = embedded_path() if model is None else Path(model)
    if not folder.is_dir():
        return str(model)
    digest = hashlib.sha256()
    for file in [folder / "config.json", *sorted(folder.glob("*.safetensors"))]:
        if file.is_file():
            size = file.stat().st_size
            digest.update(f"{file.name} {size}\n".encode())
            with file.open("rb") as data:
                digest.update(data.read(_EDGE))
                data.seek(max(0, size - _EDGE))
                digest.update(data.read(_EDGE))
    return digest.hexdigest()


def read_questions(given: Sequence[str], file: Path | None) -> tuple[str, ...]:
    """The questions given one by one, then those of a file with one a line.

    Raises:
        MmfastError: The file cannot be read as text.
    """
    lines: list[str] = []
    if file is not None:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is no UTF-8 text"
            raise MmfastError(
                f"questions {quote(file)} cannot be read ({reason}); give a file, a question a line"
            ) from None
    return tuple(check_question(q) for q in given) + tuple(q.strip() for q in lines if q.strip())
