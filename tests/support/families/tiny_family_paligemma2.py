"""PaliGemma 2: Gemma 2, half of whose layers see a window of what was written, and all images."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from tiny_family_paligemma import FAMILY as FIRST
from tiny_family_paligemma import build

FAMILY = replace(
    FIRST,
    build=partial(
        build,
        kind="gemma2",
        sliding_window=12,
        query_pre_attn_scalar=8,
        final_logit_softcapping=None,  # the oracle ends with the head
    ),
)
