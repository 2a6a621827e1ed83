"""Adapters: the layout of a model family's visual tokens, and a few flags.

A family is one file in this folder that builds an `Adapter` and calls `add_adapter`; it is found by
itself, and relatives may share a file. Nothing about a method may enter it, so the cost of methods
and families adds up instead of multiplying.

Vision encoders without a language model (ViTs of timm, SigLIP, CLIP and DINOv2 of transformers)
have no `model_type` that names a family: `encoder_adapter` knows them. Every image is one raster of
patches; class, distillation and register tokens stand in front of it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from mmfast.core.errors import ModelError
from mmfast.core.registry import import_all
from mmfast.core.trace import Trace
from mmfast.models.families.tower import Tower, batch_tower, find_tower
from mmfast.models.wrappers import reads_text_alone

# Arguments of the call of `get_image_features`, or of another kind, by name.
Call = Mapping[str, Any]


def one_tile(base: Any, call: Call) -> list[int]:
    """Every image is one input of the tower."""
    return [1] * len(call["pixel_values"])


@lru_cache
def raster_places(grid: tuple[int, int, int]) -> Tensor:
    """`(t, y, x)` of every token of a full raster, `[t * h * w, 3]`."""
    axes = torch.meshgrid(*(torch.arange(n) for n in grid), indexing="ij")
    return torch.stack([axis.flatten() for axis in axes], dim=-1)


def square(base: Any, kind: str, embeds: Tensor, _: Tensor | None) -> Layout | None:
    """A `recover` for images that are squares; None where the number of tokens is no square."""
    side = math.isqrt(len(embeds))
    return Layout(len(embeds), (1, side, side)) if side * side == len(embeds) else None


@dataclass(frozen=True)
class Layout:
    """The placeholder tokens of one image or one video, in the order the LLM gets them.

    Attributes:
        length: How many there are, separators included.
        grid: `(frames, rows, columns)` of the others in raster order; None where they are no
            single raster (tiles of several resolutions).
        separators: Offsets of newline tokens; no method sees them, so none can drop them.
        tiles: For an image cut into tiles, the tile of each content token: 0 is the overview,
            tiles count from 1 in raster order. None for anything else.
        places: `[N, 3]` int `(t, y, x)` of each content token where there is no `grid`: tiles in
            the raster of the whole mosaic, the overview in its own. None where it is not known.
    """

    length: int
    grid: tuple[int, int, int] | None
    separators: tuple[int, ...] = ()
    tiles: tuple[int, ...] | None = None
    places: Tensor | None = field(default=None, compare=False, repr=False)

    def place(self) -> Tensor | None:
        """`(t, y, x)` of each content token, `[N, 3]`; None where it is unknown."""
        if self.places is not None or self.grid is None:
            return self.places
        return raster_places(self.grid)

    @cached_property
    def tile(self) -> Tensor | None:
        """The tile of each content token, `[N]`; None for what is not cut into tiles."""
        return None if self.tiles is None else torch.tensor(self.tiles)

    def content(self) -> Tensor:
        """Offsets of the tokens that a method may reduce, `[N]` ascending."""
        return self._content

    @cached_property
    def _content(self) -> Tensor:
        keep = torch.ones(self.length, dtype=torch.bool)
        keep[list(self.separators)] = False
        return keep.nonzero()[:, 0]


Recover = Callable[[Any, str, Tensor, Tensor | None], Layout | list[Layout] | None]


@dataclass(frozen=True)
class Adapter:
    """One model family.

    Attributes:
        family: `model_type` of its config.
        layout: `(base model, "image" or "video", call) -> list[Layout]`, one per image or video
            in the order of the features.
        fold: `(base model, kind, values [P, C], call) -> list of [N, C]`: brings values of the
            vision tower's patches (in the tower's own order, without class token) to the content
            tokens of each image or video, the way the family brings the features there.
        recover: `(base model, kind, embeddings [length, D], positions [3, length] or None) ->
            Layout` of one image or video, or list of those that come joined, for features that
            were encoded before `attach` and come without their call; None where the tensors do
            not show it.
        tower: `(base model) -> Tower`: where the vision tower keeps its blocks.
        audio_tower: The same of the audio encoder, for a family that hears.
        tile_counts: `(base model, call) -> list[int]`: tower inputs of each image of a call.
        media: Kinds of media it takes.
        blocks: `(arguments of forward) -> [B, P + L]`: for a family whose media tokens see forward
            inside their image, the number of the image of each token up to now, -1 at text; None
            where this call is causal.
        resizes: A smaller picture gets fewer tokens (tiles), or frames are pooled, though the tower
            takes one size alone.
        deepstack: The text model adds further visual features after its first layers.
        mrope: Positions have three axes, and the base model remembers `rope_deltas`.
        inner: Stages may act before and inside the tower (sites `pixel` and `vit`), and a frame
            cache and CUDA graphs around its blocks.
        counts: Its `generate` takes no positions and counts them itself.
        framed: Clips are written with the placeholder of images, frame by frame.
        apart: Text and media of a prompt may be read apart and put together, as a server does.
        alone: A vision encoder without a language model.
    """

    family: str
    layout: Callable[[Any, str, Call], list[Layout]]
    fold: Callable[[Any, str, Tensor, Call], list[Tensor]]
    recover: Recover = lambda *_: None
    tower: Callable[[Any], Tower] = find_tower
    audio_tower: Callable[[Any], Tower] | None = None
    tile_counts: Callable[[Any, Call], list[int]] = one_tile
    media: tuple[str, ...] = ("image", "video")
    blocks: Callable[[Call], Tensor | None] = lambda _: None
    resizes: bool = False
    deepstack: bool = False
    mrope: bool = False
    inner: bool = True
    counts: bool = False
    framed: bool = False
    apart: bool = True
    alone: bool = False

    def tower_of(self, base: Any, kind: str) -> Tower:
        """The tower that encodes a kind of media."""
        find = self.audio_tower if kind == "audio" else None
        return (find or self.tower)(base)


def check_inner(adapter: Adapter, what: str) -> None:
    """Refuse what changes the inside of a tower that is of another build; a ModelError."""
    if not adapter.inner:
        raise ModelError(
            f"{what} cannot act in {adapter.family!r}, whose tower is of another build; reduce at "
            "site 'pre' or inside the language model, such as fastv@llm2"
        )


def check_apart(adapter: Adapter, what: str) -> None:
    """Refuse what puts prompts together from parts of a family that cannot; a ModelError."""
    if not adapter.apart:
        raise ModelError(
            f"{what} reads text and media of a prompt apart, which gives other answers in "
            f"{adapter.family!r}; ask mmfast.pipeline, without it"
        )


_PACKAGE = "mmfast.models.families"  # every file of it is imported, which makes its family known
_ADAPTERS: dict[str, Adapter] = {}


def families(kind: str | None = None) -> list[str]:
    """Every known `model_type`, or those that take a kind of media."""
    import_all(_PACKAGE)
    names = sorted(_ADAPTERS)
    return names if kind is None else [name for name in names if kind in _ADAPTERS[name].media]


def check_media(model: Any, kind: str) -> None:
    """Refuse a kind of media that a model does not take; the ModelError names families that do."""
    if kind not in adapter_for(model).media:
        raise ModelError(
            f"{type(model).__name__} takes no {kind}; families that do: {', '.join(families(kind))}"
        )


def add_adapter(adapter: Adapter) -> None:
    """Make a family known; one of the same name is replaced."""
    _ADAPTERS[adapter.family] = adapter


def placeholder(config: Any, kind: str) -> Any:
    """Id of the token in a prompt that stands for media of a kind; None where there is none."""
    import_all(_PACKAGE)
    known = _ADAPTERS.get(config.model_type)
    name = "image" if kind == "video" and known is not None and known.framed else kind
    return getattr(config, f"{name}_token_id", None)


def adapter_for(model: Any) -> Adapter:
    """The adapter of a model by `model.config.model_type`; the ModelError says how to write one."""
    family = getattr(getattr(model, "config", None), "model_type", None)
    import_all(_PACKAGE)
    if family not in _ADAPTERS:
        alone = encoder_adapter(model)
        if alone is not None:
            return alone
        if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
            raise ModelError(
                f"{type(model).__name__} is an encoder-decoder; of those, cache= alone acts in T5, "
                "BART, Whisper and their kin, such as cache='snapkv:0.25'; leave out the rest"
            )
        if reads_text_alone(model):
            return Adapter(str(family), _no_media, _no_media, media=())
        part = getattr(getattr(getattr(model, "thinker", None), "config", None), "model_type", None)
        if part in _ADAPTERS:
            raise ModelError(
                f"{type(model).__name__} speaks, too; attach to the part that sees and hears, "
                f"its .thinker ({part})"
            )
        for name, inner in model.named_modules() if family is None else ():
            if getattr(getattr(inner, "config", None), "model_type", None) in _ADAPTERS:
                found = f"{type(model).__name__} holds a {type(inner).__name__} as .{name}"
                raise ModelError(f"{found}; attach to that")
        known = ", ".join(families())
        raise ModelError(
            f"{type(model).__name__} (model_type {family!r}) has no adapter; families: {known}; "
            "write one: mmfast.models.families.adapter.add_adapter(Adapter(model_type, layout, "
            "fold)), as mmfast/models/families/llava.py does in about 50 lines; a file in that "
            "folder is found by itself"
        )
    return _ADAPTERS[family]


def _no_media(base: Any, *_: Any) -> Any:
    raise ModelError(f"{type(base).__name__} takes no image, video or sound")


def tower_of(model: Any) -> Tower:
    """The vision tower of a model; ModelError where the family is unknown."""
    return adapter_for(model).tower(getattr(model, "base_model", model))


def token_counts(
    model: Any, kind: str, inputs: Mapping[str, Any], trace: Trace
) -> list[tuple[int, int]]:
    """Tokens of every image or clip before and after all stages, without separators."""
    layouts = adapter_for(model).layout(model.base_model, kind, inputs)
    full = [len(layout.content()) for layout in layouts]
    left = dict(enumerate(full))
    for site, item, reduction in trace.reductions:
        if site != "vit":  # inside the encoder patches are counted, and its output is restored
            left[item] = reduction.m
    return [(n, left[item]) for item, n in enumerate(full)]


def add_views(model: Any, kind: str, inputs: Mapping[str, Any], trace: Trace) -> None:
    """Let the trace of a call that reduced nothing be drawn too: everything was kept."""
    if any(site != "vit" for site, _, _ in trace.reductions):
        return
    for number, layout in enumerate(adapter_for(model).layout(model.base_model, kind, inputs)):
        tile = None if layout.tiles is None else torch.tensor(layout.tiles)
        trace.see(number, layout.place(), tile, (kind, number))


# `model_type` of encoders of transformers; one of their modules has `embeddings` and `encoder`.
TRANSFORMERS = ("siglip_vision_model", "clip_vision_model", "dinov2", "dinov2_with_registers")

# Names in an aggregator of VGGT, by which it is known.
SCENE = ("frame_blocks", "global_blocks", "patch_embed", "patch_size", "patch_start_idx")


def encoder_adapter(model: Any) -> Adapter | None:
    """The adapter of a model that is a vision encoder alone; None for any other model.

    Encoders inside timm's feature extractor and inside the wrapper of transformers are found, too.
    ModelError for another model of timm.
    """
    tower = _find(model)
    if tower is None:
        return None
    name = type(tower.module).__name__
    return Adapter(name, _layout, _fold, tower=lambda _: tower, media=("image",), alone=True)


def _find(model: Any) -> Tower | None:
    if "timm" in sys.modules:
        from timm.models.eva import Eva
        from timm.models.vision_transformer import VisionTransformer

        for part in (model, getattr(model, "timm_model", None), getattr(model, "model", None)):
            if isinstance(part, (VisionTransformer, Eva)):
                blocks: Any = part.blocks
                return Tower(part, part, blocks, False, part.cls_token is not None)
        if type(model).__module__.startswith("timm."):
            raise ModelError(
                f"{type(model).__name__} of timm is no plain ViT; attach to a VisionTransformer "
                "(ViT, DeiT, SigLIP, CLIP, DINOv2) or an Eva (EVA, EVA-02, DINOv3)"
            )
    inner: Any = getattr(model, "aggregator", None)  # VGGT (arXiv 2503.11651) has heads behind it
    for part in (model, inner):
        if all(hasattr(part, name) for name in SCENE):
            return Tower(part, part, part.global_blocks, packed=False, class_token=False)
    if getattr(getattr(model, "config", None), "model_type", None) not in TRANSFORMERS:
        return None
    parts = (m for m in model.modules() if hasattr(m, "embeddings") and hasattr(m, "encoder"))
    module = next(parts)
    return batch_tower(module, module)


def _layout(base: Any, kind: str, call: Call) -> list[Layout]:
    images, _, height, width = call["pixel_values"].shape
    if hasattr(base, "patch_embed"):
        rows, columns = map(int, base.patch_embed.dynamic_feat_size((height, width)))
    else:
        rows, columns = height // base.config.patch_size, width // base.config.patch_size
    return [Layout(rows * columns, (1, rows, columns))] * images


def _fold(base: Any, kind: str, values: Tensor, call: Call) -> list[Tensor]:
    return list(values.cpu().chunk(len(call["pixel_values"])))
