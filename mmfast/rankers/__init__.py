"""Learned rankings of tokens, one method a file; importing registers them.

Their weights lie beside a checkpoint, by name and, inside the language model, by layer.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mmfast.compressors.base import config_of, placed
from mmfast.core.errors import ModelError
from mmfast.core.registry import get
from mmfast.core.tokens import Tokens

FOLDER = "rankers"  # beside the weights of a checkpoint


def training(name: str, layer: int | None = None, home: str | Path = "") -> str:
    """The command that trains a ranking, of the checkpoint `home` where it is known."""
    layers = "" if layer is None else f" --layers {layer}"
    model = f" --model {shlex.quote(str(home))}" if home else ""
    return f"python -m mmfast.rankers.train{layers} --ranker {name}{model}"


def _example(name: str) -> str:
    return get(name, "ranker").example


def file_of(folder: str | Path, name: str, layer: int | None = None) -> Path:
    """The file of a ranking beside a checkpoint."""
    stem = name if layer is None else f"{name}-{layer}"
    return Path(folder) / FOLDER / f"{stem}.safetensors"


def find(home: str | Path, name: str, layer: int | None = None, path: str = "") -> Path:
    """The file of a ranking: `path`, or the one beside the checkpoint `home`.

    ModelError with the command that trains it where there is none, or it is another layer's.
    """
    file = Path(path) if path else file_of(home, name, layer)
    spec = name if layer is None else f"{name}@llm{layer}"
    if not file.is_file():
        known = sorted(each.stem.split("-")[-1] for each in file.parent.glob(f"{name}-*"))
        have = f" (there are heads of layers {', '.join(known)})" if known else ""
        missing = f"no file {path!r}" if path else f"{str(home)!r} has no {FOLDER}/{file.name}"
        raise ModelError(
            f"'{spec}' is learned, and {missing}{have}; train it with "
            f"`{training(name, layer, home)}`, or name a file: "
            f"{_example(name).replace(name, spec)}?path=FILE"
        )
    mine = config_of(file, "ranking", name).get("layer")
    if mine != layer:
        raise ModelError(
            f"{str(file)!r} holds the head of layer {mine}, not of {layer}; write "
            f"{name}@llm{mine}, or train one ({training(name, layer)})"
        )
    return file


def fitted(name: str, path: str, tokens: Tokens, load: Callable[[str], Any]) -> Any:
    """Return what `load` makes of a file, beside tokens `x` `[..., N, D]`.

    ModelError where there is no file, or its weights are for another width.
    """
    if not Path(path).is_file():
        raise ModelError(
            f"{name!r} is learned and {path!r} is no file; attach it to a model that has weights, "
            f"or name a file: {_example(name)}?path=FILE"
        )
    module = placed(path, tokens.x.device, torch.float32, load)
    width = module.config["width"]
    if width != tokens.x.shape[-1]:
        raise ModelError(
            f"{path!r} is for tokens of width {width}, and these have {tokens.x.shape[-1]}; train "
            f"it on this model ({training(name, module.config.get('layer'))})"
        )
    return module
