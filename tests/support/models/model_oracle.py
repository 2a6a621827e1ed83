"""What a reduced forward pass must equal, computed without the code under test.

`embed` builds the prompt by hand, `removed` runs the stock text model on hand-shortened inputs,
`masked` drops nothing: it walks the decoder layers and hides what is dropped as keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from tiny_base import PIXELS, by_name
from torch import Tensor

from mmfast.core.reduction import Reduction

EXPERTS = "moe_mm_token_type_ids"


@dataclass
class Prompt:
    """One prompt without padding: embeddings `[L, D]`, positions `[L]` or `[3, L]`, items."""

    embeds: Tensor
    positions: Tensor
    items: list[Tensor]  # places of the tokens a method may reduce, per image or video
    planes: list[Tensor] = field(default_factory=list)  # [L, D], zero at text
    asked: int = 0  # tokens of the prompt before what was generated
    sides: Tensor | None = None  # [L, layers, P], what each layer gets beside its states
    types: Tensor | None = None  # [L], where they choose between experts of text and of media

    def experts(self, keep: Tensor) -> dict[str, Tensor]:
        """Arguments of the text model and its layers for the tokens in `keep`."""
        return {} if self.types is None else {EXPERTS: self.types[keep][None]}


@contextmanager
def in_double(tiny: Any) -> Iterator[None]:
    """Run the model in float64, and leave it as it was: float32 to float64 and back is exact."""
    tiny.model.double()
    try:
        yield
    finally:
        tiny.model.float()


def doubled(inputs: dict[str, Any]) -> dict[str, Any]:
    """Inputs with float64 in place of float32."""
    return {k: v.double() if torch.is_floating_point(v) else v for k, v in inputs.items()}


def encode(tiny: Any, inputs: dict[str, Any], kind: str) -> Any:
    """Stock encoder output of all items of a kind."""
    call = {name: inputs[name] for name in tiny.facts.calls[kind] if name in inputs}
    base = tiny.model.base_model
    method = getattr(base, f"get_{kind}_features")
    given = by_name(method, call)
    output = method(**given, return_dict=True)
    old = given.keys() != call.keys()
    if old and isinstance(output.pooler_output, Tensor):  # whose forward appends the newline
        newline = base.image_newline.expand(len(output.pooler_output), 1, -1)
        output.pooler_output = torch.cat([output.pooler_output, newline], 1)
    if output.pooler_output is None:  # sounds of 5.17
        output.pooler_output = output.last_hidden_state
    return output


def embed(tiny: Any, inputs: dict[str, Any]) -> Prompt:
    """The prompt of a batch of one, every feature put in its place by hand."""
    model, ids = tiny.model, inputs["input_ids"][0]
    embeds = model.get_input_embeddings()(ids).clone()
    items: list[tuple[int, Tensor]] = []
    planes: list[Tensor] = []
    for kind in tiny.facts.kinds:
        if PIXELS[kind] not in inputs:
            continue
        output = encode(tiny, inputs, kind)
        places = (ids == tiny.facts.token(model.config, kind)).nonzero()[:, 0]
        tiny.facts.amend(tiny, output, ids, embeds)
        # Clips of LLaVA-NeXT-Video in 5.17 are frames of tokens.
        features = [f.flatten(0, -2) for f in tiny.facts.items(tiny, output, kind, inputs)]
        embeds[places] = torch.cat(features)
        split = places.split([len(f) for f in features])
        items += [(int(mine[0]), mine[tiny.facts.content(tiny, embeds[mine])]) for mine in split]
        for index, plane in enumerate(getattr(output, "deepstack_features", None) or ()):
            if len(planes) <= index:
                planes.append(torch.zeros_like(embeds))
            planes[index][places] = plane if isinstance(plane, Tensor) else torch.cat(list(plane))
    items.sort(key=lambda pair: pair[0])
    places, types = [places for _, places in items], inputs.get(EXPERTS)
    return Prompt(
        embeds,
        positions_of(tiny, inputs),
        places,
        planes,
        asked=len(ids),
        sides=sides_of(tiny, ids),
        types=None if types is None else types[0],
    )


def sides_of(tiny: Any, ids: Tensor) -> Tensor | None:
    """What the layers of a small Gemma 4 get beside their states; media count as padding."""
    text, config = tiny.model.get_decoder(), tiny.model.config
    if not getattr(text.config, "hidden_size_per_layer_input", 0):
        return None
    media = [getattr(config, f"{kind}_token_id") for kind in tiny.facts.kinds]
    ids = ids.masked_fill(torch.isin(ids, torch.tensor(media)), text.config.pad_token_id)
    return text.get_per_layer_inputs(ids[None], None)[0]


def positions_of(tiny: Any, inputs: dict[str, Any]) -> Tensor:
    """Stock positions of a prompt, `[L]` or `[3, L]`."""
    ids = inputs["input_ids"]
    if tiny.facts.positions is not None:
        return tiny.facts.positions(tiny, inputs)
    if not tiny.facts.rope:
        return torch.arange(ids.shape[1])
    grids = {name: inputs[name] for name in tiny.facts.rope if name in inputs}
    return tiny.model.base_model.get_rope_index(ids, **grids)[0][:, 0]


def append(tiny: Any, prompt: Prompt, ids: Tensor) -> Prompt:
    """The prompt followed by generated tokens `[n]`, counted on from the last position."""
    embeds = torch.cat([prompt.embeds, tiny.model.get_input_embeddings()(ids)])
    # Stock generate counts on from the last position of every axis, which is text.
    after = torch.arange(1, len(ids) + 1) + prompt.positions[..., -1:]
    zeros = torch.zeros(len(ids), embeds.shape[1])
    planes = [torch.cat([plane, zeros]) for plane in prompt.planes]
    sides = sides_of(tiny, ids)
    return replace(
        prompt,
        embeds=embeds,
        positions=torch.cat([prompt.positions, after], -1),
        planes=planes,
        sides=None if sides is None else torch.cat([prompt.sides, sides]),
        types=None if prompt.types is None else F.pad(prompt.types, (0, len(ids))),
    )


def kept_places(prompt: Prompt, reductions: list[tuple[str, int, Reduction]]) -> Tensor:
    """Places left after pruning, `[M]` ascending."""
    alive = torch.ones(len(prompt.embeds), dtype=torch.bool)
    items = [item.clone() for item in prompt.items]
    for _, number, reduction in reductions:
        alive[items[number]] = False
        items[number] = items[number][reduction.keep]
        alive[items[number]] = True
    return alive.nonzero()[:, 0]


def removed(
    tiny: Any, prompt: Prompt, keep: Tensor, contiguous: bool = False, attentions: bool = False
) -> Any:
    """Stock text model on the kept tokens with their original positions; logits `[M, V]`.

    With `attentions` it returns those of the layers instead.
    """
    text = tiny.model.get_decoder()
    positions = prompt.positions[..., keep]
    if contiguous:  # the fault that the oracle must see
        positions = torch.arange(len(keep)).expand_as(positions)
    extra = prompt.experts(keep)
    if prompt.planes:
        visual = torch.zeros(len(prompt.embeds), dtype=torch.bool)
        visual[torch.cat(prompt.items)] = True
        extra |= {
            "visual_pos_masks": visual[keep][None],
            "deepstack_visual_embeds": [plane[keep][visual[keep]] for plane in prompt.planes],
        }
    if prompt.sides is not None:
        extra["per_layer_inputs"] = prompt.sides[keep][None]
    embeds = prompt.embeds[keep][None]
    ones = torch.ones(1, len(keep), dtype=torch.int64)  # without it, a gap would end a sequence
    out = text(
        inputs_embeds=embeds,
        position_ids=positions[None] if positions.ndim == 1 else positions[:, None],
        attention_mask=tiny.facts.mask(tiny, embeds, ones, blocks(prompt)[keep][None] >= 0),
        use_cache=False,
        output_attentions=attentions,
        **extra,
    )
    return out.attentions if attentions else tiny.model.lm_head(out.last_hidden_state[0])


def masked(tiny: Any, prompt: Prompt, reductions: list[tuple[str, int, Reduction]]) -> Tensor:
    """Logits `[L, V]` of a pass that hides dropped tokens as keys instead of dropping them.

    Merged tokens are averaged by a plain loop, features and DeepStack planes alike.
    """
    text = tiny.model.get_decoder()
    hidden = prompt.embeds.clone()
    planes = [plane.clone() for plane in prompt.planes]
    items = [item.clone() for item in prompt.items]
    alive = torch.ones(len(hidden), dtype=torch.bool)
    sides, lent = [], {}
    if prompt.sides is not None:
        given = text.project_per_layer_inputs(hidden[None], prompt.sides[None])[0]
        sides = [side.clone() for side in given.unbind(1)]
    kinds = getattr(text.config, "layer_types", None) or ["full_attention"] * len(text.layers)
    for index, layer in enumerate(text.layers):
        for site, number, reduction in reductions:
            if (0 if site == "pre" else int(site[3:])) == index:
                for values in (hidden, *planes[index:], *sides[index:]):
                    merge(values, items[number], reduction)
                alive[items[number]] = False
                items[number] = items[number][reduction.keep]
                alive[items[number]] = True
        more = {"per_layer_input": sides[index][None]} if sides else {}
        if "gemma4" in text.config.model_type:
            more["shared_kv_states"] = lent
        hidden = through(tiny, layer, kinds[index], hidden, prompt, alive.clone(), more)
        if index < len(planes):
            hidden = hidden + planes[index]
    norm = text.norm if hasattr(text, "norm") else text.embedding_norm
    return tiny.model.lm_head(norm(hidden))


def through(
    tiny: Any,
    layer: Any,
    kind: str,
    hidden: Tensor,
    prompt: Prompt,
    alive: Tensor,
    more: dict[str, Any] | None = None,
) -> Tensor:
    """One decoder layer `[L, D]`, in which the living tokens do not notice the others."""
    if kind in ("conv", "linear_attention"):
        hidden = hidden.clone()
        hidden[alive] = layer(hidden[alive][None], position_embeddings=None)[0]
        return hidden
    text, positions, number = tiny.model.get_decoder(), prompt.positions, blocks(prompt)
    seen = torch.ones(len(hidden), len(hidden)).tril().bool()
    seen |= forward_of(tiny, kind, number)
    if kind == "sliding_attention":  # counts the living
        rank = alive.cumsum(0)
        seen &= rank[:, None] - rank[None] < text.config.sliding_window
    if tiny.facts.prefix:  # past any window, too
        seen[: prompt.asked, : prompt.asked] = True
    mask = (seen & (alive | torch.eye(len(hidden), dtype=torch.bool)))[None, None]
    if text.config._attn_implementation == "eager":
        mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    by_kind = [kind] if hasattr(text.rotary_emb, "layer_types") else []
    places = positions[None] if positions.ndim == 1 else positions[:, None]
    cos_sin = text.rotary_emb(hidden[None], places, *by_kind)
    more = {**(more or {}), **prompt.experts(torch.arange(len(hidden)))}
    return layer(hidden[None], attention_mask=mask, position_embeddings=cos_sin, **more)[0]


def forward_of(tiny: Any, kind: str, number: Tensor) -> Tensor:
    """What tokens see inside the blocks of `number` `[L]` in a layer of a kind, `[L, L]`."""
    there = tiny.facts.blocks and (kind == "sliding_attention" or not tiny.facts.windowed)
    return (number[:, None] == number[None]) & (number >= 0) & bool(there)


def blocks(prompt: Prompt) -> Tensor:
    """Number of the image or frame of each token `[L]`, -1 at text, which parts frames."""
    number = torch.full((len(prompt.embeds),), -1)
    for index, places in enumerate(prompt.items):
        number[places] = len(number) * index + (places.diff(prepend=places[:1]) > 1).cumsum(0)
    return number


def merge(values: Tensor, where: Tensor, reduction: Reduction) -> None:
    """Put the weighted mean of its sources in the place of every kept token, in place."""
    before = values[where].clone()
    owner = reduction.owner.tolist()
    for slot, source in enumerate(reduction.keep.tolist()):
        mine = [i for i, o in enumerate(owner) if o == slot]
        if reduction.weight is None:
            values[where[source]] = before[mine].mean(0)
        else:
            weight = reduction.weight[mine].float()
            values[where[source]] = (weight[:, None] * before[mine]).sum(0)
