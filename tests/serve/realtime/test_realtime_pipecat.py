"""Pipecat's own service of the Realtime API against `mmfast serve`, with the embedded models.

`MMFAST_PIPECAT_ENV` names an environment with `pipecat-ai[openai]`; without it, one is made and
filled from PyPI, and the tests are skipped where that cannot be done.
"""

from __future__ import annotations

import os
import subprocess
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from serve_tools import serving

from mmfast.ops.audio import resample
from mmfast.tiny.speech.recordings import say

SCRIPT = Path(__file__).resolve().parents[2] / "support" / "serve" / "pipecat_client.py"
PACKAGE = "pipecat-ai[openai]"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of the client."""
    if named := os.environ.get("MMFAST_PIPECAT_ENV"):
        found = Path(named) / "bin" / "python"
        if not found.exists():
            pytest.fail(f"MMFAST_PIPECAT_ENV={named} has no bin/python")
        return found
    folder = tmp_path_factory.mktemp("pipecat")
    venv.create(folder, with_pip=True)
    found = folder / "bin" / "python"
    call = [found, "-m", "pip", "install", "-q", PACKAGE]
    done = subprocess.run(call, capture_output=True, text=True, timeout=800, check=False)
    if done.returncode:
        pytest.skip(f"{PACKAGE} cannot be installed: {done.stderr.strip()[-200:]}")
    return found


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
