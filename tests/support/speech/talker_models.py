"""Tiny random talkers of the stock classes, saved to folders with their readers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import mmfast

LETTERS = "abcdefghijklmnopqrstuvwxyz'"


def loud(model: Any, seed: int = 1, gain: float = 1.0) -> Any:
    """Weights large enough that every layer matters."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                fan = weight[0].numel()
                weight.copy_(torch.randn(weight.shape, generator=generator) * gain / fan**0.5)
            elif name.endswith("bias"):
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.05)
    return model.eval()


def vits(folder: Path, **changes: Any) -> str:
    """24 samples in a frame; three speakers."""
    from transformers import VitsConfig, VitsModel, VitsTokenizer

    config = VitsConfig(**{
        "vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
        "ffn_dim": 32, "flow_size": 16, "spectrogram_bins": 9, "num_speakers": 3,
        "speaker_embedding_size": 8, "upsample_initial_channel": 16, "upsample_rates": [4, 6],
        "upsample_kernel_sizes": [8, 12], "resblock_kernel_sizes": [3, 5],
        "resblock_dilation_sizes": [[1, 3], [1, 3]], "duration_predictor_filter_channels": 16,
        "prior_encoder_num_flows": 2, "prior_encoder_num_wavenet_layers": 2,
        "posterior_encoder_num_wavenet_layers": 2, "wavenet_dilation_rate": 1,
        "depth_separable_num_layers": 2, "duration_predictor_num_flows": 2, **changes,
    })  # fmt: skip
    torch.manual_seed(0)
    loud(VitsModel(config), gain=0.7).save_pretrained(folder)
    vocab = {letter: at for at, letter in enumerate(["<pad>", " ", *LETTERS, "<unk>"])}
    (folder / "vocab.json").write_text(json.dumps(vocab))
    VitsTokenizer(str(folder / "vocab.json"), phonemize=False).save_pretrained(folder)
    return str(folder)


def spelling(folder: Path, sentences: list[str]) -> Path:
    """A SentencePiece model of letters, trained on these sentences."""
    import sentencepiece

    text = folder / "text.txt"
    text.write_text("\n".join(sentences * 20))
    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(folder / "spm"), model_type="char", vocab_size=40,
        hard_vocab_limit=False, bos_id=0, pad_id=1, eos_id=2, unk_id=3, minloglevel=2,
    )  # fmt: skip
    return folder / "spm.model"


def speecht5(folder: Path) -> str:
    """Two mel frames a step, six samples a frame; a vocoder and two voices beside it."""
    from transformers import (
        SpeechT5Config,
        SpeechT5ForTextToSpeech,
        SpeechT5HifiGan,
        SpeechT5HifiGanConfig,
        SpeechT5Tokenizer,
    )

    config = SpeechT5Config(
        vocab_size=64, hidden_size=16, encoder_layers=2, encoder_attention_heads=2,
        encoder_ffn_dim=32, decoder_layers=2, decoder_attention_heads=2, decoder_ffn_dim=32,
        num_mel_bins=8, speech_decoder_prenet_units=16, speech_decoder_postnet_units=16,
        speech_decoder_postnet_layers=2, speaker_embedding_dim=6, max_text_positions=64,
        max_speech_positions=256, reduction_factor=2,
    )  # fmt: skip
    torch.manual_seed(0)
    loud(SpeechT5ForTextToSpeech(config)).save_pretrained(folder)
    vocoder = SpeechT5HifiGanConfig(
        model_in_dim=8, upsample_initial_channel=8, upsample_rates=[3, 2],
        upsample_kernel_sizes=[7, 4], resblock_kernel_sizes=[3], resblock_dilation_sizes=[[1, 3]],
    )  # fmt: skip
    loud(SpeechT5HifiGan(vocoder), seed=2).save_pretrained(folder / "vocoder")
    words = spelling(folder, ["the quick brown fox jumps over the lazy dog.", "how vexing! is it?"])
    SpeechT5Tokenizer(str(words)).save_pretrained(folder)
    (folder / "speaker_embeddings").mkdir()
    for seed, name in enumerate(("anna", "ben")):
        voice = np.random.default_rng(seed).standard_normal(6).astype("float32")
        np.save(folder / "speaker_embeddings" / f"{name}.npy", voice)
    return str(folder)


def letters(**special: str) -> Any:
    """A tokenizer of letters, digits and marks; special tokens, by attribute, come last."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    signs = ["<pad>", "<unk>", "<s>", "</s>", *" abcdefghijklmnopqrstuvwxyz0123456789.,?!':[]"]
    words = Tokenizer(models.WordLevel({sign: at for at, sign in enumerate(signs)}, "<unk>"))
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    basic = {"pad_token": "<pad>", "unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(
        tokenizer_object=words, **basic, extra_special_tokens=special, padding_side="left"
    )


def bark(folder: Path) -> str:
    """Books of 16 codes, 8 samples a frame; a preset `v2/anna`."""
    from transformers import BarkConfig, BarkModel, BarkProcessor, EncodecConfig
    from transformers.models.bark.generation_configuration_bark import BarkGenerationConfig

    part = {"block_size": 128, "num_layers": 2, "num_heads": 2, "hidden_size": 16}
    codec = EncodecConfig(
        sampling_rate=800, hidden_size=8, num_filters=4, upsampling_ratios=(4, 2),
        codebook_size=16, codebook_dim=8, target_bandwidths=(3.2,),
    )  # fmt: skip
    config = BarkConfig(
        semantic_config={**part, "input_vocab_size": 120, "output_vocab_size": 60},
        coarse_acoustics_config={**part, "input_vocab_size": 90, "output_vocab_size": 90},
        fine_acoustics_config={
            **part, "block_size": 64, "input_vocab_size": 20, "output_vocab_size": 20,
            "n_codes_total": 4,
        },
        codec_config=codec.to_dict(),
    )  # fmt: skip
    torch.manual_seed(0)
    model = loud(BarkModel(config), gain=2.0)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        model.semantic.lm_head.weight[50].zero_()  # it goes on speaking
        for name, entries in model.codec_model.named_buffers():
            if name.endswith("embed"):
                entries.copy_(torch.randn(entries.shape, generator=generator) * 0.3)
    generation = BarkGenerationConfig(
        semantic_config={
            "eos_token_id": 50, "semantic_vocab_size": 50, "text_encoding_offset": 52,
            "text_pad_token": 117, "semantic_infer_token": 118, "max_input_semantic_length": 32,
            "max_new_tokens": 12, "semantic_rate_hz": 50,
        },
        coarse_acoustics_config={
            "coarse_semantic_pad_token": 84, "coarse_rate_hz": 100, "coarse_infer_token": 85,
            "max_coarse_input_length": 16, "max_coarse_history": 24, "sliding_window_len": 8,
        },
        fine_acoustics_config={
            "max_fine_history_length": 16, "max_fine_input_length": 32, "n_fine_codebooks": 4,
        },
        sample_rate=800,
        codebook_size=16,
    )  # fmt: skip
    model.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps(generation.to_dict()))
    BarkProcessor(letters()).save_pretrained(folder)
    random, names = np.random.default_rng(0), ("semantic", "coarse", "fine")
    sizes = {"semantic": ((20,), 50), "coarse": ((2, 40), 16), "fine": ((4, 40), 16)}
    paths = {}
    for name in names:
        shape, most = sizes[name]
        paths[f"{name}_prompt"] = f"anna_{name}_prompt.npy"
        np.save(folder / paths[f"{name}_prompt"], random.integers(0, most, shape))
    listed = {"repo_or_path": str(folder), "v2/anna": paths}
    (folder / "speaker_embeddings_path.json").write_text(json.dumps(listed))
    return str(folder)


def seamless(folder: Path) -> str:
    """English and French, three speakers."""
    from transformers import (
        SeamlessM4TTokenizer,
        SeamlessM4Tv2Config,
        SeamlessM4Tv2ForTextToSpeech,
    )

    tongues = {"eng": 46, "fra": 47}
    config = SeamlessM4Tv2Config(
        vocab_size=50, t2u_vocab_size=40, char_vocab_size=40, hidden_size=16,
        max_position_embeddings=64, encoder_layers=2, encoder_ffn_dim=32,
        encoder_attention_heads=2, decoder_layers=2, decoder_ffn_dim=32,
        decoder_attention_heads=2, max_new_tokens=12, speech_encoder_layers=1,
        speech_encoder_attention_heads=2, speech_encoder_intermediate_size=16,
        t2u_encoder_layers=1, t2u_encoder_ffn_dim=32, t2u_encoder_attention_heads=2,
        t2u_decoder_layers=1, t2u_decoder_ffn_dim=32, t2u_decoder_attention_heads=2,
        t2u_max_position_embeddings=256, t2u_variance_predictor_embed_dim=16,
        t2u_variance_predictor_hidden_dim=16, upsample_initial_channel=16, upsample_rates=[3, 2],
        upsample_kernel_sizes=[7, 4], resblock_kernel_sizes=[3], resblock_dilation_sizes=[[1, 3]],
        unit_hifi_gan_vocab_size=40, unit_embed_dim=8, lang_embed_dim=4, spkr_embed_dim=4,
        vocoder_num_langs=2, vocoder_num_spkrs=3, vocoder_offset=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = loud(SeamlessM4Tv2ForTextToSpeech(config), gain=1.5)
    signs = ["<pad>", "<unk>", "<s>", "</s>", *"▁abcdefghijklmnopqrstuvwxyz0123456789.,?!'"]
    given = {
        "text_decoder_lang_to_code_id": tongues, "t2u_lang_code_to_id": {"eng": 36, "fra": 37},
        "vocoder_lang_code_to_id": {"eng": 0, "fra": 1}, "max_new_tokens": 12,
        "id_to_text": {str(at): sign for at, sign in enumerate(signs)},
        "char_to_id": {sign: at % 40 for at, sign in enumerate(signs)},
        "decoder_start_token_id": 3, "bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 0,
    }  # fmt: skip
    model.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps(given))
    words = SeamlessM4TTokenizer(
        vocab={sign: at for at, sign in enumerate(signs)},
        additional_special_tokens=["__eng__", "__fra__"],
    )
    words.save_pretrained(folder)
    return str(folder)


def dia(folder: Path) -> str:
    """Three books of 16 codes with delays 0, 2 and 3; 8 samples a frame."""
    from transformers import (
        DacConfig,
        DacModel,
        DiaConfig,
        DiaFeatureExtractor,
        DiaForConditionalGeneration,
        DiaProcessor,
        DiaTokenizer,
    )

    part = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "head_dim": 8}
    config = DiaConfig(
        encoder_config={**part, "num_key_value_heads": 2, "intermediate_size": 32},
        decoder_config={
            **part, "num_key_value_heads": 1, "intermediate_size": 32, "vocab_size": 20,
            "cross_num_attention_heads": 2, "cross_head_dim": 8, "cross_num_key_value_heads": 2,
            "cross_hidden_size": 16, "num_channels": 3, "pad_token_id": 17, "eos_token_id": 16,
            "bos_token_id": 18,
        },
        delay_pattern=[0, 2, 3],
    )  # fmt: skip
    torch.manual_seed(0)
    model = loud(DiaForConditionalGeneration(config), gain=2.0)
    model.generation_config.update(
        max_new_tokens=20, decoder_start_token_id=18, bos_token_id=18, eos_token_id=16,
        pad_token_id=17, guidance_scale=3.0, do_sample=True, top_k=10,
    )  # fmt: skip
    model.save_pretrained(folder)
    codec = DacConfig(
        encoder_hidden_size=4, downsampling_ratios=(2, 4), decoder_hidden_size=32, n_codebooks=3,
        codebook_size=16, codebook_dim=4, sampling_rate=800,
    )  # fmt: skip
    loud(DacModel(codec), seed=3, gain=0.6).save_pretrained(folder / "audio_tokenizer")
    processor = DiaProcessor(
        DiaFeatureExtractor(sampling_rate=800, hop_length=8),
        DiaTokenizer(),
        DacModel.from_pretrained(folder / "audio_tokenizer"),
    )
    processor.save_pretrained(folder)
    return str(folder)


TURNS = (  # a chat template of the parts of every turn, sound as its placeholder
    "{%% for turn in messages %%}{%% for part in turn['content'] %%}"
    "{{ part['text'] if part['type'] == 'text' else '%s' }}"
    "{%% endfor %%}{%% endfor %%}%s"
)


def higgs(folder: Path) -> str:
    """Three books of 32 codes, 480 samples a frame."""
    from codec_cases import higgs_tokenizer
    from transformers import (
        DacFeatureExtractor,
        HiggsAudioV2Config,
        HiggsAudioV2ForConditionalGeneration,
        HiggsAudioV2Processor,
        HiggsAudioV2TokenizerModel,
    )

    signs = {
        "audio_token": "<|AUDIO_OUT|>", "audio_bos_token": "<|audio_out_bos|>",
        "audio_eos_token": "<|audio_eos|>", "audio_delay_token": "<|reserved_special_token_6|>",
    }  # fmt: skip
    words = letters(**signs)
    ids = {name: words.convert_tokens_to_ids(sign) for name, sign in signs.items()}
    config = HiggsAudioV2Config(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, pad_token_id=0, bos_token_id=2,
        eos_token_id=3, rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        num_codebooks=3, codebook_size=34, audio_token_id=ids["audio_token"],
        audio_bos_token_id=ids["audio_bos_token"], audio_delay_token_id=ids["audio_delay_token"],
        audio_stream_bos_id=32, audio_stream_eos_id=33,
    )  # fmt: skip
    torch.manual_seed(0)
    model = loud(HiggsAudioV2ForConditionalGeneration(config), gain=1.5)
    model.generation_config.update(max_new_tokens=30, eos_token_id=3, pad_token_id=0)
    model.save_pretrained(folder)
    higgs_tokenizer().save_pretrained(folder / "audio_tokenizer")
    template = TURNS % ("<|AUDIO_OUT|>", "<|audio_out_bos|>")
    HiggsAudioV2Processor(
        DacFeatureExtractor(sampling_rate=24000, hop_length=480),
        words,
        HiggsAudioV2TokenizerModel.from_pretrained(folder / "audio_tokenizer"),
        chat_template=template,
        audio_stream_bos_id=32,
        audio_stream_eos_id=33,
    ).save_pretrained(folder)
    return str(folder)


def vibevoice(folder: Path) -> str:
    """8 samples a frame, four latents."""
    from transformers import (
        VibeVoiceAcousticTokenizerFeatureExtractor,
        VibeVoiceConfig,
        VibeVoiceForConditionalGeneration,
        VibeVoiceProcessor,
    )

    signs = {
        "audio_bos_token": "<|vision_start|>", "audio_eos_token": "<|vision_end|>",
        "audio_token": "<|vision_pad|>",
    }  # fmt: skip
    words = letters(**signs)
    ids = {f"{name}_id": words.convert_tokens_to_ids(sign) for name, sign in signs.items()}
    sound = {
        "hidden_size": 4, "kernel_size": 5, "num_filters": 4, "downsampling_ratios": [2, 4],
        "depths": [1, 1, 1], "ffn_expansion": 2, "layer_scale_init_value": 0.5,
    }  # fmt: skip
    config = VibeVoiceConfig(
        audio_config={"model_type": "vibevoice_acoustic_tokenizer", **sound},
        semantic_model_config={
            "model_type": "vibevoice_acoustic_tokenizer_encoder", **sound, "hidden_size": 6,
        },
        text_config={
            "model_type": "qwen2", "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32,
            "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
        },
        diffusion_head_config={"num_hidden_layers": 1, "intermediate_size": 16,
                               "frequency_embedding_size": 8, "hidden_size": 16, "latent_size": 4},
        pad_token_id=3, eos_token_id=3, **ids,
    )  # fmt: skip
    torch.manual_seed(0)
    model = loud(VibeVoiceForConditionalGeneration(config))
    model.generation_config.update(  # it goes on speaking for eight frames at least
        max_new_tokens=10, min_new_tokens=8, eos_token_id=3, pad_token_id=3, guidance_scale=1.3,
        suppress_tokens=[ids["audio_bos_token_id"], ids["audio_eos_token_id"]],
    )  # fmt: skip
    model.save_pretrained(folder)
    VibeVoiceProcessor(
        VibeVoiceAcousticTokenizerFeatureExtractor(pad_to_multiple_of=8),
        words,
        chat_template=TURNS % ("<|vision_pad|>", "<|vision_start|>"),
    ).save_pretrained(folder)
    return str(folder)


def pocket_tts(folder: Path) -> str:
    """16 samples a frame, four latents."""
    if not hasattr(transformers, "PocketTTSConfig"):  # before 5.21
        pytest.skip("this release of transformers has no Pocket TTS")
    from codec_cases import pocket_tokenizer
    from transformers import (
        PocketTTSAudioTokenizerModel,
        PocketTTSConfig,
        PocketTTSFeatureExtractor,
        PocketTTSForConditionalGeneration,
        PocketTTSProcessor,
    )

    signs = {
        "audio_prompt_token": "<voice>", "audio_latent_token": "<latent>",
        "audio_prompt_bos_token": "<voice_bos>", "audio_bos_token": "<sound>",
    }  # fmt: skip
    words = letters(**signs)
    ids = {f"{name}_id": words.convert_tokens_to_ids(sign) for name, sign in signs.items()}
    config = PocketTTSConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, latent_dim=4, frame_rate=100.0, pad_token_id=0, **ids,
        flow_head_config={
            "hidden_size": 16, "num_hidden_layers": 1, "latent_dim": 4, "condition_dim": 16,
            "frequency_embedding_size": 8,
        },
    )  # fmt: skip
    torch.manual_seed(0)
    model = loud(PocketTTSForConditionalGeneration(config))
    model.generation_config.update(
        max_new_tokens=10, do_sample=True, temperature=0.7, return_dict_in_generate=True
    )
    model.save_pretrained(folder)
    pocket_tokenizer().save_pretrained(folder / "audio_tokenizer")
    PocketTTSProcessor(
        PocketTTSFeatureExtractor(sampling_rate=1600, frame_size=16, pad_to_multiple_of=16),
        words,
        PocketTTSAudioTokenizerModel.from_pretrained(folder / "audio_tokenizer"),
        chat_template=TURNS % ("<voice_bos><voice>", "<sound>"),
    ).save_pretrained(folder)
    return str(folder)


def qwen3_omni(folder: Path) -> str:
    """Three books of 32 codes, 12 samples a frame; speakers anna and ben."""
    from transformers import (
        Qwen2VLImageProcessor,
        Qwen2VLVideoProcessor,
        Qwen3OmniMoeConfig,
        Qwen3OmniMoeForConditionalGeneration,
        Qwen3OmniMoeProcessor,
        WhisperFeatureExtractor,
    )

    signs = {
        "audio_token": "<|audio|>", "image_token": "<|image|>", "video_token": "<|video|>",
        "audio_bos_token": "<|a|>", "audio_eos_token": "<|/a|>", "vision_bos_token": "<|v|>",
        "vision_eos_token": "<|/v|>", "im_start": "<|im_start|>", "im_end": "<|im_end|>",
        "system": "<|system|>", "user": "<|user|>", "assistant": "<|assistant|>",
        "tts_pad": "<tts_pad>", "tts_bos": "<tts_text_bos>", "tts_eos": "<tts_text_eod>",
    }  # fmt: skip
    words = letters(**signs)
    at = {name: words.convert_tokens_to_ids(sign) for name, sign in signs.items()}
    seen = {
        "audio_token_id": at["audio_token"], "image_token_id": at["image_token"],
        "video_token_id": at["video_token"], "audio_start_token_id": at["audio_bos_token"],
        "vision_start_token_id": at["vision_bos_token"],
    }  # fmt: skip
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1],
            "mrope_interleaved": True}  # fmt: skip
    layers = {
        "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
    }  # fmt: skip
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
    talker = {
        "text_config": {
            **layers, **experts, "vocab_size": 1056, "rope_parameters": rope,
            "shared_expert_intermediate_size": 16,
        },
        "code_predictor_config": {**layers, "vocab_size": 32, "num_code_groups": 3},
        "num_code_groups": 3, "spatial_merge_size": 2, "thinker_hidden_size": 16,
        "accept_hidden_layer": 1,
        "codec_eos_token_id": 1040, "codec_pad_id": 1041, "codec_bos_id": 1042,
        "codec_nothink_id": 1043, "codec_think_bos_id": 1044, "codec_think_eos_id": 1045,
        "speaker_id": {"anna": 1050, "ben": 1051}, **seen,
    }  # fmt: skip
    config = Qwen3OmniMoeConfig(
        thinker_config={
            "text_config": {**layers, **experts, "vocab_size": 72, "rope_parameters": rope},
            "audio_config": {
                "num_mel_bins": 8, "encoder_layers": 1, "encoder_attention_heads": 2,
                "encoder_ffn_dim": 16, "d_model": 16, "output_dim": 16,
                "downsample_hidden_size": 4, "max_source_positions": 64,
            },
            "vision_config": {
                "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2,
                "patch_size": 4, "out_hidden_size": 16, "num_position_embeddings": 16,
                "deepstack_visual_indexes": [],
            },
            "user_token_id": at["user"], **seen,
        },
        talker_config=talker,
        code2wav_config={
            "codebook_size": 32, "hidden_size": 16, "num_attention_heads": 2,
            "num_key_value_heads": 2, "sliding_window": 5, "intermediate_size": 16,
            "num_hidden_layers": 2, "num_quantizers": 3, "upsample_rates": [3, 2],
            "upsampling_ratios": [2], "decoder_dim": 16, "layer_scale_initial_scale": 0.5,
        },
        im_start_token_id=at["im_start"], im_end_token_id=at["im_end"],
        tts_pad_token_id=at["tts_pad"], tts_bos_token_id=at["tts_bos"],
        tts_eos_token_id=at["tts_eos"], system_token_id=at["system"], user_token_id=at["user"],
        assistant_token_id=at["assistant"],
    )  # fmt: skip
    torch.manual_seed(0)
    model = loud(Qwen3OmniMoeForConditionalGeneration(config))
    with torch.no_grad():
        for name, weight in model.code2wav.named_parameters():
            if name.endswith("gamma"):
                weight.fill_(0.5)
    model.save_pretrained(folder)
    template = (
        "{% for turn in messages %}<|im_start|><|{{ turn['role'] }}|>\n{% for part in "
        "turn['content'] %}{{ part['text'] if part['type'] == 'text' else '<|audio|>' }}"
        "{% endfor %}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|><|assistant|>\n{% endif %}"
    )
    Qwen3OmniMoeProcessor(
        Qwen2VLImageProcessor(),
        Qwen2VLVideoProcessor(),
        WhisperFeatureExtractor(feature_size=8),
        words,
        chat_template=template,
    ).save_pretrained(folder)
    return str(folder)


def folders_of(kinds: Iterable[str], places: pytest.TempPathFactory) -> dict[str, str]:
    """Return a checkpoint of each kind, by its name."""
    return {kind: globals()[kind](places.mktemp(kind)) for kind in kinds}


def pipes_of(folders: Mapping[str, str]) -> dict[str, Any]:
    """Return a pipeline over each checkpoint."""
    return {
        kind: mmfast.pipeline("text-to-speech", folder, device="cpu", dtype="float32")
        for kind, folder in folders.items()
    }
