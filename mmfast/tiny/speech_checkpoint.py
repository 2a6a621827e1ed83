"""The speech model's folder: stock backbone and tokenizer, ear and layout beside them."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from safetensors.torch import save_file
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from mmfast.models.speech_layout import SpeechLayout
from mmfast.models.speech_tower import FILE as TOWER
from mmfast.tiny.speech_losses import Model
from mmfast.tiny.speech_net import llama_config, to_llama


def tokenizer(layout: SpeechLayout) -> PreTrainedTokenizerFast:
    """Text and audio rows as an ordinary tokenizer: words of the domain whole, others spelled."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    codes = [f"<{chr(97 + q)}{c}>" for q in range(layout.books) for c in range(layout.entries)]
    names = [*layout.rows, "<next>", "<end>", *codes]
    core = Tokenizer(
        models.WordPiece(
            {name: i for i, name in enumerate(names)},
            unk_token="<pad>",
            continuing_subword_prefix="",
        )
    )
    ends = normalizers.Replace(Regex(r"(?<=[a-z'])(?![a-z'])"), "_")
    core.normalizer = normalizers.Sequence([normalizers.Lowercase(), ends])
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[a-z']+_|[,.?]"), "removed", invert=True)
    core.decoder = decoders.Sequence([decoders.Fuse(), decoders.Replace("_", " ")])
    marks = [name for name in names if name.startswith("<")]
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="<end>",
        additional_special_tokens=marks,
        model_max_length=4096,
        clean_up_tokenization_spaces=False,
    )


def save_checkpoint(folder: Path, model: Model, layout: SpeechLayout) -> None:
    """Write backbone (float16), tokenizer, ear and layout; what reads it meanwhile sees no half."""
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent) as place:
        _write(Path(place), model, layout)
        for file in Path(place).iterdir():
            file.chmod(0o644)
            file.replace(folder / file.name)


def _write(folder: Path, model: Model, layout: SpeechLayout) -> None:
    config = llama_config(model.net.shape, layout.id("<pad>"), layout.end)
    stock: Any = LlamaForCausalLM(config)
    stock.load_state_dict(to_llama(model.net))
    stock.half().save_pretrained(folder)
    tokenizer(layout).save_pretrained(folder)
    ear = {name: value.detach().half() for name, value in model.tower.state_dict().items()}
    save_file(ear, folder / TOWER)
    layout.save(folder)
