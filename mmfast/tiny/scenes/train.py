"""Train the model of the larger world: `python -m mmfast.tiny.scenes.train --out DIR`.

Clips are drawn once; tower and projector, which start as those of tiny-video, learn what every
patch shows; they run over all clips once; then the decoder learns to answer. A run that was cut
off, or is given more steps or minutes, goes on where it stopped: the same command again.
"""

from __future__ import annotations

import argparse
import copy
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from mmfast.tiny import training
from mmfast.tiny.card import write_card
from mmfast.tiny.scenes.albums import ALBUM
from mmfast.tiny.scenes.bank import SceneBank, make_bank
from mmfast.tiny.scenes.evaluate import FREELY, NAME, run_scenes
from mmfast.tiny.scenes.lessons import (
    GREY,
    KINDS,
    LEAST,
    Encoded,
    SceneAsk,
    SceneSampler,
    letterboxed,
    picture_frames,
    picture_sizes,
    scene_loss,
    scene_score,
)
from mmfast.tiny.scenes.looks import BACKGROUNDS
from mmfast.tiny.scenes.model import START, make_model, make_processor
from mmfast.tiny.scenes.outside import FIGURES
from mmfast.tiny.scenes.questions import ABSENT, LOOSE
from mmfast.tiny.scenes.readout import SceneReadout
from mmfast.tiny.scenes.unasked import EVERYDAY
from mmfast.tiny.video import tower
from mmfast.tiny.video.lessons import SUBSETS, Lesson, answer, choose
from mmfast.tiny.video.scene import IGNORE, THINGS, patch_offsets

HELD = 96  # clips of the world that are never trained on, for looks
BATCH, QUESTIONS = 12, 12  # of each thread, or of a device
FRAMES = {"cpu": 32}  # frames that the tower learns from, of each thread; 256 of a device
CHUNK = {"cpu": 1}  # clips that are encoded at once; 64 on a device
STILLS, WHOLE = 0.4, 0.5  # shares of steps with pictures, and with all visual tokens
ALBUMS = 0.25  # share of the steps with pictures that show several at once
KEEPS = (0.6, 0.4, 0.25)  # shares of the visual tokens otherwise
HARD = {"where": 5, "describe": 4, "count": 2, "speed": 2}  # asked more even where right
BLIND = 0.04  # share of steps with questions that come without a clip or picture
EDGES = 2.0  # weight of a mean distance, in patches, of the edges that the tower tells
FOREIGN = 2.0  # weight of telling things of the world from those that it has not
STRANGERS = 3  # clips outside the world in a batch


class SceneTower(tower.TowerTask):
    """Tower and projector that know much already, at a lower rate."""

    parallel = True

    def __init__(self, model: Any, bank: SceneBank, seed: int) -> None:
        kinds = [BACKGROUNDS.index(view.look.background) for view in bank.views]
        strangers = len(bank.clips.tables) - len(kinds)
        self.grounds = torch.tensor([*kinds, *[IGNORE] * strangers])
        widths = (model.config.vision_config.hidden_size, model.config.text_config.hidden_size)
        self.ground = nn.ModuleList(nn.Linear(width, len(BACKGROUNDS)) for width in widths)
        self.edges = nn.ModuleList(nn.Linear(width, 4) for width in widths)
        self.foreign = nn.ModuleList(nn.Linear(width, 1) for width in widths)
        own = nn.ModuleList([self.ground, self.edges, self.foreign]).to(model.device)
        self.grounds = self.grounds.to(model.device)
        self.reaches = reaches(bank).to(model.device)
        size = FRAMES.get(model.device.type, 256)
        super().__init__(model, bank.clips, seed, size=size, rate=6e-4, readouts=own.parameters())
        for weight in (*own.parameters(), *self.fine.parameters(), *self.coarse.parameters()):
            if weight.ndim == 2:  # at first the tower feels nothing of them
                nn.init.zeros_(weight)
        if self.device.type == "cpu":
            # The gradient of the fused kernel takes a processor half of a step.
            model.model.vision_tower.set_attn_implementation("eager")

    def batches(self, step: int, done: float) -> list[tuple[list[int], list[int]]]:
        """Random frames for each thread."""
        return [
            batch
            for _ in range(training.side_by_side(self.device))
            for batch in super(SceneTower, self).batches(step, done)
        ]

    def loss(self, batch: Any) -> tuple[Tensor, training.Figures]:
        """Loss on patches of the tower and on pooled tokens of the projector."""
        with training.fast(self.device):
            return super().loss(batch)

    def judge_frames(
        self, features: Tensor, tokens: Tensor, clips: Tensor, times: Tensor
    ) -> tuple[Tensor, training.Figures]:
        """Every patch and token tells what is behind the things, and the edges of its thing.

        It also tells whether the world has its thing.
        """
        truth, total = self.grounds[clips], features.new_zeros(())
        strange = (truth == IGNORE).float()[:, None]
        places, gaps = self.truth.places[clips, :, times][..., None], list[Tensor]()
        corners = (places + self.reaches[clips]).unbind(-1)  # of things, `[n, THINGS, 2]` each
        for read, x, owners in zip(self.edges, (features, tokens), self.truth.owners, strict=True):
            owner = owners[clips, times].long()
            ways = torch.cat([patch_offsets(owner, corner) for corner in corners], -1)
            known = ~ways.isnan()
            gap = (read(x).float() - ways.nan_to_num())[known].abs().mean()
            total = total + EDGES * gap
            gaps.append(gap.detach())
        told = list[Tensor]()
        for read, x, owners in zip(
            self.foreign, (features, tokens), self.truth.owners, strict=True
        ):
            owner = owners[clips, times]
            shown = (owner > 0) & (owner <= THINGS)
            said, wanted = read(x).float()[..., 0][shown], strange.expand_as(shown)[shown]
            total = total + FOREIGN * binary_cross_entropy_with_logits(said, wanted)
            told.append(((said > 0) == (wanted > 0)).float().mean())
        for read, x in zip(self.ground, (features, tokens), strict=True):
            seen = read(x).float()
            each = truth[:, None].expand(seen.shape[:2])
            total = total + cross_entropy(seen.flatten(0, 1), each.flatten(), ignore_index=IGNORE)
        right = (seen.mean(1).argmax(-1) == truth)[truth != IGNORE].float().mean()
        return total, {
            "background": right,
            "edges": dict(zip(("patch", "cell"), gaps, strict=True)),
            "foreign": dict(zip(("patch", "cell"), told, strict=True)),
        }


def reaches(bank: SceneBank) -> Tensor:
    """Ways from centres to corners, top left and bottom right: `[n, THINGS, 2 (x, y), 2]`."""
    found = torch.full((len(bank.clips.tables), THINGS, 2, 2), float("nan"))
    for number, view in enumerate(bank.views):
        for thing in range(len(view.scene.things)):
            found[number, thing] = torch.from_numpy(view.reach(thing)).T
    return found


class SceneLanguage(training.Task):
    """The decoder's answers about clips and pictures."""

    parallel = True

    def __init__(self, model: Any, sampler: SceneSampler, options: argparse.Namespace) -> None:
        self.model, self.sampler, self.best, self.fresh = model.train(), sampler, -1.0, False
        self.device, self.seed, self.batch = model.device, options.seed, options.batch
        lm = model.model.language_model
        digits = sampler.tokenizer.convert_tokens_to_ids([*"0123456789", ","])
        self.readout = SceneReadout(lm.config.hidden_size, digits[:10], digits[10])
        self.readout.to(self.device)
        rest = [model.model.image_newline, *self.readout.parameters()]
        self.optimiser = training.FastOptimiser.of(lm, rest, options.rate)
        self.hard = HARD | dict(options.hard)
        self.weights = dict.fromkeys(KINDS, 1.0)
        total, inside = len(sampler.encoded.clips), len(sampler.bank.views)
        self.inside, self.strange = inside - options.held, np.arange(inside, total)
        known, foreign = self._shown(range(self.inside)), self._shown(range(inside, total))
        self.shown = {size: (known[size], foreign[size]) for size in known if size in foreign}
        held, part = range(self.inside, inside), -(-options.held // 3)
        self.exam = [
            sampler.clips([*held[at : at + part], *self.strange[:2].tolist()], 12,
                          self.weights, kept=at == 0)
            for at in range(0, options.held, part)
        ]  # fmt: skip
        self.exam += [
            sampler.pictures(some, 12, self.weights) for some in self._shown(held).values()
        ]
        every = [picture for some in self._shown(held).values() for picture in some]
        every = every[: len(every) // ALBUM * ALBUM]
        self.exam += [sampler.pictures(every, 12, self.weights, ALBUM)] if every else []
        self.drawn = training.DrawAhead(sampler.draw, self.ask, options.workers)

    def _shown(self, clips: range) -> dict[tuple[int, int], list[int]]:
        """Pictures of clips by their size: those of a batch are of one."""
        found: dict[tuple[int, int], list[int]] = {}
        for picture, (clip, _) in enumerate(self.sampler.encoded.frames):
            if clip in clips:
                found.setdefault(self.sampler.encoded.sizes[picture], []).append(picture)
        return found

    def ask(self, number: int) -> SceneAsk:
        """Clips, or now and then pictures, of the batch of a number."""
        rng = np.random.default_rng([self.seed, 5, number])
        still = bool(rng.random() < STILLS and self.shown)
        part: tuple[Any, Any] = (self.inside, self.strange)
        if still:
            sizes, many = [*self.shown], np.array([len(some) for some, _ in self.shown.values()])
            part = self.shown[sizes[rng.choice(len(sizes), p=many / many.sum())]]
        if still and rng.random() < ALBUMS:
            known = [picture for some, _ in self.shown.values() for picture in some]
            chosen = rng.choice(known, self.batch * ALBUM).tolist()
            return SceneAsk((self.seed, 6, number), chosen, True, QUESTIONS, dict(self.weights),
                            album=ALBUM)  # fmt: skip
        strangers = max(STRANGERS * self.batch // BATCH, 1)
        if rng.random() < BLIND:  # as if of a stranger: the answer is the refusal
            part, still, strangers = (self.inside, self.strange), False, self.batch
        chosen = [*rng.choice(part[0], self.batch - strangers), *rng.choice(part[1], strangers)]
        media = [int(medium) for medium in chosen]
        return SceneAsk((self.seed, 6, number), media, still, QUESTIONS, dict(self.weights))

    def batches(self, step: int, done: float) -> list[tuple[Lesson, Tensor]]:
        """A batch for each thread."""
        many = training.side_by_side(self.device)
        return [self._batch(number) for number in range(step * many, (step + 1) * many)]

    def _batch(self, number: int) -> tuple[Lesson, Tensor]:
        """A batch and the tokens kept of it."""
        draft = self.drawn(number)
        lesson = self.sampler.lesson(draft)
        if min(draft.media) >= self.inside and not draft.still:
            return lesson, lesson.every[:, :0]
        rng = torch.Generator().manual_seed((self.seed << 32) + number)
        share, way, some = torch.rand(3, generator=rng).tolist()
        if some < WHOLE:
            return lesson, lesson.every
        keep = round(KEEPS[int(share * len(KEEPS))] * lesson.every.shape[1])
        return lesson, choose(lesson.tokens, keep, SUBSETS[int(way * len(SUBSETS))], rng)

    def loss(self, batch: tuple[Lesson, Tensor]) -> tuple[Tensor, training.Figures]:
        """Loss of the answers."""
        lesson, kept = batch
        with training.fast(self.device):
            found = answer(self.model, lesson, kept)
            loss = scene_loss(self.model, found.states, lesson.packed, self.readout)
            read = self.readout.loss(found.layers, lesson.packed, lesson.things)
        figures = {"loss": loss.detach(), "read": read.detach(), "kept": kept.shape[1]}
        return loss + read, figures

    def look(self) -> training.Figures:
        """Shares answered correctly; kinds that lag are asked more from now on."""
        with training.fast(self.device):
            kept = scene_score(self.model, self.exam[:1])
            scores = scene_score(self.model, self.exam[1:])
        least = {k: self.hard.get(k, 1) * LEAST for k in KINDS}
        self.weights = {k: least[k] + 3 * min(1 - scores.get(k, 0.0), 0.4) for k in KINDS}
        mean = sum(scores.values()) / len(scores)
        self.best, self.fresh = max(mean, self.best), mean >= self.best
        return {"mean": mean, "kept": sum(kept.values()) / len(kept), "kinds": scores}

    def resume(self, step: int) -> None:
        """Ask as an interrupted run does."""
        self.look()


def encode(model: Any, bank: SceneBank, pictures: int, seed: int) -> Encoded:
    """Run tower and projector over all clips and over the frames that are pictures."""
    model.eval()
    frames = picture_frames(bank, pictures, seed)
    sizes = picture_sizes(bank, frames)
    project, pool = model.model.multi_modal_projector, model.model.apply_pooling
    size = CHUNK.get(model.device.type, 64)

    @torch.no_grad()  # of each thread
    def tokens(pixels: Tensor) -> Tensor:
        # A device has the time for float32, in which the model is used.
        with training.fast() if model.device.type == "cpu" else nullcontext():
            found: Tensor = project(tower.tower_features(model, tower.scale_pixels(pixels)))
            return found

    def pooled(first: int) -> Tensor:
        pixels = bank.clips.frames[first : first + size].to(model.device)
        some = pool(tokens(pixels.flatten(0, 1)).float()).half()
        found: Tensor = some.unflatten(0, pixels.shape[:2])
        return found

    def still(number: int) -> Tensor:
        frame = bank.clips.frames[frames[number]]
        boxed = [letterboxed(frame, sizes[number], fill) for fill in (0, GREY)]
        found: Tensor = tokens(torch.stack([frame, *boxed]).to(model.device)).half()
        return found

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with ThreadPoolExecutor(training.side_by_side(model.device)) as threaded:
        clips = torch.cat(list(threaded.map(pooled, range(0, len(bank.clips.tables), size))))
        stills = torch.stack(list(threaded.map(still, range(len(frames)))))
    torch.set_num_threads(threads)
    return Encoded(clips, stills, frames, sizes)


@torch.no_grad()
def blended(model: nn.Module, before: Mapping[str, Tensor], share: float) -> nn.Module:
    """A copy with a share of the model's weights, and the rest of those before (WiSE-FT, 2022)."""
    found, now = copy.deepcopy(model), model.state_dict()
    found.load_state_dict({name: torch.lerp(before[name], now[name], share) for name in now})
    return found


def run(options: argparse.Namespace, log: training.Log) -> None:
    """Run all stages and leave the checkpoint that was best on held-out clips."""
    seed, out, processor = options.seed, options.out, make_processor()
    model = make_model(processor, seed, options.start).to(training.ready(options.device))
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    cache = options.bank or out / "bank.npz"
    with log.stage("bank", clips=options.clips, strangers=options.strangers):
        show = partial(training.progress, "clips", total=options.clips + options.strangers)
        workers = max(torch.get_num_threads(), options.workers)
        bank = make_bank(cache, options.clips, options.strangers, seed, workers, show)
    tower_task = SceneTower(model, bank, seed)
    course = training.Course("tower", options.tower_minutes, options.tower_steps)
    training.train(tower_task, course, log, checkpoint=out / "tower.pt")
    bank = bank.first(min(options.decoder_clips, len(bank.views)))
    with log.stage("encode", clips=len(bank.views)):
        encoded = encode(model, bank, options.pictures, seed)
    newline = model.model.image_newline
    sampler = SceneSampler(bank, encoded, newline, processor.tokenizer, seed)
    task = SceneLanguage(model, sampler, options)

    def save() -> None:
        if task.fresh:
            training.save_whole(blended(model, before, options.blend), out)
            processor.save_pretrained(out)

    hold = 0.35  # share of the stage after which the rate falls
    minutes = options.minutes
    if options.within is not None:
        minutes = max(options.within - log.minutes, 0.1)
    course = training.Course("language", minutes, options.steps, hold=hold, watch=options.watch)
    with closing(task.drawn):
        training.train(task, course, log, save, out / "language.pt")


def _weight(text: str) -> tuple[str, float]:
    kind, _, much = text.partition("=")
    if kind not in KINDS:
        raise argparse.ArgumentTypeError(f"{kind!r} is none of {', '.join(KINDS)}")
    try:
        return kind, float(much)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{much!r} is no weight; give one, {kind}=5") from None


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = training.recipe_parser(__doc__, NAME)
    add = parser.add_argument
    add("--start", default=START, help="model to start from; one of this recipe keeps all it knows")
    add("--bank", type=Path, help="file that keeps the drawn clips; OUT/bank.npz by default")
    add("--clips", type=int, default=3000, help="clips of the world")
    add("--decoder-clips", type=int, default=3000, help="of them for the decoder")
    add("--strangers", type=int, default=800, help="clips outside it")
    add("--pictures", type="count", default=3000, help="single frames that are pictures")
    add("--tower-steps", type=int, default=2000)
    add("--tower-minutes", type=float, help="fit the tower's stage into this time instead")
    add("--steps", type=int, default=2400, help="decoder steps")
    add("--minutes", type=float, help="fit the decoder's stage into this time instead")
    add("--within", type=float, help="end the decoder's stage so many minutes after the start")
    add("--rate", type="rate", default=1.5e-3, help="peak learning rate of the decoder")
    add("--blend", type=float, default=1.0, help="share of what it learned; the rest is as before")
    add("--questions", type="count", default=800, help="of the final evaluation")
    add("--batch", type="count", default=BATCH, help="clips of each thread or of a device")
    add("--held", type="count", default=HELD, help="clips that are never trained on, for looks")
    add("--watch", type=float, default=4.0, help="minutes between looks at them")
    add("--hard", type=_weight, nargs="*", default=(), help="kinds asked more, such as where=5")
    add("--workers", type=int, help="processes that draw ahead; none for cpu")
    training.device_option(parser)
    options = parser.parse_args(argv)
    if options.workers is None:
        options.workers = 0 if options.device.type == "cpu" else max((os.cpu_count() or 1) - 2, 1)
    if not 0 < options.blend <= 1:
        parser.error(f"--blend must be above 0 and at most 1, not {options.blend}")
    least, strangers = options.held + options.batch, 2 * STRANGERS
    if options.decoder_clips < least or options.strangers < strangers:
        parser.error(f"--decoder-clips must be {least} or more, --strangers {strangers} or more")
    return options


@training.one_line
def main(argv: Sequence[str] | None = None) -> training.Figures:
    """Command line; returns the evaluation that the card shows."""
    options = _arguments(argv)
    log = training.Log(options.out, fresh=not (options.out / "tower.pt").exists())
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", min(os.cpu_count() or 1, 8))))
    log.start(seed=options.seed)
    run(options, log)
    ask = partial(run_scenes, options.out, seed=options.seed, device=options.device)
    result = ask(options.questions)
    more = {"absent": (ABSENT,), "loose": LOOSE}
    more |= {kind: (kind,) for kind in (FREELY, EVERYDAY, FIGURES)}
    for name, kinds in more.items():
        found = ask(options.questions // 4, kinds=kinds)
        result[name] = {key: found[key] for key in ("n", "accuracy", "interval")}
    log({"stage": "evaluation", **result, "model": "this checkpoint"})
    log.end()
    write_card(options.out, NAME)
    return result


if __name__ == "__main__":
    main()
