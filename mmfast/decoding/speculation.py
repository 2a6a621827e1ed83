"""Specs of draft and verify for text, and drafts that need no model.

A spec is ``kind[:value][?knob=value&…]``:

* ``self:0.1``: the model itself drafts, on a share (or a number) of its visual keys and values;
  ``self?reduce=SPEC``: on a prompt that a reducer has shortened.
* ``draft:DIR``: a smaller model drafts, which may see less: ``?reduce=SPEC`` or ``?media=false``.
* both take ``?tree=``: a tree of drafts, verified in one pass. ``tree=3`` or ``tree=3x2x1`` are the
  children of every token, level by level (SpecInfer, Miao et al., arXiv 2305.09781);
  ``tree=dynamic`` grows where the product of draft probabilities is greatest (DySpec, Xiong et al.,
  arXiv 2410.11744).
* ``self?weights=int4``: the model itself drafts on its weights in fewer bits (on a CPU), over the
  whole cache, and so do ``self:0.1`` and ``draft:DIR`` with this knob.
* ``draft:DIR?learn=1e-4``: the smaller model learns from the places where its drafts fell, at this
  rate, while it drafts (Online Speculative Decoding, Liu et al., arXiv 2310.07177).
* ``exit:FILE``: the first layers of the model itself and a trained adapter draft, over the model's
  own cache, and stop where they are unsure (Kangaroo, Liu et al., arXiv 2404.18911).
* ``recycle``: Token Recycling (Luo et al., arXiv 2408.08696): the likeliest tokens that followed
  each token when it was verified are the candidates when it comes again.
* ``lookup``: prompt lookup: what followed the last tokens where they stood before.

All are verified by the model on the whole cache, so that what it says is what it would have said.

* ``bild:DIR`` is the exception (BiLD, Kim et al., arXiv 2302.07863): a smaller model writes alone
  while it is sure, and the model takes back only what it finds very unlikely. Answers differ.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mmfast.core.errors import ModelError, SpecError, an, unknown
from mmfast.core.files import check_directory
from mmfast.core.spec import WEIGHTS, Budget, check_budget
from mmfast.core.spec import parse as parse_stages

SELF, DRAFT, RECYCLE, LOOKUP, BILD = "self", "draft", "recycle", "lookup", "bild"
EXIT = "exit"
ATTENTION = "attention"  # the score of self-drafting that is no cache policy
TRAINING = "python -m mmfast.decoding.train"  # of the adapter of an early exit
OFF = "none"  # one token a pass, where a server or a stream has another spec
_COMMON = {"most": 8, "least": 0.3, "adapt": True}
_KNOBS: dict[str, dict[str, int | float | bool | str]] = {
    SELF: {"score": ATTENTION, "rise": 0.0, "tree": "", "weights": "", "reduce": ""},
    DRAFT: {"media": True, "tree": "", "learn": 0.0, "weights": "", "reduce": ""},
    RECYCLE: {"width": 8, "tree": 24},
    LOOKUP: {"ngram": 3},
    EXIT: {},
    BILD: {"fallback": 0.6, "rollback": 3.0, "media": True, "weights": "", "reduce": ""},
}
_EXAMPLES = (
    "'self:0.1', 'self?reduce=divprune:0.1', 'draft:DIR', 'exit:FILE', 'recycle' or 'lookup'"
)
_LONE = 16  # tokens that the small model of `bild` writes at most before the model reads them


@dataclass(frozen=True)
class DecodePlan:
    """One parsed spec of draft and verify.

    Attributes:
        text: The spec as it was written.
        kind: `self`, `draft`, `recycle`, `lookup`, `bild` or `exit`.
        budget: Visual keys and values per layer and head that a `self` draft reads; a share is of
            those of the prompt. None is all of them.
        score: Choice of them: `attention` (of the last tokens of the prompt, pooled over
            neighbours) or the name of a cache policy of role `score`.
        model: Directory of the draft model, or file of the adapter of an early exit.
        weights: Form of packed weights that the draft reads; "" are those of the model.
        reduce: Spec of the reducers that shorten the prompt of the draft.
        media: The draft model sees the media of the prompt.
        ngram: Tokens at the end that `lookup` looks for, fewer where so many are not found.
        width: Candidates that `recycle` remembers of a token.
        tree: Most candidates that `recycle` verifies in one pass, as a tree where the model can.
        branches: Children of a token in a tree that a model drafts, level by level; the last number
            is that of all further levels.
        dynamic: Such a tree grows where its draft is likeliest.
        most: Most drafts of a pass.
        least: Drafts end in front of one that the draft is less confident of.
        adapt: The number of drafts follows what was accepted and what passes cost.
        learn: Rate at which the draft model learns from drafts that fell; 0 is not at all.
        rise: Share of its drafts that has to stand, or else a `self` draft of later answers reads
            twice as much; 0 is no matter what falls.
        rollback: Negative log probability (nats) up to which the model of `bild` lets a draft
            stand; None lets those stand that it would have said.
    """

    text: str
    kind: str
    budget: Budget = None
    score: str = ATTENTION
    model: str = ""
    weights: str = ""
    reduce: str = ""
    media: bool = True
    ngram: int = 3
    width: int = 8
    tree: int = 24
    branches: tuple[int, ...] = ()
    dynamic: bool = False
    most: int = 8
    least: float = 0.3
    adapt: bool = True
    rollback: float | None = None
    learn: float = 0.0
    rise: float = 0.0

    def __str__(self) -> str:
        return self.text

    @property
    def shares(self) -> bool:
        """The draft reads the keys and values of the model itself."""
        return self.kind == SELF and not self.reduce

    @property
    def views(self) -> bool:
        """The draft reads a part of the keys and values of the model itself."""
        return self.shares and self.budget is not None

    @property
    def runs_model(self) -> bool:
        """A second pass over a prompt of its own stands behind the drafts."""
        return self.kind in (DRAFT, BILD) or bool(self.reduce)

    @property
    def loads(self) -> bool:
        """A server must have been started with the model or the adapter of these drafts."""
        return self.runs_model or self.kind == EXIT

    @property
    def grows(self) -> bool:
        """A model drafts a tree."""
        return self.dynamic or bool(self.branches)

    @property
    def branching(self) -> bool:
        """A server drafts a tree of candidates: only where that is asked for."""
        return self.kind == RECYCLE and self.tree > 0 and "tree=" in self.text

    @property
    def widest(self) -> int:
        """Most tokens that a server reads in the rows of answers for the drafts of one pass."""
        if self.shares and not self.views:  # it drafts there, too
            return self.reach
        return max(self.most, self.tree) if self.branching else self.most

    @property
    def reach(self) -> int:
        """Most tokens that a model reads for the drafts of one pass of a server."""
        return 2 * self.most if self.dynamic else self.most

    @property
    def exact(self) -> bool:
        """Answers are those of the model alone."""
        return self.kind != BILD


def plan_decode(text: str | DecodePlan | None) -> DecodePlan | None:
    """Read a spec of draft and verify; None, "" or "none" is one token a pass.

    Raises:
        SpecError: Names the value, the choices and the fix.
    """
    if text is None or isinstance(text, DecodePlan):
        return text
    if not isinstance(text, str):
        raise SpecError(f"decode is {an(type(text).__name__)}: {text!r}; write {_EXAMPLES}")
    if text.strip() in ("", OFF):
        return None
    match = re.fullmatch(r"(?P<kind>[^:?]*)(:(?P<value>[^?]*))?(\?(?P<knobs>.*))?", text.strip())
    kind = match["kind"] if match else ""
    if match is None or kind not in _KNOBS:
        raise SpecError(f"{unknown('decode', kind or text, _KNOBS)}; write {_EXAMPLES}")
    found = _knobs(kind, match["knobs"] or "")
    if found.get("reduce"):
        parse_stages(str(found["reduce"]))
    if kind in (SELF, DRAFT):
        found |= _branches(kind, str(found.pop("tree", "")))
    value = match["value"]
    if kind in (DRAFT, BILD, EXIT):
        if not value:
            what, where = ("adapter", "FILE") if kind == EXIT else ("model", "DIR")
            raise SpecError(f"decode {text!r} names no {what}; write '{kind}:{where}'")
        found["model"] = value
        if kind == BILD:
            found = {"most": _LONE, "rollback": _KNOBS[BILD]["rollback"], **found, "adapt": False}
            found["least"] = found.pop("fallback", _KNOBS[BILD]["fallback"])
    elif kind == SELF:
        found["budget"] = _budget(text, value, found)
        if found["budget"] is None and "score" in found:
            raise SpecError(f"decode {text!r} chooses nothing by score=; write 'self:0.1?score=…'")
        if found.get("rise") and not isinstance(found["budget"], float):
            raise SpecError(
                f"decode {text!r} has no share that could rise; write 'self:0.1?rise=0.8'"
            )
        _check_score(str(found.get("score", ATTENTION)))
    elif value:
        raise SpecError(f"decode {kind!r} takes no value, got {value!r}; write {kind!r}")
    return DecodePlan(text.strip(), kind, **found)  # type: ignore[arg-type]


def check_kind(plan: DecodePlan | None) -> None:
    """Refuse (SpecError) drafts that no server makes."""
    if plan is None or not (plan.learn or plan.rise):
        return
    raise SpecError(
        f"decode={plan.text!r} learns from what all callers are told, so no server takes it; use "
        "'self:0.1', 'recycle' or 'lookup', or a pipeline"
    )


def check_place(plan: DecodePlan | None) -> None:
    """Refuse (ModelError) a draft model or an adapter that is not there."""
    if plan is None or not plan.model:
        return
    if plan.kind != EXIT:
        check_directory(plan.model)
    else:
        check_exit(plan.model)


def check_exit(path: str) -> None:
    """Refuse (ModelError) the file of an adapter that is not there."""
    if not Path(path).is_file():
        raise ModelError(
            f"decode='exit:{path}' names no file; train one with `{TRAINING} --model DIR`"
        )


def _knobs(kind: str, text: str) -> dict[str, object]:
    """Read knobs; `reduce` takes all that follows, as a spec has knobs of its own."""
    known = {**(_COMMON if kind != BILD else {"most": _LONE}), **_KNOBS[kind]}
    text, here, reduce = text.partition("reduce=") if "reduce" in known else (text, "", "")
    if here and not reduce:
        raise SpecError(f"decode {kind!r}: reduce= is empty; write reduce=divprune:0.1")
    found: dict[str, object] = {"reduce": reduce} if here else {}
    for pair in filter(None, text.rstrip("&").split("&")):
        name, _, value = pair.partition("=")
        if name not in known:
            raise SpecError(unknown(f"knob of decode {kind!r}", name, known))
        if name in found:
            raise SpecError(f"knob {name!r} of decode {kind!r} is given twice; write it once")
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
    for name in ("least", "fallback", "rise"):
        share = found.get(name)
        if isinstance(share, float) and not 0 <= share <= 1:
            raise SpecError(
                f"knob {name}={share} of decode {kind!r} is no probability; choose 0 to 1"
            )
    weights = found.get("weights", WEIGHTS[0])
    if weights not in WEIGHTS:
        raise SpecError(unknown(f"weights of decode {kind!r}", str(weights), WEIGHTS))
    learn = found.get("learn")
    if learn and "weights" in found:
        raise SpecError(f"decode {kind!r} learns on float weights; leave out learn= or weights=")
    if isinstance(learn, float) and not 0 <= learn < 1:
        raise SpecError(f"knob learn={learn} of decode {kind!r} is no rate; write 1e-4")
    if learn and found.get("tree"):
        raise SpecError(f"decode {kind!r} learns from chains; leave out learn= or tree=")
    rollback = found.get("rollback")
    if isinstance(rollback, float) and not rollback >= 0:
        raise SpecError(f"knob rollback={rollback} of decode {kind!r} is below 0; write 3.0")
    return found


def _branches(kind: str, tree: str) -> dict[str, object]:
    """Read `dynamic`, or children per level such as `3x2x1`."""
    if tree in ("", "dynamic"):
        return {"dynamic": True} if tree else {}
    levels = tree.split("x")
    if not all(level.isdecimal() and 1 <= int(level) <= 64 for level in levels):
        raise SpecError(
            f"knob tree={tree!r} of decode {kind!r}: write 'dynamic', or the children of a token, "
            "1 to 64, such as 3 or 3x2x1"
        )
    return {"branches": tuple(int(level) for level in levels)}


def _budget(text: str, value: str | None, knobs: Mapping[str, object]) -> Budget:
    reduced = bool(knobs.get("reduce"))
    if not value and (reduced or knobs.get("weights")):
        return None
    if reduced or not value:
        raise SpecError(
            f"decode {text!r}: give a share of the visual keys and values ('self:0.1'), a reducer "
            "for the prompt of the draft ('self?reduce=divprune:0.1'), one of them, or the weights "
            "of the draft ('self?weights=int4')"
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


class TextDrafts:
    """Drafts for one text of what followed its last tokens: by a `Recycler`, else in the text."""

    def __init__(self, plan: DecodePlan, recycler: Recycler | None, text: Sequence[int]) -> None:
        self.recycler, self._index = recycler, PromptIndex(plan.ngram)
        if recycler is not None:
            recycler.warm(text)
        self.push(text)

    def push(self, tokens: Sequence[int]) -> None:
        """Append tokens of the text."""
        if self.recycler is None:
            self._index.push(tokens)

    def find(self, last: int, most: int) -> list[int]:
        """Draft at most `most` tokens behind the text, which ends with `last`."""
        recycler = self.recycler
        return self._index.find(most) if recycler is None else recycler.chain(last, most)


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
