"""Tasks: a pipeline class says which task it does, and every list of tasks is made of that.

A task is registered by `@task` on its class, in any file of this folder, whose text is searched:
so a task is known although its module, and what that imports, is not loaded before it is used.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from mmfast.core.errors import MmfastError, unknown
from mmfast.core.large_pages import use_large_pages

T = TypeVar("T", bound=type)
TASKS: dict[str, tuple[str, str]] = {}  # module and class by task
ALIASES: dict[str, str] = {}  # task by alias


def task(name: str, *, aliases: Sequence[str] = ()) -> Callable[[T], T]:
    """Register a pipeline class for a task.

    Args:
        name: The task, as `mmfast.pipeline` takes it.
        aliases: Other names for it, such as those of transformers.

    Raises:
        MmfastError: Another class has the name.
    """

    def registered(cls: T) -> T:
        _add(name, aliases, (cls.__module__, cls.__name__))
        cls.task = name  # type: ignore[attr-defined]
        return cls

    return registered


def _add(name: str, aliases: Sequence[str], where: tuple[str, str]) -> None:
    for each in (name, *aliases):
        owner = TASKS.get(ALIASES.get(each, each), where)
        if owner != where:
            raise MmfastError(f"task {each!r} of {'.'.join(where)} is that of {'.'.join(owner)}")
    TASKS[name] = where
    ALIASES.update(dict.fromkeys(aliases, name))


def discover(folder: Path, package: str) -> None:
    """Register the tasks of all files of a folder, without importing them."""
    for path in sorted(folder.glob("*.py")):
        text = path.read_text(encoding="utf-8")
        if "\n@task(" in text:
            for name, aliases, cls in _declared(ast.parse(text)):
                _add(name, aliases, (f"{package}.{path.stem}", cls))


def _declared(tree: ast.Module) -> Iterator[tuple[str, Sequence[str], str]]:
    for node in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        for call in node.decorator_list:
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "task":
                more = [ast.literal_eval(each.value) for each in call.keywords]
                yield ast.literal_eval(call.args[0]), (more or [()])[0], node.name


discover(Path(__file__).parent, "mmfast.pipelines")


def pipeline(task: str, model: Any = None, **options: Any) -> Any:
    """Build the pipeline of a task.

    Args:
        task: A name in `TASKS`, such as `video-qa` or `speech-chat`, or in `ALIASES`, such as
            transformers' `video-text-to-text`.
        model: Directory or hub id of a checkpoint, a model of transformers, a `(model, processor)`
            pair, or None for the embedded model, which works offline on a CPU.
        **options: Those of the task's class. All take `device`, `dtype` and `model_kwargs`, the
            arguments of `from_pretrained` (`device_map`, `quantization_config`, …). Questions
            about media take `processor`, `reduce`, `cache`, `encoder`, `decode`, `frames`, `fps`,
            `max_new_tokens`, `temperature`, `batch_size` and further arguments of `generate`, or
            instead of `reduce` a target for the planner: `target_ttft_ms`, `target_tokens`,
            `max_memory`, `quality`; see `mmfast.pipelines.visual_qa.VisualQA`,
            `.video_stream.VideoStream`, `.speech` and `.omni_chat.OmniChat`.

    Raises:
        MmfastError: Unknown task, option or value, before any weight is read; names the choices.
        ModelError: The checkpoint cannot be loaded.

    Example:
        >>> pipe = pipeline("video-qa", reduce="evs:0.25")
        >>> pipe("clip.mp4", "Which way does the red circle move?").text
        'left'
    """
    name = ALIASES.get(task, task) if isinstance(task, str) else ""
    if name not in TASKS:
        raise MmfastError(unknown("task", task, [*TASKS, *ALIASES]))
    module, cls = TASKS[name]
    use_large_pages()
    return getattr(importlib.import_module(module), cls)(model, **options)
