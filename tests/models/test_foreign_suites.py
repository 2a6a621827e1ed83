"""transformers' own model and training tests, on tiny models that `attach` has changed.

A stock model and an attached one run the same tests in processes of their own; what the stock model
passes, the attached one must pass, except the tests of `REASONS`. The suites come with the source
distribution of transformers: MMFAST_TRANSFORMERS names its unpacked folder, else pip fetches it.
Tests of `generate` are not in it.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tarfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import transformers
from tiny_models import ALL_FAMILIES

SPECS = {"whole": "uniform:1.0", "pre": "divprune:0.5", "llm": "fastv@llm1:0.5"}
FIRST_READ = {"lfm2_vl": "fastv@llm2:0.5"}  # its layer 0 is a convolution: no attention to read
SUPPORT = Path(__file__).parents[1] / "support"
# Modules that the suites import and the source distribution lacks.
STUBS = {
    "exporters/test_export.py": "ExportTesterMixin",
    "generation/test_utils.py": "GenerationTesterMixin",
}
SHAPE = "compares the shape of hidden states or attention with the length of the whole prompt"
REASONS = {
    "test_attention_outputs": SHAPE,
    "test_hidden_states_output": SHAPE,
}
IN_DEPTH = ("qwen3_vl",)  # the others where MMFAST_ALL_FAMILIES is set


@functools.cache
def suites() -> Path:
    """The folder that holds the package `tests` of transformers, completed by stubs."""
    given = os.environ.get("MMFAST_TRANSFORMERS")
    root = Path(given) if given else _fetched()
    for name, mixin in STUBS.items():
        stub = root / "tests" / name
        if not stub.exists():
            stub.parent.mkdir(exist_ok=True)
            (stub.parent / "__init__.py").touch()
            stub.write_text(f"class {mixin}:\n    pass\n", encoding="utf-8")
    (root / "tests" / "__init__.py").touch()
    return root


def _fetched() -> Path:
    version = transformers.__version__
    root = Path(os.environ["XDG_CACHE_HOME"]) / f"transformers-{version}"
    if not root.exists():
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:"]
        done = subprocess.run([*pip, f"transformers=={version}", "-d", root.parent], check=False)
        archive = root.parent / f"{root.name}.tar.gz"
        if done.returncode or not archive.exists():
            pytest.skip(f"the source distribution of transformers {version} cannot be had")
        with tarfile.open(archive) as packed:
            packed.extractall(root.parent, filter="data")
    return root


def outcomes(family: str, spec: str, folder: Path) -> dict[str, str]:
    """Name and outcome of every test of one run."""
    report = folder / f"{family}-{len(list(folder.iterdir()))}.xml"
    paths = [SUPPORT.parents[1], *(path for path in SUPPORT.iterdir() if path.is_dir())]
    values = {"MMFAST_SUITES": suites(), "MMFAST_FAMILY": family, "MMFAST_SPEC": spec}
    environment = {**os.environ, **{name: str(value) for name, value in values.items()}}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, paths))
    options = ["-q", "-W", "ignore", "-c", os.devnull, "-p", "no:cacheprovider", "--tb=line"]
    file = SUPPORT / "foreign" / "family_suite.py"
    command = [sys.executable, "-m", "pytest", *options, "--rootdir", file.parent, file]
    environment.pop("PYTEST_ADDOPTS", None)
    done = subprocess.run(
        [*map(str, command), f"--junitxml={report}"],
        env=environment, cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert report.exists(), done.stdout[-2000:] + done.stderr[-2000:]
    found: dict[str, str] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = {child.tag for child in case}
        name = str(case.get("name"))
        outcome = "failed" if kinds & {"failure", "error"} else "passed"
        outcome = "skipped" if "skipped" in kinds else outcome
        found[name] = "failed" if found.get(name) == "failed" else outcome
    return found


def check(family: str, folder: Path) -> None:
    stock = outcomes(family, "", folder)
    passing = {name for name, outcome in stock.items() if outcome == "passed"}
    assert len(passing) > 80
    specs = {**SPECS, "llm": FIRST_READ.get(family, SPECS["llm"])}
    for name, spec in specs.items():
        attached = outcomes(family, spec, folder)
        worse = {test for test in passing if attached.get(test) != "passed"}
        assert worse <= (set() if name == "whole" else set(REASONS)), (spec, sorted(worse))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("family", IN_DEPTH)
def test_attached_models_pass_what_the_stock_model_passes(family: str, tmp_path: Path) -> None:
    check(family, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(not os.environ.get("MMFAST_ALL_FAMILIES"), reason="MMFAST_ALL_FAMILIES=1")
@pytest.mark.parametrize("family", sorted(set(ALL_FAMILIES) - set(IN_DEPTH)))
def test_every_other_family(family: str, tmp_path: Path) -> None:
    check(family, tmp_path)


def test_the_reasoned_list_is_short() -> None:
    assert len(REASONS) <= 12 and all(REASONS.values())
