"""Drafts of the first layers of a model and a small adapter behind them.

Kangaroo (Liu et al., arXiv 2404.18911): the states behind an early layer go through one attention
layer with a norm in front of it and one behind, and the model's own head reads tokens off them. The
draft needs no prompt and no cache of its own for the layers: it reads on in the keys and values
that the model holds, and what it adds goes before the model verifies. Only the adapter remembers
keys and values of its own, made of the states that pass by.

The verifying pass computes the first layers of the drafts once more: stock models take no states in
the middle.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmfast.compressors.base import placed, read_module
from mmfast.core.errors import ModelError
from mmfast.decoding.row import DraftLength
from mmfast.decoding.speculation import TRAINING, DecodePlan, check_exit
from mmfast.models.decoder.drafters import BatchText, DraftRun, ModelDrafter
from mmfast.models.decoder.reader import SequenceReader
from mmfast.models.wrappers import decoder_of, layers_of
from mmfast.ops.attention import rotate_at


class ExitAdapter(nn.Module):
    """One attention layer and two norms behind the first `layer` layers of a model.

    Positions are rotary and count places of the sequence, padding included: only their differences
    matter. An untrained adapter adds nothing, so that the head reads the states as they are.
    """

    name = "exit"

    def __init__(self, width: int, layer: int, *, heads: int = 4) -> None:
        super().__init__()
        self.config = {"width": width, "layer": layer, "heads": heads}
        self.layer, self._heads = layer, heads
        self.before, self.behind = nn.RMSNorm(width, 1e-6), nn.RMSNorm(width, 1e-6)
        self.query, self.key, self.value, self.out = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )
        nn.init.zeros_(self.out.weight)

    def forward(
        self,
        states: Tensor,
        past: tuple[Tensor, Tensor] | None = None,
        known: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """States for the head `[B, n, D]`, and keys and values `[B, H, S, d]` with the new ones.

        Args:
            states: Behind layer `layer`, `[B, n, D]`.
            past: Keys and values of the places before.
            known: False at padding among all S places, `[B, S]`; None is no padding.
        """
        start = 0 if past is None else past[0].shape[2]
        places = torch.arange(start, start + states.shape[1], device=states.device)
        q, k, v = self.heads(states, places)
        if past is not None:
            k, v = torch.cat([past[0], k], dim=2), torch.cat([past[1], v], dim=2)
        slots = torch.arange(k.shape[2], device=k.device)
        here = slots[start:, None]
        mask = (slots <= here)[None]
        if known is not None:
            mask = mask & known[:, None] | (slots == here)  # padding sees itself, not nothing
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None])
        return self.mixed(states, mixed.transpose(1, 2)), (k, v)

    def heads(self, states: Tensor, places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values `[B, H, n, d]` of states `[B, n, D]` at places `[n]`."""
        x = self.before(states)
        q, k, v = (
            each(x).unflatten(-1, (self._heads, -1)).transpose(1, 2)
            for each in (self.query, self.key, self.value)
        )
        return rotate_at(q, places), rotate_at(k, places), v

    def mixed(self, states: Tensor, attended: Tensor) -> Tensor:
        """States for the head `[B, n, D]`, from what the heads attended to, `[B, n, H, d]`."""
        found: Tensor = self.behind(states + self.out(attended.flatten(2)))
        return found


def new_adapter(model: Any, layer: int) -> ExitAdapter:
    """Return an untrained adapter: the exit alone, under the final norm of the model.

    ModelError: the model has no such layer to leave at.
    """
    decoder = decoder_of(model)
    count, config = len(layers_of(decoder)), model.config.get_text_config()
    if not 1 <= layer < count:
        raise ModelError(
            f"an exit behind layer {layer} of {count} drafts nothing; choose 1 to {count - 1}"
        )
    width = int(config.hidden_size)
    heads = next(n for n in range(int(config.num_attention_heads), 0, -1) if not width % (2 * n))
    adapter = ExitAdapter(width, layer, heads=heads)
    norms = [getattr(decoder, name, None) for name in ("norm", "final_layer_norm")]
    norm = next((each for each in norms if each is not None), None)
    if norm is not None:
        place = next(norm.parameters())
        with torch.no_grad():
            # Of ones, a norm by the mean square gives its scale, however it keeps its weights.
            scale = norm(torch.ones(1, 1, width, device=place.device, dtype=place.dtype))[0, 0]
            if float(scale.abs().max()) > 1e-3:
                adapter.behind.weight.copy_(scale)
    return adapter


def read_exit(path: str | Path) -> ExitAdapter:
    """Read an adapter, on the CPU in float32; ModelError where the file is none."""
    found: ExitAdapter = read_module(path, "adapter of an early exit", ExitAdapter)
    return found


def load_exit(path: str, model: Any) -> ExitAdapter:
    """Read the adapter for a model; ModelError where there is none, or it is another model's."""
    check_exit(path)
    adapter: ExitAdapter = placed(path, model.device, model.dtype, read_exit)
    width, count = model.config.get_text_config().hidden_size, len(layers_of(decoder_of(model)))
    if adapter.config["width"] != width or adapter.layer >= count:
        raise ModelError(
            f"the adapter {path!r} is for states of width {adapter.config['width']} behind layer "
            f"{adapter.layer}, and {type(model).__name__} has {count} layers of width {width}; "
            f"train one with `{TRAINING} --model DIR`"
        )
    return adapter


class _ExitReached(Exception):  # noqa: N818 (it is a way out, and no error)
    """Leaves a pass of the model behind the layer of an exit."""

    def __init__(self, states: Tensor) -> None:
        super().__init__("left behind an early layer")
        self.states = states


class ExitStates:
    """States behind one layer of a model, as the passes of one call and its thread go by.

    `found` are those of whole passes, with the number of new tokens that `reader` held before; a
    pass that `leaves` ends there.
    """

    def __init__(self) -> None:
        self.found: list[tuple[int, Tensor]] = []
        self.reader: SequenceReader | None = None
        self.leaves = False
        self._thread = threading.get_ident()

    @contextmanager
    def watched(self, model: Any, layer: int) -> Iterator[None]:
        """Watch a model for one call of `generate`."""
        handle = layers_of(decoder_of(model))[layer - 1].register_forward_hook(self._note)
        try:
            yield
        finally:
            handle.remove()
            self.found, self.reader = [], None

    def _note(self, _module: Any, _args: Any, output: Any) -> None:
        if threading.get_ident() != self._thread:  # another call on the same model
            return
        states: Tensor = (output[0] if isinstance(output, tuple) else output).detach()
        if self.leaves:
            raise _ExitReached(states)
        self.found.append((0 if self.reader is None else self.reader.held, states))


class ExitReader:
    """The first layers of a model with an adapter, as a model of its own.

    It reads into the model's own cache; `leave` takes what it has read out again.
    """

    def __init__(self, reader: SequenceReader, states: ExitStates, adapter: ExitAdapter) -> None:
        if not reader.whole:
            raise ModelError(
                "decode='exit:FILE' reads on in the cache of the first layers, which needs full "
                "attention in all layers; use decode='recycle'"
            )
        self.model, self.held = reader.model, 0
        self._main, self._states, self._adapter = reader, states, adapter
        self._own = reader.beside(reader.cache)
        self._head = reader.model.get_output_embeddings()
        # The prompt may come in several passes; what the adapter keeps of it comes first.
        prompt = torch.cat([each for _, each in states.found], dim=1)
        mask, length = reader.prompt_mask, prompt.shape[1]
        # Of a cache to go on from, the adapter has not seen the turns before.
        self._mask = None if mask is None else mask[:, -length:].bool()
        states.found, states.reader = [], reader
        self._prompt = length
        _, self._past = adapter(prompt, None, self._mask)

    def sync(self) -> None:
        """Take over the states of the tokens that the model holds."""
        past = self._past[0].shape[2]
        new: Tensor | None = None
        for start, states in self._states.found:
            place = self._prompt + start - past
            new = states if new is None or place <= 0 else torch.cat([new[:, :place], states], 1)
        self._states.found.clear()
        count = self._prompt + self._main.held - past
        if new is not None and count > 0:
            _, self._past = self._adapter(new[:, :count], self._past, self._known(new[:, :count]))
        self.held = self._main.held

    @torch.no_grad()
    def read(self, tokens: Tensor, depths: Tensor | None = None, mask: Any = None) -> Tensor:
        """Read tokens `[B, n]` in the first layers; returns their logits `[B, n, V]` float32."""
        self._own.held, self._states.leaves = self.held, True
        try:
            self._own.run(tokens, depths, mask)
            raise ModelError("the model did not pass the layer of the early exit")
        except _ExitReached as reached:
            states = reached.states
        finally:
            self._states.leaves = False
        self.held += tokens.shape[1]
        found, self._past = self._adapter(states, self._past, self._known(states))
        logits: Tensor = self._head(found)
        return logits.float()

    def rewind(self, held: int) -> None:
        """Forget tokens behind the first `held` new ones."""
        gone = self.held - held
        for layer in self._main.cache.layers[: self._adapter.layer] if gone else ():  # not to 0
            layer.crop(-gone)
        keys, values = self._past
        length = self._prompt + held
        self._past, self.held = (keys[:, :, :length], values[:, :, :length]), held

    def leave(self) -> None:
        """Leave the cache as the model holds it."""
        self.rewind(self._main.held)

    def _known(self, states: Tensor) -> Tensor | None:
        """False at padding among what the adapter holds with `states` added, `[B, S]`."""
        if self._mask is None:
            return None
        length = self._past[0].shape[2] + states.shape[1]
        return F.pad(self._mask, (0, length - self._prompt), value=True)


class ExitDrafter(ModelDrafter):
    """Drafts of an early exit."""

    def __init__(self, reader: ExitReader, plan: DecodePlan, vocabulary: int) -> None:
        super().__init__(reader, plan, vocabulary, reader.sync)
        self._exit = reader

    def propose(self, text: BatchText, held: int, length: DraftLength, most: int) -> DraftRun:
        """Draft until the exit is unsure, and leave the cache to the model."""
        try:
            return super().propose(text, held, length, most)
        finally:
            self._exit.leave()


def exit_drafter(
    reader: SequenceReader, states: ExitStates, adapter: ExitAdapter, plan: DecodePlan
) -> ExitDrafter:
    """Return what drafts for one call, whose prompt the model has just read."""
    vocabulary = reader.model.config.get_text_config().vocab_size
    return ExitDrafter(ExitReader(reader, states, adapter), plan, vocabulary)
