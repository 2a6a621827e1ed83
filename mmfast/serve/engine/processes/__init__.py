"""Worker processes of the engine and their messages."""

# Imported once by the fork server and by spare workers of Ray, so that a new worker starts fast.
# transformers imports on first use: the last three modules are those that load a checkpoint.
PRELOAD = (
    "mmfast.serve.engine.processes.workers",
    "mmfast.serve.engine.scheduler",
    "transformers.models.auto.configuration_auto",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.processing_auto",
)
