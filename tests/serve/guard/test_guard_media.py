"""Media of requests: decoded elsewhere, within limits, and whatever happens there stays there."""

from __future__ import annotations

import ast
import asyncio
import base64
import gc
import io
import os
import subprocess
import sys
import textwrap
import threading
import time
import wave
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from media_factory import restamped, write_video
from PIL import Image

from mmfast.bench.suites.serve import hostile as bombs
from mmfast.core.errors import MediaError
from mmfast.frontends.audio.reader import load_audio
from mmfast.frontends.image import read_image
from mmfast.frontends.video.reader import read_video
from mmfast.serve.config import ServerConfig
from mmfast.serve.engine.base import Media
from mmfast.serve.guard.decoders import Decoders, ForkServer
from mmfast.serve.guard.errors import ApiError
from mmfast.serve.guard.fetch import data_url
from mmfast.serve.guard.media import decoders, load_media, load_sound

CONFIG = ServerConfig()


@pytest.fixture(scope="module")
def own() -> Iterator[Decoders]:
    """Decoding processes of this file alone."""
    found = Decoders(1, waiting=2, held=8 << 20)
    found.warm()
    yield found
    found.close()


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


def _sound(rate: int = 44_100, channels: int = 2, seconds: float = 1.0) -> bytes:
    target = io.BytesIO()
    with wave.open(target, "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(rate)
        time_ = np.arange(int(rate * seconds)) / rate
        tone = (np.sin(2 * np.pi * 440 * time_) * 20_000).astype("<i2")
        file.writeframes(np.repeat(tone, channels).tobytes())
    return target.getvalue()


def test_pictures_are_what_the_front_end_reads() -> None:
    for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP"):
        data = bombs.picture(kind)
        url = data_url(data, f"image/{kind.lower()}")
        media: Media = run(load_media(url, "image", CONFIG))
        assert media.shot.kind == "image" and media.shot.metadata is None
        assert np.array_equal(media.shot.pixels, read_image(data))
        assert media.key == run(load_media(data, "image", CONFIG)).key
        media.shot.pixels[:] = 0  # processors may write


def test_clips_are_what_the_front_end_reads(clip_path: Path) -> None:
    data = clip_path.read_bytes()
    keys = set()
    for sampling in ({"frames": 5}, {"fps": 4.0}, {}):
        media: Media = run(load_media(data, "video", CONFIG, **sampling))
        mine = read_video(data, **(sampling or {"frames": CONFIG.frames}))
        assert np.array_equal(media.shot.pixels, mine.frames)
        assert dict(media.shot.metadata or {}) == mine.metadata() | {"video_backend": "pyav"}
        keys.add(media.key)
    assert len(keys) == 3, "another sampling is another clip"


def test_a_sound_that_is_cut_short_is_heard_and_told_of(caplog: pytest.LogCaptureFixture) -> None:
    for data, told in ((_sound(), 0), (_sound()[:-999], 1)):
        pcm, _, note = run(load_sound(data, CONFIG))
        assert (len(pcm) < 16_000) == bool(told)
        mine = [each.getMessage() for each in caplog.records if each.name == "mmfast"]
        assert mine == ["a sound is shorter than its header says: it is heard up to its end"] * told
        assert [note] * told == mine and bool(note) == bool(told)


def test_frames_that_were_spread_are_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    even = write_video(tmp_path / "even.mp4", count=12, rate=25)
    times = [40 * i for i in range(12)]
    for again in (0, 2):  # frames with the time of the one before
        stamps = [min(time, times[11 - again]) for time in times]
        data = restamped(even, tmp_path / f"{again}.mkv", stamps).read_bytes()
        caplog.clear()
        note = run(load_media(data, "video", CONFIG, frames=4)).note
        mine = [each.getMessage() for each in caplog.records if each.name == "mmfast"]
        assert mine == [f"a clip has {again} frames without a later time: they were spread"] * (
            again > 0
        )
        assert [note] * bool(again) == mine and bool(note) == bool(again)


def test_a_picture_of_several_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    for frames in (1, 3):
        found = run(load_media(data_url(bombs.gif(64, frames), "image/gif"), "image", CONFIG))
        assert found.shot.pixels.shape[:2] == (64, 64)
        mine = [each.getMessage() for each in caplog.records if each.name == "mmfast"]
        note = "the image is an animation, of which one frame is read; give it as a video"
        assert mine == [note] * (frames > 1) and found.note == note * (frames > 1)


def test_sounds_are_what_the_front_end_reads() -> None:
    for rate, channels in ((44_100, 2), (16_000, 1), (8_000, 1)):
        data = _sound(rate, channels)
        encoded = base64.b64encode(data).decode()
        pcm, at, _ = run(load_sound(encoded, CONFIG, format="wav"))
        assert at == 16_000 and pcm.dtype == torch.float32
        assert torch.allclose(pcm, load_audio(data, 16_000), atol=1e-6)
    url = data_url(_sound(), "audio/wav")
    assert len(run(load_sound(url, CONFIG, rate=24_000))[0]) == 24_000


def _refusal(work: Coroutine[Any, Any, Any]) -> ApiError:
    with pytest.raises(ApiError) as found:
        run(work)
    assert 400 <= found.value.status < 500
    assert "/proc" not in str(found.value) and "Limits(" not in str(found.value)
    assert found.value.param == "here"
    return found.value


def _load(data: bytes | str, kind: Any, **options: Any) -> Coroutine[Any, Any, Any]:
    return load_media(data, kind, ServerConfig(**options), param="here")


def test_what_is_no_such_media_is_refused() -> None:
    for data, kind in (
        (bombs.archive(), "video"),
        (bombs.archive(), "image"),
        (bombs.picture("JPEG"), "video"),
        (b"#EXTM3U\nfile:///etc/passwd\n", "video"),
        (b"ffconcat version 1.0\nfile /etc/passwd\n", "video"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "image"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n", "image"),
        (b"\0", "image"),
        (b"", "image"),
        (_sound(), "video"),
    ):
        _refusal(_load(data, kind))
    for data in (bombs.picture(), b"", b"nonsense" * 100):
        _refusal(load_sound(data, CONFIG, param="here"))
    _refusal(load_sound(base64.b64encode(_sound()).decode(), CONFIG, format="mp3", param="here"))
    _refusal(load_sound("no base64", CONFIG, param="here"))


def test_addresses_are_no_way_in(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(bombs.picture())
    for url in (f"file://{path}", str(path), "ftp://a.example/x", "~", "", "http://a.example/x"):
        for kind in ("image", "video"):
            assert str(tmp_path) not in str(_refusal(_load(url, kind)))
    _refusal(load_sound(f"file://{path}", CONFIG, param="here"))
    _refusal(load_sound(str(path), CONFIG, param="here"))


def test_numbers_of_frames_are_bounded(clip_path: Path) -> None:
    data = clip_path.read_bytes()
    for asked in ({"frames": 65}, {"frames": 0}, {"frames": 3, "fps": 1.0}):
        _refusal(load_media(data, "video", CONFIG, param="here", **asked))
    small = ServerConfig(frames=4, max_frames=4)
    refused = _refusal(load_media(data, "video", small, fps=30.0, param="here"))
    assert refused.code == "too_many_frames"


def test_bombs_are_refused_before_they_go_off() -> None:
    image, video = "image", "video"
    for name, data, kind in (
        ("png", bombs.png(), image),
        ("gif", bombs.gif(), video),
        ("gif, one frame", bombs.gif(9000, 1), image),
        ("webp", bombs.webp(), video),
        ("webp canvas", bombs.webp(16_383, 3), image),
        ("webp frames", bombs.webp(1000, 3000), video),
    ):
        start = time.process_time()
        refused = _refusal(_load(data, kind))
        assert len(data) < 2 << 20, name
        assert refused.code == "invalid_media", name
        assert time.process_time() - start < 1.0, name


def test_clips_are_bounded_as_a_whole() -> None:
    clip = bombs.video(np.zeros((64, 64, 3), np.uint8), 40)
    assert run(_load(clip, "video", frames=2)).shot.pixels.shape == (2, 64, 64, 3)
    for options in (
        {"max_clip_pixels": 64 * 64 * 39},
        {"max_video_pixels": 64 * 63},
        {"max_media_seconds": 1.0},
        {"max_media_bytes": 64 * 64 * 3 * 7},
        {"max_body_bytes": len(clip) - 1},
    ):
        _refusal(_load(clip, "video", **options))
    _refusal(_load(clip[:-200], "video"))
    _refusal(_load(clip[: len(clip) // 2], "video"))
    sound = _sound(seconds=2.0)
    short = ServerConfig(max_media_seconds=1.0)
    _refusal(load_sound(sound, short, param="here"))


def _job(**more: Any) -> dict[str, Any]:
    limits = {"seconds": 5.0, "decoded_bytes": 64 << 20}
    return {"kind": "image", "limits": limits, "seconds": 5.0, "memory": 1 << 30} | more


def test_memory_is_bounded_in_fact(own: Decoders) -> None:
    """A picture within all limits on its header, and memory for half of it."""
    data = bombs.png(4000)
    with pytest.raises(MediaError):
        run(own.decode(data, _job(memory=16 << 20)))
    with pytest.raises(ApiError) as found:  # decoded, but no room to keep it
        run(own.decode(data, _job()))
    assert found.value.status == 429


def test_time_is_bounded_in_fact(own: Decoders) -> None:
    gif = bombs.gif(3000, 40)
    limits = {"seconds": 60.0, "decoded_bytes": 64 << 20}
    job = {"frame_pixels": 1 << 30, "clip_pixels": 1 << 50, "frames": 1}
    start = time.monotonic()
    with pytest.raises(MediaError, match=r"0\.1 s"):
        run(own.decode(gif, _job(kind="video", limits=limits, seconds=0.1, **job)))
    assert time.monotonic() - start < 20
    _no_children(own)


def _no_children(own: Decoders) -> None:
    process = own._parent._process
    assert process is not None
    deadline = time.monotonic() + 20
    while psutil.Process(process.pid).children():
        assert time.monotonic() < deadline, "a decoding process was left behind"
        time.sleep(0.01)


def test_whoever_leaves_takes_his_process_along(own: Decoders) -> None:
    gif = bombs.gif(3000, 200)
    limits = {"seconds": 60.0, "decoded_bytes": 64 << 20}
    job = _job(kind="video", limits=limits, seconds=60.0, frames=1)
    job |= {"frame_pixels": 1 << 30, "clip_pixels": 1 << 50}

    async def leave() -> None:
        task = asyncio.create_task(own.decode(gif, job))
        process = own._parent._process
        assert process is not None
        while not psutil.Process(process.pid).children():
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(leave())
    _no_children(own)
    assert run(own.decode(bombs.picture(), _job()))[0].shape == (48, 64, 3)


def test_so_many_wait_and_no_more(own: Decoders) -> None:
    async def crowd() -> list[Any]:
        held = threading.Event()
        own._threads.submit(held.wait)  # the one that decodes has something else to do
        work = [own.decode(bombs.picture(), _job()) for _ in range(8)]
        tasks = [asyncio.create_task(each) for each in work]
        await asyncio.sleep(0)
        held.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    found = run(crowd())
    refused = [f for f in found if isinstance(f, ApiError)]
    assert len(refused) == 5 and all(r.status == 429 for r in refused)
    assert run(own.decode(bombs.picture(), _job()))[0].shape == (48, 64, 3)


def test_decoded_media_are_bounded_together(own: Decoders) -> None:
    data = bombs.picture(width=1000, height=1000)  # 3 MB each, 8 MB allowed
    kept = [run(own.decode(data, _job()))[0] for _ in range(2)]
    with pytest.raises(ApiError) as found:
        run(own.decode(data, _job()))
    assert found.value.status == 429
    view = kept[0][:10]
    del kept
    gc.collect()
    run(own.decode(data, _job()))
    with pytest.raises(ApiError):
        _ = [run(own.decode(data, _job()))[0] for _ in range(2)]  # `view` still counts
    del view
    gc.collect()


def test_a_dead_parent_is_replaced(own: Decoders) -> None:
    process = own._parent._process
    assert process is not None
    process.kill()
    process.wait()
    assert run(own.decode(bombs.picture(), _job()))[0].shape == (48, 64, 3)
    assert own._parent._process is not process


def test_a_process_that_dies_is_one_failed_request(own: Decoders) -> None:
    """A decoder that crashes: here, killed from outside while it works."""
    gif = bombs.gif(3000, 200)
    limits = {"seconds": 60.0, "decoded_bytes": 64 << 20}
    job = _job(kind="video", limits=limits, seconds=60.0, frames=1)
    job |= {"frame_pixels": 1 << 30, "clip_pixels": 1 << 50}

    async def crash() -> None:
        task = asyncio.create_task(own.decode(gif, job))
        parent = own._parent._process
        assert parent is not None
        while not (children := psutil.Process(parent.pid).children()):
            await asyncio.sleep(0.01)
        children[0].kill()
        with pytest.raises(MediaError):
            await task
        assert (await own.decode(bombs.picture(), _job()))[0].shape == (48, 64, 3)

    run(crash())


def test_what_a_decoding_process_may_not_do(tmp_path: Path) -> None:
    """Whatever runs in it: no network, no program, no file to write, little memory."""
    script = textwrap.dedent("""
        import os, socket, subprocess, sys
        from mmfast.serve.guard.sandbox import limit
        from mmfast.serve.guard.sandbox import confine
        limit(64 << 20, 20.0, 1 << 20)
        out = os.dup(3)
        took = confine()
        def tried(what):
            try:
                what()
            except (OSError, MemoryError) as error:
                return type(error).__name__
            return "allowed"
        found = [
            tried(lambda: socket.socket()),
            tried(lambda: subprocess.run(["true"])),
            tried(lambda: open(sys.argv[1], "w")),
            tried(lambda: os.remove(sys.argv[2])),
            tried(lambda: os.kill(os.getppid(), 0)),
            tried(lambda: bytearray(256 << 20)),
            tried(lambda: os.write(os.memfd_create("x"), bytes(1 << 20)) and None),
            tried(lambda: open(sys.argv[2]).read()),
        ]
        os.write(out, repr((took, found)).encode())
        os._exit(0)
    """)
    (tmp_path / "there").write_text("x")
    read, write = os.pipe()
    with os.fdopen(read, "rb") as answer:
        root = str(Path(__file__).resolve().parents[3])
        paths = [str(tmp_path / name) for name in ("new", "there")]
        done = subprocess.run(
            ["bash", "-c", f'exec "$@" 3>&{write}', "-", sys.executable, "-c", script, *paths],
            pass_fds=[write],
            env={**os.environ, "PYTHONPATH": root},
            timeout=120,
            check=False,
        )
        os.close(write)
        assert done.returncode == 0
        took, found = ast.literal_eval(answer.read().decode())
    if not took:
        pytest.skip("this system has no seccomp filters")
    refused = ["PermissionError"] * 5
    assert found == [*refused, "MemoryError", "allowed", "allowed"]


def test_the_decoding_process_is_light() -> None:
    """It imports no torch: it starts at once and its forks are cheap."""
    child = "mmfast.serve.guard.sandbox"
    code = f"import sys, {child} as c; c._warm(); print('torch' in sys.modules)"
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"


def test_servers_of_one_process_share_their_decoders() -> None:
    assert decoders(ServerConfig()) is decoders(ServerConfig(max_frames=9))
    assert Image.MAX_IMAGE_PIXELS is not None


def test_a_decoder_that_does_not_start_is_told_to_the_input_that_needs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server that is stopped while it starts leaves no traceback of its first thread."""

    def dead(self: ForkServer) -> None:
        raise ApiError(503, "the process that decodes media does not start", code="decoder")

    monkeypatch.setattr(ForkServer, "_ready", dead)
    made = Decoders(1)
    made.warm()
    with pytest.raises(ApiError, match="does not start"):
        asyncio.run(made.decode(b"x", {"kind": "image", "seconds": 5}))
