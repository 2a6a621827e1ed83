"""Loading: arguments of `from_pretrained`, processors, and models that are loaded already."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoProcessor, PreTrainedModel
from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

import mmfast
from mmfast.core.errors import ModelError
from mmfast.models.loading import embedded_path, load, pick_device
from mmfast.models.prompt import Shot, build_inputs
from mmfast.pipelines.answer import Answer

CLIP = Path(__file__).resolve().parents[2] / "assets" / "clips" / "red-circle.mp4"
QUESTION = "Which way does the red circle move?"
HERE = str(embedded_path())


@register_quantization_config("plain-for-tests")
class _PlainConfig(QuantizationConfigMixin):  # type: ignore[misc]
    def __init__(self, **_: Any) -> None:
        self.quant_method = "plain-for-tests"


@register_quantizer("plain-for-tests")
class _PlainQuantizer(HfQuantizer):  # type: ignore[misc]
    """Leaves the weights as they are; the model counts as quantised."""

    requires_calibration = False
    is_trainable = False

    def __init__(self, quantization_config: Any, **options: Any) -> None:
        super().__init__(quantization_config, **options)

    def is_serializable(self, *_: Any, **__: Any) -> bool:
        return True


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The devices that models are moved to with `.to`."""
    found: list[Any] = []
    stock = PreTrainedModel.to

    def to(model: Any, *args: Any, **options: Any) -> Any:
        found.extend(args)
        return stock(model, *args, **options)

    monkeypatch.setattr(PreTrainedModel, "to", to)
    return found


def test_arguments_reach_the_model(moved: list[Any]) -> None:
    kwargs = {"attn_implementation": "eager", "dtype": "bfloat16", "revision": "main"}
    pipe = mmfast.pipeline("video-qa", device="cpu", model_kwargs=kwargs)
    assert pipe.model.config._attn_implementation == "eager"
    assert pipe.model.dtype == torch.bfloat16 and moved == [torch.device("cpu")]
    assert isinstance(pipe(CLIP, QUESTION), Answer)
    model, _ = load(HERE, "cpu", "auto", None, {"torch_dtype": torch.float16})
    assert model.dtype == torch.float16
    assert kwargs == {"attn_implementation": "eager", "dtype": "bfloat16", "revision": "main"}


@pytest.mark.parametrize("task", ["video-qa", "image-qa", "video-stream"])
def test_placed_models_are_not_moved(task: str, moved: list[Any]) -> None:
    pytest.importorskip("accelerate")
    pipe = mmfast.pipeline(task, model_kwargs={"device_map": "cpu"})
    assert pipe.model.device.type == "cpu" and not moved
    assert not pipe.model.training
    mmfast.pipeline(task, device="cpu", model_kwargs={"device_map": "cpu"})
    assert not moved


def test_quantised_models_are_not_moved(moved: list[Any]) -> None:
    pipe = mmfast.pipeline(
        "video-qa", device="cpu", model_kwargs={"quantization_config": _PlainConfig()}
    )
    assert pipe.model.is_quantized and not moved
    stock = mmfast.pipeline("video-qa", device="cpu")
    assert pipe(CLIP, QUESTION).text == stock(CLIP, QUESTION).text


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"device": "cpu", "model_kwargs": {"device_map": "auto"}}, "contradict"),
        ({"device": "cpu", "model_kwargs": {"device_map": {"": 0}}}, "contradict"),
        ({"dtype": "float32", "model_kwargs": {"dtype": "float16"}}, "contradict"),
        ({"dtype": torch.float32, "model_kwargs": {"torch_dtype": torch.float16}}, "contradict"),
        ({"model_kwargs": {"dtype": "flaot16"}}, "did you mean 'float16'"),
        ({"model_kwargs": {"devce_map": "auto"}}, "did you mean 'device_map'"),
        ({"model_kwargs": {"quantisation_config": 1}}, "did you mean 'quantization_config'"),
        ({"model_kwargs": {"trust_remote_code": True}}, "refused"),
        ({"model_kwargs": {"use_safetensors": False}}, "refused"),
        ({"model_kwargs": {"attn_implementation": "egaer"}}, "egaer"),
        ({"processor": object()}, "without a tokenizer"),
        ({"model": "tiny-text"}, "reads text alone"),
        ({"processor": "./nowhere"}, "cannot load processor './nowhere'"),
        ({"model": "./nowhere", "model_kwargs": {"dtype": "auto"}}, "does not exist"),
        ({"model": object()}, "model of transformers"),
    ],
)
def test_what_cannot_be_loaded(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ModelError) as error:
        mmfast.pipeline("video-qa", **options)
    assert told in str(error.value) and "\n" not in str(error.value)


def test_a_folder_with_an_adapter_alone_names_the_way(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"adapter of PEFT without its model.*merge_and_unload"):
        load(str(tmp_path), "cpu", "auto")


def test_agreement_is_no_contradiction() -> None:
    given = {"dtype": torch.float32, "use_safetensors": True, "trust_remote_code": False}
    model, _ = load(HERE, "cpu", "float32", None, given)
    assert model.dtype == torch.float32
    field = {"vision_feature_select_strategy": "default"}  # of its configuration
    model, _ = load(HERE, "cpu", "auto", None, field)
    assert model.config.vision_feature_select_strategy == "default"


def test_processors(tmp_path: Path) -> None:
    model, processor = load(HERE, "cpu", "auto")
    processor.save_pretrained(tmp_path)
    text = mmfast.pipeline("video-qa", (model, processor))(CLIP, QUESTION).text
    for given in (processor, HERE, Path(HERE), str(tmp_path)):
        for source in (model, HERE):
            pipe = mmfast.pipeline("video-qa", source, processor=given)
            assert pipe(CLIP, QUESTION).text == text
    assert mmfast.pipeline("video-qa", model).processor.tokenizer  # that of its own directory
    model.name_or_path = ""
    assert mmfast.pipeline("video-stream", model, processor=processor).processor is processor
    for name in ("", "./nowhere"):
        model.name_or_path = name
        with pytest.raises(ModelError, match="pass processor=") as error:
            mmfast.pipeline("video-qa", model)
        assert "\n" not in str(error.value)
    with pytest.raises(ModelError, match="beside processor="):
        mmfast.pipeline("video-qa", (model, processor), processor=processor)
    for source in (model, (model, processor)):
        with pytest.raises(ModelError, match="loaded already"):
            mmfast.pipeline("video-qa", source, model_kwargs={"dtype": "auto"})


@pytest.mark.parametrize("kind", ["image", "video"])
def test_rows_of_a_flat_picture_are_not_taken_for_channels(kind: str) -> None:
    """As the processor reads the same picture from PIL, or with channels first."""
    processor = AutoProcessor.from_pretrained(HERE)
    chat = [{"role": "user", "content": [{"type": kind}, {"type": "text", "text": "what?"}]}]
    text = processor.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    for rows in (3, 4, 48):
        flat = np.random.default_rng(0).integers(0, 256, (rows, 48, 3), np.uint8)
        shot, plain = Shot("image", flat), {"images": [[Image.fromarray(flat)]]}
        if kind == "video":
            known = {"total_num_frames": 2, "fps": 2.0, "frames_indices": [0, 1]}
            shot = Shot("video", np.stack([flat, flat]), known)
            frames = torch.from_numpy(shot.pixels).permute(0, 3, 1, 2)
            plain = {"videos": [frames], "do_sample_frames": False}
        found = build_inputs(processor, [[shot]], ["what?"], torch.device("cpu"))
        told = processor(text=[text], padding=True, return_tensors="pt", **plain)
        name = "pixel_values" if kind == "image" else "pixel_values_videos"
        assert torch.equal(found[name], told[name]), rows


@pytest.mark.parametrize("task", ["text-to-speech", "speech-chat"])
def test_speech_tasks_take_them_too(task: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="takes no model_kwargs"):
        mmfast.pipeline(task, model_kwargs={"dtype": "auto"})
    with pytest.raises(ModelError, match="refused"):
        mmfast.pipeline(task, str(tmp_path), model_kwargs={"trust_remote_code": True})


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_device_that_does_not_exist_is_refused(
    monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    assert pick_device("cpu").type == "cpu"
    assert pick_device(None).type == ("cuda" if count else "cpu")
    for index in range(count):
        assert pick_device(f"cuda:{index}") == torch.device("cuda", index)
    for wrong in (f"cuda:{count}", "cuda:99", *(["cuda"] if not count else [])):
        with pytest.raises(ModelError, match=f"'{wrong}' is not here; choices: cpu") as caught:
            pick_device(wrong)
        assert [f"cuda:{i}" in str(caught.value).split("choices")[1] for i in range(count + 1)] == [
            *[True] * count,
            False,
        ]
        assert "\n" not in str(caught.value)
    for unknown in ("gpu", "meta", "cuda:-1", ""):
        with pytest.raises(ModelError, match="cuda:<index>"):
            pick_device(unknown)
