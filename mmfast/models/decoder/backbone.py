"""Any stock causal language model as the trunk of a draft-and-verify loop.

The decoder layers are called directly, on caches that belong to a stream: nothing of a stream is
on the model, so any number of streams may use it. `StreamDecoder` runs a decoder on embeddings, its
state a value.
"""

# ruff: noqa: D102 (`heads.base.Trunk` documents what heads use)
from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmfast.core.errors import MmfastError, ModelError
from mmfast.core.kv import KVBlock
from mmfast.core.registry import get
from mmfast.heads.base import causal_mask
from mmfast.heads.base import load_head as load_file
from mmfast.models.cache_name import CACHE
from mmfast.models.decoder.blocks import (
    Block,
    Lean,
    LoneModule,
    Stock,
    WideProduct,
    lean_entry,
    lean_fits,
    lean_norm,
    stock_entry,
)
from mmfast.models.decoder.rotary import Rotary
from mmfast.models.reduction.cache_layers import Pair, cache_over
from mmfast.models.wrappers import FULL, SLIDING, kind_of
from mmfast.ops.stream_cache import Angles, Placer, RowBuffer, advance, empty, within

_LAYERS = ("layers", "h")
_NORMS = ("norm", "final_layer_norm", "final_layernorm", "ln_f")
_INNER = ("intermediate_size", "n_inner", "moe_intermediate_size", "ffn_dim")  # widths in configs
_SCALES = "logits_scaling", "logit_scale", "final_logit_softcapping"  # Granite, Cohere, Gemma
_VECTORS = 32  # columns of a block of the output head
_CLOSE = {torch.float64: 1e-3, torch.float32: 1e-3}  # of the largest logit; else 5e-2


@dataclass(eq=False)
class BackboneState:
    """Keys and values of B streams, one slot per decoder layer; `lengths` tokens of each stand."""

    slots: list[RowBuffer]
    lengths: list[int]

    def crop(self, lengths: Sequence[int]) -> None:
        """Keep the first `lengths` tokens of each stream; nothing is copied."""
        self.lengths = [min(a, b) for a, b in zip(self.lengths, lengths, strict=True)]

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values, whether filled or not."""
        return sum(slot.nbytes for slot in self.slots)


class Backbone:
    """A causal language model of transformers, called piece by piece.

    Its layers attend to all that was read or to a sliding window; positions are rotary (of three
    axes, too, which count text alike), learned (GPT-2) or none. The model stays as it is; call
    `refresh` when its weights change. `lean` runs Llama-like layers in fewer operations (None:
    where it gains), `check` compares a few tokens with the stock forward pass first. ModelError
    where the model is of a kind that cannot be called so.
    """

    def __init__(self, model: Any, *, lean: bool | None = None, check: bool = True) -> None:
        self.model = model
        self.decoder = _decoder(model)
        self._check_kind()
        self.config = self.decoder.config
        self.layers = _first(self.decoder, _LAYERS)
        self._table = model.get_input_embeddings()
        self._output = model.get_output_embeddings()
        self.final_norm: Any = _first(self.decoder, _NORMS)
        self._learned = getattr(self.decoder, "wpe", None)
        self._scale = float(getattr(self.decoder, "embedding_multiplier", 1.0))
        weight = self._table.weight
        self.entries, self.width = weight.shape
        self.vocabulary = self._output.weight.shape[0]
        self.device, self.dtype = weight.device, weight.dtype
        turns = hasattr(self.decoder, "rotary_emb")
        self._rotary = Rotary(self.decoder, moves=False) if turns else None
        self.axes = self._rotary.axes if self._rotary is not None else 1
        self.lean = lean_fits(self.layers[0]) if lean is None else lean
        self._scales = [getattr(self.config, name, None) for name in _SCALES]
        self._kinds = [(kind_of(self.config, i), w) for i, w in enumerate(self._windows())]
        self._placers = self._make_placers()
        self.placer = self._placers[self._kinds[-1]].with_window(0)  # modules are as the last layer
        self.refresh()
        if check:
            self._check_equal()

    def refresh(self) -> None:
        """Read the weights anew."""
        self.blocks: list[Block] = [self.block(layer) for layer in self.layers]
        self._normed = self.normer(self.final_norm)
        # Rows of the output head, laid out for products.
        self._parts: dict[tuple[int, int], WideProduct] = {}

    # --- streams ------------------------------------------------------------------------------

    def state(self, batch: int = 1, reserve: int = 512) -> BackboneState:
        """Empty caches of `batch` streams, with room for `reserve` tokens each."""
        return BackboneState([RowBuffer(reserve) for _ in self.blocks], [0] * batch)

    def run(self, state: BackboneState, embeds: Tensor, counts: Sequence[int]) -> Tensor:
        """Read `embeds` `[B, n, D]` behind the tokens of the streams; the state changes in place.

        Of the n, the first `counts[b]` are tokens of stream b, the rest padding. Returns the hidden
        states `[B, n, D]` before the final norm.
        """
        n = embeds.shape[1]
        places = {k: placer.place(state.lengths, n) for k, placer in self._placers.items()}
        x = self._enter(embeds, state.lengths, counts)
        for block, slot, kind in zip(self.blocks, state.slots, self._kinds, strict=True):
            x = block(x, slot, places[kind])
        state.lengths = [n + count for n, count in zip(state.lengths, counts, strict=True)]
        return x

    # --- what heads are made of, see mmfast.heads.base.Trunk -----------------------------------

    def embed(self, ids: Tensor) -> Tensor:
        if type(self._table) is nn.Embedding:
            return torch.embedding(self._table.weight, ids)
        found: Tensor = self._table(ids)
        return found

    def norm(self, hidden: Tensor) -> Tensor:
        """The final norm; the stock module where gradients are wanted."""
        return self.final_norm(hidden) if torch.is_grad_enabled() else self._normed(hidden)

    def logits(self, hidden: Tensor, rows: slice) -> Tensor:
        """Logits `[.., rows]` of normed hidden states `[.., D]`: only those rows are computed."""
        return self._scaled(self._products(hidden, rows))

    def _products(self, hidden: Tensor, rows: slice) -> Tensor:
        start, stop, _ = rows.indices(self.vocabulary)
        weight, bias = self._output.weight, self._output.bias
        if stop - start == self.vocabulary:
            return F.linear(hidden, weight, bias)
        if self.lean and bias is None and not torch.is_grad_enabled():
            part = self._parts.get((start, stop))
            if part is None:
                own = weight[start:stop].detach().t()
                # Blocks of vectors' width need columns that they divide: 2050 would be 82 x 25.
                part = WideProduct(F.pad(own, (0, -own.shape[1] % _VECTORS)).contiguous(), None)
                self._parts[start, stop] = part
            if hidden.ndim == 1:
                return torch.mv(part.weight.t(), hidden)[: stop - start]
            found = part(hidden.reshape(-1, self.width))[:, : stop - start]
            return found if hidden.ndim == 2 else found.unflatten(0, hidden.shape[:-1])
        return F.linear(hidden, weight[start:stop], None if bias is None else bias[start:stop])

    def new_layer(self, ffn: int | None = None) -> nn.Module:
        config = copy.deepcopy(self.config)
        if ffn is not None:
            setattr(config, next(name for name in _INNER if hasattr(config, name)), ffn)
        last = len(self.layers) - 1
        return self._fresh(type(self.layers[last])(config, last))

    def new_norm(self) -> nn.Module:
        norm: nn.Module = copy.deepcopy(self.final_norm).requires_grad_(True)
        return norm

    def new_output(self) -> nn.Module:
        output: nn.Module = copy.deepcopy(self._output).requires_grad_(True)
        return output

    def block(self, layer: nn.Module) -> Block:
        return Lean(layer) if self.lean else Stock(layer)

    def normer(self, norm: nn.Module) -> Callable[[Tensor], Tensor]:
        return lean_norm(norm) if self.lean else norm

    def entry(self, norms: Sequence[nn.Module], linear: nn.Module) -> Callable[[Tensor], Tensor]:
        return (lean_entry if self.lean else stock_entry)(norms, linear)

    def lone(
        self, norms: Sequence[nn.Module], linear: nn.Module, block: Block
    ) -> LoneModule | None:
        if not isinstance(block, Lean):
            return None
        return LoneModule(norms, linear, block, self.final_norm)

    def whole(self, layer: nn.Module, x: Tensor, mask: Tensor | None) -> Tensor:
        n = x.shape[1]
        place = self.placer.even(0, n)
        if mask is None and self.config._attn_implementation == "eager" and n > 1:
            mask = causal_mask(n, x)
        return Stock(layer).run(x, mask, place)

    # --- inside -------------------------------------------------------------------------------

    def _windows(self) -> list[int]:
        """Places that each layer looks back to, 0 for all."""
        window = getattr(self.config, "sliding_window", None) or 0
        if getattr(self.config, "layer_types", None) is None:  # then all layers are alike
            return [window] * len(self.layers)
        kinds = [kind_of(self.config, i) for i in range(len(self.layers))]
        return [window if kind == SLIDING else 0 for kind in kinds]

    def _make_placers(self) -> dict[tuple[str, int], Placer]:
        """One for each kind of layer: kinds may have windows and frequencies of their own."""
        explicit = self.config._attn_implementation == "eager" and not self.lean
        return {
            kind: Placer(
                partial(self._angles, layer=self._kinds.index(kind)),
                self.device, self.dtype, kind[1], explicit,
            )
            for kind in dict.fromkeys(self._kinds)
        }  # fmt: skip

    def _angles(self, n: int, layer: int = 0) -> Angles:
        if self._rotary is None:  # blocks without rotary positions read none
            none = torch.zeros(n, 2, device=self.device, dtype=self.dtype)
            return none, none
        with torch.inference_mode(False), torch.no_grad():
            places = torch.arange(n, device=self.device).expand(self.axes, n)
            cos, sin = self._rotary.angles(places, self._table.weight, layer)
        return cos[0], sin[0]

    def _enter(self, embeds: Tensor, starts: Sequence[int], counts: Sequence[int]) -> Tensor:
        """Embeddings as the first layer takes them: scaled, and with learned positions."""
        x = embeds if self._scale == 1 else embeds * self._scale
        table = None if self._rotary is None else self._rotary.most
        most: int | None = table if self._learned is None else self._learned.num_embeddings
        if most is None:
            return x
        longest = max(a + n for a, n in zip(starts, counts, strict=True))
        if longest > most:
            raise ModelError(
                f"{longest} tokens are more than the {most} positions that "
                f"{type(self.model).__name__} has; give shorter prompts or a lower limit"
            )
        if self._learned is None:
            return x
        own = torch.arange(embeds.shape[1], device=self.device)
        at = torch.tensor(list(starts), device=self.device)[:, None] + own  # [B, n]
        placed: Tensor = x + self._learned(at.clamp(max=most - 1))  # padding may lie behind them
        return placed

    def _scaled(self, logits: Tensor) -> Tensor:
        """Products of the output head as the model makes logits of them."""
        scaling, scale, cap = self._scales
        if scaling:
            logits = logits / scaling
        if scale:
            logits = logits * scale
        if cap:
            logits = torch.tanh(logits / cap) * cap
        return logits

    def _fresh(self, layer: nn.Module) -> nn.Module:
        layer.apply(self.model._init_weights)
        return layer.to(self.device, self.dtype)

    def _check_kind(self) -> None:
        decoder, name = self.decoder, type(self.model).__name__
        layers = _first(decoder, _LAYERS) if hasattr(decoder, "config") else None
        kinds = [kind_of(decoder.config, i) for i in range(len(layers or ()))]
        if odd := sorted(set(kinds) - {FULL, SLIDING}):
            raise ModelError(
                f"{name} has layers of kind {', '.join(odd)}; "
                "drafts can be taken back from attention layers only, full or sliding"
            )
        if not kinds or _first(decoder, _NORMS) is None:
            raise ModelError(
                f"{name} is no causal language model of decoder layers and a final norm; "
                "use one such as LlamaForCausalLM, Qwen2ForCausalLM or Qwen3ForCausalLM"
            )
        attention = str(decoder.config._attn_implementation)
        if attention not in ("sdpa", "eager"):
            raise ModelError(
                f"{name} runs {attention!r} attention, which takes no masks of single streams; "
                "load it with attn_implementation='sdpa'"
            )

    @torch.no_grad()
    def _check_equal(self) -> None:
        """Raise unless a few tokens, read in two pieces, give the logits of the stock forward."""
        ids = torch.arange(6, device=self.device)[None] % self.vocabulary
        want = self.model(input_ids=ids, use_cache=False).logits.float()
        state, found = self.state(1, 8), []
        try:
            for piece in (ids[:, :4], ids[:, 4:]):
                hidden = self.norm(self.run(state, self.embed(piece), [piece.shape[1]]))
                found.append(self.logits(hidden, slice(None)).float())
        except MmfastError:
            raise
        except (TypeError, ValueError, AttributeError, RuntimeError, IndexError) as error:
            raise ModelError(
                f"the decoder layers of {type(self.model).__name__} cannot be called one by one "
                f"({' '.join(str(error).split())[:120]}); use a Llama-like model"
            ) from error
        gap = (torch.cat(found, 1) - want).abs().max()
        if not gap <= _CLOSE.get(self.dtype, 5e-2) * want.abs().max().clamp(min=1e-3):
            raise ModelError(
                f"{type(self.model).__name__} does more around its decoder layers than embedding, "
                f"norm and output head (logits differ by {float(gap):.2g}); use a Llama-like model"
            )


def _decoder(model: Any) -> Any:
    return model.get_decoder() if hasattr(model, "get_decoder") else None


def _first(decoder: Any, names: Sequence[str]) -> Any:
    """The first of these parts that a decoder has, else None."""
    return next((getattr(decoder, name) for name in names if hasattr(decoder, name)), None)


def backbone_of(model: Any) -> Backbone:
    """The model as a trunk; one that is a trunk already stays it."""
    return model if isinstance(model, Backbone) else Backbone(model)


def make_head(name: str, model: Any, *, start: str = "last", **options: Any) -> Any:
    """A new head, such as `mctp` or `mtp`, for a causal language model or a `Backbone` of one.

    `start="last"` copies the model's last decoder layer into every module, where the inner width is
    the same all of it, else all but the feed-forward part; `"random"` does not. Options are the
    head's: `modules`, `ffn`, `window` …
    """
    make = get(name, "head").fn
    if start not in ("last", "random"):
        raise ModelError(f"unknown start {start!r} of a head; choices: 'last', 'random'")
    trunk = backbone_of(model)
    try:
        head = make(trunk, **options)
    except TypeError as error:
        raise ModelError(f"head {name!r}: {error}; see the options of its class") from error
    if start == "last":
        for layer in getattr(head, "layers", ()):
            copy_weights(trunk.layers[-1], layer)
    return head


def copy_weights(source: nn.Module, target: nn.Module) -> None:
    """Copy the weights of the same name and shape."""
    ours = target.state_dict()
    with torch.no_grad():
        for name, weight in source.state_dict().items():
            if name in ours and ours[name].shape == weight.shape:
                ours[name].copy_(weight)


def load_head(path: str | Path, model: Any) -> Any:
    """The head of a file on a model; see `mmfast.heads.base.load_head`."""
    return load_file(path, backbone_of(model))


class StreamDecoder:
    """Steps of a stock decoder (`LlamaModel`, `MoshiModel`, `CsmBackboneModel`, …).

    A token may look back to `window` places, its own included, of `width` tokens each; None for
    all. ModelError where the attention takes no mask of ours, or the window is below 2.
    """

    def __init__(self, body: nn.Module, window: int | None = None, width: int = 1) -> None:
        self.body = body
        self.window, self.width = window, width
        if window is not None and window < 2:
            raise ModelError(f"window={window!r} holds no history; use 2 or more, or None for all")
        config: Any = body.config
        self.layers = int(config.num_hidden_layers)
        self.attention = config._attn_implementation
        if self.attention not in ("sdpa", "eager"):
            raise ModelError(
                f"steps of a stream need attention 'sdpa' or 'eager', not {self.attention!r}; "
                "load the model with attn_implementation='sdpa'"
            )

    def start(self, batch: int = 1) -> KVBlock:
        """The state before the first step."""
        return empty(batch, next(self.body.parameters()).device)

    def step(
        self, state: KVBlock, embeds: Tensor, real: Tensor | None = None
    ) -> tuple[KVBlock, Tensor]:
        """Run the tokens `[B, n, D]`; returns the next state and the last hidden states.

        `real` `[B, n]` is False where shorter streams are padded; padding leaves no trace.
        """
        step = advance(state, embeds.shape[1], real, self.window, self.width)
        kept: list[Pair] = []

        def join(layer: int, keys: Tensor, values: Tensor) -> Pair:
            if state.keys:
                keys = torch.cat([state.keys[layer], keys], dim=2)
                values = torch.cat([state.values[layer], values], dim=2)
            kept.append((keys, values))
            return keys, values

        out: Tensor = self.body(
            inputs_embeds=embeds,
            attention_mask=self.mask(step.sees[:, None], embeds.dtype),
            position_ids=step.place.clamp(min=0),
            **{CACHE: cache_over(self.layers, join, lambda _: state.n)},
            use_cache=True,
        ).last_hidden_state
        keys, values = zip(*kept, strict=True)
        state = KVBlock(keys, values, step.known, step.seen)
        return within(state, self.window, self.width), out

    def mask(self, sees: Tensor, dtype: torch.dtype) -> Tensor:
        """Turn what a token sees, `[B, 1, n, N]` bool, into the mask its attention takes."""
        if self.attention == "sdpa":
            return sees
        return torch.zeros_like(sees, dtype=dtype).masked_fill(~sees, torch.finfo(dtype).min)
