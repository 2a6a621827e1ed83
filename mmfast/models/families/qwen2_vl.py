"""Qwen2-VL: M-RoPE, and a vision tower that attends over whole frames.

Paper: arXiv 2409.12191.
"""

from __future__ import annotations

from mmfast.models.families.adapter import Adapter, add_adapter
from mmfast.models.families.qwen import fold, layout, recover

add_adapter(Adapter("qwen2_vl", layout, fold, recover, mrope=True))
