"""The network of silero-vad, on the weights in its wheel, with its memory as a value.

The package's own wrapper keeps one conversation inside the model, and importing it sets the number
of threads of the whole process; so the file of weights (safetensors, 1.2 MB) is read without it.
The network: a Fourier transform by convolution, four convolutions, an LSTM cell, a sigmoid.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from mmfast.core.errors import ModelError

WINDOW = 512  # samples at 16 kHz: 32 ms
_CONTEXT = 64  # samples of the window before that a window sees
_BINS = 129
_STRIDES = (1, 2, 2, 1)
_FILE = "silero_vad_16k.safetensors"


@dataclass(frozen=True)
class SileroState:
    """Memory of `B` streams: the cell `[2, B, 128]`, and the end of the last window `[B, 64]`."""

    cell: Tensor
    context: Tensor


@lru_cache(maxsize=1)
@torch.inference_mode(False)  # it outlives the call: later ones may need gradients
def _weights() -> dict[str, Tensor]:
    found = importlib.util.find_spec("silero_vad")  # finds it, does not run it
    file = Path(found.origin).parent / "data" / _FILE if found and found.origin else None
    if file is None or not file.is_file():
        what = "is not installed" if file is None else f"is too old: it has no {_FILE}"
        raise ModelError(
            f"silero-vad {what}: pip install 'mmfast[speech]' (silero-vad>=6.2), or name the "
            f"simple detector, engine='energy'"
        )
    from safetensors.torch import load_file

    return load_file(file)


class Silero:
    """How likely a window of 512 samples at 16 kHz holds speech.

    Raises:
        ModelError: The wheel of silero-vad is not there.
    """

    window = WINDOW

    def __init__(self) -> None:
        self._weights = _weights()

    def start(self, batch: int) -> SileroState:
        """Memory of streams that have heard nothing."""
        return SileroState(torch.zeros(2, batch, 128), torch.zeros(batch, _CONTEXT))

    def step(self, state: SileroState, samples: Tensor) -> tuple[SileroState, Tensor]:
        """Samples `[B, 512]` in -1..1 to probabilities `[B]`."""
        w = self._weights
        seen = F.pad(torch.cat([state.context, samples], dim=1)[:, None], (0, 64), mode="reflect")
        with torch.no_grad():
            parts = F.conv1d(seen, w["stft_conv.weight"], stride=128)  # [B, 2 * 129, 4]
            x = (parts[:, :_BINS].square() + parts[:, _BINS:].square()).sqrt()
            for number, stride in enumerate(_STRIDES, start=1):
                weight, bias = w[f"conv{number}.weight"], w[f"conv{number}.bias"]
                x = F.conv1d(x, weight, bias, stride=stride, padding=1).relu()
            names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
            cell = [w[f"lstm_cell.{name}"] for name in names]
            h, c = torch.lstm_cell(x[..., 0], (state.cell[0], state.cell[1]), *cell)
            voice = F.conv1d(h.relu()[..., None], w["final_conv.weight"], w["final_conv.bias"])
        context = samples[:, -_CONTEXT:].clone()
        return SileroState(torch.stack([h, c]), context), voice[:, 0, 0].sigmoid()

    def reset(self, state: SileroState, rows: Tensor) -> SileroState:
        """Memory with some streams (`[B]` bool) started anew."""
        cell = state.cell.masked_fill(rows[None, :, None], 0.0)
        return SileroState(cell, state.context.masked_fill(rows[:, None], 0.0))
