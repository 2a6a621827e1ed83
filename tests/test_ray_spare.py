"""The process in waiting on Ray: who warms up and who does not, and orders that nobody takes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from mmfast.serve.ray.preload import PLACE
from mmfast.serve.ray.spare import Spare

CODE = "import sys, mmfast.serve.ray.preload; print('torch' in sys.modules)"


def imported(place: str) -> bool:
    root = Path(__file__).resolve().parents[1]
    env = {**os.environ, "PYTHONPATH": str(root), PLACE: place}
    done = subprocess.run(
        [sys.executable, "-c", CODE], env=env, capture_output=True, text=True, check=True
    )
    return done.stdout.strip() == "True"


def test_workers_warm_up_where_they_are_asked_to(tmp_path: Path) -> None:
    assert not imported("") and not imported(str(tmp_path))  # controllers, first replicas
    assert not list(tmp_path.iterdir())
    (tmp_path / "warm").touch()
    assert imported(str(tmp_path))
    (done,) = [each.name for each in tmp_path.iterdir() if each.name != "warm"]
    assert done.isdigit()


def test_a_cluster_that_takes_no_such_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_preload_python_modules", raising=False)
    monkeypatch.delenv(PLACE, raising=False)
    spare = Spare()
    folder = Path(os.environ[PLACE])
    assert not spare.start(SimpleNamespace(nodes=list)) and spare.ready == []
    (folder / "123").touch()
    assert spare.ready == [123]
    spare.close()
    assert PLACE not in os.environ and not folder.exists()
    spare.close()
