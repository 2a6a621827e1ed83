"""Tasks: one file adds one, nothing is imported before it is used, and names are unique."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import mmfast
from mmfast.pipelines import registry

ROOT = Path(__file__).resolve().parents[2]
SOURCE = '''"""A task in one file."""

from typing import Any

from mmfast.pipelines.registry import task


@task("counting", aliases=("how-many",))
class Counter:
    def __init__(self, model: Any = None, **options: Any) -> None:
        self.model, self.options = model, options
'''


@pytest.fixture
def restored() -> Iterator[None]:
    """The tasks as before once the test is over."""
    tasks, aliases = dict(registry.TASKS), dict(registry.ALIASES)
    yield
    for table, kept in ((registry.TASKS, tasks), (registry.ALIASES, aliases)):
        table.clear()
        table.update(kept)


def test_tasks_of_the_package() -> None:
    assert set(registry.TASKS) == {
        "image-qa", "video-qa", "video-stream", "text-to-speech", "speech-to-text",
        "speech-chat", "speech-translation", "omni-chat",
    }  # fmt: skip
    assert registry.ALIASES == {
        "automatic-speech-recognition": "speech-to-text",
        "image-text-to-text": "image-qa",
        "translation": "speech-translation",
        "video-text-to-text": "video-qa",
    }


@pytest.mark.usefixtures("restored")
def test_a_task_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "counter_task.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    package = tmp_path / "tasks_package"
    package.mkdir()
    (package / "counter.py").write_text(SOURCE)
    registry.discover(package, "tasks_package")
    assert "tasks_package.counter" not in sys.modules
    with pytest.raises(mmfast.MmfastError, match=r"counting.*how-many"):
        mmfast.pipeline("count")
    for name in ("counting", "how-many"):
        pipe = mmfast.pipeline(name, "a model", frames=3)
        assert type(pipe).__name__ == "Counter" and pipe.task == "counting"
        assert (pipe.model, pipe.options) == ("a model", {"frames": 3})
    with pytest.raises(mmfast.MmfastError, match=r"task 'counting' of counter_task\.Counter is"):
        __import__("counter_task")


def test_classes_agree_with_what_was_found_in_their_text() -> None:
    """In a fresh process: the list needs no import, and importing all changes nothing."""
    code = (
        "import sys, importlib\n"
        "from mmfast.pipelines import ALIASES, TASKS\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
        "tasks, aliases = dict(TASKS), dict(ALIASES)\n"
        "for name, (module, cls) in tasks.items():\n"
        "    assert getattr(importlib.import_module(module), cls).task == name\n"
        "assert (tasks, aliases) == (TASKS, ALIASES)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
