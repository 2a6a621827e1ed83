"""How much visitors may leave on the disk: the oldest of it goes when there is more."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from starlette.responses import PlainTextResponse

MOST = 1 << 30  # bytes of all files of visitors
AT_ONCE = 64 << 20  # bytes of one upload, and of one that does not say how long it is none


class UploadQuota:
    """ASGI middleware in front of uploads: bounds each of them, and all that lie there.

    Args:
        app: What it stands before.
        path: Where the page is mounted.
        blocks: The page, which knows the files that came through it.
        most: Bytes of all files.
        at_once: Bytes of one upload.
    """

    def __init__(
        self, app: Any, path: str, blocks: Any, most: int = MOST, at_once: int = AT_ONCE
    ) -> None:
        self._app, self._blocks, self._most, self._at_once = app, blocks, most, at_once
        self._path = path.rstrip("/") + "/"

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """One request, connection or life."""
        if not self._uploads(scope):
            await self._app(scope, receive, send)
            return
        length = dict(scope["headers"]).get(b"content-length", b"")
        if not length.isdigit() or int(length) > self._at_once:
            text = f"an upload has up to {self._at_once >> 20} MB, and says how many"
            await PlainTextResponse(text, 413)(scope, receive, send)
            return
        try:
            await self._app(scope, receive, send)
        finally:
            await asyncio.to_thread(self.sweep)

    def _uploads(self, scope: Any) -> bool:
        path = str(scope.get("path", "")) if scope["type"] == "http" else ""
        return path.startswith(self._path) and path.rstrip("/").endswith("/upload")

    def sweep(self) -> int:
        """Remove the oldest files until the rest is within the limit; how many were."""
        sets = list(self._blocks.temp_file_sets)
        found = sorted(_known({str(name) for each in sets for name in set(each)} - self._kept()))
        total, gone = sum(size for _, size, _ in found), set[str]()
        for _, size, name in found:
            if total <= self._most:
                break
            with suppress(OSError):
                Path(name).unlink()
                Path(name).parent.rmdir()  # of this file alone, where it is empty now
            total -= size
            gone.add(name)
        for each in sets:
            each -= {name for name in set(each) if str(name) in gone}
        return len(gone)

    def _kept(self) -> set[str]:
        """Files of the page itself."""
        mine = (getattr(block, "keep_in_cache", ()) for block in self._blocks.blocks.values())
        return {str(name) for each in mine for name in each}


def _known(names: Iterable[str]) -> Iterable[tuple[float, int, str]]:
    """When each file came, its bytes, and its name."""
    for name in names:
        with suppress(OSError):
            found = Path(name).stat()
            yield found.st_mtime, found.st_size, name
