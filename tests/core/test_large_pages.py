"""Memory in large pages: what torch takes is not touched page by page."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mmfast.core.large_pages import LARGE_PAGES, use_large_pages

SYSTEM = Path("/sys/kernel/mm/transparent_hugepage/enabled")
FAULTS = (
    "import resource, torch\n"
    "count = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
    "before = count()\n"
    "torch.ones(1 << 24)\n"
    "print(count() - before)"
)


def _faults(code: str) -> int:
    kept = {k: v for k, v in os.environ.items() if k != LARGE_PAGES}
    command = [sys.executable, "-c", code + FAULTS]
    return int(subprocess.run(command, env=kept, check=True, capture_output=True).stdout)


@pytest.mark.skipif(
    not SYSTEM.is_file() or "[madvise]" not in SYSTEM.read_text(),
    reason="the system gives no large pages, or gives them to all",
)
def test_tensors_of_megabytes_come_in_large_pages() -> None:
    lines = "from mmfast.core.large_pages import use_large_pages\nuse_large_pages()\n"
    plain = _faults("")
    assert _faults(lines) < plain / 4 and plain > 10_000
    # An import of torch before it takes nothing yet.
    assert _faults("import torch, mmfast.pipelines.registry\n" + lines) < plain / 4


def test_what_a_user_has_set_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LARGE_PAGES, "0")
    use_large_pages()
    assert os.environ[LARGE_PAGES] == "0"
