"""The Gradio demo (`mmfast demo`) and scripts, on the public names of mmfast alone."""

import os

# Before gradio is imported: nothing that a visitor does leaves the machine.
os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
