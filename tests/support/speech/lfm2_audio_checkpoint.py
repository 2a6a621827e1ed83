"""A small LFM2-Audio in the layout of the package liquid-audio, every weight from its own name."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

WIDE, DIM, HEARD, BOOKS, VOCAB = 64, 128, 32, 8, 200
SIGNS = {"<|startoftext|>": 1, "<|im_start|>": 6, "<|im_end|>": 7, "<|audio_start|>": 128}
SIGNS["<|text_end|>"] = 130
LETTERS = "\n abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,?!'"


def config() -> dict[str, Any]:
    return {
        "architectures": ["Lfm2AudioForConditionalGeneration"],
        "codebooks": BOOKS,
        "tie_audio_embeddings": False,
        "semantic_codebook_factor": 100,
        "codebook_weight": "log",
        "interleaved_n_text": 4,
        "interleaved_n_audio": 6,
        "preprocessor": {
            "sample_rate": 16000, "normalize": "per_feature", "window_size": 0.025,
            "window_stride": 0.01, "window": "hann", "features": 128, "n_fft": 512, "log": True,
            "frame_splicing": 1, "dither": 1e-5, "pad_to": 0, "pad_value": 0.0,
        },
        "encoder": {
            "feat_in": 128, "feat_out": -1, "n_layers": 2, "d_model": HEARD,
            "subsampling": "dw_striding", "subsampling_factor": 8, "subsampling_conv_channels": 16,
            "causal_downsampling": False, "reduction": None, "reduction_position": None,
            "reduction_factor": 1, "ff_expansion_factor": 4, "self_attention_model": "rel_pos",
            "n_heads": 4, "att_context_size": [-1, -1], "xscaling": False, "untie_biases": True,
            "pos_emb_max_len": 500, "conv_kernel_size": 9, "conv_norm_type": "batch_norm",
            "conv_context_size": None, "dropout": 0.1, "dropout_pre_encoder": 0.1,
            "dropout_emb": 0.0, "dropout_att": 0.1,
        },
        "lfm": {
            "vocab_size": VOCAB, "hidden_size": WIDE, "intermediate_size": 96,
            "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
            "layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 3,
            "max_position_embeddings": 512, "block_auto_adjust_ff_dim": False,
        },
        "depthformer": {"layers": 2, "dim": DIM, "tie": True},
    }  # fmt: skip


def shapes() -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {
        "lfm.embed_tokens.weight": (VOCAB, WIDE), "lfm.embedding_norm.weight": (WIDE,),
        "conformer.pre_encode.out.weight": (HEARD, 256), "conformer.pre_encode.out.bias": (HEARD,),
        "conformer.pre_encode.conv.0.weight": (16, 1, 3, 3),
        "audio_adapter.model.0.weight": (HEARD,), "audio_adapter.model.0.bias": (HEARD,),
        "audio_adapter.model.1.weight": (WIDE, HEARD), "audio_adapter.model.1.bias": (WIDE,),
        "audio_adapter.model.3.weight": (WIDE, WIDE), "audio_adapter.model.3.bias": (WIDE,),
        "audio_embedding.embedding.weight": (BOOKS * 2049, WIDE),
        "audio_embedding.embedding_norm.weight": (WIDE,),
        "depth_linear.weight": (BOOKS * DIM, WIDE), "depth_linear.bias": (BOOKS * DIM,),
    }  # fmt: skip
    for at in (0, 2, 3, 5, 6):
        found[f"conformer.pre_encode.conv.{at}.bias"] = (16,)
    for at, size in ((2, (1, 3, 3)), (3, (16, 1, 1)), (5, (1, 3, 3)), (6, (16, 1, 1))):
        found[f"conformer.pre_encode.conv.{at}.weight"] = (16, *size)
    for book in range(BOOKS):
        found[f"depth_embeddings.{book}.embedding.weight"] = (2049, DIM)
        found[f"depth_embeddings.{book}.embedding_norm.weight"] = (DIM,)
    for layer in range(3):
        found |= _layer(f"lfm.layers.{layer}.", WIDE, 96)
        if layer == 1:
            found |= _attention(f"lfm.layers.{layer}.self_attn.", 16)
            continue
        conv = f"lfm.layers.{layer}.conv."
        found |= {f"{conv}in_proj.weight": (3 * WIDE, WIDE), f"{conv}out_proj.weight": (WIDE, WIDE)}
        found[f"{conv}conv.weight"] = (WIDE, 1, 3)
    for layer in range(2):
        found |= _conformer(f"conformer.layers.{layer}.")
        start = f"depthformer.layers.{layer}."
        found |= _layer(start, DIM, 512)
        found |= {f"{start}operator.qkv_proj.weight": (DIM + 2 * 8 * 4, DIM)}
        found |= {f"{start}operator.out_proj.weight": (DIM, DIM)}
        for name in "qk":
            found[f"{start}operator.bounded_attention.{name}_layernorm.weight"] = (4,)
    return found


def _layer(start: str, dim: int, inner: int) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {
        f"{start}feed_forward.{name}.weight": (inner, dim) for name in ("w1", "w3")
    }
    found[f"{start}feed_forward.w2.weight"] = (dim, inner)
    return found | {f"{start}{name}_norm.weight": (dim,) for name in ("operator", "ffn")}


def _attention(start: str, each: int) -> dict[str, tuple[int, ...]]:
    sizes = {"q": WIDE, "k": 2 * each, "v": 2 * each, "out": WIDE}
    found: dict[str, tuple[int, ...]] = {
        f"{start}{name}_proj.weight": (size, WIDE) for name, size in sizes.items()
    }
    return found | {f"{start}{name}_layernorm.weight": (each,) for name in "qk"}


def _conformer(start: str) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for name in ("feed_forward1", "conv", "self_att", "feed_forward2", "out"):
        found |= {f"{start}norm_{name}.weight": (HEARD,), f"{start}norm_{name}.bias": (HEARD,)}
    linear = {f"self_attn.linear_{name}": (HEARD, HEARD) for name in ("q", "k", "v", "out")}
    for number in (1, 2):
        linear[f"feed_forward{number}.linear1"] = (4 * HEARD, HEARD)
        linear[f"feed_forward{number}.linear2"] = (HEARD, 4 * HEARD)
    for name, size in linear.items():
        found |= {f"{start}{name}.weight": size, f"{start}{name}.bias": size[:1]}
    found[f"{start}self_attn.linear_pos.weight"] = (HEARD, HEARD)
    found |= {f"{start}self_attn.pos_bias_{name}": (4, 8) for name in "uv"}
    conv = {"pointwise_conv1": (64, HEARD, 1), "depthwise_conv": (HEARD, 1, 9)}
    conv["pointwise_conv2"] = (HEARD, HEARD, 1)
    for name, shape in conv.items():
        found |= {f"{start}conv.{name}.weight": shape, f"{start}conv.{name}.bias": shape[:1]}
    for name in ("weight", "bias", "running_mean", "running_var"):
        found[f"{start}conv.batch_norm.{name}"] = (HEARD,)
    return found


def weights() -> dict[str, Tensor]:
    """Weights by which every part matters, and text and sound end now and then."""
    found = {name: _weight(name, shape) for name, shape in shapes().items()}
    table = found["lfm.embed_tokens.weight"]
    table *= 2
    for token, gain in ((7, 1.2), (128, 1.6), (130, 1.6)):
        table[token] *= gain
    found["depth_embeddings.0.embedding.weight"][2048] *= 1.4
    return found


def _weight(name: str, shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    drawn = torch.randn(shape, generator=generator)
    if len(shape) > 1:
        return drawn / (drawn[0].numel() ** 0.5)
    if name.endswith(("var", "cluster_usage")):
        return drawn.abs() + 0.5
    return drawn * 0.1 + name.endswith("weight")


# Of a small Mimi: what differs from the published one.
SMALL_MIMI = {
    "hidden_size": 16, "num_filters": 2, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 16, "codebook_dim": 8,
    "vector_quantization_hidden_dimension": 8, "upsample_groups": 16, "num_quantizers": 8,
}  # fmt: skip


def mimi_weights(sizes: dict[str, list[int]]) -> dict[str, Tensor]:
    """Weights of a Mimi of these shapes, by the names of Kyutai."""
    found = {name: _weight(name, tuple(shape)) for name, shape in sizes.items()}
    return found | {name: torch.ones(1) for name in found if name.endswith("_initialized")}


def write(folder: Path) -> str:
    """Write the checkpoint with a tokenizer of letters; return where it is."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    (folder / "config.json").write_text(json.dumps(config()))
    save_file(weights(), folder / "model.safetensors")
    names = {at: sign for sign, at in SIGNS.items()}
    free = iter([at for at in range(10, VOCAB) if at not in names])
    names |= {next(free): letter for letter in LETTERS}
    vocab = {names.get(at, f"<{at}>"): at for at in range(VOCAB)}
    words = Tokenizer(models.WordLevel(vocab, "<0>"))
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    words.add_special_tokens([AddedToken(sign, special=True) for sign in SIGNS])
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<0>").save_pretrained(folder)
    return str(folder)


def question() -> Tensor:
    """Noise of a second and a half, `[24000]` at 16 kHz."""
    return torch.randn(24000, generator=torch.Generator().manual_seed(5)) * 0.1
