"""Limits of time, tokens, memory and quality that a caller sets."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mmfast.core import sizes
from mmfast.core.errors import MmfastError, unknown
from mmfast.core.spec import SelfCheck, is_auto, self_check

# Points of accuracy that a quality may cost; None is whatever is best at a tenth of the tokens.
QUALITIES: Mapping[str, float | None] = {"high": 0.01, "balanced": 0.03, "fast": None}
KINDS = ("image", "multi-image", "video", "document")
FAST_SHARE = 0.1
AUTO_QUALITY = "balanced"


@dataclass(frozen=True)
class Target:
    """Limits that a plan has to meet, all of them."""

    ttft_ms: float | None = None  # milliseconds to the first token
    tokens: int | None = None  # visual tokens of a prompt in a decoder layer, mean over both
    memory: int | None = None  # bytes of weights, keys and values, and activations
    quality: str | None = None  # A name in `QUALITIES`
    kind: str | None = None  # A name in `KINDS`, where the caller knows better than the file
    auto: bool = False  # `reduce="auto"` asks for the plan
    check: SelfCheck | None = None  # answers are checked, and tell whether to reduce less

    def __bool__(self) -> bool:
        return any(v is not None for v in (self.ttft_ms, self.tokens, self.memory, self.quality))

    @property
    def may_wait(self) -> bool:
        """True where all tokens will do until the machine can be measured: no limit is broken."""
        return self.auto and self.tokens is None and self.memory is None

    def __str__(self) -> str:
        parts = {
            "time to first token": None if self.ttft_ms is None else f"{self.ttft_ms:g} ms",
            "visual tokens": self.tokens,
            "memory": None if self.memory is None else sizes.format_bytes(self.memory),
            "quality": self.quality,
        }
        return ", ".join(f"{name} {value}" for name, value in parts.items() if value is not None)


def make_target(
    target_ttft_ms: float | None = None,
    target_tokens: int | None = None,
    max_memory: str | int | None = None,
    quality: str | None = None,
    kind: str | None = None,
) -> Target:
    """Check what a caller asked for; a target without any limit is false."""
    if quality is not None and quality not in QUALITIES:
        raise MmfastError(unknown("quality", quality, QUALITIES))
    if kind is not None and kind not in KINDS:
        raise MmfastError(unknown("kind of media", kind, KINDS))
    if target_ttft_ms is not None:
        _positive("target_ttft_ms", target_ttft_ms, "milliseconds such as 300")
    if target_tokens is not None:
        _positive("target_tokens", target_tokens, "a whole number of tokens such as 64", whole=True)
    return Target(target_ttft_ms, target_tokens, parse_bytes(max_memory), quality, kind)


def automatic(reduce: str | None, target: Target, cache: Any = None) -> tuple[str | None, Target]:
    """Read `reduce="auto"` as no spec and a target: the one given, else balanced quality."""
    if reduce is None or not is_auto(reduce):
        return reduce, target
    wanted = target or Target(quality=AUTO_QUALITY, kind=target.kind)
    return None, checked_by(replace(wanted, auto=True), self_check(reduce), cache)


def checked_by(target: Target, check: SelfCheck | None, cache: Any = None) -> Target:
    """Let answers under a target be checked; MmfastError where not all tokens can be read again."""
    given = {"max_memory": target.memory, "cache": cache}
    if check is not None and (odd := [name for name, value in given.items() if value is not None]):
        raise MmfastError(
            f"reduce={check.text!r} reads answers again over the keys and values of all tokens; "
            f"leave out {odd[0]}=, or the check"
        )
    return replace(target, check=check)


def check_alone(target: Target, reduce: str | None) -> None:
    """Refuse a target beside a spec: the planner chooses the method and its budget."""
    if target and reduce:
        raise MmfastError(
            f"reduce={reduce!r} and a target ({target}) contradict each other; "
            "give the spec, or give the target and let the planner choose"
        )


def parse_bytes(value: str | int | None) -> int | None:
    """Read a limit of memory such as `"2GB"`; see `mmfast.core.sizes.parse_bytes`."""
    size = sizes.parse_bytes(value, "max_memory=")
    if size is not None:
        _positive("max_memory", size, "a size such as 2GB or 1.5GiB, or a number of bytes")
    return size


def _positive(name: str, value: Any, example: str, whole: bool = False) -> None:
    number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value <= 0:
        raise MmfastError(f"{name}={value!r} cannot be met; give {example}")
