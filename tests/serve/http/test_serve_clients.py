"""Foreign clients against `mmfast serve` with the embedded model, each with its own example.

They live in an environment of their own: `MMFAST_CLIENTS_ENV` names one that has them
(openai openai-agents langchain-openai litellm instructor pydantic-ai-slim[openai]); without it, one
is made and filled from PyPI, and the tests are skipped where that cannot be done.
"""

from __future__ import annotations

import os
import subprocess
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("llguidance")

from serve_tools import serving

SCRIPT = Path(__file__).resolve().parents[2] / "support" / "serve" / "foreign_clients.py"
PACKAGES = ("openai", "openai-agents", "langchain-openai", "litellm", "instructor")
PACKAGES += ("pydantic-ai-slim[openai]",)
CLIENTS = ("openai_chat", "openai_responses", "openai_agents", "langchain_openai", "litellm")
CLIENTS += ("instructor", "pydantic_ai")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of the clients."""
    if named := os.environ.get("MMFAST_CLIENTS_ENV"):
        found = Path(named) / "bin" / "python"
        if not found.exists():
            pytest.fail(f"MMFAST_CLIENTS_ENV={named} has no bin/python")
        return found
    folder = tmp_path_factory.mktemp("clients")
    venv.create(folder, with_pip=True)
    found = folder / "bin" / "python"
    for wanted in (["uv"], PACKAGES):
        tool = ["-m", "uv", "pip", "install", "--python", str(found)]
        tool = tool if wanted is PACKAGES else ["-m", "pip", "install"]
        done = subprocess.run(
            [found, *tool, "-q", *wanted], capture_output=True, text=True, timeout=600, check=False
        )
        if done.returncode:
            pytest.skip(f"{', '.join(wanted)} cannot be installed: {done.stderr.strip()[-200:]}")
    return found


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(MMFAST_API_KEY="sk-test") as (_, found):
        yield found


@pytest.mark.parametrize("name", CLIENTS)
def test_a_client_runs_its_own_example(name: str, url: str, python: Path) -> None:
    plain = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [python, str(SCRIPT), name, url],
        env=plain,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1].startswith("ok ")
    print(done.stdout.splitlines()[-1])
