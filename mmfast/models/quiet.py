"""Library chatter off the terminal."""

from __future__ import annotations

import logging
import os
import sys


def quiet() -> None:
    """Keep library chatter off the terminal: the user sees answers, errors and progress."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    if "transformers" in sys.modules:  # then it has read its environment already
        from transformers.utils import logging as transformers_logging

        transformers_logging.disable_progress_bar()
