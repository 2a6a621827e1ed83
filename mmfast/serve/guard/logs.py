"""Logs of the server, as text or JSON lines, without keys, media, or text of users by default."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any, TextIO

from mmfast.serve.config import ServerConfig

ACCESS = logging.getLogger("mmfast.serve.access")
_IN_MESSAGE = ("method", "path", "status")
_HIDDEN = "<key>"
# Record of uvicorn for each handshake that was answered with an HTTP error.
_REFUSED = "ASGI callable returned without completing handshake."
_LONGEST = 16_000  # letters of a record


class _Handler(logging.StreamHandler[TextIO]):
    """Removes keys from all records, also from those of libraries and from tracebacks."""

    def __init__(self, config: ServerConfig) -> None:
        super().__init__(sys.stderr)
        self._keys = [key for key in config.api_keys if len(key) >= 4]
        self.setFormatter(JsonFormatter() if config.json_logs else TextFormatter())
        self.addFilter(lambda record: record.msg != _REFUSED)

    def format(self, record: logging.LogRecord) -> str:
        out = super().format(record)
        for key in self._keys:
            out = out.replace(key, _HIDDEN)
        return out[:_LONGEST]


class TextFormatter(logging.Formatter):
    """Text such as `12:00:01 info  POST /v1/chat/completions 200 id=… ms=41.2`."""

    def format(self, record: logging.LogRecord) -> str:
        """Format a record as a line with the traceback below it."""
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        fields = fields_of(record).items()
        more = " ".join(
            f"{k}={_one_line(str(v))}" for k, v in fields if v is not None and k not in _IN_MESSAGE
        )
        line = f"{clock} {record.levelname.lower():7} {_one_line(record.getMessage())} {more}"
        trace = self.formatException(record.exc_info) if record.exc_info else ""
        return line.rstrip() + ("\n" + trace if trace else "")


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """Format a record as JSON."""
        out: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **fields_of(record),
        }
        if record.exc_info:
            out["trace"] = self.formatException(record.exc_info)
        return json.dumps({k: v for k, v in out.items() if v is not None}, default=str)


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """Return the fields of a record, from `extra={"fields": {...}}`."""
    found = getattr(record, "fields", None)
    return dict(found) if isinstance(found, dict) else {}


def set_up(config: ServerConfig) -> logging.Handler:
    """Send the logs of the server and of uvicorn to stderr; a second call replaces the first."""
    handler = _Handler(config)
    for name in ("mmfast", "uvicorn", "uvicorn.error"):
        logger = logging.getLogger(name)
        for old in [h for h in logger.handlers if isinstance(h, _Handler)]:
            logger.removeHandler(old)
        logger.setLevel(config.log_level.upper() if name == "mmfast" else logging.WARNING)
        if name != "uvicorn.error":  # its records propagate to "uvicorn"
            logger.addHandler(handler)
            logger.propagate = False
    return handler


def text(value: str, config: ServerConfig) -> str:
    """Return a question or an answer for the log: its length only, unless `log_text` is set."""
    return _one_line(value) if config.log_text else f"<{len(value)} letters>"


def request(quiet: bool, method: str, path: str, status: int, fields: dict[str, Any]) -> None:
    """Log one line for a request that has ended."""
    level = logging.DEBUG if quiet else logging.INFO
    if ACCESS.isEnabledFor(level):
        more = {"method": method, "path": path[:200], "status": status, **fields}
        shown = _one_line(f"{method} {path[:200]} {status}")
        ACCESS.log(level, "%s", shown, extra={"fields": more})


def _one_line(value: str) -> str:
    """Escape line breaks, so that text of a client cannot imitate a line of the log."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in value)
