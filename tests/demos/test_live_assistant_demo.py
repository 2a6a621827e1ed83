"""The live assistant of the demos: the script in its own words, and every cell of the notebook."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import mmfast
from mmfast.demos import live_assistant

NOTEBOOK = Path(live_assistant.__file__).with_suffix(".ipynb")
WINDOW = "sink:64+window:576+retrieve:16"


def test_the_assistant_speaks_when_it_happens_and_remembers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    world = mmfast.World(3, every=20)
    fact = world.event(0)
    event, stats = live_assistant.assist(
        world.frames(seconds=42),
        "What number is on the screen now?",
        str(fact.number),
        f"What number is at the {fact.name}?",
        memory=WINDOW,
    )
    said = capsys.readouterr().out
    assert fact.start <= event.time <= fact.stop + 1
    assert f"What number is at the {fact.name}? {fact.number} (" in said
    assert "(0 frames" not in said and stats["subscriptions"] == []
    calm, _ = live_assistant.assist(
        world.frames(seconds=3), "What number is on the screen now?", "99", memory=WINDOW
    )
    assert calm is None and "it never came" in capsys.readouterr().out


def test_the_script_names_its_arguments() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "mmfast.demos.live_assistant"], capture_output=True, text=True
    )
    assert ran.returncode == 1 and ran.stderr.strip().count("\n") == 0 and "SOURCE" in ran.stderr


def test_a_source_that_is_not_there_ends_the_script_in_one_line() -> None:
    command = [sys.executable, "-m", "mmfast.demos.live_assistant", "/no/clip.mp4", "What?", "5"]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 2 and "Traceback" not in ran.stderr
    assert ran.stderr.splitlines()[-1].startswith("'/no/clip.mp4' does not exist")


def test_every_cell_of_the_notebook_runs(capsys: pytest.CaptureFixture[str]) -> None:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    names: dict[str, Any] = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            assert not cell["outputs"]  # what was run elsewhere is not kept
            exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
    assert names["event"].time <= names["world"].event(0).stop + 1
    assert names["answer"] == str(names["world"].event(0).number)
    assert names["reply"].recalled and names["alarm"].events == 1
    assert "live tokens" in capsys.readouterr().out
