"""Prefill of a prompt of which parts were read before, elsewhere or at the same place.

Keys are stored before RoPE and rotated to where they stand now, by the model's own modules: under
M-RoPE on three axes. What a part was told by the tokens before it is another matter: of media seen
behind another beginning, a share of the tokens is read again in every layer, and the rest is taken
as it was (CacheBlend, Yao et al., 2405.16444; Cache-Craft, Agarwal et al., 2502.15734).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from einops import rearrange
from torch import Tensor
from transformers import DynamicCache

from mmfast.core.errors import ModelError
from mmfast.core.kv import KVBlock
from mmfast.models.cache_name import CACHE
from mmfast.models.decoder.grouped import grouped
from mmfast.models.decoder.rotary import Raw
from mmfast.models.patching import override
from mmfast.models.reduction.cache_layers import Pair, cache_over
from mmfast.models.reduction.inputs import PromptRows
from mmfast.streams.engine import Engine
from mmfast.streams.reuse.plan import ReusePlan

LOOK = 1  # decoder layer whose keys and values first tell which tokens deviate: made by layer 0
WIDE = 1.5  # times the plan's share that run behind the first look; see `narrowing`


@dataclass(frozen=True, eq=False)
class SeenPart:
    """Keys and values that were stored, and the first of the places `start:stop` they go to.

    `exact` says that all before them is the same as it was; `impact` `[n]` is the share of
    attention that each token paid to what stood before the part, `mean` `[D]` the mean embedding of
    what that was.
    """

    start: int
    block: KVBlock
    exact: bool
    impact: Tensor | None = None
    mean: Tensor | None = None

    @property
    def stop(self) -> int:
        """Place behind the last one."""
        return self.start + self.block.n


@dataclass(eq=False)
class PrefilledPrompt:
    """Keys and values of a prompt: `layers` hold `[2, H, n, d]`, keys rotated.

    `raw` are keys before RoPE of the tokens from `first` on, `[H, n - first, d]` per layer; none
    where tokens were taken from elsewhere, since what follows them is near the truth, not the
    truth. `impact` has attention of the queries of layer `LOOK`. `computed` counts tokens that ran,
    the mean of the layers from `LOOK` on; `hidden` `[D]` is the last one's.
    """

    layers: list[Tensor]
    first: int
    computed: int
    hidden: Tensor
    raw: dict[int, Tensor] = field(default_factory=dict)
    query: Tensor | None = None  # [Hq, n - first, d] of layer `LOOK`, rotated

    def part(self, start: int, stop: int, positions: Tensor) -> KVBlock:
        """Keys before RoPE and values of tokens `start:stop` at positions `[A, n]`."""
        at = slice(start - self.first, stop - self.first)
        relative = (positions[:, start:stop] - positions[:, start : start + 1]).cpu()
        keys = tuple(self.raw[i][:, at] for i in range(len(self.layers)))
        values = tuple(layer[1, :, start:stop] for layer in self.layers)
        return KVBlock(keys, values, relative, relative[:, -1] + 1)

    def impact(self, start: int, stop: int, scaling: float) -> Tensor | None:
        """Share of attention `[stop - start]` that tokens pay to what stands before `start`."""
        if self.query is None or not start:
            return None
        keys = self.layers[min(LOOK, len(self.layers) - 1)][0, :, :stop]
        query = self.query[:, start - self.first : stop - self.first]
        grouped = rearrange(query, "(h g) q d -> h (g q) d", h=len(keys))
        scores = (grouped @ keys.transpose(1, 2)).float() * scaling
        scores = rearrange(scores, "h (g q) m -> h g q m", q=stop - start)
        own = torch.ones(stop - start, stop, dtype=torch.bool, device=keys.device)
        shares = scores.masked_fill_(~own.tril(start), -torch.inf).softmax(-1)
        return shares[..., :start].sum(-1).mean((0, 1))

    def cache(self, config: Any, length: int) -> DynamicCache:
        """A cache of transformers with the first `length` tokens."""
        found = DynamicCache(config=config)
        for i, layer in enumerate(self.layers):
            found.update(*layer[:, None, :, :length].unbind(0), i)  # which copies
        return found


class _Chosen(BaseException):
    """The keys and values of a layer tell which tokens to read again."""


class ReusePrefill:
    """Prefills prompts of one model; holds no state of a prompt, and any thread may use it.

    ModelError where the layers are not of full attention, keys cannot be read before RoPE, or the
    attention takes no mask of ours.
    """

    def __init__(self, model: Any) -> None:
        name = model.get_decoder().config._attn_implementation
        if name not in ("sdpa", "eager"):
            raise ModelError(
                f"reuse of keys and values needs attention 'sdpa' or 'eager', not {name!r}; load "
                "the model with attn_implementation='sdpa', or use reuse='encoder'"
            )
        self.engine = Engine(model)
        self.decoder = self.engine.decoder

    @property
    def scaling(self) -> float:
        """Factor of attention scores."""
        attention: Any = self.engine.attentions[min(LOOK, len(self.engine.attentions) - 1)]
        return float(attention.scaling)

    @torch.no_grad()
    def run(
        self,
        rows: PromptRows,
        seen: Sequence[SeenPart] = (),
        plan: ReusePlan | None = None,
        stop: int | None = None,
    ) -> PrefilledPrompt:
        """Read the tokens of a prompt up to `stop`, taking what was `seen` where it goes.

        Exact parts stand at the beginning, side by side; of others the plan's share is read again.
        ModelError under `torch.autocast`, whose values are not those of the weights.
        """
        if torch.is_autocast_enabled(rows.hidden.device.type):
            raise ModelError(
                "reuse= keeps keys and values in the precision of the weights, and torch.autocast "
                "rounds them to another; leave autocast, load the model with dtype='bfloat16', or "
                "give reuse='encoder'"
            )
        n = len(rows.hidden) if stop is None else stop
        first = max((part.stop for part in seen if part.exact), default=0)
        return _Run(self.engine, rows, seen, plan, first, n).run()


class _Run:
    """One prefill: tokens `first:n`, of which `rows` run once they are chosen, else all."""

    def __init__(
        self,
        engine: Engine,
        prompt: PromptRows,
        seen: Sequence[SeenPart],
        plan: ReusePlan | None,
        first: int,
        n: int,
    ) -> None:
        self.engine, self.prompt, self.seen, self.plan = engine, prompt, seen, plan
        self.first, self.n = first, n
        self.layers: list[Tensor] = []
        self.elsewhere = [part for part in seen if not part.exact]
        self.rows: Tensor | None = None  # of the tokens that run, ascending, from `first` on
        last = engine.turner.layers - 1
        self._narrow: dict[int, float] = {}
        if plan is not None and plan.mode == "blend":
            self._narrow = narrowing(last, plan.recomputed)
        self._look, self._last = min(LOOK, last), last
        self._reused = torch.zeros(n, dtype=torch.bool, device=prompt.hidden.device)
        for part in self.elsewhere:
            self._reused[part.start : part.stop] = True
        self._moved = sum(part.block.n for part in self.elsewhere)
        again = 0 if plan is None else math.ceil(plan.recomputed * self._moved)
        self.computed = n - first - self._moved + again  # the mean of the layers from the look on
        self._choosing = self._owned = False
        self._mask: Any = None
        self._angles: tuple[Any, ...] | None = None
        self._thread = threading.get_ident()

    def run(self) -> PrefilledPrompt:
        if self.elsewhere and not self._narrow:
            assert self.plan is not None
            score = torch.cat([_impact_of(part) for part in self.elsewhere])
            places = self._reused.nonzero()[:, 0]
            self._choose(places, score.to(places.device), self.plan.recomputed)
        self.layers = self._loaded() if self.seen else []
        engine, prompt, new = self.engine, self.prompt, slice(self.first, self.n)
        places = prompt.positions[:, new]
        weight = engine.decoder.get_input_embeddings().weight
        cache = cache_over(engine.turner.layers, self._write, lambda layer: self.first)
        raw, recording = Raw(), nullcontext()  # type: Raw, Any
        if not self.elsewhere:
            recording = engine.capture.recording()
        with recording as found, self._partly() if self.elsewhere else nullcontext():
            raw = found or raw
            hidden = engine.decoder(
                inputs_embeds=prompt.hidden[new][None].to(weight.device, weight.dtype),
                position_ids=places[:, None] if engine.turner.axes > 1 else places,
                **{CACHE: cache},
                use_cache=True,
                **self._planes(),
            ).last_hidden_state
        keys = {layer: each[0] for layer, each in raw.keys.items()}
        query = raw.queries.get(self._look)
        if query is not None:
            query = engine.turner.rotate(self._look, query[0], places)
        return PrefilledPrompt(self.layers, self.first, self.computed, hidden[0, -1], keys, query)

    def _write(self, layer: int, keys: Tensor, values: Tensor) -> Pair:
        """Store keys and values `[1, H, q, d]` of the tokens that run; return those of all."""
        if layer == len(self.layers):  # nothing was seen
            self.layers.append(keys.new_empty(2, keys.shape[1], self.n, keys.shape[3]))
        own = self.layers[layer]
        at = self._at.to(own.device)
        share, score = self._narrow.get(layer), None
        if self._choosing and share is not None:
            score = self._deviation(own, at, keys[0], values[0])
        own[0].index_copy_(1, at, keys[0])
        own[1].index_copy_(1, at, values[0])
        if score is not None and share is not None:
            self._choose(self._at, score, share)
        if self._choosing:
            raise _Chosen
        return own[0][None], own[1][None]

    @property
    def _at(self) -> Tensor:
        """Places `[q]` of the tokens that run."""
        if self.rows is None:
            return torch.arange(self.first, self.n, device=self._reused.device)
        return self.rows + self.first

    def _loaded(self) -> list[Tensor]:
        """Room for all layers, `[2, H, n, d]` each, with all that was seen at its new place.

        Layers of one device lie in one tensor, and keys of a part turn in one operation there.
        """
        turner, first = self.engine.turner, self.seen[0].block
        rooms: dict[Any, list[int]] = {}
        for layer, keys in enumerate(first.keys):
            rooms.setdefault((turner.device(layer), keys.shape[0], keys.shape[2]), []).append(layer)
        found: dict[int, Tensor] = {}
        for (device, heads, width), group in rooms.items():
            room = first.keys[group[0]].new_empty(
                len(group), 2, heads, self.n, width, device=device
            )
            for part in self.seen:
                own = room[:, :, :, part.start : part.stop]
                raw = torch.stack([part.block.keys[i].to(device) for i in group])
                where = self.prompt.positions[:, part.start : part.stop]
                own[:, 0] = turner.rotate(group[0], raw, where)
                torch.stack([part.block.values[i].to(device) for i in group], out=own[:, 1])
            found |= dict(zip(group, room, strict=True))
        return [found[layer] for layer in range(turner.layers)]

    def _deviation(self, own: Tensor, at: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Return how far stored keys and values at places `[q]` are from those made here, `[q]`."""
        total = torch.zeros(len(at), device=own.device)
        for plane, fresh in enumerate((keys, values)):
            held = own[plane].index_select(1, at)
            size = fresh.float().square().sum((0, 2)).mean().clamp_min(1e-12)
            total += (fresh - held).float().square().sum((0, 2)) / size
        return total

    def _choose(self, at: Tensor, score: Tensor, share: float) -> None:
        """Let all run that is not seen, and a share of the rest `at` places, of the top scores."""
        count = math.ceil(share * self._moved)
        score = score.to(at.device).masked_fill(~self._reused[at], -torch.inf)
        runs = (~self._reused).float()
        runs[: self.first] = 0
        runs[at[score.topk(count).indices]] = 1
        running = self.n - self.first - self._moved + count  # known without asking a device
        self._run_on(runs.topk(running).indices.sort().values - self.first)

    def _run_on(self, rows: Tensor) -> None:
        self.rows, self._angles = rows, None

    @contextmanager
    def _partly(self) -> Iterator[None]:
        """Let layers behind the choice run on the chosen tokens alone."""
        with ExitStack() as stack:
            stack.enter_context(grouped(self.engine.model))
            for index, layer in enumerate(self.engine.decoder.layers):
                stack.enter_context(override(layer, "forward", partial(self._layer, index)))
            for index in {*self._narrow, self._last}:
                asks: Any = getattr(self.engine.attentions[index], "q_proj", None)
                if hasattr(asks, "out_features"):
                    stack.enter_context(override(asks, "forward", partial(self._queries, asks)))
            yield

    def _queries(self, module: Any, stock: Callable[..., Any], hidden: Tensor) -> Any:
        """No queries are made where only keys and values are asked for."""
        if not self._choosing or threading.get_ident() != self._thread:
            return stock(hidden)
        return hidden.new_zeros(*hidden.shape[:-1], module.out_features)

    def _layer(
        self, index: int, stock: Callable[..., Any], hidden: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        if threading.get_ident() != self._thread:
            return stock(hidden, *args, **kwargs)
        if index in self._narrow or index == self._last:
            self._choosing = True
            try:  # stops once keys and values of all tokens are known, before any attention
                self._through(stock, hidden, *args, **kwargs)
            except _Chosen:
                pass
            finally:
                self._choosing = False
        if self.rows is None:
            return stock(hidden, *args, **kwargs)
        if index == self._last:  # nothing reads what this layer makes of other tokens
            self._run_on(self.rows[-1:])
        if not self._owned:  # from here on rows are written in place
            hidden, self._owned = hidden.clone(), True
        found = self._through(stock, hidden, *args, **kwargs)
        return hidden.index_copy_(1, self.rows.to(hidden.device), found)

    def _through(
        self, stock: Callable[..., Any], hidden: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Run a layer on the tokens that run, `[1, q, D]`."""
        if self.rows is None:
            return stock(hidden, *args, **kwargs)  # type: ignore[no-any-return]
        rows = self.rows.to(hidden.device)
        if self._angles is None or self._angles[0].device != hidden.device:
            turned = kwargs["position_embeddings"]
            self._angles = tuple(each.index_select(-2, rows) for each in turned)
            self._mask = self._sees(rows, hidden.dtype)
        kwargs |= {"position_embeddings": self._angles, "attention_mask": self._mask}
        kwargs["position_ids"] = None
        found = stock(hidden.index_select(1, rows), *args, **kwargs)
        through: Tensor = found[0] if isinstance(found, tuple) else found
        return through

    def _sees(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """The mask `[1, 1, rows, n]`: a token sees all up to itself, taken or read."""
        places = torch.arange(self.n, device=rows.device)
        hidden = (places > rows[:, None] + self.first)[None, None]
        return torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, torch.finfo(dtype).min)

    def _planes(self) -> dict[str, Any]:
        """DeepStack features of the tokens that are read."""
        visual = self.prompt.visual[self.first : self.n]
        if not self.prompt.planes or not bool(visual.any()):
            return {}
        start = int(self.prompt.visual[: self.first].sum())
        span = slice(start, start + int(visual.sum()))
        planes = [plane[span] for plane in self.prompt.planes]
        return {"visual_pos_masks": visual[None], "deepstack_visual_embeds": planes}


def narrowing(last: int, share: float) -> dict[int, float]:
    """Layers of 0 to `last` that choose among the tokens that run, and the share they leave.

    The choice narrows, since a layer tells more of a token the more layers before it were read
    anew. What runs more behind the first look runs less behind the second: `share` is the mean of
    all layers from `LOOK` on, as in CacheBlend.
    """
    behind = last - LOOK
    if behind < 1:
        return {min(LOOK, last): share}
    wide = min(1.0, WIDE * share)
    return {LOOK: wide, LOOK + 1: ((behind + 1) * share - wide) / behind}


def _impact_of(part: SeenPart) -> Tensor:
    """Return how much the context mattered to a part; nothing stood before a first one."""
    return torch.zeros(part.block.n) if part.impact is None else part.impact.cpu()
