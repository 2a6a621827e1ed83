"""What a fork server imports once, so that no worker has to: a new one is there at once."""

from __future__ import annotations

import contextlib
from importlib import import_module

# transformers imports on first use; these are what loading a checkpoint uses.
CLASSES = ("AutoConfig", "AutoModelForImageTextToText", "AutoProcessor")

# Whatever fails here fails again where it is needed, and says so there.
with contextlib.suppress(Exception):
    for _name in ("processes.roles", "scheduler"):
        import_module(f"mmfast.serve.engine.{_name}")
    for _name in CLASSES:
        getattr(import_module("transformers"), _name)
