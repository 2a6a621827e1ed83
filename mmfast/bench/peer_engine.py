"""One engine of `mmfast peers`, in an environment that need not have mmfast.

The argument is a JSON object: the folder of the checkpoint and what to run. When the engine is
ready it says so in a line of JSON; then each line of the input, the seed of a clip and
how to prune it, gets one with the times of its tokens.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import platform
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np

PATCH, FPS = 28, 2.0  # pixels along a visual token; frames a second
QUESTION = "What happens in this clip, and in which order?"
MEDIA = "<|vision_start|><|{}_pad|><|vision_end|>"
Given = Mapping[str, Any]


class TokenTimes:
    """Tokens of an answer and the time at which each came."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.times: list[float] = []

    def add(self, *tokens: int) -> None:
        """Note tokens that have come just now."""
        self.tokens += tokens
        self.times += [time.perf_counter()] * len(tokens)


# Answers a clip `[T, H, W, 3]`, pruned where a method is named, and returns the number of tokens
# that the decoder read.
Answerer = Callable[[np.ndarray[Any, Any], TokenTimes, str | None], int]


def clip(seed: int, frames: int, rows: int, columns: int) -> np.ndarray[Any, Any]:
    """Return uint8 `[T, H, W, 3]`: a still scene of coloured tiles, a moving one, camera noise."""
    drawn = np.random.default_rng(seed)
    tiles = np.repeat(drawn.integers(20, 236, (1, rows, columns, 3)), frames, 0)
    for number, tile in enumerate(drawn.integers(20, 236, (frames, 3))):
        tiles[number, rows // 2, number % columns] = tile
    pixels = tiles.repeat(PATCH, 1).repeat(PATCH, 2)
    return (pixels + drawn.integers(-20, 20, pixels.shape)).astype(np.uint8)


def transformers_engine(given: Given) -> Answerer:
    """Load the stock model and processor."""
    import torch
    from transformers import AutoProcessor, Qwen2_5_VLForConditionalGeneration

    torch.set_num_threads(given["threads"])
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(
        given["folder"], dtype=getattr(torch, given["dtype"])
    )
    processor = AutoProcessor.from_pretrained(given["folder"])
    return _generated(model.eval(), processor, given, lambda prune: nullcontext())


def mmfast_engine(given: Given) -> Answerer:
    """Load through a pipeline of mmfast; a spec is attached at every clip."""
    import torch

    import mmfast

    torch.set_num_threads(given["threads"])
    pipe = mmfast.pipeline(
        "video-qa", given["folder"], dtype=given["dtype"], weights=given["weights"], device="cpu"
    )

    encoder = given["encoder"]

    def reduced(prune: str | None) -> Any:
        if prune is None and encoder is None:
            return nullcontext()
        return mmfast.attach(pipe.model, prune, encoder=encoder)

    return _generated(pipe.model, pipe.processor, given, reduced)


def _generated(
    model: Any, processor: Any, given: Given, reduced: Callable[[str | None], Any]
) -> Answerer:
    import torch

    text = MEDIA.format("video") + QUESTION
    count = {"max_new_tokens": given["tokens"], "min_new_tokens": given["tokens"]}

    class PromptedStreamer:
        def __init__(self, seen: TokenTimes) -> None:
            self.seen, self.begun = seen, False

        def put(self, value: Any) -> None:
            if self.begun:  # the first call is the prompt's
                self.seen.add(*value.flatten().tolist())
            self.begun = True

        def end(self) -> None: ...

    def answer(frames: np.ndarray[Any, Any], seen: TokenTimes, prune: str | None) -> int:
        video = torch.from_numpy(frames).permute(0, 3, 1, 2)  # [T, 3, H, W]
        inputs = processor(
            text=[text], videos=[video], do_sample_frames=False, fps=FPS, return_tensors="pt"
        )
        with torch.no_grad(), reduced(prune) as trace:
            model.generate(**inputs, **count, do_sample=False, streamer=PromptedStreamer(seen))
        cut = sum(row.tokens_in - row.tokens_out for row in trace.rows) if trace else 0
        return int(inputs["input_ids"].shape[1]) - cut

    return answer


def vllm_engine(given: Given) -> Answerer:
    """Start vLLM on the CPU, in this process, without a store of prompts or encodings."""
    from vllm import LLM, SamplingParams

    rate = given["prune"] and {"video_pruning_rate": 1.0 - given["kept"]}
    most = given["visual"] + given["tokens"] + 256
    llm = LLM(
        given["folder"],
        **rate or {},
        dtype=given["dtype"],
        max_model_len=most,
        max_num_batched_tokens=most,
        max_num_seqs=1,
        enforce_eager=given["engine"] == "vllm",
        enable_prefix_caching=False,
        mm_processor_cache_gb=0,
        limit_mm_per_prompt={"video": 1, "image": 0},
        skip_mm_profiling=True,
        seed=0,
    )
    engine = llm.llm_engine
    # The runner for GPUs takes it from the model, that for CPUs does not.
    runner = engine.model_executor.driver_worker.worker.model_runner
    runner.is_multimodal_pruning_enabled = bool(rate)
    wish = SamplingParams(
        temperature=0, max_tokens=given["tokens"], ignore_eos=True, detokenize=False
    )

    def answer(frames: np.ndarray[Any, Any], seen: TokenTimes, prune: str | None) -> int:
        count = len(frames)
        facts: dict[str, Any] = {"fps": FPS, "duration": count / FPS, "total_num_frames": count}
        facts |= {"frames_indices": [*range(count)], "video_backend": "opencv"}
        media = {"video": [(frames, facts | {"do_sample_frames": False})]}
        text = MEDIA.format("video") + QUESTION
        engine.add_request(
            str(time.perf_counter()), {"prompt": text, "multi_modal_data": media}, wish
        )
        size = 0
        while engine.has_unfinished_requests():
            for out in engine.step():
                seen.add(*out.outputs[0].token_ids[len(seen.tokens) :])
                size = len(out.prompt_token_ids)
        return size

    return answer


def openvino_engine(given: Given) -> Answerer:
    """Convert the checkpoint once, beside it, and open it without a cache of prompts.

    CDPruner of OpenVINO takes images alone: every second frame goes in as one, which makes as many
    visual tokens as the clip.
    """
    import openvino as ov
    import openvino_genai as genai

    form = given["weights"]
    home = Path(given["folder"], "-".join(filter(None, ("openvino", form))))
    if not (home / "openvino_detokenizer.xml").is_file():
        order = {"convert": given["folder"], "home": str(home), "weights": form}
        words = [sys.executable, __file__, json.dumps(order)]
        subprocess.run(words, check=True)  # whose memory is not the engine's
    memory = genai.SchedulerConfig()
    memory.enable_prefix_caching, memory.cache_size = False, 1
    memory.max_num_batched_tokens = given["visual"] + 256
    precision = {"bfloat16": "bf16", "float32": "f32"}[given["dtype"]]
    how = {"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": given["threads"]}
    pipe = genai.VLMPipeline(str(home), "CPU", scheduler_config=memory, **how)
    config = genai.GenerationConfig()
    config.max_new_tokens, config.ignore_eos = given["tokens"], True
    config.apply_chat_template = False
    config.set_eos_token_id(0)  # the tokenizer has none, and none would be -1

    class GenaiStreamer(genai.StreamerBase):  # type: ignore[misc]
        def __init__(self, seen: TokenTimes) -> None:
            super().__init__()
            self.seen = seen

        def write(self, token: Any) -> Any:
            self.seen.add(*(token if isinstance(token, list) else [token]))
            return genai.StreamingStatus.RUNNING

        def end(self) -> None: ...

    def answer(frames: np.ndarray[Any, Any], seen: TokenTimes, prune: str | None) -> int:
        config.pruning_ratio = round(100 * (1 - given["kept"])) if prune else 0
        if prune:
            media = {"images": [ov.Tensor(frame[None]) for frame in frames[::2].copy()]}
        else:
            media = {"videos": [ov.Tensor(frames)]}
        found = pipe.generate(
            QUESTION, **media, generation_config=config, streamer=GenaiStreamer(seen)
        )
        return int(found.perf_metrics.get_num_input_tokens())

    return answer


def _convert(folder: str, home: str, weights: str | None) -> None:
    """Export for OpenVINO, its weights rounded by NNCF where a form is named."""
    from optimum.exporters.openvino import main_export
    from optimum.intel import OVConfig, OVWeightQuantizationConfig

    how: dict[str, Any] = {"task": "image-text-to-text", "library_name": "transformers"}
    if weights is not None:
        bits = OVWeightQuantizationConfig(bits=int(weights.removeprefix("int")))
        how["ov_config"] = OVConfig(quantization_config=bits)
    main_export(folder, home, convert_tokenizer=True, **how)


SYSTEM = platform.system()
# The module that knows the release, and what loads the engine.
ENGINES: dict[str, tuple[str, Callable[[Given], Answerer]]] = {
    "transformers": ("transformers", transformers_engine),
    "vllm": ("vllm", vllm_engine),
    "vllm-compiled": ("vllm", vllm_engine),
    "openvino": ("openvino_genai", openvino_engine),
    "mmfast": ("mmfast", mmfast_engine),
}


def measure(
    answer: Answerer, frames: np.ndarray[Any, Any], prune: str | None = None
) -> dict[str, Any]:
    """Ask about a clip; milliseconds to the first token and from token to token, peak memory."""
    seen = TokenTimes()
    _reset_peak()
    start = time.perf_counter()
    size = answer(frames, seen, prune)
    first, last = seen.times[0], seen.times[-1]
    return {
        "ttft_ms": 1e3 * (first - start),
        "step_ms": 1e3 * (last - first) / max(1, len(seen.times) - 1),
        "peak_mb": _peak_mb(),
        "prompt_tokens": size,
        "tokens": seen.tokens,
    }


def _reset_peak() -> None:
    if SYSTEM == "Linux":
        with suppress(AttributeError):  # freed memory that the allocator holds; not in musl
            ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _peak_mb() -> float:
    if SYSTEM == "Linux":
        status = Path("/proc/self/status").read_text(encoding="ascii")
        found = re.search(r"VmHWM:\s+(\d+)", status)
        return int(found[1]) * 1024 / 1e6 if found else 0.0
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size * (1 if SYSTEM == "Darwin" else 1024) / 1e6


def main() -> None:
    """Be an engine until the input ends."""
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8")  # libraries print where they like
    os.dup2(2, 1)
    given = json.loads(sys.argv[1])
    if "convert" in given:
        return _convert(given["convert"], given["home"], given["weights"])
    module, load = ENGINES[given["engine"]]
    answer = load(given)

    def tell(**what: Any) -> None:
        print(json.dumps(what), file=lines, flush=True)

    tell(release=importlib.import_module(module).__version__.partition("-")[0])
    for line in sys.stdin:
        asked = json.loads(line)
        frames = clip(asked["seed"], given["frames"], *given["grid"])
        tell(**measure(answer, frames, asked["prune"]))


if __name__ == "__main__":
    main()
