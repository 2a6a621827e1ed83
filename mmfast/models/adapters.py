"""LoRA adapters in the format of peft: trained beside a model, put beside it, merged into it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from torch import nn

from mmfast.compressors.base import check_rank
from mmfast.core.errors import MmfastError, ModelError
from mmfast.models.wrappers import decoder_of, stock_model

CONFIG, WEIGHTS = _FILES = ("adapter_config.json", "adapter_model.safetensors")
_MERGE = (
    "plain LoRA of linear layers is taken; merge the adapter (merge_and_unload) and give the "
    "model that is saved then"
)
_PEFT = 'adapters need peft: pip install "mmfast[train]"'


def with_lora(model: Any, rank: int, scale: float = 2.0) -> Any:
    """Put LoRA into all linear layers of a model's decoder; nothing else of it learns then.

    Returns the model of peft around it; `scale` is the factor of what the matrices add. ModelError:
    no peft, a rank that no layer has, or a decoder without linear layers.
    """
    if rank < 1:
        raise ModelError(f"a LoRA of rank {rank} learns nothing; give a rank from 1 on, such as 16")
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise ModelError(_PEFT) from None
    stock = stock_model(model)
    decoder = decoder_of(stock)
    linear = {n: layer for n, layer in decoder.named_modules() if isinstance(layer, nn.Linear)}
    leaves = {name.rpartition(".")[2] for name in linear}
    if not leaves:
        raise ModelError(
            f"the {type(decoder).__name__} of {type(stock).__name__} has no linear layer for a LoRA"
        )
    check_rank(rank, ((layer.in_features, layer.out_features) for layer in linear.values()))
    home = next(name for name, module in stock.named_modules() if module is decoder)
    inside = rf"{re.escape(home)}\..*" if home else ".*"
    names = rf"{inside}\b({'|'.join(sorted(leaves))})"
    alpha = round(scale * rank)
    return get_peft_model(model, LoraConfig(r=rank, lora_alpha=alpha, target_modules=names))


def save_lora(learner: Any, folder: Path, base: str) -> None:
    """Write the adapter of a model of peft; `base` is the name or folder of its model."""
    home = str(Path(base).resolve()) if Path(base).is_dir() else base
    learner.active_peft_config.base_model_name_or_path = home
    # peft would ask the hub for the words of `base`, which a LoRA of layers leaves as they are
    learner.save_pretrained(str(folder), save_embedding_layers=False)
    (folder / WEIGHTS).chmod(0o644)


def base_named(folder: str | Path) -> str | None:
    """Name the model of a folder that holds an adapter alone; None where it holds anything else.

    ModelError: the adapter names no model, or another adapter.
    """
    path = Path(folder)
    if (path / "config.json").is_file() or not (path / CONFIG).is_file():
        return None
    try:
        base = json.loads((path / CONFIG).read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError):
        base = None
    if not isinstance(base, str) or not base or (Path(base) / CONFIG).is_file():
        raise ModelError(
            f"{str(folder)!r} holds an adapter of PEFT without its model, and names "
            f"{base!r} as that; save the model that "
            "PeftModel.from_pretrained(…).merge_and_unload() returns, or give (model, processor)"
        )
    return base


def merge(model: Any, folder: str) -> None:
    """Add the matrices of an adapter to the weights of its model, a stock one before and after.

    Learned modules of `folder` (compressors, rankings) are those of the model from then on.
    """
    inject(model, Path(folder).name, Path(folder), "merged")
    for _, layer in tuner_layers(model):
        layer.merge()
    unload(model)
    model.name_or_path = folder


def tuner_layers(model: Any) -> list[tuple[str, Any]]:
    """Return the layers of peft in a model, by name."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [(n, each) for n, each in model.named_modules() if isinstance(each, BaseTunerLayer)]


def unload(model: Any) -> None:
    """Put the layers that peft wrapped back into the model; adapters that are not merged go."""
    for path, layer in tuner_layers(model):
        parent, _, leaf = path.rpartition(".")
        setattr(model.get_submodule(parent), leaf, layer.get_base_layer())
    model._hf_peft_config_loaded = False
    vars(model).pop("peft_config", None)


def inject(model: Any, name: str, folder: Path, key: str) -> None:
    """Add the matrices of an adapter to a model as peft and transformers do.

    `name` is what errors call it, `key` what peft does. MmfastError for a folder without an
    adapter, and for one that does not fit or changes more than linear layers.
    """
    for file in _FILES:
        if not (folder / file).is_file():
            raise MmfastError(
                f"adapter {name!r}: {str(folder)!r} has no {file}; give a folder that peft's "
                "save_pretrained wrote"
            )
    try:
        from peft import PeftConfig
        from peft.tuners.lora import Linear
    except ImportError:
        raise MmfastError(_PEFT) from None
    from transformers.utils import logging as told

    verbosity = told.get_verbosity()
    told.set_verbosity(told.CRITICAL)  # its report lists all weights of the model
    try:
        config: Any = PeftConfig.from_pretrained(str(folder))
        kind = "DORA" if getattr(config, "use_dora", False) else config.peft_type
        if kind != "LORA" or config.modules_to_save:
            held = f"whole modules {config.modules_to_save}" if kind == "LORA" else str(kind)
            raise MmfastError(f"adapter {name!r} holds {held}: {_MERGE}")
        info = model.load_adapter(str(folder), key, peft_config=config)
    except MmfastError:
        raise
    except Exception as error:  # peft and transformers raise many kinds
        text = " ".join(str(error).split())[:160]
        text = "its matrices have other sizes" if "mismatched" in text else text
        raise MmfastError(f"adapter {name!r} of {str(folder)!r} does not fit: {text}") from error
    finally:
        told.set_verbosity(verbosity)
    if left := sorted([*info.unexpected_keys, *(n for n in info.missing_keys if key in n)]):
        raise MmfastError(
            f"adapter {name!r} of {str(folder)!r} does not fit: {len(left)} of its matrices have "
            f"no place, such as {left[0]}; it was made for {config.base_model_name_or_path!r}"
        )
    for path, layer in tuner_layers(model):
        if key in layer.lora_embedding_A or key in layer.lora_variant:
            raise MmfastError(f"adapter {name!r} changes {path} otherwise: {_MERGE}")
        if key in layer.lora_A and not isinstance(layer, Linear):
            raise MmfastError(f"adapter {name!r} changes {path}, no linear layer: {_MERGE}")
