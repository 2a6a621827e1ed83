"""Training of a learned compressor for the embedded video model, whose weights stay frozen.

A LoRA in its decoder may learn with the compressor.

Features of the clips are projected once. A step then runs the decoder on the few vectors of each
clip, and the loss of the answers reaches the compressor through it. Two more losses come from the
decoder's own pass over all patches: the distribution of its answers, and the patches that they look
at, which the compressor learns to choose (words of an answer take the frames in turn, so that one
frame keeps the left digit and the next one the right).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from einops import rearrange
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div, pad

from mmfast.compressors.base import Compressed, Compressor, file_of
from mmfast.compressors.base import load as read_compressor
from mmfast.core.errors import ModelError
from mmfast.core.registry import get
from mmfast.models.adapters import save_lora, with_lora
from mmfast.models.loading import load, located
from mmfast.tiny import training
from mmfast.tiny.video import scene, tower
from mmfast.tiny.video.lessons import (
    ClipSampler,
    Lesson,
    PackedQuestions,
    Weights,
    answer,
    answer_from,
)
from mmfast.tiny.video.model import ASSISTANT, END, USER, rotate
from mmfast.tiny.video.questions import KINDS

CLIPS, HELD = 8, 256  # of a step, and at the end of the bank, which are never trained on


def questions_of(packed: PackedQuestions) -> list[tuple[int, Tensor]]:
    """Clip and mask `[L]` of every question; a clip with fewer than others has empty masks."""
    own = [packed.block == number for number in range(int(packed.block.max()) + 1)]
    return [(clip, mask[clip]) for clip in range(len(packed.ids)) for mask in own]


def alone(lesson: Lesson) -> PackedQuestions:
    """Questions of a lesson in rows of their own, `[B Q, L]`; empty rows where a clip has fewer."""
    packed = lesson.packed
    found = questions_of(packed)
    length = max(int(mask.sum()) for _, mask in found)

    def rows(values: Tensor, fill: int) -> Tensor:
        parts = [values[clip][mask] for clip, mask in found]
        return torch.stack([pad(part, (0, length - len(part)), value=fill) for part in parts])

    ids, block = rows(packed.ids, END), rows(torch.zeros_like(packed.block), -1)
    labels = rows(packed.labels, scene.IGNORE)
    return PackedQuestions(ids, block, rows(packed.within, 0), labels, rows(packed.named, 0))


@dataclass(frozen=True)
class Taught:
    """Logits and looks of the decoder where it sees all patches of a lesson."""

    logits: Tensor  # at the tokens of answers, question by question. `[n, V]`
    share: Tensor  # of each patch of a frame in what the answer looks at. `[B Q, F, P]`
    mass: Tensor  # of each frame in it; zero in empty rows. `[B Q, F]`


@torch.no_grad()
def teach(model: Any, lesson: Lesson) -> Taught:
    """Run the decoder on all patches.

    Cubes of attention among the patches are summed over heads and layers, since heads that look at
    one patch tell where an answer is, and most others look everywhere.
    """
    lm, packed, shape = model.model.language_model, lesson.packed, lesson.tokens.shape[:3]
    out, total = answer(model, lesson, lesson.every), shape[1] * shape[2]
    at, text_at = pad(lesson.every + 1, (1, 0)), total + 2 + packed.within
    looked = torch.zeros(())
    for layer, keys, queries in zip(lm.layers[1:], out.keys[1:], out.queries[1:], strict=True):
        key, query = (
            rearrange(each, "b n (h d) -> b h n d", d=layer.self_attn.head_dim)
            for each in (keys[:, : total + 1], queries)
        )
        key = rotate(key, lm.rotary_emb(keys, at))
        query = rotate(query, lm.rotary_emb(keys, text_at))
        score = query @ key.mT / key.shape[-1] ** 0.5
        looked = looked + score.softmax(-1)[..., 1:].pow(3).sum(1)  # [B, L, N]
    found = questions_of(packed)
    answers = [mask & (packed.labels[clip] != scene.IGNORE) for clip, mask in found]
    states = [out.states[clip][own] for (clip, _), own in zip(found, answers, strict=True)]
    share = torch.zeros(len(found), *shape[1:])
    for row, ((clip, _), own) in enumerate(zip(found, answers, strict=True)):
        words = looked[clip][own & (packed.labels[clip] != END)].unflatten(-1, shape[1:])
        for frame in range(shape[1] if len(words) else 0):
            share[row, frame] = words[frame % len(words), frame]
    mass = share.sum(-1)
    share = share / mass[..., None].clamp(min=1e-20)
    mass = mass / mass.sum(-1, keepdim=True).clamp(min=1e-20)
    return Taught(model.lm_head(torch.cat(states)), share, mass)


def guidance(score: Tensor, taught: Taught) -> Tensor:
    """Mean cross-entropy of scores `[B Q, F, k, P]` to what the decoder looks at in each cell."""
    allowed = score.isfinite()
    target = taught.share[:, :, None] * allowed
    weight = target.sum(-1) * taught.mass[..., None]  # [B Q, F, k]
    logs = score.log_softmax(-1).masked_fill(~allowed, 0.0)
    gap = -(target / target.sum(-1, keepdim=True).clamp(min=1e-20) * logs).sum(-1)
    return (gap * weight).sum() / weight.sum().clamp(min=1e-20)


def respond(
    model: Any, compressor: Compressor, shown: Tensor, packed: PackedQuestions
) -> tuple[Tensor, Compressed]:
    """States of the answers `[B Q, L, D]` to Q questions each about clips `[B, F, P, D]`."""
    embed = model.model.language_model.embed_tokens
    ids = pad(packed.ids, (1, 0), value=USER)  # all text of the prompt, as `attach` sees it
    inside = pad(packed.block, (1, 0), value=0) >= 0
    ends = (ids == ASSISTANT).int()
    known = inside & (ends.cumsum(1) - ends == 0)  # up to the answer
    clips = (len(shown), len(ids) // len(shown))
    text, known = embed(ids).unflatten(0, clips), known.unflatten(0, clips)
    out = compressor(shown[:, None], text, known)  # [B, Q, F, k, D]
    frames, patches = shown.shape[1:3]
    if out.vectors.shape[1] < clips[1]:  # the question was not read
        each = ((way, getattr(out, way)) for way in ("vectors", "place", "owner"))
        out = replace(out, **{way: x.expand(*clips, *x.shape[2:]) for way, x in each})
    at = out.place + torch.arange(frames)[:, None] * patches
    place, visual = at.flatten(0, 1).flatten(1), out.vectors.flatten(0, 1).flatten(1, 2)
    fused = None if out.text is None else out.text.flatten(0, 1)
    return answer_from(model, packed, visual, place, frames * patches, fused).states, out


class CompressorTask(training.Task):
    """A compressor in training under a frozen model, and the LoRA of `learner` around that."""

    def __init__(
        self,
        model: Any,
        compressor: Compressor,
        clips: ClipSampler,
        seed: int,
        *,
        held: int = HELD,
        rate: float = 1.5e-3,
        questions: int = 8,
        learner: Any = None,
    ) -> None:
        if learner is None:
            model.requires_grad_(False)
        self.model, self.learner = model.eval(), learner
        self.compressor, self.clips, self.questions = compressor.train(), clips, questions
        adapted = [each for each in model.parameters() if each.requires_grad]
        self.optimiser = training.Optimiser.by_layer(compressor, rate, adapted)
        self.rng = torch.Generator().manual_seed(seed)
        self.lead = 1.0  # weight of the patches to choose; they matter less once they are known
        self.count = len(clips.bank.tables) - held
        self.weights: Weights = dict.fromkeys(KINDS, 1.0)
        parts = range(self.count, self.count + held, CLIPS)
        ends = [min(start + CLIPS, self.count + held) for start in parts]
        self.exam = [
            clips.lesson(range(a, b), 4, self.weights) for a, b in zip(parts, ends, strict=True)
        ]

    def batches(self, step: int, done: float) -> list[Lesson]:
        """Random clips and questions about them."""
        self.lead = max(0.1, 1 - 2 * done)
        chosen = torch.randint(self.count, (CLIPS,), generator=self.rng).tolist()
        return [self.clips.lesson(chosen, self.questions, self.weights)]

    def loss(self, batch: Lesson) -> tuple[Tensor, training.Figures]:
        """Loss of the answers, and what the decoder's pass over all patches teaches."""
        with training.fast():
            return self._loss(batch)

    def _loss(self, batch: Lesson) -> tuple[Tensor, training.Figures]:
        with nullcontext() if self.learner is None else self.learner.disable_adapter():
            taught = teach(self.model, batch)
        packed = alone(batch)
        states, out = respond(self.model, self.compressor, batch.tokens, packed)
        asked = packed.labels != scene.IGNORE
        logits = self.model.lm_head(states[asked])
        right = cross_entropy(logits, packed.labels[asked])
        like = kl_div(logits.log_softmax(-1), taught.logits.softmax(-1), reduction="batchmean")
        total, figures = right + like, {"loss": right.item(), "like": like.item()}
        if out.score is not None:
            look = guidance(out.score.flatten(0, 1), taught)
            total, figures = total + self.lead * look, figures | {"look": look.item()}
        return total, figures

    @torch.no_grad()
    def look(self) -> training.Figures:
        """Shares answered correctly; kinds that lag are asked more from now on."""
        marks: list[tuple[str, bool]] = []
        for lesson in self.exam:
            packed, kinds = alone(lesson), [kind for row in lesson.kinds for kind in row]
            states, _ = respond(self.model, self.compressor, lesson.tokens, packed)
            right = packed.correct(self.model.lm_head(states).argmax(-1))
            marks += zip(kinds, (mark for row in right for mark in row), strict=True)
        scores = training.shares(marks, KINDS)
        self.weights = {kind: 0.4 + 4 * min(1 - scores.get(kind, 0.0), 0.4) for kind in KINDS}
        return {"mean": sum(mark for _, mark in marks) / len(marks), "kinds": scores}


def pupil(name: str) -> tuple[Any, Any]:
    """Model and processor that the lessons fit; ModelError for one of another architecture."""
    model, processor = load(located(name), "cpu", "float32")
    if not hasattr(model.model, "image_newline"):
        raise ModelError(
            f"{name!r} is a {type(model).__name__}; the lessons are those of tiny-video: "
            "name that, or a checkpoint of python -m mmfast.tiny.video.train"
        )
    return model, processor


def run(options: argparse.Namespace, log: training.Log) -> None:
    """Train one compressor for every number of tokens, on the same clips and for as long."""
    get(options.compressor, "compressor")  # imports them, and refuses an unknown name
    for tokens in options.tokens:
        Compressor.kinds[options.compressor].refuse(tokens)
    model, processor = pupil(options.model)
    bank, features = tower.encoded_clips(model, options.clips, options.seed, log)  # [n, F, P, D]
    train_all(options, log, model, ClipSampler(bank, features, processor.tokenizer, options.seed))


def train_all(
    options: argparse.Namespace, log: training.Log, model: Any, clips: ClipSampler
) -> None:
    """Train on clips whose features are known."""
    learner, beside = None, lambda: None
    if options.lora is not None:
        learner = with_lora(model, options.lora)
        beside = partial(save_lora, learner, options.out, options.model)
    patches, width = clips.tokens.shape[-2:]
    side = round(patches**0.5)
    for tokens in options.tokens:
        torch.manual_seed(options.seed)
        compressor = Compressor.kinds[options.compressor](width, tokens, (side, side))
        if options.start:
            go_on(compressor, options.start)
        path = file_of(options.out, options.compressor, tokens)
        how = {"held": options.held, "rate": options.rate, "learner": learner}
        task = CompressorTask(model, compressor, clips, options.seed, **how)
        training.teach(task, log, options, path, compressor, watch=2.0, beside=beside)


@torch.no_grad()
def go_on(compressor: Compressor, start: Path) -> None:
    """Take the weights of a file; every token has the one learned vector of a single token."""
    weights = read_compressor(start).state_dict()
    own = compressor.state_dict()
    for name, value in weights.items():
        if name == "learned" and len(value) == 1:
            noise = 0.02 * torch.randn(own[name].shape) if len(own[name]) > 1 else 0.0
            weights[name] = value.expand(own[name].shape) + noise
    compressor.load_state_dict(weights)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = training.RecipeParser(__doc__, "python -m mmfast.compressors.train")
    add = parser.add_argument
    add("--model", default="tiny-video", help="embedded model or checkpoint folder")
    add("--compressor", default="query_compressor", help="name of the architecture")
    add("--tokens", type="count", nargs="+", default=[1], help="vectors a frame; several: one each")
    add("--out", type=Path, default=Path("compressed"), help="folder that gets compressors/")
    add("--lora", type="count", help="rank of a LoRA that the decoder learns, too; none by default")
    add("--start", type="present", help="weights to go on from, of one token or of as many")
    training.teach_options(parser, rate=1.5e-3, steps=1300)
    add("--clips", type=int, default=4256, help="of the bank, held-out ones included")
    add("--held", type=int, default=HELD, help="clips at its end that are never trained on")
    options = parser.parse_args(argv)
    if options.clips < options.held + CLIPS:
        parser.error(f"--clips {options.clips} must be at least {options.held + CLIPS}")
    if max(options.tokens) > scene.CELLS**2:
        parser.error(f"--tokens must be 1 to {scene.CELLS**2}, the patches of a frame")
    if options.lora is not None and len(options.tokens) > 1:
        parser.error("a folder holds one LoRA: with --lora give one number of --tokens")
    return options


@training.one_line
def main(argv: Sequence[str] | None = None) -> None:
    """Train and write the weights and the log."""
    options = arguments(argv)
    fields = ("model", "compressor", "tokens", "lora", "seed", "minutes", "steps", "clips")
    training.Log.record(options.out / "compressors", run, options, *fields)
