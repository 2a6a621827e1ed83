"""How many drafted codes of a frame stand.

Real recordings become eight residual codebooks, a small causal language model with a depth head
learns them, drafters learn what the depth head says; unseen recordings then show which share of
the drafts stands, codebook by codebook, and how many depth passes a frame takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmfast.bench.named import Tick
from mmfast.bench.results import Row
from mmfast.decoding.codebooks import (
    BlockPlan,
    CodeChoice,
    Drafter,
    FrameDecoder,
    copy_frame,
    one_by_one,
    parallel,
)
from mmfast.decoding.sampling import Sampling
from mmfast.heads.code_base import CodeMlp
from mmfast.heads.depth import DepthHead
from mmfast.heads.groups import GroupsHead
from mmfast.ops.audio import log_mel
from mmfast.tiny.speech.codec import recordings

BOOKS, SIZE, WIDTH, STACK = 8, 64, 64, 4  # 25 frames per second
SPAN, BATCH = 24, 12


@dataclass(frozen=True, eq=False)
class Learned:
    """A language model with a depth head.

    Attributes:
        body: The decoder.
        head: The depth head.
    """

    body: Any
    head: DepthHead

    def hidden(self, codes: Tensor) -> Tensor:
        """Recordings `[B, T, K]` to the hidden states `[B, T, D]` that each frame is said from."""
        start = codes.new_full((len(codes), 1, BOOKS), SIZE)
        read = self.head.inputs(torch.cat([start, codes[:, :-1]], dim=1))
        hidden: Tensor = self.body(inputs_embeds=read).last_hidden_state
        return hidden


def codes_of(count: int, seed: int, books: list[Tensor] | None = None) -> tuple[Any, list[Tensor]]:
    """Codes `[T, K]` of recordings, and the codebooks, fitted where none are given."""
    frames = []
    for pcm in recordings(count, seed):
        mel = log_mel(pcm[None])[0]
        whole = len(mel) // STACK
        frames.append(mel[: whole * STACK].reshape(whole, -1))
    rest, fitted, found = torch.cat(frames), books or [], []
    for at in range(BOOKS):
        book = books[at] if books else _fit(rest, seed + at)
        if not books:
            fitted.append(book)
        nearest = torch.cdist(rest, book).argmin(1)
        found.append(nearest)
        rest = rest - book[nearest]
    whole_codes = torch.stack(found, dim=1)
    return whole_codes.split([len(f) for f in frames]), fitted


def _fit(rest: Tensor, seed: int, rounds: int = 12) -> Tensor:
    source = torch.Generator().manual_seed(seed)
    book = rest[torch.randperm(len(rest), generator=source)[:SIZE]].clone()
    for _ in range(rounds):
        nearest = torch.cdist(rest, book).argmin(1)
        number = torch.bincount(nearest, minlength=SIZE).clamp(min=1)
        sums = torch.zeros_like(book).index_add_(0, nearest, rest)
        book = torch.where((number > 1)[:, None], sums / number[:, None], book)
    return book


def _spans(codes: Any, source: torch.Generator) -> Tensor:
    line = torch.cat(list(codes))
    starts = torch.randint(len(line) - SPAN, (BATCH,), generator=source)
    return torch.stack([line[s : s + SPAN] for s in starts.tolist()])


def learn(codes: Any, steps: int, seed: int = 0) -> Learned:
    """Train the language model and its depth head on codes."""
    from transformers import LlamaConfig, LlamaModel

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=1,
        bos_token_id=None,
        eos_token_id=None,
        hidden_size=WIDTH,
        intermediate_size=3 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    head = DepthHead(WIDTH, BOOKS, SIZE, dim=WIDTH, layers=2, ffn=2 * WIDTH, per_step=False)
    model, source = Learned(LlamaModel(config), head), torch.Generator().manual_seed(seed)
    weights = [*model.body.parameters(), *head.parameters()]

    def loss() -> Tensor:
        spans = _spans(codes, source)
        return head.loss(model.hidden(spans), spans).loss

    _train(weights, steps, loss)
    model.body.eval()
    head.eval()
    return model


def _train(weights: list[Any], steps: int, loss: Any) -> None:
    optimiser = torch.optim.AdamW(weights, 2e-3, betas=(0.9, 0.98))
    plan = torch.optim.lr_scheduler.OneCycleLR(optimiser, 2e-3, total_steps=steps, pct_start=0.1)
    for _ in range(steps):
        optimiser.zero_grad()
        loss().backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimiser.step()
        plan.step()


def drafters(model: Learned, codes: Any, steps: int, seed: int = 1) -> dict[str, Drafter]:
    """Drafters that have learned what the depth head says."""
    mlp, choice = CodeMlp(WIDTH, BOOKS, SIZE, 1, 2 * WIDTH), CodeChoice()
    groups = GroupsHead(WIDTH, BOOKS, SIZE, groups=4, dim=WIDTH, layers=1, ffn=2 * WIDTH)
    source = torch.Generator().manual_seed(seed)

    def loss() -> Tensor:
        spans = _spans(codes, source)
        with torch.no_grad():
            hidden = model.hidden(spans)
            flat = hidden.flatten(0, 1)
            front = model.head.fronts(flat)
            said = one_by_one(model.head, flat, front, choice).view_as(spans)
            before = torch.cat([spans[:, :1], spans[:, :-1]], dim=1).flatten(0, 1)
        guess = mlp.guess(flat, front, before)
        one = torch.nn.functional.cross_entropy(guess.flatten(0, 1), said.flatten())
        two = groups.loss(flat[:, None], said.flatten(0, 1)[:, None], power=None).loss
        return one + two

    _train([*mlp.parameters(), *groups.parameters()], steps, loss)
    made = {"copy": copy_frame, "mlp": parallel(mlp.eval().guess)}
    return made | {"groups": parallel(groups.eval().guess)}


@torch.no_grad()
def measure(model: Learned, codes: Any, name: str, drafter: Drafter, sampling: Sampling) -> Row:
    """Frames of unseen recordings, each on its own."""
    decoder = FrameDecoder(model.head, drafter, BlockPlan(BOOKS))
    choice, same, frames = CodeChoice(sampling), 0, 0
    for line in codes:
        hidden = model.hidden(line[None])[0]
        for at in range(1, len(line), 4):
            one = hidden[at][None]
            said = decoder.frame(one, model.head.fronts(one), line[at - 1][None], choice)
            frames += 1
            if sampling.greedy:
                alone = one_by_one(model.head, one, model.head.fronts(one), choice)
                same += int(torch.equal(said, alone))
    figures = decoder.count.to_dict()
    return {
        "job": name,
        "mode": "greedy" if sampling.greedy else f"T {sampling.temperature:g}",
        "score": decoder.count.rounds / frames,
        "codebooks": BOOKS,
        "n": frames,
        "passes_per_frame": round(decoder.count.rounds / frames, 3),
        "identical": same / frames if sampling.greedy else None,
        "acceptance": figures["acceptance"],
        "seed": 0,
        "device": "cpu",
    }


def rows(progress: Tick, count: int = 60, steps: int = 400, unseen: int = 5) -> list[Row]:
    """All rows: three drafters, greedy and sampled; most of the time is training."""
    progress("recordings and training", 0, 2)
    seen, books = codes_of(count, seed=0)
    fresh, _ = codes_of(unseen, seed=977, books=books)
    model = learn(seen, steps)
    found = drafters(model, seen, max(steps // 2, 1))
    ways = (Sampling(), Sampling(temperature=0.8, top_k=50))
    progress("drafting", 1, 2)
    return [measure(model, fresh, name, found[name], way) for name in found for way in ways]
