"""The video model before training: stock classes, tokenizer and processor, nothing downloaded.

In training a question sees the frames and itself, with the numbers of the stock forward pass; those
of a stream may see keys at other positions than those at which frames were computed, in each layer
others, as a session moves retrieved frames between its sinks and its window.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from transformers import (
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    LlavaOnevisionImageProcessor,
    LlavaOnevisionProcessor,
    LlavaOnevisionVideoProcessor,
    PreTrainedTokenizerFast,
    Qwen2Config,
    SiglipVisionConfig,
)

from mmfast.ops.attention import rotate as turned
from mmfast.tiny.video.clips import INPUT
from mmfast.tiny.video.questions import WORDINGS
from mmfast.tiny.video.scene import COLOURS, DIRECTIONS, IGNORE, PATCHES, SHAPES

SPECIALS = ("<|end|>", "<|user|>", "<|assistant|>", "<image>", "<video>")
END, USER, ASSISTANT, IMAGE, VIDEO = range(len(SPECIALS))
ANSWERS = (*COLOURS, *SHAPES, *DIRECTIONS, "top left", "top right", "bottom left", "bottom right")

# Media first, then the text, as LLaVA-OneVision was trained.
CHAT = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<|assistant|>{% else %}<|user|>{% endif %}"
    "{% if message['content'] is string %}{{ message['content'] | trim }}{% else %}"
    "{% for part in message['content'] if part['type'] == 'image' %}<image>{% endfor %}"
    "{% for part in message['content'] if part['type'] == 'video' %}<video>{% endfor %}"
    "{% for part in message['content'] if part['type'] == 'text' %}{{ part['text'] | trim }}"
    "{% endfor %}{% endif %}"
    "{% if message['role'] == 'assistant' %}<|end|>{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def vocabulary_texts() -> Iterator[str]:
    """Every wording with every word that fills it; they fix the vocabulary."""
    names = [f"{c} {s}" for c in COLOURS for s in SHAPES] + ["start", "end", *COLOURS, *SHAPES]
    for wordings in WORDINGS.values():
        for wording in wordings:
            yield from (wording.format(name, name) for name in names)
    yield from ANSWERS


def make_tokenizer(texts: Iterable[str] | None = None, size: int = 640) -> PreTrainedTokenizerFast:
    """Train lower-case byte-level BPE: known words are one token each, digits are separate.

    `size` tokens are fixed by `texts`, those of this world by default.
    """
    core = Tokenizer(models.BPE())
    core.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(vocabulary_texts() if texts is None else texts, trainer)
    return wrapped(core)


def wrapped(core: Tokenizer) -> PreTrainedTokenizerFast:
    """The tokenizer of transformers around one of this world."""
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=SPECIALS[END],
        pad_token=SPECIALS[END],
        extra_special_tokens={"image_token": SPECIALS[IMAGE], "video_token": SPECIALS[VIDEO]},
        padding_side="left",
        model_max_length=4096,
        clean_up_tokenization_spaces=False,
    )


def make_processor(
    texts: Iterable[str] | None = None, vocabulary: int = 640
) -> LlavaOnevisionProcessor:
    """Make the processor, which resizes any picture to the tower's size."""
    size = {"height": INPUT, "width": INPUT}
    grey = [0.5, 0.5, 0.5]
    return LlavaOnevisionProcessor(
        image_processor=LlavaOnevisionImageProcessor(
            size=size, image_mean=grey, image_std=grey, image_grid_pinpoints=[[INPUT, INPUT]]
        ),
        tokenizer=make_tokenizer(texts, vocabulary),
        video_processor=LlavaOnevisionVideoProcessor(
            size=size, image_mean=grey, image_std=grey, do_sample_frames=False
        ),
        num_image_tokens=PATCHES**2,
        vision_feature_select_strategy="full",
        chat_template=CHAT,
    )


def make_model(vocabulary: int, seed: int) -> LlavaOnevisionForConditionalGeneration:
    """Make a LLaVA-OneVision of about three million parameters with random weights."""
    torch.manual_seed(seed)
    vision = SiglipVisionConfig(
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        image_size=INPUT,
        patch_size=INPUT // PATCHES,
        vision_use_head=False,
    )
    text = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=192,
        intermediate_size=448,
        num_hidden_layers=5,
        num_attention_heads=6,
        num_key_value_heads=6,
        max_position_embeddings=4096,
        # Frames lie 36 positions apart: a small base lets heads tell frames from cells.
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=END,
    )
    config = LlavaOnevisionConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=IMAGE,
        video_token_index=VIDEO,
        image_grid_pinpoints=[[INPUT, INPUT]],
        vision_feature_select_strategy="full",
        vision_feature_layer=-1,
        tie_word_embeddings=True,
    )
    config.eos_token_id = config.pad_token_id = END
    model = LlavaOnevisionForConditionalGeneration(config)
    model.generation_config.update(eos_token_id=END, pad_token_id=END, max_new_tokens=8)
    return model.float()


@dataclass(frozen=True)
class DecoderLayout:
    """Positions and visibility of a prefix of frames and the questions packed behind it."""

    at: Tensor  # positions of the prefix. `[B, P]`
    text_at: Tensor  # positions of the questions. `[B, L]`
    # For each layer, added to the questions' scores on prefix and questions; one for all layers
    # if there is only one. `[B, 1, L, P + L]`
    seen: list[Tensor]
    # Added to the prefix's scores, -inf = not seen `[P, P]`; None = plainly causal
    own: Tensor | None = None
    # For each layer the positions of the prefix as the questions see it `[B, P]`; none = those of
    # `at`
    moved: list[Tensor] | None = None


@dataclass(frozen=True)
class DecoderOutput:
    """States and keys of a prefix and the questions behind it."""

    states: Tensor  # normalised last states of the questions. `[B, L, D]`
    layers: list[Tensor]  # states of all after each layer but the last. `[B, P + L, D]`
    keys: list[Tensor]  # the prefix's keys of each layer before RoPE. `[B, P, D]`
    queries: list[Tensor]  # the questions' queries of each layer before RoPE. `[B, L, D]`


def run_decoder(lm: Any, prefix: Tensor, text: Tensor, layout: DecoderLayout) -> DecoderOutput:
    """Run all layers of a Qwen2Model on a prefix `[B, P, D]` and packed questions `[B, L, D]`."""
    split, x = prefix.shape[1], torch.cat([prefix, text], 1)
    own_turn, text_turn = lm.rotary_emb(x, layout.at), lm.rotary_emb(x, layout.text_at)
    layers, keys, queries = [], [], []
    for number, layer in enumerate(lm.layers):
        attention, last = layer.self_attn, number == len(lm.layers) - 1
        h = layer.input_layernorm(x)
        q, k, v = attention.q_proj(h), attention.k_proj(h), attention.v_proj(h)
        keys.append(k[:, :split])
        queries.append(q[:, split:])
        q, k, v = (rearrange(t, "b n (h d) -> b h n d", d=attention.head_dim) for t in (q, k, v))
        own_k = rotate(k[:, :, :split], own_turn)
        moved = own_k
        if layout.moved is not None:
            moved = rotate(k[:, :, :split], lm.rotary_emb(x, layout.moved[number]))
        known = torch.cat([moved, rotate(k[:, :, split:], text_turn)], 2)
        bias = layout.seen[number % len(layout.seen)]
        mixed = _attend(rotate(q[:, :, split:], text_turn), known, v, bias)
        if last:  # nothing reads the prefix any more
            x = x[:, split:]
        else:
            own_q, own_v = rotate(q[:, :, :split], own_turn), v[:, :, :split]
            mixed = torch.cat([_attend(own_q, own_k, own_v, layout.own), mixed], 1)
        x = x + attention.o_proj(mixed)
        x = x + layer.mlp(layer.post_attention_layernorm(x))
        if not last:
            layers.append(x)
    return DecoderOutput(lm.norm(x), layers, keys, queries)


def rotate(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Turn queries or keys `[B, h, n, d]` by cosines and sines `[B, n, d]` of their positions."""
    return turned(x, *(part[:, None] for part in turn))  # [B, 1, n, d] each


def _attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    # In bfloat16 its gradient takes a processor twice as long; the kernels of a device want it.
    slow = q.device.type == "cpu"
    with torch.autocast("cpu", enabled=False) if slow else nullcontext():
        q, k, v = (part.float() if slow else part for part in (q, k, v))
        mixed = scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=bias is None)
    return rearrange(mixed, "b h n d -> b n (h d)")


class Readout(nn.Module):
    """Linear classifiers on states, `sizes` wide: extra losses of training, then discarded."""

    def __init__(self, width: int, sizes: Mapping[str, int]) -> None:
        super().__init__()
        self.sizes = dict(sizes)
        self.read = nn.Linear(width, sum(sizes.values()))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """Logits of each label: states `[..., D]` to `[..., classes]`."""
        parts = self.read(x).split(list(self.sizes.values()), -1)
        return dict(zip(self.sizes, parts, strict=True))

    def loss(self, x: Tensor, labels: Mapping[str, Tensor]) -> Tensor:
        """Sum of the mean losses of the given labels `[...]`, IGNORE where there is none."""
        logits, total = self(x), x.new_zeros(())
        for name, label in labels.items():
            if (label != IGNORE).any():
                total = total + cross_entropy(logits[name].flatten(0, -2), label.flatten())
        return total
