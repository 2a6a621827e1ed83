"""Entry point `lmms_eval.models`: tells lmms-eval where the plugin is, without loading torch."""

from __future__ import annotations

from typing import Any


def manifest() -> Any:
    """The manifest of the model `mmfast`."""
    from lmms_eval.models.registry_v2 import ModelManifest

    return ModelManifest(model_id="mmfast", chat_class_path="mmfast.bench.lmms.Mmfast")
