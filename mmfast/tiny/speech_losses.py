"""What the speech model owes: the next token, words that end, tokens further ahead."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

from mmfast.models.speech_layout import SpeechLayout
from mmfast.models.speech_tower import Tower
from mmfast.tiny.speech_bank import COUNTED
from mmfast.tiny.speech_net import Layer, Net
from mmfast.tiny.speech_packing import AUDIO, TEXT, Batch

MIDDLE = 6  # behind this layer the states of the ear say which word has just ended
AHEAD = 5  # tokens behind the next one that states are asked for, too
ASKED = 3  # one place in so many is
EARLY = 4  # frames of a word that count as its beginning
Part = tuple[float, int, int]  # loss, places, places guessed right


@dataclass(frozen=True)
class Weights:
    """What counts how much."""

    text: float = 1.0
    dense: float = 0.5
    books: tuple[float, ...] = (1.0, 0.5, 0.5, 0.5)
    turns: float = 1.5  # `<next>` and `<end>`
    starts: float = 2.0  # of book 0 where a word begins, beside elsewhere
    later: float = 0.08  # of each token further ahead


class Model(nn.Module):
    """Backbone, ear and the read-outs that are thrown away."""

    def __init__(self, net: Net, tower: Tower, layout: SpeechLayout, middle: int = MIDDLE) -> None:
        super().__init__()
        self.middle = middle
        self.net, self.tower = net, tower
        self.last = nn.Linear(net.shape.width, layout.texts)
        self.count = nn.Linear(net.shape.width, COUNTED + 1)
        # States that know what follows make the draft modules' guesses right.
        self.ahead = nn.Linear(net.shape.width, AHEAD * net.shape.width, bias=False)
        nn.init.zeros_(self.ahead.weight)

    def embedded(self, batch: Batch) -> Tensor:
        """Embeddings of ids and of sound `[B, L, D]`."""
        x = self.net.embed[batch.ids]
        if batch.mel is None or batch.at is None:
            return x
        heard, there = self.tower(batch.mel), batch.at >= 0
        rows = torch.arange(len(x))[:, None].expand_as(batch.at)[there]
        return x.index_put((rows, batch.at[there]), heard[there])


def losses(
    model: Model, layout: SpeechLayout, batch: Batch, weights: Weights
) -> tuple[Tensor, dict[str, Part]]:
    """The sum to be differentiated, and per part its mean, the places and those guessed right."""
    states, middle = model.net(model.embedded(batch), model.middle)
    labels = batch.ids[:, 1:]
    total, parts = states.new_zeros(()), {}
    chosen = batch.kind[:, :-1] == TEXT
    if chosen.any():
        logits = linear(states[:, :-1][chosen], model.net.head[: layout.texts])
        loss = cross_entropy(logits, labels[chosen], reduction="sum")
        total = total + weights.text * loss
        parts["text"] = _part(loss, logits, labels[chosen])
    chosen = batch.kind[:, :-1] == AUDIO
    if chosen.any():
        logits = linear(states[:, :-1][chosen], model.net.head[layout.texts :])
        target = labels[chosen] - layout.texts
        each = cross_entropy(logits, target, reduction="none")
        book = torch.where(target < 2, -1, (target - 2) // layout.entries)
        scale = torch.tensor([weights.turns, *weights.books[: layout.books]])[book + 1]
        # Which word it is shows in its first frames.
        early = (book == 0) & (ages(layout, batch.ids)[:, 1:][chosen] <= EARLY * layout.books)
        scale = torch.where(early, weights.starts * scale, scale)
        total = total + (each * scale).sum()
        for q in range(-1, layout.books):
            mine = book == q
            name = f"book{q}" if q >= 0 else "turn"
            parts[name] = _part(each[mine].sum(), logits[mine], target[mine])
        later = further(model, layout, states, batch)
        total = total + weights.later * later
    if batch.at is not None and batch.last is not None and batch.count is not None:
        there = batch.at >= 0
        rows = torch.arange(len(states))[:, None].expand_as(batch.at)[there]
        ear = middle[rows, batch.at[there]]
        for name, readout, target in (
            ("last", model.last, batch.last[there]),
            ("count", model.count, batch.count[there]),
        ):
            logits = readout(ear)
            loss = cross_entropy(logits, target, reduction="sum")
            # Most embeddings repeat what the one before said.
            total = total + weights.dense * loss / 4
            parts[name] = _part(loss, logits, target)
    return total, parts


def ages(layout: SpeechLayout, ids: Tensor) -> Tensor:
    """Audio tokens since the sound of this group began `[B, L]`: 1 at its first code."""
    sound = (ids >= layout.texts).long().cumsum(1)
    turn = (ids == layout.next) | (ids == layout.end)
    return sound - torch.where(turn, sound, 0).cummax(1).values.roll(1, 1).index_fill(
        1, torch.tensor([0]), 0
    )


def further(model: Model, layout: SpeechLayout, states: Tensor, batch: Batch) -> Tensor:
    """What states know of the tokens behind the next one: a sum, as if all places were asked."""
    owed = batch.kind == AUDIO
    total = states.new_zeros(())
    shifts = model.ahead.weight.unflatten(0, (AHEAD, -1))
    for k in range(1, AHEAD + 1):
        n = batch.ids.shape[1] - 1 - k
        if n < 1:
            break
        # Text in between comes from outside: nobody drafts across it.
        whole = torch.stack([owed[:, i : i + n] for i in range(k + 1)]).all(0)
        rows, places = torch.arange(len(whole))[:, None], torch.arange(n)
        whole &= (5 * rows + places + k) % ASKED == 0
        if not whole.any():
            continue
        here = states[:, :n][whole]
        logits = linear(here + linear(here, shifts[k - 1]), model.net.head[layout.texts :])
        labels = batch.ids[:, 1 + k :][whole] - layout.texts
        total = total + cross_entropy(logits, labels, reduction="sum") * ASKED
    return total


def _part(loss: Tensor, logits: Tensor, target: Tensor) -> Part:
    right = int((logits.argmax(-1) == target).sum()) if len(target) else 0
    return float(loss.detach()), len(target), right


def matrices(model: Model) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Matrices of the layers, and everything else."""
    inner = [p for m in model.net.layers if isinstance(m, Layer) for p in m.parameters()]
    hidden = [p for p in inner if p.ndim > 1]
    known = {id(p) for p in hidden}
    return hidden, [p for p in model.parameters() if id(p) not in known]
