"""When to speak and when to be silent: rising edges with hysteresis, and not too often."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mmfast.core.errors import MmfastError, unknown


@dataclass(frozen=True)
class Rule:
    """When to speak.

    Attributes:
        threshold: Probability from which it speaks.
        release: Probability at which it is ready to speak again: what goes on is told once, and
            a value that trembles around the threshold does not ring all the time.
        every: Seconds of the stream between two looks.
        pause: Least seconds of the stream between two events.

    Raises:
        MmfastError: A value out of range.
    """

    threshold: float = 0.6
    release: float = 0.4
    every: float = 1.0
    pause: float = 5.0

    @classmethod
    def of(cls, knobs: Mapping[str, float]) -> Rule:
        """A rule of knobs by name; without `release` it is two thirds of the threshold.

        Raises:
            MmfastError: An unknown name, or a value out of range.
        """
        for name in knobs:
            if name not in cls.__dataclass_fields__:
                raise MmfastError(unknown("knob", name, cls.__dataclass_fields__))
        threshold = knobs.get("threshold", cls.threshold)
        return cls(**{"release": threshold * 2 / 3, **knobs})

    def __post_init__(self) -> None:
        if not 0 < self.threshold <= 1 or not 0 <= self.release <= self.threshold:
            raise MmfastError(
                f"threshold={self.threshold!r}, release={self.release!r}: give probabilities with "
                "release at most threshold, such as 0.6 and 0.4"
            )
        if not self.every >= 0 or not self.pause >= 0:
            raise MmfastError(f"every={self.every!r}, pause={self.pause!r}: give seconds from 0")


@dataclass(frozen=True)
class Ready:
    """Where a rule stands; a value.

    Attributes:
        armed: The probability has been low since the last event.
        told: Seconds of the last event.
        looked: Seconds of the last look.
    """

    armed: bool = True
    told: float | None = None
    looked: float | None = None

    def due(self, rule: Rule, time: float) -> bool:
        """Whether it is time for a look."""
        return self.looked is None or time - self.looked >= rule.every

    def step(self, rule: Rule, time: float, probability: float) -> tuple[Ready, bool]:
        """Take what a look has found; says whether to speak now."""
        if probability < rule.threshold:
            return Ready(self.armed or probability <= rule.release, self.told, time), False
        rested = self.told is None or time - self.told >= rule.pause
        if self.armed and rested:
            return Ready(False, time, time), True
        return Ready(self.armed, self.told, time), False
