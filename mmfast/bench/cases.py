"""Models of preset shapes with random weights, and the inputs of every stage."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from mmfast.bench.presets import Preset, get_preset
from mmfast.core.errors import MmfastError, unknown
from mmfast.core.tokens import Tokens
from mmfast.models.cache_name import CACHE

# A prime: rows of a weight that repeats this many values never line up with one another.
_PERIOD = 1_048_583


@torch.no_grad()
def fill_(model: nn.Module, seed: int = 0) -> None:
    """Fill parameters at memory speed, with variances of trained models: zeros run faster."""
    noise = torch.randn(_PERIOD, generator=torch.Generator().manual_seed(seed))
    for index, (name, parameter) in enumerate(model.named_parameters()):
        if parameter.ndim == 1 and name.endswith("weight"):
            parameter.fill_(1.0)
            continue
        values = (noise * _scale(name, parameter)).to(parameter.device, parameter.dtype)
        rest = parameter.view(-1)
        for part in (values[index * 7919 % _PERIOD :], *[values] * (len(rest) // _PERIOD + 1)):
            rest[: len(part)] = part[: len(rest)]
            rest = rest[len(part) :]


def _scale(name: str, parameter: Tensor) -> float:
    if parameter.ndim == 1:
        return 0.02
    embedding = "embed_tokens" in name or "position_embedding" in name or "pos_embed" in name
    return 1.0 if embedding else float(parameter[0].numel() ** -0.5)


def video_features(grid: tuple[int, int, int], width: int, seed: int = 0) -> Tensor:
    """`[T * H * W, width]` of a clip with a still background, a moving block, noise and one cut.

    The cosine of a background patch with itself a frame later is about 0.94, as on real clips.
    """
    frames, rows, columns = grid
    gen = torch.Generator().manual_seed(seed)
    textures = torch.randn(12, width, generator=gen)
    scenes = []
    for _ in range(2):
        coarse = torch.randint(12, (rows // 3 + 1, columns // 3 + 1), generator=gen)
        patches = coarse.repeat_interleave(3, 0).repeat_interleave(3, 1)[:rows, :columns]
        own = torch.randn(rows, columns, width, generator=gen)
        scenes.append(0.8 * textures[patches] + 0.6 * own)
    thing = torch.randn(max(1, rows // 4), max(1, columns // 4), width, generator=gen)
    x = torch.empty(frames, rows, columns, width)
    for t in range(frames):
        x[t] = scenes[int(t >= max(1, frames * 2 // 3))]
        top = (t * 2) % (rows - thing.shape[0] + 1)
        left = (t * 3) % (columns - thing.shape[1] + 1)
        x[t, top : top + thing.shape[0], left : left + thing.shape[1]] = thing
    x += 0.25 * torch.randn(x.shape, generator=gen)
    return x.reshape(-1, width)  # [N, D]


def textured_video(grid: tuple[int, int, int], d: int, seed: int = 0) -> Tokens:
    """Return tokens with attention scores: a textured scene, camera noise, a moving patch."""
    frames, rows, columns = grid
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randn(1, d, 5, 5, generator=generator)
    scene = torch.nn.functional.interpolate(coarse, size=(rows, columns), mode="bilinear")
    scene = scene[0].permute(1, 2, 0)
    scene = scene + 0.5 * torch.randn(rows, columns, d, generator=generator)
    clip = scene + 0.2 * torch.randn(frames, rows, columns, d, generator=generator)
    side = min(3, rows, columns)
    patch, top = torch.randn(side, side, d, generator=generator), (rows - side) // 2
    for frame in range(frames):
        left = frame % (columns - side + 1)
        clip[frame, top : top + side, left : left + side] = patch
    attn = torch.rand(frames * rows * columns, generator=generator)
    return Tokens(clip.reshape(-1, d), attn=attn, grid=grid)


_BEFORE, _AFTER = 14, 18  # a system line and a short question: 32 text tokens
_STAMP = 7  # Qwen3-VL writes "<12.5 seconds>" before every frame


def video_grid(preset: Preset, frames: int) -> tuple[int, int, int]:
    """Return (frames, rows, columns) of the tokens that the language model reads."""
    rows, columns = preset.grid
    if frames < 1:
        raise MmfastError(f"--frames {frames} is no clip; give at least 1")
    if preset.family == "llava_onevision":
        return frames, (rows + 1) // 2, (columns + 1) // 2  # bilinear pooling by 2
    if frames % 2:
        raise MmfastError(
            f"--frames {frames}: {preset.name} takes pairs of frames; give an even number"
        )
    return frames // 2, rows // 2, columns // 2  # two frames a step, 2 x 2 patches a token


def check_frames(preset: Preset, frames: int) -> None:
    """Refuse a clip that a shape cannot read: a long one ends the process, not the allocation."""
    tokens = math.prod(video_grid(preset, frames))
    most = model_config(preset, ()).get_text_config().max_position_embeddings
    if tokens > most:
        raise MmfastError(
            f"--frames {frames}: {tokens:,} visual tokens are more than the {most:,} positions of "
            f"{preset.name}; give at most {most * frames // tokens}"
        )


def prompt_inputs(
    preset: Preset, config: Any, grid: tuple[int, int, int], seed: int
) -> dict[str, Tensor]:
    """Return `input_ids` [1, L] with placeholders, and the inputs of M-RoPE."""
    gen = torch.Generator().manual_seed(seed)
    top = min(config.video_token_id, config.image_token_id)

    def text(n: int) -> list[int]:
        return torch.randint(top - 10, (n,), generator=gen).tolist()

    video, per_frame = config.video_token_id, grid[1] * grid[2]
    if preset.family == "llava_onevision":
        ids = [*text(_BEFORE), *[video] * (grid[0] * per_frame + 1), *text(_AFTER)]  # + newline
        return {"input_ids": torch.tensor([ids])}
    start, end = config.vision_start_token_id, config.vision_end_token_id
    if preset.family == "qwen2_5_vl":
        ids = [*text(_BEFORE), start, *[video] * (grid[0] * per_frame), end, *text(_AFTER)]
    else:
        ids = text(_BEFORE)
        for _ in range(grid[0]):
            ids += [*text(_STAMP), start, *[video] * per_frame, end]
        ids += text(_AFTER)
    input_ids = torch.tensor([ids])
    kinds = torch.where(input_ids == video, 2, 0)
    thw = torch.tensor([[grid[0], *preset.grid]])
    return {"input_ids": input_ids, "mm_token_type_ids": kinds, "video_grid_thw": thw}


def pixel_inputs(preset: Preset, frames: int, seed: int) -> dict[str, Tensor]:
    """Return inputs of the tower: frames `[1, T, 3, H, W]`, or patches `[P, C * 2 * p * p]`."""
    rows, columns = preset.grid
    size = int(preset.vision["patch_size"])
    if preset.family != "llava_onevision":
        x = video_features((frames // 2, rows, columns), 3 * 2 * size * size, seed)
        thw = torch.tensor([[frames // 2, rows, columns]])
        return {"pixel_values_videos": x, "video_grid_thw": thw}
    side = int(preset.vision["image_size"])
    patches = video_features((frames, rows, columns), 3 * size * size, seed)
    x = patches.reshape(frames, rows, columns, 3, size, size).permute(0, 3, 1, 4, 2, 5)
    x = x.reshape(frames, 3, rows * size, columns * size)
    # 384 is 27.4 patches of 14: the tower's convolution never reads the rest.
    x = torch.nn.functional.pad(x, (0, side - columns * size, 0, side - rows * size))
    return {"pixel_values_videos": x[None]}


def video_output(preset: Preset, model: Any, visual: Tensor, deepstack: list[Tensor]) -> Any:
    """Return the encoder's output object with features `[N, D]` as the family stores them."""
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    if preset.family == "llava_onevision":
        newline = model.model.image_newline[None]
        return BaseModelOutputWithPooling(pooler_output=torch.cat([visual, newline])[None])
    if preset.family == "qwen2_5_vl":
        return BaseModelOutputWithPooling(pooler_output=(visual,))
    from transformers.models.qwen3_vl.modeling_qwen3_vl import BaseModelOutputWithDeepstackFeatures

    return BaseModelOutputWithDeepstackFeatures(
        pooler_output=(visual,), deepstack_features=[(plane,) for plane in deepstack]
    )


def feature_rows(output: Any) -> Tensor:
    """Return the features `[N, D]` of an encoder's output, in one tensor or in several."""
    found = output.pooler_output
    rows = found if isinstance(found, Tensor) else torch.cat(list(found))
    return rows.flatten(0, -2)


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TOWER_STAGES = frozenset({"vit", "ttft"})
LLM_STAGES = frozenset({"llm", "decode", "ttft"})


@dataclass
class Case:
    """A model and its inputs."""

    preset: Preset  # the shape it was built from
    model: Any  # A stock model class, random weights, evaluation mode
    # (frames, rows, columns) of the visual tokens that the language model reads
    grid: tuple[int, int, int]
    prompt: dict[str, Any]  # keyword arguments of `model(...)` without visual inputs
    # keyword arguments of `model.get_video_features`; empty without a tower stage
    pixels: dict[str, Any]
    visual: Tensor  # features `[N, D]` in place of a tower's output
    deepstack: list[Tensor] = field(default_factory=list)
    batch: int = 1  # copies of the prompt

    @property
    def device(self) -> torch.device:
        """Device of the model and its inputs."""
        return self.visual.device

    @property
    def n(self) -> int:
        """Visual tokens that a reducer may remove, without separators."""
        return self.visual.shape[0]

    def features(self) -> dict[str, Any]:
        """Return fresh `mm_encoder_outputs`, the stock entry point behind the encoder."""
        out = video_output(self.preset, self.model, self.visual, self.deepstack)
        if self.batch > 1:
            out.pooler_output = out.pooler_output.repeat(self.batch, 1, 1)
        return {"video": out}

    def decode(self, cache: Any, steps: int) -> None:
        """Run decoding steps on a cache, each with the first token of the prompt."""
        token = self.prompt["input_ids"][:, :1]
        for _ in range(steps):
            self.model(input_ids=token, **{CACHE: cache}, use_cache=True)

    def repeated(self, batch: int) -> Case:
        """Return the case with `batch` copies of its prompt; for LLaVA-OneVision shapes."""
        prompt = {k: v.repeat(batch, *[1] * (v.ndim - 1)) for k, v in self.prompt.items()}
        return replace(self, prompt=prompt, batch=batch)


def pick_dtype(name: str, preset: Preset, device: torch.device) -> torch.dtype:
    """Return a dtype; `auto` is float32 on the CPU where that fits, else bfloat16."""
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
    """Build only what `stages` need: no tower for `llm`, one decoder layer for `vit`."""
    shape = preset if isinstance(preset, Preset) else get_preset(preset)
    device = device or torch.device("cpu")
    if device.type not in ("cpu", "cuda"):
        raise MmfastError(f"no clock for device {str(device)!r}; choices: cpu, cuda")
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
    """Return the model in evaluation mode with uninitialised weights; none on `meta`."""
    import transformers

    config = model_config(preset, stages)
    names = {"llava_onevision": "LlavaOnevision", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL"}
    with unfilled(device, dtype):
        kind = getattr(transformers, f"{names[preset.family]}ForConditionalGeneration")
        model = kind(config)
    model.tie_weights()
    return model.eval()


def model_config(preset: Preset, stages: Collection[str]) -> Any:
    """Return the transformers config, with one layer in a half that no stage uses."""
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


@contextmanager
def unfilled(device: str | torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Construct without any initialiser: 7 billion random draws would take minutes."""
    from transformers.initialization import no_init_weights

    old = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device), no_init_weights():
            yield
    finally:
        torch.set_default_dtype(old)
