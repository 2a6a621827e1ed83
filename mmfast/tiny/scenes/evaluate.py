"""Measure a model on the larger world: `python -m mmfast.tiny.scenes.evaluate --model DIR`.

Half of the questions are in wordings that training never showed; so are all that are outside.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from mmfast.attach import attach
from mmfast.frontends.image import read_image
from mmfast.frontends.video.reader import read_video
from mmfast.models.loading import load
from mmfast.models.prompt import Shot, chat_inputs
from mmfast.tiny import training
from mmfast.tiny.evaluate import interval
from mmfast.tiny.scenes import looks, outside
from mmfast.tiny.scenes.facts import clip_items, picture_items
from mmfast.tiny.scenes.questions import (
    ABSENT,
    ALONE,
    CLIP_KINDS,
    LOOSE,
    OUTSIDE,
    SAID,
    SHORT,
    STILL_KINDS,
    SceneItem,
    spelled,
)
from mmfast.tiny.scenes.scoring import (
    calibration,
    is_right,
    made_up,
    parse_box,
    pope,
    refused,
    score,
)
from mmfast.tiny.scenes.unasked import ASKED, EVERYDAY
from mmfast.tiny.scenes.wordings import FREE
from mmfast.tiny.video import scene
from mmfast.tiny.video.clips import encode

NAME = "tiny-scenes"
TOKENS = 96  # of the longest answer
BATCH = 16
FREELY = "freely"  # kind of questions in wordings that nobody trains
STRANGE = "strange media"  # kind of questions of the world about media outside it
ELSEWHERE = (STRANGE, outside.FIGURES)  # kinds of questions about media outside the world
TURNS = (*CLIP_KINDS, OUTSIDE, STRANGE)
STILLS = (*STILL_KINDS, OUTSIDE, EVERYDAY, *ELSEWHERE, ABSENT, ALONE, SHORT)
CONTROLS = ("", "other", "reversed")  # which media: its own, those of another case, backwards
Report = Callable[[str, int, int], None]


@dataclass(frozen=True)
class SceneCase:
    """A conversation about one file, and the right answer to its last question."""

    file: bytes
    media: str  # `video` or `image`
    turns: tuple[str, ...]  # question, answer, question, or one question
    answer: str
    kind: str
    kept: bool  # whether it is worded as training never was

    def shot(self, backwards: bool = False) -> Shot:
        """Decode the file."""
        if self.media == "image":
            return Shot("image", read_image(self.file), None)
        clip = read_video(self.file, frames=scene.SAMPLED)
        frames = np.ascontiguousarray(clip.frames[::-1]) if backwards else clip.frames
        return Shot("video", frames, clip.metadata())

    def chat(self, shot: Shot) -> list[dict[str, Any]]:
        """The conversation with its medium in the first message."""
        roles = ("user", "assistant")
        texts = [[text] for text in self.turns]
        return [
            {"role": roles[i % 2], "content": [shot, *text] if i == 0 else text}
            for i, text in enumerate(texts)
        ]


def _view(seed: int, index: int, lone: bool) -> tuple[looks.SceneView, scene.Drawing, scene.Table]:
    view = looks.make_view(scene.EVAL, seed, index, lone, shades=lone)
    drawing = looks.draw(view)
    return view, drawing, scene.make_table(view.scene, drawing)


def _clip_file(frames: scene.Bytes, zoom: float) -> bytes:
    return encode(looks.resize(frames, zoom), looks.FPS)


def _picture_file(frame: scene.Bytes, zoom: float) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(looks.resize(frame[None], zoom)[0]).save(buffer, "JPEG", quality=92)
    return buffer.getvalue()


def scene_cases(
    seed: int, kinds: Sequence[str] = TURNS, stills: bool = True
) -> Iterator[SceneCase]:
    """Cases of all kinds in turn, every third about a picture where the kind allows it.

    Those of `FREELY` take the forms of `FREE` in turn, those of `EVERYDAY` the questions of a list.
    """
    rng, indices = np.random.default_rng([scene.EVAL, seed, 31]), count()
    for number in count():
        turn, kind = number // len(kinds), kinds[number % len(kinds)]
        lap, kept = turn + number, bool(turn % 2)
        still = stills and lap % 3 == 0 and kind in STILLS
        lone = kind == ALONE and number % 4 != 3  # now and then several things are called one
        while True:
            view, drawing, table = _view(seed, next(indices), lone)
            at = int(rng.integers(scene.SAMPLED))
            items = picture_items(view, table, at) if still else clip_items(view, table, True)
            any_kind = kind in (OUTSIDE, EVERYDAY, *ELSEWHERE)
            known = [item for item in items if item.kind == kind
                     or (any_kind and item.kind not in (ABSENT, *LOOSE))]  # fmt: skip
            if kind == FREELY:
                known = _of_form([*FREE][turn % len(FREE)], items)
            if known:
                break
        frames, zoom = drawing.frames, view.look.zoom
        if kind in ELSEWHERE:
            sort = _stranger(rng, kept) if kind == STRANGE else kind
            frames, zoom = outside.pictures(sort, rng), 1.0
        shown = frames[scene.sampled_indices(scene.FRAMES)[at]]
        file = _picture_file(shown, zoom) if still else _clip_file(frames, zoom)
        item = known[int(rng.integers(len(known)))]
        if kind in ELSEWHERE:
            item = _single(known, item)
        turns, answer = _worded(item, kept, rng), item.answer
        if kind == FREELY:
            kept, rows = True, FREE[item.form or item.kind]
            turns = (rows[turn // len(FREE) % len(rows)].format(*item.slots),)
        if kind == OUTSIDE:
            worldly = turn % 4 >= 2  # of those kept back, too, every other one
            turns = ((outside.worldly if worldly else outside.question)(rng, kept),)
        if kind == EVERYDAY:
            kept, turns = True, (ASKED[turn % len(ASKED)],)
        if any_kind:
            answer = outside.REFUSAL
        yield SceneCase(file, "image" if still else "video", turns, answer, kind, kept)


def _of_form(form: str, items: Sequence[SceneItem]) -> list[SceneItem]:
    """Items of one question whose words fit wordings of a form."""
    return [item for item in items if (item.form or item.kind) == form
            and item.before is None and item.kind not in (ABSENT, SAID)]  # fmt: skip


def _stranger(rng: np.random.Generator, kept: bool) -> str:
    trained = [kind for kind in outside.PICTURES if kind not in outside.KEPT_PICTURES]
    kinds = outside.KEPT_PICTURES if kept else trained
    return kinds[int(rng.integers(len(kinds)))]


def _single(known: Sequence[SceneItem], item: SceneItem) -> SceneItem:
    return item if item.before is None else next(k for k in known if k.before is None)


def _worded(item: SceneItem, kept: bool, rng: np.random.Generator) -> tuple[str, ...]:
    numbers = item.wordings(kept)
    text = spelled(item.worded(numbers[int(rng.integers(len(numbers)))]), rng)
    if item.before is None:
        return (text,)
    return (*_worded(item.before, kept, rng), item.before.answer, text)


@dataclass(frozen=True)
class SceneAnswer:
    """Answer of a model to a case, and the probability that it gave to just that answer."""

    text: str
    sure: float


@torch.inference_mode()
def answers(
    pair: tuple[Any, Any],
    cases: Sequence[SceneCase],
    control: str = "",
    report: Report | None = None,
) -> list[SceneAnswer]:
    """Greedy answers of a model and its processor, in batches of one kind of media."""
    model, processor = pair
    found: dict[int, SceneAnswer] = {}
    for media in ("video", "image"):
        mine = [i for i, case in enumerate(cases) if case.media == media]
        for at in range(0, len(mine), BATCH):
            some = mine[at : at + BATCH]
            chats = []
            for i in some:
                source = cases[mine[(mine.index(i) + 7) % len(mine)] if control == "other" else i]
                chats.append(cases[i].chat(source.shot(control == "reversed")))
            inputs = chat_inputs(processor, chats, model.device)
            out = model.generate(
                **inputs, do_sample=False, max_new_tokens=TOKENS,
                return_dict_in_generate=True, output_logits=True,
            )  # fmt: skip
            ids = out.sequences[:, inputs["input_ids"].shape[1] :]
            texts = processor.batch_decode(ids, skip_special_tokens=True)
            sure = _confidence(ids, torch.stack(out.logits, 1), model.generation_config)
            made = map(SceneAnswer, (text.strip() for text in texts), sure)
            found |= dict(zip(some, made, strict=True))
            if report is not None:
                report("questions", len(found), len(cases))
    return [found[i] for i in range(len(cases))]


def _confidence(ids: Tensor, logits: Tensor, config: Any) -> list[float]:
    """Probability of each answer `[B, L]`, its end included, under logits `[B, L, V]`."""
    ends = torch.tensor(config.eos_token_id).to(ids)
    over = torch.isin(ids, ends).long().cumsum(1) - torch.isin(ids, ends).long()
    chosen = logits.float().log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    found: list[float] = chosen.masked_fill(over > 0, 0.0).sum(1).exp().tolist()
    return found


def judge(cases: Sequence[SceneCase], said: Sequence[SceneAnswer]) -> dict[str, Any]:
    """Figures of answers: shares of right ones, overall and by kind, and what they rest on."""
    pairs = [(case, answer.text) for case, answer in zip(cases, said, strict=True)]
    kinds = ["where" if c.kind in LOOSE and parse_box(c.answer) else c.kind for c in cases]
    scores = [score(kind, c.answer, text) for kind, (c, text) in zip(kinds, pairs, strict=True)]
    right = [is_right(kind, value) for kind, value in zip(kinds, scores, strict=True)]
    inside = [refused(text) for case, text in pairs if case.answer != outside.REFUSAL]
    told = [made_up(case.answer, text) for case, text in pairs if case.kind == "describe"]
    marks = [(each.sure, mark) for each, mark in zip(said, right, strict=True)]
    asked = [(case.answer, text) for case, text in pairs if case.kind == "exists"]

    def mean(values: Sequence[float], kind: str) -> float | None:
        mine = [v for case, v in zip(cases, values, strict=True) if case.kind == kind]
        return float(np.mean(mine)) if mine else None

    return {
        "n": len(cases),
        "accuracy": float(np.mean(right)),
        "interval": interval(sum(right), len(right)),
        "by_kind": {kind: mean(right, kind) for kind in dict.fromkeys(c.kind for c in cases)},
        "overlap": mean(scores, "where"),
        "facts": mean(scores, "describe"),
        "made_up": float(np.mean(told)) if told else None,
        "pope": pope(asked),
        "refused_inside": float(np.mean(inside)) if inside else None,
        "calibration": calibration(marks),
    }


def run_scenes(
    model: Any,
    n: int = 400,
    seed: int = 1000,
    control: str = "",
    report: Report | None = None,
    kinds: Sequence[str] = TURNS,
    device: str | torch.device = "cpu",
) -> dict[str, Any]:
    """Ask a model (a name, a folder or a pair) `n` questions about unseen media."""
    pair = load(model, device, "float32")
    cases = list(islice(scene_cases(seed, kinds), n))
    found = measure(cases, answers(pair, cases, control, report))
    return {"seed": seed, "control": control or None, **found}


def measure(cases: Sequence[SceneCase], said: Sequence[SceneAnswer]) -> dict[str, Any]:
    """Figures of all answers, in wordings that training showed and kept back, on things alike."""
    found = judge(cases, said)
    for name, kept in (("trained", False), ("kept_back", True)):
        some = [(case, answer) for case, answer in zip(cases, said, strict=True)
                if case.kept == kept]  # fmt: skip
        if some:
            found[name] = judge(*zip(*some, strict=True))
    alike = [pair for pair in zip(cases, said, strict=True) if one_colour(pair[0].turns[-1])]
    if alike:
        share = judge(*zip(*alike, strict=True))
        found["one_colour"] = {key: share[key] for key in ("n", "accuracy", "interval")}
    return found


def one_colour(question: str) -> bool:
    """Return whether a question names two things of one colour, which differ in shape alone."""
    named = re.findall("|".join(scene.COLOURS), question.lower())
    return len(named) == 2 and named[0] == named[1]


def scene_rows(
    reduce: Sequence[str],
    caches: Sequence[str],
    n: int,
    seed: int,
    model: str | None,
    report: Report | None = None,
    known: Callable[[str | None, str | None], dict[str, Any] | None] = lambda spec, cache: None,
) -> Iterator[dict[str, Any]]:
    """Rows of results about the same media: all tokens, then each reducer, then each policy.

    Specs act as in `attach`. A row that is `known` by its spec and policy is not asked again.
    """
    cases, pair = list(islice(scene_cases(seed), n)), load(model or NAME, "cpu", "float32")
    ways = [(None, None), *((spec, None) for spec in reduce), *((None, spec) for spec in caches)]
    for spec, cache in ways:
        if (row := known(spec, cache)) is not None:
            yield row
            continue
        with attach(pair[0], spec, cache=cache) if spec or cache else nullcontext():
            found = measure(cases, answers(pair, cases, "", report))
        name = Path(model or NAME).name
        yield {"suite": "scenes", "seed": seed, "reduce": spec, "cache": cache, "model": name,
               "score": found["accuracy"], **found}  # fmt: skip


@training.one_line
def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Command line; prints one JSON object."""
    parser = training.RecipeParser(__doc__)
    parser.add_argument("--model", required=True, help="checkpoint folder, or a name: tiny-video")
    parser.add_argument("--n", type="count", default=400, help="questions")
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--control", choices=CONTROLS, default="", help="other media than its own")
    note = 'of questions; "absent" asks about what is not there, "alone" about "the object", …'
    parser.add_argument(
        "--kinds",
        nargs="+",
        choices=(*TURNS, ABSENT, *LOOSE, FREELY, EVERYDAY, outside.FIGURES),
        default=TURNS,
        help=note,
    )
    training.device_option(parser)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    choices = options.model, options.n, options.seed, options.control
    found = run_scenes(*choices, kinds=options.kinds, device=options.device)
    found = {"model": Path(options.model).name, **found}
    print(json.dumps(found))
    return found


if __name__ == "__main__":
    main()
