"""Files that visitors of the demo give, decoded as the server decodes those of its clients."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from mmfast.core.errors import MediaError
from mmfast.frontends.image import kind_of
from mmfast.serve.config import ServerConfig
from mmfast.serve.guard.errors import ApiError
from mmfast.serve.guard.media import load_media


def read_upload(path: str, config: ServerConfig | None = None) -> Any:
    """Pixels of a clip `[T, H, W, 3]` or an image `[H, W, 3]`, from a process with limits.

    Args:
        path: The file.
        config: Its limits hold; those of `mmfast serve` if absent.

    Raises:
        MediaError: It is no such media, too large, or broken.
    """
    given = ServerConfig() if config is None else config
    try:
        media = asyncio.run(load_media(Path(path).read_bytes(), kind_of(path), given))
    except ApiError as error:
        raise MediaError(str(error)) from None
    return media.shot.pixels
