"""Every snippet of the README and the guides runs, on small stand-ins for media and checkpoints.

All Python blocks of a page run in order in one process, in a folder where `clip.mp4`, `photo.jpg`
and `Qwen/Qwen2.5-VL-7B-Instruct` (a tiny random model of that class) lie beside the assets. Shell
blocks run line by line there; lines that would block or take minutes are only parsed.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import threading
import time
import tomllib
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest.mock import patch

import pytest
from scheduling import model_of
from warm_program import warm

from mmfast.cli import load

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "docs" / "quickstart.md",
    *sorted((ROOT / "docs" / "guides").glob("*.md")),
    *sorted((ROOT / "docs" / "extend").glob("*.md")),
]
RESULTS = sorted((ROOT / "docs" / "results").glob("*.md"))
CHECKPOINT = "Qwen/Qwen2.5-VL-7B-Instruct"
# Programs that need another environment, or belong to another test.
ELSEWHERE = ("pip", "pytest", "export", "python -m mmfast.bench.lmms", "HF_HUB_OFFLINE=1")
ADDRESS = re.compile(r"http://127.0.0.1:\d+")
MINUTES = re.compile(
    r"--full|--preset|--encoder timm|--train|--minutes|--steps \d{3}|--n (?!8\b)\d\d+"
    r"|mmfast demo|mmfast serve|bench.report.docs"
)


def blocks(page: Path, *languages: str) -> list[str]:
    text = page.read_text(encoding="utf-8")
    return re.findall(rf"^```(?:{'|'.join(languages)})\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def lines(page: Path) -> Iterator[str]:
    """Commands of a page, continued lines joined."""
    for block in blocks(page, "sh", "bash"):
        yield from filter(None, map(str.strip, block.replace("\\\n", " ").splitlines()))


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder in which every file that a snippet names exists."""
    home = tmp_path_factory.mktemp("reader")
    (home / "assets").symlink_to(ROOT / "assets")
    (home / "tests").symlink_to(ROOT / "tests")
    (home / "clip.mp4").symlink_to(ROOT / "assets" / "clips" / "red-circle.mp4")
    (home / "photo.jpg").symlink_to(ROOT / "assets" / "clips" / "picture.jpg")
    (home / "bin").mkdir()
    for part in model_of("qwen2_5_vl"):  # a random model, and its processor with a chat template
        part.save_pretrained(home / CHECKPOINT)
    with patch.dict(os.environ, inherited()), warm(home / "bin"):
        yield home


def inherited() -> dict[str, str]:
    """What a process that a snippet runs in has in its environment."""
    paths = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    return {"PYTHONPATH": paths, "PYTHONWARNINGS": "ignore"}


def run(command: list[str], folder: Path, **more: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **inherited(), **more}
    programs = [str(folder / "bin"), str(Path(sys.executable).parent), environment["PATH"]]
    environment["PATH"] = os.pathsep.join(programs)
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, env=environment, timeout=540
    )


@contextmanager
def server(folder: Path) -> Iterator[str]:
    """Address of `mmfast serve`, in a process of its own, once it is ready."""
    command = [sys.executable, "-m", "mmfast", "serve", "--port", "0", "--no-demo"]
    with subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            url = next(found[0] for line in process.stderr if (found := ADDRESS.findall(line)))
            threading.Thread(target=process.stderr.read, daemon=True).start()
            for _ in range(600):
                with suppress(OSError):
                    if urllib.request.urlopen(f"{url}/ready").status == 200:
                        break
                time.sleep(0.2)
            yield url
        finally:
            process.terminate()


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=name)
def test_python_runs(page: Path, folder: Path) -> None:
    code, python = "\n".join(blocks(page, "python")), str(folder / "bin" / "python")
    if "openai" in code:
        with server(folder) as url:
            done = run([python, "-c", code], folder, MMFAST_URL=f"{url}/v1")
    else:
        done = run([python, "-c", code], folder)
    assert done.returncode == 0, done.stderr[-2000:]


def commands(pages: list[Path]) -> list[tuple[str, str]]:
    return [(name(page), line) for page in pages for line in lines(page)]


def runs(line: str) -> bool:
    return not line.startswith(ELSEWHERE) and not MINUTES.search(line)


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if any(lines(page))], ids=name)
def test_shell_runs(page: Path, folder: Path) -> None:
    for line in filter(runs, lines(page)):
        done = run(["bash", "-c", line], folder)
        assert done.returncode == 0, f"{line}\n{done.stderr[-2000:]}"


@pytest.mark.parametrize(("page", "line"), commands([*PAGES, *RESULTS]))
def test_commands_are_those_of_the_program(page: str, line: str) -> None:
    """Options of every `mmfast` command are parsed by the program itself."""
    found = re.search(r"(?:^|\s)mmfast (.*?)(?:;|$)", line.split("&&")[-1])
    if not found or line.startswith(("caches=", "all=", "some=", "specs()", "HF_HUB")):
        return
    text = re.sub(r"\$\(specs .*?\)|\$caches", "--reduce evs:0.25", found[1])
    words = shlex.split(text.replace("$name", "frame-cache"))
    command = load(words[0])
    context = command.make_context(words[0], words[1:])
    assert context.info_name == words[0]


def test_extras_that_are_installed_exist() -> None:
    metadata = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for page, line in commands([*PAGES, *RESULTS]):
        for extra in re.findall(r'pip install -e "\.\[([\w-]+)\]"', line):
            assert extra in metadata["optional-dependencies"], (page, extra)
