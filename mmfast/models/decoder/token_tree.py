"""Trees of drafts that a model grows, for one pass of another that verifies all of their paths.

SpecInfer (Miao et al., arXiv 2305.09781) gives every token of a level a fixed number of children.
DySpec (Xiong et al., arXiv 2410.11744) adds, one by one, the draft that is expected to stand with
the greatest chance: the product of the draft's probabilities along its path.

Where tokens are drawn, the children of a place are drawn one after the other, none twice. Whether
another is drawn may depend on all that was drawn before it, never on itself, so that rejection in
rounds (`decoding.accept.accept_among`) says what the verifying model alone would say.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mmfast.decoding.row import DraftLength
from mmfast.decoding.sampling import draw
from mmfast.decoding.speculation import DecodePlan
from mmfast.models.decoder.drafters import BatchText, DraftRun, ModelDrafter, fitted
from mmfast.models.decoder.reader import SequenceReader

_NOTHING = 1e-6  # probability that is left of rounding alone


@dataclass
class Place:
    """A token of a tree whose children are drafted; the root is the last token said.

    `value` is the product of draft probabilities up to here, `sure` the draft's confidence in the
    likeliest token behind it, `left` `[V]` its probabilities without those of the children so far;
    None before the draft has read the token, and where it stops. `slot` counts the tokens of the
    tree that the draft has read before it.
    """

    node: int
    depth: int
    value: float
    read: bool = False
    sure: float = 0.0
    left: Tensor | None = None
    slot: int = -1


@dataclass
class TokenTree:
    """Drafts `tokens`, their `parents` (-1 is the root), and what each was drawn from, `q` `[V]`.

    `uniform` gives draws in [0, 1); None takes the likeliest token that is left.
    """

    uniform: Callable[[], Tensor] | None = None
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    sure: list[float] = field(default_factory=list)
    q: list[Tensor] = field(default_factory=list)
    places: list[Place] = field(default_factory=lambda: [Place(-1, 0, 1.0)])

    def read(self, place: Place, shares: Tensor, stops: bool = False) -> None:
        """Take in the draft's probabilities `[V]` behind a place; where it `stops`, none follow."""
        place.read, place.sure = True, float(shares.amax())
        place.left = None if stops else shares.clone()

    def chance(self, place: Place) -> float:
        """Return the chance of the next child: at most `value` before the place is read.

        Of a token yet to be drawn that is the probability of all that is left.
        """
        if not place.read:
            return place.value
        if place.left is None:
            return 0.0
        next_one = place.left.amax() if self.uniform is None else place.left.sum()
        return place.value * float(next_one)

    def add(self, place: Place) -> Place | None:
        """Add the next child of a place; None where nothing is left."""
        left = place.left
        if left is None or float(left.sum()) < _NOTHING:
            place.left = None
            return None
        if self.uniform is None:
            token = int(left.argmax())
        else:
            token = int(draw(left[None].cpu(), self.uniform()))
        share = float(left[token])
        if share <= 0:
            place.left = None
            return None
        if self.uniform is not None:
            self.q.append(left / left.sum())
        self.tokens.append(token)
        self.parents.append(place.node)
        self.sure.append(place.sure)
        left[token] = 0
        child = Place(len(self.tokens) - 1, place.depth + 1, place.value * share)
        self.places.append(child)
        return child

    def cut(self, most: int) -> None:
        """Keep the `most` tokens whose paths are likeliest; no path loses its beginning."""
        order = sorted(range(len(self.tokens)), key=lambda node: -self.places[node + 1].value)
        kept = sorted(order[:most])
        place = {node: i for i, node in enumerate(kept)} | {-1: -1}
        self.parents = [place[self.parents[node]] for node in kept]
        self.tokens = [self.tokens[node] for node in kept]
        self.sure = [self.sure[node] for node in kept]

    def path(self, node: int) -> list[int]:
        """Nodes from the first level down to `node`."""
        found: list[int] = []
        while node >= 0:
            found.append(node)
            node = self.parents[node]
        return found[::-1]


def grow_levels(
    tree: TokenTree, branches: Sequence[int], most: int, worth: Callable[[float], bool]
) -> list[Place]:
    """Add a level with the children that `branches` gives it; returns what is to be read next.

    The likeliest places come first, as the tree ends at `most` tokens.
    """
    level = max(place.depth for place in tree.places)
    front = [place for place in tree.places if place.depth == level]
    if len(tree.tokens) >= most or not worth(max(map(tree.chance, front))):
        return []
    for place in sorted(front, key=lambda each: -each.value):
        for _ in range(branches[min(level, len(branches) - 1)]):
            if len(tree.tokens) >= most or tree.add(place) is None:
                break
    return [] if len(tree.tokens) >= most else [p for p in tree.places if not p.read]


def grow_likeliest(tree: TokenTree, most: int, worth: Callable[[float], bool]) -> list[Place]:
    """Add the likeliest drafts; returns what is to be read next.

    Of the likeliest tokens, all that are among the `most` best of those known are read at once, and
    `cut` drops those that better ones have driven out: the tree is that of one token after the
    other, in about as many passes as it is deep. A draft that was drawn must not be dropped for
    what it is, so there each is read before the next is added.
    """
    if tree.uniform is None:
        return _grow_ahead(tree, most, worth)
    while len(tree.tokens) < most:
        place = max(tree.places, key=tree.chance)
        chance = tree.chance(place)
        if chance <= 0 or not worth(chance):
            break
        if not place.read:
            return [place]
        tree.add(place)
    return []


def _grow_ahead(tree: TokenTree, most: int, worth: Callable[[float], bool]) -> list[Place]:
    while True:
        best = sorted((place.value for place in tree.places[1:]), reverse=True)[:most]
        bar = best[-1] if len(best) == most else 0.0
        place = max((each for each in tree.places if each.read), key=tree.chance)
        chance = tree.chance(place)
        if chance <= bar or not worth(chance) or tree.add(place) is None:
            break
    return [p for p in tree.places if not p.read and p.value > bar and worth(p.value)]


def _grow(
    tree: TokenTree, plan: DecodePlan, most: int, worth: Callable[[float], bool]
) -> list[Place]:
    if plan.dynamic:
        return grow_likeliest(tree, most, worth)
    return grow_levels(tree, plan.branches, most, worth)


class BatchTree:
    """A tree of at most `most` drafts for an answer of a batch, beside chains and other trees.

    `places` are those whose tokens are read next, first the last token said. `length` says which
    drafts are worth it; None is all.
    """

    def __init__(self, plan: DecodePlan, length: DraftLength | None, most: int) -> None:
        self.tree, self._plan, self._length, self._most = TokenTree(), plan, length, most
        self.places, self._read = [*self.tree.places], 0

    @property
    def begun(self) -> bool:
        """Further reads are of its own tokens."""
        return self.tree.places[0].read

    @property
    def tokens(self) -> list[int]:
        """Tokens that are read next."""
        return [self.tree.tokens[place.node] for place in self.places]

    @property
    def depths(self) -> list[int]:
        """Places of these behind the last token said."""
        return [place.depth for place in self.places]

    def paths(self, behind: int) -> list[list[int]]:
        """Ways to them among all tokens read in this step, of which the first `behind` are said."""
        found = list[list[int]]()
        for place in self.places:
            place.slot, self._read = behind + self._read, self._read + 1
            way = (self.tree.places[node + 1].slot for node in self.tree.path(place.node))
            found.append([*range(behind), *way])
        return found

    def take(self, shares: Tensor) -> None:
        """Take in the probabilities `[n, V]` behind them, and grow."""
        length = self._length
        for place, mine in zip(self.places, shares, strict=True):
            stops = length is not None and length.doubts(float(mine.amax()))
            self.tree.read(place, mine, stops)
        worth = (lambda _: True) if length is None else length.worth
        more = _grow(self.tree, self._plan, self._most, worth)
        self.places = more[: self._plan.reach - self._read]


class TreeDrafter(ModelDrafter):
    """Drafts of a model as a tree, for one row whose cache can read one."""

    reader: SequenceReader

    def propose(self, text: BatchText, held: int, length: DraftLength, most: int) -> DraftRun:
        """Draft a tree of at most `most` tokens behind the last token said."""
        start = time.perf_counter()
        self.begin(held)
        reader, said = self.reader, text.said[0]
        uniform = None if text.generators is None else lambda: text.uniform(0, 1)
        tree, plan = TokenTree(uniform), self.plan
        logits = self.read([said[reader.held :]])
        base, passes, places = reader.held, 0, tree.places[:]

        def worth(chance: float) -> bool:
            return not plan.adapt or length.worth(chance)

        while places:
            passes += 1
            for place, row in zip(places, logits, strict=True):
                line = [*said, *(tree.tokens[node] for node in tree.path(place.node))]
                shares = fitted(row[None], text, len(line), [line]).softmax(-1)[0]
                tree.read(place, shares, length.doubts(float(shares.amax())))
            places = _grow(tree, plan, most, worth)
            if places:
                logits = self._read_nodes(tree, places, base)
        reader.rewind(base)
        if uniform is None:
            tree.cut(most)
        q = None if uniform is None else [tree.q]
        run = DraftRun([tree.tokens], [tree.sure], q, tree.parents, passes)
        run.seconds = time.perf_counter() - start
        return run

    def _read_nodes(self, tree: TokenTree, places: Sequence[Place], base: int) -> Tensor:
        """Logits `[n, V]` behind places of a tree; those read before stand behind `base` tokens."""
        held = self.reader.held
        seen = torch.zeros(len(places), held - base + len(places), dtype=torch.bool)
        for row, place in enumerate(places):
            place.slot = held - base + row
            seen[row, [tree.places[node + 1].slot for node in tree.path(place.node)]] = True
        depths = torch.tensor([base + place.depth - 1 - held for place in places])
        ids = [tree.tokens[place.node] for place in places]
        return self.read([ids], depths, self.reader.tree_mask(seen))
