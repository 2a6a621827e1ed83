"""End of a turn by words and by prosody, and backchannels by their sound."""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmfast.models.loading import embedded_path
from mmfast.ops.audio import HOP, RATE, log_mel

# Probability of the last words, below which the ear has guessed them, and above which it has not.
GUESSED, SURE = 0.8, 0.95


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Words that end no English sentence; that end one only behind a question word, as "where are you
# from" does; or behind one further in, or yes or no, as "tell me what it is" does; and words that
# are an answer alone.
_OPEN = _words(
    """
    a an the my your his its our their every and or nor but because although while if unless
    until than as very really quite um uh er erm hmm which what's where's i'm i'd i'll i've
    """
)
_STRANDED = _words(
    """
    of to at from into onto with without for by between about near behind beside above below under
    around i we they he she want wants need needs this these like be been being
    """
)
_AUXILIARY = _words(
    """
    is are was were am do does did has have had will would can could should shall may might must
    """
)
_ASKING = _words("what which who whom whose where when why how")
_ALONE = _words(
    """
    yes no yeah yep nope okay ok sure right stop wait go thanks thank hello hi hey bye goodbye
    please sorry continue cancel repeat again help
    """
)


class Overheard(NamedTuple):
    """Words that a listener understood of a turn so far, and what it knows of them."""

    text: str
    sure: float = 1.0  # probability of the last words, in the sound
    ending: float | None = None  # probability that people say no more behind these words


def finished(text: str, sure: float = 1.0) -> bool | None:
    """Tell whether a sentence as it was heard so far is whole; None where that is unclear.

    `sure` is the probability of its last words: an ear that has learned whole sentences guesses the
    end of one that breaks off. A sentence in another language than English is judged by its marks
    and its length alone.
    """
    words, end = re.findall(r"[\w']+", text.lower()), text.rstrip()[-1:]
    if not words:
        return None
    last, asking = words[-1], [n for n, word in enumerate(words) if word in _ASKING]
    wished = words[-2:] in (["would", "like"], ["i'd", "like"])
    if (
        sure < GUESSED
        or end in ",:;-\u2013\u2014\u2026"
        or text.rstrip().endswith("..")
        or last in _OPEN
        or wished
    ):
        return False
    if last in _STRANDED and not asking:
        return False
    if last in _STRANDED and end != "?":
        return None
    if last in _AUXILIARY:
        return None if words[0] in ("yes", "no") or asking[-1:] > [0] else False
    if sure < SURE:
        return None
    if end in ".?!\u3002\uff1f\uff01" or (len(words) <= 2 and words[0] in _ALONE):
        return True
    return True if len(words) > 2 else None


# What a listener says without wanting the floor.
BACKCHANNELS = _words("yes yeah yep okay ok right sure mhm mm hmm hm uh huh uhhuh aha ah i see oh")


def is_backchannel(text: str) -> bool:
    """Tell whether all words of a text are of the kind that says "go on"."""
    words = re.findall(r"[a-z]+", text.lower())
    return 0 < len(words) <= 4 and BACKCHANNELS.issuperset(words)


FRAMES = 160  # of 10 ms: what is heard before a silence
BANDS, CHANNELS = 20, 23
FACTS = 7  # words unheard, whole, unclear, broken off; length of the turn; ending, if known
HASHES, WIDTH = 512, 6  # last words, and pairs of them, that the network tells apart
STATES: tuple[bool | str | None, ...] = ("unheard", True, None, False)
# Milliseconds of silence for each of which the network gives a score.
SILENCES = tuple(range(128, 1281, 96))
_WINDOW, _SHORTEST, _LONGEST = 640, RATE // 400, RATE // 60  # of pitch: 60 to 400 Hz


def prosody(pcm: Tensor) -> Tensor:
    """Return bands, energy, pitch and voicing `[B, 23, 160]` of the ends of sounds `[B, n]`.

    All are relative to the loudest and to the usual pitch, so that neither level nor voice matters.
    """
    length = FRAMES * HOP
    pcm = F.pad(pcm, (max(0, length - pcm.shape[-1]), 0))[..., -length:]
    bands = log_mel(pcm, torch.float32).unflatten(-1, (BANDS, -1)).mean(-1)  # [B, T, 20]
    energy = bands.mean(-1, keepdim=True)
    top = energy.topk(8, dim=1).values.mean(1, keepdim=True)
    lag, voiced = _pitch(pcm)
    sure = (voiced > 0.5) & (energy[..., 0] > top[..., 0] - 3)
    usual = torch.where(sure, lag, torch.nan).nanmedian(-1, keepdim=True).values.nan_to_num(0.0)
    pitch = torch.where(sure, (usual - lag).clamp(-1, 1), 0.0)
    parts = ((bands - top) / 4, (energy - top) / 4, 1.5 * pitch[..., None], voiced[..., None])
    return torch.cat(parts, -1).clamp(-1.75, 1.75).mT.contiguous()


def _pitch(pcm: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log2 of the period in samples, and the strength of voicing, `[B, T]`."""
    around = (_WINDOW - HOP) // 2
    frames = F.pad(pcm, (around, around)).unfold(-1, _WINDOW, HOP)  # [B, T, 640]
    power = torch.fft.rfft(frames - frames.mean(-1, keepdim=True), 2 * _WINDOW).abs().square()
    repeats = torch.fft.irfft(power)[..., : _LONGEST + 1]
    shares = 1 - torch.arange(_LONGEST + 1) / _WINDOW  # of the window that overlaps itself
    strength = repeats / shares / repeats[..., :1].clamp(min=1e-6)
    # two periods repeat as well as one: the shorter wins
    early = strength - 0.2 * torch.arange(_LONGEST + 1) / _LONGEST
    best = early[..., _SHORTEST:].argmax(-1, keepdim=True) + _SHORTEST
    return best[..., 0].float().log2(), strength.gather(-1, best)[..., 0].clamp(0, 1)


class ProsodyNet(nn.Module):
    """Three convolutions over `prosody` and two layers over their end; 18,000 parameters."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        sizes = (CHANNELS, 24, 24, 16)
        self.convolutions = nn.ModuleList(
            nn.Conv1d(a, b, 5, stride=2, padding=2) for a, b in pairwise(sizes)
        )
        self.dropout = nn.Dropout(0.4)  # few voices are trained on
        self.words = nn.Embedding(HASHES, WIDTH)
        self.hidden = nn.Linear(sizes[-1] * FRAMES // 8 + FACTS + 2 * WIDTH, 32)
        self.out = nn.Linear(32, outputs)

    def forward(self, x: Tensor, facts: Tensor) -> Tensor:
        """Return logits `[B, outputs]` of `prosody` `[B, 23, 160]` and facts `[B, 9]`."""
        for convolution in self.convolutions:
            x = F.gelu(convolution(x))
        words = self.words(facts[:, FACTS:].long()).flatten(1)  # [B, 12]
        x = self.dropout(torch.cat([x.flatten(1), words], 1))
        facts = facts[:, :FACTS]
        found: Tensor = self.out(F.gelu(self.hidden(torch.cat([x, facts], 1))))
        return found


def known_facts(samples: int, said: Overheard | None = None) -> list[float]:
    """Return what else is known of a turn of so many samples, as numbers.

    `said` is what was understood of it, None where nobody wrote it down.
    """
    whole = "unheard" if said is None else finished(said.text, said.sure)
    states = [float(whole is state) for state in STATES]
    ending = [0.0, 0.0]
    if said is not None and said.ending is not None:
        chance = min(max(said.ending, 1e-3), 1 - 1e-3)
        ending = [1.0, math.log(chance / (1 - chance)) / 4]
    words = [] if said is None else re.findall(r"[\w']+", said.text.lower())[-2:]
    last = [_hashed(" ".join(words[at:])) for at in (-1, -2)]
    return [*states, math.log1p(samples / RATE), *ending, *last]


def _hashed(words: str) -> float:
    """Number of one or two words; 0 where there are none."""
    return float(1 + zlib.crc32(words.encode()) % (HASHES - 1)) if words else 0.0


class TurnEnd:
    """Scores of the embedded networks: whether a turn is over, and whether it is a backchannel."""

    def __init__(self, over: ProsodyNet, backchannel: ProsodyNet) -> None:
        self.over, self.backchannel = over.eval(), backchannel.eval()

    @torch.no_grad()
    def scores(self, pcm: Tensor, said: Overheard | None = None) -> list[float]:
        """Return the probability that a turn `[n]` is over, for each silence of `SILENCES`.

        `said` is as of `known_facts`.
        """
        facts = torch.tensor([known_facts(len(pcm), said)])
        scores: list[float] = self.over(prosody(pcm[None]), facts)[0].sigmoid().tolist()
        return scores

    def patience(
        self, pcm: Tensor, said: Overheard | None, wanted: Sequence[float], most: int
    ) -> int:
        """Return the milliseconds of silence after which a score is reached, at most `most`.

        `wanted` are the scores for the shortest silence, for the next …, the last for the rest.
        """
        scores = self.scores(pcm, said)
        least = [wanted[min(i, len(wanted) - 1)] for i in range(len(scores))]
        found = zip(SILENCES, scores, least, strict=True)
        return min(next((ms for ms, score, each in found if score >= each), most), most)

    @torch.no_grad()
    def murmur(self, pcm: Tensor) -> float:
        """Return the probability that a short sound `[n]` wants no answer."""
        facts = torch.tensor([known_facts(len(pcm))])
        return float(self.backchannel(prosody(pcm[None]), facts)[0, 0].sigmoid())


@cache
@torch.inference_mode(False)  # it outlives the call
def load_turn_end() -> TurnEnd:
    """Load the embedded networks; ModelError where there are none."""
    from safetensors.torch import load_file

    home = embedded_path("tiny-turns")
    weights = load_file(home / "model.safetensors")
    nets = []
    for name, outputs in json.loads((home / "config.json").read_text())["outputs"].items():
        net = ProsodyNet(outputs)
        own = [key for key in weights if key.startswith(f"{name}.")]
        net.load_state_dict({key.removeprefix(f"{name}."): weights[key].float() for key in own})
        nets.append(net)
    return TurnEnd(*nets)
