"""`mmfast` and Python code in processes that fork from one which has imported everything.

Imports take most of a short command: a page of commands runs three times as fast. The programs that
`warm` makes are called as any other, from a shell too; each call is a process of its own, with the
arguments, folder, environment, input and output of its caller.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CLIENT = """#!{python} -SE
import json, os, socket, sys
line = socket.socket(socket.AF_UNIX)
line.connect({address!r})
told = {{"argv": [{name!r}, *sys.argv[1:]], "folder": os.getcwd(), "environ": dict(os.environ)}}
data = json.dumps(told).encode()
socket.send_fds(line, [len(data).to_bytes(8, "big")], [0, 1, 2])
line.sendall(data)
sys.exit(int(line.recv(16) or b"70"))
"""


@contextmanager
def warm(folder: Path) -> Iterator[None]:
    """Make the programs `mmfast` and `python` in a folder, which work until the end."""
    address = str(folder / "line")
    for name in ("mmfast", "python"):
        program = folder / name
        program.write_text(CLIENT.format(python=sys.executable, address=address, name=name))
        program.chmod(0o755)
    with subprocess.Popen([sys.executable, __file__, address]) as process:
        try:
            while not Path(address).exists():
                assert process.poll() is None, "the warm process ended"
                time.sleep(0.1)
            yield
        finally:
            process.kill()


def _serve(address: str) -> None:
    import mmfast

    mmfast.pipeline("image-qa")  # loads what transformers imports when it is asked for
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as line:
        line.bind(address + ".new")
        line.listen(64)
        Path(address + ".new").rename(address)
        while True:
            call, _ = line.accept()
            if os.fork() == 0:
                line.close()
                _answer(call)
            call.close()


def _answer(call: socket.socket) -> None:
    """Run what a caller asks for, and end this process."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    head, files, _, _ = socket.recv_fds(call, 8, 3)
    for number, file in enumerate(files):
        os.dup2(file, number)
    data, size = b"", int.from_bytes(head, "big")
    while len(data) < size:
        data += call.recv(size - len(data))
    told = json.loads(data)
    os.chdir(told["folder"])
    os.environ.clear()
    os.environ.update(told["environ"])
    code = _code_of(told["argv"])
    sys.stdout.flush()
    sys.stderr.flush()
    call.sendall(str(code).encode())
    os._exit(code)


def _code_of(argv: list[str]) -> int:
    """Return the exit status of a call of `mmfast ...`, `python -c CODE` or `python -m MODULE`."""
    try:
        sys.argv = argv
        if argv[0] == "mmfast":
            from mmfast.cli import main

            main()
        elif argv[1] == "-m":
            sys.argv = argv[2:]
            runpy.run_module(argv[2], run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, "")
            exec(compile(argv[2], "<page>", "exec"), {"__name__": "__main__"})
        atexit._run_exitfuncs()
    except SystemExit as end:
        atexit._run_exitfuncs()
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    _serve(sys.argv[1])
