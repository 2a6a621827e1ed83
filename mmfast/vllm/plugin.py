"""What vLLM calls in each of its processes."""

from __future__ import annotations

# Architecture -> the subclass, imported when a model of that kind is asked for: importing vLLM's
# models earlier would initialise CUDA in a process that forks later.
MODELS = {
    "Qwen3VLForConditionalGeneration": "mmfast.vllm.qwen3_vl:Qwen3VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration": (
        "mmfast.vllm.qwen2_5_vl:Qwen2_5_VLForConditionalGeneration"
    ),
}


def register() -> None:
    """Put the subclasses in the place of vLLM's models; any number of times, with one effect."""
    from vllm import ModelRegistry

    for architecture, place in MODELS.items():
        ModelRegistry.register_model(architecture, place)
