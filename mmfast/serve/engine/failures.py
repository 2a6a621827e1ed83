"""What is told of an answer that cannot be given, and what is kept for the log."""

from __future__ import annotations

import logging

from mmfast.core.errors import MmfastError, ModelError
from mmfast.serve.engine.base import BusyError, Failure

LOG = logging.getLogger("mmfast.serve")


class NoTokenError(ModelError):
    """The model gave no numbers that a token can be chosen by."""


def failure(error: BaseException, request: str = "", logged: bool = False) -> Failure:
    """The last event of an answer that failed.

    A request that is wrong is told so. Whatever else went wrong is not the request's fault, and
    its text may hold anything, paths too: it is for the log alone.

    Args:
        error: What was raised.
        request: Its id.
        logged: It is in the log already.
    """
    if isinstance(error, BusyError):
        return Failure(str(error), 503, "busy")
    if isinstance(error, MmfastError) and not isinstance(error, ModelError):
        return Failure(str(error), 400, "invalid_request_error")
    if not logged:
        LOG.error("request %s failed", request, exc_info=error)
    if isinstance(error, NoTokenError):
        text = "the model gave NaN or infinite logits, so no token can be chosen"
        return Failure(f"{text}; ask something else", 500, "model_error")
    if isinstance(error, ModelError):
        text = "the model failed on this request; the server's log says why"
        return Failure(text, 500, "model_error")
    return Failure(f"the engine failed on this request ({type(error).__name__})")
