"""Tiny random encoder-decoders of text and sound, and the stock one with entries hidden by mask."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
import transformers as hf
from torch import Tensor

from mmfast.models.cache_name import CACHE, returned_cache
from mmfast.models.kv.encoded import cross_attention

WORDS, START = 96, 2
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
_PARTS = {"layers": 2, "attention_heads": 4, "ffn_dim": 48}
BOTH = {f"{part}_{what}": n for part in ("encoder", "decoder") for what, n in _PARTS.items()}
LIKE_BART = {"vocab_size": WORDS, "d_model": 32, "max_position_embeddings": 128, **BOTH, **ENDS}


def _t5() -> Any:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    return hf.T5ForConditionalGeneration(hf.T5Config(vocab_size=WORDS, **sizes, **ENDS))


def _like_bart(name: str) -> Callable[[], Any]:
    def make() -> Any:
        config = getattr(hf, f"{name.split('ForC')[0].removesuffix('MTModel')}Config")
        return getattr(hf, name)(config(**LIKE_BART, forced_eos_token_id=None))

    return make


def _t5gemma() -> Any:
    sizes = {
        "vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "query_pre_attn_scalar": 8, "layer_types": ["full_attention"] * 2, **ENDS,
    }  # fmt: skip
    config = hf.T5GemmaConfig(encoder=dict(sizes), decoder=dict(sizes), vocab_size=WORDS)
    return hf.T5GemmaForConditionalGeneration(config)


def _whisper() -> Any:
    sizes = {"vocab_size": WORDS, "d_model": 32, "num_mel_bins": 16, "max_source_positions": 40}
    rest = {"max_target_positions": 64, "begin_suppress_tokens": None}
    return hf.WhisperForConditionalGeneration(hf.WhisperConfig(**sizes, **rest, **BOTH, **ENDS))


def _moonshine() -> Any:
    layers = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    both = {f"{part}_{key}": n for part in ("encoder", "decoder") for key, n in layers.items()}
    sizes = {"vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 48}
    return hf.MoonshineForConditionalGeneration(hf.MoonshineConfig(**sizes, **both, **ENDS))


MAKERS: dict[str, Callable[[], Any]] = {
    "t5": _t5,
    "bart": _like_bart("BartForConditionalGeneration"),
    "marian": _like_bart("MarianMTModel"),
    "m2m_100": _like_bart("M2M100ForConditionalGeneration"),
    "pegasus": _like_bart("PegasusForConditionalGeneration"),
    "t5gemma": _t5gemma,
    "whisper": _whisper,
    "moonshine": _moonshine,
}
NAMES = [*MAKERS]
SOUND = ("whisper", "moonshine")


@lru_cache
def encoder_decoder(name: str) -> Any:
    """Return a tiny model of a family."""
    torch.manual_seed(0)
    model = MAKERS[name]().eval()
    with torch.no_grad():
        for part, each in model.named_parameters():
            if part.endswith((".q.weight", "q_proj.weight", "v_proj.weight")):
                each.mul_(6.0)  # or random attention would be the same for all entries
    model.generation_config = hf.GenerationConfig(decoder_start_token_id=START, pad_token_id=0)
    return model


def inputs_of(name: str, rows: int = 1, seed: int = 0) -> dict[str, Tensor]:
    """Return what the encoder reads: 40 tokens, or sound of about as many frames."""
    drawn = torch.Generator().manual_seed(seed)
    if name == "whisper":
        return {"input_features": torch.randn(rows, 16, 80, generator=drawn)}
    if name == "moonshine":
        return {"input_values": torch.randn(rows, 16_000, generator=drawn)}
    return {"input_ids": torch.randint(3, WORDS, (rows, 40), generator=drawn)}


def written(
    model: Any, inputs: dict[str, Tensor], tokens: int = 5, begin: int = 3, new: Any = None
) -> tuple[Tensor, Tensor, Any]:
    """Write tokens, greedily or those of `new`; returns them, logits by step, and the cache."""
    rows = len(next(iter(inputs.values())))
    ids = torch.arange(START, START + begin).expand(rows, -1)
    mask = {name: value for name, value in inputs.items() if name == "attention_mask"}
    found, logits, cache = [], [], {}
    with torch.no_grad():
        encoded = model.get_encoder()(**inputs)
        for step in range(tokens):
            given = {"encoder_outputs": encoded, "decoder_input_ids": ids, "use_cache": True}
            out = model(**given, **mask, **cache)
            cache = {CACHE: returned_cache(out)}
            logits.append(out.logits[:, -1])
            ids = out.logits[:, -1:].argmax(-1) if new is None else new[:, step : step + 1]
            found.append(ids)
    return torch.cat(found, 1), torch.stack(logits, 1), cache[CACHE]


def places(kept: Any, whole: Any) -> list[Tensor]:
    """Marks `[B, H, n]` of the entries of each layer of a whole cache that are in another."""
    marks = []
    for mine, other in zip(kept, whole, strict=True):
        same = (other.keys[:, :, :, None] == mine.keys[:, :, None]).all(-1)  # [B, H, n, m]
        marks.append(same.any(-1))
    return marks


@contextmanager
def hiding(model: Any, marks: list[Tensor], begin: int = 3) -> Iterator[None]:
    """Let cross-attention see marked entries alone once the decoder's prompt has been read."""
    own, heads = model.config._attn_implementation, 4
    model.set_attn_implementation("eager")

    def hide(index: int) -> Any:
        def hook(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
            if args[0].shape[1] == begin if args else kwargs["hidden_states"].shape[1] == begin:
                return None
            name = "mask" if "mask" in kwargs else "attention_mask"
            mine = marks[index].repeat_interleave(heads // marks[index].shape[1], 1)
            seen = torch.zeros(mine.shape).masked_fill(~mine, -1e9)
            return args, {**kwargs, name: seen[:, :, None]}

        return hook

    modules = cross_attention(model)
    hooks = [m.register_forward_pre_hook(hide(i), with_kwargs=True) for i, m in modules.items()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        model.set_attn_implementation(own)
