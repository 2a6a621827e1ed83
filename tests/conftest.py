"""Fixtures that several test files share."""

from __future__ import annotations

import atexit
import functools
import gc
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parents[1]

# A fresh home for every run, before anything reads it: no calibration, cache or token of the
# person who runs the tests may help them or hurt them.
HOME = tempfile.mkdtemp(prefix="mmfast-home-")
atexit.register(shutil.rmtree, HOME, ignore_errors=True)
for _name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "HF_HOME"):
    os.environ[_name] = str(Path(HOME, _name.lower()))
    Path(os.environ[_name]).mkdir()  # torch keeps kernels there, if it is there
os.environ |= {"HOME": HOME, "HF_HUB_OFFLINE": "1"}
pytest.register_assert_rewrite("reducer_checks", "compress_checks")

# A script's background job inherits SIGINT ignored, and so would the commands that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Random input is the same in every run, and no machine is too slow for it.
settings.register_profile("fixed", derandomize=True, deadline=None)
settings.load_profile("fixed")

from media_factory import write_video  # noqa: E402

_SERVING = re.compile(r"tests/(demos|serve|voice)/")
_PLANNING = re.compile(r"tests/(planner|pipelines|serve|cli|demos|devices)/")
# What stock models refuse before a release.
_REFUSED = {
    (5, 18): r"not used by the model: \['mm_encoder_outputs'\]|have its forwarding implemented|"
    "exactly one of input_ids or inputs_embeds",
    (5, 23): "`num_frames_per_video` is required",  # which forward of Gemma 4 takes and drops
}
_INFERENCE = re.compile(r"tests/(caches|models/(families|reduction|text|vision))/")

# Imports allocate much and free nothing: collections of garbage meanwhile are in vain.
gc.disable()


def pytest_collection_finish() -> None:
    """Freeze what the imports have left, so that no later collection walks over it."""
    gc.enable()
    gc.collect()
    gc.freeze()


@functools.cache
def _says_slow(path: Path) -> bool:
    return "slow" in path.read_text(encoding="utf-8").lower()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A run of the slow tests alone does not import the files that have none."""
    if config.option.markexpr != "slow" or any(".py" in arg for arg in config.args):
        return None
    path = collection_path
    return True if path.match("test_*.py") and not _says_slow(path) else None


_AXES: defaultdict[str, list[dict[str, int]]] = defaultdict(list)  # test: place of ids by axis


def _in_turn(item: pytest.Item, every: int, first: int = 0) -> bool:
    """One case of a grid in `every`, each value of an axis in turn."""
    ids = item.callspec._idlist  # type: ignore[attr-defined]
    axes = _AXES[item.nodeid.partition("[")[0]]
    axes += [{} for _ in ids[len(axes) :]]
    places = [axis.setdefault(name, len(axis)) for axis, name in zip(axes, ids, strict=True)]
    return (sum(places) - first) % every == 0


def pytest_itemcollected(item: pytest.Item) -> None:
    for mark in item.iter_markers("rest_is_slow"):
        if not _in_turn(item, *mark.args, **mark.kwargs):
            item.add_marker("slow")
    ours = item.path.match("test_*.py")  # a suite of others brings marks of its own
    if ours and item.get_closest_marker("slow") and not _says_slow(item.path):
        raise pytest.UsageError(f"{item.nodeid} is slow, and its file does not say `slow`")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Failures(config.pluginmanager))


class _Failures:
    """Failed tests are named when they fail: a run that is cut off prints no summary."""

    def __init__(self, plugins: pytest.PytestPluginManager) -> None:
        self._plugins = plugins

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal: Any = self._plugins.get_plugin("terminalreporter")
        if report.failed and terminal is not None:
            terminal.write_line(f"\n{report.nodeid} failed: {_reason(report)}")


def _reason(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(crash.message if crash else report.longrepr).strip().partition("\n")[0]


def _older(*release: int) -> bool:
    found = sys.modules.get("transformers")
    return bool(found) and tuple(map(int, found.__version__.split(".")[:2])) < release


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Any:
    """Skip a test that ends with a refusal which names a later release of transformers.

    Of older releases, `generate` and forward themselves refuse some of what they are given.
    """
    try:
        return (yield)
    except Exception as error:
        ours = error.__context__ if isinstance(error, AssertionError) else error
        text = str(ours)
        named = re.findall(r"transformers\s(\d+)\.(\d+)", text)
        refused = type(ours).__module__ == "mmfast.core.errors" and named
        if refused and _older(*max(tuple(map(int, each)) for each in named)):
            pytest.skip(text)
        stock = [words for release, words in _REFUSED.items() if _older(*release)]
        if isinstance(ours, ValueError) and stock and re.search("|".join(stock), text):
            pytest.skip(text)
        raise


@pytest.fixture(scope="module", autouse=True)
def swept(request: pytest.FixtureRequest) -> Iterator[None]:
    """A socket or a loop that a module leaves open is found there, and not in a later test."""
    yield
    if _SERVING.search(request.path.as_posix()):
        gc.collect()


@pytest.fixture(autouse=True)
def inference(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests of attached models run without gradients, as `generate` does."""
    if not _INFERENCE.search(request.path.as_posix()):
        yield
        return
    import torch

    with torch.no_grad():
        yield


@pytest.fixture(autouse=True)
def quiet_machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planner trusts its measurements in tests, whatever else the machine does."""
    if _PLANNING.search(request.path.as_posix()):
        monkeypatch.setattr("mmfast.planner.learner.unrest", lambda bench: (0.03, ""))


@pytest.fixture(scope="session")
def clip_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty-eight numbered frames, 30 per second, H.264 with B-frames in mp4."""
    return write_video(tmp_path_factory.mktemp("clips") / "clip.mp4")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--matrix-out", help="write what `-m matrix` ran to this .jsonl file")
    parser.addoption(
        "--fuzz-minutes",
        type=float,
        default=0.0,
        help="send the server made-up requests for so long; 5 is the long proof",
    )
    parser.addoption(
        "--realtime-sequences",
        type=int,
        default=100,
        help="random sequences of events on the realtime socket; 2000 is the long proof",
    )


@pytest.fixture(scope="session")
def note_cell(request: pytest.FixtureRequest) -> Any:
    """Takes the cells of the method x family matrix, and writes them where it is asked to."""
    rows: list[dict[str, str]] = []

    def note(cell: Any, reason: str) -> None:
        rows.append({**cell._asdict(), "reason": reason})

    yield note
    target = request.config.getoption("--matrix-out")
    if target and not request.session.testsfailed:
        lines = "".join(json.dumps(row) + "\n" for row in sorted(rows, key=lambda r: [*r.values()]))
        Path(target).write_text(lines, encoding="utf-8")


@pytest.fixture(scope="session")
def demo_url() -> Iterator[str]:
    """Where `mmfast demo` serves, in a process of its own."""
    command = [sys.executable, "-m", "mmfast", "demo", "--port", "0", "--no-open"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("mmfast demo: http://"), line
            yield line.split()[2]
        finally:
            process.terminate()
