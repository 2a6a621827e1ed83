"""Speech on a device: the codes, words and sound of the CPU, in every mode and class."""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path
from typing import Any

import codec_cases
import listener_models
import pytest
import talker_models
import torch
from codebook_models import choices, csm, moshi, prompts
from devices import DEVICE, MARKS
from torch import Tensor
from typer.testing import CliRunner

import mmfast
from mmfast.decoding.codebooks import copy_frame
from mmfast.decoding.sampling import Sampling
from mmfast.models.loading import load, load_codec
from mmfast.models.speech.csm import CsmSteps, SpeechContext
from mmfast.models.speech.moshi import MoshiVoice
from mmfast.models.speech.moshi_graphs import MoshiFrames, MoshiStatic, compile_run, eager
from mmfast.models.speech.moshi_steps import MoshiSteps
from mmfast.tiny.video import scene

pytestmark = MARKS

ON = str(DEVICE)
SENTENCE = "The red circle moves to the left."
ASKED = "how many objects are there?"
PLACES = ("cpu", ON)


@functools.cache
def talker(device: str) -> Any:
    return mmfast.pipeline("text-to-speech", device=device)


@functools.cache
def said(text: str) -> Tensor:
    found: Tensor = talker("cpu")(text).pcm
    return found


def codes_of(sounds: Any) -> list[list[int]]:
    """Codes of all pieces, one list a book."""
    found = [sound.codes for sound in sounds if sound.codes is not None]
    return torch.cat([each.cpu() for each in found], -1).tolist()  # type: ignore[no-any-return]


# --- the embedded model ---------------------------------------------------------------------------


@pytest.mark.parametrize("head", ["mctp", "mtp"])
@pytest.mark.parametrize("mode", ["exact", "fast", "turbo"])
def test_say(mode: str, head: str) -> None:
    if head not in talker(ON).talker.heads:
        pytest.skip(f"the head {head} was not carried")
    codes = [codes_of(talker(p).stream(SENTENCE, mode=mode, head=head)) for p in PLACES]
    if mode == "exact":  # how much is drafted follows the clock, and with it what is let stand
        assert codes[0] == codes[1]
        assert codes[1] == codes_of(talker(ON).stream(SENTENCE, schedule="vanilla"))
    assert codes[1][0]


@pytest.mark.parametrize("schedule", ["vanilla", "balance", "boost"])
@pytest.mark.parametrize("verify", ["exact", "typical:0.3", "none"])
def test_schedules(verify: str, schedule: str) -> None:
    assert codes_of(talker(ON).stream("a red dot", verify=verify, schedule=schedule))[0]


def test_sampled_speech_repeats() -> None:
    how = Sampling(temperature=0.8, top_k=20, seed=3)
    codes = [codes_of(talker(ON).talker.speak("a red dot", sampling=how)) for _ in range(2)]
    assert codes[0] == codes[1]


def test_sound_is_that_of_the_cpu_and_lies_there() -> None:
    one, two = (talker(place)("a blue square") for place in PLACES)
    assert two.pcm.device.type == "cpu" and one.text == two.text
    torch.testing.assert_close(two.pcm, one.pcm, atol=1e-3, rtol=0)
    pieces = list(talker(ON).stream(iter(["It is ", "three ", "o'clock."])))
    assert "".join(piece.text for piece in pieces)
    many = talker(ON)(["one dot.", "two dots."])
    assert [each.text for each in many] == ["one dot.", "two dots."]


@pytest.mark.parametrize("speakers", [1, 2])
def test_transcribe(speakers: int) -> None:
    texts = []
    for place in PLACES:
        try:
            pipe = mmfast.pipeline("speech-to-text", device=place, speakers=speakers)
        except mmfast.MmfastError:
            if speakers == 2:
                pytest.skip("the ear for two was not carried")
            raise
        texts.append([each.text for each in pipe([said(SENTENCE), said(ASKED)])])
        if speakers == 2:
            pieces = pipe.stream(said(ASKED).split(1600))
            texts[-1].append(" ".join(str(each) for each in pieces))
    assert texts[0] == texts[1] and texts[0][0]


def test_sound_on_the_device_is_heard() -> None:
    pipe = mmfast.pipeline("speech-to-text", device=ON)
    assert pipe(said(SENTENCE).to(DEVICE)).text == pipe(said(SENTENCE)).text


@pytest.mark.parametrize("ear", ["voice", "semantic", "prosody"])
def test_conversations(ear: str) -> None:
    pytest.importorskip("silero_vad")
    pause, found = torch.zeros(24_000), []
    for place in PLACES:
        pipe = mmfast.pipeline("speech-chat", device=place)
        sound = torch.cat([pause[:8000], said("what is two plus three?"), pause])
        events = list(pipe.run(sound.split(1600), ear=ear))
        assert not [event for event in events if event.kind == "error"]
        found.append([e.text for e in events if e.kind in ("heard", "text")])
    assert found[0] == found[1] and found[0]


def test_a_recording_is_answered() -> None:
    found = []
    for place in PLACES:
        spoken = mmfast.pipeline("speech-chat", device=place)(said("what is two plus three?"))
        found.append((spoken.heard, spoken.text))
    assert found[0] == found[1] and found[0][0]


def test_a_text_model_with_a_voice() -> None:
    texts = []
    for place in PLACES:
        pipe = mmfast.pipeline("speech-chat", chat=lambda turns: "a red dot.", device=place)
        texts.append(pipe(said(ASKED)).text)
    assert texts[0] == texts[1] == "a red dot."


@functools.cache
def _pair(device: str) -> Any:
    return load("tiny-video", device, "float32")


def test_omni_chat() -> None:
    frames = scene.draw(scene.make_scene(scene.EVAL, 7, 0)).frames
    found = []
    for place in PLACES:
        pipe = mmfast.pipeline("omni-chat", _pair(place), device=place)
        spoken = pipe(frames, said(ASKED))
        found.append((spoken.heard, spoken.text))
    assert found[0] == found[1]


def test_omni_chat_on_a_stream() -> None:
    pytest.importorskip("silero_vad")
    frames = scene.draw(scene.make_scene(scene.EVAL, 7, 0)).frames[::4]
    found = []
    for place in PLACES:
        pipe = mmfast.pipeline("omni-chat", _pair(place), device=place)
        with pipe.open(memory="sink:64+window:1152+retrieve:4") as session:
            sound = torch.cat([torch.zeros(40_000), said(ASKED), torch.zeros(24_000)])
            events = list(session.run(sound.split(1600), frames=enumerate(frames)))
        assert not [event for event in events if event.kind == "error"]
        found.append([e.text for e in events if e.kind in ("heard", "text")])
    assert found[0] == found[1]


POLICIES = ("confidence:0.99", "wait:3", "agreement:2", "learned:0.9", "interleaved:1", "joint:0")


@pytest.mark.parametrize("policy", POLICIES)
def test_translate(policy: str) -> None:
    from mmfast.models.loading import embedded_path

    name = "tiny-interleaved" if policy[:5] in ("inter", "joint") else "tiny-translate"
    try:
        embedded_path(name)
    except mmfast.MmfastError:
        pytest.skip(f"{name} was not carried")
    texts = []
    for place in PLACES:
        pipe = mmfast.pipeline("speech-translation", policy=policy, device=place)
        texts.append([pipe.translate("the red circle moves left"), pipe(said(SENTENCE)).text])
        texts[-1] += [piece.text for piece in pipe.stream(said(SENTENCE))]
    assert texts[0] == texts[1]


# --- stock classes --------------------------------------------------------------------------------


def _user(batch: int = 2, frames: int = 20) -> Tensor:
    return torch.randint(64, (batch, 4, frames), generator=torch.Generator().manual_seed(1))


def _stepped(model: Any, user: Tensor, **options: Any) -> Tensor:
    steps = MoshiSteps(model, **options)
    state, found = steps.start(len(user)), []
    for at in range(user.shape[2]):
        state, frame = steps.step(state, user[:, :, at].to(model.device))
        found.append(torch.cat([frame.text[:, None], frame.codes], 1).cpu())
    return torch.stack(found)


@pytest.mark.parametrize("drafted", [False, True])
@pytest.mark.parametrize("window", [20, 6])
def test_moshi_steps(window: int, drafted: bool) -> None:
    how = {"drafter": copy_frame} if drafted else {}
    one, two = (_stepped(moshi(window).to(place), _user(), **how) for place in PLACES)
    assert torch.equal(one, two)


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("window", [20, 6])
@pytest.mark.parametrize("way", ["graphs", "eager", "compiled"])
def test_moshi_on_buffers_of_fixed_shape(way: str, window: int, sampled: bool) -> None:
    model, user = moshi(window).to(DEVICE), _user(3, 30).to(DEVICE)
    torch._dynamo.reset()
    recorder = {"graphs": None, "eager": eager}.get(
        way, functools.partial(compile_run, backend="eager")
    )
    steps = MoshiSteps(model, **choices(sampled))
    static = MoshiStatic(model, 3, **choices(sampled), graphs=recorder)
    state = steps.start(3)
    for at in range(30):
        state, frame = steps.step(state, user[:, :, at])
        mine = static.step(user[:, :, at])
        assert torch.equal(frame.text, mine.text) and torch.equal(frame.codes, mine.codes)
        if at == 12 and not sampled:
            rows = torch.tensor([False, True, False], device=DEVICE)
            state = steps.reset(state, rows)
            static.reset(rows)


def test_moshi_in_frames_of_sound() -> None:
    model = moshi(6).to(DEVICE)
    voice = MoshiVoice(model, text=Sampling(), audio=Sampling())
    frames, state = MoshiFrames(voice, 2), voice.start(2)
    noise = torch.Generator().manual_seed(0)
    for at in range(10):
        pcm = (torch.randn(2, 1920, generator=noise) * 0.3).to(DEVICE)
        state, heard = voice.step(state, pcm)
        mine = frames.frame(pcm)
        assert torch.equal(mine.codes, heard.codes) and torch.equal(mine.text, heard.text)
        torch.testing.assert_close(mine.pcm, heard.pcm, rtol=1e-3, atol=1e-4)
        if at == 5:
            rows = torch.tensor([True, False], device=DEVICE)
            state = voice.reset(state, rows)
            frames.reset(rows)
    frames.check()


def test_moshi_answers() -> None:
    asked = torch.randn(3 * 1920 + 100, generator=torch.Generator().manual_seed(1)) * 0.3
    found = []
    for place in PLACES:
        voice = MoshiVoice(moshi(6).to(place), text=Sampling(), audio=Sampling())
        sounds = list(voice.reply(asked, 24_000, seconds=0.8))
        assert all(sound.pcm.device.type == "cpu" or place != "cpu" for sound in sounds)
        again = list(voice.run(asked.split(700)))
        found.append((codes_of(sounds), codes_of(again)))
    assert found[0] == found[1]


def test_a_pipeline_of_moshi(tmp_path: Path) -> None:
    moshi().save_pretrained(tmp_path)
    talker_models.letters().save_pretrained(tmp_path)
    pipe = mmfast.pipeline("speech-chat", str(tmp_path), device=ON, dtype="float32", seconds=0.8)
    spoken = pipe(torch.zeros(8000))
    assert spoken.rate == 24_000 and spoken.pcm.device.type == "cpu"


@pytest.mark.parametrize("drafted", [False, True])
def test_csm_steps(drafted: bool) -> None:
    found = []
    for place in PLACES:
        steps = CsmSteps(csm().to(place), **({"drafter": copy_frame} if drafted else {}))
        state, codes = steps.start([[SpeechContext(p)] for p in prompts(4, words=90)]), []
        for _ in range(4):
            state, frame = steps.step(state)
            codes.append(frame.cpu())
        found.append(torch.stack(codes))
    assert torch.equal(*found)


CODECS = ("mimi", "encodec", "dac", "xcodec", "higgs_tokenizer", "vibevoice_tokenizer",
          "pocket_tokenizer", "xcodec2")  # fmt: skip


@pytest.mark.parametrize("name", CODECS)
def test_codecs(name: str) -> None:
    """Codes of the same sound, and the sound of the same codes, in pieces and as a whole."""
    model, found = getattr(codec_cases, name)(), []
    for place in PLACES:
        codec = load_codec(copy.deepcopy(model).to(place))
        pcm = codec_cases.noise(1, codec.hop * 12).to(place)
        codes = codec.encode(pcm)
        sound = codec.decode(codes)
        state, parts = codec.decoder.start(1), []
        for at in range(codes.shape[-1]):
            state, part = codec.decoder.step(state, codes[..., at : at + 1])
            parts.append(part)
        parts.append(codec.decoder.finish(state))
        torch.testing.assert_close(torch.cat(parts, -1), sound, atol=1e-3, rtol=1e-3)
        found.append((codes.cpu(), sound.cpu()))
    if not found[0][0].is_floating_point():
        assert (found[0][0] == found[1][0]).float().mean() > 0.98  # ties of random books
        return
    torch.testing.assert_close(found[0][0], found[1][0], atol=1e-3, rtol=1e-3)


def _folder(make: Any, place: Path) -> str:
    place.mkdir()
    try:
        return str(make(place))
    except ImportError as error:
        pytest.skip(str(error)[:100])


@pytest.mark.parametrize("kind", [*listener_models.BUILDERS])
def test_listeners(kind: str, tmp_path: Path) -> None:
    folder = _folder(listener_models.BUILDERS[kind], tmp_path / "model")
    sounds, texts = listener_models.noise(9600, 16000), []
    for place in PLACES:
        pipe = mmfast.pipeline("speech-to-text", folder, device=place, dtype="float32")
        texts.append([each.text for each in pipe(sounds)])
    assert len(texts[1]) == 2
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    "kind",
    [
        "wav2vec2",
        "parakeet_ctc",
        "nemotron_asr_streaming",
        "kyutai_speech_to_text",
        "voxtral_realtime",
    ],
)
def test_listeners_of_a_stream(kind: str, tmp_path: Path) -> None:
    folder = _folder(listener_models.BUILDERS[kind], tmp_path / "model")
    sound = listener_models.noise(24_000)[0]
    pipe = mmfast.pipeline("speech-to-text", folder, device=ON, dtype="float32")
    assert isinstance("".join(str(each) for each in pipe.stream(sound.split(4000))), str)


TALKERS = ("vits", "speecht5", "bark", "seamless", "dia", "higgs", "vibevoice", "pocket_tts")


@pytest.mark.parametrize("kind", TALKERS)
def test_talkers(kind: str, tmp_path: Path) -> None:
    folder = _folder(getattr(talker_models, kind), tmp_path / "model")
    for place in PLACES:
        try:
            pipe = mmfast.pipeline("text-to-speech", folder, device=place, dtype="float32")
        except mmfast.MmfastError as error:
            if "install" in str(error):
                pytest.skip(str(error)[:100])
            raise
        state = torch.get_rng_state()
        spoken = pipe("hello there.")
        assert torch.equal(torch.get_rng_state(), state)
        assert spoken.pcm.device.type == "cpu" and torch.isfinite(spoken.pcm).all()


def test_omni_speaks() -> None:
    from omni_models import omni, prompt

    from mmfast.models.speech.omni import OmniSpeech

    class Words:
        """Letters to ids."""

        tokenizer = None

        def __call__(self, text: Any = None, audio: Any = None, **_: Any) -> Any:
            if isinstance(text, str):
                return {"input_ids": [10 + ord(letter) % 25 for letter in text]}
            return prompt(7, 3)

        def apply_chat_template(self, *_: Any, **__: Any) -> str:
            return "asked"

        def decode(self, ids: Any, **_: Any) -> str:
            return "".join(chr(97 + int(i) % 26) for i in ids)

    lengths = []
    for place in PLACES:
        words = Words()
        words.tokenizer = words
        this = OmniSpeech(omni().to(place), words, num_steps=2, max_words=10, max_codes=20)
        sounds = list(this.speak("hello"))
        lengths.append(sum(len(sound.pcm) for sound in sounds))
    assert lengths[0] == lengths[1] > 0


# --- commands -------------------------------------------------------------------------------------


def command(*words: str) -> Any:
    """The document that a command prints with --json."""
    from mmfast.cli import app

    result = CliRunner().invoke(app, [*words, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.parametrize("mode", ["exact", "fast", "turbo"])
def test_command_say(mode: str, tmp_path: Path) -> None:
    out = tmp_path / "out.wav"
    found = command("say", "a red dot", "-o", str(out), "--device", ON, "--mode", mode)
    assert found["seconds"] > 0 and out.stat().st_size > 1000


def test_commands_that_listen(tmp_path: Path) -> None:
    file, out = tmp_path / "in.wav", tmp_path / "out.wav"
    mmfast.pipeline("text-to-speech", device="cpu")("what is two plus three?").save(file)
    texts = [command("transcribe", str(file), "--device", place) for place in PLACES]
    assert json.dumps(texts[0], sort_keys=True).count("two") == 1 or texts[0]
    found = command("talk", str(file), "-o", str(out), "--device", ON, "--whole")
    assert found["heard"]


@pytest.mark.parametrize("job", ["drafts", "moshi"])
def test_bench_of_moshi(job: str) -> None:
    from mmfast.bench.suites import decode as moshi_bench

    if job == "drafts":
        pytest.skip("measured by a suite of its own")
    rows = moshi_bench.measure_moshi(moshi_bench.TINY, "tiny", (2,), 3, ON, copy_gb_s=10.0)
    assert all(row["same_codes"] == 1.0 for row in rows)
