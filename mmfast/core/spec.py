"""Spec strings ``name[@site][:budget][?knob=value&…]`` joined by ``+``, and their execution."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from mmfast.core.errors import MmfastError, SpecError, an, unknown
from mmfast.core.registry import (
    MEDIA,
    NAMED_TOO,
    START,
    TEXT,
    TOKEN_KINDS,
    TOKENS,
    Method,
    get,
    listed,
)

if TYPE_CHECKING:
    from mmfast.core.reduction import Reduction
    from mmfast.core.tokens import Tokens

Budget = int | float | None
WEIGHTS = ("int8", "int4", "float16", "bfloat16", "int8-dynamic")  # forms of packed weights
DTYPES = ("auto", "float32", "bfloat16", "float16")
AUTO = "auto"  # in the place of a spec: the planner chooses the reducers

BUDGETS = "a share with a dot in (0, 1] such as 0.25, or a whole number of tokens such as 64"


def check_budget(budget: Budget) -> Budget:
    """Refuse a budget that can never be met: 0, negative, a share above 1, NaN (SpecError)."""
    if budget is None:
        return None
    if isinstance(budget, bool) or not isinstance(budget, (int, float)):
        raise SpecError(f"budget {budget!r} is {an(type(budget).__name__)}; {BUDGETS}")
    if isinstance(budget, int):
        if budget < 1:
            raise SpecError(f"budget {budget} keeps nothing; {BUDGETS}")
    elif not 0.0 < budget <= 1.0:
        raise SpecError(f"budget {budget} is no share; {BUDGETS}")
    return budget


def count(budget: Budget, n: int) -> int | None:
    """Tokens to keep of `n`: a share is rounded half to even, at least 1; SpecError above `n`."""
    if budget is None:
        return None
    if isinstance(budget, float):
        return max(1, round(budget * n))
    if budget > n:
        raise SpecError(
            f"budget {budget} is more than the {n} tokens there are; choose at most {n}"
        )
    return budget


_STAGE = re.compile(
    r"(?P<name>[^@:?+]*)(@(?P<site>[^@:?+]*))?(:(?P<budget>[^@:?]*))?(\?(?P<knobs>.*))?"
)
_EXAMPLE = (
    "write name[@site][:budget][?knob=value], for example 'divprune:0.25' or 'fastv@llm3:0.5'"
)


@dataclass(frozen=True)
class Cut:
    """One cut of a schedule: number `index` of `of`, counted from 1."""

    schedule: int  # number of the stage in its spec string
    index: int
    of: int


@dataclass(frozen=True)
class Spec:
    """One parsed stage.

    Attributes:
        method: The registered method.
        site: `pre`, `vit`, `kv` or `llm`.
        layer: Decoder layer K before which it runs, where `site` is `llm`; None elsewhere, and
            for a schedule, whose layers follow from the model.
        budget: int = tokens per item, float = share in (0, 1], None = the method decides.
        knobs: Keyword arguments for the method.
        cut: Number of the cut in its schedule, once the model is known; see `expand`.
    """

    method: Method
    site: str
    layer: int | None
    budget: Budget
    knobs: Mapping[str, Any] = field(default_factory=dict)
    cut: Cut | None = None

    @property
    def staged(self) -> bool:
        """True for a schedule: one cut at every relative depth of its method."""
        return self.site == "llm" and self.layer is None

    @property
    def whole(self) -> bool:
        """True if it keeps everything: a share of 1.0, which is not one token."""
        return isinstance(self.budget, float) and self.budget == 1.0

    def count(self, n: int, frames: int) -> int | None:
        """Tokens to keep of `n` in so many frames; None where the method or its rate decides."""
        if self.method.rate and not self.whole:
            return None
        each = self.method.learned and isinstance(self.budget, int)
        return count(self.budget * frames if each else self.budget, n)  # type: ignore[operator]

    @property
    def tokens(self) -> str:
        """The tokens of a prompt that it may drop: of `media`, of `text`, or `all`."""
        return TEXT if self.method.rate else str(self.knobs.get(TOKENS, MEDIA))

    @property
    def where(self) -> str:
        """The site as written: `pre`, `vit`, `llm3`, `llm` for a schedule."""
        return self.site if self.layer is None else f"{self.site}{self.layer}"

    def __str__(self) -> str:
        budget = "" if self.budget is None else f":{self.budget}"
        knobs = "&".join(f"{k}={v}" for k, v in self.knobs.items())
        return f"{self.method.name}@{self.where}{budget}" + (f"?{knobs}" if knobs else "")


@dataclass(frozen=True)
class SelfCheck:
    """Knobs of `reduce="auto?check=0.8&every=4"`, under which a model checks its own cuts.

    Attributes:
        text: The spec as it was written.
        least: Share of the tokens of answers that all visual tokens have to lead to, too.
        every: One answer of so many is checked.
    """

    text: str
    least: float
    every: int = 1


def is_auto(text: object) -> bool:
    """Return True where the planner chooses the reducers, with knobs or without."""
    return isinstance(text, str) and text.strip().partition("?")[0] == AUTO


def self_check(text: str) -> SelfCheck | None:
    """Read the knobs of `auto`; None without any, SpecError for those that it does not have."""
    _, asked, rest = text.strip().partition("?")
    if not asked:
        return None
    example = f"write '{AUTO}?check=0.8', or '{AUTO}?check=0.8&every=4'"
    pairs = [pair.partition("=")[::2] for pair in rest.split("&")]
    knobs = dict(pairs)
    for name in knobs:
        if name not in ("check", "every"):
            raise SpecError(f"{unknown(f'knob of {AUTO!r}', name, ('check', 'every'))}; {example}")
    if "check" not in knobs or len(knobs) < len(pairs):
        raise SpecError(f"{text!r} needs one share at which a cut is kept; {example}")
    try:
        least, every = float(knobs["check"]), int(knobs.get("every", 1))
    except ValueError:
        least, every = 0.0, 1
    if not 0 < least <= 1 or every < 1:
        raise SpecError(f"{text!r}: check is a share in (0, 1] and every at least 1; {example}")
    return SelfCheck(text.strip(), least, every)


def check_names(
    reduce: Iterable[str | None] = (),
    cache: Iterable[str | None] = (),
    prefill: Iterable[str | None] = (),
) -> None:
    """Refuse what is wrong in the text of specs, without an import of torch (SpecError)."""
    texts = list(reduce)
    named = [text for text in texts if not is_auto(text)]
    for text in set(texts) - {None, *named}:
        self_check(str(text))
    for kind, specs in (("reducer", named), ("cache", cache), ("prefill", prefill)):
        texts = [text for text in specs if text]
        known = [m for each in (kind, *NAMED_TOO.get(kind, ())) if texts for m in listed(each)]
        for text in texts:
            parse(text, kind, known)


def parse(
    text: str | Sequence[Spec] | None, kind: str = "reducer", among: Sequence[Method] = ()
) -> tuple[Spec, ...]:
    """Parse a spec string; None or "" gives no stage, and parsed stages are returned.

    Methods are those `among` the given ones, or all registered ones.

    Raises:
        SpecError: Names the offending value, the choices and the nearest match.
    """
    if text is None or (isinstance(text, str) and not text.strip()):
        return ()
    if isinstance(text, (tuple, list)) and all(isinstance(each, Spec) for each in text):
        return tuple(text)
    if not isinstance(text, str):
        raise SpecError(f"spec is {an(type(text).__name__)}: {text!r}; {_EXAMPLE}")
    if kind == "reducer" and is_auto(text):
        raise SpecError(
            f"{text!r} is planned for one prompt, by pipelines of images and clips, attach(), and "
            "mmfast ask, eval and serve; here name a reducer, such as 'evs:0.25'"
        )
    # A knob value may hold a '+' exponent (1e+3); a stage never starts with a digit.
    return tuple(_parse_stage(part.strip(), kind, among) for part in re.split(r"\+(?!\d)", text))


def _parse_stage(text: str, kind: str, among: Sequence[Method]) -> Spec:
    match = _STAGE.fullmatch(text)
    if match is None or not match["name"]:
        raise SpecError(f"cannot read spec {text!r}; {_EXAMPLE}")
    method = get(match["name"], kind, among)
    site, layer = _parse_site(method, match["site"])
    budget = None if match["budget"] is None else _parse_budget(match["budget"], text)
    if budget is None and not method.adaptive:
        how = f"'{method.name}:0.25' for a share or '{method.name}:64' for a number of tokens"
        if method.learned:
            how = f"the {method.takes}, such as '{method.example}'"
        raise SpecError(f"{method.name!r} needs a budget; write {how}")
    if budget is not None and method.routes:
        raise SpecError(
            f"{method.name!r} takes no budget: it chooses among ways that have their own; write "
            f"'{method.example}'"
        )
    spec = Spec(method, site, layer, budget, _parse_knobs(method, match["knobs"]))
    if method.learned and isinstance(budget, float) and not spec.whole:
        raise SpecError(
            f"{text!r} gives a share, and a learned compressor takes the {method.takes}; write for "
            f"example '{method.example}'"
        )
    inside = site == "llm" or "attn_ahead" in method.needs or method.rate
    if spec.tokens != MEDIA and not inside:
        raise SpecError(
            f"{text!r} runs before the text is read; write '{method.name}@llm2' for "
            f"tokens={spec.tokens}"
        )
    return spec


def _parse_site(method: Method, text: str | None) -> tuple[str, int | None]:
    if text is None:
        site = method.sites[0]
        return site, method.layer if site == "llm" and not method.stages else None
    match = re.fullmatch(r"(vit|pre|kv|pixel|llm)(\d*)", text)
    schedule = text == "llm" and bool(method.stages)
    lacks = match is None or match[1] not in method.sites
    if match is None or lacks or (match[1] == "llm") != bool(match[2] or schedule):
        choices = ["llm<K>" if s == "llm" else s for s in method.sites]
        choices += ["llm"] if method.stages else []
        raise SpecError(
            f"{method.name!r} cannot run at site {text!r}; choices: {', '.join(choices)} "
            "(llm3 = before decoder layer 3)"
        )
    return match[1], int(match[2]) if match[2] else None


def _parse_budget(text: str, spec: str) -> Budget:
    try:
        return check_budget(int(text) if re.fullmatch(r"[+-]?\d+", text) else float(text))
    except SpecError:
        raise
    except ValueError:
        raise SpecError(f"budget {text!r} in {spec!r} is no number; {BUDGETS}") from None


def _parse_knobs(method: Method, text: str | None) -> dict[str, Any]:
    knobs: dict[str, Any] = {}
    for pair in text.split("&") if text else ():
        name, equals, value = pair.partition("=")
        if name not in method.knobs:
            what = f"knob of {method.name!r}"
            raise SpecError(
                unknown(what, name, method.knobs)
                if method.knobs
                else f"{what}: it has none, got {name!r}"
            )
        if not equals or not value:
            raise SpecError(
                f"knob {name!r} of {method.name!r} has no value; write {name}={method.knobs[name]}"
            )
        if name in knobs:
            raise SpecError(f"knob {name!r} of {method.name!r} is given twice; write it once")
        knobs[name] = _convert(method, name, value)
        if name == TOKENS and method.text and value not in TOKEN_KINDS:
            raise SpecError(
                unknown(f"value of knob {name!r} of {method.name!r}", value, TOKEN_KINDS)
            )
    return knobs


def _convert(method: Method, name: str, value: str) -> Any:
    default = method.knobs[name]
    kind = type(default)
    try:
        if kind is bool:
            return {"true": True, "1": True, "false": False, "0": False}[value.lower()]
        if default is None:
            return float(value) if "." in value or "e" in value else int(value)
        return kind(value)
    except (ValueError, KeyError):
        want = "an int or float" if default is None else f"{an(kind.__name__)}"
        raise SpecError(
            f"knob {name}={value!r} of {method.name!r} is not {want}, such as {default}"
        ) from None


def run(spec: Spec, tokens: Tokens) -> Reduction | list[Reduction]:
    """Run one stage on `tokens`.

    Returns:
        One Reduction with the leading dims of `tokens`; for a method that picks its own budget
        on batched tokens a list, one per item, since the lengths differ.

    Raises:
        SpecError: The budget does not fit, or a signal the method needs is missing.
    """
    from mmfast.core.reduction import Reduction
    from mmfast.core.tokens import choosing

    method = spec.method
    budget = spec.count(tokens.n, tokens.grid[0] if tokens.grid else 1)
    lead = tuple(tokens.x.shape[:-2])
    parity = bool(spec.knobs.get("parity"))  # reproduces the reference, wrong counts included
    if budget == tokens.n and not parity:
        return Reduction.identity(tokens.n, lead, tokens.x.device)
    missing = [need for need in method.needs if not tokens.has(need)]
    if missing:
        raise SpecError(
            f"{method.name!r} needs {', '.join(map(repr, missing))}, which these tokens lack; "
            "pass it to Tokens (fields x, attn, query, grid, or signals by name)"
        )
    if budget is None and lead and not (parity and method.coupled):
        items: list[Reduction] = []
        for index in range(lead[0]):
            one = run(spec, tokens.select(index))
            items.extend(one if isinstance(one, list) else [one])
        return items
    hidden = TOKENS if method.text else None  # of the model side alone
    knobs = {name: value for name, value in spec.knobs.items() if name != hidden}
    with choosing(tokens.x.device):
        reduction: Reduction = method.fn(tokens, budget, **knobs)
    exact = budget is None or reduction.m == budget or (method.resizes and reduction.m < budget)
    if not exact and not parity:
        raise MmfastError(
            f"{method.name!r} kept {reduction.m} tokens instead of {budget}; report this as a bug"
        )
    together = [reduction]
    for size in lead if budget is None else ():
        together = [item.select(index) for item in together for index in range(size)]
    return together if lead and budget is None else reduction


def reduce(tokens: Tokens, spec: str) -> Reduction | list[Reduction]:
    """Reduce tokens by a spec string, stages composed with `Reduction.then`.

    Args:
        tokens: Features and signals, `x` of shape `[..., N, D]`.
        spec: For example `"divprune:0.25"` or `"evs:0.5+random:16"`.

    Returns:
        A Reduction with `keep` `[..., M]`; a list of them for an adaptive method on a batch.

    Raises:
        SpecError: The spec is wrong, or a signal is missing.
        MmfastError: The tokens hold NaN or infinity.

    Example:
        >>> reduce(Tokens(torch.randn(288, 64), grid=(8, 6, 6)), "evs:0.25").m
        72
    """
    from mmfast.core.tokens import Tokens, follow

    stages = parse(spec)
    if not stages:
        raise SpecError(f"spec {spec!r} is empty; {_EXAMPLE}")
    if not isinstance(tokens, Tokens):
        raise SpecError(
            f"reduce() takes mmfast.Tokens, not {an(type(tokens).__name__)}; write "
            "mmfast.Tokens(x), with a grid and signals where the method needs them"
        )
    tokens.check_finite()
    result = run(stages[0], tokens)
    for stage in stages[1:]:
        if isinstance(result, list):
            raise SpecError(
                f"{stage.method.name!r} cannot follow an adaptive stage on a batch; "
                "reduce items one by one"
            )
        after = run(stage, follow(tokens, result))
        if isinstance(after, list):
            raise SpecError(
                f"{stage.method.name!r} needs a budget to follow another stage on a batch"
            )
        result = result.then(after)
    return result


def stage_layers(
    depths: Iterable[float], layers: int, able: Collection[int] | None = None
) -> list[int]:
    """Return the decoder layers before which a schedule cuts, ascending.

    Depth d in (0, 1) is layer `round(d L)`, at least 1, since layer 0 has no attention before it,
    and the nearest of `able` where given; depths that fall on one layer are one cut.
    """
    choices = sorted(able or range(1, layers))

    def nearest(depth: float) -> int:
        return min(choices, key=lambda layer: (abs(layer - round(depth * layers)), layer))

    return sorted({nearest(depth) for depth in depths})


def expand(
    specs: Iterable[Spec], layers: int, able: Collection[int] | None = None
) -> tuple[Spec, ...]:
    """Turn every schedule into its cuts; SpecError for a model of fewer than two layers."""
    found: list[Spec] = []
    for number, spec in enumerate(specs):
        if not spec.staged:
            found.append(spec)
            continue
        if layers < 2:
            raise SpecError(
                f"{str(spec)!r} cuts between decoder layers, but the model has {layers}; "
                "use a model of at least 2 layers, or a method that runs at 'pre'"
            )
        at = stage_layers(_depths(spec), layers, able)
        found += [
            replace(spec, layer=layer, cut=Cut(number, index + 1, len(at)))
            for index, layer in enumerate(at)
        ]
    return tuple(found)


def _depths(spec: Spec) -> list[float]:
    start = {**spec.method.knobs, **spec.knobs}.get(START, 0.0)
    if not 0.0 <= start < 1.0:
        raise SpecError(f"knob {START}={start} of '{spec}' is no depth; choose 0 up to 1")
    return [depth for depth in spec.method.stages if depth >= start] or [*spec.method.stages[-1:]]


def wanted(spec: Spec, n: int, entered: MutableMapping[int, int]) -> int | None:
    """Return the tokens that a stage keeps of `n` of one item; None where the method decides.

    The cuts of a schedule remove a constant share each. The last one leaves exactly the budget of
    what entered the first (kept in `entered`), or less where stages of other methods between them
    removed more. SpecError for a whole-number budget above the tokens there are.
    """
    cut = spec.cut
    if cut is None:
        known = spec.whole or not spec.method.learned  # else it depends on the frames
        return count(spec.budget, n) if known else None
    first = entered.setdefault(cut.schedule, n)
    last = count(spec.budget, first)
    if last is None or cut.index == cut.of:
        return None if last is None else min(n, last)
    share: float = (last / first) ** (cut.index / cut.of)
    return min(n, round(first * share))
