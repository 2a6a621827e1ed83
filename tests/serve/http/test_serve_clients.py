"""Foreign clients against `mmfast serve` with the embedded model, each with its own example.

They live in an environment of their own: `MMFAST_CLIENTS_ENV` names one that has them
(openai openai-agents langchain-openai litellm instructor pydantic-ai-slim[openai]); without it, one
is made and filled from PyPI, and the tests are skipped where that cannot be done.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("llguidance")

from serve_tools import python_with, serving

SCRIPT = Path(__file__).resolve().parents[2] / "support" / "serve" / "foreign_clients.py"
PACKAGES = ("openai", "openai-agents", "langchain-openai", "litellm", "instructor")
PACKAGES += ("pydantic-ai-slim[openai]",)
CLIENTS = ("openai_chat", "openai_responses", "openai_agents", "langchain_openai", "litellm")
CLIENTS += ("instructor", "pydantic_ai")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of the clients."""
    return python_with("MMFAST_CLIENTS_ENV", PACKAGES, tmp_path_factory.mktemp("clients"))


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
