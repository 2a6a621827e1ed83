"""The wheel: built, unpacked elsewhere and used from there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parents[1]
USE = """
import importlib, json, pathlib, sys
import mmfast
assert pathlib.Path(mmfast.__file__).is_relative_to(sys.argv[1]), mmfast.__file__
for name in json.loads(sys.argv[2]):
    importlib.import_module(name)
from mmfast.models.loading import embedded_path
assert embedded_path().is_relative_to(sys.argv[1])
from mmfast.planner.candidates import shipped_rows
assert shipped_rows()
print(mmfast.reduce(mmfast.Tokens(importlib.import_module("torch").eye(8)), "uniform:0.5").m)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    # Sources are copied first: setuptools leaves build/ behind, which would shadow later edits.
    copy = tmp_path_factory.mktemp("source")
    files = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    for name in files:
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes((ROOT / name).read_bytes())
    options = ["--wheel", "--no-isolation", "--outdir", str(out), str(copy)]
    subprocess.run([sys.executable, "-m", "build", *options], check=True, capture_output=True)
    return next(out.glob("*.whl"))


def _modules() -> list[str]:
    names = []
    beside = ("pipelines", "kernels", "demos")
    prefixes = {"mmfast": "mmfast", **{name: f"mmfast.{name}" for name in beside}}
    for top, prefix in prefixes.items():
        for path in (ROOT / top).rglob("*.py"):
            parts = path.relative_to(ROOT / top).with_suffix("").parts
            names.append(".".join([prefix, *(p for p in parts if p != "__init__")]))
    return [n for n in names if not n.endswith("__main__") and not _needs_more(n)]


def _needs_more(module: str) -> bool:
    """Whether a module needs what only an extra or a GPU machine has."""
    runs_in_vllm = module == "mmfast.vllm.qwen"
    return ".kernels." in module or module == "mmfast.bench.lmms" or runs_in_vllm


def test_wheel_holds_everything(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert "mmfast/py.typed" in names
    for path in (ROOT / "assets" / "models").rglob("*"):
        if path.is_file():
            assert f"mmfast/{path.relative_to(ROOT)}" in names
    for top in ("mmfast", "kernels", "pipelines", "demos"):
        for path in (ROOT / top).rglob("*.py"):
            inside = str(path.relative_to(ROOT))
            assert (inside if top == "mmfast" else f"mmfast/{inside}") in names


@pytest.mark.slow
def test_wheel_works_from_another_directory(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    run = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r})\n{USE}",
            str(tmp_path / "site"),
            json.dumps(_modules()),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split()[-1] == "4"


@pytest.mark.slow
def test_the_installed_wheel_answers_outside_the_checkout(wheel: Path, tmp_path: Path) -> None:
    """Install the wheel by pip, then ask a question with its console script."""
    site = tmp_path / "site"
    options = ["--no-deps", "--no-index", "--quiet", "--target", str(site)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(wheel)], check=True)
    clip = tmp_path / "clip.mp4"
    clip.write_bytes((ROOT / "assets" / "clips" / "red-circle.mp4").read_bytes())
    command = [sys.executable, str(site / "bin" / "mmfast"), "ask", str(clip)]
    run = subprocess.run(
        [*command, "Which way does the red circle move?", "--json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(site)},
    )
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout)["answer"] == "left"


def test_bare_checkout_finds_kernels_and_pipelines() -> None:
    code = "import mmfast.pipelines, mmfast.kernels; print(mmfast.pipelines.__file__)"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert Path(run.stdout.strip()).parent == ROOT / "pipelines"


def test_the_space_asks_for_what_the_package_is() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    _, head, _ = (ROOT / "space" / "README.md").read_text().split("---\n", 2)
    said = dict(line.split(": ", 1) for line in head.splitlines())
    (needed,) = (
        Requirement(each)
        for each in project["optional-dependencies"]["demo"]
        if each.startswith("gradio")
    )
    assert said["sdk"] == needed.name and said["sdk_version"] in needed.specifier
    # 6.0 to 6.23 know no option that the page gives them
    assert "6.23.1" not in needed.specifier and "6.24.0" in needed.specifier
    assert said["python_version"].strip('"') in SpecifierSet(project["requires-python"])
    assert len(said["short_description"]) <= 60  # longer ones are refused there
    wheel = f"./mmfast-{project['version']}-py3-none-any.whl[demo]"
    assert wheel in (ROOT / "space" / "requirements.txt").read_text().splitlines()
