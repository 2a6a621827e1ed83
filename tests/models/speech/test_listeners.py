"""Stock recognisers from folders write what their classes write when driven by hand."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from listener_models import BUILDERS, RATE, LoadedListeners, ctc, noise

from mmfast.core.errors import MediaError, MmfastError, ModelError, SpecError
from mmfast.models.speech.listeners.base import StockListener
from mmfast.models.speech.sound import cut
from mmfast.voice.models import load_voice

# of stock classes that are driven by hand
pytestmark = [
    pytest.mark.filterwarnings("ignore:Using the model-agnostic default"),
    pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask"),
]
SOUNDS = noise(9600, 16000, 12345)
CTC = ("wav2vec2", "wav2vec2-group", "hubert", "wavlm", "unispeech-sat")


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> LoadedListeners:
    return LoadedListeners(tmp_path_factory)


def by_hand(kind: str, this: Any, sound: torch.Tensor) -> str:
    """Text of one sound as the documentation of its class writes it down."""
    model, processor, array = this.model, this.processor, sound.numpy()
    with torch.no_grad():
        if kind in CTC:
            inputs = processor(array, sampling_rate=RATE, return_tensors="pt")
            found = processor.batch_decode(model(**inputs).logits.argmax(-1))
        elif kind == "voxtral_realtime":
            inputs = processor(array, return_tensors="pt")
            ids = model.generate(**inputs)[:, inputs["input_ids"].shape[1] :]
            found = processor.batch_decode(ids, skip_special_tokens=True)
        elif kind == "voxtral":
            inputs = processor.apply_transcription_request(
                [array], model_id="any", sampling_rate=RATE, format=["wav"]
            )
            ids = model.generate(**inputs)[:, inputs["input_ids"].shape[1] :]
            found = processor.batch_decode(ids, skip_special_tokens=True)
        elif kind == "qwen3_asr":
            inputs = processor.apply_transcription_request(array)
            ids = model.generate(**inputs)[:, inputs["input_ids"].shape[1] :]
            found = processor.decode(ids, return_format="transcription_only")
        elif kind == "kyutai_speech_to_text":
            inputs = processor(audio=up(array, RATE, 24000), sampling_rate=24000)
            ids = model.generate(input_values=inputs["input_values"])
            found = processor.batch_decode(ids, skip_special_tokens=True)
        elif kind == "moonshine":
            inputs = processor(array, sampling_rate=RATE, return_tensors="pt")
            most = max(round(len(array) / RATE * 6.5), 4)
            found = processor.batch_decode(
                model.generate(**inputs, max_new_tokens=most), skip_special_tokens=True
            )
        else:
            inputs = processor(array, sampling_rate=RATE, return_tensors="pt")
            out = model.generate(**inputs)
            ids = getattr(out, "sequences", out)
            found = processor.batch_decode(ids, skip_special_tokens=True)
    return str(found[0]).strip()


def up(array: Any, source: int, target: int) -> Any:
    """Samples at another rate, by the resampler that has tests of its own."""
    from mmfast.ops.audio import resample

    return resample(torch.from_numpy(array), source, target).numpy()


@pytest.mark.parametrize("kind", BUILDERS)
def test_a_listener_writes_what_its_class_writes_by_hand(kind: str, load: Any) -> None:
    this = load(kind)
    texts = [this.transcribe(sound, RATE) for sound in SOUNDS]
    assert texts == [by_hand(kind, this, sound) for sound in SOUNDS]
    assert len(set(texts)) > 1 and all(texts)  # they hear something, and not always the same


@pytest.mark.rest_is_slow(3, 1)
@pytest.mark.parametrize("kind", BUILDERS)
def test_a_batch_is_one_by_one(kind: str, load: Any) -> None:
    this = load(kind)
    alone = [this.transcribe(sound, RATE) for sound in SOUNDS]
    assert this.hear(SOUNDS, RATE)[0] == alone
    assert this.hear(SOUNDS, RATE, batch=2)[0] == alone


def test_a_norm_over_time_hears_no_padding(load: Any, tmp_path: Path) -> None:
    group = load_voice(ctc("Wav2Vec2", "group", mask=True)(tmp_path), "cpu", "float32")
    sounds = [sound.clamp(-1, 1) for sound in noise(16000, 7000, 23456, 9001, 16000, 1200)]
    for this in (load("moonshine"), group):
        assert this.hear(sounds, RATE)[0] == [this.transcribe(sound, RATE) for sound in sounds]


@pytest.mark.parametrize(
    ("kind", "shortest"), [("wav2vec2", 400), ("moonshine", 895), ("parakeet_rnnt", 160)]
)
def test_a_sound_without_a_frame_is_no_text(kind: str, shortest: int, load: Any) -> None:
    this, sound = load(kind), SOUNDS[0].clamp(-1, 1)
    assert this.shortest == shortest
    this.transcribe(sound[:shortest], RATE)  # is heard
    with pytest.warns(UserWarning, match=r"too short for .*, which hears \d+ ms or more") as told:
        texts, trace = this.hear([sound[: shortest - 1], sound], RATE)
    assert texts == ["", this.transcribe(sound, RATE)]  # the others of the batch are written down
    assert trace.notes == [str(each.message) for each in told]
    if this.streams:  # also what is left behind the last chunk
        chunks = sound[: 9600 - 8].split(8000)
        assert "".join(this.stream(chunks, RATE, chunk=0.1, context=0.0))
        assert not list(this.stream([sound[:9]], RATE))


@pytest.mark.parametrize("kind", ["parakeet_ctc", "whisper", "voxtral_realtime"])
def test_a_batch_shares_the_passes_of_the_model(kind: str, load: Any) -> None:
    this = load(kind)
    calls: list[int] = []
    first = next(m for m in this.model.modules() if isinstance(m, torch.nn.modules.conv._ConvNd))
    with_hook = first.register_forward_hook(lambda m, args, out: calls.append(len(args[0])))
    this.hear(SOUNDS, RATE)
    with_hook.remove()
    assert calls and set(calls) == {len(SOUNDS)}


@pytest.mark.parametrize("kind", ["whisper", "parakeet_ctc"])
def test_silence_is_no_text_and_wrong_sound_is_refused(kind: str, load: Any) -> None:
    this = load(kind)
    assert this.hear([torch.zeros(RATE), SOUNDS[0], torch.zeros(0)], RATE)[0] == [
        "", this.transcribe(SOUNDS[0], RATE), "",
    ]  # fmt: skip
    for wrong in (torch.zeros(2, 100), torch.tensor([float("nan")]), torch.zeros(9).long(), [0.1]):
        with pytest.raises(MediaError) as error:
            this.transcribe(wrong, RATE)
        assert "\n" not in str(error.value)


def test_long_sound_is_cut_where_it_is_quietest(load: Any) -> None:
    this = load("parakeet_ctc")
    loud = noise(24 * RATE, 12 * RATE)
    sound = torch.cat([loud[0], torch.zeros(RATE // 2), loud[1]])
    first, second = cut(sound, RATE, this.longest)
    assert 24 * RATE <= len(first) <= 24.5 * RATE
    assert torch.equal(torch.cat([first, second]), sound)
    assert this.transcribe(sound) == f"{this.transcribe(first)} {this.transcribe(second)}"


@pytest.mark.parametrize("rate", [8000, 44100])
def test_other_rates_are_resampled(rate: int, load: Any) -> None:
    this = load("parakeet_ctc")
    sound = noise(rate)[0]
    given = torch.from_numpy(up(sound.numpy(), rate, RATE))
    assert this.transcribe(sound, rate) == this.transcribe(given, RATE)


# --- options and stages ---


def test_whisper_takes_a_language_and_translates(load: Any) -> None:
    this = load("whisper")
    for options, how in (
        ({"language": "de"}, {"language": "de"}),
        ({"language": "en", "translate": True}, {"language": "en", "task": "translate"}),
        ({"max_new_tokens": 5}, {"max_new_tokens": 5}),
    ):
        inputs = this.processor(SOUNDS[0].numpy(), sampling_rate=RATE, return_tensors="pt")
        ids = this.model.generate(**inputs, **how)
        by_hand = this.processor.batch_decode(ids, skip_special_tokens=True)[0]
        assert this.transcribe(SOUNDS[0], RATE, **options) == by_hand
        assert this.tuned(**options).transcribe(SOUNDS[0], RATE) == by_hand
    with pytest.raises(ModelError, match=r"cannot listen so.*klingon"):
        this.transcribe(SOUNDS[0], RATE, language="klingon")


def test_dropped_frames_of_whisper_are_as_if_masked(load: Any) -> None:
    """The oracle keeps all frames and takes the others out of cross-attention."""
    this = load("whisper")
    inputs = this.processor(SOUNDS[1].numpy(), sampling_rate=RATE, return_tensors="pt")
    (text,), trace = this.hear([SOUNDS[1]], RATE, reduce="divprune:0.1", language="en")
    ((_, _, reduction),) = trace.reductions
    assert (reduction.n, reduction.m) == (1500, 150)
    gone = torch.ones(1500, dtype=torch.bool)
    gone[reduction.keep] = False
    layers = [layer.encoder_attn for layer in this.model.model.decoder.layers]

    def masked(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        mask = torch.zeros(1, 1, 1, 1500).masked_fill(gone, float("-inf"))
        return args, {**kwargs, "attention_mask": mask}

    hooks = [layer.register_forward_pre_hook(masked, with_kwargs=True) for layer in layers]
    try:
        ids = this.model.generate(inputs["input_features"], language="en")
    finally:
        for hook in hooks:
            hook.remove()
    assert text == this.processor.batch_decode(ids, skip_special_tokens=True)[0]
    assert text != this.transcribe(SOUNDS[1], RATE, language="en")  # frames that count were lost


@pytest.mark.parametrize("kind", ["whisper", "moonshine", "voxtral", "qwen3_asr"])
def test_all_frames_kept_change_nothing(kind: str, load: Any) -> None:
    this = load(kind)
    options = {"language": "en"} if kind in ("whisper", "qwen3_asr") else {}
    stock, _ = this.hear(SOUNDS, RATE, **options)
    kept = this.tuned(reduce="divprune:1.0", **options)
    assert kept.hear(SOUNDS, RATE)[0] == stock


ACTING = [
    *product(("voxtral", "qwen3_asr"), ({"reduce": "divprune:0.3"}, {"cache": "sink:2+window:6"})),
    *product(("whisper", "moonshine"), ({"cache": "knorm:0.3"},)),
]


@pytest.mark.parametrize(("kind", "stage"), ACTING)
def test_stages_act_as_attach_does(kind: str, stage: dict[str, str], load: Any) -> None:
    from mmfast.attach import attach

    this = load(kind)
    (text,), trace = this.hear(SOUNDS[:1], RATE, **stage)
    with attach(this.model, **stage) as acted:
        assert text == by_hand(kind, this, SOUNDS[0])
    assert [row.stage for row in trace.rows] == [row.stage for row in acted.rows] != []
    row = trace.rows[-1]
    assert 0 < row.tokens_out < row.tokens_in
    assert this.transcribe(SOUNDS[0], RATE) == by_hand(kind, this, SOUNDS[0])  # and leave no trace


def test_qwen3_asr_loses_tokens_as_if_they_were_never_there(load: Any) -> None:
    """The oracle removes them from the embeddings, at the positions they had."""
    from mmfast.attach import attach

    this = load("qwen3_asr")
    inputs = this.processor.apply_transcription_request(SOUNDS[0].numpy())
    with torch.no_grad(), attach(this.model, "divprune:0.4") as trace:
        logits = this.model(**inputs).logits
    model, ids = this.model, inputs["input_ids"][0]
    ((_, _, reduction),) = trace.reductions
    places = (ids == model.config.audio_token_id).nonzero()[:, 0]
    assert reduction.n == len(places) and reduction.m == round(0.4 * len(places))
    alive = ids != model.config.audio_token_id
    alive[places[reduction.keep]] = True
    sound = {name: inputs[name] for name in ("input_features", "input_features_mask")}
    with torch.no_grad():
        embeds = model.get_input_embeddings()(ids).clone()
        embeds[places] = model.model.get_audio_features(**sound, return_dict=True).pooler_output
        kept = alive.nonzero()[:, 0]
        out = model.model.language_model(
            inputs_embeds=embeds[kept][None],
            position_ids=kept[None],
            attention_mask=torch.ones(1, len(kept), dtype=torch.int64),
            use_cache=False,
        )
        assert torch.equal(logits[0], model.lm_head(out.last_hidden_state[0]))


@pytest.mark.parametrize(
    ("kind", "option", "reason"),
    [
        ("parakeet_ctc", {"reduce": "divprune:0.5"}, "CTC model has no decoder"),
        ("wav2vec2", {"cache": "snapkv:8"}, "CTC model has no decoder"),
        ("parakeet_tdt", {"reduce": "divprune:0.5"}, "transducer has no decoder"),
        ("voxtral_realtime", {"reduce": "divprune:0.5"}, "added to the tokens of text"),
        ("voxtral_realtime", {"cache": "snapkv:8"}, "sliding window"),
        ("kyutai_speech_to_text", {"cache": "snapkv:8"}, "sliding window"),
        ("whisper", {"cache": "quest:0.1"}, "nothing follows"),
        ("whisper", {"reduce": "visionzip:0.5"}, "frames alone"),
        ("whisper", {"reduce": "fastv@llm2:0.5"}, "frames alone"),
        ("voxtral", {"reduce": "nosuch:0.5"}, "nosuch"),
        ("qwen3_asr", {"reduce": "fastv@llm9:0.5"}, "llm9"),
    ],
)
def test_what_cannot_act_is_refused_in_one_line(
    kind: str, option: dict[str, str], reason: str, load: Any
) -> None:
    for call in (load(kind).tuned, lambda **how: load(kind).transcribe(SOUNDS[0], RATE, **how)):
        with pytest.raises(SpecError, match=reason) as error:
            call(**option)
        assert "\n" not in str(error.value)


def test_unknown_options_name_the_choices(load: Any) -> None:
    with pytest.raises(MmfastError, match=r"unknown option of ParakeetForCTC 'lang'.*choices"):
        load("parakeet_ctc").tuned(lang="en")


# --- folders ---


def test_a_model_without_a_processor_is_refused(tmp_path: Path) -> None:
    BUILDERS["parakeet_ctc"](tmp_path)
    for name in ("processor_config.json", "preprocessor_config.json", "tokenizer.json",
                 "tokenizer_config.json"):  # fmt: skip
        (tmp_path / name).unlink(missing_ok=True)
    with pytest.raises(ModelError) as error:
        load_voice(str(tmp_path), "cpu")
    assert "\n" not in str(error.value)


def test_a_folder_of_another_kind_is_refused(tmp_path: Path) -> None:
    transformers.BertConfig(architectures=["BertModel"]).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"unknown speech model type 'bert'.*whisper"):
        load_voice(str(tmp_path), "cpu")


def test_a_listener_is_one_class_and_one_line() -> None:
    from mmfast.models.loading import speech_families

    found = [n for n, each in speech_families().items() if issubclass(each.cls, StockListener)]
    assert {name.removesuffix("-group") for name in BUILDERS} == set(found)
