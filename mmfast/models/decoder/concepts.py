"""Embeddings of text that a language model makes of short segments itself (CompLLM, 2509.19228)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, smooth_l1_loss

from mmfast.compressors.base import placed, training
from mmfast.compressors.compllm import CompLLM, owners
from mmfast.core.errors import ModelError
from mmfast.core.locks import WholeLock
from mmfast.models.wrappers import decoder_of, layers_of

TOKENS = 2048  # of segments that are read side by side
MIB = 1 << 20
# Of an instance alone: what other code put over its class or hooked to it stays with the original.
_OWN = ("forward", "__deepcopy__", "__reduce_ex__", "_mmfast_handle", "_mmfast_undo")


class LoraLinear(nn.Module):
    """A linear layer of another model with a product of low rank beside it (2106.09685)."""

    def __init__(self, stock: nn.Module, down: Tensor, up: Tensor, scale: float) -> None:
        super().__init__()
        self.stock = stock
        self.low = (down, up)  # parameters of the compressor, not of this module
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        """`[..., in]` to `[..., out]`."""
        down, up = self.low
        out: Tensor = self.stock(x)
        return out + self.scale * linear(linear(x.to(down.dtype), down), up).to(out.dtype)


def _twin(module: nn.Module, name: str, added: Mapping[str, tuple[Tensor, Tensor, float]]) -> Any:
    """A module on the same parameters, without hooks, with the `added` products beside its own.

    So it may run while the original does, in this thread or in another.
    """
    if name in added:
        return LoraLinear(_twin(module, "", {}), *added[name])
    made = cast(Any, module.__class__.__new__(module.__class__))
    fresh = nn.Module().__dict__
    kept = {key: value for key, value in module.__dict__.items() if key not in _OWN}
    made.__dict__.update(kept | {key: fresh[key] for key in fresh if "hooks" in key})
    made.__dict__["_buffers"] = dict(module._buffers)  # tables that grow with a prompt
    made.__dict__["_compiled_call_impl"] = None
    made.__dict__["_modules"] = {
        key: child and _twin(child, f"{name}.{key}" if name else key, added)
        for key, child in module._modules.items()
    }
    return made


def linear_shapes(text: Any) -> dict[str, list[int]]:
    """Outputs and inputs of every linear layer in the decoder layers of a text model, by name."""
    names = {id(module): name for name, module in text.named_modules()}
    found = (m for layer in layers_of(text) for m in layer.modules() if isinstance(m, nn.Linear))
    return {names[id(m)]: [m.out_features, m.in_features] for m in found}


def new_compressor(model: Any, rate: int, **knobs: Any) -> CompLLM:
    """Make an untrained compressor for a causal language model.

    ModelError where it has no token that ends a text. `knobs` are those of `CompLLM`.
    """
    text, end = decoder_of(model), model.config.get_text_config().eos_token_id
    if end is None:
        raise ModelError(
            f"{type(model).__name__} has no token that ends a text; set model.config.eos_token_id"
        )
    table = model.get_input_embeddings().weight.detach().float()
    made = CompLLM(table.shape[1], rate, linear_shapes(text), **knobs)
    made.start(table[end if isinstance(end, int) else end[0]], float(table.square().mean().sqrt()))
    return made.to(table.device)


def check_concepts(compressor: Any, path: str, model: Any) -> None:
    """Refuse weights of another method or of another model (ModelError)."""
    if not isinstance(compressor, CompLLM):
        raise ModelError(f"{path!r} holds a {compressor.name!r}, not a 'compllm'; write that name")
    text, mine = decoder_of(model), compressor.config
    if any(name.endswith(".base_layer") for name in linear_shapes(text)):
        raise ModelError(
            "compllm reads segments with layers that it knows by name, and an adapter of PEFT is "
            "around some of them; attach to what its merge_and_unload() returns"
        )
    width = model.get_input_embeddings().weight.shape[1]
    if (mine["width"], mine["shapes"]) != (width, linear_shapes(text)):
        raise ModelError(
            f"{path!r} was trained on another model than this {type(model).__name__} of width "
            f"{width}; train it on this one ({training('compllm', compressor.rate)})"
        )


class ConceptReader:
    """Reads segments with a text model and a compressor's LoRA.

    The model itself stays as it is: a twin on the same parameters reads.
    """

    def __init__(self, text: Any, compressor: CompLLM) -> None:
        self.compressor = compressor
        sides = ((n, compressor.down[k], compressor.up[k]) for n, k in compressor.keys.items())
        added = {name: (down, up, compressor.scale) for name, down, up in sides}
        self._twin = _twin(text, "", added)

    def read(self, segments: Tensor) -> Tensor:
        """Segments of one length `[n, S, D]`, none of which sees another, as `[n, k, D]`."""
        compressor, many = self.compressor, len(segments)
        count = compressor.count(segments.shape[1])
        marks = compressor.mark.to(segments.dtype).expand(many, count, -1)
        out = self._twin(inputs_embeds=torch.cat([segments, marks], 1), use_cache=False)
        told = out.last_hidden_state[:, -count:].to(compressor.leave.weight.dtype)
        found: Tensor = compressor.leave(told)
        return found.to(segments.dtype)

    def read_all(self, segments: Mapping[Hashable, Tensor]) -> dict[Hashable, Tensor]:
        """Segments `[S, D]` by key, those of one length side by side, as `[k, D]` each."""
        lengths: dict[int, list[Hashable]] = {}
        for key, segment in segments.items():
            lengths.setdefault(len(segment), []).append(key)
        found: dict[Hashable, Tensor] = {}
        for length, keys in lengths.items():
            step = max(1, TOKENS // length)
            for at in range(0, len(keys), step):
                some = keys[at : at + step]
                found |= zip(some, self.read(torch.stack([segments[k] for k in some])), strict=True)
        return found


class SegmentStore:
    """Embeddings of segments by their token ids, at most so many bytes; the least used go first."""

    def __init__(self, limit: int) -> None:
        self.limit, self.bytes = limit, 0
        self._known: OrderedDict[Hashable, Tensor] = OrderedDict()
        self._lock = WholeLock()

    def __len__(self) -> int:
        return len(self._known)

    def get(self, key: Hashable) -> Tensor | None:
        """Return what is known of a segment, which then counts as used."""
        with self._lock:
            if key in self._known:
                self._known.move_to_end(key)
            return self._known.get(key)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._known.clear()
            self.bytes = 0

    def put(self, key: Hashable, value: Tensor) -> None:
        """Hold `[k, D]`, a copy: a slice would hold all of its batch."""
        value = value.clone()
        with self._lock:
            old = self._known.pop(key, None)
            self.bytes += value.nbytes - (0 if old is None else old.nbytes)
            self._known[key] = value
            while self.bytes > self.limit:
                self.bytes -= self._known.popitem(last=False)[1].nbytes


def _state_of(text: Any) -> list[Any]:
    """Tell where the weights of a model are and how often they changed; equal while they stay."""
    return [
        (each.data_ptr(), each.dtype, each.device, 0 if each.is_inference() else each._version)
        for each in text.parameters()
    ]


class ContextReader:
    """Reads the text before a question under `attach`, segment by segment, each one once."""

    def __init__(self, model: Any, knobs: Mapping[str, Any]) -> None:
        self._text, self._path = decoder_of(model), str(knobs["path"])
        self._first, self._plain = int(knobs["first"]), False
        self._made: Any = None  # weights that embeddings in the store are of
        self.store = SegmentStore(int(knobs["memory"]) * MIB)
        weight = model.get_input_embeddings().weight
        check_concepts(placed(self._path, weight.device, weight.dtype), self._path, model)

    def _refuse_scaled(self, hidden: Tensor, ids: Tensor) -> None:
        """Refuse a model that changes embeddings before layer 0: it would change them twice."""
        table = self._text.get_input_embeddings()
        if not torch.equal(table(ids[:1, -1:].to(hidden.device)).to(hidden), hidden[:1, -1:]):
            raise ModelError(
                f"compllm writes embeddings, and {type(self._text).__name__} scales those before "
                "its first layer; use 'fastkv'"
            )
        self._plain = True

    @torch.no_grad()
    def signals(
        self, prompts: Sequence[tuple[int, Tensor]], hidden: Tensor, ids: Tensor | None, past: int
    ) -> list[dict[str, Tensor]]:
        """Return `concepts` `[M, D]` and `concept_owner` `[N]` for each prompt.

        Prompts are a row and the places `[N]` in it; `hidden` `[B, L, D]` is what enters layer 0.
        Segments are known again by `ids` `[B, L]`; without ids all are read. `past` tokens stand
        before: a later turn has no first tokens to keep.
        """
        compressor = cast(CompLLM, placed(self._path, hidden.device, hidden.dtype))
        first, size = 0 if past else self._first, compressor.segment
        learning = self._text.training  # its weights change
        known, wanted = dict[Hashable, Tensor](), dict[Hashable, Tensor]()
        rows = list[tuple[Tensor, list[Hashable]]]()
        if ids is not None and not self._plain:
            self._refuse_scaled(hidden, ids)
        if (made := (compressor, _state_of(self._text))) != self._made:
            self.store.clear()
            self._made = made
        for number, (row, where) in enumerate(prompts):
            x = hidden[row].index_select(0, where.to(hidden.device))
            words = None if ids is None else ids[row, where.to(ids.device)].tolist()
            keys = list[Hashable]()
            for at in range(first, len(x), size):
                part = slice(at, at + size)
                keys.append((number, at) if words is None else tuple(words[part]))
                held = None if words is None or learning else self.store.get(keys[-1])
                if held is None:
                    wanted.setdefault(keys[-1], x[part])
                else:
                    known[keys[-1]] = held
            rows.append((x, keys))
        if wanted:
            known |= self._read(compressor, wanted, ids is not None and not learning)
        return [
            {
                "concepts": torch.cat([x[:first], *(known[key] for key in keys)]),
                "concept_owner": owners(len(x), first, size, compressor.rate).to(x.device),
            }
            for x, keys in rows
        ]

    def _read(
        self, compressor: CompLLM, wanted: Mapping[Hashable, Tensor], hold: bool
    ) -> dict[Hashable, Tensor]:
        found = ConceptReader(self._text, compressor).read_all(wanted)
        for key, value in found.items() if hold else ():
            self.store.put(key, value)
        return found


@dataclass(frozen=True)
class AnsweredText:
    """A text to learn from: ids of a context `[N]`, and of a question with its answer `[T]`.

    `writes` `[T]` is True at the tokens behind which a word of the answer stands.
    """

    context: Tensor
    rest: Tensor
    writes: Tensor


def distillation(
    model: Any, compressor: CompLLM, texts: Sequence[AnsweredText], first: int = 1
) -> tuple[Tensor, Tensor]:
    """Loss of a compressor: what a frozen model computes where it answers, with and without it.

    Smooth L1 distance of the hidden states of the two passes behind a decoder layer, divided by the
    standard deviation of the pass over all tokens, mean over layers; states at the tokens from
    which answers are written count. The `first` tokens of a context stay. Also returns the last
    states of the pass over embeddings, `[n, D]`. Gradients reach the compressor alone where the
    parameters of the model ask for none.
    """
    table = model.get_input_embeddings()
    every = [table(torch.cat([text.context, text.rest])) for text in texts]
    short = _shortened(ConceptReader(decoder_of(model), compressor), every, texts, first)
    marks = [text.writes for text in texts]
    with torch.no_grad():
        right = _states(model, every, marks)
    found = _states(model, short, marks)
    losses = [
        smooth_l1_loss(mine, stock) / stock.std() for mine, stock in zip(found, right, strict=True)
    ]
    return torch.stack(losses).mean(), found[-1]


def _shortened(
    reader: ConceptReader, every: Sequence[Tensor], texts: Sequence[AnsweredText], first: int
) -> list[Tensor]:
    """Embedded texts `[N + T, D]` with those of their contexts in segments, `[M + T, D]`."""
    size, places = reader.compressor.segment, list[list[tuple[int, int, int]]]()
    for row, text in enumerate(texts):
        n = len(text.context)
        places.append([(row, at, min(at + size, n)) for at in range(first, n, size)])
    found = reader.read_all({
        place: every[place[0]][place[1] : place[2]] for mine in places for place in mine
    })  # fmt: skip
    return [
        torch.cat([x[:first], *(found[place] for place in mine), x[len(text.context) :]])
        for x, mine, text in zip(every, places, texts, strict=True)
    ]


def _states(model: Any, rows: Sequence[Tensor], marks: Sequence[Tensor]) -> list[Tensor]:
    """Hidden states `[n, D]` behind each decoder layer, at the marked ends of rows `[L, D]`."""
    padded = nn.utils.rnn.pad_sequence(list(rows), batch_first=True)  # behind: nothing sees it
    out = decoder_of(model)(inputs_embeds=padded, use_cache=False, output_hidden_states=True)
    return [
        torch.cat([
            row[len(x) - len(mark) : len(x)][mark]
            for row, x, mark in zip(states, rows, marks, strict=True)
        ]).float()
        for states in out.hidden_states[1:]
    ]  # fmt: skip
