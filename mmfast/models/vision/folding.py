"""Blocks of a vision tower without attention, its place folded into the norm: `"riformer:2"`.

Wang et al., CVPR 2023 (RIFormer, arXiv 2304.05659): a block adds to its input what its attention
makes of the normed input. In training an affine map of each channel stands in place of attention,
less its own input, so that it starts by adding nothing; it imitates what attention gave. The map
and the norm in front of it are one norm: with scale s and shift t, weight g and bias b of the norm
become g (s - 1) and b (s - 1) + t. What is left of the block is norm, MLP and two additions.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmfast.compressors.base import placed, read_module
from mmfast.core.errors import ModelError, SpecError, unknown
from mmfast.core.spec import Spec
from mmfast.core.trace import Trace
from mmfast.models.cost import linear_macs
from mmfast.models.families.adapter import adapter_for, tower_of
from mmfast.models.families.tower import (
    NORMS,
    Tower,
    attention_of,
    check_blocks,
    has_halves,
    part_of,
)
from mmfast.models.patching import override
from mmfast.models.reduction.tower_signals import from_tower, sources_of

NAME, FOLDER = "riformer", "towers"  # in specs, and beside the weights of a checkpoint
TIMM_PRE_NORM = ("Block", "EvaBlock")  # of timm, whose norms stand in front of attention and MLP
MODES = ("fast", "compile", "graph")


@dataclass(frozen=True)
class EncoderPlan:
    """One parsed `encoder=`: how the tower runs, and how many of its blocks have no attention."""

    mode: str | None = None
    folded: int | None = None
    path: str = ""


def plan_encoder(text: str | None) -> EncoderPlan:
    """Read `"fast"`, `"riformer:2"`, `"riformer:2?path=FILE"` or `"riformer:2+fast"`.

    Raises:
        SpecError: Names the value, the choices and the fix.
    """
    if text is None:
        return EncoderPlan()
    if text in MODES:
        return EncoderPlan(text)
    match = re.fullmatch(rf"{NAME}:(\d+)(\?path=(?P<path>.+?))?(\+(?P<mode>\w+))?", str(text))
    if match is None:
        head = re.split(r"[:?+]", str(text))[0]
        if head == NAME:
            raise SpecError(
                f"encoder={text!r} does not name its blocks; write '{NAME}:2' for two blocks "
                f"without attention, '{NAME}:2?path=FILE' or '{NAME}:2+fast'"
            )
        raise SpecError(unknown("encoder", str(text), (*MODES, f"{NAME}:N")))
    count, mode = int(match[1]), match["mode"]
    if count < 1:
        raise SpecError(f"encoder={text!r} folds no block; write '{NAME}:1' or leave it out")
    if mode not in (None, "fast"):
        raise SpecError(
            f"encoder={text!r}: code that was compiled or recorded does not notice other weights; "
            f"write '{NAME}:{count}' or '{NAME}:{count}+fast'"
        )
    return EncoderPlan(mode, count, match["path"] or "")


class AffineMixer(nn.Module):
    """A scale and shift of each channel, less the input, in place of attention in training.

    A norm without a bias has no place for a shift, so there is none in front of such a norm.
    """

    def __init__(self, width: int, shifts: bool, paired: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.shift = nn.Parameter(torch.zeros(width)) if shifts else None
        self.paired = paired

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
        """Map `[..., D]`; a pair with None where the block expects attention weights, too."""
        out = self.scale * hidden_states - hidden_states
        out = out if self.shift is None else out + self.shift
        return (out, None) if self.paired else out

    def fold(self, norm: Any) -> dict[str, Tensor]:
        """Weight and bias of the norm that does what `norm` and this map do, by name."""
        less = self.scale - 1
        found = {"weight": norm.weight * less}
        if self.shift is not None:
            found["bias"] = norm.bias * less + self.shift
        return found


class FoldedBlocks(nn.Module):
    """Weights of all blocks of a tower; those numbered in `blocks` have no attention.

    Names are those of the tower's own parameters, counted from its blocks.
    """

    name = NAME

    def __init__(self, blocks: Sequence[int], shapes: Mapping[str, Sequence[int]]) -> None:
        super().__init__()
        known = {name: [int(size) for size in shape] for name, shape in shapes.items()}
        self.config = {"blocks": [int(block) for block in blocks], "shapes": known}
        # A dot would make a parameter one of a submodule.
        made = {key.replace(".", "/"): nn.Parameter(torch.zeros(known[key])) for key in known}
        self.values = nn.ParameterDict(made)

    @property
    def blocks(self) -> list[int]:
        """Numbers of the blocks without attention."""
        found: list[int] = self.config["blocks"]  # type: ignore[assignment]
        return found

    def named(self) -> dict[str, Tensor]:
        """Values by the names of the tower's parameters."""
        shapes: dict[str, list[int]] = self.config["shapes"]  # type: ignore[assignment]
        return {name: self.values[name.replace(".", "/")] for name in shapes}


def without_attention(model: Any, blocks: Collection[int]) -> Any:
    """Copy a model, and put an affine map in place of attention in some blocks of its tower.

    Until it learns it is the model without that attention. ModelError for blocks it does not have.
    """
    check_tower(tower_of(model), blocks)
    made = copy.deepcopy(model)
    tower = tower_of(made)
    for number in sorted(blocks):
        block: Any = tower.blocks[number]
        norm, attention = part_of(block, NORMS[1]), attention_of(block)
        shifts = getattr(norm, "bias", None) is not None
        mixer = AffineMixer(len(norm.weight), shifts, gives_pair(tower, attention)).to(norm.weight)
        block._modules[_name_in(block, attention)] = mixer
    return made


@torch.no_grad()
def fold(model: Any) -> FoldedBlocks:
    """Fold the affine maps of a model made by `without_attention` into the norms before them."""
    blocks, found, gone = tower_of(model).blocks, dict[str, Tensor](), list[int]()
    for number, block in enumerate(blocks):
        attention = attention_of(block)
        mine: dict[str, Tensor] = {f"{number}.{n}": each for n, each in block.named_parameters()}
        if isinstance(attention, AffineMixer):
            gone.append(number)
            inside = f"{number}.{_name_in(block, attention)}."
            mine = {name: each for name, each in mine.items() if not name.startswith(inside)}
            norm = part_of(block, NORMS[1])
            at = f"{number}.{_name_in(block, norm)}"
            mine |= {f"{at}.{name}": each for name, each in attention.fold(norm).items()}
        found |= mine
    made = FoldedBlocks(gone, {name: each.shape for name, each in found.items()})
    for name, each in made.named().items():
        each.copy_(found[name])
    return made.eval().requires_grad_(False)


def _name_in(block: nn.Module, part: nn.Module) -> str:
    return next(name for name, each in block.named_children() if each is part)


def gives_pair(tower: Tower, attention: nn.Module) -> bool:
    """A tower's attention returns a pair, the second being the weights that it may give."""
    known = inspect.signature(type(attention).forward).return_annotation
    if known is inspect.Signature.empty:
        return not (tower.packed or tower.timm)
    return "tuple" in str(known)


def training(count: int) -> str:
    """The command that trains a tower with so many folded blocks."""
    blocks = " ".join(str(number) for number in range(1, count + 1))
    return f"python -m mmfast.tiny.video.folding --blocks {blocks}"


def file_of(folder: str | Path, count: int) -> Path:
    """The file of a tower with so many folded blocks beside a checkpoint."""
    return Path(folder) / FOLDER / f"{NAME}-{count}.safetensors"


def read(path: str | Path) -> FoldedBlocks:
    """Read the weights of a file, on the CPU in float32; ModelError where it holds none."""
    found: FoldedBlocks = read_module(path, "tower", FoldedBlocks)
    return found


def _weights(model: Any, plan: EncoderPlan) -> FoldedBlocks:
    """The weights that a plan names, on the device of the tower; ModelError if they do not fit."""
    count, tower = plan.folded or 0, tower_of(model)
    if count > len(tower.blocks):
        raise ModelError(
            f"'{NAME}:{count}' folds more than the {len(tower.blocks)} blocks of "
            f"{type(tower.module).__name__}; give 1 to {len(tower.blocks)}"
        )
    home = str(getattr(model, "name_or_path", "") or "")
    file = Path(plan.path) if plan.path else file_of(home, count)
    if not file.is_file():
        known = sorted(each.stem.split("-")[-1] for each in file.parent.glob(f"{NAME}-*"))
        have = f" (it has {NAME}:{', '.join(known)})" if known and not plan.path else ""
        missing = f"no file {plan.path!r}" if plan.path else f"{home!r} has no {FOLDER}/{file.name}"
        raise ModelError(
            f"'{NAME}:{count}' is learned, and {missing}{have}; train a tower with "
            f"`{training(count)}`, or name a file: {NAME}:{count}?path=FILE"
        )
    like = next(tower.module.parameters())
    found: FoldedBlocks = placed(str(file), like.device, like.dtype, read)
    if len(found.blocks) != count:
        raise ModelError(
            f"{str(file)!r} has {len(found.blocks)} blocks without attention, not {count}; write "
            f"'{NAME}:{len(found.blocks)}'"
        )
    check_tower(tower, found.blocks)
    gone = tuple(f"{n}.{_name_in(b, attention_of(b))}." for n, b in enumerate(tower.blocks))
    gone = tuple(gone[number] for number in found.blocks)
    own = {name: list(each.shape) for name, each in tower.blocks.named_parameters()}
    own = {name: shape for name, shape in own.items() if not name.startswith(gone)}
    if own != found.config["shapes"]:
        raise ModelError(
            f"{str(file)!r} was trained for another tower than {type(tower.module).__name__} with "
            f"{len(tower.blocks)} blocks; train one on this model ({training(count)})"
        )
    return found


def check_tower(tower: Tower, blocks: Collection[int]) -> None:
    """Refuse blocks that a tower lacks, or that do not add attention of a normed input."""
    kind = type(tower.module).__name__
    check_blocks(tower, kind, f"{NAME} to fold")
    if not blocks or not all(0 <= number < len(tower.blocks) for number in blocks):
        raise ModelError(
            f"blocks {sorted(blocks)} are not among those of {kind}; choose from 0 to "
            f"{len(tower.blocks) - 1}"
        )
    for block in tower.blocks:
        known = not tower.timm or type(block).__name__ in TIMM_PRE_NORM
        if not known or not has_halves(block):
            raise ModelError(
                f"'{NAME}' folds attention into the norm in front of it, and "
                f"{type(block).__name__} of {kind} is built otherwise; use encoder='fast'"
            )


def check_folded(encoder: str | None, specs: Sequence[Spec], model: Any) -> None:
    """Refuse stages that read or merge by attention that a folded block does not have."""
    plan = plan_encoder(encoder)
    if plan.folded is None:
        return
    found = _weights(model, plan)
    merging = [spec for spec in specs if spec.site == "vit" and not spec.whole]
    if merging:
        raise SpecError(
            f"'{merging[0]}' pairs tokens by the keys of every block, and encoder={encoder!r} "
            "leaves some without; use site 'pre'"
        )
    if adapter_for(model).alone:
        return
    for spec in specs:
        needs = from_tower(spec.method.needs)
        for name, source in sources_of(tower_of(model), needs, {}).items():
            if source.block in found.blocks and not spec.whole:
                raise SpecError(
                    f"'{spec}' reads {name!r} in block {source.block} of the vision tower, which "
                    f"has no attention under encoder={encoder!r}; use a method that reads tokens "
                    "alone, such as divprune"
                )


@contextmanager
def folded_tower(model: Any, encoder: str | None, trace: Trace) -> Iterator[None]:
    """Let the tower run with the weights of a file, some blocks without attention, exactly undone.

    The tower's own parameters are set aside, and follow the model where it moves meanwhile. The
    trace gets a note of the multiply-adds that are left. None, or a mode alone, does nothing.
    """
    plan = plan_encoder(encoder)
    if plan.folded is None:
        yield
        return
    found, tower = _weights(model, plan), tower_of(model)
    whole = linear_macs(tower.blocks)
    less = sum(linear_macs(attention_of(tower.blocks[number])) for number in found.blocks)
    note = (
        f"{NAME}: no attention in blocks {', '.join(map(str, found.blocks))} of "
        f"{len(tower.blocks)}; {whole - less} instead of {whole} multiply-adds a patch in the "
        "linear layers of the tower's blocks, which learn nothing meanwhile"
    )
    with ExitStack() as stack:
        for name, value in found.named().items():
            at, _, leaf = name.rpartition(".")
            stack.enter_context(_set_aside(tower.blocks.get_submodule(at), leaf, value))
        for number in found.blocks:
            attention = attention_of(tower.blocks[number])
            around = _same_pair if gives_pair(tower, attention) else _same
            stack.enter_context(override(attention, "forward", around))
        trace.notes.append(note)
        yield


@contextmanager
def _set_aside(owner: nn.Module, name: str, value: Tensor) -> Iterator[None]:
    """Put a value in place of a parameter, which comes back on the device of the module by then.

    What is saved and loaded meanwhile is the parameter: a checkpoint is one of the stock model.
    """
    before = owner._parameters[name]
    assert before is not None
    folded = owner._parameters[name] = nn.Parameter(value.clone(), requires_grad=False)

    def saved(_: nn.Module, states: dict[str, Any], prefix: str, __: Any) -> None:
        states[prefix + name] = before.detach().to(folded.device, folded.dtype)

    def loaded(_: nn.Module, states: dict[str, Any], prefix: str, *__: Any) -> None:
        found = states.get(prefix + name)
        if found is not None and found.shape == before.shape:
            before.data = found.detach().to(before.device, before.dtype, copy=True)
            states[prefix + name] = folded.detach()

    hooks = (
        owner.register_state_dict_post_hook(saved),
        owner.register_load_state_dict_pre_hook(loaded),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        last = owner._parameters[name]
        assert last is not None
        before.data = before.data.to(last.device, last.dtype)
        owner._parameters[name] = before


def _same(_: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return args[0] if args else next(iter(kwargs.values()))


def _same_pair(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return _same(call, *args, **kwargs), None
