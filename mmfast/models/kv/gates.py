"""Gates of a model: how much its key heads will need a token, told from the state that enters.

One small gate stands beside each attention module. It is trained once, with the model as it is, on
the scores of `kvzip`, and replaces the passes that those take.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmfast.core.trace import Trace
from mmfast.models.kv.notes import GATED, score_new, warn_of_unscored
from mmfast.models.reduction.call import PassState

RANK, SINKS = 16, 16  # both as published
_LITTLE = 1e-6  # of a mean square
_SOME = 1024  # tokens of a training step


class KeyGate(nn.Module):
    """Attention of low rank of a token to itself, beside sinks that are learned.

    The state of a token gives a query for each query head and a key for each key head, both of
    `rank` channels and of one length. What the softmax over that key and the sinks gives to the key
    is the score, a mean over the query heads of a key head.
    """

    def __init__(
        self, width: int, heads: int, groups: int, rank: int = RANK, sinks: int = SINKS
    ) -> None:
        super().__init__()
        self.query = nn.Linear(width, heads * groups * rank)
        self.key = nn.Linear(width, heads * rank, bias=False)
        self.query_scale = nn.Parameter(torch.ones(rank))
        self.key_scale = nn.Parameter(torch.ones(rank))
        self.sinks = nn.Parameter(torch.zeros(heads, sinks, rank))
        self.bias = nn.Parameter(torch.zeros(heads, groups))

    def forward(self, states: Tensor) -> Tensor:
        """Return scores `[..., n, H]` in (0, 1) of states `[..., n, D]`."""
        return self.logits(states).sigmoid().mean(-1)

    def logits(self, states: Tensor) -> Tensor:
        """Return what the sigmoid makes weights of, by query head: `[..., n, H, G]`."""
        heads, groups = self.bias.shape
        rank = self.sinks.shape[-1]
        query = self.query(states).unflatten(-1, (heads, groups, rank))
        key = self.key(states).unflatten(-1, (heads, 1, rank))
        query = F.rms_norm(query, (rank,), self.query_scale, _LITTLE)
        key = F.rms_norm(key, (rank,), self.key_scale, _LITTLE)
        own = (query * key).sum(-1) / rank**0.5 + self.bias
        others = torch.einsum("...hgr,hsr->...hgs", query, self.sinks) / rank**0.5
        found: Tensor = own - others.logsumexp(-1)
        return found

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> KeyGate:
        """Build the gate whose `state_dict` is given; KeyError or RuntimeError where it is none."""
        heads, sinks, rank = tensors["sinks"].shape
        width = tensors["key.weight"].shape[1]
        gate = cls(width, heads, tensors["bias"].shape[1], rank, sinks)
        gate.load_state_dict({name: value.float() for name, value in tensors.items()})
        return gate.requires_grad_(False)


def train_gate(
    states: Tensor, scores: Tensor, groups: int, steps: int = 600, seed: int = 0
) -> KeyGate:
    """Train the gate of a layer on scores `[T, H]` in [0, 1] of tokens with states `[T, D]`.

    Binary cross-entropy, in batches that are drawn anew at every step, with AdamW.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        gate = KeyGate(states.shape[1], scores.shape[1], groups)
        nn.init.normal_(gate.sinks, std=0.5)  # equal sinks would stay equal
    optimiser = torch.optim.AdamW(gate.parameters(), lr=1e-2, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, max(steps, 1))
    with torch.enable_grad():
        for _ in range(steps):
            some = torch.randint(len(states), (min(_SOME, len(states)),), generator=generator)
            found = gate(states[some].float())
            loss = F.binary_cross_entropy(found, scores[some].float())
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
    return gate.requires_grad_(False)


class StateRecorder:
    """States that enter attention modules, by decoder layer, while a thread is in a call."""

    def __init__(self, modules: Mapping[int, nn.Module], state: PassState | None = None) -> None:
        self._modules, self._state, self._local = modules, state, threading.local()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Hooks in, hooks out."""
        look: Any = torch.compiler.disable(self._look)
        with ExitStack() as stack:
            for index, module in self._modules.items():
                hook = partial(look, index)
                stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
            yield

    def take(self, index: int) -> Tensor | None:
        """States `[B, n, D]` of a layer in the call that this thread is in."""
        found: Tensor | None = self._local.__dict__.pop(str(index), None)
        return found

    def _look(
        self, index: int, _: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        if self._state is None or self._state.active:
            given = kwargs.get("hidden_states")
            self._local.__dict__[str(index)] = (args[0] if given is None else given).detach()


class Gating(StateRecorder):
    """Scores that gates give the tokens that a cache gets, noted on its layers."""

    def __init__(
        self,
        modules: Mapping[int, nn.Module],
        gates: Mapping[int, KeyGate],
        state: PassState,
        trace: Trace,
    ) -> None:
        super().__init__(modules, state)
        self._gates, self._trace = gates, trace

    @torch.no_grad()
    def arrive(self, layer: Any, index: int) -> None:
        """Note the scores of the entries that a call has just stored in a layer."""
        states = self.take(index)
        if states is not None:
            scores = self._gates[index].to(states.device)(states.float())  # [B, n, H]
            unscored = score_new(layer, GATED, scores.transpose(1, 2).to(layer.keys.device))
            warn_of_unscored(self._trace, unscored, "scores tokens as they come")
