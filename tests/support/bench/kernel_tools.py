"""Gates for Triton kernels on a machine without a GPU.

`interpreted` runs code on Triton's interpreter, `compiled` makes machine code for real chips, and
`planted` runs a gate against copies of a kernel with a bug in each: a gate that lets one pass is
no gate. Each of them starts one process, because Triton reads its switches when it is imported;
so give one call much to do.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
ORACLES = ROOT / "tests" / "support" / "oracles"
CAPABILITIES = (80, 89, 90, 100, 120)

# 1. Triton 3.6 turns a loop bound into an index through an array of one element, which numpy 2.4
#    refuses; reading that element by hand is what later releases do.
# 2. The interpreter holds bfloat16 as bits and computes with them as integers, silently wrong: a
#    kernel may load, store and cast it, but not compute with it.
INTERPRETER = """
import triton.runtime.interpreter as interpreter
from triton import language as tl

patch = interpreter._patch_lang_tensor
def patched(tensor, *scope):
    patch(tensor, *scope)
    tensor.__index__ = lambda self: int(self.handle.data.reshape(-1)[0])
interpreter._patch_lang_tensor = patched

def guarded(function):
    def call(self, *arguments):
        for value in arguments:
            if getattr(value, "dtype", None) == tl.bfloat16:
                raise TypeError("bfloat16 reached arithmetic: cast it to float32 after loading")
        return function(self, *arguments)
    return call

for name in ("binary_op", "unary_op", "ternary_op", "create_dot", "create_fma"):
    function = getattr(interpreter.InterpreterBuilder, name)
    setattr(interpreter.InterpreterBuilder, name, guarded(function))
"""

# A module of kernels from a file of our choice, under its usual name.
_LOAD = """
import importlib.util, sys

def load(name, path):
    import mmfast.kernels
    spec = importlib.util.spec_from_file_location("mmfast.kernels." + name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    setattr(mmfast.kernels, name, module)
    spec.loader.exec_module(module)
    return module
"""

_PLANTED = """
import json, sys, traceback

code, name, paths = json.loads(sys.stdin.read())
results = []
for path in paths:
    try:
        load(name, path)
        exec(compile(code, "<gate>", "exec"), {"__name__": "gate"})
        results.append("passed")
    except BaseException:
        results.append(traceback.format_exc())
print("RESULTS" + json.dumps(results))
"""

_COMPILE = """
import pickle, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

module, jobs, out = pickle.load(sys.stdin.buffer)
kernels = {file: load(module, file) for file in {job["file"]: 0 for job in jobs}}
results = []
for job in jobs:
    fn = getattr(kernels[job["file"]], job["fn"])
    constexprs = job.get("constexprs", {})
    signature = {k: "constexpr" if k in constexprs else job["signature"][k] for k in fn.arg_names}
    aligned = {(fn.arg_names.index(k),): [["tt.divisibility", 16]] for k in job.get("aligned", ())}
    made = triton.compile(
        ASTSource(fn=fn, signature=signature, constexprs=constexprs, attrs=aligned),
        target=GPUTarget("cuda", job["capability"], 32),
        options={k: job[k] for k in ("num_warps", "num_stages", "maxnreg") if k in job},
    )
    results.append((made.asm["cubin"], made.asm["ptx"], made.metadata.shared))
with open(out, "wb") as file:
    pickle.dump(results, file)
"""


@dataclass(frozen=True)
class Binary:
    """One kernel as machine code."""

    label: str
    registers: int
    stack: int
    local: int
    shared: int  # bytes of shared memory
    sass: str
    ptx: str


def python(code: str, *arguments: str, **environment: str) -> str:
    """Run code in a process of its own, which has to succeed; returns what it printed."""
    run = _process(code, arguments, environment)
    assert run.returncode == 0, run.stderr.decode()
    return run.stdout.decode()


def interpreted(code: str) -> str:
    """Run code where Triton kernels are interpreted on the host; returns what it printed."""
    return python(INTERPRETER + code, TRITON_INTERPRET="1")


def compiled(module: str, jobs: Sequence[Mapping[str, Any]]) -> list[Binary]:
    """Compile kernels of `mmfast.kernels.<module>` for real chips, all in one process.

    Args:
        module: Name of the file in `kernels/`, without suffix.
        jobs: Each a mapping with `fn` (name of the jitted function), `signature` (argument to
            Triton type, such as "*bf16", "i32"), `constexprs`, `capability` (90 and so on) and
            optionally `num_warps`, `num_stages`, `maxnreg`, `aligned`, the names of pointers
            and integers that are multiples of 16, as a launch finds out by itself, and `file`,
            another file with the module's text, as `edited` makes it.
    """
    usual = ROOT / "kernels" / f"{module}.py"
    work = [{**job, "file": str(job.get("file", usual))} for job in jobs]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "binaries"
        data = pickle.dumps((module, work, str(out)))
        run = _process(_LOAD + _COMPILE, (), {"TRITON_CACHE_DIR": folder}, data)
        assert run.returncode == 0, run.stderr.decode()
        made = pickle.loads(out.read_bytes())
    return [_binary(job, *parts) for job, parts in zip(jobs, made, strict=True)]


def edited(module: str, old: str, new: str, folder: Path) -> Path:
    """A copy of a kernel file in `folder` with a text that occurs once replaced by another."""
    text = (ROOT / "kernels" / f"{module}.py").read_text(encoding="utf-8")
    assert text.count(old) == 1, f"{text.count(old)} times in kernels/{module}.py: {old!r}"
    path = folder / f"{module}_{len(list(folder.iterdir()))}.py"
    path.write_text(text.replace(old, new), encoding="utf-8")
    return path


def planted(
    module: str, code: str, *bugs: tuple[str, str], because: str = "AssertionError"
) -> None:
    """Every bug has to fail the gate: `code`, interpreted, against the kernel with that bug.

    All run in one process, the kernel without a bug first: that one has to pass.

    Args:
        module: Name of the file in `kernels/`, without suffix.
        code: The gate, as `interpreted` runs it; it imports the kernel itself.
        bugs: Texts that occur once in the file, and what to put in their place.
        because: What the failure has to say. A bug that does not even run proves nothing.
    """
    with tempfile.TemporaryDirectory() as folder:
        kernel = ROOT / "kernels" / f"{module}.py"
        files = [kernel, *(edited(module, old, new, Path(folder)) for old, new in bugs)]
        data = json.dumps([code, module, [str(file) for file in files]]).encode()
        switch = {"TRITON_INTERPRET": "1"}
        run = _process(INTERPRETER + _LOAD + _PLANTED, (), switch, data)
    assert run.returncode == 0, run.stderr.decode()
    sound, *broken = json.loads(run.stdout.decode().rpartition("RESULTS")[2])
    assert sound == "passed", sound
    for (old, new), result in zip(bugs, broken, strict=True):
        assert because in result, f"{old!r} -> {new!r} was not caught: {result}"


def assert_clean(binary: Binary) -> None:
    """Nothing of a program's values lives outside its registers."""
    assert binary.stack == binary.local == 0, (binary.label, binary.registers, binary.stack)
    assert not re.search(r"\b(STL|LDL)\b", binary.sass), binary.label


def has_wide_loads(binary: Binary) -> bool:
    """Whether global memory is read 16 bytes at a time, directly, asynchronously or by TMA."""
    wide = r"\bLDG\.E(\.\w+)*\.128|\bLDGSTS\.E(\.\w+)*\.128|\bUTMALDG|\bUBLKCP"
    return re.search(wide, binary.sass) is not None


def has_tensor_cores(binary: Binary) -> bool:
    """Whether matrix products run on tensor cores."""
    return re.search(r"\b(HGMMA|UTC\w*MMA|HMMA|QGMMA|IMMA)\b", binary.sass) is not None


def _process(
    code: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    data: bytes | None = None,
) -> subprocess.CompletedProcess[bytes]:
    clean = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    with tempfile.TemporaryDirectory() as folder:
        # From a file: the kernels are compiled from their source text, and so is code in a file.
        script = Path(folder) / "script.py"
        script.write_text(code, encoding="utf-8")
        here = os.pathsep.join([str(ROOT), str(ORACLES), *filter(None, [clean.get("PYTHONPATH")])])
        return subprocess.run(
            [sys.executable, str(script), *arguments],
            cwd=ROOT,
            env=clean | {"OMP_NUM_THREADS": "1", "PYTHONPATH": here} | dict(environment),
            input=data,
            capture_output=True,
            timeout=300,
        )


def _binary(job: Mapping[str, Any], cubin: bytes, ptx: str, shared: int) -> Binary:
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, sass = (
            subprocess.run(
                [tools / "cuobjdump", flag, file.name], capture_output=True, text=True, check=True
            ).stdout
            for flag in ("-res-usage", "-sass")
        )
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    assert found, usage
    registers, stack, local = map(int, found.groups())
    label = f"{job['fn']} sm_{job['capability']} {job.get('constexprs', {})}"
    return Binary(label, registers, stack, local, shared, sass, ptx)
