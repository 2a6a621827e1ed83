"""Reduced inputs instead of hooks, for callers that own the call.

Media are encoded through the stock methods, reduced, and handed on as `mm_encoder_outputs` with a
shortened prompt and the original positions. Everything after that is stock, caches included.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmfast.core.errors import ModelError, SpecError
from mmfast.core.spec import Spec, parse
from mmfast.core.trace import Trace
from mmfast.models.encoder_names import (
    FEATURES,
    encode_media,
    encoder_arguments,
    needed_of,
    no_features,
    output_of,
    planes_of,
    takes_features,
)
from mmfast.models.families.adapter import adapter_for, placeholder
from mmfast.models.families.prompt_ids import prompt_ids
from mmfast.models.families.tower import kinds_of
from mmfast.models.reduction.check import check
from mmfast.models.reduction.decoder_signals import AHEAD
from mmfast.models.reduction.record import features_given, flat, recording
from mmfast.models.reduction.sequence import Sequences, locate
from mmfast.models.reduction.site import sites_of
from mmfast.models.reduction.step import EXPERTS, ForwardStep
from mmfast.models.wrappers import base_of, position_axes


def compress(
    model: Any,
    inputs: Mapping[str, Any],
    reduce: str | Sequence[Spec] | None,
    trace: Trace | None = None,
) -> dict[str, Any]:
    """Encode and reduce the media of a prompt; the result is what `attach` would compute.

    Takes inputs of the processor and stages at sites `pixel` and `pre`. Returns inputs for
    `forward` or `generate`: `input_ids` `[B, m]` left-padded, `attention_mask`, explicit
    `position_ids` and `mm_encoder_outputs` (`inputs_embeds` where there is sound, or text was
    fused, or transformers is older than 5.18: KV policies take embedded media for text). Token
    counts and sequences that `generate` returns are those of the shortened prompt.
    ModelError where a signal is missing, a prompt ends with media whose last token is dropped, or
    the family's `generate` takes no positions.
    """
    if parse(reduce) and adapter_for(model).counts:
        raise ModelError(
            f"generate of {type(model).__name__} takes no positions, so a shortened prompt would "
            "lose its own; use attach()"
        )
    rest, _ = compressed(model, inputs, reduce, trace)
    base = base_of(model)
    merger = getattr(base, "inputs_merger", None)  # of SmolVLM before 5.21: equal blocks alone
    blocks = merger is not None and "patch_size" in merger.__code__.co_varnames
    return rest if takes_features(model) and not blocks else _with_embeds(base, rest)


def _with_embeds(base: Any, rest: dict[str, Any]) -> dict[str, Any]:
    """Everything embedded, for a release whose models take no features in place of pixels."""
    outputs = rest.pop(FEATURES, None)
    if outputs is None:
        return rest
    if any(planes_of(output) for output in outputs.values()):
        raise no_features(base)
    return {**rest, "inputs_embeds": _embedded(base, rest["input_ids"], outputs)}


@torch.no_grad()
def compressed(
    model: Any,
    inputs: Mapping[str, Any],
    reduce: str | Sequence[Spec] | None,
    trace: Trace | None = None,
) -> tuple[dict[str, Any], Sequences]:
    """As `compress`, with the places of text and media in the shortened prompt."""
    from mmfast.models.vision.pixel import pixel_stage  # imports this package

    specs = check(asked, model) if (asked := parse(reduce)) else ()
    sites, early = sites_of(specs), [spec for spec in specs if spec.site == "pixel"]
    for spec in specs:
        if spec.site not in ("pixel", "pre") or AHEAD in spec.method.needs or spec.method.rate:
            raise SpecError(f"{str(spec)!r} runs inside the model; use attach() for it, not inputs")
    if inputs.get("input_ids") is None:
        raise ModelError("inputs hold no 'input_ids'; pass what the processor returned")
    adapter, base = adapter_for(model), base_of(model)
    needs, given = {need for site in sites for need in site.needs}, features_given(inputs)
    with (
        pixel_stage(model, adapter, early) if early else nullcontext(),
        prompt_ids(inputs["input_ids"]),
        recording(base, adapter, needs) if None in given.values() else nullcontext() as recorder,
    ):
        outputs = {kind: _encode(base, kind, inputs) for kind in given}
        # VideoLLaMA3's mask of dropped tokens, which is all True where its layout is known
        spent = _encoder_arguments(base) | {"video_compression_mask"}
        rest = {k: v for k, v in inputs.items() if k not in spent}
        rest["position_ids"] = positions_of(model, inputs)
        rest["mm_encoder_outputs"] = outputs
        mask = inputs.get("attention_mask")
        ok = None if mask is None or bool(mask.all()) else mask.bool()
        sequences = locate(base, adapter, rest, recorder.last if recorder else {}, ok)
    step, sounds = ForwardStep(sites, sequences, None, trace or Trace()), "audio" in outputs
    if step.sites or sounds:
        config = base.config.get_text_config()
        hidden = _embedded(base, rest["input_ids"], outputs)
        rest, hidden = _shortened(model, rest, outputs, step, hidden)
        if getattr(config, "hidden_size_per_layer_input", 0) and step.merged:
            raise ModelError(
                f"layers of {type(model).__name__} get inputs made of embeddings, and merged ones "
                "would get others than under attach(); use attach(), or a method that only drops"
            )
        # Stock models take no encoded sound, and no text of other embeddings than its ids have, so
        # everything goes in embedded.
        if sounds or step.fused:
            del rest["mm_encoder_outputs"]
            rest["inputs_embeds"] = hidden
    return rest, sequences


def _encoder_arguments(base: Any) -> set[str]:
    names = set()
    for kind in kinds_of(base):
        names |= set(encoder_arguments(base, kind))
    return names


def _encode(base: Any, kind: str, inputs: Mapping[str, Any]) -> Any:
    given = (inputs.get("mm_encoder_outputs") or {}).get(kind)
    if given is not None:
        return given
    names = [name for name in encoder_arguments(base, kind) if name in inputs]
    return encode_media(base, kind, {name: inputs[name] for name in names}, return_dict=True)


def positions_of(model: Any, inputs: Mapping[str, Any]) -> Tensor:
    """Return the positions of a prompt, those given or those of `generate`."""
    given: Tensor | None = inputs.get("position_ids")
    if given is not None:
        return given
    positions: Tensor = model._prepare_position_ids_for_generation(
        inputs["input_ids"], dict(inputs)
    )
    return positions


def _embedded(base: Any, ids: Tensor, outputs: Mapping[str, Any]) -> Tensor:
    hidden: Tensor = base.get_input_embeddings()(ids)
    for kind, output in outputs.items():
        place = (ids == placeholder(base.config, kind))[..., None]
        hidden = hidden.masked_scatter(place, flat(output.pooler_output).to(hidden))
    return hidden


def _shortened(
    model: Any, rest: dict[str, Any], outputs: dict[str, Any], step: ForwardStep, hidden: Tensor
) -> tuple[dict[str, Any], Tensor]:
    base, ids, sequences = base_of(model), rest["input_ids"], step.sequences
    places = {kind: ids == placeholder(base.config, kind) for kind in outputs}
    for site in step.sites:
        hidden = step.reduce(site, hidden)
    if sequences.index is None:
        return rest, hidden
    pad = getattr(base.config.get_text_config(), "pad_token_id", None) or 0
    short = {**rest, **_gathered(rest, sequences, int(pad))}
    for kind, output in outputs.items():
        here = places[kind].gather(1, sequences.index) & (short["attention_mask"] > 0)
        planes = _planes(output, places, kind, hidden, step, here)
        rows = _like(output.pooler_output, hidden[here])
        extra = {} if planes is None else {"deepstack_features": planes}
        short["mm_encoder_outputs"] = {
            **short["mm_encoder_outputs"],
            kind: _output(output, rows, extra),
        }
    return short, hidden


def _gathered(rest: dict[str, Any], sequences: Sequences, pad: int) -> dict[str, Any]:
    """Everything that runs along the prompt, shortened alike; original positions."""
    index, ok = sequences.index, sequences.ok
    assert index is not None
    valid = torch.ones_like(index) if ok is None else ok.long()
    out: dict[str, Any] = {"attention_mask": valid}
    for name, value in rest.items():
        if name in ("input_ids", "token_type_ids", "mm_token_type_ids", EXPERTS):
            filler = pad if name == "input_ids" else 0
            out[name] = value.gather(1, index).masked_fill(valid == 0, filler)
    positions = rest["position_ids"]
    wide = index.expand(*positions.shape[:-2], *index.shape)
    out["position_ids"] = positions.expand(*positions.shape[:-2], len(index), -1).gather(-1, wide)
    if bool((index[:, -1] != rest["input_ids"].shape[1] - 1).any()):
        raise ModelError(
            "a prompt ends with an image or clip whose last token was dropped, and generate would "
            "count on from a wrong position; put text behind it, or use attach()"
        )
    return out


def _planes(
    output: Any,
    places: dict[str, Tensor],
    kind: str,
    hidden: Tensor,
    step: ForwardStep,
    here: Tensor,
) -> list[Any] | None:
    if getattr(output, "deepstack_features", None) is None:
        return None
    visual = torch.stack(list(places.values())).any(0)
    reduced = []
    for plane in planes_of(output):
        rows = torch.cat(list(plane))
        joint = rows.new_zeros(int(visual.sum()), rows.shape[-1])
        joint[places[kind][visual]] = rows
        reduced.append([step.add_planes(torch.zeros_like(hidden), joint.to(hidden))[here]])
    return reduced


def _output(stock: Any, rows: Any, extra: Mapping[str, Any]) -> Any:
    """An encoder output of the stock class: features, and the fields that the class requires."""
    return output_of(type(stock), {**needed_of(stock), "pooler_output": rows, **extra})


def _like(stock: Any, rows: Tensor) -> Any:
    return rows[None] if isinstance(stock, Tensor) else [rows]


@torch.no_grad()
def encoded(model: Any, inputs: Mapping[str, Any], needs: Collection[str] = ()) -> dict[str, Any]:
    """Inputs of `generate` or `forward` with the encoder's outputs in place of pixels.

    The outputs remember the layout and the tower's signals in `needs`, so stages work on them under
    `attach` as if the media were encoded there.
    """
    base = base_of(model)
    outputs = {}
    with prompt_ids(inputs.get("input_ids")), recording(base, adapter_for(model), needs):
        for kind in features_given(inputs):
            outputs[kind] = _encode(base, kind, inputs)
    names = {name for name in _encoder_arguments(base) if name.startswith("pixel_values")}
    rest = {name: value for name, value in inputs.items() if name not in names}
    return {**rest, "mm_encoder_outputs": outputs}


@dataclass(frozen=True, eq=False)
class PromptRows:
    """One prompt as the language model reads it.

    `hidden` `[n, D]` are its embeddings, `positions` `[A, n]`; `places` `[n]` bool by kind tell
    where media stand, `visual` `[n]` where any does, and `planes` are DeepStack features of those,
    `[visual tokens, D]` each. `fused` `[n]` is True at text whose embedding is not that of its id.
    """

    hidden: Tensor
    positions: Tensor
    places: dict[str, Tensor]
    visual: Tensor
    planes: tuple[Tensor, ...]
    fused: Tensor


def prompt_rows(model: Any, rest: Mapping[str, Any], whole: Mapping[str, Any]) -> PromptRows:
    """Return the rows of one prompt from inputs, or from what `compressed` returns of them.

    `whole` are the encoder's outputs before reduction, by kind.
    """
    base, ids = base_of(model), rest["input_ids"][0]
    outputs = rest.get("mm_encoder_outputs") or {}
    embeds: Tensor | None = rest.get("inputs_embeds")
    joint = torch.zeros_like(ids, dtype=torch.bool)
    words = base.get_input_embeddings()(ids)
    hidden = words if embeds is None else embeds[0]
    planes: list[Tensor] = []
    places = {}
    for kind, output in (outputs or whole).items():
        place = places[kind] = ids == placeholder(base.config, kind)
        if embeds is None:
            hidden = hidden.masked_scatter(place[:, None], flat(output.pooler_output).to(hidden))
        for i, plane in enumerate(planes_of(output)):
            if len(planes) <= i:
                planes.append(torch.zeros_like(hidden))
            planes[i][place] = flat(plane).to(hidden)
        joint |= place
    positions = axes(model, positions_of(model, rest), len(ids))
    fused = torch.zeros_like(joint) if embeds is None else (hidden != words).any(-1) & ~joint
    shown = tuple(plane[joint] for plane in planes)
    return PromptRows(hidden, positions, places, joint, shown, fused)


def axes(model: Any, positions: Tensor, length: int) -> Tensor:
    """Return positions `[A, m]` of one prompt, from `[1, m]`, `[A, 1, m]` or `[A + 1, 1, m]`."""
    count = position_axes(model.get_decoder())
    if positions.ndim == 3:
        positions = positions[-max(count, 3) :, 0]
    if positions.shape[0] == 1:
        positions = positions.expand(count, -1)
    return positions[:, -length:].contiguous()
