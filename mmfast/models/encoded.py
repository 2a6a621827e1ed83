"""Media encoded once, for several runs with different reductions behind the encoder."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from typing import Any

import torch

from mmfast.models.adapter import adapter_for
from mmfast.models.prompt_ids import prompt_ids
from mmfast.models.records import features_given, recording


@torch.no_grad()
def encoded(model: Any, inputs: Mapping[str, Any], needs: Collection[str] = ()) -> dict[str, Any]:
    """Inputs with the encoder's outputs in place of pixels.

    The outputs remember the layout and the tower's signals, so stages at `pre` and inside the
    language model work on them under `attach` as if the media were encoded there.

    Args:
        model: A stock model of a known family.
        inputs: What its processor returned.
        needs: Signals that later stages will ask for.

    Returns:
        Arguments of `generate` or `forward`.

    Raises:
        ModelError: The family is unknown.
    """
    base = model.base_model
    outputs, names = {}, set[str]()
    with prompt_ids(inputs.get("input_ids")), recording(base, adapter_for(model), needs):
        for kind in features_given(inputs):
            method = getattr(base, f"get_{kind}_features")
            parameters = inspect.signature(method).parameters
            given = {name: inputs[name] for name in parameters if name in inputs}
            outputs[kind] = method(**given, return_dict=True)
            names |= {name for name in given if name.startswith("pixel_values")}
    rest = {name: value for name, value in inputs.items() if name not in names}
    return {**rest, "mm_encoder_outputs": outputs}
