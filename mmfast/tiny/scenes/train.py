"""Train the model of the larger world: `python -m mmfast.tiny.scenes.train --out DIR`.

Clips are drawn once; tower and projector, which start as those of tiny-video, learn what every
patch shows; they run over all clips once; then the decoder learns to answer. A run that was cut
off, or is given more steps or minutes, goes on where it stopped: the same command again.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from mmfast.tiny import training
from mmfast.tiny.card import write_card
from mmfast.tiny.scenes.bank import SceneBank, make_bank
from mmfast.tiny.scenes.evaluate import NAME, run_scenes
from mmfast.tiny.scenes.lessons import (
    KINDS,
    LEAST,
    Encoded,
    SceneSampler,
    picture_frames,
    scene_loss,
    scene_score,
)
from mmfast.tiny.scenes.looks import BACKGROUNDS
from mmfast.tiny.scenes.model import START, make_model, make_processor
from mmfast.tiny.scenes.questions import ABSENT
from mmfast.tiny.scenes.readout import SceneReadout
from mmfast.tiny.video import tower
from mmfast.tiny.video.lessons import SUBSETS, Lesson, answer, choose
from mmfast.tiny.video.scene import IGNORE

HELD = 96  # clips of the world that are never trained on, for looks
BATCH, QUESTIONS = 12, 12  # of each thread
STILLS, WHOLE = 0.35, 0.5  # shares of steps with pictures, and with all visual tokens
KEEPS = (0.6, 0.4, 0.25)  # shares of the visual tokens otherwise
HARD = {"where": 3, "describe": 3, "count": 2, "speed": 2}  # asked more even where right
STRANGERS = 2  # clips outside the world in a batch


class SceneTower(tower.TowerTask):
    """Tower and projector that know much already, at a lower rate."""

    parallel = True

    def __init__(self, model: Any, bank: SceneBank, seed: int) -> None:
        kinds = [BACKGROUNDS.index(view.look.background) for view in bank.views]
        strangers = len(bank.clips.tables) - len(kinds)
        self.grounds = torch.tensor([*kinds, *[IGNORE] * strangers])
        widths = (model.config.vision_config.hidden_size, model.config.text_config.hidden_size)
        self.ground = nn.ModuleList(nn.Linear(width, len(BACKGROUNDS)) for width in widths)
        readouts = self.ground.parameters()
        super().__init__(model, bank.clips, seed, size=32, rate=6e-4, readouts=readouts)
        # The gradient of the fused kernel takes a processor half of a step.
        model.model.vision_tower.set_attn_implementation("eager")

    def batches(self, step: int, done: float) -> list[tuple[list[int], list[int]]]:
        """Random frames for each thread."""
        return [
            batch
            for _ in range(training.THREADS)
            for batch in super(SceneTower, self).batches(step, done)
        ]

    def loss(self, batch: Any) -> tuple[Tensor, training.Figures]:
        """Loss on patches of the tower and on pooled tokens of the projector."""
        with training.fast():
            return super().loss(batch)

    def judge_frames(
        self, features: Tensor, tokens: Tensor, clips: list[int]
    ) -> tuple[Tensor, training.Figures]:
        """Every patch and every token tells what is behind the things."""
        truth, total = self.grounds[clips], features.new_zeros(())
        for read, x in zip(self.ground, (features, tokens), strict=True):
            seen = read(x).float()
            each = truth[:, None].expand(seen.shape[:2])
            total = total + cross_entropy(seen.flatten(0, 1), each.flatten(), ignore_index=IGNORE)
        right = (seen.mean(1).argmax(-1) == truth)[truth != IGNORE].float().mean()
        return total, {"background": float(right)}


class SceneLanguage(training.Task):
    """The decoder's answers about clips and pictures."""

    parallel = True

    def __init__(self, model: Any, sampler: SceneSampler, seed: int, rate: float) -> None:
        self.model, self.sampler, self.best, self.fresh = model.train(), sampler, -1.0, False
        lm = model.model.language_model
        digits = sampler.tokenizer.convert_tokens_to_ids([*"0123456789", ","])
        self.readout = SceneReadout(lm.config.hidden_size, digits[:10], digits[10])
        rest = [model.model.image_newline, *self.readout.parameters()]
        self.optimiser = training.FastOptimiser.of(lm, rest, rate)
        self.rng = torch.Generator().manual_seed(seed)
        self.weights = dict.fromkeys(KINDS, 1.0)
        total, inside = len(sampler.encoded.clips), len(sampler.bank.views)
        self.inside, self.strange = inside - HELD, torch.arange(inside, total)
        self.order = torch.empty(0, dtype=torch.long)
        known = [i for i, (clip, _) in enumerate(sampler.encoded.frames) if clip < self.inside]
        foreign = [i for i, (clip, _) in enumerate(sampler.encoded.frames) if clip >= inside]
        self.shown = torch.tensor(known), torch.tensor(foreign)
        held = range(self.inside, inside)
        self.exam = [
            sampler.clips([*held[at : at + HELD // 3], *self.strange[:2].tolist()], 12,
                          self.weights, kept=at == 0)
            for at in range(0, HELD, HELD // 3)
        ]  # fmt: skip

    def batches(self, step: int, done: float) -> list[tuple[Lesson, Tensor]]:
        """A batch for each thread."""
        return [self._batch() for _ in range(training.THREADS)]

    def _batch(self) -> tuple[Lesson, Tensor]:
        """Clips, or now and then pictures, and the tokens kept of them."""
        if self._chance() < STILLS:
            known, foreign = self.shown
            chosen = self._some(known, BATCH - STRANGERS) + self._some(foreign, STRANGERS)
            lesson = self.sampler.pictures(chosen, QUESTIONS, self.weights)
        else:
            size = BATCH - STRANGERS
            if len(self.order) < size:
                self.order = torch.randperm(self.inside, generator=self.rng)
            chosen, self.order = self.order[:size].tolist(), self.order[size:]
            chosen += self._some(self.strange, STRANGERS)
            lesson = self.sampler.clips(chosen, QUESTIONS, self.weights)
        whole = lesson.every
        if self._chance() < WHOLE:
            return lesson, whole
        share = KEEPS[int(torch.randint(len(KEEPS), (), generator=self.rng))]
        way = SUBSETS[int(torch.randint(len(SUBSETS), (), generator=self.rng))]
        return lesson, choose(lesson.tokens, round(share * whole.shape[1]), way, self.rng)

    def loss(self, batch: tuple[Lesson, Tensor]) -> tuple[Tensor, training.Figures]:
        """Loss of the answers."""
        lesson, kept = batch
        with training.fast():
            found = answer(self.model, lesson, kept)
            loss = scene_loss(self.model, found.states, lesson.packed, self.readout)
            read = self.readout.loss(found.layers, lesson.packed, lesson.things["numbers"])
        return loss + read, {"loss": loss.item(), "read": read.item(), "kept": kept.shape[1]}

    def look(self) -> training.Figures:
        """Shares answered correctly; kinds that lag are asked more from now on."""
        with training.fast():
            kept = scene_score(self.model, self.exam[:1])
            scores = scene_score(self.model, self.exam[1:])
        least = {k: HARD.get(k, 1) * LEAST for k in KINDS}
        self.weights = {k: least[k] + 3 * min(1 - scores.get(k, 0.0), 0.4) for k in KINDS}
        mean = sum(scores.values()) / len(scores)
        self.best, self.fresh = max(mean, self.best), mean >= self.best
        return {"mean": mean, "kept": sum(kept.values()) / len(kept), "kinds": scores}

    def _some(self, among: Tensor, many: int) -> list[int]:
        found: list[int] = among[torch.randint(len(among), (many,), generator=self.rng)].tolist()
        return found

    def _chance(self) -> float:
        return float(torch.rand((), generator=self.rng))


def encode(model: Any, bank: SceneBank, pictures: int, seed: int) -> Encoded:
    """Run tower and projector over all clips and over the frames that are pictures."""
    model.eval()
    frames = picture_frames(bank, pictures, seed)
    shown, stills = dict(frames), dict[int, Tensor]()
    project, pool = model.model.multi_modal_projector, model.model.apply_pooling

    @torch.no_grad()  # of each thread
    def one(clip: int) -> Tensor:
        with training.fast():
            pixels = tower.scale_pixels(bank.clips.frames[clip])
            tokens = project(tower.tower_features(model, pixels))
        if clip in shown:
            stills[clip] = tokens[shown[clip]].half()[None]
        pooled: Tensor = pool(tokens.float()).half()
        return pooled

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with ThreadPoolExecutor(training.THREADS) as threaded:
        clips = torch.stack(list(threaded.map(one, range(len(bank.clips.tables)))))
    torch.set_num_threads(threads)
    return Encoded(clips, torch.stack([stills[clip] for clip, _ in frames]), frames)


def run(options: argparse.Namespace, log: training.Log) -> None:
    """Run all stages and leave the checkpoint that was best on held-out clips."""
    seed, out, processor = options.seed, options.out, make_processor()
    model = make_model(processor, seed, options.start)
    cache = options.bank or out / "bank.npz"
    with log.stage("bank", clips=options.clips, strangers=options.strangers):
        show = partial(training.progress, "clips", total=options.clips + options.strangers)
        workers = torch.get_num_threads()
        bank = make_bank(cache, options.clips, options.strangers, seed, workers, show)
    tower_task = SceneTower(model, bank, seed)
    course = training.Course("tower", options.tower_minutes, options.tower_steps)
    training.train(tower_task, course, log, checkpoint=out / "tower.pt")
    bank = bank.first(min(options.decoder_clips, len(bank.views)))
    with log.stage("encode", clips=len(bank.views)):
        encoded = encode(model, bank, options.pictures, seed)
    newline = model.model.image_newline
    task = SceneLanguage(
        model, SceneSampler(bank, encoded, newline, processor.tokenizer, seed), seed, options.rate
    )

    def save() -> None:
        if task.fresh:
            training.save_whole(model, out)
            processor.save_pretrained(out)

    hold = 0.35  # share of the stage after which the rate falls
    course = training.Course("language", options.minutes, options.steps, hold=hold)
    training.train(task, course, log, save, out / "language.pt")


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--out", type=Path, default=Path(NAME), help="checkpoint folder")
    add("--seed", type=int, default=0)
    add("--start", default=START, help="model to start from; one of this recipe keeps all it knows")
    add("--bank", type=Path, help="file that keeps the drawn clips; OUT/bank.npz by default")
    add("--clips", type=int, default=3000, help="clips of the world")
    add("--decoder-clips", type=int, default=3000, help="of them for the decoder")
    add("--strangers", type=int, default=800, help="clips outside it")
    add("--pictures", type=int, default=3000, help="single frames that are pictures")
    add("--tower-steps", type=int, default=2000)
    add("--tower-minutes", type=float, help="fit the tower's stage into this time instead")
    add("--steps", type=int, default=2400, help="decoder steps")
    add("--minutes", type=float, help="fit the decoder's stage into this time instead")
    add("--rate", type=float, default=1.5e-3, help="peak learning rate of the decoder")
    add("--questions", type=int, default=800, help="of the final evaluation")
    options = parser.parse_args(argv)
    if options.decoder_clips < HELD + BATCH or options.strangers < 2 * STRANGERS:
        parser.error(
            f"--decoder-clips must be {HELD + BATCH} or more, --strangers {2 * STRANGERS} or more"
        )
    return options


def main(argv: Sequence[str] | None = None) -> training.Figures:
    """Command line; returns the evaluation that the card shows."""
    options = _arguments(argv)
    log = training.Log(options.out, fresh=not (options.out / "tower.pt").exists())
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", min(os.cpu_count() or 1, 8))))
    log.start(seed=options.seed)
    run(options, log)
    result = run_scenes(options.out, options.questions, seed=options.seed)
    absent = run_scenes(options.out, options.questions // 4, options.seed, kinds=(ABSENT,))
    result["absent"] = {key: absent[key] for key in ("n", "accuracy", "interval")}
    log({"stage": "evaluation", **result, "model": "this checkpoint"})
    log.end()
    write_card(options.out, NAME)
    return result


if __name__ == "__main__":
    main()
