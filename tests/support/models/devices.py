"""The device of tests that compare a run there with the same run on the CPU.

They carry the marker `gpu` and need CUDA: where there is none, a module that imports this one is
skipped, and none of its hundreds of cases is collected. `MMFAST_TEST_DEVICE=cpu` runs them on the
CPU, where both sides are the same: that shows whether a test itself works.
"""

from __future__ import annotations

import os

import pytest
import torch

# What libraries say of a GPU is no fault of what is tested there.
MARKS = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]
LIKE = "keys of random weights behind a norm are all of one length, and rounding would choose"
DEVICE = torch.device(os.environ.get("MMFAST_TEST_DEVICE", "cuda"))
if DEVICE.type == "cuda" and not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
