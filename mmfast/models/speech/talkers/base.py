"""Parts that talkers of transformers share: sentences, options, seeds, batches and streams.

A stock class makes sound in one call, `generate` or `forward`, and draws from torch's global
generators. Here the call runs as it is, so that its samples are those of the class driven by hand
after `torch.manual_seed(seed)`; text is said sentence by sentence, so that sound starts after the
first one. `stepped` hands out what the class makes before its call has ended.
"""

from __future__ import annotations

import contextvars
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mmfast.core.errors import MmfastError, ModelError, SpecError, unknown
from mmfast.core.speech import Sound
from mmfast.frontends.audio.reader import load_audio

_END = re.compile(r"(?<=[.!?…;:])\s+")
_TURN = threading.RLock()  # torch's generators and hooks of a shared model belong to one call


def sentences(text: str | Iterable[str]) -> Iterator[str]:
    """Yield sentences as soon as they are complete; joined they are the text."""
    rest = ""
    for piece in [text] if isinstance(text, str) else text:
        rest += piece
        while found := _END.search(rest):
            yield rest[: found.end()]
            rest = rest[found.end() :]
    if rest.strip():
        yield rest


class GeneratorState:
    """State of torch's global generators that belongs to one reply, seeded once.

    Within it a stock class draws what it would draw alone after `torch.manual_seed(seed)`, and
    nothing outside notices. One call runs at a time.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self.cuda = device if device.type == "cuda" else None
        with _TURN:
            outside = self._read()
            torch.manual_seed(seed)
            self._state = self._read()
            self._write(outside)

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Draw from here until the end of the block."""
        with _TURN:
            outside = self._read()
            self._write(self._state)
            try:
                yield
            finally:
                self._state = self._read()
                self._write(outside)

    def _read(self) -> tuple[Tensor, Tensor | None]:
        cuda = None if self.cuda is None else torch.cuda.get_rng_state(self.cuda)
        return torch.get_rng_state(), cuda

    def _write(self, state: tuple[Tensor, Tensor | None]) -> None:
        torch.set_rng_state(state[0])
        if self.cuda is not None and state[1] is not None:
            torch.cuda.set_rng_state(state[1], self.cuda)


class _Left(BaseException):
    """Raised in a call whose sound is not wanted any more."""


class Steps:
    """A call of a stock class in a thread of its own, which waits behind each thing it tells.

    Hooks of a shared model are called for every call of it: they ask `mine` which one it is.
    """

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work, self._told = work, SimpleQueue[tuple[str, Any]]()
        self._go, self._gone = threading.Semaphore(0), False
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._run,), daemon=True)

    def mine(self) -> bool:
        """Return True in the thread of the call."""
        return threading.current_thread() is self._thread

    def tell(self, value: Any) -> None:
        """Hand a value over and wait."""
        self._told.put(("step", value))
        self._wait()

    def _run(self) -> None:
        try:
            self._wait()
            self._told.put(("end", self._work()))
        except _Left:
            self._told.put(("end", None))
        except BaseException as error:  # raised where the next step is asked for
            self._told.put(("error", error))

    def _wait(self) -> None:
        self._go.acquire()
        if self._gone:
            raise _Left

    def next(self) -> tuple[str, Any]:
        """Run to the next report, or to the end: `("step", value)` or `("end", result)`."""
        self._go.release()
        kind, value = self._told.get()
        if kind == "error":
            raise value
        return kind, value

    def start(self) -> None:
        """Begin; nothing runs before the first `next`."""
        self._thread.start()

    def stop(self) -> None:
        """Leave the call where it is."""
        self._gone = True
        self._go.release()
        self._thread.join()


def stepped(
    call: Callable[[], Any], hooks: Callable[[Steps], Sequence[Any]], random: GeneratorState
) -> Iterator[tuple[str, Any]]:
    """Run a call of a stock class step by step: yield what its hooks tell, then its result.

    `hooks` registers them and returns their handles. Between two steps nothing runs, and leaving
    the iterator ends the call.
    """
    steps = Steps(call)
    with _TURN:
        handles = hooks(steps)
    steps.start()
    try:
        kind = "step"
        while kind == "step":
            with random():
                kind, value = steps.next()
            yield kind, value
    finally:
        with _TURN:
            steps.stop()
            for handle in handles:
                handle.remove()


def named_told(module: nn.Module, steps: Steps, tell: Callable[[dict[str, Any]], None]) -> Any:
    """Call `tell` with the named arguments of each call of a module in the thread of `steps`.

    Returns the handle. A stream may end while another waits in a hook of the same module: torch
    then calls the hook that was removed once more, without the named arguments.
    """

    def called(_: Any, args: Any, named: dict[str, Any] | None = None) -> None:
        if named is not None and steps.mine():
            tell(named)

    return module.register_forward_pre_hook(called, with_kwargs=True)


class _Reached(BaseException):
    """A module was called; holds its arguments."""


def arguments_of(module: nn.Module, call: Callable[[], Any]) -> tuple[tuple[Any, ...], Any]:
    """Return the arguments with which `call` calls a module, which does not run."""

    def caught(_: Any, args: Any, named: Any) -> None:
        raise _Reached(args, named)

    with module.register_forward_pre_hook(caught, with_kwargs=True):
        try:
            call()
        except _Reached as reached:
            args, named = reached.args
            return args, named
    raise ModelError(f"{type(module).__name__} was not reached; this version of it is not known")


@dataclass(frozen=True)
class TalkerOptions:
    """Options of every talker: the seed of all that is random, and sentences said at once."""

    seed: int = 0
    batch_size: int = 8


@dataclass(frozen=True)
class DrawnOptions(TalkerOptions):
    """Options of talkers that draw tokens, those of `generate`; None: as the checkpoint has it."""

    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None


class StockTalker:
    """A stock class as a `core.speech.Speaker`.

    A subclass says a batch of sentences in `_say`; one that hands sound out while it is made has a
    `_stream` of its own. `batched` is False where the class says one at a time, `by_sentence` where
    it takes a whole text.
    """

    name: ClassVar[str]
    Options: ClassVar[type[TalkerOptions]] = TalkerOptions
    option_names: ClassVar[tuple[str, ...]] = ()
    batched: ClassVar[bool] = True
    by_sentence: ClassVar[bool] = True
    voices: tuple[str, ...] = ()
    sample_rate: int

    def __init_subclass__(cls) -> None:
        cls.option_names = tuple(each.name for each in fields(cls.Options))

    def __init__(self, model: Any, **options: Any) -> None:
        self.model = model.eval()
        self.device = torch.device(model.device)
        self.options = self._changed(self.Options(), options)

    def speak(self, text: str | Iterable[str], **options: Any) -> Iterator[Sound]:
        """Say text, or pieces of it as they come, sentence by sentence."""
        how = self._changed(self.options, options)
        return self._spoken(text, how, GeneratorState(how.seed, self.device))

    def left_out(self, text: str) -> list[str]:
        """Return letters and digits of a text that have no token of their own, and are not said."""
        words = getattr(self, "tokenizer", None)
        unknown_id = getattr(words, "unk_token_id", None)
        if words is None or unknown_id is None:
            return []
        signs = [sign for sign in dict.fromkeys(text) if sign.isalnum()]
        return [c for c in signs if unknown_id in words(c, add_special_tokens=False)["input_ids"]]

    def _noted(self, sound: Sound, text: str) -> Sound:
        lost = self.left_out(text)
        return replace(sound, notes={**sound.notes, "left_out": lost}) if lost else sound

    def speak_all(self, texts: Sequence[str], **options: Any) -> list[list[Sound]]:
        """Say several texts, `batch_size` sentences at once; the pieces of each text."""
        how = self._changed(self.options, options)
        if not self._batches(how):
            return [list(self.speak(text, **options)) for text in texts]
        parts = [[*self._parts(text)] for text in texts]
        flat = [part for each in parts for part in each if worded(part)]
        random, said = GeneratorState(how.seed, self.device), []
        for at in range(0, len(flat), how.batch_size):
            with random(), self._refusing(), torch.no_grad():
                said += self._say([each.strip() for each in flat[at : at + how.batch_size]], how)
        left = iter(said)
        return [
            [
                self._noted(self._sound(next(left) if worded(part) else None, part), part)
                for part in each
            ]
            for each in parts
        ]

    def _batches(self, how: Any) -> bool:
        """Return True where sentences of a batch are what each would be alone."""
        return self.batched

    def _spoken(
        self, text: str | Iterable[str], how: Any, random: GeneratorState
    ) -> Iterator[Sound]:
        for part in self._parts(text):
            shown = part
            for sound in self._stream(part.strip(), how, random) if worded(part) else ():
                yield self._noted(replace(sound, text=shown), shown)
                shown = ""
            if shown:
                yield self._sound(None, shown)

    def _parts(self, text: str | Iterable[str]) -> Iterator[str]:
        if isinstance(text, str) and not self.by_sentence:
            return iter([text])
        return sentences(text)

    def _stream(self, text: str, how: Any, random: GeneratorState) -> Iterator[Sound]:
        """Yield the sound of one sentence; all at once where the class does."""
        with random(), self._refusing(), torch.no_grad():
            (pcm,) = self._say([text], how)
        yield self._sound(pcm, "")

    def _say(self, texts: list[str], how: Any) -> list[Tensor]:
        """Return the sound `[n]` of each sentence."""
        raise NotImplementedError

    def _sound(self, pcm: Tensor | None, text: str, codes: Tensor | None = None) -> Sound:
        pcm = torch.zeros(0) if pcm is None else pcm.detach().float().cpu()
        return Sound(pcm, self.sample_rate, text, codes)

    def _changed(self, options: Any, changes: dict[str, Any]) -> Any:
        for name in changes:
            if name not in self.option_names:
                raise SpecError(unknown(f"option of {self.name}", name, self.option_names))
        return replace(options, **changes)

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """Turn what the stock class refuses into one line (ModelError)."""
        try:
            yield
        except (MmfastError, torch.OutOfMemoryError):
            raise
        except (ValueError, KeyError, IndexError, OSError, ImportError, RuntimeError) as error:
            reason = " ".join(str(error).split())[:300]
            raise ModelError(f"{self.name} cannot say this: {reason}") from error


class GeneratingTalker(StockTalker):
    """A stock class with a processor, whose `generate` takes `settings`: options that are not None.

    One that streams yields what `_steps` tells; its `_hooks` are those of `stepped`.
    """

    settings: ClassVar[tuple[str, ...]]
    detailed: ClassVar[bool] = False  # whether all that `generate` made is wanted

    def __init__(self, model: Any, processor: Any, **options: Any) -> None:
        super().__init__(model, **options)
        self.processor = processor

    def _generate(self, inputs: Any, how: Any) -> Any:
        given = set_options(how, self.settings)
        return self.model.generate(**inputs, **given, return_dict_in_generate=self.detailed)

    def _steps(self, inputs: Any, how: Any, random: GeneratorState) -> Iterator[tuple[str, Any]]:
        return stepped(lambda: self._generate(inputs, how), self._hooks, random)

    def _hooks(self, steps: Steps) -> Sequence[Any]:
        raise NotImplementedError

    def _recording(self, voice: str | None, count: int) -> dict[str, Any]:
        """Return the processor's `audio`: the voice of a file for each text, or nothing."""
        if voice is None:
            return {}
        return {"audio": [load_audio(Path(voice), self.sample_rate).numpy()] * count}


def worded(text: str) -> bool:
    """Return True where there is something to say."""
    return any(letter.isalnum() for letter in text)


def folder_of(model: Any) -> Path | None:
    """Return the directory from which a model was loaded; None for a hub id."""
    name = str(getattr(model, "name_or_path", "") or "")
    return Path(name) if name and Path(name).is_dir() else None


def set_options(how: Any, names: Sequence[str]) -> dict[str, Any]:
    """Options that are not left to the checkpoint, by name."""
    return {name: getattr(how, name) for name in names if getattr(how, name) is not None}
