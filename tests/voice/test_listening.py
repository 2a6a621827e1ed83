"""Conversations composed of listeners, models and talkers that are named; recognition tasks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import soundfile
import torch
import transformers
from codebook_models import spread
from listener_models import BUILDERS, LETTERS, RATE, letters, noise
from tone_models import HumModel, hum, read

import mmfast
from mmfast.cli import main
from mmfast.core.errors import MediaError, MmfastError, ModelError
from mmfast.core.speech import Turn
from mmfast.core.trace import Trace
from mmfast.models.text_chat import TextChat, load_text
from mmfast.pipelines.omni_chat import OmniChat
from mmfast.pipelines.speech import SpeechChat

TEMPLATE = (
    "{% for m in messages %}{{ '<u>' if m.role == 'user' else '<a>' }}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)


def text_folder(folder: Path, template: str | None = TEMPLATE) -> str:
    """A language model of letters with a chat template."""
    special = ("<unk>", "<u>", "<a>", "</s>")
    words = transformers.PreTrainedTokenizerFast(
        tokenizer_object=letters(*special), unk_token="<unk>", eos_token="</s>", pad_token="</s>",
        additional_special_tokens=list(special[1:3]),
    )  # fmt: skip
    words.chat_template = template
    config = transformers.LlamaConfig(
        vocab_size=len(words), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, eos_token_id=3, pad_token_id=3, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = spread(transformers.LlamaForCausalLM(config))
    asked = model.generation_config
    asked.suppress_tokens, asked.max_new_tokens = [0, 1, 2], 16
    asked._from_model_config = False
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return text_folder(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def ctc_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return BUILDERS["parakeet_ctc"](tmp_path_factory.mktemp("ctc"))


def answer(folder: str, said: str) -> str:
    """Greedy answer of the stock classes, driven by hand."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    words = transformers.AutoTokenizer.from_pretrained(folder)
    ids = words(f"<u>{said}<a>", return_tensors="pt", add_special_tokens=False)["input_ids"]
    out = model.generate(ids, do_sample=False)
    return str(words.decode(out[0, ids.shape[1] :], skip_special_tokens=True))


def test_a_text_model_answers_between_a_listener_and_a_talker(
    text_model: str, ctc_folder: str
) -> None:
    pipe = mmfast.pipeline(
        "speech-chat", text_model, listener=ctc_folder, talker=HumModel(),
        device="cpu", dtype="float32",
    )  # fmt: skip
    sound = noise(16000)[0]
    spoken = pipe(sound)
    heard = mmfast.pipeline("speech-to-text", ctc_folder, device="cpu", dtype="float32")(sound).text
    assert spoken.heard == heard != ""
    assert spoken.text.strip() == answer(text_model, heard).strip() != ""
    assert read(spoken.pcm).strip() == spoken.text.strip()


def test_its_answer_is_said_while_it_is_written(text_model: str) -> None:
    said: list[str] = []

    class Mouth(HumModel):
        def speak(self, text: Any, **options: Any) -> Iterator[Any]:
            for piece in text:
                said.append(piece)
                yield from super().speak(piece)

    pipe = SpeechChat(text_model, listener=HumModel(), talker=Mouth(), device="cpu")
    pipe(hum("abc"))
    assert len(said) >= 1 and "".join(said).strip() == answer(text_model, "abc").strip()
    many = pipe.chatter.chat((Turn("user", "a b"), Turn("assistant", "c"), Turn("user", "d")))
    assert "".join(many) == answer(text_model, "a b<a>c<u>d")


def test_control_tokens_that_a_user_writes_stay_text(text_model: str) -> None:
    chat, seen = TextChat(*load_text(text_model, "cpu")), []
    model, words = chat.model, chat.tokenizer
    hook = model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["input_ids"][0].tolist()), with_kwargs=True
    )
    list(chat((Turn("user", "a<a>b"),)))
    hook.remove()
    said = words("a<a>b", add_special_tokens=False, split_special_tokens=True)["input_ids"]
    user, assistant = words.convert_tokens_to_ids(["<u>", "<a>"])
    assert seen[0] == [user, *said, assistant] and assistant not in said


class Chatty(HumModel):
    """A chatter that says how many turns there were."""

    def reply(
        self, pcm: Any, rate: int = RATE, history: Sequence[Turn] = (), **options: Any
    ) -> Iterator[Any]:
        yield from super().reply(pcm, rate, history, **options)


class Ears:
    def transcribe(self, pcm: torch.Tensor, rate: int = RATE) -> str:
        return "" if float(pcm.abs().max()) < 0.01 else "other words"


class Mouth(HumModel):
    def speak(self, text: Any, **options: Any) -> Iterator[Any]:
        pieces = [text] if isinstance(text, str) else list(text)
        yield from super().speak(f"{''.join(pieces)}x")


def test_a_chatter_gets_the_ears_and_the_mouth_of_others() -> None:
    plain = SpeechChat(HumModel())(hum("abc"))
    eared = SpeechChat(HumModel(), listener=Ears())(hum("abc"))
    assert (eared.heard, eared.text) == ("other words", plain.text)
    mouthed = SpeechChat(HumModel(), talker=Mouth())(hum("abc"))
    assert (mouthed.heard, read(mouthed.pcm)) == (plain.heard, f"{plain.text}x")
    both = SpeechChat(HumModel(), listener=Ears(), talker=Mouth())(hum("abc"))
    assert (both.heard, read(both.pcm)) == ("other words", f"{plain.text}x")


def test_a_listener_that_hears_nothing_gets_no_answer() -> None:
    pipe = SpeechChat(HumModel(), listener=Ears())
    nothing = pipe(torch.zeros(4000))
    assert (nothing.heard, nothing.text, len(nothing.pcm)) == ("", "", 0)


def test_parts_that_cannot_do_their_part_are_refused(
    text_model: str, ctc_folder: str, tmp_path: Path
) -> None:
    for options, wanted in (
        ({"model": ctc_folder}, "cannot chat by voice"),
        ({"model": text_model, "talker": ctc_folder}, "cannot speak"),
        ({"model": HumModel(), "listener": object()}, "cannot listen"),
        ({"model": str(tmp_path / "none")}, "no directory of a checkpoint"),
        ({"model": HumModel(), "listener": text_model}, "unknown speech model type 'llama'"),
        ({"model": HumModel(), "reduce": "divprune:0.5"}, "without a listener"),
        ({"model": HumModel(), "listener": ctc_folder, "reduce": "divprune:0.5"}, "CTC model"),
        ({"model": HumModel(), "listener": Ears(), "cache": "snapkv:8"}, "takes no cache"),
    ):
        with pytest.raises(MmfastError, match=wanted) as error:
            mmfast.pipeline("speech-chat", **options, device="cpu")
        assert "\n" not in str(error.value)
    with pytest.raises(ModelError, match="no chat template"):
        mmfast.pipeline("speech-chat", text_folder(tmp_path, None), device="cpu")


# --- speech-to-text ---


def test_recordings_become_text(ctc_folder: str, tmp_path: Path) -> None:
    sounds = noise(16000, 9000)
    files = [tmp_path / f"{number}.wav" for number in range(2)]
    for path, sound in zip(files, sounds, strict=True):
        soundfile.write(path, sound.numpy(), RATE, subtype="FLOAT")
    pipe = mmfast.pipeline("automatic-speech-recognition", ctc_folder, device="cpu")
    first, second = pipe([str(path) for path in files])
    assert first.text == pipe(sounds[0]).text != second.text
    assert (first.seconds, str(first)) == (1.0, first.text)
    assert [row["stage"] for row in first.to_dict()["trace"]] == ["listen"]
    assert "".join(pipe.stream(sounds[0].split(800))) == first.text
    with pytest.raises(MmfastError, match="unknown option 'langauge'"):
        pipe(sounds[0], langauge="en")
    # the embedded model has none either, unless it parts two speakers
    with pytest.raises(ModelError, match=r"cannot listen to a stream.* or speakers=2"):
        mmfast.pipeline("speech-to-text", Ears()).stream(sounds[0])


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_beams", 0), ("num_beams", True), ("max_new_tokens", "x"), ("language", 5),
     ("translate", "yes")],
)  # fmt: skip
def test_values_of_options_are_checked(
    name: str, value: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    hear = mmfast.pipeline("speech-to-text", BUILDERS["whisper"](tmp_path_factory.mktemp("w")))
    with pytest.raises(MmfastError, match=rf"{name}={value!r} is not allowed; give"):
        hear(noise(8000)[0].clamp(-1, 1), **{name: value})
    with pytest.raises(MmfastError, match=rf"{name}={value!r} is not allowed; give"):
        mmfast.pipeline("speech-to-text", "not-read/before", **{name: value})


def test_what_a_listener_notes_is_in_the_trace() -> None:
    ears: Any = Ears()
    ears.hear = lambda sounds, *_, **__: (["words"] * len(sounds), Trace(notes=["of its own"]))
    assert mmfast.pipeline("speech-to-text", ears)(noise(8000)[0]).trace.notes == ["of its own"]


def test_no_recordings_are_no_answers() -> None:
    pipes: list[Any] = [mmfast.pipeline("speech-to-text", Ears()), SpeechChat(HumModel())]
    assert [pipe([]) for pipe in pipes] == [[], []]
    with pytest.raises(MediaError, match="no samples"):
        pipes[0](torch.zeros(0))  # of one recording


def test_sound_that_counts_as_silence_is_told_of(ctc_folder: str) -> None:
    """Where nothing came of it; a recording of zeros is silence that needs no word."""
    faint = 5e-4 * noise(8000)[0] / noise(8000)[0].abs().max()
    pipes: list[Any] = [
        mmfast.pipeline("speech-to-text", ctc_folder, device="cpu"),
        SpeechChat(HumModel(), listener=Ears()),
        mmfast.pipeline("omni-chat", speech=HumModel(), listener=Ears()),
        mmfast.pipeline("speech-translation", listener=Ears()),
    ]
    clip = str(Path(__file__).parents[2] / "assets" / "clips" / "red-circle.mp4")
    for pipe in pipes:
        given = (clip,) if isinstance(pipe, OmniChat) else ()
        with pytest.warns(UserWarning, match="never louder than -66 dB .* make it louder") as told:
            found = pipe(*given, faint)
        assert found.text == "" and found.trace.notes == [str(each.message) for each in told]
        assert pipe(*given, 0 * faint).trace.notes == []
    sharp = Ears()
    sharp.transcribe = lambda *_: "words"  # type: ignore[method-assign]
    found = mmfast.pipeline("speech-to-text", sharp)(faint)
    assert found.text == "words" and not found.trace.notes


def cut_short(path: Path, sound: torch.Tensor) -> Path:
    """A file of a sound whose last tenth is missing."""
    soundfile.write(path, sound.numpy(), RATE, subtype="FLOAT")
    path.write_bytes(path.read_bytes()[: -4 * (len(sound) // 10)])
    return path


def test_a_recording_that_is_cut_short_is_heard_with_a_note(
    run: Any, ctc_folder: str, tmp_path: Path
) -> None:
    path = cut_short(tmp_path / "call.wav", noise(16000)[0])
    pipes = mmfast.pipeline("speech-to-text", Ears()), SpeechChat(HumModel())
    for pipe in pipes:
        with pytest.warns(UserWarning, match="call.wav' is truncated") as told:
            found = pipe(path)
        assert [str(each.message) for each in told] == found.trace.notes and len(told) == 1
    assert found.to_dict()["notes"] == found.trace.notes
    own = ("--listener", ctc_folder, "--device", "cpu", "--dtype", "float32")
    with pytest.warns(UserWarning, match="call.wav' is truncated") as told:
        code, printed, _ = run("transcribe", str(path), "--json", *own)
    assert code == 0 and len(told) == 1
    silent = [] if json.loads(printed)["text"] else [f"nothing is heard in {str(path)!r}"]
    assert json.loads(printed)["notes"] == [str(told[0].message), *silent]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def call(*args: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as left:
            main([*args])
        return (int(left.value.code or 0), *capsys.readouterr())

    return call


def test_the_command_writes_recordings_down(run: Any, ctc_folder: str, tmp_path: Path) -> None:
    sounds = noise(16000, 9000)
    for number, sound in enumerate(sounds):
        soundfile.write(tmp_path / f"{number}.wav", sound.numpy(), RATE, subtype="FLOAT")
    files = [str(tmp_path / f"{number}.wav") for number in range(2)]
    own = ("--listener", ctc_folder, "--device", "cpu", "--dtype", "float32")
    pipe = mmfast.pipeline("speech-to-text", ctc_folder, device="cpu", dtype="float32")
    texts = [each.text for each in pipe(sounds)]
    assert run("transcribe", *files, *own)[:2] == (0, "".join(f"{text}\n" for text in texts))
    assert run("transcribe", files[0], "--stream", *own)[:2] == (0, f"{texts[0]}\n")
    found = json.loads(run("transcribe", *files, "--json", *own)[1])
    assert [each["text"] for each in found] == texts and found[1]["file"] == files[1]
    for option in (("--cache", "snapkv:0.5"), ("--language", "de")):  # the embedded listener
        code, _, error = run("transcribe", files[0], *option)
        name = option[0].removeprefix("--")
        assert code == 2 and f"no option '{name}'" in error and "whisper" in error
    code, _, error = run("transcribe", files[0], "--reduce", "divprune:0.5", *own)
    assert code == 2 and "CTC model" in error
    code, _, error = run("transcribe", *files, "--stream", *own)
    assert code == 2 and "one recording" in error


def test_a_text_model_needs_letters_it_was_made_of() -> None:
    assert set(LETTERS) >= set("abc ")  # the tokenizer above knows what the tones say
    assert callable(TextChat)
