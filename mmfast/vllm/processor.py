"""Shared parts of both models: prompts with a place for each kept token, and the reduction."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mmfast.core.errors import MmfastError, ModelError, SpecError
from mmfast.core.reduction import Reduction
from mmfast.vllm.plan import KEY, ReducerPlan, read_plan


def recount(
    ids: Sequence[int], counts: Sequence[int], *, video: int, start: int, end: int
) -> list[int]:
    """Return a prompt with other numbers of places per frame.

    A frame is a run of tokens `video`, of any length, between tokens `start` and `end`; images and
    text stay unchanged. More or fewer frames than counts raise `MmfastError`.
    """
    out: list[int] = []
    rest, at, frames = list(counts), 0, 0
    while at < len(ids):
        out.append(ids[at])
        at += 1
        if out[-1] != start:
            continue
        stop = at
        while stop < len(ids) and ids[stop] == video:
            stop += 1
        if stop == len(ids) or ids[stop] != end:
            continue  # an image, or text
        frames += 1
        out += [video] * (rest.pop(0) if rest else 0)
        at = stop
    if frames != len(counts):
        raise MmfastError(
            f"the prompt has {frames} frames where {len(counts)} were expected: this vLLM lays "
            "videos out in a way that mmfast does not know; use the version that its notes name"
        )
    return out


def lumped(count: int, frames: int) -> list[int]:
    """Return the places per frame of a pruned video, all in the first frame, as in vLLM.

    They only reserve room; the embeddings decide the frame of each token.
    """
    return [count] + [0] * (frames - 1)


class PrunedPrompt:
    """Mixin for vLLM's processors of Qwen models: prompts with places for the kept tokens."""

    info: Any  # vLLM's ProcessingInfo

    def _get_prompt_updates(
        self, mm_items: Any, hf_processor_mm_kwargs: Mapping[str, Any], out_mm_kwargs: Any
    ) -> Sequence[Any]:
        plan, kwargs = self._plan(hf_processor_mm_kwargs)
        parent: Any = super()
        updates = parent._get_prompt_updates(mm_items, kwargs, out_mm_kwargs)
        if plan is None:
            return list(updates)

        def counted(update: Any) -> Any:
            def replacement(index: int) -> Any:
                grid = out_mm_kwargs["video"][index]["video_grid_thw"].data
                return self._shorter(update.replacement(index), plan, grid)

            return replace(update, replacement=replacement)

        return [counted(u) if u.modality == "video" else u for u in updates]

    def _shorter(self, stock: Any, plan: ReducerPlan, grid: torch.Tensor) -> Any:
        """Return a video's part of the prompt, with places for the kept tokens.

        `stock` is vLLM's part: token ids, or its `PromptUpdateDetails` around them. `grid` counts
        patches: frames, rows, columns.
        """
        kept = self._kept(plan, grid)
        if isinstance(stock, list):  # Qwen2.5-VL: nothing but places
            return [self.info.get_hf_config().video_token_id] * kept
        frames = lumped(kept, int(grid[0]))
        return type(stock).from_seq(recount(stock.full, frames, **self._ids()))

    def _call_hf_processor(
        self, prompt: str, mm_data: Any, mm_kwargs: Mapping[str, Any], tok_kwargs: Any
    ) -> Any:
        _, kwargs = self._plan(mm_kwargs)
        parent: Any = super()
        return parent._call_hf_processor(prompt, mm_data, kwargs, tok_kwargs)

    def _plan(self, kwargs: Mapping[str, Any]) -> tuple[ReducerPlan | None, dict[str, Any]]:
        """Return the server's plan, and the processor's arguments without our own."""
        mm_config, rest = self.info.ctx.get_mm_config(), dict(kwargs)
        asked = rest.pop(KEY, None)
        theirs = (getattr(mm_config, "mm_processor_kwargs", None) or {}).get(KEY)
        if asked is not None and asked != theirs:
            raise SpecError(
                f"{KEY} of a request is {asked!r}: results are stored under the media's hash, so a "
                f"server keeps one spec, {theirs!r}; start another server for another one"
            )
        return read_plan(mm_config, self.info.get_hf_config()), rest

    def _kept(self, plan: ReducerPlan, grid: torch.Tensor) -> int:
        merge = self.info.get_hf_config().vision_config.spatial_merge_size
        return plan.count(int(grid.prod()) // merge**2)

    def _ids(self) -> dict[str, int]:
        config = self.info.get_hf_config()
        start, end = config.vision_start_token_id, config.vision_end_token_id
        return {"video": config.video_token_id, "start": start, "end": end}


class PrunedText(PrunedPrompt):
    """Mixin for a processor that writes the places into the text of the prompt, as for Qwen3-VL."""

    def _call_hf_processor(
        self, prompt: str, mm_data: Any, mm_kwargs: Mapping[str, Any], tok_kwargs: Any
    ) -> Any:
        plan, _ = self._plan(mm_kwargs)
        out = super()._call_hf_processor(prompt, mm_data, mm_kwargs, tok_kwargs)
        if plan is None or "video_grid_thw" not in out:
            return out
        counts = [n for g in out["video_grid_thw"] for n in lumped(self._kept(plan, g), int(g[0]))]
        rows = torch.as_tensor(out["input_ids"]).reshape(1, -1).tolist()
        rows = [recount(row, counts, **self._ids()) for row in rows]
        held = out["input_ids"]
        out["input_ids"] = torch.tensor(rows) if isinstance(held, torch.Tensor) else rows
        return out


class PrunedVideos:
    """Mixin for vLLM's Qwen models: reduction of videos by the plan."""

    mmfast_plan: ReducerPlan | None
    visual: Any
    mmfast_times: str  # field of vLLM's inputs

    # Methods of the parent class; the plugin does not know a release without one of them.
    mmfast_needs: tuple[str, ...] = ("_postprocess_video_embeds_evs", "recompute_mrope_positions")

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        config = vllm_config.model_config
        plan = read_plan(config.multimodal_config, config.hf_config)
        stock = super()
        missing = [name for name in self.mmfast_needs if not hasattr(stock, name)]
        if plan is not None and missing:
            raise ModelError(
                f"this vLLM's {type(self).__name__} has no {missing[0]}, which mmfast prunes by; "
                "use the version that mmfast.vllm names, or leave its spec out"
            )
        super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
        self.mmfast_plan = plan  # a torch module takes attributes only now

    def _postprocess_video_embeds_evs(
        self, video_embeds_split: tuple[Tensor, ...], video_input: Any
    ) -> tuple[Tensor, ...]:
        """Prune each video `[N, D]`; without a plan, leave it to vLLM."""
        if self.mmfast_plan is None:
            parent: Any = super()
            pruned: tuple[Tensor, ...] = parent._postprocess_video_embeds_evs(
                video_embeds_split, video_input
            )
            return pruned
        sizes = field(video_input, "video_grid_thw").tolist()
        times = list(field(video_input, self.mmfast_times))
        each = zip(video_embeds_split, sizes, times, strict=True)
        return tuple(self.mmfast_video(*video) for video in each)

    @abstractmethod
    def mmfast_video(self, embeds: Tensor, size: Any, time: Any) -> Tensor:
        """Prune one video `[N, D]` to what vLLM expects; `time` is its entry of `mmfast_times`."""

    def mmfast_choose(self, embeds: Tensor, size: Any, width: int) -> tuple[Reduction, Tensor]:
        """Choose the kept tokens of one video.

        `embeds` `[N, D]` is the output of the tower; channels after the first `width` (DeepStack)
        do not count. `size` is in patches: frames, rows, columns. The returned mask `[N]` has one
        set entry per place of the prompt.
        """
        assert self.mmfast_plan is not None
        merge = int(self.visual.spatial_merge_size)
        frames, rows, columns = (int(v) for v in size)
        grid = (frames, rows // merge, columns // merge)
        chosen = self.mmfast_plan.reduce(embeds[:, :width], grid)
        mask = torch.zeros(len(embeds), dtype=torch.bool, device=embeds.device)
        mask[chosen.keep] = True
        return chosen, mask


def field(inputs: Any, name: str) -> Any:
    """Return a field of vLLM's inputs, mappings in some releases and objects in others."""
    value = getattr(inputs, name, None)
    return inputs[name] if value is None else value
