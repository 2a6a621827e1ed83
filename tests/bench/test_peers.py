"""Engines side by side: the line protocol, engines that are missing or end, rows and tables."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_runs import fails, run

from mmfast.bench import peers
from mmfast.bench.peer_engine import FPS, MEDIA, QUESTION, clip
from mmfast.bench.peers import SHAPES, PeerError, PeerProcess, run_peers, write_checkpoint
from mmfast.bench.report.docs import write_table
from mmfast.bench.results import load
from mmfast.core.errors import MmfastError

TOKENS, FRAMES, VISUAL = 5, 2, 24
DYING = """#!{python}
import json, sys
if sys.argv[1] == "-c":
    raise SystemExit(0)
print(json.dumps({{"release": "9.1"}}), flush=True)
for number, line in enumerate(sys.stdin):
    if number == 2:
        raise MemoryError("no room for the second round")
    row = {{"ttft_ms": 8.0, "step_ms": 2.0, "peak_mb": 1.0, "prompt_tokens": 72, "tokens": [1, 2]}}
    print(json.dumps(row), flush=True)
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("peers")
    write_checkpoint(folder, SHAPES["tiny"])
    return folder


@pytest.fixture
def ended() -> Iterator[list[PeerProcess]]:
    """Engines that the end of the test closes."""
    found: list[PeerProcess] = []
    yield found
    for engine in found:
        engine.close()


def given(folder: Path, **what: Any) -> dict[str, Any]:
    shared = {"folder": str(folder), "frames": FRAMES, "grid": SHAPES["tiny"].grid, "threads": 1}
    shared |= {"tokens": TOKENS, "visual": VISUAL, "dtype": "float32", "prune": None}
    return {**shared, "weights": None, "encoder": None, "kept": 0.25, **what}


def greedy(folder: Path, seed: int) -> list[int]:
    """The answer by one whole pass a token, without a cache, a streamer or a child."""
    from transformers import AutoProcessor, Qwen2_5_VLForConditionalGeneration

    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    processor = AutoProcessor.from_pretrained(folder)
    video = torch.from_numpy(clip(seed, FRAMES, *SHAPES["tiny"].grid)).permute(0, 3, 1, 2)
    inputs = processor(
        text=[MEDIA.format("video") + QUESTION],
        videos=[video],
        do_sample_frames=False,
        fps=FPS,
        return_tensors="pt",
    )
    found: list[int] = []
    for _ in range(TOKENS):
        with torch.no_grad():
            logits = model(**inputs, use_cache=False).logits[0, -1]
        found.append(int(logits.argmax()))
        inputs["input_ids"] = torch.cat([inputs["input_ids"], torch.tensor([found[-1:]])], 1)
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        kinds = inputs["mm_token_type_ids"]
        inputs["mm_token_type_ids"] = torch.cat([kinds, torch.zeros_like(kinds[:, :1])], 1)
    return found


@pytest.mark.slow  # starts processes that import torch
def test_engines_answer_a_clip_with_the_same_tokens(
    checkpoint: Path, tmp_path: Path, ended: list[PeerProcess]
) -> None:
    answers = {}
    for engine, prune in (("transformers", None), ("mmfast", None), ("mmfast", "evs:0.25")):
        wish = given(checkpoint, engine=engine)
        ended.append(PeerProcess(Path(sys.executable), wish, tmp_path / "log"))
        answers[engine, prune] = [ended[-1].ask(seed, prune) for seed in (3, 4)]
    stock, ours, pruned = answers.values()
    assert [row["tokens"] for row in stock] == [row["tokens"] for row in ours]
    assert [row["tokens"] for row in stock] == [greedy(checkpoint, seed) for seed in (3, 4)]
    assert stock[0]["tokens"] != stock[1]["tokens"]  # or equal answers would prove nothing
    assert [row["prompt_tokens"] for row in ours] == [row["prompt_tokens"] for row in stock]
    assert pruned[0]["prompt_tokens"] == stock[0]["prompt_tokens"] - VISUAL * 3 // 4
    assert all(row[key] > 0 for row in stock for key in ("ttft_ms", "step_ms", "peak_mb"))


@pytest.mark.slow  # starts processes that import torch
def test_an_engine_that_cannot_start_says_why(checkpoint: Path, tmp_path: Path) -> None:
    wish = given(checkpoint / "nowhere", engine="mmfast")
    with pytest.raises(PeerError, match=r"^mmfast.*ModelError: .*CHECKPOINT.* does not exist"):
        PeerProcess(Path(sys.executable), wish, tmp_path / "log")


@pytest.mark.slow  # starts processes that import torch
def test_engines_that_miss_or_end_leave_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "vllm" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(DYING.format(python=sys.executable))
    python.chmod(0o755)
    engines = ("transformers", "vllm", "openvino")
    jobs = [job for job in peers.peer_jobs(engines=engines) if not job.prune]
    monkeypatch.setattr(peers, "peer_jobs", lambda *_: jobs)
    rows = run_peers(frames=FRAMES, threads=1, rounds=2, envs=tmp_path, tokens=TOKENS)
    full, half, dead, missing = rows
    assert [row["state"] for row in rows] == ["ok", "ok", "died", "not run"]
    assert dead["reason"] == "MemoryError: no room for the second round"
    told = f"no environment 'openvino' with openvino_genai in {str(tmp_path)!r}"
    assert told in missing["reason"] and "--install" in missing["reason"]
    assert not {"median_ms", "speedup"} & (dead.keys() | missing.keys())
    assert full["n"] == half["n"] == 2 and full["speedup"] == full["agree"] == 1.0
    for row in (full, half):
        assert row["visual"] == VISUAL and row["tokens_per_s"] == pytest.approx(
            1e3 / row["step_ms"]
        )
        assert row["noise"] >= 0 and row["step_noise"] >= 0 and row["versions"]["peer"]
    told = "\n".join(write_table("peers", rows))
    assert "| vllm bfloat16 9.1 | 72 | died: MemoryError: no room for the second round |" in told
    assert f"{FRAMES} frames, {VISUAL} visual tokens, {TOKENS} answer tokens" in told


class _Counting:
    """Stands in for a process: how many of them there are at a time."""

    alive, most = 0, 0
    release = "1"

    def __init__(self, python: Path, given: dict[str, Any], log: Path) -> None:
        if given["dtype"] == "float32":
            raise PeerError("no such arithmetic")
        _Counting.alive += 1
        _Counting.most = max(_Counting.most, _Counting.alive)

    def ask(self, seed: int, prune: str | None = None) -> dict[str, Any]:
        row = {"ttft_ms": 4.0 if prune else 8.0, "step_ms": 2.0, "peak_mb": 1.0}
        return {**row, "prompt_tokens": 72, "tokens": [seed]}

    def close(self) -> None:
        _Counting.alive -= 1


def test_few_engines_at_once_are_compared_with_the_same_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peers, "PeerProcess", _Counting)
    monkeypatch.setattr(peers, "write_checkpoint", lambda *_: None)
    rows = run_peers(frames=2, rounds=1, engines=["transformers", "mmfast"], at_once=2)
    names = [job.name for job in peers.peer_jobs(engines=["transformers", "mmfast"])]
    assert [row["job"] for row in rows] == names and len(names) > 6
    assert rows[0]["state"] == rows[2]["state"] == "not run"  # the float32 ones
    assert rows[1]["speedup"] == 1.0  # transformers bfloat16, the first that runs
    assert all(row["speedup"] == (2.0 if row["reduce"] else 1.0) for row in rows[3:])
    assert _Counting.most == 3 and _Counting.alive == 0


def test_clips_differ_by_seed_and_are_made_again_alike() -> None:
    first, again, other = (clip(seed, 4, 2, 3) for seed in (1, 1, 2))
    assert first.shape == (4, 56, 84, 3) and (first == again).all() and (first != other).any()
    assert (first[0] != first[1]).any()


def test_what_is_alike_ends_at_the_first_difference() -> None:
    assert peers._alike([1, 2, 3, 4], [1, 2, 9, 4]) == 0.5
    assert peers._alike([1, 2], [1, 2]) == 1.0 and peers._alike([1, 2], [3, 2]) == 0.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"preset": "tinny"}, "unknown shape of mmfast peers 'tinny'"),
        ({"frames": 3}, "--frames 3: the model takes pairs"),
        ({"rounds": 0}, "--rounds 0 measures nothing"),
        ({"at_once": 0}, "--at-once 0: one engine runs beside the first"),
        ({"engines": ["vlm"]}, "unknown engine 'vlm'"),
        ({"reduces": ["evz:0.5"]}, "evz"),
    ],
)
def test_wrong_options_are_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(MmfastError, match=message) as error:
        run_peers(**options)
    assert "\n" not in str(error.value)


def test_the_command_reports_what_is_not_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.jsonl"
    words = ["peers", "--engines", "openvino"]
    code, told, error = run(capsys, *words, "--json", "--out", str(out))
    rows = json.loads(told)
    assert code == 1 and rows == load(out)
    reason = "openvino bfloat16 not run: --envs names no folder of environments"
    assert error == f"mmfast: error: no engine ran; {reason}\n"
    pruned = ["openvino bfloat16 CDPruner", "openvino bfloat16 weights int8 CDPruner"]
    assert [row["job"] for row in rows] == ["openvino bfloat16", *pruned]
    assert {row["reason"] for row in rows} == {"--envs names no folder of environments"}
    assert "not run: --envs names no folder" in run(capsys, *words)[1]


@pytest.mark.parametrize(("states", "code"), [(("died", "died"), 1), (("died", "ok"), 0)])
def test_one_engine_that_ran_is_enough(
    states: tuple[str, str], code: int, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    rows = [{"job": state, "state": state, "reason": "no room"} for state in states]
    monkeypatch.setattr(peers, "run_peers", lambda *_, **__: rows)
    found, _, error = run(capsys, "peers")
    assert found == code and ("no engine ran; died died: no room" in error) == bool(code)


def test_the_command_fails_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert "choices: qwen2.5-vl-0.5b, tiny" in fails(capsys, "peers", "--preset", "huge")
    assert "--tokens 1: a step" in fails(capsys, "peers", "--tokens", "1")
