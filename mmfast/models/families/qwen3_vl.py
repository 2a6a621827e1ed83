"""Qwen3-VL: M-RoPE, DeepStack, and videos whose frames stand between timestamps in the prompt.

The frames of a video are one item: its placeholders follow each other with text in between.
Paper: arXiv 2511.21631.
"""

from __future__ import annotations

from mmfast.models.families.adapter import Adapter, add_adapter
from mmfast.models.families.qwen import fold, layout, recover

add_adapter(Adapter("qwen3_vl", layout, fold, recover, deepstack=True, mrope=True))
