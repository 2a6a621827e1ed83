"""Methods that choose what a prompt reads: `core.registry` finds every file here by itself."""
