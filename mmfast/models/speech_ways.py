"""Ways to decode of the speech model: schedule, rule and draft modules, checked before a word."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mmfast.core.errors import ModelError, SpecError, unknown
from mmfast.decoding.accept import parse_rule
from mmfast.decoding.guide import Guide
from mmfast.decoding.loop import Decoder
from mmfast.decoding.sampling import Sampling
from mmfast.decoding.schedule import parse_schedule
from mmfast.models.backbone import Backbone

HEADS = ("mctp", "mtp")
Make = Callable[[Guide], Decoder]


def decoding(
    backbone: Backbone,
    heads: Mapping[str, Any],
    mode: str | Sequence[int],
    verify: str,
    head: str,
    sampling: Sampling | None,
) -> Make:
    """What makes a decoder for a guide.

    Raises:
        SpecError: An unknown mode, rule or head.
        ModelError: The model lacks the head.
    """
    schedule, rule = parse_schedule(mode), parse_rule(verify)
    if head not in HEADS:
        raise SpecError(unknown("head", head, HEADS))
    module = heads.get(head) if schedule.most else None
    if schedule.most and module is None:
        raise ModelError(f"the model has no head {head!r}; use mode='vanilla'")

    def make(guide: Guide) -> Decoder:
        return Decoder(backbone, module, guide, schedule=schedule, verify=rule, sampling=sampling)

    return make
