"""What the processors of both models share: the prompt reserves what the plan keeps."""

from __future__ import annotations

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
    """A prompt with other numbers of places per frame.

    A frame is a run of video tokens, of any length, between a start and an end token; what lies
    between these tokens for an image, and the text around all of them, stays.

    Args:
        ids: Tokens of the prompt.
        counts: New number of places of each frame, in order.
        video: The token that stands for a place.
        start: The token before a frame.
        end: The token after it.

    Raises:
        MmfastError: There are more or fewer frames than counts.
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
    """Places per frame of a pruned video: vLLM puts all of them into the first frame.

    They only reserve room; where each frame's tokens end up is settled with the embeddings.
    """
    return [count] + [0] * (frames - 1)


class PrunedPrompt:
    """To stand before one of vLLM's processors of Qwen models among the bases of a class."""

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
        """A video's part of the prompt, with places for what is kept.

        Args:
            stock: vLLM's: token ids, or its `PromptUpdateDetails` around them.
            plan: What is kept.
            grid: Patches of the video: frames, rows, columns `[3]`.
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
        """The server's plan, and the processor's arguments without our own."""
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
    """For a processor that writes the places into the prompt's text itself, as Qwen3-VL's does."""

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
    """To stand before one of vLLM's Qwen models among the bases of a class."""

    mmfast_plan: ReducerPlan | None
    visual: Any

    # Of the parent; a release without one of them is one that this plugin does not know.
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
        self.mmfast_plan = plan  # after: a torch module takes attributes from then on

    def mmfast_choose(self, embeds: Tensor, size: Any, width: int) -> tuple[Reduction, Tensor]:
        """What is kept of one video.

        Args:
            embeds: The tower's output `[N, D]`, further channels behind the first `width`.
            size: Patches: frames, rows, columns.
            width: Channels that the choice looks at, DeepStack's left out.

        Returns:
            The choice, and its mask `[N]`: as many are set as the prompt has places.
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
    """A field of vLLM's inputs, which are mappings in some releases and objects in others."""
    value = getattr(inputs, name, None)
    return inputs[name] if value is None else value
