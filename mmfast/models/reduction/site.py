"""Running the stages of one site on one image or video."""

from __future__ import annotations

import time
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce

import torch
from torch import Tensor

from mmfast.core.errors import ModelError
from mmfast.core.reduction import Reduction
from mmfast.core.registry import MEDIA
from mmfast.core.spec import Spec, run, wanted
from mmfast.core.tokens import Tokens, follow, follow_signals
from mmfast.models.reduction.decoder_signals import AHEAD, WINDOW, WINDOWED

# A knob of stages that look ahead: `auto`, `new` or `original`.
POSITIONS = "positions"
# A chunk of a chunked prefill holds tokens part[0]:part[1] of the part[2] tokens of an item.
Part = tuple[int, int, int]


@dataclass(frozen=True)
class Site:
    """The stages that run before decoder layer `layer` (`pre` is layer 0), in the order written.

    A share refers to the tokens that enter its stage, so `"evs:0.5+divprune:0.5"` leaves a quarter;
    a whole number is what the stage leaves of each image or video.
    """

    layer: int
    specs: tuple[Spec, ...]

    @property
    def name(self) -> str:
        """The site as written in a spec, such as `pre` or `llm3`."""
        return self.specs[0].where

    @property
    def deep(self) -> bool:
        """It works on hidden states inside the LLM, on the tokens of this call."""
        return self.specs[0].site == "llm" or self.ahead or self.concepts

    @property
    def ahead(self) -> bool:
        """It reads the attention of a deeper layer, which then has to run first."""
        return AHEAD in self.specs[0].method.needs

    @property
    def concepts(self) -> bool:
        """It puts what the model makes of segments of text in their place."""
        return self.specs[0].method.rate

    @property
    def early(self) -> bool:
        """It ran before the vision tower, so that its outcome is known."""
        return self.specs[0].site == "pixel"

    @property
    def tokens(self) -> str:
        """The tokens of a prompt that its stages may drop: of media, of text, or all."""
        return self.specs[0].tokens

    @property
    def of_text(self) -> bool:
        """It drops text, alone or together with media."""
        return self.tokens != MEDIA

    def renumbers(self, turns: bool) -> bool:
        """Return True if it counts what is left anew; `turns`: positions turn along one axis."""
        counts = self.ahead or self.concepts
        asked = self.specs[0].knobs.get(POSITIONS, "auto" if counts else "original")
        return bool(asked == "new" or (asked == "auto" and self.of_text and turns))

    @property
    def last(self) -> int:
        """Tokens at the end of a prompt that stay: whose attention is read, or the question."""
        if self.concepts:
            spec = self.specs[0]
            return int({**spec.method.knobs, **spec.knobs}["recent"])
        return WINDOW if self.needs & WINDOWED else 1

    @property
    def revives(self) -> bool:
        """Dropped tokens may come back while decoding."""
        return self.deep and any(spec.method.revives for spec in self.specs)

    @property
    def halts(self) -> bool:
        """Tokens that leave keep their state up to the end of the model."""
        return self.deep and all(spec.method.halts for spec in self.specs)

    @property
    def bypasses(self) -> bool:
        """Tokens that are not kept stay until the prompt ends, past the feed-forward layers."""
        return any(spec.method.bypasses for spec in self.specs)

    @property
    def fuses(self) -> bool:
        """It changes the embeddings of the prompt's text by what it read in the media."""
        return any(spec.method.fuses and not spec.whole for spec in self.specs)

    @property
    def asks(self) -> bool:
        """It reads the text of a prompt in front of the decoder."""
        specs = () if self.deep else self.specs
        return any("query" in spec.method.needs and not spec.whole for spec in specs)

    @property
    def joint(self) -> bool:
        """A stage looks at all images of a prompt at once."""
        return any(spec.method.scope == "prompt" for spec in self.specs)

    @property
    def needs(self) -> set[str]:
        """Signals some stage reads."""
        inner = {need for spec in self.specs if self.deep for need in spec.method.inner}
        return inner | {need for spec in self.specs for need in spec.method.needs}

    def left(self, n: int, entered: MutableMapping[int, int]) -> int | None:
        """Tokens the site leaves of `n` of an item; None where a stage decides itself.

        SpecError for a whole-number budget above the tokens that enter its stage.
        """
        for spec in self.specs:
            left = wanted(fitted(spec, n), n, entered)
            if left is None:
                return None
            n = left
        return n


_ORDER = ("pixel", "pre", AHEAD, "llm")


def sites_of(specs: Sequence[Spec]) -> list[Site]:
    """Group stages by the decoder layer before which they run, in layer order."""
    layers: dict[tuple[int, str], list[Spec]] = {}
    for spec in specs:
        if spec.site in _ORDER:
            name = AHEAD if AHEAD in spec.method.needs else spec.site
            layers.setdefault((spec.layer or 0, name), []).append(spec)
    order = sorted(layers, key=lambda key: (key[0], _ORDER.index(key[1])))
    return [Site(layer, tuple(layers[layer, name])) for layer, name in order]


def refuse_parts(sites: Sequence[Site]) -> None:
    """ModelError for a site that drops, fuses or asks text, in a prompt that comes in parts."""
    for site in sites:
        if site.fuses:
            spec = next(spec for spec in site.specs if spec.method.fuses)
            raise ModelError(
                f"'{spec}' fuses all text of a prompt with its media, and chunked prefill shows a "
                "part; leave out prefill_chunk_size"
            )
        if site.of_text:
            raise ModelError(
                f"'{site.specs[0]}' asks the end of a prompt which of its text may go, and chunked "
                "prefill shows a part; leave out prefill_chunk_size"
            )
        if site.asks:
            spec = next(spec for spec in site.specs if "query" in spec.method.needs)
            raise ModelError(
                f"'{spec}' reads the question of a prompt, and chunked prefill shows a part; leave "
                "out prefill_chunk_size"
            )


def fitted(spec: Spec, n: int) -> Spec:
    """A stage for a prompt of `n` tokens: one of fewer than its budget is kept whole."""
    counts = spec.tokens != MEDIA and not spec.method.rate
    short = counts and isinstance(spec.budget, int) and spec.budget > n
    return replace(spec, budget=n) if short else spec


@dataclass(frozen=True)
class Chain:
    """The reductions of one item by the stages of a site, and the milliseconds of each.

    `raster` is `(frames, rows, columns)` of what is left, where that is a full raster again.
    """

    reductions: tuple[Reduction, ...]
    ms: tuple[float, ...] = field(default=(), compare=False)
    raster: tuple[int, int, int] | None = None

    @property
    def keep(self) -> Tensor:
        """`[M]` ascending: the token that each output stands for."""
        keep = self.reductions[0].keep
        for reduction in self.reductions[1:]:
            keep = keep.index_select(0, reduction.keep)
        return keep

    @property
    def owner(self) -> Tensor:
        """`[N]` in [-1, M): the output that each token joins, -1 where it left."""
        return reduce(Reduction.then, self.reductions).owner

    @property
    def pure(self) -> bool:
        """Every output is one untouched token."""
        return all(reduction.pure for reduction in self.reductions)

    @property
    def text(self) -> Tensor | None:
        """`[T, D]` to be added to the embeddings of the text; None where it stays as it is."""
        found = [each.text for each in self.reductions if each.text is not None]
        return torch.stack(found).sum(0) if found else None

    def follow(self, signals: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Signals of the `N` tokens as those of the `M`."""
        for reduction in self.reductions:
            here = {name: value.to(reduction.keep.device) for name, value in signals.items()}
            signals = follow_signals(here, reduction)
        return dict(signals)

    def apply(self, x: Tensor) -> Tensor:
        """`[N, D]` to `[M, D]`."""
        for reduction in self.reductions:
            x = reduction.apply(x)
        return x


def run_stage(spec: Spec, tokens: Tokens, entered: MutableMapping[int, int]) -> Reduction:
    """Run one stage on the tokens that enter it; errors are those of `run_site`."""
    spec = fitted(spec, tokens.n)
    if spec.cut is not None:
        spec = replace(spec, budget=wanted(spec, tokens.n, entered), cut=None)
    check_signals(spec, tokens)
    found = run(spec, tokens)
    assert isinstance(found, Reduction)
    return found


def run_site(site: Site, tokens: Tokens, entered: MutableMapping[int, int]) -> Chain:
    """Run all stages of a site on one item, `x` `[N, D]`.

    ModelError for a signal that the model could not supply, SpecError for a budget that does not
    fit.
    """
    reductions: list[Reduction] = []
    ms: list[float] = []
    for spec in site.specs:
        start = time.perf_counter()
        if reductions and not reductions[-1].m:
            break  # all have halted
        if reductions:
            tokens = follow(tokens, reductions[-1])
        reductions.append(run_stage(spec, tokens, entered))
        ms.append((time.perf_counter() - start) * 1e3)
    return Chain(tuple(reductions), tuple(ms))


def run_part(
    site: Site, tokens: Tokens, part: Part, entered: MutableMapping[int, int]
) -> tuple[Chain, Part]:
    """Run the stages on the part of an item that a chunk of a chunked prefill brings.

    The budget is split so that all parts together keep what the item would. Also returns the part
    as it stands after them.
    """
    reductions: list[Reduction] = []
    for spec in site.specs:
        if reductions and not reductions[-1].m:
            break
        if reductions:
            tokens = follow(tokens, reductions[-1])
        whole = wanted(spec, part[2], entered)
        if whole is not None:
            start, stop = (round(end * whole / part[2]) for end in part[:2])
            part, spec = (start, stop, whole), replace(spec, budget=stop - start, cut=None)
        if spec.budget == 0:
            nothing = torch.empty(0, dtype=torch.int64, device=tokens.x.device)
            reductions.append(Reduction.prune(nothing, tokens.n))
            break
        reductions.append(run_stage(spec, tokens, entered))
    return Chain(tuple(reductions)), part


_DEEP = "it exists at 'llm<K>' only, with K at least 1"
_TEXT = "the prompt, or the chunk of it under prefill_chunk_size, has"
# What to do about a signal the model side did not supply.
_ADVICE = {
    "grid": "the tokens are no full raster (image tiles, a chunk, or reduced before): "
    "use it alone, without prefill_chunk_size, on videos or on images of one tile",
    **dict.fromkeys(
        ("attn", "attn_visual"),
        "at 'pre' encode the media inside attach(); at 'llm<K>' K must be at least 1",
    ),
    "attn_ahead": "it exists at 'pre' only, and under attach()",
    "attn_before": "it exists at 'llm<K>' only, behind two layers with attention, and under "
    "attach()",
    **dict.fromkeys(("attn_window", "key_norm"), _DEEP),
    **dict.fromkeys(
        ("attn_text", "attn_peak", "attn_mutual", "text_key_norm"),
        f"it exists at 'llm<K>' with K at least 1, where {_TEXT} text",
    ),
    **dict.fromkeys(("values", "drift"), f"{_DEEP}, and under attach()"),
    "text_values": f"it exists at 'llm<K>' with K at least 1, under attach(), where {_TEXT} text",
    "rope": "it exists at 'llm<K>' with K at least 1, under attach(), in models with rotary "
    "positions",
    **dict.fromkeys(
        ("keys", "attn_middle", "attn_first"),
        "it exists at 'pre' only: encode the media inside attach()",
    ),
    "tile": "it exists at 'pre' and for images only; use a method without tiles, such as 'hiprune'",
    "place": "it exists at 'pre' only, and where the family's layout tells it",
    "pixels": "it exists at site 'pixel' only, before the vision tower",
    "image": "only a method registered with scope='prompt' sees several images at once",
    "query": f"{_TEXT} no text",
}


def check_signals(spec: Spec, tokens: Tokens) -> None:
    """Refuse a stage whose signals are not there (ModelError); the identity needs none."""
    if spec.count(tokens.n, tokens.grid[0] if tokens.grid else 1) == tokens.n:
        return  # the identity needs nothing
    for need in spec.method.needs:
        if not tokens.has(need):
            why = _ADVICE.get(need, "the model side does not supply it")
            knobs = {name: value for name, value in spec.knobs.items() if name != "path"}
            asked = str(replace(spec, knobs=knobs))  # the file may be one that nobody has named
            raise ModelError(f"{asked!r} needs {need!r}, which is missing here; {why}")
