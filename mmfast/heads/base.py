"""Base of the audio heads: drafts ahead of the backbone, taken back or learned from.

A head is a chain of light modules on the last hidden states of a causal language model. Module k
stands at position t, has read the hidden state of t and guesses token t + k + 2; token t + 1 is
the one that the backbone itself chose there. Its keys and values are its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mmfast.core.errors import ModelError
from mmfast.core.registry import get
from mmfast.ops.codebooks import CodeLoss, code_loss
from mmfast.ops.stream_cache import Placer, RowBuffer, TokenPlaces


@dataclass(eq=False)
class HeadState:
    """State of a head for B streams, drafts included.

    `embeds` are the tokens' embeddings and `hidden` the backbone's hidden states, `[B, capacity,
    D]`. `length` counts, per stream, tokens that the backbone has read and that stand; `filled` and
    `first` give, per module and stream, the end of the positions whose keys are those of such
    tokens, and the oldest one. `slots` are keys and values per module.
    """

    embeds: Tensor
    hidden: Tensor
    length: list[int]
    filled: list[list[int]]
    first: list[list[int]]
    slots: list[RowBuffer] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        buffers = sum(each.nbytes for each in self.slots)
        return self.embeds.nbytes + self.hidden.nbytes + buffers


def room(state: HeadState, needed: int) -> None:
    """Make the buffers of a state hold `needed` tokens."""
    have = state.embeds.shape[1]
    if needed <= have:
        return
    for name in ("embeds", "hidden"):
        old = getattr(state, name)
        new = old.new_zeros(old.shape[0], max(needed, have + have // 2), old.shape[2])
        new[:, :have].copy_(old)
        setattr(state, name, new)


def gather(buffer: Tensor, starts: Sequence[int], n: int, offset: int = 0) -> Tensor:
    """`[B, n, D]` from each stream's own start."""
    start = starts[0] + offset
    if len(starts) == 1 or all(s == starts[0] for s in starts):
        return buffer[:, start : start + n]
    return torch.stack([row[s + offset :][:n] for row, s in zip(buffer, starts, strict=True)])


def at(hidden: Tensor, last: Sequence[int]) -> Tensor:
    """`[B, D]`: one place of each stream."""
    if len(last) == 1 or all(i == last[0] for i in last):
        return hidden[:, last[0]]
    return torch.stack([row[i] for row, i in zip(hidden, last, strict=True)])


# Given the logits [B, rows] of draft i, the tokens [B] to draft behind; None ends it.
Pick = Callable[[Tensor, int], Tensor | None]
Block = Callable[[Tensor, RowBuffer, TokenPlaces], Tensor]
Rows = slice
RowsAt = Callable[[int], Rows]  # those of every module


class Trunk(Protocol):
    """Language model as a head needs it; `mmfast.models.decoder.backbone.Backbone` is one."""

    width: int
    placer: Placer

    def embed(self, ids: Tensor) -> Tensor:
        """Embeddings `[.., D]` of ids `[..]`."""

    def norm(self, hidden: Tensor) -> Tensor:
        """The final norm."""

    def logits(self, hidden: Tensor, rows: Rows) -> Tensor:
        """Logits `[.., rows]` of normed hidden states `[.., D]`."""

    def new_layer(self, ffn: int | None = None) -> nn.Module:
        """A decoder layer of the model's own class, its inner width `ffn` where given."""

    def new_norm(self) -> nn.Module:
        """A norm of the model's own class."""

    def new_output(self) -> nn.Module:
        """An output matrix of its own, a copy of the model's to begin with."""

    def block(self, layer: nn.Module) -> Block:
        """The layer as it is called on pieces of streams."""

    def normer(self, norm: nn.Module) -> Callable[[Tensor], Tensor]:
        """The norm as it is called on pieces of streams."""

    def entry(self, norms: Sequence[nn.Module], linear: nn.Module) -> Callable[[Tensor], Tensor]:
        """A linear layer on inputs `[.., k D]` side by side, each through its own norm."""

    def lone(
        self, norms: Sequence[nn.Module], linear: nn.Module, block: Block
    ) -> Callable[[Tensor, Tensor], Tensor] | None:
        """An entry of two inputs, a layer and the final norm on one token that sees itself alone.

        It takes and returns `[D]`; None where the parts themselves are as fast.
        """

    def whole(self, layer: nn.Module, x: Tensor, mask: Tensor | None) -> Tensor:
        """The layer on whole sequences `[B, T, D]`, causal, differentiable."""


class AudioHead(nn.Module):
    """Base of the heads that draft along time.

    There are K `modules`, the most tokens that can be drafted at once, with layers of inner width
    `ffn` (None is the model's). A module attends to `window` positions, its own included; 0 is all.
    With 1 it has no keys and catches up on nothing: the cheapest there is. Modules catch up on
    `history` positions at once; one that lags further starts anew there. `reads` tells which hidden
    states the head is fed: `normed` or `raw`, before the final norm.
    """

    name: ClassVar[str] = ""
    reads: ClassVar[str] = "normed"

    def __init__(
        self,
        trunk: Trunk,
        modules: int,
        *,
        ffn: int | None = None,
        window: int = 0,
        history: int = 256,
    ) -> None:
        super().__init__()
        if modules < 1 or history < 1 or window < 0:
            raise ModelError(
                f"a head of {modules} modules, window {window} and history {history} cannot be; "
                "use at least 1 module, window 0 or more, history 1 or more"
            )
        self.trunk = trunk
        self.modules_count = modules
        self.window, self.history = window, history
        self.config: dict[str, Any] = {
            "head": self.name, "modules": modules, "ffn": ffn, "window": window, "history": history
        }  # fmt: skip
        self.layers = nn.ModuleList(trunk.new_layer(ffn) for _ in range(modules))
        self._placer: Placer | None = None
        self._blocks: list[Block] = []
        self._lone: list[Callable[[Tensor, Tensor], Tensor]] = []  # modules, where they can be

    # --- drafting -----------------------------------------------------------------------------

    def init_state(self, batch: int = 1, reserve: int = 512) -> HeadState:
        """The state before the first token of `batch` streams, with room for `reserve` tokens."""
        weight = next(self.parameters())
        shape = (batch, reserve + self.modules_count + 1, self.trunk.width)
        embeds, hidden = (weight.new_zeros(shape) for _ in range(2))
        none = [[0] * batch for _ in range(2 * self.modules_count)]
        filled, first = none[: self.modules_count], none[self.modules_count :]
        slots = [RowBuffer(reserve) for _ in range(self.modules_count)]
        return HeadState(embeds, hidden, [0] * batch, filled, first, slots)

    def observe(self, state: HeadState, embeds: Tensor, hidden: Tensor, counts: list[int]) -> None:
        """Take in what the backbone has just read; `state` changes in place.

        `embeds` and `hidden` are `[B, n, D]`; `counts` says how many of the n are no padding.
        """
        n = embeds.shape[1]
        room(state, max(state.length) + n + self.modules_count + 1)
        for row, old in enumerate(state.length):
            state.embeds[row, old : old + n].copy_(embeds[row])
            state.hidden[row, old : old + n].copy_(hidden[row])
            state.length[row] = old + counts[row]

    def crop(self, state: HeadState, lengths: Sequence[int]) -> None:
        """Keep the first `lengths` tokens of each stream; nothing is copied."""
        for row, length in enumerate(lengths):
            state.length[row] = min(state.length[row], length)
        if self.window == 1:  # there are no keys
            return
        for module, filled in enumerate(state.filled):
            for row, length in enumerate(state.length):
                filled[row] = min(filled[row], max(0, length - 1 - module))
                first = state.first[module]
                first[row] = min(first[row], filled[row])

    def draft(
        self, state: HeadState, token: Tensor, limit: int, rows: Rows | RowsAt, pick: Pick
    ) -> int:
        """Guess the tokens behind `token`; returns how many modules have run.

        `state` changes in place: keys of the drafts stay until `crop` takes them back. `token`
        `[B]` is what the backbone chose behind the last one it read; `limit` is at most the number
        of modules; drafts are of `rows` of the vocabulary, which may differ by module.
        """
        limit = min(limit, self.modules_count)
        if not limit:
            return 0
        rows_at = rows if callable(rows) else lambda _: rows
        if self.window == 1:
            return self._draft_alone(state, token, limit, rows_at, pick)
        starts, ends = self._starts(state, limit), state.length
        width = max(end - start for start, end in zip(starts, ends, strict=True))
        room(state, max(ends) + width + limit + 1)
        blocks, placer = self._ready()
        hidden = gather(state.hidden, starts, width)
        last = [end - start - 1 for start, end in zip(starts, ends, strict=True)]
        place: TokenPlaces | None = None
        firsts: list[int] | None = None
        for module in range(limit):
            if place is None or state.first[module] != firsts:
                firsts = list(state.first[module])
                place = placer.place(starts, width, firsts)
            self._take(state, module, token)
            x = self._enter(state, module, hidden, starts, width)
            raw = blocks[module](x, state.slots[module], place)
            hidden, normed = self._leave(module, raw)
            state.filled[module] = list(ends)
            chosen = pick(self.output(module, at(normed, last), rows_at(module)), module)
            if chosen is None:
                return module + 1
            token = chosen
        return limit

    def _draft_alone(
        self, state: HeadState, token: Tensor, limit: int, rows_at: RowsAt, pick: Pick
    ) -> int:
        """As `draft`, where a module sees one place alone: there is nothing to keep or catch up."""
        starts = [end - 1 for end in state.length]
        room(state, max(state.length) + 1)
        blocks, placer = self._ready()
        if len(starts) == 1 and self._lone:
            return self._draft_lone(state.hidden[0, starts[0]], token, limit, rows_at, pick)
        place, hidden = placer.place(starts, 1), at(state.hidden, starts)  # [B, D]
        for module in range(limit):
            x = self._enter_alone(module, token, hidden)[:, None]
            raw = blocks[module](x, state.slots[module], place)
            hidden, normed = self._leave(module, raw[:, 0])
            chosen = pick(self.output(module, normed, rows_at(module)), module)
            if chosen is None:
                return module + 1
            token = chosen
        return limit

    def _draft_lone(
        self, hidden: Tensor, token: Tensor, limit: int, rows_at: RowsAt, pick: Pick
    ) -> int:
        """The same of one stream, from its last hidden state `[D]`."""
        for module in range(limit):
            hidden = self._lone[module](self.trunk.embed(token)[0], hidden)
            chosen = pick(self.output(module, hidden, rows_at(module))[None], module)
            if chosen is None:
                return module + 1
            token = chosen
        return limit

    def _starts(self, state: HeadState, limit: int) -> list[int]:
        """First places of the modules that are to run, so that none lags."""
        starts = []
        for row, end in enumerate(state.length):
            start = min(state.filled[module][row] for module in range(limit))
            start = max(min(start, end - 1), end - self.history)
            for module in range(limit):
                if state.filled[module][row] < start:
                    state.first[module][row] = start
            starts.append(start)
        return starts

    def _ready(self) -> tuple[list[Block], Placer]:
        if not self._blocks or self._placer is None:
            self._blocks = [self.trunk.block(layer) for layer in self.layers]
            self._placer = self.trunk.placer.with_window(self.window)
            self._prepare()
        return self._blocks, self._placer

    def refresh(self) -> None:
        """Read the weights anew: drafting uses prepared copies, so call it after training."""
        self._blocks = []

    def train(self, mode: bool = True) -> Self:
        """As of `nn.Module`; drafting reads the weights anew."""
        self.refresh()
        return super().train(mode)

    def _prepare(self) -> None:
        """Prepare further weights for drafting."""

    def _take(self, state: HeadState, module: int, token: Tensor) -> None:
        """Note the token in front of module `module`, where the head reads tokens."""

    def _enter(
        self, state: HeadState, module: int, hidden: Tensor, starts: list[int], n: int
    ) -> Tensor:
        """Input `[B, n, D]` of a module's layer."""
        raise NotImplementedError

    def _enter_alone(self, module: int, token: Tensor, hidden: Tensor) -> Tensor:
        """The same of one place: from the token `[B]` in front of the module, and `[B, D]`."""
        raise NotImplementedError

    def _leave(self, module: int, raw: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs of the next module and of the output head."""
        raise NotImplementedError

    def output(self, module: int, states: Tensor, rows: Rows) -> Tensor:
        """Logits `[.., rows]` of the states `[.., D]` that a module leaves, differentiable."""
        return self.trunk.logits(states, rows)

    # --- learning -----------------------------------------------------------------------------

    def weights(self) -> list[float]:
        """Weight of every module's loss."""
        raise NotImplementedError

    def forward(self, hidden: Tensor, embeds: Tensor, mask: Tensor | None = None) -> list[Tensor]:
        """Run all modules on whole sequences, with the true tokens in front of each.

        `hidden` (as `reads` says) and `embeds` are `[B, T, D]`; `mask` is added to the scores, `[B
        or 1, 1, T, T]`, None is causal. Returns per module k the states `[B, T - 1 - k, D]` that
        `output` turns into logits; place t is about token t + k + 2. Fewer where the sequences are
        shorter than that.
        """
        raise NotImplementedError

    def loss(self, hidden: Tensor, embeds: Tensor, labels: Tensor) -> CodeLoss:
        """Weighted sum over the modules on whole sequences, figures per module.

        `hidden` (as `reads` says) and `embeds` are `[B, T, D]`, and get no gradient; `labels` `[B,
        T]` are the tokens at every place, -100 where none is to be guessed. ModelError: shapes do
        not fit, or no label is there.
        """
        if labels.shape != hidden.shape[:2] or embeds.shape != hidden.shape:
            raise ModelError(
                f"hidden states {list(hidden.shape)}, embeddings {list(embeds.shape)} and labels "
                f"{list(labels.shape)} differ; they are [B, T, D], [B, T, D] and [B, T]"
            )
        mask = causal_mask(labels.shape[1], hidden, self.window) if self.window else None
        terms, total = [], hidden.new_zeros(())
        for k, states in enumerate(self(hidden.detach(), embeds.detach(), mask)):
            chosen = (target := labels[:, k + 2 :]) >= 0
            if chosen.any():
                logits = self.output(k, states[:, : target.shape[1]][chosen], slice(None))
                found = code_loss(logits[:, None], target[chosen][:, None])
                terms.append(found)
                total = total + self.weights()[k] * found.loss
        if not terms:
            raise ModelError("no label behind the second token; use longer sequences or fewer -100")
        each, right = (torch.cat(x) for x in zip(*((t.each, t.right) for t in terms), strict=True))
        return CodeLoss(total, each, right)


def causal_mask(n: int, like: Tensor, window: int = 0) -> Tensor:
    """`[1, 1, n, n]` added to scores: a place sees itself and those before, `window` at most."""
    seen = torch.ones(n, n, dtype=torch.bool, device=like.device).tril()
    seen = seen.triu(1 - window) if window else seen
    mask = torch.zeros(1, 1, n, n, dtype=like.dtype, device=like.device)
    return mask.masked_fill_(~seen, torch.finfo(like.dtype).min)


def save_head(head: Any, path: str | Path, dtype: torch.dtype | None = None) -> None:
    """Write a head with a `config` to `path` (`….safetensors`) and its JSON file beside it.

    Folders are made; `dtype` is that of the numbers in the file, None as they are.
    """
    weights = Path(path).with_suffix(".safetensors")
    weights.parent.mkdir(parents=True, exist_ok=True)
    state = {
        name: t.detach().to("cpu", dtype).contiguous() for name, t in head.state_dict().items()
    }
    save_file(state, weights)
    weights.with_suffix(".json").write_text(json.dumps(head.config, indent=1) + "\n")


def load_head(path: str | Path, trunk: Any) -> nn.Module:
    """Load the head of a `.safetensors` file, beside its `.json`, onto a language model's parts.

    ModelError: a file is missing or broken, or the head is of another model.
    """
    weights = Path(path).with_suffix(".safetensors")
    try:
        config = json.loads(weights.with_suffix(".json").read_text())
        state = load_file(weights)
        make = get(config.pop("head"), "head").fn
    except (OSError, KeyError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ModelError(
            f"the head {weights.name!r} cannot be read: {reason}; "
            "name a .safetensors file that save_head wrote, with its .json beside it"
        ) from error
    head: nn.Module = make(trunk, **config)
    try:
        head.load_state_dict(state)
    except RuntimeError as error:
        raise ModelError(
            f"the head {weights.name!r} does not fit {type(trunk).__name__} of width "
            f"{trunk.width}: {str(error).splitlines()[-1].strip()}; load it on its own model"
        ) from error
    return head.eval()
