"""Streaming stages over the modules of a codec: sound to codes and codes to sound, in any pieces.

`stream` turns a module into a streaming layer, recognised by its parts and not by its class: SEANet
convolutions (`conv`, `causal`, `pad_mode`), residual blocks (`block`, `shortcut`), an LSTM beside a
skip (`lstm`), plain convolutions with zero padding, and functions of each moment. `FrameStage` runs
such layers on whole frames; all rows of a batch share one grid of frames. A row can begin anew
while the others go on: in place where every layer is in step; where a layer waits for samples
(mirrored padding, look-ahead), in a group of its own, whose output comes `lag` frames late. The
state is a tuple of tuples, tensors, blocks of keys and values, and numbers; every tensor has the
rows of the batch first, so rows can be taken out and put back without knowing what a state means.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from mmfast.core.errors import MediaError, ModelError
from mmfast.core.kv import KVBlock
from mmfast.frontends.codecs.layers import (
    CodecLayer,
    Conv,
    ConvTranspose,
    LayerChain,
    Pointwise,
    Recurrent,
    Residual,
    join,
)

MOMENTARY = (nn.ELU, nn.GELU, nn.ReLU, nn.LeakyReLU, nn.SiLU, nn.Tanh, nn.Identity)


def walk(modules: Iterable[Any]) -> LayerChain:
    """Return modules that run one after the other as one streaming layer."""
    return LayerChain([stream(module) for module in modules])


def stream(module: Any) -> CodecLayer:
    """Return a module of a codec as a streaming layer; ModelError where it cannot stream."""
    if isinstance(module, nn.Conv1d):
        return Conv(module, *_own_padding(module))
    if isinstance(module, nn.ConvTranspose1d):
        return ConvTranspose(module, *_own_padding(module))
    if isinstance(getattr(module, "convtr", None), nn.ConvTranspose1d):
        return ConvTranspose(module.convtr, 0, int(module.padding_total))
    if isinstance(getattr(module, "conv", None), (nn.Conv1d, nn.ConvTranspose1d)):
        return _seanet(module) if hasattr(module, "causal") else _causal(module)
    if hasattr(module, "dwconv") or hasattr(module, "mixer"):
        return _conv_next(module)
    if hasattr(module, "act1") and hasattr(module, "conv2"):
        unit = walk([module.act1, module.conv1, module.act2, module.conv2])
        return Residual(unit, Pointwise(nn.Identity()))
    if hasattr(module, "block") and hasattr(module, "shortcut"):
        return Residual(walk(module.block), stream(module.shortcut))
    if isinstance(getattr(module, "lstm", None), nn.LSTM):
        return Recurrent(module.lstm)
    if hasattr(module, "res_unit1"):
        return walk(_dac_block(module))
    if hasattr(module, "snake1") and hasattr(module, "conv2"):
        unit = walk([module.snake1, module.conv1, module.snake2, module.conv2])
        return Residual(unit, Pointwise(nn.Identity()))
    if isinstance(module, MOMENTARY) or hasattr(module, "alpha"):  # alpha: the snake activation
        return Pointwise(module)
    raise ModelError(
        f"cannot stream a layer {type(module).__name__}; choices: convolutions, transposed "
        "convolutions, LSTM, residual blocks, activations"
    )


def _own_padding(module: Any) -> tuple[int, int]:
    extra = getattr(module, "output_padding", (0,))[0]  # cut off less at the end
    if module.padding_mode != "zeros" or isinstance(module.padding, str):
        raise ModelError(
            f"cannot stream padding {module.padding!r} of {module.padding_mode!r}; "
            "give zeros, the same at both ends"
        )
    if extra > module.padding[0]:
        raise ModelError(
            f"cannot stream output_padding {extra} beyond padding {module.padding[0]}; give less"
        )
    return module.padding[0], module.padding[0] - extra


def _causal(module: Any) -> CodecLayer:
    """Pad with zeros on the left; a transposed one says what it cuts off at both ends."""
    conv = module.conv
    if isinstance(conv, nn.ConvTranspose1d):
        return ConvTranspose(conv, int(module.left_pad), int(module.right_pad))
    return Conv(conv, (conv.kernel_size[0] - 1) * conv.dilation[0] + 1 - conv.stride[0], 0)


def _conv_next(module: Any) -> CodecLayer:
    """ConvNeXt blocks: a convolution of each channel, and a network of each moment."""
    same = Pointwise(nn.Identity())

    def across(*parts: Callable[[Tensor], Tensor]) -> CodecLayer:
        def run(x: Tensor) -> Tensor:
            x = x.transpose(1, 2)
            for part in parts:
                x = part(x)
            return x.transpose(1, 2)

        return Pointwise(run)

    if hasattr(module, "mixer"):
        mixed = [across(module.norm), stream(module.mixer), across(lambda x: x * module.gamma)]
        thought = across(module.ffn_norm, module.ffn, lambda x: x * module.ffn_gamma)
        return LayerChain([Residual(LayerChain(mixed), same), Residual(thought, same)])
    parts = (module.norm, module.pwconv1, module.act, module.pwconv2, lambda x: x * module.gamma)
    return Residual(LayerChain([stream(module.dwconv), across(*parts)]), same)


def _seanet(module: Any) -> CodecLayer:
    """Pad all on the left (causal), or both sides with the odd sample on the left."""
    if getattr(module, "norm_type", "weight_norm") == "time_group_norm":
        raise ModelError(
            "this codec normalises over all time (norm_type 'time_group_norm'), so it cannot "
            "stream; choose one of norm_type 'weight_norm', such as facebook/encodec_24khz"
        )
    conv, causal = module.conv, bool(module.causal)
    kernel = (conv.kernel_size[0] - 1) * conv.dilation[0] + 1
    total = kernel - conv.stride[0]
    if isinstance(conv, nn.ConvTranspose1d):
        right = math.ceil(total * module.trim_right_ratio) if causal else total // 2
        return ConvTranspose(conv, total - right, right)
    right = 0 if causal else total // 2
    return Conv(conv, total - right, right, module.pad_mode, whole=True)


def _dac_block(module: Any) -> list[Any]:
    units = [module.res_unit1, module.res_unit2, module.res_unit3]
    if hasattr(module, "conv_t1"):
        return [module.snake1, module.conv_t1, *units]
    return [*units, module.snake1, module.conv1]


def tree_map(function: Callable[..., Tensor], *trees: Any) -> Any:
    """Apply `function` to tensors at the same place of each tree; copy the rest of the first."""
    first = trees[0]
    if isinstance(first, Tensor):
        return function(*trees)
    if isinstance(first, tuple):
        parts = [tree_map(function, *each) for each in zip(*trees, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else tuple(parts)
    if isinstance(first, KVBlock):
        names = ("keys", "values", "relative", "advance")
        mapped = {n: tree_map(function, *(getattr(tree, n) for tree in trees)) for n in names}
        return replace(first, **mapped)
    return first


def take_rows(tree: Any, rows: Tensor) -> Any:
    """Select rows `[b]` of every tensor."""
    return tree_map(lambda x: x.index_select(0, rows.to(x.device)), tree)


def where_rows(rows: Tensor, yes: Any, no: Any) -> Any:
    """Take the rows of `yes` where `rows` (`[B]` bool) is True, else those of `no`."""

    def pick(a: Tensor, b: Tensor) -> Tensor:
        return torch.where(rows.to(a.device).view(-1, *[1] * (a.dim() - 1)), a, b)

    return tree_map(pick, yes, no)


BLOCK = 32  # frames worked on at once, which bounds the memory of a long chunk


class RowGroup(NamedTuple):
    """Rows that began at the same time."""

    rows: Tensor  # [b] their numbers in the batch
    inner: Any  # state of the layers
    due: Tensor | None  # [b, ..., p] output not given yet, of rows that began late
    frames: int  # since it began


class RowState(NamedTuple):
    """State of a stage."""

    batch: int
    waiting: Tensor  # [B, ..., r] input that does not fill a frame
    frames: int  # of the oldest stream
    groups: tuple[RowGroup, ...]


class FrameStage:
    """A stage over layers that turn frames of `unit` inputs into `yields` outputs each.

    `check` checks the input. `blank` is the output of a row that began late until its own comes (-1
    for codes, 0.0 for sound), `shape` the dimensions between batch and time. `whole` fills the last
    frame with zeros. `lookahead` outputs come late, and `startup` frames before the first one.
    """

    def __init__(
        self,
        layers: CodecLayer,
        check: Callable[[Any, int | None], Tensor],
        unit: int,
        yields: int,
        blank: float,
        shape: tuple[int, ...] = (),
        whole: bool = False,
        device: torch.device | None = None,
    ) -> None:
        self.layers, self.check, self.unit, self.yields = layers, check, unit, yields
        self.blank, self.shape, self.whole, self.device = blank, shape, whole, device
        counts = [layers.count(m * unit) for m in range(257)]
        owed = [m * yields - n for m, n in enumerate(counts)]
        self.lookahead, self._lag = owed[-1], max(owed)
        self.startup = sum(n == 0 for n in counts)

    def start(self, batch: int = 1) -> RowState:
        """Return the state of `batch` streams before their first chunk."""
        if batch < 1:
            raise MediaError(f"batch is {batch}; give 1 or more streams")
        rows = torch.arange(batch, device=self.device)
        group = RowGroup(rows, self.layers.start(batch), None, 0)
        return RowState(batch, torch.zeros(batch, 0, device=self.device), 0, (group,))

    @torch.no_grad()
    def step(self, state: RowState, chunk: Tensor) -> tuple[RowState, Tensor]:
        """Run a chunk of any length to the output that it makes certain; `state` is not changed."""
        chunk = self.check(chunk, state.batch).to(self.device)
        if state.waiting.numel():
            chunk = torch.cat([state.waiting.to(chunk), chunk], -1)
        whole = chunk.shape[-1] // self.unit * self.unit
        state = state._replace(waiting=chunk[..., whole:].clone())
        if not whole:
            return state, self._blanks(state.batch, 0)
        outs = []
        for piece in chunk[..., :whole].split(BLOCK * self.unit, -1):
            state, out = self._advance(state, piece)
            outs.append(out)
        return state, outs[0] if len(outs) == 1 else torch.cat(outs, -1)

    @torch.no_grad()
    def finish(self, state: RowState) -> Tensor:
        """Return the rest of every stream; shorter rows are filled with blanks at the end."""
        rest = state.waiting
        part = -(-rest.shape[-1] // self.unit)
        if self.whole:
            rest = functional.pad(rest, (0, part * self.unit - rest.shape[-1]))
        tails = []
        for group in state.groups:
            inner, out = self.layers.step(group.inner, self._of(rest, group, state))
            tail = join(out, self.layers.finish(inner))
            assert tail is not None
            given = self.layers.count(group.frames * self.unit)
            missing = (group.frames + part) * self.yields - given - tail.shape[-1]
            tail = self._fill(tail, tail.shape[-1] + max(0, missing))
            tails.append(tail if group.due is None else torch.cat([group.due, tail], -1))
        longest = max(tail.shape[-1] for tail in tails)
        return self._gather(state, [self._fill(tail, longest) for tail in tails])

    def reset(self, state: RowState, rows: Tensor) -> RowState:
        """The state with streams `rows` (`[B]` bool) anew; their begun frame becomes silence."""
        if rows.dtype != torch.bool or rows.shape != (state.batch,):
            raise MediaError(
                f"rows are {rows.dtype} {list(rows.shape)}; give torch.bool [{state.batch}]"
            )
        rows = rows.to(self.device)
        if rows.all():
            return self.start(state.batch)
        if not rows.any():
            return state
        waiting = where_rows(rows, torch.zeros_like(state.waiting), state.waiting)
        groups = self._split(state, rows)
        if self.layers.in_step:
            group = state.groups[0]
            inner = where_rows(rows, self.layers.start(state.batch), group.inner)
            groups = (group._replace(inner=inner),)
        return state._replace(waiting=waiting, groups=groups)

    def _advance(self, state: RowState, piece: Tensor) -> tuple[RowState, Tensor]:
        """Run whole frames through the layers of every group; each gives as much as the oldest."""
        new, before = piece.shape[-1] // self.unit, self.layers.count(state.frames * self.unit)
        frames = state.frames + new
        n = self.layers.count(frames * self.unit) - before
        groups, outs = [], []
        for group in state.groups:
            inner, out = self.layers.step(group.inner, self._of(piece, group, state))
            due = None
            if group.due is not None:
                out = torch.cat([group.due, out], -1)
                out, due = out[..., :n], out[..., n:]
            groups.append(RowGroup(group.rows, inner, due, group.frames + new))
            outs.append(out)
        state = state._replace(frames=frames, groups=tuple(groups))
        return state, self._gather(state, outs)

    def _split(self, state: RowState, rows: Tensor) -> tuple[RowGroup, ...]:
        """Return groups without the rows, and a new group of these rows, late by the lag."""
        kept = []
        for group in state.groups:
            stay = (~rows[group.rows]).nonzero().flatten()
            if len(stay):
                kept.append(take_rows(group, stay)._replace(frames=group.frames))
        new = rows.nonzero().flatten()
        due = self._blanks(len(new), self._lag)
        return (*kept, RowGroup(new, self.layers.start(len(new)), due, 0))

    def _blanks(self, rows: int, n: int) -> Tensor:
        kind = torch.long if isinstance(self.blank, int) else torch.float32
        shape = (rows, *self.shape, n)
        return torch.full(shape, self.blank, dtype=kind, device=self.device)

    def _of(self, x: Tensor, group: RowGroup, state: RowState) -> Tensor:
        return x if len(state.groups) == 1 else x.index_select(0, group.rows)

    def _gather(self, state: RowState, outs: list[Tensor]) -> Tensor:
        if len(outs) == 1 and len(outs[0]) == state.batch:
            return outs[0]
        back = torch.argsort(torch.cat([group.rows for group in state.groups]))
        return torch.cat(outs, 0).index_select(0, back)

    def _fill(self, x: Tensor, n: int) -> Tensor:
        return x if x.shape[-1] == n else functional.pad(x, (0, n - x.shape[-1]), value=self.blank)


class WholeState(NamedTuple):
    """Pieces `[..., n]` of every row that have come so far."""

    rows: tuple[tuple[Tensor, ...], ...]


class WholeStage:
    """A stage over a function that needs the whole stream: it gives nothing before the end.

    `function` takes rows of one length `[b, ..., n]`, `check` checks a chunk; `blank` and `shape`
    are those of `FrameStage`.
    """

    lookahead = math.inf

    def __init__(
        self,
        function: Callable[[Tensor], Tensor],
        check: Callable[[Any, int | None], Tensor],
        blank: float,
        shape: tuple[int, ...] = (),
        device: torch.device | None = None,
    ) -> None:
        self.function, self.check, self.blank = function, check, blank
        self.shape, self.device = shape, device

    def start(self, batch: int = 1) -> WholeState:
        """Return the state of `batch` streams before their first chunk."""
        if batch < 1:
            raise MediaError(f"batch is {batch}; give 1 or more streams")
        return WholeState(((),) * batch)

    def step(self, state: WholeState, chunk: Tensor) -> tuple[WholeState, Tensor]:
        """Keep a chunk; what it makes certain is nothing."""
        chunk = self.check(chunk, len(state.rows)).to(self.device)
        rows = tuple((*old, new) for old, new in zip(state.rows, chunk, strict=True))
        return WholeState(rows), self._none(len(rows))

    @torch.no_grad()
    def finish(self, state: WholeState) -> Tensor:
        """Run every stream; shorter outputs are filled with blanks at the end."""
        whole = [torch.cat(row, -1) if row else None for row in state.rows]
        lengths = {0 if row is None else row.shape[-1] for row in whole}
        if len(lengths) == 1 and lengths != {0}:
            return self.function(torch.stack([row for row in whole if row is not None]))
        outs = [
            self._none(1)[0] if row is None or not row.shape[-1] else self.function(row[None])[0]
            for row in whole
        ]
        longest = max(out.shape[-1] for out in outs)
        pads = [(0, longest - out.shape[-1]) for out in outs]
        filled = [
            functional.pad(out, by, value=self.blank) for out, by in zip(outs, pads, strict=True)
        ]
        return torch.stack(filled)

    def reset(self, state: WholeState, rows: Tensor) -> WholeState:
        """Return the state with streams `rows` (`[B]` bool) started anew."""
        kept = zip(rows.tolist(), state.rows, strict=True)
        return WholeState(tuple(() if gone else row for gone, row in kept))

    def _none(self, batch: int) -> Tensor:
        kind = torch.long if isinstance(self.blank, int) else torch.float32
        return torch.full((batch, *self.shape, 0), self.blank, dtype=kind, device=self.device)


def run(stage: Any, x: Tensor) -> Tensor:
    """Run a whole stream `[B, ..., n]` through a `core.speech.Stage`, in bounded memory."""
    state, out = stage.step(stage.start(x.shape[0]), x)
    return torch.cat([out, stage.finish(state)], dim=-1)
