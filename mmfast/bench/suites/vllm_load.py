"""Clips per second of vLLM with and without pruning, and with its own; the cost of each reducer.

Runs in an environment with vLLM (.ci/vllm makes one). Every engine is a process of its own that
waits while another one works; all answer the same clips in turn, which no cache has seen before.
The one with the plugin takes every spec, as it has no store of results.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from mmfast.bench.registry import Tick, benchmark
from mmfast.bench.results import Row
from mmfast.core.errors import MmfastError
from mmfast.vllm import VARIABLE
from mmfast.vllm.plan import choices

STOCK, OURS, THEIRS = "stock", "mmfast", "vLLM's EVS"
OPTIONS: dict[str, dict[str, Any]] = {STOCK: {}, OURS: {}, THEIRS: {"video_pruning_rate": 0.75}}
JOBS = (STOCK, "stock again", "divprune:0.25", "evs:0.25", THEIRS)  # others are specs of `OURS`
LOADS, ROUNDS, TOKENS = {1: 2, 2: 4, 4: 8, 16: 16}, 3, 16  # requests by how many at once
MODERATE = 0.5  # share kept in the comparison of reducers
HARDEST = ("info_rank:0.9", "prumerge_plus:0.9", "divprune:0.9", "uniform:1.0")  # little to gain
CLIP = (16, 224, 224, 3)  # 512 tokens
WIDTH = 512
# Of an engine in one process on the CPU that says nothing.
ENVIRON = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
_SPECIALS = ("image_pad", "video_pad", "vision_start", "vision_end")
Turns = list[tuple[Row, Row]]  # stock and the job, one after the other


@benchmark("serve", "vllm")
def vllm_load(tick: Tick) -> list[Row]:
    """Measure vLLM on a random Qwen2.5-VL, stock and pruned, interleaved."""
    found: dict[tuple[str, int], Turns] = {}
    with _engines(OPTIONS) as engines:
        _warm(engines)
        runs = [(turn, load) for turn in range(ROUNDS) for load in LOADS]
        for number, (turn, load) in enumerate(runs):
            tick(f"{load} at once", number, len(runs))
            rows = {job: _ask(engines, job, load, turn) for job in JOBS}
            for job, row in rows.items():
                found.setdefault((job, load), []).append((rows[STOCK], row))
    return [_row(job, load, turns) for (job, load), turns in found.items()]


@benchmark("serve", "vllm-reducers")
def vllm_reducers(tick: Tick) -> list[Row]:
    """Measure every reducer at a moderate share, a clip at a time, each beside stock."""
    jobs = ["stock again", *(f"{name}:{MODERATE}" for name in choices()), *HARDEST]
    found: dict[str, Turns] = {}
    with _engines((STOCK, OURS)) as engines:
        _warm(engines)
        runs = [(turn, job) for turn in range(ROUNDS) for job in jobs]
        for number, (turn, job) in enumerate(runs):
            tick(job, number, len(runs))
            pair = _ask(engines, STOCK, 1, turn), _ask(engines, job, 1, turn)
            found.setdefault(job, []).append(pair)
    return [_row(job, 1, turns) for job, turns in found.items()]


def _warm(engines: dict[str, subprocess.Popen[str]]) -> None:
    for name in engines:
        _ask(engines, "divprune:0.5" if name == OURS else name, 1, -1)


@contextmanager
def _engines(names: Any) -> Iterator[dict[str, subprocess.Popen[str]]]:
    try:
        import vllm  # noqa: F401
    except ModuleNotFoundError as error:
        raise MmfastError(
            "this benchmark needs vLLM in this environment; .ci/vllm FOLDER makes one"
        ) from error
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        save(Path(folder))
        yield {name: stack.enter_context(_process(folder, name)) for name in names}


def _row(job: str, load: int, turns: Turns) -> Row:
    import vllm

    times = ("seconds", "cpu_seconds", "ttft_ms")
    middle = {key: statistics.median(mine[key] for _, mine in turns) for key in times}
    gains = {
        name: statistics.median(stock[key] / mine[key] for stock, mine in turns)
        for name, key in (("speedup", "seconds"), ("cpu_speedup", "cpu_seconds"))
    }
    return {
        "job": job,
        "sessions": load,
        "engine": f"vllm {vllm.__version__}",
        "device": "cpu",
        "n": len(turns),
        "prompt_tokens": turns[0][1]["prompt_tokens"],
        "requests_per_s": LOADS[load] / middle["seconds"],
        **gains,
        **middle,
        "machine_load": max(mine["machine_load"] for _, mine in turns),
    }


TOWER: Row = {"depth": 4, "hidden_size": 256, "intermediate_size": 512, "num_heads": 4}
TOWER |= {"fullatt_block_indexes": [3]}
TEXT: Row = {"hidden_size": WIDTH, "intermediate_size": 4 * WIDTH, "num_hidden_layers": 8}
TEXT |= {"num_attention_heads": WIDTH // 64, "num_key_value_heads": 2}


def save(folder: Path, tower: Row = TOWER, text: Row = TEXT, tied: bool = False) -> Any:
    """Save and return the configuration of a Qwen2.5-VL without weights; its processor, too.

    The tokenizer reads bytes; a `vocab_size` beyond those gets words that no text is made of.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import (
        PreTrainedTokenizerFast,
        Qwen2_5_VLConfig,
        Qwen2_5_VLProcessor,
        Qwen2VLImageProcessor,
        Qwen2VLVideoProcessor,
    )

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    others = text.get("vocab_size", 0) - len(alphabet) - len(_SPECIALS) - 1
    words = [*alphabet, *(f"w{number}" for number in range(others))]
    raw = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    marks = {f"{name.removesuffix('_pad')}_token": f"<|{name}|>" for name in _SPECIALS}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<|pad|>", extra_special_tokens=marks
    )
    ids = {f"{name}_id": tokenizer.convert_tokens_to_ids(mark) for name, mark in marks.items()}
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 12, 12]}
    none = {"bos_token_id": None, "eos_token_id": None}
    config = Qwen2_5_VLConfig(
        vision_config={**tower, "out_hidden_size": text["hidden_size"]},
        text_config={**text, **none, "vocab_size": len(tokenizer), "rope_parameters": rope},
        architectures=["Qwen2_5_VLForConditionalGeneration"],
        tie_word_embeddings=tied,
        **ids,
    )
    config.save_pretrained(folder)
    size = {"shortest_edge": 28 * 28, "longest_edge": 10**8}
    Qwen2_5_VLProcessor(
        tokenizer=tokenizer,
        image_processor=Qwen2VLImageProcessor(size=size),
        video_processor=Qwen2VLVideoProcessor(size=size),
    ).save_pretrained(folder)
    return config


def _process(folder: str, name: str) -> subprocess.Popen[str]:
    environ = {key: value for key, value in os.environ.items() if key != VARIABLE} | {
        **ENVIRON,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    if name == OURS:
        environ[VARIABLE] = "uniform:1.0"  # until a question names another
    words = [sys.executable, "-m", __spec__.name, folder, name]
    pipe = subprocess.PIPE
    return subprocess.Popen(words, env=environ, stdin=pipe, stdout=pipe, text=True)


def _ask(engines: dict[str, subprocess.Popen[str]], job: str, load: int, turn: int) -> Row:
    """Let an engine answer the clips of a turn."""
    name = STOCK if job.startswith(STOCK) else job if job in engines else OURS
    engine, spec = engines[name], job if name == OURS else None
    wish = {"load": load, "seed": 1000 * (turn + 1) + 100 * load, "spec": spec}
    assert engine.stdin is not None and engine.stdout is not None
    try:
        os.write(engine.stdin.fileno(), json.dumps(wish).encode() + b"\n")
        line = engine.stdout.readline()
    except BrokenPipeError:
        line = ""
    if not line:
        raise MmfastError("an engine of the benchmark ended; its last words are above")
    row: Row = json.loads(line)
    return row


def _answer(engine: Any, load: int, seed: int, spec: str | None) -> Row:
    """Answer the clips of this load, as many at once."""
    import numpy as np
    from vllm import SamplingParams

    if spec:
        os.environ[VARIABLE] = spec
    count = LOADS[load]
    facts = {"fps": 2.0, "duration": 8.0, "total_num_frames": 16, "video_backend": "opencv"}
    facts |= {"frames_indices": [*range(CLIP[0])], "do_sample_frames": False}
    rng = np.random.default_rng(seed)
    clips = [rng.integers(0, 256, CLIP, dtype=np.uint8) for _ in range(count)]
    text = "<|vision_start|><|video_pad|><|vision_end|>What happens?"
    wish = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    begun, first, size, done = dict[str, float](), dict[str, float](), 0, 0
    start, used = time.perf_counter(), time.process_time()
    while done < count:
        while len(begun) < min(count, done + load):
            name = f"{start}-{len(begun)}"  # which stands for the clip in the store of encodings
            begun[name] = time.perf_counter()
            media = {"video": [(clips[len(begun) - 1], facts)]}
            engine.add_request(name, {"prompt": text, "multi_modal_data": media}, wish)
        for out in engine.step():
            name = out.request_id.rsplit("#")[0]
            first.setdefault(name, time.perf_counter())
            size, done = len(out.prompt_token_ids), done + out.finished
    waits = [first[name] - begun[name] for name in begun if name in first]
    return {
        "seconds": time.perf_counter() - start,
        "cpu_seconds": time.process_time() - used,
        "ttft_ms": 1e3 * statistics.median(waits),
        "prompt_tokens": size,
        "machine_load": os.getloadavg()[0],
    }


def main(folder: str, name: str) -> None:
    """Be one of the engines: a request to measure a line, a row a line."""
    output, sys.stdout = sys.stdout, sys.stderr
    from vllm import LLM

    options = {"dtype": "float32", "max_model_len": 1024, "enforce_eager": True, "seed": 0}
    options |= {"load_format": "dummy", "enable_prefix_caching": False, "mm_processor_cache_gb": 0}
    engine = LLM(folder, **options, **OPTIONS[name]).llm_engine
    # The runner for GPUs takes both from the model, that for CPUs does not.
    runner = engine.model_executor.driver_worker.worker.model_runner
    runner.is_multimodal_pruning_enabled = name == THEIRS
    runner.requires_sequential_video_encoding = name == OURS
    for line in sys.stdin:
        print(json.dumps(_answer(engine, **json.loads(line))), file=output, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
