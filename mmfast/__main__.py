"""The command `mmfast`, and `python -m mmfast`: Ctrl-C ends it even while it is imported."""

import atexit
import os
import signal
import sys
import threading
from typing import NoReturn


def main() -> None:
    """Import and run the command."""
    # Inside an import, KeyboardInterrupt may come out as another exception, or in a traceback.
    own = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if own:
        signal.signal(signal.SIGINT, _leave)
    from mmfast.cli import main as command

    if own:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        command()
    except SystemExit as end:
        # torch, cut short in a thread that still loads a model, would abort the interpreter
        if any(each.name == "mmfast-load" for each in threading.enumerate()):
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr)
            sys.stdout.flush()
            sys.stderr.flush()
            atexit._run_exitfuncs()
            os._exit(end.code if isinstance(end.code, int) else int(end.code is not None))
        raise


def _leave(*_: object) -> NoReturn:
    os.write(2, b"mmfast: interrupted\n")
    os._exit(130)


if __name__ == "__main__":
    main()
