"""Build a preset: the stock class with random weights, and the inputs of every stage."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mmfast.bench.inputs import pixel_inputs, prompt_inputs, video_grid, video_output
from mmfast.bench.presets import Preset, get_preset
from mmfast.bench.synthetic import fill_, video_features
from mmfast.core.errors import MmfastError, unknown

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TOWER_STAGES = frozenset({"vit", "ttft"})
LLM_STAGES = frozenset({"llm", "decode", "ttft"})


@dataclass
class Case:
    """A model and its inputs.

    Attributes:
        preset: The shape it was built from.
        model: A stock model class, random weights, evaluation mode.
        grid: (frames, rows, columns) of the visual tokens the language model gets.
        prompt: Keyword arguments of `model(...)` apart from anything visual.
        pixels: Keyword arguments of `model.get_video_features`; empty without a tower stage.
        visual: Features `[N, D]` a tower would have given.
    """

    preset: Preset
    model: Any
    grid: tuple[int, int, int]
    prompt: dict[str, Any]
    pixels: dict[str, Any]
    visual: Tensor
    deepstack: list[Tensor] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return self.visual.device

    @property
    def n(self) -> int:
        """Visual tokens that a reducer may touch; separators are none."""
        return self.visual.shape[0]

    def features(self) -> dict[str, Any]:
        """Fresh `mm_encoder_outputs`: the stock entry point behind the encoder."""
        return {"video": video_output(self.preset, self.model, self.visual, self.deepstack)}


def pick_device(name: str | None) -> torch.device:
    """`None` is the first CUDA device, or the CPU where there is none.

    Raises:
        MmfastError: No such device.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise MmfastError(unknown("device", name, ["cpu", "cuda", "cuda:0"])) from None
    missing = device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count()
    if missing or device.type not in ("cpu", "cuda"):
        have = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
        raise MmfastError(f"device {name!r} is not here; choices: {', '.join(have)}")
    return device


def pick_dtype(name: str, preset: Preset, device: torch.device) -> torch.dtype:
    """`auto` is float32 on the CPU where that fits, else bfloat16.

    Raises:
        MmfastError: Unknown name.
    """
    if name == "auto":
        return torch.bfloat16 if preset.half or device.type == "cuda" else torch.float32
    if name not in DTYPES:
        raise MmfastError(unknown("dtype", name, ["auto", *DTYPES]))
    return DTYPES[name]


def build(
    preset: str | Preset,
    stages: Collection[str],
    frames: int = 8,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Case:
    """Build what `stages` need and no more: no tower for `llm`, one decoder layer for `vit`.

    Raises:
        MmfastError: Unknown preset, or a number of frames the family cannot take.
    """
    shape = preset if isinstance(preset, Preset) else get_preset(preset)
    device = device or torch.device("cpu")
    model = empty_model(shape, stages, device, dtype)
    config = model.config
    fill_(model, seed)
    grid = video_grid(shape, frames)
    width = config.get_text_config().hidden_size
    visual = video_features(grid, width, seed).to(device, dtype)
    planes = config.vision_config.deepstack_visual_indexes if shape.family == "qwen3_vl" else ()
    deepstack = [
        0.5 * video_features(grid, width, seed + 1 + i).to(device, dtype)
        for i in range(len(planes))
    ]
    pixels = pixel_inputs(shape, frames, seed) if TOWER_STAGES & set(stages) else {}
    pixels = {
        k: v.to(device, dtype if v.is_floating_point() else v.dtype) for k, v in pixels.items()
    }
    prompt = prompt_inputs(shape, config, grid, seed)
    prompt = {k: v.to(device) for k, v in prompt.items()}
    return Case(shape, model, grid, prompt, pixels, visual, deepstack)


def empty_model(
    preset: Preset, stages: Collection[str], device: torch.device, dtype: torch.dtype
) -> Any:
    """The model in evaluation mode with whatever its memory held; on `meta` it takes none."""
    config = model_config(preset, stages)
    with unfilled(device, dtype):
        model = _model_class(preset.family)(config)
    model.tie_weights()
    return model.eval()


def model_config(preset: Preset, stages: Collection[str]) -> Any:
    """The transformers config, cut down to one layer where no stage uses that half."""
    from transformers import AutoConfig

    vision, text = dict(preset.vision), dict(preset.text)
    if not TOWER_STAGES & set(stages):
        vision["num_hidden_layers" if preset.family == "llava_onevision" else "depth"] = 1
    if not LLM_STAGES & set(stages):
        text["num_hidden_layers"] = 1
    return AutoConfig.for_model(
        preset.family,
        vision_config=vision,
        text_config=text,
        tie_word_embeddings=preset.tied,
        **preset.special,
    )


def _model_class(family: str) -> Any:
    import transformers

    return {
        "llava_onevision": transformers.LlavaOnevisionForConditionalGeneration,
        "qwen2_5_vl": transformers.Qwen2_5_VLForConditionalGeneration,
        "qwen3_vl": transformers.Qwen3VLForConditionalGeneration,
    }[family]


@contextmanager
def unfilled(device: str | torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Construct without running any initialiser: 7 billion random draws would take minutes."""
    from transformers.initialization import no_init_weights

    old = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device), no_init_weights():
            yield
    finally:
        torch.set_default_dtype(old)
