"""The plugin in a real vLLM, whose tokens must be those of `mmfast.attach` on transformers in fp32.

vLLM wants an environment of its own: `.ci/vllm FOLDER` makes one and runs these tests, and
`MMFAST_VLLM_ENV=FOLDER pytest -m "slow or not slow" tests/vllm` runs them again.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from mmfast.vllm import VARIABLE
from mmfast.vllm.plan import choices

ROOT = Path(__file__).resolve().parents[2]
ENGINE = ROOT / "tests" / "support" / "serve" / "vllm_engine.py"
ENVIRONMENT = os.environ.get("MMFAST_VLLM_ENV", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not ENVIRONMENT, reason="MMFAST_VLLM_ENV names no environment with vLLM; see .ci/vllm"
    ),
]
FAMILIES = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
TEXT = "Lorem ipsum dolor sit amet consectetur. "
# transformers puts the text after a clip of Qwen2.5-VL that is longer than wide at other positions
# than vLLM and the published model do, so the clips here are not.
CLIP, OTHER, WIDE = [8, 56, 72, 1], [6, 40, 56, 2], [4, 24, 200, 5]
VIDEOS = [
    ["a {video} b", [], [CLIP]],
    ["{video} and {video}: which?", [], [[4, 40, 56, 1], OTHER]],
]
IMAGES = [
    ["a {image} b {image}?", [[40, 56, 1], [48, 24, 2]], []],
    ["{image}!", [[72, 88, 3]], []],
]
HARD = {
    "long": [[f"{TEXT * 3}{{video}}{TEXT * 2}?", [], [CLIP]]],
    "the same clip": [
        [f"{TEXT * 3}{{video}}{TEXT * 2}{end}", [], [CLIP]] for end in ("other?", "and then?")
    ],
    "no text between": [
        ["{video}{video} b", [], [CLIP, OTHER]],
        ["{video}{video} c", [], [OTHER, CLIP]],
        ["{image}{image}{image}", [[40, 56, 1], [24, 24, 7], [40, 56, 1]], []],
    ],
    "mixed": [
        ["{image}{video}{image}" + TEXT, [[40, 56, 1], [96, 24, 2]], [WIDE]],
        ["x {video} y {image}{image}!", [[40, 56, 1], [40, 56, 1]], [OTHER]],
        [TEXT, [], []],
    ],
    "crowd": [
        [f"{i} {{video}} {TEXT}{i}", [], [[4 + 2 * (i % 2), 40, 56 + 8 * (i % 2), i]]]
        for i in range(8)
    ],
}


def python(*words: str, job: Any = None, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run vLLM's Python; no process of it inherits a spec that was not given."""
    clean = {k: v for k, v in os.environ.items() if k not in (VARIABLE, "PYTHONPATH")}
    return subprocess.run(
        [str(Path(ENVIRONMENT) / "bin" / "python"), *words],
        input=None if job is None else json.dumps(job),
        env=clean | environ,
        capture_output=True,
        text=True,
        timeout=850,
    )


def engine(folder: Path, family: str, specs: list[str | None], **job: Any) -> Any:
    """Run a job of `tests/support/serve/vllm_engine.py`."""
    environ = job.pop("environ", {}) | ({VARIABLE: specs[0]} if specs[0] else {})
    job = {"options": {}, "family": family, "folder": str(folder / family), "specs": specs} | job
    done = python(str(ENGINE), job=job, **environ)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def differences(found: Any) -> list[str]:
    """Specs and cases with other tokens or log-probabilities than `attach`, or that failed."""
    wrong = []
    for spec, cases in found.items():
        for name, row in cases.items():
            mine = [each["tokens"] for each in row["attach"]]
            theirs = [[each["tokens"] for each in turn] for turn in row["vllm"]]
            pairs = [pair for turn in row["vllm"] for pair in zip(turn, row["attach"], strict=True)]
            scores = [zip(a["scores"], b["scores"], strict=True) for a, b in pairs]
            far = max((abs(a - b) for each in scores for a, b in each), default=9.0)
            if far > 1e-4 or any(turn != mine for turn in theirs):
                wrong.append(f"{spec} {name}: {row.get('attach_error', row.get('vllm_error'))}")
    return wrong


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vllm")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_reducer_gives_the_tokens_of_attach(folder: Path, family: str) -> None:
    specs = [f"{name}:0.3" for name in choices()]
    specs += ["divprune:7", "evs:0.5+divprune:0.5", "visionzip:0.6+uniform:0.5", "divprune:1.0"]
    found = engine(folder, family, specs, cases={"video": VIDEOS, "image": IMAGES})
    assert differences(found) == []
    answers = {
        json.dumps([each["tokens"] for case in cases.values() for each in case["vllm"][0]])
        for cases in found.values()
    }
    assert len(answers) > len(specs) / 2  # the choice shows in the tokens
    for cases in found.values():
        for row in cases.values():
            pairs = zip(row["attach"], row["vllm"][0], strict=True)
            assert all(b["length"] <= a["length"] for a, b in pairs)


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 72, "max_num_seqs": 4},  # clips are read in parts
        {"num_gpu_blocks_override": 6, "max_model_len": 640},  # requests lose their memory
        {"enforce_eager": False},
        {"enable_prefix_caching": False, "mm_processor_cache_gb": 0},
    ],
    ids=["chunks", "little memory", "compiled", "no caches"],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_hard_schedules(folder: Path, family: str, options: Any) -> None:
    found = engine(folder, family, ["visionzip:0.5"], cases=HARD, options=options, rounds=3)
    assert differences(found) == []


def test_several_answers_to_a_prompt(folder: Path) -> None:
    cases = {name: HARD[name] for name in ("mixed", "the same clip")}
    found = engine(folder, "qwen3_vl", ["visionzip:0.5"], cases=cases, answers=2)
    assert differences(found) == []
    assert all(len(row["vllm"]) == 2 for row in found["visionzip:0.5"].values())


def test_the_runner_of_gpus(folder: Path) -> None:
    """The second runner of vLLM, whose kernels are interpreted."""
    options = {"max_num_batched_tokens": 256, "max_num_seqs": 4}
    job = {"cases": {"both": [VIDEOS[0], IMAGES[0]]}, "options": options, "rounds": 2}
    found = engine(folder, "qwen2_5_vl", ["divprune:0.4"], **job, interpreted=True)
    assert differences(found) == []


def test_processes_of_their_own(folder: Path) -> None:
    environ = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    found = engine(folder, "qwen3_vl", ["tome:0.4"], cases=HARD, rounds=2, environ=environ)
    assert differences(found) == []


def test_a_clip_that_fits_only_when_cut(folder: Path) -> None:
    """More tokens than `max_model_len`, and positions beyond it."""
    cases = {"clip": [["a {video} b", [], [[16, 104, 104, 3]]]]}
    found = engine(folder, "qwen3_vl", ["divprune:0.3"], cases=cases)
    assert differences(found) == []
    row = found["divprune:0.3"]["clip"]
    assert row["attach"][0]["length"] > 1024 > row["vllm"][0][0]["length"]
    stock = engine(folder, "qwen3_vl", [None], cases=cases)["None"]["clip"]
    assert "longer than the maximum model length" in stock["vllm_error"]


@pytest.mark.parametrize("family", FAMILIES)
def test_without_a_spec_it_is_vllm_and_positions_matter(folder: Path, family: str) -> None:
    """Stock tokens with mmfast installed; and a plugin that forgot the distances is found out."""
    cases = {"video": VIDEOS, "image": IMAGES}
    stock = engine(folder, family, [None], cases=cases)
    assert differences(stock) == []
    wrong = engine(folder, family, ["uniform:0.5"], cases=cases, fault=True)
    assert len(differences(wrong)) == 2


@pytest.mark.parametrize(
    ("spec", "options", "text"),
    [
        ("cdpruner:0.25", {}, "mmfast: 'cdpruner' looks at the question"),
        ("evs", {}, "mmfast: 'evs' decides its budget itself"),
        ("evs:0.5", {"video_pruning_rate": 0.5}, "does not work with --video-pruning-rate"),
    ],
)
def test_the_start_is_refused_in_one_line(folder: Path, spec: str, options: Any, text: str) -> None:
    job = {"family": "qwen2_5_vl", "folder": str(folder / "qwen2_5_vl"), "specs": [None]}
    done = python(str(ENGINE), job={**job, "cases": {}, "options": options}, **{VARIABLE: spec})
    assert done.returncode != 0
    assert [line for line in done.stderr.splitlines() if text in line]


def test_a_model_that_stays_stock_is_named(tmp_path: Path) -> None:
    config = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    code = (
        "import sys; from vllm.engine.arg_utils import EngineArgs;"
        "EngineArgs(sys.argv[1], dtype='float32', skip_tokenizer_init=True).create_model_config()"
    )
    environ = {VARIABLE: "evs:0.5", "HF_HUB_OFFLINE": "1"}
    done = python("-c", code, str(tmp_path), **environ)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (done.stdout + done.stderr).count("mmfast prunes nothing in Qwen2ForCausalLM") == 1


@pytest.mark.parametrize("family", FAMILIES[:2])
def test_the_server_answers_with_the_tokens_of_attach(folder: Path, family: str) -> None:
    """`mmfast serve --engine vllm` over HTTP, with a picture and a clip, streamed and not."""
    job = {"family": family, "folder": str(folder / family), "spec": "divprune:0.25"}
    done = python(str(ENGINE), job={**job, "serve": True})
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    for kind in ("image", "video"):
        row = found[kind]
        assert row["tokens"] == row["streamed"] == row["attach"], kind
        left = row["whole"] - row["places"] + round(row["places"] * 0.25)
        assert row["places"] > 30 and row["prompt_tokens"] == [left, left], kind
    assert found["without_key"] == 401 and found["remote"] >= 400
