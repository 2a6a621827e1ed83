"""Pipecat's own service of the Realtime API against `mmfast serve`, with the embedded models.

`MMFAST_PIPECAT_ENV` names an environment with `pipecat-ai[openai]`; without it, one is made and
filled from PyPI, and the tests are skipped where that cannot be done.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from serve_tools import python_with, serving

from mmfast.ops.audio import resample
from mmfast.tiny.speech.recordings import say

SCRIPT = Path(__file__).resolve().parents[2] / "support" / "serve" / "pipecat_client.py"
PACKAGE = "pipecat-ai[openai]"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of the client."""
    return python_with("MMFAST_PIPECAT_ENV", [PACKAGE], tmp_path_factory.mktemp("pipecat"))


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving("--voice", MMFAST_API_KEY="sk-test") as (_, found):
        yield found.replace("http", "ws", 1) + "/v1/realtime"


@pytest.mark.parametrize("kind", ["audio", "text"])
def test_pipecat_talks(kind: str, url: str, python: Path, tmp_path: Path) -> None:
    pcm = resample(say("what colour is the circle?").pcm, 16000, 24000)
    file = tmp_path / "question.pcm"
    file.write_bytes((pcm * 32767).round().to(torch.int16).numpy().tobytes())
    plain = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [python, str(SCRIPT), url, "sk-test", str(file), kind],
        env=plain,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1].startswith("ok ")
    print(done.stdout.splitlines()[-1])
