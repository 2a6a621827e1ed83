"""Loading a checkpoint: the embedded one, a directory or a hub id, safetensors only."""

from __future__ import annotations

import copy
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

import torch

from mmfast.core.errors import ModelError, an, unknown
from mmfast.core.files import check_directory
from mmfast.core.registry import import_all
from mmfast.core.spec import DTYPES
from mmfast.core.speech import Codec
from mmfast.frontends.codecs.checkpoints import dac_codec, encodec_codec, mimi_codec
from mmfast.frontends.codecs.latents import pocket_codec, vibevoice_codec
from mmfast.frontends.codecs.semantic import higgs_codec, xcodec2_codec, xcodec_codec
from mmfast.models.adapters import base_named, merge

EMBEDDED = "tiny-scenes"
# Checkpoints in the package that answer about pictures and clips, by name.
EMBEDDED_NAMES = ("tiny-video", "tiny-scenes", "tiny-stream", "tiny-document")
EMBEDDED_TEXT = "tiny-text"  # the one that reads text alone
# A checkpoint may be hostile: its code is never run, and its weights are read from safetensors.
FIXED: Mapping[str, bool] = {"trust_remote_code": False, "use_safetensors": True}
HUB = (
    "cache_dir", "force_download", "local_files_only", "proxies", "token", "revision", "subfolder",
)  # fmt: skip
PLACED = ("device_map", "device_mesh", "distributed_config", "tp_plan", "tp_size")
MODEL_KWARGS = (
    *HUB, *PLACED, "adapter_kwargs", "adapter_name", "attn_implementation", "config", "dtype",
    "experts_implementation", "generation_config", "ignore_mismatched_sizes",
    "key_mapping", "low_cpu_mem_usage", "max_memory", "offload_buffers", "offload_folder",
    "quantization_config", "torch_dtype", "variant",
)  # fmt: skip


def embedded_path(name: str = EMBEDDED) -> Path:
    """Directory of an embedded checkpoint; ModelError where the package came without it."""
    path = Path(str(files("mmfast.assets").joinpath(f"models/{name}")))
    if not (path / "config.json").is_file():
        raise ModelError(f"embedded model {name!r} is missing at {path}; reinstall mmfast")
    return path


def located(model: str | Path | None) -> str:
    """Return the place of a model: an embedded one goes by name, unless a folder here has it."""
    if model is None or (model in (*EMBEDDED_NAMES, EMBEDDED_TEXT) and not Path(model).exists()):
        return str(embedded_path(str(model or EMBEDDED)))
    return str(model)


def pick_device(device: str | torch.device | None) -> torch.device:
    """The device asked for (ModelError if it is not there), or CUDA if there is one, or the CPU."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        picked = torch.device(device)
        kind = picked.type
        count = 1 if kind == "cpu" else torch.get_device_module(kind).device_count()
    except (RuntimeError, TypeError, AttributeError):
        raise ModelError(unknown("device", device, ("cpu", "cuda", "cuda:<index>"))) from None
    if kind != "cpu" and (picked.index or 0) >= count:
        have = ", ".join(["cpu", *(f"{kind}:{i}" for i in range(count))])
        raise ModelError(f"device {str(device)!r} is not here; choices: {have}")
    return picked


def pick_dtype(dtype: str | torch.dtype) -> torch.dtype | str:
    """A dtype by name or as it is; ModelError for an unknown name."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in DTYPES:
        raise ModelError(unknown("dtype", dtype, DTYPES))
    return dtype if dtype == "auto" else getattr(torch, dtype)


def check_fixed(given: Mapping[str, Any]) -> None:
    """Refuse to run a checkpoint's code or to read other weights than safetensors (ModelError)."""
    for name, value in given.items():
        if name in FIXED and value is not FIXED[name]:
            raise ModelError(
                f"{name}={value!r} is refused: code of a checkpoint is never run, and weights are "
                "read from safetensors alone; save the model in a stock class as safetensors"
            )
        if isinstance(value, Mapping):
            check_fixed(value)


def check_kwargs(
    model: Any,
    device: str | torch.device | None,
    dtype: str | torch.dtype,
    given: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Return arguments of `from_pretrained`, checked before any weight is read.

    ModelError: an unknown one, one that `device` or `dtype` contradicts, one beside a model that
    is loaded already, remote code, or weights that are no safetensors.
    """
    if given is not None and not isinstance(given, Mapping):
        raise ModelError(f"model_kwargs is {an(type(given).__name__)}; give a dict")
    found = dict(given or {})
    check_fixed(found)
    if found and not (model is None or isinstance(model, (str, Path))):
        raise ModelError(
            f"model_kwargs ({', '.join(found)}) are for loading, but the {type(model).__name__} "
            "given is loaded already; give a directory or a hub id, or leave them out"
        )
    if "torch_dtype" in found:
        found["dtype"] = found.pop("torch_dtype")
    for name in found:
        if name not in (*MODEL_KWARGS, *FIXED) and not hasattr(_config(model, found), name):
            raise ModelError(unknown("entry of model_kwargs", name, MODEL_KWARGS))
    if isinstance(found.get("dtype"), str):
        found["dtype"] = pick_dtype(found["dtype"])
    own = {"device": None if device is None else str(device)}
    own["dtype"] = None if dtype == "auto" else str(pick_dtype(dtype))
    for name, entry in (*(("device", each) for each in PLACED), ("dtype", "dtype")):
        if None not in (own[name], found.get(entry)) and str(found[entry]) != own[name]:
            raise ModelError(
                f"{name}={own[name]} and {entry}={found[entry]!r} of model_kwargs contradict each "
                "other; give one of them"
            )
    return found


def load(
    model: Any,
    device: str | torch.device | None,
    dtype: str | torch.dtype,
    processor: Any = None,
    model_kwargs: Mapping[str, Any] | None = None,
) -> tuple[Any, Any]:
    """Load `(model, processor)`, the model in evaluation mode on its device.

    `model` is None (embedded), a name of EMBEDDED_NAMES, a directory, a hub id, such a pair, or a
    model; objects are used as they are. A directory with a LoRA alone is the model that it names,
    with the LoRA merged. `processor` is an object, a directory or a hub id; None takes the model's.
    `model_kwargs` go to `from_pretrained`; a model with a `device_map`, or quantised, is not moved.
    ModelError where files are missing or the family cannot answer about images or video.
    """
    named = isinstance(model, (str, Path))
    if named and (base := base_named(where := located(model))) is not None:
        pair = load(base, device, dtype, processor, model_kwargs)
        merge(pair[0], where)
        return pair
    given = check_kwargs(model, device, dtype, model_kwargs)
    if isinstance(model, tuple):
        if len(model) != 2 or processor is not None:
            beside = "" if processor is None else " beside processor="
            raise ModelError(f"model is a tuple of {len(model)}{beside}; give (model, processor)")
        return model
    if isinstance(model, torch.nn.Module):
        name = str(getattr(model, "name_or_path", None) or "")
        if processor is None and not name:
            raise ModelError(f"this {type(model).__name__} comes without its processor{_PASS}")
        return model, read_processor(processor or name)
    if not named and model is not None:
        raise ModelError(
            f"model is {an(type(model).__name__)}; give a directory, a hub id, a model of "
            "transformers or (model, processor)"
        )
    where, place, kind = located(model), pick_device(device), pick_dtype(dtype)
    check_directory(where)
    config = _config(model, given)
    if reads_only_text(config.model_type):
        raise ModelError(
            f"model {where!r} ({config.model_type}) reads text alone; give one of images or video, "
            "or attach() to it for a KV policy (docs/guides/text.md)"
        )
    with loading(f"model {where!r}"):
        read = read_processor(processor or where, given, where)
        return from_pretrained(answering_class(config), where, place, kind, given), read


_PASS = "; pass processor= (an object, a directory or a hub id), or (model, processor)"


def read_processor(
    source: Any, given: Mapping[str, Any] | None = None, model: str | None = None
) -> Any:
    """A processor as it is or from a checkpoint, of the model's revision where it is the model."""
    if isinstance(source, (str, Path)):
        from transformers import AutoProcessor

        where, options = str(source), of_hub(given or {}, HUB if source is model else HUB[:-2])
        with loading(f"{'model' if source is model else 'processor'} {where!r}", _PASS):
            source = AutoProcessor.from_pretrained(where, trust_remote_code=False, **options)
    if not hasattr(source, "tokenizer"):
        raise ModelError(f"processor is {an(type(source).__name__)} without a tokenizer{_PASS}")
    return source


def twin(model: Any, processor: Any) -> tuple[Any, Any]:
    """Return model and processor once more, with the same weights in memory.

    Hooks and settings of one of them do not act on the other.
    """
    return twin_model(model), copy.deepcopy(processor)


def twin_model(model: Any) -> Any:
    """Return a model once more, with the same weights in memory and hooks of its own."""
    shared = {id(each): each for each in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared)


def of_hub(given: Mapping[str, Any], names: Sequence[str] = HUB) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` that a processor or tokenizer takes, too."""
    return {name: given[name] for name in names if name in given}


@contextmanager
def loading(name: str, fix: str = "") -> Iterator[None]:
    """Turn errors of transformers about files and arguments into a one-line ModelError."""
    try:
        yield
    except ModelError:
        raise
    except (OSError, ValueError, KeyError, ImportError, TypeError, NotImplementedError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ModelError(f"cannot load {name}: {reason}{fix}") from error


def part_of(folder: Path, name: str, auto: str, device: str | torch.device | None = "cpu") -> Any:
    """Load a stock model in float32 from a folder's part `name`, "" the folder itself.

    `auto` names the class of transformers that loads it, `device` is as of `pick_device`.
    ModelError: there is no such part, or its files are bad.
    """
    place = folder / name
    if not place.is_dir():
        raise ModelError(f"{str(folder)!r} has no folder {name!r}; give a whole speech model")
    with loading(str(place)):
        return from_pretrained(
            stock_class(auto, "model"), str(place), pick_device(device), torch.float32
        )


def from_pretrained(
    cls: Any,
    where: str,
    device: torch.device,
    dtype: torch.dtype | str,
    given: Mapping[str, Any] | None = None,
) -> Any:
    """Load a model of a stock class in evaluation mode, on its device unless `given` places it."""
    options = {"dtype": dtype, **(given or {}), **FIXED}
    placed = any(options.get(name) is not None for name in PLACED)
    if "quantization_config" in options and not placed and device.type != "cpu":
        options["device_map"] = {"": device}  # its weights cannot be moved afterwards
    model = cls.from_pretrained(where, **options)
    stays = placed or getattr(model, "hf_quantizer", None) is not None
    return (model if stays else model.to(device)).eval()


def _config(model: Any, given: Mapping[str, Any]) -> Any:
    from transformers import AutoConfig

    where = located(model)
    with loading(f"model {where!r}"):
        return AutoConfig.from_pretrained(where, trust_remote_code=False, **of_hub(given))


def answering_class(config: Any) -> Any:
    """The class that answers: of a Qwen-Omni checkpoint, which can speak, too, the thinker."""
    import transformers

    thinkers = {
        "qwen2_5_omni": "Qwen2_5OmniThinkerForConditionalGeneration",
        "qwen3_omni_moe": "Qwen3OmniMoeThinkerForConditionalGeneration",
    }
    return getattr(transformers, thinkers.get(config.model_type, "AutoModelForImageTextToText"))


def reads_only_text(kind: str) -> bool:
    """Return whether a `model_type` is that of a language model which no media reach."""
    from transformers.models.auto import modeling_auto as names

    seeing = names.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    return is_text_model(kind) and kind not in seeing


def is_text_model(kind: str) -> bool:
    """Return whether a `model_type` is that of a causal language model of transformers."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return bool(kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


EMBEDDED_CODEC = "tiny-speech"
CODECS: dict[str, tuple[str, Callable[..., Any]]] = {  # model type -> stock class and codec
    "mimi": ("MimiModel", mimi_codec),
    "encodec": ("EncodecModel", encodec_codec),
    "dac": ("DacModel", dac_codec),
    "xcodec": ("XcodecModel", xcodec_codec),
    "xcodec2": ("Xcodec2Model", xcodec2_codec),
    "higgs_audio_v2_tokenizer": ("HiggsAudioV2TokenizerModel", higgs_codec),
    "vibevoice_acoustic_tokenizer": ("VibeVoiceAcousticTokenizerModel", vibevoice_codec),
    "pocket_tts_audio_tokenizer": ("PocketTTSAudioTokenizerModel", pocket_codec),
}


def load_codec(
    source: Any = EMBEDDED_CODEC,
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype = "float32",
    **options: Any,
) -> Codec:
    """A codec, ready to stream: "tiny-speech" (embedded), a directory, a hub id, or a model.

    A loaded one goes to CUDA where there is one, in float32 for exactness; a model stays where it
    is. Options are `codebooks` (how many to encode to) and `lookahead` (DAC: frames). ModelError
    where it cannot be loaded, is of another kind, or does not take the options. `features` is the
    feature extractor of X-Codec 2, for a model; None takes the class's own settings.
    """
    if isinstance(source, (str, Path)):
        if str(source) == EMBEDDED_CODEC:
            return _embedded(options)
        source, features = _load(str(source), device, dtype)
        options = {**features, **options}
    kind = str(getattr(getattr(source, "config", None), "model_type", type(source).__name__))
    if kind not in CODECS:
        raise ModelError(unknown("codec", kind, [*CODECS, EMBEDDED_CODEC]))
    more = {"dac": ["lookahead"], "xcodec2": ["features"]}
    allowed = ["codebooks", *more.get(kind, ())]
    for name in options:
        if name not in allowed:
            raise ModelError(unknown(f"option of codec {kind}", name, allowed))
    if kind == "xcodec2" and options.get("features") is None:
        from transformers import Xcodec2FeatureExtractor

        options["features"] = Xcodec2FeatureExtractor(hop_length=source.config.hop_length)
    codec: Codec = CODECS[kind][1](source.eval(), **options)
    return codec


def _embedded(options: dict[str, Any]) -> Codec:
    if options:
        raise ModelError(f"codec {EMBEDDED_CODEC!r} takes no options, given: {', '.join(options)}")
    embedded = import_module("mmfast.frontends.codecs.embedded.codec")
    codec: Codec = embedded.load_embedded()
    return codec


def _load(
    where: str, device: str | torch.device | None, dtype: str | torch.dtype
) -> tuple[Any, dict[str, Any]]:
    """A codec's model, and the feature extractor without which it cannot encode."""
    import transformers

    place, kind = pick_device(device), pick_dtype(dtype)
    with loading(f"codec {where!r}"):
        config = transformers.AutoConfig.from_pretrained(where, trust_remote_code=False)
        if config.model_type not in CODECS:
            raise ModelError(unknown("codec", config.model_type, [*CODECS, EMBEDDED_CODEC]))
        stock = stock_class(CODECS[config.model_type][0], f"codec {where!r}")
        model, features = from_pretrained(stock, where, place, kind), {}
        if config.model_type == "xcodec2":
            reader = transformers.AutoFeatureExtractor
            features["features"] = reader.from_pretrained(where, trust_remote_code=False)
        return model, features


def stock_class(name: str | type, what: str) -> Any:
    """A class of transformers by its name; ModelError where the version installed has none.

    One of ours, for a model that transformers has no class of, is given as it is.
    """
    import transformers

    if not isinstance(name, str):
        return name
    found = getattr(transformers, name, None)
    if found is None:
        raise ModelError(
            f"{what} needs {name}, which transformers {transformers.__version__} does not have; "
            "install a version that has it"
        )
    return found


def device_name(device: torch.device) -> str:
    """The accelerator's product name, or the processor's; never the name of a machine."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


V = TypeVar("V", bound=type)


@dataclass(frozen=True)
class SpeechFamily:
    """A class of transformers that loads a checkpoint, its reader and its voice here.

    `reader` is the class that turns its text into ids and back; `voice` makes a voice, a `cls`, of
    a loaded model and its reader.
    """

    stock: str | type
    reader: str
    voice: Callable[[Any, Any], Any]
    cls: type


_FAMILIES: dict[str, SpeechFamily] = {}


def speech_family(
    model_type: str, stock: str | type, argument: str, reader: str = "AutoTokenizer", part: str = ""
) -> Callable[[V], V]:
    """Register a class as the voice of a model type, which is that of `config.json`.

    `stock` names the class of transformers that loads it, or is one of ours, `reader` names the one
    that turns text into ids and back; `argument` is the argument of the class that takes the
    reader, or its attribute `part`.
    """

    def register(cls: V) -> V:
        def voice(model: Any, words: Any) -> Any:
            return cls(model, **{argument: getattr(words, part) if part else words})

        _FAMILIES[model_type] = SpeechFamily(stock, reader, voice, cls)
        return cls

    return register


def speech_families() -> dict[str, SpeechFamily]:
    """Return the families by model type."""
    import_all("mmfast.models.speech")
    return dict(sorted(_FAMILIES.items()))
