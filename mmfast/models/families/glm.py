"""GLM-4.1V, GLM-4.5V, GLM-4.6V and GLM-OCR.

As in Qwen a call brings its grids and positions have three axes (M-RoPE). A clip is written as
pictures between times, with the placeholder of images. Paper: arXiv 2507.01006.
"""

from __future__ import annotations

from mmfast.models.families.adapter import Adapter, add_adapter
from mmfast.models.families.qwen import fold, layout, recover

for _family in ("glm4v", "glm4v_moe", "glm46v", "glm_ocr"):
    add_adapter(Adapter(_family, layout, fold, recover, mrope=True, inner=False, framed=True))
