"""The model before training, and the processor: stock classes, small numbers, no download."""

from collections.abc import Iterable

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
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

from mmfast.tiny.video.clips import INPUT
from mmfast.tiny.video.questions import WORDINGS
from mmfast.tiny.video.scene import COLOURS, DIRECTIONS, PATCHES, SHAPES

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


def corpus() -> Iterable[str]:
    """Every wording with every filling word, which fixes the vocabulary."""
    names = [f"{c} {s}" for c in COLOURS for s in SHAPES] + ["start", "end", *COLOURS, *SHAPES]
    for wordings in WORDINGS.values():
        for wording in wordings:
            yield from (wording.format(name, name) for name in names)
    yield from ANSWERS


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Lower-case byte-level BPE: known words are one token, digits are apart, any text works."""
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
        vocab_size=640,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(corpus(), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=SPECIALS[END],
        pad_token=SPECIALS[END],
        extra_special_tokens={"image_token": SPECIALS[IMAGE], "video_token": SPECIALS[VIDEO]},
        padding_side="left",
        model_max_length=4096,
        clean_up_tokenization_spaces=False,
    )


def make_processor() -> LlavaOnevisionProcessor:
    """Tokenizer, image and video processor that bring any picture to the tower's size."""
    size = {"height": INPUT, "width": INPUT}
    grey = [0.5, 0.5, 0.5]
    return LlavaOnevisionProcessor(
        image_processor=LlavaOnevisionImageProcessor(
            size=size, image_mean=grey, image_std=grey, image_grid_pinpoints=[[INPUT, INPUT]]
        ),
        tokenizer=make_tokenizer(),
        video_processor=LlavaOnevisionVideoProcessor(
            size=size, image_mean=grey, image_std=grey, do_sample_frames=False
        ),
        num_image_tokens=PATCHES**2,
        vision_feature_select_strategy="full",
        chat_template=CHAT,
    )


def make_model(vocabulary: int, seed: int) -> LlavaOnevisionForConditionalGeneration:
    """A LLaVA-OneVision of about three million parameters with random weights."""
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
    model.generation_config.eos_token_id = END
    model.generation_config.pad_token_id = END
    model.generation_config.max_new_tokens = 8
    return model.float()
