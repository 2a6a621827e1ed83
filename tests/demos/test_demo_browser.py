"""The demo in Chromium, with a fake camera and microphone: every tab, nothing from elsewhere.

Pictures go to the folder that MMFAST_SCREENSHOTS names, or to pytest's temporary one.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from demo_media import camera_file, microphone_file

sync_api = pytest.importorskip(
    "playwright.sync_api", reason="no playwright: pip install playwright"
)
ROOT = Path(__file__).resolve().parents[2]
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
ASKED = "which way does the red circle move?"
PATIENCE = 120_000  # milliseconds; a loaded machine is no failure
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-sync",
    "--no-first-run",
    "--metrics-recording-only",
    "--use-fake-ui-for-media-stream",
    "--use-fake-device-for-media-stream",
    "--autoplay-policy=no-user-gesture-required",
]

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    import mmfast

    folder = tmp_path_factory.mktemp("devices")
    camera = camera_file(folder / "camera.mjpeg")
    spoken = mmfast.pipeline("text-to-speech", verify="exact")(ASKED)
    microphone = microphone_file(folder / "microphone.wav", spoken, silence=60.0)
    args = [
        *FLAGS,
        "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
        f"--use-file-for-fake-video-capture={camera}",
        f"--use-file-for-fake-audio-capture={microphone}",
    ]
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=args)
        yield chromium
        chromium.close()


class Visit:
    """A visitor's page, and what it must not do."""

    def __init__(self, browser: Any, url: str, pictures: Path, **context: Any) -> None:
        self.context = browser.new_context(permissions=["camera", "microphone"], **context)
        self.context.set_default_timeout(PATIENCE)
        self.page, self.pictures = self.context.new_page(), pictures
        self.bad: list[str] = []
        self.page.on("pageerror", lambda error: self.bad.append(f"error: {error}"))
        self.page.on("console", self._console)
        self.page.on("request", self._request)
        self.page.on("websocket", self._request)
        self.page.goto(url)
        self.page.get_by_role("tab", name="Ask").first.wait_for()

    def _console(self, message: Any) -> None:
        if message.type == "error":
            self.bad.append(f"console: {message.text}")

    def _request(self, request: Any) -> None:
        if not re.match(r"(http|ws)://127\.0\.0\.1:|data:|blob:", request.url):
            self.bad.append(f"request: {request.url}")

    def tab(self, name: str) -> None:
        self.page.get_by_role("tab", name=name).first.click()

    def shoot(self, name: str) -> None:
        self.page.screenshot(path=self.pictures / f"{name}.png", full_page=True)

    def wait(self, script: str, argument: Any = None) -> None:
        """Until a function of the page is true."""
        self.page.wait_for_function(script, arg=argument)

    def fits(self) -> bool:
        script = "() => document.documentElement.scrollWidth <= window.innerWidth"
        return bool(self.page.evaluate(script))

    def close(self) -> None:
        self.context.close()
        assert not self.bad, self.bad


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    folder = Path(os.environ.get("MMFAST_SCREENSHOTS") or tmp_path)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture
def visit(browser: Any, demo_url: str, pictures: Path) -> Iterator[Visit]:
    found = Visit(browser, demo_url, pictures, viewport={"width": 1280, "height": 1000})
    yield found
    found.close()


def test_the_first_answer_is_there_without_a_click(visit: Visit) -> None:
    page = visit.page
    page.locator(".mm-card").nth(1).wait_for()
    assert page.locator(".mm-answer").all_inner_texts() == ["left", "left"]
    assert "Medians of" in page.locator(".mm-timed").inner_text()
    assert "0.5B shape" in page.locator(".mm-real").inner_text()
    visit.wait("() => document.querySelector('mm-frames figure img')?.naturalWidth > 0")
    area = page.locator("#ask-upload").bounding_box()
    assert page.locator("#ask-upload").is_visible() and area["y"] + area["height"] < 1000
    visit.shoot("arrival")


def test_code_is_copied(visit: Visit) -> None:
    page = visit.page
    visit.context.grant_permissions(["clipboard-read", "clipboard-write"])
    for name, start in (("Python", "from importlib.resources"), ("CLI", "mmfast ask")):
        button = page.get_by_role("button", name=f"Copy as {name}")
        button.click()
        page.locator(".mm-copies").get_by_text("Copied", exact=True).last.wait_for()
        visit.wait("async (s) => (await navigator.clipboard.readText()).startsWith(s)", start)
        text = page.evaluate("() => navigator.clipboard.readText()")
        assert text.startswith(start) and "divprune:0.25" in text


@pytest.mark.slow
def test_an_upload_is_compared_stopped_and_replaced_by_a_bad_one(
    visit: Visit, tmp_path: Path
) -> None:
    page, clip = visit.page, ROOT / "assets" / "clips" / "number.mp4"
    visit.tab("Compare")
    page.locator("#compare-upload input[type=file]").set_input_files(clip)
    visit.wait("() => document.querySelectorAll('video[src*=\"file=\"]').length === 1")
    questions, asked = page.get_by_label("Questions, one a line"), "What number is on the screen?"
    questions.fill("\n".join([asked] * 6))  # enough work that it goes on until it is stopped
    page.locator("#compare-run").click()
    page.locator("#trial .progress-level-inner").wait_for()
    assert page.locator(".progress-text:visible, .progress-level-inner:visible").count() == 1
    page.locator("#compare-stop").click()
    visit.wait("() => document.querySelector('#trial').innerText.includes('Stopped.')")
    page.locator("#compare-stop").wait_for(state="hidden")
    questions.fill(asked)
    page.locator("#compare-run").click()
    page.locator("#trial svg").wait_for()
    table = page.locator("#trial table").inner_text()
    assert "same" in table and "all tokens" in table and "random:0.25" in table
    visit.shoot("trial")
    bad = tmp_path / "holiday.mp4"
    bad.write_bytes(b"no film at all")
    page.locator("#compare-upload").get_by_label("Clear").click()
    page.locator("#compare-upload input[type=file]").set_input_files(bad)
    page.locator(".toast-body").first.wait_for()
    assert not page.locator("#trial svg").count() and not page.locator("#trial table").count()
    visit.bad = [line for line in visit.bad if not line.startswith("console:")]


@pytest.mark.slow
def test_asking_shows_both_answers_and_the_slider_changes_the_picture(visit: Visit) -> None:
    page = visit.page
    page.locator("#ask").click()
    visit.wait(  # the answers of the arrival go, and timed ones come
        "() => document.querySelectorAll('.mm-answer').length === 2"
        " && !document.body.innerText.includes('not timed')"
    )
    answers = page.locator(".mm-answer").all_inner_texts()
    assert answers == ["left", "left"]
    assert "72 of 288" in page.locator(".mm-fast").inner_text()
    assert "Same answer with 25%" in page.locator(".mm-verdict").inner_text()
    picture = page.locator("mm-frames figure img").nth(1)
    before = picture.get_attribute("src")
    slider = page.locator("#budget input[type=range]")
    slider.focus()
    for _ in range(10):
        page.keyboard.press("ArrowLeft")
    visit.wait("() => document.querySelector('.mm-fast')?.innerText.includes('divprune:0.15')")
    visit.wait(
        "(before) => { const shown = document.querySelectorAll('mm-frames figure img')[1];"
        " return shown && shown.getAttribute('src') !== before; }",
        before,
    )
    assert "43 of 288" in page.locator(".mm-fast").inner_text()
    caption = page.locator("mm-frames figcaption").nth(1)
    assert caption.inner_text().startswith("Frame 1 of 8")
    page.get_by_label("Frame", exact=True).focus()
    page.keyboard.press("End")
    assert caption.inner_text().startswith("Frame 8 of 8")
    visit.shoot("ask")


def test_another_clip_brings_its_own_questions(visit: Visit) -> None:
    page = visit.page
    page.get_by_label("Clip or picture").first.click()
    page.get_by_role("option", name="number", exact=True).click()
    page.get_by_role("button", name="What number is on the screen?").click()
    page.locator(".mm-card").nth(1).wait_for()
    assert page.locator(".mm-answer").first.inner_text() == "36"


def test_a_file_that_is_no_clip_is_refused_in_one_line(visit: Visit, tmp_path: Path) -> None:
    page, bad = visit.page, tmp_path / "holiday.mp4"
    bad.write_bytes(b"no film at all")
    page.locator(".mm-card").nth(1).wait_for()
    page.locator("#ask-upload input[type=file]").set_input_files(bad)
    told = page.locator(".toast-body").first
    told.wait_for()
    assert "'holiday.mp4' is neither an image nor a video" in told.inner_text()
    assert not page.locator(".mm-card").count()  # nothing of the clip before
    assert not page.locator("button.gallery-item").filter(visible=True).count()
    page.locator("#ask").click()
    page.get_by_text("No answer: the message tells why.").wait_for()
    page.locator("#ask-stop").wait_for(state="hidden")
    # what the page logs of its own errors is no fault of it
    visit.bad = [line for line in visit.bad if not line.startswith("console:")]


def test_comparing_tells_the_figures_of_a_dot(visit: Visit) -> None:
    visit.tab("Compare")
    page = visit.page
    dot = page.locator("#chart .mm-chosen .mm-dot").first
    dot.focus()
    says = dot.locator(".mm-says")
    assert says.is_visible() and re.fullmatch(r"dtd at 5%: \d+\.\d% right .*", says.text_content())
    other = page.locator("#chart .mm-chosen .mm-dot").nth(20)
    other.locator("circle").nth(1).hover()
    assert other.locator(".mm-says").is_visible()
    page.get_by_label("pages").check()
    page.get_by_text("model tiny-document").wait_for()
    assert page.locator("#methods a").first.get_attribute("href").startswith("https://arxiv.org/")
    visit.shoot("compare")


def test_the_world_is_watched_and_asked(visit: Visit) -> None:
    visit.tab("Watch")
    page = visit.page
    page.locator("#play").click()
    page.locator("img.mm-screen").wait_for()
    first = page.locator("img.mm-screen").get_attribute("src")
    visit.wait("(was) => document.querySelector('img.mm-screen').src !== was", first)
    page.locator("#watch-ask").click()
    page.locator("#watch-log strong").first.wait_for()
    assert page.locator("#watch-log strong").first.inner_text()
    assert "MB" in page.locator("#counters").inner_text()
    visit.shoot("watch")
    page.locator("#pause").click()
    page.get_by_label("camera", exact=True).check()  # another stream, of which nothing was asked
    page.locator("#watch-log strong").wait_for(state="detached")


@pytest.mark.slow
def test_the_camera_is_watched_and_asked(visit: Visit) -> None:
    visit.tab("Watch")
    page = visit.page
    page.get_by_label("camera", exact=True).check()
    page.get_by_text("Click to Access Webcam").click()
    page.locator("#camera button").filter(has_text="Record").click()
    visit.wait("() => Number(document.querySelector('#counters dd')?.innerText) >= 3")
    page.locator("#watch-q textarea, #watch-q input").first.fill("What colour is the circle now?")
    page.locator("#watch-ask").click()
    visit.wait("() => document.querySelector('#watch-log strong')?.innerText === 'red'")
    visit.shoot("camera")


@pytest.mark.slow
def test_a_spoken_question_is_heard_answered_and_interrupted(visit: Visit) -> None:
    visit.tab("Voice")
    page = visit.page
    # somebody who interrupts as soon as there is something to hear
    page.evaluate(
        """() => {
            const voice = document.querySelector('mm-voice'), sound = voice.sound.bind(voice);
            voice.sound = (pcm) => {
                sound(pcm);
                window.heard = [pcm.length, voice.player.pieces.length, voice.player.sounding];
                voice.hush.click();
            };
        }"""
    )
    page.get_by_role("button", name="Start talking").click()
    visit.wait("() => document.querySelector('.mm-you')?.innerText.includes('red circle move')")
    page.locator(".mm-cut").first.wait_for()
    assert "this much was heard" in page.locator(".mm-cut").first.inner_text()
    visit.wait("() => document.querySelector('.mm-cut')?.innerText.includes('left')")
    samples, pieces, sounding = page.evaluate("() => window.heard")
    assert samples > 100 and pieces >= 1 and sounding
    assert "Interrupted" in page.locator("mm-voice [role=status]").inner_text()
    visit.shoot("voice")
    page.get_by_role("button", name="Stop talking").click()
    assert page.get_by_role("button", name="Start talking").is_enabled()


def test_a_typed_text_is_heard(visit: Visit) -> None:
    visit.tab("Voice")
    page = visit.page
    with page.expect_response(re.compile(r"/gradio_api/file=.*\.wav"), timeout=PATIENCE) as sound:
        page.locator("#say").click()
    assert sound.value.ok and len(sound.value.body()) > 10_000
    page.locator("#say-figures dd").first.wait_for()
    assert "audio tokens a pass" in page.locator("#say-figures").inner_text()
    room = "(box) => parseFloat(getComputedStyle(box).paddingRight)"
    assert page.get_by_label("Drafting").evaluate(room) > 16  # the arrow lies there


@pytest.mark.slow
def test_a_phone_never_scrolls_sideways(browser: Any, demo_url: str, pictures: Path) -> None:
    size = {"width": 390, "height": 740}
    visit = Visit(browser, demo_url, pictures, viewport=size, has_touch=True, color_scheme="dark")
    visit.page.locator(".mm-card").nth(1).wait_for()
    visit.page.locator("#ask").click()
    top = "document.querySelector('#answers').getBoundingClientRect().top"
    visit.wait(f"() => {top} < window.innerHeight - 60")  # the progress is in view
    visit.page.locator(".mm-card").nth(1).wait_for()
    visit.wait(f"() => Math.abs({top}) < 60")  # and then the answers
    for name in ("Ask", "Compare", "Watch", "Voice", "About"):
        visit.tab(name)
        visit.page.get_by_role("tabpanel").filter(visible=True).first.wait_for()
        assert visit.fits(), name
        visit.shoot(f"phone-{name.lower()}")
    visit.close()


@pytest.mark.slow
def test_everything_is_reached_with_the_keyboard(visit: Visit) -> None:
    page = visit.page
    page.locator("button.gallery-item", has_text="?").first.wait_for()  # these come a little later
    assert not page.evaluate(
        """() => [...document.querySelectorAll('input, textarea, select, button')]
            .filter((e) => e.offsetParent && e.type !== 'file' && !e.ariaLabel && !e.title
                && !e.labels?.length && !e.innerText.trim() && !e.placeholder
                && !e.getAttribute('aria-labelledby'))
            .map((e) => e.outerHTML.slice(0, 160))"""
    )
    seen: list[str] = []
    for _ in range(40):
        page.keyboard.press("Tab")
        seen.append(page.evaluate("() => document.activeElement.id || document.activeElement.role "
                                  "|| document.activeElement.tagName"))  # fmt: skip
        if seen[-1] == "ask":
            break
    assert seen[-1] == "ask", seen
    page.keyboard.press("Enter")
    page.locator(".mm-card").nth(1).wait_for()
    page.get_by_role("tab", name="Compare").filter(visible=True).first.focus()
    page.keyboard.press("Enter")
    page.locator("#chart svg").first.wait_for()
