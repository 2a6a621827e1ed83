"""What the tests of the scheduler share: models, requests, and the stock answer one by one."""

from __future__ import annotations

import copy
import functools
import itertools
import queue
import random
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import tiny

from mmfast.models.loading import load
from mmfast.models.prompt import Shot, chat_inputs
from mmfast.serve.engine.base import (
    Delta,
    Event,
    Executor,
    Finish,
    Media,
    Message,
    Options,
    Request,
    SamplingOptions,
)
from mmfast.serve.engine.decode import DecodeBatch
from mmfast.serve.engine.runner import ModelRunner

EMBEDDED = "embedded"
_PLUGS = itertools.count()
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>\n{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% else %}{{ place[part['type']] }}"
    "{% endif %}{% endfor %}\n{% endfor %}{% if add_generation_prompt %}<assistant>\n{% endif %}"
)


@functools.cache
def model_of(family: str) -> tuple[Any, Any]:
    """A tiny random model with a chat template, or the embedded one; with its processor."""
    if family == EMBEDDED:
        return load(None, "cpu", "float32")  # type: ignore[return-value]
    this = tiny(family)
    processor = copy.copy(this.processor)
    places = {k: this.facts.placeholder(k) for k in this.facts.kinds if k != "audio"}
    processor.chat_template = "{% set place = " + repr(places) + " %}" + TEMPLATE
    return this.model, processor


def image(seed: int, size: tuple[int, int] = (40, 56)) -> Media:
    """A random image."""
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
    return Media(Shot("image", pixels), f"image-{seed}-{size}")


def clip(seed: int, frames: int = 4, size: tuple[int, int] = (40, 56)) -> Media:
    """A random clip of two frames a second."""
    rng = np.random.default_rng(seed + 1000)
    pixels = rng.integers(0, 256, (frames, *size, 3), dtype=np.uint8)
    facts = {
        "total_num_frames": frames,
        "fps": 2.0,
        "duration": frames / 2,
        "frames_indices": list(range(frames)),
        "width": size[1],
        "height": size[0],
    }
    return Media(Shot("video", pixels, facts), f"clip-{seed}-{frames}-{size}")


def ask(name: str, *parts: str | Media, tokens: int = 6, **more: Any) -> Request:
    """A request of one message."""
    return talk(name, [parts], tokens=tokens, **more)


def talk(
    name: str,
    turns: Sequence[Sequence[str | Media]],
    tokens: int = 6,
    sampling: SamplingOptions | None = None,
    **more: Any,
) -> Request:
    """A request of several messages, the user's first."""
    roles = ("user", "assistant")
    messages = tuple(Message(roles[i % 2], tuple(turn)) for i, turn in enumerate(turns))
    names = ("reduce", "cache", "target_ttft_ms", "prefill", "decode", "reuse")
    options = {k: more.pop(k) for k in names if k in more}
    return Request(
        name, messages, sampling or SamplingOptions(max_tokens=tokens), Options(**options), **more
    )


class Ear:
    """Hears the events of one request."""

    def __init__(self, executor: Executor, request: Request) -> None:
        self.events, self.name = list[Event](), request.id
        self._inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
        executor.submit(request, self._inbox.put)

    def next(self) -> Event:
        """The next event."""
        self.events.append(self._inbox.get(timeout=120))
        return self.events[-1]

    def wait(self) -> Event:
        """The last event."""
        while isinstance(self.next(), Delta):
            pass
        assert self._inbox.empty()
        return self.events[-1]

    @property
    def text(self) -> str:
        """What was said so far."""
        return "".join(event.text for event in self.events if isinstance(event, Delta))


def mixed(prefix: str = "") -> list[Request]:
    """Text, images, clips, both, several turns; all lengths differ."""
    return [
        ask(f"{prefix}a", image(1), "what?"),
        ask(f"{prefix}b", "hello there", tokens=9),
        ask(f"{prefix}c", image(2, (24, 24)), image(3, (24, 24)), "compare", tokens=3),
        ask(f"{prefix}d", clip(1), "what moves?", tokens=8),
        ask(f"{prefix}e", "a long one " * 30, tokens=12),
        talk(f"{prefix}f", [(image(1), "what?"), ("red",), (image(4), "and this?")], tokens=7),
        talk(f"{prefix}g", [(clip(2, 6), "what?"), ("left",), ("and now?",)], tokens=5),
        ask(f"{prefix}h", image(1), clip(1), "which one?", tokens=10),
    ]


def promised_bytes(patch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Bytes that a batch holds at its steps to come, and the most that was promised by then."""
    promised, found = [0], list[tuple[int, int]]()
    fits, rounds = ModelRunner.fits, DecodeBatch.rounds

    def promising(self: ModelRunner, answer: Any) -> bool:
        promised.append(self.worst([answer]) * self.per_token)
        return fits(self, answer)

    def noted(self: DecodeBatch) -> Any:
        found.append((self.nbytes, promised[-1]))
        return rounds(self)

    patch.setattr(ModelRunner, "fits", promising)
    patch.setattr(DecodeBatch, "rounds", noted)
    return found


def together(executor: Executor, requests: Sequence[Request]) -> list[Ear]:
    """Submit requests so that the engine meets all of them at once."""
    held, here = threading.Event(), threading.Event()

    def hold(event: Event) -> None:
        here.set()
        held.wait(60)

    executor.submit(ask(f"plug-{next(_PLUGS)}", "a", tokens=1), hold)
    assert here.wait(120)
    try:
        return [Ear(executor, request) for request in requests]
    finally:
        held.set()


def answers(executor: Executor, requests: Sequence[Request]) -> list[tuple[str, Event]]:
    """Texts and last events of requests that are answered together."""
    ears = together(executor, requests)
    ends = [ear.wait() for ear in ears]
    return [(ear.text, end) for ear, end in zip(ears, ends, strict=True)]


def stock(pair: tuple[Any, Any], request: Request) -> str:
    """The answer of stock `generate` to one request."""
    model, processor = pair
    chat = [message.chat for message in request.messages]
    inputs = chat_inputs(processor, [chat], model.device)
    config = model.config
    named = (getattr(config, f"{kind}_token_id", None) for kind in ("image", "video", "audio"))
    with torch.inference_mode():
        output = model.generate(
            **inputs,
            max_new_tokens=request.sampling.max_tokens,
            do_sample=False,
            suppress_tokens=[i for i in named if i is not None],
        )
    new = output[:, inputs["input_ids"].shape[1] :]
    found: str = processor.batch_decode(new, skip_special_tokens=True)[0]
    return found


def comings_and_goings(
    executor: Any, rng: random.Random, requests: Iterable[Request], pair: tuple[Any, Any]
) -> list[Finish]:
    """Send requests at random moments and cancel some; the ends of those that stay.

    Each of these says what stock `generate` of the model and processor does.
    """
    sent: list[tuple[Request, Ear, bool]] = []
    for request in requests:
        sent.append((request, Ear(executor, request), rng.random() < 0.3))
        time.sleep(rng.random() * 0.05)
        if sent[-1][2]:
            executor.cancel(request.id)
    ends: list[Finish] = []
    for request, ear, leaves in sent:
        end = ear.wait()
        if not leaves:
            assert isinstance(end, Finish), end
            assert ear.text == stock(pair, request), request.options
            ends.append(end)
    return ends
