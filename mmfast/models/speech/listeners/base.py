"""Recognition by a stock model: the sound cut and batched, options and stages checked.

A kind of model is one file in this folder with a class that writes a batch of sounds down, and
`speech_family` says which checkpoints it reads; it is found by itself.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from mmfast.attach import attach, turn_of
from mmfast.caches.plan import call_plan
from mmfast.core.errors import MmfastError, ModelError, SpecError, unknown
from mmfast.core.spec import parse
from mmfast.core.trace import Trace
from mmfast.models.reduction.check import check
from mmfast.models.speech.sound import Watched, pieces

BATCH = 8  # sounds that are written down at once
STAGES = ("reduce", "cache")
L = TypeVar("L", bound="StockListener")
T = TypeVar("T")


class StockListener:
    """A stock model that writes speech down; implements `Listener` of `mmfast.core.speech`.

    Attributes:
        longest: Seconds of sound that the model reads at once; longer sound is cut where it is
            quietest.
        knobs: Options of a call, beside `reduce` and `cache`.
        streamed: Those of them that act on a stream alone.
        whole: Reason why it does not stream, or "" where it does.
        frozen: Reasons why `reduce` and `cache` cannot act, by their names.
        attached: Those of the two that are attached to the model.
    """

    longest: ClassVar[float] = 30.0
    knobs: ClassVar[frozenset[str]] = frozenset()
    streamed: ClassVar[frozenset[str]] = frozenset()
    whole: ClassVar[str] = "it reads a recording as a whole"
    frozen: ClassVar[Mapping[str, str]] = {}
    attached: ClassVar[tuple[str, ...]] = STAGES
    option_names: ClassVar[frozenset[str]] = frozenset(STAGES)

    def __init_subclass__(cls) -> None:
        cls.option_names = cls.knobs | frozenset(STAGES)

    def __init__(self, model: Any, processor: Any) -> None:
        if not hasattr(processor, "feature_extractor") or not hasattr(processor, "tokenizer"):
            raise ModelError(
                f"{type(model).__name__} comes with a {type(processor).__name__}, which reads no "
                "sound or writes no text; save the whole processor into the model's folder"
            )
        self.model, self.processor = model, processor
        self.rate = int(processor.feature_extractor.sampling_rate)
        self.options: dict[str, Any] = {}

    @property
    def shortest(self) -> int:
        """Samples of the shortest sound that makes a frame of the encoder."""
        return 1

    @property
    def streams(self) -> bool:
        """True where `stream` writes down what is still being said."""
        return not self.whole

    def tuned(self: L, **options: Any) -> L:
        """Return the same model with options of all calls; they are checked at once.

        Args:
            **options: `reduce`, a spec of stages on the audio tokens; `cache`, a spec of KV
                policies; `language`, `max_new_tokens` and so on as far as the class has them.

        Raises:
            MmfastError: An option or a stage that this model does not have.
        """
        found = copy.copy(self)
        found.options = self._how(options)
        return found

    def _how(self, options: Mapping[str, Any]) -> dict[str, Any]:
        name = type(self.model).__name__
        given = {**self.options, **{k: v for k, v in options.items() if v is not None}}
        for each in given:
            if each not in self.option_names:
                raise MmfastError(unknown(f"option of {name}", each, sorted(self.option_names)))
            if each in self.frozen:
                raise SpecError(f"{each}={given[each]!r} cannot act on {name}: {self.frozen[each]}")
        if given != self.options:
            self.check(given.get("reduce"), given.get("cache"))
        return given

    def check(self, reduce: Any, cache: Any) -> None:
        """Refuse stages that the model does not have (SpecError, ModelError)."""
        if reduce is not None or cache is not None:
            check(parse(reduce), self.model, call_plan(cache))

    def transcribe(self, pcm: Tensor, rate: int = 16_000, **options: Any) -> str:
        """Return what is said in sound `[n]`, "" for silence; MediaError: it is no sound."""
        return self.hear([pcm], rate, **options)[0][0]

    def hear(
        self, sounds: Sequence[Tensor], rate: int = 16_000, batch: int = BATCH, **options: Any
    ) -> tuple[list[str], Trace]:
        """Return what is said in each sound, and the trace of the stages that acted."""
        if idle := sorted(self.streamed & options.keys()):
            raise MmfastError(f"{', '.join(idle)} of {type(self.model).__name__}: of a stream only")
        how, trace = self._how(options), Trace()
        cut = [self._audible(pieces(pcm, rate, self.rate, self.longest), trace) for pcm in sounds]
        flat = [piece for mine in cut for piece in mine]
        found: list[str] = []
        with self.stages(how, trace), torch.inference_mode(), stock_errors(self.model):
            for start in range(0, len(flat), batch):
                found += self.write(flat[start : start + batch], how, trace)
        texts = iter(found)
        return [" ".join(t for _ in mine if (t := next(texts).strip())) for mine in cut], trace

    def _audible(self, parts: list[Tensor], trace: Trace) -> list[Tensor]:
        """Return the parts that make a frame; the others are noted, as nothing is heard in them."""
        for part in parts:
            if len(part) < self.shortest:
                ms = 1e3 * len(part) / self.rate, 1e3 * self.shortest / self.rate
                trace.warn(
                    f"{ms[0]:.0f} ms of sound are too short for {type(self.model).__name__}, which "
                    f"hears {ms[1]:.0f} ms or more: no text is written for them"
                )
        return [part for part in parts if len(part) >= self.shortest]

    @contextmanager
    def stages(self, how: dict[str, Any], trace: Trace) -> Iterator[None]:
        """Attach what is to be attached, taken out of the options of a call."""
        given = {name: how.pop(name, None) for name in self.attached}
        if all(spec is None for spec in given.values()):
            yield
            return
        with turn_of(self.model), attach(self.model, **given) as acted:
            yield
        trace.rows += acted.rows
        trace.reductions += acted.reductions

    def write(self, sounds: list[Tensor], how: Mapping[str, Any], trace: Trace) -> list[str]:
        """Write each of some sounds `[n]` at the model's rate down."""
        raise NotImplementedError

    def stream(self, chunks: Iterable[Tensor], rate: int = 16_000, **options: Any) -> Iterator[str]:
        """Yield text while chunks of sound come; joined it is the whole text, "" of silence.

        ModelError: the model hears only what has been said.
        """
        if self.whole:
            raise ModelError(
                f"{type(self.model).__name__} does not stream: {self.whole}; call it with the "
                "whole recording, or take a listener that does: kyutai_speech_to_text, "
                "voxtral_realtime, nemotron_asr_streaming, parakeet_ctc, wav2vec2"
            )
        return self._unless_silent(Watched(chunks), rate, options)

    def _unless_silent(
        self, sound: Watched, rate: int, options: Mapping[str, Any]
    ) -> Iterator[str]:
        """Yield the text of a stream; what is written of silence in front waits for a sound."""
        held = ""
        with closing(self.follow(sound, rate, **options)) as pieces:
            for piece in pieces:
                held += piece
                if held and sound.loud:
                    yield held
                    held = ""

    def follow(
        self, chunks: Iterable[Tensor], rate: int, **options: Any
    ) -> Generator[str, None, None]:
        """Yield what each chunk of a stream adds; silence may be heard as anything."""
        raise NotImplementedError

    def own(self) -> Any:
        """Return the same weights with attributes of their own.

        Some stock loops keep their state on the model, where two calls would share it.
        """
        return copy.copy(self.model)

    def inputs(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a processor made, where the model is and in its precision."""
        device, dtype = self.model.device, self.model.dtype
        return {
            name: value.to(device, dtype if value.is_floating_point() else None)
            if isinstance(value, Tensor)
            else value
            for name, value in values.items()
        }


@contextmanager
def stock_errors(model: Any) -> Iterator[None]:
    """Turn what a stock class says about its arguments into a one-line ModelError."""
    try:
        yield
    except MmfastError:
        raise
    except (ValueError, KeyError, TypeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ModelError(f"{type(model).__name__} cannot listen so: {reason}") from error


def field(kernels: Iterable[int], strides: Iterable[int]) -> int:
    """Samples that one frame behind a stack of convolutions sees."""
    seen = 1
    for kernel, stride in reversed([*zip(kernels, strides, strict=True)]):
        seen = (seen - 1) * stride + kernel
    return seen


def by_length(sounds: list[Tensor], write: Callable[[list[Tensor]], list[T]]) -> list[T]:
    """Write sounds of equal length together: an encoder that masks no padding would hear it."""
    found: dict[int, T] = {}
    for length in sorted({len(sound) for sound in sounds}):
        places = [n for n, sound in enumerate(sounds) if len(sound) == length]
        found |= zip(places, write([sounds[n] for n in places]), strict=True)
    return [found[n] for n in range(len(sounds))]


def arrays(sounds: Iterable[Tensor]) -> list[Any]:
    """Sounds as the arrays that processors take."""
    return [sound.cpu().numpy() for sound in sounds]
