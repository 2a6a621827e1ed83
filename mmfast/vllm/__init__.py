"""A vLLM plugin: fixed budgets per video, chosen by the vision encoder's own output.

`pip install mmfast` beside vLLM is enough: vLLM calls `register` in each of its processes (entry
point group `vllm.general_plugins`), which replaces Qwen3-VL and Qwen2.5-VL by subclasses. Without a
spec they behave as in vLLM; with one they keep the tokens that a method of mmfast picks::

    MMFAST_VLLM_REDUCE=divprune:0.25 vllm serve Qwen/Qwen3-VL-8B-Instruct --video-pruning-rate 0.75
    vllm serve … --video-pruning-rate 0.75 --hf-overrides '{"mmfast_reduce": "evs:0.25"}'
    vllm serve … --video-pruning-rate 0.75 --mm-processor-kwargs '{"mmfast_reduce": "evs:0.25"}'

`--video-pruning-rate` turns on vLLM's own code for pruned videos, which this plugin uses with
another method and count. A spec without a budget (`divprune`) keeps one minus that rate. Prefer the
first two ways: the third may also pass the spec to the processor of Hugging Face.

vLLM reserves places in the prompt before there is any embedding, so the count must follow from the
size of the video; and it stores results under a hash of the media, so the choice may depend on the
video alone. Allowed are therefore reducers at site `pre` with a fixed budget that use the encoder's
output only. A method that reads the question would mix the results of different questions; a
method inside the LLM is impossible, since vLLM gives all layers one length; a method that reads the
encoder's attention as well, since vLLM's kernels keep none. All three are refused at the start of
the server, in one line. Images stay whole, as with vLLM's own methods. Servers with different specs
must not share a store of results.

Tested with stand-ins for vLLM's classes (tests/support/serve/vllm_stubs.py, after version 0.33):
counts are exact for all sizes and budgets; the tokens are those of `mmfast.reduce`; prompt,
embeddings and positions fit together, DeepStack channels and timestamps included; keeping all
tokens equals the stock model; a video gives the same tokens in any batch and after any other video;
registering twice has no further effect.

Not tested with a real vLLM. Its internal names change between releases; if one is missing, the
server ends at the start with a line that names it.
"""

from __future__ import annotations

from mmfast.vllm.plan import ReducerPlan, choices, parse_plan, read_plan

__all__ = ["ReducerPlan", "choices", "parse_plan", "read_plan", "register"]

# Architecture -> the subclass, imported when a model of that kind is loaded: an earlier import of
# vLLM's models would initialise CUDA in a process that forks later.
MODELS = {
    "Qwen3VLForConditionalGeneration": "mmfast.vllm.qwen3_vl:Qwen3VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration": (
        "mmfast.vllm.qwen2_5_vl:Qwen2_5_VLForConditionalGeneration"
    ),
}


def register() -> None:
    """Replace vLLM's models by the subclasses; further calls have no effect."""
    from vllm import ModelRegistry

    for architecture, place in MODELS.items():
        ModelRegistry.register_model(architecture, place)
