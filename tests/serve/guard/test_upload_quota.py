"""What visitors of the demo leave on the disk is bounded, and what goes is the oldest."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

pytest.importorskip("starlette")

pytest.importorskip("gradio")

from mmfast.demos.app import UploadQuota


def page(folder: Path, **options: int) -> tuple[Any, Any]:
    """A page that keeps what is uploaded, as Gradio does; and its application."""
    kept = folder / "own.png"
    kept.write_bytes(bytes(5000))
    os.utime(kept, (0, 0))
    blocks = SimpleNamespace(
        temp_file_sets=[set[Any](), {str(kept)}],
        count=-1,
        blocks={0: SimpleNamespace(keep_in_cache={str(kept)}), 1: SimpleNamespace()},
    )

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message["body"], message["more_body"]
        if scope["path"].endswith("upload"):
            number = blocks.count = blocks.count + 1
            file = folder / f"n{number}" / "clip.mp4"
            file.parent.mkdir()
            file.write_bytes(body)
            os.utime(file, (number, number))
            blocks.temp_file_sets[0].add(file)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"ok"})

    return UploadQuota(app, "/demo", blocks, **options), blocks


def post(app: Any, *sizes: int, path: str = "/demo/gradio_api/upload") -> list[int]:
    async def main() -> list[int]:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return [(await client.post(path, content=bytes(n))).status_code for n in sizes]

    return asyncio.run(main())


def test_the_oldest_uploads_go(tmp_path: Path) -> None:
    app, blocks = page(tmp_path, most=3000, at_once=2000)
    assert post(app, *[1000] * 5) == [200] * 5
    left = sorted(each.name for each in tmp_path.glob("n*"))
    assert left == ["n2", "n3", "n4"] and len(blocks.temp_file_sets[0]) == 3
    assert (tmp_path / "own.png").exists()  # of the page itself
    assert post(app, 10, path="/demo/gradio_api/queue/join") == [200]
    assert app.sweep() == 0


def test_one_upload_is_bounded_before_it_is_read(tmp_path: Path) -> None:
    app, _ = page(tmp_path, most=3000, at_once=2000)
    assert post(app, 2000, 2001) == [200, 413]

    async def endless() -> Any:
        yield b"x"

    async def main() -> int:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            reply = await client.post("/demo/gradio_api/upload", content=endless())
            return reply.status_code

    assert asyncio.run(main()) == 413
    assert post(app, 2500, path="/elsewhere/upload") == [200]  # not ours


def test_the_demo_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from fastapi import FastAPI

    from mmfast.demos import app as demo

    made: list[Any] = []
    monkeypatch.setattr(demo, "_build", lambda shelf: "blocks")
    monkeypatch.setattr(demo.gr, "mount_gradio_app", lambda app, blocks, **_: made.append(blocks))
    app = FastAPI()
    demo.mount(app, "/demo", shelf=SimpleNamespace())  # type: ignore[arg-type]
    (found,) = [each for each in app.user_middleware if each.cls is UploadQuota]
    assert found.kwargs == {"path": "/demo", "blocks": "blocks"} and made == ["blocks"]
