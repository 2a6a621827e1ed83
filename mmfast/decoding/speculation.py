"""Specs of draft and verify for text, and drafts that need no model.

A spec is ``kind[:value][?knob=value&…]``:

* ``self:0.1``: the model itself drafts, on a share (or a number) of its visual keys and values;
  ``self?reduce=SPEC``: on a prompt that a reducer has shortened.
* ``draft:DIR``: a smaller model drafts, which may see less: ``?reduce=SPEC`` or ``?media=false``.
* ``recycle``: Token Recycling (Luo et al., arXiv 2408.08696): the likeliest tokens that followed
  each token when it was verified are the candidates when it comes again.
* ``lookup``: prompt lookup: what followed the last tokens where they stood before.

All are verified by the model on the whole cache, so that what it says is what it would have said.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from mmfast.core.errors import SpecError, an, unknown
from mmfast.core.spec import Budget, check_budget
from mmfast.core.spec import parse as parse_stages

SELF, DRAFT, RECYCLE, LOOKUP = "self", "draft", "recycle", "lookup"
ATTENTION = "attention"  # the score of self-drafting that is no cache policy
OFF = "none"  # of a request to a server: one token a pass, whatever the server's spec is
_COMMON = {"most": 8, "least": 0.3, "adapt": True}
_KNOBS: dict[str, dict[str, int | float | bool | str]] = {
    SELF: {"score": ATTENTION, "reduce": ""},
    DRAFT: {"media": True, "reduce": ""},
    RECYCLE: {"width": 8, "tree": 24},
    LOOKUP: {"ngram": 3},
}
_EXAMPLES = "'self:0.1', 'self?reduce=divprune:0.1', 'draft:DIR', 'recycle' or 'lookup'"


@dataclass(frozen=True)
class DecodePlan:
    """One parsed spec of draft and verify.

    Attributes:
        text: The spec as it was written.
        kind: `self`, `draft`, `recycle` or `lookup`.
        budget: Visual keys and values per layer and head that a `self` draft reads; a share is of
            those of the prompt.
        score: Choice of them: `attention` (of the last tokens of the prompt, pooled over
            neighbours) or the name of a cache policy of role `score`.
        model: Directory of the draft model.
        reduce: Spec of the reducers that shorten the prompt of the draft.
        media: The draft model sees the media of the prompt.
        ngram: Tokens at the end that `lookup` looks for, fewer where so many are not found.
        width: Candidates that `recycle` remembers of a token.
        tree: Most candidates that `recycle` verifies in one pass, as a tree where the model can.
        most: Most drafts of a pass.
        least: Drafts end in front of one that the draft is less confident of.
        adapt: The number of drafts follows what was accepted and what passes cost.
    """

    text: str
    kind: str
    budget: Budget = None
    score: str = ATTENTION
    model: str = ""
    reduce: str = ""
    media: bool = True
    ngram: int = 3
    width: int = 8
    tree: int = 24
    most: int = 8
    least: float = 0.3
    adapt: bool = True

    def __str__(self) -> str:
        return self.text

    @property
    def views(self) -> bool:
        """The draft reads a part of the keys and values of the model itself."""
        return self.kind == SELF and not self.reduce

    @property
    def runs_model(self) -> bool:
        """A second pass over a prompt of its own stands behind the drafts."""
        return self.kind == DRAFT or bool(self.reduce)


def plan_decode(text: str | DecodePlan | None) -> DecodePlan | None:
    """Read a spec of draft and verify; None or "" is one token a pass.

    Raises:
        SpecError: Names the value, the choices and the fix.
    """
    if text is None or isinstance(text, DecodePlan) or not str(text).strip():
        return text if isinstance(text, DecodePlan) else None
    if not isinstance(text, str):
        raise SpecError(f"decode is {an(type(text).__name__)}: {text!r}; write {_EXAMPLES}")
    match = re.fullmatch(r"(?P<kind>[^:?]*)(:(?P<value>[^?]*))?(\?(?P<knobs>.*))?", text.strip())
    kind = match["kind"] if match else ""
    if match is None or kind not in _KNOBS:
        raise SpecError(f"{unknown('decode', kind or text, _KNOBS)}; write {_EXAMPLES}")
    found = _knobs(kind, match["knobs"] or "")
    if found.get("reduce"):
        parse_stages(str(found["reduce"]))
    value = match["value"]
    if kind == DRAFT:
        if not value:
            raise SpecError(f"decode {text!r} names no model; write 'draft:DIR'")
        found["model"] = value
    elif kind == SELF:
        found["budget"] = _budget(text, value, bool(found.get("reduce")))
        _check_score(str(found.get("score", ATTENTION)))
    elif value:
        raise SpecError(f"decode {kind!r} takes no value, got {value!r}; write {kind!r}")
    return DecodePlan(text.strip(), kind, **found)  # type: ignore[arg-type]


def check_kind(plan: DecodePlan) -> None:
    """Refuse (SpecError) drafts that no server makes: those of a second prompt."""
    if plan.runs_model:
        raise SpecError(
            f"decode={plan.text!r} reads a second prompt for its drafts, which the server does "
            "not; use 'self:0.1', 'recycle' or 'lookup', or a pipeline"
        )


def _knobs(kind: str, text: str) -> dict[str, object]:
    """Read knobs; `reduce` takes all that follows, as a spec has knobs of its own."""
    known = {**_COMMON, **_KNOBS[kind]}
    text, here, reduce = text.partition("reduce=") if "reduce" in known else (text, "", "")
    if here and not reduce:
        raise SpecError(f"decode {kind!r}: reduce= is empty; write reduce=divprune:0.1")
    found: dict[str, object] = {"reduce": reduce} if here else {}
    for pair in filter(None, text.rstrip("&").split("&")):
        name, _, value = pair.partition("=")
        if name not in known:
            raise SpecError(unknown(f"knob of decode {kind!r}", name, known))
        default = known[name]
        try:
            if isinstance(default, bool):
                found[name] = {"true": True, "1": True, "false": False, "0": False}[value.lower()]
            else:
                found[name] = type(default)(value)
        except (ValueError, KeyError):
            what = type(default).__name__
            raise SpecError(
                f"knob {name}={value!r} of decode {kind!r} is no {what}, such as {default}"
            ) from None
    for name, low, high in (("most", 1, 64), ("ngram", 1, 16), ("width", 1, 64), ("tree", 0, 256)):
        number = found.get(name)
        if isinstance(number, int) and not low <= number <= high:
            raise SpecError(f"knob {name}={number} of decode {kind!r}: choose {low} to {high}")
    least = found.get("least")
    if isinstance(least, float) and not 0 <= least <= 1:
        raise SpecError(f"knob least={least} of decode {kind!r} is no probability; choose 0 to 1")
    return found


def _budget(text: str, value: str | None, reduced: bool) -> Budget:
    if reduced and not value:
        return None
    if reduced or not value:
        raise SpecError(
            f"decode {text!r}: give a share of the visual keys and values ('self:0.1'), or a "
            "reducer for the prompt of the draft ('self?reduce=divprune:0.1'), one of them"
        )
    try:
        return check_budget(int(value) if re.fullmatch(r"[+-]?\d+", value) else float(value))
    except SpecError:
        raise
    except ValueError:
        raise SpecError(f"decode {text!r}: budget {value!r} is no number; write 0.1") from None


def _check_score(score: str) -> None:
    from mmfast.core.registry import methods

    names = [m.name for m in methods("cache") if m.role == "score"]
    if score != ATTENTION and score not in names:
        raise SpecError(unknown("score of decode 'self'", score, [ATTENTION, *names]))


class Recycler:
    """Candidates that followed each token, newest first, over all texts of a model.

    The adjacency matrix of Token Recycling (arXiv 2408.08696), by rows that were needed. Threads
    may share one: a row is replaced as a whole.
    """

    def __init__(self, width: int = 8) -> None:
        self.width = width
        self._rows: dict[int, list[int]] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def learn(self, tokens: Sequence[int], candidates: Sequence[Sequence[int]]) -> None:
        """Note the likeliest tokens behind each of `tokens`, the likeliest first."""
        for token, mine in zip(tokens, candidates, strict=True):
            self._rows[token] = list(mine[: self.width])

    def warm(self, ids: Sequence[int]) -> None:
        """Note the pairs of a prompt, for tokens that nothing is known of."""
        pairs: dict[int, list[int]] = {}
        for one, other in itertools.pairwise(ids):
            mine = pairs.setdefault(one, [])
            if other not in mine:
                mine.insert(0, other)
        for token, mine in pairs.items():
            self._rows.setdefault(token, mine[: self.width])

    def chain(self, token: int, most: int) -> list[int]:
        """Return the likeliest candidate of each token in turn, at most `most`."""
        found: list[int] = []
        while len(found) < most and (mine := self._rows.get(token)):
            token = mine[0]
            found.append(token)
        return found

    def tree(self, token: int, nodes: int, depth: int) -> tuple[list[int], list[int]]:
        """Return tokens and parents of a tree below a token, breadth first; -1 is the token.

        A node of rank r below its parent costs r + 1 more than that; the cheapest `nodes` are
        taken: likely branches grow deep, unlikely ones stay short, as in the template of the paper.
        """
        tokens, parents, _levels, _costs = list[int](), list[int](), list[int](), list[int]()
        limit = 0
        while len(tokens) < nodes and limit < 4 * depth:
            limit += 1
            tokens, parents, _levels, _costs = [], [], [], []
            front = [(-1, token, 0, 0)]
            for place, mine, level, cost in front:
                for rank, following in enumerate(self._rows.get(mine, ())):
                    price = cost + rank + 1
                    if price > limit or level >= depth:
                        break
                    tokens.append(following)
                    parents.append(place)
                    front.append((len(tokens) - 1, following, level + 1, price))
        return tokens[:nodes], parents[:nodes]


class PromptIndex:
    """Places of all runs of up to `ngram` tokens in one sequence, for prompt lookup."""

    def __init__(self, ngram: int = 3) -> None:
        self._ngram, self._ids = ngram, list[int]()
        self._ends: dict[tuple[int, ...], tuple[int, int]] = {}

    def push(self, tokens: Sequence[int]) -> None:
        """Append tokens of the sequence."""
        for token in tokens:
            self._ids.append(token)
            end = len(self._ids)
            for n in range(1, min(self._ngram, end) + 1):
                run = tuple(self._ids[end - n :])
                # The last place and the one before it: the last one is the run itself.
                self._ends[run] = (end, self._ends.get(run, (0, 0))[0])

    def find(self, most: int) -> list[int]:
        """Return what followed the longest known run at the end, at most `most` tokens."""
        for n in range(min(self._ngram, len(self._ids)), 0, -1):
            before = self._ends[tuple(self._ids[-n:])][1]
            if before:
                return self._ids[before : before + most]
        return []
