"""Shared parts of both models: prompts with a place for each kept token, and the reduction.

A request's positions are those of the whole prompt: text keeps its own, and every place of an image
or video holds the position of that item's first token. The encoder's output carries, behind its
channels, the distance of each kept token from there; it is split off when embeddings enter the
prompt and added to the positions of that step. So nothing depends on the runner, on the chunk of a
prompt that is read, or on what the prefix cache already holds.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from mmfast.core.errors import ModelError
from mmfast.models.families.adapter import adapter_for
from mmfast.models.families.tower import Tower, attention_of
from mmfast.models.reduction.probe import received_within
from mmfast.models.reduction.tower_signals import SignalSource, from_tower, sources_of
from mmfast.vllm.plan import ReducerPlan, read_plan

# Channels of a distance: time, row and column, each as two digits to this base, which every dtype
# of embeddings holds exactly.
BASE, CHANNELS = 256, 6


def shorten(ids: Sequence[int], token: int, count: int) -> list[int]:
    """Return a prompt with the first `count` of the tokens `token` and everything else."""
    out: list[int] = []
    for each in ids:
        if each == token:
            count -= 1
        if each != token or count >= 0:
            out.append(each)
    return out


def digits(distances: Tensor, like: Tensor) -> Tensor:
    """Write distances `[3, n]` as channels `[n, 6]` of the dtype and device of `like`."""
    pairs = torch.stack([distances // BASE, distances % BASE], dim=1)  # [3, 2, n]
    return pairs.flatten(0, 1).T.to(like.device, like.dtype)


def number(channels: Tensor) -> Tensor:
    """Read distances `[3, n]` from channels `[n, 6]`."""
    pairs = channels.T.to(torch.int64).unflatten(0, (3, 2))
    out: Tensor = pairs[:, 0] * BASE + pairs[:, 1]
    return out


class PrunedPrompt:
    """Mixin for vLLM's processors of Qwen models: prompts with places for the kept tokens."""

    info: Any  # vLLM's ProcessingInfo

    def _get_mm_hashes(self, inputs: Any) -> dict[str, list[str]]:
        """Name results by the spec as well, for stores that servers of other specs share."""
        parent: Any = super()
        mark = hashlib.sha256(str(read_plan()).encode()).hexdigest()[:16]
        found = parent._get_mm_hashes(inputs)
        return {kind: [f"{each}-{mark}" for each in hashes] for kind, hashes in found.items()}

    def _get_prompt_updates(
        self, mm_items: Any, hf_processor_mm_kwargs: Mapping[str, Any], out_mm_kwargs: Any
    ) -> Sequence[Any]:
        parent: Any = super()
        updates = parent._get_prompt_updates(mm_items, hf_processor_mm_kwargs, out_mm_kwargs)
        return [replace(u, replacement=partial(self._places, u, out_mm_kwargs)) for u in updates]

    def _places(self, update: Any, items: Any, index: int) -> Any:
        """Return an item's part of the prompt: ids, all of which the encoder's output replaces."""
        kind, config = update.modality, self.info.get_hf_config()
        stock = update.replacement(index)
        grid = items[kind][index][f"{kind}_grid_thw"].data.tolist()
        kept = read_plan().count(tokens_of(grid, config))
        token = getattr(config, f"{kind}_token_id")
        if isinstance(stock, list):
            return shorten(stock, token, kept)
        return type(stock).from_seq(shorten(stock.full, token, kept))


def tokens_of(grid: Sequence[int], config: Any) -> tuple[int, int, int]:
    """Return frames, rows and columns of tokens; `grid` counts patches."""
    merge = config.vision_config.spatial_merge_size
    return int(grid[0]), int(grid[1]) // merge, int(grid[2]) // merge


@dataclass(frozen=True)
class Item:
    """An image or video as vLLM's models see it in `mm_features`."""

    modality: str
    data: Mapping[str, Any]  # name: an object with `data`
    ids: Sequence[int]  # its part of the whole prompt

    def at(self, offset: int) -> SimpleNamespace:
        """Return it as a feature that begins at `offset` of a prompt."""
        place = SimpleNamespace(offset=offset, length=len(self.ids))
        return SimpleNamespace(modality=self.modality, data=self.data, mm_position=place)


class PrunedMedia:
    """Mixin for vLLM's Qwen models: reduction of images and videos by the plan."""

    config: Any
    visual: Any
    _shift: Tensor  # [3, n]: distances of the tokens of this step from their items' first
    _most: int  # tokens that vLLM measured the tower's memory for

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        refuse(vllm_config, read_plan())
        media = vllm_config.model_config.multimodal_config
        # vLLM then builds rotary tables for positions beyond the shortened prompt, and calls the
        # methods below; its runners, which would shift positions in their own way, do not see it.
        media.video_pruning_rate = 0.5
        try:
            super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
        finally:
            media.video_pruning_rate = None
        limits = vllm_config.scheduler_config
        self._most = limits.max_num_encoder_input_tokens
        self._shift = torch.zeros(3, limits.max_num_batched_tokens, dtype=torch.int64)
        self._signals: dict[SignalSource, list[Tensor]] = {}

    def embed_multimodal(self, **kwargs: Any) -> Any:
        """Encode and reduce; the signals of the tower are read on the way."""
        parent: Any = super()
        out: list[Tensor] = []
        for part in self._portions(kwargs):
            with self._reading(read_plan().needs):
                out += parent.embed_multimodal(**part)
        return tuple(out)

    def _portions(self, given: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Cut a batch of items into what the tower may get at once, one item at least.

        vLLM's scheduler fills it by the tokens that are kept.
        """
        (grids,) = (value for name, value in given.items() if name.endswith("_grid_thw"))
        ends = torch.cat([torch.zeros(1, dtype=torch.int64), grids.prod(-1).cumsum(0)])  # patches
        share = self.config.vision_config.spatial_merge_size**2
        start = 0
        while start < len(grids):
            fit = int((ends[start + 1 :] - ends[start] <= self._most * share).sum())
            stop = start + max(fit, 1)
            patches = slice(int(ends[start]), int(ends[stop]))
            tokens = slice(patches.start // share, patches.stop // share)
            rows = {"pixel_values": patches, "pixel_values_videos": patches}
            rows |= {"image_embeds": tokens, "video_embeds": tokens}
            yield {k: value[rows.get(k, slice(start, stop))] for k, value in given.items()}
            start = stop

    def _postprocess_image_embeds_evs(self, embeds: Any, inputs: Any) -> tuple[Tensor, ...]:
        return self._reduced("image", embeds, inputs)

    def _postprocess_video_embeds_evs(self, embeds: Any, inputs: Any) -> tuple[Tensor, ...]:
        return self._reduced("video", embeds, inputs)

    def _reduced(self, kind: str, embeds: Sequence[Tensor], inputs: Any) -> tuple[Tensor, ...]:
        """Reduce items `[N, D]`; each row gets the distance from its item's first token."""
        grids = field(inputs, f"{kind}_grid_thw")
        signals = self._folded(kind, grids)
        out = []
        for index, (rows, grid) in enumerate(zip(embeds, grids.tolist(), strict=True)):
            data = {f"{kind}_grid_thw": SimpleNamespace(data=torch.tensor(grid))}
            for name in self.mmfast_extras if kind == "video" else ():
                data[name] = SimpleNamespace(data=field(inputs, name)[index])
            mine = {name: values[index] for name, values in signals.items()}
            out.append(self._row(self._item(kind, data), rows, mine))
        return tuple(out)

    def _row(self, item: Item, rows: Tensor, signals: Mapping[str, Tensor]) -> Tensor:
        """Return the rows `[M, D + 6]` of an item's places: text as it is, kept tokens in between.

        Channels of `rows` behind the model's width (DeepStack) follow the others.
        """
        width = self.config.get_text_config().hidden_size
        grid = tokens_of(item.data[f"{item.modality}_grid_thw"].data.tolist(), self.config)
        chosen = read_plan().reduce(rows[:, :width], grid, signals)
        kept = chosen.apply(rows)
        ids = torch.tensor(item.ids)
        seen = ids == getattr(self.config, f"{item.modality}_token_id")
        stays = ~seen
        stays[seen.nonzero()[:, 0][chosen.keep.cpu()]] = True
        parent: Any = super()
        distances = parent.get_mrope_input_positions(list(item.ids), [item.at(0)])[0][:, stays]
        if not bool(seen.all()):
            text = self.get_language_model().embed_input_ids(ids[stays].to(rows.device))  # type: ignore[attr-defined]
            whole = rows.new_zeros(len(text), rows.shape[1])
            whole[:, :width] = text
            whole[seen[stays].to(rows.device)] = kept
            kept = whole
        return torch.cat([kept, digits(distances, kept)], dim=1)

    mmfast_extras: tuple[str, ...] = ()  # fields of a video that its positions depend on

    def _item(self, kind: str, data: Mapping[str, Any]) -> Item:
        frames, rows, columns = tokens_of(data[f"{kind}_grid_thw"].data.tolist(), self.config)
        token = getattr(self.config, f"{kind}_token_id")
        if kind == "video":
            return Item(kind, data, self.mmfast_layout(frames, rows * columns, data))
        return Item(kind, data, [token] * (frames * rows * columns))

    def mmfast_layout(self, frames: int, count: int, data: Mapping[str, Any]) -> list[int]:
        """Return the part of a prompt of a whole video: `count` places a frame."""
        return [self.config.video_token_id] * (frames * count)

    def get_mrope_input_positions(
        self, input_tokens: list[int], mm_features: Sequence[Any]
    ) -> tuple[Tensor, int]:
        """Return positions `[3, L]`, an item's places all at its first token, and vLLM's delta."""
        whole: list[int] = []
        source: list[int] = []
        features, at = [], 0
        for feature in sorted(mm_features, key=lambda each: each.mm_position.offset):
            start, length = feature.mm_position.offset, feature.mm_position.length
            source += range(len(whole), len(whole) + start - at)
            whole += input_tokens[at:start]
            item = self._item(feature.modality, feature.data)
            features.append(item.at(len(whole)))
            source += [len(whole)] * length
            whole += item.ids
            at = start + length
        source += range(len(whole), len(whole) + len(input_tokens) - at)
        whole += input_tokens[at:]
        parent: Any = super()
        positions, _ = parent.get_mrope_input_positions(whole, features)
        return positions[:, source], int(positions.max()) + 1 - len(input_tokens)

    def embed_input_ids(
        self,
        input_ids: Tensor,
        multimodal_embeddings: Any = None,
        *,
        is_multimodal: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Merge text and media; the distances are kept for `forward`."""
        self._shift.zero_()
        if multimodal_embeddings is not None and len(multimodal_embeddings):
            assert is_multimodal is not None
            distances = number(torch.cat([each[:, -CHANNELS:] for each in multimodal_embeddings]))
            places = is_multimodal.nonzero()[:, 0].to(self._shift.device)
            self._shift[:, places] = distances.to(self._shift.device)
            multimodal_embeddings = [each[:, :-CHANNELS] for each in multimodal_embeddings]
        parent: Any = super()
        out: Tensor = parent.embed_input_ids(
            input_ids, multimodal_embeddings, is_multimodal=is_multimodal, **kwargs
        )
        return out

    def forward(self, input_ids: Any, positions: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the LLM; a graph needs the positions where they lie, so they change in place."""
        count = min(positions.shape[-1], self._shift.shape[-1])
        positions[:, :count].add_(self._shift[:, :count])
        self._shift.zero_()  # a step without embeddings, as idle ranks run, has these positions too
        parent: Any = super()
        return parent.forward(input_ids, positions, *args, **kwargs)

    @contextmanager
    def _reading(self, needs: Sequence[str]) -> Iterator[None]:
        """Read the signals of the tower while it runs."""
        self._signals = {}
        with ExitStack() as stack:
            for source in dict.fromkeys(self._sources(needs).values()):
                module: Any = attention_of(self.visual.blocks[source.block])
                hook = partial(self._record, source)
                stack.callback(module.attn.register_forward_pre_hook(hook, with_kwargs=True).remove)
            yield

    def _sources(self, needs: Sequence[str]) -> dict[str, SignalSource]:
        tower = Tower(self, self.visual, self.visual.blocks, packed=True, class_token=False)
        return sources_of(tower, from_tower(needs), {})

    def _record(self, source: SignalSource, module: Any, _: Any, given: Mapping[str, Any]) -> None:
        query, key = (given[name].transpose(1, 2) for name in ("query", "key"))  # [1, H, S, d]
        ends = given["cu_seqlens"]
        if ends is None or int(ends[-1]) != query.shape[2]:
            raise ModelError(
                "this attention of vLLM's vision tower does not tell where its sequences end, so "
                "its weights cannot be read; take a method that reads features alone: divprune"
            )
        what = key.mean(1)[0] if source.what == "keys" else None
        if what is None:
            what = received_within(query, key, ends, module.scale)[0][:, None]
        self._signals.setdefault(source, []).append(what)

    def _folded(self, kind: str, grids: Tensor) -> dict[str, list[Tensor]]:
        """Signals by name, of each item: attention `[N]`, keys `[N, d]`."""
        adapter, out = adapter_for(self), {}
        for name, source in self._sources(read_plan().needs).items():
            patches = torch.cat(self._signals[source]).float()
            items = adapter.fold(self, kind, patches, {f"{kind}_grid_thw": grids})
            out[name] = items if source.what == "keys" else [each[:, 0] for each in items]
        self._signals = {}
        return out


def refuse(config: Any, plan: ReducerPlan) -> None:
    """Raise a `ModelError` where a server's options and the plan do not go together."""
    parallel, media = config.parallel_config, config.model_config.multimodal_config
    tower = from_tower(plan.needs)
    layers = getattr(config, "compilation_config", None)
    for reason in (
        media.video_pruning_rate and "--video-pruning-rate, vLLM's own pruning",
        parallel.pipeline_parallel_size > 1 and "--pipeline-parallel-size above 1",
        config.speculative_config is not None and "--speculative-config",
        # Halves of a batch run apart, and each would read the distances of the first.
        getattr(parallel, "use_ubatching", False) and "--enable-dbo or --ubatch-size",
        # vLLM gives an adapter its rows of the tower by the tokens that are kept.
        getattr(config.lora_config, "enable_tower_connector_lora", False)
        and "--enable-tower-connector-lora",
        os.environ.get("VLLM_USE_RUST_FRONTEND", "0") != "0"
        and "VLLM_USE_RUST_FRONTEND, whose prompts have a place for every token",
        tower and parallel.tensor_parallel_size > 1 and "a split vision tower",
        tower and getattr(layers, "compile_mm_encoder", False) and "a compiled vision tower",
        tower and getattr(media, "enable_mm_embeds", False) and "--enable-mm-embeds",
    ):
        if reason:
            raise ModelError(
                f"mmfast's {plan} does not work with {reason}; leave one of the two out"
            )


def field(inputs: Any, name: str) -> Any:
    """Return a field of vLLM's inputs, mappings in some releases and objects in others."""
    value = getattr(inputs, name, None)
    return inputs[name] if value is None else value
