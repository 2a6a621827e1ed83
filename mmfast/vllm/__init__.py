"""A vLLM plugin: fixed budgets per video, chosen by the vision encoder's own output.

Installed beside vLLM, `pip install mmfast` is enough: vLLM calls `register` in each of its
processes (entry point group `vllm.general_plugins`), and Qwen3-VL and Qwen2.5-VL become subclasses
of its own. Without a spec these do what vLLM does; with one they keep the tokens that a method of
mmfast picks::

    MMFAST_VLLM_REDUCE=divprune:0.25 vllm serve Qwen/Qwen3-VL-8B-Instruct --video-pruning-rate 0.75
    vllm serve … --video-pruning-rate 0.75 --hf-overrides '{"mmfast_reduce": "evs:0.25"}'
    vllm serve … --video-pruning-rate 0.75 --mm-processor-kwargs '{"mmfast_reduce": "evs:0.25"}'

`--video-pruning-rate` switches vLLM's own road for pruned videos on, which this plugin takes: what
it adds is the method and the count. A spec without a budget (`divprune`) keeps one minus that rate.
Prefer the first two ways: the third hands the spec to vLLM's Hugging Face processor, too, wherever
vLLM does not ask ours first.

What is allowed, and why: vLLM reserves places in the prompt before there is any embedding, so the
count follows from the size of the video alone; and it stores results under a hash of the media, so
the choice may depend on the video alone. Hence reducers at site `pre` with a fixed budget that look
at nothing but the encoder's output. Methods that look at the question would put one question's
tokens into another one's answer; those inside the LLM find no place, since vLLM gives all layers
one length; those that look at the encoder's attention find none, since vLLM's kernels keep none.
All three are refused when the server starts, in one line. Images stay whole, as with vLLM's own
methods. Servers with different specs must not share a store of results.

Proven, with stand-ins for vLLM's classes (tests/support/vllm_stubs.py, written from what its 0.33
offers and calls; no vLLM runs where this project is built): counts are met exactly for all sizes
and budgets; the tokens are those of `mmfast.reduce`; prompt, embeddings and positions fit together,
DeepStack channels and timestamps included; all tokens kept is the stock model; the same video gives
the same tokens in any batch and after any other video; registering twice is registering once.

Never run: a real vLLM, of any version. Its internal names move between releases, so where one that
is needed is missing, the server ends at start with a line that says which.
"""

from __future__ import annotations

from mmfast.vllm.plan import ReducerPlan, choices, parse_plan, read_plan

__all__ = ["ReducerPlan", "choices", "parse_plan", "read_plan", "register"]

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
