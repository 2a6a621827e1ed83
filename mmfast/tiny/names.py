"""Names of the suites of `mmfast eval`, which a command checks before it imports torch."""

from __future__ import annotations

from mmfast.core.errors import MmfastError, unknown

SUITES = ("video", "image", "multi-image", "document", "table")
OWN_SUITES = ("scenes", "stream", "present", "history", "speech", "needles")  # ask in their own way


def check_suite(name: str, own: bool = False) -> None:
    """Refuse (MmfastError) a suite that does not exist, or asks in its `own` way."""
    choices = (*SUITES, *OWN_SUITES) if own else SUITES
    if name not in choices:
        raise MmfastError(unknown("suite", name, choices))
