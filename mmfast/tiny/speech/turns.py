"""Trains the embedded ear for ends of turns, and generates the turns that it is judged by.

`python -m mmfast.tiny.speech.turns` makes recordings of espeak-ng with pauses inside, runs the
detector of speech over them, and trains two small networks on what it calls silences.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from mmfast.frontends.audio.activity import WINDOW, VoiceActivity
from mmfast.frontends.audio.turns import TurnCutter
from mmfast.models.speech.embedded import load_speech
from mmfast.models.speech.turn_end import (
    BANDS,
    FRAMES,
    SILENCES,
    Overheard,
    ProsodyNet,
    known_facts,
    prosody,
)
from mmfast.ops.audio import HOP
from mmfast.tiny import training
from mmfast.tiny.speech.dialogue import dialogue
from mmfast.tiny.speech.recordings import QUIET, RATE, EspeakVoice, noise, say
from mmfast.tiny.speech.text import (
    HEARD_NAMES,
    Split,
    groups,
    heard_voice,
    question,
    sentence,
)

PauseKind = Literal["word", "comma", "hesitation"]
PAUSE = (0.2, 1.2)  # seconds
HESITATIONS = ("um", "uh", "so", "and", "well", "let me see")
HELD_VOICES = ("en-us+m2", "en-us+m7", "en-us+f4")  # of the evaluation alone
MURMURS = (
    "yes", "yeah", "okay", "right", "mm hmm", "uh huh", "uh-huh", "mhm", "hmm", "i see", "sure",
    "aha", "oh", "yes yes", "okay okay", "oh i see",
)  # fmt: skip
# Short calls for the floor, many of which begin or rhyme like a backchannel.
CALLS = (
    "stop", "wait", "no", "what", "hello", "help", "red", "left", "light", "eight", "why", "who",
    "you", "go on", "pause", "louder", "repeat", "sorry", "one", "ten", "green", "go back", "next",
    "hold on", "no no", "yes but", "okay stop", "say what", "the red one", "not that", "me too",
    "please", "enough", "again", "how", "where", "i said", "it's wrong", "cancel", "up", "a shoe",
)  # fmt: skip


class Pause(NamedTuple):
    """A silence inside a turn: samples `[start, stop)` and the words before it."""

    start: int
    stop: int
    kind: PauseKind


@dataclass(frozen=True)
class SpokenTurn:
    """A turn with its pauses; `words` are texts with the sample behind each."""

    pcm: NDArray[np.float32]
    text: str
    words: tuple[tuple[str, int], ...]
    pauses: tuple[Pause, ...]

    def before(self, sample: int) -> str:
        """Return what was said before a sample, to 80 ms."""
        return " ".join(word for word, stop in self.words if stop <= sample + 0.08 * RATE)


def turn_voice(rng: np.random.Generator, split: Split) -> EspeakVoice:
    """A voice to be heard; those of the evaluation are never trained on."""
    names = [n for n in HEARD_NAMES if (n in HELD_VOICES) == (split == "eval")]
    return replace(heard_voice(rng), name=names[int(rng.integers(len(names)))])


def turn_text(rng: np.random.Generator, split: Split) -> str:
    """A question, a sentence or what a user says in a conversation, as one sentence."""
    draw = rng.random()
    if draw < 0.45:
        text = question(rng, split)
    elif draw < 0.7:
        text = sentence(rng, split)
    else:
        text = dialogue(rng, split)[0].text
    return text[:-1].replace(".", ",").replace("?", ",") + text[-1]


def planned(text: str, rng: np.random.Generator) -> tuple[list[str], dict[int, PauseKind]]:
    """Words and marks of a text that pauses, and the kinds of pauses behind some of them."""
    parts, kinds = groups(text), dict[int, PauseKind]()
    for _ in range(int(rng.choice(4, p=(0.3, 0.35, 0.25, 0.1)))):
        free = [
            i
            for i in range(len(parts) - 2)
            if not {i - 1, i, i + 1} & kinds.keys() and parts[i] not in ",.?"
        ]
        if not free:
            break
        at, draw = free[int(rng.integers(len(free)))], rng.random()
        kind: PauseKind = "word" if draw < 0.45 else "comma" if draw < 0.7 else "hesitation"
        added = [","] if kind != "word" and parts[at + 1] != "," else []
        if kind == "hesitation":
            said = HESITATIONS[int(rng.integers(len(HESITATIONS)))].split()
            added = [*said, ","] if parts[at + 1] != "," else [",", *said]
        elif parts[at + 1] == ",":
            kind = "comma"
        place = at + (kind != "word") * (len(added) + (parts[at + 1] == ","))
        parts[at + 1 : at + 1] = added
        kinds = {(k if k <= at else k + len(added)): v for k, v in kinds.items()} | {place: kind}
    return parts, kinds


def spoken_turn(text: str, voice: EspeakVoice, rng: np.random.Generator) -> SpokenTurn:
    """Say a text with pauses of `PAUSE` seconds in it."""
    parts, kinds = planned(text, rng)
    said = say(" ".join(parts).replace(" ,", ",").replace(" .", ".").replace(" ?", "?"), voice)
    pcm = said.pcm.numpy()
    out, words, pauses, length = list[NDArray[Any]](), list[tuple[str, int]](), list[Pause](), 0
    for i, word in enumerate(said.words):
        piece = pcm[word.start : word.stop].copy()
        if kinds.get(i) == "word":
            edge = min(len(piece), RATE // 25)  # a breath stops no sound within a sample
            piece[len(piece) - edge :] *= np.linspace(1, 0, edge, dtype=np.float32)
        out.append(piece)
        length += len(piece)
        if word.text[0] not in ",.?":
            words.append((word.text, length))
        if i in kinds:
            joined = np.concatenate(out)
            loud = int(np.flatnonzero(np.abs(joined) > QUIET)[-1]) + 1
            rest = max(0, round(float(rng.uniform(*PAUSE)) * RATE) - (length - loud))
            out = [joined, np.zeros(rest, np.float32)]
            length += rest
            pauses.append(Pause(loud, length, kinds[i]))
    whole = np.concatenate(out)
    end = int(np.flatnonzero(np.abs(whole) > QUIET)[-1]) + 1
    return SpokenTurn(whole[:end].astype(np.float32), text, tuple(words), tuple(pauses))


def recorded(pcm: NDArray[Any], rng: np.random.Generator) -> Tensor:
    """A sound in the noise and at the level of some room."""
    level = float(np.sqrt(np.mean(pcm[np.abs(pcm) > QUIET] ** 2)))
    loud = level * 10 ** (-rng.uniform(14, 45) / 20)
    noisy = pcm + loud * noise(len(pcm), float(rng.choice([0.0, 0.5, 1.0])), rng)
    return torch.from_numpy(np.clip(noisy * 10 ** (rng.uniform(-18, 3) / 20), -1, 1)).float()


class PlacedTurn(NamedTuple):
    """A turn in a stream, from its first sample on."""

    start: int
    turn: SpokenTurn

    @property
    def stop(self) -> int:
        """Sample behind its last sound."""
        return self.start + len(self.turn.pcm)


def stream(
    turns: Sequence[SpokenTurn], rng: np.random.Generator, gap: float = 2.5
) -> tuple[Tensor, list[PlacedTurn]]:
    """Turns of one speaker with `gap` seconds after each, in noise, and their places."""
    parts, placed, at = list[NDArray[Any]](), list[PlacedTurn](), 0
    for turn in turns:
        lead = np.zeros(round(rng.uniform(0.3, 0.6) * RATE), np.float32)
        placed.append(PlacedTurn(at + len(lead), turn))
        parts += [lead, turn.pcm, np.zeros(round(gap * RATE), np.float32)]
        at += sum(len(part) for part in parts[-3:])
    return recorded(np.concatenate(parts), rng), placed


class Example(NamedTuple):
    """A silence as an ear meets it: the turn so far `[n]`, and seconds until speech goes on."""

    pcm: Tensor
    silence: float  # infinite at the end of a turn
    words: str
    whole: bool


class _Known:
    """A detector that gives probabilities computed before."""

    def __init__(self, voices: Tensor) -> None:
        self.voices = voices

    def start(self) -> Any:
        return 0

    def step(self, state: Any, window: Tensor) -> tuple[Any, Tensor]:
        return state + 1, self.voices[state].reshape(1, 1)


def heard_before(pcm: Tensor) -> Any:
    """Return a detector that knows the probabilities of one sound `[n]`, for several ears."""
    activity = VoiceActivity()
    return _Known(activity.step(activity.start(), pcm[None])[1][0])


def examples(streams: Sequence[tuple[Tensor, list[PlacedTurn]]]) -> Iterator[list[Example]]:
    """Silences of streams of one turn each, as an ear meets them."""
    longest = -(-max(len(pcm) for pcm, _ in streams) // WINDOW) * WINDOW
    stack = torch.stack([F.pad(pcm, (0, longest - len(pcm))) for pcm, _ in streams])
    activity = VoiceActivity()
    _, voices = activity.step(activity.start(len(stack)), stack)
    for (pcm, placed), voice in zip(streams, voices, strict=True):
        yield list(_silences(pcm, placed[0], voice))


def _silences(pcm: Tensor, placed: PlacedTurn, voice: Tensor) -> Iterator[Example]:
    met = list[Tensor]()
    cutter = TurnCutter(
        activity=_Known(voice),  # type: ignore[arg-type]
        silence_duration_ms=SILENCES[0],
        patience=lambda said: met.append(said) or 60_000,  # type: ignore[func-returns-value]
    )
    state, open_ = cutter.start(), None
    for window in pcm[: len(pcm) // WINDOW * WINDOW].split(WINDOW):
        state, _ = cutter.step(state, window)
        if open_ is not None and state.gate.quiet_from != open_:
            yield _example(met.pop(0), (state.heard - open_) / RATE, placed, open_)
            open_ = None
        if len(met) and open_ is None:
            open_ = state.pause[0]
    if open_ is not None and open_ > placed.stop - 0.2 * RATE:
        yield _example(met.pop(0), float("inf"), placed, open_)


def _example(pcm: Tensor, silence: float, placed: PlacedTurn, at: int) -> Example:
    over = silence == float("inf")
    return Example(
        pcm, silence, placed.turn.before(len(placed.turn.pcm) if over else at - placed.start), over
    )


class TurnLesson(NamedTuple):
    """Examples as tensors; targets of silences that were over before count nothing."""

    x: Tensor  # [N, 23, 160]
    facts: Tensor  # [N, 9]
    target: Tensor  # [N, K]
    counted: Tensor  # [N, K]


def prosody_of(found: Sequence[Example]) -> Tensor:
    """Prosody `[N, 23, 160]` of the turns so far."""
    length = FRAMES * HOP
    ends = [F.pad(each.pcm, (max(0, length - len(each.pcm)), 0))[-length:] for each in found]
    return torch.cat([prosody(torch.stack(ends[at : at + 64])) for at in range(0, len(ends), 64)])


def ending_lesson(
    found: Sequence[Example], ending: Callable[[str], float], rng: np.random.Generator
) -> TurnLesson:
    """Examples twice: as an ear without words meets them, and with words, some of them misheard.

    `ending` gives the probability that people say no more; some listeners do not know it.
    """
    spans = torch.tensor(SILENCES) / 1000
    x = prosody_of(found)
    counted = spans < torch.tensor([[each.silence] for each in found])
    target = torch.tensor([[float(each.whole)] for each in found]).expand(-1, len(SILENCES))
    unheard = [known_facts(len(each.pcm)) for each in found]
    heard = [known_facts(len(each.pcm), _judged(each, ending, rng)) for each in found]
    facts = torch.tensor(unheard + heard)
    return TurnLesson(x.repeat(2, 1, 1), facts, target.repeat(2, 1), counted.float().repeat(2, 1))


def _judged(each: Example, ending: Callable[[str], float], rng: np.random.Generator) -> Overheard:
    """Words as they are heard: recognisers put full stops where none is, and mishear ends."""
    words = each.words + "." * (rng.random() < (0.4 if each.whole else 0.15))
    if rng.random() < 0.1:
        words = " ".join(words.split()[:-1])
    sure = 0.9 if rng.random() < 0.15 else 1.0
    return Overheard(words, sure, ending(words) if words and rng.random() < 0.7 else None)


def murmurs(count: int, split: Split, seed: int) -> Iterator[tuple[SpokenTurn, bool]]:
    """Short utterances, and whether each is a backchannel."""
    rng = np.random.default_rng([seed, 93, split == "eval"])
    for number in range(count):
        kind = number % 2 == 0
        texts = MURMURS if kind else CALLS
        text = texts[int(rng.integers(len(texts)))]
        said = say(text + ("." if rng.random() < 0.8 else ","), turn_voice(rng, split))
        pcm = said.pcm.numpy()
        end = int(np.flatnonzero(np.abs(pcm) > QUIET)[-1]) + 1
        yield SpokenTurn(pcm[:end], text, (), ()), kind


def spoken_turns(count: int, split: Split, seed: int) -> Iterator[SpokenTurn]:
    """Turns with pauses; the evaluation has other texts and other voices."""
    rng = np.random.default_rng([seed, 92, split == "eval"])
    for _ in range(count):
        yield spoken_turn(turn_text(rng, split), turn_voice(rng, split), rng)


def varied(x: Tensor, draw: torch.Generator) -> Tensor:
    """Prosody `[B, 23, 160]` as other voices, lines and rooms have it, some of it without its past.

    Bands are moved by one, coloured and blurred by noise.
    """
    rows, channels, frames = x.shape
    bands, rest = x[:, :BANDS], x[:, BANDS:]
    move = torch.randint(-1, 2, (rows, 1, 1), generator=draw)
    places = (torch.arange(BANDS)[:, None] + move).clamp(0, BANDS - 1).expand(-1, -1, frames)
    colour = torch.randn(rows, 1, BANDS // 2, generator=draw)
    colour = F.interpolate(colour, BANDS, mode="linear").mT  # [B, 20, 1]
    bands = bands.gather(1, places) + 0.15 * colour
    x = torch.cat([bands, rest], 1)
    x = x + 0.1 * torch.randn(rows, channels, frames, generator=draw)
    kept = torch.randint(40, 2 * frames, (rows, 1, 1), generator=draw)  # of half of them, all
    return torch.where(torch.arange(frames) < frames - kept, -1.0, x)


class TurnTask(training.Task):
    """A network that learns one lesson."""

    def __init__(self, net: ProsodyNet, lesson: TurnLesson, held: TurnLesson, seed: int) -> None:
        self.net, self.lesson, self.held = net, lesson, held
        self.draw = torch.Generator().manual_seed(seed)
        self.optimiser = training.Optimiser((), net.parameters(), 3e-3, decay=0.1)

    def batches(self, step: int, done: float) -> list[Any]:
        """Return one batch, varied."""
        self.net.train()
        rows = torch.randint(len(self.lesson.x), (128,), generator=self.draw)
        batch = TurnLesson(*(part[rows] for part in self.lesson))
        return [batch._replace(x=varied(batch.x, self.draw))]

    def loss(self, batch: Any) -> tuple[Tensor, training.Figures]:
        """Cross-entropy of what is counted."""
        logits = self.net(batch.x, batch.facts)
        each = F.binary_cross_entropy_with_logits(logits, batch.target, reduction="none")
        total = (each * batch.counted).sum() / batch.counted.sum()
        return total, {"loss": float(total.detach())}

    @torch.no_grad()
    def look(self) -> training.Figures:
        """Loss and share of right decisions on other voices and texts."""
        self.net.eval()
        total, _ = self.loss(self.held)
        right = (self.net(self.held.x, self.held.facts) > 0) == (self.held.target > 0.5)
        share = (right * self.held.counted).sum() / self.held.counted.sum()
        return {"loss": round(float(total), 4), "right": round(float(share), 4)}


BATCH = 64  # streams that the detector hears together


def _batched(turns: Iterator[SpokenTurn], seed: int, again: int = 1) -> Iterator[list[Example]]:
    """Silences of turns, each in several rooms."""
    rng = np.random.default_rng([seed, 95])
    waiting = list[tuple[Tensor, list[PlacedTurn]]]()
    for turn in turns:
        for _ in range(again):
            waiting.append(stream([turn], rng, 1.6))
        if len(waiting) >= BATCH:
            yield from examples(waiting)
            waiting = []
    if waiting:
        yield from examples(waiting)


def endings(count: int, split: Split, seed: int) -> list[Example]:
    """Silences of so many turns."""
    return [each for part in _batched(spoken_turns(count, split, seed), seed) for each in part]


def brief_examples(count: int, split: Split, seed: int) -> list[Example]:
    """So many short utterances, in two rooms each; `whole` are backchannels."""
    said = list(murmurs(count, split, seed))
    met = _batched((turn for turn, _ in said), seed, 2)
    kinds = [kind for _, kind in said for _ in range(2)]
    return [each[0]._replace(whole=kind) for kind, each in zip(kinds, met, strict=True) if each]


def brief_lesson(found: Sequence[Example]) -> TurnLesson:
    """Short utterances, and whether each is a backchannel."""
    x = prosody_of(found)
    facts = torch.tensor([known_facts(len(each.pcm)) for each in found])
    target = torch.tensor([[float(each.whole)] for each in found])
    return TurnLesson(x, facts, target, torch.ones_like(target))


def save_networks(folder: Path, nets: dict[str, ProsodyNet]) -> None:
    """Write the networks in half precision, and what reads them needs to know."""
    from safetensors.torch import save_file

    weights = {f"{n}.{k}": v.half() for n, net in nets.items() for k, v in net.state_dict().items()}
    save_file({k: v.contiguous() for k, v in weights.items()}, folder / "model.safetensors")
    (folder / "model.safetensors").chmod(0o644)
    outputs = {name: net.out.out_features for name, net in nets.items()}
    config = {"model_type": "mmfast_turns", "silences": SILENCES, "outputs": outputs}
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


PART = 500  # turns that are drawn from one seed


def make_lesson(name: str, split: Split, options: argparse.Namespace) -> TurnLesson:
    """Recordings of a network, a fifth as many for the evaluation."""
    share = 1.0 if split == "train" else 0.2
    if name == "backchannel":
        return brief_lesson(brief_examples(round(share * options.murmurs), split, options.seed))
    found = list[Example]()
    for part, at in enumerate(range(0, round(share * options.turns), PART)):
        count = min(PART, round(share * options.turns) - at)
        found += endings(count, split, 100 * options.seed + part)
    ending = load_speech(options.speech).ending
    return ending_lesson(found, ending, np.random.default_rng([options.seed, 96]))


@training.one_line
def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = training.recipe_parser(__doc__, "tiny-turns")
    parser.add_argument("--speech", type="present", help="speech model, not the embedded one")
    parser.add_argument("--turns", type="count", default=2000, help="turns with pauses")
    parser.add_argument("--murmurs", type="count", default=320, help="short utterances")
    parser.add_argument("--steps", type=int, default=1000)
    options = parser.parse_args(argv)
    log = training.Log(options.out)
    log.start(seed=options.seed, turns=options.turns, murmurs=options.murmurs)
    torch.manual_seed(options.seed)
    nets = {"over": ProsodyNet(len(SILENCES)), "backchannel": ProsodyNet(1)}
    for name, net in nets.items():
        with log.stage(f"{name} recordings") as row:
            lesson, held = (make_lesson(name, split, options) for split in ("train", "eval"))
            row["examples"], row["held"] = len(lesson.x), len(held.x)
        task = TurnTask(net, lesson, held, options.seed)
        training.train(task, training.Course(name, steps=options.steps, every=100), log)
    save_networks(options.out, nets)
    log.end()


if __name__ == "__main__":
    main()
