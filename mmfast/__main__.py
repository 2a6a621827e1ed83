"""The command `mmfast`, and `python -m mmfast`: Ctrl-C ends it even while it is imported."""

import os
import signal
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
    command()


def _leave(*_: object) -> NoReturn:
    os.write(2, b"mmfast: interrupted\n")
    os._exit(130)


if __name__ == "__main__":
    main()
