"""What the browser's fake camera and microphone show and say."""

from __future__ import annotations

import wave
from io import BytesIO
from pathlib import Path
from typing import Any

import av
import numpy as np
from PIL import Image

CLIPS = Path(__file__).resolve().parents[3] / "assets" / "clips"


def camera_file(path: Path, clip: str = "red-circle.mp4") -> Path:
    """A clip as pictures behind each other, which Chromium plays over and over."""
    with av.open(str(CLIPS / clip)) as container:
        frames = [frame.to_image() for frame in container.decode(video=0)]
    data = b"".join(_jpeg(frame.resize((240, 240))) for frame in frames)
    path.write_bytes(data)
    return path


def _jpeg(frame: Image.Image) -> bytes:
    file = BytesIO()
    frame.save(file, "jpeg", quality=92)
    return file.getvalue()


def microphone_file(path: Path, spoken: Any, silence: float) -> Path:
    """Somebody says something, waits, and says it again; 48 kHz, as Chromium wants it."""
    pcm = (spoken.pcm.clamp(-1, 1).numpy() * 32767).astype("<i2").repeat(48000 // spoken.rate)
    gap = np.zeros(round(48000 * silence), "<i2")
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(48000)
        file.writeframes(np.concatenate([gap[: 48000 // 2], pcm, gap]).tobytes())
    return path
