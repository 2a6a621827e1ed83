"""What the models of both families share: the plan, and its choice for one video."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmfast.core.errors import ModelError
from mmfast.core.reduction import Reduction
from mmfast.vllm.plan import Plan, read_plan


class PrunedVideos:
    """To stand before one of vLLM's Qwen models among the bases of a class."""

    mmfast_plan: Plan | None
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
