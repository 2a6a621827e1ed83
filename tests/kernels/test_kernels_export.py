"""The repository of Hugging Face's `kernels` package: its layout, and slow runs of that package."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from mmfast.kernels import export

_LOADED = """
import sys
from pathlib import Path
from kernels import get_local_kernel
import torch

ours = get_local_kernel(Path(sys.argv[1]))
torch.manual_seed(0)
x = torch.randn(1, 9, 16)
offsets, source = torch.tensor([[0, 3, 9]]).int(), torch.randperm(9)[None].int()
rows = x[0, source[0].long()].double()
found = ours.segment_merge(x, offsets, source, None, mean=True)
torch.testing.assert_close(found[0].double(), torch.stack([rows[:3].mean(0), rows[3:].mean(0)]))
query, key = torch.randn(1, 2, 5, 16), torch.randn(1, 1, 7, 16)
logits = query.double() @ key.double().transpose(2, 3) / 4
lse = logits.logsumexp(-1).float()
found = ours.attention_column_sums(query, key, lse, 0.25)
torch.testing.assert_close(found.double(), logits.softmax(-1).sum(2), rtol=1e-4, atol=1e-5)
clip = torch.randn(4, 3, 16)
cosine, l1, norm = ours.temporal_difference(clip, [4])
wide = clip.double()
expected = torch.cosine_similarity(wide[1:], wide[:-1], dim=-1)
torch.testing.assert_close(cosine[1:], expected, rtol=1e-5, atol=1e-6)
torch.testing.assert_close(l1[1:].double(), wide.diff(dim=0).abs().mean(-1))
torch.testing.assert_close(norm.double(), wide.norm(dim=-1))
table = torch.randn(1, 9, 9)
picks, nearest = [2], table[0, 2].double()
while len(picks) < 4:
    nearest[picks] = torch.inf
    picks.append(int(nearest.argmin()))
    nearest = nearest.maximum(table[0, picks[-1]].double())
assert ours.max_min_select(table, torch.tensor([2]), 4)[0].tolist() == picks
index = torch.tensor([[[5, 1, 2]]])
keys, values = torch.randn(1, 1, 7, 16), torch.randn(1, 1, 7, 16)
found = ours.selected_attention(query[:, :, :1], keys, values, index, 0.25)
chosen_keys, chosen = (x[:, :, [5, 1, 2]].double() for x in (keys, values))
expected = (query[:, :, :1].double() @ chosen_keys.mT / 4).softmax(-1) @ chosen
torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)
print("all five")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return export.export(tmp_path / "out", "me/mine")


def test_the_layout(folder: Path) -> None:
    built, package = folder / "build" / "torch-universal", folder / "torch-ext" / "mmfast_kernels"
    names = {f"{kernel}.py" for kernel in export.KERNELS} | {"__init__.py"}
    assert {path.name for path in package.iterdir()} == names
    assert {path.name for path in built.iterdir()} == names | {"metadata.json"}
    general = tomllib.loads((folder / "build.toml").read_text())["general"]
    about = json.loads((built / "metadata.json").read_text())
    assert (general["name"], general["version"]) == (about["name"], about["version"])
    assert (
        general["hub"]["repo-id"] == "me/mine" and "me/mine" in (folder / "README.md").read_text()
    )
    root = Path(export.__file__).parents[1]
    assert (folder / "LICENSE").read_text() == (root / "LICENSE").read_text()
    every = {path.stem for path in (root / "kernels").glob("*.py")} - {"export"}
    assert every == set(export.KERNELS)


def test_every_file_imports_torch_triton_and_its_neighbours_only(folder: Path) -> None:
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level:
                assert node.level == 1 and node.module in export.KERNELS
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                names = (
                    [node.module]
                    if isinstance(node, ast.ImportFrom)
                    else [a.name for a in node.names]
                )
                for name in names:
                    top = str(name).partition(".")[0]
                    assert top in {"torch", "triton"} or top in sys.stdlib_module_names


def test_a_folder_with_files_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="new or empty"):
        export.export(folder)


def test_a_folder_that_cannot_be_written_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    command = [sys.executable, str(export.__file__), str(tmp_path / "file" / "out")]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 2 and len(ran.stderr.splitlines()) == 1
    assert "Not a directory" in ran.stderr and "file/out" in ran.stderr


@pytest.mark.slow
def test_the_package_loads_and_runs_all(folder: Path) -> None:
    try:
        from kernels import get_local_kernel  # noqa: F401, TID251
        from kernels._rust import Build  # noqa: TID251
    except ImportError:
        pytest.skip("needs Hugging Face's package kernels")
    assert Build.open(folder).general.backends
    given = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-W", "ignore", "-c", _LOADED, str(folder)]
    run = subprocess.run(command, capture_output=True, text=True, env=given, check=False)
    assert run.returncode == 0 and "all five" in run.stdout, run.stderr
