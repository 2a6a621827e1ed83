"""Chromium calls the server with the snippet of the guide: it is heard, and hears the answer."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiortc")

from demo_media import microphone_file
from realtime_tools import ANSWER
from serve_tools import running
from tone_models import hum
from webrtc_client import QUESTION, Voices, app_with, likeness

from mmfast.core.speech import Sound

sync_api = pytest.importorskip(
    "playwright.sync_api", reason="no playwright: pip install playwright"
)
GUIDE = Path(__file__).resolve().parents[3] / "docs" / "guides" / "serve.md"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
PATIENCE = 120_000  # milliseconds; a loaded machine is no failure
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--no-first-run",
    "--use-fake-ui-for-media-stream",
    "--use-fake-device-for-media-stream",
    "--autoplay-policy=no-user-gesture-required",
]
ENERGY = """async () => {
  for (const each of (await peer.getStats()).values())
    if (each.type === "inbound-rtp" && each.kind === "audio") return each.totalAudioEnergy;
}"""

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def test_a_page_calls_as_the_guide_says(tmp_path: Path) -> None:
    (snippet,) = re.findall(r"```js\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    spoken = microphone_file(tmp_path / "said.wav", Sound(hum(QUESTION), 16_000), silence=60.0)
    voices = Voices()
    args = [*FLAGS, f"--use-file-for-fake-audio-capture={spoken}"]
    with running(app_with(voices)) as url, sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=args)
        page = chromium.new_context(permissions=["microphone"]).new_page()
        page.set_default_timeout(PATIENCE)
        page.goto(f"{url}/docs")
        start = "window.seen = []; call(location.origin, 'none', (e) => seen.push(e))"
        page.evaluate(f"{snippet}; {start}.then((made) => {{ window.peer = made.peer; }})")
        stopped = "seen.some((e) => e.type === 'output_audio_buffer.stopped')"
        page.wait_for_function(f"window.peer && {stopped}")
        seen: list[dict[str, Any]] = page.evaluate("seen")
        energy = page.evaluate(ENERGY)
        page.evaluate("peer.close()")
        chromium.close()
    (done,) = [event["response"] for event in seen if event["type"] == "response.done"]
    assert done["output"][0]["content"][0]["transcript"] == ANSWER
    assert likeness(voices.heard[0], hum(QUESTION)) > 0.5  # a browser filters what it records
    assert energy > 1e-4
