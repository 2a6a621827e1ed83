"""Benchmarks of a plain installation: only what needs a further package asks for it."""

from __future__ import annotations

import subprocess
import sys
import textwrap

# Packages of `[ray]`, `[serve]` and `[test]` that a plain installation does not have.
RAY = ("pyarrow", "ray")
SERVE = ("fastapi", "uvicorn", "pydantic", "httpx", "cachetools", "llguidance", "prometheus_client")
TEST = ("pytest", "hypothesis", "scipy", "peft", "psutil", "matplotlib", "gradio")


def without(packages: tuple[str, ...], code: str) -> str:
    """Output of code in a process that does not find these packages."""
    head = f"""
        from importlib.machinery import PathFinder

        stock = PathFinder.find_spec

        def found(name, path=None, target=None):
            return None if name.partition(".")[0] in {packages!r} else stock(name, path, target)

        PathFinder.find_spec = staticmethod(found)
        from mmfast.bench.registry import SUITES, named_rows, names
        from mmfast.core.errors import MmfastError
    """
    script = textwrap.dedent(head) + textwrap.dedent(code)
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout


LIST = """
    for suite in SUITES:
        try:
            names(suite)
        except MmfastError as error:
            print(error)
"""


def test_suites_ask_for_no_package_that_they_do_not_use() -> None:
    assert without((*RAY, *TEST), LIST) == ""
    told = without((*RAY, *SERVE, *TEST), LIST).splitlines()
    assert [line.partition(" needs")[0] for line in told] == ["--serve"]
    assert 'which is not installed: pip install "mmfast[test]"' in told[0]


def test_a_benchmark_that_lacks_a_package_names_it_in_one_line() -> None:
    """As `mmfast batch` does, whose answers are a Parquet file."""
    told = without(
        RAY,
        """
        try:
            named_rows("serve", "batch")
        except MmfastError as error:
            print(error)
        """,
    )
    assert told == (
        '--serve batch needs pyarrow, which is not installed: pip install "mmfast[test]"\n'
    )
