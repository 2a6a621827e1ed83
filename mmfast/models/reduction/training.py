"""Training of an attached model: labels, places, layers that run again in the backward pass.

A loss compares logits `[B, m, V]` of the tokens that are left with labels `[B, L]` of all tokens,
so the loss function of the one attached model is given the labels of those that are left. What is
predicted behind a removed token is the next one that is left, as in a prompt written without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from mmfast.core.errors import ModelError
from mmfast.core.reduction import gather_rows
from mmfast.core.spec import Spec
from mmfast.core.trace import Trace
from mmfast.models.cache_name import CACHE, OLD
from mmfast.models.reduction.call import PassState, is_static
from mmfast.models.wrappers import base_of, layers_of

IGNORE = -100  # label of a token that takes no part in a loss
_LOSS = "_loss_function"  # where transformers keeps a loss function that was set
# On the position embeddings of a call: the change of the inputs of each layer.
_CHANGES = "_mmfast_changes"
_ALWAYS = CACHE == OLD  # up to 5.23 transformers checkpoints without gradients, too
# Methods of a model that switch it on and off end in `_enable` and `_disable`.
CHECKPOINTING = "activation_checkpointing"
if not hasattr(PreTrainedModel, f"{CHECKPOINTING}_enable"):  # before 5.23
    CHECKPOINTING = "gradient_checkpointing"
# Class of a model that reads the state at the last token of its whole prompt.
CLASSIFIER = "ForSequenceClassification"
Cuts = Sequence[Callable[[Tensor], Tensor]]


@dataclass(frozen=True)
class Remainder:
    """Tokens that a call left of `length` a row: places `[B, m]`, and `ok`, False at padding."""

    length: int
    index: Tensor
    ok: Tensor | None

    def follow(self, values: Tensor, fill: float = 0) -> Tensor:
        """Values `[B, L, …]` of the tokens as `[B, m, …]` of those left, `fill` at padding."""
        rows = torch.arange(len(values), device=values.device)[:, None]
        found = values[rows, self.index.to(values.device)]
        if self.ok is not None:
            found[~self.ok.to(values.device)] = fill
        return found

    def labels(self, labels: Tensor, ignore: int) -> Tensor:
        """Labels `[B, L]` as `[B, m]`; behind padding nothing predicts the first token of a row."""
        found = self.follow(labels, ignore)
        if self.ok is not None:
            first = self.ok & ~F.pad(self.ok, (1, 0), value=True)[:, :-1]
            found[first.to(found.device)] = ignore
        return found

    def next_labels(self, labels: Tensor, ignore: int) -> Tensor:
        """Labels `[B, L]` of the token behind each one as `[B, m]`, those of the next one left."""
        end = torch.full_like(self.index[:, :1], self.length)
        behind = Remainder(self.length, torch.cat([self.index[:, 1:], end], 1), self.ok)
        return behind.follow(F.pad(labels, (1, 0), value=ignore), ignore)

    def spread(self, states: Tensor) -> Tensor:
        """States `[B, m, D]` by place, `[B, L, D]`: a token that went has that of the one before.

        So the last token of a prompt has the state of the last one that is left.
        """
        index = self.index if self.ok is None else self.index.masked_fill(~self.ok, -1)
        places = torch.arange(self.length, device=index.device).expand(len(index), -1)
        rank = torch.searchsorted(index.contiguous(), places.contiguous(), right=True) - 1
        return gather_rows(states, rank.clamp_min(0).to(states.device))


class RemainderLoss:
    """The loss function of an attached model; gives its own one the labels of the tokens left."""

    def __init__(self, model: Any, state: PassState) -> None:
        self._model, self._state = model, state
        self._own: Any = None  # what was set on the model
        self._stock: Callable[..., Any]

    @contextmanager
    def installed(self) -> Iterator[None]:
        """In the place of the model's loss function, exactly undone."""
        self.stand()
        try:
            yield
        finally:
            space = self._model.__dict__
            if space.get(_LOSS) is self:
                del space[_LOSS]
                space.update({} if self._own is None else {_LOSS: self._own})

    def stand(self) -> None:
        """Stand in the place of the loss function, also of one that was set since."""
        space = self._model.__dict__
        able = self._model is not base_of(self._model) and hasattr(self._model, "loss_function")
        if able and space.get(_LOSS) is not self:
            self._own, self._stock = space.get(_LOSS), self._model.loss_function
            space[_LOSS] = self

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, logits: Any, labels: Any, *args: Any, **kwargs: Any) -> Any:
        """The loss of logits `[B, m, V]`; what runs along the prompt `[B, L]` is shortened."""
        left: Remainder | None = self._state.left
        if left is not None and labels.shape[:2] == (along := (len(left.index), left.length)):
            ignore = kwargs.get("ignore_index", IGNORE)
            for name, value in kwargs.items():
                if isinstance(value, Tensor) and value.shape[:2] == along:
                    shifted = name == "shift_labels"
                    kwargs[name] = (
                        left.next_labels(value, ignore) if shifted else left.follow(value)
                    )
            labels = left.labels(labels, ignore)
        if args:
            return self._stock(logits, labels, *args, **kwargs)
        return self._stock(logits=logits, labels=labels, **kwargs)


def checkpointed(layer: Any) -> bool:
    """Return True if a decoder layer runs again in the backward pass, and stores nothing."""
    learning = layer.training and (_ALWAYS or torch.is_grad_enabled())
    return learning and getattr(layer, "gradient_checkpointing", False)


def refuse_cache(layers: Iterable[Any], cache: Any) -> None:
    """Refuse a cache with a place for other keys than those of this call, which layers drop.

    Raises:
        ModelError: A layer is checkpointed, and the cache is static or has tokens.
    """
    if cache is None or not any(map(checkpointed, layers)):
        return
    held = int(cache.get_seq_length())
    if held or is_static(cache):
        raise ModelError(
            f"gradient checkpointing stores no keys and values, so this call cannot use its "
            f"{type(cache).__name__} of {held} tokens; run it under torch.no_grad(), leave out "
            f"{OLD}=, or call model.{CHECKPOINTING}_disable()"
        )


def refuse_places(module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Before an attached model: ModelError for logits at places, some of which may be gone."""
    if isinstance(kwargs.get("logits_to_keep"), Tensor):
        raise ModelError(
            "logits_to_keep as places counts the tokens of the whole prompt, and reduce= drops "
            "some; give the number of last tokens, or leave it out"
        )


def tell_constant(specs: Iterable[Spec], base: Any, text: Any, trace: Trace) -> None:
    """Warn of a compressor in training, whose vectors are constants for what computes its input.

    That is the vision tower and the projector, or for one of text the language model itself.
    """
    if not text.training or not (
        torch.is_grad_enabled() or any(map(checkpointed, layers_of(text)))
    ):
        return
    for spec in specs:
        if not spec.method.learned or spec.whole:
            continue
        inside = set() if spec.method.rate else {id(each) for each in text.parameters()}
        if any(each.requires_grad and id(each) not in inside for each in base.parameters()):
            name = spec.method.name
            trace.warn(
                f"{name} gives vectors without gradients: embeddings that it read are not learned "
                "through them"
                if spec.method.rate
                else f"{name} gives vectors without gradients: the vision tower and what is behind "
                "it learn nothing through them; freeze those, or train with a reducer"
            )


def note_change(
    layer: int, given: Mapping[str, Any], cuts: Cuts, kwargs: Mapping[str, Any]
) -> None:
    """Note the cuts before a layer in training and the arguments that are not as `given`.

    Up to transformers 5.22, and with `checkpoint_wrapper` of torch, hooks run again with a
    checkpointed layer, after the call has ended. All the layer then has of the call are the
    arguments, so the note is kept with those.
    """
    changed = {name: value for name, value in kwargs.items() if value is not given.get(name)}
    if changed:
        given["position_embeddings"][0].__dict__.setdefault(_CHANGES, {})[layer] = cuts, changed


def inputs_again(layer: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Inputs `(args, kwargs)` of a layer that runs again, changed alike; None in the first run."""
    given = kwargs.get("position_embeddings")
    known = {} if given is None else given[0].__dict__.get(_CHANGES, {})
    if layer not in known:
        return None
    cuts, changed = known[layer]
    hidden = args[0] if args else kwargs.pop("hidden_states")
    for cut in cuts:
        hidden = cut(hidden)
    return (hidden, *args[1:]), {**kwargs, **changed}
