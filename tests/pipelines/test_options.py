"""Options: an unknown name or value is refused by every task before anything of a model is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tone_models import HumModel
from transformers import AutoConfig, AutoProcessor, GenerationConfig, PreTrainedModel

import mmfast
from mmfast.core.errors import MmfastError
from mmfast.pipelines.generation import DRAWING, merged
from mmfast.pipelines.omni_chat import OmniChat
from mmfast.pipelines.speech import SpeechChat, TextToSpeech

CLIP = Path(__file__).resolve().parents[2] / "assets" / "clips" / "red-circle.mp4"
QUESTION = "Which way does the red circle move?"
VISUAL = ("video-qa", "image-qa", "video-text-to-text", "image-text-to-text")
TASKS = (*VISUAL, "video-stream", "text-to-speech", "speech-to-text", "speech-chat", "omni-chat")


@pytest.fixture
def untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes every reader of a checkpoint raise what no test expects."""

    def touched(*_: Any, **__: Any) -> Any:
        raise AssertionError("a checkpoint was read")

    for cls in (PreTrainedModel, AutoProcessor, AutoConfig):
        monkeypatch.setattr(cls, "from_pretrained", touched)
    for place in ("mmfast.models.loading.load", "mmfast.pipelines.visual_qa.load",
                  "mmfast.pipelines.video_stream.load", "mmfast.pipelines.omni_chat.load",
                  "mmfast.voice.models.load_voice"):  # fmt: skip
        monkeypatch.setattr(place, touched)


@pytest.fixture(scope="module")
def pipe() -> Any:
    return mmfast.pipeline("video-qa", device="cpu")


def refused(task: str, **options: Any) -> str:
    """Return the one line with which the construction of a pipeline is refused."""
    with pytest.raises(MmfastError) as error:
        mmfast.pipeline(task, **options)
    text = str(error.value)
    assert "\n" not in text
    return text


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize("task", TASKS)
def test_unknown_names(task: str) -> None:
    name = mmfast.pipelines.ALIASES.get(task, task)
    assert refused(task, banana=1).startswith(f"{name}: unknown option 'banana'")
    near = {"device": "devcie", "dtype": "dtpye"}
    for right, wrong in near.items():
        assert f"unknown option {wrong!r}; did you mean {right!r}?" in refused(task, **{wrong: 1})
    assert "never run" in refused(task, trust_remote_code=True)
    assert "safetensors" in refused(task, use_safetensors=False)


def test_an_option_of_the_pipeline_in_a_call_says_where_it_belongs(pipe: Any) -> None:
    for call in (pipe, pipe.stream):
        with pytest.raises(MmfastError, match="when the pipeline is made") as error:
            call(None, "what?", cache="snapkv:64")  # else "did you mean 'use_cache'?"
        assert str(error.value).endswith("pipeline('video-qa', cache='snapkv:64')")
    with pytest.raises(MmfastError, match="unknown option 'redcue'"):
        pipe(None, "what?", redcue="evs:0.5")


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize("task", [*VISUAL, "omni-chat"])
@pytest.mark.parametrize(
    ("wrong", "right"),
    [("redcue", "reduce"), ("max_new_tokns", "max_new_tokens"), ("temprature", "temperature"),
     ("repetition_penalti", "repetition_penalty"), ("model_kwarg", "model_kwargs"),
     ("batchsize", "batch_size"), ("target_ttft", "target_ttft_ms")],
)  # fmt: skip
def test_nearest_names_of_questions(task: str, wrong: str, right: str) -> None:
    assert f"did you mean {right!r}?" in refused(task, **{wrong: 1})


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize(
    ("task", "options", "told"),
    [
        ("video-stream", {"frame_cach": 0.5}, "did you mean 'frame_cache'"),
        ("video-qa", {"num_return_sequences": 2}, "an input has one answer"),
        ("video-stream", {"max_new_tokens": 5}, "choices: attn, batch, clips, decode, device"),
        ("text-to-speech", {"voise": "x"}, "did you mean 'voice'"),
        ("text-to-speech", {"speed": 165}, "choices: head, mode"),
        ("speech-chat", {"voise": "x"}, "did you mean 'voice'"),
        ("speech-chat", {"rate": 3}, "unknown option 'rate'"),
        ("text-to-speech", {"devcie": "cpu"}, "did you mean 'device'"),
        ("speech-chat", {"chat": str, "talker": None, "spead": 165}, "did you mean 'speed'"),
        ("omni-chat", {"voice": {"voise": "x"}}, "did you mean 'voice'"),
        ("omni-chat", {"sized_four": 5}, "did you mean 'sized_for'"),
    ],
)
def test_nearest_names_of_other_tasks(task: str, options: dict[str, Any], told: str) -> None:
    assert told in refused(task, **options)


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize("task", [*VISUAL, "omni-chat"])
@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"frames": 0}, "frames=0"), ({"frames": 2.5}, "frames=2.5"), ({"fps": 0}, "fps=0"),
        ({"fps": float("nan")}, "fps=nan"), ({"max_new_tokens": -1}, "max_new_tokens=-1"),
        ({"max_new_tokens": True}, "max_new_tokens=True"), ({"batch_size": 0}, "batch_size=0"),
        ({"temperature": -1}, "temperature=-1"), ({"temperature": "hot"}, "temperature='hot'"),
        ({"top_p": 0}, "top_p=0"), ({"top_p": 1.5}, "top_p=1.5"), ({"top_k": -3}, "top_k=-3"),
        ({"do_sample": "yes"}, "do_sample='yes'"), ({"seed": -1}, "seed=-1"),
        ({"device": "cpuu"}, "did you mean 'cpu'"), ({"dtype": "flot32"}, "mean 'float32'"),
        ({"encoder": "fst"}, "did you mean 'fast'"), ({"cache": "snapkw:3"}, "mean 'snapkv'"),
        ({"reduce": "evz:0.5"}, "did you mean 'evs'"), ({"reduce": "evs:0"}, "budget 0"),
        ({"quality": "hihg"}, "did you mean 'high'"), ({"max_memory": "lots"}, "'lots'"),
        ({"seed": 3}, "do_sample=True"), ({"generation_config": 5}, "generation_config"),
        ({"do_sample": False, "temperature": 0.7}, "contradict"),
        ({"do_sample": True, "temperature": 0}, "contradict"),
        ({"generation_config": {"max_new_tokns": 5}}, "mean 'max_new_tokens'"),
        ({"generation_config": GenerationConfig(temperature=-2.0)}, "temperature=-2.0"),
        ({"generation_config": GenerationConfig(return_dict_in_generate=True)}, "return_dict"),
        ({"model_kwargs": {"trust_remote_code": True}}, "trust_remote_code=True is refused"),
        ({"model_kwargs": {"use_safetensors": False}}, "use_safetensors=False is refused"),
        ({"model_kwargs": {"use_safetensors": None}}, "use_safetensors=None is refused"),
        ({"model_kwargs": {"adapter_kwargs": {"trust_remote_code": True}}}, "is refused"),
        ({"model_kwargs": ["dtype"]}, "give a dict"),
    ],
)  # fmt: skip
def test_values_of_questions(task: str, options: dict[str, Any], told: str) -> None:
    assert told in refused(task, **options)


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize(
    ("task", "options", "told"),
    [
        ("video-stream", {"reduce": "stc_prunr:0.3"}, "video-stream: unknown"),
        ("video-stream", {"fps": -1}, "fps=-1"),
        ("video-stream", {"sized_for": 0}, "sized_for=0"),
        ("video-stream", {"batch": "two"}, "batch='two'"),
        ("video-stream", {"gate": 3}, "gate=3"),
        ("video-stream", {"frame_cache": "much"}, "frame_cache='much'"),
        ("text-to-speech", {"mode": "trubo"}, "text-to-speech: unknown mode 'trubo'; did you mean"),
        ("text-to-speech", {"verify": "exat"}, "did you mean 'exact'"),
        ("text-to-speech", {"verify": "typical:7"}, "typical:7"),
        ("text-to-speech", {"voice": "en-uk"}, "did you mean 'en-us'"),
        ("text-to-speech", {"head": "mtcp"}, "unknown head 'mtcp'"),
        ("text-to-speech", {"rate": 9000}, "9000"),
        ("text-to-speech", {"rate": "fast"}, "rate='fast'"),
        ("text-to-speech", {"device": "gpu"}, "unknown device 'gpu'"),
        ("speech-chat", {"mode": "trubo"}, "speech-chat: unknown mode 'trubo'; did you mean"),
        ("speech-chat", {"dtype": "half"}, "unknown dtype 'half'"),
        ("speech-chat", {"chat": str, "mode": "trubo"}, "did you mean 'turbo'"),
        ("omni-chat", {"voice": {"mode": "trubo"}}, "did you mean 'turbo'"),
        ("omni-chat", {"model": "./nowhere", "reduce": "evz:0.5"}, "omni-chat: unknown"),
        ("omni-chat", {"model": "./nowhere", "seed": 3}, "omni-chat: seed=3"),
        ("omni-chat", {"voice": "en-us"}, "omni-chat: voice='en-us' is not allowed; give a dict"),
        ("omni-chat", {"decode": "recycel"}, "omni-chat: unknown decode 'recycel'; did you mean"),
        ("video-qa", {"model": "./nowhere", "cache": "snapkw:3"}, "video-qa: unknown cache"),
    ],
)
def test_values_of_other_tasks(task: str, options: dict[str, Any], told: str) -> None:
    assert told in refused(task, **options)


def test_options_of_a_speech_checkpoint_are_those_of_its_class(tmp_path: Path) -> None:
    """They follow from its config.json; there is no weight in the directory."""
    for kind, task, good in (
        ("csm", "text-to-speech", "seconds"),
        ("moshi", "speech-chat", "quiet"),
        ("qwen2_5_omni", "speech-chat", "num_steps"),
    ):
        (tmp_path / "config.json").write_text(f'{{"model_type": "{kind}"}}')
        assert good in refused(task, model=str(tmp_path), banana=3)
        assert "unknown option 'mode'" in refused(task, model=str(tmp_path), mode="turbo")
        with pytest.raises(mmfast.ModelError, match="cannot load model"):
            mmfast.pipeline(task, str(tmp_path), **{good: 3})
    (tmp_path / "config.json").write_text('{"model_type": "csm"}')
    assert "seconds=-1" in refused("text-to-speech", model=str(tmp_path), seconds=-1)


def test_an_object_that_takes_any_option_checks_them_itself() -> None:
    assert TextToSpeech(HumModel(), banana=1).options == {"banana": 1}

    class Strict:
        sample_rate = 16000

        def speak(self, text: str, *, tempo: int = 1) -> Any:
            return iter(())

    assert "did you mean 'tempo'" in refused("text-to-speech", model=Strict(), tenpo=2)
    with pytest.raises(MmfastError, match="did you mean 'tempo'"):
        TextToSpeech(Strict())("hello", tenpo=3)


@pytest.mark.parametrize(
    "call",
    [
        lambda pipe: pipe(CLIP, QUESTION, max_new_tokns=5),
        lambda pipe: pipe.stream(CLIP, QUESTION, max_new_tokns=5),
        lambda pipe: pipe([CLIP], QUESTION, batchsize=5),
        lambda pipe: pipe.plan(CLIP, QUESTION, target_tokns=5),
        lambda pipe: pipe(CLIP, QUESTION, temperature=-1),
        lambda pipe: pipe(CLIP, QUESTION, max_new_tokens=0),
        lambda pipe: pipe(CLIP, QUESTION, batch_size=0),
        lambda pipe: pipe(CLIP, QUESTION, seed=1),
        lambda pipe: pipe(CLIP, QUESTION, quality="hihg"),
        lambda pipe: pipe(CLIP, QUESTION, text="again"),
        lambda pipe: pipe(CLIP, videos=CLIP, text="again"),
        lambda pipe: pipe(images="a.png", text="which?"),
        lambda pipe: pipe(text="which?"),
        lambda pipe: pipe.stream([CLIP, CLIP], QUESTION),
    ],
)
def test_calls_are_checked_before_anything_is_read(
    pipe: Any, call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipe, "_read", lambda media: pytest.fail("media were read"))
    with pytest.raises(MmfastError) as error:
        call(pipe)
    assert "\n" not in str(error.value)


def test_options_of_sessions() -> None:
    class Opened:
        task = "video-stream"

    from mmfast.pipelines.video_stream import VideoStream

    def refuse(told: str, call: Any, *args: Any, **options: Any) -> None:
        with pytest.raises(MmfastError) as error:
            call(*args, **options)
        assert told in str(error.value) and "\n" not in str(error.value)

    opened: Any = Opened()
    refuse("did you mean 'memory'", VideoStream.open, opened, memry="window:64")
    refuse("did you mean 'window'", VideoStream.open, opened, memory="windw:64")
    refuse("did you mean 'window'", VideoStream.open, opened, "windw:64")
    refuse("host_blocks=0", VideoStream.open, opened, host_blocks=0)
    refuse("'much'", VideoStream.open, opened, host_bytes="much")
    refuse("did you mean 'host_bytes'", VideoStream.restore, opened, "folder", host_byte=3)
    refuse("folder=5 is not allowed; give the path", VideoStream.restore, opened, 5)
    refuse(
        "limits=3 is not allowed; give mmfast.frontends.source.Limits",
        VideoStream.open,
        opened,
        limits=3,
    )
    talk = SpeechChat(HumModel())
    refuse("ear=5 is not allowed; give 'voice'", talk.open, ear=5)
    refuse("clock=5 is not allowed; give a Clock", talk.open, clock=5)
    refuse("history='1MB' is not allowed; give a History", talk.open, history="1MB")
    refuse("speech-chat: reduce is set when the pipeline is made", talk, b"", reduce="evs:0.5")
    refuse("text-to-speech: device is set when", TextToSpeech(HumModel()), "yes", device="cpu")
    refuse("did you mean 'ahead'", talk.open, ahed=3)
    refuse("ahead=-1", talk.open, ahead=-1)
    refuse("did you mean 'voice'", talk.open, ear="vioce")
    refuse("did you mean 'interrupt'", talk.run, b"", interupt=False)
    omni = OmniChat(speech=HumModel())
    refuse("did you mean 'memory'", omni.open, memry="window:64")
    refuse("did you mean 'window'", omni.open, memory="windw:64")
    refuse("did you mean 'clock'", omni.open, clok=None)
    refuse("max_new_tokens=0", omni.open, max_new_tokens=0)
    refuse("cache is set when the pipeline is made", omni, CLIP, "why?", cache="snapkv:64")


def test_a_call_stands_above_its_pipeline() -> None:
    cold = {"max_new_tokens": 128, "do_sample": False}
    assert merged({}, {}) == cold
    assert merged({"max_new_tokens": None}, {"max_new_tokens": 3})["max_new_tokens"] == 3
    warm = {"temperature": 0.7, "seed": 4}
    assert merged(warm, {}) == {**cold, **warm, "do_sample": True}
    assert merged(warm, {"do_sample": False}) == merged(warm, {"temperature": 0}) == cold
    assert merged(cold, {"top_p": 0.5}) == {**cold, "top_p": 0.5, "do_sample": True}
    config = GenerationConfig(max_new_tokens=9, temperature=0.3)
    assert merged({"max_new_tokens": 5}, {"generation_config": config}) == {
        "max_new_tokens": 9, "temperature": 0.3, "do_sample": True,
    }  # fmt: skip
    assert merged({"generation_config": config, "max_new_tokens": 5}, {})["max_new_tokens"] == 5
    assert "max_new_tokens" not in merged({"generation_config": {"max_length": 500}}, {})
    assert merged({}, {"temperature": 1.0, "do_sample": False})["do_sample"] is False
    assert not {*DRAWING} & {*merged({}, {"temperature": 1.0, "do_sample": False})}


def test_generation_options_act(pipe: Any) -> None:
    spoken: list[dict[str, Any]] = []
    stock = pipe.model.generate

    def watched(**options: Any) -> torch.Tensor:
        spoken.append({k: v for k, v in options.items() if not isinstance(v, torch.Tensor)})
        return stock(**options)  # type: ignore[no-any-return]

    pipe.model.generate = watched
    try:
        pipe(CLIP, QUESTION, max_new_tokens=1, top_p=0.5, repetition_penalty=1.5)
        list(pipe.stream(CLIP, QUESTION, generation_config=GenerationConfig(max_new_tokens=2)))
    finally:
        del pipe.model.generate
    first, second = spoken
    assert (first["max_new_tokens"], first["top_p"], first["do_sample"]) == (1, 0.5, True)
    assert first["repetition_penalty"] == 1.5 and second["max_new_tokens"] == 2
    assert second["do_sample"] is False and "generation_config" not in second


def test_answers_are_as_long_as_a_call_says(pipe: Any) -> None:
    def made(**options: Any) -> int:
        rows = pipe(CLIP, "How many objects are there?", eos_token_id=-1, **options).trace.rows
        return next(row.tokens_out for row in rows if row.stage == "generate")

    assert made(max_new_tokens=3) == 3 and made(generation_config={"max_new_tokens": 5}) == 5
    assert made(max_new_tokens=2, generation_config={"max_new_tokens": 5}) == 2


def drawn(pipe: Any, media: Any, question: Any, **options: Any) -> Any:
    how = {"temperature": 5.0, "max_new_tokens": 8, "eos_token_id": -1, **options}
    found = pipe(media, question, **how)
    return [str(each) for each in found] if isinstance(found, list) else str(found)


def test_a_seed_repeats_what_stock_sampling_draws(pipe: Any) -> None:
    inputs, _ = pipe._inputs([(CLIP, QUESTION)], mmfast.Trace())
    texts = []
    for seed in range(4):
        torch.manual_seed(seed)
        how = {"temperature": 5.0, "do_sample": True, "eos_token_id": -1, "max_new_tokens": 8}
        ids = pipe.run(inputs, **how)[:, inputs["input_ids"].shape[1] :]
        texts.append(pipe.processor.batch_decode(ids, skip_special_tokens=True)[0].strip())
    state = torch.get_rng_state()
    assert [drawn(pipe, CLIP, QUESTION, seed=seed) for seed in range(4)] == texts
    assert torch.equal(torch.get_rng_state(), state)  # others' numbers are not used up
    assert len(set(texts)) == 4
    stream = pipe.stream(CLIP, QUESTION, temperature=5.0, seed=2, max_new_tokens=8, eos_token_id=-1)
    assert "".join(stream).strip() == texts[2]


def test_batches_draw_what_singles_draw(pipe: Any) -> None:
    questions = [QUESTION, "How many objects are there?", "Is there a red circle?"]
    for reduce in (None, "evs:0.5"):
        own = mmfast.pipeline("video-qa", (pipe.model, pipe.processor), reduce=reduce)
        singles = [drawn(own, CLIP, question, seed=7) for question in questions]
        assert len(set(singles)) > 1
        for size in (1, 2, 3):
            assert drawn(own, CLIP, questions, seed=7, batch_size=size) == singles


def test_batch_size_of_a_call_is_the_size_of_its_passes(pipe: Any) -> None:
    sizes: list[int] = []
    questions = ["How many objects are there?", QUESTION, "Is there a red circle?"] * 2
    one_by_one = [pipe(CLIP, question).text for question in questions]
    stock = pipe.run
    pipe.run = lambda inputs, *args, **how: (
        sizes.append(len(inputs["input_ids"])) or stock(inputs, *args, **how)
    )
    try:
        assert [a.text for a in pipe(CLIP, questions, batch_size=4)] == one_by_one
    finally:
        del pipe.run
    assert sizes == [4, 2] and pipe.batch_size == 1


def test_beams_and_stop_strings(pipe: Any) -> None:
    inputs, _ = pipe._inputs([(CLIP, QUESTION)], mmfast.Trace())
    with torch.inference_mode():
        ids = pipe.model.generate(**inputs, num_beams=3, do_sample=False, max_new_tokens=8)
    text = pipe.processor.batch_decode(
        ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
    )
    answer = pipe(CLIP, QUESTION, num_beams=3, max_new_tokens=8)
    with pytest.raises(MmfastError, match="num_beams"):
        pipe.stream(CLIP, QUESTION, num_beams=3)
    warm = mmfast.pipeline("video-qa", (pipe.model, pipe.processor), temperature=9.0, seed=1)
    assert warm(CLIP, QUESTION, do_sample=False).text == pipe(CLIP, QUESTION).text
    assert "".join(warm.stream(CLIP, QUESTION, temperature=0)).strip() == pipe(CLIP, QUESTION).text
    assert answer.text == text[0].strip() and answer.ttft_ms > 0
    word = pipe(CLIP, QUESTION).text
    assert pipe(CLIP, QUESTION, stop_strings=[word], eos_token_id=-1).text == word


def test_a_seed_repeats_no_beams_and_no_drafts_of_generate(pipe: Any) -> None:
    for more in (
        {"num_beams": 3},
        {"prompt_lookup_num_tokens": 2},
        {"assistant_model": pipe.model},
    ):
        given = {"temperature": 2.0, "seed": 1, **more}
        for ask in (pipe, pipe.stream):
            with pytest.raises(MmfastError, match=f"seed=1 .*leave out {next(iter(more))}="):
                ask(CLIP, QUESTION, **given)
        with pytest.raises(MmfastError, match="seed=1"):
            mmfast.pipeline("video-qa", (pipe.model, pipe.processor), **given)
        torch.manual_seed(1)
        assert pipe(CLIP, QUESTION, **{**given, "seed": None}).text  # without a seed it draws


def test_a_seed_goes_with_strings_that_stop(pipe: Any) -> None:
    """`generate` gives no tokenizer to the loop of a seed, in which its own criterion fails."""
    given = {"eos_token_id": -1, "max_new_tokens": 8, "stop_strings": ["left"], "seed": 1}
    whole = pipe(CLIP, QUESTION, **{**given, "stop_strings": None}, temperature=0.01).text
    cut = pipe(CLIP, QUESTION, **given, temperature=0.01).text
    assert cut == "left" and whole.startswith(cut) and len(whole) > len(cut)
    assert "".join(pipe.stream(CLIP, QUESTION, **given, temperature=0.01)) == cut


def test_a_checkpoint_that_asks_for_other_outputs_answers_all_the_same(pipe: Any) -> None:
    """Its generation config may ask for a dict, for several answers, or for beams."""
    config, questions = pipe.model.generation_config, [QUESTION, "How many objects are there?"]
    plain = [answer.text for answer in pipe(CLIP, questions, batch_size=2)]
    stated = {"return_dict_in_generate": True, "output_scores": True, "do_sample": True}
    stated |= {"num_return_sequences": 2, "stop_strings": ["left"]}
    old = {name: getattr(config, name) for name in (*stated, "num_beams")}
    try:
        config.update(**stated)
        assert [answer.text for answer in pipe(CLIP, questions, batch_size=2)] == plain
        assert "".join(pipe.stream(CLIP, QUESTION)) == plain[0]
        assert pipe(CLIP, QUESTION, num_beams=2).text
        with pytest.raises(MmfastError, match=r"config has stop_strings=.*set that to None"):
            pipe(CLIP, QUESTION, temperature=0.5, seed=1)
        config.stop_strings = None
        assert pipe(CLIP, QUESTION, temperature=0.5, seed=1).text
        config.num_beams = 2
        with pytest.raises(
            MmfastError, match="generation_config has num_beams=2: give num_beams=1"
        ):
            pipe(CLIP, QUESTION, temperature=0.5, seed=1)
    finally:
        config.update(**old)
