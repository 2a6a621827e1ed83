"""Tiny random models of stock classes that write speech down, saved with their processors."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from codebook_models import MIMI, spread
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from mmfast.voice.models import load_voice

LETTERS = " abcdefghijklmnopqrstuvwxyz'"
RATE = 16_000
MELS = 16


def noise(*lengths: int, seed: int = 0) -> list[Tensor]:
    """Sounds of so many samples, no two alike: a tone that rises and falls, under noise."""
    draw = torch.Generator().manual_seed(seed)

    def sound(n: int) -> Tensor:
        level, pitch, swing, speed = (float(x) for x in torch.rand(4, generator=draw))
        time = torch.arange(n) / RATE
        phase = 2e3 * (0.2 + pitch) * time + 300 * swing * torch.sin(20 * speed * time)
        hiss = torch.randn(n, generator=draw)
        return (0.1 + 0.5 * level) * torch.sin(phase) + 0.05 * level * hiss

    return [sound(n) for n in lengths]


def letters(*special: str) -> Tokenizer:
    """A tokenizer of single letters behind special tokens, the first of which is the unknown."""
    vocab = {token: number for number, token in enumerate([*special, *LETTERS])}
    found = Tokenizer(models.WordLevel(vocab, special[0]))
    found.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    found.decoder = decoders.Fuse()
    return found


def saved(model: Any, processor: Any, folder: Path) -> str:
    """Save both into a folder."""
    model.eval().save_pretrained(folder)
    processor.save_pretrained(folder)
    return str(folder)


def ctc(name: str, norm: str = "layer", mask: bool = True) -> Callable[[Path], str]:
    """wav2vec 2.0 and its kin; those of `norm` "group" have no mask."""

    def build(folder: Path) -> str:
        special = ["<pad>", "<s>", "</s>", "<unk>", "|"]
        vocab = {token: number for number, token in enumerate([*special, *LETTERS[1:]])}
        (folder / "vocab.json").write_text(json.dumps(vocab))
        words = transformers.Wav2Vec2CTCTokenizer(str(folder / "vocab.json"))
        config = getattr(transformers, f"{name}Config")(
            vocab_size=len(vocab),
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            conv_dim=[8] * 7,
            feat_extract_norm=norm,
            num_conv_pos_embeddings=16,
            num_conv_pos_embedding_groups=2,
            pad_token_id=0,
        )
        torch.manual_seed(0)
        model = spread(getattr(transformers, f"{name}ForCTC")(config), "weight_v", 2.0)
        ears = transformers.Wav2Vec2FeatureExtractor(return_attention_mask=mask, do_normalize=mask)
        return saved(model, transformers.Wav2Vec2Processor(ears, words), folder)

    return build


ENCODER = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "subsampling_conv_channels": 8,
    "num_mel_bins": MELS,
    "layerdrop": 0.0,
}


def parakeet(name: str, kind: str = "Parakeet", **more: Any) -> Callable[[Path], str]:
    """Parakeet with a CTC head, or a transducer; or Nemotron."""

    def build(folder: Path) -> str:
        own = ["<unk>", "<pad>", *(["<blank>"] if name != "CTC" else [])]
        words = transformers.ParakeetTokenizer(
            tokenizer_object=letters(*own),
            unk_token="<unk>",
            pad_token="<pad>",
            additional_special_tokens=own[2:],
        )
        sizes = {} if name == "CTC" else {"decoder_hidden_size": 16, "blank_token_id": 2}
        config = getattr(transformers, f"{kind}{name if kind == 'Parakeet' else ''}Config")(
            vocab_size=len(words), encoder_config=ENCODER, pad_token_id=1, **sizes, **more
        )
        torch.manual_seed(0)
        model = spread(getattr(transformers, f"{kind}For{name}")(config))
        with torch.no_grad():
            if name == "TDT":  # a token without duration is followed by itself for ever
                model.joint.head.bias[len(words)] -= 20
            elif name == "RNNT":  # so is a token without a blank behind it
                model.joint.head.bias[2] += 2
        if name != "CTC":
            asked = model.generation_config
            asked.decoder_start_token_id, asked._from_model_config = 2, False
            asked.suppress_tokens = [0, 1, *range(len(words), len(words) + 5 * (name == "TDT"))]
        ears = getattr(transformers, f"{kind}FeatureExtractor")(feature_size=MELS)
        return saved(model, getattr(transformers, f"{kind}Processor")(ears, words), folder)

    return build


def whisper(folder: Path) -> str:
    """Whisper for two languages, whose text is bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = transformers.WhisperTokenizer(
        vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]
    )
    names = "endoftext startoftranscript en de translate transcribe startoflm startofprev nospeech"
    special = [f"<|{name}|>" for name in (*names.split(), "notimestamps")]
    words.add_special_tokens({"additional_special_tokens": special})
    words.add_tokens([f"<|{n * 0.02:.2f}|>" for n in range(1501)])
    ids = {token: words.convert_tokens_to_ids(token) for token in special}
    end, start = ids["<|endoftext|>"], ids["<|startoftranscript|>"]
    sizes = {f"{part}_{what}": n for part in ("encoder", "decoder") for what, n in PARTS.items()}
    config = transformers.WhisperConfig(
        vocab_size=len(words), d_model=16, max_target_positions=64, **sizes, pad_token_id=end,
        bos_token_id=end, eos_token_id=end, decoder_start_token_id=start,
        begin_suppress_tokens=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = spread(transformers.WhisperForConditionalGeneration(config), "encoder.embed_positions")
    asked = model.generation_config
    asked.lang_to_id = {token: ids[token] for token in ("<|en|>", "<|de|>")}
    asked.task_to_id = {task: ids[f"<|{task}|>"] for task in ("transcribe", "translate")}
    asked.is_multilingual, asked.max_length = True, 24
    asked.no_timestamps_token_id = ids["<|notimestamps|>"]
    # letters alone: marks of time are no text
    kept = {end, *(words.convert_tokens_to_ids(letter) for letter in LETTERS[1:-1])}
    asked.suppress_tokens = [n for n in range(len(words)) if n not in kept]
    asked._from_model_config = False
    ears = transformers.WhisperFeatureExtractor()
    return saved(model, transformers.WhisperProcessor(ears, words), folder)


PARTS = {"layers": 2, "attention_heads": 2, "ffn_dim": 32}


def moonshine(folder: Path) -> str:
    """Moonshine, whose text is letters."""
    words = transformers.PreTrainedTokenizerFast(
        tokenizer_object=letters("<unk>", "<s>", "</s>"),
        unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>",
    )  # fmt: skip
    layers = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = transformers.MoonshineConfig(
        vocab_size=len(words), hidden_size=16, intermediate_size=32, pad_token_id=2,
        **{f"{part}_{key}": n for part in ("encoder", "decoder") for key, n in layers.items()},
    )  # fmt: skip
    torch.manual_seed(0)
    model = spread(transformers.MoonshineForConditionalGeneration(config))
    model.generation_config.suppress_tokens = [0, 1]
    model.generation_config._from_model_config = False
    ears = transformers.Wav2Vec2FeatureExtractor(return_attention_mask=True, do_normalize=False)
    return saved(model, transformers.Wav2Vec2Processor(ears, words), folder)


TEXT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 4096,
}


def written(model: Any, size: int, kept: set[int], end: int) -> None:
    """Let a model write what is kept, and the end, of a vocabulary of `size`."""
    asked = model.generation_config
    asked.suppress_tokens = [n for n in range(size) if n not in {*kept, end}]
    asked.eos_token_id = asked.pad_token_id = end
    asked.max_new_tokens, asked.max_length, asked._from_model_config = 12, None, False


def tekken(folder: Path, audio: dict[str, Any], version: str) -> Any:
    """A tokenizer of bytes as mistral-common reads it."""
    names = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]",
             "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]",
             "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]",
             "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]", "[ARGS]", "[CALL_ID]",
             "[THINK]", "[/THINK]", "[AUDIO]", "[BEGIN_AUDIO]", "[TRANSCRIBE]", "[STREAMING_PAD]",
             "[STREAMING_WORD]"]  # fmt: skip
    special = [{"rank": n, "token_str": name, "is_control": True} for n, name in enumerate(names)]
    vocab = [
        {"rank": n, "token_bytes": base64.b64encode(bytes([n])).decode(), "token_str": None}
        for n in range(256)
    ]
    count = len(names)
    config = {
        "pattern": ".", "num_vocab_tokens": 256, "default_vocab_size": 256 + count,
        "default_num_special_tokens": count, "version": version,
    }  # fmt: skip
    found = {"vocab": vocab, "special_tokens": special, "config": config, "audio": audio}
    (folder / "tekken.json").write_text(json.dumps({**found, "version": 1, "type": "Tekken"}))
    return transformers.MistralCommonBackend.from_pretrained(folder)


SOUND = {
    "sampling_rate": RATE,
    "frame_rate": 12.5,
    "audio_encoding_config": {"num_mel_bins": MELS, "hop_length": 160, "window_size": 400},
}
BYTES = {29 + ord(letter) for letter in LETTERS}


def voxtral(folder: Path) -> str:
    """Voxtral, whose text is bytes and whose windows have 30 s."""
    words = tekken(folder, {**SOUND, "chunk_length_s": 30.0}, "v11")
    ear = {"num_mel_bins": MELS, "hidden_size": 16, "intermediate_size": 64,
           "num_hidden_layers": 2, "num_attention_heads": 2}  # fmt: skip
    config = transformers.VoxtralConfig(
        audio_config=ear, text_config={**TEXT, "vocab_size": 285}, audio_token_id=24
    )
    torch.manual_seed(0)
    model = spread(transformers.VoxtralForConditionalGeneration(config), "embed_positions")
    written(model, 285, BYTES, 2)
    ears = transformers.WhisperFeatureExtractor(feature_size=MELS)
    return saved(model, transformers.VoxtralProcessor(ears, words), folder)


def voxtral_realtime(folder: Path) -> str:
    """Voxtral Realtime, late by two tokens."""
    audio = {**SOUND, "transcription_format": "streaming", "transcription_delay_ms": 160.0,
             "streaming_look_ahead_ms": 2.5, "streaming_look_back_ms": 52.5,
             "streaming_n_left_pad_tokens": 4}  # fmt: skip
    words = tekken(folder, audio, "v13")
    small = {"num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 8}
    config = transformers.VoxtralRealtimeConfig(
        audio_config={**small, "hidden_size": 16, "intermediate_size": 32, "num_mel_bins": MELS},
        text_config={**TEXT, "vocab_size": 285, "sliding_window": 64, "tie_word_embeddings": False},
        default_num_delay_tokens=2,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = spread(transformers.VoxtralRealtimeForConditionalGeneration(config))
    written(model, 285, BYTES, 2)
    asked = model.generation_config
    asked.max_new_tokens, asked.eos_token_id, asked.pad_token_id = None, None, 11
    asked.suppress_tokens = [n for n in range(285) if n not in BYTES]
    ears = transformers.VoxtralRealtimeFeatureExtractor(feature_size=MELS)
    return saved(model, transformers.VoxtralRealtimeProcessor(ears, words), folder)


def kyutai(folder: Path) -> str:
    """Kyutai's recogniser on a Mimi of 4 codebooks, late by half a second."""
    words = transformers.PreTrainedTokenizerFast(
        tokenizer_object=letters("<unk>", "<s>", "</s>", "<pad>"),
        unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<pad>",
    )  # fmt: skip
    config = transformers.KyutaiSpeechToTextConfig(
        vocab_size=len(words), codebook_vocab_size=65, hidden_size=32, num_hidden_layers=2,
        num_attention_heads=4, ffn_dim=64, num_codebooks=4, audio_bos_token_id=64,
        audio_pad_token_id=64, pad_token_id=3, bos_token_id=1, sliding_window=20,
        max_position_embeddings=40, codec_config={**MIMI, "num_quantizers": 4},
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.KyutaiSpeechToTextForConditionalGeneration(config)
    spread(model.model), spread(model.lm_head)
    asked = model.generation_config
    asked.bos_token_id, asked.pad_token_id, asked._from_model_config = 1, 3, False
    asked.eos_token_id = None
    ears = transformers.KyutaiSpeechToTextFeatureExtractor(audio_delay_seconds=0.5)
    return saved(model, transformers.KyutaiSpeechToTextProcessor(ears, words), folder)


QWEN = """{% for message in messages %}<|im_start|>{{ message.role }} {% for part in message.content
-%}{% if part.type == 'text' %}{{ part.text }}{% else %}<|audio_start|><|audio_pad|><|audio_end|>
{%- endif %}{% endfor %}<|im_end|>{% endfor %}"""


def qwen3_asr(folder: Path) -> str:
    """Qwen3-ASR, whose text is letters."""
    special = ["<unk>", "<|im_start|>", "<|im_end|>", "<|audio_pad|>", "<|audio_start|>",
               "<|audio_end|>", "<asr_text>"]  # fmt: skip
    words = transformers.PreTrainedTokenizerFast(
        tokenizer_object=letters(*special), unk_token="<unk>", pad_token="<|im_end|>",
        eos_token="<|im_end|>", additional_special_tokens=special[1:-1], padding_side="left",
        extra_special_tokens={"audio_token": "<|audio_pad|>", "audio_bos_token": "<|audio_start|>",
                              "audio_eos_token": "<|audio_end|>"},
    )  # fmt: skip
    ear = {"num_mel_bins": MELS, "d_model": 16, "encoder_layers": 2, "encoder_attention_heads": 2,
           "encoder_ffn_dim": 32, "output_dim": 32, "downsample_hidden_size": 8}  # fmt: skip
    config = transformers.Qwen3ASRConfig(
        audio_config=ear, text_config={**TEXT, "vocab_size": len(words)}, audio_token_id=3,
        pad_token_id=2, eos_token_id=2, timestamp_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = spread(transformers.Qwen3ASRForConditionalGeneration(config))
    written(model, len(words), set(range(7, len(words))), 2)
    ears = transformers.Qwen3ASRFeatureExtractor(feature_size=MELS)
    processor = transformers.Qwen3ASRProcessor(ears, words, chat_template=QWEN)
    return saved(model, processor, folder)


BUILDERS: dict[str, Callable[[Path], str]] = {
    "wav2vec2": ctc("Wav2Vec2"),
    "wav2vec2-group": ctc("Wav2Vec2", "group", False),
    "hubert": ctc("Hubert"),
    "wavlm": ctc("WavLM"),
    "unispeech-sat": ctc("UniSpeechSat"),
    "parakeet_ctc": parakeet("CTC"),
    "parakeet_rnnt": parakeet("RNNT"),
    "parakeet_tdt": parakeet("TDT"),
    "nemotron_asr_streaming": parakeet("RNNT", "NemotronAsrStreaming"),
    "whisper": whisper,
    "moonshine": moonshine,
    "voxtral": voxtral,
    "voxtral_realtime": voxtral_realtime,
    "kyutai_speech_to_text": kyutai,
    "qwen3_asr": qwen3_asr,
}


class LoadedListeners:
    """Listeners of tiny checkpoints, each saved and loaded once."""

    def __init__(self, places: pytest.TempPathFactory) -> None:
        self._places, self._loaded = places, dict[str, Any]()

    def __call__(self, kind: str) -> Any:
        """Return the listener of a kind of checkpoint."""
        if kind not in self._loaded:
            folder = self._places.mktemp("listeners") / kind
            folder.mkdir()
            self._loaded[kind] = load_voice(BUILDERS[kind](folder), "cpu", "float32")
        return self._loaded[kind]
