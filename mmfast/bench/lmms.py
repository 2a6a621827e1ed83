"""Model plugin for lmms-eval: any supported checkpoint, with `reduce=` and `cache=`.

Beside the answers it reports time to first token and tokens per second of decoding alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from lmms_eval.api.instance import GenerationResult, TokenCounts
from lmms_eval.api.model import lmms
from lmms_eval.models.model_utils.gen_metrics import log_metrics
from lmms_eval.protocol import ChatMessages
from tqdm import tqdm

from mmfast.attach import attach
from mmfast.caches.plan import call_plan
from mmfast.core.errors import MmfastError
from mmfast.core.spec import parse
from mmfast.frontends.image import read_image
from mmfast.frontends.video.reader import read_video
from mmfast.models.cost import FirstToken
from mmfast.models.loading import load
from mmfast.models.prompt import Shot, chat_inputs

Chat = list[dict[str, Any]]


class Mmfast(lmms):  # type: ignore[misc]
    """A checkpoint under lmms-eval.

    `pretrained` is a directory or hub id, the embedded video model by default; `reduce` (such as
    `evs:0.25+fastv@llm3:0.5`) and `cache` are specs; `dtype` is `auto`, `float32`, `bfloat16` or
    `float16`. `batch_size` questions make one forward pass. A clip gives `max_num_frames` uniformly
    sampled frames, or `fps` a second; `system_prompt` stands in front of every conversation.
    """

    is_simple = False

    def __init__(
        self,
        pretrained: str | None = None,
        reduce: str | None = None,
        cache: str | None = None,
        device: str | None = None,
        dtype: str = "auto",
        batch_size: int | str = 1,
        max_num_frames: int = 8,
        fps: float | None = None,
        system_prompt: str | None = None,
        **unknown: Any,
    ) -> None:
        super().__init__()
        unknown.pop("max_batch_size", None)
        if unknown:
            raise MmfastError(
                f"unknown model_args {', '.join(sorted(unknown))}; choices: pretrained, reduce, "
                "cache, device, dtype, batch_size, max_num_frames, fps, system_prompt"
            )
        parse(reduce)
        call_plan(cache)
        self.reduce, self.cache = reduce, cache
        self.sampling = {"fps": float(fps)} if fps else {"frames": int(max_num_frames)}
        self.batch_size = 1 if batch_size == "auto" else int(batch_size)
        self.system = [{"role": "system", "content": [system_prompt]}] if system_prompt else []
        self.model, self.processor = load(pretrained, device, dtype)

    def generate_until(self, requests: Sequence[Any]) -> list[GenerationResult]:
        """Answer all requests; those with equal generation arguments share batches."""
        results: dict[int, GenerationResult] = {}
        meter = BatchMeter()
        bar = tqdm(total=len(requests), desc="mmfast", disable=self.rank != 0)
        for part in self._batches(requests):
            arguments = requests[part[0]].args[2]
            chats = [self._chat(requests[index].args) for index in part]
            for index, result in zip(part, self._answer(chats, arguments, meter), strict=True):
                results[index] = result
                self.cache_hook.add_partial("generate_until", requests[index].args, result.text)
            bar.update(len(part))
        bar.close()
        log_metrics(**meter.metrics())
        return [results[index] for index in range(len(requests))]

    def generate_until_multi_round(self, requests: Sequence[Any]) -> list[str]:
        """Refuse: rounds would need the cache of the round before."""
        raise NotImplementedError("mmfast answers single rounds; use tasks with generate_until")

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Refuse: reductions are measured on generated answers."""
        raise NotImplementedError("mmfast generates answers; use tasks with generate_until")

    def _batches(self, requests: Sequence[Any]) -> Iterator[list[int]]:
        def arguments(index: int) -> str:
            return repr(sorted(requests[index].args[2].items()))

        order = sorted(range(len(requests)), key=arguments)  # stable: documents keep their order
        for _, group in groupby(order, arguments):
            same = list(group)
            for start in range(0, len(same), self.batch_size):
                yield same[start : start + self.batch_size]

    def _chat(self, args: Sequence[Any]) -> Chat:
        _, to_messages, _, number, task, split = args
        messages = ChatMessages(messages=to_messages(self.task_dict[task][split][number]))
        chat = [
            {"role": message.role, "content": [self._part(part) for part in message.content]}
            for message in messages.messages
        ]
        return [*self.system, *chat]

    def _part(self, part: Any) -> Shot | str:
        if part.type == "text":
            return str(part.text)
        if part.type == "image":
            return Shot("image", read_image(part.url), None)
        if part.type == "video":
            clip = read_video(part.url, **self.sampling)
            return Shot("video", clip.frames, clip.metadata())
        raise MmfastError(f"a message holds {part.type!r}; mmfast reads text, image and video here")

    def _answer(
        self, chats: Sequence[Chat], arguments: Mapping[str, Any], meter: BatchMeter
    ) -> list[GenerationResult]:
        inputs = chat_inputs(self.processor, chats, self.model.device)
        options, stops = generation(arguments)
        first = FirstToken()
        streamer = {"streamer": first} if options["num_beams"] == 1 else {}
        start = time.perf_counter()
        with torch.inference_mode(), attach(self.model, self.reduce, self.cache):
            out = self.model.generate(**inputs, **options, **streamer)
        end = time.perf_counter()
        prompt = inputs["input_ids"].shape[1]
        new = out[:, prompt:]
        pad = self.processor.tokenizer.pad_token_id
        lengths = (new != pad).sum(1).tolist()
        meter.add(start, first.at, end, lengths)
        texts = self.processor.batch_decode(new, skip_special_tokens=True)
        return [
            GenerationResult(cut(text, stops), TokenCounts(prompt, length))
            for text, length in zip(texts, lengths, strict=True)
        ]


class BatchMeter:
    """Adds up times and tokens of batches."""

    def __init__(self) -> None:
        self.elapsed = self.decoding = 0.0
        self.tokens = self.later = self.requests = 0
        self.firsts: list[float] = []

    def add(self, start: float, first: float, end: float, lengths: Sequence[int]) -> None:
        """Add a batch: start of `generate`, first token (0 under beams), end, tokens per row."""
        self.elapsed += end - start
        self.requests += len(lengths)
        self.tokens += sum(lengths)
        if first:
            self.firsts.append((first - start) * 1e3)
            self.decoding += end - first
            self.later += sum(max(0, length - 1) for length in lengths)

    def metrics(self) -> dict[str, Any]:
        """Return figures under the names of lmms-eval, `ttft_ms` and `decode_tokens_per_second`."""
        firsts = sorted(self.firsts)
        more = {"ttft_ms": firsts[len(firsts) // 2]} if firsts else {}
        if self.later and self.decoding:
            more["decode_tokens_per_second"] = self.later / self.decoding
        speed = self.tokens / self.elapsed if self.elapsed else 0.0
        sums = {"total_elapsed_time": self.elapsed, "total_gen_tokens": self.tokens}
        additional = {"total_requests": self.requests, **more}
        return {**sums, "avg_speed": speed, "additional_metrics": additional}


def generation(arguments: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return arguments of `generate` from those of a task, and the stop strings."""
    until = arguments.get("until") or []
    temperature = float(arguments.get("temperature") or 0.0)
    options: dict[str, Any] = {"max_new_tokens": int(arguments.get("max_new_tokens", 64))}
    options |= {"num_beams": int(arguments.get("num_beams") or 1), "do_sample": temperature > 0}
    if temperature > 0:
        top_p = arguments.get("top_p")
        options |= {"temperature": temperature, **({} if top_p is None else {"top_p": top_p})}
    return options, [until] if isinstance(until, str) else list(until)


def cut(text: str, stops: Sequence[str]) -> str:
    """Return the text up to the first stop string."""
    for stop in stops:
        text = text.split(stop)[0] if stop else text
    return text.strip()
