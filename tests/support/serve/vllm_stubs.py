"""Stand-ins for the parts of vLLM that `mmfast.vllm` builds on: names, arguments, who calls whom.

Written from what vLLM 0.33 offers and does, not from its code: just enough of it to serve a video.
What a real one checks is checked here: the prompt holds the places that the processor announced, as
many embeddings come as there are places, and positions are rebuilt from the channels behind them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

VIDEO, IMAGE, START, END, WIDTH, MERGE = 1, 2, 3, 4, 8, 2
PAD = "<|vision_start|><|video_pad|><|vision_end|>"


class Registry:
    """vLLM's `ModelRegistry`."""

    def __init__(self) -> None:
        self.models: dict[str, Any] = {}

    def register_model(self, architecture: str, model: Any) -> None:
        self.models[architecture] = model

    def load(self, architecture: str) -> Any:
        module, _, name = self.models[architecture].partition(":")
        return getattr(import_module(module), name)


class MultiModalRegistry:
    """vLLM's `MULTIMODAL_REGISTRY`."""

    def register_processor(self, processor: Any, *, info: Any, dummy_inputs: Any) -> Any:
        def mark(model: Any) -> Any:
            model.factory = (processor, info, dummy_inputs)
            return model

        return mark


@dataclass
class PromptReplacement:
    modality: str
    target: str
    replacement: Callable[[int], Any] = field(repr=False)


@dataclass
class PromptUpdateDetails:
    full: list[int]
    is_embed: Any = None

    @staticmethod
    def from_seq(full: list[int]) -> PromptUpdateDetails:
        return PromptUpdateDetails(full)


@dataclass
class Field:
    data: Any


class Info:
    """`ProcessingInfo`: how a processor gets at configs and the tokenizer."""

    def __init__(self, mm_config: Any, hf_config: Any) -> None:
        self.ctx = SimpleNamespace(get_mm_config=lambda: mm_config)
        self.get_hf_config = lambda: hf_config


def stamp(seconds: float) -> list[int]:
    """A tokenized timestamp; longer for later ones."""
    return [100 + ord(c) for c in f"<{seconds:.1f} seconds>"]


def laid_out(times: list[float], per_frame: list[int]) -> list[int]:
    """Tokens of a Qwen3-VL video."""
    ids: list[int] = []
    for seconds, n in zip(times, per_frame, strict=True):
        ids += [*stamp(seconds), START, *[VIDEO] * n, END]
    return ids


def tokens_of(grid: Tensor) -> tuple[int, int]:
    """Frames, and tokens of each."""
    frames, rows, columns = grid.tolist()
    return frames, (rows // MERGE) * (columns // MERGE)


def stock_count(grid: Tensor, rate: float) -> int:
    """What vLLM itself would keep; another number than ours on purpose."""
    frames, each = tokens_of(grid)
    return max(each, int(frames * each * (1 - rate)))


class BaseProcessor:
    """Turns the prompt into ids; knows no argument but the Hugging Face processor's own."""

    def __init__(self, info: Info) -> None:
        self.info = info

    def _call_hf_processor(self, prompt: str, mm_data: Any, mm_kwargs: Any, tok_kwargs: Any) -> Any:
        assert not {*mm_kwargs} - {"fps"}, mm_kwargs
        ids: list[int] = []
        for word in prompt.split():
            known = {"<|image|>": [START, IMAGE, IMAGE, END]}
            ids += known.get(word, [int(word)] if word.isdigit() else [50 + len(word)])
        return {"input_ids": torch.tensor([ids])}


class Qwen3VLMultiModalProcessor(BaseProcessor):
    """Writes the places into the prompt, and announces the same ones afterwards."""

    def _call_hf_processor(self, prompt: str, mm_data: Any, mm_kwargs: Any, tok_kwargs: Any) -> Any:
        rate, grids, times = self.info.ctx.get_mm_config().video_pruning_rate, [], []
        for grid, seconds in mm_data.get("videos", []):
            per_frame = self._per_frame(grid, rate)
            places = " ".join(map(str, laid_out(seconds, per_frame)))
            prompt = prompt.replace(PAD, places, 1)
            grids.append(grid)
            times.append(seconds)
        out = super()._call_hf_processor(prompt, {}, mm_kwargs, tok_kwargs)
        return out | ({"video_grid_thw": torch.stack(grids), "timestamps": times} if grids else {})

    def _per_frame(self, grid: Tensor, rate: float | None) -> list[int]:
        frames, each = tokens_of(grid)
        return [stock_count(grid, rate)] + [0] * (frames - 1) if rate else [each] * frames

    def _get_prompt_updates(self, mm_items: Any, hf_processor_mm_kwargs: Any, out: Any) -> Any:
        assert not {*hf_processor_mm_kwargs} - {"fps"}
        rate = self.info.ctx.get_mm_config().video_pruning_rate

        def video(index: int) -> PromptUpdateDetails:
            item = out["video"][index]
            per_frame = self._per_frame(item["video_grid_thw"].data, rate)
            return PromptUpdateDetails.from_seq(laid_out(item["timestamps"].data, per_frame))

        return [
            PromptReplacement("image", "<|image|>", lambda index: [IMAGE, IMAGE]),
            PromptReplacement("video", PAD, video),
        ]


class Qwen25VLMultiModalProcessor(BaseProcessor):
    """Announces places; vLLM puts them into the prompt."""

    def _get_prompt_updates(self, mm_items: Any, hf_processor_mm_kwargs: Any, out: Any) -> Any:
        rate = self.info.ctx.get_mm_config().video_pruning_rate

        def video(index: int) -> list[int]:
            grid = out["video"][index]["video_grid_thw"].data
            return [VIDEO] * (stock_count(grid, rate) if rate else int(grid.prod()) // MERGE**2)

        return [PromptReplacement("video", "<|video_pad|>", video)]


class BaseModel(nn.Module):
    """What both models do alike; the tower is given what it would compute."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        self.config = vllm_config.model_config.hf_config
        mm_config = vllm_config.model_config.multimodal_config
        self.rate = mm_config.video_pruning_rate
        self.is_multimodal_pruning_enabled = bool(self.rate)
        self.visual = SimpleNamespace(spatial_merge_size=MERGE)
        self.prefix = prefix

    def embed_multimodal(self, video: Any, embeds: list[Tensor]) -> tuple[Tensor, ...]:
        split = tuple(embeds)
        if self.is_multimodal_pruning_enabled:
            split = self._postprocess_video_embeds_evs(split, video)
        return tuple(split)

    def _stock_mask(self, embeds: Tensor, size: list[int]) -> Tensor:
        mask = torch.zeros(len(embeds), dtype=torch.bool)
        mask[: stock_count(torch.tensor(size), self.rate)] = True
        return mask


class Qwen3VL(BaseModel):
    """Timestamps go between the frames; five channels of positions and flags behind each row."""

    def __init__(self, *, vllm_config: Any, prefix: str = "model") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.visual_dim = WIDTH

    def _postprocess_video_embeds_evs(self, split: Any, video: Any) -> tuple[Tensor, ...]:
        done = []
        for embeds, size, times in zip(
            split, video["video_grid_thw"].tolist(), video["timestamps"], strict=True
        ):
            mask = self._stock_mask(embeds, size)
            per_frame = mask.reshape(size[0], -1).sum(1).tolist()
            done.append(
                self._create_final_video_embeddings(embeds[mask], per_frame, times, size, mask)
            )
        return tuple(done)

    def _create_final_video_embeddings(
        self,
        video_embeddings: Tensor,
        num_tokens_per_frame: list[int],
        timestamps: list[float],
        video_grid_thw: list[int],
        retention_mask: Tensor,
    ) -> Tensor:
        ids = torch.tensor(laid_out(timestamps, num_tokens_per_frame))
        is_video = ids == VIDEO
        assert int(is_video.sum()) == len(video_embeddings) == int(retention_mask.sum())
        rows = ids[:, None].expand(-1, video_embeddings.shape[1]).to(video_embeddings.dtype).clone()
        rows[is_video] = video_embeddings
        every = [tokens_of(torch.tensor(video_grid_thw))[1]] * len(timestamps)
        whole = torch.tensor(laid_out(timestamps, every))
        where = qwen3_positions(whole.tolist(), video_grid_thw).T
        place = torch.zeros(len(ids), 5, dtype=torch.long)
        place[is_video, :3] = where[whole == VIDEO][retention_mask]
        place[~is_video, :3] = where[whole != VIDEO]
        place[:, 3], place[:, 4] = ids == START, is_video
        return torch.cat([rows, place.to(rows.dtype)], dim=1)

    def recompute_mrope_positions(
        self, ids: Any, embeds: Any, positions: Tensor, computed: int
    ) -> Any:
        kept = [rows[:, :-5] for rows in embeds]
        return kept, [rows[:, -5:-2].long().T for rows in embeds], 0


def qwen3_positions(ids: list[int], size: list[int]) -> Tensor:
    """Time, row and column of each token of a whole video: text counts on, frames are rasters."""
    rows, columns = size[1] // MERGE, size[2] // MERGE
    out: list[tuple[int, int, int]] = []
    base, inside = 0, 0
    for token in ids:
        if token == VIDEO:
            row, column = divmod(inside, columns)
            out.append((base, base + row, base + column))
            inside += 1
            if inside == rows * columns:
                base, inside = base + max(rows, columns), 0
        else:
            out.append((base,) * 3)
            base += 1
    return torch.tensor(out).T


class Qwen25VL(BaseModel):
    """Nothing between the frames; four channels of positions behind each row."""

    def _postprocess_video_embeds_evs(self, split: Any, video: Any) -> tuple[Tensor, ...]:
        done = []
        for embeds, size, seconds in zip(
            split, video["video_grid_thw"].tolist(), video["second_per_grid_ts"].long(), strict=True
        ):
            mask = self._stock_mask(embeds, size)
            place = media_positions(size, MERGE, tokens_per_second=2, video_second_per_grid=seconds)
            done.append(torch.cat([embeds[mask], place[mask].to(embeds.dtype)], dim=1))
        return tuple(done)

    def recompute_mrope_positions(
        self, ids: Any, embeds: Any, positions: Tensor, computed: int
    ) -> Any:
        return [rows[:, :-4] for rows in embeds], [rows[:, -4:-1].long().T for rows in embeds], 0


def media_positions(
    size: list[int], merge: int, tokens_per_second: float = 1.0, video_second_per_grid: float = 1.0
) -> Tensor:
    """Time, row, column and width of each token of a video, `[N, 4]`."""
    frames, rows, columns = size[0], size[1] // merge, size[2] // merge
    step = int(tokens_per_second * video_second_per_grid)
    raster = torch.cartesian_prod(*map(torch.arange, (frames, rows, columns)))
    raster[:, 0] *= step
    return torch.cat([raster, torch.full((len(raster), 1), columns)], dim=1)


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry]:
    """A machine with vLLM on it; gives its model registry."""
    registry = Registry()
    models = "vllm.model_executor.models"
    for name in ("vllm", "vllm.multimodal", "vllm.model_executor", models):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    _fill("vllm", ModelRegistry=registry)
    _fill("vllm.multimodal", MULTIMODAL_REGISTRY=MultiModalRegistry())
    parts: dict[str, Any] = {"Qwen3VLMultiModalProcessor": Qwen3VLMultiModalProcessor}
    parts |= {"Qwen3VLForConditionalGeneration": Qwen3VL}
    parts |= {"Qwen3VLProcessingInfo": Info, "Qwen3VLDummyInputsBuilder": object}
    monkeypatch.setitem(sys.modules, f"{models}.qwen3_vl", ModuleType("qwen3_vl"))
    _fill(f"{models}.qwen3_vl", **parts)
    parts = {"Qwen2_5_VLMultiModalProcessor": Qwen25VLMultiModalProcessor}
    parts |= {"Qwen2_5_VLForConditionalGeneration": Qwen25VL}
    parts |= {"Qwen2_5_VLProcessingInfo": Info, "Qwen2_5_VLDummyInputsBuilder": object}
    parts |= {"compute_mrope_for_media": media_positions}
    monkeypatch.setitem(sys.modules, f"{models}.qwen2_5_vl", ModuleType("qwen2_5_vl"))
    _fill(f"{models}.qwen2_5_vl", **parts)
    sys.modules[models].__dict__.update(
        qwen3_vl=sys.modules[f"{models}.qwen3_vl"], qwen2_5_vl=sys.modules[f"{models}.qwen2_5_vl"]
    )
    for name in ("mmfast.vllm.qwen3_vl", "mmfast.vllm.qwen2_5_vl"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield registry
    for name in ("mmfast.vllm.qwen3_vl", "mmfast.vllm.qwen2_5_vl"):
        sys.modules.pop(name, None)


def _fill(name: str, **parts: Any) -> None:
    sys.modules[name].__dict__.update(parts)


@dataclass
class Server:
    """One vLLM: its config, the processor of one process and the model of another."""

    registry: Registry
    family: str
    kwargs: dict[str, Any] | None = None
    rate: float | None = 0.75
    hf: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        import mmfast.vllm

        mmfast.vllm.register()
        vision = SimpleNamespace(spatial_merge_size=MERGE, tokens_per_second=2)
        ids = {"video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END}
        hf_config = SimpleNamespace(vision_config=vision, **ids, **self.hf)
        mm_config = SimpleNamespace(mm_processor_kwargs=self.kwargs, video_pruning_rate=self.rate)
        config = SimpleNamespace(multimodal_config=mm_config, hf_config=hf_config)
        cls = self.registry.load(f"{self.family}ForConditionalGeneration")
        processor, info, _ = cls.factory
        self.processor = processor(info(mm_config, hf_config))
        self.model = cls(vllm_config=SimpleNamespace(model_config=config), prefix="")

    def serve(self, grids: list[list[int]], embeds: list[Tensor], **request: Any) -> Any:
        """Prompt ids, and of each video its embeddings and positions, as the LLM gets them."""
        thw = torch.tensor(grids)
        times = [[0.5 * i for i in range(grid[0])] for grid in grids]
        kwargs = (self.kwargs or {}) | request
        pads = PAD if self.family == "Qwen3VL" else "<|video_pad|>"
        prompt = "hello <|image|> " + " between ".join([pads] * len(grids)) + " question"
        mm_data = {"videos": list(zip(thw, times, strict=True))}
        out = self.processor._call_hf_processor(
            prompt=prompt, mm_data=mm_data, mm_kwargs=kwargs, tok_kwargs={}
        )
        pairs = zip(thw, times, strict=True)
        items = [{"video_grid_thw": Field(g), "timestamps": Field(t)} for g, t in pairs]
        updates = self.processor._get_prompt_updates({}, kwargs, {"video": items})
        (update,) = (u for u in updates if u.modality == "video")
        places = [update.replacement(index) for index in range(len(grids))]
        ids = out["input_ids"].flatten().tolist()
        full = [place if isinstance(place, list) else place.full for place in places]
        if self.family == "Qwen3VL":
            at = 0
            for part in full:  # as vLLM looks for them: in turn, and exactly
                at = next(i for i in range(at, len(ids)) if ids[i : i + len(part)] == part)
                at += len(part)
        second = torch.ones(len(grids)) * 1.5
        video = {"video_grid_thw": thw, "timestamps": times, "second_per_grid_ts": second}
        rows = self.model.embed_multimodal(video, embeds)
        on = self.model.is_multimodal_pruning_enabled  # then timestamps come as embeddings, too
        assert [len(r) for r in rows] == [len(p) if on else p.count(VIDEO) for p in full]
        if self.model.is_multimodal_pruning_enabled:
            kept, positions, _ = self.model.recompute_mrope_positions(ids, rows, torch.empty(0), 0)
        else:
            kept, positions = rows, [torch.empty(0)] * len(rows)
        return ids, list(zip(kept, positions, strict=True))
