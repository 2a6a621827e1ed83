"""The lmms-eval plugin, over the parts of lmms-eval that it touches and under the real one."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import tomllib
import types
from pathlib import Path
from typing import Any

import pytest

from mmfast.bench.lmms_task import write_task
from mmfast.core.errors import MmfastError, SpecError

ROOT = Path(__file__).resolve().parents[2]


@dataclasses.dataclass
class _Counts:
    input_tokens: int
    output_tokens: int


@dataclasses.dataclass
class _Result:
    text: str
    token_counts: _Counts


class _Model:
    rank = 0

    def __init__(self) -> None:
        self.task_dict: dict[str, Any] = {}
        self.cache_hook = types.SimpleNamespace(add_partial=lambda *_: None)


class _Messages:
    """Messages whose parts have attributes, as the pydantic models of lmms-eval."""

    def __init__(self, messages: Any) -> None:
        self.messages = [
            types.SimpleNamespace(
                role=each["role"],
                content=[types.SimpleNamespace(**part) for part in each["content"]],
            )
            for each in messages
        ]


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The plugin's module over stand-ins of lmms-eval; `module.logged` collects its metrics."""
    logged: list[dict[str, Any]] = []
    names = {
        "lmms_eval": {},
        "lmms_eval.api": {},
        "lmms_eval.api.instance": {"GenerationResult": _Result, "TokenCounts": _Counts},
        "lmms_eval.api.model": {"lmms": _Model},
        "lmms_eval.models": {},
        "lmms_eval.models.model_utils": {},
        "lmms_eval.models.model_utils.gen_metrics": {"log_metrics": lambda **m: logged.append(m)},
        "lmms_eval.protocol": {"ChatMessages": _Messages},
    }
    for name, content in names.items():
        module = types.ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "mmfast.bench.lmms", raising=False)
    module: Any = importlib.import_module("mmfast.bench.lmms")
    module.logged = logged
    yield module
    sys.modules.pop("mmfast.bench.lmms", None)


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("task")
    assert write_task(folder, "video", 6, 5) == "mmfast_video"
    return folder, json.loads((folder / "questions.json").read_text())


def _requests(folder: Path, docs: list[dict[str, Any]], arguments: list[Any]) -> list[Any]:
    spec = importlib.util.spec_from_file_location("task_utils", folder / "utils.py")
    assert spec is not None and spec.loader is not None
    utils: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(utils)
    return [
        types.SimpleNamespace(args=("", utils.messages, given, number, "t", "test"))
        for number, given in zip(range(len(docs)), arguments, strict=True)
    ]


def test_answers_come_in_the_order_of_the_requests(plugin: Any, task: Any) -> None:
    folder, docs = task
    model = plugin.Mmfast(reduce="evs:0.5", batch_size=2)
    model.task_dict = {"t": {"test": docs}}
    short, long = {"max_new_tokens": 8}, {"max_new_tokens": 9, "until": ["\n"]}
    requests = _requests(folder, docs, [short, long] * 3)
    results = model.generate_until(requests)
    right = [each.text == doc["answer"] for each, doc in zip(results, docs, strict=True)]
    assert sum(right) >= 5
    assert all(each.token_counts.input_tokens > 288 for each in results)
    (metrics,) = plugin.logged
    assert metrics["total_gen_tokens"] == sum(r.token_counts.output_tokens for r in results)
    assert metrics["additional_metrics"]["total_requests"] == 6
    assert 0 < metrics["additional_metrics"]["ttft_ms"] < 1e3 * metrics["total_elapsed_time"]


def test_wrong_arguments_are_one_line_before_any_weight(plugin: Any) -> None:
    with pytest.raises(MmfastError, match=r"unknown model_args redcue; choices: pretrained"):
        plugin.Mmfast(redcue="evs:0.5")
    with pytest.raises(SpecError, match="evs"):
        plugin.Mmfast(pretrained="no/such", reduce="evss:0.5")


def test_generation_arguments(plugin: Any) -> None:
    options, stops = plugin.generation({"until": "\n", "temperature": 0, "top_p": 0.5})
    assert options == {"max_new_tokens": 64, "num_beams": 1, "do_sample": False}
    assert stops == ["\n"]
    options, _ = plugin.generation({"temperature": 0.7, "max_new_tokens": 3})
    assert options["do_sample"] and options["temperature"] == 0.7 and options["max_new_tokens"] == 3
    assert plugin.cut("a b\nc", ["\n"]) == "a b"


def test_the_meter_separates_decoding(plugin: Any) -> None:
    meter = plugin.BatchMeter()
    meter.add(10.0, 10.5, 11.5, [5, 3])
    meter.add(20.0, 0.0, 21.0, [4])  # beams: no first token known
    metrics = meter.metrics()
    assert metrics["total_gen_tokens"] == 12 and metrics["total_elapsed_time"] == 2.5
    more = metrics["additional_metrics"]
    assert more == {"total_requests": 3, "ttft_ms": 500.0, "decode_tokens_per_second": 6.0}


def test_the_entry_point_names_the_class() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    entry = config["project"]["entry-points"]["lmms_eval.models"]["mmfast"]
    module, function = entry.split(":")
    assert callable(getattr(importlib.import_module(module), function))
    assert "class Mmfast(lmms)" in (ROOT / "mmfast" / "bench" / "lmms.py").read_text()


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("lmms_eval") is None, reason="lmms-eval is not installed: [eval]"
)
def test_a_local_task_runs_under_lmms_eval(tmp_path: Path, task: Any) -> None:
    folder, _ = task
    command = [sys.executable, "-m", "lmms_eval", "--model", "mmfast", "--tasks", "mmfast_video"]
    command += ["--model_args", "reduce=evs:0.5", "--include_path", str(folder)]
    command += ["--output_path", str(tmp_path)]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    subprocess.run(command, check=True, env={**os.environ, **offline}, cwd=tmp_path)
    (path,) = tmp_path.rglob("*_results.json")
    results = json.loads(path.read_text())["results"]["mmfast_video"]
    assert results["accuracy,none"] >= 5 / 6
