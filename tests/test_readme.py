"""The README: its commands are what CI runs, its snippet runs, its tables are generated."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def _blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_ci_runs_the_two_commands_as_they_stand() -> None:
    ci = (ROOT / ".ci" / "run").read_text().splitlines()
    commands = [line.strip() for block in _blocks("bash") for line in block.splitlines()]
    assert len(commands) == 2
    assert [line for line in ci if line.startswith("pip install")] == commands


def test_snippet_runs() -> None:
    (code,) = _blocks("python")
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert "visual tokens" in run.stdout and "prefill" in run.stdout


def test_tables_are_what_the_generator_writes() -> None:
    command = [sys.executable, "-m", "mmfast.bench.report.readme", "--check"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


def test_every_linked_file_exists() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert "://" in target or (ROOT / target).exists(), target
