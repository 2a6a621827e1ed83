"""Files that appear whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from mmfast.core.errors import MmfastError


@contextmanager
def whole_file(
    path: str | os.PathLike[str], kind: type[MmfastError] = MmfastError
) -> Iterator[Path]:
    """Yield a name beside `path`; what the block writes there takes its place at the end.

    An error of `kind` where the disk is full or the folder cannot be written; what was there
    before stays then, and after every other exception.
    """
    target = Path(path)
    if (target.exists() and not target.is_file()) or not os.access(target.parent, os.W_OK):
        yield target  # a device or a pipe; or a file that may be written, but not its folder
        return
    real = target.resolve()  # of a link its end
    draft = real.with_name(f".{real.name}.{os.getpid()}.part")
    try:
        yield draft
        draft.replace(real)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise kind(
            f"{str(target)!r} cannot be written: {reason}; make room, or name another file"
        ) from None
    finally:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
