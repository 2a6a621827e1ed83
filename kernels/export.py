"""Write the kernels as a repository of Hugging Face's `kernels` package: `python -m` this module.

The folder holds the sources for its builder (`build.toml`, `torch-ext/`) and the built variant
that `get_kernel` and `get_local_kernel` load (`build/torch-universal/`: Python without binaries).
"""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

NAME = "mmfast-kernels"
VERSION = 1
KERNELS = (
    "attention_column_sums",
    "max_min_select",
    "segment_merge",
    "selected_attention",
    "temporal_difference",
)
_SELF = Path(__file__).resolve()

_INIT = '''"""Triton kernels of mmfast: attention, farthest points, merges, changes over time."""

{imports}

__all__ = {names}
'''
_BUILD = """[general]
name = "{name}"
version = {version}
edition = 5
license = "Apache-2.0"
backends = ["cuda"]

[general.hub]
repo-id = "{repo}"

[torch-noarch]
"""
_CARD = """---
license: apache-2.0
library_name: kernels
tags:
- kernels
---

# {name}

Triton kernels of mmfast, without a dependency on it. They run on NVIDIA GPUs, and on the CPU under
`TRITON_INTERPRET=1`.

```python
from kernels import get_kernel

mmfast_kernels = get_kernel("{repo}", version={version}, trust_remote_code=True)
sums = mmfast_kernels.attention_column_sums(query, key, lse, scale)  # [B, H, S]
```

| function | computes |
|---|---|
| `attention_column_sums` | attention that each key receives, `[B, H, S]`, without the weights |
| `max_min_select` | indices of farthest points, `[B, count]`, from similarities `[B, N, N]` |
| `segment_merge` | sums or means of rows by segment, `[B, M, D]`, without atomics |
| `selected_attention` | attention of one query to chosen entries of a cache, `[B, Hq, 1, w]` |
| `temporal_difference` | cosines, differences and lengths of patches over time, `[F, n]` |

Docstrings give shapes, types and errors.
"""


def export(target: str | Path, repo: str = f"mmfast/{NAME}") -> Path:
    """Write the repository to a new or empty folder and return it; `repo` is its name on the Hub.

    A ValueError says that the folder has files, or that the license of mmfast is missing.
    """
    folder = Path(target)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{str(folder)!r} has files; give a new or empty folder")
    text = _license()
    package = NAME.replace("-", "_")
    for place in (folder / "torch-ext" / package, folder / "build" / "torch-universal"):
        place.mkdir(parents=True)
        for kernel in KERNELS:
            source = _SELF.with_name(f"{kernel}.py").read_text(encoding="utf-8")
            (place / f"{kernel}.py").write_text(source, encoding="utf-8")
        imports = "\n".join(f"from .{each} import {each}" for each in KERNELS)
        listed = _INIT.format(imports=imports, names=json.dumps(KERNELS))
        (place / "__init__.py").write_text(listed, encoding="utf-8")
    about = {"id": f"_{package}_{VERSION}", "name": NAME, "version": VERSION}
    about |= {"license": "Apache-2.0", "python-depends": [], "backend": {"type": "cuda"}}
    contents = {
        "build/torch-universal/metadata.json": json.dumps(about, indent=2) + "\n",
        "build.toml": _BUILD.format(name=NAME, version=VERSION, repo=repo),
        "README.md": _CARD.format(name=NAME, version=VERSION, repo=repo),
        "LICENSE": text,
    }
    for name, content in contents.items():
        (folder / name).write_text(content, encoding="utf-8")
    return folder


def _license() -> str:
    """Return the license, of a checkout or of the installed package."""
    found = [_SELF.parents[1] / "LICENSE"]
    with suppress(PackageNotFoundError):
        found += [Path(str(e.locate())) for e in files("mmfast") or () if e.name == "LICENSE"]
    for path in found:
        if path.is_file():
            return path.read_text(encoding="utf-8")
    raise ValueError("the LICENSE of mmfast is missing; install mmfast again")


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit("give a folder, and the name on the Hub: DIR [OWNER/NAME]")
    try:
        print(export(*sys.argv[1:]))
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        sys.exit(2)
