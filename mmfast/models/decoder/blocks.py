"""Decoder layers as they are called on pieces of streams: stock, or the same in fewer calls.

At a hidden width of a few hundred a CPU spends most of a decoder layer between operations. `Lean`
does what a Llama-like layer does in half as many, on weights joined once.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmfast.core.locks import WholeLock
from mmfast.models.cache_name import CACHE
from mmfast.models.reduction.cache_layers import StoreLayer
from mmfast.ops.stream_cache import RowBuffer, TokenPlaces


def lean_norm(norm: Any) -> Callable[[Tensor], Tensor]:
    """A stock RMS norm in five operations."""
    return partial(_weighted, bare_norm(norm), norm.weight.detach())


def _weighted(bare: Callable[[Tensor], Tensor], weight: Tensor, x: Tensor) -> Tensor:
    return bare(x).mul_(weight)


def bare_norm(norm: Any) -> Callable[[Tensor], Tensor]:
    """The norm without its weight, which the next product has taken in."""
    eps = torch.tensor(norm.variance_epsilon, dtype=norm.weight.dtype)
    return partial(_normed, eps, 1 / norm.weight.numel())


def _normed(eps: Tensor, share: float, x: Tensor) -> Tensor:
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x * torch.addcmul(eps, length, length, value=share).rsqrt_()


def lean_entry(norms: Sequence[Any], linear: Any) -> Callable[[Tensor], Tensor]:
    """A linear layer on inputs `[.., k D]` side by side, each normed: all of them at once."""
    bare, parts = bare_norm(norms[0]), len(norms)
    scale = torch.cat([norm.weight.detach() for norm in norms])
    return partial(_entered, bare, parts, (linear.weight.detach() * scale).t().contiguous())


def _entered(bare: Callable[[Tensor], Tensor], parts: int, weight: Tensor, x: Tensor) -> Tensor:
    normed = bare(x.view(-1, parts, x.shape[-1] // parts)).view(-1, x.shape[-1])
    return normed.mm(weight).view(*x.shape[:-1], -1)


def stock_entry(norms: Sequence[Any], linear: Any) -> Callable[[Tensor], Tensor]:
    """The same with the modules themselves."""
    return partial(_entered_stock, norms, linear)


def _entered_stock(norms: Sequence[Any], linear: Any, x: Tensor) -> Tensor:
    pieces = x.chunk(len(norms), -1)
    joined = [norm(piece) for norm, piece in zip(norms, pieces, strict=True)]
    return F.linear(torch.cat(joined, -1), linear.weight)


def head_norm(
    attention: Any, queries: int, keys: int, order: Tensor
) -> Callable[[Tensor], Tensor] | None:
    """The norms of queries and keys as one, where the layer has them; columns in this order."""
    if not hasattr(attention, "q_norm"):
        return None
    q, k = attention.q_norm, attention.k_norm
    weight = torch.cat((q.weight.expand(queries, -1), k.weight.expand(keys, -1))).detach()
    weight = weight[:, None, None, order]
    eps = torch.tensor(q.variance_epsilon, dtype=weight.dtype)

    return partial(_normed_heads, eps, weight)


def _normed_heads(eps: Tensor, weight: Tensor, x: Tensor) -> Tensor:  # [queries + keys, B, n, d]
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x * torch.addcmul(eps, length, length, value=1 / x.shape[-1]).rsqrt_() * weight


Block = Callable[[Tensor, RowBuffer, TokenPlaces], Tensor]

_LEAN = ("LlamaDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer", "MistralDecoderLayer")
_LEAN_NUMBERS = 4_000_000  # of a layer; larger ones spend their time in the products
_FEW = 28  # most rows of a product on a packed weight


def lean_fits(layer: nn.Module) -> bool:
    """Test if `Lean` does what the layer does, and gains by it."""
    weight = next(layer.parameters())
    return (
        type(layer).__name__ in _LEAN
        and weight.device.type == "cpu"
        and weight.dtype in (torch.float32, torch.float64)
        and sum(p.numel() for p in layer.parameters()) <= _LEAN_NUMBERS
    )


class Lean:
    """A Llama-like decoder layer on `[B, n, D]`, its weights joined and laid out for products.

    Columns of queries and keys that RoPE turns together lie side by side, so that turning is one
    product of complex numbers.
    """

    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        parts = (attention.q_proj, attention.k_proj, attention.v_proj)
        self.width = attention.q_proj.in_features
        self.head = attention.head_dim
        self.keys = attention.k_proj.out_features // self.head
        self.queries = attention.q_proj.out_features // self.head
        self.turned = self.queries + self.keys
        self.scaling = attention.scaling
        pairs = torch.arange(self.head).view(2, -1).t().flatten()
        self.qkv = WideProduct(*_joined(parts, layer.input_layernorm))
        self.out = WideProduct(*_joined((attention.o_proj,)))
        self.through = WideProduct(*self._through())
        columns = torch.arange(self.turned * self.head).view(self.turned, -1)
        self.qkv.sort(columns[:, pairs].flatten())
        both = (mlp.gate_proj, mlp.up_proj)
        self.up = WideProduct(*_joined(both, layer.post_attention_layernorm))
        self.down = WideProduct(*_joined((mlp.down_proj,)))
        self.norms = layer.input_layernorm, layer.post_attention_layernorm
        self.before = bare_norm(layer.input_layernorm)
        self.between = bare_norm(layer.post_attention_layernorm)
        name = type(mlp.act_fn).__name__
        self.act: Callable[[Tensor], Tensor] = F.silu if "SiLU" in name else mlp.act_fn
        self.head_norm = head_norm(attention, self.queries, self.keys, pairs)

    def __call__(self, x: Tensor, slot: RowBuffer, place: TokenPlaces) -> Tensor:
        """The layer on new tokens, behind those of the slot."""
        batch, n, width = x.shape
        rows = batch * n
        flat = x.view(rows, width) if x.is_contiguous() else x.reshape(rows, width)
        if place.alone:
            flat = self.through(self.before(flat), flat)
        else:
            mixed = self._mixed(self.before(flat), batch, n, slot, place)
            flat = self.out(mixed, flat)
        normed = self.between(flat)
        gate, up = self.up(normed).chunk(2, -1)
        inner = self.act(gate).mul_(up)
        return self.down(inner, flat).view(batch, n, width)

    def _mixed(
        self, normed: Tensor, batch: int, n: int, slot: RowBuffer, place: TokenPlaces
    ) -> Tensor:
        heads = self.qkv(normed).view(batch, n, -1, self.head).permute(2, 0, 1, 3)
        turned = heads[: self.turned]  # [queries + keys, B, n, d]
        if self.head_norm is not None:
            turned.copy_(self.head_norm(turned))
        pairs = turned.view(self.turned, batch, n, self.head // 2, 2)
        torch.view_as_complex(pairs).mul_(place.turn)
        both = heads[self.queries :].view(2, self.keys, batch, n, self.head)
        keys, values = slot.put(both.transpose(1, 2), place)
        mixed = F.scaled_dot_product_attention(
            heads[: self.queries].transpose(0, 1),
            keys,
            values,
            attn_mask=place.mask,
            is_causal=place.causal,
            scale=self.scaling,
            enable_gqa=self.queries != self.keys,
        )
        return mixed.transpose(1, 2).reshape(batch * n, -1)

    def _through(self) -> tuple[Tensor, Tensor | None]:
        """Attention where a token sees itself alone: its own values, projected, as one product."""
        first, groups = self.turned * self.head, self.queries // self.keys
        rows = torch.arange(self.keys * self.head).view(self.keys, self.head)
        rows = first + rows.repeat_interleave(groups, 0).flatten()  # one per query head
        out = self.out.weight.double()
        through = (self.qkv.weight[:, rows].double() @ out).to(self.out.weight.dtype)
        if self.qkv.bias is None:
            return through, self.out.bias
        bias = (self.qkv.bias[rows].double() @ out).to(self.out.weight.dtype)
        return through, bias if self.out.bias is None else bias + self.out.bias


class LoneModule:
    """A draft module on one token of one stream, which sees itself alone, in few operations.

    The module is a linear layer on the embedding and the hidden state, each normed, a Llama-like
    layer, and the final norm. Of one token a norm is a number, the factor of the product behind it.
    """

    def __init__(self, norms: Sequence[Any], linear: Any, layer: Lean, final: Any) -> None:
        scale = torch.cat([norm.weight.detach() for norm in norms])
        entries = (linear.weight.detach() * scale).t().contiguous()
        self.of_embedding, self.of_hidden = (part.t() for part in entries.chunk(2))
        self.through, self.through_bias = layer.through.weight.t(), layer.through.bias
        self.up, self.up_bias = layer.up.weight.t(), layer.up.bias
        self.down, self.down_bias = layer.down.weight.t(), layer.down.bias
        self.act, self.weight = layer.act, final.weight.detach()
        # Never read: their factor is 0.
        self.none, self.nothing = (self.weight.new_zeros(w.shape[0]) for w in (self.down, self.up))
        self.eps = [norm.variance_epsilon for norm in (*norms, *layer.norms, final)]

    def __call__(self, embedding: Tensor, hidden: Tensor) -> Tensor:
        """Embedding and normed hidden state `[D]` to the next normed hidden state `[D]`."""
        addmv, (e, h, before, between, final) = torch.addmv, self.eps
        factor = _factor(embedding, e)
        x = addmv(self.none, self.of_embedding, embedding, beta=0, alpha=factor)
        x = addmv(x, self.of_hidden, hidden, alpha=_factor(hidden, h))
        x = addmv(x, self.through, x, alpha=_factor(x, before))
        if self.through_bias is not None:
            x.add_(self.through_bias)
        both = addmv(self.nothing, self.up, x, beta=0, alpha=_factor(x, between))
        if self.up_bias is not None:
            both.add_(self.up_bias)
        gate, up = both.chunk(2)
        x = addmv(x, self.down, self.act(gate).mul_(up))
        if self.down_bias is not None:
            x.add_(self.down_bias)
        normed: Tensor = (x * self.weight).mul_(_factor(x, final))
        return normed


def _factor(x: Tensor, eps: float) -> float:
    """One over the root mean square of `[D]`."""
    square: float = torch.dot(x, x).item()
    factor: float = (square / x.shape[0] + eps) ** -0.5
    return factor


class Stock:
    """A decoder layer of any class with stock arguments."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self.names = inspect.signature(layer.forward).parameters
        self.cache_name = "layer_past" if "layer_past" in self.names else CACHE

    def __call__(self, x: Tensor, slot: RowBuffer, place: TokenPlaces) -> Tensor:
        """The layer on new tokens, behind those of the slot."""
        mask = place.mask
        cache = {self.cache_name: StoreLayer(partial(slot.put_two, place=place)), "use_cache": True}
        mask = mask[None, None] if mask is not None and mask.ndim == 2 else mask
        return self.run(x, mask, place, **cache)

    def run(self, x: Tensor, mask: Tensor | None, place: TokenPlaces, **cache: Any) -> Tensor:
        """The layer on tokens at these places, under this mask; differentiable."""
        if "position_embeddings" in self.names:
            cache["position_embeddings"] = place.angles
        elif "position_ids" in self.names:  # it turns queries and keys by itself (GPT-J)
            even = torch.arange(place.start, place.start + place.n, device=x.device)[None]
            cache["position_ids"] = even if place.at is None else place.at[1]
        if "use_cache" not in self.names:
            cache.pop("use_cache", None)
        found = self.layer(x, attention_mask=mask, **cache)
        hidden: Tensor = found[0] if isinstance(found, tuple) else found
        return hidden


def _joined(parts: Any, norm: Any = None) -> tuple[Tensor, Tensor | None]:
    """Weights of linear layers side by side, `[in, out]`, times a norm's, and their biases."""
    weight = torch.cat([part.weight.detach() for part in parts])
    weight = (weight if norm is None else weight * norm.weight.detach()).t().contiguous()
    biases = [part.bias for part in parts]
    if all(bias is None for bias in biases):
        return weight, None
    return weight, torch.cat([bias.detach() for bias in biases])


@cache
def xnn_alone() -> bool:
    """Test if torch has XNNPACK's product (2.14 has not), and it runs on the thread that calls.

    XNNPACK has as many threads as were set first.
    """
    if not hasattr(torch.ops.prepacked, "linear_clamp_run"):
        return False
    torch.set_num_threads(1)  # as is; where nobody has set any yet, XNNPACK now has one
    prepacked, x = torch.ops.prepacked, torch.zeros(16, 256)
    packed = prepacked.linear_clamp_prepack(torch.zeros(256, 256), None)
    begun, whole, own = time.thread_time(), time.process_time(), 0.0
    while own < 0.02:  # times of other threads are counted every few milliseconds
        prepacked.linear_clamp_run(x, packed)
        own = time.thread_time() - begun
    return time.process_time() - whole < 1.2 * own


class WideProduct:
    """A product with a weight `[in, out]` and its bias; of a few rows, on a packed weight.

    The library would copy a wide matrix before every product, which costs as much as reading it
    once more; XNNPACK packs it once. That is of one thread: its threads wait for each other in
    loops, which takes a hundred times as long where others want the cores.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias
        fits = weight.dtype == torch.float32 and weight.device.type == "cpu"
        self._few = _FEW if fits else 0
        self._packed: Any = None  # once it is asked for
        self._turn = WholeLock()  # a packed weight holds the input that it is run on

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_packed": None}  # which the library cannot save

    def sort(self, order: Tensor) -> None:
        """Put the first columns into another order."""
        index = torch.cat((order, torch.arange(len(order), self.weight.shape[1])))
        self.weight = self.weight[:, index].contiguous()
        self.bias = None if self.bias is None else self.bias[index]

    def __call__(self, x: Tensor, plus: Tensor | None = None) -> Tensor:
        """Rows `[m, in]` to `[m, out]`, in the faster way; to `plus` where given."""
        few = 1 < x.shape[0] <= self._few and not x.requires_grad
        if few and torch.get_num_threads() == 1 and xnn_alone():
            found = self._run(x)
            return found if plus is None else found.add_(plus)
        if plus is None:
            return (
                x.mm(self.weight) if self.bias is None else torch.addmm(self.bias, x, self.weight)
            )
        found = torch.addmm(plus, x, self.weight)
        return found if self.bias is None else found.add_(self.bias)

    def _run(self, x: Tensor) -> Tensor:
        prepacked = torch.ops.prepacked
        # Else a packed weight is asked, at the price of the product, if it overrides functions.
        with self._turn, torch._C.DisableTorchFunctionSubclass():
            if self._packed is None:
                self._packed = prepacked.linear_clamp_prepack(self.weight.t(), self.bias)
            found: Tensor = prepacked.linear_clamp_run(x, self._packed)
        return found
