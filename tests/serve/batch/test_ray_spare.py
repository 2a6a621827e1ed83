"""The process in waiting on Ray: who warms up and who does not, and orders that nobody takes."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from mmfast.serve.ray import preload
from mmfast.serve.ray.cluster import PLACE, Spare


def test_workers_warm_up_where_they_are_asked_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Controllers and first replicas are not; what cannot be imported keeps nobody from waiting."""
    imported: list[str] = []

    def take(name: str) -> None:
        imported.append(name)
        if "serve" in name:
            raise ImportError("not installed")

    monkeypatch.setattr(preload, "import_module", take)
    for place in ("", str(tmp_path), str(tmp_path / "nowhere")):
        preload.warm(place)
    assert not imported and not list(tmp_path.iterdir())
    (tmp_path / "warm").touch()
    preload.warm(str(tmp_path))
    assert tuple(imported) == preload.PARTS and (tmp_path / str(os.getpid())).exists()


def test_what_is_imported_is_there() -> None:
    for name in preload.PARTS:
        known = find_spec(name.partition(".")[0])
        if known is not None and "._" not in name:
            assert find_spec(name) is not None, name


def test_one_waits_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    from mmfast.serve.ray import cluster as where

    orders: list[int] = []
    clock, idle = [1000.0], set[int]()
    monkeypatch.setattr(where, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(where, "_idle", idle.__contains__)
    monkeypatch.setattr(where, "_SEEN", True)
    monkeypatch.setattr(Spare, "_order", lambda self, ray: orders.append(len(orders)))
    spare = Spare()

    def after() -> int:
        for _ in range(3):
            spare.keep(None)
        return len(orders)

    try:
        folder = Path(os.environ[PLACE])
        assert after() == 1  # on its way
        (folder / "77").touch()
        idle.add(77)
        assert after() == 1  # waits
        idle.clear()
        assert after() == 2  # taken: the next one
        clock[0] += 200
        assert after() == 3  # which never came
    finally:
        spare.close()


def test_a_cluster_that_takes_no_such_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_preload_python_modules", raising=False)
    monkeypatch.delenv(PLACE, raising=False)
    spare = Spare()
    folder = Path(os.environ[PLACE])
    assert spare.due()
    spare.keep(SimpleNamespace(nodes=list))  # knows no job
    assert spare.ready == [] and not spare.due()  # it is not asked again
    (folder / "123").touch()
    assert spare.ready == [123]
    spare.close()
    assert PLACE not in os.environ and not folder.exists()
    spare.close()
