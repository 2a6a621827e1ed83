"""Workers of `mmfast batch` that die, without a cluster: a stand-in for Ray that runs in place."""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("pyarrow.parquet")

from mmfast.core.errors import MmfastError
from mmfast.serve.batch import run as batch_cluster
from mmfast.serve.batch.job import BatchJob, Medium
from mmfast.serve.batch.run import Task, _shares, _ThreadOutput, answered, blank
from mmfast.serve.batch.store import Row

JOB = BatchJob(Path("folder"), ("?",))


class DiedError(Exception):
    """Ray's `RayActorError`."""


class FakeRay:
    """Actors that work when they are asked for what they did; those that meet poison are gone.

    Args:
        poison: Paths that no worker outlives.
        load: What a worker says when it loads; None dies.
        loads: So many workers can be loaded, and those behind them die of it.
    """

    exceptions = SimpleNamespace(RayActorError=DiedError)

    def __init__(self, poison: set[str], load: str | None = "", loads: int = 10**6) -> None:
        self.poison, self.load, self.loads = poison, load, loads
        self.started, self.done = 0, 0
        self.dead: set[int] = set()

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 4.0}

    def remote(self, **options: Any) -> Any:
        return lambda cls: SimpleNamespace(remote=lambda job, threads: self._actor())

    def _actor(self) -> Any:
        me = self.started
        self.started += 1

        def answer(tasks: list[Task]) -> list[Row]:
            assert me not in self.dead, "asked again after it died"
            if any(medium.path in self.poison for medium, _ in tasks):
                self.dead.add(me)
                raise DiedError("gone\nfor good")
            self.done += len(tasks)
            return [blank(JOB, *task) | {"answer": "yes"} for task in tasks]

        def load() -> str:
            if self.load is None or me >= self.loads:
                raise DiedError("out of memory")
            return self.load

        return SimpleNamespace(
            load=SimpleNamespace(remote=lambda: _Future(load)),
            answer=SimpleNamespace(remote=lambda tasks: _Future(lambda: answer(tasks))),
        )

    def wait(self, futures: list[Any], num_returns: int, timeout: float) -> tuple[Any, Any]:
        return futures[-1:], futures[:-1]  # the youngest: answers come in no order

    def get(self, future: Any) -> Any:
        return future.run()


class _Future:
    def __init__(self, run: Any) -> None:
        self.run = run


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Answers forty files in chunks, on the stand-in; gives rows and warnings."""

    def go(ray: FakeRay, size: int = 3, workers: int | None = 3) -> tuple[list[Row], list[str]]:
        @contextmanager
        def cluster(address: str) -> Iterator[Any]:
            yield ray

        monkeypatch.setattr(batch_cluster, "_cluster", cluster)
        tasks = [(Medium(f"{n}.mp4", f"{n}.mp4", 1, 1), "?") for n in range(40)]
        chunks = (tasks[i : i + size] for i in range(0, 40, size))
        said: list[str] = []
        rows = [row for part in answered(JOB, chunks, workers, "", said.append) for row in part]
        return rows, said

    return go


@pytest.mark.parametrize(("size", "deaths"), [(1, 6), (3, 8), (7, 9)])
def test_poison_becomes_a_row(run: Any, size: int, deaths: int) -> None:
    """A death among others blames nobody; two alone are enough."""
    ray = FakeRay({"0.mp4", "20.mp4", "39.mp4"})
    rows, said = run(ray, size)
    assert sorted(row["path"] for row in rows) == sorted(f"{n}.mp4" for n in range(40))
    failed = {row["path"] for row in rows if row["error"]}
    assert failed == ray.poison and ray.done == 37
    assert all("died 2 times" in row["error"] for row in rows if row["error"])
    assert len(ray.dead) == len(said) == deaths and ray.started == 3 + deaths
    assert all("\n" not in line for line in said)


def test_workers_that_cannot_load(run: Any) -> None:
    with pytest.raises(MmfastError, match="no such model"):
        run(FakeRay(set(), "no such model"))
    with pytest.raises(MmfastError, match="fewer --workers"):
        run(FakeRay(set(), None))


def test_workers_are_not_loaded_without_end(run: Any) -> None:
    """What a machine has no room for any more is tried three times, and not for ever."""
    ray = FakeRay({"3.mp4"}, loads=1)
    with pytest.raises(MmfastError, match="3 workers in a row died while they loaded") as error:
        run(ray, workers=1)
    assert (
        ray.started == 4 and "\n" not in str(error.value) and "fewer --workers" in str(error.value)
    )
    ray = FakeRay({"3.mp4"}, loads=3)  # the other two go on
    rows, said = run(ray, size=1)
    assert sorted(row["path"] for row in rows) == sorted(f"{n}.mp4" for n in range(40))
    assert {row["path"] for row in rows if row["error"]} == {"3.mp4"}
    assert ray.started <= 3 + 2 * 3 and any("go on alone" in line for line in said)


@pytest.mark.parametrize("cores", [1, 2, 3, 7, 16])
@pytest.mark.parametrize("gpus", [0, 1, 2, 8])
@pytest.mark.parametrize("workers", [None, 1, 2, 3, 5])
def test_shares_always_fit(cores: int, gpus: int, workers: int | None) -> None:
    """Shares that do not fit would be waited for without end."""
    count, options, threads = _shares(JOB, workers, {"CPU": cores, "GPU": gpus})
    assert count == (workers or gpus or max(1, cores // 2))
    assert options["num_cpus"] > 0 and count * options["num_cpus"] <= cores
    per_gpu = int(1 / options["num_gpus"] + 1e-9) if options["num_gpus"] else 0
    assert per_gpu * gpus >= (count if gpus else 0)
    assert threads >= 1 and threads * count <= max(cores, count)
    on_cpu = BatchJob(Path("folder"), ("?",), device="cpu")
    assert _shares(on_cpu, workers, {"CPU": cores, "GPU": gpus})[1]["num_gpus"] == 0


def test_ray_prints_nothing_on_standard_output() -> None:
    """Its listener prints there when a worker dies, in the middle of our JSON."""
    target = io.StringIO()
    with redirect_stdout(target), redirect_stdout(_ThreadOutput()):
        other = threading.Thread(target=lambda: print("(raylet) a worker died", file=sys.stdout))
        other.start()
        other.join()
        print("ours", flush=True)
    assert target.getvalue() == "ours\n"
