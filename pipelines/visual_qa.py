"""What `video-qa` and `image-qa` share: read, prompt, reduce, generate, account."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from mmfast.attach import attach
from mmfast.core.errors import MmfastError
from mmfast.core.spec import parse
from mmfast.core.trace import Row, Trace, peak_bytes
from mmfast.models.counts import summed, token_counts
from mmfast.models.loading import load
from mmfast.models.prompt import Shot, build_inputs, check_question
from mmfast.models.timing import FirstToken, encoder_timer
from mmfast.pipelines.answer import Answer
from mmfast.pipelines.streaming import stream_text


class VisualQA:
    """Answer questions about images or clips with any supported checkpoint.

    Args:
        model: None (embedded), a directory, a hub id, or a `(model, processor)` pair.
        reduce: Spec string such as `"evs:0.25"` or `"divprune:0.5+fastv@llm3:0.5"`.
        cache: KV policy spec string.
        device: `cpu`, `cuda`, `cuda:1`; None picks CUDA where there is one.
        dtype: `auto`, `float32`, `bfloat16` or `float16`.
        frames: Frames sampled uniformly from a clip.
        fps: Sample at this rate instead.
        max_new_tokens: Longest answer in tokens.
        batch_size: Questions answered in one forward pass.
        **generate: Further arguments of the model's `generate`.

    Raises:
        SpecError: Wrong `reduce` or `cache`, before any weight is read.
        ModelError: The checkpoint cannot be loaded.
    """

    def __init__(
        self,
        model: Any = None,
        *,
        reduce: str | None = None,
        cache: str | None = None,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype = "auto",
        frames: int = 8,
        fps: float | None = None,
        max_new_tokens: int = 64,
        batch_size: int = 1,
        **generate: Any,
    ) -> None:
        parse(reduce)
        parse(cache, kind="cache")
        for name, value in (("max_new_tokens", max_new_tokens), ("batch_size", batch_size)):
            if not isinstance(value, int) or value < 1:
                raise MmfastError(
                    f"{name}={value!r} is not allowed; give a whole number of at least 1"
                )
        self.embedded = model is None
        self.reduce, self.cache = reduce, cache
        self.frames, self.fps = frames, fps
        self.batch_size = batch_size
        self.generate = {"max_new_tokens": max_new_tokens, "do_sample": False, **generate}
        self.model, self.processor = load(model, device, dtype)

    @abstractmethod
    def _read(self, media: Any) -> list[Shot]:
        """Decode what one question is about."""

    def __call__(self, media: Any, question: str | Sequence[str]) -> Any:
        """Answer one question, or a list of them.

        Args:
            media: A clip or image; a list of them gives a list of answers.
            question: A question; a list goes with a list of media, or with one that all share.

        Returns:
            An `Answer`, or a list of them where `media` or `question` is a list.

        Raises:
            MediaError: The input cannot be read.
            MmfastError: Empty question, or lists of different lengths.
        """
        pairs, many = pair_up(media, question)
        answers: list[Answer] = []
        for at in range(0, len(pairs), self.batch_size):
            answers += self._answer(pairs[at : at + self.batch_size])
        return answers if many else answers[0]

    def stream(self, media: Any, question: str) -> Iterator[str]:
        """Answer one question piece by piece.

        Yields:
            Text deltas; joined they are the text of the answer.
        """
        inputs, _ = self._inputs([(media, check_question(question))], Trace())
        return stream_text(self, inputs)

    def _inputs(
        self, pairs: list[tuple[Any, str]], trace: Trace
    ) -> tuple[dict[str, Any], list[int]]:
        """The model's inputs, and how many images or clips each question is about."""
        with trace.stage("read"):
            shots = [self._read(media) for media, _ in pairs]
        with trace.stage("preprocess"):
            questions = [question for _, question in pairs]
            inputs = build_inputs(self.processor, shots, questions, self.model.device)
        return inputs, [len(mine) for mine in shots]

    def _answer(self, pairs: list[tuple[Any, str]]) -> list[Answer]:
        start, reading, first = time.perf_counter(), Trace(), FirstToken()
        inputs, items = self._inputs(pairs, reading)
        begin = time.perf_counter()
        with (
            encoder_timer(self.model) as encode,
            attach(self.model, self.reduce, self.cache) as trace,
        ):
            output = self.run(inputs, streamer=first)
        end = time.perf_counter()
        kind = "video" if "pixel_values_videos" in inputs else "image"
        counts = summed(token_counts(self.model, kind, inputs, trace), items)
        prompt = inputs["input_ids"].shape[1]
        inside = sum(row.ms for row in trace.rows if row.stage != "vit")  # vit is part of encode
        trace.add("prefill", prompt, 1, (first.at - begin) * 1e3 - encode.ms - inside)
        trace.add("generate", 1, output.shape[1] - prompt, (end - first.at) * 1e3)
        visual = sum(n for n, _ in counts)
        trace.rows[:0] = [*reading.rows, Row("encode", visual, visual, encode.ms, peak_bytes())]
        texts = self.processor.batch_decode(output[:, prompt:], skip_special_tokens=True)
        ttft = (first.at - start) * 1e3
        return [
            Answer(text.strip(), trace, ttft, n, m)
            for text, (n, m) in zip(texts, counts, strict=True)
        ]

    def run(self, inputs: dict[str, Any], **extra: Any) -> torch.Tensor:
        """Stock greedy `generate`; a model must not write placeholder tokens into its answer."""
        config = self.model.config
        ids = [getattr(config, name, None) for name in ("image_token_id", "video_token_id")]
        blocked = [i for i in ids if i is not None]
        with torch.inference_mode():
            output: torch.Tensor = self.model.generate(
                **inputs, suppress_tokens=blocked or None, **self.generate, **extra
            )
        return output


def pair_up(media: Any, question: Any) -> tuple[list[tuple[Any, str]], bool]:
    """Pair media with questions; says whether the caller asked for a list.

    A list of arrays or PIL images with ONE question is one clip given as frames; a list of
    paths or bytes, or a list of questions, means several inputs.

    Raises:
        MmfastError: Lists of different lengths, an empty list, or an empty question.
    """
    if isinstance(question, (list, tuple)):
        several = isinstance(media, (list, tuple)) and not _is_frames(media, len(question))
        items = list(media) if several else [media] * len(question)
        if len(items) != len(question) or not items:
            raise MmfastError(
                f"{len(items)} media and {len(question)} questions; give one question per media"
            )
        return [(m, check_question(q)) for m, q in zip(items, question, strict=True)], True
    text = check_question(question)
    if isinstance(media, (list, tuple)) and media and not _is_frames(media, 1):
        return [(m, text) for m in media], True
    return [(media, text)], False


def _is_frames(media: Sequence[Any], questions: int) -> bool:
    if all(
        isinstance(m, (str, bytes)) or hasattr(m, "__fspath__") or hasattr(m, "read") for m in media
    ):
        return False
    # Arrays of rank 4 are clips; images and rank-3 arrays are frames of one clip unless there is
    # exactly one question for each.
    return getattr(media[0], "ndim", 3) == 3 and len(media) != questions
