"""Messages on one line, and a fence that turns a decoder's exceptions into them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mmfast.core.errors import MediaError, MmfastError


class Mismatch(Exception):  # noqa: N818 - a change of plan, never seen by a caller
    """A decoder did not give the frames that the packets promised."""


class Damage(Mismatch):
    """... because it is damaged: what follows depends on how a decoder conceals that."""


def quote(text: object) -> str:
    """Quote a value for a message: one line, at most 200 characters."""
    shown = repr(str(text))
    return shown if len(shown) <= 200 else shown[:160] + "..." + shown[-30:]


def first_line(error: BaseException) -> str:
    """Give an exception's reason as one short line."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return " ".join(str(text).split())[:160]


@contextmanager
def refusing(name: str, doing: str = "decoded") -> Iterator[None]:
    """Turn whatever a decoder raises on broken input into a one-line `MediaError`."""
    try:
        yield
    except (MmfastError, Mismatch):
        raise
    except Exception as error:  # garbage makes decoders raise nearly anything, MemoryError too
        raise MediaError(
            f"{name} cannot be {doing} ({first_line(error)}): it is damaged or not what its "
            f"header says; re-encode or download it again"
        ) from error
