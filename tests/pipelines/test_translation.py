"""`speech-translation`: embedded model, stock classes from folders, streams, errors, command."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import cli_runs
import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForSeq2SeqLM,
    BartConfig,
    M2M100Config,
    MarianConfig,
    MBartConfig,
    PreTrainedTokenizerFast,
    T5Config,
)

import mmfast
from mmfast.core.errors import MediaError, MmfastError, ModelError, SpecError
from mmfast.frontends.audio.wav import write_sound
from mmfast.models.translation import Translator
from mmfast.pipelines.translation import SpeechTranslation
from mmfast.tiny.speech.recordings import RATE, say
from mmfast.tiny.translation.grammar import (
    COLOURS,
    DIGITS,
    MOVES,
    PACES,
    SHAPES,
    SIDES,
    SIZES,
    TENS,
    sentence,
)
from mmfast.tiny.translation.train import make_tokenizer
from mmfast.voice.interpreter import joined

SENTENCE = "the red circle is next to the blue star and the big green square moves left"
# Words of English sentences: those of the grammar that are none of Velda's
TABLES = (*SHAPES, *COLOURS, *SIZES, *DIGITS, *TENS, *MOVES, *SIDES, *PACES, "the is next to and a")
TABLES += ("up down from faster than appears before after i like but not has there are on screen",)
VELDA = "ronda ruva stela bima apud esa e kado gelo grano levo mira"
SMALL = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2}
SMALL |= {"decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "d_model": 16}
SMALL |= {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 1, "bos_token_id": 1}
CONFIGS = {
    "marian": lambda v: MarianConfig(vocab_size=v, max_position_embeddings=300, **SMALL),
    "bart": lambda v: BartConfig(vocab_size=v, max_position_embeddings=300, **SMALL),
    "mbart": lambda v: MBartConfig(vocab_size=v, max_position_embeddings=300, **SMALL),
    "m2m_100": lambda v: M2M100Config(vocab_size=v, max_position_embeddings=300, **SMALL),
    "t5": lambda v: T5Config(
        vocab_size=v, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2,
        decoder_start_token_id=0,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def pipe() -> SpeechTranslation:
    return mmfast.pipeline("speech-translation")


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("said") / "said.wav"
    write_sound(path, say(f"{SENTENCE}.").pcm, RATE)
    return path


@pytest.fixture
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A tiny random model of a stock class with the embedded words."""
    torch.manual_seed(0)
    words = make_tokenizer()
    config = CONFIGS[request.param](len(words))
    model = AutoModelForSeq2SeqLM.from_config(config)
    model.generation_config.suppress_tokens = [0, 2]  # no trained model writes these
    model.generation_config.forced_eos_token_id = None
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(0.3 * torch.randn_like(weight))
    model.save_pretrained(tmp_path)
    words.save_pretrained(tmp_path)
    return tmp_path


def test_unseen_sentences_are_translated(pipe: SpeechTranslation) -> None:
    rng = np.random.default_rng(7)
    pairs = [sentence(rng, "eval") for _ in range(60)]
    found = pipe.translate([english for english, _ in pairs])
    right = sum(text == velda for text, (_, velda) in zip(found, pairs, strict=True))
    assert right >= 54, right
    assert pipe.translate("the red circle moves left") == "ronda ruva levo mira"
    assert pipe.translate([]) == [] and pipe.translate(["", "  "]) == ["", ""]
    assert pipe.translate(["", "the red circle moves left"]) == ["", "ronda ruva levo mira"]


def test_speech_is_translated_before_it_ends(pipe: SpeechTranslation, recording: Path) -> None:
    found = pipe(recording)
    assert found.heard == SENTENCE and found.text == str(found) == VELDA
    assert found.pieces[0].at < 0.7 * found.seconds and 0 < found.lag < 0.8 * found.seconds
    late = pipe(recording, policy="offline")
    assert late.text == VELDA and len(late.pieces) == 1
    assert late.lag == late.pieces[0].at > 0.9 * late.seconds
    both = pipe([recording, recording])
    assert [each.text for each in both] == [VELDA] * 2 and pipe([]) == []
    assert {row.stage for row in found.trace.rows} == {"listen", "translate"}
    assert found.trace.rows[0].tokens_in > late.trace.rows[0].tokens_in == 1


@pytest.mark.rest_is_slow(3, 1)
@pytest.mark.parametrize(
    "policy", ["agreement:2", "wait:4", "greedy", "confidence:0.9", "learned:0.9", "interleaved:1"]
)
def test_a_stream_is_the_recording(pipe: SpeechTranslation, recording: Path, policy: str) -> None:
    """Cut anywhere, the sound gives the same pieces at the same times."""
    pcm = say(f"{SENTENCE}.").pcm
    whole = list(pipe.stream(recording, policy=policy))
    for size in (160, 1000, 9999):
        assert list(pipe.stream(iter(pcm.split(size)), RATE, policy=policy)) == whole
    assert joined(whole) == pipe(recording, policy=policy).text
    assert [piece.final for piece in whole].count(True) == 1 and whole[-1].final


def test_a_recording_that_is_cut_short_is_translated_with_a_note(
    pipe: SpeechTranslation, recording: Path, tmp_path: Path
) -> None:
    path = tmp_path / "call.wav"
    path.write_bytes(recording.read_bytes()[:-2000])
    with pytest.warns(UserWarning, match="call.wav' is truncated") as told:
        found = pipe(path, policy="offline")
    assert [str(each.message) for each in told] == found.trace.notes and found.text


def test_sentences_end_where_the_speaker_pauses(pipe: SpeechTranslation) -> None:
    first, second = (
        say(text).pcm for text in ("the red circle moves left.", "peter has two black stars.")
    )
    gap = torch.zeros(RATE)
    found = pipe((torch.cat([first, gap, second, gap]).numpy(), RATE))
    assert found.text == "ronda ruva levo mira peter stelan nokan du hava"
    assert sum(piece.final for piece in found.pieces) == 2


@pytest.mark.parametrize("sound", ["silence", "noise"])
def test_nothing_said_is_nothing_translated(pipe: SpeechTranslation, sound: str) -> None:
    pcm = torch.zeros(3 * RATE)
    if sound == "noise":
        pcm = 0.01 * torch.randn(3 * RATE, generator=torch.Generator().manual_seed(0))
    found = pipe((pcm.numpy(), RATE))
    assert found.text == "" == found.heard and found.lag == 0


def test_a_model_that_reads_and_writes_in_one_sequence(
    pipe: SpeechTranslation, recording: Path
) -> None:
    """The pipeline that translates by another model takes the embedded one for such a policy."""
    found = pipe(recording, policy="interleaved:1")
    assert found.text == VELDA and found.heard == SENTENCE
    assert 0 < found.lag < pipe(recording, policy="offline").lag / 2
    own = mmfast.pipeline("speech-translation", "tiny-interleaved")
    assert own.policy.name == "interleaved:1" and own.translate(SENTENCE) == VELDA
    lags = []
    for late in (0, 2, 5):
        pieces = list(own.stream_text(SENTENCE.split(), policy=f"interleaved:{late}"))
        assert joined(pieces) == VELDA
        lags.append(sum(piece.at * piece.words for piece in pieces))
    assert lags == sorted(set(lags))


def test_a_joint_stream_is_parted_into_transcript_and_translation(
    pipe: SpeechTranslation,
) -> None:
    """Each text has words of its own language alone, and no marks; what was written stays."""
    pieces = list(pipe.stream_text(SENTENCE.split(), policy="joint:1"))
    english = {word for one in TABLES for word in one.split()}
    assert set(pieces[-1].heard.split()) <= english and not set(joined(pieces).split()) & english
    assert len(pieces) > 2 and pieces[-1].final
    starts = [piece.heard for piece in pieces]
    assert all(later.startswith(one) for one, later in pairwise(starts)) and starts[0]


def test_a_policy_without_its_head_is_refused() -> None:
    words = make_tokenizer()
    torch.manual_seed(0)
    model = AutoModelForSeq2SeqLM.from_config(CONFIGS["marian"](len(words))).eval()
    bare = mmfast.pipeline("speech-translation", (model, words))
    with pytest.raises(SpecError, match="train_stability"):
        bare.stream_text(["a"], policy="learned:0.9")
    with pytest.raises(SpecError, match="tiny-interleaved"):
        bare.stream_text(["a"], policy="interleaved:1")


def test_words_that_are_typed(pipe: SpeechTranslation) -> None:
    pieces = list(pipe.stream_text(SENTENCE.split()))
    assert list(pipe.stream_text(SENTENCE)) == list(pipe.stream_text([SENTENCE])) == pieces
    assert joined(pieces) == VELDA
    assert pieces[0].at < len(SENTENCE.split()) / 2
    assert list(pipe.stream_text([SENTENCE[:20], SENTENCE[20:]]))[-1].final
    with pytest.raises(MmfastError, match="no text"):
        pipe.translate(3)


def test_a_text_without_place_in_the_model_is_one_line(pipe: SpeechTranslation) -> None:
    """It was an index out of range; what fits is translated to the last place."""
    places = pipe.translator.model.config.max_position_embeddings
    with pytest.raises(ModelError, match=f"has {places} places; translate it in sentences"):
        pipe.translate("and " * (places + 1))
    found = pipe.translator.hypothesis("the red circle", [5] * (places - 3))
    assert len(found.words) <= 2


def test_what_is_no_text_is_one_line(pipe: SpeechTranslation) -> None:
    for words in (None, 3):
        with pytest.raises(MmfastError, match="is no text"):
            pipe.stream_text(words)
    with pytest.raises(MmfastError, match="int cannot be said or translated"):
        list(pipe.stream_text(["red", 3]))


def test_a_session_takes_chunks_of_any_kind(pipe: SpeechTranslation, recording: Path) -> None:
    """Integers, channels, lists and numbers that are none, as other streams do."""
    pcm = (say(f"{SENTENCE}.").pcm * 32768).round().clamp(-32768, 32767)
    for chunk in (pcm.numpy().astype(np.int16), np.stack([pcm.numpy() / 32768] * 2)):
        session = pipe.open("offline")
        assert joined([*session.push(chunk), *session.finish()]) == VELDA
    assert pipe.open().push([float("nan")] * 100) == []
    for wrong in (None, "a", torch.zeros(1, 2, 10)):
        with pytest.raises(MediaError, match="the chunk"):
            pipe.open().push(wrong)


@pytest.mark.parametrize("folder", sorted(CONFIGS), indirect=True)
def test_stock_classes_from_folders(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy translation of the class itself; chances are those of one pass over all words."""
    monkeypatch.setattr("mmfast.models.translation.LONGEST", 12)
    pipe = mmfast.pipeline("speech-translation", folder, dtype="float32")
    model = AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    words = PreTrainedTokenizerFast.from_pretrained(folder)
    texts = ["the red circle moves left", "peter has two stars and the video ends"]
    start = torch.tensor([[model.config.decoder_start_token_id]])
    for text, found in zip(texts, pipe.translate(texts), strict=True):
        inputs = words(text, return_tensors="pt")
        alone = model.generate(
            **inputs, decoder_input_ids=start, forced_bos_token_id=None, max_new_tokens=12,
            do_sample=False,
        )  # fmt: skip
        assert found == words.decode(alone[0], skip_special_tokens=True)
    whole = pipe.translator.hypothesis(texts[1])
    ids = [token for word in whole.ids for token in word]
    later = pipe.translator.hypothesis(texts[1], ids[:3])
    assert later.words[: len(whole.words) - 3] == whole.words[3:]
    with torch.no_grad():
        logits = model(**inputs, decoder_input_ids=torch.tensor([[int(start), *ids[:-1]]])).logits[
            0
        ]
    expected = [float(row.softmax(-1)[token]) for row, token in zip(logits, ids, strict=True)]
    assert whole.chances == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    ("options", "kind", "part"),
    [
        ({"policy": "wait:0"}, SpecError, "whole number"),
        ({"every": 0.0}, SpecError, "every=0.0"),
        ({"silence": 99}, SpecError, "silence=99"),
        ({"polcy": "greedy"}, MmfastError, "policy"),
        ({"target": "deu_Latn"}, ModelError, "deu_Latn"),
        ({"model": "assets/models/tiny-video"}, ModelError, "no encoder-decoder"),
        ({"model": "./nowhere"}, ModelError, "nowhere"),
        ({"model": "assets/models/tiny-text"}, ModelError, "no encoder-decoder"),
        ({"model": "tiny-translate", "policy": "interleaved:1"}, SpecError, "tiny-interleaved"),
        ({"model": "tiny-interleaved", "policy": "wait:3"}, SpecError, "interleaved:N"),
        ({"policy": "interleaved:9"}, SpecError, "latency"),
        ({"listener": "assets/models/tiny-video"}, ModelError, "llava_onevision"),
    ],
)
def test_bad_options_are_one_line(
    options: dict[str, Any], kind: type[Exception], part: str
) -> None:
    with pytest.raises(kind) as caught:
        mmfast.pipeline("speech-translation", **options)
    assert part in str(caught.value) and "\n" not in str(caught.value)


def test_languages_of_a_tokenizer() -> None:
    words = make_tokenizer()
    words.add_special_tokens({"additional_special_tokens": ["eng_Latn", "__de__"]})
    torch.manual_seed(0)
    model = AutoModelForSeq2SeqLM.from_config(CONFIGS["m2m_100"](len(words))).eval()
    german = Translator(model, words, source="eng_Latn", target="de")
    assert german._start == [1, words.convert_tokens_to_ids("__de__")]
    assert german.hypothesis("the red circle").ids
    with pytest.raises(ModelError, match=r"'fr'; choices: de, eng_Latn$"):
        Translator(model, words, target="fr")


def test_command(recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*argv: str) -> tuple[int, str, str]:
        return cli_runs.run(capsys, *argv)

    assert run("translate", str(recording))[:2] == (0, f"{VELDA}\n")
    code, out, _ = run("translate", str(recording), "--policy", "wait:3", "--stream")
    assert code == 0 and out.count("\n") == 1 and out.startswith("ronda ruva ")
    for policy in ("interleaved:1", "learned:0.9"):
        assert run("translate", str(recording), "--policy", policy)[:2] == (0, f"{VELDA}\n")
    code, out, _ = run("translate", str(recording), "--policy", "joint")
    assert code == 0 and len(out.split()) > 5 and "<" not in out
    code, out, _ = run("translate", str(recording), "--json")
    found = json.loads(out)
    assert code == 0 and found["text"] == VELDA and found["pieces"][-1]["final"]
    assert run("translate", "--text", "the red circle moves left")[1] == "ronda ruva levo mira\n"
    code, out, error = run("translate", "--text", "the red lamp moves left")
    assert code == 0 and out and error == "mmfast: note: the translator does not know: lamp\n"
    assert run("translate", "--text", "the red lamp moves left", "--stream")[2] == error
    for argv in (
        ["--text", " "],
        [],
        [str(recording), "--text", "x"],
        [str(recording), "--policy", "never"],
    ):
        code, out, error = run("translate", *argv)
        assert code == 2 and not out and len(error.strip().splitlines()) == 1, argv
