"""Base of the learned compressors: their interface, their files, and their use as a reduction."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mmfast.core.errors import ModelError
from mmfast.core.reduction import Reduction
from mmfast.core.registry import get
from mmfast.core.tokens import Tokens

FOLDER = "compressors"  # beside the weights of a checkpoint
_HEADER = "compressor"  # entry of the file's metadata that holds its configuration, as JSON
# What files of another kind end in, and configurations that a class cannot be made of.
_UNREADABLE: tuple[type[Exception], ...] = (
    *(OSError, SafetensorError, TypeError, ValueError, RuntimeError),
    *(ArithmeticError, AttributeError, LookupError),
)


@dataclass(frozen=True)
class Compressed:
    """Outputs of a compressor.

    Attributes:
        vectors: What the language model reads in place of the patches, `[..., F, k, D]`.
        place: The patch of its frame that each stands for, ascending, `[..., F, k]`.
        owner: The output that each patch belongs to, for pictures of it, `[..., F, P]`, counted
            from the first of its frame; below 0 or from k on it is one of another frame.
        score: What its choice among the patches goes by, before the softmax, -inf where it must
            not choose, `[..., F, k, P]`; lessons may teach it. None for one that chooses nothing.
        text: What is added to the embedded text of the prompt, 0 at padding, `[..., T, D]`. None
            for one that leaves the text as it is.
    """

    vectors: Tensor
    place: Tensor
    owner: Tensor
    score: Tensor | None = None
    text: Tensor | None = None

    @classmethod
    def of_cells(cls, vectors: Tensor, score: Tensor, cell: Tensor) -> Compressed:
        """Sort one output a cell by its place; `cell` `[P]` numbers the cell of each patch."""
        place = score.argmax(-1)
        order = place.argsort(-1)
        vectors, score = (
            each.gather(-2, order[..., None].expand_as(each)) for each in (vectors, score)
        )
        return cls(vectors, place.gather(-1, order), order.argsort(-1)[..., cell], score)


class Compressor(nn.Module):
    """Base of the modules that turn the patches of each frame into `tokens` vectors.

    They read projected features of one image or video and, where `asks`, the embedded text of the
    prompt. `width` is that of the language model, `grid` the rows and columns of a frame. Those of
    text (`compllm`) share the files alone.
    """

    kinds: ClassVar[dict[str, type[Compressor]]] = {}  # by name
    name: ClassVar[str] = ""
    config: dict[str, Any]  # arguments of the class

    def __init_subclass__(cls, name: str, **more: Any) -> None:
        super().__init_subclass__(**more)
        cls.name, cls.kinds[name] = name, cls

    def forward(
        self, x: Tensor, question: Tensor | None = None, known: Tensor | None = None
    ) -> Compressed:
        """Compress features `[..., F, P, D]`.

        Args:
            x: Projected features of F frames of P patches.
            question: Embedded text, `[..., T, D]`.
            known: False where the question is padding, `[..., T]`; None is no padding.
        """
        raise NotImplementedError

    @classmethod
    def refuse(cls, tokens: int) -> None:
        """Refuse a number of tokens a frame that no grid has with this class (ModelError)."""

    def check(self, grid: tuple[int, int, int], width: int, tokens: int) -> None:
        """Refuse features that the weights were not trained for (ModelError)."""
        mine = self.config
        have = (tuple(mine["grid"]), mine["width"], mine["tokens"])
        if have != (grid[1:], width, tokens):
            raise ModelError(
                f"{self.name}:{tokens} meets frames of {grid[1]} x {grid[2]} tokens of width "
                f"{width}, and its weights are for {mine['tokens']} of {have[0][0]} x {have[0][1]} "
                f"of width {mine['width']}; train it on this model ({training(self.name, tokens)})"
            )


def check_rank(rank: int, shapes: Iterable[Sequence[int]]) -> None:
    """Refuse a LoRA that is wider than all the layers of these shapes (ModelError)."""
    most = max(map(min, shapes), default=rank)
    if rank > most:
        raise ModelError(f"a LoRA of rank {rank} is wider than all layers; give up to {most}")


def training(name: str, tokens: int) -> str:
    """The command that trains a compressor."""
    return f"python -m mmfast.compressors.train --compressor {name} --tokens {tokens}"


def file_of(folder: str | Path, name: str, tokens: int) -> Path:
    """The file of a compressor beside a checkpoint."""
    return Path(folder) / FOLDER / f"{name}-{tokens}.safetensors"


def find(folder: str | Path, name: str, tokens: int) -> Path:
    """The file of a compressor beside a checkpoint; ModelError with the command that makes it."""
    if name in Compressor.kinds:
        Compressor.kinds[name].refuse(tokens)
    path = file_of(folder, name, tokens)
    if path.is_file():
        return path
    known = sorted(each.stem.split("-")[-1] for each in path.parent.glob(f"{name}-*.safetensors"))
    have = f" (it has {name}:{', '.join(known)})" if known else ""
    raise ModelError(
        f"'{name}:{tokens}' is learned, and {str(folder)!r} has no {FOLDER}/{path.name}{have}; "
        f"train one with `{training(name, tokens)}`, or name a file: {name}:{tokens}?path=FILE"
    )


def save(module: Any, path: str | Path, dtype: torch.dtype | None = None) -> None:
    """Write a module as safetensors, its `name` and `config` in the metadata; folders are made."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {
        name: value.detach().to("cpu", dtype).contiguous()
        for name, value in module.state_dict().items()
    }
    config = {"name": module.name, **module.config}
    save_file(state, path, {_HEADER: json.dumps(config)})
    path.chmod(0o644)


def load(path: str | Path) -> Compressor:
    """Read a compressor, on the CPU in float32; ModelError where the file is none."""

    def make(name: str, config: dict[str, Any]) -> Compressor:
        get(name, "compressor")  # imports all of them, and refuses an unknown name
        return Compressor.kinds[name](**config)

    found: Compressor = read_weights(path, "compressor", make)
    return found


@contextmanager
def _readable(path: str | Path, what: str) -> Iterator[None]:
    try:
        yield
    except _UNREADABLE as error:
        reason = " ".join(f"{type(error).__name__} {error}".split())[:200]
        raise ModelError(
            f"the {what} {str(path)!r} cannot be read: {reason}; name a .safetensors file "
            "that mmfast.compressors.base.save wrote"
        ) from error


def config_of(path: str | Path, what: str, name: str = "") -> dict[str, Any]:
    """Read the `name` and `config` of the module in a file, whose name is `name` if that is given.

    ModelError, which names `what` it should be.
    """
    with _readable(path, what), safe_open(path, "pt") as file:
        found: dict[str, Any] = json.loads(file.metadata()[_HEADER])
        if found["name"] != (name or found["name"]):
            raise ValueError("it holds another kind of module")
        return found


def check_file(path: str | Path, name: str, tokens: int, width: int) -> None:
    """Refuse a file before a prompt comes: no compressor, or one for something else (ModelError).

    Args:
        path: The file.
        name: The architecture that is asked for.
        tokens: Vectors a frame, or the rate of one of text.
        width: That of the language model.
    """
    mine = config_of(path, "compressor")
    if mine["name"] != name:
        raise ModelError(f"{str(path)!r} holds a {mine['name']!r}, not a {name!r}; write that name")
    have = (mine.get("tokens"), mine.get("width"))
    if have != (tokens, width):
        raise ModelError(
            f"{str(path)!r} is a {name}:{have[0]} for a model of width {have[1]}, not a "
            f"{name}:{tokens} for one of width {width}; name that, or train one on this model "
            f"({training(name, tokens)})"
        )


def read_weights(path: str | Path, what: str, make: Callable[[str, dict[str, Any]], Any]) -> Any:
    """Read the module that `make` makes of the name and config in a file's metadata, in float32.

    ModelError, which names `what` it should be, where the file is no such module.
    """
    config = config_of(path, what)
    with _readable(path, what), _undisturbed():
        found = make(config.pop("name"), config)
        found.load_state_dict(load_file(path))
        return found.float().eval().requires_grad_(False)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Make modules on the CPU, whose weights are drawn beside the numbers that a caller draws."""
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        yield


def read_module(path: str | Path, what: str, kind: Any) -> Any:
    """Read a module of the class `kind`, on the CPU in float32; ModelError where it is another."""
    config_of(path, what, kind.name)
    return read_weights(path, what, lambda _, config: kind(**config))


@lru_cache(maxsize=16)
def _placed(
    read: Callable[[str], Any], path: str, _age: int, device: torch.device, dtype: torch.dtype
) -> Any:
    with torch.inference_mode(False):  # it may serve a caller that trains, too
        return read(path).to(device, dtype)


def placed(
    path: str, device: torch.device, dtype: torch.dtype, read: Callable[[str], Any] = load
) -> Any:
    """Return the module that `read` makes of a file, on a device; again when the file changes."""
    age = Path(path).stat().st_mtime_ns if Path(path).is_file() else 0
    return _placed(read, path, age, device, dtype)


def learned(tokens: Tokens, budget: int, path: str, name: str) -> Reduction:
    """Compress the tokens of one image or video by the weights of a file.

    Args:
        tokens: `x` `[N, D]` with its `grid`, and `query` `[T, D]`.
        budget: Tokens to keep, a multiple of the frames.
        path: The file; `attach` and pipelines fill it in.
        name: The architecture that the file must hold.
    """
    grid = tokens.grid
    assert grid is not None
    frames, count = grid[0], budget // grid[0]
    if not path:
        find("", name, count)
    compressor: Compressor = placed(path, tokens.x.device, tokens.x.dtype)
    if compressor.name != name:
        raise ModelError(f"{path!r} holds a {compressor.name!r}, not a {name!r}; write that name")
    compressor.check(grid, tokens.x.shape[-1], count)
    out: Compressed = compressor(tokens.x.unflatten(-2, (frames, -1)), tokens.query)
    frame = torch.arange(frames, device=tokens.x.device)[:, None]
    keep = (out.place + frame * (grid[1] * grid[2])).flatten(-2)  # [..., F k]
    slot = (out.owner + frame * count).flatten(-2)
    merged = Reduction.merge(keep, keep.gather(-1, slot))
    return replace(merged, vectors=out.vectors.flatten(-3, -2), text=out.text)
