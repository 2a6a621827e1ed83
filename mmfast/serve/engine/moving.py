"""Values that came from another process, onto the device of this one."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def moved(value: T, device: torch.device) -> T:
    """The same with all its tensors on a device; a value of the CPU stays as it is there.

    Args:
        value: Tensors in dictionaries, lists, tuples and dataclasses.
        device: Where they go.
    """
    return value if device.type == "cpu" else _moved(value, device)


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {name: _moved(each, device) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_moved(each, device) for each in value)
    if is_dataclass(value) and not isinstance(value, type):
        parts = {each.name: _moved(getattr(value, each.name), device) for each in fields(value)}
        return replace(value, **parts)
    return value
