"""The command `mmfast`, and `python -m mmfast`: Ctrl-C ends it even while it is imported."""

import atexit
import os
import signal
import sys
import threading
from typing import NoReturn


def main() -> None:
    """Import and run the command."""
    codes: list[int] = []
    atexit.register(_end, codes)  # before what the imports register, so that it runs behind that
    # Inside an import, KeyboardInterrupt may come out as another exception, or in a traceback.
    own = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if own:
        signal.signal(signal.SIGINT, _leave)
    from mmfast.cli import main as command
    from mmfast.core.large_pages import use_large_pages

    use_large_pages()

    if own:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        command()
    except SystemExit as end:
        codes.append(end.code if isinstance(end.code, int) else int(end.code is not None))
        raise


def _end(codes: list[int]) -> None:
    """End the process where torch would abort it, cut short in a thread that loads a model."""
    if codes and any(each.name == "mmfast-load" for each in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(codes[0])


def _leave(*_: object) -> NoReturn:
    os.write(2, b"mmfast: interrupted\n")
    os._exit(130)


if __name__ == "__main__":
    main()
