"""Numbers of workers that encode, prefill and decode, by a queueing model and its simulation.

A request passes three stages. Workers that do one stage each do not hold up a running answer with
the prompts of others; workers that do all three share the load more evenly (DistServe, 2401.09670;
EPD, 2501.05460). Which is better depends on the load, and so does the number of each.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mmfast.planner.queueing import poisson, simulate

STAGES = ("encode", "prefill", "decode")
NEAR = 1.05  # strains within this factor are equal
COMBINED = "combined"  # role of a worker that does all stages of its requests


@dataclass(frozen=True)
class StageLoad:
    """The work of requests at one stage.

    `seconds` is the mean of a request alone, `spread` the variance over its square, and `gain[n-1]`
    the work in seconds alone that a worker does in a second on n requests at once; no more than
    `len(gain)` share a worker.
    """

    name: str
    seconds: float
    spread: float = 1.0
    gain: tuple[float, ...] = (1.0,)


@dataclass(frozen=True)
class RoleTargets:
    """Longest times that users accept, as multiples of those of a request alone."""

    first: float = 5.0  # to the first token
    step: float = 1.5  # of a token


TARGETS = RoleTargets()


@dataclass(frozen=True)
class RoleAdvice:
    """Workers by role, and what the model expects of them."""

    roles: Mapping[str, int]
    first_seconds: float  # to the first token
    step_stretch: float  # time of a token over that of a request alone
    strain: float  # the larger share of a target that is used; above 1 one is missed


def pooled(gain: Sequence[float], workers: int) -> list[float]:
    """Return the gain of several workers, among which requests are shared out evenly."""
    own, found = (0.0, *gain), list[float]()
    for n in range(1, workers * len(gain) + 1):
        each, more = divmod(n, workers)
        rest = own[each + 1] if more else 0.0
        found.append((workers - more) * own[each] + more * rest)
    return found


def together(loads: Sequence[StageLoad]) -> StageLoad:
    """Return the load of a worker that does all stages; only decoding gains by a batch."""
    *prompt, decode = loads
    before, seconds = sum(load.seconds for load in prompt), sum(load.seconds for load in loads)
    spread = sum(load.spread * load.seconds**2 for load in loads) / seconds**2
    gain = tuple(seconds / (before + decode.seconds / each) for each in decode.gain)
    return StageLoad(COMBINED, seconds, spread, gain)


def stage_seconds(load: StageLoad, rate: float, workers: int) -> float:
    """Return the mean seconds at a stage, its queue included; infinite beyond its capacity.

    A chain of births and deaths whose rates are those of the batch; the queue behind it counts as
    Allen and Cunneen have it for M/G/c, which is exact for M/M/c and M/G/1.
    """
    speeds = [each / load.seconds for each in pooled(load.gain, workers)]
    if rate <= 0:
        return load.seconds
    full = rate / speeds[-1]
    if full >= 1:
        return math.inf
    weights = [1.0]
    for speed in speeds:
        weights.append(weights[-1] * rate / speed)
    tail = weights[-1] * full / (1 - full)  # all places are taken, and some wait
    served = sum(n * weight for n, weight in enumerate(weights)) + len(speeds) * tail
    queued = tail / (1 - full) * (1 + load.spread) / 2
    return (served + queued) / (sum(weights) + tail) / rate


def capacity(roles: Mapping[str, int], loads: Sequence[StageLoad]) -> float:
    """Return the requests a second that workers can serve at most."""
    if COMBINED in roles:
        whole = together(loads)
        return roles[COMBINED] * whole.gain[-1] / whole.seconds
    return min(roles[load.name] * load.gain[-1] / load.seconds for load in loads)


def predicted(
    roles: Mapping[str, int],
    loads: Sequence[StageLoad],
    rate: float,
    targets: RoleTargets = TARGETS,
) -> RoleAdvice:
    """Return what the model expects of workers at a rate of requests a second."""
    *prompt, decode = loads
    alone = sum(load.seconds for load in prompt)
    if COMBINED in roles:
        whole = together(loads)
        stretch = stage_seconds(whole, rate, roles[COMBINED]) / whole.seconds
        first = alone * stretch
    else:
        first = sum(stage_seconds(load, rate, roles[load.name]) for load in prompt)
        stretch = stage_seconds(decode, rate, roles[decode.name]) / decode.seconds
    strain = max(first / alone / targets.first, stretch / targets.step)
    return RoleAdvice(dict(roles), first, stretch, strain)


def choices(workers: int) -> list[dict[str, int]]:
    """Return all ways to give workers their roles; every stage needs one."""
    found: list[dict[str, int]] = [{COMBINED: workers}]
    for encode in range(1, workers - 1):
        for prefill in range(1, workers - encode):
            counts = (encode, prefill, workers - encode - prefill)
            found.append(dict(zip(STAGES, counts, strict=True)))
    return found


def advise(
    loads: Sequence[StageLoad],
    rate: float,
    workers: int,
    targets: RoleTargets = TARGETS,
) -> RoleAdvice:
    """Return the roles that strain the targets least at a rate of requests a second.

    Of those that strain them about as little, the ones that answer soonest; where no roles can
    serve that rate, those that serve most.
    """
    found = [predicted(roles, loads, rate, targets) for roles in choices(workers)]
    best = min(each.strain for each in found)
    if math.isinf(best):
        return max(found, key=lambda each: capacity(each.roles, loads))

    def seconds(each: RoleAdvice) -> float:
        return each.first_seconds + each.step_stretch * loads[-1].seconds

    return min((each for each in found if each.strain <= best * NEAR), key=seconds)


def simulated(
    roles: Mapping[str, int],
    loads: Sequence[StageLoad],
    rate: float,
    count: int = 5000,
    seed: int = 0,
) -> dict[str, float]:
    """Simulate requests that come at random; return the mean seconds of each stage.

    What leaves a stage arrives at the next, in the order in which it left.
    """
    # Not from the numbers of the arrivals: work would be long where nobody comes.
    dice, times = random.Random(f"work {seed}"), poisson(rate, count, seed)
    stages = [(together(loads), roles[COMBINED])] if COMBINED in roles else []
    stages = stages or [(load, roles[load.name]) for load in loads]
    found: dict[str, float] = {}
    for load, workers in stages:
        work = [_drawn(load, dice) for _ in times]
        told = simulate(times, work, pooled(load.gain, workers))
        found[load.name] = sum(told.seconds) / len(told.seconds)
        times = [at for _, at in told.ends]
    return found


def _drawn(load: StageLoad, dice: random.Random) -> float:
    if not load.spread:
        return load.seconds
    return dice.gammavariate(1 / load.spread, load.seconds * load.spread)


def moves(now: Sequence[str], wanted: Mapping[str, int]) -> dict[int, str]:
    """Return the new roles of as few workers as possible, by number."""
    missing, free = dict(wanted), list[int]()
    for number, role in enumerate(now):
        if missing.get(role, 0):
            missing[role] -= 1
        else:
            free.append(number)
    new = [role for role, count in missing.items() for _ in range(count)]
    return dict(zip(free, new, strict=True))
