"""The forward pass at hand, and hooks that are in place only while a pass needs them.

Reduction happens in prompts; in a decode step hooks on a hundred layers would only cost time. A
pass that needs the hooks of the layers puts them in, and the next one that does not takes them out,
never under a pass of another thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import StaticLayer

from mmfast.core.errors import ModelError
from mmfast.core.locks import WholeLock
from mmfast.models.cache_name import cache_of, layered_cache_of
from mmfast.models.encoder_names import FEATURES
from mmfast.models.patching import CANDIDATES, override, stand_before
from mmfast.models.reduction.cache_layers import is_short
from mmfast.models.reduction.step import ForwardStep
from mmfast.models.wrappers import LayerCall, layers_of

_BY_TOKEN = ("input_ids", "position_ids", "cache_position", "mm_token_type_ids", "token_type_ids")


class Call:
    """One call of the base model that brings visual tokens, or several tokens to a short cache.

    `past` counts tokens of earlier calls (the cache itself counts on as soon as a layer has run);
    `step` is made from `kwargs` at the first decoder layer; `given` are arguments of the text
    model, where a site looks ahead; `stack` is closed when the call ends.
    """

    def __init__(self, kwargs: Mapping[str, Any]) -> None:
        self.kwargs: Mapping[str, Any] | None = kwargs
        cache = cache_of(kwargs)
        self.past = 0 if cache is None else int(cache.get_seq_length())
        self.step: ForwardStep | None = None
        self.given: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
        self.stack = ExitStack()


@dataclass(frozen=True)
class PromptPart:
    """The part of a prompt that one call of the model brings.

    `drafts` of its tokens stand behind the prompt and may be taken back; `rest` tokens come later.
    """

    drafts: int = 0
    rest: int = 0
    first: bool = True

    @property
    def last(self) -> bool:
        """The prompt ends here."""
        return self.rest == 0


class _PromptState(threading.local):
    inside = False
    begin: int = 0
    end: int | None = None
    stack: ExitStack  # of the `generate` at hand


class PromptTracker:
    """Distinguishes prompts from decode steps of one model, per thread."""

    def __init__(self) -> None:
        self._local = _PromptState()

    @contextmanager
    def told_by_generate(self, model: Any, guided: bool = False) -> Iterator[None]:
        """Take the length of a prompt from the `generate` of a model.

        ModelError in a call that reads a second prompt for guidance, unless such may be `guided`.
        """
        with ExitStack() as stack:
            if hasattr(model, "_prepare_model_inputs"):  # a base model does not generate
                around = partial(self._generate, model, guided)
                stack.enter_context(override(model, "generate", around))
                stack.enter_context(override(model, "_prepare_model_inputs", self._inputs))
                stack.enter_context(override(model, CANDIDATES, partial(self._drafted, model)))
            yield

    def part(self, past: int, length: int) -> PromptPart | None:
        """The part of a prompt that a call of `length` tokens brings; None for a decode step."""
        local = self._local
        if not local.inside:  # the caller runs the model: several tokens are a prompt
            return PromptPart() if length > 1 else None
        if local.end is None or past >= local.end:
            return None
        behind = past + length - local.end
        return PromptPart(max(0, behind), max(0, -behind), past <= local.begin)

    def _generate(
        self, model: Any, guided: bool, stock: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        config = kwargs.get("generation_config") or model.generation_config
        scale = kwargs.get("guidance_scale", getattr(config, "guidance_scale", None))
        if scale is not None and scale != 1 and not guided:
            raise ModelError(
                f"guidance_scale={scale} reads a second prompt inside generate, which cache= and "
                "cuts of text would take for a part of the first one; leave it out, or use reduce= "
                "on media alone"
            )
        local = self._local
        before = dict(local.__dict__)
        try:
            with ExitStack() as local.stack:
                local.inside, local.end = True, None
                return stock(*args, **kwargs)
        finally:
            local.__dict__.clear()
            local.__dict__.update(before)

    def _drafted(self, model: Any, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Watch the passes of a `generate` that verifies drafts, until it ends."""
        self._local.stack.enter_context(override(model, "forward", self._alone))
        return stock(*args, **kwargs)

    def _alone(self, stock: Callable[..., Any], **kwargs: Any) -> Any:
        """Read a prompt before the drafts that `generate` sends with it.

        Later drafts read what was left of the prompt; so must these.
        """
        cache, length = layered_cache_of(kwargs), length_of(kwargs)
        past = 0 if cache is None else int(cache.get_seq_length())
        part = self.part(past, length) if cache is not None else None
        if part is None or not part.drafts:
            return stock(**kwargs)
        prompt, drafts = _halves(kwargs, length, part.drafts)
        first, then = stock(**prompt), stock(**drafts)
        then.logits = torch.cat([first.logits, then.logits], 1)
        for name in ("hidden_states", "attentions"):
            if (layers := getattr(then, name, None)) is not None:
                pairs = zip(getattr(first, name), layers, strict=True)
                setattr(then, name, tuple(a if b is None else _rows(a, b) for a, b in pairs))
        return then

    def _inputs(self, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        ids, name, options = stock(*args, **kwargs)
        mask: Tensor | None = options.get("attention_mask")
        # A mask spans the cache too; without one, ids are those of the whole conversation.
        end = int((ids if mask is None else mask).shape[1])
        cache = layered_cache_of(options)
        past = 0 if cache is None else int(cache.get_seq_length())
        # An answer that goes on feeds its last token again: that is no prompt.
        self._local.begin = past
        self._local.end = None if past and end - past <= 1 else end
        return ids, name, options


def _halves(kwargs: dict[str, Any], length: int, drafts: int) -> tuple[dict[str, Any], ...]:
    """Arguments of a prompt, and of the `drafts` behind it: its media are in the prompt alone."""
    first, then = dict(kwargs), dict(kwargs)
    for name, value in kwargs.items():
        if name == "logits_to_keep" and isinstance(value, int) and value:
            first[name], then[name] = max(1, value - drafts), min(value, drafts)
        elif name == "attention_mask" and isinstance(value, Tensor):
            first[name] = value[:, :-drafts]
        elif name in _BY_TOKEN and isinstance(value, Tensor) and value.shape[-1] == length:
            first[name], then[name] = value[..., :-drafts], value[..., -drafts:]
        elif isinstance(value, Tensor) or name == FEATURES:
            del then[name]
    return first, then


def _rows(first: Tensor, then: Tensor) -> Tensor:
    """Rows `[.., n, m]` of two passes, one behind the other; the narrower ones end in zeros."""
    width = max(first.shape[-1], then.shape[-1])
    return torch.cat([F.pad(each, (0, width - each.shape[-1])) for each in (first, then)], -2)


class PassState(threading.local):
    """The pass that each thread is in; all hooks of one attached model share it.

    There is no `call` in a plain decode step, no `part` in any decode step or without a KV policy.
    `cache` is set while a KV policy is at work, `active` where keys and values are stored, too.
    `left` are the tokens that the latest call left (`training.Remainder`), None where all stayed.
    """

    call: Call | None = None
    part: PromptPart | None = None
    cache: Any = None
    active = False
    left: Any = None

    @property
    def padding(self) -> Tensor | None:
        """`[B, n]` False at padding of the new tokens; None where there is none."""
        return None if self.call is None or self.call.step is None else self.call.step.sequences.ok

    @property
    def has_media(self) -> bool:
        """The pass brings visual tokens."""
        return (
            self.call is not None
            and self.call.step is not None
            and bool(self.call.step.sequences.items)
        )


def apply(function: Any, *args: Any) -> Any:
    """`function(*args)`, for `torch.compiler.disable`."""
    return function(*args)


def is_shortened(cache: Any) -> bool:
    """Some layer of the cache was reduced."""
    return cache is not None and any(is_short(layer) for layer in cache.layers)


def needs_layers(cache: Any) -> bool:
    """A decode step must give some layer of the cache a mask of its own."""
    return cache is not None and any(getattr(layer, "uneven", False) for layer in cache.layers)


def is_static(cache: Any) -> bool:
    """The cache is written in place, as compiled decoding needs it."""
    return cache is not None and bool(cache.layers) and isinstance(cache.layers[0], StaticLayer)


def length_of(kwargs: Mapping[str, Any]) -> int:
    """Tokens per row that a call of the base model brings."""
    ids = kwargs.get("input_ids")
    return int((kwargs["inputs_embeds"] if ids is None else ids).shape[1])


class _ArmedState(threading.local):
    depth = 0


class Arming:
    """Puts hooks in and out between calls.

    A hook may be met by a call of another thread that does not need it, so it has to leave such a
    call alone. `idle` is True when a call has taken the hooks out: compiled code guards on it.
    Leaving for good does not count, or else code would be compiled anew at every `attach`.
    """

    def __init__(self, hooks: Callable[[], AbstractContextManager[Any]]) -> None:
        self._hooks = hooks
        self._lock = threading.Lock()  # of the counts
        self._change = WholeLock()  # of the hooks, which may ask torch
        self._held: AbstractContextManager[Any] | None = None
        self._running = 0  # calls of all threads
        self._pinned = False
        self._local = _ArmedState()
        self.idle = False

    def begin(self, needed: bool) -> None:
        """A call begins; `end` must follow, also after an exception."""
        with self._lock:
            if needed:
                self._arm()
            elif self._held is not None and not self._running and not self._pinned:
                self._disarm()
                self.idle = True
            self._running += 1
            self._local.depth += 1

    def end(self) -> None:
        """A call that may have begun in this thread ends."""
        if self._local.depth:
            with self._lock:
                self._local.depth -= 1
                self._running -= 1

    @contextmanager
    def installed(self) -> Iterator[None]:
        """In place at first, out for good at the end."""
        with self._lock:
            self._arm()
        try:
            yield
        finally:
            with self._lock:
                self._disarm()

    def pin(self) -> None:
        """In place until the end: calls follow that do not say what they need (compiled ones)."""
        with self._lock:
            self._pinned = True
            self._arm()

    def _arm(self) -> None:
        if self._held is None:
            with self._change:
                held = self._hooks()
                held.__enter__()
            self._held, self.idle = held, False

    def _disarm(self) -> None:
        if self._held is not None:
            held, self._held = self._held, None
            with self._change:
                held.__exit__(None, None, None)


@contextmanager
def on_layers(
    text: Any,
    first: int,
    before: Callable[..., Any],
    key: str | None = None,
    keep: Callable[..., Any] | None = None,
    after: Callable[..., Any] | None = None,
) -> Iterator[None]:
    """Hooks of a text model: before its layers from `first` on, before itself, after its last.

    The first two are called `key`, so that compiled code knows them again.
    """
    with ExitStack() as stack:
        layers = layers_of(text)
        for index in range(first, len(layers)):
            hook = LayerCall(layers[index]).around(partial(before, index))
            stack.callback(stand_before(layers[index], hook, key))
        if keep is not None:
            stack.callback(stand_before(text, keep, key))
        if after is not None:
            stack.callback(layers[-1].register_forward_hook(after).remove)
        yield
