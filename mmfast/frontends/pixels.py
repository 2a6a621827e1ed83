"""Arrays and tensors as pictures: layout, dtype and range checks, then uint8 RGB."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from mmfast.core.errors import MediaError
from mmfast.frontends.limits import Limits
from mmfast.frontends.picture import Frame

_CHANNELS = (1, 3, 4)
_SLACK = 1e-3  # a float picture may overshoot [0, 1] by resampling noise of bf16


def is_tensor(media: object) -> bool:
    """Say whether `media` is a torch tensor, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(media, torch.Tensor)


def is_array(media: object) -> bool:
    """Say whether `media` is a numpy array or a torch tensor."""
    return isinstance(media, np.ndarray) or is_tensor(media)


def to_numpy(array: Any, name: str) -> npt.NDArray[Any]:
    """Bring an array to the host; torch's types that numpy lacks become float32."""
    if not is_tensor(array):
        return np.asarray(array)
    try:
        host = array.detach().cpu()
        host = host.float() if host.is_floating_point() else host
        return np.asarray(host.numpy())
    except (TypeError, RuntimeError, NotImplementedError) as error:
        raise MediaError(
            f"{name} is a tensor that numpy cannot read ({str(error).splitlines()[0]}): "
            f"give a dense uint8 or float tensor"
        ) from None


def channel_axis(shape: tuple[int, ...], tensor: bool, name: str) -> int:
    """Find the channels of a picture: -1 for [..., H, W, C], -3 for [..., C, H, W].

    Where both could be (a picture 1, 3 or 4 pixels wide), an axis of 3 wins, then the habit of
    the library: torch puts channels first, numpy last.
    """
    axes = [axis for axis in (-1, -3) if shape[axis] in _CHANNELS]
    if not axes:
        raise MediaError(
            f"{name} has shape {list(shape)}, in which no axis can be the channels: "
            f"give [T, H, W, 3] or [T, 3, H, W] for a video, [H, W, 3] or [3, H, W] for an image"
        )
    rgb = [axis for axis in axes if shape[axis] == 3]
    preferred = -3 if tensor else -1
    choices = rgb or axes
    return preferred if preferred in choices else choices[0]


def array_picture(array: Any, name: str, limits: Limits, axis: int | None = None) -> Frame:
    """Turn one picture [H, W], [H, W, C] or [C, H, W] into uint8 RGB [H, W, 3].

    uint8 is taken as it is, float in [0, 1] is scaled to 255. Grey is repeated, alpha is
    composited over white.

    Raises:
        MediaError: Shape, dtype, range, NaN, or size is wrong.
    """
    shape = tuple(array.shape)
    if len(shape) not in (2, 3):
        raise MediaError(
            f"{name} has shape {list(shape)}: an image is [H, W], [H, W, 3] or [3, H, W], "
            f"a video [T, H, W, 3] or [T, 3, H, W]"
        )
    if 0 in shape:
        raise MediaError(f"{name} has shape {list(shape)}, which holds no pixel: give a picture")
    if len(shape) == 3 and axis is None:
        axis = channel_axis(shape, is_tensor(array), name)
    height, width = shape[-2:] if axis == -3 else shape[:2]
    limits.check_picture(name, width, height)
    pixels = _to_uint8(to_numpy(array, name), name)
    if axis == -3:
        pixels = pixels.transpose(1, 2, 0)
    return _to_rgb(pixels)


def _to_uint8(array: npt.NDArray[Any], name: str) -> npt.NDArray[np.uint8]:
    if array.dtype == np.uint8:
        return array
    if not np.issubdtype(array.dtype, np.floating):
        raise MediaError(
            f"{name} has dtype {array.dtype}: give uint8 in [0, 255] or float in [0, 1]"
        )
    low, high = float(array.min()), float(array.max())  # NaN wins both
    if not np.isfinite([low, high]).all():
        raise MediaError(f"{name} holds NaN or infinite values: give float in [0, 1] or uint8")
    if low < -_SLACK or high > 1 + _SLACK:
        raise MediaError(
            f"{name} has float values from {low:g} to {high:g}: scale them to [0, 1] or give uint8"
        )
    scaled: Frame = np.rint(np.clip(array, 0, 1) * 255).astype(np.uint8)
    return scaled


def _to_rgb(pixels: npt.NDArray[np.uint8]) -> Frame:
    """[H, W], [H, W, 1], [H, W, 3] or [H, W, 4] to [H, W, 3]."""
    if pixels.ndim == 2:
        pixels = pixels[..., None]
    if pixels.shape[-1] == 1:
        return np.repeat(pixels, 3, axis=-1)
    if pixels.shape[-1] == 3:
        return pixels
    alpha = pixels[..., 3:].astype(np.uint16)
    over_white = pixels[..., :3] * alpha + 255 * (255 - alpha) + 127
    rgb: Frame = (over_white // 255).astype(np.uint8)
    return rgb
