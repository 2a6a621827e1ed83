"""Stock recognisers that stream: any split of the sound, and the text of the whole recording."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from listener_models import RATE, LoadedListeners, noise

from mmfast.core.errors import MediaError, MmfastError, ModelError, SpecError

# of stock classes that are driven by hand
pytestmark = [
    pytest.mark.filterwarnings("ignore:Using the model-agnostic default"),
    pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask"),
]
SOUND = noise(40000)[0]
STREAMS = ("wav2vec2", "parakeet_ctc", "nemotron_asr_streaming", "voxtral_realtime",
           "kyutai_speech_to_text")  # fmt: skip


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> LoadedListeners:
    return LoadedListeners(tmp_path_factory)


@pytest.mark.parametrize("kind", STREAMS)
def test_any_split_gives_the_same_text(kind: str, load: Any) -> None:
    this = load(kind)
    how = {"chunk": 0.5, "context": 0.25} if kind in ("wav2vec2", "parakeet_ctc") else {}
    whole = "".join(this.stream([SOUND], RATE, **how))
    uneven = [SOUND[:1], SOUND[1:1], SOUND[1:7777], SOUND[7777:]]
    for chunks in (SOUND.split(1600), uneven):
        assert "".join(this.stream(chunks, RATE, **how)) == whole != ""


@pytest.mark.parametrize("kind", ["voxtral_realtime", "kyutai_speech_to_text"])
@pytest.mark.parametrize("length", [640, 9601, 40000])
def test_a_stream_is_the_recording(kind: str, length: int, load: Any) -> None:
    this = load(kind)
    streamed = "".join(this.stream(SOUND[:length].split(1600), RATE))
    assert streamed.strip() == this.transcribe(SOUND[:length], RATE)


@pytest.mark.parametrize("kind", STREAMS)
def test_a_stream_of_silence_is_no_text(kind: str, load: Any) -> None:
    this = load(kind)
    for chunks in ([], [torch.zeros(0)], torch.zeros(16000).split(1600), [SOUND[:16000] / 1e4]):
        assert "".join(this.stream(chunks, RATE)) == ""
    late = torch.cat([torch.zeros(16000), SOUND])  # that silence is part of what is heard
    if kind in ("voxtral_realtime", "kyutai_speech_to_text"):
        assert "".join(this.stream(late.split(1600), RATE)).strip() == this.transcribe(late, RATE)


@pytest.mark.parametrize(
    ("name", "value"),
    [("chunk", "a"), ("chunk", 0), ("chunk", -1.0), ("chunk", float("nan")), ("context", -0.5)],
)
def test_seconds_of_a_stream_are_checked(name: str, value: Any, load: Any) -> None:
    this = load("wav2vec2")
    with pytest.raises(SpecError, match=rf"{name}=.* give seconds"):
        list(this.stream([SOUND], RATE, **{name: value}))
    with pytest.raises(MmfastError, match=rf"{name} of .* of a stream only"):
        this.hear([SOUND], RATE, **{name: 1.0})


@pytest.mark.parametrize("kind", ["wav2vec2", "parakeet_ctc"])
def test_a_stream_whose_context_reaches_the_ends_is_the_recording(kind: str, load: Any) -> None:
    this = load(kind)
    streamed = "".join(this.stream(SOUND.split(1600), RATE, chunk=0.5, context=3.0))
    assert streamed == this.transcribe(SOUND, RATE)


def test_nemotron_streams_as_its_class_does_by_hand(load: Any) -> None:
    """The oracle hands the stock `generate` the parts of a recording padded to whole parts."""
    this = load("nemotron_asr_streaming")
    processor = this.processor
    frames, hop = processor.num_mel_frames_per_audio_chunk, processor.feature_extractor.hop_length
    sound = torch.nn.functional.pad(SOUND, (0, 2 * frames * hop))
    half = processor.feature_extractor.n_fft // 2

    def parts() -> Iterator[torch.Tensor]:
        first = processor(
            sound[: processor.num_samples_first_audio_chunk].numpy(), sampling_rate=RATE,
            is_streaming=True, is_first_audio_chunk=True,
        )  # fmt: skip
        done = processor.num_mel_frames_first_audio_chunk
        yield first["input_features"][:, :done]
        while done * hop - half < len(SOUND):
            start = done * hop - half
            yield processor(
                sound[start : start + processor.num_samples_per_audio_chunk].numpy(),
                sampling_rate=RATE, is_streaming=True, is_first_audio_chunk=False,
            )["input_features"]  # fmt: skip
            done += frames

    ids = this.model.generate(
        input_features=parts(), num_lookahead_tokens=processor.default_num_lookahead_tokens
    ).sequences
    (text,) = processor.batch_decode(ids, skip_special_tokens=True)
    assert "".join(this.stream(SOUND.split(1600), RATE)).strip() == text.strip()


@pytest.mark.parametrize("kind", ["voxtral_realtime", "kyutai_speech_to_text", "parakeet_ctc"])
def test_text_comes_before_the_sound_ends(kind: str, load: Any) -> None:
    this = load(kind)
    taken = []

    def chunks() -> Iterator[torch.Tensor]:
        for number, chunk in enumerate(noise(64000)[0].split(1600)):
            taken.append(number)
            yield chunk

    options = {"chunk": 0.5, "context": 0.5} if kind == "parakeet_ctc" else {}
    heard = this.stream(chunks(), RATE, **options)
    if kind == "voxtral_realtime":  # words are told when they end, and letters here never do
        assert "".join(heard)
        return
    assert next(heard) and len(taken) < 40


@pytest.mark.parametrize("kind", ["nemotron_asr_streaming", "voxtral_realtime"])
def test_streams_on_one_model_do_not_touch_each_other(kind: str, load: Any) -> None:
    this = load(kind)
    sounds = [SOUND, noise(24000, seed=1)[0]]
    alone = ["".join(this.stream(sound.split(1600), RATE)) for sound in sounds]
    found: dict[int, str] = {}

    def listen(number: int) -> None:
        found[number] = "".join(this.stream(sounds[number].split(1600), RATE))

    threads = [threading.Thread(target=listen, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[number] for number in range(2)] == alone


def test_leaving_a_stream_stops_the_model(load: Any) -> None:
    before = threading.active_count()
    heard = load("nemotron_asr_streaming").stream(SOUND.split(1600), RATE)
    next(heard)
    heard.close()
    assert threading.active_count() == before


def test_an_error_in_the_stream_reaches_its_reader(load: Any) -> None:
    for kind in STREAMS:
        with pytest.raises(MediaError, match="float samples"):
            list(load(kind).stream([torch.zeros(3, 4)], RATE))


@pytest.mark.parametrize("kind", ["whisper", "parakeet_tdt", "moonshine", "qwen3_asr"])
def test_others_say_why_they_do_not_stream(kind: str, load: Any) -> None:
    with pytest.raises(ModelError, match=r"does not stream: .*kyutai_speech_to_text") as error:
        load(kind).stream([SOUND], RATE)
    assert "\n" not in str(error.value)


def test_lookahead_is_of_those_that_were_trained(load: Any, tmp_path: Path) -> None:
    this = load("nemotron_asr_streaming")
    with pytest.raises(ModelError, match="lookahead"):
        list(this.stream([SOUND], RATE, lookahead=5))
    stock = this.transcribe(SOUND, RATE)
    assert this.transcribe(SOUND, RATE, lookahead=0) != stock
    assert this.transcribe(SOUND, RATE) == stock  # of that call alone
