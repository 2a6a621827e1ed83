"""LFM2-Audio of Liquid AI on stock classes: an LFM2 that hears, reads, writes and says codes.

transformers has no class of it (arXiv 2511.23404 describes the family). Sound comes in through a
FastConformer, which is Parakeet's encoder; the backbone is LFM2; a frame of codes of Mimi is said
by a depth transformer, which is an LFM2 of attention layers alone. Checkpoints of the package
liquid-audio are read as they are: names change, and the channels that a pair of its rotation turns
are brought to where the stock classes look for them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from mmfast.core.errors import ModelError
from mmfast.models.cache_name import CACHE, returned_cache
from mmfast.models.loading import FIXED
from mmfast.models.speech.mimi_weights import halves

KIND = "lfm2_audio"  # its config.json names no model type
CODES = 2048  # of a codebook; the number behind them ends sound
TURN_END, SOUND_START, TEXT_END = 7, 128, 130  # text tokens, as the package has them
_HEADS, _KV_HEADS = 32, 8  # of the depth transformer; its configuration does not say


@dataclass(frozen=True)
class SoundDraw:
    """Temperature and number of candidates of text and of codes; None takes the most likely."""

    text_temperature: float | None = None
    text_top_k: int | None = None
    temperature: float | None = None
    top_k: int | None = None


class Lfm2AudioModel(nn.Module):
    """Parts of LFM2-Audio, and its two ways to generate; one sequence at a time."""

    def __init__(self, config: Mapping[str, Any], ffn: int) -> None:
        from transformers import Lfm2Config, Lfm2Model, ParakeetEncoder

        super().__init__()
        own = dict(config["lfm"])
        self.name_or_path = ""
        self.config = SimpleNamespace(model_type=KIND, **{**config, "lfm": own})
        self.books = int(config["codebooks"])
        wide, depth = own["hidden_size"], config["depthformer"]
        dim = int(depth["dim"])
        self.lfm = Lfm2Model(Lfm2Config(**own))
        self.encoder = ParakeetEncoder(_encoder(config["encoder"]))
        heard = int(config["encoder"]["d_model"])
        parts = nn.LayerNorm(heard), nn.Linear(heard, wide), nn.GELU(), nn.Linear(wide, wide)
        self.adapter = nn.Sequential(*parts)
        self.frames = nn.Embedding(self.books * (CODES + 1), wide)
        self.depth_in = nn.Linear(wide, self.books * dim)
        self.depth = Lfm2Model(
            Lfm2Config(
                vocab_size=1,
                hidden_size=dim,
                intermediate_size=ffn,
                num_hidden_layers=int(depth["layers"]),
                layer_types=["full_attention"] * int(depth["layers"]),
                num_attention_heads=_HEADS,
                num_key_value_heads=_KV_HEADS,
                block_auto_adjust_ff_dim=False,
                rope_parameters={"rope_type": "default", "rope_theta": 1e6},
            )
        )
        self.depth.embedding_norm = nn.Identity()
        self.codes = nn.ModuleList(nn.Embedding(CODES + 1, dim) for _ in range(self.books))
        norms = (nn.RMSNorm(dim, eps=1e-5) for _ in range(self.books))
        heads = (nn.Sequential(norm, nn.Linear(dim, CODES + 1, bias=False)) for norm in norms)
        self.heads = nn.ModuleList(heads)

    @property
    def device(self) -> torch.device:
        """The place of its weights."""
        return self.frames.weight.device

    @classmethod
    def from_pretrained(
        cls,
        where: str,
        *,
        dtype: Any = "auto",
        revision: str | None = None,
        **given: Any,
    ) -> Self:
        """Load a directory or hub id of the layout of liquid-audio, else ModelError.

        It holds no code, and of weights safetensors alone are read.
        """
        if others := given.keys() - FIXED:
            names = ", ".join(sorted(others))
            raise ModelError(f"LFM2-Audio is loaded without {names}; choices: dtype, revision")
        folder = Path(where)
        if not folder.is_dir():
            from huggingface_hub import snapshot_download

            folder = Path(snapshot_download(where, revision=revision))
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        files = sorted(folder.glob("model*.safetensors"))
        state = {name: each for file in files for name, each in load_file(file).items()}
        first = state.get("depthformer.layers.0.feed_forward.w1.weight")
        if first is None:
            raise ModelError(
                f"{str(folder)!r} has no weights of LFM2-Audio; give a checkpoint of liquid-audio"
            )
        model = cls(config, len(first)).to(first.dtype if dtype == "auto" else dtype)
        missing, unknown = model.load_state_dict(stock_names(state, model.books), strict=False)
        missing = [name for name in missing if name != "depth.embed_tokens.weight"]
        if missing or unknown:
            raise ModelError(
                f"{str(folder)!r} does not fit LFM2-Audio: missing {missing[:3]}, unknown "
                f"{unknown[:3]}; give a checkpoint of liquid-audio"
            )
        model.name_or_path = str(folder)
        return model

    @torch.no_grad()
    def read(self, parts: Sequence[tuple[str, Tensor]]) -> Tensor:
        """Embed a prompt `[1, L, D]`.

        Its parts are `text` (ids `[T]`), `sound` (mel `[t, 128]`) and `codes` `[Q, t]`.
        """
        rows = []
        for kind, values in parts:
            values = values.to(self.device)
            if kind == "text":
                rows.append(self.lfm.embed_tokens(values))
            elif kind == "sound":
                mel = values[None].to(self.frames.weight.dtype)
                rows.append(self.adapter(self.encoder(mel).last_hidden_state[0]))
            else:
                rows.append(self._frame(values.T))
        return torch.cat(rows)[None]

    def _frame(self, codes: Tensor) -> Tensor:
        first = torch.arange(self.books, device=codes.device) * (CODES + 1)
        out: Tensor = self.frames(codes + first).sum(-2)  # [t, Q] to [t, D]
        return out

    @torch.no_grad()
    def generate(
        self, prompt: Tensor, most: int, draw: SoundDraw, *, interleaved: bool
    ) -> Iterator[Tensor]:
        """Yield text tokens `[1]` and frames of codes `[Q]` as they come, `most` of both.

        `interleaved` takes text and sound in turns of fixed length, for conversation; else the
        model itself says when sound begins. A frame of `CODES` ends sound.
        """
        turns = {False: self.config.interleaved_n_text, True: self.config.interleaved_n_audio}
        cache, sounds, left, over = None, False, turns[False], False
        for _ in range(most):
            left -= 1
            output = self.lfm(inputs_embeds=prompt, use_cache=True, **{CACHE: cache})
            cache, hidden = returned_cache(output), output.last_hidden_state[0, -1]
            if sounds:
                token = self.frame(hidden, draw)
                sounds = not interleaved or bool(left) or over
                left = left if sounds else turns[False]
                if int(token[0]) == CODES:
                    token, sounds = torch.full_like(token, CODES), False
                prompt = self._frame(token[None])[None]
                yield token
                continue
            logits = F.linear(hidden, self.lfm.embed_tokens.weight)
            token = _pick(logits, draw.text_temperature, draw.text_top_k)
            ends, over = int(token) == TURN_END, over or int(token) == TEXT_END
            if ends and interleaved:
                return
            yield token
            if ends:
                return
            sounds = (not left or over) if interleaved else int(token) == SOUND_START
            left = turns[True] if interleaved and sounds else left
            prompt = self.lfm.embed_tokens(token)[None]

    @torch.no_grad()
    def frame(self, hidden: Tensor, draw: SoundDraw) -> Tensor:
        """Say the codes `[Q]` of a frame, one after the other, from a hidden state `[D]`."""
        rows, before, cache = self.depth_in(hidden).view(self.books, 1, 1, -1), None, None
        codes: list[Tensor] = []
        for book in range(self.books):
            row = rows[book] if before is None else rows[book] + before
            output = self.depth(inputs_embeds=row, use_cache=True, **{CACHE: cache})
            cache = returned_cache(output)
            logits = self.heads[book](output.last_hidden_state[0, -1])
            codes.append(_pick(logits, draw.temperature, draw.top_k))
            before = self.codes[book](codes[-1])[None]
        return torch.cat(codes)


def _pick(logits: Tensor, temperature: float | None, top_k: int | None) -> Tensor:
    """Choose a token `[1]`; no temperature, or a single candidate, takes the most likely."""
    if temperature is None or temperature <= 0 or top_k == 1:
        return logits.argmax(keepdim=True)
    logits = logits / temperature
    if top_k is not None:
        least = logits.topk(min(top_k, len(logits))).values[-1]
        logits = logits.masked_fill(logits < least, -torch.inf)
    return torch.multinomial(logits.softmax(0), 1)


def _encoder(config: Mapping[str, Any]) -> Any:
    """Parakeet's settings of a FastConformer; ModelError for one that it cannot be."""
    from transformers import ParakeetEncoderConfig

    fixed: dict[str, Any] = {
        "self_attention_model": "rel_pos",
        "subsampling": "dw_striding",
        "reduction": None,
    }
    fixed |= {"causal_downsampling": False, "conv_norm_type": "batch_norm", "untie_biases": True}
    for name, value in fixed.items():
        if config.get(name, value) != value:
            raise ModelError(
                f"the encoder of this LFM2-Audio has {name}={config[name]!r}, and {value!r} alone "
                "is known; give a checkpoint that has it"
            )
    width = int(config["d_model"])
    return ParakeetEncoderConfig(
        hidden_size=width,
        num_hidden_layers=config["n_layers"],
        num_attention_heads=config["n_heads"],
        intermediate_size=width * config["ff_expansion_factor"],
        conv_kernel_size=config["conv_kernel_size"],
        subsampling_factor=config["subsampling_factor"],
        subsampling_conv_channels=config["subsampling_conv_channels"],
        num_mel_bins=config["feat_in"],
        scale_input=config["xscaling"],
    )


# Names of liquid-audio, and those of the parts here; the first that matches counts.
_NAMES = (
    ("conformer.pre_encode.conv.", "encoder.subsampling.layers."),
    ("conformer.pre_encode.out.", "encoder.subsampling.linear."),
    ("conformer.", "encoder."),
    ("audio_adapter.model.", "adapter."),
    ("audio_embedding.embedding.", "frames."),
    ("depth_linear.", "depth_in."),
    ("depthformer.", "depth."),
    ("lfm.", "lfm."),
)
_INNER = (
    (".self_attn.linear_out.", ".self_attn.o_proj."),
    (".self_attn.linear_pos.", ".self_attn.relative_k_proj."),
    (".self_attn.linear_q.", ".self_attn.q_proj."),
    (".self_attn.linear_k.", ".self_attn.k_proj."),
    (".self_attn.linear_v.", ".self_attn.v_proj."),
    (".self_attn.pos_bias_", ".self_attn.bias_"),
    (".conv.batch_norm.", ".conv.norm."),
    (".operator.bounded_attention.", ".self_attn."),
    (".operator.", ".self_attn."),
)
_UNUSED = {"codebook_offsets", "audio_loss_weights", "audio_embedding.to_logits.weight"}
_UNUSED |= {"audio_embedding.embedding_norm.weight"}


def stock_names(state: Mapping[str, Tensor], books: int) -> dict[str, Tensor]:
    """Rename the weights of liquid-audio, and reorder what its rotation turns in pairs."""
    found: dict[str, Tensor] = {}
    for name, weight in state.items():
        if name in _UNUSED:
            continue
        new = next((n + name.removeprefix(o) for o, n in _NAMES if name.startswith(o)), name)
        if new.startswith(("encoder.", "depth.")):
            for old, inner in _INNER:
                new = new.replace(old, inner)
        if new.endswith(".qkv_proj.weight"):
            found |= _split(new.removesuffix("qkv_proj.weight"), weight)
        elif name.startswith("depthformer.") and "_layernorm." in name:
            found[new] = halves(weight, len(weight))
        elif not new.startswith("depth_embeddings."):
            found[new] = weight
    for book in range(books):
        old = f"depth_embeddings.{book}"
        table = state[f"{old}.embedding.weight"]
        found[f"codes.{book}.weight"] = table
        found[f"heads.{book}.0.weight"] = state[f"{old}.embedding_norm.weight"]
        found[f"heads.{book}.1.weight"] = state.get(f"{old}.to_logits.weight", table)  # or tied
    return found


def _split(prefix: str, weight: Tensor) -> dict[str, Tensor]:
    """Part queries, keys and values of the depth transformer."""
    each = weight.shape[1] // _HEADS
    sizes = [weight.shape[1], _KV_HEADS * each, _KV_HEADS * each]
    query, key, value = weight.split(sizes)
    parts = {"q": halves(query, each), "k": halves(key, each), "v": value}
    return {f"{prefix}{name}_proj.weight": part for name, part in parts.items()}
