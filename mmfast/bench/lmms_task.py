"""Entry point of the lmms-eval plugin, and embedded suites as local lmms-eval tasks.

`python -m mmfast.bench.lmms_task FOLDER` writes a task. This module imports neither lmms-eval nor
torch, since lmms-eval loads it to find the plugin.

The folder holds questions and media; lmms-eval needs no network for it:

HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 lmms-eval --model mmfast --model_args reduce=evs:0.25 \
  --tasks mmfast_video --include_path FOLDER
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

UTILS = '''"""Functions of the local task, called by lmms-eval."""

from pathlib import Path

HERE = Path(__file__).parent


def messages(doc, lmms_eval_specific_kwargs=None):
    media = [{"type": doc["media_kind"], "url": str(HERE / name)} for name in doc["media"]]
    return [{"role": "user", "content": [*media, {"type": "text", "text": doc["question"]}]}]


def text(doc, lmms_eval_specific_kwargs=None):
    return doc["question"]


def visual(doc):
    return [str(HERE / name) for name in doc["media"]]


def score(doc, results):
    return {"accuracy": float(results[0].strip().lower() == doc["answer"])}
'''
TASK = """dataset_path: json
dataset_kwargs:
  data_files:
    test: {questions}
task: {task}
test_split: test
output_type: generate_until
doc_to_messages: !function utils.messages
doc_to_visual: !function utils.visual
doc_to_text: !function utils.text
doc_to_target: answer
process_results: !function utils.score
generation_kwargs:
  max_new_tokens: 8
  temperature: 0
metric_list:
  - metric: accuracy
    aggregation: mean
    higher_is_better: true
"""


def manifest() -> Any:
    """Return the manifest of the model `mmfast`, for the entry point `lmms_eval.models`."""
    from lmms_eval.models.registry_v2 import ModelManifest

    return ModelManifest(model_id="mmfast", chat_class_path="mmfast.bench.lmms.Mmfast")


def write_task(folder: Path, name: str = "video", n: int = 40, seed: int = 1000) -> str:
    """Write the first `n` cases of a suite as a task; return its name."""
    from mmfast.tiny.suites import suite, suite_of

    asked, task = suite_of(name), f"mmfast_{name.replace('-', '_')}"
    folder.mkdir(parents=True, exist_ok=True)
    suffix = "mp4" if asked.media == "video" else "png"
    rows = []
    for number, case in enumerate(suite(n, seed, name)):
        files = [f"{number}-{i}.{suffix}" for i in range(len(case.media))]
        for file, content in zip(files, case.media, strict=True):
            (folder / file).write_bytes(content)
        row = {"question": case.question, "answer": case.answer, "media": files}
        rows.append({**row, "media_kind": asked.media})
    questions = folder / "questions.json"
    questions.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    (folder / "utils.py").write_text(UTILS, encoding="utf-8")
    yaml = TASK.format(questions=json.dumps(str(questions.resolve())), task=task)
    (folder / f"{task}.yaml").write_text(yaml, encoding="utf-8")
    return task


def main(args: Sequence[str] | None = None) -> None:
    """Parse the command line and write a task."""
    from mmfast.tiny.suites import SUITES
    from mmfast.tiny.training import RecipeParser, one_line

    parser = RecipeParser(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--suite", default="video", choices=list(SUITES))
    parser.add_argument("--n", type="count", default=40)
    parser.add_argument("--seed", type=int, default=1000)
    options = parser.parse_args(args)
    task = one_line(write_task)(options.folder, options.suite, options.n, options.seed)
    print(f"wrote task {task} with {options.n} questions", file=sys.stderr)


if __name__ == "__main__":
    main()
