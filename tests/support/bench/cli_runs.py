"""Helpers that several tests share: cli runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmfast.cli import main

ROOT = Path(__file__).resolve().parents[3]


CLIP = str(ROOT / "assets" / "clips" / "red-circle.mp4")


QUESTION = "Which way does the red circle move?"


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of one call."""
    with pytest.raises(SystemExit) as stop:
        main(list(args))
    captured = capsys.readouterr()
    return int(stop.value.code or 0), captured.out, captured.err


def fails(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """The one-line error of a call that must exit 2 and print nothing else."""
    code, out, err = run(capsys, *args)
    assert code == 2 and out == "", (code, out, err)
    assert err.startswith("mmfast: error: ") and err.count("\n") == 1, err
    return err
