"""The site: generated pages are fresh, every page builds, the README keeps its size."""

from __future__ import annotations

import re
import subprocess
import sys
import xml.dom.minidom
from pathlib import Path

import pytest

from mmfast.bench.report import docs
from mmfast.bench.report.catalogue import ROOT, systems
from mmfast.core.errors import MmfastError
from mmfast.core.registry import get, methods

README = (ROOT / "README.md").read_text(encoding="utf-8")
KINDS = ("reducer", "cache", "prefill", "ranker")
METHODS = [method for kind in KINDS for method in methods(kind)]


def test_generated_files_are_fresh(capsys: pytest.CaptureFixture[str]) -> None:
    code = docs.main(["--check"])
    assert code == 0, capsys.readouterr().err


def test_unknown_arguments_and_folders_are_refused(tmp_path: Path) -> None:
    assert docs.main(["--force"]) == 2
    with pytest.raises(MmfastError, match=r"no README\.md"):
        docs.outputs(tmp_path)


@pytest.mark.slow
def test_the_site_builds_strictly(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    api = (tmp_path / "api.html").read_text(encoding="utf-8")
    assert "Keep everything else" in api or "attach" in api
    assert "--sort accuracy|ttft]" in (tmp_path / "commands.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("method", METHODS, ids=lambda method: f"{method.kind}-{method.name}")
def test_every_method_has_a_page_of_its_own(method: docs.Method) -> None:
    page = docs.method_page(method)
    assert 1000 <= len(page.encode()) <= 3200
    assert page.startswith(f"# `{method.name}`\n") and method.summary in page
    for knob in method.knobs:
        assert f"| `{knob}` |" in page
        described = next(line for line in page.splitlines() if line.startswith(f"| `{knob}` |"))
        assert not described.endswith("|  |"), f"{method.name}: {knob} is not described"
    links = f"`{method.paper}`", f"/abs/{method.paper}", f"openreview.net/forum?id={method.paper}"
    assert any(link in page for link in links) or not method.paper


def test_every_published_method_says_where_it_differs() -> None:
    known = docs.notes(ROOT)
    named = {f"{method.kind}/{method.name}" for method in METHODS}
    assert set(known) == named
    for method in METHODS:
        told = known[f"{method.kind}/{method.name}"]
        assert not method.paper or (told["title"] and told["differs"]), method.name


def test_a_page_of_a_method_that_left_is_named(tmp_path: Path) -> None:
    page = tmp_path / "docs" / "methods" / "reducers" / "gone.md"
    page.parent.mkdir(parents=True)
    page.write_text("# `gone`\n")
    (tmp_path / "README.md").write_text("nothing generated\n")
    assert docs.main(["--check"], tmp_path) == 1
    assert docs.main([], tmp_path) == 0 and not page.exists()


def test_figures_of_a_page_come_from_rows() -> None:
    page = docs.method_page(get("evs"))
    assert "| clips | 98.2 (96.4 to 99.1) |" in page
    assert "not measured" in docs.method_page(get("pixelprune"))


def test_the_readme_is_one_page() -> None:
    assert len(README.encode()) <= 15_000
    for table in re.findall(r"<!-- table:\w+ -->(.*?)<!-- /table", README, re.DOTALL):
        assert sum(line.startswith("|") for line in table.splitlines()) <= 2 + 12
    assert f"{len(methods('reducer'))} reducers and {len(methods('cache'))} cache" in README
    assert f"{len(systems())} published systems" in README


def test_pictures_are_well_formed() -> None:
    for path in [*(ROOT / "docs" / "images").glob("*.svg"), *ROOT.glob("assets/images/*.svg")]:
        assert xml.dom.minidom.parse(str(path)).documentElement.tagName == "svg"
