"""Weights in fewer bits on which a model drafts; it verifies on its own, so nothing else changes.

A step of one row reads every weight once, which is most of what it costs until the cache is as
large as the weights. Int4 reads an eighth of the bytes of float32, and says nearly always the same.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor

from mmfast.core.errors import ModelError
from mmfast.core.sizes import format_bytes
from mmfast.models.decoder.grouped import grouped
from mmfast.models.decoder.reader import SequenceReader
from mmfast.models.packing import draft_forms
from mmfast.models.patching import is_compiled, override
from mmfast.ops.weight_forms import FEW, WeightForm


class DraftWeights:
    """The linear layers of a decoder and its head in fewer bits, beside the layers themselves.

    ModelError: no such form here, or a model whose layers cannot be packed, or are compiled.
    """

    def __init__(self, model: Any, form: str) -> None:
        if is_compiled(model):
            raise ModelError(
                f"weights={form!r} of drafts change from pass to pass, which compiled code of "
                f"{type(model).__name__} cannot; leave it out, or compile nothing"
            )
        self.form, self.forms = form, draft_forms(model, form)
        self._here = threading.local()

    @property
    def nbytes(self) -> int:
        """Bytes that are held beside the model."""
        return sum(form.nbytes for form in self.forms.values())

    @property
    def note(self) -> str:
        """One line for a trace."""
        return f"drafts read {len(self.forms)} layers as {self.form}: {format_bytes(self.nbytes)}"

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Stand in the layers, and act in `drafting` alone."""
        with ExitStack() as stack:
            for layer, form in self.forms.items():
                around = partial(self._forward, form, layer)
                stack.enter_context(override(layer, "forward", around))
            yield

    @contextmanager
    def drafting(self) -> Iterator[None]:
        """Let passes of this thread read the weights in fewer bits."""
        self._here.drafts = True
        try:
            yield
        finally:
            self._here.drafts = False

    def _forward(self, form: WeightForm, layer: Any, stock: Any, x: Tensor) -> Tensor:
        if not getattr(self._here, "drafts", False) or x.numel() > FEW * x.shape[-1]:
            found: Tensor = stock(x)
            return found
        return form.product(x.reshape(-1, x.shape[-1]), layer.bias).reshape(*x.shape[:-1], -1)


class LightReader(SequenceReader):
    """Reads tokens of a draft on weights in fewer bits, which stand in the model."""

    def __init__(self, weights: DraftWeights, *args: Any) -> None:
        super().__init__(*args)
        self._weights = weights

    def run(self, *args: Any) -> Tensor:
        """Read as `SequenceReader` does, shared keys once: last bits of a draft do not matter."""
        with self._weights.drafting(), grouped(self.model, steps=True):
            return super().run(*args)
