"""What the processors of both models share: the prompt reserves what the plan keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from mmfast.core.errors import SpecError
from mmfast.vllm.plan import KEY, Plan, read_plan
from mmfast.vllm.prompt import lumped, recount


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

    def _shorter(self, stock: Any, plan: Plan, grid: torch.Tensor) -> Any:
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

    def _plan(self, kwargs: Mapping[str, Any]) -> tuple[Plan | None, dict[str, Any]]:
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

    def _kept(self, plan: Plan, grid: torch.Tensor) -> int:
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
